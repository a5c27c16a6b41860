"""Whether a net agrees with itself, and its windows with what it declares: each a fault in words, or none.

Not here: measuring what a net does not declare (receptive_field), or the refusals (load).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.nets.net_geometry import Geometry, UnmeasurableError, run_net
from volpipe.nets.receptive_field import (
    LATERALS,
    SEED,
    Build,
    MarginProbe,
    Net,
    TimeLimit,
    noise,
    only_sizes,
    randomised,
    shifts,
    takes,
)
from volpipe.nets.receptive_field_probe import reaches_past
from volpipe.nets.window_sizes import AxisSizes, with_size

if TYPE_CHECKING:
    import torch
    from torch import nn


def find_nondeterminism(build: Build, in_channels: int, windows: Sequence[Triple]) -> str:
    """Return the fault of a net that gives two outputs for one window; "" for a net that gives one.

    The window is the first of `windows` (z, y, x) that the net takes.
    """
    import torch

    from volpipe.nets.declared import bare_net, served

    def seeded() -> nn.Module:
        net = bare_net(build())
        torch.default_generator.manual_seed(SEED)  # after building, so that random parts of the net's own differ
        return net if served(net).draws_weights else randomised(net, positive=False)

    with torch.random.fork_rng(devices=[]):
        first, second = seeded(), seeded()
        window, out = _first_output(first, in_channels, windows)
        if not _is_same(out, run_net(first, window)):
            return "gives another output for the same window each time: dropout, or noise that eval() does not end"
        if not _is_same(out, run_net(second, window)):
            return (
                "differs from one call of its function to the next, beside its weights; seed what it draws, or make it "
                "a buffer"
            )
    return ""


def _first_output(net: Net, in_channels: int, windows: Sequence[Triple]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise of the first size that the net takes, and its output."""
    for shape in windows[:-1]:
        window = noise((1, in_channels, *shape))
        with contextlib.suppress(UnmeasurableError):
            return window, run_net(net, window)
    window = noise((1, in_channels, *windows[-1]))
    return window, run_net(net, window)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def find_disagreement(build: Build, in_channels: int, window: Triple, declared: Geometry) -> str:
    """Return the number by which windows of a net would disagree, such as "halo along z"; "" where they agree.

    Args:
        build: returns a new net at each call.
        window: of the plan (z, y, x).
        declared: the net's own, its halo as `before` and `after`.
    """
    import torch

    from volpipe.nets.declared import bare_net, only_sizes_of

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = bare_net(build())
        sizes = only_sizes_of(net)
        random_net = randomised(bare_net(build()), positive=False)
        if any(declared.margin):
            small = triple(max(1, 2 * halo) for halo in declared.halo)
            try:
                return _disagreement_of_margins(build, net, random_net, in_channels, declared, small)
            except UnmeasurableError:  # it takes longer windows alone
                return _disagreement_of_margins(build, net, random_net, in_channels, declared, window)
        loaded = bare_net(build())
        positive = randomised(net, positive=True)
        halo = declared.aligned_halo()
        for axis in range(3):
            shape = _probe_window(positive, in_channels, axis, window, halo, declared, sizes)
            stride, ratio = declared.stride[axis], declared.ratios[axis]
            for net in (positive, loaded):
                if reaches_past(net, in_channels, axis, window=shape, halo=halo[axis], stride=stride, ratio=ratio):
                    return f"halo along {'zyx'[axis]}"
            margin = halo[axis] + stride
            if not sizes[axis] and not all(
                shifts(each, in_channels, axis, shape, margin, stride, ratio) for each in (random_net, loaded)
            ):
                return f"stride along {'zyx'[axis]}"
    return ""


def _disagreement_of_margins(
    build: Build, net: nn.Module, random_net: nn.Module, in_channels: int, declared: Geometry, least: Triple
) -> str:
    """Return the wrong number of a net whose output lacks a margin; "" where windows of `least` and more agree."""
    axes = [
        AxisSizes(ratio, margin, remainder, stride, align_up(max(1, size - remainder), stride) + remainder)
        for ratio, margin, remainder, stride, size in zip(
            declared.ratios, declared.margin, declared.remainder, declared.stride, least, strict=True
        )
    ]
    sizes = only_sizes(net)
    window = triple(only or own.least for only, own in zip(sizes, axes, strict=True))
    probe = MarginProbe(build, net, random_net, in_channels, axes, sizes, TimeLimit(), window)
    halo = declared.aligned_halo()
    inner = [r.out(h - m) for r, h, m in zip(declared.ratios, halo, declared.margin, strict=True)]
    for axis in range(3):
        if axis != probe.across and not probe.agree([axis], declared.stride, inner):
            return f"halo along {'zyx'[axis]}"
    return ""


def _probe_window(
    net: Net, in_channels: int, axis: int, window: Triple, halo: Triple, declared: Geometry, sizes: Triple
) -> Triple:
    """Return a window (z, y, x) to probe along `axis`: with a core of some strides, as thin as the net takes it.

    A net that takes windows of one size alone is probed in the plan's.
    """
    stride = declared.stride
    thin = [n or min(w, align_up(LATERALS[0], s)) for n, w, s in zip(sizes, window, stride, strict=True)]
    length = sizes[axis] or max(window[axis], 2 * halo[axis] + 3 * stride[axis])
    for shape in (with_size(thin, axis, length), with_size(window, axis, length)):
        if takes(net, noise((1, in_channels, *shape)), axis, length, declared.ratios[axis]):
            return shape
    return window
