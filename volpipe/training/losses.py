"""Losses of a training, by the recipe's weights; each is a mean, so that weights mean the same at every window.

Not here: the adversary's loss (discriminator). Torch is imported at the top, as in all modules of a training's worker.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool3d, binary_cross_entropy, binary_cross_entropy_with_logits, cross_entropy

from volpipe.geometry.grid import Triple
from volpipe.recipes.training import Affinities, Classes, Loss
from volpipe.training.data.targets import NEAR, UNKNOWN, channels_known, class_numbers

ROOM = (0, 2, 3, 4)  # all axes but the channels'
RAREST = 0.05  # share of the voxels, as of a small window that no membrane cuts
SMALL = 1e-6  # squared error, normalised, below which charbonnier is round


def loss_terms(
    loss: Loss | Affinities | Classes, out: Tensor, truth: Tensor, *, logits: bool = False
) -> dict[str, Tensor]:
    """Return the unweighted terms of `loss` whose weight is not 0; `out`, `truth` (n, c, z, y, x).

    `logits`: `out` are the logits of affinities.
    """
    if isinstance(loss, Classes):
        return class_terms(loss, out, truth)
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
        differences = [error.diff(dim=axis) for axis in (2, 3, 4) if error.shape[axis] > 1] or [error]
        terms["gradient"] = torch.stack([each.abs().mean() for each in differences]).mean()
    return terms


def affinity_terms(choice: Affinities, out: Tensor, truth: Tensor, *, logits: bool) -> dict[str, Tensor]:
    """Return the unweighted terms of `choice` whose weight is not 0.

    Args:
        out: (n, offset, z, y, x), affinities from 0 to 1, or with `logits` their logits.
        truth: of the same shape: NEAR, APART or UNKNOWN, which does not count.
    """
    known, near = (truth != UNKNOWN).float(), (truth == NEAR).float()
    terms = {}
    if choice.bce:
        entropy = binary_cross_entropy_with_logits if logits else binary_cross_entropy
        errors = entropy(out, near, reduction="none")
        terms["bce"] = (errors * balance(near, known)).sum() / known.sum().clamp(min=1)
    if choice.dice:
        chance = out.sigmoid() if logits else out
        terms["dice"] = 1 - _dice((1 - chance) * known, (1 - near) * known).mean()
    return terms


def class_terms(choice: Classes, out: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Return the unweighted terms of `choice` whose weight is not 0.

    Args:
        out: (n, class, z, y, x), logits.
        truth: (n, 1, z, y, x), the number of the class, or UNKNOWN, which does not count; or of each class (n, class,
            z, y, x), as of `targets.partial_targets`; or of regions, as of `targets.region_targets`.
    """
    if choice.regions:
        return region_terms(choice, out, truth)
    counted = None
    if truth.shape[1] > 1:
        counted = channels_known(truth)
        out, truth = with_left_out_as_first(out, counted), class_numbers(truth)
    known = truth != UNKNOWN
    terms = {}
    if choice.cross_entropy:
        weights = out.new_tensor(choice.balance) if choice.balance else None
        index = truth[:, 0].long()
        shares = known[:, 0].float() if weights is None else weights[index.clamp(min=0)] * known[:, 0]
        sums = cross_entropy(out, index, weights, reduction="sum", ignore_index=UNKNOWN)
        terms["cross_entropy"] = sums / shares.sum().clamp(min=SMALL)
    if choice.dice:
        of_class = truth == torch.arange(out.shape[1], device=out.device).view(1, -1, 1, 1, 1)
        terms["dice"] = _missing_overlap(out.softmax(1) * known, of_class.float(), counted)
    return terms


def region_terms(choice: Classes, out: Tensor, truth: Tensor) -> dict[str, Tensor]:
    """Return the unweighted terms of `choice`, of classes that overlap, whose weight is not 0.

    Args:
        out: (n, region, z, y, x), logits.
        truth: of the same shape: 1, 0 or UNKNOWN, which does not count.
    """
    known, inside = (truth != UNKNOWN).float(), (truth == 1).float()
    terms = {}
    if choice.cross_entropy:
        weights = known
        if choice.balance:
            weights = known * torch.where(inside > 0, out.new_tensor(choice.balance).view(1, -1, 1, 1, 1), 1.0)
        errors = binary_cross_entropy_with_logits(out, inside, reduction="none")
        terms["cross_entropy"] = (errors * weights).sum() / weights.sum().clamp(min=SMALL)
    if choice.dice:
        terms["dice"] = _missing_overlap(out.sigmoid() * known, inside, channels_known(truth))
    return terms


def with_left_out_as_first(out: Tensor, annotated: Tensor) -> Tensor:
    """Return logits (n, class, z, y, x) in which the first class has the chances of those that are not annotated too.

    So a voxel of the first label costs nothing, whichever of these it is: the marginal loss of Shi et al. 2021
    (doi 10.1016/j.media.2021.101979).

    Args:
        annotated: (n, class), bool.
    """
    left_out = ~annotated[..., None, None, None]
    summed = left_out.clone()
    summed[:, 0] = True
    first = out.masked_fill(~summed, -torch.inf).logsumexp(1, keepdim=True)
    return torch.cat([first, out.masked_fill(left_out, -torch.inf)[:, 1:]], 1)


def _missing_overlap(out: Tensor, truth: Tensor, counted: Tensor | None) -> Tensor:
    """Return 1 less the mean Dice coefficient of the channels that any of `counted` (n, c) has; of all without."""
    shares = _dice(out, truth)
    if counted is None:
        return 1 - shares.mean()
    has = counted.any(0)
    return ((1 - shares) * has).sum() / has.sum().clamp(min=1)


def balance(near: Tensor, known: Tensor) -> Tensor:
    """Return the weight of each pair (n, offset, z, y, x): per offset, near and apart pairs have half the weight each.

    A kind rarer than `RAREST` has less, so that no voxel weighs more than 1 / (2 * RAREST).
    """
    share = (near * known).sum(ROOM, keepdim=True) / known.sum(ROOM, keepdim=True).clamp(min=1)
    share = share.clamp(RAREST, 1 - RAREST)
    return known * torch.where(near > 0, 0.5 / share, 0.5 / (1 - share))


def _dice(out: Tensor, truth: Tensor) -> Tensor:
    """Return the Dice coefficient of each channel, with squares as in Milletari et al. 2016 (arXiv 1606.04797)."""
    both = (out * truth).sum(ROOM)
    return (2 * both + SMALL) / (out.square().sum(ROOM) + truth.square().sum(ROOM) + SMALL)


def consistency(out: Tensor, inputs: Tensor, scale: Triple) -> Tensor:
    """Return the mean absolute difference between `out`, binned by `scale`, and the net's `inputs`."""
    return (avg_pool3d(out, scale) - inputs).abs().mean()


def cropped(data: Tensor, margin: Triple, scale: Triple = (1, 1, 1)) -> Tensor:
    """Return `data` (n, c, z, y, x) without `margin` times `scale` voxels at each face."""
    z, y, x = (slice(m * s, n - m * s) for m, s, n in zip(margin, scale, data.shape[2:], strict=True))
    return data[..., z, y, x]
