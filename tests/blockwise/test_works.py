"""Several works on one loop: each ends by itself, on workers that exist in the test alone, as do their tasks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from scripted import Part, Pool, log, perform_all

from volpipe.blockwise import loop as loop_module
from volpipe.blockwise.interrupts import INTERRUPTS
from volpipe.blockwise.journal import Record, read_records
from volpipe.blockwise.logs import logging_to
from volpipe.blockwise.loop import perform
from volpipe.blockwise.notes import DRIVER, read_note
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.work import (
    LoopObserver,
    Steps,
    Together,
    Until,
    Work,
    observing,
)
from volpipe.errors import PlanError, RunError, RunStopped, SiteError, VolpipeError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop_module, "TICK_SECONDS", 0.001)
    INTERRUPTS.reset()
    yield
    INTERRUPTS.reset()


def raises(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


# ---- side by side


@pytest.mark.parametrize("at_once", [1, 3, 64])
def test_no_more_works_are_open_than_may_be_and_all_come_to_their_ends(at_once: int) -> None:
    pool, events = Pool(), list[str]()
    ended = perform_all(pool, (Part(f"w{n}", pool, 5, events=events) for n in range(9)), at_once=at_once)
    assert {name: one.result for name, one in ended.items()} == {f"w{n}": 5 for n in range(9)}
    assert [event for event in events if event[0] == "+"] == [f"+w{n}" for n in range(9)]
    open_works = [sum(1 if e[0] == "+" else -1 for e in events[: n + 1]) for n in range(len(events))]
    assert max(open_works) <= at_once
    if at_once > 1:
        assert max(open_works) > 1


@pytest.mark.parametrize("slots", [1, 3])
def test_tasks_in_flight_are_bounded_over_all_works_together(slots: int) -> None:
    pool = Pool(num_slots=slots)
    perform_all(pool, [Part(f"w{n}", pool, 30) for n in range(7)])
    assert pool.most_in_flight[""] == 2 * slots
    assert len(pool.tasks) == 7 * 30


def test_works_are_opened_as_there_is_room_for_their_tasks_not_all_at_the_start() -> None:
    pool, events = Pool(num_slots=1), list[str]()
    perform_all(pool, (Part(f"w{n}", pool, 50, events=events) for n in range(20)))
    open_works = [sum(1 if e[0] == "+" else -1 for e in events[: n + 1]) for n in range(len(events))]
    assert max(open_works) <= 3


def test_tasks_of_earlier_works_go_first_or_those_of_later_ones_where_that_is_asked() -> None:
    for latest_first in (False, True):
        pool = Pool(num_slots=2)
        gate = [Part(f"w{n}", pool, 40) for n in range(3)]
        perform_all(pool, gate, latest_first=latest_first)
        last = {name: max(n for n, (work, _) in enumerate(pool.tasks) if work == name) for name in ("w0", "w1")}
        assert (last["w0"] < last["w1"]) is not latest_first


def test_a_work_waits_until_another_has_come_as_far() -> None:
    pool, order = Pool(), list[str]()
    first = Part("first", pool, 10, events=order)

    def steps() -> Steps[str]:
        yield Until(lambda: len(first.marked) > 3)
        order.append(f"after {len(first.marked)}")
        return "so far"

    ended = perform_all(pool, [Work("second", steps), first])
    assert ended["second"].result == "so far"
    begun, after, ended_then = order
    assert (begun, ended_then) == ("+first", "-first")
    assert 3 < int(after.removeprefix("after ")) < 10


# ---- failures


def test_a_failure_is_that_of_its_own_work_alone() -> None:
    pool = Pool(bad=("all fail",))
    works = [
        Part("all fail", pool),
        Part("before", pool, before=raises(PlanError("no such box"))),
        Part("good", pool, 30),
        Part("after", pool, after=raises(RunError("no room for the table"))),
        Part("also good", pool),
    ]
    ended = perform_all(pool, works)
    errors = {name: type(one.error) for name, one in ended.items() if one.error is not None}
    assert errors == {"all fail": RunStopped, "before": PlanError, "after": RunError}
    assert (ended["good"].result, ended["also good"].result) == (30, 8)
    assert all(ended[name].result is None for name in errors)


def test_a_folder_that_cannot_be_made_is_the_failure_of_its_own_work(tmp_path: Path) -> None:
    """As a disk that is full or may not be written, before the work has a log: in a batch, one dataset of many."""
    pool = Pool()
    lost = Part("lost", pool, folder=tmp_path / "no" / "such" / "place")
    ended = perform_all(pool, [lost, Part("good", pool)])
    assert ended["good"].result == 8
    assert isinstance(ended["lost"].error, RunError)
    assert "No such file or directory" in str(ended["lost"].error)
    assert str(tmp_path / "no" / "such" / "place") in str(ended["lost"].error)


def test_an_error_of_ours_while_the_works_are_listed_ends_what_is_open() -> None:
    pool, first = Pool(), Part("first", Pool())

    def works() -> Iterator[Part]:
        first.pool = pool
        yield first
        yield Part("second", pool)
        raise PlanError("the list ends in the middle of a line")

    with pytest.raises(PlanError, match="middle of a line"):
        perform_all(pool, works())
    assert isinstance(first.seen, GeneratorExit)
    assert not pool.is_open


def test_an_error_of_the_site_ends_all_works_and_each_is_told(tmp_path: Path) -> None:
    pool = Pool(refusal=SiteError("the queue is closed"))
    works = [Part(f"w{n}", pool, folder=tmp_path / f"w{n}") for n in range(3)]
    with pytest.raises(SiteError, match="the queue is closed"):
        perform_all(pool, works)
    assert pool.num_starts == 1
    begun = [work for work in works if work.events]
    assert begun
    for work in begun:
        assert isinstance(work.seen, SiteError)
        assert work.folder is not None
        note = read_note(work.folder / DRIVER)
        assert note is not None and note.ended == "stopped"
        assert "the queue is closed" in (work.folder / "log").read_text()


def test_a_site_that_is_lost_under_way_ends_all_works_with_its_error(tmp_path: Path) -> None:
    pool = Pool()
    works = [Part(f"w{n}", pool, 20, tmp_path / f"w{n}") for n in range(3)]
    submit = pool.submit

    def lose(work: str, units: Sequence[int]) -> Future[Record[Any]]:
        if len(pool.tasks) == 30:
            raise SiteError("all jobs were cancelled")
        return submit(work, units)

    pool.submit = lose  # type: ignore[method-assign]
    with pytest.raises(SiteError, match="all jobs were cancelled"):
        perform_all(pool, works)
    assert all(work.seen is None or isinstance(work.seen, SiteError) for work in works)
    assert sum(isinstance(work.seen, SiteError) for work in works) >= 1
    assert not pool.is_open


def test_works_that_wait_for_each_other_are_an_error_and_no_hang() -> None:
    pool, seen = Pool(), list[BaseException]()

    def waiting() -> Steps[None]:
        try:
            yield Until(lambda: False)
        except RuntimeError as error:
            seen.append(error)
            raise

    with pytest.raises(RuntimeError, match=r"works wait for each other: \['all', 'left', 'right'\]"):
        perform_all(pool, [Work("left", waiting), Part("done", pool), Work("right", waiting)])
    assert len(seen) == 2
    assert not pool.is_open


# ---- interrupts


def test_an_interrupt_reaches_every_open_work_which_leaves_its_folder_as_interrupted(tmp_path: Path) -> None:
    pool = Pool(num_slots=2)
    works = [Part(f"w{n}", pool, 9, tmp_path / f"w{n}") for n in range(40)]
    show = pool.show

    def interrupted(progress: Progress) -> None:
        if len(pool.tasks) > 20 and not INTERRUPTS.is_asked:
            assert INTERRUPTS.ask()
        show(progress)

    pool.show = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        perform_all(pool, works)
    states = {work.name: None if work.folder is None else read_note(work.folder / DRIVER) for work in works}
    ended = {name: note.ended for name, note in states.items() if note is not None}
    open_works = [work for work in works if isinstance(work.seen, KeyboardInterrupt)]
    assert open_works
    assert {work.name for work in open_works} == {name for name, state in ended.items() if state == "interrupted"}
    assert set(ended.values()) <= {"interrupted", "ended"}
    assert len(ended) < len(works)  # no other work began
    sent = [(name, unit) for name, units in pool.tasks for unit in units]
    marked = [
        (name, unit)
        for name in ended
        for record in read_records(tmp_path / name / "journal", ())
        for unit in record.done
    ]
    assert sorted(marked) == sorted(sent)  # what ran could finish
    assert not pool.is_open


# ---- logs


def test_a_line_goes_to_the_log_of_its_own_work_and_of_those_that_it_belongs_to(tmp_path: Path) -> None:
    pool = Pool(bad=("w1",))
    works = [Part(f"w{n}", pool, 12, tmp_path / f"w{n}") for n in range(3)]
    level = logging.getLogger("volpipe").level

    def steps() -> Steps[None]:
        with logging_to(tmp_path / "all.log"):
            log.info("all begin")
            yield Together(works, lambda ended: log.info("%s is over", ended.work.name))
            log.info("all end")

    perform(Work("all", steps), pool.start)
    lines = {work.name: (tmp_path / work.name / "log").read_text() for work in works}
    for name, text in lines.items():
        assert f"{name} begins" in text
        others = [other for other in lines if other != name]
        assert not any(other in text for other in others), text
        assert ("no good" in text) == (name == "w1")
    whole = (tmp_path / "all.log").read_text()
    assert all(f"{name} begins" in whole and f"{name} is over" in whole for name in lines)
    assert "no good" in whole
    assert whole.index("all begin") < whole.index("all end")
    assert not any("is over" in text for text in lines.values())
    assert logging.getLogger("volpipe").level == level
    assert logging.getLogger("volpipe").handlers == []


def test_errors_are_of_one_kind_with_those_of_a_work_alone() -> None:
    pool = Pool(bad=("alone",))
    with pytest.raises(VolpipeError, match=r"^part failed for 3 parts and worked for none, so the work stops: "):
        perform(Part("alone", pool), pool.start)
    assert not pool.is_open


# ---- observers


class Diary(LoopObserver):
    """Writes down what it hears: which work began, how many units of it were done at most, how it ended; the pool."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.done: Counter[str] = Counter()
        self.ended: dict[str, object] = {}
        self.pools: list[bool] = []

    def begin(self, place: tuple[int, ...], works: Sequence[Work[Any]]) -> None:
        assert len(works) == len(place) + 1
        self.begun.append("/".join(work.name for work in works))

    def use(self, pool: Any) -> None:
        self.pools.append(pool is not None and pool.is_open)

    def move(self, place: tuple[int, ...], works: Sequence[Work[Any]], progress: Progress) -> None:
        name = works[-1].name
        assert name not in self.ended and f"all/{name}" in self.begun
        self.done[name] = max(self.done[name], progress.stages[0].num_done)

    def end(self, place: tuple[int, ...], works: Sequence[Work[Any]], result: object, error: object) -> None:
        assert works[-1].name not in self.ended
        self.ended[works[-1].name] = result if error is None else error


