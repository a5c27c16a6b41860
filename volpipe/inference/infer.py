"""Infer: the net runs over the windows of blocks, whose weighted sums are written meanwhile.

A block's voxels go to the net's device once, as they are stored. There they are cut into windows, normalised, computed,
weighted, added and finished; what comes back is what is written. Reading the next block, computing this one and writing
the last ones overlap, in threads. Not here: where voxels come from (windows), the net on its device (runner), the sum
of a block (block_sum), what becomes of it (reassemble), or the order of blocks (schedule).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from volpipe.blockwise.notes import Reporter
from volpipe.errors import NetError
from volpipe.inference.block_sum import BlockSum
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan
from volpipe.inference.reassemble import BlockWriter, Outcome
from volpipe.inference.runner import Bus, Runner, load_runner
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import SlabsOf, Voxels, WindowBatch, WindowSource, ahead, batches

if TYPE_CHECKING:
    import torch

BATCHES_AHEAD, SLABS_AHEAD = 2, 0  # beside the next one


def infer(
    selection: Selection,
    normalise: Affine,
    tensors: ScratchTensors,
    source: WindowSource,
    blocks: Sequence[int],
    reporter: Reporter | None = None,
    before_write: Callable[[], None] = lambda: None,
) -> Iterator[Outcome]:
    """Yield each of `blocks` once it is written, with its result or its error.

    In memory are the slab whose sum grows and those that are being written (`Plan.blocks_behind`); the voxels of those
    after it are read meanwhile. A block is not written if `before_write` raises. The `reporter` counts the windows that
    are computed; once it is dismissed, no other block begins.
    """
    runner = load_runner(selection.plan)
    runner.check()
    num_behind = selection.plan.blocks_behind + runner.bus.is_gpu  # one more, in the GPU's memory: it need not wait
    with closing(source), BlockWriter(selection, tensors, source, before_write) as writer:
        for block, outcome in block_sums(
            selection, normalise, runner, source, blocks, given_up=writer.failed, reporter=reporter
        ):
            yield from writer.written(0 if isinstance(outcome, Exception) else num_behind - 1)
            if isinstance(outcome, Exception):
                writer.give_up(block)
                yield block, outcome
            elif block not in writer.failed:
                writer.submit(outcome)
            del outcome  # else it would stay while the next one grows
        yield from writer.written(0)
        yield from writer.closed(0)


def block_sums(
    selection: Selection,
    normalise: Affine,
    runner: Runner,
    source: WindowSource,
    blocks: Sequence[int],
    *,
    slabs_of: SlabsOf | None = None,
    given_up: Container[int] = (),
    reporter: Reporter | None = None,
) -> Iterator[tuple[int, BlockSum | Exception]]:
    """Yield each of `blocks` with the sum of each of its slabs once its last window is added, or with its first error.

    Slabs are all those of the selection, or as `slabs_of` returns them; those of blocks that are `given_up` meanwhile
    are not computed. The `reporter` is as of `infer`.

    The voxels of the next one are on the device by then. On a GPU the sum may still be computed: whoever takes a part
    of it waits.
    """
    reporter = reporter or Reporter()
    growing: BlockSum | None = None
    before: BlockSum | None = None  # the slab that was yielded last, where others of its block follow
    failed: int | None = None
    incoming = batches(source, blocks, slabs_of or selection.slabs, runner.batch)
    as_stored = selection.plan.is_as_stored
    depth = SLABS_AHEAD if source.has_slabs else BATCHES_AHEAD
    for batch, voxels in ahead(lifted(incoming, runner.bus, as_stored=as_stored), depth):
        if batch.block == failed or batch.block in given_up:
            continue
        if reporter.is_dismissed and not any(
            part is not None and part.block == batch.block for part in (growing, before)
        ):
            return
        error = batch.error
        if batch.voxels is not None and voxels is not None:
            try:
                if growing is None or growing.block != batch.block:
                    rolling = before if before is not None and before.block == batch.block else None
                    before = None
                    growing = BlockSum(
                        selection, normalise, batch.block, batch.slab, runner.bus, batch.is_last, before=rolling
                    )
                    del rolling
                for part in batch.parts(runner.batch):
                    with runner.computing():
                        _add_windows(growing, runner, part, voxels)
                    reporter.add(len(part.numbers))
            except Exception as raised:
                error = runner.explain(raised)
        if error is not None:
            failed, growing = batch.block, None
            yield batch.block, error
        elif batch.numbers[-1] == batch.slab.numbers[-1]:
            assert growing is not None
            growing.close()
            before = None if batch.is_last else growing
            yield batch.block, growing
            growing = None


def _add_windows(growing: BlockSum, runner: Runner, batch: WindowBatch, voxels: torch.Tensor) -> None:
    """Add the windows of `batch`, which are cut from `voxels` on the device, to the sum of their block."""
    assert batch.voxels is not None
    plan = growing.plan
    windows = cut(batch.voxels, voxels, as_stored=plan.is_as_stored)
    outs = runner.run(windows)
    if plan.is_as_stored:
        outs = _in_type(outs, plan)
    for number, out in zip(batch.numbers, outs, strict=True):
        growing.add(number, out)


def _in_type(outs: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Return the net's output for voxels as they are stored, in the type of the plan's output, which holds all of it.

    Raises:
        NetError: it does not.
    """
    import torch

    expected, given = plan.dtype, str(outs.dtype).removeprefix("torch.")
    if given == expected.name:
        return outs
    if plan.net.dtype and np.can_cast(given, expected, "safe"):
        return torch.from_numpy(outs.numpy().astype(expected))
    if plan.net.dtype:
        raise NetError(
            f"function {plan.net.label} gave {given} for a block, and {plan.net.dtype} when it was tried, so that the "
            f"output is {expected}; let it give one type, whatever the voxels"
        )
    raise NetError(
        f"net {plan.net.label} declares integers, and gave {outs.dtype} for torch.{expected}; let it give the type "
        "that it gets, or leave out its attribute integers"
    )


def lifted(
    incoming: Iterable[WindowBatch], bus: Bus, *, as_stored: bool
) -> Iterator[tuple[WindowBatch, torch.Tensor | None]]:
    """Yield each batch with its voxels on the device of `bus`, None if it has an error; each array goes there once.

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
    for window, inside in zip(windows, voxels.inside, strict=False):
        kept = window[inside].clone()
        window.copy_(window.new_tensor(voxels.padding or (0.0,)).reshape(-1, 1, 1, 1))[inside] = kept
    return windows
