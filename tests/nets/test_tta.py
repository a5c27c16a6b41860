"""Test-time augmentation: means over forms, computed here by hand; and what cannot be turned."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Ended, Give, giver, set_each
from volumes import noise, write_volume

from volpipe.nets.tta import forms, mean_of_forms
from volpipe.volumes.volume import open_volume

# Each voxel, thrice its next neighbour along x and its next along z: no two forms of a window give the same.
NET = """
import torch
class PendingInput(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(1, 1, 1))
    def forward(self, x):
        padded = torch.nn.functional.pad(x, (0, 1, 0, 0, 0, 1))
        return x + 3 * padded[:, :, :-1, :, 1:] + padded[:, :, 1:, :, :-1]
def build():
    return PendingInput()
"""
SHAPE = (12, 14, 10)


def mean_by_hand(volume: np.ndarray, *, turned: bool) -> np.ndarray:
    """Return what the mean comes to: every form looks ahead another way, once for each neighbour on an axis."""
    padded = np.pad(volume.astype(np.float64), 1, mode="reflect")

    def both(axis: int) -> np.ndarray:
        inner = [slice(1, -1)] * 3
        sides = []
        for part in (slice(None, -2), slice(2, None)):
            inner[axis] = part
            sides.append(padded[tuple(inner)])
        return (sides[0] + sides[1]) / 2

    aside = (both(1) + both(2)) / 2 if turned else both(2)
    return volume + 3 * aside + both(0)


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    (tmp_path / "net.py").write_text(NET)
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    return giver(tmp_path, monkeypatch, capsys)


def run(give: Give, augment: str, shape: str = "[8,8,8]", *more: str) -> Ended:
    recipe = ["net.name=net.py:build", "normalise.method=none", "output.dtype=float32", "output.intensity=raw"]
    settings = set_each(*recipe, f"windows.shape={shape}", f"infer.augment={augment}", *more)
    return give("run", "--config", "threads", *settings, "-o", "out.zarr", "in.n5")


@pytest.mark.parametrize(("augment", "number"), [("none", 1), ("flips", 8), ("rotations", 16)])
def test_each_form_is_there_once(augment: str, number: int) -> None:
    window = torch.arange(27.0).view(1, 1, 3, 3, 3)
    seen = set()

    def note(form: torch.Tensor) -> torch.Tensor:
        seen.add(tuple(form.flatten().tolist()))
        return form

    assert torch.equal(mean_of_forms(note, window, augment), window)  # type: ignore[arg-type]
    assert len(seen) == len(list(forms(augment))) == number  # type: ignore[arg-type]
    for form in seen:  # z stays z, y and x may change places
        layers = np.array(form).reshape(3, 3, 3)
        steps = [abs(int(np.diff(layers, axis=axis).flat[0])) for axis in range(3)]
        assert steps in ([9, 3, 1], [9, 1, 3])


@pytest.mark.parametrize(("augment", "turned"), [("flips", False), ("rotations", True)])
def test_a_run_writes_the_mean_over_the_whole_volume(give: Give, tmp_path: Path, augment: str, turned: bool) -> None:
    assert run(give, augment).code == 0
    found = np.squeeze(open_volume(tmp_path / "out.zarr").open()[:])
    assert np.abs(found - mean_by_hand(noise(SHAPE), turned=turned)).max() < 1e-3


def test_without_it_a_net_looks_one_way(give: Give, tmp_path: Path) -> None:
    assert run(give, "none").code == 0
    found = np.squeeze(open_volume(tmp_path / "out.zarr").open()[:])
    assert np.abs(found - mean_by_hand(noise(SHAPE), turned=False)).max() > 10


@pytest.mark.parametrize("shape", ["[8,8,10]", "[10,12,8]"])
def test_windows_whose_y_and_x_differ_cannot_be_turned(give: Give, tmp_path: Path, shape: str) -> None:
    y, x = itertools.islice(eval(shape), 1, 3)
    ended = run(give, "rotations", shape)
    assert ended.code == 2
    assert f"infer.augment=rotations turns y into x, but window is {y} along y and {x} along x; use flips" in ended.err
    assert not (tmp_path / "out.zarr").exists()


OFFSETS = [(0, -2, 0), (0, 0, -2), (-1, 3, 0), (-1, 0, 3), (1, 3, 0), (1, 0, 3)]
PAIRS = """
import torch
def pad(x, *by):
    return torch.nn.functional.pad(x, [n for step in reversed(by) for n in (max(0, -step), max(0, step))])
class Pairs(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(1, 3, 3), in_channels=1, out_channels=6)
    def forward(self, x):
        z, y, x_size = x.shape[2:]
        other = [
            pad(x, *o)[:, :, max(0, o[0]):, max(0, o[1]):, max(0, o[2]):][:, :, :z, :y, :x_size] for o in OFFSETS
        ]
        return torch.cat([x * each + ASIDE * k for k, each in enumerate(other)], dim=1)
def build():
    return Pairs()
"""


def products(volume: np.ndarray) -> np.ndarray:
    """Return each voxel times the one at each of `OFFSETS`; beyond the faces the volume is mirrored."""
    wide = np.pad(volume.astype(np.float64), 3, mode="reflect")
    inner = [tuple(slice(3 + step, 3 + step + n) for step, n in zip(o, volume.shape, strict=True)) for o in OFFSETS]
    return np.stack([volume * wide[each] for each in inner])


@pytest.mark.parametrize(
    ("augment", "aside", "weight"),
    [
        ("flips", [0, 1, 3, 4, 3, 4], 100),
        ("rotations", [0.5, 0.5, 3.5] + [3.5] * 3, 100),
        pytest.param("flips", [0, 1, 3, 4, 3, 4], 0, marks=pytest.mark.long),
        pytest.param("rotations", [0.5, 0.5, 3.5] + [3.5] * 3, 0, marks=pytest.mark.long),
    ],
)
def test_pairs_of_affinities_are_put_back(
    give: Give, tmp_path: Path, augment: str, aside: list[float], weight: int
) -> None:
    """A number added to each channel shows of which channels the mean is, in windows whose cores are small."""
    (tmp_path / "net.py").write_text(PAIRS.replace("OFFSETS", str(OFFSETS)).replace("ASIDE", str(weight)))
    assert run(give, augment, "[12,16,16]", "net.offsets=" + str([*map(list, OFFSETS)])).code == 0
    found = open_volume(tmp_path / "out.zarr").open()[:]
    wanted = products(noise(SHAPE)) + weight * np.array(aside)[:, None, None, None]
    assert np.abs(found - wanted).max() < 1e-2


@pytest.mark.parametrize(
    ("augment", "offsets", "wanted"),
    [
        ("flips", "[[0,1,2]]", "[0, -1, 2] of the offset [0, 1, 2], and net.offsets has neither that nor [0, 1, -2]"),
        ("rotations", "[[0,-1,0]]", "[0, 0, -1] of the offset [0, -1, 0], and net.offsets has neither that nor"),
    ],
)
def test_an_offset_that_no_channel_has_when_mirrored_or_turned_is_refused(
    give: Give, tmp_path: Path, augment: str, offsets: str, wanted: str
) -> None:
    ended = run(give, augment, "[8,8,8]", f"net.offsets={offsets}")
    assert ended.code == 2
    assert f"infer.augment={augment} makes {wanted}" in ended.err
    assert not (tmp_path / "out.zarr").exists()
