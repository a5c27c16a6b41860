"""How work is told while it is watched, letter by letter: its driver, its stages, its workers and what failed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.notes import Note, StageNote, TaskNote
from volpipe.blockwise.usage import Totals
from volpipe.display import reports, watching
from volpipe.display.console import rendered
from volpipe.display.workers import roster_view, sentences
from volpipe.geometry.grid import Box
from volpipe.runs.presence import Driver
from volpipe.stages.status import Status
from volpipe.training.logs import TrainingPace
from volpipe.workflow.roster import Worker, WorkerTask

NOTE = Note("s", command="volpipe run -o out.zarr in.n5", folder="/data", part=0.254, seconds_left=90.0)
DRIVER = Driver("running", "9", "login", "2026-11-23 10:00:00", NOTE)
NAME = "process 9 on login since 2026-11-23 10:00:00"
AGAIN = "To continue: cd /data && volpipe run -o out.zarr in.n5"
RUN = Status(
    "run", "out.zarr", False, DRIVER,
    {"measure": StageNote(4, 4), "infer": StageNote(1000, 4000, 3, 2), "pyramid 1": StageNote(0, 9)},
    {"infer": Totals(tasks=5, seconds=65.0, read_bytes=1 << 20, written_bytes=1 << 10, peak_bytes=1 << 30)},
)  # fmt: skip


@pytest.mark.parametrize(
    ("state", "more", "line"),
    [
        ("running", {}, f"{NAME} is at work, 25% done, about 1 min 30 s left"),
        ("unseen", {"silent_seconds": 600.0}, f"not complete, 25% done; {NAME} worked on it, and whether it still does "
         f"cannot be seen from this machine (last sign of it 10 min 00 s ago). {AGAIN}"),
        ("interrupted", {}, f"interrupted; nobody works on it. {AGAIN}"),
        ("stopped", {}, f"stopped by an error, which its log has; nobody works on it. {AGAIN}"),
        ("ended", {}, f"not complete, 3 parts missing; nobody works on it. {AGAIN}"),
        ("ended", {"note": None}, "not complete, 3 parts missing; nobody works on it. Run the same command again to "
         "continue."),
    ],
)  # fmt: skip
def test_a_driver_is_told_with_how_the_work_goes_on(state: str, more: dict[str, object], line: str) -> None:
    driver = replace(DRIVER, state=state, **more)  # type: ignore[arg-type]
    assert reports.driver_line("out.zarr", driver, False, 3, 90.0) == f"out.zarr: {line}"


def test_complete_work_is_complete_whoever_made_it() -> None:
    for state in ("unseen", "interrupted", "stopped", "ended"):
        assert reports.driver_line("o", replace(DRIVER, state=state), True) == "o: complete"  # type: ignore[arg-type]
    assert reports.driver_line("o", replace(DRIVER, state="ended"), False).startswith("o: not complete; nobody works")
    plain = replace(DRIVER, note=replace(NOTE, part=None))
    assert reports.driver_line("o", plain, False) == f"o: {NAME} is at work"


def test_a_plain_line_has_stages_that_were_begun() -> None:
    assert watching.plain_line(RUN) == (
        "out.zarr: measure 4/4, infer 1,000/4,000 (3 in flight, 2 failed); about 1 min 30 s left"
    )
    nothing = replace(RUN, stages={}, driver=replace(DRIVER, note=None))
    assert watching.plain_line(nothing) == "out.zarr: starting"
    training = Status("training", "t", False, DRIVER, {"train": StageNote(5, 10)}, pace=TrainingPace(5, 0.123456, 0.25))
    assert watching.plain_line(training) == "t: train 5/10, loss 0.1235, 4.0 s/step; about 20.0 s left"
    fast = replace(training, pace=TrainingPace(5, 0.5, 2.0))
    assert watching.plain_line(fast) == "t: train 5/10, loss 0.5, 2.0 steps/s; about 2.5 s left"
    flow = Status("stages", "f", False, DRIVER, parts=(replace(RUN, name="a"), replace(RUN, name="b", stages={})))
    assert watching.plain_line(flow).startswith("f: a measure 4/4, a infer 1,000/4,000 (3 in flight, 2 failed); about")


def test_a_headline_says_how_much_is_done_and_what_is_left() -> None:
    assert watching.headline(RUN) == "out.zarr: 25% done, about 1 min 30 s left"
    assert watching.headline(replace(RUN, driver=replace(DRIVER, note=None))) == "out.zarr: at work"


def shown(*parts: object) -> list[str]:
    return [" ".join(line.split()) for line in rendered(*parts).splitlines()]  # type: ignore[arg-type]


def test_a_terminal_shows_as_many_stages_as_it_has_lines() -> None:
    lines = shown(watching.view(RUN, 40))
    assert lines[0] == "out.zarr: 25% done, about 1 min 30 s left"
    assert lines[1] == "stage done in flight failed"
    assert lines[2].startswith("measure ") and lines[2].endswith(" 4 / 4")
    assert lines[3].startswith("infer ") and lines[3].endswith(" 1,000 / 4,000 3 2")
    assert lines[4].startswith("pyramid 1 ") and lines[4].endswith(" 0 / 9")
    assert lines[5:] == [
        "5 tasks in 1 min 05 s of workers; read 1.0 MiB, wrote 1.0 KiB, peak memory 1.0 GiB", f"{NAME} is at work"
    ]  # fmt: skip
    assert len(shown(watching.view(RUN, 9))) == len(lines) - 1


def test_a_standing_has_what_each_stage_took() -> None:
    assert shown(reports.standing_table(RUN.totals | {"other": Totals(units=7)}, RUN.stages, "as it is")) == [
        "stage done in flight tasks task time read written peak memory",
        "measure 4 / 4",
        "infer 1,000 / 4,000 3 5 1 min 05 s 1.0 MiB 1.0 KiB 1.0 GiB",
        "pyramid 1 0 / 9",
        "other 7",
        "as it is",
    ]


def test_what_is_missing_is_listed_up_to_so_many_lines() -> None:
    missing = [Missing("infer", n, Box((0, 0, n), (1, 2, n + 1)), "no room") for n in range(1, 4)]
    assert shown(reports.missing_table(missing, 2)) == [
        "missing", "stage unit box z,y,x reason", "infer 1 0:1,0:2,1:2 no room", "infer 2 0:1,0:2,2:3 no room",
        "… 1 more `volpipe status --all` lists them",
    ]  # fmt: skip
    assert len(shown(reports.missing_table(missing, 3))) == len(shown(reports.missing_table(missing, None))) == 5


def worker(pid: int, *seconds: float, host: str = "n1", **more: object) -> Worker:
    box = "1024:1280,2048:2304,0:64"
    tasks = [WorkerTask("", 0.25, TaskNote("infer", 8 * n, 4, 8 * n + 1, box, 1.0, s)) for n, s in enumerate(seconds)]
    note = Note("s", host, pid, every=0.5, cpu_percent=90.0, memory_bytes=1 << 30)
    return replace(Worker(note, tuple(tasks), 0.5, True), **more)  # type: ignore[arg-type]


def test_workers_are_counted_and_those_that_are_not_as_they_should_be_named() -> None:
    assert list(sentences([])) == ["no worker has shown itself yet: they start, or their tasks are short"]
    workers = [
        worker(1, 5.0), worker(2), worker(3, host="n2", clock_seconds=-75.0),
        worker(4, is_alive=False, silent_seconds=90.0), worker(5, is_alive=False, is_left=True),
    ]  # fmt: skip
    assert list(sentences(workers)) == [
        "3 workers on 2 nodes, 2 without a task; 1 task; CPU 270 %, memory 3.0 GiB",
        "silent: n1 process 4 for 1 min 30 s (killed, frozen, or on a machine that cannot be reached)",
        "of a driver before this one: n1 process 5",
        "the clock of n2 is 1 min 15 s behind that of the file system",
    ]
    assert list(sentences([worker(1, 5.0), worker(2, 6.0, clock_seconds=11.0)])) == [
        "2 workers; 2 tasks; CPU 180 %, memory 2.0 GiB",
        "the clock of n1 is 11.0 s ahead of that of the file system",
    ]
    silent = [worker(n, is_alive=False, silent_seconds=3.0) for n in range(5)]
    assert list(sentences(silent))[1].startswith(
        "silent: n1 process 0 for 3.0 s, n1 process 1 for 3.0 s, n1 process 2 for 3.0 s and 2 more ("
    )


def test_each_task_has_a_line_below_its_node_and_threads_share_that_of_their_process() -> None:
    gpu = worker(7, 3725.0)
    gpu = replace(gpu, note=replace(gpu.note, device_percent=42.4, device_used_bytes=3 << 30))
    workers = [gpu, worker(8, 7.0, 754.0), worker(9, host="n2")]
    lines = shown(roster_view(RUN, workers, 200))
    assert lines[:2] == ["out.zarr: 25% done, about 1 min 30 s left",
                         "3 workers on 2 nodes, 1 without a task; 3 tasks; CPU 270 %, memory 3.0 GiB"]  # fmt: skip
    assert lines[2:] == [
        "process cpu memory gpu task box z,y,x time done", "n1",
        "7 90 % 1.0 GiB 42 % 3.0 GiB infer 1 1024:1280, 2048:2304, 0:64 1:02:05 25%",
        "8 90 % 1.0 GiB infer 1 1024:1280, 2048:2304, 0:64 0:07 25%",
        "infer 9 1024:1280, 2048:2304, 0:64 12:34 25%", "n2", "9 90 % 1.0 GiB waits",
    ]  # fmt: skip
    short = shown(roster_view(RUN, workers, 200, 9))  # of which two are for tasks: those under way longest
    assert short[3:] == ["n1", lines[4], lines[6].replace("infer 9", "8 90 % 1.0 GiB infer 9"), "… 2 more"]
