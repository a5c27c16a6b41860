"""NaN and infinity from a net: counted, refused with their box, or kept where the recipe says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import Give, giver, set_each
from plans import planned
from volumes import windowed, write_volume

from volpipe.blockwise.journal import read_results
from volpipe.errors import PlanError
from volpipe.inference.plan import Plan
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS, Inferred
from volpipe.volumes.volume import View, open_volume

# Voxels of 7 become NaN, of 8 infinite, of 9 minus infinity.
NET = """
import torch
class Holed(torch.nn.Module):
    volpipe = dict(intensity="raw")
    def forward(self, x):
        x = torch.where(x == 7, torch.nan, x)
        return torch.where(x == 8, torch.inf, torch.where(x == 9, -torch.inf, x))
def build():
    return Holed()
"""
FLOAT = "output.dtype=float32"


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    (tmp_path / "net.py").write_text(NET)
    return giver(tmp_path, monkeypatch, capsys)


def holed() -> np.ndarray:
    """Return a volume of 16 × 16 × 32 voxels, of which the net spoils three."""
    data = np.ones((16, 16, 32), np.uint8)
    data[3, 4, 5], data[6, 2, 7], data[1, 1, 1] = 7, 8, 9
    return data


def command(blend: str, *settings: str) -> list[str]:
    overlap = 0 if blend == "crop" else 4
    division = windowed((8, 8, 8), (overlap,) * 3, (1, 1, 1), blend)
    recipe = set_each("net.name=net.py:build", "normalise.method=none", "output.levels=0", *division, *settings)
    return ["run", "--config", "threads", *recipe, "-o", "out.zarr", "in.n5/raw"]


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_a_block_with_nan_fails_with_its_counts_and_box_and_the_others_are_written(
    tmp_path: Path, give: Give, dtype: str
) -> None:
    write_volume(tmp_path / "in.n5", holed())
    ended = give(*command("crop", f"output.dtype={dtype}"))
    assert ended.code == 1
    said = " ".join(ended.err.split())
    assert "net build gave 1 NaN and 2 infinite voxels in box 1:7,1:5,1:8" in said
    assert "infer.nonfinite=keep and output.dtype=float32" in said
    assert "1 part is missing" in said
    expected = np.ones((16, 16, 32))
    expected[:8, :8, :8] = 0
    np.testing.assert_array_equal(open_volume(tmp_path / "out.zarr", view=View(incomplete=True)).open()[...], expected)


def bad_in(plan: Plan, block: int) -> tuple[int, int, int]:
    """Return a block with the number of voxels of NaN, and of infinity, that some window of it covers."""
    seen = np.zeros(holed().shape, bool)
    for number in plan.lattice.windows_of(block):
        box = plan.lattice.window_box(number)
        if plan.recipe.windows.blend == "crop":
            box = plan.blocks.box(block)
        seen[tuple(slice(max(0, a), max(0, b)) for a, b in zip(box.start, box.stop, strict=True))] = True
    seen_values = holed()[seen]
    return block, int((seen_values == 7).sum()), int(np.isin(seen_values, (8, 9)).sum())


@pytest.mark.parametrize("blend", ["crop", "hann"])
def test_what_is_kept_is_in_the_output_in_the_journal_and_told(tmp_path: Path, give: Give, blend: str) -> None:
    data = holed()
    write_volume(tmp_path / "in.n5", data)
    ended = give(*command(blend, FLOAT, "infer.nonfinite=keep"))
    assert ended.code == 0
    out = open_volume(tmp_path / "out.zarr").open()[...]
    expected = data.astype(np.float32)
    expected[3, 4, 5], expected[6, 2, 7], expected[1, 1, 1] = np.nan, np.inf, -np.inf
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    plan = RunFolder(tmp_path / "out.zarr.run").load(Plan)
    assert plan is not None
    results = read_results(tmp_path / "out.zarr.run" / "journal.jsonl", RESULTS, Inferred)
    counted = [entry for result in results for entry in result.nonfinite]
    assert sorted(counted) == [entry for block in range(len(plan.blocks)) if any((entry := bad_in(plan, block))[1:])]
    nan, infinite = (sum(entry[i] for entry in counted) for i in (1, 2))
    # By hand: windows of hann begin at -2, 2, 6 …, the first two along an axis are one block's, so that of the three
    # voxels only (6, 2, 7) is seen by more than one: by two along z and along x.
    assert (nan, infinite) == {"crop": (1, 2), "hann": (1, 5)}[blend]
    assert f"blocks of the output hold {nan} NaN and {infinite} infinite voxels, kept as infer.nonf" in ended.err


def test_what_is_not_wanted_may_be_nan(tmp_path: Path, give: Give) -> None:
    """A window that is computed for its neighbour's sake adds to voxels that the mask leaves out."""
    data = np.ones((8, 8, 32), np.uint8)
    data[4, 4, 13] = 7  # beside the wanted cell, within reach of its windows but not in it
    write_volume(tmp_path / "in.n5", data)
    mask = np.zeros((8, 8, 32), np.uint8)
    mask[:, :, :4] = 1
    write_volume(tmp_path / "mask.n5", mask)
    assert give(*command("hann", FLOAT), "--mask", "mask.n5/raw").code == 0
    assert give(*command("crop")[:-3], "--mask", "mask.n5/raw", "-o", "crop.zarr", "in.n5/raw").code == 0
    mask[:, :, 12:16] = 1
    write_volume(tmp_path / "wider.n5", mask)
    refused = give(*command("hann", FLOAT)[:-3], "--mask", "wider.n5/raw", "-o", "wider.zarr", "in.n5/raw")
    assert refused.code == 1


def test_a_finite_net_says_nothing(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", np.ones((8, 8, 8), np.uint8))
    ended = give(*command("crop", FLOAT))
    assert (ended.code, ended.err) == (0, "")


def test_integers_have_no_word_for_nan() -> None:
    with pytest.raises(
        PlanError, match=r"infer.nonfinite=keep needs .* the output's are uint8; set output.dtype=float"
    ):
        planned("infer.nonfinite=keep", "output.dtype=uint8")
    assert planned("infer.nonfinite=keep", FLOAT).out_dtype == "float32"
