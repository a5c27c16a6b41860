"""The map of blocks: a slow block, a bad node, retries and missing blocks are where they were, by brute force."""

from __future__ import annotations

import json
import time
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
from volpipe.reporting.page import Chart
from volpipe.reporting.tally import Tally
from volpipe.runs.worker import RESULTS, Inferred

AXES = {"xy": (1, 2), "xz": (0, 2), "yz": (0, 1)}  # down, across


def charts(blocks: BlockMap) -> dict[str, Chart]:
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
    found = charts(blocks)
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
    found = charts(blocks)
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
    (times, nodes) = charts(blocks).values()
    assert time.perf_counter() - started < 30  # 0.3 s, 2026-11-23
    for chart in (times, nodes):
        assert len(json.dumps({name: list(values) for name, values in chart.data.items()})) < 400_000
    assert {row["seconds"] for row in rows(times)} == {1.0, 10.0}
    assert len(set(nodes.data["node"])) <= block_map.MOST_NODES + 1


def test_one_block_has_no_map() -> None:
    blocks = BlockMap("infer", Grid((64, 64, 64), (64, 64, 64)))
    blocks.add([0], 3.0, "node")
    closed(blocks)
    assert charts(blocks) == {}


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
    Tally(maps={"infer": blocks}).read(path)
    closed(blocks, missing=range(3, 8))
    table = [row for row in rows(charts(blocks)["block_times"]) if row["plane"] == "xy"]
    assert [row["seconds"] for row in table] == [3.0, 3.0, 4.0, None]
    assert [row["node"] for row in table] == ["one", "one", "two", None]
    assert [row["tries"] for row in table] == [0, 0, 1, 0]
    assert [row["missing"] for row in table] == [1, 1, 1, 2]
