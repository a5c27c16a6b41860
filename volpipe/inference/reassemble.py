"""Reassemble: a shard of the output adds the block tensors that reach it, and is written once.

Not here: shards that one block determines (infer writes those), or coarser levels (pyramid).
"""

from __future__ import annotations

from volpipe.inference.intensity import Affine, Tally
from volpipe.inference.output import summed, write_selected
from volpipe.inference.scratch import Tensors
from volpipe.inference.selection import Selection


def reassemble(selection: Selection, normalise: Affine, tensors: Tensors, shard: int, tally: Tally) -> str:
    """Write `shard` of level 0, and return its checksums; `tally` counts the clipped voxels.

    Blocks are added in ascending order, so that the bits depend on nothing else.
    """
    plan = selection.plan
    box = plan.shards().box(shard)
    blocks = list(filter(selection.has_block, plan.blocks_of_shard(shard)))
    return write_selected(selection, box, summed(selection, normalise, box, tensors.total(box, blocks), tally))
