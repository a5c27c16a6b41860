"""Objects of slices, stitched to those of the next slices: two are one where they overlap enough.

Not here: objects within a slice (centres, flows), or the graph (solve). Whether two are one rests on their sizes and
their overlap alone, not on what else they are joined to. A box of the graph decides that where it holds both of them::

    slice 0   ( a      )  ( b )        a and c: 4 voxels of both, of 8 that either covers: 0.5
    slice 1      ( c )                 b overlaps none
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from volpipe.segmentation.agglomerate import connected_components
from volpipe.segmentation.edges import Edges


def stitched(edges: Edges, threshold: float, is_open: np.ndarray, voxels: np.ndarray) -> tuple[np.ndarray, Edges]:
    """Return the owner (nodes,), from 0, of each node, and the edges that matter between owners, as `agglomerate` does.

    An edge is certain or undecided. A node with an undecided edge owns itself alone, because its size decides it.

    Args:
        edges: their second sum is the number of overlapping voxels; of certain ones it is 0.
        threshold: share of their overlap in all that either covers, from which two are one.
        is_open: (nodes,), bool; whether a node may have more voxels, and edges, outside.
        voxels: (nodes,), int64: of each.
    """
    overlap, is_certain = edges.sums[:, 1], edges.sums[:, 1] == 0
    is_known = ~is_certain & ~edges.any_end(is_open)
    share = overlap / np.maximum(voxels[edges.pairs].sum(axis=1) - overlap, 1)
    is_dropped = is_known & (share < threshold)
    is_certain |= is_known & ~is_dropped
    edges = replace(edges, sums=np.where(is_certain[:, None], [[1, 0]], edges.sums))[~is_dropped]
    is_certain, is_locked = is_certain[~is_dropped], is_open.copy()
    is_locked[edges.pairs[~is_certain]] = True
    is_link = is_certain & ~edges.any_end(is_locked)
    owner = connected_components(len(is_open), edges.pairs[is_link], np.arange(len(is_open)))
    rest = edges[~is_link]
    # An undecided edge is the only one between two nodes that own themselves alone; sums of certain ones stay (n, 0).
    return owner, Edges.total(owner[rest.pairs], rest.sums, rest.first)
