"""How the output of a net in bfloat16 differs from that in float32: measured over an invented volume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from plans import facts

from volpipe.estimation.precision import difference, measure_difference, measured_difference
from volpipe.inference.intensity import Affine
from volpipe.nets.facts import Difference
from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice, Normalise

# A net that adds some where it computes in bfloat16.
NET = """import torch

class Shifted(torch.nn.Module):
    scale, stride, halo, out_channels, intensity = (1, 1, 1), (1, 1, 1), (2, 2, 2), 1, "same"

    def __init__(self, added):
        super().__init__()
        self.added = added

    def forward(self, x):
        return x + self.added if torch.is_autocast_enabled("cpu") else x

def net(added=0.0):
    return Shifted(added)
"""


@pytest.mark.parametrize(("added", "levels"), [(0.0, 0), (0.002, 0), (0.01, 1), (0.02, 3), (-0.01, 1)])
def test_the_difference_is_counted_in_the_grey_levels_of_an_output(tmp_path: Path, added: float, levels: int) -> None:
    (tmp_path / "mine.py").write_text(NET)
    choice = NetChoice(name="mine.py:net", options={"added": added})
    measured = measure_difference(choice, Normalise(), describe(choice, str(tmp_path)), str(tmp_path))
    assert measured.levels == levels == round(abs(added) * 127.5)  # half a range of 255 levels is 1
    assert (measured.share > 0.9) == (levels > 0)  # but for voxels that are clipped
    assert measured.relative == pytest.approx(abs(added) / 2, rel=0.3)  # of about the whole range


SIZED = """
import torch

class Sized(torch.nn.Module):
    scale, stride, halo, margin, out_channels = {scale}, (2, 2, 2), (6, 6, 6), ({margin},) * 3, 1

    def forward(self, x):
        added = 0.01 if torch.is_autocast_enabled("cpu") else 0.0
        x = x + added
        x[..., :6] += 9 * added
        x[..., -6:] += 9 * added
        return {output}

def net():
    return Sized()
"""


@pytest.mark.parametrize(
    ("scale", "margin", "output"),
    [
        ((1, 1, 1), 4, "x[..., 4:-4, 4:-4, 4:-4]"),
        ((0.5, 0.5, 0.5), 0, "torch.nn.functional.avg_pool3d(x, 2)"),
        ((0.5, 1, 0.5), 4, "torch.nn.functional.avg_pool3d(x[..., 4:-4, 4:-4, 4:-4], (2, 1, 2))"),
    ],
)
def test_only_voxels_inside_the_halo_count_of_valid_and_of_coarser_outputs(
    tmp_path: Path, scale: tuple[float, ...], margin: int, output: str
) -> None:
    (tmp_path / "mine.py").write_text(SIZED.format(scale=(1, 1, 1), margin=margin, output=output))
    choice = NetChoice(name="mine.py:net", scale=scale)
    measured = measure_difference(choice, Normalise(), describe(choice, str(tmp_path)), str(tmp_path))
    assert measured.relative == pytest.approx(0.005, rel=0.5)


@pytest.mark.parametrize("intensity", ["same", "unit", "raw"])
def test_a_difference_is_that_of_the_voxels_that_a_run_would_store(intensity: str) -> None:
    rng = np.random.default_rng(0)
    exact = rng.uniform(0, 1, (2, 8, 8, 8)).astype(np.float32)
    other = exact + rng.normal(0, 0.003, exact.shape).astype(np.float32)
    affine = Affine(100.0, 20.0)
    found = difference(exact, other, facts(intensity=intensity), Normalise(), affine)
    assert found.relative == pytest.approx(np.abs(other - exact).max() / (exact.max() - exact.min()))
    if intensity == "raw":
        assert found.levels is None
        return
    stored = [np.rint(x * 20.0 + 100.0 if intensity == "same" else x * 255.0).clip(0, 255) for x in (exact, other)]
    apart = np.abs(stored[1] - stored[0])
    assert (found.levels, found.share) == (apart.max(), np.mean(apart > 0))
    assert found.levels > 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_an_output_that_is_not_finite_differs_by_all(bad: float) -> None:
    exact = np.linspace(0, 1, 64, dtype=np.float32).reshape(1, 4, 4, 4)
    other = np.where(exact > 0.9, np.float32(bad), exact)
    assert difference(exact, other, facts(), Normalise(), Affine()) == Difference(normalise=Normalise(), relative=1.0)


@pytest.mark.long
def test_a_process_of_its_own_measures_the_same(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NET)
    choice = NetChoice(name="mine.py:net", options={"added": 0.01})
    net = describe(choice, str(tmp_path))
    assert measured_difference(choice, Normalise(), net, str(tmp_path)) == measure_difference(
        choice, Normalise(), net, str(tmp_path)
    )
    assert measured_difference(NetChoice(name="none.py:net"), Normalise(), net, str(tmp_path)) is None
