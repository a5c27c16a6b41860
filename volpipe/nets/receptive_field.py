"""The geometry of a net, measured from outside: scale, stride and halo.

Not here: what a net declares (load), or the error of a smaller halo (halo_search). A net is measured with other
weights: random ones for scale and stride; positive ones for the halo, so that no two influences on an output cancel.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.nets.net_geometry import (
    KEYS,
    Geometry,
    NetArray,
    Ratio,
    SlowNetError,
    UnmeasurableError,
    WholeWindowError,
    run_net,
)
from volpipe.nets.receptive_field_probe import reach_along, reaches_past
from volpipe.nets.window_sizes import STRIDES, AxisSizes, Shapes, window_sizes

if TYPE_CHECKING:
    import torch
    from torch import nn

Build = Callable[[], "nn.Module"]
Net = Callable[["torch.Tensor"], "torch.Tensor"]

SEED = 0
FIRST_LENGTH, MOST_LENGTH = 96, 384  # of the windows, along the axis that is measured
LATERALS = (4, 8, 16)  # sizes of windows along the axes that are not measured, the least that the net takes
MOST_SECONDS, LOG_SECONDS = 60.0, 0.5  # of a processor, so that a busy machine refuses no small net
PATIENCE = 20  # times as long on the wall: for a net that waits, or is given a twentieth of a processor
MEASURED = ("scale", *(f"{what} along {axis}" for what in ("stride", "halo") for axis in "zyx"))
SAME = 1e-5  # of the largest output: more than rounding leaves of equal numbers, and far voxels add

NO_GRADIENT = (
    "no gradient comes through it, as through classes of argmax, a threshold, detach(), no_grad() and numpy",
    f"let it return numbers from before those; or {KEYS}",
)

log = logging.getLogger(__name__)


@dataclass
class Watch:
    """A limit on the processor time that measuring a net takes, and a log of its progress.

    The time is that of the thread that measures, which has a share of all work, and never more than on the wall.
    """

    most_seconds: float = MOST_SECONDS
    clock: Callable[[], float] = time.thread_time
    wall: Callable[[], float] = time.monotonic
    known: dict[str, str] = field(default_factory=dict)
    _started: tuple[float, float] | None = None
    _last_log: float = -math.inf

    def wrap(self, net: Net) -> Net:
        """Return `net` with a look at the clock before each call."""

        def watched(windows: torch.Tensor) -> torch.Tensor:
            self._check_time()
            return net(windows)

        return watched

    def _check_time(self) -> None:
        now, wall = self.clock(), self.wall()
        self._started = self._started or (now, wall)
        seconds, most = now - self._started[0], self.most_seconds
        known = ", ".join(f"{what} {value}" for what, value in self.known.items()) or "nothing"
        missing = [what for what in MEASURED if what not in self.known]
        for took, limit, of in ((seconds, most, " of processor time"), (wall - self._started[1], PATIENCE * most, "")):
            if took > limit:
                raise SlowNetError(
                    f"measuring took more than {limit:.0f} s{of}; known so far: {known}; missing: {', '.join(missing)}",
                    "set {keys}, which it does not declare",
                )
        if wall - self._last_log >= LOG_SECONDS:
            self._last_log = wall
            what = missing[0] if missing else "halo"
            share = f"{seconds:.0f} s of {most:.0f} s of processor time"
            log.info("measures the %s of the net, %s; known so far: %s", what, share, known)


def measure_geometry(
    build: Build, in_channels: int | None = None, watch: Watch | None = None, *, whole_window: str = ""
) -> Geometry:
    """Return the geometry of the net that `build` returns, a new one at each call.

    Args:
        in_channels: of the net; None where it is to be tried.
        whole_window: why tiles of the net differ from the whole, if that is known: only shapes are measured then.

    Raises:
        UnmeasurableError: it takes none of the windows tried, gives what cannot be served, or is too slow.
    """
    import torch

    watch = watch or Watch()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = _bare(build())
        mixed = watch.wrap(_randomised(net, positive=False))
        channels = _channels_to_try(net) if in_channels is None else [in_channels]
        shapes = Shapes(mixed, lambda: _bare(build()), channels)
        base, sizes, axes = window_sizes(shapes, _only_sizes(net))
        probe = Probe(build, net, mixed, shapes.channels[0], axes, sizes, watch)
        ratios = [axis.ratio for axis in axes]
        watch.known["scale"] = str(triple(ratio.scale for ratio in ratios))
        strides, reaches, problem = [axis.step for axis in axes], [(axis.margin, axis.margin) for axis in axes], ""
        try:
            if whole_window:
                raise WholeWindowError(whole_window)
            strides, reaches = probe.geometry() if any(axis.margin for axis in axes) else probe.padded_geometry()
        except WholeWindowError as error:
            problem = str(error)
            strides = [
                own.step if sizes[axis] else _step_by_shapes(shapes, base, axis, own) for axis, own in enumerate(axes)
            ]
        before, after = map(triple, zip(*reaches, strict=True))
        small = [only or own.window(1, stride) for only, own, stride in zip(sizes, axes, strides, strict=True)]
        window = _noise((1, shapes.channels[0], *(small if any(axis.margin for axis in axes) else base)))
        out = shapes.of(base)
        assert out is not None
        outputs, arrays = _outputs(net, window)
        return Geometry(
            triple(ratio.scale for ratio in ratios), triple(strides), before, after, shapes.num_out,
            margin=triple(axis.margin for axis in axes),
            remainder=triple(axis.remainder % stride for axis, stride in zip(axes, strides, strict=True)),
            shrink=triple(ratio.shrink for ratio in ratios),
            in_channels=shapes.channels[0],
            fixed=sizes if _slice_axis(net) is None else _with(sizes, _slice_axis(net) or 0, 0),
            uneven=triple(axis.uneven for axis in axes),
            whole_window=problem, least=(base, out),
            outputs=outputs, arrays=arrays,
        )  # fmt: skip


def _channels_to_try(net: nn.Module) -> list[int]:
    from volpipe.nets.adapter import possible_channels

    return possible_channels(net, _context(net))


def _outputs(net: nn.Module, window: torch.Tensor) -> tuple[tuple[str, ...], tuple[NetArray, ...]]:
    """Return the outputs of a user's net, if it has several, and those of them that are joined in one."""
    from volpipe.nets.adapter import Adapter

    return (net.described_outputs(window), net.arrays(window)) if isinstance(net, Adapter) else ((), ())


