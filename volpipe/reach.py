"""How a net sees, measured from outside: scale, stride and halo, and the error that a smaller halo makes.

Not here: what a net says of itself (nets), or what windows cost (costs). A net is measured with weights of its own kind
that let everything through: positive ones, so that nothing that acts on an output can cancel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry import Geometry, UnmeasurableError, run_net
from volpipe.grid import Box, align_up
from volpipe.measure import sampled_affine
from volpipe.probes import reach_along
from volpipe.sample import Sample
from volpipe.volume import open_volume

if TYPE_CHECKING:
    import torch
    from torch import nn

    from volpipe.recipe import Recipe

Triple = tuple[int, int, int]
Build = Callable[[], "nn.Module"]

SEED = 0
STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
FIRST_LENGTH, MOST_LENGTH = 96, 384  # of the windows, along the axis that is measured; whole multiples of all STRIDES
FIRST_REACH, MOST_REACH = 32, 256
SAME = 1e-5  # of the largest output: more than rounding leaves of equal numbers, and far voxels add
DRAWS = 4
CORE = 32  # voxels of a tile that halos are tried on, about
HALO_SHARES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)


def measure_geometry(build: Build, in_channels: int = 1) -> Geometry:
    """Return the geometry of the net that `build` makes anew at each call.

    Raises:
        UnmeasurableError: it takes no windows as they are tried here, or sees its whole window whatever that is.
    """
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)
        net = _bare(build())
        sizes: Triple = getattr(net, "fixed", (0, 0, 0))
        redraw: Callable[..., nn.Module] | None = getattr(net, "redrawn", None)  # of nets without a gradient
        mixed = _redrawn(net, positive=False) if redraw is None else redraw(positive=False)
        out_channels, scale = _channels_and_scale(mixed, in_channels, sizes)
        strides = [_stride(mixed, in_channels, axis, scale[axis], sizes) for axis in range(3)]
        if redraw is None:
            positive = _redrawn(_bare(build()).double(), positive=True)
            reaches = [_reach(positive, in_channels, axis, strides, scale[axis]) for axis in range(3)]
        else:
            positive = redraw(positive=True)
            reaches = [
                reach_along(positive, in_channels, axis, strides=strides, scale=scale[axis], sizes=sizes)
                for axis in range(3)
            ]
    (bz, az), (by, ay), (bx, ax) = reaches
    z, y, x = strides
    return Geometry(scale, (z, y, x), (bz, by, bx), (az, ay, ax), out_channels)


def _bare(net: nn.Module) -> nn.Module:
    """Return what of a net is to be measured: that of a package without what is done to values before and after."""
    found = getattr(net, "bare", net)
    return found if hasattr(found, "forward") else net


def _redrawn(net: nn.Module, *, positive: bool) -> nn.Module:
    """Return `net` with weights drawn anew: none is zero, as those of a net may be that starts at none.

    Where they are to be positive, pooling takes the mean: a largest voxel would hide the others.
    """
    import torch

    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
                continue
            inputs = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
            drawn = torch.rand_like(parameter) + 0.5 if positive else torch.randn_like(parameter)
            parameter.copy_(drawn / (inputs if positive else math.sqrt(inputs)))
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


def _channels_and_scale(net: nn.Module, in_channels: int, sizes: Triple) -> tuple[int, Triple]:
    shape = tuple(n or max(STRIDES) for n in sizes)
    out = run_net(net, _noise((1, in_channels, *shape))).shape
    if len(out) != 5 or any(m % n for m, n in zip(out[2:], shape, strict=True)):
        raise UnmeasurableError(
            f"a window of {shape} voxels gives {tuple(out)}, which is no whole multiple; nets that shrink windows "
            "must pad"
        )
    z, y, x = (m // n for m, n in zip(out[2:], shape, strict=True))
    return out[1], (z, y, x)


def _stride(net: nn.Module, in_channels: int, axis: int, scale: int, sizes: Triple) -> int:
    """Return the least shift of the input along `axis` that only shifts the output, away from the window's faces.

    `sizes` are those of the only window that the net takes, 0 along an axis where it takes others too.
    """
    length = most = sizes[axis] or FIRST_LENGTH
    while length <= (sizes[axis] or MOST_LENGTH):
        most = length
        shape = [n or max(STRIDES) for n in sizes]
        shape[axis] = length + max(STRIDES)
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
            if float(difference.abs().max()) <= SAME * largest and fits:
                return shift
        length *= 2
    raise UnmeasurableError(
        f"no shift along axis {'zyx'[axis]} by up to {max(STRIDES)} voxels leaves the output as it is, in windows of "
        f"up to {most}; layers that look at the whole window (norms, attention) do that"
    )


def _takes(net: nn.Module, line: torch.Tensor, axis: int, length: int, scale: int) -> bool:
    """Return whether windows may be so long along `axis`: nets that shift by one may still want whole multiples."""
    try:
        return run_net(net, line.narrow(2 + axis, 0, length)).shape[2 + axis] == length * scale
    except UnmeasurableError:
        return False


def _reach(net: nn.Module, in_channels: int, axis: int, strides: Sequence[int], scale: int) -> tuple[int, int]:
    """Return how far the input of any output voxel lies below and above it along `axis`, by the gradient."""
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
            (found,) = np.nonzero(acts)
            before, after = max(before, place // scale - int(found[0])), max(after, int(found[-1]) - place // scale)
            touched |= found[0] == 0 or found[-1] == shape[axis] - 1
        if not touched:
            return before, after
        reach *= 2
    raise UnmeasurableError(f"an output voxel sees more than {MOST_REACH} voxels along axis {'zyx'[axis]}")


def _gradients(net: nn.Module, shape: tuple[int, ...], axis: int, places: range) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each of `places` of the output along `axis` with a flag for each input voxel along it: whether it acts."""
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
            except Exception as error:  # whatever the net's code makes of it, and code without a gradient
                raise UnmeasurableError(f"no gradient comes through it: {error}") from error
            acts |= (slope[0] != 0).movedim(1 + axis, 0).flatten(1).any(dim=1).numpy()
        if not acts.any():
            raise UnmeasurableError(f"nothing that goes in acts on output voxel {place} along axis {'zyx'[axis]}")
        yield place, acts


