"""The time left: what is said of it while a run goes on, by sequences that were recorded and by ones that are made."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from volpipe.blockwise.heartbeat import Beat
from volpipe.blockwise.pace import LEAST_SECONDS, Flights, Pace, Reading

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


def test_tasks_under_way_count_by_their_time_where_nobody_says_how_far_they_are() -> None:
    flights = Flights({"gpu": 2})
    for unit in range(4):
        flights.add("gpu", "infer", unit, 1, now=100.0)
    assert flights.parts(104.0, 0.0, {}, {}) == {"infer": (0.0, 0.0)}  # nothing is known of a unit
    flights.remove("gpu", "infer", 0, now=110.0)
    done, seconds = flights.parts(112.0, 100.0, {"infer": 10.0}, {})["infer"]
    assert done == pytest.approx(0.95 + 0.2)  # that of the other worker is late; one that waited has begun; one waits
    assert seconds == pytest.approx(10 * done)


def test_a_beat_says_how_far_a_task_is_and_an_earlier_attempts_does_not_count() -> None:
    flights = Flights({"gpu": 1})
    flights.add("gpu", "infer", 3, 4, now=100.0)
    assert flights.parts(110.0, 100.0, {"infer": 9.0}, {3: Beat(1.5, 6.0, 106.0)}) == {"infer": (1.5, 6.0)}
    lost = flights.parts(110.0, 100.0, {"infer": 9.0}, {3: Beat(3.5, 50.0, 90.0)})["infer"]
    assert lost == pytest.approx((10 / 9, 10.0))  # by the time that has passed
