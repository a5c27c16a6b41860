"""Infer: the net runs over the windows of blocks; their weighted sums become shards of the output, or block tensors.

Not here: where windows come from (windows), the net on its device (runner), the sum of a block (block_sum), or the
order of blocks (schedule). Reading the next windows, computing these and writing the last block overlap: each has a
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from volpipe.inference.block_sum import BlockSum
from volpipe.inference.intensity import ALL_FINITE, Affine, Nonfinite, Tally
from volpipe.inference.output import write_selected, write_total
from volpipe.inference.runner import Runner, load_runner
from volpipe.inference.scratch import Tensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import Batch, WindowSource, ahead, batches

BATCHES_AHEAD = 2


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
    reached = plan.shards_of_block(done.block)
    shards = list(filter(selection.is_due, reached))
    contributors = {s: list(filter(selection.has_block, plan.blocks_of_shard(s))) for s in shards}
    closed = [
        shard
        for shard, blocks in contributors.items()
        if blocks[-1] == done.block and all(tensors.has_sum(b, plan.shards().box(shard)) for b in blocks[:-1])
    ]
    if len(closed) < len(shards):
        other = [] if selection.due is None else [shard for shard in reached if not selection.due[shard]]
        tensors.write_sum(done.block, done.total, [*closed, *other])
    checksums, clipped = {}, {}
    for shard in closed:
        box = plan.shards().box(shard)
        if done.is_finished:
            checksums[shard] = write_selected(selection, box, done.part(box))
        else:
            total, tally = tensors.total(box, contributors[shard], done), Tally()
            checksums[shard] = write_total(selection, done.normalise, box, total, tally)
            clipped[shard] = tally.clipped
    if done.is_finished and closed:
        clipped[closed[0]] = done.tally.clipped
    shared = tuple(shard for shard in closed if not plan.is_direct(shard))
    return BlockResult(shared, done.bad, checksums, clipped, fingerprint)


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

    At most two sums are in memory: the one that grows and the one that is being written; the voxels of the next block
    are read meanwhile. A block is not written if `before_write` raises; `on_windows` is called with the number of
    windows of each batch that was computed.
    """
    after_next = dict(zip(blocks, blocks[2:], strict=False))

    def write(done: BlockSum) -> BlockResult:
        source.forget(done.block)
        try:
            before_write()
            return write_block(selection, tensors, done, source.fingerprint(done.block))
        finally:
            if done.block in after_next:
                source.expect(after_next[done.block])

    runner = load_runner(selection.plan)
    runner.check()
    for block in blocks[:2]:
        source.expect(block)
    writing: tuple[int, Future[BlockResult]] | None = None
    with ThreadPoolExecutor(1, "volpipe-write") as writer:
        incoming = ahead(batches(source, blocks, runner.batch, selection.windows_of), BATCHES_AHEAD)
        for block, outcome in block_sums(selection, normalise, runner, incoming, on_windows):
            if isinstance(outcome, Exception):
                yield block, outcome
                continue
            if writing is not None:
                yield writing[0], _outcome(writing[1])
            writing = block, writer.submit(write, outcome)
            del outcome  # else it would stay while the next one grows
        if writing is not None:
            yield writing[0], _outcome(writing[1])


def block_sums(
    selection: Selection,
    normalise: Affine,
    runner: Runner,
    incoming: Iterator[Batch],
    on_windows: Callable[[int], None] = lambda num_windows: None,
) -> Iterator[tuple[int, BlockSum | Exception]]:
    """Yield each block with its sum once its last window is added, or with its first error."""
    growing: BlockSum | None = None
    failed: int | None = None
    for batch in incoming:
        if batch.block == failed:
            continue
        if growing is None or growing.block != batch.block:
            growing = BlockSum(selection, normalise, batch.block)
        error = batch.error
        if batch.windows is not None:
            try:
                for number, out in zip(batch.numbers, runner(batch.windows), strict=True):
                    growing.add(number, out)
                on_windows(len(batch.numbers))
                if batch.is_last:
                    growing.check()
            except Exception as raised:
                error = runner.explain(raised)
        if error is not None:
            failed, growing = batch.block, None
            yield batch.block, error
        elif batch.is_last:
            yield batch.block, growing
            growing = None


def _outcome(future: Future[BlockResult]) -> Exception | BlockResult:
    error = future.exception()  # not raised: a traceback through here would keep the block's sum
    if error is not None and not isinstance(error, Exception):
        raise error
    return future.result() if error is None else error
