"""Labels, verified by cutting blocks into fragments again.

Not here: the segmentation, or its files (driver), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from volpipe.errors import RunError
from volpipe.inference.output_plan import level_key
from volpipe.runs.verify import Recomputed
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.tasks import find_fragments
from volpipe.volumes.volume import open_writer


def recompute_labels(plan: SegmentPlan, blocks: Sequence[int], num_blocks: int, seed: int = 0) -> Iterator[Recomputed]:
    """Yield random ones of `blocks`, which are written, cut into fragments again and compared with the stored labels.

    Only the graph of all blocks knows which fragments are one object, so each fragment is checked to have one label.

    Raises:
        RunError: the input volume has another shape or type now.
    """
    volume, source = plan.source.volume(), plan.source
    expected = (source.num_channels, *source.shape), source.dtype
    actual = (volume.num_channels, *volume.spatial_shape), str(volume.dtype)
    if actual != expected:
        raise RunError(
            f"{volume} is {actual[1]} {actual[0]} (c, z, y, x), its labels are of {expected[1]} {expected[0]}; put "
            "that back, or segment what is there with --fresh"
        )
    reader = volume.open()
    rng = np.random.default_rng(seed)
    sample = rng.choice(blocks, size=min(num_blocks, len(blocks)), replace=False)
    for block in sorted(map(int, sample)):
        box = plan.blocks.box(block)
        labels = open_writer(plan.out, level_key(0)).read(box)
        ids = find_fragments(plan, reader, block).ids
        yield Recomputed(block, box, num_misfits(ids, labels, plan.recipe.objects.min_voxels))


def num_misfits(ids: np.ndarray, labels: np.ndarray, min_voxels: int) -> int:
    """Return the number of voxels of `labels` (z, y, x) that contradict the fragments `ids`, of the same shape.

    Background has label 0. A fragment has the label of most of its voxels, 0 only if it is smaller than `min_voxels`.
    """
    names, place = np.unique(labels, return_inverse=True)
    pairs, count = np.unique(ids.ravel().astype(np.int64) * len(names) + place.ravel(), return_counts=True)
    fragment, is_none = pairs // len(names), names[pairs % len(names)] == 0
    size = np.bincount(ids.ravel())
    may_be = np.where(is_none, (fragment == 0) | (size[fragment] < min_voxels), fragment > 0)
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, fragment[may_be], count[may_be])
    return int(ids.size - most.sum())
