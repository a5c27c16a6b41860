"""Reassemble: a shard of the output adds the block tensors that reach it, and is written once.

Not here: shards that one block determines (infer writes those), or coarser levels (pyramid).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from volpipe.geometry.grid import Box
from volpipe.inference.intensity import Affine, Tally
from volpipe.inference.output import append_summed, close_shard, open_shard, summed, write_selected
from volpipe.inference.scratch import Tensors
from volpipe.inference.selection import Selection


def reassemble(
    selection: Selection, normalise: Affine, tensors: Tensors, shard: int, tally: Tally
) -> Callable[[], str]:
    """Return what writes `shard` of level 0, and returns its checksums; `tally` counts the clipped voxels.

    Blocks are added in ascending order, so that the bits depend on nothing else. Where the format allows it, the shard
    is written layer by layer, into a bucket only a large one; else its voxels are in memory by now.
    """
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
