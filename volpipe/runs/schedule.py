"""The schedule: which units of work there are, what each waits for, and which may start now.

Not here: starting anything (blockwise.loop). Units are numbers; a flag per unit and stage is all that is kept, so that
the driver's memory stays flat. Dependants are counted by looking at their few neighbours, never by holding futures.

    factor(block) ─► infer(block) ─► reassemble(shard) ─► pyramid 1(shard) ─► pyramid 2(shard) …
                          └─ shards that a block finishes are done with it ─────┘
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, partial
from typing import Generic, TypeVar

import numpy as np

from volpipe.blockwise.stage import Feed, Schedule, Stage, fed
from volpipe.geometry.grid import Box
from volpipe.inference.output_plan import OutputPlan
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection

P = TypeVar("P", bound=OutputPlan)


class OutputSchedule(Schedule, Generic[P]):
    """The stages that make an output: those of its voxels, which write the shards of level 0, and a stage per level.

    Args:
        stages: that make level 0, in the order in which they get a turn.
        due: by level, a flag for each shard, whether it is written in the end; None where all of the level are.
        readers: of the output's levels, where other work reads them meanwhile.
    """

    def __init__(
        self,
        plan: P,
        stages: Sequence[Stage],
        due: Sequence[np.ndarray | None],
        readers: Sequence[Feed],
    ) -> None:
        self.plan, self.due, self.readers = plan, due, readers
        self.pyramid = [
            Stage(
                f"pyramid {i}",
                len(plan.shards(i)),
                waits=partial(self._lacks_finer, i),
                active=due[i],
                doing="interpolating to the volume's grid" if i == plan.finest else "writing a coarser level",
            )
            for i in range(1, len(plan.factors))
        ]
        super().__init__(*reversed(self.pyramid), *stages)

    def open_readers(self) -> None:
        """Let other work read the output, whose metadata are there now."""
        for reader in self.readers:
            level = reader.level + self.plan.finest
            shards = self.plan.array(reader.array).shards(level)
            reader.open(
                shards, (n for n in range(len(shards)) if not self._is_due(level, n) or self._is_written(level, n))
            )

    def is_missing(self, level: int, shard: int) -> bool:
        """Return whether `shard` of `level` is still to be written."""
        return self._is_due(level, shard) and not self._is_written(level, shard)

    def _is_due(self, level: int, shard: int) -> bool:
        """Return whether `shard` of `level` is written in the end."""
        flags = self.due[level]
        return flags is None or bool(flags[shard])

    def _finish_shard(self, level: int, shard: int) -> None:
        for reader in self.readers:
            if reader.level + self.plan.finest == level:
                reader.add(shard)
        if level < len(self.pyramid):
            for coarser in self.coarser(level + 1, shard):
                self.pyramid[level].offer(coarser)

    def _coarser_kept_back(self, lost: Set[int]) -> Iterator[tuple[Stage, int]]:
        """Yield the units of coarser levels that cannot be done without the shards of level 0 that are `lost`."""
        for level, stage in enumerate(self.pyramid, 1):
            lost = {coarser for shard in lost for coarser in self.coarser(level, shard)}
            yield from ((stage, shard) for shard in sorted(lost))
            lost |= stage.failed

    def coarser(self, level: int, shard: int) -> Iterable[int]:
        """Return the shards of `level` that show `shard` of the level before: one, unless they lie on another grid."""
        own, shards = self.plan.shards(level - 1).box(shard), self.plan.shards(level)
        around = shards.touching(self.plan.coarser_box(level, own))
        if level != self.plan.finest:
            return around
        return (n for n in around if not (self.plan.finer_box(level, shards.box(n)) & own).is_empty)

    def _lacks_finer(self, level: int, shard: int) -> bool:
        box = self.plan.finer_box(level, self.plan.shards(level).box(shard))
        finer = self.plan.shards(level - 1).touching(box)
        return not all(self._is_written(level - 1, s) for s in finer if self._is_due(level - 1, s))

    @abstractmethod
    def _is_first_written(self, shard: int) -> bool:
        """Return whether `shard` of level 0 is there."""

    def _is_written(self, level: int, shard: int) -> bool:
        return bool(self.pyramid[level - 1].done[shard]) if level else self._is_first_written(shard)


class RunSchedule(OutputSchedule[Plan]):
    """The stages of a run and what releases what; `plan` and `readers` are as of `OutputSchedule`.

    Args:
        selection: what of it is selected; all of its region where it is not given.
        keep_tensors: whether window tensors and block tensors stay.
        most_waiting: blocks of windows that may wait for the net at a time, beside those that it failed on.
        feed: the volume, where other work is still writing it.
    """

    def __init__(
        self,
        plan: Plan,
        selection: Selection | None = None,
        *,
        keep_tensors: bool = False,
        most_waiting: int = 64,
        feed: Feed | None = None,
        readers: Sequence[Feed] = (),
    ) -> None:
        selection = selection or Selection(plan)
        self.keep_tensors = keep_tensors
        self.most_waiting = most_waiting
        num_blocks, stored = len(plan.blocks), plan.mode == "stored"
        blocks, num_sums = selection.blocks, selection.num_sums
        due = [selection.shards(level) for level in range(len(plan.factors))]
        cutting = "cutting the volume into windows"
        self.factor = Stage("factor", num_blocks if stored else 0, active=blocks if stored else None, doing=cutting)
        waits = (lambda block: not self.factor.done[block]) if stored else None
        row = plan.blocks.counts[2] if num_sums else 0
        self.infer = Stage(
            "infer", num_blocks, label="gpu", waits=waits, active=blocks, row=row, doing="running the net"
        )
        num_shards = len(plan.shards()) if num_sums else 0
        active = due[0] if num_sums else None
        self.reassemble = Stage(
            "reassemble",
            num_shards,
            num_sums,
            waits=self._lacks_sums,
            active=active,
            doing="joining blocks in the output",
        )
        self.discards = {
            what: Stage(
                f"discard {what}", size, waits=lambda unit: True, marked=False, doing="deleting scratch tensors"
            )
            for what, size in (("windows", num_blocks), ("sum", num_blocks * len(plan.sum_parts)))
        }
        self._num_outside = 0  # blocks, not seen by the net, that this session leaves alone
        fed(self.factor if stored else self.infer, feed, selection.input_box)
        stages = (self.reassemble, *self.discards.values(), self.infer, self.factor)
        super().__init__(plan, stages, due, readers)

    @property
    def shown(self) -> list[Stage]:
        """The stages that have units, in the order of a voxel's life."""
        return [s for s in (self.factor, self.infer, self.reassemble, *self.pyramid) if s.num_units]

    def resume(self, done: Iterable[Mapping[str, Sequence[int] | np.ndarray]]) -> None:
        """Mark what an earlier session finished; see `Schedule`."""
        super().resume(done)
        self.factor.leave_out(self.infer.done[: self.factor.size])
        for stage in (self.infer, self.reassemble, *self.pyramid):
            stage.look_again()

    def limit(self, box: Box) -> None:
        """Compute in this session only the blocks that the shards in `box` of the output need; call it after `resume`.

        Shards and coarser levels that are whole by that are written, wherever they lie.
        """
        outside = np.ones(len(self.plan.blocks), bool)
        for shard in filter(partial(self._is_due, 0), self.plan.shards().touching(box)):
            outside[list(self.plan.blocks_of_shard(shard))] = False
        self._num_outside = int(np.count_nonzero(outside & ~self.infer.done))
        self.infer.hold(outside)
        self.factor.hold(outside[: self.factor.size])

    def take(self, stage: Stage, most: int) -> list[int]:
        """Return up to `most` units of `stage` that may start now."""
        if stage is self.factor:
            most = min(most, self.most_waiting - self._num_waiting())
        elif stage is self.infer and any(late.ready for late in (self.reassemble, *self.discards.values())):
            # What joins and frees sums had its turn before, and its workers have all that they may have at a time.
            # So the net waits, or scratch would grow beyond what was planned.
            return []
        return stage.take(most) if most > 0 else []

    def _num_waiting(self) -> int:
        """Return how many blocks have windows, or are getting them, that the net has not seen and still may see."""
        num_begun = self.factor.num_taken - len(self.factor.ready)
        num_over = self.infer.num_done + len(self.factor.failed) + len(self.infer.failed)
        return num_begun - num_over - self._num_outside

    def finish(self, stage: Stage, unit: int) -> None:
        """Mark `unit` done and offer what waited for it."""
        stage.mark(unit)
        if stage is self.factor:
            self.infer.offer(unit)
        elif stage is self.infer:
            self._finish_block(unit)
        elif stage is self.reassemble:
            self._finish_shard(0, unit)
            for block in self.plan.blocks_of_shard(unit):
                self._discard_sum(block)
        elif stage in self.pyramid:
            self._finish_shard(self.pyramid.index(stage) + 1, unit)

    def kept_back(self) -> Iterator[tuple[Stage, int]]:
        """Yield the units that cannot be done because one that they need failed."""
        plan, lost = self.plan, {block for _, block in self.starved()} | self.factor.failed | self.infer.failed
        yield from ((self.infer, block) for block in sorted(lost - self.infer.failed))
        lost = {shard for block in lost for shard in plan.shards_of_block(block) if self._is_due(0, shard)}
        yield from ((self.reassemble, shard) for shard in sorted(lost) if not plan.is_direct(shard))
        yield from self._coarser_kept_back(lost | self.reassemble.failed)

    @property
    def share_left(self) -> float:
        """Return the share of blocks, 0 to 1, that the net has not seen."""
        return self.infer.num_left / self.infer.num_units

    @property
    def is_complete(self) -> bool:
        return all(stage.num_done == stage.num_units for stage in (self.infer, self.reassemble, *self.pyramid))

    def _finish_block(self, block: int) -> None:
        plan = self.plan
        if plan.mode == "stored":
            self._discard("windows", block)
        for shard in filter(partial(self._is_due, 0), plan.shards_of_block(block)):
            if plan.is_direct(shard):
                self._finish_shard(0, shard)
            else:
                self.reassemble.offer(shard)

    def _discard_sum(self, block: int) -> None:
        """Discard what nobody needs any more of the tensor of `block`: parts are numbered block by block."""
        plan = self.plan
        if self.keep_tensors or not self.infer.has(block):
            return
        place, (_, ny, nx) = plan.blocks.index(block), plan.shards().counts
        for unit, along in enumerate(self._reached, block * len(plan.sum_parts)):
            if self.discards["sum"].taken[unit]:
                continue
            z, y, x = (ranges[k] for ranges, k in zip(along, place, strict=True))
            is_used = False
            for shard in ((k * ny + j) * nx + i for k in z for j in y for i in x):  # that is done last comes first
                if self.reassemble.done[shard]:
                    is_used = True
                elif self._is_due(0, shard) and not plan.is_direct(shard):
                    break
            else:
                if is_used:
                    self._discard("sum", unit)

    @cached_property
    def _reached(self) -> list[list[list[range]]]:
        """The places of the shards that sums reach, by part, by axis, and by the place of their block along that."""
        return [[self._reached_along(axis, part) for axis in range(3)] for part in self.plan.sum_parts]

    def _reached_along(self, axis: int, part: Box) -> list[range]:
        plan, cell, ranges = self.plan, self.plan.shard[axis], list[range]()
        for k in range(plan.blocks.counts[axis]):
            block = plan.blocks.number(tuple(k if other == axis else 0 for other in range(3)))
            box = part.shift(plan.core_start(block)) & plan.sum_box(block)
            places = range(box.start[axis] // cell, -(-box.stop[axis] // cell))
            ranges.append(places[::-1] if box.shape[axis] else places[:0])
        return ranges

    def _discard(self, what: str, unit: int) -> None:
        stage = self.discards[what]
        if not self.keep_tensors and not stage.taken[unit]:
            stage.taken[unit] = True
            stage.ready.append(unit)

    def _lacks_sums(self, shard: int) -> bool:
        blocks = self.plan.blocks_of_shard(shard)
        # The last one comes last, as a rule.
        return len(blocks) == 1 or not all(self.infer.done[b] for b in reversed(blocks) if self.infer.has(b))

    def _is_first_written(self, shard: int) -> bool:
        blocks = self.plan.blocks_of_shard(shard)
        return bool(self.infer.done[blocks[0]] if len(blocks) == 1 else self.reassemble.done[shard])

    def box(self, stage: Stage, unit: int) -> Box:
        """Return the box (z, y, x) of the output that `unit` makes."""
        if stage in self.pyramid:
            level = self.pyramid.index(stage) + 1
            return self.plan.shards(level).box(unit).scaled(self.plan.factors[level]) & Box.from_shape(
                self.plan.shown_shape
            )
        box = self.plan.shards().box(unit) if stage is self.reassemble else self.plan.sum_box(unit)
        return self.plan.shown_box(box)
