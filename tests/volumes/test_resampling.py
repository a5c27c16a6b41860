"""Volumes on another grid: the values are those of skimage over the whole, whatever boxes they are read in."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from skimage.transform import resize
from volumes import noise, write_volume

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, triple
from volpipe.volumes.file_states import read_known
from volpipe.volumes.on_grid import resampled
from volpipe.volumes.resampling import Order, Resampling
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.storage.tensorstore import downsample
from volpipe.volumes.volume import Volume, open_volume

SHAPE = (34, 40, 47)


def stored(
    folder: Path, shape: tuple[int, ...], orders: tuple[Order, Order, Order] = (3, 3, 3), *, smooths: bool = False
) -> Volume:
    grid = Resampling(triple(shape), triple(SHAPE), "uint8", orders)
    return resampled(open_volume(folder / "in.n5"), grid.smoothed() if smooths else grid)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_volume(tmp_path_factory.mktemp("resampled") / "in.n5", noise(SHAPE)).parent


@pytest.mark.parametrize("shape", [(17, 40, 31), (50, 61, 47), (12, 90, 20), (34, 40, 47), (1, 7, 200)])
@pytest.mark.parametrize("order", [1, 3])
@pytest.mark.parametrize("smooths", [False, True])
def test_values_are_those_of_skimage_over_the_whole(
    folder: Path, shape: tuple[int, ...], order: Order, smooths: bool
) -> None:
    voxels = stored(folder, shape, (order, order, order), smooths=smooths).crop(Box.from_shape(shape))[0]
    whole = noise(SHAPE).astype(np.float64)
    expected = resize(whole, shape, order, mode="edge", anti_aliasing=smooths, preserve_range=True)
    np.testing.assert_allclose(voxels, expected, rtol=0, atol=2e-5)


@settings(max_examples=30)
@given(
    st.data(),
    st.sampled_from([(17, 40, 31), (50, 61, 47)]),
    st.sampled_from([(3, 3, 3), (0, 3, 3), (0, 1, 0)]),
    st.booleans(),
)
def test_a_box_is_the_crop_of_the_whole(
    folder: Path, data: st.DataObject, shape: tuple[int, ...], orders: tuple[Order, Order, Order], smooths: bool
) -> None:
    volume = stored(folder, shape, orders, smooths=smooths and 0 not in orders)
    ends = [sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    whole = volume.crop(Box.from_shape(shape))
    assert np.array_equal(volume.crop(box), whole[:, *box.slices])
    assert np.array_equal(read_known(volume.open(), box.shift((-3, 0, 0)))[0][:, 3:], whole[:, *box.slices][:, :-3])


LENGTHS = st.integers(1, 40)


@given(LENGTHS, LENGTHS, st.sampled_from([0, 1, 3]), st.booleans(), st.data())
def test_all_voxels_that_see_a_box_lie_in_the_box_around_them(
    own: int, other: int, order: Order, smooths: bool, data: st.DataObject
) -> None:
    plain = Resampling((own, 1, 1), (other, 1, 1), "float32", (order, order, order))
    grid = plain.smoothed() if smooths and order else plain
    start = data.draw(st.integers(0, other - 1))
    box = Box((start, 0, 0), (data.draw(st.integers(start + 1, other)), 1, 1))
    voxels = {i for i in range(own) if not (grid.seen(Box((i, 0, 0), (i + 1, 1, 1))) & box).is_empty}
    around = grid.sees(box)
    assert voxels <= {*range(around.start[0], around.stop[0])}
    assert around.shape[0] <= len(voxels) + 8 * max(1, math.ceil(own / other))


@given(LENGTHS, LENGTHS, st.data())
def test_nearest_voxels_keep_every_bit(own: int, other: int, data: st.DataObject) -> None:
    grid, stored = Resampling((1, own, 1), (1, other, 1), "uint64", (0, 0, 0)), np.arange(other) + (1 << 62)
    start = data.draw(st.integers(0, own - 1))
    box = Box((0, start, 0), (1, data.draw(st.integers(start + 1, own)), 1))
    seen = grid.seen(box)
    picked = grid.pick(stored[None, None, seen.start[1] : seen.stop[1], None], box)[0, 0, :, 0]
    places = [math.floor(((i + 0.5) * other / own - 0.5) + 0.5) for i in range(box.start[1], box.stop[1])]
    assert np.array_equal(picked, stored[np.clip(places, 0, other - 1)])


@pytest.mark.parametrize("shape", [(17, 40, 31), (50, 61, 47)])
def test_statistics_take_each_stored_voxel_once(folder: Path, shape: tuple[int, ...]) -> None:
    parts = [stored(folder, shape).open().read_own(part) for part in Box.from_shape(shape).cut(0, 5, 0)]
    assert np.array_equal(np.concatenate(parts, 1)[0], noise(SHAPE))


def test_a_grid_is_of_one_shape_and_reads_boxes_alone(folder: Path) -> None:
    with pytest.raises(VolumeError, match=r"is uint8 \(34, 40, 47\) .*, and was uint8 \(34, 40, 48\) when its grid"):
        resampled(open_volume(folder / "in.n5"), Resampling((17, 20, 24), (34, 40, 48), "uint8"))
    with pytest.raises(VolumeError, match="read on another grid than it is stored"):
        stored(folder, (17, 40, 31))[0]


# ---- coarser levels


STEPS = [(1, *step) for step in product((1, 2), repeat=3) if step != (1, 1, 1)]


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return voxels of all values, with whole blocks of the largest and halves of every kind among them."""
    rng, top = np.random.default_rng(0), np.iinfo(dtype).max
    data = rng.integers(0, top, shape, dtype, endpoint=True)
    data[:, :4] = top
    data[:, 4:8] = rng.integers(0, 4, data[:, 4:8].shape, dtype)
    return data


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_means_of_pairs_are_those_of_tensorstore(dtype: str, step: tuple[int, ...]) -> None:
    data = values(dtype, (2, 16, 10, 14))
    expected = ts.downsample(ts.array(data), list(step), "mean").read().result()
    with patch.object(ts, "downsample", side_effect=AssertionError("this is done without it")):
        result = downsample(data, step, "mean")
    assert result.dtype == data.dtype
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_means_of_part_of_an_array_are_its_own(dtype: str) -> None:
    """Its voxels do not lie one after the other."""
    part = values(dtype, (3, 24, 20, 20))[1:, 2:18, 1:9, 3:17]
    np.testing.assert_array_equal(downsample(part, (1, 2, 2, 2), "mean"), downsample(part.copy(), (1, 2, 2, 2), "mean"))


