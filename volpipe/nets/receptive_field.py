"""The geometry of a net, measured from outside: scale, stride and halo.

Not here: what a net declares (declared), whether it agrees with that (agreement), or the error of a smaller halo
(halo_search). A net is measured with random
parameters for scale and stride, so that what its weights leave out counts, with positive ones for the halo, so that no
two influences on an output cancel, and with those that it has. Its buffers are as it has them, such as a kernel that
came with its weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.nets.net_geometry import (
    KEYS,
    FarReachError,
    Geometry,
    Ratio,
    SlowNetError,
    UnmeasurableError,
    WholeWindowError,
    run_net,
)
from volpipe.nets.receptive_field_probe import (
    FIRST_REACH,
    MOST_REACH,
    MOST_REACH_OF_SLICES,
    MOST_VOXELS,
    DeadNetError,
    far_reach,
    reach_along,
    reaches_middle,
    sees_all,
)
from volpipe.nets.window_sizes import STRIDES, AxisSizes, Shapes, window_sizes, with_size

if TYPE_CHECKING:
    import torch
    from torch import nn

    from volpipe.nets.declared import ServedNet

Build = Callable[[], "nn.Module"]
Net = Callable[["torch.Tensor"], "torch.Tensor"]

SEED = 0
FIRST_LENGTH = 96  # of the windows, along the axis that is measured
LIKELY_LENGTH = 384  # up to which windows are tried before it is asked whether a net looks at all of them
# Voxels of the halo of a net that sees further than was tried: windows of four times as many are a million voxels of
# slices, and 17 million of volumes, and what lies beyond acts by little on most nets.
FAR_HALO, FAR_HALO_OF_SLICES = 64, 512
# Of the window that shows that a net looks at all of it: longer than the reach of any other net that was measured.
WHOLE_LENGTH, WHOLE_VOXELS = 6144, 1 << 18
LARGEST_STRIDES = [
    step for step in reversed(STRIDES) if not any(other % step == 0 for other in STRIDES if other > step)
]
LATERALS = (4, 8, 16)  # sizes of windows along the axes that are not measured, the least that the net takes
MOST_SECONDS, LOG_SECONDS = 60.0, 0.5  # of a processor, so that a busy machine refuses no small net
PATIENCE = 20  # times as long on the wall: for a net that waits, or is given a twentieth of a processor
MEASURED = ("scale", *(f"{what} along {axis}" for what in ("stride", "halo") for axis in "zyx"))
SAME = 1e-5  # of the largest output: more than rounding leaves of equal numbers, and far voxels add
LAST_BITS = 8  # of the type in which a net computes, by which equal numbers may differ where it has few of them
FAINT = 1e-2  # of the largest output: less than a wrong stride makes, more than voxels beyond most windows add
SMALL_CHANGE = 1e-3  # of the input

NO_GRADIENT = (
    "no gradient comes through it, as through classes of argmax, a threshold, detach(), no_grad() and numpy",
    f"let it return numbers from before those; or {KEYS}",
)

log = logging.getLogger(__name__)


@dataclass
class TimeLimit:
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

    @property
    def is_late(self) -> bool:
        """Whether a quarter of the time is over, so that windows twice as long may take more than what is left."""
        return self._started is not None and self.clock() - self._started[0] > self.most_seconds / 4

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
    build: Build,
    in_channels: int | None = None,
    watch: TimeLimit | None = None,
    *,
    whole_window: str = "",
    hint: Triple | None = None,
) -> Geometry:
    """Return the geometry of the net that `build` returns, a new one at each call, with the weights that it runs with.

    Args:
        in_channels: of the net; None where it is to be tried.
        whole_window: why tiles of the net differ from the whole, if that is known: only shapes are measured then.
        hint: a window that its user has chosen.

    Raises:
        UnmeasurableError: it takes none of the windows tried, gives what cannot be served, or is too slow.
    """
    import torch

    from volpipe.nets.adapter import Adapter, possible_channels

    watch = watch or TimeLimit()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = _bare(build())
        random_net = watch.wrap(randomised(net, positive=False))
        channels = possible_channels(net, _served(net).context) if in_channels is None else [in_channels]
        shapes = Shapes(random_net, lambda: _bare(build()), channels)
        base, sizes, axes = window_sizes(shapes, only_sizes(net), hint)
        kind: type[MarginProbe | PaddedProbe] = MarginProbe if any(axis.margin for axis in axes) else PaddedProbe
        probe = kind(build, net, random_net, shapes.channels[0], axes, sizes, watch, base)
        ratios = [axis.ratio for axis in axes]
        watch.known["scale"] = str(triple(ratio.scale for ratio in ratios))
        strides, reaches, problem = [axis.step for axis in axes], [(axis.margin, axis.margin) for axis in axes], ""
        try:
            if whole_window:
                raise WholeWindowError(whole_window)
            strides, reaches = probe.geometry()
        except WholeWindowError as error:
            problem = str(error)
            strides = [
                own.step if sizes[axis] else _step_by_shapes(shapes, base, axis, own) for axis, own in enumerate(axes)
            ]
        before, after = map(triple, zip(*reaches, strict=True))
        small = [only or own.window(1, stride) for only, own, stride in zip(sizes, axes, strides, strict=True)]
        window = noise((1, shapes.channels[0], *(small if any(axis.margin for axis in axes) else base)))
        out = shapes.of(base)
        assert out is not None
        outputs, arrays = (net.described_outputs(window), net.arrays(window)) if isinstance(net, Adapter) else ((), ())
        return Geometry(
            triple(ratio.scale for ratio in ratios), triple(strides), before, after, shapes.num_out,
            margin=triple(axis.margin for axis in axes),
            remainder=triple(axis.remainder % stride for axis, stride in zip(axes, strides, strict=True)),
            shrink=triple(ratio.shrink for ratio in ratios),
            in_channels=shapes.channels[0],
            fixed=sizes if _served(net).slice_axis is None else with_size(sizes, _served(net).slice_axis or 0, 0),
            uneven=triple(axis.uneven for axis in axes),
            whole_window=problem, further="" if problem else "; ".join(probe.further), least=(base, out),
            outputs=outputs, arrays=arrays,
        )  # fmt: skip


def only_sizes(net: nn.Module) -> Triple:
    """Return the only sizes of windows (z, y, x) that a net takes, 0 along an axis where it takes others.

    Slices go one by one: nothing is left to measure across them.
    """
    from volpipe.nets.declared import only_sizes_of

    sizes, axis = only_sizes_of(net), _served(net).slice_axis
    return sizes if axis is None else with_size(sizes, axis, 1)


def _served(net: nn.Module) -> ServedNet:
    from volpipe.nets.declared import served

    return served(net)


def _step_by_shapes(shapes: Shapes, base: Triple, axis: int, sizes: AxisSizes) -> int:
    """Return the least step of a window's length along `axis` by which the output grows as it should."""
    for step in STRIDES:
        if sizes.margin or step % sizes.ratio.shrink:
            continue
        first = align_up(base[axis], step)
        lengths = [first + k * step for k in range(3)]
        outs = [shapes.of(with_size(base, axis, length)) for length in lengths]
        if all(out and out[axis] == sizes.ratio.out(length) for out, length in zip(outs, lengths, strict=True)):
            return step
    return sizes.step


