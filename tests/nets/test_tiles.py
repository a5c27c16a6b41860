"""Tiles of the shipped nets: with the aligned halo they equal the whole bit for bit, with less they do not."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from nets import Net, align_up, run, weights_dtype
from torch import Tensor, nn

from volpipe.geometry.grid import Shape
from volpipe.models.srgan3d import srgan3d
from volpipe.models.unet3d import unet3d
from volpipe.models.upsample import upsample

TILED: dict[str, Callable[[], Net]] = {
    "unet": lambda: unet3d(features=(2, 3, 4)),
    "r5": lambda: srgan3d(features=2, num_blocks=1),
    "z4": lambda: srgan3d(variant="z4", features=2, num_blocks=1),
    "upsample": lambda: upsample(scale=(3, 2, 1), mode="linear"),
}


@pytest.mark.parametrize("name", TILED)
def test_tiles_with_the_aligned_halo_equal_the_whole_bit_for_bit(name: str) -> None:
    net = in_integers(TILED[name]())
    volume = random_volume(tuple(n * s for n, s in zip((2, 4, 4), net.volpipe["stride"], strict=True)))
    whole = run_whole(net, volume)
    assert whole.std() > 0.01
    assert torch.equal(run_tiled(net, volume, aligned_halo(net)), whole)


@pytest.mark.parametrize("name", TILED)
def test_tiles_with_one_stride_less_differ_from_the_whole(name: str) -> None:
    net = in_integers(TILED[name]())
    volume = random_volume(tuple(2 * s for s in net.volpipe["stride"]))
    whole = run_whole(net, volume)
    for axis, (halo, stride) in enumerate(zip(aligned_halo(net), net.volpipe["stride"], strict=True)):
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
    volume = random_volume(tuple(4 * s for s in net.volpipe["stride"]))
    whole, tiled = run_whole(net, volume), run_tiled(net, volume, aligned_halo(net))
    assert whole.dtype == torch.float32
    torch.testing.assert_close(tiled, whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TILED)
def test_number_of_threads_does_not_change_a_bit(name: str) -> None:
    net = awake(TILED[name]())
    window = random_volume(tuple(8 * s for s in net.volpipe["stride"]))
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


# ---- run whole and in tiles


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
    return tuple(align_up(h, s) for h, s in zip(net.volpipe["halo"], net.volpipe["stride"], strict=True))


def run_whole(net: Net, volume: np.ndarray) -> Tensor:
    """Return the reference: `volume` extended once by mirroring, run in one piece, cropped."""
    halo = aligned_halo(net)
    extended = np.pad(volume, [(h, h) for h in halo], mode="reflect")
    return run_cropped(net, extended, halo)


def run_tiled(net: Net, volume: np.ndarray, halo: Shape) -> Tensor:
    """Return `volume` run in windows that keep twice the stride, with `halo` voxels around each."""
    extended = np.pad(volume, [(h, h) for h in halo], mode="reflect")
    tile = tuple(2 * s for s in net.volpipe["stride"])
    shape = [n * s for n, s in zip(volume.shape, net.volpipe["scale"], strict=True)]
    out = torch.empty(shape, dtype=weights_dtype(net))  # z,y,x
    for start in itertools.product(*(range(0, n, t) for n, t in zip(volume.shape, tile, strict=True))):
        window = extended[tuple(slice(a, a + t + 2 * h) for a, t, h in zip(start, tile, halo, strict=True))]
        kept = tuple(slice(a * s, (a + t) * s) for a, t, s in zip(start, tile, net.volpipe["scale"], strict=True))
        out[kept] = run_cropped(net, window, halo)
    return out


def run_cropped(net: Net, window: np.ndarray, halo: Shape) -> Tensor:
    out = torch.from_numpy(run(net, np.ascontiguousarray(window)))
    return out[tuple(slice(h * s, n - h * s) for h, s, n in zip(halo, net.volpipe["scale"], out.shape, strict=True))]
