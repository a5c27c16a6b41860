"""Needs of stages add up field by field; what one stage does not know the sum does not either."""

from __future__ import annotations

from dataclasses import asdict

from volpipe.stages.needs import NOTHING, ResourceNeeds

A = ResourceNeeds(1.0, 2.0, 4.0, 8, 16, 32.0, 64, 128, is_measured=True)
B = ResourceNeeds(100.0, 200.0, 400.0, 800, 1600, 3200.0, 6400, 12800, is_measured=False)


def test_needs_add_up() -> None:
    both = A + B
    assert both.is_measured is False and (A + A).is_measured is True
    numbers = {name: value for name, value in asdict(both).items() if name != "is_measured"}
    assert list(numbers.values()) == [101.0, 202.0, 404.0, 808, 1616, 3232.0, 6464, 12928]
    assert A + NOTHING == NOTHING + A == A


def test_a_disk_holds_output_and_scratch_at_their_highest() -> None:
    assert (A.most_bytes, A.most_inodes) == (36.0, 8 + 16 + 64 + 128)
    assert (NOTHING.most_bytes, NOTHING.most_inodes) == (0.0, 0)
