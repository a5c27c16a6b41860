"""The shipped nets: known answers, halos measured from outside, tiles that equal the whole bit for bit."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import volpipe.models
from volpipe.models.identity import identity
from volpipe.models.shift import shift
from volpipe.models.srgan3d import discriminator, srgan3d
from volpipe.models.unet3d import unet3d
from volpipe.models.upsample import upsample

Triple = tuple[int, int, int]
Shape = tuple[int, ...]
Net = Any  # torch types every attribute of a module as Tensor | Module, so that none can be used

# small nets of every kind, by name
NETS: dict[str, Callable[[], Net]] = {
    "identity": lambda: identity(channels=2),
    "shift-z": lambda: shift(offset=(2, 0, 0)),
    "shift-y": lambda: shift(offset=(0, -3, 0)),
    "upsample-nearest": lambda: upsample(scale=(3, 1, 2)),
    "upsample-linear": lambda: upsample(scale=(3, 1, 2), mode="linear"),
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


# ---- every net


def test_output_has_the_declared_shape_at_every_multiple_of_the_stride(net: Net) -> None:
    for counts in ((1, 1, 1), (4, 1, 7), (6, 5, 2)):
        window = tuple(n * s for n, s in zip(counts, net.stride, strict=True))
        with torch.inference_mode():
            out = net(torch.rand(2, net.in_channels, *window))
        assert out.shape == (2, net.out_channels, *(w * s for w, s in zip(window, net.scale, strict=True)))
        assert out.dtype == torch.float32


def test_default_window_is_aligned_and_keeps_voxels(net: Net) -> None:
    for window, halo, stride in zip(net.window, net.halo, net.stride, strict=True):
        assert window % stride == 0
        assert window > 2 * align_up(halo, stride)


def test_halo_is_the_farthest_that_a_voxel_acts(net: Net) -> None:
    assert measured_reach(net) == net.halo


def test_beyond_the_halo_nothing_depends_on_the_padding(net: Net) -> None:
    for axis, halo in enumerate(net.halo):
        assert max(padded_voxels(net, axis)) <= halo


@pytest.mark.parametrize("name", ["shift-y", "upsample-linear", "unet", "r5-1", "r5-2", "z2-1", "z4-1", "z4-2"])
def test_one_stride_less_than_the_halo_is_too_little(name: str) -> None:
    net = NETS[name]()
    for axis, (halo, stride) in enumerate(zip(net.halo, net.stride, strict=True)):
        if halo:
            assert max(padded_voxels(net, axis)) > align_up(halo, stride) - stride


def test_a_seed_gives_the_same_weights_and_leaves_the_global_state() -> None:
    for make in (unet3d, srgan3d_small, discriminator_small):
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
    assert (unet3d().stride, unet3d().halo, unet3d().window) == ((4, 4, 4), (23, 23, 23), (176, 176, 176))
    assert unet3d(anisotropic=True).stride == (2, 4, 4)
    assert unet3d(features=(2, 3, 4, 5), anisotropic=True).stride == (4, 8, 8)
    assert unet3d(features=(2,), anisotropic=True).halo == (0, 2, 2)
    assert unet3d().intensity == "same"
    assert unet3d(out_channels=3).intensity == "raw"
    assert unet3d(output="sigmoid").intensity == "unit"


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


@pytest.mark.parametrize("make", [unet3d, lambda **options: srgan3d(features=2, num_blocks=1, **options)])
def test_tile_invariance_follows_norm_and_mode(make: Callable[..., Net]) -> None:
    assert make(norm="none").tile_invariant
    assert make(norm="none").train().tile_invariant
    assert make(norm="batch").tile_invariant
    assert not make(norm="batch").train().tile_invariant
    assert not make(norm="instance").tile_invariant


# ---- the generator and the discriminator


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
        out = net(torch.empty(1, 1, *net.window))
    assert out.shape[2:] == tuple(w * s for w, s in zip(net.window, scale, strict=True))
    assert (net.halo, net.stride, net.scale, net.intensity) == (halo, stride, scale, intensity)


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 6])
def test_halo_grows_with_the_blocks_as_derived_by_hand(num_blocks: int) -> None:
    halos = {v: srgan3d(variant=v, features=1, num_blocks=num_blocks).halo for v in ("r5", "r4", "z2", "z4")}
    xy = 12 + 8 * num_blocks
    assert halos["r5"] == (8 + 8 * num_blocks, xy, xy)
    assert halos["r4"] == (14 + 16 * num_blocks, 18 + 16 * num_blocks, 18 + 16 * num_blocks)
    assert halos["z2"] == (5 + 4 * num_blocks, xy, xy)
    assert halos["z4"] == (4 + 2 * num_blocks, xy, xy)


def test_same_grid_generators_end_in_tanh() -> None:
    for variant in ("r5", "r4"):
        net: Net = srgan3d(variant=variant, features=2, num_blocks=1)
        x = 100 * torch.randn(1, 1, 8, 8, 8)
        out = net(x)
        net.last.weight.data *= 1e-6  # so small that tanh is straight
        straight = 1e6 * net(x)
        assert straight.abs().max() > 1
        torch.testing.assert_close(out, torch.tanh(straight), rtol=0, atol=1e-5)


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


# ---- tiles

TILED: dict[str, Callable[[], Net]] = {
    "unet": lambda: unet3d(features=(2, 3, 4)),
    "r5": lambda: srgan3d(features=2, num_blocks=1),
    "z4": lambda: srgan3d(variant="z4", features=2, num_blocks=1),
    "upsample": lambda: upsample(scale=(3, 2, 1), mode="linear"),
}


@pytest.mark.parametrize("name", TILED)
def test_tiles_with_the_aligned_halo_equal_the_whole_bit_for_bit(name: str) -> None:
    net = in_integers(TILED[name]())
    volume = random_volume(tuple(n * s for n, s in zip((2, 4, 4), net.stride, strict=True)))
    whole = run_whole(net, volume)
    assert whole.std() > 0.01
    assert torch.equal(run_tiled(net, volume, aligned_halo(net)), whole)


@pytest.mark.parametrize("name", TILED)
def test_tiles_with_one_stride_less_differ_from_the_whole(name: str) -> None:
    net = in_integers(TILED[name]())
    volume = random_volume(tuple(2 * s for s in net.stride))
    whole = run_whole(net, volume)
    for axis, (halo, stride) in enumerate(zip(aligned_halo(net), net.stride, strict=True)):
        if halo:
            less = (*aligned_halo(net)[:axis], halo - stride, *aligned_halo(net)[axis + 1 :])
            assert not torch.equal(run_tiled(net, volume, less), whole)


def test_tiles_off_the_stride_grid_are_wrong_by_the_size_of_the_signal() -> None:
    net = in_integers(TILED["r5"]())
    volume = random_volume((8, 8, 8))
    halo = tuple(h + 2 for h in aligned_halo(net))  # more than enough, but no multiple of 4
    whole = run_whole(net, volume)
    wrong = run_tiled(net, volume, halo) - whole
    assert wrong.abs().max() > 0.5 * whole.std()


@pytest.mark.parametrize("make", [*TILED.values(), lambda: unet3d(features=(4, 8), norm="batch")])
def test_float32_tiles_equal_the_whole_but_for_the_order_of_sums(make: Callable[[], Net]) -> None:
    net = awake(make())
    volume = random_volume(tuple(4 * s for s in net.stride))
    whole, tiled = run_whole(net, volume), run_tiled(net, volume, aligned_halo(net))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(tiled, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TILED)
def test_number_of_threads_does_not_change_a_bit(name: str) -> None:
    net = awake(TILED[name]())
    window = random_volume(tuple(8 * s for s in net.stride))
    before, outs = torch.get_num_threads(), []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        outs.append(run(net, window))
    torch.set_num_threads(before)
    np.testing.assert_array_equal(outs[0], outs[1])


def test_instance_norm_makes_tiles_differ_whatever_the_halo() -> None:
    net = awake(unet3d(features=(4, 8), norm="instance"))
    volume = random_volume((16, 16, 16))
    assert (run_tiled(net, volume, aligned_halo(net)) - run_whole(net, volume)).abs().max() > 0.01


# ---- measured from outside


def srgan3d_small(*, seed: int) -> Net:
    return srgan3d(features=2, num_blocks=1, seed=seed)


def discriminator_small(*, seed: int) -> Net:
    return discriminator(features=2, seed=seed)


def align_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def num_parameters(net: Net) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


def run(net: Net, volume: np.ndarray) -> np.ndarray:
    """Return the one output channel (z, y, x) of `net` for `volume` (z, y, x)."""
    with torch.inference_mode():
        out: np.ndarray = net(torch.from_numpy(volume)[None, None].to(weights_dtype(net)))[0, 0].numpy()
    return out


def weights_dtype(net: Net) -> torch.dtype:
    return next((parameter.dtype for parameter in net.parameters()), torch.float32)


def interpolate(volume: np.ndarray, scale: Shape) -> np.ndarray:
    """Return `volume` at positions (o + 1/2) / s - 1/2 per axis, by numpy's own interpolation."""
    for axis, factor in enumerate(scale):
        n = volume.shape[axis]
        at = (np.arange(n * factor) + 0.5) / factor - 0.5
        lines = np.moveaxis(volume, axis, -1)
        stretched = np.array([np.interp(at, np.arange(n), line) for line in lines.reshape(-1, n)])
        volume = np.moveaxis(stretched.reshape(*lines.shape[:-1], n * factor), -1, axis)
    return volume


