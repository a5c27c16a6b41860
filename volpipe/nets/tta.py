"""Test-time augmentation: the mean of a net's outputs over the mirrored and turned forms of a window.

Not here: augmentation in training. The order of forms is fixed, so that results are the same to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from volpipe.errors import PlanError
from volpipe.geometry.grid import Triple
from volpipe.recipes.inference import Augment, Recipe

if TYPE_CHECKING:
    import torch

Z, Y, X = 2, 3, 4  # of a batch of windows (n, c, z, y, x)


def forms(augment: Augment) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Yield the axes to mirror, and whether y and x are swapped first: 1, 8 or 16 forms."""
    turns = (False, True) if augment == "rotations" else (False,)
    axes = () if augment == "none" else (Z, Y, X)
    for is_turned, count in itertools.product(turns, range(len(axes) + 1)):
        yield from ((mirrored, is_turned) for mirrored in itertools.combinations(axes, count))


def mean_of_forms(net: Callable[[torch.Tensor], torch.Tensor], windows: torch.Tensor, augment: Augment) -> torch.Tensor:
    """Return the mean, float32, of the outputs of `net` for all forms of `windows` (n, c, z, y, x), each put back."""
    if augment == "none":
        return net(windows).float()
    total: torch.Tensor | None = None
    number = 0
    for mirrored, is_turned in forms(augment):
        form = windows.transpose(Y, X) if is_turned else windows
        out = net(form.flip(mirrored).contiguous() if mirrored or is_turned else form).float().flip(mirrored)
        out = out.transpose(Y, X) if is_turned else out
        total = out if total is None else total + out
        number += 1
    assert total is not None
    return total / number


def check_augment(recipe: Recipe, **sizes: Triple) -> None:
    """Refuse to mirror a net whose channels have directions, and to turn windows if one of `sizes` differs in y and x.

    A mirrored affinity is that of the voxel on the other side, and y-affinities of a turned window are of x.

    Raises:
        PlanError: with the offsets or both sizes, and what to set.
    """
    augment, offsets = recipe.infer.augment, recipe.net.offsets
    if augment != "none" and offsets is not None:
        raise PlanError(
            f"infer.augment={augment} averages mirrored outputs, but net.offsets gives each channel a direction, such "
            f"as {list(offsets[0])}, which mirrors reverse; set infer.augment=none, or leave net.offsets out if the "
            "channels are no affinities"
        )
    if augment != "rotations":
        return
    for what, (_, y, x) in sizes.items():
        if y != x:
            raise PlanError(
                f"infer.augment=rotations turns y into x, but {what} is {y} along y and {x} along x; use flips, or "
                "make them alike"
            )
