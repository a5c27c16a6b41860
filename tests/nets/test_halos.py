"""The geometry that every shipped net declares is what is measured from outside: shapes, and halos to the voxel."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from nets import Net, align_up
from torch import Tensor, nn

from volpipe.geometry.grid import Shape
from volpipe.models.identity import identity
from volpipe.models.shift import shift
from volpipe.models.srgan3d import srgan3d
from volpipe.models.superres import superres
from volpipe.models.unet3d import unet3d
from volpipe.models.upsample import upsample

# small nets of every kind, by name
NETS: dict[str, Callable[[], Net]] = {
    "identity": lambda: identity(channels=2),
    "shift-z": lambda: shift(offset=(2, 0, 0)),
    "shift-y": lambda: shift(offset=(0, -3, 0)),
    "upsample-nearest": lambda: upsample(scale=(3, 1, 2)),
    "upsample-linear": lambda: upsample(scale=(3, 1, 2), mode="linear"),
    "superres-4": lambda: superres(factor=4, features=2, num_blocks=2, fold=2),
    "superres-2": lambda: superres(factor=2, features=2, num_blocks=1, fold=1),
    "superres-fold-3": lambda: superres(factor=3, features=2, num_blocks=1, fold=3),
    "unet": lambda: unet3d(features=(2, 3, 4)),
    "unet-one-level": lambda: unet3d(features=(2,)),
    "unet-deep": lambda: unet3d(features=(1, 1, 2, 2)),
    "unet-anisotropic": lambda: unet3d(features=(2, 3, 4), anisotropic=True),
    "unet-residual": lambda: unet3d(features=(2, 3), residual=True),
    "unet-affinities": lambda: unet3d(features=(2, 3), out_channels=3, output="sigmoid"),
    "unet-batch": lambda: unet3d(features=(2, 3), norm="batch"),
    **{
        f"{variant}-{num_blocks}": partial(srgan3d, variant=variant, features=1, num_blocks=num_blocks)
        for variant, num_blocks in itertools.product(("r5", "r4", "z2", "z4"), (1, 2))
    },
}


@pytest.fixture(params=NETS)
def net(request: pytest.FixtureRequest) -> Net:
    return NETS[request.param]()


def test_output_has_the_declared_shape_at_every_multiple_of_the_stride(net: Net) -> None:
    for counts in ((1, 1, 1), (4, 1, 7), (6, 5, 2)):
        window = tuple(n * s for n, s in zip(counts, net.volpipe["stride"], strict=True))
        with torch.inference_mode():
            out = net(torch.rand(2, net.volpipe["in_channels"], *window))
        assert out.shape == (
            2,
            net.volpipe["out_channels"],
            *(w * s for w, s in zip(window, net.volpipe["scale"], strict=True)),
        )
        assert out.dtype == torch.float32


def test_default_window_is_aligned_and_keeps_voxels(net: Net) -> None:
    for window, halo, stride in zip(net.volpipe["window"], net.volpipe["halo"], net.volpipe["stride"], strict=True):
        assert window % stride == 0
        assert window > 2 * align_up(halo, stride)


def test_halo_is_the_farthest_that_a_voxel_acts(net: Net) -> None:
    assert measured_reach(net) == net.volpipe["halo"]


def test_beyond_the_halo_nothing_depends_on_the_padding(net: Net) -> None:
    for axis, halo in enumerate(net.volpipe["halo"]):
        assert max(padded_voxels(net, axis)) <= halo


@pytest.mark.parametrize("name", ["shift-y", "upsample-linear", "unet", "r5-1", "r5-2", "z2-1", "z4-1", "z4-2"])
def test_one_stride_less_than_the_halo_is_too_little(name: str) -> None:
    net = NETS[name]()
    for axis, (halo, stride) in enumerate(zip(net.volpipe["halo"], net.volpipe["stride"], strict=True)):
        if halo:
            assert max(padded_voxels(net, axis)) > align_up(halo, stride) - stride


# ---- measured from outside


def measured_reach(net: Net) -> Shape:
    """Return per axis how far, in input voxels, a single voxel acts, over one period of the stride."""
    net, reach = positive(net), []
    for axis, (halo, stride, scale) in enumerate(
        zip(net.volpipe["halo"], net.volpipe["stride"], net.volpipe["scale"], strict=True)
    ):
        middle = align_up(halo + 2 * stride, stride)
        line = torch.zeros(stride, 2 * middle + stride)
        line[range(stride), range(middle, middle + stride)] = 1.0  # one voxel lit per line
        place, output = torch.nonzero(acts(net, axis, line), as_tuple=True)
        reach.append(int((output // scale - middle - place).abs().max()))
    return tuple(reach)


def padded_voxels(net: Net, axis: int) -> tuple[int, int]:
    """Return how many voxels at the near and the far face of a window see what lies outside it."""
    net = positive(net)
    halo, stride, scale = net.volpipe["halo"][axis], net.volpipe["stride"][axis], net.volpipe["scale"][axis]
    outside = align_up(halo + stride, stride)
    size = 2 * outside
    near, far = torch.zeros(1, outside + size), torch.zeros(1, size + outside)
    near[:, :outside], far[:, size:] = 1.0, 1.0
    inner_near = acts(net, axis, near)[0, outside * scale :]
    inner_far = acts(net, axis, far)[0, : size * scale]
    return -(-int(inner_near.sum()) // scale), -(-int(inner_far.sum()) // scale)


def acts(net: Net, axis: int, line: Tensor) -> Tensor:
    """Return which outputs along `axis` (n, voxels) an input shows in that is `line` (n, voxels) along it."""
    shape = [line.shape[0], 1, *(align_up(4, s) for s in net.volpipe["stride"])]
    shape[2 + axis] = line.shape[1]
    view = [line.shape[0], 1, 1, 1, 1]
    view[2 + axis] = line.shape[1]
    x = line.double().view(view).expand(shape).repeat(1, net.volpipe["in_channels"], 1, 1, 1)
    with torch.inference_mode():
        changed: Tensor = net(x) != net(torch.zeros_like(x))
    return changed.movedim(2 + axis, 1).flatten(2).any(dim=2)


def positive(net: Net) -> Net:
    """Return `net` in float64 with every weight positive and every bias zero: nothing that acts can cancel.

    Weights grow with the channel, so that nothing is lost where a net takes the mean of channels from each.
    """
    for name, parameter in net.double().named_parameters():
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
        growth = torch.arange(1.0, len(parameter) + 1).square()
        parameter.data *= growth.view(-1, *[1] * (parameter.ndim - 1))
    return net