def test_an_observer_hears_of_every_work_once_and_of_the_pool() -> None:
    pool, diary = Pool(bad=("w1",)), Diary()
    with observing(diary):
        perform_all(pool, [Part(f"w{n}", pool, 5) for n in range(3)])
    perform_all(pool, [Part("later", pool)])
    assert diary.begun == ["all", "all/w0", "all/w1", "all/w2"]
    assert (diary.done["w0"], diary.done["w2"]) == (5, 5)
    assert (diary.ended["w0"], diary.ended["w2"], diary.ended["all"]) == (5, 5, None)
    assert isinstance(diary.ended["w1"], RunStopped)
    assert diary.pools == [True, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SiteError("no workers"), ValueError("a fault")])
def test_an_observer_hears_that_all_were_left(error: BaseException) -> None:
    pool, diary = Pool(), Diary()
    works = [Part("a", pool), Part("b", pool, before=raises(error))]
    with observing(diary), pytest.raises(type(error)):
        perform_all(pool, works)
    assert set(diary.ended) == {"a", "b", "all"} and diary.ended["b"] is error


def test_an_observer_that_fails_ends_no_work_and_is_told_no_more(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Diary):
        def move(self, *arguments: object) -> None:
            raise RuntimeError("a fault of its own")

    pool, broken, diary = Pool(), Broken(), Diary()
    with observing(broken), observing(diary):
        ended = perform_all(pool, [Part("a", pool)])
    assert ended["a"].result == 8 and diary.ended == {"a": 8, "all": None}
    assert broken.ended == {}
    assert [record.message for record in caplog.records if "hears of no further task" in record.message] == [
        "Broken fails, and hears of no further task"
    ]


