"""Infer: the net runs over the windows of blocks; their weighted sums become shards of the output, or block tensors.

A block's voxels go to the net's device once, as they are stored. There they are cut into windows, normalised, computed,
weighted, added and finished; what comes back is what is written. Reading the next block, computing this one and writing
the last one overlap: each has a thread. Not here: where voxels come from (windows), the net on its device (runner), the
sum of a block (block_sum), or the order of blocks (schedule).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from volpipe.errors import NetError
from volpipe.geometry.grid import Box
from volpipe.inference.block_sum import BlockSum
from volpipe.inference.intensity import ALL_FINITE, Affine, Nonfinite, Tally
from volpipe.inference.output import summed, write_selected
from volpipe.inference.runner import Bus, Runner, load_runner
from volpipe.inference.scratch import Tensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import Batch, Voxels, WindowSource, ahead, batches

if TYPE_CHECKING:
    import torch

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
    done.check()
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
        tensors.write_sum(done, [*closed, *other])
    checksums, clipped = {}, {}
    for shard in closed:
        box = plan.shards().box(shard)
        if done.is_finished:
            data = done.part(box)
        else:
            data, clipped[shard] = _summed(selection, tensors, done, box, contributors[shard])
        checksums[shard] = write_selected(selection, box, data)
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
        for block, outcome in block_sums(selection, normalise, runner, source, blocks, on_windows=on_windows):
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
    source: WindowSource,
    blocks: Sequence[int],
    *,
    on_windows: Callable[[int], None] = lambda num_windows: None,
) -> Iterator[tuple[int, BlockSum | Exception]]:
    """Yield each of `blocks` with its sum once its last window is added, or with its first error.

    The voxels of the next one are on the device by then. On a GPU the sum may still be computed: whoever takes a part
    of it waits.
    """
    growing: BlockSum | None = None
    failed: int | None = None
    incoming = batches(source, blocks, runner.batch, selection.windows_of)
    as_stored = selection.plan.keeps_integers
    for batch, voxels in ahead(lifted(incoming, runner.bus, as_stored=as_stored), BATCHES_AHEAD):
        if batch.block == failed:
            continue
        error = batch.error
        if batch.voxels is not None and voxels is not None:
            try:
                if growing is None or growing.block != batch.block:
                    growing = BlockSum(selection, normalise, batch.block, runner.bus)
                for part in batch.parts(runner.batch):
                    _add(growing, runner, part, voxels)
                    on_windows(len(part.numbers))
            except Exception as raised:
                error = runner.explain(raised)
        if error is not None:
            failed, growing = batch.block, None
            yield batch.block, error
        elif batch.is_last:
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


def _outcome(future: Future[BlockResult]) -> Exception | BlockResult:
    error = future.exception()  # not raised: a traceback through here would keep the block's sum
    if error is not None and not isinstance(error, Exception):
        raise error
    return future.result() if error is None else error
