"""Nets that have learned voxels of one size: SciPy over the whole volume says what they read and what is written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from growing import edit
from inline import Inline, Stopped
from scipy.ndimage import convolve, gaussian_filter, map_coordinates
from volumes import fingerprint, noise, write_volume

import volpipe as vp
from volpipe.errors import IncompleteError, PlanError, RunError
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.volumes.storage.metadata import ArraySpec, Level
from volpipe.volumes.volume import Multiscale, create_array, create_multiscale, open_volume, open_writer
from volpipe.workflow.plan import plan_flow
from volpipe.workflow.prepare import prepare
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.work_plan import RunPlan, execute

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, spacing=None, scale=1):
        super().__init__()
        torch.manual_seed(2)
        self.conv, self.scale = nn.Conv3d(1, channels, 3, padding=1), scale
        known = {"out_channels": channels} | ({} if spacing is None else {"spacing": spacing})
        self.volpipe = {"scale": (scale,) * 3, "stride": (1, 1, 1), "halo": (1, 1, 1), **known}

    def forward(self, x):
        x = self.conv(x)
        for axis in (2, 3, 4):
            x = x.repeat_interleave(self.scale, axis)
        return x

def net(channels=1, spacing=None, scale=1):
    return Net(channels, spacing, scale)

class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.fine, self.coarse = nn.Conv3d(1, 2, 3, padding=1), nn.Conv3d(1, 3, 2, stride=2)

    def forward(self, x):
        return {"fine": self.fine(x), "coarse": self.coarse(x)}

def heads():
    return Heads()
"""
NET = ("net.name=nets.py:net", "net.untrained=true", "normalise.method=none", "windows.shape=[16,16,20]")
BLOCKS = ("windows.block=[1,2,1]", "output.shard=auto", "output.levels=1")
SHAPE = (23, 41, 37)
Lengths = tuple[float, float, float]


def resized(data: np.ndarray, shape: tuple[int, ...], order: int) -> np.ndarray:
    """Return `data` on another grid that covers it, by SciPy; smoothed before where voxels become longer."""
    steps = [n / m for n, m in zip(data.shape, shape, strict=True)]
    data = data.astype(np.float64)
    if order:
        data = gaussian_filter(data, [max(0, (step - 1) / 2) for step in steps], mode="nearest")
    places = [(np.arange(m) + 0.5) * step - 0.5 for m, step in zip(shape, steps, strict=True)]
    return map_coordinates(data, np.meshgrid(*places, indexing="ij"), order=order, mode="nearest")


def seen(data: np.ndarray, size: Lengths, spacing: Lengths) -> np.ndarray:
    """Return what a net of `spacing` reads of a volume of voxels of `size`."""
    shape = [round(n * v / s) for n, v, s in zip(data.shape, size, spacing, strict=True)]
    return resized(data, tuple(shape), 3).clip(0, 255)


def made(image: np.ndarray, channels: int = 1) -> np.ndarray:
    """Return what the net makes of an image, (c, z, y, x)."""
    namespace: dict[str, Any] = {}
    exec(NETS, namespace)
    conv = namespace["net"](channels).conv
    weights, bias = conv.weight.detach().numpy()[:, 0], conv.bias.detach().numpy()
    padded = np.pad(image, 1, mode="reflect")
    inner = (slice(1, -1),) * 3
    return np.stack([convolve(padded, w[::-1, ::-1, ::-1])[inner] + b for w, b in zip(weights, bias, strict=True)])


def planned(folder: Path, data: np.ndarray, size: Lengths | None, *settings: str, name: str = "out.zarr") -> Plan:
    folder.mkdir(exist_ok=True)
    (folder / "nets.py").write_text(NETS)
    if not (folder / "in.n5").exists():
        write_volume(folder / "in.n5", data)
    known = () if size is None else (f"input.voxel_size_nm={list(size)}",)
    recipe = load_recipe(Path("none"), [*NET, *BLOCKS, *known, *settings])
    return prepare(str(folder / "in.n5"), recipe, folder / name, folder)


def ran(plan: Plan) -> np.ndarray:
    assert execute(plan, Inline().start).missing == []
    return open_volume(plan.out).open()[...]


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-6 * float(np.ptp(expected)))


