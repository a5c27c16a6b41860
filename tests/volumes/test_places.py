"""Volumes that are paired voxel by voxel lie at one place, or are refused; what is not known of it is told."""

from __future__ import annotations

import pytest
from plans import volume

from volpipe.errors import PlanError
from volpipe.volumes.places import Paired, check_same_place
from volpipe.volumes.volume import Volume

SIZE = (40.0, 4.0, 4.0)


def at(origin: tuple[float, float, float], size: tuple[float, float, float] | None = SIZE) -> Volume:
    made = volume((10, 20, 30), voxel_size_nm=size)
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