# ---- workers: when they start, when they stop, and pauses without any


def test_workers_are_started_by_the_first_work_that_asks_and_only_then() -> None:
    pool, at_start = Pool(), list[int]()

    def idle() -> Steps[str]:
        at_start.append(pool.num_starts)
        yield Until(lambda: True)
        return "nothing to do"

    ended = perform_all(pool, [Work(f"idle {n}", idle) for n in range(3)])
    assert [one.result for one in ended.values()] == ["nothing to do"] * 3
    assert pool.num_starts == 0
    perform_all(pool, [Work("idle", idle), *(Part(f"w{n}", pool) for n in range(5))])
    assert pool.num_starts == 1
    assert at_start == [0, 0, 0, 0]


@pytest.mark.parametrize("num", [1, 2, 5])
@pytest.mark.parametrize("at_once", [5, 64])
def test_workers_are_stopped_before_the_last_steps_of_the_last_work(num: int, at_once: int) -> None:
    pool, open_then = Pool(), list[bool]()
    works = [Part(f"w{n}", pool, after=lambda: open_then.append(pool.is_open)) for n in range(num)]
    perform_all(pool, works, at_once=min(at_once, num) if at_once == 5 else at_once)
    assert len(open_then) == num
    assert open_then[-1] is False
    assert pool.num_starts == 1


