"""Infer: the net runs over the windows of blocks; their weighted sums become shards of the output, or block tensors.

A block's voxels go to the net's device once, as they are stored. There they are cut into windows, normalised, computed,
weighted, added and finished; what comes back is what is written. Reading the next block, computing this one and writing
the last one overlap: each has a thread. Not here: where voxels come from (windows), the net on its device (runner), the
sum of a block (block_sum), or the order of blocks (schedule).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from volpipe.errors import NetError
from volpipe.geometry.grid import Box
from volpipe.inference.block_sum import BlockSum
from volpipe.inference.intensity import ALL_FINITE, Affine, Nonfinite, Tally
from volpipe.inference.output import (
    append_selected,
    close_shard,
    open_shard,
    shards_at_once,
    summed,
    write_selected,
)
from volpipe.inference.runner import Bus, Runner, load_runner
from volpipe.inference.scratch import Tensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import Batch, Voxels, WindowSource, ahead, batches
from volpipe.volumes.storage.requests import in_turn
from volpipe.volumes.writer import ShardStream

if TYPE_CHECKING:
    import torch

BATCHES_AHEAD, BLOCKS_AHEAD = 2, 0  # beside the next one


@dataclass(frozen=True)
class BlockResult:
    """Shards that a block wrote.

    Attributes:
        shared: shards that it wrote and shares with other blocks.
        bad: voxels that were not finite, and were stored so.
        checksums: of all shards that it wrote, by their number.
        clipped: voxels that were clipped to the type of the output, by shard; where the block finishes all of its
            shards, they are counted in the first.
        fingerprint: of the voxels that it read.
    """

    shared: tuple[int, ...] = ()
    bad: Nonfinite = ALL_FINITE
    checksums: Mapping[int, str] = field(default_factory=dict)
    clipped: Mapping[int, int] = field(default_factory=dict)
    fingerprint: str = ""


def write_block(selection: Selection, tensors: Tensors, done: BlockSum, fingerprint: str = "") -> BlockResult:
    """Write the shards that block `done` finishes, and return them.

    It finishes the shards that no later block adds to, if the sums of earlier blocks are there; the rest of its sum
    goes to scratch. Shards without a selected voxel, and those that were written before, do not count.
    """
    plan = selection.plan
    done.check()
    reached = plan.shards_of_block(done.block)
    shards = list(filter(selection.is_due, reached))
    contributors = {
        s: list(filter(selection.has_block, plan.blocks_of_shard(s))) if plan.num_sums else [done.block] for s in shards
    }
    closed = [
        shard
        for shard, blocks in contributors.items()
        if blocks[-1] == done.block and all(tensors.has_sum(b, plan.shards().box(shard)) for b in blocks[:-1])
    ]
    if len(closed) < len(shards):
        other = [] if selection.due is None else [shard for shard in reached if not selection.due[shard]]
        tensors.write_sum(done, [*closed, *other])
    clipped = dict[int, int]()

    def writes() -> Iterator[Callable[[], str]]:
        for shard in closed:
            box = plan.shards().box(shard)
            if done.is_finished:
                data = done.part(box)
            else:
                data, clipped[shard] = _summed(selection, tensors, done, box, contributors[shard])
            yield partial(write_selected, selection, box, data)

    checksums = dict(zip(closed, in_turn(writes(), shards_at_once(plan)), strict=True))
    if done.is_finished and closed:
        clipped[closed[0]] = done.clipped
    shared = tuple(shard for shard in closed if not plan.is_direct(shard))
    return BlockResult(shared, done.bad, checksums, clipped, fingerprint)


def _summed(
    selection: Selection, tensors: Tensors, done: BlockSum, box: Box, blocks: Sequence[int]
) -> tuple[np.ndarray, int]:
    """Return the sums of `blocks` in `box` as they will be stored, (c, z, y, x), and how many voxels were clipped.

    The last of them is `done`; where it is the only one that adds, they are finished on its device.
    """
    plan, tally = selection.plan, Tally()
    data = np.empty((plan.net.out_channels, *box.shape), plan.dtype)
    own = plan.sole_box(done.block) & box
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
    return data, tally.clipped


class SlabWriter:
    """The shards of one block at a time, which grow slab by slab, and what is noted of it."""

    def __init__(self, selection: Selection) -> None:
        self.selection = selection
        self._streams: dict[int, ShardStream] = {}
        self._bad, self._clipped = ALL_FINITE, 0

    def add(self, done: BlockSum) -> None:
        """Append the slab `done` of the block to its shards.

        Raises:
            NonfiniteError: as `BlockSum.check`.
        """
        done.check()
        for shard in filter(self.selection.is_due, self.selection.plan.shards().touching(done.box)):
            if shard not in self._streams:
                self._streams[shard] = open_shard(self.selection.plan, shard)
            box = self.selection.plan.shards().box(shard) & done.box
            append_selected(self.selection, self._streams[shard], box, done.part(box))
        self._bad, self._clipped = self._bad + done.bad, self._clipped + done.clipped

    def close(self, fingerprint: str) -> BlockResult:
        """Put the shards in their places, once all slabs were added, and return what was noted of the block."""
        checksums = {shard: close_shard(self.selection.plan, shard, stream) for shard, stream in self._streams.items()}
        clipped = {next(iter(checksums)): self._clipped} if checksums else {}
        result = BlockResult((), self._bad, checksums, clipped, fingerprint)
        self._streams, self._bad, self._clipped = {}, ALL_FINITE, 0
        return result

    def abort(self) -> None:
        """Delete what was written of shards that are not whole."""
        for stream in self._streams.values():
            stream.abort()
        self._streams, self._bad, self._clipped = {}, ALL_FINITE, 0


def infer(
    selection: Selection,
    normalise: Affine,
    tensors: Tensors,
    source: WindowSource,
    blocks: Sequence[int],
    *,
    before_write: Callable[[], None] = lambda: None,
    on_windows: Callable[[int], None] = lambda num_windows: None,
) -> Iterator[tuple[int, Exception | BlockResult]]:
    """Yield each of `blocks` once it is written, with its result or its error.

    At most two sums are in memory: the one that grows and the one that is being written; the voxels of the block
    after these are read meanwhile. Of a block in slabs, these take the place of blocks. A block is not written if
    `before_write` raises; `on_windows` is called with the number of windows of each batch that was computed.
    """
    after_next = dict(zip(blocks, blocks[2:], strict=False))
    slabs, failed = SlabWriter(selection), set[int]()

    def write(done: BlockSum) -> BlockResult | None:
        if done.is_last:
            source.forget(done.block)
            if done.block in after_next:
                source.expect(after_next[done.block])
        try:
            before_write()
            if done.slab is None:
                return write_block(selection, tensors, done, source.fingerprint(done.block))
            slabs.add(done)
            return slabs.close(source.fingerprint(done.block)) if done.is_last else None
        except BaseException:
            failed.add(done.block)
            slabs.abort()
            raise

    runner = load_runner(selection.plan)
    runner.check()
    for block in blocks[:2]:
        source.expect(block)
    writing: tuple[int, Future[BlockResult | None]] | None = None
    sums = block_sums(selection, normalise, runner, source, blocks, on_windows=on_windows, given_up=failed)
    with ExitStack() as stack:
        stack.callback(slabs.abort)  # after the last write
        writer = stack.enter_context(ThreadPoolExecutor(1, "volpipe-write"))
        for block, outcome in sums:
            if writing is not None:
                yield from _written(*writing)
                writing = None
            if isinstance(outcome, Exception):
                slabs.abort()
                yield block, outcome
            elif block not in failed:
                writing = block, writer.submit(write, outcome)
            del outcome  # else it would stay while the next one grows
        if writing is not None:
            yield from _written(*writing)


def block_sums(
    selection: Selection,
    normalise: Affine,
    runner: Runner,
    source: WindowSource,
    blocks: Sequence[int],
    *,
    on_windows: Callable[[int], None] = lambda num_windows: None,
    given_up: Container[int] = (),
) -> Iterator[tuple[int, BlockSum | Exception]]:
    """Yield each of `blocks` with its sum once its last window is added, or with its first error.

    Of a block that `source` gives in slabs, each is yielded for itself; blocks that are `given_up` meanwhile are not
    computed to their end.

    The voxels of the next one are on the device by then. On a GPU the sum may still be computed: whoever takes a part
    of it waits.
    """
    growing: BlockSum | None = None
    failed: int | None = None
    incoming = batches(source, blocks, runner.batch, selection.windows_of)
    as_stored = selection.plan.keeps_integers
    depth = BLOCKS_AHEAD if source.has_blocks else BATCHES_AHEAD
    for batch, voxels in ahead(lifted(incoming, runner.bus, as_stored=as_stored), depth):
        if batch.block == failed or batch.block in given_up:
            continue
        error = batch.error
        if batch.voxels is not None and voxels is not None:
            try:
                if growing is None or growing.block != batch.block:
                    growing = BlockSum(selection, normalise, batch.block, runner.bus, batch.slab, batch.is_last)
                for part in batch.parts(runner.batch):
                    _add(growing, runner, part, voxels)
                    on_windows(len(part.numbers))
            except Exception as raised:
                error = runner.explain(raised)
        if error is not None:
            failed, growing = batch.block, None
            yield batch.block, error
        elif batch.is_last or batch.slab is not None:
            assert growing is not None
            growing.close()
            yield batch.block, growing
            growing = None


def _add(growing: BlockSum, runner: Runner, batch: Batch, voxels: torch.Tensor) -> None:
    """Add the windows of `batch`, which are cut from `voxels` on the device, to the sum of their block."""
    assert batch.voxels is not None
    plan = growing.plan
    windows = cut(batch.voxels, voxels, as_stored=plan.keeps_integers)
    outs = runner.run(windows)
    if plan.keeps_integers and outs.dtype != windows.dtype:
        raise NetError(
            f"net {plan.net.label} declares integers, and gave {outs.dtype} for {windows.dtype}; let it give the type "
            "that it gets, or leave out its attribute integers"
        )
    for number, out in zip(batch.numbers, outs, strict=True):
        growing.add(number, out)


def lifted(incoming: Iterable[Batch], bus: Bus, *, as_stored: bool) -> Iterator[tuple[Batch, torch.Tensor | None]]:
    """Yield each batch with its voxels on the device of `bus`, to which an array goes once; None with an error.

    Those that do not go through the net `as_stored` must fit float32.
    """
    array: np.ndarray | None = None
    tensor: torch.Tensor | None = None
    for batch in incoming:
        voxels, error = batch.voxels, batch.error
        if voxels is not None and voxels.data is not array:
            array = tensor = None  # else two blocks would be there
            try:
                if voxels.normalise is not None and not as_stored:
                    voxels.normalise.check(voxels.data)
                tensor, array = bus.up(voxels.data), voxels.data
            except Exception as raised:
                error = raised
        yield (batch, tensor) if error is None else (replace(batch, voxels=None, error=error), None)


def cut(voxels: Voxels, data: torch.Tensor, *, as_stored: bool) -> torch.Tensor:
    """Return the windows (n, c, z, y, x) of `voxels`, which are on the device as `data`: float32, normalised.

    Those that go through the net `as_stored` keep their type and their values.
    """
    import torch

    parts = [data[place] for place in voxels.places]
    if as_stored:
        return torch.stack(parts)
    windows = torch.empty((len(parts), *parts[0].shape), dtype=torch.float32, device=data.device)
    for window, part in zip(windows, parts, strict=True):
        window.copy_(part)
    if voxels.normalise is not None:
        voxels.normalise.normalise(windows)
    return windows


def _written(block: int, future: Future[BlockResult | None]) -> Iterator[tuple[int, Exception | BlockResult]]:
    """Yield `block` with its result, or its error; nothing as long as slabs of it are missing."""
    error = future.exception()  # not raised: a traceback through here would keep the block's sum
    if error is not None and not isinstance(error, Exception):
        raise error
    result = future.result() if error is None else error
    if result is not None:
        yield block, result
