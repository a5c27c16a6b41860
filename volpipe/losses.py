"""Losses of a training, by the recipe's weights; each is a mean, so that weights mean the same at every window.

Not here: the adversary's own loss (adversary). This imports torch as it is imported, as all that training needs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool3d, binary_cross_entropy, binary_cross_entropy_with_logits

from volpipe.targets import NEAR, UNKNOWN
from volpipe.training import Affinities, Loss

Triple = tuple[int, int, int]
ROOM = (0, 2, 3, 4)  # all axes but the channels'
RAREST = 0.05  # share of the voxels, as of a small window that no membrane cuts
SMALL = 1e-6  # squared error, normalised, below which charbonnier is round


def loss_terms(loss: Loss | Affinities, out: Tensor, truth: Tensor, *, logits: bool = False) -> dict[str, Tensor]:
    """Return each term of `loss` that has a weight, not yet weighted; `out`, `truth` (n, c, z, y, x).

    `logits`: `out` is of affinities, before their sigmoid.
    """
    if isinstance(loss, Affinities):
        return affinity_terms(loss, out, truth, logits=logits)
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


def affinity_terms(choice: Affinities, out: Tensor, truth: Tensor, *, logits: bool) -> dict[str, Tensor]:
    """Return each term of `choice` that has a weight, not yet weighted.

    Args:
        out: (n, offset, z, y, x), the chance of each pair, or where `logits` is true its logit.
        truth: the same shape: NEAR, APART or UNKNOWN, which takes no part.
    """
    known, near = (truth != UNKNOWN).float(), (truth == NEAR).float()
    terms = {}
    if choice.bce:
        entropy = binary_cross_entropy_with_logits if logits else binary_cross_entropy
        each = entropy(out, near, reduction="none")
        terms["bce"] = (each * balance(near, known)).sum() / known.sum().clamp(min=1)
    if choice.dice:
        chance = out.sigmoid() if logits else out
        terms["dice"] = 1 - _dice((1 - chance) * known, (1 - near) * known).mean()
    return terms


def balance(near: Tensor, known: Tensor) -> Tensor:
    """Return the weight of each pair (n, offset, z, y, x): per offset, near and apart weigh a half of what is known.

    A kind that is rarer than `RAREST` weighs less, so that no voxel has more than 1 / (2 * RAREST).
    """
    share = (near * known).sum(ROOM, keepdim=True) / known.sum(ROOM, keepdim=True).clamp(min=1)
    share = share.clamp(RAREST, 1 - RAREST)
    return known * torch.where(near > 0, 0.5 / share, 0.5 / (1 - share))


def _dice(made: Tensor, truth: Tensor) -> Tensor:
    """Return the Dice coefficient of each channel, as Milletari et al. 2016 (arXiv 1606.04797) have it: of squares."""
    both = (made * truth).sum(ROOM)
    return (2 * both + SMALL) / (made.square().sum(ROOM) + truth.square().sum(ROOM) + SMALL)


def consistency(out: Tensor, given: Tensor, scale: Triple) -> Tensor:
    """Return the mean absolute difference between `out`, binned by `scale`, and the net's input `given`."""
    return (avg_pool3d(out, scale) - given).abs().mean()


def cropped(data: Tensor, margin: Triple, scale: Triple = (1, 1, 1)) -> Tensor:
    """Return `data` (n, c, z, y, x) without `margin` times `scale` voxels at each face."""
    z, y, x = (slice(m * s, n - m * s) for m, s, n in zip(margin, scale, data.shape[2:], strict=True))
    return data[..., z, y, x]
