"""Sums of journals, and maps of blocks: those of json, arithmetic and brute force, of many lines in little memory."""

from __future__ import annotations

import itertools
import json
import random
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from volpipe.blockwise.journal import Attempt, Journal, Record
from volpipe.blockwise.stage import Stage
from volpipe.blockwise.usage import Usage
from volpipe.geometry.grid import Grid
from volpipe.reporting import block_map
from volpipe.reporting.block_map import BlockMap
from volpipe.reporting.page import Chart, Page, PageSection, Sheet
from volpipe.reporting.render import MOST_BYTES, render
from volpipe.reporting.tally import MOST_TASKS, NUM_BINS, JournalTally
from volpipe.reporting.tasks import damage_note, task_sections
from volpipe.runs.worker import RESULTS, Inferred

BEGAN = 1_700_000_000.0


def line(stage: str = "infer", done: list[int] | None = None, **fields: object) -> dict[str, Any]:
    usage = {"started": BEGAN, "seconds": 1.0, "cpu_seconds": 0.5, "peak_bytes": 100, "host": "a", "pid": 1}
    return {"stage": stage, "done": [0] if done is None else done} | usage | fields


def attempt(stage: str = "infer", units: tuple[int, ...] = (0,), **fields: object) -> dict[str, Any]:
    return line(stage, [], result="Attempt", units=units, reason="OSError: no", number=1, **fields)