def _noise(shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.rand(shape)


@dataclass(frozen=True)
class HaloError:
    """What a halo (z, y, x) leaves: the largest and the root mean square difference of tile and whole."""

    halo: Triple
    largest: float
    rms: float


def halo_errors(
    net: Callable[[np.ndarray], np.ndarray], voxels: np.ndarray, geometry: Geometry, core: Triple
) -> Iterator[HaloError]:
    """Yield what halos from none to the exact one leave of the difference between a tile and the whole.

    Args:
        net: as for one window: (1, c, z, y, x) -> (1, C, z', y', x').
        voxels: (c, z, y, x), normalised: `core` with the exact halo, in whole strides, around it.
        core: voxels of the tile that are kept, in whole strides.
    """
    exact = _aligned(geometry.halo, geometry.stride)
    whole = _middle(net(voxels[None])[0], exact, core, geometry.scale)
    for halo in dict.fromkeys(_aligned([h * share for h in exact], geometry.stride) for share in HALO_SHARES):
        cut = tuple(slice(e - h, e + c + h) for e, h, c in zip(exact, halo, core, strict=True))
        tile = _middle(net(np.ascontiguousarray(voxels[:, *cut])[None])[0], halo, core, geometry.scale)
        difference = np.abs(tile.astype(np.float64) - whole)
        yield HaloError(halo, float(difference.max()), float(np.sqrt(np.square(difference).mean())))


def _aligned(sizes: Sequence[float], strides: Triple) -> Triple:
    z, y, x = (align_up(math.ceil(n), s) for n, s in zip(sizes, strides, strict=True))
    return z, y, x


def _middle(out: np.ndarray, halo: Triple, core: Triple, scale: Triple) -> np.ndarray:
    """Return what an output (c, z, y, x) holds of the core."""
    return out[:, *(slice(h * s, (h + c) * s) for h, c, s in zip(halo, core, scale, strict=True))]


def core_of(geometry: Geometry) -> Triple:
    """Return a tile to try halos on, in whole strides: some voxels past every face."""
    z, y, x = (align_up(CORE, stride) for stride in geometry.stride)
    return z, y, x


def real_window(
    recipe: Recipe, in_channels: int, geometry: Geometry, core: Triple, location: str | None = None
) -> np.ndarray:
    """Return voxels (c, z, y, x), normalised as in a run: `core` with the exact halo around it.

    They are from the middle of the volume at `location`, mirrored where that is smaller; without one, invented.

    Raises:
        VolpipeError: the volume cannot be read, or has not the net's channels.
    """
    halo = _aligned(geometry.halo, geometry.stride)
    z, y, x = wanted = tuple(c + 2 * h for c, h in zip(core, halo, strict=True))
    if location is None:
        raw = Sample((z, y, x), seed=SEED).raw(Box.of(wanted))
        voxels = np.repeat(raw[None], in_channels, axis=0)
    else:
        volume = open_volume(location, recipe.input.key, recipe.input.level, view=recipe.input.view)
        if volume.num_channels != in_channels:
            raise VolpipeError(f"the net takes {in_channels} channels, {volume} has {volume.num_channels}")
        start = tuple((n - w) // 2 for n, w in zip(volume.spatial_shape, wanted, strict=True))
        stop = tuple(a + w for a, w in zip(start, wanted, strict=True))
        voxels = volume.open().read_mirrored(Box(start, stop))
    return sampled_affine(recipe.normalise, voxels).apply(voxels)