def _only_sizes(net: nn.Module) -> Triple:
    """Return the only sizes of windows (z, y, x) that a net takes, 0 along an axis where it takes others.

    Slices go one by one: nothing is left to measure across them.
    """
    from volpipe.nets.declared import only_sizes_of

    sizes, axis = only_sizes_of(net), _slice_axis(net)
    return sizes if axis is None else _with(sizes, axis, 1)


def _slice_axis(net: nn.Module) -> int | None:
    from volpipe.nets.declared import slice_axis_of

    return slice_axis_of(net)


def _context(net: nn.Module) -> int:
    from volpipe.nets.declared import context_of

    return context_of(net)


def _draws_weights(net: nn.Module) -> bool:
    from volpipe.nets.declared import draws_weights

    return draws_weights(net)


def _step_by_shapes(shapes: Shapes, base: Triple, axis: int, sizes: AxisSizes) -> int:
    """Return the least step of a window's length along `axis` by which the output grows as it should."""
    for step in STRIDES:
        if sizes.margin or step % sizes.ratio.shrink:
            continue
        first = align_up(base[axis], step)
        lengths = [first + k * step for k in range(3)]
        outs = [shapes.of(_with(base, axis, length)) for length in lengths]
        if all(out and out[axis] == sizes.ratio.out(length) for out, length in zip(outs, lengths, strict=True)):
            return step
    return sizes.step


