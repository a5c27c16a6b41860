"""A small 3D U-Net for restoration, segmentation or affinities (Çiçek et al. 2016, arXiv 1606.06650).

Not a trained net: the weights are drawn from a seed, so that a run without trained ones can be repeated.

With features (16, 32, 64): every number is two convolutions to as many channels, ``- -`` is a concatenation::

    x ─ 16 - - - - - - - - - - - 16 ─ 1x1x1 ─ y
         └ pool ─ 32 - - - 32 ─ up ┘
                   └ pool ─ 64 ─ up ┘
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

Triple = tuple[int, int, int]
NORMS = {"none": nn.Identity, "batch": nn.BatchNorm3d, "instance": nn.InstanceNorm3d}
ACTIVATIONS = {"relu": nn.ReLU, "leaky_relu": nn.LeakyReLU, "elu": nn.ELU, "silu": nn.SiLU}
OUTPUTS = ("none", "sigmoid")
ROOM = (64, 128)  # voxels per axis that the default window keeps, for a halo up to a quarter of the first, and above


def unet3d(
    *,
    in_channels: int = 1,
    out_channels: int = 1,
    features: Sequence[int] = (16, 32, 64),
    anisotropic: bool = False,
    norm: str = "none",
    activation: str = "relu",
    output: str = "none",
    residual: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Return a 3D U-Net in evaluation mode.

    Args:
        features: channels per level, finest first; every further entry halves the grid once more.
        anisotropic: the first level neither convolves nor pools along z, for sections thicker than pixels.
        norm: "none", "batch" (tile-invariant in evaluation mode) or "instance" (never tile-invariant).
        activation: "relu", "leaky_relu", "elu" or "silu".
        output: "none" or "sigmoid".
        residual: the net adds a correction to its input, and starts at none: untrained, it is the identity.
        seed: of the weights; torch's own random state stays as it was.
    """
    check_choice("norm", norm, NORMS)
    check_choice("activation", activation, ACTIVATIONS)
    check_choice("output", output, OUTPUTS)
    check_channels(in_channels, out_channels, features)
    if residual and (in_channels != out_channels or output != "none"):
        raise ValueError(
            f"unet3d: residual is True with in_channels {in_channels}, out_channels {out_channels}, output "
            f"{output!r}; the input can be added only to as many channels, with output 'none'"
        )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        net = UNet3D(
            in_channels,
            out_channels,
            features=tuple(features),
            anisotropic=anisotropic,
            norm=norm,
            activation=activation,
            output=output,
            residual=residual,
        )
    return net.eval()


