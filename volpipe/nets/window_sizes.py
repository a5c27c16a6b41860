"""The windows that a net takes, and the shapes that it gives for them: channels, scale, margin and remainder.

Not here: whether windows agree (receptive_field), which takes values. A large window is tried without values where the
net's code allows that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING

from volpipe.geometry.grid import Triple, triple
from volpipe.nets.net_geometry import OutputError, Ratio, SlowNetError, UnmeasurableError, run_net

if TYPE_CHECKING:
    import torch
    from torch import nn

Net = Callable[["torch.Tensor"], "torch.Tensor"]

STRIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 15, 16, 18, 20, 21, 24, 25, 27, 28, 30, 32, 36, 40, 48, 54, 64)
# Cubes that are tried for a first window: multiples of usual strides, then all sizes of a range, in which a net without
# padding finds one whatever its remainder.
FIRST_SIZES = (32, 64, 48, 96, 128)
RANGES = ((33, 64), (65, 96), (129, 192), (193, 288), (289, 512), (1023, 1024), (8, 31))
SIZES_TO_TRY = (
    *FIRST_SIZES,
    # even ones first
    *(size for low, high in RANGES for is_odd in (0, 1) for size in range(low, high + 1) if size % 2 == is_odd),
)
SECOND_STEPS = (-16, 32, 48, 36, 27, 64, 54, 60, 40, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 18, 20, 24, 25)
MOST_COMPUTED = 48**3  # voxels of a window that is computed rather than tried without values, once one was refused
MOST_TRIED = 160**3  # voxels of a window that is computed where the net cannot be tried without values

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AxisSizes:
    """Lengths of windows along one axis, and of the output: (w - 2 * margin) * ratio for w = remainder + k * step.

    Attributes:
        step: the least one by which lengths of windows may differ, as far as shapes tell.
        least: the shortest window, as far as it is known.
        uneven: input voxels that the output lacks less before than behind, 0 or 1; the margin is the larger.
    """

    ratio: Ratio
    margin: int
    remainder: int
    step: int
    least: int
    uneven: int = 0

    def window(self, least_output: int, step: int) -> int:
        """Return the shortest window, in whole steps, whose output has at least `least_output` voxels."""
        length = self.remainder + -(-(self.least - self.remainder) // step) * step
        while self.ratio.out(length - 2 * self.margin) < least_output:
            length += step
        return length


@dataclass
class Shapes:
    """The output shape (C, z, y, x) of a net by window (z, y, x), tried once for each.

    Attributes:
        net: with values, on the CPU.
        build: returns a new net.
        channels: numbers of channels that the net may take; the first one that it does stays alone.
    """

    net: Net
    build: Callable[[], nn.Module]
    channels: list[int]
    error: UnmeasurableError | None = None
    _known: dict[Triple, Triple | None] = field(default_factory=dict)
    _has_refused: bool = False
    _empty: Net | None = None
    _is_computed: bool = False
    num_out: int = 0

    def of(self, window: Triple) -> Triple | None:
        """Return the shape (z, y, x) of the output for a window, None where the net does not take it."""
        if window not in self._known:
            shape = self._try_window(window)
            self._known[window] = None if shape is None else triple(shape[1:])
            self.num_out = self.num_out if shape is None else shape[0]
            self._has_refused |= shape is None
        return self._known[window]

    def _try_window(self, window: Triple) -> tuple[int, ...] | None:
        for number in self.channels:
            try:
                shape = tuple(self._output_of((1, number, *window)).shape)
            except (SlowNetError, OutputError):
                raise
            except UnmeasurableError as error:
                if self.error is None or number == self.channels[-1]:
                    self.error = error
                continue
            if len(shape) != 5:
                raise UnmeasurableError(
                    f"a window (1, {number}, z, y, x) gives {len(shape)} axes, {shape}",
                    "let its forward return (n, c, z, y, x)",
                )
            if not all(shape):
                continue
            self.channels = [number]
            return shape[1:]
        return None

    def _output_of(self, shape: Sequence[int]) -> torch.Tensor:
        import torch

        voxels = shape[2] * shape[3] * shape[4]
        if self._is_computed or not self._has_refused or voxels <= MOST_COMPUTED // 8:
            return self._computed(shape, voxels)
        try:
            if self._empty is None:
                self._empty = self.build().to("meta")
            with torch.device("meta"):
                return run_net(self._empty, torch.empty(tuple(shape)))
        except (Exception, SystemExit) as error:
            if isinstance(error, OutputError) or (isinstance(error, UnmeasurableError) and not _is_of_meta(error)):
                raise
            log.debug("the net cannot be tried without values: %s", error)
            self._is_computed = True
            return self._computed(shape, voxels)

    def _computed(self, shape: Sequence[int], voxels: int) -> torch.Tensor:
        import torch

        if voxels > MOST_TRIED:
            raise UnmeasurableError(f"windows of more than {MOST_TRIED} voxels are not tried", "set {keys}")
        return run_net(self.net, torch.rand(tuple(shape)))


def _is_of_meta(error: BaseException) -> bool:
    """Return whether a failure is one of trying without values, not of the window."""
    words = str(error).lower()
    return any(
        word in words for word in ("meta", "fake", "item()", "without values", "cannot copy out", "aten::_local")
    )


def window_sizes(shapes: Shapes, fixed: Triple, hint: Triple | None = None) -> tuple[Triple, Triple, list[AxisSizes]]:
    """Return a window that the net takes, the only sizes that it takes, and its sizes along z, y, x.

    Args:
        fixed: the only size that it takes, 0 along an axis where it takes others.
        hint: a window that its user has chosen, which is tried after the usual cubes.

    Raises:
        UnmeasurableError: it takes none of those tried, or gives another size than can be served.
    """
    base = _first_window(shapes, fixed, hint)
    ratios = None if all(fixed) else _ratios(shapes, base, fixed)
    if ratios is None:
        return base, base, [_only_size(shapes, base, axis) for axis in range(3)]
    window = triple(
        n if only else -(-n // ratio.shrink) * ratio.shrink for n, only, ratio in zip(base, fixed, ratios, strict=True)
    )
    base = window if shapes.of(window) is not None else base
    axes = [
        _only_size(shapes, base, axis) if fixed[axis] else _axis_sizes(shapes, base, axis, ratios[axis])
        for axis in range(3)
    ]
    return base, fixed, axes


def _first_window(shapes: Shapes, fixed: Triple, hint: Triple | None) -> Triple:
    first: UnmeasurableError | None = None
    cubes = [(size,) * 3 for size in SIZES_TO_TRY]
    if hint is not None:
        cubes.insert(len(FIRST_SIZES), hint)
    for cube in cubes:
        window = triple(only or size for only, size in zip(fixed, cube, strict=True))
        if shapes.of(window) is not None:
            return window
        first = first or shapes.error
        if all(fixed) or "channels" in str(shapes.error).partition(": ")[2]:  # which no size mends
            break
    assert first is not None or shapes.error is not None
    error = first or shapes.error
    assert error is not None
    raise error


def _ratios(shapes: Shapes, base: Triple, fixed: Triple) -> list[Ratio] | None:
    """Return output voxels per input voxel along each axis, by a second window; None where no other size is taken."""
    first = shapes.of(base)
    assert first is not None
    takes_others = False
    for step in SECOND_STEPS:
        window = triple(n if only else n + step for n, only in zip(base, fixed, strict=True))
        second = shapes.of(window) if min(window) > 0 else None
        if second is None:
            continue
        takes_others |= second != first
        ratios = [
            Ratio() if fixed[axis] else _ratio_of(Fraction(second[axis] - first[axis], step)) for axis in range(3)
        ]
        if all(ratio is not None for ratio in ratios):
            return [ratio for ratio in ratios if ratio is not None]
    if not takes_others:
        return None
    raise UnmeasurableError(
        f"a window of {base} voxels gives {first}, and outputs of other sizes follow no scale",
        "let the output have a whole number of voxels per input voxel, or one per whole number of them; or set "
        "net.scale, net.margin, net.remainder, net.stride and net.halo",
    )


def _ratio_of(factor: Fraction) -> Ratio | None:
    if factor >= 1 and factor.denominator == 1:
        return Ratio(scale=factor.numerator)
    return Ratio(shrink=factor.denominator) if factor > 0 and factor.numerator == 1 else None


def _only_size(shapes: Shapes, base: Triple, axis: int) -> AxisSizes:
    """Return the sizes of a net that takes one length, by the voxels of its output: a coarser grid, or a margin."""
    size, out = base[axis], (shapes.of(base) or base)[axis]
    ratio = _ratio_of(Fraction(out, size))
    if ratio is not None and (ratio.shrink == 1 or out * ratio.shrink == size):
        return AxisSizes(ratio, 0, 0, 1, size)
    margin, uneven = _halves(size - out, axis, size, out, Ratio())
    return AxisSizes(Ratio(), margin, size, 1, size, uneven)


def _halves(loss: int, axis: int, size: int, out: int, ratio: Ratio) -> tuple[int, int]:
    """Return the voxels that an output lacks at the high face, and how many fewer it lacks at the low face."""
    if loss < 0 or (loss % 2 and ratio.shrink > 1):
        how = "gains" if loss < 0 else "loses"
        raise UnmeasurableError(
            f"a window of {size} voxels along {'zyx'[axis]} gives {out}: it {how} {abs(loss)}, not the same on both "
            "sides",
            "let its forward drop the voxels that are too many on one side",
        )
    return -(-loss // 2), loss % 2


def _axis_sizes(shapes: Shapes, base: Triple, axis: int, ratio: Ratio) -> AxisSizes:
    """Return the lengths of windows along one axis: of those that the net takes, the ones that lose fewest voxels."""
    length, out = base[axis], (shapes.of(base) or base)[axis]
    if length * ratio.scale == out * ratio.shrink:
        return AxisSizes(ratio, 0, 0, ratio.shrink, length)

    def loss(size: int) -> int | None:
        """Return the input voxels that the output of a window of `size` lacks, None where the net does not take it."""
        shape = shapes.of(with_size(base, axis, size))
        if shape is None or shape[axis] % ratio.scale:
            return None
        return size - shape[axis] * ratio.shrink // ratio.scale

    for step in STRIDES:
        if step % ratio.shrink:
            continue
        losses = ((loss(size), size) for size in range(length, length + step))
        classes = [
            (missing % min(2, ratio.shrink), missing, n % step != 0, n) for missing, n in losses if missing is not None
        ]
        for _, missing, _, size in sorted(classes):
            if any(loss(size + k * step) != missing for k in (1, 2)):
                continue
            margin, uneven = _halves(missing, axis, size, (shapes.of(with_size(base, axis, size)) or base)[axis], ratio)
            shortest = size  # that loses as much
            while shortest - step > missing and loss(shortest - step) == missing:
                shortest -= step
            return AxisSizes(ratio, margin, size % step, step, shortest, uneven)
    raise UnmeasurableError(
        f"windows of {length} voxels and more along {'zyx'[axis]} give outputs that do not grow with them in steps of "
        f"up to {STRIDES[-1]}",
        "set net.scale, net.margin, net.remainder, net.stride and net.halo",
    )


def with_size(sizes: Sequence[int], axis: int, size: int) -> Triple:
    """Return `sizes` (z, y, x) with another one along `axis`."""
    return triple(size if i == axis else n for i, n in enumerate(sizes))
