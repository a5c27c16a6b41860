"""Workers of several works: when they start, when they stop, and pauses without any."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from scripted_works import Part, Pool, perform_all

from volpipe.blockwise import loop as loop_module
from volpipe.blockwise.interrupts import INTERRUPTS
from volpipe.blockwise.loop import perform
from volpipe.blockwise.phase import Progress
from volpipe.blockwise.work import Steps, Until, Work
from volpipe.errors import RunError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop_module, "TICK_SECONDS", 0.001)
    INTERRUPTS.reset()
    yield
    INTERRUPTS.reset()


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
    pool, order = Pool(num_slots=1), list[str]()
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
    pool, left = Pool(num_slots=2), list[int]()

    def is_over() -> bool:
        left.append(len(pool.in_flight))
        if len(left) % 3 == 0 and left[-1]:
            pool.show(None)  # type: ignore[arg-type]  # another one comes back
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
