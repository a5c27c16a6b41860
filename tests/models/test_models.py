"""The shipped nets: what is drawn from a seed, which options are refused, and known answers of the simple ones."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from nets import Net, interpolate, run
from torch import nn

import volpipe.models
from volpipe.geometry.grid import Triple
from volpipe.models.identity import identity
from volpipe.models.shift import shift
from volpipe.models.srgan3d import discriminator, srgan3d
from volpipe.models.unet3d import unet3d
from volpipe.models.upsample import upsample

# ---- every net


def test_a_seed_gives_the_same_weights_and_leaves_the_global_state() -> None:
    for make in (unet3d, partial(srgan3d, features=2, num_blocks=1), partial(discriminator, features=2)):
        torch.manual_seed(123)
        before = torch.random.get_rng_state()
        first = make(seed=5).state_dict()
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.rand(7)
        second, other = make(seed=5).state_dict(), make(seed=6).state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert any(not torch.equal(first[key], other[key]) for key in first)


def test_nets_import_torch_and_the_standard_library_alone() -> None:
    folder = Path(volpipe.models.__file__ or "").parent
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                names = [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                root = name.partition(".")[0]
                assert root == "torch" or root in sys.stdlib_module_names, f"{file.name} imports {name}"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (identity, {"channels": 0}, "channels is 0; give 1 or more"),
        (shift, {"offset": (1, 2)}, r"offset is \(1, 2\); give three whole numbers"),
        (shift, {"offset": (1, 2, 0.5)}, r"offset is \(1, 2, 0.5\); give three whole numbers"),
        (shift, {"channels": 0}, "channels is 0"),
        (upsample, {"scale": (2, 0, 2)}, r"scale is \(2, 0, 2\); give three whole numbers from 1 up"),
        (upsample, {"mode": "cubic"}, "mode is 'cubic'; give one of nearest, linear"),
        (unet3d, {"norm": "group"}, "norm is 'group'; give one of none, batch, instance"),
        (unet3d, {"activation": "tanh"}, "activation is 'tanh'; give one of relu, leaky_relu, elu, silu"),
        (unet3d, {"output": "softmax"}, "output is 'softmax'; give one of none, sigmoid"),
        (unet3d, {"features": ()}, r"features is \(\); give a whole number"),
        (unet3d, {"features": [8, 0]}, r"features is \[8, 0\]; give a whole number"),
        (unet3d, {"out_channels": 0}, "out_channels is 0; give a whole number"),
        (
            unet3d,
            {"residual": True, "out_channels": 3},
            "residual is True with in_channels 1, out_channels 3",
        ),
        (unet3d, {"residual": True, "output": "sigmoid"}, "residual is True .* output 'sigmoid'; .* 'none'"),
        (srgan3d, {"variant": "r6"}, "variant is 'r6'; give one of r5, r4, z2, z4"),
        (srgan3d, {"norm": "group"}, "norm is 'group'; give one of none, batch, instance"),
        (srgan3d, {"features": 0}, "features is 0; give a whole number from 1 up"),
        (srgan3d, {"num_blocks": 1.5}, "num_blocks is 1.5; give a whole number from 1 up"),
        (discriminator, {"strides": "all"}, "strides is 'all'; give one of literal, patch"),
        (discriminator, {"heads": 0}, "heads is 0"),
    ],
)
def test_a_wrong_option_is_named(make: Callable[..., Net], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


@pytest.mark.parametrize("make", [unet3d, lambda **options: srgan3d(features=2, num_blocks=1, **options)])
def test_tile_invariance_follows_norm(make: Callable[..., Net]) -> None:
    assert make(norm="none").volpipe["tile_invariant"]
    assert make(norm="batch").volpipe["tile_invariant"]
    assert not make(norm="instance").volpipe["tile_invariant"]


# ---- known answers


def test_identity_returns_its_input_in_other_memory() -> None:
    x = torch.rand(2, 3, 4, 5, 6)
    out = identity(channels=3)(x)
    assert torch.equal(out, x)
    assert out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("offset", [(0, 0, 0), (1, 2, 3), (-1, 0, 2), (5, -6, 1), (-9, 9, 9)])
def test_shift_moves_every_voxel_by_its_offset(offset: Triple) -> None:
    x = np.random.default_rng(0).random((4, 5, 6), np.float32)
    expected = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        source = tuple(i - d for i, d in zip(index, offset, strict=True))
        if all(0 <= i < n for i, n in zip(source, x.shape, strict=True)):
            expected[index] = x[source]
    np.testing.assert_array_equal(run(shift(offset=offset), x), expected)


@pytest.mark.parametrize("scale", [(1, 1, 1), (2, 2, 2), (4, 1, 3)])
def test_nearest_repeats_every_voxel(scale: Triple) -> None:
    x = np.random.default_rng(0).random((2, 3, 4), np.float32)
    np.testing.assert_array_equal(run(upsample(scale=scale), x), np.kron(x, np.ones(scale, np.float32)))


@pytest.mark.parametrize("scale", [(1, 1, 1), (2, 2, 2), (4, 1, 3), (1, 5, 1)])
def test_linear_interpolates_at_half_voxel_positions(scale: Triple) -> None:
    x = np.random.default_rng(0).random((1, 3, 4), np.float32)
    np.testing.assert_allclose(run(upsample(scale=scale, mode="linear"), x), interpolate(x, scale), rtol=0, atol=1e-6)


def test_linear_keeps_a_ramp_inside() -> None:
    out = run(upsample(scale=(1, 1, 4), mode="linear"), np.arange(4, dtype=np.float32).reshape(1, 1, 4))
    assert out.ravel()[2:-2].tolist() == [0.125 + 0.25 * i for i in range(12)]


def test_linear_agrees_with_torch() -> None:
    x = torch.rand(1, 1, 5, 6, 7)
    due = nn.functional.interpolate(x, scale_factor=(2, 3, 4), mode="trilinear", align_corners=False)
    torch.testing.assert_close(upsample(scale=(2, 3, 4), mode="linear")(x), due, rtol=0, atol=1e-6)


@pytest.mark.parametrize("factor", [2, 3, 5])
def test_linear_does_not_depend_on_where_the_window_lies(factor: int) -> None:
    x, net = torch.rand(1, 1, 200, 2, 2), upsample(scale=(factor, 1, 1), mode="linear")
    whole, part = net(x), net(x[:, :, 99:151])
    assert torch.equal(part[:, :, factor:-factor], whole[:, :, 100 * factor : 150 * factor])


# ---- U-Net


def test_unet_declares_what_its_options_make_of_it() -> None:
    assert (unet3d().volpipe["stride"], unet3d().volpipe["halo"], unet3d().volpipe["window"]) == (
        (4, 4, 4),
        (23, 23, 23),
        (176, 176, 176),
    )
    assert unet3d(anisotropic=True).volpipe["stride"] == (2, 4, 4)
    assert unet3d(features=(2, 3, 4, 5), anisotropic=True).volpipe["stride"] == (4, 8, 8)
    assert unet3d(features=(2,), anisotropic=True).volpipe["halo"] == (0, 2, 2)
    assert unet3d().volpipe["intensity"] == "same"
    assert unet3d(out_channels=3).volpipe["intensity"] == "raw"
    assert unet3d(output="sigmoid").volpipe["intensity"] == "unit"


def test_untrained_residual_unet_is_the_identity_and_the_plain_one_is_not() -> None:
    x = torch.rand(1, 2, 8, 8, 8)
    options = {"in_channels": 2, "out_channels": 2, "features": (2, 3)}
    assert torch.equal(unet3d(**options, residual=True)(x), x)
    assert not torch.allclose(unet3d(**options)(x), x, atol=0.01)


def test_sigmoid_output_lies_between_zero_and_one() -> None:
    x = 100 * torch.randn(1, 1, 8, 8, 8)
    plain, out = unet3d(features=(4, 8))(x), unet3d(features=(4, 8), output="sigmoid")(x)
    assert plain.min() < 0 or plain.max() > 1
    torch.testing.assert_close(out, 1 / (1 + torch.exp(-plain)))


def test_default_unet_varies_with_its_input_and_stays_bounded() -> None:
    out = unet3d()(torch.rand(1, 1, 16, 16, 16))
    assert 0.05 < out.std() < 5