@dataclass
class Probe:
    """Strides and reaches of a net, by values of its outputs.

    Attributes:
        build: returns a new net at each call.
        net: one of them.
        mixed: that net with random weights, watched.
        in_channels: of the net.
        axes: sizes of windows along z, y, x.
        sizes: the only ones that it takes; 0 along an axis where it takes others.
        watch: on the time.
    """

    build: Build
    net: nn.Module
    mixed: Net
    in_channels: int
    axes: Sequence[AxisSizes]
    sizes: Triple
    watch: Watch

    def __post_init__(self) -> None:
        self.ratios = [axis.ratio for axis in self.axes]
        self.across = _slice_axis(self.net)
        if self.across is not None:
            axis, halo = "zyx"[self.across], _context(self.net)
            self.watch.known |= {f"stride along {axis}": "1", f"halo along {axis}": str(halo)}

    def padded_geometry(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return stride and reach along each axis of a net that keeps the size of windows."""
        least = _least(self.mixed, self.in_channels, self.axes, self.sizes)
        measured = [axis for axis in range(3) if axis != self.across]
        strides, likely = [1, 1, 1], (1, FIRST_LENGTH)
        for axis in measured:
            likely = strides[axis], _ = _stride(
                self.mixed, self.in_channels, axis, self.axes[axis], sizes=self.sizes, least=least, likely=likely
            )
            self.watch.known[f"stride along {'zyx'[axis]}"] = str(strides[axis])
        draws_weights = _draws_weights(self.net)
        module = _randomised(self.net if draws_weights else _bare(self.build()).double(), positive=True)
        positive = self.watch.wrap(module)
        if not draws_weights:
            self._check_gradient(positive, strides)
        reaches = [(_context(self.net),) * 2] * 3
        for axis in measured:
            reaches[axis] = reach_along(
                positive, self.in_channels, axis, strides=strides, ratios=self.ratios, sizes=self.sizes,
                is_double=not draws_weights,
            )  # fmt: skip
            self.watch.known[f"halo along {'zyx'[axis]}"] = str(max(reaches[axis]))
        return strides, reaches

    def _check_gradient(self, positive: Net, strides: Sequence[int]) -> None:
        """Refuse a net whose numbers come from a threshold or the like, which would hide what it sees."""
        import torch

        shape = [only or align_up(LATERALS[0], 2 * stride) for only, stride in zip(self.sizes, strides, strict=True)]
        with torch.enable_grad():
            window = torch.rand((1, self.in_channels, *shape), dtype=torch.float64, requires_grad=True)
            if not positive(window).requires_grad:
                raise UnmeasurableError(*NO_GRADIENT)

    def geometry(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return stride and reach along each axis of a net whose output lacks a margin of its window."""
        strides = [axis.step for axis in self.axes]
        measured = [axis for axis in range(3) if axis != self.across]
        if self.agree(measured, strides, (0, 0, 0)):
            return strides, [(axis.margin,) * 2 for axis in self.axes]
        reaches = []
        for axis, sizes in enumerate(self.axes):
            if axis == self.across:
                reaches.append((_context(self.net),) * 2)
                continue
            strides[axis] = self._stride(axis)
            self.watch.known[f"stride along {'zyx'[axis]}"] = str(strides[axis])
            halo = sizes.margin + self._padding(axis, strides)
            self.watch.known[f"halo along {'zyx'[axis]}"] = str(halo)
            reaches.append((halo, halo))
        return strides, reaches

    def agree(self, axes: Sequence[int], strides: Sequence[int], inner: Sequence[int]) -> bool:
        """Return whether a window gives the same voxels as a larger one that begins and ends a stride further out.

        That is along `axes`. Of a net that takes no larger one, the other is as large, and lies a stride before it.

        Args:
            inner: output voxels to leave out at each face.
        """
        is_fixed = any(self.sizes[axis] for axis in axes)  # it takes no larger window
        shifts = [self.ratios[axis].out(strides[axis]) if axis in axes else 0 for axis in range(3)]
        outputs = [2 * n + 1 + shift for n, shift in zip(inner, shifts, strict=True)]  # of every phase of the stride
        window = [
            only or own.window(output, stride)
            for only, own, output, stride in zip(self.sizes, self.axes, outputs, strides, strict=True)
        ]
        places = [strides[axis] if axis in axes else 0 for axis in range(3)]
        larger = [n + (1 if is_fixed else 2) * place for n, place in zip(window, places, strict=True)]
        line = _noise((1, self.in_channels, *larger))
        for axis in axes:
            line = line * _noise((1, 1, *(n if i == axis else 1 for i, n in enumerate(larger))))
            end = line.narrow(2 + axis, larger[axis] - strides[axis], strides[axis])
            end.mul_(6).sub_(2)  # the largest and the smallest values are not in all windows
        first = run_net(self.mixed, _cut(line, [0] * 3, window if is_fixed else larger))
        moved = run_net(self.mixed, _cut(line, places, window))
        start = [n + shift for n, shift in zip(inner, shifts, strict=True)]
        kept = [n - 2 * i - is_fixed * shift for n, i, shift in zip(moved.shape[2:], inner, shifts, strict=True)]
        return min(kept) > 0 and _is_near(_cut(first, start, kept), _cut(moved, inner, kept))

    def _stride(self, axis: int) -> int:
        """Return the least stride along `axis` by which windows agree, away from their faces."""
        sizes, lateral = self.axes[axis], [each.step for each in self.axes]
        for share in (1, 4, 16):
            for step in STRIDES:
                if step % sizes.step:
                    continue
                inner = [0, 0, 0]
                inner[axis] = sizes.ratio.out(share * max(step, 2 * sizes.ratio.shrink))
                if self.agree([axis], [*lateral[:axis], step, *lateral[axis + 1 :]], inner):
                    return step
        raise WholeWindowError(
            f"no shift along axis {'zyx'[axis]} by up to {STRIDES[-1]} voxels leaves the output as it is"
        )

    def _padding(self, axis: int, strides: Sequence[int]) -> int:
        """Return how far from its faces the output differs from that of a larger window, in strides of input voxels."""
        for steps in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24):
            inner = [0, 0, 0]
            inner[axis] = self.ratios[axis].out(steps * strides[axis])
            if self.agree([axis], strides, inner):
                return steps * strides[axis]
        raise WholeWindowError(f"windows disagree along axis {'zyx'[axis]}, however far from their faces")


