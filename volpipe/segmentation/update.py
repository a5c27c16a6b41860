"""An update of a segmentation: blocks whose input has changed, and what rests on them.

Not here: how files and voxels are compared (runs.update), or the journal's records (runs.updates). Fragments of changed
blocks are made again, the edges of these and of their neighbours, the boxes of the graph around them, and the names of
all. Until they are known all labels are open; then only those that have changed, by the digests of the fragments and
names of each block::

    blocks                |  0  |  1  | *2* |  3  |  4  |      2 has changed
    fragments                         | *2* |
    edges                       |  1  |  2  |  3  |
    labels                      |  1  |  2  |                  the others are as they were painted
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.blockwise.journal import Journal, Record
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import POOL, Steps
from volpipe.geometry.grid import Box
from volpipe.runs.growth import grids_of
from volpipe.runs.output_work import OutputWork
from volpipe.runs.update import LOOK, Comparison, changed_blocks, compare_known, find_known, looked
from volpipe.runs.updates import SEEN, STAGE, Updated, is_due, to_ranges, updates_in
from volpipe.runs.work import WorkSession
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.tasks import EDGES, FRAGMENTS, IDS, RESULTS, SOLVED, Objects, SegmentJob, submitter
from volpipe.units import count

Work = OutputWork[SegmentPlan, Any]  # Any: the result of a segmentation
log = logging.getLogger(__name__)

MARK = b'"result":"Objects"'


def standing_updates(
    journal: Path, plan: SegmentPlan, *, is_pending: bool = True, with_due: bool = True
) -> list[tuple[int, Updated]]:
    """Return the updates in a segmentation's `journal`, each with the number of its line, with the labels they took.

    These are known once the graph is solved again; before, all are taken, unless `is_pending` is False.
    `with_due` is as of `updates_in`.
    """
    updates = updates_in(journal, RESULTS, plan.identity, with_due=is_pending and with_due)
    if not updates:
        return []
    with journal.open("rb") as lines:
        solved = [(n, Record.from_line(line, RESULTS).result) for n, line in enumerate(lines) if MARK in line]
    ends, standing, is_open = [*(line for line, _ in updates[1:]), math.inf], [], False
    for (start, update), end in zip(updates, ends, strict=True):
        painted = [objects.painted for n, objects in solved if start < n < end and isinstance(objects, Objects)]
        is_open = not painted and (is_open or "graph" in update.taken)
        labels = painted[-1] if painted else {}
        if is_open and end == math.inf and is_pending:
            labels = {f"s{i}": to_ranges(range(len(plan.shards(i)))) for i in range(len(plan.factors))}
        standing.append((start, dataclasses.replace(update, taken=update.taken | labels)))
    return standing


def compare(work: Work) -> Comparison:
    """Return how the input compares with what the blocks of `work` read, as far as the states of its files tell."""
    plan, schedule = work.plan, work.resumed()[0]
    known = find_known(work.records(), len(plan.blocks))
    return compare_known(known, plan.source.as_planned(), plan.input_box, schedule.by_name["pieces"].done)


def update_steps(work: Work, session: WorkSession) -> Steps[Updated | None]:
    """Find what has changed in the input of `work`, and take back in its journal what rests on it; None: nothing.

    Raises:
        RunStopped: the input cannot be read.
    """
    log.info("looking for what has changed in %s", work.plan.source.path)
    found = compare(work)
    changed, why = found.changed | found.unknown, ""
    if found.unknown.any():
        num = int(found.unknown.sum())
        why = f"{count(num, 'block')} of an earlier version, which did not note what blocks read, are computed again"
        log.warning("%s", why)
    if found.moved.any():
        known = find_known(work.records(), len(work.plan.blocks))
        pool: WorkerPool = yield POOL
        job = SegmentJob(str(work.folder.path), work.plan.identity, session.name)
        changed |= changed_blocks(known, (yield from looked(session, partial(submitter, pool, job), LOOK, found.moved)))
    return _take_back(work, session.journal, np.flatnonzero(changed).tolist(), why)


def _take_back(work: Work, journal: Journal, changed: list[int], why: str) -> Updated | None:
    plan, blocks, taken = work.plan, set(changed), dict[str, str]()
    if not changed and not is_due(work.folder.journal, RESULTS, plan.identity):
        return None
    if changed:
        blocks |= _lost(work.folder.path, FRAGMENTS, plan)
        edges = _near(plan, changed) | _lost(work.folder.path, EDGES, plan)
        boxes = {unit for block in blocks | edges for unit in plan.boxes.around(block)} | _unsolved(
            work.folder.path, plan
        )
        taken = {SEEN: to_ranges(changed)} | _taken(plan, blocks, edges, boxes)
        work.before_change()
    update = Updated(
        time.time(), len(changed), len(blocks), len(plan.blocks), taken, (), why, plan.identity, plan.identity
    )
    journal.append(Record(STAGE, (), result=update))
    log.info("%s", update)
    return update if changed else None


def _taken(plan: SegmentPlan, blocks: Iterable[int], edges: Iterable[int], boxes: Iterable[int]) -> dict[str, str]:
    """Return what is made again: with a box all around it, and all labels."""
    own = {"pieces": to_ranges(sorted(blocks)), "edges": to_ranges(sorted(edges)), "solve": to_ranges(sorted(boxes))}
    sizes = {"number": plan.boxes.num_slabs, "name": len(plan.boxes), "graph": 1}
    return own | {stage: to_ranges(range(size)) for stage, size in sizes.items()}


def _unsolved(folder: Path, plan: SegmentPlan) -> set[int]:
    """Return the boxes whose file is gone."""
    return {unit for unit in range(len(plan.boxes)) if not (folder / SOLVED / f"{unit}.npz").is_file()}


def _near(plan: SegmentPlan, blocks: Iterable[int]) -> set[int]:
    """Return the blocks whose edges rest on the fragments of `blocks`."""
    return {near for block in blocks for near in plan.blocks.touching(plan.around(block))}


def _lost(folder: Path, stage: str, plan: SegmentPlan) -> set[int]:
    """Return the blocks whose file of `stage`, or array of fragments, is gone: only updates keep them."""
    if not (folder / IDS).is_dir() or not (folder / stage).is_dir():
        return set(range(len(plan.blocks)))
    with os.scandir(folder / stage) as files:
        there = {file.name for file in files}
    return {block for block in range(len(plan.blocks)) if f"{block}.npz" not in there}


def follow(work: Work, old: Work) -> Updated:
    """Note in the journal that the volume has grown since the plan of `old`, and store that of `work`.

    A kill before the plan is stored leaves the old one, for which the journal is as it was.
    """
    plan, before = work.plan, old.plan
    changed, edges = set(_moved(before, plan, "input_box")), set(_moved(before, plan, "around"))
    if before.shape[1:] != plan.shape[1:]:  # voxels, and so fragments, are numbered in C order of the volume
        changed = edges = set(_moved(before, plan, ""))
    blocks = changed | _lost(work.folder.path, FRAGMENTS, before)
    edges |= _lost(work.folder.path, EDGES, before)
    shapes = (" × ".join(map(str, each.source.shape)) for each in (before, plan))
    boxes = range(max(len(before.boxes), len(plan.boxes)))
    taken = {SEEN: to_ranges(sorted(changed))} | _taken(plan, blocks, edges | _near(plan, changed), boxes)
    update = Updated(
        time.time(), len(changed), len(blocks), len(plan.blocks), taken, (),
        "the volume has grown from {} to {}".format(*shapes), before.identity, plan.identity, grids_of(before),
    )  # fmt: skip
    work.before_change()
    with Journal(work.folder.journal, RESULTS) as journal:
        journal.append(Record(STAGE, (), result=update))
    work.folder.store(plan)
    log.info("%s", update)
    return update


def _moved(before: SegmentPlan, now: SegmentPlan, what: str) -> Iterator[int]:
    """Yield the blocks of `before`, numbered as `now` has them, that have another box of that name; all for ""."""

    def box(plan: SegmentPlan, block: int) -> Box:
        named: Box = getattr(plan, what)(block)
        return named

    for block in range(len(before.blocks)):
        number = now.blocks.number(before.blocks.index(block))
        if not what or box(before, block) != box(now, number):
            yield number
