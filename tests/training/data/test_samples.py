"""Degradations against brute force, and samples: a function of their number, never of what is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from inline import Inline
from trainings import made

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, Grid, Triple
from volpipe.recipes.inference import load_recipe
from volpipe.recipes.training import TrainRecipe
from volpipe.runs.options import RunOptions
from volpipe.training.data.augment import coarser
from volpipe.training.data.degrade import context
from volpipe.training.data.samples import Sampler
from volpipe.training.data.volumes import cached_bytes
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, create_array, create_multiscale
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

SHAPE = (24, 30, 36)


@pytest.fixture
def volume(tmp_path: Path) -> np.ndarray:
    """A volume of `SHAPE` at v.tif, whose values tell nothing of where they lie but are all known."""
    data = np.random.default_rng(5).integers(0, 256, SHAPE).astype(np.uint8)
    tifffile.imwrite(tmp_path / "v.tif", data)
    return data


def recipe(**sections: object) -> TrainRecipe:
    samples = {"shape": (2, 6, 6), "swap": False, "flips": ()} | dict(sections.pop("samples", {}))  # type: ignore[call-overload]
    tree = {"net": {"name": "identity"}, "data": [{"path": "v.tif"}], "samples": samples, "train": {"seed": 3}}
    return TrainRecipe.model_validate(tree | sections)


def degrade(data: np.ndarray, kind: str, scale: Triple) -> np.ndarray:
    return coarser(torch.from_numpy(data)[None], kind, scale)[0].numpy()


def bounds(box: Box) -> list[tuple[int, int]]:
    return list(zip(box.start, box.stop, strict=True))


# ---- degradations


def test_bin_is_the_mean_of_each_group() -> None:
    data = np.random.default_rng(0).random((1, 8, 6, 4), np.float32)
    made = degrade(data, "bin", (4, 3, 1))
    for z in range(2):
        for y in range(2):
            np.testing.assert_allclose(made[0, z, y], data[0, 4 * z : 4 * z + 4, 3 * y : 3 * y + 3].mean((0, 1)), 1e-6)
    assert made.shape == (1, 2, 2, 4)


def test_subsample_takes_the_voxel_at_or_after_the_middle() -> None:
    data = np.arange(12, dtype=np.float32).reshape(1, 12, 1, 1)
    assert degrade(data, "subsample", (4, 1, 1)).ravel().tolist() == [2, 6, 10]
    assert degrade(data, "subsample", (3, 1, 1)).ravel().tolist() == [1, 4, 7, 10]


@pytest.mark.parametrize("factor", [2, 3, 4, 5])
def test_gaussian_has_the_width_of_a_voxel_and_lies_in_its_middle(factor: int) -> None:
    reach = context("gaussian", (factor, 1, 1))[0]
    size = 3 * factor
    response = np.empty(size + 2 * reach)
    for place in range(len(response)):  # the answer to a single bright slice, slice by slice
        data = np.zeros((1, len(response), 1, 1), np.float32)
        data[0, place] = 1
        made = degrade(data, "gaussian", (factor, 1, 1))
        assert made.shape == (1, 3, 1, 1)
        response[place] = made[0, 1, 0, 0]
    places = np.arange(len(response)) - reach
    centre = (response * places).sum() / response.sum()
    assert centre == pytest.approx(factor + (factor - 1) / 2, abs=1e-4)
    deviation = np.sqrt((response * (places - centre) ** 2).sum() / response.sum())
    assert deviation == pytest.approx(factor / 2.3548, rel=0.03)  # full width at half maximum, cut at 3 deviations
    assert response.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("kind", ["bin", "gaussian"])
def test_a_ramp_keeps_its_place(kind: str) -> None:
    reach = context(kind, (4, 1, 1))[0]
    ramp = (np.arange(16 + 2 * reach, dtype=np.float32) - reach).reshape(1, -1, 1, 1)
    made = degrade(ramp, kind, (4, 1, 1)).ravel()
    np.testing.assert_allclose(made, [1.5, 5.5, 9.5, 13.5], atol=1e-4)


# ---- samples


def test_a_sample_depends_on_its_number_and_the_seed_alone(volume: np.ndarray, tmp_path: Path) -> None:
    options = {"degrade": {"kind": "bin", "noise": 4.0}, "samples": {"flips": ("z", "y", "x"), "swap": True}}
    first = Sampler(recipe(**options), (2, 1, 1), str(tmp_path))
    again = Sampler(recipe(**options), (2, 1, 1), str(tmp_path))
    backwards = [made(again, number) for number in (7, 3, 0)][::-1]
    for sample, number in zip(backwards, (0, 3, 7), strict=True):
        np.testing.assert_array_equal(made(first, number).inputs, sample.inputs)
        np.testing.assert_array_equal(made(first, number).truth, sample.truth)
    assert not np.array_equal(made(first, 0).truth, made(first, 1).truth)
    other = Sampler(recipe(**options, train={"seed": 4}), (2, 1, 1), str(tmp_path))
    assert not np.array_equal(made(first, 0).truth, made(other, 0).truth)


def test_truth_is_a_part_of_the_volume_and_given_is_its_mean(volume: np.ndarray, tmp_path: Path) -> None:
    sampler = Sampler(recipe(degrade={"kind": "bin", "whole": False}), (4, 1, 1), str(tmp_path))
    windows = np.lib.stride_tricks.sliding_window_view(volume, (8, 6, 6))
    places = set()
    for number in range(20):
        sample = made(sampler, number)
        truth = (sample.truth[0] + 1) * 127.5
        found = np.argwhere((np.abs(windows - truth) < 1e-3).all(axis=(3, 4, 5)))
        assert len(found) == 1
        places.add(tuple(found[0]))
        np.testing.assert_allclose(sample.inputs[0], sample.truth[0].reshape(2, 4, 6, 6).mean(1), atol=1e-6)
    assert len(places) == 20


def test_given_is_whole_as_an_integer_volume_would_be(volume: np.ndarray, tmp_path: Path) -> None:
    inputs = made(Sampler(recipe(degrade={"kind": "bin"}), (4, 1, 1), str(tmp_path)), 0).inputs
    greys = (inputs + 1) * 127.5
    np.testing.assert_allclose(greys, np.rint(greys), atol=1e-4)


def test_slices_of_the_input_alone_are_missing_or_uneven(volume: np.ndarray, tmp_path: Path) -> None:
    volume = volume // 2 + 60  # so that nothing is black, and nothing clips
    tifffile.imwrite(tmp_path / "v.tif", volume)
    plain = Sampler(recipe(degrade={"kind": "bin", "whole": False}), (2, 1, 1), str(tmp_path))
    worse = {"kind": "bin", "whole": False, "missing": 0.2, "uneven": 0.1}
    sampler = Sampler(recipe(degrade=worse), (2, 1, 1), str(tmp_path))
    gains = []
    for number in range(100):
        whole, sample = made(plain, number), made(sampler, number)
        np.testing.assert_array_equal(sample.truth, whole.truth)
        ratio = (sample.inputs[0] + 1) / (whole.inputs[0] + 1)
        np.testing.assert_allclose(ratio, np.broadcast_to(ratio[:, :1, :1], ratio.shape), atol=1e-5)
        gains.extend(ratio[:, 0, 0])
    found = np.array(gains)
    assert np.mean(np.abs(found[::2] - found[1::2]) > 1e-3) > 0.8  # of both slices of a window
    kept = found[found > 0]
    assert 1 - len(kept) / len(found) == pytest.approx(0.2, abs=4 * (0.2 * 0.8 / len(found)) ** 0.5)
    assert (kept >= 0.9).all() and (kept <= 1.1).all()
    assert kept.std() == pytest.approx(0.1 / 3**0.5, rel=0.1)  # of equal chances between 0.9 and 1.1
    np.testing.assert_array_equal(made(sampler, 3).inputs, made(sampler, 3).inputs)


@pytest.mark.parametrize("stay", [1, 4])
def test_no_sample_touches_what_is_held_out(volume: np.ndarray, tmp_path: Path, stay: int) -> None:
    volume[:, :, 20:] = 255
    volume[:, :, :20] //= 2
    tifffile.imwrite(tmp_path / "v.tif", volume)
    held = recipe(data=[{"path": "v.tif", "held_out": ":,:,20:36"}], samples={"stay": stay})
    sampler = Sampler(held, (2, 1, 1), str(tmp_path))
    assert max(made(sampler, number).truth.max() for number in range(100)) < 0.9
    free = Sampler(recipe(samples={"stay": stay}), (2, 1, 1), str(tmp_path))
    assert max(made(free, number).truth.max() for number in range(100)) == 1


@pytest.mark.parametrize("others", [[":,:,0:16"], [None]])
def test_no_sample_touches_what_another_entry_of_its_volume_holds_out(
    volume: np.ndarray, tmp_path: Path, others: list[str | None]
) -> None:
    volume[:, :, :16] = volume[:, :, 20:] = 255
    volume[:, :, 16:20] //= 2
    volume[:, :, :16] -= 55 if None in others else 0  # what is not held out may be seen
    tifffile.imwrite(tmp_path / "v.tif", volume)
    boxes = [":,:,20:36", *others]
    entries = [{"path": "v.tif"} | ({} if box is None else {"held_out": box}) for box in boxes]
    sampler = Sampler(recipe(data=entries, samples={"shape": (2, 4, 4)}), (1, 1, 1), str(tmp_path))
    assert max(made(sampler, number).truth.max() for number in range(100)) < 0.9


@pytest.mark.parametrize("name", ["link.tif", "hard.tif", "folder/../v.tif", "folder_link/v.tif"])
def test_what_is_held_out_is_so_by_whatever_name_the_volume_has(volume: np.ndarray, tmp_path: Path, name: str) -> None:
    tifffile.imwrite(tmp_path / "v.tif", volume)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.tif").symlink_to("v.tif")
    (tmp_path / "hard.tif").hardlink_to(tmp_path / "v.tif")
    (tmp_path / "folder_link").symlink_to(tmp_path)
    entries = [{"path": "v.tif", "held_out": ":,:,20:36"}, {"path": name}]
    _, other = Sampler(recipe(data=entries, samples={"shape": (2, 4, 4)}), (1, 1, 1), str(tmp_path)).sources
    assert [box.start[2] for box in other.closed] == [20]


@pytest.mark.parametrize("path", ["v.zarr", "link.zarr"])
@pytest.mark.parametrize("size", [(8.0, 8.0, 8.0), None])
def test_what_is_held_out_of_a_level_is_held_out_of_the_others(
    tmp_path: Path, path: str, size: tuple[float, float, float] | None
) -> None:
    """Voxel i of s1 shows 2i and 2i + 1 of s0: 5:13 of that is touched by 2:7 of it."""
    levels = (Level("s0"), Level("s1", (2, 2, 2)))
    for level in levels:
        shape = tuple(int(32 // f) for f in level.factor)
        create_array(tmp_path / "v.zarr", level.key, ArraySpec(shape, np.dtype(np.uint8), (16, 16, 16)))
    create_multiscale(tmp_path / "v.zarr", Multiscale(levels, voxel_size_nm=size, origin_nm=(40.0, 0.0, 4.0)))
    (tmp_path / "link.zarr").symlink_to("v.zarr")
    entries = [{"path": "v.zarr", "held_out": "5:13,5:13,5:13"}, {"path": path, "level": 1, "held_out": "4:6,4:6,4:6"}]
    fine, coarse = Sampler(recipe(data=entries, samples={"shape": (2, 4, 4)}), (1, 1, 1), str(tmp_path)).sources
    assert set(coarse.closed) == {Box((2,) * 3, (7,) * 3), Box((4,) * 3, (6,) * 3)}
    assert set(fine.closed) == {Box((5,) * 3, (13,) * 3), Box((8,) * 3, (12,) * 3)}


def test_every_place_and_turn_comes_up(volume: np.ndarray, tmp_path: Path) -> None:
    """Of a volume that is one window, the samples are its 16 turns."""
    tifffile.imwrite(tmp_path / "v.tif", volume[:2, :6, :6])
    choice = recipe(samples={"flips": ("z", "y", "x"), "swap": True})
    sampler = Sampler(choice, (1, 1, 1), str(tmp_path))
    seen = {made(sampler, number).truth.tobytes() for number in range(200)}
    corner = (volume[:2, :6, :6].astype(np.float32) - np.float32(127.5)) / np.float32(127.5)
    turned = {
        np.ascontiguousarray(np.transpose(corner, order)[::z, ::y, ::x]).tobytes()
        for order in ((0, 1, 2), (0, 2, 1))
        for z in (1, -1)
        for y in (1, -1)
        for x in (1, -1)
    }
    assert seen == turned


def test_volumes_share_the_samples_by_their_size(volume: np.ndarray, tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "black.tif", np.zeros((24, 30, 12), np.uint8))
    both = recipe(data=[{"path": "v.tif"}, {"path": "black.tif"}])
    sampler = Sampler(both, (1, 1, 1), str(tmp_path))
    black = sum(made(sampler, number).truth.max() == -1 for number in range(200))
    assert 30 < black < 70  # a quarter of 200, four deviations either way


def test_planned_chunks_that_stay_are_those_that_windows_touch_and_few_more(tmp_path: Path) -> None:
    shape, chunk = (40, 96, 96), (16, 16, 16)
    for name, dtype in (("raw", "uint8"), ("labels", "uint64")):
        create_array(tmp_path / "v.n5", name, ArraySpec(shape, np.dtype(dtype), chunk, codec="gzip"), "n5")
    data = [{"path": "v.n5/raw", "labels": "v.n5/labels"}]
    for steps in (1, 5, 25, 500):
        chosen = recipe(samples={"shape": (8, 16, 24)}, data=data, train={"steps": steps, "batch": 2, "accumulate": 2})
        sampler = Sampler(chosen, (1, 1, 1), str(tmp_path))
        boxes = [sampler.window(number).box for number in range(4 * steps)]
        touched = {number for box in boxes for number in Grid(shape, chunk).touching(box)}
        num_voxels = sum(Grid(shape, chunk).box(number).num_voxels for number in touched)
        assert 0.9 * 9 * num_voxels < cached_bytes(chosen, (1, 1, 1), str(tmp_path)) < 1.5 * 9 * num_voxels


def test_a_window_longer_than_a_volume_is_refused(volume: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"axis z: a window of 32 voxels .* has 24; give a smaller samples.shape"):
        Sampler(recipe(samples={"shape": (8, 6, 6)}), (4, 1, 1), str(tmp_path))


def test_a_volume_that_is_all_held_out_is_refused(volume: np.ndarray, tmp_path: Path) -> None:
    held = recipe(data=[{"path": "v.tif", "held_out": ":,:,:"}])
    with pytest.raises(
        PlanError, match=r"lay outside of what is held out of .*; make samples.shape or data.held_out smaller"
    ):
        made(Sampler(held, (1, 1, 1), str(tmp_path)), 0)


def test_statistics_that_only_measuring_tells_are_refused(volume: np.ndarray, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"give normalise.low and high, or mean and std"):
        Sampler(recipe(normalise={"method": "zscore"}), (1, 1, 1), str(tmp_path))


# ---- stored windows


@pytest.fixture
def windows(volume: np.ndarray, tmp_path: Path) -> Path:
    """The folder with the window tensors of a run over the volume: windows of 8 voxels that overlap by 4."""
    settings = [
        "net.name=identity", "tensors.mode=stored", "windows.shape=[8,8,8]", "windows.overlap=4", "windows.blend=hann",
    ]  # fmt: skip
    plan = prepare(str(tmp_path / "v.tif"), load_recipe(None, settings), tmp_path / "out.zarr", tmp_path)
    assert execute(plan, Inline().start, RunOptions(keep_tensors=True)).missing == []
    return tmp_path / "out.zarr.run" / "tensors.n5"


@pytest.mark.long
def test_stored_windows_are_learnt_from_as_those_of_the_volume(volume: np.ndarray, windows: Path) -> None:
    stored = recipe(
        data=[{"path": str(windows), "stored": True, "held_out": "0:24,0:30,14:36"}],
        samples={"shape": (4, 8, 8)},
        degrade={"kind": "bin"},
    )
    sampler = Sampler(stored, (2, 1, 1))
    around = np.pad(volume, 8, mode="reflect").astype(np.float32) / 127.5 - 1
    places = np.lib.stride_tricks.sliding_window_view(around, (8, 8, 8))
    seen = set()
    for number in range(30):
        sample = made(sampler, number)
        found = np.argwhere((np.abs(places - sample.truth[0]) < 1e-5).all(axis=(3, 4, 5)))
        assert len(found) >= 1
        assert min(x for *_, x in found) - 8 + 8 <= 14  # it ends before what is held out
        seen.add(tuple(found[0]))
        np.testing.assert_allclose(sample.inputs[0], sample.truth[0].reshape(4, 2, 8, 8).mean(1), atol=1e-6)
        np.testing.assert_array_equal(sample.truth, made(Sampler(stored, (2, 1, 1)), number).truth)
    assert len(seen) > 10


def test_stored_windows_of_another_shape_are_refused(windows: Path) -> None:
    other = recipe(data=[{"path": str(windows), "stored": True}])
    with pytest.raises(PlanError, match=r"have \(8, 8, 8\) voxels \(z, y, x\), samples.shape .* need \(2, 6, 6\)"):
        Sampler(other, (1, 1, 1))


def test_what_a_blur_sees_is_not_held_out_either(volume: np.ndarray, tmp_path: Path) -> None:
    volume[:12] = 255
    volume[12:] //= 2
    tifffile.imwrite(tmp_path / "v.tif", volume)
    held = recipe(data=[{"path": "v.tif", "held_out": "0:12,:,:"}], degrade={"kind": "gaussian"})
    sampler = Sampler(held, (2, 1, 1), str(tmp_path))
    assert sampler.context[0] > 0
    assert max(made(sampler, number).inputs.max() for number in range(100)) < 0.1
