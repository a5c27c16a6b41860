"""Several volumes as the channels of a net: what a run over one volume of all channels gives, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from growing import edit
from inline import Inline, Stopped
from volumes import fingerprint, noise, windowed, write_volume

import volpipe as vp
from volpipe.estimation.memory import array_bytes
from volpipe.geometry.grid import Box
from volpipe.runs.provenance import read_provenance
from volpipe.volumes.volume import ArraySpec, create_array, create_multiscale, open_writer

NETS = """
import torch
from torch import nn

class Mixed(nn.Module):
    volpipe = dict(in_channels=2, scale=(1, 1, 1), stride=(1, 1, 1), halo=(1, 1, 1))
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv3d(2, 1, 3, padding=1)
    def forward(self, x):
        return self.conv(x)

class Same(nn.Module):
    volpipe = dict(in_channels=3, out_channels=3, scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0))
    def forward(self, x):
        return x
"""
SHAPE = (18, 26, 33)
MIXED = (
    "net.name=own.py:Mixed", "net.untrained=true", "normalise.method=zscore", "output.levels=0",
    *windowed((16, 16, 16), (2, 2, 2), (1, 2, 2), "crop"),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(NETS)
    one, other = noise(SHAPE), noise(SHAPE, seed=1) // 3
    write_volume(tmp_path / "one.n5", one, chunk=8)
    zarr.create_array("other.zarr", data=other, chunks=(6, 10, 33), dimension_names=("z", "y", "x"))
    write_volume(tmp_path / "both.n5", np.stack([one, other]), chunk=8)
    return tmp_path


def ran(volume: str, out: str, *settings: str, site: Inline | None = None, **options: Any) -> np.ndarray:
    """Return the output of a run over `volume`."""
    report = vp.run(vp.plan(volume, out=out, settings=settings), site=site or Inline(), **options)
    assert not report.missing
    data: np.ndarray = vp.open(out)[...]
    return data


@pytest.mark.parametrize(
    ("mode", "method"),
    [
        ("streamed", "zscore"),
        ("stored", "percentile"),
        pytest.param("streamed", "percentile", marks=pytest.mark.long),
    ],
)
def test_volumes_are_channels_each_normalised_for_itself(folder: Path, mode: str, method: str) -> None:
    settings = [*MIXED, f"tensors.mode={mode}", f"normalise.method={method}"]
    together = ran("both.n5/raw", "both.zarr", *settings, "normalise.per_channel=true")
    separate = ran("one.n5/raw", "two.zarr", *settings, "input.also=other.zarr")
    assert np.ptp(together) > 1
    np.testing.assert_array_equal(separate, together)


@pytest.mark.parametrize("grid", ["input", pytest.param("net", marks=pytest.mark.long)])
def test_volumes_are_read_at_the_voxel_size_that_the_net_has_learned(folder: Path, grid: str) -> None:
    settings = [*MIXED, "input.voxel_size_nm=[10,8,8]", "net.spacing=[12,8,10]", f"output.grid={grid}"]
    together = ran("both.n5/raw", "both.zarr", *settings, "normalise.per_channel=true")
    separate = ran("one.n5/raw", "two.zarr", *settings, "input.also=other.zarr")
    assert together.shape == ((15, 26, 26) if grid == "net" else SHAPE)
    np.testing.assert_array_equal(separate, together)
    write_volume(folder / "wide.n5", noise(SHAPE, "uint16", seed=2), chunk=8)  # by the map of its own type
    settings = ["net.name=own.py:Same", "output.dtype=float32", "output.levels=0", *settings[-3:]]
    image, wide, _ = ran("one.n5/raw", "three.zarr", *settings, "input.also=[wide.n5/raw,wide.n5/raw]")
    for name, channel in (("one", image), ("wide", wide)):
        alone = ran(f"{name}.n5/raw", f"{name}.zarr", *settings, f"input.also=[{name}.n5/raw,{name}.n5/raw]")
        np.testing.assert_allclose(channel, alone[0], atol=1e-5)


def test_each_volume_has_its_own_type_and_map(folder: Path) -> None:
    labels = noise(SHAPE, "uint16", seed=2) % 7
    write_volume(folder / "labels.n5", labels, chunk=16)
    floats = noise(SHAPE, "float32", seed=3)
    write_volume(folder / "floats.n5", floats, chunk=11)
    also = '[{path="labels.n5/raw",normalise={method="none"}},{path="floats.n5",key="raw",normalise={mean=5,std=2}}]'
    settings = ["net.name=own.py:Same", "output.dtype=float32", f"input.also={also}", "output.levels=0"]
    plan = vp.plan("one.n5/raw", out="out.zarr", settings=settings)
    assert (plan.source.dtype, plan.source.num_channels) == ("float32", 3)
    image, marks, grey = ran("one.n5/raw", "out.zarr", *settings)
    np.testing.assert_allclose(image, noise(SHAPE) / 127.5 - 1, atol=1e-6)  # the range of 8 bits, not of floats
    np.testing.assert_array_equal(marks, labels)
    np.testing.assert_allclose(grey, (floats - 5) / 2, rtol=1e-6)


def test_a_killed_run_goes_on_to_the_bytes_of_one_go_and_any_change_is_seen(folder: Path) -> None:
    settings = [*MIXED, "input.also=other.zarr"]
    ran("one.n5/raw", "out.zarr", *settings)
    whole = fingerprint("out.zarr")
    shutil.rmtree("out.zarr")
    shutil.rmtree("out.zarr.run")
    with pytest.raises(Stopped):
        ran("one.n5/raw", "out.zarr", *settings, site=Inline(most_tasks=5))
    ran("one.n5/raw", "out.zarr", *settings, site=Inline(seed=1))
    assert fingerprint("out.zarr") == whole
    said = read_provenance("out.zarr")["input"]
    assert said["path"].endswith("one.n5") and said["also"][0]["path"].endswith("other.zarr")
    assert said["fingerprint"] != said["also"][0]["fingerprint"]
    edit(folder / "other.zarr", Box((0, 0, 0), (2, 2, 2)))
    with pytest.raises(vp.VolpipeError, match=r"the volume 2 .*other\.zarr has changed since this output was begun"):
        ran("one.n5/raw", "out.zarr", *settings)
    report = vp.run(vp.plan("one.n5/raw", out="out.zarr", settings=settings), site=Inline(), update=True)
    (update,) = report.updates
    assert 0 < update.changed < len(report.plan.blocks)


def test_a_plan_counts_the_bytes_of_all_volumes(folder: Path) -> None:
    settings = [*MIXED, "input.also=other.zarr"]
    both = vp.plan("both.n5/raw", out="o.zarr", settings=MIXED)
    two = vp.plan("one.n5/raw", out="o.zarr", settings=settings)
    assert array_bytes(two) >= array_bytes(both)
    read = [vp.estimate(plan).estimate.read_bytes for plan in (both, two)]
    assert read[1] == pytest.approx(read[0], rel=0.2)  # as they are compressed


def placed(place: Path, size: tuple[float, float, float], origin: tuple[float, float, float]) -> None:
    """Write an OME-Zarr of voxels of `size`, in nm, whose first one lies at `origin`."""
    spec = ArraySpec(SHAPE, np.dtype(np.uint8), (16, 16, 16), axes=("z", "y", "x"))
    create_array(place, "s0", spec, "zarr3")
    open_writer(place, "s0").write(Box.from_shape(SHAPE), noise(SHAPE))
    levels = vp.volumes.volume.Multiscale(
        (vp.volumes.volume.Level("s0", (1.0, 1.0, 1.0)),), ("z", "y", "x"), size, origin, "a"
    )
    create_multiscale(place, levels, format="ome-zarr-0.5")


@pytest.mark.parametrize(
    ("also", "sentence"),
    [
        ("small.n5/raw", r"input\.also\.0 .*small\.n5:raw has \(18, 26, 32\) voxels .* has \(18, 26, 33\)"),
        (
            "coarse.zarr",
            r"coarse\.zarr.* has voxels of 16 × 8 × 8 nm .* of 8 × 8 × 8 nm.*input\.also\.0\.voxel_size_nm",
        ),
        ("moved.zarr", r"moved\.zarr.* begins at 0 × 0 × 80 nm .* at 0 × 0 × 0 nm.*input\.also\.0\.origin_nm"),
        ("nowhere.n5", r"nowhere\.n5"),
        ("first.zarr,first.zarr", "takes 2 channels, the volume .* has 3 channels, 1 \\+ 1 \\+ 1 of 3 volumes"),
        ('[{path="first.zarr",shape=3}]', "shape"),
        ("[3]", "also"),
    ],
)
def test_volumes_of_another_grid_are_refused_with_both_numbers(folder: Path, also: str, sentence: str) -> None:
    write_volume(folder / "small.n5", noise((18, 26, 32)))
    placed(folder / "first.zarr", (8, 8, 8), (0, 0, 0))
    placed(folder / "coarse.zarr", (16, 8, 8), (0, 0, 0))
    placed(folder / "moved.zarr", (8, 8, 8), (0, 0, 80))
    with pytest.raises(vp.VolpipeError, match=sentence):
        vp.plan("first.zarr", out="o.zarr", settings=[*MIXED, f"input.also={also}"])
    given = '[{path="moved.zarr",origin_nm=[0,0,0]}]'
    assert vp.plan("first.zarr", out="o.zarr", settings=[*MIXED, f"input.also={given}"]).source.num_channels == 2


def test_a_net_of_more_channels_names_the_key(folder: Path) -> None:
    with pytest.raises(
        vp.VolpipeError, match=r"takes 2 channels, .* give the volumes of the other channels as input\.also"
    ):
        vp.plan("one.n5/raw", out="o.zarr", settings=MIXED)
