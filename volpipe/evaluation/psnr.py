"""PSNR: how large the mean squared error is beside the range of grey levels.

Not here: other errors of two outputs (differences).
"""

from __future__ import annotations

import math

import numpy as np

from volpipe.evaluation.score import IMAGE, ImageTotal, Score, ScoredBlock, Sums, Values


def psnr(num: int | float, squares: float, data_range: float) -> float:
    """Return the peak signal-to-noise ratio in dB of `num` voxels, whose squared errors have the sum `squares`.

    It is infinite where nothing differs, and not a number of no voxels.
    """
    if not num:
        return math.nan
    return 10 * math.log10(data_range**2 * num / squares) if squares else math.inf


def error_sums(block: ScoredBlock) -> Sums:
    """Return the number of a block's voxels, and the sum of their squared errors."""
    truth = block.truth[block.own]
    return np.array([truth.size, np.square(block.data[block.own] - truth).sum()], np.float64)


def psnr_of(total: ImageTotal) -> Values:
    num, squares = total.sums[PSNR.name].tolist()
    return {PSNR.name: psnr(num, squares, total.data_range)}


PSNR = Score("psnr", (IMAGE,), psnr_of, title="PSNR", unit="dB", digits=2, sums=error_sums)
