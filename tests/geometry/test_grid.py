"""Laws of the geometry, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volpipe.geometry.grid import Box, Grid, Index, Lattice, align_up, mirror, mirrored_runs, ravel, unravel

sizes = st.integers(1, 13)
triples = st.tuples(sizes, sizes, sizes)


@st.composite
def lattices(draw: st.DrawFn) -> Lattice:
    shape = draw(triples)
    window = draw(triples)
    overlap = tuple(draw(st.integers(0, w - 1)) for w in window)
    block = draw(st.tuples(*[st.integers(1, 3)] * 3))
    shift = draw(st.tuples(*[st.integers(0, 2)] * 3))
    if draw(st.booleans()):
        return Lattice(shape, window, overlap, block, shift)
    corner = tuple(draw(st.integers(0, n - 1)) for n in shape)
    plain = Lattice(shape, window, overlap, block, corner=corner)
    later = [draw(st.integers(-(p // s), 2)) for p, s in zip(plain.phase, plain.stride, strict=True)]
    starts = [b * -(-c // (b * s)) + t for b, c, s, t in zip(block, corner, plain.stride, later, strict=True)]
    ends = zip(starts, corner, plain.counts, strict=True)
    first = tuple(draw(st.integers(0, min(start, count))) if c else 0 for start, c, count in ends)
    return Lattice(shape, window, overlap, block, tuple(later), corner, first)


@given(triples, triples)
def test_cells_of_a_grid_cover_every_voxel_once(shape: tuple[int, ...], cell: tuple[int, ...]) -> None:
    grid = Grid(shape, cell)
    seen = np.zeros(shape, int)
    for number in range(len(grid)):
        seen[grid.box(number).slices] += 1
    assert (seen == 1).all()


@given(triples, triples, triples, triples)
def test_touching_finds_just_the_cells_that_share_a_voxel(
    shape: tuple[int, ...], cell: tuple[int, ...], start: tuple[int, ...], extent: tuple[int, ...]
) -> None:
    grid = Grid(shape, cell)
    box = Box(tuple(a - 3 for a in start), tuple(a - 3 + n for a, n in zip(start, extent, strict=True)))
    expected = [i for i in range(len(grid)) if not (grid.box(i) & box).is_empty]
    assert list(grid.touching(box)) == expected
    whole = Grid(tuple(n * c for n, c in zip(grid.counts, cell, strict=True)), cell)  # no cell is clipped
    inner = box & Box.from_shape(shape)
    num_voxels = sum(whole.box(i).num_voxels for i in whole.touching(inner))
    assert inner.is_empty or grid.num_voxels_touching(inner) == num_voxels


@given(lattices())
def test_window_cores_tile_the_volume_once(lattice: Lattice) -> None:
    seen = np.zeros(lattice.shape, int)
    for position in range(lattice.num_windows):
        index = lattice.window_index(lattice.dense(position))
        core = Box(
            tuple(i * s for i, s in zip(index, lattice.stride, strict=True)),
            tuple((i + 1) * s for i, s in zip(index, lattice.stride, strict=True)),
        )
        seen[(core & Box.from_shape(lattice.shape)).slices] += 1
    assert (seen == 1).all()


@given(lattices())
def test_every_window_belongs_to_exactly_one_block(lattice: Lattice) -> None:
    numbers = [n for block in range(len(lattice.blocks)) for n in lattice.windows_of(block)]
    assert numbers == [lattice.dense(position) for position in range(lattice.num_windows)]
    assert len({lattice.window_index(n) for n in numbers}) == lattice.num_windows


@given(lattices())
def test_cores_of_blocks_tile_the_volume_and_one_begins_at_the_corner(lattice: Lattice) -> None:
    seen = np.zeros(lattice.shape, int)
    for block in range(len(lattice.blocks)):
        seen[lattice.core_box(block).slices] += 1
    assert (seen == 1).all()
    assert lattice.corner in [lattice.core_box(block).start for block in range(len(lattice.blocks))]


@given(lattices())
def test_positions_of_a_block_are_those_of_its_windows(lattice: Lattice) -> None:
    for block in range(len(lattice.blocks)):
        assert [lattice.dense(p) for p in lattice.positions_of(block)] == lattice.windows_of(block)


@given(lattices())
def test_a_block_reads_the_union_of_its_windows(lattice: Lattice) -> None:
    for block in filter(lattice.windows_of, range(len(lattice.blocks))):
        boxes = [lattice.window_box(n) for n in lattice.windows_of(block)]
        assert lattice.input_box(block) == Box(
            tuple(min(b.start[a] for b in boxes) for a in range(3)),
            tuple(max(b.stop[a] for b in boxes) for a in range(3)),
        )


@given(lattices())
def test_a_window_that_does_not_exist_is_refused(lattice: Lattice) -> None:
    existing = {lattice.dense(position) for position in range(lattice.num_windows)}
    for number in set(range(lattice.max_number)) - existing:
        with pytest.raises(IndexError):
            lattice.window_index(number)
    with pytest.raises(IndexError):
        lattice.window_index(lattice.max_number)
    with pytest.raises(IndexError):
        lattice.dense(lattice.num_windows)


@given(st.integers(1, 9), st.integers(0, 30), st.integers(0, 30))
def test_mirror_is_numpy_reflect(size: int, before: int, after: int) -> None:
    expected = np.pad(np.arange(size), (before, after), mode="reflect" if size > 1 else "edge")
    assert mirror(-before, size + after, size).tolist() == expected.tolist()


@given(st.integers(1, 9), st.integers(-30, 30), st.integers(1, 30))
def test_runs_show_what_the_mirror_does(size: int, start: int, length: int) -> None:
    places = mirror(start, start + length, size)
    seen, shown = np.arange(places.min(), places.max() + 1), np.full(length, -1)
    for positions, voxels in mirrored_runs(start, start + length, size):
        assert (shown[positions] == -1).all()
        shown[positions] = seen[voxels]
    assert shown.tolist() == places.tolist()


@given(st.tuples(*[st.integers(1, 5)] * 4), st.data())
def test_unravel_undoes_ravel(counts: tuple[int, ...], data: st.DataObject) -> None:
    index = tuple(data.draw(st.integers(0, n - 1)) for n in counts)
    number = ravel(index, counts)
    assert number == np.ravel_multi_index(index, counts)
    assert unravel(number, counts) == index


def test_boxes_intersect_shift_and_scale() -> None:
    a, b = Box((0, 0, 0), (4, 5, 6)), Box((2, -1, 3), (9, 2, 5))
    assert a & b == Box((2, 0, 3), (4, 2, 5))
    assert (a & Box((4, 0, 0), (5, 1, 1))).is_empty
    assert a.shift((1, 2, 3)) == Box((1, 2, 3), (5, 7, 9))
    assert b.scaled((1, 2, 4)) == Box((2, -2, 12), (9, 4, 20))
    assert a.contains(a & b) and not a.contains(b)
    assert str(a) == "0:4,0:5,0:6" and a.num_voxels == 120


@pytest.mark.parametrize(("value", "step", "expected"), [(0, 4, 0), (1, 4, 4), (4, 4, 4), (57, 4, 60)])
def test_align_up(value: int, step: int, expected: int) -> None:
    assert align_up(value, step) == expected


def test_a_lattice_that_cannot_be_is_refused_by_axis() -> None:
    with pytest.raises(ValueError, match="axis y"):
        Lattice((8, 8, 8), (4, 4, 4), (0, 4, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("shift", "corner", "first"),
    [((0, -1, 0), (0, 0, 0), (0, 0, 0)), ((0, 0, 0), (0, 8, 0), (0, 0, 0)), ((0, 0, 0), (0, 4, 0), (0, 2, 0))],
    ids=["a block begins before its core", "the corner is outside", "the first window is later than the block"],
)
def test_blocks_that_cannot_lie_so_are_refused_by_axis(shift: Index, corner: Index, first: Index) -> None:
    with pytest.raises(ValueError, match=r"axis y: shift -?\d, corner \d, first \d make no lattice of 8 voxels"):
        Lattice((8, 8, 8), (4, 4, 4), (0, 0, 0), (1, 1, 1), shift, corner, first)
