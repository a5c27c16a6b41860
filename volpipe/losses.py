"""Losses of a training, by the recipe's weights; each is a mean, so that weights mean the same at every window.

Not here: the adversary's own loss (adversary). This imports torch as it is imported, as all that training needs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool3d

from volpipe.training import Loss

Triple = tuple[int, int, int]
SMALL = 1e-6  # squared error, normalised, below which charbonnier is round


def loss_terms(loss: Loss, out: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Return each term of `loss` that has a weight, not yet weighted; `out`, `truth` (n, c, z, y, x)."""
    error = out - truth
    terms = {}
    if loss.l1:
        terms["l1"] = error.abs().mean()
    if loss.l2:
        terms["l2"] = error.square().mean()
    if loss.charbonnier:
        terms["charbonnier"] = (error.square() + SMALL).sqrt().mean()
    if loss.gradient:
        terms["gradient"] = torch.stack([error.diff(dim=axis).abs().mean() for axis in (2, 3, 4)]).mean()
    return terms


def consistency(out: Tensor, given: Tensor, scale: Triple) -> Tensor:
    """Return the mean absolute difference between `out`, binned by `scale`, and the net's input `given`."""
    return (avg_pool3d(out, scale) - given).abs().mean()


def cropped(data: Tensor, margin: Triple, scale: Triple = (1, 1, 1)) -> Tensor:
    """Return `data` (n, c, z, y, x) without `margin` times `scale` voxels at each face."""
    z, y, x = (slice(m * s, n - m * s) for m, s, n in zip(margin, scale, data.shape[2:], strict=True))
    return data[..., z, y, x]
