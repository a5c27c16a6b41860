"""Affinities: of one object or not, and where that can be said."""

import numpy as np
import pytest

from volpipe.geometry.affinities import OFFSETS, affinities


@pytest.mark.parametrize("offset", [*OFFSETS, (2, -1, 3), (0, 0, 20)])
def test_affinities_are_what_a_loop_over_voxels_finds(offset):
    labels = np.random.default_rng(1).integers(0, 3, (10, 11, 12))
    near, known = affinities(labels, [offset])
    for voxel in np.ndindex(*labels.shape):
        other = tuple(np.add(voxel, offset))
        inside = all(0 <= o < n for o, n in zip(other, labels.shape, strict=True))
        assert known[0][voxel] == inside
        assert near[0][voxel] == (inside and labels[voxel] == labels[other] != 0)