def written(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def random_lines(num: int, num_workers: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return lines of workers that do one task after the other, some of which fail."""
    rng, clocks, lines = random.Random(seed), [BEGAN] * num_workers, []
    for number in range(num):
        worker, seconds = rng.randrange(num_workers), rng.random() * 9
        fields: dict[str, Any] = {
            "started": clocks[worker], "seconds": seconds, "cpu_seconds": 2 * seconds, "host": f"n{worker % 3}",
            "pid": worker, "read_bytes": rng.randrange(999), "written_bytes": rng.randrange(99),
            "peak_bytes": rng.randrange(9999), "queued_seconds": rng.random(),
        }  # fmt: skip
        clocks[worker] += seconds
        if number % 10 == 9:
            lines.append(attempt(units=(number,), **fields))
        else:
            lines.append(line(rng.choice(["factor", "infer"]), [2 * number, 2 * number + 1], **fields))
    return lines


def sheet(sections: list[PageSection], title: str) -> dict[str, dict[str, object]]:
    """Return the rows of a table by their first cell, each by its columns."""
    found = next(item for part in sections for item in part.items if isinstance(item, Sheet) and item.title == title)
    return {str(row[0]): dict(zip(found.names, row, strict=True)) for row in found.rows}


def charts(sections: list[PageSection]) -> dict[str, Chart]:
    return {item.kind: item for part in sections for item in part.items if isinstance(item, Chart)}


def test_sums_are_those_of_the_lines(tmp_path: Path) -> None:
    lines = random_lines(700, 5)
    tally = JournalTally()
    tally.read(written(tmp_path / "a", *lines))
    done = [entry for entry in lines if entry["done"]]
    for name, groups in (("stage", tally.stages), ("host", tally.nodes)):
        for key, sums in groups.items():
            own = [entry for entry in done if entry[name] == key]
            assert sums.tasks == len(own) and sums.units == 2 * len(own)
            for field in ("seconds", "cpu_seconds", "queued_seconds", "read_bytes", "written_bytes"):
                assert getattr(sums, field) == pytest.approx(sum(entry[field] for entry in own))
            assert sums.peak_bytes == max(entry["peak_bytes"] for entry in own)
    assert tally.all.attempts == sum(not entry["done"] for entry in lines) == 70
    assert tally.all.lost_seconds == pytest.approx(sum(entry["seconds"] for entry in lines if not entry["done"]))
    assert set(tally.workers) == {(f"n{w % 3}", w) for w in range(5)}


@pytest.mark.parametrize("seed", range(4))
def test_bins_hold_every_second_of_every_task(tmp_path: Path, seed: int) -> None:
    lines = random_lines(2000, 4, seed)
    random.Random(seed).shuffle(lines)  # also where the first line is not the first in time
    tally = JournalTally()
    tally.read(written(tmp_path / "a", *lines))
    total = sum(map(sum, tally.bins.rows.values()))
    assert total == pytest.approx(sum(entry["seconds"] for entry in lines))
    for pid in range(4):
        own = [entry for entry in lines if entry["pid"] == pid]
        middle = (tally.bins.first + NUM_BINS // 4) * tally.bins.seconds
        early = sum(max(0.0, min(e["started"] + e["seconds"], middle) - e["started"]) for e in own)
        binned = sum(sum(row[: NUM_BINS // 4]) for (_, (_, key)), row in tally.bins.rows.items() if key == pid)
        assert binned == pytest.approx(early)


def test_tasks_of_each_session_are_its_own(tmp_path: Path) -> None:
    lines = [line(started=BEGAN + t) for t in (1, 2, 11, 12, 13)] + [attempt(started=BEGAN + 14)]
    tally = JournalTally([BEGAN, BEGAN + 10])
    tally.read(written(tmp_path / "a", *lines))
    assert [(sums.tasks, sums.attempts) for sums in tally.by_session] == [(2, 0), (3, 1)]
    rows = sheet(task_sections(tally, sites=[("slurm", BEGAN), ("local", BEGAN + 10)]), "By session")
    assert [(row["site"], row["tasks"], row["failed attempts"]) for row in rows.values()] == [
        ("slurm", 2, ""),
        ("local", 3, 1),
    ]


DAMAGED = [
    "no json", '{"stage": "infer"', "[1]", "null", '{"done": [1]}', '{"stage": 7, "done": [1]}',
    '{"stage": "infer", "done": 3}', json.dumps(line(seconds="long")),
    json.dumps(line(peak_bytes=None)), '{"stage":"infer","done":[1],"seconds":NaN}',
    '{"stage":"infer","done":[1],"started":Infinity}', '{"stage":"infer","done":["one"]}', "\x00\x00",
    '{"stage":"infer","done":[],"result":"Attempt"}', "1" * 5000,
]  # fmt: skip


def test_a_damaged_line_is_left_out_and_named(tmp_path: Path) -> None:
    whole, broken = JournalTally(), JournalTally()
    whole.read(written(tmp_path / "a", line(), line(done=[1])))
    broken.read(written(tmp_path / "b", line(), *DAMAGED, line(done=[1])))
    assert broken.stages == whole.stages and whole.num_damaged == 0
    assert broken.num_damaged == len(DAMAGED)
    note = damage_note(broken)
    assert note is not None and damage_note(whole) is None
    assert f"{len(DAMAGED)} lines of the journal cannot be understood" in note.text
    assert f"the first is line 2 of {tmp_path / 'b'}" in note.text


def test_the_last_line_may_still_be_written(tmp_path: Path) -> None:
    path = written(tmp_path / "a", line(), line(done=[1]))
    path.write_bytes(path.read_bytes()[:-9])
    tally = JournalTally()
    tally.read(path)
    assert tally.all.tasks == 1 and tally.num_damaged == 0
    tally.read(tmp_path / "none")
    assert tally.all.tasks == 1


def test_tasks_that_overlap_in_one_process_get_lanes_of_their_own(tmp_path: Path) -> None:
    lines = [line(started=BEGAN + t, seconds=10.0) for t in (0, 1, 2, 10.5, 11.5)] + [attempt(started=BEGAN + 20)]
    tally = JournalTally()
    tally.read(written(tmp_path / "a", *lines))
    data = charts(task_sections(tally))["timeline"].data
    bars = sorted(zip(data["worker"], data["began"], data["ended"], data["colour"], strict=True))
    assert {bar[0] for bar in bars} == {"process 1", "process 1 #2", "process 1 #3"}
    assert [bar[3] for bar in bars].count("failed attempt") == 1
    for one, other in itertools.pairwise(bars):
        assert one[0] != other[0] or one[2] <= other[1]


def test_a_lost_worker_has_a_lane_of_its_own_that_says_when(tmp_path: Path) -> None:
    lost = {"stage": "infer", "done": [], "result": "Attempt", "units": [3], "reason": "WorkerLost: gone", "number": 1}
    tally = JournalTally()
    tally.read(written(tmp_path / "a", line(), lost | {"started": BEGAN, "seconds": 5.0}))
    data = charts(task_sections(tally))["timeline"].data
    number = list(data["worker"]).index("lost workers")
    assert (data["ended"][number] - data["began"][number], data["failed"][number]) == (5000, "WorkerLost: gone")  # type: ignore[operator]
    assert sheet(task_sections(tally), "Failed attempts")


def test_a_slow_node_has_a_pace_above_one(tmp_path: Path) -> None:
    lines = [
        line(done=[i], host="slow" if i % 2 else "fast", pid=i % 2, seconds=3.0 if i % 2 else 1.0) for i in range(20)
    ]
    tally = JournalTally()
    tally.read(written(tmp_path / "a", *lines))
    rows = sheet(task_sections(tally), "By node")
    assert (rows["slow"]["pace"], rows["fast"]["pace"]) == ("1.50 ×", "0.50 ×")


def test_gpu_and_waiting_are_weighted_by_time(tmp_path: Path) -> None:
    gpu = {"device": "A100", "device_percent": 90.0, "device_used_bytes": 3 << 30, "device_seconds": 0.5}
    other = gpu | {"device_percent": 30.0, "seconds": 3.0, "device_seconds": 1.5, "queued_seconds": 4.0}
    tally = JournalTally()
    tally.read(written(tmp_path / "a", line(**gpu), line(done=[1], **other), line("pyramid 1")))
    rows = sheet(task_sections(tally), "By stage")
    assert rows["infer"]["GPU"] == "45 %" and rows["infer"]["GPU memory"] == "3.0 GiB"
    assert rows["infer"]["net on device"] == "50 %" and rows["infer"]["waiting"] == "50 %"
    assert rows["pyramid 1"]["GPU"] == ""


def test_many_tasks_become_tiles_in_bounded_memory(tmp_path: Path) -> None:
    """Three times the lines take no more memory, and the page of a million would not be larger."""
    peaks, sizes = [], []
    for num in (5_000, 15_000):
        path = written(tmp_path / f"{num}", *random_lines(num, 40))
        tracemalloc.start()
        tally = JournalTally()
        tally.read(path)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sections = task_sections(tally)
        sizes.append(len(render(Page("a", "b", sections)).encode()))
        assert tally.num_tasks > MOST_TASKS and charts(sections).keys() == {"at_work", "tiles"}
        tiles = charts(sections)["tiles"].data
        assert len(set(tiles["worker"])) == 40
        assert len(tiles["worker"]) <= 40 * NUM_BINS
        assert not any("{" in chart.caption for chart in charts(sections).values())
    assert peaks[1] < 1.2 * peaks[0] + 100_000
    assert max(sizes) < MOST_BYTES / 2


def test_as_many_tasks_as_are_kept_have_a_bar_each_and_fit(tmp_path: Path) -> None:
    lines = [line("reassemble", done=[10**6 + i], host=f"node-{i % 40:04}.example.org", pid=i % 40, started=BEGAN + i,
                  seconds=1.23456789, queued_seconds=0.123456, read_bytes=10**9 + i, written_bytes=10**8 + i,
                  peak_bytes=10**10) for i in range(MOST_TASKS)]  # fmt: skip
    tally = JournalTally()
    tally.read(written(tmp_path / "a", *lines))
    sections = task_sections(tally, box_of=lambda stage, unit: "12345:12345,12345:12345,12345:12345")
    assert len(charts(sections)["timeline"].data["began"]) == MOST_TASKS
    html = render(Page("a", "b", sections))
    assert "left out" not in html and "not shown" not in html
    assert len(html.encode()) < MOST_BYTES / 2


@pytest.mark.parametrize("growing", [1, -1], ids=["slower and slower", "faster and faster"])
def test_of_more_tasks_than_are_kept_one_by_one_the_slowest_are_kept_alone(tmp_path: Path, growing: int) -> None:
    seconds = [float(1 + (i if growing > 0 else 3_000 - i)) for i in range(MOST_TASKS + 40)]
    lines = [line(done=[i], started=BEGAN + i, seconds=took) for i, took in enumerate(seconds)]
    tally = JournalTally()
    tally.read(written(tmp_path / "most", *lines[:MOST_TASKS]))
    assert [task.seconds for task in tally.tasks] == seconds[:MOST_TASKS]
    tally = JournalTally()
    tally.read(written(tmp_path / "more", *lines))
    assert (tally.num_tasks, tally.tasks) == (len(lines), [])
    slowest = [task.seconds for task in tally.slowest]
    assert slowest == sorted(seconds, reverse=True)[: len(slowest)] and len(slowest) > 1


def test_a_task_that_does_not_say_when_it_began_is_not_kept_for_the_timeline(tmp_path: Path) -> None:
    tally = JournalTally()
    tally.read(written(tmp_path / "a", line(started=0), line(done=[1])))
    assert [task.units for task in tally.tasks] == [(1,)]
    assert tally.num_tasks == 2


def test_tasks_that_took_no_time_or_say_none_have_no_timeline(tmp_path: Path) -> None:
    for fields in ({"seconds": 0}, {"started": 0}):
        tally = JournalTally()
        tally.read(written(tmp_path / "a", line(**fields)))
        sections = task_sections(tally)
        assert not charts(sections) and sheet(sections, "By stage")["infer"]["tasks"] == 1
    assert not charts(task_sections(JournalTally()))


def test_more_workers_than_lanes_are_shown_by_node(tmp_path: Path) -> None:
    lines = [line(done=[i], host=f"n{i % 7}", pid=i, started=BEGAN + i) for i in range(6000)]
    tally = JournalTally()
    tally.read(written(tmp_path / "a", *lines))
    assert tally.all.tasks == 6000 and len(tally.workers) <= 2007
    sections = task_sections(tally)
    assert set(charts(sections)["tiles"].data["worker"]) == {f"n{i}" for i in range(7)}
    assert sum(int(str(row["tasks"])) for row in sheet(sections, "By node").values()) == 6000


# ---- the map of blocks


AXES = {"xy": (1, 2), "xz": (0, 2), "yz": (0, 1)}  # down, across


def charts_of_map(blocks: BlockMap) -> dict[str, Chart]:
    return {item.kind: item for item in blocks.items() if isinstance(item, Chart)}


def rows(chart: Chart) -> list[dict[str, Any]]:
    """Return the cells of a map as a table has them."""
    return [dict(zip(chart.data, values, strict=True)) for values in zip(*chart.data.values(), strict=True)]


def cell(table: Sequence[Mapping[str, Any]], plane: str, box: Any) -> Mapping[str, Any]:
    """Return the cell of a plane that a block's box lies in."""
    down, across = AXES[plane]
    (found,) = [
        row for row in table
        if row["plane"] == plane
        and row["y0"] <= box.start[down] < row["y1"] and row["x0"] <= box.start[across] < row["x1"]
    ]  # fmt: skip
    return found


def closed(blocks: BlockMap, missing: Sequence[int] = (), inactive: Sequence[int] = ()) -> None:
    stage = Stage(blocks.stage, len(blocks.grid))
    stage.done[:] = True
    stage.done[[*missing, *inactive]] = False
    if inactive:
        stage.active = np.ones(len(blocks.grid), bool)
        stage.active[[*inactive]] = False
    blocks.close(stage)


def test_a_slow_block_a_bad_node_and_what_failed_are_seen_from_all_sides() -> None:
    grid = Grid((64, 80, 96), (16, 16, 16))
    blocks, slow, failed, gone = BlockMap("infer", grid), 37, 11, 90
    for unit in range(len(grid)):
        if unit != gone:
            blocks.add([unit], 50.0 if unit == slow else 1 + unit / 1000, "bad" if unit == slow else "good")
    blocks.add_attempt([failed])
    closed(blocks, missing=[gone], inactive=[3])
    found = charts_of_map(blocks)
    table = rows(found["block_times"])
    assert len(table) == 5 * 6 + 4 * 6 + 4 * 5
    for plane in AXES:
        assert cell(table, plane, grid.box(slow))["seconds"] == 50.0
        assert cell(table, plane, grid.box(slow))["node"] == "bad"
        assert sum(row["seconds"] == 50.0 for row in table if row["plane"] == plane) == 1
        assert [row for row in table if row["plane"] == plane and row["tries"]] == [
            cell(table, plane, grid.box(failed))
        ]
        assert [row for row in table if row["plane"] == plane and row["missing"]] == [
            cell(table, plane, grid.box(gone))
        ]
        assert sum(row["blocks"] for row in table if row["plane"] == plane) == len(grid) - 1
    assert found["block_nodes"].data["node"] == found["block_times"].data["node"]
    assert "50.0 s at most" in found["block_times"].caption


@settings(max_examples=30)
@given(
    st.tuples(*[st.integers(1, 70)] * 3), st.tuples(*[st.integers(1, 3)] * 3), st.integers(0, 2**32), st.integers(1, 40)
)
def test_cells_are_those_that_brute_force_gives(
    shape: tuple[int, int, int], block: tuple[int, int, int], seed: int, batch: int
) -> None:
    grid = Grid(tuple(min(n, 40 * b) for n, b in zip(shape, block, strict=True)), block)
    rng = np.random.default_rng(seed)
    units = rng.permutation(len(grid))[: min(len(grid), 500)].tolist()
    seconds = {unit: float(f"{value:.2g}") for unit, value in zip(units, rng.random(len(units)), strict=True)}
    blocks = BlockMap("infer", grid)
    previous, block_map.BATCH = block_map.BATCH, batch
    try:
        for unit in units:
            blocks.add([unit], seconds[unit], "node")
        closed(blocks)
    finally:
        block_map.BATCH = previous
    found = charts_of_map(blocks)
    table = rows(found["block_times"]) if found else []
    known = {plane: [row for row in table if row["plane"] == plane] for plane in AXES}
    for plane, own in known.items():
        boxes = {unit: cell(own, plane, grid.box(unit)) for unit in units} if own else {}
        for row in own:
            inside = [seconds[unit] for unit, own_cell in boxes.items() if own_cell is row]
            assert row["blocks"] == len(inside)
            assert row["seconds"] == (max(inside) if inside else None)
            if inside:
                assert row["mean"] == pytest.approx(np.mean(inside), rel=6e-3)


def test_a_million_blocks_make_a_small_map_in_seconds() -> None:
    grid = Grid((6400, 6400, 6400), (64, 64, 64))
    blocks = BlockMap("infer", grid)
    started = time.perf_counter()
    for first in range(0, len(grid), 64):
        slow = first // 64 == 7777
        blocks.add(range(first, min(first + 64, len(grid))), 640.0 if slow else 64.0, f"node{first // 64 % 100}")
    closed(blocks)
    (times, nodes) = charts_of_map(blocks).values()
    assert time.perf_counter() - started < 30  # 0.3 s, 2026-11-23
    for chart in (times, nodes):
        assert len(json.dumps({name: list(values) for name, values in chart.data.items()})) < 400_000
    assert {row["seconds"] for row in rows(times)} == {1.0, 10.0}
    assert len(set(nodes.data["node"])) <= block_map.MOST_NODES + 1


def test_one_block_has_no_map() -> None:
    blocks = BlockMap("infer", Grid((64, 64, 64), (64, 64, 64)))
    blocks.add([0], 3.0, "node")
    closed(blocks)
    assert charts_of_map(blocks) == {}


def test_lines_of_a_journal_are_added_and_damaged_ones_left_out(tmp_path: Path) -> None:
    path, grid = tmp_path / "journal.jsonl", Grid((64, 64, 64), (32, 32, 32))
    with Journal(path, RESULTS) as journal:
        journal.append(Record("infer", (0, 1), result=Inferred(shared=(5,)), usage=Usage(seconds=6.0, host="one")))
        journal.append(Record("infer", (), result=Attempt((2,), "out of memory", 1), usage=Usage(seconds=9.0)))
        journal.append(Record("infer", (2,), usage=Usage(seconds=4.0, host="two")))
        journal.append(Record("pyramid 1", (0,), usage=Usage(seconds=100.0)))
    with path.open("ab") as file:
        file.write(b'{"stage": "infer", "done": "three"}\n{"stage": 3}\nnonsense\n{"stage": "infer", "done": [7')
    blocks = BlockMap("infer", grid)
    JournalTally(maps={"infer": blocks}).read(path)
    closed(blocks, missing=range(3, 8))
    table = [row for row in rows(charts_of_map(blocks)["block_times"]) if row["plane"] == "xy"]
    assert [row["seconds"] for row in table] == [3.0, 3.0, 4.0, None]
    assert [row["node"] for row in table] == ["one", "one", "two", None]
    assert [row["tries"] for row in table] == [0, 0, 1, 0]
    assert [row["missing"] for row in table] == [1, 1, 1, 2]