SIZES = [
    ((6.3, 6.3, 6.3), (8, 8, 8)),
    ((40, 8, 8), (8, 8, 8)),  # five times as many slices
    pytest.param((8, 4, 4), (8, 8, 8), marks=pytest.mark.long),  # as a level of a pyramid
    pytest.param((30, 3.5, 5), (40, 8, 8), marks=pytest.mark.long),
    pytest.param((10, 12, 9), (8, 8, 8), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("size", "spacing"), SIZES)
def test_a_net_reads_voxels_that_it_has_learned_and_its_output_lies_on_those_of_the_volume(
    tmp_path: Path, size: Lengths, spacing: Lengths
) -> None:
    data = noise(SHAPE)
    expected = made(seen(data, size, spacing))[0]
    plan = planned(tmp_path, data, size, f"net.spacing={list(spacing)}", "output.grid=input")
    assert_close(ran(plan), resized(expected, SHAPE, 1))
    volume, own = open_volume(plan.out), open_volume(f"{plan.out}/net")
    assert_close(own.open()[...], expected)
    assert (volume.voxel_size_nm, volume.origin_nm, len(volume.levels)) == (size, (0, 0, 0), 2)
    lengths = [v * n / m for v, n, m in zip(size, SHAPE, expected.shape, strict=True)]
    assert own.voxel_size_nm == pytest.approx(lengths)
    assert own.origin_nm == pytest.approx([(n - v) / 2 for n, v in zip(lengths, size, strict=True)])
    checked = vp.verify(plan.out, recompute=1)
    assert (checked.is_whole, len(checked.blocks)) == (True, 1)


def test_numbers_lie_on_the_grid_of_the_net_where_nothing_is_said(tmp_path: Path) -> None:
    data, size = noise(SHAPE), (6.3, 5.0, 11.0)
    alone = planned(tmp_path, data, size, "net.spacing=[8,8,8]")
    both = planned(tmp_path, data, size, "net.spacing=[8,8,8]", "output.grid=input", name="both.zarr")
    ran(alone), ran(both)
    first, second = open_volume(alone.out), open_volume(f"{both.out}/net")
    assert np.array_equal(first.open()[...], second.open()[...])
    assert (first.voxel_size_nm, first.origin_nm) == (second.voxel_size_nm, second.origin_nm)
    assert not (Path(alone.out) / "net").exists()


@pytest.mark.parametrize(("size", "spacing"), SIZES[1:3])
def test_classes_have_the_nearest_voxel_and_lie_on_the_image(tmp_path: Path, size: Lengths, spacing: Lengths) -> None:
    data = noise(SHAPE)
    settings = ("net.options.channels=3", f"net.spacing={list(spacing)}", "output.kind=classes")
    classes = ran(planned(tmp_path, data, size, *settings, "output.grid=net"))
    expected = made(seen(data, size, spacing), 3).argmax(axis=0)
    assert np.mean(classes == expected) > 0.9999  # of two that are alike to the last bits either may be
    plan = planned(tmp_path, data, size, *settings, name="back.zarr")
    back = ran(plan)
    assert back.dtype == np.uint8 and np.array_equal(back, resized(classes, SHAPE, 0))
    assert open_volume(plan.out).voxel_size_nm == size
    checked = vp.verify(plan.out, recompute=1)
    assert (checked.is_whole, [block.num_differ for block in checked.blocks]) == (True, [0])


def test_a_mask_and_an_update_count_on_both_grids(tmp_path: Path) -> None:
    data, size, known = noise(SHAPE), (8.0, 4.0, 5.0), ("net.spacing=[8,8,8]", "output.grid=input")
    small = ("windows.block=[1,1,1]", "input.mask=mask.n5", "output.shard=[14,14,18]", "output.chunk=[7,7,9]")
    mask = np.zeros(SHAPE, np.uint8)
    mask[2:9, 20:, 3:20] = 1
    write_volume(tmp_path / "mask.n5", mask)
    plan = planned(tmp_path, data, size, *known, *small)
    before = ran(plan)
    own = open_volume(f"{plan.out}/net").open()[...]
    assert 0 < np.count_nonzero(own == 0) < own.size
    assert_close(before, resized(own, SHAPE, 1))
    edit(tmp_path / "in.n5", Box((4, 30, 5), (8, 41, 15)))
    assert execute(plan, Inline().start, RunOptions(update=True)).missing == []
    after = open_volume(plan.out).open()[...]
    assert not np.array_equal(after, before)
    assert np.array_equal(after, ran(planned(tmp_path, data, size, *known, *small, name="fresh.zarr")))
    assert vp.verify(plan.out, recompute=1).is_whole


def test_a_region_is_the_crop_of_the_whole_and_stored_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    data, size, known = noise(SHAPE), (6.3, 5, 11), ("net.spacing=[8,8,8]", "output.grid=input", "infer.exact=true")
    whole = ran(planned(tmp_path, data, size, *known))
    part = planned(tmp_path, data, size, *known, "input.roi='3:20,10:31,:'", name="part.zarr")
    assert np.array_equal(ran(part), whole[3:20, 10:31])
    assert open_volume(part.out).origin_nm == (3 * 6.3, 50, 0)
    assert vp.verify(part.out, recompute=1).is_whole
    stored = planned(tmp_path, data, size, *known, "tensors.mode=stored", "windows.blend=hann", name="stored.zarr")
    streamed = planned(tmp_path, data, size, *known, "windows.blend=hann", name="streamed.zarr")
    assert stored.mode == "stored" and np.array_equal(ran(stored), ran(streamed))


def test_a_net_that_makes_more_voxels_makes_as_many_more_of_the_volume(tmp_path: Path) -> None:
    data, size = noise(SHAPE), (10.0, 6.0, 6.0)
    plan = planned(tmp_path, data, size, "net.spacing=[8,8,8]", "net.options.scale=2", "output.grid=input")
    expected = made(seen(data, size, (8, 8, 8)))[0].repeat(2, 0).repeat(2, 1).repeat(2, 2)
    assert_close(ran(plan), resized(expected, tuple(2 * n for n in SHAPE), 1))
    volume = open_volume(plan.out)
    assert (volume.voxel_size_nm, volume.origin_nm) == ((5, 3, 3), (-2.5, -1.5, -1.5))
    assert vp.verify(plan.out, recompute=1).is_whole


def test_all_outputs_of_a_net_lie_on_the_volume_each_by_its_own_grid(tmp_path: Path) -> None:
    data, size = noise((24, 40, 36)), (8.0, 4.0, 6.0)
    settings = ("net.name=nets.py:heads", "net.output=all", "net.spacing=[16,8,12]", "windows.shape=[8,8,12]")
    whole = planned(tmp_path, data, size, *settings)
    assert execute(whole, Inline().start).missing == []
    back = planned(tmp_path, data, size, *settings, "output.grid=input", name="back.zarr")
    assert execute(back, Inline().start).missing == []
    for name, coarser in (("fine", 1), ("coarse", 2)):
        own, shown = open_volume(f"{whole.out}/{name}"), open_volume(f"{back.out}/{name}")
        shape = tuple(n // coarser for n in data.shape)
        assert shown.voxel_size_nm == tuple(v * coarser for v in size)
        expected = [resized(channel, shape, 1) for channel in own.open()[...]]
        assert_close(shown.open()[...], np.stack(expected))
    assert vp.verify(back.out, recompute=1).is_whole


@pytest.mark.parametrize("name", ["out.n5", "out.precomputed", "old.zarr"])
def test_every_format_holds_both_grids(tmp_path: Path, name: str) -> None:
    data, size = noise(SHAPE), (8.0, 4.0, 4.0)
    format = ["output.format=ome-zarr-0.4"] if name == "old.zarr" else []
    known = ("net.spacing=[8,8,8]", "output.grid=input")
    plan = planned(tmp_path, data, size, *known, *format, name=name)
    ran(plan)
    own, shown = (open_volume(place) for place in (f"{plan.out}/net", plan.out))
    expected = made(seen(data, size, (8, 8, 8)))[0]
    assert_close(own.crop(Box.from_shape(expected.shape))[0], expected)
    assert_close(shown.crop(Box.from_shape(SHAPE))[0], resized(expected, SHAPE, 1))
    assert shown.voxel_size_nm == size and own.voxel_size_nm == pytest.approx([8, 41 / 20 * 4, 37 / 18 * 4])
    assert vp.verify(plan.out, recompute=1).is_whole


def test_a_killed_run_is_continued_byte_for_byte_and_another_spacing_is_another_run(tmp_path: Path) -> None:
    data, size, known = noise(SHAPE), (6.3, 5, 11), ("net.spacing=[8,8,8]", "output.grid=input", "windows.blend=hann")
    small = ("windows.block=[1,2,2]", "output.shard=[8,16,20]", "output.chunk=[8,8,10]")
    whole = planned(tmp_path, data, size, *known, *small, name="whole.zarr")
    ran(whole)
    for most_tasks in (2, 6, 12):
        with pytest.raises(Stopped):
            execute(planned(tmp_path, data, size, *known, *small), Inline(0, 2, most_tasks).start)
        with pytest.raises(IncompleteError):
            open_volume(tmp_path / "out.zarr").open().read(Box.from_shape(SHAPE))
    plan = planned(tmp_path, data, size, *known, *small)
    ran(plan)
    levels = ("net/s0", "s0", "s1")
    for each in levels:
        assert fingerprint(Path(plan.out) / each / "c") == fingerprint(Path(whole.out) / each / "c")
    other = planned(tmp_path, data, size, "net.spacing=[8,8,9]", *known[1:], *small)
    with pytest.raises(RunError, match=r"net\.spacing: "):
        execute(other, Inline().start)


FLOW = """
[[stage]]
name = "classes"
[stage.net]
name = "nets.py:net"
untrained = true
spacing = [8, 8, 8]
options = { channels = 3 }
[stage.input]
voxel_size_nm = [6.3, 5, 11]
[stage.windows]
shape = [16, 16, 20]
block = [1, 1, 1]
[stage.output]
kind = "classes"
shard = [14, 14, 18]
chunk = [7, 7, 9]

[[stage]]
name = "part"
kind = "convert"
[stage.input]
roi = "3:20,10:31,:"
[stage.windows]
shape = [8, 8, 8]
block = [1, 1, 1]
"""


def test_a_stage_reads_an_output_on_the_grid_of_the_volume_while_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "flow.toml").write_text(FLOW)
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    flow = find_flow(tmp_path / "flow.toml", ["classes.normalise.method=none"])
    assert flow is not None
    plan = plan_flow(flow, str(tmp_path / "in.n5"), tmp_path / "out", tmp_path)
    assert execute(plan, Inline(slots=2).start).is_complete
    classes, part = (open_volume(stage.out) for stage in plan.stages)
    own = open_volume(tmp_path / "out" / "classes.zarr" / "net").open()[...]
    assert np.array_equal(classes.open()[...], resized(own, SHAPE, 0))
    assert np.array_equal(part.open()[...], classes.open()[3:20, 10:31])


def test_what_a_net_declares_is_taken_where_the_recipe_says_nothing(tmp_path: Path) -> None:
    data, size = noise(SHAPE), (8.0, 4.0, 4.0)
    declared = planned(tmp_path, data, size, "net.options.spacing=[8,0,8]")
    given = planned(tmp_path, data, size, "net.options.spacing=[8,0,8]", "net.spacing=[8,8,8]", name="b.zarr")
    assert (declared.source.shape, given.source.shape) == ((23, 41, 18), (23, 20, 18))
    alike = planned(tmp_path, data, size, "net.spacing=[8.05,4,3.97]", name="c.zarr")
    assert alike.source.resampling is None and alike.notes.volume == planned(tmp_path, data, size).notes.volume


def test_grey_levels_are_those_of_the_stored_type(tmp_path: Path) -> None:
    data, size = noise(SHAPE), (8.0, 4.0, 4.0)
    plan = planned(
        tmp_path, data, size, "net.name=identity", "net.untrained=false", "net.spacing=[8,8,8]", "normalise.method=auto"
    )
    assert plan.out_dtype == "uint8" and "8 bits" in plan.notes.mapping
    read = seen(data, size, (8, 8, 8))
    assert np.abs(ran(plan) - read).max() <= 0.501
    zscore = planned(tmp_path, data, size, "net.spacing=[8,8,8]", "normalise.method=zscore", name="z.zarr")
    expected = made((read - data.mean()) / data.std())[0]
    np.testing.assert_allclose(ran(zscore), expected, rtol=0, atol=1e-5 * np.ptp(expected))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            (
                "net.spacing=[8,8,8]",
                "output.grid=input",
                "net.options.channels=3",
                "net.offsets=[[1,0,0],[0,1,0],[0,0,1]]",
            ),
            r"affinities \(net\.offsets\) are of pairs of voxels of the net's grid",
        ),
        (
            ("net.name=nets.py:heads", "net.output=coarse", "net.spacing=[8,8,8]", "output.grid=input"),
            r"axis z: net heads makes one voxel of 2, and the 23 of the volume, or its 23 on the net's grid, are no",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, settings: tuple[str, ...], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        planned(tmp_path, noise(SHAPE), (8, 4, 4), *settings)


def test_an_unknown_voxel_size_is_refused_with_the_way_to_give_it(tmp_path: Path) -> None:
    for given in ("net.spacing=[8,8,10]", "net.options.spacing=[8,8,10]"):
        with pytest.raises(
            PlanError, match=r"8 × 8 × 10 nm .*of .*in.n5:raw is unknown; give .* input.voxel_size_nm=8,8,10"
        ):
            planned(tmp_path, noise(SHAPE), None, given)
    assert planned(tmp_path, noise(SHAPE), None, "net.options.spacing=[0,0,0]").source.resampling is None


def test_a_part_alone_is_refused_on_the_grid_of_the_volume(tmp_path: Path) -> None:
    plan = planned(tmp_path, noise(SHAPE), (8, 4, 4), "net.spacing=[8,8,8]", "output.grid=input")
    with pytest.raises(PlanError, match="--only is a box on the net's grid"):
        RunPlan(plan).limited(RunOptions(), "0:4,:,:")


def test_plans_name_a_nearer_level_and_voxels_that_are_far_longer(tmp_path: Path) -> None:
    spec, where = ArraySpec((16, 32, 32), np.dtype(np.uint8), (16, 32, 32)), (Level("s0"), Level("s1", (1, 2, 2)))
    for key, level in (("s0", spec), ("s1", replace(spec, shape=(16, 16, 16)))):
        create_array(tmp_path / "in.zarr", key, level)
    create_multiscale(tmp_path / "in.zarr", Multiscale(where, ("z", "y", "x"), (8, 4, 4), (0, 0, 0), "in"))
    open_writer(tmp_path / "in.zarr", "s0").write(Box.from_shape((16, 32, 32)), noise((16, 32, 32)))
    open_writer(tmp_path / "in.zarr", "s1").write(Box.from_shape((16, 16, 16)), noise((16, 16, 16)))
    (tmp_path / "nets.py").write_text(NETS)

    def notes(*settings: str) -> str:
        recipe = load_recipe(Path("none"), [*NET, *settings])
        return " ".join(prepare(str(tmp_path / "in.zarr"), recipe, tmp_path / "out.zarr", tmp_path).warnings())

    nearer = "level 1 of .* has voxels of 8 × 8 × 8 nm, nearer to those .*: input.level=1 is read faster"
    assert re.search(nearer, notes("net.spacing=[8.5,8.5,8.5]"))
    assert re.search(
        "level 0 of .*: input.level=0 has detail that level 1", notes("net.spacing=[8,4,5]", "input.level=1")
    )
    assert "level" not in notes("net.spacing=[8,8.5,8.5]", "input.level=1") + notes("net.spacing=[9,5,5]")
    assert "adds no such detail; is net.spacing in nm" in notes("net.spacing=[8,0.9,8]")


@pytest.mark.real
def test_real_voxels_are_read_and_put_back_as_by_scipy(tmp_path: Path, shared: Path) -> None:
    data, size, spacing = tifffile.imread(shared / "fibsem_medulla" / "tiny96_raw.tif"), (10, 10, 10), (16, 12.5, 8)
    known = ("net.name=identity", "net.untrained=false", f"net.spacing={list(spacing)}", "output.grid=input")
    plan = planned(tmp_path, data, size, *known, "output.dtype=float32", "windows.shape=[32,48,64]")
    assert_close(ran(plan), resized(seen(data, size, spacing), data.shape, 1))
