"""Test-time augmentation: the mean of a net's outputs over the mirrored and turned forms of a window.

An affinity is of two voxels, of which a mirrored window changes the order: in that of a channel of the offset -1, the
pair of a voxel lies at the voxel before. It is put back to the voxel, and to the channel, that hold it else.

Not here: augmentation in training. The order of forms is fixed, so that results are the same to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from volpipe.errors import PlanError
from volpipe.geometry.affinities import Offset
from volpipe.geometry.grid import Triple, triple
from volpipe.nets.facts import NetFacts
from volpipe.recipes.inference import Augment, Recipe

if TYPE_CHECKING:
    import torch

Z, Y, X = 2, 3, 4  # of a batch of windows (n, c, z, y, x)


Form = tuple[tuple[int, ...], bool]  # the axes that are mirrored, and whether y and x are swapped before


def forms(augment: Augment) -> Iterator[Form]:
    """Yield 1, 8 or 16 forms of a window."""
    turns = (False, True) if augment == "rotations" else (False,)
    axes = () if augment == "none" else (Z, Y, X)
    for is_turned, count in itertools.product(turns, range(len(axes) + 1)):
        yield from ((mirrored, is_turned) for mirrored in itertools.combinations(axes, count))


def mean_of_forms(
    net: Callable[[torch.Tensor], torch.Tensor],
    windows: torch.Tensor,
    augment: Augment,
    offsets: Sequence[Offset] | None = None,
) -> torch.Tensor:
    """Return the mean, float32, of the outputs of `net` for all forms of `windows` (n, c, z, y, x), each put back.

    With `offsets` the channels are affinities; those whose other voxel lies outside the output are not to be used.
    """
    if augment == "none":
        return net(windows).float()
    import torch

    total: torch.Tensor | None = None
    number = 0
    for mirrored, is_turned in forms(augment):
        form = windows.transpose(Y, X) if is_turned else windows
        out = net(form.flip(mirrored).contiguous() if mirrored or is_turned else form).float().flip(mirrored)
        out = out.transpose(Y, X) if is_turned else out
        if offsets is not None:  # of an ensemble, the channels of one net after the other
            nets = torch.split(out, len(offsets), dim=1)
            out = torch.cat([_with_pairs_put_back(each, offsets, (mirrored, is_turned)) for each in nets], dim=1)
        total = out if total is None else total + out
        number += 1
    assert total is not None
    return total / number


def _with_pairs_put_back(affinities: torch.Tensor, offsets: Sequence[Offset], form: Form) -> torch.Tensor:
    """Return the `affinities` (n, c, z, y, x) of a form, of which the voxels are back, in their own channels."""
    import torch

    in_form = [_in_form(offset, form) for offset in offsets]
    channels = []
    for offset in offsets:
        if offset in in_form:
            channels.append(affinities[:, in_form.index(offset)])
        else:
            pairs = affinities[:, in_form.index(_reversed(offset))]  # each at its other voxel
            channels.append(pairs.roll([-step for step in offset], (Z - 1, Y - 1, X - 1)))
    return torch.stack(channels, dim=1)


def _in_form(offset: Offset, form: Form) -> Offset:
    """Return where `offset` leads when the form of the window is put back."""
    mirrored, is_turned = form
    z, y, x = (-step if axis in mirrored else step for axis, step in zip((Z, Y, X), offset, strict=True))
    return (z, x, y) if is_turned else (z, y, x)


def _reversed(offset: Offset) -> Offset:
    return triple(-step for step in offset)


def with_forms(recipe: Recipe, net: NetFacts) -> NetFacts:
    """Return the facts of `net` run over the forms that `recipe` chooses: affinities are read beyond the net's halo.

    Raises:
        PlanError: a mirrored or turned offset is that of no channel; it names both, and what to set.
    """
    augment, offsets = recipe.infer.augment, recipe.net.offsets
    if augment == "none" or offsets is None:
        return net
    for form, offset in itertools.product(forms(augment), offsets):
        turned = _in_form(offset, form)
        if not {turned, _reversed(turned)} & set(offsets):
            raise PlanError(
                f"infer.augment={augment} makes {list(turned)} of the offset {list(offset)}, and net.offsets has "
                f"neither that nor {list(_reversed(turned))}; set infer.augment={'flips or ' if form[1] else ''}none, "
                "or leave net.offsets out if the channels are no affinities"
            )
    if len(net.arrays) > 1:
        raise PlanError(
            f"infer.augment={augment} of affinities needs one output, and net {net.label} gives {len(net.arrays)}; "
            f"name one, such as net.output={net.arrays[0].output}"
        )
    reach = (max(abs(offset[axis]) for offset in offsets) for axis in range(3))
    sizes = zip(net.halo, reach, net.shrink, net.scale, strict=True)
    return net.model_copy(update={"halo": triple(h + -(-r * u // s) for h, r, u, s in sizes)})


def check_turns(recipe: Recipe, **sizes: Triple) -> None:
    """Refuse to turn windows if one of `sizes` differs in y and x.

    Raises:
        PlanError: with both sizes, and what to set.
    """
    if recipe.infer.augment != "rotations":
        return
    for what, (_, y, x) in sizes.items():
        if y != x:
            raise PlanError(
                f"infer.augment=rotations turns y into x, but {what} is {y} along y and {x} along x; use flips, or "
                "make them alike"
            )
