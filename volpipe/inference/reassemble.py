"""Reassemble: shards of the output from the sums of blocks, each written once; block tensors of what is left of a sum.

A shard is written by the block that finishes it, whole or slab by slab, while the next one is computed; or by a task of
its own, which adds the block tensors that reach it. Not here: the sum of a block (block_sum), or coarser levels
(pyramid).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self, TypeVar

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.inference.block_sum import BlockSum
from volpipe.inference.intensity import ALL_FINITE, Affine, Nonfinite, Tally
from volpipe.inference.output import (
    append_selected,
    append_summed,
    close_shard,
    join_arrays,
    open_shard,
    shards_at_once,
    summed,
    write_selected,
)
from volpipe.inference.scratch import SumStream, Tensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import WindowSource
from volpipe.volumes.storage.requests import in_turn

MOST_CLOSING = 1  # blocks whose files are stored for good while later ones are computed
R = TypeVar("R")


@dataclass(frozen=True)
class BlockResult:
    """Shards that a block wrote.

    Attributes:
        shared: shards that it wrote and shares with other blocks.
        bad: voxels that were not finite, and were stored so.
        checksums: of all shards that it wrote, by their number.
        clipped: voxels that were clipped to the type of the output, by shard, where other blocks may add to that.
        clipped_in_block: those of a block that finishes all of its shards.
        fingerprint: of the voxels that it read.
    """

    shared: tuple[int, ...] = ()
    bad: Nonfinite = ALL_FINITE
    checksums: Mapping[int, str] = field(default_factory=dict)
    clipped: Mapping[int, int] = field(default_factory=dict)
    clipped_in_block: int = 0
    fingerprint: str = ""

    @classmethod
    def joined(cls, arrays: Sequence[BlockResult]) -> BlockResult:
        """Return what a block wrote of all `arrays` of an output, of which it finishes the same shards."""
        first = arrays[0]
        if len(arrays) == 1:
            return first
        return replace(
            first,
            bad=sum((each.bad for each in arrays), ALL_FINITE),
            checksums={shard: join_arrays(each.checksums[shard] for each in arrays) for shard in first.checksums},
            clipped=dict(sum((Counter(each.clipped) for each in arrays), Counter())),
            clipped_in_block=sum(each.clipped_in_block for each in arrays),
        )


Outcome = tuple[int, Exception | BlockResult]  # of a block


def write_block(selection: Selection, tensors: Tensors, done: BlockSum, fingerprint: str = "") -> BlockResult:
    """Write the shards that block `done` finishes, and return them.

    It finishes the shards that no later block adds to, if the sums of earlier blocks are there; the rest of its sum
    goes to scratch. Shards without a selected voxel, and those that were written before, do not count.
    """
    for array in done.arrays:
        array.check()
    closed, stored = _destinations(selection, tensors, done.block)
    parts = zip(selection.arrays, tensors.arrays, done.arrays, strict=True)
    return BlockResult.joined([_write_array(*part, closed, stored, fingerprint) for part in parts])


def _write_array(
    selection: Selection,
    tensors: Tensors,
    done: BlockSum,
    closed: Mapping[int, Sequence[int]],
    stored: Collection[int] | None,
    fingerprint: str,
) -> BlockResult:
    """Write the shards of one array that block `done` finishes; arguments as `_destinations` gives them."""
    plan = selection.plan
    if stored is not None:
        tensors.write_sum(done, stored)
    tallies = defaultdict[int, Tally](Tally)

    def writes() -> Iterator[Callable[[], str]]:
        for shard, blocks in closed.items():
            box = plan.shards().box(shard)
            data = (
                done.part(box) if done.is_finished else _summed(selection, tensors, done, box, blocks, tallies[shard])
            )
            yield partial(write_selected, selection, box, data)

    checksums = dict(zip(closed, in_turn(writes(), shards_at_once(plan)), strict=True))
    clipped = {shard: tally.clipped for shard, tally in tallies.items()}
    clipped_in_block = done.clipped if done.is_finished and closed else 0
    shared = tuple(shard for shard in closed if not plan.is_direct(shard))
    return BlockResult(shared, done.bad, checksums, clipped, clipped_in_block, fingerprint)


def _destinations(
    selection: Selection, tensors: Tensors, block: int
) -> tuple[Mapping[int, Sequence[int]], Collection[int] | None]:
    """Return the shards that `block` finishes now, each with the blocks that add to it, ascending; and the shards that
    the rest of its sum, in scratch, leaves out, None where there is no rest.
    """
    plan = selection.plan
    reached = plan.shards_of_block(block)
    shards = list(filter(selection.is_due, reached))
    contributors = {
        s: list(filter(selection.has_block, plan.blocks_of_shard(s))) if plan.num_sums else [block] for s in shards
    }
    closed = {
        shard: blocks
        for shard, blocks in contributors.items()
        if blocks[-1] == block and all(tensors.has_sums(b, shard) for b in blocks[:-1])
    }
    if len(closed) == len(shards):
        return closed, None
    other = [] if selection.due is None else [shard for shard in reached if not selection.due[shard]]
    return closed, [*closed, *other]


def _summed(
    selection: Selection, tensors: Tensors, done: BlockSum, box: Box, blocks: Sequence[int], tally: Tally
) -> np.ndarray:
    """Return the sums of `blocks` in `box` as they will be stored, (c, z, y, x); `tally` counts the clipped voxels.

    The last of them is `done`; where it is the only one that adds, they are finished on its device.
    """
    plan = selection.plan
    data = np.empty((plan.num_channels, *box.shape), plan.dtype)
    own = plan.sole_box(done.block) & done.box & box
    if own.is_empty or selection.mask(own) is not None:  # sums of voxels that are not selected may be partial
        own = Box(box.start, box.start)
    else:
        data[:, *own.relative_to(box.start).slices] = done.finished(own, tally)
    total = tensors.total(box, blocks[:-1])
    for rest in box.without(own):
        place, reached = rest.relative_to(box.start).slices, rest & done.box
        if not reached.is_empty:
            total[:, *reached.relative_to(box.start).slices] += done.part(reached)
        data[:, *place] = summed(selection, done.normalise, rest, total[:, *place], tally)
    return data


class SlabWriter:
    """What a block writes while it is computed slab by slab: shards that it finishes, and the rest of its sum."""

    def __init__(self, selection: Selection, tensors: Tensors, block: int) -> None:
        closed, stored = _destinations(selection, tensors, block)
        parts = zip(selection.arrays, tensors.arrays, strict=True)
        self._arrays = [_ArrayWriter(*part, block, closed, stored) for part in parts]

    def add(self, done: BlockSum) -> None:
        """Write the layers of the slab `done`, those before it to which others alone add, and after the last one.

        Raises:
            NonfiniteError: as `BlockSum.check`.
        """
        for array in done.arrays:
            array.check()
        for writer, array in zip(self._arrays, done.arrays, strict=True):
            writer.add(array)

    def persist(self) -> None:
        """Store for good what was added so far; what goes wrong is raised by `close`."""
        for writer in self._arrays:
            writer.persist()

    def close(self, fingerprint: str) -> BlockResult:
        """Put the files in their places, once all slabs were added, and return what was noted of the block."""
        return BlockResult.joined([writer.close(fingerprint) for writer in self._arrays])

    def abort(self) -> None:
        """Delete what was written of files that are not whole."""
        for writer in self._arrays:
            writer.abort()


class _ArrayWriter:
    """What `SlabWriter` writes of one array; arguments as `_destinations` gives them."""

    def __init__(
        self,
        selection: Selection,
        tensors: Tensors,
        block: int,
        closed: Mapping[int, Sequence[int]],
        stored: Collection[int] | None,
    ) -> None:
        self.selection, self.tensors, self.block = selection, tensors, block
        self._streams = {shard: (open_shard(selection.plan, shard), blocks) for shard, blocks in closed.items()}
        self._rest = None if stored is None else SumStream(tensors, block, stored)
        self._bad, self._tallies, self._clipped = ALL_FINITE, defaultdict[int, Tally](Tally), 0
        self._error: Exception | None = None

    def add(self, done: BlockSum) -> None:
        selection, shards = self.selection, self.selection.plan.shards()
        if self._rest is not None:
            self._rest.append(done, done.box)
        for shard, (stream, blocks) in self._streams.items():
            box = shards.box(shard)
            if not done.is_finished:
                stop = box.stop[0] if done.is_last else min(done.box.stop[0], box.stop[0])
                make = partial(_summed, selection, self.tensors, done, blocks=blocks, tally=self._tallies[shard])
                append_summed(selection, stream, box.along(0, stream.position, max(stream.position, stop)), make)
            elif not (box & done.box).is_empty:
                append_selected(selection, stream, box & done.box, done.part(box & done.box))
            if len(self._streams) > 1:
                stream.settle()
        if self._streams and done.is_finished:
            self._clipped += done.clipped
        self._bad += done.bad

    def persist(self) -> None:
        try:
            for stream, _ in self._streams.values():
                stream.persist()
        except Exception as error:
            self._error = self._error or error

    def close(self, fingerprint: str) -> BlockResult:
        if self._error is not None:
            raise self._error
        plan = self.selection.plan
        if self._rest is not None:
            self._rest.close()
        checksums = {shard: close_shard(plan, shard, stream) for shard, (stream, _) in self._streams.items()}
        clipped = {shard: tally.clipped for shard, tally in self._tallies.items()}
        shared = tuple(shard for shard in self._streams if not plan.is_direct(shard))
        return BlockResult(shared, self._bad, checksums, clipped, self._clipped, fingerprint)

    def abort(self) -> None:
        for stream, _ in self._streams.values():
            stream.abort()
        if self._rest is not None:
            self._rest.abort()


class BlockWriter:
    """Writes blocks, whole or slab by slab, in threads; of what is not whole in the end, nothing stays.

    Files of slabs are stored for good, and put in their places, by a thread of its own, while others are written: a
    disk takes as long for that as a GPU for many slabs.

    Args:
        before_write: called before each part of a block is written; what it raises is the block's error.

    Attributes:
        failed: blocks that could not be written.
    """

    def __init__(
        self, selection: Selection, tensors: Tensors, source: WindowSource, before_write: Callable[[], None]
    ) -> None:
        self.selection, self.tensors, self.source, self.before_write = selection, tensors, source, before_write
        self.failed = set[int]()
        self._slabs: SlabWriter | None = None  # of the block whose slabs come
        self._writing = deque[tuple[int, Future[Future[BlockResult] | None]]]()
        self._closing = deque[tuple[int, Future[BlockResult]]]()

    def __enter__(self) -> Self:
        self._closer = ThreadPoolExecutor(1, "volpipe-close")
        self._writer = ThreadPoolExecutor(self.selection.plan.blocks_behind, "volpipe-write")
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.shutdown()
        self.give_up()
        self._closer.shutdown()

    def submit(self, done: BlockSum) -> None:
        """Let `done` be written."""
        self._writing.append((done.block, self._writer.submit(self._write, done)))

    def written(self, but: int) -> Iterator[Outcome]:
        """Yield what became of blocks whose writing is over, and wait for the writing of all but so many slabs."""
        while len(self._writing) > but:
            block, future = self._writing.popleft()
            closed = _outcome(future)
            if isinstance(closed, Exception):
                yield block, closed
            elif closed is not None:
                self._closing.append((block, closed))
            yield from self.closed(MOST_CLOSING)

    def closed(self, but: int) -> Iterator[Outcome]:
        """Yield what became of blocks whose files are in their places, and wait for those of all but so many."""
        while self._closing and (len(self._closing) > but or self._closing[0][1].done()):
            block, future = self._closing.popleft()
            outcome = _outcome(future)
            yield block, outcome

    def _write(self, done: BlockSum) -> Future[BlockResult] | None:
        """Write `done`, and return what its block will have given; None while slabs follow, or if it has failed."""
        if done.block in self.failed:
            return None
        with self._giving_up(done.block):
            self.before_write()
            if done.slab is None:
                whole = Future[BlockResult]()
                whole.set_result(write_block(self.selection, self.tensors, done, self.source.fingerprint(done.block)))
                return whole
            if self._slabs is None:
                self._slabs = SlabWriter(self.selection, self.tensors, done.block)
            self._slabs.add(done)
            if not done.is_last:
                self._closer.submit(self._slabs.persist)
                return None
            slabs, fingerprint = self._slabs, self.source.fingerprint(done.block)
        self._slabs = None
        closed = self._closer.submit(self._close, done.block, slabs, fingerprint)
        if self.selection.plan.num_sums:  # the next block looks for what this one left
            wait([closed])
        return closed

    def _close(self, block: int, slabs: SlabWriter, fingerprint: str) -> BlockResult:
        """Put the files of `block` in their places, whose `slabs` were all written."""
        with self._giving_up(block, slabs):
            self.before_write()  # the last slab may have taken long
            return slabs.close(fingerprint)

    @contextmanager
    def _giving_up(self, block: int, slabs: SlabWriter | None = None) -> Iterator[None]:
        """Note that `block` has failed where what is done meanwhile raises, and delete what was written of it."""
        try:
            yield
        except BaseException:
            self.failed.add(block)
            if slabs is None:
                self.give_up()
            else:
                slabs.abort()
            raise

    def give_up(self) -> None:
        """Delete what was written of a block whose slabs do not all come."""
        if self._slabs is not None:
            self._slabs.abort()
        self._slabs = None


def _outcome(future: Future[R]) -> R | Exception:
    """Return what `future` gives, or its error."""
    error = future.exception()  # not raised: a traceback through here would keep the block's sum
    if error is None:
        return future.result()
    if not isinstance(error, Exception):
        raise error
    return error


def reassemble(
    selection: Selection, normalise: Affine, tensors: Tensors, shard: int, tally: Tally
) -> Callable[[], str]:
    """Return what writes `shard` of level 0, and returns its checksums; `tally` counts the clipped voxels.

    Blocks are added in ascending order, so that the bits depend on nothing else. Where the format allows it, the shard
    is written layer by layer, into a bucket only a large one; else its voxels are in memory by now.
    """
    parts = zip(selection.arrays, tensors.arrays, strict=True)
    writes = [_reassemble_array(each, normalise, own, shard, tally) for each, own in parts]
    return lambda: join_arrays(write() for write in writes)


def _reassemble_array(
    selection: Selection, normalise: Affine, tensors: Tensors, shard: int, tally: Tally
) -> Callable[[], str]:
    """Return what writes `shard` of one array; see `reassemble`."""
    plan = selection.plan
    whole = plan.shards().box(shard)
    blocks = list(filter(selection.has_block, plan.blocks_of_shard(shard)))

    def added(box: Box) -> np.ndarray:
        return summed(selection, normalise, box, tensors.total(box, blocks), tally)

    if not plan.is_streamed or (plan.is_in_bucket and not plan.has_slabs):
        return partial(write_selected, selection, whole, added(whole))

    def write() -> str:
        stream = open_shard(plan, shard)
        try:
            append_summed(selection, stream, whole, added)
            return close_shard(plan, shard, stream)
        finally:
            stream.abort()  # nothing is left once it is closed

    return write
