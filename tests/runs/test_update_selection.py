"""Updates of outputs of a part of a volume: masks and empty space that change."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from slabs import slabs_of
from updates import FLOATS, ROW, SHAPE, assert_fresh, divisions, num_looked, planned, ran, write_n5
from volumes import noise, windowed, write_volume

from volpipe.errors import PlanError, RunError
from volpipe.runs import update
from volpipe.runs.options import RunOptions
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import RunWork
from volpipe.workflow.work_plan import execute


def blotted(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return noise with boxes of zeros, uint8 from 1 elsewhere."""
    data = np.maximum(noise(shape, seed=int(rng.integers(99))), 1)
    for _ in range(int(rng.integers(1, 5))):
        start = [int(rng.integers(n)) for n in shape]
        data[tuple(slice(a, a + int(rng.integers(3, 20))) for a in start)] = 0
    return data


def rewritten(folder: Path, name: str, data: np.ndarray) -> None:
    """Write `data` over the volume, chunks of zeros left out; those that are as they were are not touched."""
    write_volume(folder / "new.n5", data, chunk=5)
    (folder / name).mkdir(exist_ok=True)
    new, old = folder / "new.n5", folder / name
    for file in {f.relative_to(root) for root in (new, old) for f in root.rglob("*") if f.is_file()}:
        if not (new / file).exists():
            (old / file).unlink()
        elif not (old / file).exists() or (old / file).read_bytes() != (new / file).read_bytes():
            (old / file).parent.mkdir(parents=True, exist_ok=True)
            (new / file).replace(old / file)
    shutil.rmtree(new)


