"""Volumes that are paired voxel by voxel lie at one place, or are refused; what is not known of it is told."""

from __future__ import annotations

import pytest
from plans import volume

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box
from volpipe.volumes.places import Paired, check_same_place, find_part
from volpipe.volumes.volume import Volume

SIZE = (40.0, 4.0, 4.0)


def at(
    origin: tuple[float, float, float], size: tuple[float, float, float] | None = SIZE,
    shape: tuple[int, int, int] = (10, 20, 30),
) -> Volume:  # fmt: skip
    made = volume(shape, voxel_size_nm=size)
    return type(made)(**{**vars(made), "origin_nm": origin})


@pytest.mark.parametrize(
    ("origin", "size", "sentence"),
    [
        ((400.0, 0.0, 0.0), SIZE, r"axis z: A begins at 0 nm, B at 400 nm: .*origin 400 × 0 × 0 .* no place in common"),
        ((0.0, 8.0, 0.0), SIZE, r"axis y: A begins at 0 nm, B at 8 nm: .* y 6 … 78, x -2 … 118 nm in common; do so$"),
        ((0.0, 0.0, -2.1), SIZE, r"axis x: A begins at 0 nm, B at -2\.1 nm"),
        ((0.0, 0.0, 0.0), (40.0, 8.0, 4.0), r"axis y: voxels of A are 4 nm long, of B 8 nm: .*voxels of 40 × 8 × 4 nm"),
    ],
)
def test_volumes_that_lie_elsewhere_are_refused_with_both_places(
    origin: tuple[float, float, float], size: tuple[float, float, float], sentence: str
) -> None:
    with pytest.raises(PlanError, match=sentence):
        check_same_place(Paired("A", at((0.0, 0.0, 0.0))), Paired("B", at(origin, size)), "do so")


@pytest.mark.parametrize(
    ("origin", "size", "notes"),
    [
        ((0.0, 0.0, 0.0), SIZE, []),
        ((0.0, 0.0, 0.0), (40.0, 4.002, 4.0), []),  # rounded to three digits
        ((0.0, 0.0, 2.0), SIZE, ["B lies 0.5 voxels beside A along x; they are paired all the same"]),
        ((900.0, 0.0, 0.0), None, ["B has no voxel size, so that nobody knows whether it lies where A does"]),
    ],
)
def test_volumes_at_one_place_are_paired_with_what_is_not_known(
    origin: tuple[float, float, float], size: tuple[float, float, float] | None, notes: list[str]
) -> None:
    told = check_same_place(Paired("A", at((0.0, 0.0, 0.0))), Paired("B", at(origin, size)), "do so")
    assert [note.replace(f" {volume()}", "")[: len(known)] for note, known in zip(told, notes, strict=True)] == notes


def test_a_coarser_volume_has_the_place_of_its_voxels_means() -> None:
    coarse = at((60.0, 0.0, 0.0), (160.0, 4.0, 4.0))  # the centre of four voxels of 40 nm
    pair = Paired("A", at((0.0, 0.0, 0.0))), Paired("B", coarse)
    assert check_same_place(*pair, "do so", factors=(4, 1, 1)) == []
    with pytest.raises(PlanError, match="axis z: voxels of A are 40 nm long, of B 160 nm and not 2 times as much"):
        check_same_place(*pair, "do so", factors=(2, 1, 1))


@pytest.mark.parametrize("start", [(0, 0, 0), (3, 5, 7), (-2, 4, 25), (9, -4, -5)])
@pytest.mark.parametrize("origin", [(0.0, 0.0, 0.0), (120.0, -8.0, 4000.0)])
def test_a_part_is_found_by_its_first_voxel(origin: tuple[float, float, float], start: tuple[int, int, int]) -> None:
    there = tuple(o + n * s for o, n, s in zip(origin, start, SIZE, strict=True))
    part = at((there[0], there[1], there[2]), shape=(4, 6, 8))
    found = find_part(Paired("A", at(origin)), Paired("B", part), "do so")
    assert found == Box(start, tuple(a + n for a, n in zip(start, (4, 6, 8), strict=True)))


@pytest.mark.parametrize(
    ("origin", "size", "sentence"),
    [
        ((0.0, 6.0, 0.0), SIZE, r"axis y: A begins at 0 nm, B at 6 nm: these are 1\.5 voxels of 4 nm, no whole number "
         r"\(remainder -0\.5\): .*; do so$"),
        ((0.0, 0.0, 0.1), SIZE, r"axis x: .* these are 0\.025 voxels of 4 nm"),
        ((0.0, 0.0, 0.0), (40.0, 4.0, 8.0), r"axis x: voxels of A are 4 nm long, of B 8 nm"),
        ((0.0, 0.0, 0.0), None, r"the metadata of B state no voxel size, by which one is known to be a part"),
    ],
)  # fmt: skip
def test_what_is_no_part_is_refused(
    origin: tuple[float, float, float], size: tuple[float, float, float] | None, sentence: str
) -> None:
    with pytest.raises(PlanError, match=sentence):
        find_part(Paired("A", at((0.0, 0.0, 0.0))), Paired("B", at(origin, size, (4, 6, 8))), "do so")


def test_sizes_that_add_up_to_half_a_voxel_are_those_of_another_volume() -> None:
    """Over 30 voxels a size that is a thousandth longer is 0.03 voxels off; 3,000 voxels away it is 3."""
    whole = Paired("A", at((0.0, 0.0, 0.0), (40.0, 4.0, 4.0), (10, 20, 9000)))
    near = at((0.0, 0.0, 0.0), (40.0, 4.0, 4.003), (4, 6, 30))
    assert find_part(whole, Paired("B", near), "do so") == Box((0, 0, 0), (4, 6, 30))
    far = at((0.0, 0.0, 12000.0), (40.0, 4.0, 4.003), (4, 6, 30))
    with pytest.raises(PlanError, match=r"axis x: voxels of A are 4 nm long, of B 4\.003 nm"):
        find_part(whole, Paired("B", far), "do so")
