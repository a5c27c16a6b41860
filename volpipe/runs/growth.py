"""Growth: a volume that has become longer along an axis, and what of its output is as it was.

Not here: what else has changed in it (update). Windows, blocks and shards keep the sizes that they had, so that a block
keeps its place, and is numbered anew. What lay at the old face is made again: blocks that saw it mirrored,
or whose windows weigh otherwise beside new ones, and shards that it cut::

    before   |  0  |  1  |  2 ┊                 the face
    now      |  0  |  1  |  2  |  3  |  4 ┊     2 is computed again, 3 and 4 for the first time

A coarser level has faces of its own: where the old one ended whole blocks, it may have cut shards there all the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from volpipe.blockwise.journal import Journal, Record
from volpipe.errors import RunError
from volpipe.geometry.blend import span
from volpipe.geometry.grid import Grid, Triple
from volpipe.inference.output_plan import OutputPlan
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection
from volpipe.inference.tiling import AXES
from volpipe.runs.output_work import OutputWork
from volpipe.runs.prepasses import Work, known_normalisation
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.schedule import RunSchedule
from volpipe.runs.update import Again, rests_on
from volpipe.runs.update_records import BLOCKS, STAGE, Updated, to_ranges
from volpipe.runs.verify import written

log = logging.getLogger(__name__)

P = TypeVar("P", bound=OutputPlan)


class Blocks(Protocol):
    """A plan whose tasks compute blocks and write shards."""

    @property
    def blocks(self) -> Grid:
        """Its blocks."""

    @property
    def factors(self) -> Sequence[Triple]:
        """Of each level of the output."""

    def shards(self, level: int = 0) -> Grid:
        """Return the shards of `level`."""


def grids_of(plan: Blocks) -> dict[str, tuple[int, int, int]]:
    """Return the numbers of blocks and of shards (z, y, x) by which a journal's records are numbered."""
    grids: dict[str, Grid] = {BLOCKS: plan.blocks} | {f"s{i}": plan.shards(i) for i in range(len(plan.factors))}
    return {name: (grid.counts[0], grid.counts[1], grid.counts[2]) for name, grid in grids.items()}


def grown_from(plan: P, folder: RunFolder, *following: str) -> P | None:
    """Return `plan` with the sizes of what was begun in `folder` before the volume grew; None where nothing grew.

    Levels that were begun keep their factors, and others follow them: those that a volume of a few slices begins with
    are not always those of a thicker one.

    Args:
        following: fields of the plan that follow from the shape of the volume.

    Raises:
        RunError: the volume has shrunk, or the output cannot grow.
    """
    old = folder.load(type(plan))
    if old is None or old.source.shape == plan.source.shape:
        return None
    grown = plan.as_begun(old).with_levels(old.factors)
    longer = old.source.of_shape(plan.source.shape)
    as_now = {name: getattr(grown, name) for name in ("factors", *following)}
    if old.changed(source=longer, **as_now).identity != grown.identity:
        return None  # something else differs too, which is refused with what that is
    _check_growth(old, grown)
    return grown


def _check_growth(old: OutputPlan, new: OutputPlan) -> None:
    """Refuse a volume that has shrunk, or an output that cannot grow.

    Raises:
        RunError: saying why.
    """
    for axis, before, now in zip(AXES, old.source.shape, new.source.shape, strict=True):
        if now < before:
            raise RunError(
                f"axis {axis}: the volume {new.source.path} had {before} voxels and has {now}; --update follows a "
                "volume that grows, not one that shrinks: use --fresh to start over"
            )
    if not new.folders.scheme.is_regular:
        raise RunError(
            f"{new.out} is {new.format}, which numbers its chunks by the shape, so that all would move; the volume has "
            "grown: use --fresh to start over"
        )
    if old.dtype != new.dtype:
        raise RunError(
            f"the volume {new.source.path} has grown to more voxels than labels of type {old.dtype} can name; use "
            f"--fresh to start over with {new.dtype}"
        )