def _cut(data: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return the box of `data` (n, c, z, y, x) of a size at a place."""
    for axis in range(3):
        data = data.narrow(2 + axis, start[axis], size[axis])
    return data


def _is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).abs().max()) <= SAME * float(one.abs().max())


def find_nondeterminism(build: Build, in_channels: int, windows: Sequence[Triple]) -> str:
    """Return the fault of a net that gives two outputs for one window; "" for a net that gives one.

    The window is the first of `windows` (z, y, x) that the net takes.
    """
    import torch

    def seeded() -> nn.Module:
        net = _bare(build())
        torch.default_generator.manual_seed(SEED)  # after building, so that random parts of the net's own differ
        return net if _draws_weights(net) else _randomised(net, positive=False)

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
        window = _noise((1, in_channels, *shape))
        with contextlib.suppress(UnmeasurableError):
            return window, run_net(net, window)
    window = _noise((1, in_channels, *windows[-1]))
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

    from volpipe.nets.declared import only_sizes_of

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = _bare(build())
        sizes = only_sizes_of(net)
        mixed = _randomised(_bare(build()), positive=False)
        if any(declared.margin):
            small = triple(max(1, 2 * halo) for halo in declared.halo)
            try:
                return _disagreement_of_margins(build, net, mixed, in_channels, declared, small)
            except UnmeasurableError:  # it takes longer windows alone
                return _disagreement_of_margins(build, net, mixed, in_channels, declared, window)
        positive = _randomised(net, positive=True)
        halo = declared.aligned_halo()
        for axis in range(3):
            shape = _probe_window(positive, in_channels, axis, window, halo, declared, sizes)
            stride, ratio = declared.stride[axis], declared.ratios[axis]
            if reaches_past(positive, in_channels, axis, window=shape, halo=halo[axis], stride=stride, ratio=ratio):
                return f"halo along {'zyx'[axis]}"
            if not sizes[axis] and not _shifts(mixed, in_channels, axis, shape, halo[axis] + stride, stride, ratio):
                return f"stride along {'zyx'[axis]}"
    return ""


def _disagreement_of_margins(
    build: Build, net: nn.Module, mixed: nn.Module, in_channels: int, declared: Geometry, least: Triple
) -> str:
    """Return the wrong number of a net whose output lacks a margin; "" where windows of `least` and more agree."""
    axes = [
        AxisSizes(ratio, margin, remainder, stride, align_up(max(1, size - remainder), stride) + remainder)
        for ratio, margin, remainder, stride, size in zip(
            declared.ratios, declared.margin, declared.remainder, declared.stride, least, strict=True
        )
    ]
    probe = Probe(build, net, mixed, in_channels, axes, _only_sizes(net), Watch())
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
    for shape in (_with(thin, axis, length), _with(window, axis, length)):
        if _takes(net, _noise((1, in_channels, *shape)), axis, length, declared.ratios[axis]):
            return shape
    return window


def _with(sizes: Sequence[int], axis: int, size: int) -> Triple:
    """Return `sizes` (z, y, x) with another one along `axis`."""
    return triple(size if i == axis else n for i, n in enumerate(sizes))


def _shifts(net: Net, in_channels: int, axis: int, window: Triple, margin: int, stride: int, ratio: Ratio) -> bool:
    """Return whether shifting the input by `stride` along `axis` only shifts the output, `margin` off the faces."""
    length = window[axis]
    margin = align_up(max(margin, stride), ratio.shrink)
    count = ratio.out(length - 2 * margin)
    if count <= 0:
        return True  # no voxel is that far inside
    line = _noise((1, in_channels, *_with(window, axis, length + stride)))
    still = run_net(net, line.narrow(2 + axis, 0, length)).narrow(2 + axis, ratio.out(margin), count)
    moved = run_net(net, line.narrow(2 + axis, stride, length))
    moved = moved.narrow(2 + axis, ratio.out(margin - stride), count)
    return _is_near(still, moved)


def _least(net: Net, in_channels: int, axes: Sequence[AxisSizes], sizes: Triple) -> Triple:
    """Return the smallest of LATERALS that the net takes along each axis, to save time."""
    least = [n or axis.least for n, axis in zip(sizes, axes, strict=True)]
    for axis in range(3):
        for size in () if sizes[axis] else LATERALS:
            if size % axes[axis].ratio.shrink or not 2 * axes[axis].ratio.shrink <= size <= least[axis]:
                continue
            if _takes(net, _noise((1, in_channels, *_with(least, axis, size))), axis, size, axes[axis].ratio):
                least[axis] = size
                break
    return triple(least)


def _bare(net: nn.Module) -> nn.Module:
    """Return the bare network of a package, without its pre- and postprocessing; other nets as they are."""
    from volpipe.nets.declared import bare_net

    return bare_net(net)


def _randomised(net: nn.Module, *, positive: bool) -> nn.Module:
    """Return `net` with random weights, in place unless it draws its own: none is zero as if it were untrained."""
    import torch

    from volpipe.nets.declared import ServedNet

    if isinstance(net, ServedNet) and net.draws_weights:
        return net.with_random_weights(positive=positive)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            inputs = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
            weights = torch.rand_like(parameter) + 0.5 if positive else torch.randn_like(parameter)
            parameter.copy_(weights / (inputs if positive else math.sqrt(inputs)))
    return net


def _stride(
    net: Net, in_channels: int, axis: int, own: AxisSizes, *, sizes: Triple, least: Triple, likely: tuple[int, int]
) -> tuple[int, int]:
    """Return the least shift of the input along `axis` that only shifts the output, and the window that showed it.

    What lies at the window's faces does not count.

    Args:
        sizes: the only window that the net takes, 0 along an axis where it takes others.
        least: sizes of windows along the other axes.
        likely: shift and window along another axis, which are tried first.

    Raises:
        WholeWindowError: there is none.
    """
    length = most = sizes[axis] or align_up(max(FIRST_LENGTH, likely[1]), own.least if FIRST_LENGTH % own.least else 1)
    while length <= (sizes[axis] or MOST_LENGTH):
        most = length
        shape = _with(least, axis, length + max(STRIDES))
        slices = [n if i == axis else 1 for i, n in enumerate(shape)]
        line = _noise((1, in_channels, *shape)) * _noise((1, 1, *slices))  # no part of it is like another, on average
        shifted = Shifted(net, line, axis, length, own.ratio, is_fixed=bool(sizes[axis]))
        parts = [likely[0] // prime for prime in (2, 3, 5, 7) if likely[0] % prime == 0]
        if shifted.only_shifts(likely[0]) and not any(map(shifted.only_shifts, parts)):
            return likely[0], length
        for shift in STRIDES:
            if shifted.only_shifts(shift):
                return shift, length
        length *= 2
    raise WholeWindowError(
        f"no shift along axis {'zyx'[axis]} by up to {max(STRIDES)} voxels leaves the output as it is, in windows of "
        f"up to {most}; layers that look at the whole window (norms, attention) do that"
    )


@dataclass
class Shifted:
    """Outputs of `net` for windows of `length` along `axis` that are cut from `line`, each a shift further."""

    net: Net
    line: torch.Tensor
    axis: int
    length: int
    ratio: Ratio
    is_fixed: bool
    _known: dict[int, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        out = run_net(self.net, self.line.narrow(2 + self.axis, 0, self.length))
        self._still = out.narrow(2 + self.axis, 0, self.ratio.out(self.length))
        self._largest = float(self._still.abs().max())

    def only_shifts(self, shift: int) -> bool:
        """Return whether shifting the input only shifts the output, in the middle of the window."""
        if shift not in self._known:
            self._known[shift] = self._only_shifts(shift)
        return self._known[shift]

    def _only_shifts(self, shift: int) -> bool:
        net, axis, length, ratio = self.net, self.axis, self.length, self.ratio
        first, count = ratio.out(length // 3), max(1, ratio.out(length // 6))
        if shift % ratio.shrink or first + ratio.out(shift) + count > ratio.out(length):  # in a small window
            return False
        moved = run_net(net, self.line.narrow(2 + axis, shift, length)).narrow(2 + axis, first, count)
        still = self._still.narrow(2 + axis, first + ratio.out(shift), count)
        if float((still - moved).abs().max()) > SAME * self._largest:
            return False
        if self.is_fixed:
            return True
        if not _takes(net, self.line, axis, length + shift, ratio):
            return False
        window = triple(n if i != axis else length for i, n in enumerate(self.line.shape[2:]))
        return _shifts(net, self.line.shape[1], axis, window, length // 3, shift, ratio)  # no luck of the draw


def _takes(net: Net, line: torch.Tensor, axis: int, length: int, ratio: Ratio) -> bool:
    """Return whether windows may have `length` along `axis`: a net of stride 1 may still demand multiples."""
    try:
        return run_net(net, line.narrow(2 + axis, 0, length)).shape[2 + axis] == ratio.out(length)
    except SlowNetError:
        raise
    except UnmeasurableError:
        return False


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.rand(shape)
