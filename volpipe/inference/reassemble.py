"""Reassemble: shards of the output from the sums of blocks, each written once; block tensors of what is left of a sum.

A shard is written by the block that finishes it, slab by slab, while the next one is computed; or by a task of its own,
which adds the block tensors that reach it. Not here: the sum of a block (block_sum), or coarser levels
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
from volpipe.inference.intensity import ALL_FINITE, Affine, ClippedVoxels, Nonfinite
from volpipe.inference.output import (
    ShardFile,
    append_voxels,
    close_shard,
    join_arrays,
    open_shard,
    selected,
    shards_at_once,
    summed,
    summed_layers,
    writing_shard,
)
from volpipe.inference.scratch import ScratchTensors, SumStream
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
        """Return the result of a block over all `arrays` of an output, of which it finishes the same shards."""
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


def _destinations(
    selection: Selection, tensors: ScratchTensors, block: int
) -> tuple[Mapping[int, Sequence[int]], Collection[int] | None]:
    """Return the shards that `block` finishes now, each with the blocks that add to it, ascending; and the shards that
    the rest of its sum, in scratch, leaves out, None where there is no rest.
    """
    plan = selection.plan
    reached = plan.shards_of_block(block)
    shards = list(filter(selection.is_unwritten, reached))
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
    other = [] if selection.unwritten is None else [shard for shard in reached if not selection.unwritten[shard]]
    return closed, [*closed, *other]


def _summed(
    selection: Selection, tensors: ScratchTensors, done: BlockSum, box: Box, blocks: Sequence[int], tally: ClippedVoxels
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


class BlockFiles:
    """What a block writes while its slabs come: shards that it finishes, and the rest of its sum.

    It finishes the shards that no later block adds to, if the sums of earlier blocks are there; the rest of its sum
    goes to scratch. Shards without a selected voxel, and those that were written before, do not count.
    """

    def __init__(self, selection: Selection, tensors: ScratchTensors, block: int) -> None:
        closed, stored = _destinations(selection, tensors, block)
        parts = zip(selection.arrays, tensors.arrays, strict=True)
        self._arrays = [_ArrayFiles(*part, block, closed, stored) for part in parts]

    def add(self, done: BlockSum) -> None:
        """Write the layers of the slab `done`, those before it to which others alone add, and after the last one.

        Raises:
            NonfiniteError: as `BlockSum.check`.
        """
        for array in done.arrays:
            array.check()
        for files, array in zip(self._arrays, done.arrays, strict=True):
            files.add(array)

    def persist(self) -> None:
        """Store for good what was added so far; what goes wrong is raised by `close`."""
        for files in self._arrays:
            files.persist()

    def close(self, fingerprint: str) -> BlockResult:
        """Put the files in their places, once all slabs were added, and return what was noted of the block."""
        return BlockResult.joined([files.close(fingerprint) for files in self._arrays])

    def abort(self) -> None:
        """Delete what was written of files that are not whole."""
        for files in self._arrays:
            files.abort()


class _ArrayFiles:
    """What `BlockFiles` writes of one array; arguments as `_destinations` gives them."""

    def __init__(
        self,
        selection: Selection,
        tensors: ScratchTensors,
        block: int,
        closed: Mapping[int, Sequence[int]],
        stored: Collection[int] | None,
    ) -> None:
        self.selection, self.tensors = selection, tensors
        self._shards = {shard: (open_shard(selection.plan, shard), blocks) for shard, blocks in closed.items()}
        self._rest = None if stored is None else SumStream(tensors, block, stored)
        self._bad, self._tallies, self._clipped = ALL_FINITE, defaultdict[int, ClippedVoxels](ClippedVoxels), 0
        self._error: Exception | None = None

    def add(self, done: BlockSum) -> None:
        if self._rest is not None:
            self._rest.append(done.box, done.part)
        writes = (
            partial(self._append, file, box, data)
            for shard, (file, blocks) in self._shards.items()
            for box, data in self._determined_layers(shard, file.position, blocks, done)
        )
        in_turn(writes, shards_at_once(self.selection.plan))
        if self._shards and done.is_finished:
            self._clipped += done.clipped
        self._bad += done.bad

    def _append(self, file: ShardFile, box: Box, data: np.ndarray) -> None:
        append_voxels(self.selection.plan, file, box, data)
        if len(self._shards) > 1:
            file.settle()

    def _determined_layers(
        self, shard: int, position: int, blocks: Sequence[int], done: BlockSum
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield the layers of `shard` from `position` on that `done` determines, as they will be stored."""
        selection, box = self.selection, self.selection.plan.shards().box(shard)
        if done.is_finished:
            if not (inside := box & done.box).is_empty:
                yield inside, selected(selection, inside, done.part(inside))
            return
        stop = box.stop[0] if done.is_last else min(done.box.stop[0], box.stop[0])
        summed = partial(_summed, selection, self.tensors, done, blocks=blocks, tally=self._tallies[shard])
        yield from summed_layers(selection, box.along(0, position, max(position, stop)), summed)

    def persist(self) -> None:
        try:
            for file, _ in self._shards.values():
                file.persist()
        except Exception as error:
            self._error = self._error or error

    def close(self, fingerprint: str) -> BlockResult:
        if self._error is not None:
            raise self._error
        plan = self.selection.plan
        if self._rest is not None:
            self._rest.close()
        checksums = {shard: close_shard(plan, shard, file) for shard, (file, _) in self._shards.items()}
        clipped = {shard: tally.clipped for shard, tally in self._tallies.items()}
        shared = tuple(shard for shard in self._shards if not plan.is_direct(shard))
        return BlockResult(shared, self._bad, checksums, clipped, self._clipped, fingerprint)

    def abort(self) -> None:
        for file, _ in self._shards.values():
            file.abort()
        if self._rest is not None:
            self._rest.abort()