def follow(work: Work, old: Work) -> Updated:
    """Note in the journal that the volume has grown since the plan of `old`, from when on that of `work` counts."""
    selection, normalise = Selection(work.plan), known_normalisation(old)
    again = _made_again(work.plan, old)
    is_measured = work.plan.grey_rule.needs_measuring
    taken = again.taken(work.plan) | {"factor": to_ranges(range(len(work.plan.blocks)))}
    if is_measured and normalise is None:
        taken |= dict.fromkeys(("measure", "histogram"), taken["factor"])
    kept = normalise.rows if is_measured and normalise is not None else ()
    shapes = (" × ".join(map(str, each.plan.source.shape)) for each in (old, work))
    update = Updated(
        time.time(), len(again.changed), len(again.blocks), selection.num_blocks, kept,
        "the volume has grown from {} to {}".format(*shapes), work.plan.identity, taken=taken,
    )  # fmt: skip
    return grow(work, old.plan, update)


def grow(work: OutputWork[Any, Any], before: Blocks, update: Updated) -> Updated:
    """Note the `update` in the journal of `work`, whose units had the numbers of the plan `before`, and return it.

    A kill before the journal has it leaves the old plan, one after it the new one.
    """
    work.before_change()
    numbered = replace(update, before=grids_of(before), now=grids_of(work.plan))
    work.folder.store_next(work.plan)
    with Journal(work.folder.journal, work.kinds) as journal:
        journal.append(Record(STAGE, (), result=numbered))
    work.folder.store(work.plan)
    log.info("%s", update)
    return numbered.noted()


def _made_again(plan: Plan, old: Work) -> Again:
    """Return what of the output of `old` is to be made again, numbered as `plan` has it."""
    before, selection = old.plan, Selection(plan)
    schedule = RunSchedule(plan, selection)
    blocks = _moved_cells(before, plan, lambda each: each.blocks, _window_weights)
    shards = set(_moved_cells(before, plan, lambda each: each.shards(), _adding_blocks))
    there = {shard for level, shard in written(old.records) if level == 0}
    for shard in range(len(before.shards())):  # sums of blocks that wait for it are not kept
        if shard not in there and not before.is_direct(shard):
            shards.add(plan.shards().number(before.shards().index(shard)))
    changed = [block for block in blocks if selection.has_block(block)]

    def cut(level: int) -> list[int]:
        """Return the shards of a coarser level that the old face cut; there may be more levels now."""
        if level >= len(before.factors):
            return []
        return _moved_cells(before, plan, lambda each: each.shards(level), partial(_shard_ends, level))

    return rests_on(changed, schedule, selection, filter(selection.is_unwritten, shards), cut)


def _moved_cells(
    before: Plan, now: Plan, grid_of: Callable[[Plan], Grid], facts: Callable[[Plan, int, int], object]
) -> list[int]:
    """Return the cells of a grid of `before`, ascending and numbered as `now` has them, of which some fact is another.

    Args:
        facts: returns what counts of the cells at a place along an axis.
    """
    old, new = grid_of(before), grid_of(now)
    flags = np.zeros(old.counts, bool)
    for axis, size in enumerate(old.counts):
        shape = [1, 1, 1]
        shape[axis] = -1
        moved = [facts(before, axis, place) != facts(now, axis, place) for place in range(size)]
        flags |= np.asarray(moved, bool).reshape(shape)
    return sorted(new.number(tuple(place)) for place in np.argwhere(flags).tolist())


def _shard_ends(level: int, plan: Plan, axis: int, shard: int) -> tuple[int, int]:
    """Return where shards of `level` at a place along `axis` end, and where what they show of the finer one does."""
    shards, finer = plan.shards(level), plan.shards(level - 1)
    stop = min((shard + 1) * shards.cell[axis], shards.shape[axis])
    return stop, min(stop * plan.step(level)[axis], finer.shape[axis])


def _window_weights(plan: Plan, axis: int, block: int) -> list[tuple[int, int, bytes]]:
    """Return the place and the weights along `axis` of each window of the blocks at `block`."""
    lattice, scale, windows = plan.lattice, plan.net.scale[axis], plan.lattice.windows_along(axis, block)
    spans = [(lattice.start_along(axis, i), span(plan.blend, lattice, axis, i, scale)) for i in windows]
    return [(start, each.start, each.weights.tobytes()) for start, each in spans]


def _adding_blocks(plan: Plan, axis: int, shard: int) -> tuple[int, range]:
    """Return where the shards at a place along `axis` end, and the places of the blocks that add to them."""
    return min((shard + 1) * plan.shard[axis], plan.out_shape[axis]), plan.blocks_along(axis, shard)