def positive(net: Net) -> Net:
    """Return `net` in float64 with every weight one and every bias zero: nothing that acts can cancel."""
    for name, parameter in net.double().named_parameters():
        nn.init.constant_(parameter, 0.0 if name.endswith("bias") else 1.0)
    return net


def acts(net: Net, axis: int, line: Tensor) -> Tensor:
    """Return which outputs along `axis` (n, voxels) an input shows in that is `line` (n, voxels) along it."""
    shape = [line.shape[0], 1, *(align_up(4, s) for s in net.stride)]
    shape[2 + axis] = line.shape[1]
    view = [line.shape[0], 1, 1, 1, 1]
    view[2 + axis] = line.shape[1]
    x = line.double().view(view).expand(shape).repeat(1, net.in_channels, 1, 1, 1)
    with torch.inference_mode():
        changed: Tensor = net(x) != net(torch.zeros_like(x))
    return changed.movedim(2 + axis, 1).flatten(2).any(dim=2)


def measured_reach(net: Net) -> Shape:
    """Return per axis how far, in input voxels, a single voxel acts, over one period of the stride."""
    net, reach = positive(net), []
    for axis, (halo, stride, scale) in enumerate(zip(net.halo, net.stride, net.scale, strict=True)):
        middle = align_up(halo + 2 * stride, stride)
        line = torch.zeros(stride, 2 * middle + stride)
        line[range(stride), range(middle, middle + stride)] = 1.0  # one voxel lit per line
        place, output = torch.nonzero(acts(net, axis, line), as_tuple=True)
        reach.append(int((output // scale - middle - place).abs().max()))
    return tuple(reach)


def padded_voxels(net: Net, axis: int) -> tuple[int, int]:
    """Return how many voxels at the near and the far face of a window see what lies outside it."""
    net = positive(net)
    halo, stride, scale = net.halo[axis], net.stride[axis], net.scale[axis]
    outside = align_up(halo + stride, stride)
    size = 2 * outside
    near, far = torch.zeros(1, outside + size), torch.zeros(1, size + outside)
    near[:, :outside], far[:, size:] = 1.0, 1.0
    inner_near = acts(net, axis, near)[0, outside * scale :]
    inner_far = acts(net, axis, far)[0, : size * scale]
    return -(-int(inner_near.sum()) // scale), -(-int(inner_far.sum()) // scale)


def awake(net: Net) -> Net:
    """Return `net` with no weight or bias left at zero, so that every layer is heard."""
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        if parameter.detach().count_nonzero() == 0:
            nn.init.normal_(parameter, std=0.1, generator=generator)
    return net


def in_integers(net: Net) -> Net:
    """Return `net` in float64 with weights -1, 0 and 1: its sums are exact, in whatever order they are taken.

    In float32 the last bit may depend on the window's shape, as the order does that oneDNN sums in.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in net.double().parameters():
        parameter.data = torch.randint(-1, 2, parameter.shape, generator=generator).double()
    if hasattr(net, "last"):
        net.last.weight.data *= 2.0**-25  # exact as well, and tanh still hears it
    return net


def random_volume(shape: Shape) -> np.ndarray:
    """Return noise, float32, in steps of 1/128, as bytes normalised to -1..1 would be."""
    return (np.random.default_rng(0).integers(-128, 128, shape) / 128).astype(np.float32)


def aligned_halo(net: Net) -> Shape:
    return tuple(align_up(h, s) for h, s in zip(net.halo, net.stride, strict=True))


def run_whole(net: Net, volume: np.ndarray) -> Tensor:
    """Return the reference: `volume` extended once by mirroring, run in one piece, cropped."""
    halo = aligned_halo(net)
    extended = np.pad(volume, [(h, h) for h in halo], mode="reflect")
    return run_cropped(net, extended, halo)


def run_tiled(net: Net, volume: np.ndarray, halo: Shape) -> Tensor:
    """Return `volume` run in windows that keep twice the stride, with `halo` voxels around each."""
    extended = np.pad(volume, [(h, h) for h in halo], mode="reflect")
    tile = tuple(2 * s for s in net.stride)
    shape = [n * s for n, s in zip(volume.shape, net.scale, strict=True)]
    out = torch.empty(shape, dtype=weights_dtype(net))  # z,y,x
    for start in itertools.product(*(range(0, n, t) for n, t in zip(volume.shape, tile, strict=True))):
        window = extended[tuple(slice(a, a + t + 2 * h) for a, t, h in zip(start, tile, halo, strict=True))]
        kept = tuple(slice(a * s, (a + t) * s) for a, t, s in zip(start, tile, net.scale, strict=True))
        out[kept] = run_cropped(net, window, halo)
    return out


def run_cropped(net: Net, window: np.ndarray, halo: Shape) -> Tensor:
    out = torch.from_numpy(run(net, np.ascontiguousarray(window)))
    return out[tuple(slice(h * s, n - h * s) for h, s, n in zip(halo, net.scale, out.shape, strict=True))]
