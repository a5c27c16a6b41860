"""A small residual net that makes a volume finer along z, by a whole factor: what bins of slices averaged away.

Not the GAN's generator (srgan3d), and not for data of another kind of blur: it takes a slice of its input to be the
mean of `factor` slices of its output, keeps that mean to the bit of rounding, and learns only how it is shared out.
With `keep_mean` false it may change the mean as well, and so take noise off its input.

The trunk works on folds, `fold` x `fold` pixels of a slice as channels, so that a voxel of it sees farther for less::

    x ─┬─ fold ─ conv ─┬─ blocks of [3x3x3 ─ ReLU ─ 1x3x3] ─┬─ conv ─ unfold to slices ─ less its mean ─ + ─ y
       │               └─────────── identity ─────────────┘                                            │
       └─ the polynomial through the means of five slices ─────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor, nn

Triple = tuple[int, int, int]
REACH = 2  # slices on both sides through whose means the polynomial goes: of degree 4, so nothing of a cubic is lost
CORE = (32, 96, 96)  # input voxels (z, y, x) that the default window keeps


def superres(
    *, factor: int = 4, features: int = 64, num_blocks: int = 4, fold: int = 2, keep_mean: bool = True, seed: int = 0
) -> nn.Module:
    """Return the net in evaluation mode, one channel in, one out, `factor` times as many slices out as in.

    Untrained, it is the interpolation.

    Args:
        factor: slices of the output per slice of the input.
        features: channels of the trunk.
        num_blocks: residual blocks of the trunk; each widens the halo by 1 slice and by 2 * `fold` pixels.
        fold: pixels along y, and along x, that the trunk sees as one.
        keep_mean: whether the mean of the slices of the output is the slice of the input.
        seed: of the weights; torch's own random state stays as it was.
    """
    for option, value in (("features", features), ("num_blocks", num_blocks), ("fold", fold), ("factor", factor - 1)):
        if not isinstance(value, int) or value < 1:
            given, least = (value + 1, 2) if option == "factor" else (value, 1)
            raise ValueError(f"superres: {option} is {given}; give a whole number from {least} up")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
        return SuperRes(factor, features, num_blocks, fold, keep_mean).eval()


class SuperRes(nn.Module):
    """Interpolation plus a correction, whose mean over each slice of the input is zero; zero padding, no norm."""

    def __init__(self, factor: int, features: int, num_blocks: int, fold: int, keep_mean: bool) -> None:
        super().__init__()
        self.factor, self.fold, self.keep_mean = factor, fold, keep_mean
        self.shares = slice_shares(factor)
        self.first = nn.Conv3d(fold * fold, features, 3, padding=1)
        self.blocks = nn.ModuleList(Block(features) for _ in range(num_blocks))
        self.last = nn.Conv3d(features, factor * fold * fold, 3, padding=1)
        draw_weights(self)

        stride: Triple = (1, fold, fold)
        wide = (2 * num_blocks + 2) * fold + fold - 1  # a pixel may lie at the far side of its fold
        halo: Triple = (max(num_blocks + 2, REACH), wide, wide)
        self.volpipe = {
            "in_channels": 1, "out_channels": 1, "scale": (factor, 1, 1), "stride": stride, "halo": halo,
            "window": triple(c + 2 * align_up(h, s) for c, h, s in zip(CORE, halo, stride, strict=True)),
            "tile_invariant": True, "intensity": "same",
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:  # n,1,z,y,x
        return self.interpolate(x) + self.correction(x)  # n,1,z*factor,y,x

    def interpolate(self, x: Tensor) -> Tensor:  # n,1,z,y,x
        """Return the slices as the polynomial through the means of their neighbours has them; end slices repeat."""
        size = x.shape[2]
        padded = torch.cat([*[x[:, :, :1]] * REACH, x, *[x[:, :, -1:]] * REACH], dim=2)
        taps = [padded.narrow(2, k, size) for k in range(2 * REACH + 1)]
        # Not a convolution: mixed precision would round it, and its last bits would depend on the window's shape.
        finer = [reduce(torch.add, map(torch.mul, taps, shares)) for shares in self.shares]
        return torch.stack(finer, dim=3).flatten(2, 3)  # n,1,z*factor,y,x

    def correction(self, x: Tensor) -> Tensor:  # n,1,z,y,x; Y and X are y and x less the fold
        """Return what the trunk adds, zero in the mean over each slice of `x` if that is kept."""
        f = self.fold
        n, _, z, height, width = x.shape
        y: Tensor = x.reshape(n, 1, z, height // f, f, width // f, f)
        y = self.first(y.permute(0, 1, 4, 6, 2, 3, 5).flatten(1, 3))  # n,features,z,Y,X
        start = y
        for block in self.blocks:
            y = block(y)
        y = self.last(y + start).to(x.dtype).reshape(n, self.factor, f, f, z, height // f, width // f)
        if self.keep_mean:
            y = y - y.mean(dim=1, keepdim=True)  # n,factor,f,f,z,Y,X
        return y.permute(0, 4, 1, 5, 2, 6, 3).reshape(n, 1, -1, height, width)  # n,1,z*factor,y,x


class Block(nn.Module):
    """A convolution in three dimensions and one within slices, around which the input passes unchanged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inner = nn.Conv3d(channels, channels, 3, padding=1)
        self.outer = nn.Conv3d(channels, channels, (1, 3, 3), padding=(0, 1, 1))

    def forward(self, x: Tensor) -> Tensor:  # n,c,z,y,x
        y: Tensor = self.outer(torch.relu(self.inner(x)))  # n,c,z,y,x
        return x + y


def slice_shares(factor: int) -> list[list[float]]:
    """Return the weights of a slice and its neighbours, 2 * REACH + 1 of them, in each of its `factor` finer slices.

    The polynomial's integral goes through the sums of the means up to each face between slices; a finer slice is the
    difference of the integral at its two faces, times `factor`. Finite volumes are reconstructed so.
    """
    num_slices = 2 * REACH + 1
    with torch.device("cpu"):  # a net may be built on another, which has no numbers to give
        faces = torch.arange(num_slices + 1, dtype=torch.float64) - num_slices / 2
        sums = torch.ones(num_slices + 1, num_slices, dtype=torch.float64).tril(-1)  # up to each face, of each mean
        coefficients = torch.linalg.solve(torch.linalg.vander(faces).flip(-1), sums)
        places = torch.linspace(-0.5, 0.5, factor + 1, dtype=torch.float64)
        inner = torch.linalg.vander(places, N=num_slices + 1).flip(-1) @ coefficients
    shares: list[list[float]] = (inner.diff(dim=0) * factor).tolist()
    return shares


def draw_weights(net: SuperRes) -> None:
    """Fill the convolutions as He et al. 2015 (arXiv 1502.01852), the outer of a block a tenth, the last with zeros."""
    outer = {block.outer for block in net.modules() if isinstance(block, Block)}
    for layer in net.modules():
        if isinstance(layer, nn.Conv3d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
            if layer in outer:
                layer.weight.detach().mul_(0.1)
    nn.init.zeros_(net.last.weight)


def triple(values: Iterable[int]) -> Triple:
    """Return three numbers, z, y, x, as a tuple of three."""
    z, y, x = values
    return z, y, x


def align_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step
