"""Interrupts of a loop: nothing starts, what runs may end, and a second one ends all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import Looped, Workers

from volpipe.blockwise import loop as loop_module
from volpipe.blockwise.interrupts import INTERRUPTS, Interrupts
from volpipe.blockwise.journal import Journal, Record, read_records
from volpipe.blockwise.notes import OVER, WORKERS, keeping_notes
from volpipe.blockwise.phase import Phase, Progress
from volpipe.blockwise.stage import Schedule, Stage
from volpipe.blockwise.usage import Usage


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop_module, "TICK_SECONDS", 0.001)
    yield


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupts]:
    INTERRUPTS.reset()
    yield INTERRUPTS
    INTERRUPTS.reset()


def test_after_an_interrupt_nothing_starts_and_what_runs_is_marked(tmp_path: Path, interrupts: Interrupts) -> None:
    workers = Workers()

    def show(progress: Progress) -> None:
        if len(workers.tasks) > 20:
            assert interrupts.ask() or interrupts.is_asked
        workers.show(progress)

    with Journal(tmp_path / "journal", ()) as journal:
        loop = Looped(Phase(Schedule(Stage("work", 5000)), workers.submit, journal, show), {"cpu": 2, "gpu": 2})
        with pytest.raises(KeyboardInterrupt):
            loop.run()
    assert len(workers.tasks) < 30
    marked = [unit for record in read_records(tmp_path / "journal", ()) for unit in record.done]
    assert sorted(marked) == sorted(unit for _, units in workers.tasks for unit in units)


def test_an_interrupt_ends_tasks_at_their_next_unit_and_the_rest_is_left(
    tmp_path: Path, interrupts: Interrupts
) -> None:
    over = tmp_path / WORKERS / OVER
    workers = Workers(
        lambda stage, units: Record(stage, tuple(units[:1] if over.exists() else units), usage=Usage(seconds=0.001))
    )

    def show(progress: Progress) -> None:
        if len(workers.tasks) > 20 and not interrupts.is_asked:
            interrupts.ask()
        elif not interrupts.is_asked or over.exists():
            workers.show(progress)

    stage = Stage("work", 5000)
    with keeping_notes(tmp_path), Journal(tmp_path / "journal", ()) as journal, pytest.raises(KeyboardInterrupt):
        phase = Phase(Schedule(stage), workers.submit, journal, show)
        Looped(phase, {"cpu": 2, "gpu": 2}).run()
    num_left = sum(len(units) - 1 for _, units in workers.tasks[-4:])
    assert num_left > 0 and len(stage.ready) == num_left
    assert stage.num_left == 5000 - sum(len(units) for _, units in workers.tasks) + num_left


def test_what_takes_longer_than_the_grace_is_given_up(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volpipe.blockwise.interrupts.GRACE_SECONDS", 0.05)
    workers = Workers()
    loop = Looped(Phase(Schedule(Stage("work", 9)), workers.submit, None, lambda progress: None), {"cpu": 1})
    threading.Timer(0.1, interrupts.ask).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert len(workers.in_flight) == 2


def test_the_second_interrupt_ends_a_run_at_once(interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("volpipe.blockwise.interrupts.SAME_SECONDS", 0.01)

    def show(progress: Progress) -> None:
        interrupts.ask()
        assert not interrupts.ask()  # a terminal and a wrapper may send one Ctrl-C twice
        time.sleep(0.02)

    workers = Workers()
    loop = Looped(Phase(Schedule(Stage("work", 9)), workers.submit, None, show), {"cpu": 1})
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert len(workers.in_flight) == 2
    assert not interrupts.ask()  # while jobs are cancelled, a third one changes nothing


def test_outside_of_a_run_the_first_interrupt_ends_all(interrupts: Interrupts) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupts.ask()


def test_no_interrupt_keeps_jobs_from_being_cancelled(interrupts: Interrupts) -> None:
    with interrupts.closing():
        assert not interrupts.ask()
    with pytest.raises(KeyboardInterrupt):
        interrupts.ask()
