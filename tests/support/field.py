"""Architectures of the field with few features: their true kernels, pools, norms, padding and outputs; untrained.

A function without arguments returns each, with weights whose statistics are as those of a trained net.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Sizes = Sequence[int]


def trained(net: nn.Module, seed: int = 0) -> nn.Module:
    """Return `net` in evaluation mode; its outputs have a spread, and its norms know means and deviations."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    with torch.no_grad():
        for name, tensor in itertools.chain(net.named_parameters(), net.named_buffers()):
            if name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
                drawn(tensor, 0.5, 1.5)
            elif tensor.ndim == 1:
                drawn(tensor, -0.3, 0.3)
            elif tensor.ndim > 1 and tensor.is_floating_point():
                reach = (6 / max(1, tensor[0].numel())) ** 0.5
                drawn(tensor, -reach, reach)
    return net.eval()


# --- without padding: LSD, DaCapo, CellMap


def cropped(data: torch.Tensor, size: Sizes) -> torch.Tensor:
    for axis, n in enumerate(size, 2):
        data = data.narrow(axis, (data.shape[axis] - n) // 2, n)
    return data


class ValidUNet(nn.Module):
    """Convolutions of 3 × 3 × 3 without padding, and cropped skips.

    Args:
        factors: of the pools, from the finest.
        even: crop so that the output keeps its grid whatever the window, and refuse odd pools.
        heads: channels of each output.
        convs: in each level, on the way down and on the way up.
        repeats: grow by repeating voxels; else by transposed convolutions.
    """

    def __init__(
        self, factors: Sequence[Sizes], even: bool, *heads: int, convs: Sizes = (2, 2), repeats: bool = True
    ) -> None:
        super().__init__()
        widths = [2 * 2**level for level in range(len(factors) + 1)]
        self.factors, self.even, self.convs = factors, even, convs
        self.down = nn.ModuleList(self._convs(a, b, convs[0]) for a, b in zip([1, *widths], widths, strict=False))
        self.up = nn.ModuleList(self._convs(a + b, a, convs[1]) for a, b in itertools.pairwise(widths))
        self.grow = nn.ModuleList(
            nn.Upsample(scale_factor=tuple(map(float, factor)))
            if repeats
            else nn.ConvTranspose3d(width, width, tuple(factor), tuple(factor))
            for factor, width in zip(factors, widths[1:], strict=True)
        )
        self.heads = nn.ModuleList(nn.Sequential(nn.Conv3d(widths[0], n, 1), nn.Sigmoid()) for n in heads)

    @staticmethod
    def _convs(ins: int, outs: int, count: int) -> nn.Sequential:
        layers = [[nn.Conv3d(outs if i else ins, outs, 3), nn.ReLU()] for i in range(count)]
        return nn.Sequential(*itertools.chain(*layers))

    def forward(self, x: torch.Tensor) -> Any:  # Any: a tensor, or one for each head
        skips: list[torch.Tensor] = []
        for level, down in enumerate(self.down):
            if level:
                factor = self.factors[level - 1]
                if self.even and any(n % f for n, f in zip(x.shape[2:], factor, strict=True)):
                    raise RuntimeError(f"Can not downsample shape {tuple(x.shape)} with factor {factor}")
                x = F.max_pool3d(x, tuple(factor))
            x = down(x)
            skips.append(x)
        lost = 2 * self.convs[1]
        for level in reversed(range(len(self.factors))):
            x = self.grow[level](x)
            if self.even:
                total = [1, 1, 1]
                for factor in self.factors[level:]:
                    total = [a * b for a, b in zip(total, factor, strict=True)]
                x = cropped(x, [(n - lost) // t * t + lost for n, t in zip(x.shape[2:], total, strict=True)])
            x = self.up[level](torch.cat([cropped(skips[level], x.shape[2:]), x], 1))
        outs = [head(x) for head in self.heads]
        return outs[0] if len(outs) == 1 else tuple(outs)


def lsd() -> nn.Module:
    """LSD's net of affinities."""
    return trained(ValidUNet([(1, 2, 2), (1, 2, 2), (2, 2, 2)], True, 3))


def mtlsd() -> nn.Module:
    """LSD's net of shape descriptors and affinities."""
    return trained(ValidUNet([(1, 2, 2), (2, 2, 2)], True, 10, 3))


def dacapo() -> nn.Module:
    """DaCapo's CNNectome U-Net, that grows by transposed convolutions."""
    return trained(ValidUNet([(2, 2, 2), (2, 2, 2)], True, 6, repeats=False))


def cellmap() -> nn.Module:
    """CellMap's U-Net of fly_organelles: 178 voxels of a window give 56."""
    return trained(ValidUNet([(2, 2, 2)] * 3, True, 8, convs=(3, 2)))


# --- whole windows of volumes: BANIS, PyTC, SegNeuron


class MedNeXtBlock(nn.Module):
    """A depthwise convolution, a norm of each channel, and two of 1 × 1 × 1 around a GELU, beside a residual.

    `step`: 1 coarser by 2, -1 finer by 2.
    """

    def __init__(self, ins: int, outs: int, step: int = 0) -> None:
        super().__init__()
        conv = nn.ConvTranspose3d if step < 0 else nn.Conv3d
        stride = 2 if step else 1
        self.step = step
        self.depthwise = conv(ins, ins, 3, stride, 1, groups=ins)
        self.norm = nn.GroupNorm(ins, ins)
        self.points = nn.Sequential(nn.Conv3d(ins, 2 * ins, 1), nn.GELU(), nn.Conv3d(2 * ins, outs, 1))
        self.residual = conv(ins, outs, 1, stride) if step else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.points(self.norm(self.depthwise(x))) + self.residual(x)
        return F.pad(out, (1, 0, 1, 0, 1, 0)) if self.step < 0 else out


class MedNeXt(nn.Module):
    def __init__(self, outs: int, levels: int = 4, width: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem, self.head = nn.Conv3d(1, width, 1), nn.Conv3d(width, outs, 1)
        self.encoder = nn.ModuleList(MedNeXtBlock(n, n) for n in widths)
        self.down = nn.ModuleList(MedNeXtBlock(a, b, 1) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(MedNeXtBlock(b, a, -1) for a, b in itertools.pairwise(widths))
        self.decoder = nn.ModuleList(MedNeXtBlock(n, n) for n in widths[:-1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.stem(x), []
        for encode, down in zip(self.encoder, self.down, strict=False):
            x = encode(x)
            skips.append(x)
            x = down(x)
        x = self.encoder[-1](x)
        for up, decode in zip(reversed(self.up), reversed(self.decoder), strict=True):
            x = decode(up(x) + skips.pop())
        return self.head(x)


def banis() -> nn.Module:
    """BANIS' MedNeXt of six affinities."""
    return trained(MedNeXt(6))


def _elu(ins: int, outs: int, kernel: Sizes, stride: Sizes = (1, 1, 1)) -> nn.Sequential:
    padding = tuple(n // 2 for n in kernel)
    conv = nn.Conv3d(ins, outs, tuple(kernel), tuple(stride), padding, padding_mode="replicate", bias=False)
    return nn.Sequential(conv, nn.BatchNorm3d(outs), nn.ELU())


class Residual(nn.Module):
    def __init__(self, width: int, kernel: Sizes) -> None:
        super().__init__()
        self.convs = nn.Sequential(_elu(width, width, kernel), _elu(width, width, kernel)[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.elu(self.convs(x) + x)


class ResidualUNet(nn.Module):
    """PyTC's residual U-Net for anisotropic volumes: flat first levels, and corners that interpolation keeps."""

    def __init__(self, outs: int) -> None:
        super().__init__()
        widths, kernels = [3, 4, 6, 8], [(1, 3, 3), (1, 3, 3), (3, 3, 3), (3, 3, 3)]
        strides = [(1, 2, 2), (1, 2, 2), (2, 2, 2)]
        self.first = _elu(1, widths[0], (1, 5, 5))
        self.encoder = nn.ModuleList(Residual(n, kernel) for n, kernel in zip(widths, kernels, strict=True))
        self.down = nn.ModuleList(
            _elu(a, b, kernel, stride)
            for (a, b), kernel, stride in zip(itertools.pairwise(widths), kernels[1:], strides, strict=True)
        )
        self.up = nn.ModuleList(
            _elu(b, a, kernel) for (a, b), kernel in zip(itertools.pairwise(widths), kernels[1:], strict=True)
        )
        self.decoder = nn.ModuleList(Residual(n, kernel) for n, kernel in zip(widths, kernels, strict=False))
        self.last = nn.Conv3d(widths[0], outs, (1, 5, 5), padding=(0, 2, 2), padding_mode="replicate")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.encoder[0](self.first(x)), []
        for down, encode in zip(self.down, self.encoder[1:], strict=True):
            skips.append(x)
            x = encode(down(x))
        for up, decode in zip(reversed(self.up), reversed(self.decoder[:3]), strict=True):
            skip = skips.pop()
            x = F.interpolate(up(x), size=skip.shape[2:], mode="trilinear", align_corners=True)
            x = decode(x + skip)
        return self.last(x)


def pytc() -> nn.Module:
    """PyTC's residual U-Net of three affinities."""
    return trained(ResidualUNet(3))


def _normed(ins: int, outs: int, is_flat: bool) -> nn.Sequential:
    kernel, padding = ((1, 3, 3), (0, 1, 1)) if is_flat else ((3, 3, 3), (1, 1, 1))
    layers = [
        [nn.Conv3d(n, outs, kernel, 1, padding), nn.InstanceNorm3d(outs, affine=True), nn.LeakyReLU(0.01, inplace=True)]
        for n in (ins, outs)
    ]
    return nn.Sequential(*itertools.chain(*layers))


class TwoStreams(nn.Module):
    """SegNeuron's mesh of flat and full convolutions, of two levels: streams merge by the size of their difference."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(_normed(1, 3, is_flat) for is_flat in (True, False))
        self.deep = nn.ModuleList(_normed(3, 4, is_flat) for is_flat in (True, False))
        self.up = nn.ModuleList(_normed(7, 3, is_flat) for is_flat in (True, False))
        self.affinities, self.boundary = nn.Conv3d(3, 3, 1, bias=False), nn.Conv3d(3, 1, 1, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat, full = (layer(x) for layer in self.first)
        factor = (2, 2, 2) if x.shape[2] >= 8 else (1, 2, 2)
        deep = self.deep[0](F.max_pool3d(flat, (1, 2, 2))), self.deep[1](F.max_pool3d(full, factor))
        grown = [F.interpolate(each, size=x.shape[2:], mode="trilinear") for each in deep]
        merged = torch.cat([(flat - full).abs(), (grown[0] - grown[1]).abs()], 1)
        y = self.up[0](merged) + self.up[1](merged)
        return torch.sigmoid(self.affinities(y)), torch.sigmoid(self.boundary(y))


def segneuron() -> nn.Module:
    """SegNeuron's net of affinities and of a boundary."""
    return trained(TwoStreams())


# --- slices: MitoNet, and nets of neighbouring slices


def _conv2d(ins: int, outs: int, size: int = 3, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(ins, outs, size, stride, dilation * (size // 2), dilation, groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outs), nn.ReLU())


class Pyramid(nn.Module):
    """Dilated convolutions beside each other, and the mean of the whole slice."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList([_conv2d(ins, outs, 1), *(_conv2d(ins, outs, 3, 1, rate) for rate in (2, 4, 6))])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(ins, outs, 1), nn.ReLU())
        self.project = _conv2d(5 * outs, outs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = F.interpolate(self.pool(x), size=x.shape[2:], mode="bilinear", align_corners=True)
        return self.project(torch.cat([*(branch(x) for branch in self.branches), mean], 1))


class PanopticDeepLab(nn.Module):
    """MitoNet's net: semantic logits, heat map of centres and offsets to them, on the grid of the slice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = _conv2d(1, 4, 7, 2)
        self.stages = nn.ModuleList([_conv2d(4, 6), _conv2d(6, 8, 3, 2), _conv2d(8, 8, 3, 2)])
        self.aspp = Pyramid(8, 6)
        self.project = nn.ModuleList([_conv2d(8, 4, 1), _conv2d(6, 4, 1)])
        self.fuse = nn.ModuleList(nn.Sequential(_conv2d(10, 10, 5, groups=10), _conv2d(10, 6, 1)) for _ in range(2))
        self.heads = nn.ModuleDict({name: nn.Conv2d(6, n, 1) for name, n in HEADS.items()})

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x, features = F.max_pool2d(self.stem(x), 3, 2, 1), []
        for stage in self.stages:
            x = stage(x)
            features.append(x)
        x = self.aspp(x)
        for low, project, fuse in zip((features[1], features[0]), self.project, self.fuse, strict=True):
            x = F.interpolate(x, size=low.shape[2:], mode="bilinear", align_corners=True)
            x = fuse(torch.cat([x, project(low)], 1))
        return {
            name: F.interpolate(head(x), scale_factor=4.0, mode="bilinear", align_corners=True)
            for name, head in self.heads.items()
        }


HEADS = {"sem_logits": 1, "ctr_hmp": 1, "offsets": 2}


def mitonet() -> nn.Module:
    """MitoNet's Panoptic-DeepLab of slices."""
    return trained(PanopticDeepLab())


class SliceUNet(nn.Module):
    """A U-Net of slices with batch norm and three pools of 2, as micro-sam's and bioimage.io's small nets."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        widths = [3, 4, 6, 8]
        self.down = nn.ModuleList(
            nn.Sequential(_conv2d(a, b), _conv2d(b, b)) for a, b in itertools.pairwise([ins, *widths])
        )
        self.grow = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(nn.Sequential(_conv2d(2 * n, n), _conv2d(n, n)) for n in widths[:-1])
        self.head = nn.Conv2d(widths[0], outs, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if level else x)
            skips.append(x)
        skips.pop()
        for grow, up in zip(reversed(self.grow), reversed(self.up), strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], 1))
        return torch.sigmoid(self.head(x))


def slices() -> nn.Module:
    """A U-Net of slices."""
    return trained(SliceUNet(1, 2))


def neighbours() -> nn.Module:
    """A U-Net of slices that gets five as channels."""
    return trained(SliceUNet(5, 2))


def normed_neighbours() -> nn.Module:
    """A net of slices that gets five as channels and looks at its whole window."""
    return trained(nn.Sequential(nn.Conv2d(5, 4, 3, padding=1), nn.InstanceNorm2d(4), nn.ELU(), nn.Conv2d(4, 2, 1)))


# --- nets of MONAI and nnU-Net, by their own libraries

MONAI: dict[str, dict[str, Any]] = {
    "UNet": {"spatial_dims": 3, "channels": [4, 8, 16], "strides": [2, 2], "num_res_units": 2},
    "SegResNet": {"init_filters": 8, "blocks_down": [1, 2, 2], "blocks_up": [1, 1]},
    "DynUNet": {
        "spatial_dims": 3, "kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2],
        "filters": [4, 8, 8],
    },
    "BasicUNet": {"spatial_dims": 3, "features": [4, 4, 8, 8, 8, 4]},
    "AttentionUnet": {"spatial_dims": 3, "channels": [4, 8], "strides": [2]},
    "MedNeXt": {
        "init_filters": 4, "encoder_expansion_ratio": 2, "decoder_expansion_ratio": 2, "bottleneck_expansion_ratio": 2,
        "blocks_down": [1, 1, 1, 1], "blocks_bottleneck": 1, "blocks_up": [1, 1, 1, 1],
    },
}  # fmt: skip
NNUNET: dict[str, dict[str, Any]] = {
    "PlainConvUNet": {"n_conv_per_stage": [2, 2, 2], "n_conv_per_stage_decoder": [2, 2]},
    "ResidualEncoderUNet": {"n_blocks_per_stage": [1, 2, 2], "n_conv_per_stage_decoder": [1, 1]},
}
STAGES: dict[str, Any] = {
    "n_stages": 3, "features_per_stage": [4, 8, 8], "conv_op": "torch.nn.modules.conv.Conv3d",
    "kernel_sizes": [[1, 3, 3], [3, 3, 3], [3, 3, 3]], "strides": [[1, 1, 1], [1, 2, 2], [2, 2, 2]], "conv_bias": True,
    "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d", "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "dropout_op": None, "dropout_op_kwargs": None, "nonlin": "torch.nn.LeakyReLU", "nonlin_kwargs": {"inplace": True},
}  # fmt: skip


def monai(name: str) -> nn.Module:
    """One of MONAI's nets, of one channel and two classes."""
    from monai.networks import nets

    net: nn.Module = getattr(nets, name)(in_channels=1, out_channels=2, **MONAI[name])
    return trained(net)


def nnunet(name: str) -> nn.Module:
    """One of nnU-Net's nets, of one channel and three classes."""
    from dynamic_network_architectures.architectures import unet

    built = {"conv_op": nn.Conv3d, "norm_op": nn.InstanceNorm3d, "nonlin": nn.LeakyReLU}
    arguments = STAGES | NNUNET[name] | built
    net: nn.Module = getattr(unet, name)(1, num_classes=3, deep_supervision=False, **arguments)
    return trained(net)
