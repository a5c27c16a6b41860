"""An update of a segmentation: blocks whose input has changed, and what rests on them.

Not here: how files and voxels are compared (runs.update), or the journal's records (runs.update_records). Fragments of
changed blocks are made again, the edges of these and of their neighbours, the boxes of the graph around them, and the
names of all. With the objects the journal takes back the labels that have changed, by the digests of the fragments and
names of each block::

    blocks                |  0  |  1  | *2* |  3  |  4  |      2 has changed
    fragments                         | *2* |
    edges                       |  1  |  2  |  3  |
    labels                      |  1  |  2  |                  the others are as they were painted
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.blockwise.journal import Record
from volpipe.blockwise.work import Steps
from volpipe.geometry.grid import Box
from volpipe.runs.growth import grow
from volpipe.runs.input_comparison import InputComparison
from volpipe.runs.output_work import OutputWork
from volpipe.runs.unit_records import WorkSession
from volpipe.runs.update import changed_blocks
from volpipe.runs.update_records import SEEN, STAGE, Updated, to_ranges
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.tasks import EDGES, FRAGMENTS, IDS, SOLVED, SegmentJob, submitter

Work = OutputWork[SegmentPlan, Any]  # Any: the result of a segmentation
log = logging.getLogger(__name__)


def update_steps(work: Work, session: WorkSession, compared: InputComparison) -> Steps[Updated | None]:
    """Find what has changed in the input of `work`, and take back in its journal what rests on it; None: nothing.

    Raises:
        RunStopped: the input cannot be read.
    """
    log.info("looking for what has changed in %s", work.plan.source.path)
    job = SegmentJob(str(work.folder.path), work.plan.identity, session.name)
    is_changed = yield from changed_blocks(session, compared, lambda pool: partial(submitter, pool, job))
    changed: list[int] = np.flatnonzero(is_changed).tolist()
    if not changed:
        return None
    plan, folder = work.plan, work.folder.path
    blocks = set(changed) | _missing_files(folder, FRAGMENTS, plan)
    edges = _near(plan, changed) | _missing_files(folder, EDGES, plan)
    boxes = {unit for block in blocks | edges for unit in plan.boxes.around(block)}
    boxes |= {unit for unit in range(len(plan.boxes)) if not (folder / SOLVED / f"{unit}.npz").is_file()}
    taken = {SEEN: to_ranges(changed)} | _taken(plan, blocks, edges, boxes)
    work.before_change()
    update = Updated(time.time(), len(changed), len(blocks), len(plan.blocks), taken=taken)
    session.journal.append(Record(STAGE, (), result=update))
    log.info("%s", update)
    return update


def _taken(plan: SegmentPlan, blocks: Iterable[int], edges: Iterable[int], boxes: Iterable[int]) -> dict[str, str]:
    """Return what is made again: with a box all around it; labels are taken back when the objects are known."""
    own = {"pieces": to_ranges(sorted(blocks)), "edges": to_ranges(sorted(edges)), "solve": to_ranges(sorted(boxes))}
    sizes = {"number": plan.boxes.num_slabs, "name": len(plan.boxes), "graph": 1}
    return own | {stage: to_ranges(range(size)) for stage, size in sizes.items()}


def _near(plan: SegmentPlan, blocks: Iterable[int]) -> set[int]:
    """Return the blocks whose edges rest on the fragments of `blocks`."""
    return {near for block in blocks for near in plan.blocks.touching(plan.around(block))}


def _missing_files(folder: Path, stage: str, plan: SegmentPlan) -> set[int]:
    """Return the blocks whose file of `stage`, or array of fragments, is not there: only updates keep these."""
    if not (folder / IDS).is_dir() or not (folder / stage).is_dir():
        return set(range(len(plan.blocks)))
    with os.scandir(folder / stage) as files:
        there = {file.name for file in files}
    return {block for block in range(len(plan.blocks)) if f"{block}.npz" not in there}


def follow(work: Work, before: SegmentPlan) -> Updated:
    """Note in the journal that the volume has grown since the plan `before`, from when on that of `work` counts."""
    plan = work.plan
    changed, edges = set(_changed_boxes(before, plan, "input_box")), set(_changed_boxes(before, plan, "around"))
    # voxels, and so fragments, are numbered in C order of the volume
    if before.shape[1:] != plan.shape[1:] or plan.method.sees_shape:
        changed = edges = set(_changed_boxes(before, plan, ""))
    blocks = changed | _missing_files(work.folder.path, FRAGMENTS, before)
    edges |= _missing_files(work.folder.path, EDGES, before)
    shapes = (" × ".join(map(str, each.source.shape)) for each in (before, plan))
    boxes = range(max(len(before.boxes), len(plan.boxes)))
    taken = {SEEN: to_ranges(sorted(changed))} | _taken(plan, blocks, edges | _near(plan, changed), boxes)
    update = Updated(
        time.time(), len(changed), len(blocks), len(plan.blocks), (),
        "the volume has grown from {} to {}".format(*shapes), plan.identity, taken=taken,
    )  # fmt: skip
    return grow(work, before, update)


def _changed_boxes(before: SegmentPlan, now: SegmentPlan, what: str) -> Iterator[int]:
    """Yield the blocks of `before`, numbered as `now` has them, that have another box of that name; all for ""."""

    def box(plan: SegmentPlan, block: int) -> Box:
        named: Box = getattr(plan, what)(block)
        return named

    for block in range(len(before.blocks)):
        number = now.blocks.number(before.blocks.index(block))
        if not what or box(before, block) != box(now, number):
            yield number
