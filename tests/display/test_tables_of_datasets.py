"""Tables of a batch's datasets, letter by letter: what each takes, how far it is, and how it ended."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import RenderableType
from rich.progress import Progress as Bar

from volpipe.blockwise.phase import Progress
from volpipe.blockwise.stage import Stage
from volpipe.display import batches
from volpipe.display.console import Bars, rendered
from volpipe.workflow.batch_table import DatasetRow

A = DatasetRow(
    "a.n5/raw", "done/a.zarr", "none", "new", shape=(8, 16, 32), num_blocks=1200, output_bytes=3 << 20,
    output_files=7, scratch_bytes=1 << 10, worker_seconds=65.0, grey="8 bits: 0 … 255", is_measured=True,
)  # fmt: skip
B = replace(
    A, volume="b.n5", out="done/b.zarr", state="begun", why="windows.blend: crop -> hann", share_left=0.5,
    is_measured=False, worker_seconds=None,
)  # fmt: skip


def lines(*parts: RenderableType | None) -> list[list[str]]:
    """Return the cells of a table, line by line; columns stand two spaces apart at least."""
    text = rendered(*(part for part in parts if part is not None))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]


def test_a_plan_says_what_each_dataset_takes_and_what_is_left_of_all() -> None:
    assert lines(batches.plan_table([A, B])) == [
        ["dataset", "state", "shape", "grey levels", "blocks", "output", "files", "scratch", "worker time", "goes to"],
        ["a.n5/raw", "new", "8 × 16 × 32", "8 bits: 0 … 255", "1,200", "3.0 MiB", "7", "1.0 KiB", "1 min 05 s",
         "done/a.zarr"],
        ["b.n5", "begun", "8 × 16 × 32", "8 bits: 0 … 255", "1,200", "≤ 3.0 MiB", "7", "≤ 1.0 KiB", "done/b.zarr"],
        ["2 datasets: 1 new, 1 begun; still to be written: ≤ 4.5 MiB in 10 files"],
    ]  # fmt: skip
    *_, caption = lines(batches.plan_table([A, replace(B, share_left=0.0)]))
    assert caption == ["2 datasets: 1 new, 1 begun; still to be written: 3.0 MiB in 7 files"]
    shown = lines(batches.plan_table([A, B, A], 1))
    assert [row[0] for row in shown] == ["dataset", "a.n5/raw", "… and 2 more", shown[-1][0]]


def test_what_differs_and_what_is_wrong_is_told_once() -> None:
    assert lines(batches.why_table([A, B])) == [
        ["dataset", "state", "what differs, or is left"], ["b.n5", "begun", "windows.blend: crop -> hann"]
    ]  # fmt: skip
    assert batches.why_table([A]) is None
    mistakes = [("a", "no volume"), ("b", "no net"), ("c", "no volume"), ("d", "no volume"), ("e", "no volume")]
    assert lines(batches.mistake_table(mistakes)) == [
        ["dataset", "what is wrong"], ["a, c, d and 1 more", "no volume"], ["b", "no net"]
    ]  # fmt: skip
    assert lines(batches.mistake_table(mistakes, 1))[-1] == ["… and 1 more"]


def test_an_end_says_what_it_took_and_why_it_failed() -> None:
    done = replace(A, ended="done", wall_seconds=3.0, cpu_seconds=9.5, read_bytes=1 << 20, written_bytes=1 << 10,
                   seams={"z": 1.234, "x": 0.5})  # fmt: skip
    failed = replace(B, ended="failed", wall_seconds=None, reason="no room", missing=1200)
    assert lines(batches.result_table([done, failed])) == [
        ["dataset", "ended", "elapsed", "CPU time", "read", "written", "missing", "seams", "output, or why not"],
        ["a.n5/raw", "done", "3.0 s", "9.5 s", "1.0 MiB", "1.0 KiB", "z 1.23, x 0.50", "done/a.zarr"],
        ["b.n5", "failed", "1,200", "no room"],
        ["2 datasets: 1 done, 1 failed"],
    ]
    updated = replace(done, changed_blocks=3, computed_blocks=1000)
    head, first, second, _ = lines(batches.result_table([updated, replace(done, changed_blocks=0)]))
    assert head[:4] == ["dataset", "ended", "blocks changed", "elapsed"]
    assert (first[2], second[2]) == ("3 of 1,200, 1,000 computed", "0 of 1,200")


def test_datasets_at_work_are_shown_before_those_that_wait() -> None:
    rows = [replace(A, volume=f"{i}.n5") for i in range(4)]
    rows[1], rows[2] = (
        replace(rows[1], ended="failed", reason="no room", wall_seconds=2.0),
        replace(rows[2], ended="running"),
    )
    now = batches.Now()
    table = lines(batches.live_table(rows, {2: now}, 3))
    assert [row[0] for row in table] == ["dataset", "0.n5", "1.n5", "2.n5", "… and 1 more", table[-1][0]]
    assert table[2] == ["1.n5", "new", "failed", "2.0 s", "1,200", "no room"]
    assert table[-1] == ["4 datasets: 2 waiting, 1 failed, 1 running"]
    assert [row[0] for row in lines(batches.live_table(rows, {2: now}, 2))[1:3]] == ["1.n5", "2.n5"]


def progress(**done: int) -> Progress:
    stages = [Stage(name, 4) for name in done]
    for stage in stages:
        for unit in range(done[stage.name]):
            stage.mark(unit)
    return Progress(stages, 0.0)


def test_a_dataset_at_work_tells_the_first_stage_that_is_not_done() -> None:
    now = batches.Now()
    assert now.text == ""
    now.move("", progress(measure=4, infer=1))
    assert now.text == "infer 25%"
    now.move("", progress(measure=0, infer=1))
    assert now.text == "measure 0%"
    now.move("", progress(measure=4, infer=4))
    assert now.text == "done"
    stages = batches.Now()
    stages.move("first", progress(infer=4))
    stages.move("second", progress(infer=2))
    assert stages.text == "first: done, second: infer 50%"


def test_a_line_for_each_end_says_how_many_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    shown = batches.RowsShown(Bars(Bar(disable=True)), None)
    shown.begin([A, B, replace(A, ended="unchanged")])
    assert shown.num_left == 2
    shown.start(0, replace(A, ended="running"))
    shown.end(0, replace(A, ended="interrupted", wall_seconds=1.25))
    shown.end(1, replace(B, ended="failed", reason="no room"))
    printed = capsys.readouterr().err.splitlines()
    assert printed == ["a.n5/raw: interrupted after 1.2 s; 2 left", "b.n5: failed: no room; 1 left"]
    assert shown.now == {}