class BlockWriter:
    """Writes blocks, slab by slab, in threads; files that are not whole in the end are deleted.

    Large files are stored for good, and put in their places, by a thread of its own, while others are written: a disk
    takes as long for that as a GPU for many slabs.

    Args:
        before_write: called before each part of a block is written; what it raises is the block's error.

    Attributes:
        failed: blocks that could not be written.
    """

    def __init__(
        self, selection: Selection, tensors: ScratchTensors, source: WindowSource, before_write: Callable[[], None]
    ) -> None:
        self.selection, self.tensors, self.source, self.before_write = selection, tensors, source, before_write
        self.failed = set[int]()
        self._files: dict[int, BlockFiles] = {}  # of blocks whose slabs come
        self._writing = deque[tuple[int, Future[Future[BlockResult] | None]]]()
        self._closing = deque[tuple[int, Future[BlockResult]]]()

    def __enter__(self) -> Self:
        self._closer = ThreadPoolExecutor(1, "volpipe-close")
        self._writer = ThreadPoolExecutor(self.selection.plan.blocks_behind, "volpipe-write")
        return self

    def __exit__(self, *error: object) -> None:
        self._writer.shutdown()
        for block in [*self._files]:
            self.give_up(block)
        self._closer.shutdown()

    def submit(self, done: BlockSum) -> None:
        """Let `done` be written."""
        self._writing.append((done.block, self._writer.submit(self._write_slab, done)))

    def written(self, but: int) -> Iterator[Outcome]:
        """Yield the outcomes of blocks that failed or are closed; wait until at most `but` slabs are being written."""
        while len(self._writing) > but:
            block, future = self._writing.popleft()
            closed = _outcome(future)
            if isinstance(closed, Exception):
                yield block, closed
            elif closed is not None:
                self._closing.append((block, closed))
            yield from self.closed(MOST_CLOSING)

    def closed(self, but: int) -> Iterator[Outcome]:
        """Yield the outcomes of blocks that are closed; wait until at most `but` are being closed."""
        while self._closing and (len(self._closing) > but or self._closing[0][1].done()):
            block, future = self._closing.popleft()
            outcome = _outcome(future)
            yield block, outcome

    def _write_slab(self, done: BlockSum) -> Future[BlockResult] | None:
        """Write `done`; return the future result of its block, None while slabs follow or if the block has failed."""
        block = done.block
        if block in self.failed:
            return None
        with self._giving_up(block):
            self.before_write()
            if block not in self._files:
                self._files[block] = BlockFiles(self.selection, self.tensors, block)
            files = self._files[block]
            files.add(done)
            if not done.is_last:
                self._closer.submit(files.persist)
                return None
            fingerprint = self.source.fingerprint(block)
        closed = self._closer.submit(self._close_files, block, fingerprint)
        if self.selection.plan.num_sums:  # the next block looks for what this one left
            wait([closed])
        return closed

    def _close_files(self, block: int, fingerprint: str) -> BlockResult:
        """Put the files of `block` in their places, whose slabs were all written."""
        with self._giving_up(block):
            self.before_write()  # the last slab may have taken long
            result = self._files[block].close(fingerprint)
            del self._files[block]
            return result

    @contextmanager
    def _giving_up(self, block: int) -> Iterator[None]:
        """Note that `block` has failed where what is done meanwhile raises, and delete what was written of it."""
        try:
            yield
        except BaseException:
            self.failed.add(block)
            self.give_up(block)
            raise

    def give_up(self, block: int) -> None:
        """Delete what was written of `block`, whose slabs do not all come."""
        if (files := self._files.pop(block, None)) is not None:
            files.abort()


def _outcome(future: Future[R]) -> R | Exception:
    """Return what `future` gives, or its error."""
    error = future.exception()  # not raised: a traceback through here would keep the block's sum
    if error is None:
        return future.result()
    if not isinstance(error, Exception):
        raise error
    return error


def reassemble(
    selection: Selection, normalise: Affine, tensors: ScratchTensors, shard: int, tally: ClippedVoxels
) -> Callable[[], str]:
    """Return a function that writes `shard` of level 0, and returns its checksums; `tally` counts the clipped voxels.

    Blocks are added in ascending order, so that the bits depend on nothing else. The voxels of a shard that is not
    written layer by layer are in memory by now.
    """
    parts = zip(selection.arrays, tensors.arrays, strict=True)
    writes = [_reassemble_array(each, normalise, own, shard, tally) for each, own in parts]
    return lambda: join_arrays(write() for write in writes)


def _reassemble_array(
    selection: Selection, normalise: Affine, tensors: ScratchTensors, shard: int, tally: ClippedVoxels
) -> Callable[[], str]:
    """Return a function that writes `shard` of one array; see `reassemble`."""
    plan = selection.plan
    blocks = list(filter(selection.has_block, plan.blocks_of_shard(shard)))

    def added(box: Box) -> np.ndarray:
        return summed(selection, normalise, box, tensors.total(box, blocks), tally)

    return writing_shard(plan, shard, summed_layers(selection, plan.shards().box(shard), added))