@dataclass
class Probe:
    """A net whose strides and reaches are measured by values of its outputs; `geometry` returns both.

    Attributes:
        build: returns a new net at each call.
        net: one of them.
        random_net: that net with random weights, watched.
        in_channels: of the net.
        axes: sizes of windows along z, y, x.
        sizes: the only ones that it takes; 0 along an axis where it takes others.
        watch: on the time.
        base: a window that it takes.
        further: along which axes it sees more than was tried, in words.
    """

    build: Build
    net: nn.Module
    random_net: Net
    in_channels: int
    axes: Sequence[AxisSizes]
    sizes: Triple
    watch: TimeLimit
    base: Triple
    further: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        # As it runs; a window makes sure that random parameters give numbers.
        self.loaded = self.watch.wrap(_bare(self.build()))
        window = noise((1, self.in_channels, *self.base))
        if not bool(run_net(self.random_net, window).isfinite().all()):
            self.random_net = self.loaded
        self.same = rounding(self.random_net, window)
        self.ratios = [axis.ratio for axis in self.axes]
        self.across = _served(self.net).slice_axis
        if self.across is not None:
            axis, halo = "zyx"[self.across], _served(self.net).context
            self.watch.known |= {f"stride along {axis}": "1", f"halo along {axis}": str(halo)}

    @property
    def most(self) -> int:
        """The longest reach that is tried."""
        return MOST_REACH if self.across is None else MOST_REACH_OF_SLICES

    def far_halo(self, error: FarReachError) -> tuple[int, int]:
        """Return the halo of a net that sees further than was tried, below and above; keep the fact in `further`."""
        self.further.append(str(error))
        halo = min(error.reach, FAR_HALO if self.across is None else FAR_HALO_OF_SLICES)
        return halo, halo