class UNet3D(nn.Module):
    """Encoder and decoder with concatenated skips; zero padding, so that the output has the window's size."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        features: tuple[int, ...],
        anisotropic: bool,
        norm: str,
        activation: str,
        output: str,
        residual: bool,
    ) -> None:
        super().__init__()
        flat = [anisotropic and level == 0 for level in range(len(features))]
        kernels = [(1, 3, 3) if f else (3, 3, 3) for f in flat]
        steps = [(1, 2, 2) if f else (2, 2, 2) for f in flat[:-1]]  # from each level to the next
        self.downs, self.pools = nn.ModuleList(), nn.ModuleList()
        self.ups, self.enlargers = nn.ModuleList(), nn.ModuleList()  # finest first, as the downs
        for below, above, kernel in zip((in_channels, *features[:-1]), features, kernels, strict=True):
            self.downs.append(two_convolutions(below, above, kernel, norm, activation))
        for fine, coarse, kernel, step in zip(features[:-1], features[1:], kernels[:-1], steps, strict=True):
            self.pools.append(nn.MaxPool3d(step, step))
            self.enlargers.append(nn.Upsample(scale_factor=step))  # nearest: no checkerboard
            self.ups.append(two_convolutions(fine + coarse, fine, kernel, norm, activation))
        self.last = nn.Conv3d(features[0], out_channels, 1)
        self.output, self.residual = output, residual
        self.logits = False  # true: the sigmoid is left to the loss, while a net learns
        self.draw_weights()

        stride = triple(math.prod(step[axis] for step in steps) for axis in range(3))
        halo = triple(exact_halo(self.longest_way(), axis, stride[axis]) for axis in range(3))
        window = triple(
            align_up(ROOM[4 * h > ROOM[0]], s) + 2 * align_up(h, s) for h, s in zip(halo, stride, strict=True)
        )
        self.volpipe = {
            "in_channels": in_channels, "out_channels": out_channels, "scale": (1, 1, 1), "stride": stride,
            "halo": halo, "window": window, "tile_invariant": norm != "instance",
            "intensity": "unit" if output == "sigmoid" else "same" if in_channels == out_channels else "raw",
            "logits": "logits" if output == "sigmoid" else None,
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        y, skips = self.downs[0](x), []  # n,f0,z,y,x
        for pool, down in zip(self.pools, self.downs[1:], strict=True):
            skips.append(y)
            y = down(pool(y))  # n,f1,z/2,y/2,x/2; n,f2,z/4,y/4,x/4; ...
        for skip, enlarge, up in reversed(list(zip(skips, self.enlargers, self.ups, strict=True))):
            y = up(torch.cat([skip, enlarge(y)], dim=1))  # ...; n,f1,z/2,y/2,x/2; n,f0,z,y,x
        y = self.last(y)  # n,C,z,y,x
        if self.residual:
            y = y + x
        return torch.sigmoid(y) if self.output == "sigmoid" and not self.logits else y

    def longest_way(self) -> list[nn.Module]:
        """Return the layers from input to output through the bottom; every skip sees less than this way."""
        way: list[nn.Module] = []
        for down, pool in zip(self.downs, self.pools, strict=False):
            way += [*down.children(), pool]
        way += self.downs[-1].children()
        for enlarge, up in reversed(list(zip(self.enlargers, self.ups, strict=True))):
            way += [enlarge, *up.children()]
        return way

    def draw_weights(self) -> None:
        """Fill every convolution as He et al. 2015 (arXiv 1502.01852); a residual net's last with zeros."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv3d):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="linear" if layer is self.last else "relu")
                assert layer.bias is not None
                nn.init.zeros_(layer.bias)
        if self.residual:
            nn.init.zeros_(self.last.weight)


def two_convolutions(below: int, above: int, kernel: Triple, norm: str, activation: str) -> nn.Sequential:
    """Return the block of every level: convolution, norm, activation, twice."""
    layers: list[nn.Module] = []
    for channels in (below, above):
        convolution = nn.Conv3d(channels, above, kernel, padding=triple(k // 2 for k in kernel))
        layers += [convolution, NORMS[norm](above), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)


def exact_halo(way: list[nn.Module], axis: int, stride: int) -> int:
    """Return how many voxels past its own an output voxel sees along `axis`: the most over one `stride`.

    Neither does the zero padding of a window act farther than that into it.
    """
    reaches = []
    for voxel in range(stride):
        first, last = seen(way, axis, voxel)
        reaches += [voxel - first, last - voxel]
    return max(reaches)


def seen(way: list[nn.Module], axis: int, voxel: int) -> tuple[int, int]:
    """Return the first and the last input voxel that output `voxel` depends on, walking `way` backwards."""
    first = last = voxel
    for layer in reversed(way):
        if isinstance(layer, nn.Conv3d):
            margin = layer.kernel_size[axis] // 2
            first, last = first - margin, last + margin
        elif isinstance(layer, nn.MaxPool3d):
            assert isinstance(layer.kernel_size, tuple)
            step = layer.kernel_size[axis]
            first, last = first * step, last * step + step - 1
        elif isinstance(layer, nn.Upsample):
            assert isinstance(layer.scale_factor, tuple)
            step = int(layer.scale_factor[axis])
            first, last = first // step, last // step
    return first, last


def triple(values: Iterable[int]) -> Triple:
    """Return three numbers, z, y, x, as a tuple of three."""
    z, y, x = values
    return z, y, x


def align_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def check_choice(option: str, value: str, choices: Iterable[str]) -> None:
    """Refuse an option that is none of its choices."""
    if value not in choices:
        raise ValueError(f"unet3d: {option} is {value!r}; give one of {', '.join(choices)}")


def check_channels(in_channels: int, out_channels: int, features: Sequence[int]) -> None:
    """Refuse numbers of channels that are no numbers of channels."""
    for option, value in (("in_channels", in_channels), ("out_channels", out_channels)):
        if value < 1:
            raise ValueError(f"unet3d: {option} is {value}; give a whole number from 1 up")
    if not features or not all(isinstance(f, int) and f >= 1 for f in features):
        raise ValueError(f"unet3d: features is {features}; give a whole number from 1 up for every level")
