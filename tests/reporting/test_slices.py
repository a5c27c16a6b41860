"""Which voxels a report reads: few chunks, around one voxel, whole voxels of the input; and what it does not know."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from volumes import noise, write_volume

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Grid
from volpipe.reporting.slices import (
    PLANES,
    Sight,
    averaged,
    fewer_chunks,
    inside,
    middle_of_done,
    missing_in,
    part_around,
    slice_at,
)
from volpipe.volumes.storage.tensorstore import transferred
from volpipe.volumes.volume import open_volume

sizes = st.integers(1, 60)


@st.composite
def slabs(draw: st.DrawFn) -> tuple[Box, tuple[int, int, int], int, tuple[int, ...]]:
    """A box, chunks, the axis that it is thin along, and a voxel of it."""
    start = [draw(st.integers(0, 30)) for _ in range(3)]
    shape = [draw(sizes) for _ in range(3)]
    axis = draw(st.integers(0, 2))
    shape[axis] = draw(st.integers(1, 4))
    at = tuple(a + draw(st.integers(0, n - 1)) for a, n in zip(start, shape, strict=True))
    z, y, x = (draw(st.integers(1, 20)) for _ in range(3))
    return Box(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True))), (z, y, x), axis, at


def touched(box: Box, chunks: tuple[int, ...]) -> int:
    """Return how many chunks the voxels of a box are in, counted voxel by voxel along each axis."""
    return int(
        np.prod([len({v // c for v in range(a, b)}) for a, b, c in zip(box.start, box.stop, chunks, strict=True)])
    )


@given(slabs(), st.integers(1, 40))
def test_a_slice_loses_chunks_until_they_are_few_and_keeps_its_voxel(
    slab: tuple[Box, tuple[int, int, int], int, tuple[int, ...]], most: int
) -> None:
    box, chunks, axis, at = slab
    part = fewer_chunks(box, chunks, most, axis, at)
    assert box.contains(part)
    assert all(a <= v < b for a, v, b in zip(part.start, at, part.stop, strict=True))
    assert (part.start[axis], part.stop[axis]) == (box.start[axis], box.stop[axis])
    others = [len({v // chunks[i] for v in range(part.start[i], part.stop[i])}) for i in range(3) if i != axis]
    assert touched(part, chunks) <= most or others == [1, 1]
    if touched(box, chunks) <= most:
        assert part == box


@given(st.tuples(sizes, sizes, sizes), st.tuples(sizes, sizes, sizes), st.tuples(*[st.integers(1, 4)] * 3))
def test_only_whole_voxels_of_the_input_are_compared(
    start: tuple[int, int, int], shape: tuple[int, int, int], factor: tuple[int, int, int]
) -> None:
    box = Box(start, tuple(a + n for a, n in zip(start, shape, strict=True)))
    part = inside(box, factor)
    for axis in range(3):
        whole = [
            v for v in range(200)
            if box.start[axis] <= v * factor[axis] and (v + 1) * factor[axis] <= box.stop[axis]
        ]  # fmt: skip
        expected = whole or [box.start[axis] // factor[axis]]
        assert list(range(part.start[axis], part.stop[axis])) == expected


def test_a_part_lies_around_its_voxel_and_inside_the_whole() -> None:
    whole = Box((0, 0, 0), (6, 1000, 1000))
    part = part_around(whole, (3, 20, 500), (33, 368, 368))
    assert part == Box((0, 0, 316), (6, 368, 684))
    assert part_around(whole, (3, 20, 500), (1, 1, 1)) == Box((3, 20, 500), (4, 21, 501))


def test_means_are_those_of_boxes() -> None:
    data = noise((4, 6, 8)).astype(np.float64)
    means = averaged(data, (2, 3, 4))
    for z, y, x in itertools.product(range(2), range(2), range(2)):
        assert means[z, y, x] == pytest.approx(data[2 * z : 2 * z + 2, 3 * y : 3 * y + 3, 4 * x : 4 * x + 4].mean())


@given(st.integers(0, 2**32), st.floats(0.01, 0.9))
def test_the_middle_of_what_is_done_is_done(seed: int, share: float) -> None:
    grid = Grid((37, 25, 50), (8, 8, 8))
    done = np.random.default_rng(seed).random(len(grid)) < share
    at = middle_of_done(grid, done)
    cell = grid.number(tuple(a // 8 for a in at))
    assert done[cell] or not done.any()
    assert all(0 <= a < n for a, n in zip(at, grid.shape, strict=True))


def test_the_middle_of_the_first_slabs_is_in_their_midst() -> None:
    grid = Grid((64, 64, 64), (8, 8, 8))
    done = np.zeros(grid.counts, bool)
    done[:3] = True
    assert middle_of_done(grid, done.ravel()) == (12, 32, 32)
    assert middle_of_done(grid, np.zeros(len(grid), bool)) == (32, 32, 32)


def test_voxels_of_missing_shards_are_not_known(tmp_path: Path) -> None:
    data = noise((20, 24, 28))
    volume = open_volume(write_volume(tmp_path / "v.n5", data, 8), "raw")
    grid = Grid(data.shape, (10, 12, 14))
    patch = Sight(volume, missing_in(grid, {0, 7}.__contains__)).read(Box((0, 0, 0), data.shape))
    expected = np.ones(data.shape, bool)
    expected[:10, :12, :14] = expected[10:, 12:, 14:] = False
    np.testing.assert_array_equal(patch.is_known, expected)
    np.testing.assert_array_equal(patch.data[0], data)
    np.testing.assert_array_equal(np.sort(patch.values()), np.sort(data[expected]))


def test_a_damaged_chunk_is_a_hole_with_its_reason(tmp_path: Path) -> None:
    data = noise((16, 16, 16))
    volume = open_volume(write_volume(tmp_path / "v.n5", data, 8), "raw")
    (tmp_path / "v.n5/raw/1/0/1").write_bytes(b"damaged")  # N5 names chunks x, y, z
    patch = Sight(volume).read(Box((0, 0, 0), data.shape))
    hole = np.zeros(data.shape, bool)
    hole[8:, :8, 8:] = True
    np.testing.assert_array_equal(patch.is_known, ~hole)
    np.testing.assert_array_equal(patch.data[0][~hole], data[~hole])
    assert "1/0/1" in patch.problem


def test_a_volume_that_is_gone_is_not_known_and_not_asked_again(tmp_path: Path) -> None:
    volume = open_volume(write_volume(tmp_path / "v.n5", noise((16, 16, 16)), 8), "raw")
    (tmp_path / "v.n5").rename(tmp_path / "other.n5")
    sight = Sight(volume)
    assert not sight.read(Box((0, 0, 0), (1, 16, 16))).is_known.any()
    (tmp_path / "other.n5").rename(tmp_path / "v.n5")
    patch = sight.read(Box((0, 0, 0), (1, 16, 16)))
    assert not patch.is_known.any() and "v.n5" in patch.problem


def test_slices_of_a_large_volume_read_few_bytes(tmp_path: Path) -> None:
    data = noise((96, 256, 256))  # that nothing compresses
    volume = open_volume(write_volume(tmp_path / "v.n5", data, 32), "raw")
    sight, at = Sight(volume, most_bytes=2**20), (48, 128, 128)
    before, boxes = transferred().read, {}
    for name, axis in PLANES.items():
        boxes[name] = sight.affordable(slice_at(Box((0, 0, 0), data.shape), axis, at), axis, at)
        np.testing.assert_array_equal(sight.read(boxes[name]).data[0], data[boxes[name].slices])
    assert 0 < transferred().read - before <= 2**20
    assert {name: box.num_voxels for name, box in boxes.items()} == {"xy": 96 * 96, "xz": 96 * 96, "yz": 96 * 96}


def test_one_huge_chunk_is_read_once_for_three_slices(tmp_path: Path) -> None:
    data = noise((64, 64, 64))
    volume = open_volume(write_volume(tmp_path / "v.n5", data, 32), "raw")
    sight, before = Sight(volume, most_bytes=2**16), transferred().read
    field = sight.within_reach(Box((0, 0, 0), data.shape), (40, 40, 20))
    assert field == Box((32, 32, 0), (64, 64, 32))
    sight.hold(field)
    for axis in range(3):
        box = slice_at(field, axis, (40, 40, 20))
        np.testing.assert_array_equal(sight.read(box).data[0], data[box.slices])
    assert transferred().read - before <= 2**16
    with pytest.raises(VolumeError, match=r"has chunks of 32\.0 KiB, of which a report reads none: .* up to 16\.0 KiB"):
        Sight(volume, most_bytes=2**14).within_reach(field, (40, 40, 20))
