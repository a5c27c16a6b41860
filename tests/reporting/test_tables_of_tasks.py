"""Tables of what tasks took, cell by cell, for a journal that is short enough to add up in the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from volpipe.reporting.page import Chart, PageSection, Sentence, Sheet
from volpipe.reporting.tally import MOST_SLOWEST, JournalTally
from volpipe.reporting.tasks import StageState, colours_of, damage_note, moment, stage_sheet, task_sections

BEGAN = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


def done(stage: str, units: list[int], at: float, seconds: float, **more: object) -> dict[str, object]:
    return {"stage": stage, "done": units, "started": BEGAN + at, "seconds": seconds, "host": "a", "pid": 1} | more


def failed(stage: str, units: list[int], at: float, seconds: float, reason: str, **more: object) -> dict[str, object]:
    attempt = {"result": "Attempt", "units": units, "reason": reason, "number": 1}
    return done(stage, [], at, seconds) | attempt | more


LINES = [
    done("measure", [0, 1], 0, 2, cpu_seconds=1, peak_bytes=1 << 20, read_bytes=3 << 10),
    done("infer", [0], 2, 4, cpu_seconds=8, peak_bytes=5 << 20, read_bytes=1 << 20, written_bytes=512, device="cuda",
         device_seconds=3, device_percent=50.0, device_peak_bytes=1 << 30, device_used_bytes=2 << 30, queued_seconds=1),
    done("infer", [1], 2, 12, cpu_seconds=6, peak_bytes=2 << 20, read_bytes=1 << 20, host="b", pid=7, queued_seconds=2,
         device="cuda", device_seconds=9, device_percent=100.0),
    done("infer", [3, 4], 6, 2, peak_bytes=3 << 20, host="b", pid=8),
    failed("infer", [2], 14, 3, "OSError: no disk"), failed("infer", [2], 17, 3, "OSError: no disk", host="b", pid=7),
    failed("infer", [2, 5, 6, 7, 8], 20, 0, "ValueError: odd", host="", pid=0),
    {"stage": "infer", "done": [], "failed": [[2, "OSError: no disk"]]},
]  # fmt: skip


@pytest.fixture
def tally(tmp_path: Path) -> JournalTally:
    (tmp_path / "journal").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    found = JournalTally([BEGAN - 5, BEGAN + 5])
    found.read(tmp_path / "journal")
    return found


def sections(tally: JournalTally) -> dict[str, PageSection]:
    states = {"measure": StageState(2, 2), "infer": StageState(4, 1234)}
    sites = [("slurm", BEGAN - 5), ("local", BEGAN + 5)]
    return {part.title: part for part in task_sections(tally, states, lambda stage, unit: f"{stage}[{unit}]", sites)}


def sheets(tally: JournalTally) -> dict[str, Sheet]:
    items = [item for part in sections(tally).values() for item in part.items]
    return {item.title: item for item in items if isinstance(item, Sheet)}


def test_a_stage_has_a_row_of_sums(tally: JournalTally) -> None:
    sheet = sheets(tally)["By stage"]
    assert sheet.names == [
        "stage", "units", "tasks", "task time", "per task", "CPU", "read", "written", "peak memory", "GPU",
        "net on device", "GPU memory", "queued", "waiting", "failed attempts", "time lost", "set aside",
    ]  # fmt: skip
    assert sheet.rows == [
        ("measure", "2", 1, "2.0 s", "2.0 s", "50 %", "3.0 KiB", "0 B", "1.0 MiB", "", "", "", "", "", "", "", ""),
        ("infer", "4 of 1,234", 3, "18.0 s", "6.0 s", "78 %", "2.0 MiB", "512 B", "5.0 MiB", "88 %", "75 %", "2.0 GiB",
         "1.0 s", "14 %", 3, "6.0 s", 1),
        ("all", "", 4, "20.0 s", "5.0 s", "75 %", "2.0 MiB", "512 B", "5.0 MiB", "88 %", "75 %", "2.0 GiB", "0.8 s",
         "13 %", 3, "6.0 s", 1),
    ]  # fmt: skip
    assert sheet.caption.startswith("Task time is the sum over tasks") and sheet.caption.endswith(
        "of all processes. Net on device is the share of the tasks' time that the net itself computed."
    )


def test_one_stage_alone_has_no_row_of_all_and_one_without_tasks_is_empty() -> None:
    sheet = stage_sheet(JournalTally(), {"infer": StageState(0, 3)}, ["infer"])
    assert (sheet.names, sheet.rows) == (
        ["stage", "units", "tasks", "task time", "read", "written"],
        [("infer", "0 of 3", 0, "0.0 s", "0 B", "0 B")],
    )
    assert "GPU" not in sheet.caption and "Net on device" not in sheet.caption


def test_nodes_and_workers_stand_with_the_most_time_first(tally: JournalTally) -> None:
    nodes, workers = sheets(tally)["By node"], sheets(tally)["By worker"]
    assert [row[:4] for row in nodes.rows] == [("b", 2, "1.04 ×", 2), ("a", 1, "0.92 ×", 2)]
    assert [row[:5] for row in workers.rows] == [
        ("b", "7", "100 %", 1, "12.0 s"), ("a", "1", "100 %", 2, "6.0 s"), ("b", "8", "100 %", 1, "2.0 s"),
    ]  # fmt: skip
    assert workers.caption == (
        "At work: tasks' time by the time from its first task to its last; with threads, of all of them. "
    )


def test_sessions_have_their_times_and_tasks(tally: JournalTally) -> None:
    sheet = sheets(tally)["By session"]
    assert sheet.rows == [
        [1, "slurm", "2023-11-14 22:13:15 UTC", "5.0 s", "19.0 s", 4, 3, ""],
        [2, "local", "2023-11-14 22:13:25 UTC", "1.0 s", "3.0 s", 2, 1, 3],
    ]


def test_failures_are_counted_by_reason_and_listed_the_latest_first(tally: JournalTally) -> None:
    found = sheets(tally)
    assert found["Why tasks failed"].rows == [(2, "infer", "OSError: no disk"), (1, "infer", "ValueError: odd")]
    assert found["Failed attempts"].rows == [
        ["2023-11-14 22:13:40 UTC", "infer", "2, 5, 6, 7 …", "infer[2]", "lost", "0.0 s", "ValueError: odd"],
        ["2023-11-14 22:13:37 UTC", "infer", "2", "infer[2]", "b 7", "3.0 s", "OSError: no disk"],
        ["2023-11-14 22:13:34 UTC", "infer", "2", "infer[2]", "a 1", "3.0 s", "OSError: no disk"],
    ]
    assert found["Failed attempts"].caption == ""


def test_a_timeline_has_a_bar_for_each_task_and_attempt(tally: JournalTally) -> None:
    items = sections(tally)["Timeline"].items
    chart = next(item for item in items if isinstance(item, Chart) and item.kind == "timeline")
    names = ("worker", "colour", "units", "began", "ended", "queued")
    rows = list(zip(*(chart.data[name] for name in names), strict=True))
    at = round(1000 * BEGAN)
    assert sorted(rows, key=lambda row: (row[3], str(row[0]))) == [
        ("a 1", "measure", "0 and 1 more", at, at + 2000, 0.0), ("a 1", "infer", "0", at + 2000, at + 6000, 1),
        ("b 7", "infer", "1", at + 2000, at + 14000, 2), ("b 8", "infer", "3 and 1 more", at + 6000, at + 8000, 0.0),
        ("a 1", "failed attempt", "2", at + 14000, at + 17000, 0.0),
        ("b 7", "failed attempt", "2", at + 17000, at + 20000, 0.0),
        ("lost workers", "failed attempt", "2 and 4 more", at + 20000, at + 20000, 0.0),
    ]  # fmt: skip


def test_few_tasks_have_no_slowest_and_many_do(tmp_path: Path) -> None:
    lines = [done("infer", [2 * i, 2 * i + 1], 10 * i, 2 + i % 7) for i in range(2 * MOST_SLOWEST + 1)]
    for num, has in ((2 * MOST_SLOWEST, False), (2 * MOST_SLOWEST + 1, True)):
        (tmp_path / str(num)).write_text("".join(json.dumps(line) + "\n" for line in lines[:num]))
        tally = JournalTally()
        tally.read(tmp_path / str(num))
        titles = [part.title for part in task_sections(tally)]
        assert ("Slowest tasks" in titles) == has
    slowest = next(part for part in task_sections(tally) if part.title == "Slowest tasks").items[0]
    assert isinstance(slowest, Sheet) and len(slowest.rows) == MOST_SLOWEST
    assert slowest.rows[0][:4] == ["infer", "40", "4.0 s", 2]
    assert slowest.caption == "Of 25 tasks. A first task of a worker loads the net as well."


def test_a_journal_without_tasks_says_so_and_damage_is_counted(tmp_path: Path) -> None:
    (part,) = task_sections(JournalTally())
    assert (part.title, part.items) == ("Tasks", [Sentence("No task has ended yet.")])
    assert damage_note(JournalTally()) is None
    what = "of the journal cannot be understood, damaged or by another version, and"
    for damaged, words in (("x\n", f"1 line {what} is"), ("x\ny\n", f"2 lines {what} are")):
        (tmp_path / "j").write_text(damaged + json.dumps(LINES[0]) + "\n")
        tally = JournalTally()
        tally.read(tmp_path / "j")
        note = damage_note(tally)
        assert note is not None and note.kind == "warning" and note.text.startswith(words)
        assert note.text.endswith("left out of the numbers here; the first is line 1 of " + str(tmp_path / "j") + ".")


def test_times_and_colours() -> None:
    assert moment(BEGAN + 1.9) == "2023-11-14 22:13:21 UTC"
    colours = colours_of([str(i) for i in range(31)])
    assert len(set(colours.values())) == 31
    assert (colours["0"], colours["10"], colours["20"], colours["30"]) == ("#4c78a8", "#94aecb", "#2e4865", "#bfcee0")