def test_workers_stay_while_a_work_may_still_ask_for_them() -> None:
    pool, order = Pool(1), list[str]()
    first = Part("first", pool, 3, events=order)

    def late() -> Steps[None]:
        yield Until(lambda: "-first" in order)
        order.append(f"open {pool.is_open}")
        yield from Part("late", pool, 3).steps()

    perform_all(pool, [first, Work("late", late)])
    assert order == ["+first", "-first", "open True"]
    assert pool.num_starts == 1


def test_a_pause_has_no_workers_and_later_steps_get_others() -> None:
    pool, open_then, done = Pool(), list[bool](), list[int]()

    def is_over() -> bool:
        open_then.append(pool.is_open)
        return len(open_then) % 4 == 0

    def steps() -> Steps[None]:
        for number in range(3):
            part = Part(f"part {number}", pool)
            yield from part.steps()
            done.append(len(part.marked))
            yield Until(is_over, is_pause=True)

    perform(Work("all", steps), pool.start)
    assert done == [8] * 3
    assert open_then == [False] * 12
    assert pool.num_starts == 3


def test_a_pause_waits_for_tasks_that_are_under_way() -> None:
    """Those of a phase that failed, which would otherwise write while the next ones do."""
    pool, left = Pool(2), list[int]()

    def is_over() -> bool:
        left.append(len(pool.in_flight))
        if len(left) % 3 == 0 and left[-1]:
            pool.show(None)  # another one comes back
        return True

    def failing() -> Steps[None]:
        part = Part("failing", pool)
        show, num_shown = pool.show, 0

        def fail(progress: Progress) -> None:
            nonlocal num_shown
            show(progress)
            num_shown += 1
            if num_shown == 3:
                raise RunError("no more")

        pool.show = fail  # type: ignore[method-assign]
        try:
            yield from part.steps()
        except RunError:
            pool.show = show  # type: ignore[method-assign]
        assert pool.is_open and pool.in_flight
        yield Until(is_over, is_pause=True)
        assert not pool.is_open and not pool.in_flight

    perform(Work("all", failing), pool.start)
    assert left[0] > 0


def test_an_interrupt_ends_a_pause_at_once() -> None:
    pool, seen = Pool(), list[BaseException]()

    def is_over() -> bool:
        INTERRUPTS.ask()
        return False

    def steps() -> Steps[None]:
        try:
            yield Until(is_over, is_pause=True)
        except KeyboardInterrupt as error:
            seen.append(error)
            raise

    with pytest.raises(KeyboardInterrupt):
        perform(Work("all", steps), pool.start)
    assert len(seen) == 1
