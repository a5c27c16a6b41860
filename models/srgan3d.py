"""A 3D residual generator, for restoration (r5, r4) or a finer z (z2, z4), and the discriminator of its GAN.

Not a trained net, and not the training: the weights are drawn from a seed.

The generator is the residual net of Johnson et al. 2016 (arXiv 1603.08155) in three dimensions. Drawn is r5
with its channels; z2 and z4 step less along z on the way down than on the way up, and so come out finer::

    x ─ 7x7 96 ─ /2 192 ─ /2 384 ─ 6 x [384 ─ 384, + identity] ─ x2 192 ─ x2 96 ─ 7x7 1 ─ tanh ─ y
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

Triple = tuple[int, int, int]
NORMS = {"none": nn.Identity, "batch": nn.BatchNorm3d, "instance": nn.InstanceNorm3d}
ROOM = 128  # output voxels per axis that the default window keeps


@dataclass(frozen=True)
class Variant:
    """How one generator steps.

    Attributes:
        stem: step of the first and of the last layer, along every axis.
        downs: steps (z, y, x) of the two downs; the two ups step by 2 along every axis.
        scale: output voxels per input voxel (z, y, x) that follow.
    """

    stem: int
    downs: tuple[Triple, Triple]
    scale: Triple

    @property
    def stride(self) -> Triple:
        return triple(self.stem * a * b for a, b in zip(*self.downs, strict=True))


VARIANTS = {
    "r5": Variant(1, ((2, 2, 2), (2, 2, 2)), (1, 1, 1)),
    "r4": Variant(2, ((2, 2, 2), (2, 2, 2)), (1, 1, 1)),  # an eighth of the work
    "z2": Variant(1, ((1, 2, 2), (2, 2, 2)), (2, 1, 1)),
    "z4": Variant(1, ((1, 2, 2), (1, 2, 2)), (4, 1, 1)),
}
STRIDES = {"literal": (2, 2, 2, 2, 2, 2), "patch": (2, 2, 1, 2, 1, 1)}


def srgan3d(
    *, variant: str = "r5", features: int = 96, num_blocks: int = 6, norm: str = "none", seed: int = 0
) -> nn.Module:
    """Return the generator in evaluation mode, one channel in, one out.

    Args:
        variant: "r5" or "r4" (same grid, output in -1..1), "z2" or "z4" (2 or 4 times as many voxels along z;
            the output is the linear interpolation plus a correction that starts at zero).
        features: channels of the first layer; the body has four times as many.
        num_blocks: residual blocks of the body; each widens the halo of r5 by 8 voxels.
        norm: "none", "batch" (tile-invariant in evaluation mode) or "instance" (never tile-invariant).
        seed: of the weights; torch's own random state stays as it was.
    """
    check_choice("srgan3d: variant", variant, VARIANTS)
    check_choice("srgan3d: norm", norm, NORMS)
    check_count("srgan3d: features", features)
    check_count("srgan3d: num_blocks", num_blocks)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        return Generator(VARIANTS[variant], features, num_blocks, norm).eval()


def discriminator(
    *, features: int = 84, strides: str = "literal", heads: int = 1, conditional: bool = False, seed: int = 0
) -> nn.Module:
    """Return the discriminator, in training mode: a window (n, 1, z, y, x) to logits (n, 1, z', y', x').

    Args:
        features: channels of the first layer.
        strides: "literal" (all six layers halve the grid: 64^3 to 1 logit) or "patch" (64^3 to 8^3 logits).
        heads: channels of the last layer, averaged to one logit.
        conditional: a second input channel, for the volume that the generator started from.
        seed: of the weights; torch's own random state stays as it was.
    """
    check_choice("discriminator: strides", strides, STRIDES)
    check_count("discriminator: features", features)
    check_count("discriminator: heads", heads)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return Discriminator(features, STRIDES[strides], heads, 2 if conditional else 1)


class Generator(nn.Module):
    """Stem, two downs, residual blocks, two ups, last layer; zero padding throughout."""

    def __init__(self, variant: Variant, features: int, num_blocks: int, norm: str) -> None:
        super().__init__()
        f, s = features, variant.stem
        first, second = variant.downs
        wide, pad = (3, 7, 7), (1, 3, 3)
        self.stem = unit(nn.Conv3d(1, f, wide, s, pad), norm)
        self.down1 = unit(nn.Conv3d(f, 2 * f, 3, first, 1), norm)
        self.down2 = unit(nn.Conv3d(2 * f, 4 * f, 3, second, 1), norm)
        self.body = nn.Sequential(*(ResidualBlock(4 * f, norm) for _ in range(num_blocks)))
        self.up2 = unit(nn.ConvTranspose3d(4 * f, 2 * f, 3, 2, 1, output_padding=1), norm)
        self.up1 = unit(nn.ConvTranspose3d(2 * f, f, 3, 2, 1, output_padding=1), norm)
        self.last = nn.Conv3d(f, 1, wide, 1, pad) if s == 1 else nn.ConvTranspose3d(f, 1, wide, s, pad, s - 1)
        self.finer = variant.scale[0]

        stride, scale = variant.stride, variant.scale
        halo = triple(exact_halo(self, axis, stride[axis], scale[axis]) for axis in range(3))
        window = triple(ROOM // r + 2 * align_up(h, s) for h, s, r in zip(halo, stride, scale, strict=True))
        self.volpipe = {
            "in_channels": 1, "out_channels": 1, "scale": scale, "stride": stride, "halo": halo, "window": window,
            "tile_invariant": norm != "instance", "intensity": "same",
        }  # fmt: skip
        draw_weights(self)

    def forward(self, x: Tensor) -> Tensor:  # n,1,z,y,x                 r5, 96 features, window 64^3:
        y = self.stem(x)  # n,f,z,y,x                                    n,96,64,64,64
        y = self.down2(self.down1(y))  # n,4f,z/4,y/4,x/4                n,384,16,16,16
        y = self.body(y)  # n,4f,z/4,y/4,x/4                             n,384,16,16,16
        y = self.up1(self.up2(y))  # n,f,z,y,x                           n,96,64,64,64
        y = self.last(y)  # n,1,z*scale,y,x                              n,1,64,64,64
        return torch.tanh(y) if self.finer == 1 else stretch(x, self.finer) + y


class ResidualBlock(nn.Module):
    """Two convolutions around which the input passes unchanged."""

    def __init__(self, channels: int, norm: str) -> None:
        super().__init__()
        self.inner = unit(nn.Conv3d(channels, channels, 3, 1, 1), norm)
        self.outer = nn.Sequential(nn.Conv3d(channels, channels, 3, 1, 1), NORMS[norm](channels))

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        y: Tensor = self.outer(self.inner(x))  # n,c,z,y,x
        return x + y


class Discriminator(nn.Module):
    """Six spectrally normalised convolutions (Miyato et al. 2018, arXiv 1802.05957), no norm layers."""

    def __init__(self, features: int, strides: tuple[int, ...], heads: int, in_channels: int) -> None:
        super().__init__()
        f = features
        widths = (in_channels, f, 2 * f, 2 * f, 4 * f, 4 * f, heads)
        convolutions = [
            nn.Conv3d(below, above, 3, step, 1)
            for below, above, step in zip(widths[:-1], widths[1:], strides, strict=True)
        ]
        self.layers = nn.Sequential(spectral_norm(convolutions[0]))
        for convolution in convolutions[1:]:
            self.layers.extend([nn.LeakyReLU(0.2), spectral_norm(convolution)])

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        y: Tensor = self.layers(x)  # n,heads,z/64,y/64,x/64, or /8 with strides "patch"
        return y.mean(dim=1, keepdim=True)  # n,1,z/64,y/64,x/64


def unit(convolution: nn.Module, norm: str) -> nn.Sequential:
    """Return convolution, norm, ReLU."""
    return nn.Sequential(convolution, NORMS[norm](convolution.out_channels), nn.ReLU(inplace=True))


def stretch(x: Tensor, factor: int) -> Tensor:
    """Return `x` (n, c, z, y, x) interpolated linearly to `factor` times as many slices, the ends repeated.

    The grids share their corners (align_corners=False). A slice's weights depend on its phase alone, so
    the last bit is the same in every window.
    """
    before = torch.cat([x[:, :, :1], x[:, :, :-1]], dim=2)  # n,c,z,y,x; slice z - 1
    after = torch.cat([x[:, :, 1:], x[:, :, -1:]], dim=2)  # n,c,z,y,x; slice z + 1
    phases = []
    for phase in range(factor):
        place = (phase + 0.5) / factor - 0.5  # of this output slice, from the centre of its input slice
        phases.append(x * (1 - abs(place)) + (before if place < 0 else after) * abs(place))
    return torch.stack(phases, dim=3).flatten(2, 3)  # n,c,z*factor,y,x


def exact_halo(net: Generator, axis: int, stride: int, scale: int) -> int:
    """Return how many voxels past its own an output voxel sees along `axis`: the most over one `stride`.

    Neither does the zero padding of a window act farther than that into it.
    """
    reaches = []
    for voxel in range(stride * scale):
        first, last = seen(net, axis, voxel)
        reaches += [voxel // scale - first, last - voxel // scale]
    return max(reaches)


def seen(net: Generator, axis: int, voxel: int) -> tuple[int, int]:
    """Return the first and the last input voxel that output `voxel` depends on.

    The net's layers are walked backwards; the order in which they were made is that of `forward`. What goes
    around a block, or around the whole net in z2 and z4, sees less than what goes through.
    """
    first = last = voxel
    for layer in reversed(list(net.modules())):
        if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d):
            size, step, pad = layer.kernel_size[axis], layer.stride[axis], int(layer.padding[axis])
            if isinstance(layer, nn.Conv3d):  # output o gathers inputs o * step - pad + 0 .. size - 1
                first, last = first * step - pad, last * step - pad + size - 1
            else:  # output o gathers every input i with 0 <= o + pad - i * step < size
                first, last = -(-(first + pad - size + 1) // step), (last + pad) // step
    return first, last


def draw_weights(net: Generator) -> None:
    """Fill the convolutions as He et al. 2015 (arXiv 1502.01852), so that activations keep their variance.

    The outer convolution of a block starts at a tenth, or six blocks without norm would grow it 64-fold (Wang
    et al. 2018, arXiv 1809.00219). The last layer of z2 and z4 starts at zero, so that they start as linear.
    """
    outer = {block.outer[0] for block in net.modules() if isinstance(block, ResidualBlock)}
    for layer in net.modules():
        if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d):
            # a transposed convolution spreads its kernel over step^3 outputs: so many fewer terms in each
            spread = layer.stride if isinstance(layer, nn.ConvTranspose3d) else (1, 1, 1)
            num_terms = layer.in_channels * math.prod(layer.kernel_size) / math.prod(spread)
            nn.init.normal_(layer.weight, std=((1 if layer is net.last else 2) / num_terms) ** 0.5)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            if layer in outer:
                layer.weight.detach().mul_(0.1)
    if net.finer > 1:
        nn.init.zeros_(net.last.weight)


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
        raise ValueError(f"{option} is {value!r}; give one of {', '.join(choices)}")


def check_count(option: str, value: int) -> None:
    """Refuse a number that does not count anything."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{option} is {value}; give a whole number from 1 up")