@dataclass
class PaddedProbe(Probe):
    """The measuring of a net that keeps the size of windows: strides by shifts of a line, reaches by changed planes."""

    def geometry(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return stride and reach along each axis."""
        least = self._thinnest_window()
        measured = [axis for axis in range(3) if axis != self.across]
        strides, likely = [1, 1, 1], (1, FIRST_LENGTH)
        for axis in measured:
            search = StrideSearch(self, axis, least)
            likely = strides[axis], _ = search.stride(likely)
            self.watch.known[f"stride along {'zyx'[axis]}"] = str(strides[axis])
        nets = self._nets_to_probe(strides)
        reaches = [(_served(self.net).context,) * 2] * 3
        first = FIRST_REACH
        for axis in measured:
            reaches[axis] = self._reach_of_nets(nets, axis, strides, least, first)
            first = self.most if self.further else max(first, min(max(reaches[axis]) + 1, self.most))
            self.watch.known[f"halo along {'zyx'[axis]}"] = str(max(reaches[axis]))
        return strides, reaches

    def _thinnest_window(self) -> Triple:
        """Return the smallest of LATERALS that the net takes along each axis, to save time."""
        least = [n or axis.least for n, axis in zip(self.sizes, self.axes, strict=True)]
        for axis, (own, only) in enumerate(zip(self.axes, self.sizes, strict=True)):
            for size in () if only else LATERALS:
                if size % own.ratio.shrink or not 2 * own.ratio.shrink <= size <= least[axis]:
                    continue
                window = noise((1, self.in_channels, *with_size(least, axis, size)))
                if takes(self.random_net, window, axis, size, own.ratio):
                    least[axis] = size
                    break
        return triple(least)

    def _nets_to_probe(self, strides: Sequence[int]) -> list[tuple[Net, bool]]:
        """Return the net with positive weights, and as it runs, each with whether it computes in float64.

        It does where its code takes that: in float32, changes fade sooner (receptive_field_probe).
        """
        import torch

        if _served(self.net).draws_weights:
            return [(self.watch.wrap(randomised(self.net, positive=True)), False), (self.loaded, False)]
        shape = [
            only or max(align_up(LATERALS[0], 2 * stride), base)
            for only, base, stride in zip(self.sizes, self.base, strides, strict=True)
        ]
        is_double = self._takes_double(shape)
        nets = [randomised(_bare(self.build()), positive=True), _bare(self.build())]
        watched = [self.watch.wrap(net.double() if is_double else net) for net in nets]
        # Numbers from a threshold or the like would hide what the net sees. One without a gradient, such as by
        # detach() or numpy, shows by a small change of all voxels that it has none of these.
        positive = watched[0]
        window = torch.rand((1, self.in_channels, *shape), dtype=torch.float64 if is_double else torch.float32)
        first = run_net(positive, window)
        changed = run_net(positive, window * (1 + SMALL_CHANGE * torch.rand_like(window)))
        if float((first != changed).double().mean()) < 0.5 and not _has_gradient(positive, window):
            raise UnmeasurableError(*NO_GRADIENT)
        return [(net, is_double) for net in watched]

    def _takes_double(self, shape: Sequence[int]) -> bool:
        """Return whether the net runs in float64; one whose code makes numbers of another type does not."""
        import torch

        window = torch.rand((1, self.in_channels, *shape), dtype=torch.float64)
        try:
            run_net(self.watch.wrap(_bare(self.build()).double()), window)
        except SlowNetError:
            raise
        except UnmeasurableError as error:
            log.debug("the net is measured in float32: %s", error)
            return False
        return True

    def _reach_of_nets(
        self, nets: Sequence[tuple[Net, bool]], axis: int, strides: Sequence[int], least: Triple, first: int
    ) -> tuple[int, int]:
        """Return the reach below and above along `axis`: the longest of what each of `nets` shows.

        Args:
            first: a reach that is likely.
        """
        reach, dead = (0, 0), list[DeadNetError]()
        for net, is_double in nets:
            try:
                reach = reach_along(
                    net, self.in_channels, axis, strides=strides, ratios=self.ratios, sizes=self.sizes, least=least,
                    first=max(first, 1 + max(reach)), most=self.most, known=reach, is_double=is_double,
                )  # fmt: skip
            except DeadNetError as error:
                dead.append(error)
            except FarReachError as error:
                return self.far_halo(error)
        if len(dead) == len(nets):
            raise dead[0]
        return reach


@dataclass
class MarginProbe(Probe):
    """The measuring of a net whose output lacks a margin: by windows, which agree with larger ones or do not."""

    def geometry(self) -> tuple[list[int], list[tuple[int, int]]]:
        """Return stride and reach along each axis."""
        strides = [axis.step for axis in self.axes]
        measured = [axis for axis in range(3) if axis != self.across]
        if self.agree(measured, strides, (0, 0, 0)):
            return strides, [(axis.margin,) * 2 for axis in self.axes]
        reaches = []
        for axis, sizes in enumerate(self.axes):
            if axis == self.across:
                reaches.append((_served(self.net).context,) * 2)
                continue
            strides[axis] = self._stride(axis)
            self.watch.known[f"stride along {'zyx'[axis]}"] = str(strides[axis])
            halo = sizes.margin + self._padding(axis, strides)
            self.watch.known[f"halo along {'zyx'[axis]}"] = str(halo)
            reaches.append((halo, halo))
        return strides, reaches

    def agree(self, axes: Sequence[int], strides: Sequence[int], inner: Sequence[int]) -> bool:
        """Return whether the output of a window equals that of a larger one, which is a stride longer at both ends.

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
        line = noise((1, self.in_channels, *larger))
        for axis in axes:
            line = line * noise((1, 1, *(n if i == axis else 1 for i, n in enumerate(larger))))
            end = line.narrow(2 + axis, larger[axis] - strides[axis], strides[axis])
            end.mul_(6).sub_(2)  # the largest and the smallest values are not in all windows
        start = [n + shift for n, shift in zip(inner, shifts, strict=True)]
        for net in dict.fromkeys((self.random_net, self.loaded)):
            first = run_net(net, _cut(line, [0] * 3, window if is_fixed else larger))
            moved = run_net(net, _cut(line, places, window))
            kept = [n - 2 * i - is_fixed * shift for n, i, shift in zip(moved.shape[2:], inner, shifts, strict=True)]
            if min(kept) <= 0 or not _is_near(_cut(first, start, kept), _cut(moved, inner, kept), self.same):
                return False
        return True

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
        raise self._whole_window_error(
            axis, f"no shift along axis {'zyx'[axis]} by up to {STRIDES[-1]} voxels leaves the output as it is"
        )

    def _padding(self, axis: int, strides: Sequence[int]) -> int:
        """Return how many input voxels, in whole strides, lie at a face where the output is not a larger window's."""
        tried = 0
        for steps in (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, *(32 << n for n in range(7))):
            inner = [0, 0, 0]
            inner[axis] = self.ratios[axis].out(steps * strides[axis])
            if steps > 24 and (steps * strides[axis] > self.most or self.watch.is_late):
                break
            if self.agree([axis], strides, inner):
                return steps * strides[axis]
            tried = steps * strides[axis]
        error = self._whole_window_error(
            axis, f"windows disagree along axis {'zyx'[axis]} {tried} voxels from their faces"
        )
        if error.is_shown:
            raise error
        return self.far_halo(far_reach(axis, tried))[0]

    def _whole_window_error(self, axis: int, found: str) -> WholeWindowError:
        """Return the error of a net whose output depends on the whole window: the fault `found`, and its cause."""
        sizes = self.axes[axis]
        window = [only or own.window(1, own.step) for only, own in zip(self.sizes, self.axes, strict=True)]
        window[axis] = self.sizes[axis] or sizes.window(sizes.ratio.out(2 * self.most), sizes.step)
        is_only = bool(self.sizes[axis])
        return whole_window(self.random_net, self.in_channels, axis, window, sizes.step, found, is_only=is_only)


def _cut(data: torch.Tensor, start: Sequence[int], size: Sequence[int]) -> torch.Tensor:
    """Return the box of `data` (n, c, z, y, x) of a size at a place."""
    for axis in range(3):
        data = data.narrow(2 + axis, start[axis], size[axis])
    return data


def _is_near(one: torch.Tensor, other: torch.Tensor, same: float = SAME) -> bool:
    """Return whether two outputs differ by no more than `same` of the largest; NaN and infinity are like themselves."""
    alike = (one == other) | (one.isnan() & other.isnan())
    differs = (one - other).abs().masked_fill(alike, 0)
    return float(differs.max()) <= same * float(one.abs().max().nan_to_num())


def rounding(net: Net, window: torch.Tensor) -> float:
    """Return by how much equal outputs of `net` may differ, of the largest: more where its code computes in few bits.

    The types of all numbers that it makes for `window` show that, in autocast as well.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    dtypes = set[torch.dtype]()

    class Types(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
        @classmethod
        def _should_skip_dynamo(cls) -> bool:  # else torch imports its compiler, which takes a second
            return False

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:  # Any: as torch has it
            out = func(*args, **(kwargs or {}))
            dtypes.update(leaf.dtype for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
            return out

    try:
        with Types():  # type: ignore[no-untyped-call]  # torch has no types for it
            run_net(net, window)
    except SlowNetError:
        raise
    except UnmeasurableError as error:  # some operators are not for such modes
        log.debug("the types in which the net computes cannot be seen: %s", error)
    few = [torch.finfo(dtype).eps for dtype in dtypes & {torch.float16, torch.bfloat16}]
    return max([SAME, *(LAST_BITS * eps for eps in few)])


def _has_gradient(net: Net, window: torch.Tensor) -> bool:
    """Return whether a gradient comes through `net`; one whose code fails with it has none that could be used."""
    import torch

    with torch.enable_grad():
        try:
            return bool(net(window.clone().requires_grad_()).requires_grad)
        except SlowNetError:
            raise
        except Exception as error:  # whatever the net's code makes of it
            log.debug("the net has no gradient: %s", error)
            return False


def whole_window(
    net: Net, in_channels: int, axis: int, window: Sequence[int], step: int, found: str, *, is_only: bool = False
) -> WholeWindowError:
    """Return the error of a net whose output depends on the whole window: the fault `found`, and the cause by a trial.

    Args:
        window: (z, y, x) that is tried.
        step: voxels at its faces that are changed.
        is_only: whether the net takes no longer one.
    """
    if sees_all(net, in_channels, axis, window, step):
        return WholeWindowError(
            f"{found}, and each voxel of the output sees all {window[axis]} of a window: a change at one of its faces "
            "changes all of them; layers that look at the whole window (norms, attention, global pooling) do that",
            is_shown=True,
        )
    others = ", it sees more than a third of the only window that it takes" if is_only else ""
    return WholeWindowError(
        f"{found}, and a change at the face of a window does not change all of the output: its grid is coarser than "
        f"that{others}, or it depends on the place in the window, as by coordinates or embeddings"
    )


def shifts(
    net: Net, in_channels: int, axis: int, window: Triple, margin: int, stride: int, ratio: Ratio, same: float = 0.0
) -> bool:
    """Return whether shifting the input by `stride` along `axis` only shifts the output, `margin` off the faces.

    Args:
        same: by how much outputs may differ, of the largest; 0 for what the net's types leave.
    """
    length = window[axis]
    margin = align_up(max(margin, stride), ratio.shrink)
    count = ratio.out(length - 2 * margin)
    if count <= 0:
        return True  # no voxel is that far inside
    line = noise((1, in_channels, *with_size(window, axis, length + stride)))
    still = run_net(net, line.narrow(2 + axis, 0, length)).narrow(2 + axis, ratio.out(margin), count)
    moved = run_net(net, line.narrow(2 + axis, stride, length))
    moved = moved.narrow(2 + axis, ratio.out(margin - stride), count)
    return _is_near(still, moved, same or rounding(net, line.narrow(2 + axis, 0, length)))


def _bare(net: nn.Module) -> nn.Module:
    """Return the bare network of a package, without its pre- and postprocessing; other nets as they are."""
    from volpipe.nets.declared import bare_net

    return bare_net(net)


def randomised(net: nn.Module, *, positive: bool) -> nn.Module:
    """Return `net` with random weights, in place unless it draws its own: none is zero as if it were untrained.

    Running statistics of norms would not fit those, and are as in a new net; other buffers stay.
    """
    import torch

    if _served(net).draws_weights:
        return _served(net).with_random_weights(positive=positive)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            inputs = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            weights = torch.rand_like(parameter) + 0.5 if positive else torch.randn_like(parameter)
            parameter.copy_(weights / (inputs if positive else math.sqrt(inputs)))
        for name, buffer in net.named_buffers():
            if name.endswith(("running_mean", "running_var")) and buffer.is_floating_point():
                buffer.fill_(float(name.endswith("var")))
    return net


@dataclass
class StrideSearch:
    """The search for the least shift of the input along `axis` that only shifts the output.

    What lies at the window's faces does not count.

    Attributes:
        least: sizes of windows along the other axes.
    """

    probe: Probe
    axis: int
    least: Triple

    def stride(self, likely: tuple[int, int]) -> tuple[int, int]:
        """Return that shift, and the length of the window that showed it.

        Args:
            likely: shift and window along another axis, which are tried first.

        Raises:
            WholeWindowError: there is none.
        """
        own, only = self.probe.axes[self.axis], self.probe.sizes[self.axis]
        length = only or align_up(max(FIRST_LENGTH, likely[1]), own.least if FIRST_LENGTH % own.least else 1)
        is_local, most = False, only or 3 * self.probe.most  # thirds of a window at its faces do not count
        while True:
            shift = self._shift(length, likely[0], self.probe.same)
            if shift is not None:
                return shift, length
            if not is_local and (only or 2 * length > LIKELY_LENGTH):
                error = self._whole_window_error(self._longest(length, WHOLE_LENGTH, WHOLE_VOXELS))
                if error.is_shown:
                    raise error
                is_local = True
            if self._longest(length, most, MOST_VOXELS) == length or self.probe.watch.is_late:
                break
            length *= 2
        # A window whose faces act on its middle shows a stride as well, if they act by little.
        is_far = not only and reaches_middle(
            self.probe.random_net, self.probe.in_channels, self.axis, with_size(self.least, self.axis, length), own.step
        )
        if not is_far:
            raise self._whole_window_error(length)
        return self._shift(length, likely[0], FAINT) or own.step, length

    def _longest(self, length: int, most: int, most_voxels: int) -> int:
        """Return a length doubled up to `most`, or while a window has not too many voxels."""
        lateral = math.prod(n for axis, n in enumerate(self.least) if axis != self.axis)
        while not self.probe.sizes[self.axis] and 2 * length <= most and 2 * length * lateral <= most_voxels:
            length *= 2
        return length

    def _shift(self, length: int, likely: int, same: float) -> int | None:
        """Return the least shift of the input that only shifts the output mid-window, if there is one."""
        probe, axis = self.probe, self.axis
        own, only = probe.axes[axis], probe.sizes[axis]
        shape = with_size(self.least, axis, length + max(STRIDES))
        slices = [n if i == axis else 1 for i, n in enumerate(shape)]
        line = noise((1, probe.in_channels, *shape)) * noise((1, 1, *slices))  # no part is like another, on average
        shifted = Shifted(probe.random_net, line, axis, length, own.ratio, same=same, is_fixed=bool(only))
        parts = [likely // prime for prime in (2, 3, 5, 7) if likely % prime == 0]
        if shifted.only_shifts(likely) and not any(map(shifted.only_shifts, parts)):
            return likely
        # The largest have no room in the only window of some nets, which no longer one follows.
        tried = STRIDES if only else LARGEST_STRIDES
        largest = next((shift for shift in tried if shifted.only_shifts(shift)), None)
        if largest is None:
            return None
        return next(shift for shift in STRIDES if largest % shift == 0 and shifted.only_shifts(shift))

    def _whole_window_error(self, length: int) -> WholeWindowError:
        probe, axis = self.probe, self.axis
        found = f"no shift along axis {'zyx'[axis]} by up to {max(STRIDES)} voxels leaves the output as it is"
        window, step = with_size(self.least, axis, length), probe.axes[axis].step
        return whole_window(
            probe.random_net, probe.in_channels, axis, window, step, found, is_only=bool(probe.sizes[axis])
        )


@dataclass
class Shifted:
    """Outputs of `net` for windows of `length` along `axis` that are cut from `line`, each a shift further."""

    net: Net
    line: torch.Tensor
    axis: int
    length: int
    ratio: Ratio
    same: float
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
        if not float((still - moved).abs().max()) <= self.same * self._largest:  # NaN is none
            return False
        if self.is_fixed:
            return True
        if not takes(net, self.line, axis, length + shift, ratio):
            return False
        window = triple(n if i != axis else length for i, n in enumerate(self.line.shape[2:]))
        return shifts(
            net, self.line.shape[1], axis, window, length // 3, shift, ratio, self.same
        )  # no luck of the draw


def takes(net: Net, line: torch.Tensor, axis: int, length: int, ratio: Ratio) -> bool:
    """Return whether windows may have `length` along `axis`: a net of stride 1 may still demand multiples."""
    try:
        return run_net(net, line.narrow(2 + axis, 0, length)).shape[2 + axis] == ratio.out(length)
    except SlowNetError:
        raise
    except UnmeasurableError:
        return False


def noise(shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.rand(shape)
