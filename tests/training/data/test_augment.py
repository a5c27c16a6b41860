"""Pairs of tensors against numpy and scipy: noise by counter, moved voxels and labels, batches, held volumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from scipy import ndimage, stats

from volpipe.geometry.grid import Box
from volpipe.recipes.training import Steps, TrainRecipe
from volpipe.training.data.augment import PairMaker, bent, blurred, mirrored_part, normal, slipped
from volpipe.training.data.degrade import radius
from volpipe.training.data.samples import Sampler

SHAPE = (20, 24, 28)
EVERYTHING = {
    "degrade": {"blur": 1.0, "noise": 5.0, "uneven": 0.1, "missing": 0.1, "defocused": 0.3, "cut_out": 2},
    "samples": {"shape": (8, 12, 12), "gain": (0.5, 1.2), "offset": 0.2, "elastic": 1.5, "misaligned": 2},
}
GREY = np.random.default_rng(0).integers(0, 256, SHAPE).astype(np.uint8)
LABELS = np.random.default_rng(1).integers(0, 4, SHAPE).astype(np.uint16).repeat(1, 0)


@pytest.fixture
def sampler(tmp_path: Path) -> Sampler:
    tifffile.imwrite(tmp_path / "v.tif", GREY)
    tifffile.imwrite(tmp_path / "l.tif", LABELS)
    tree = {"net": {"name": "unet3d"}, "data": [{"path": "v.tif", "labels": "l.tif"}]} | EVERYTHING
    return Sampler(TrainRecipe.model_validate(tree), (1, 1, 1), str(tmp_path))


def test_noise_is_normal_and_independent_between_places_and_keys() -> None:
    first, second = normal([3, 4], 200_001, "cpu").numpy()
    assert stats.kstest(first, "norm").pvalue > 1e-3
    for other in (second, np.roll(first, 1), np.roll(first, 100_000), np.roll(first, 100_001)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 5 / len(first) ** 0.5
        assert abs(np.corrcoef(first**2, other**2)[0, 1]) < 5 / len(first) ** 0.5


def test_noise_of_a_key_does_not_depend_on_the_other_keys() -> None:
    torch.testing.assert_close(normal([7, 9], 1000, "cpu")[1], normal([9], 1000, "cpu")[0], rtol=0, atol=0)


def test_a_pair_does_not_depend_on_the_others_of_its_batch(sampler: Sampler) -> None:
    maker = PairMaker(sampler)
    together = maker.pair([maker.load(sampler.window(number)) for number in range(6)])
    for number in (5, 0, 3):
        alone = maker.pair([maker.load(sampler.window(number))])
        for one, batch in zip(alone, together, strict=True):
            torch.testing.assert_close(one[0], batch[number], rtol=0, atol=0)


def test_windows_of_a_held_volume_are_those_that_are_read(sampler: Sampler, tmp_path: Path) -> None:
    reading, holding = (PairMaker(sampler) for _ in range(2))
    room = sampler.sources[0].num_bytes
    holding.hold(room)
    assert holding.held and not reading.held
    for number in range(5):
        pairs = [maker.pair([maker.load(sampler.window(number))]) for maker in (reading, holding)]
        for read, held in zip(*pairs, strict=True):
            torch.testing.assert_close(read, held, rtol=0, atol=0)
    few = Sampler(sampler.recipe.model_copy(update={"train": Steps(steps=3)}), (1, 1, 1), str(tmp_path))
    for maker, most in ((PairMaker(sampler), room - 1), (PairMaker(few), room)):  # no room, or seen in part
        maker.hold(most)
        assert not maker.held


@pytest.mark.parametrize("box", [Box((0, 0, 0), (20, 24, 28)), Box((-3, 5, -30), (25, 9, 40))])
def test_a_part_is_mirrored_as_numpy_pads(box: Box) -> None:
    around = np.pad(GREY, 60, mode="reflect")[
        tuple(slice(a + 60, b + 60) for a, b in zip(box.start, box.stop, strict=True))
    ]
    np.testing.assert_array_equal(mirrored_part(torch.from_numpy(GREY)[None], box)[0].numpy(), around)


@pytest.mark.parametrize("deviation", [0.0, 0.4, 1.0])
def test_a_blur_is_that_of_scipy(deviation: float) -> None:
    data = GREY.astype(np.float32)
    both = torch.from_numpy(np.stack([data, data]))[:, None]
    made = blurred(both, [deviation, 1.3], (2, 3, 4))[0, 0].numpy()
    due = ndimage.gaussian_filter(data, deviation, mode="mirror", radius=radius(deviation)) if deviation else data
    np.testing.assert_allclose(made, due, atol=1e-3)


def test_voxels_bend_as_scipy_interpolates_and_labels_with_them() -> None:
    bends = np.random.default_rng(2).normal(0, 2, (3, 3, 3, 3)).astype(np.float32)
    places = np.meshgrid(*(np.linspace(0, 2, n) for n in SHAPE), indexing="ij")
    moved = [
        np.clip(ndimage.map_coordinates(bend, places, order=1) + index, 0, size - 1)
        for bend, index, size in zip(bends, np.indices(SHAPE), SHAPE, strict=True)
    ]
    smooth = ndimage.gaussian_filter(GREY.astype(np.float32), 1)
    data, labels = bent(torch.from_numpy(smooth)[None], torch.from_numpy(LABELS.astype(np.int32)), bends)
    np.testing.assert_allclose(data[0].numpy(), ndimage.map_coordinates(smooth, moved, order=1), atol=0.02)
    assert labels is not None
    due = LABELS[tuple(np.rint(moved).astype(int))]
    assert (labels.numpy() == due).mean() > 0.999  # but for places halfway


def test_slices_slip_with_their_labels_and_no_other() -> None:
    slips = np.zeros((20, 2), int)
    slips[4], slips[9:] = (2, -1), (-3, 0)
    data, labels = slipped(torch.from_numpy(GREY)[None], torch.from_numpy(LABELS.astype(np.int32)), slips)
    assert labels is not None
    for made, source in ((data[0].numpy(), GREY), (labels.numpy(), LABELS)):
        around = np.pad(source, ((0, 0), (3, 3), (3, 3)), mode="reflect")
        for z, (down, right) in enumerate(slips):
            np.testing.assert_array_equal(made[z], around[z, 3 + down : 27 + down, 3 + right : 31 + right])


@pytest.mark.parametrize("choice", [{"defocused": 0.5}, {"cut_out": 1}])
def test_the_input_alone_is_defocused_or_cut_out(tmp_path: Path, choice: dict[str, object]) -> None:
    tifffile.imwrite(tmp_path / "v.tif", GREY)
    tree = {"net": {"name": "identity"}, "data": [{"path": "v.tif"}], "degrade": choice | {"whole": False}}
    recipe = TrainRecipe.model_validate(tree | {"samples": {"shape": (12, 18, 18), "swap": False}})
    sampler = Sampler(recipe, (1, 1, 1), str(tmp_path))
    maker = PairMaker(sampler)
    inputs, truth = (part.numpy() for part in maker.pair([maker.load(sampler.window(number)) for number in range(60)]))
    windows = np.lib.stride_tricks.sliding_window_view(GREY, truth.shape[2:])
    for number in range(60):
        box = sampler.window(number).box
        flips = sampler.window(number).changes.flips
        np.testing.assert_allclose((np.flip(truth[number, 0], flips) + 1) * 127.5, windows[box.start], atol=1e-3)
    changed = inputs != truth
    if "cut_out" in choice:
        assert all(len(np.unique(part[flags])) == 1 for part, flags in zip(inputs, changed, strict=True))
        assert changed.mean() == pytest.approx(2.5 / 12 * (3.5 / 18) ** 2, rel=0.3)  # the mean box
    else:
        shares = changed.mean((1, 3, 4)).ravel()  # of each slice
        assert set((shares > 0.5).tolist()) == {True, False} and (np.abs(shares - 0.5) > 0.4).all()
        assert (shares > 0.5).mean() == pytest.approx(0.5, abs=0.1)
