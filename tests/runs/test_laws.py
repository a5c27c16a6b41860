"""The laws of a run, end to end over real files: exact joins, faces and corners included, whatever the division."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.blockwise.ledger import Ledger
from volpipe.errors import PlanError
from volpipe.geometry.blend import FAMILIES, profile
from volpipe.geometry.grid import Placement
from volpipe.inference.plan import Plan
from volpipe.nets.load import build_net
from volpipe.recipes.inference import load_recipe
from volpipe.runs import unit_records
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage.paths import locate
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import Report
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute


def planned(folder: Path, volume: Path, *settings_: str) -> Plan:
    return prepare(str(volume), load_recipe(None, settings_), folder / "out.zarr", folder)


def ran(plan: Plan, *, seed: int = 0, slots: int = 1, keep_tensors: bool = False) -> Report:
    report = execute(plan, Inline(seed, slots).start, RunOptions(keep_tensors=keep_tensors))
    assert report.missing == []
    return report


def result(plan: Plan, level: int = 0) -> np.ndarray:
    return open_volume(plan.out, level=level).open()[...]


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[str]]:
    """A volume's shape, and windows, overlap, block and blend that divide it somehow."""
    shape = tuple(draw(st.integers(1, 23)) for _ in range(3))
    window = tuple(draw(st.integers(3, 12)) for _ in range(3))
    overlap = tuple(draw(st.integers(0, w * 2 // 3)) for w in window)
    block = tuple(draw(st.integers(1, 3)) for _ in range(3))
    placement, family = draw(st.sampled_from(get_args(Placement))), draw(st.sampled_from(FAMILIES))
    if family == "crop" and placement != "lattice":  # which are no longer than the volume
        window = tuple(map(min, window, shape))
        overlap = tuple(min(o, w - 1) for o, w in zip(overlap, window, strict=True))
    return shape, windowed(window, overlap, block, family, placement)


SLOW = examples(8, 25)


@SLOW
@given(divisions(), st.sampled_from(["uint8", "int16", "uint16", "float32"]), st.sampled_from(["stored", "streamed"]))
def test_identity_in_identity_out(drawn: tuple[tuple[int, ...], list[str]], dtype: str, mode: str) -> None:
    shape, division = drawn
    data = noise(shape, dtype)
    with tempfile.TemporaryDirectory() as name:
        volume = write_volume(Path(name) / "in.n5", data)
        given_range = ["normalise.low=-500", "normalise.high=500"] if dtype == "float32" else []
        plan = planned(Path(name), volume, "net.name=identity", f"tensors.mode={mode}", *division, *given_range)
        ran(plan)
        if dtype == "float32":
            np.testing.assert_allclose(result(plan), data, rtol=0, atol=1e-4)  # of values to 400: float32 rounding
        else:
            assert np.array_equal(result(plan), data)


@SLOW
@given(divisions(), st.tuples(*[st.integers(1, 3)] * 3))
def test_a_scaled_output_has_every_voxel_in_its_place(
    drawn: tuple[tuple[int, ...], list[str]], scale: tuple[int, ...]
) -> None:
    shape, division = drawn
    data = noise(shape)
    with tempfile.TemporaryDirectory() as name:
        volume = write_volume(Path(name) / "in.n5", data)
        plan = planned(Path(name), volume, "net.name=upsample", f"net.options.scale={list(scale)}", *division)
        ran(plan)
        assert np.array_equal(result(plan), np.kron(data, np.ones(scale, np.uint8)))


@pytest.mark.parametrize("offset", [(1, -2, 3), (0, 0, -4)])
def test_a_shift_brings_in_the_mirrored_volume(tmp_path: Path, offset: tuple[int, int, int]) -> None:
    data = noise((19, 23, 29))
    plan = planned(
        tmp_path, write_volume(tmp_path / "in.n5", data), "net.name=shift", f"net.options.offset={list(offset)}",
        "windows.shape=[16,16,16]", "windows.block=[2,1,2]",
    )  # fmt: skip
    ran(plan)
    padded = np.pad(data, 5, mode="reflect")
    expected = padded[tuple(slice(5 - o, 5 - o + n) for o, n in zip(offset, data.shape, strict=True))]
    assert np.array_equal(result(plan), expected)


@pytest.mark.parametrize("blend", [pytest.param("hann", marks=pytest.mark.long), "gaussian", "constant"])
def test_weighted_windows_are_the_weighted_mean_of_what_the_net_gave(tmp_path: Path, blend: str) -> None:
    """A net that is not tile-invariant: each voxel is the mean of its windows' outputs, weighted by the profile."""
    data = noise((17, 26, 21))
    (tmp_path / "ramp.py").write_text(
        "import torch\n"
        "class Ramp(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        rows, columns = (torch.arange(n, device=x.device) for n in x.shape[-2:])\n"
        "        return x + columns * rows[:, None]\n"
        "def ramp():\n"
        "    return Ramp()\n"
    )
    window, overlap = (8, 10, 12), (4, 4, 6)
    plan = planned(
        tmp_path, write_volume(tmp_path / "in.n5", data),
        "net.name=ramp.py:ramp", "net.intensity=same", "net.accept_tile_variance=true",
        "normalise.method=none", "output.dtype=float32", *windowed(window, overlap, (2, 1, 2), blend),
    )  # fmt: skip
    assert plan.num_sums > 0
    ran(plan)
    total, weight = np.zeros(data.shape), np.zeros(data.shape)
    profiles = [profile(blend, w) for w in window]  # type: ignore[arg-type]  # one of the families
    for corner in np.ndindex(*(-(-n // (w - o)) for n, w, o in zip(data.shape, window, overlap, strict=True))):
        start = [i * (w - o) - o // 2 for i, w, o in zip(corner, window, overlap, strict=True)]
        for z, y, x in np.ndindex(*window):
            at = (start[0] + z, start[1] + y, start[2] + x)
            if all(0 <= p < n for p, n in zip(at, data.shape, strict=True)):
                share = profiles[0][z] * profiles[1][y] * profiles[2][x]
                total[at] += share * (int(data[at]) + y * x)
                weight[at] += share
    np.testing.assert_allclose(result(plan), total / weight, rtol=2e-5)


@pytest.mark.parametrize(
    ("block", "tile", "mode", "slots", "seed"),
    [
        pytest.param((1, 1, 1), 16, "streamed", 1, 0, marks=pytest.mark.long),
        ((2, 3, 1), 16, "streamed", 2, 1),
        ((1, 2, 2), 24, "stored", 2, 2),
    ],
)
def test_a_conv_net_tiled_is_bit_identical_to_the_whole(
    tmp_path: Path, block: tuple[int, int, int], tile: int, mode: str, slots: int, seed: int
) -> None:
    data = noise((35, 42, 37))
    options = "{features=[4,6],seed=1}"
    plan = planned(
        tmp_path, write_volume(tmp_path / "in.n5", data), "net.untrained=true", f"net.options={options}",
        "output.dtype=float32", "output.intensity=raw", f"tensors.mode={mode}", "infer.exact=true",
        f"windows.shape={[tile + 20] * 3}", "windows.overlap=20", f"windows.block={list(block)}",
    )  # fmt: skip
    assert plan.net.halo <= (10, 10, 10)
    ran(plan, slots=slots, seed=seed)
    size = [-(-n // 2) * 2 for n in data.shape]
    padded = np.pad(data, [(10, 10 + s - n) for s, n in zip(size, data.shape, strict=True)], mode="reflect")
    net = build_net(plan.recipe.net)
    assert not torch.backends.mkldnn.enabled
    torch.set_num_threads(plan.recipe.infer.threads)  # others sum in another order
    with torch.inference_mode():
        whole = net(torch.from_numpy((padded.astype(np.float32) - 127.5) / 127.5)[None, None])[0, 0]
    expected = whole[10:, 10:, 10:][tuple(slice(0, n) for n in data.shape)].numpy()
    assert np.array_equal(result(plan), expected)


def test_without_its_halo_a_conv_net_is_refused_with_crop_and_wrong_without(tmp_path: Path) -> None:
    """The control of the test above: a halo that is too small is not silently accepted, and it would matter."""
    data = noise((32, 32, 32))
    volume = write_volume(tmp_path / "in.n5", data)
    settings_ = (
        "net.options={features=[4,6],seed=1}",
        "net.untrained=true",
        "output.dtype=float32",
        "output.intensity=raw",
    )
    with pytest.raises(PlanError, match="axis z: blend crop needs an overlap of"):
        planned(tmp_path, volume, "net.name=unet3d", *settings_, "windows.shape=[24,24,24]", "windows.overlap=4")
    outs = []
    for overlap in (0, 20):
        folder = tmp_path / str(overlap)
        folder.mkdir()
        plan = planned(
            folder, volume, "net.name=unet3d", *settings_, f"windows.shape={[16 + overlap] * 3}",
            f"windows.overlap={overlap}", "windows.blend=constant" if overlap == 0 else "windows.blend=crop",
        )  # fmt: skip
        ran(plan)
        outs.append(result(plan))
    assert np.abs(outs[0] - outs[1]).max() > 0.01


BLENDED = [
    "net.name=unet3d",
    "net.options={features=[4,6],seed=2}",
    "net.untrained=true",
    *windowed((16, 16, 16), (8, 8, 8), (2, 2, 2), "hann"),
]


def blended(folder: Path, *more: str) -> Plan:
    folder.mkdir(exist_ok=True)
    volume = folder.parent / "in.n5"
    if not volume.exists():
        write_volume(volume, noise((24, 28, 20)))
    return planned(
        folder, volume, *BLENDED, "normalise.method=zscore", "output.shard=[4,8,4]", "output.chunk=[4,4,4]", *more
    )


AT_EDGE = windowed((16, 16, 16), (8, 8, 8), (1, 1, 1), "gaussian", "edge")


@pytest.mark.parametrize("division", [pytest.param([], marks=pytest.mark.long), AT_EDGE])
def test_one_hash_whatever_the_order_the_workers_and_the_way_to_the_net(tmp_path: Path, division: list[str]) -> None:
    hashes = set()
    for i, (mode, slots) in enumerate([("streamed", 1), ("streamed", 2), ("stored", 1), ("stored", 3)]):
        plan = blended(tmp_path / str(i), f"tensors.mode={mode}", *division)
        assert 0 < plan.num_sums < len(plan.shards())
        ran(plan, slots=slots, seed=i)
        hashes.add(
            hashlib.sha256(b"".join(result(plan, level).tobytes() for level in range(len(plan.factors)))).hexdigest()
        )
    assert len(hashes) == 1


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("mode", "division"),
    [("stored", []), pytest.param("streamed", [], marks=pytest.mark.long), ("streamed", AT_EDGE)],
)
def test_interrupted_anywhere_and_resumed_the_bytes_are_those_of_one_go(
    tmp_path: Path, mode: str, division: list[str], times: int
) -> None:
    plan = blended(tmp_path / "run", f"tensors.mode={mode}", *division)
    ran(plan)
    undisturbed = fingerprint(plan.out)
    rng = np.random.default_rng(5)
    for seed, most_tasks in enumerate(rng.integers(0, 12, times)):
        interruptions = 0
        executors = Inline(seed, 2, int(most_tasks))
        fresh = True
        while True:
            try:
                report = execute(plan, executors.start, RunOptions(fresh=fresh))
            except Stopped:
                interruptions += 1
                executors = Inline(seed + interruptions, 2, int(rng.integers(3, 40)))
                fresh = False
                continue
            break
        assert interruptions > 0
        assert report.missing == []
        assert fingerprint(plan.out) == undisturbed
        assert not list(report.folder.glob("tensors.*"))


def test_a_run_that_goes_on_reads_the_units_of_its_journal_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = blended(tmp_path / "run")
    with pytest.raises(Stopped):
        execute(plan, Inline(most_tasks=4).start)
    reads = list[Path]()

    class Counted(Ledger):
        def __init__(self, journal: Path, *rest: Any) -> None:
            reads.append(journal)
            super().__init__(journal, *rest)

    monkeypatch.setattr(unit_records, "Ledger", Counted)
    assert not ran(plan).missing
    assert reads == [RunFolder.from_output(locate(plan.out)).journal]
