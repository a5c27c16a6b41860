"""The time left: what is said of it while a run goes on, by sequences that were recorded and by ones that are made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from volpipe.blockwise.notes import TaskNote
from volpipe.blockwise.pace import LARGEST_CREDIT, LEAST_SECONDS, Pace, Reading, credit

# Of ts1_raw.tif (250³, 8 blocks of 8 windows), seconds at which blocks ended, on a busy machine with two workers.
ENDED = (62.0, 68.0, 83.0, 101.0, 128.0, 141.0, 176.0, 190.0)
TOLD_THEN = (379, 189, 217, 245, 90)  # seconds left that were shown then: it rose, and tripled


def shown(readings: Iterator[tuple[float, Reading]]) -> list[tuple[float, float]]:
    """Return when a time left was told, and which."""
    pace, told = Pace(), []
    for now, reading in readings:
        left = pace.seconds_left(now, 0.0, {"infer": reading})
        if left is not None:
            told.append((now, left))
    return told


def by_windows() -> Iterator[tuple[float, Reading]]:
    """Yield twice a second how far the recorded run was, with windows of blocks under way."""
    for tick in range(1, 380):
        now, done = tick / 2, 0.0
        for worker in range(2):
            start = 4.0  # a net is loaded
            for stop in ENDED[worker::2]:
                done += min(1.0, max(0.0, int(8 * (now - start) / (stop - start)) / 8))
                start = stop
        yield now, Reading(done, 8 - done, 2 * now, decides=True)


def test_the_time_left_of_a_recorded_run_comes_early_and_neither_triples_nor_jumps() -> None:
    told = shown(by_windows())
    assert told[0][0] < 45  # the first block was done after 62 s
    for now, left in told:
        assert (now + left) / ENDED[-1] == pytest.approx(1, abs=0.45)
    for (_, before), (_, after) in itertools.pairwise(told):
        assert after < before + 2.5  # of half a second
    low, high = min(now + left for now, left in told), max(now + left for now, left in told)
    assert high < 2 * low
    assert max(TOLD_THEN) > 2 * min(TOLD_THEN)


def test_a_run_as_fast_as_clockwork_is_foretold_to_the_second() -> None:
    told = shown((tick / 2, Reading(tick / 20, 10 - tick / 20, tick, decides=True)) for tick in range(1, 200))
    assert told[0][0] >= LEAST_SECONDS
    for now, left in told:
        assert now + left == pytest.approx(100, rel=0.01)


def test_nothing_is_told_while_the_stage_that_takes_longest_has_not_begun() -> None:
    unplanned, planned = Pace(), Pace(planned={"infer": 4.0})
    for tick in range(1, 61):  # a tenth of a unit a second
        done = tick / 10
        readings = {"factor": Reading(done, 10 - done, 2 * done), "infer": Reading(0, 10, 0.0, decides=True)}
        assert unplanned.seconds_left(float(tick), 0.0, readings) is None
        left = planned.seconds_left(float(tick), 0.0, readings)
    assert left == pytest.approx((4 * 2 + 10 * 4) / 0.2, rel=0.02)


@pytest.mark.parametrize(
    ("done", "seconds", "pace", "expected"),
    [
        (1.5, 6.0, 10.0, (1.5, 6.0)),  # it says so itself
        (9.0, 6.0, 10.0, (4.0, 6.0)),
        (0.0, 20.0, 10.0, (2.0, 20.0)),  # by its time
        (0.0, 90.0, 10.0, (4 * LARGEST_CREDIT, 40 * LARGEST_CREDIT)),  # it is late
        (0.0, 90.0, 0.0, (0.0, 0.0)),  # nothing is known of a unit
    ],
)
def test_a_task_under_way_counts_as_it_says_or_by_its_time(
    done: float, seconds: float, pace: float, expected: tuple[float, float]
) -> None:
    assert credit(TaskNote("infer", 3, 4, 3, "", done, seconds), pace) == pytest.approx(expected)
