"""The geometry of a net, measured from outside: scale, stride and halo.

Not here: what a net declares (load), or the error of a smaller halo (halo_search). A net is measured with other
weights: random ones for scale and stride; positive ones for the halo, so that no two influences on an output cancel.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.nets.net_geometry import KEYS, Geometry, SlowNetError, UnmeasurableError, run_net
from volpipe.nets.receptive_field_probe import FIRST_REACH, MOST_REACH, far_reach, reach_along, reaches_past

if TYPE_CHECKING:
    import torch
    from torch import nn

Build = Callable[[], "nn.Module"]
Net = Callable[["torch.Tensor"], "torch.Tensor"]

SEED = 0
STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FIRST_LENGTH, MOST_LENGTH = 96, 384  # of the windows, along the axis that is measured; whole multiples of all STRIDES
LATERALS = (4, 8, 16)  # sizes of windows along the axes that are not measured, the least that the net takes
MOST_SECONDS, LOG_SECONDS = 60.0, 0.5  # of a processor, so that a busy machine refuses no small net
PATIENCE = 20  # times as long on the wall: for a net that waits, or is given a twentieth of a processor
MEASURED = ("scale", *(f"{what} along {axis}" for what in ("stride", "halo") for axis in "zyx"))
SAME = 1e-5  # of the largest output: more than rounding leaves of equal numbers, and far voxels add
DRAWS = 4

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


def measure_geometry(build: Build, in_channels: int = 1, watch: Watch | None = None) -> Geometry:
    """Return the geometry of the net that `build` returns, a new one at each call.

    Raises:
        UnmeasurableError: it takes none of the windows tried, sees its whole window whatever the size, or is too slow.
    """
    import torch

    watch = watch or Watch()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = _bare(build())
        is_flat = bool(getattr(net, "is_flat", False))  # slices go one by one: nothing is left to measure along z
        _, y, x = sizes = getattr(net, "fixed", (0, 0, 0))
        sizes = (1, y, x) if is_flat else sizes
        has_gradient = not hasattr(net, "with_random_weights")
        mixed = watch.wrap(_randomised(net, positive=False))
        out_channels, scale = _channels_and_scale(mixed, in_channels, sizes)
        watch.known["scale"] = str(scale)
        least = _least(mixed, in_channels, scale, sizes)
        axes = range(1, 3) if is_flat else range(3)
        if is_flat:
            watch.known |= {"stride along z": "1", "halo along z": "0"}
        strides = [1, 1, 1]
        for axis in axes:
            strides[axis] = _stride(mixed, in_channels, axis, scale[axis], sizes, least)
            watch.known[f"stride along {'zyx'[axis]}"] = str(strides[axis])
        positive = watch.wrap(_randomised(_bare(build()).double() if has_gradient else net, positive=True))
        reaches = [(0, 0)] * 3
        for axis in axes:
            if has_gradient:
                reaches[axis] = _reach(positive, in_channels, axis, strides, scale[axis])
            else:
                reaches[axis] = reach_along(
                    positive, in_channels, axis, strides=strides, scale=scale[axis], sizes=sizes
                )
            watch.known[f"halo along {'zyx'[axis]}"] = str(max(reaches[axis]))
    before, after = map(triple, zip(*reaches, strict=True))
    return Geometry(scale, triple(strides), before, after, out_channels)


def find_nondeterminism(build: Build, in_channels: int, windows: Sequence[Triple]) -> str:
    """Return the fault of a net that gives two outputs for one window; "" for a net that gives one.

    The window is the first of `windows` (z, y, x) that the net takes.
    """
    import torch

    def seeded() -> nn.Module:
        net = _bare(build())
        torch.default_generator.manual_seed(SEED)  # after building, so that random parts of the net's own differ
        return net if hasattr(net, "with_random_weights") else _randomised(net, positive=False)

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

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = _bare(build())
        sizes: Triple = getattr(net, "fixed", (0, 0, 0))
        positive = _randomised(net, positive=True)
        mixed = _randomised(_bare(build()), positive=False)
        halo = declared.aligned_halo()
        for axis in range(3):
            shape = _probe_window(positive, in_channels, axis, window, halo, declared, sizes)
            stride, scale = declared.stride[axis], declared.scale[axis]
            if reaches_past(positive, in_channels, axis, window=shape, halo=halo[axis], stride=stride, scale=scale):
                return f"halo along {'zyx'[axis]}"
            if not sizes[axis] and not _shifts(mixed, in_channels, axis, shape, halo[axis] + stride, stride, scale):
                return f"stride along {'zyx'[axis]}"
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
        if _takes(net, _noise((1, in_channels, *shape)), axis, length, declared.scale[axis]):
            return shape
    return window


def _with(sizes: Sequence[int], axis: int, size: int) -> Triple:
    """Return `sizes` (z, y, x) with another one along `axis`."""
    return triple(size if i == axis else n for i, n in enumerate(sizes))


def _shifts(net: Net, in_channels: int, axis: int, window: Triple, margin: int, stride: int, scale: int) -> bool:
    """Return whether shifting the input by `stride` along `axis` only shifts the output, `margin` off the faces."""
    length = window[axis]
    count = length - 2 * margin
    if count <= 0:
        return True  # no voxel is that far inside
    line = _noise((1, in_channels, *_with(window, axis, length + stride)))
    still = run_net(net, line.narrow(2 + axis, 0, length)).narrow(2 + axis, margin * scale, count * scale)
    moved = run_net(net, line.narrow(2 + axis, stride, length))
    moved = moved.narrow(2 + axis, (margin - stride) * scale, count * scale)
    return float((still - moved).abs().max()) <= SAME * float(still.abs().max())


def _least(net: Net, in_channels: int, scale: Triple, sizes: Triple) -> Triple:
    """Return the smallest of LATERALS that the net takes along each axis, to save time."""
    least = [n or max(STRIDES) for n in sizes]
    for axis in range(3):
        for size in () if sizes[axis] else LATERALS:
            if _takes(net, _noise((1, in_channels, *_with(least, axis, size))), axis, size, scale[axis]):
                least[axis] = size
                break
    return triple(least)


def _bare(net: nn.Module) -> nn.Module:
    """Return the bare network of a package, without its pre- and postprocessing; other nets as they are."""
    bare = getattr(net, "bare", net)
    return bare if hasattr(bare, "forward") else net


def _randomised(net: nn.Module, *, positive: bool) -> nn.Module:
    """Return `net` with random weights, in place unless it draws its own: none is zero, as an untrained net's may be.

    With positive weights, pooling takes the mean: a largest voxel would hide the others.
    """
    import torch

    own: Callable[..., nn.Module] | None = getattr(net, "with_random_weights", None)
    if own is not None:
        return own(positive=positive)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            inputs = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
            weights = torch.rand_like(parameter) + 0.5 if positive else torch.randn_like(parameter)
            parameter.copy_(weights / (inputs if positive else math.sqrt(inputs)))
    if positive:
        _pool_by_mean(net)
    return net


def _pool_by_mean(net: nn.Module) -> None:
    from torch import nn

    for module in list(net.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.MaxPool3d) and child.dilation in (1, (1, 1, 1)):
                mean = nn.AvgPool3d(child.kernel_size, child.stride, child.padding, child.ceil_mode)
                setattr(module, name, mean)


def _channels_and_scale(net: Net, in_channels: int, sizes: Triple) -> tuple[int, Triple]:
    shape = tuple(n or max(STRIDES) for n in sizes)
    out = run_net(net, _noise((1, in_channels, *shape))).shape
    if len(out) != 5:
        raise UnmeasurableError(
            f"a window (1, {in_channels}, z, y, x) gives {len(out)} axes, {tuple(out)}",
            "let its forward return (n, c, z, y, x)",
        )
    if not all(m and m % n == 0 for m, n in zip(out[2:], shape, strict=True)):
        raise UnmeasurableError(
            f"a window of {shape} voxels gives {tuple(out)}: along each axis the output must have as many voxels as "
            "the window, or a whole multiple of them",
            "where its convolutions take voxels from the faces, pad the input in its forward by as many, such as "
            "torch.nn.functional.pad(x, (8,) * 6) for 8 on each side; trained weights stay right",
        )
    return out[1], triple(m // n for m, n in zip(out[2:], shape, strict=True))


def _stride(net: Net, in_channels: int, axis: int, scale: int, sizes: Triple, least: Triple) -> int:
    """Return the least shift of the input along `axis` that only shifts the output, away from the window's faces.

    `sizes` is the only window that the net takes, 0 along an axis where it takes others; `least` has the sizes of
    windows along the other axes.
    """
    length = most = sizes[axis] or FIRST_LENGTH
    while length <= (sizes[axis] or MOST_LENGTH):
        most = length
        shape = _with(least, axis, length + max(STRIDES))
        slices = [n if i == axis else 1 for i, n in enumerate(shape)]
        line = _noise((1, in_channels, *shape)) * _noise((1, 1, *slices))  # no part of it is like another, on average
        still = run_net(net, line.narrow(2 + axis, 0, length)).narrow(2 + axis, 0, length * scale)
        largest = float(still.abs().max())
        for shift in STRIDES:
            first, count = length // 3 * scale, max(1, length // 6) * scale
            if first + shift * scale + count > length * scale:  # of a small window that cannot be made longer
                break
            moved = run_net(net, line.narrow(2 + axis, shift, length))
            difference = still.narrow(2 + axis, first + shift * scale, count) - moved.narrow(2 + axis, first, count)
            fits = bool(sizes[axis]) or _takes(net, line, axis, length + shift, scale)
            if float(difference.abs().max()) > SAME * largest or not fits:
                continue
            window = _with(least, axis, length)
            if sizes[axis] or _shifts(net, in_channels, axis, window, length // 3, shift, scale):  # no luck of the draw
                return shift
        length *= 2
    raise UnmeasurableError(
        f"no shift along axis {'zyx'[axis]} by up to {max(STRIDES)} voxels leaves the output as it is, in windows of "
        f"up to {most}",
        "layers that look at the whole window (norms, attention) do that: replace them, or set "
        "net.accept_tile_variance=true and expect seams; if no layer does, set {keys}, which it does not declare",
    )


def _takes(net: Net, line: torch.Tensor, axis: int, length: int, scale: int) -> bool:
    """Return whether windows may have `length` along `axis`: a net of stride 1 may still demand multiples."""
    try:
        return run_net(net, line.narrow(2 + axis, 0, length)).shape[2 + axis] == length * scale
    except SlowNetError:
        raise
    except UnmeasurableError:
        return False


def _reach(net: Net, in_channels: int, axis: int, strides: Sequence[int], scale: int) -> tuple[int, int]:
    """Return the largest distance of input below and above an output voxel along `axis`, by the gradient."""
    reach, stride = FIRST_REACH, strides[axis]
    while reach <= MOST_REACH:
        middle = align_up(reach, stride)
        shape = [align_up(4, s) for s in strides]
        shape[axis] = 2 * middle + stride
        before, after = 0, 0
        touched = False
        for place, acts in _gradients(
            net, (in_channels, *shape), axis, range(middle * scale, (middle + stride) * scale)
        ):
            (inputs,) = np.nonzero(acts)
            before, after = max(before, place // scale - int(inputs[0])), max(after, int(inputs[-1]) - place // scale)
            touched |= inputs[0] == 0 or inputs[-1] == shape[axis] - 1
        if not touched:
            return before, after
        reach *= 2
    raise far_reach(axis)


def _gradients(net: Net, shape: tuple[int, ...], axis: int, places: range) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each of `places` of the output along `axis`, and flags of the input voxels along it that act on it."""
    import torch

    for place in places:
        acts = np.zeros(shape[1 + axis], bool)
        for _ in range(DRAWS):
            window = torch.rand((1, *shape), dtype=torch.float64, requires_grad=True)
            try:
                with torch.enable_grad():
                    out = net(window).select(2 + axis, place)
                    # Outputs that sum to nothing, such as corrections that keep a mean, must not cancel.
                    (slope,) = torch.autograd.grad((out * torch.rand_like(out)).sum(), window)
            except UnmeasurableError:
                raise
            except Exception as error:  # whatever the net's code makes of it, and code without a gradient
                raise UnmeasurableError(
                    f"no gradient comes through it: {error}",
                    f"compute its output without detach(), no_grad() and numpy; or {KEYS}",
                ) from error
            acts |= (slope[0] != 0).movedim(1 + axis, 0).flatten(1).any(dim=1).numpy()
        if not acts.any():
            raise UnmeasurableError(
                f"no input voxel acts on output voxel {place} along axis {'zyx'[axis]}",
                f"return numbers from before a threshold, argmax or rounding, which hide it; or {KEYS}",
            )
        yield place, acts


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.rand(shape)
