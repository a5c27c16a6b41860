"""SSIM: how alike the structure of two images is, window by window.

Not here: which blocks are scored (subject). Windows, weights and covariance are those of scikit-image.
"""

from __future__ import annotations

import math

import numpy as np

from volpipe.evaluation.score import IMAGE, ImageTotal, Score, ScoredBlock, Sums, Values

WINDOW = 7  # voxels per axis over which SSIM compares: that of scikit-image
REACH = WINDOW // 2
K1, K2 = 0.01, 0.03  # Wang et al. 2004 (doi 10.1109/TIP.2003.819861)

Floats = np.ndarray  # float64


def similarity_sums(block: ScoredBlock) -> Sums:
    """Return the number of windows whose middle is one of the block's own voxels, and the sum of their similarity."""
    middles = tuple(
        slice(max(0, part.start - REACH), max(0, min(part.stop, size - REACH) - REACH))
        for part, size in zip(block.own, block.data.shape, strict=True)
    )
    similar = structural_similarity(block.data, block.truth, block.data_range)[middles]
    return np.array([similar.size, similar.sum()], np.float64)


def structural_similarity(data: Floats, truth: Floats, data_range: float) -> Floats:
    """Return the SSIM of each window of WINDOW voxels per axis that lies inside, with the sample covariance."""
    if min(data.shape) < WINDOW:
        return np.empty((0, 0, 0))
    num = WINDOW**3
    unbiased = num / (num - 1)
    middle = round(float(truth.mean()))  # of values far from 0 a variance is lost in their squares
    data, truth = data - middle, truth - middle
    mean_a, mean_b = means(data), means(truth)
    var_a = unbiased * (means(data * data) - mean_a * mean_a)
    var_b = unbiased * (means(truth * truth) - mean_b * mean_b)
    both = unbiased * (means(data * truth) - mean_a * mean_b)
    mean_a, mean_b = mean_a + middle, mean_b + middle
    c1, c2 = (K1 * data_range) ** 2, (K2 * data_range) ** 2
    above = (2 * mean_a * mean_b + c1) * (2 * both + c2)
    similarity: Floats = above / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return similarity


def means(data: Floats) -> Floats:
    """Return the mean of every window of WINDOW voxels per axis; whole numbers are summed without an error."""
    for axis in range(3):
        total = np.cumsum(np.insert(data, 0, 0.0, axis), axis)
        size = total.shape[axis]
        data = np.take(total, range(WINDOW, size), axis) - np.take(total, range(size - WINDOW), axis)
    return data / WINDOW**3


def mean_similarity(total: ImageTotal) -> Values:
    """Return the mean structural similarity over all windows; not a number where no window fits."""
    num_windows, similarity = total.sums[SSIM.name].tolist()
    return {SSIM.name: similarity / num_windows if num_windows else math.nan}


SSIM = Score("ssim", (IMAGE,), mean_similarity, title="SSIM", sums=similarity_sums, reach=REACH)
