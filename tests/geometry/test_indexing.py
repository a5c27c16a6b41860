"""An index is numpy's: what is read, chunk by chunk and file by file, is what numpy takes of the whole array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volpipe.geometry.indexing import ChunkedIndex, bounds, pieces, plain_index, ranges

entries = st.integers(-7, 6) | st.slices(7) | st.just(Ellipsis)


@settings(max_examples=300)
@given(st.lists(entries, max_size=4).map(tuple))
def test_a_plain_index_takes_what_numpy_takes(index: tuple[object, ...]) -> None:
    array = np.arange(7**3).reshape(7, 7, 7)
    steps = [entry.step or 1 for entry in index if isinstance(entry, slice)]
    try:
        expected = array[index]
    except IndexError:
        with pytest.raises(IndexError):
            plain_index(index, array.shape)
        return
    if min(steps, default=1) < 1:
        with pytest.raises(IndexError, match="is not supported; reverse what was read"):
            plain_index(index, array.shape)
        return
    plain = plain_index(index, array.shape)
    assert len(plain) == 3 and all(isinstance(entry, int) or entry.start >= 0 for entry in plain)
    np.testing.assert_array_equal(array[plain], expected)
    along = [list(each) for each in ranges(plain, array.shape)]
    np.testing.assert_array_equal(array[along[0]][:, along[1]][:, :, along[2]].ravel(), expected.ravel())
    if expected.size:
        box = bounds(plain, array.shape)
        touched = np.argwhere(np.isin(array, expected))
        assert (box.start, box.stop) == (tuple(touched.min(0)), tuple(touched.max(0) + 1))


def test_what_is_no_index_is_refused() -> None:
    for index, words in (
        (True, "True is not supported"), (1.5, "1.5 is not supported"), (7, "index 7 is outside an axis of 7"),
        (-8, "index -8 is outside an axis of 7"), ((0, 0, 0, 0), "too many axes"), ((..., ...), "too many axes"),
        ((0, 0, 0, ..., 0), "too many axes"), (slice(None, None, -1), "step -1 is not supported"),
    ):  # fmt: skip
        with pytest.raises(IndexError, match=words):
            plain_index(index, (7, 7, 7))
    assert plain_index((), (2, 3)) == (slice(0, 2, 1), slice(0, 3, 1))
    assert plain_index((-7, ..., 6), (7, 7, 7)) == (0, slice(0, 7, 1), 6)
    assert plain_index((0, 1, 2, ...), (7, 7, 7)) == (0, 1, 2)
    assert plain_index(slice(5, 2), (7,)) == (slice(5, 5, 1),)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 9), st.integers(1, 9))
def test_pieces_share_out_all_positions_by_their_chunks(start: int, length: int, step: int, chunk: int) -> None:
    along = range(start, start + length, step)
    found = pieces(along, chunk)
    assert list(found) == sorted({i // chunk for i in along})
    taken = []
    for number, (place, on_axis) in found.items():
        own = list(range(60))[on_axis]
        assert own == [i for i in along if i // chunk == number] == list(along)[place]
        taken += own
    assert taken == list(along)


@given(st.data())
def test_a_region_names_each_chunk_once_in_its_file(data: st.DataObject) -> None:
    shape = (11, 13)
    chunks = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    units = tuple(chunk * data.draw(st.integers(1, 3)) for chunk in chunks)
    index = plain_index(tuple(data.draw(st.slices(n).filter(lambda s: (s.step or 1) > 0)) for n in shape), shape)
    array = np.arange(11 * 13).reshape(shape)
    region, result = ChunkedIndex.of(index, shape, chunks, units), np.full(array[index].shape, -1)
    seen = []
    for unit in region.units():
        for chunk in region.chunks_in(unit):
            assert tuple(i * c // u for i, c, u in zip(chunk, chunks, units, strict=True)) == unit
            place, on_array = region.places(chunk)
            assert (result[place] == -1).all()
            result[place] = array[on_array]
            corner = [i * c for i, c in zip(chunk, chunks, strict=True)]
            rows, columns = (range(s.start, s.stop) for s in on_array)
            assert all(a <= r < a + c for rs, a, c in zip((rows, columns), corner, chunks, strict=True) for r in rs)
            seen.append(chunk)
    assert len(seen) == len(set(seen))
    np.testing.assert_array_equal(result, array[index])
