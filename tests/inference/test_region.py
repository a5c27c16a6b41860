"""Regions of interest as people write them, and masks as they lie over a volume."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plans import spans, volume

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box
from volpipe.inference.roi import find_roi, lay_mask


@given(st.tuples(*[st.integers(1, 50)] * 3), st.data())
def test_a_roi_of_voxels_is_the_box_that_it_says(shape: tuple[int, int, int], data: st.DataObject) -> None:
    sides = [data.draw(spans(n)) for n in shape]
    text = []
    for (a, b), n in zip(sides, shape, strict=True):
        start = "" if a == 0 and data.draw(st.booleans()) else str(a)
        stop = "" if b == n and data.draw(st.booleans()) else str(b)
        text.append(data.draw(st.sampled_from(["{}:{}", " {} : {} "])).format(start, stop))
    assert find_roi(",".join(text), volume(shape)) == Box(*zip(*sides, strict=True))


def test_without_a_text_all_is_wanted() -> None:
    assert find_roi(None, volume((3, 4, 5))) == find_roi(":,:,:", volume((3, 4, 5))) == Box((0, 0, 0), (3, 4, 5))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("100nm:900nm,:,:", (13, 113)),  # centres 104 … 896
        ("104nm:896nm,:,:", (13, 112)),
        ("0.1um:0.9µm,:,:", (13, 113)),
        ("0.1 micron : 9000 angstrom,:,:", (13, 113)),
        ("0nm:1.6um,:,:", (0, 200)),
        ("25%: 99.9 %,:,:", (50, 200)),
        ("20:160nm,:,:", (20, 20 + 0)),
    ],
)
def test_a_length_takes_the_voxels_whose_centres_it_holds_and_a_share_is_of_the_axis(
    text: str, expected: tuple[int, int]
) -> None:
    of = volume((200, 9, 9), voxel_size_nm=(8.0, 1.0, 1.0))
    if expected[0] == expected[1]:
        with pytest.raises(PlanError, match="axis z: 20:160nm holds no voxel; end it at 21 or more"):
            find_roi(text, of)
        return
    found = find_roi(text, of)
    assert (found.start[0], found.stop[0]) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1:2", r"roi '1:2': write z0:z1,y0:y1,x0:x1, such as 0:64,100:300,: \(a bare : is a whole axis\)"),
        ("1:2,3,:", "roi '1:2,3,:': write z0:z1"),
        ("30:10,:,:", "roi, axis z: 30:10 ends before it begins; turn it round"),
        (":,7:7,:", "roi, axis y: 7:7 holds no voxel; end it at 8 or more"),
        (":,:,5:61", "roi, axis x: 5:61 leaves the volume of 60 voxels; use 5:60, say"),
        (":,:,60:", "roi, axis x: 60:60 leaves the volume of 60 voxels; use 0:60, say"),
        (":,-3:9,:", "roi, axis y: '-3' is neither a number of voxels nor a length; write 120, or 960nm, or 75%"),
        (":,1.5:9,:", "roi, axis y: '1.5' is neither a number of voxels nor a length"),
        ("2furlong:,:,:", "roi, axis z: '2furlong' is neither a number of voxels nor a length"),
        ("2 3:,:,:", "roi, axis z: '2 3' is neither"),
        ("-80nm:,:,:", "roi, axis z: -80nm lies before the volume, whose first voxel is at 0 nm; leave the bound open"),
        (":,:,:9um", "roi, axis x: 0:2250 leaves the volume of 60 voxels; use 0:60, say"),
    ],
)
def test_a_roi_that_cannot_be_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=f"^{sentence}"):
        find_roi(text, volume((40, 50, 60), voxel_size_nm=(8.0, 4.0, 4.0)))


def test_a_length_needs_a_voxel_size() -> None:
    with pytest.raises(PlanError, match=r"^roi, axis y: 80nm needs a voxel size, which /data/in\.n5:raw lacks"):
        find_roi(":,80nm:,:", volume())


@given(st.integers(1, 60), st.integers(1, 60), st.data())
def test_a_mask_without_voxel_size_is_stretched_over_the_volume(size: int, shape: int, data: st.DataObject) -> None:
    laid = lay_mask(volume((shape, 1, 1)), volume((size, 7, 7)))
    start, stop = data.draw(spans(size))
    step = Fraction(size, shape)
    over = [j for j in range(shape) if j * step < stop and (j + 1) * step > start]
    assert laid.under(0, start, stop) == (over[0], over[-1] + 1)
    assert laid.under(1, 0, 7) == (0, 1)


@pytest.mark.parametrize("origin", ["mean", "none"])
@pytest.mark.parametrize("end", [math.ceil, math.floor])
@pytest.mark.parametrize("factor", [1, 2, 16])
def test_a_coarser_level_is_a_mask_whatever_it_calls_its_origin_and_however_it_ends(
    origin: str, end: object, factor: int
) -> None:
    size = 100
    count = -(-size // factor) if end is math.ceil else size // factor
    of = volume((size,) * 3, voxel_size_nm=(4.0, 4.0, 4.0))
    mask = volume((count,) * 3, voxel_size_nm=(4.0 * factor,) * 3)
    shift = (factor - 1) / 2 * 4.0 if origin == "mean" else 0.0
    mask = type(mask)(**{**vars(mask), "origin_nm": (shift,) * 3})
    laid = lay_mask(mask, of)
    assert laid.start == ((0.0 if origin == "mean" else -(factor - 1) / 2),) * 3
    assert laid.under(0, size - 1, size) == (count - 1, count)  # past its end its last voxel counts
    if origin == "mean":
        assert laid.under(0, factor, 2 * factor) == (1, 2)


@pytest.mark.parametrize(
    ("shape", "size", "origin", "channels", "sentence"),
    [
        ((40, 40, 40), 4.0, 0.0, 2, "mask .* has 2 channels; a mask has one: save it on its own"),
        (
            (8, 8, 8),
            4.0,
            160.0,
            1,
            "mask .*, axis z: 8 voxels of 1 of the volume's cover 40 to 48, .* no place in common",
        ),
        (
            (10, 10, 20),
            16.0,
            0.0,
            1,
            "mask .*, axis x: 20 voxels of 4 of the volume's cover -1.5 to 78.5, the volume is",
        ),
        ((8, 8, 8), 4.0, -16.0, 1, "mask .*, axis z: 8 voxels of 1 of the volume's cover -4 to 4, .* x -2 … 14 nm in"),
    ],
)
def test_a_mask_that_lies_elsewhere_is_refused(
    shape: tuple[int, int, int], size: float, origin: float, channels: int, sentence: str
) -> None:
    of = volume(voxel_size_nm=(4.0, 4.0, 4.0))
    mask = volume(shape, voxel_size_nm=(size,) * 3, num_channels=channels)
    with pytest.raises(PlanError, match=sentence):
        lay_mask(type(mask)(**{**vars(mask), "origin_nm": (origin,) * 3}), of)


@given(st.integers(1, 30), st.integers(0, 39), st.sampled_from([0.5, 1.0, 2.0, 5.0]), st.data())
def test_outside_of_a_mask_of_a_part_nothing_is_selected(
    length: int, first: int, step: float, data: st.DataObject
) -> None:
    assume(first + length * step <= 40)
    of = volume((40, 40, 40), voxel_size_nm=(4.0, 4.0, 4.0))
    mask = volume((length, 40, 40), voxel_size_nm=(4.0 * step, 4.0, 4.0))
    low = (first + (step - 1) / 2) * 4.0  # its first voxel begins at voxel `first` of the volume
    laid = lay_mask(type(mask)(**{**vars(mask), "origin_nm": (low, 0.0, 0.0)}), of)
    start, stop = data.draw(spans(40))
    below, after = laid.under(0, start, stop)
    over = [j for j in range(length) if first + j * step < stop and first + (j + 1) * step > start]
    is_rounded = first <= abs(step - 1) / 2 + 0.01 or first + length * step >= 40 - abs(
        step - 1
    )  # an end of the volume
    if over and not is_rounded:
        assert (below, after) == (over[0], over[-1] + 1)
    else:
        assert is_rounded or below == after