@pytest.mark.long
@examples(3, 8)
@given(
    divisions(), st.sampled_from(["stored", "streamed"]), st.sampled_from(["0", "missing", "mask", "both"]),
    st.integers(0, 2), st.integers(0, 2**16),
)  # fmt: skip
def test_an_output_of_what_is_wanted_is_that_of_a_fresh_run_where_other_parts_are(
    drawn: tuple[tuple[int, ...], list[str]], mode: str, kind: str, levels: int, seed: int
) -> None:
    """Mask and empty space change, grow and shrink, and the run is interrupted anywhere."""
    shape, division = drawn
    empty = {"0": ["input.empty=0"], "missing": ['input.empty="missing"'], "mask": [], "both": ["input.empty=0"]}[kind]
    mask = ["input.mask=mask.n5/raw"] if kind in ("mask", "both") else []
    more = [*FLOATS, "net.name=smooth.py:smooth", f"tensors.mode={mode}", f"output.levels={levels}", *empty, *mask]
    rng = np.random.default_rng(seed)
    coarse = tuple(-(-n // 2) for n in shape)

    def change(folder: Path) -> None:
        if rng.random() < 0.7:
            rewritten(
                folder, "in.n5", blotted(shape, rng) if kind != "mask" else noise(shape, seed=int(rng.integers(9)))
            )
        if mask:
            rewritten(folder, "mask.n5", (blotted(coarse, rng) > 100).astype(np.uint8))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rewritten(folder, "in.n5", blotted(shape, rng))
        rewritten(folder, "mask.n5", np.ones(coarse, np.uint8))
        plan = planned(folder, *more, *division)
        for _ in range(4):
            try:
                execute(plan, Inline(seed, 2, int(rng.integers(0, 60))).start, RunOptions(update=True))
            except (Stopped, PlanError, RunError) as error:
                assert isinstance(error, Stopped) or "nothing is selected" in str(error)
            change(folder)
        rewritten(folder, "in.n5", np.maximum(blotted(shape, rng), (np.arange(shape[2]) < 3).astype(np.uint8)))
        if mask:
            rewritten(folder, "mask.n5", (np.arange(coarse[2]) < 4) * np.ones(coarse, np.uint8))
        ran(plan, Inline(seed, 2), update=True)
        assert ran(plan, update=True).was_complete
        assert RunWork(plan).verify().differences == []
        assert_fresh(plan)


MASKED = ("input.mask=mask.n5/raw", "output.shard=[16,16,8]", "output.chunk=[8,8,8]")


def test_a_mask_that_changes_brings_what_is_new_in_it_and_takes_the_rest_away(tmp_path: Path) -> None:
    """Of six blocks in a row the second and third are wanted, then the third and fourth."""
    data = noise(SHAPE)
    write_n5(tmp_path, data)
    mask = np.zeros(SHAPE, np.uint8)
    mask[..., 8:24] = 1
    write_volume(tmp_path / "mask.n5", mask, chunk=8)
    plan = planned(tmp_path, *ROW, *MASKED)
    ran(plan)
    assert ran(plan, update=True).was_complete and num_looked(plan) == 0
    mask = np.roll(mask, 8, axis=2)
    rewritten(tmp_path, "mask.n5", mask)
    report = ran(plan, update=True)
    assert report.updates[0].why.startswith("the mask or the empty space selects other parts")
    assert report.totals["infer"].units == 1
    np.testing.assert_array_equal(open_volume(plan.out).open()[...], np.where(mask, data, 0))
    assert RunWork(plan).verify().differences == []
    assert_fresh(plan)


def test_empty_space_that_is_filled_is_computed_and_what_was_emptied_goes(tmp_path: Path) -> None:
    data = np.maximum(noise(SHAPE), 1)
    data[..., 24:] = 0
    write_n5(tmp_path, data)
    plan = planned(tmp_path, *ROW, "input.empty=0", *MASKED[1:])
    ran(plan)
    data[..., 40:] = 7
    data[..., :8] = 0
    write_n5(tmp_path, data)
    report = ran(plan, update=True)
    assert report.totals["infer"].units == 1
    np.testing.assert_array_equal(open_volume(plan.out).open()[...], data)
    assert_fresh(plan)
    write_n5(tmp_path, np.zeros(SHAPE, np.uint8))
    with pytest.raises(
        RunError, match=r"is empty .*nothing is selected; --update would leave an output without voxels"
    ):
        ran(plan, update=True)


def test_a_driver_killed_around_the_record_of_another_selection_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the record counts, after it, and before the shards that are wanted no more are deleted."""
    data = np.maximum(noise(SHAPE), 1)
    write_n5(tmp_path, data)
    plan = planned(tmp_path, *ROW, "input.empty=0", *MASKED[1:])
    ran(plan)
    data[..., :8] = 0
    write_n5(tmp_path, data)

    def killed(*arguments: object, **named: object) -> None:
        raise Stopped

    for name in ("Updated", "take_selection", "remove"):
        with monkeypatch.context() as patched, pytest.raises(Stopped):
            patched.setattr(update, name, killed)
            ran(plan, update=True)
    ran(plan, update=True)
    assert_fresh(plan)


BRIGHT = """
import torch
class Bright(torch.nn.Module):
    volpipe = dict(in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0), intensity="same")
    def forward(self, x):
        return x + 300
def bright():
    return Bright()
"""


@pytest.mark.parametrize(
    "slabs", [pytest.param(nullcontext(), marks=pytest.mark.long), slabs_of(1)], ids=["whole", "slabs"]
)
def test_clipped_voxels_of_a_block_with_several_shards_are_those_of_its_mask(
    tmp_path: Path, slabs: AbstractContextManager[None]
) -> None:
    """Every voxel is clipped; a block has four shards along x, of which the mask selects some."""
    (tmp_path / "bright.py").write_text(BRIGHT)
    write_volume(tmp_path / "in.n5", noise((16, 16, 32)), chunk=8)
    division = windowed((8, 16, 8), (0, 0, 0), (2, 1, 4), "crop")
    sizes = ("output.shard=[16,16,8]", "output.chunk=[8,8,8]")
    net = ("net.name=bright.py:bright", "normalise.method=none", "input.mask=mask.n5/raw")
    with slabs:
        for shards in ((0, 2), (0, 1, 2), (1, 2), (1, 3), (0,)):
            mask = np.zeros((16, 16, 32), np.uint8)
            for shard in shards:
                mask[..., 8 * shard : 8 * (shard + 1)] = 1
            rewritten(tmp_path, "mask.n5", mask)
            plan = planned(tmp_path, *net, *division, *sizes)
            assert ran(plan, update=True).clipped == (2048 * len(shards), 1.0), shards