@pytest.mark.parametrize(
    ("shape", "step", "dtype", "method"),
    [
        ((1, 15, 10, 14), (1, 2, 2, 2), "uint8", "mean"),  # the last plane has no other
        ((1, 16, 10, 13), (1, 2, 2, 2), "uint16", "mean"),
        ((1, 16, 12, 12), (1, 4, 2, 2), "uint8", "mean"),
        ((16, 10, 14), (1, 2, 2), "uint8", "mean"),
        ((1, 16, 10, 14), (1, 2, 2, 2), "int16", "mean"),
        ((1, 16, 10, 14), (1, 2, 2, 2), "uint64", "mean"),
        ((1, 16, 10, 14), (1, 2, 2, 2), "uint8", "mode"),
    ],
)
def test_all_else_is_left_to_tensorstore(
    shape: tuple[int, ...], step: tuple[int, ...], dtype: str, method: str
) -> None:
    data = np.random.default_rng(1).integers(0, 100, shape).astype(dtype)
    expected = ts.downsample(ts.array(data), list(step), "mode" if method == "mode" else "mean").read().result()
    np.testing.assert_array_equal(downsample(data, step, method), expected)


def test_what_is_encoded_does_not_wait_behind_what_is_read() -> None:
    """On an H100 it did for a quarter of a second for each slab, as long as the GPU computed one (2026-11-27)."""
    assert tensorstore.context(encodes=True) is tensorstore.context(encodes=True)
    assert tensorstore.context(encodes=True) is not tensorstore.context()
