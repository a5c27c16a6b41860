"""The generators and the discriminator: sizes and halos as published and derived, and known answers untrained."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Net, interpolate, run
from torch import Tensor, nn

from volpipe.geometry.grid import Triple
from volpipe.models.srgan3d import discriminator, srgan3d


def num_parameters(net: Net) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


# ---- the generators


@pytest.mark.parametrize(
    ("variant", "halo", "stride", "scale", "intensity"),
    [
        ("r5", (56, 60, 60), (4, 4, 4), (1, 1, 1), "same"),
        ("r4", (110, 114, 114), (8, 8, 8), (1, 1, 1), "same"),
        ("z2", (29, 60, 60), (2, 4, 4), (2, 1, 1), "same"),
        ("z4", (16, 60, 60), (1, 4, 4), (4, 1, 1), "same"),
    ],
)
def test_full_generators_have_the_published_size_and_geometry(
    variant: str, halo: Triple, stride: Triple, scale: Triple, intensity: str
) -> None:
    with torch.device("meta"):
        net = srgan3d(variant=variant)
        assert num_parameters(net) == 52_786_177
        assert num_parameters(srgan3d(variant=variant, norm="batch")) == 52_797_313
        out = net(torch.empty(1, 1, *net.volpipe["window"]))
    assert out.shape[2:] == tuple(w * s for w, s in zip(net.volpipe["window"], scale, strict=True))
    assert (net.volpipe["halo"], net.volpipe["stride"], net.volpipe["scale"], net.volpipe["intensity"]) == (
        halo,
        stride,
        scale,
        intensity,
    )


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 6])
def test_halo_grows_with_the_blocks_as_derived_by_hand(num_blocks: int) -> None:
    halos = {v: srgan3d(variant=v, features=1, num_blocks=num_blocks).volpipe["halo"] for v in ("r5", "r4", "z2", "z4")}
    xy = 12 + 8 * num_blocks
    assert halos["r5"] == (8 + 8 * num_blocks, xy, xy)
    assert halos["r4"] == (14 + 16 * num_blocks, 18 + 16 * num_blocks, 18 + 16 * num_blocks)
    assert halos["z2"] == (5 + 4 * num_blocks, xy, xy)
    assert halos["z4"] == (4 + 2 * num_blocks, xy, xy)


def test_same_grid_generators_end_in_tanh() -> None:
    for variant in ("r5", "r4"):
        net: Net = srgan3d(variant=variant, features=2, num_blocks=1).double()  # no rounding, times 1e6, in the way
        x = 100 * torch.randn(1, 1, 8, 8, 8, dtype=torch.float64)
        out = net(x)
        net.last.weight.data *= 1e-6  # so small that tanh is straight
        straight = 1e6 * net(x)
        assert straight.abs().max() > 1
        torch.testing.assert_close(out, torch.tanh(straight), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("variant", "factor"), [("z2", 2), ("z4", 4)])
def test_untrained_z_generators_interpolate_linearly(variant: str, factor: int) -> None:
    x = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
    net = srgan3d(variant=variant, features=2, num_blocks=1)
    np.testing.assert_allclose(run(net, x), interpolate(x, (factor, 1, 1)), rtol=0, atol=1e-6)
    nn.init.ones_(net.last.bias)  # and the rest is added to it, without tanh
    np.testing.assert_allclose(run(net, x), 1 + interpolate(x, (factor, 1, 1)), rtol=0, atol=1e-6)


def test_weights_are_drawn_so_that_six_blocks_do_not_explode() -> None:
    net = srgan3d(features=8)
    values: list[Tensor] = []
    net.body.register_forward_hook(lambda _layer, inputs, y: values.extend([inputs[0], y]))
    net(torch.randn(1, 1, 16, 16, 16))
    assert 0.5 < values[1].std() / values[0].std() < 2


# ---- the discriminator


@pytest.mark.parametrize(
    ("options", "num", "logits"),
    [
        ({}, 5_727_793, (1, 1, 1)),
        ({"heads": 84}, 6_480_852, (1, 1, 1)),
        ({"strides": "patch"}, 5_727_793, (8, 8, 8)),
        ({"conditional": True}, 5_727_793 + 2_268, (1, 1, 1)),
    ],
)
def test_full_discriminators_have_the_published_size(options: dict[str, object], num: int, logits: Triple) -> None:
    with torch.device("meta"):
        net = discriminator(**options)
        out = net.eval()(torch.empty(2, 2 if "conditional" in options else 1, 64, 64, 64))
    assert num_parameters(net) == num
    assert out.shape == (2, 1, *logits)


def test_discriminator_is_lipschitz_by_its_spectral_norms() -> None:
    net = discriminator(features=2)
    with torch.no_grad():
        for _ in range(20):
            net(torch.rand(1, 1, 64, 64, 64))  # each step in training mode sharpens the estimate
        for layer in net.layers:
            if isinstance(layer, nn.Conv3d):
                largest = torch.linalg.matrix_norm(layer.weight.flatten(1), ord=2)
                torch.testing.assert_close(largest, torch.tensor(1.0), rtol=0.05, atol=0)
