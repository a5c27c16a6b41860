"""Reassemble: a shard of the output adds the block tensors that reach it, and is written once.

Not here: shards that one block determines (infer writes those), or coarser levels (pyramid).
"""

from __future__ import annotations

import numpy as np

from volpipe.ops import Affine
from volpipe.output import write_total
from volpipe.tensors import NO_SUM, Tensors
from volpipe.wanted import Wanted


def reassemble(wanted: Wanted, normalise: Affine, tensors: Tensors, shard: int) -> None:
    """Write `shard` of level 0; blocks are added in ascending order, so that the bits depend on nothing else."""
    plan = wanted.plan
    box = plan.shards().box(shard)
    total = np.full((plan.net.out_channels, *box.shape), NO_SUM, np.float32)
    for block in filter(wanted.has_block, plan.blocks_of_shard(shard)):
        part = box & plan.sum_box(block)
        total[:, *part.relative_to(box.start).slices] += tensors.read_sum(block, part)
    write_total(wanted, normalise, box, total)
