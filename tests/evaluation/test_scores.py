"""Scores equal scikit-image's on what it can hold, whatever the blocks; and known answers where it has none."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tifffile
from scored import evaluated, image_scores_of, label_pair, save, scores_of, smooth_pair
from skimage import metrics

from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.evaluation.interpolate import interpolated
from volpipe.evaluation.label_scores import overlaps, total
from volpipe.evaluation.psnr import PSNR
from volpipe.evaluation.score import ImageTotal, Score, ScoredBlock, Scores
from volpipe.evaluation.scores import label_scores
from volpipe.evaluation.shell_correlation import CUBE, crossing, shell_correlation, shells
from volpipe.evaluation.ssim import SSIM
from volpipe.geometry.grid import Box
from volpipe.volumes.storage.tensorstore import transferred
from volpipe.volumes.volume import open_volume

TRUTH, FOUND = label_pair((5, 4, 6), (6, 7, 5))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# ---- images


def of_one_block(score: Score[ImageTotal], data: np.ndarray, truth: np.ndarray, data_range: float) -> float:
    """Return a score of one number of images (z, y, x), float64, which are one block."""
    assert score.sums is not None
    block = ScoredBlock(data, truth, tuple(slice(0, n) for n in data.shape), data_range)
    return float(score.values(ImageTotal({score.name: score.sums(block)}, data_range))[score.name])


@pytest.mark.parametrize("block", [(128, 128, 128), (16, 32, 9), (64, 64, 64)])
@pytest.mark.parametrize("options", [{}, {"roi": "2:40,20:141,:", "margin": (3, 0, 4)}], ids=["all", "box"])
def test_image_scores_are_those_of_scikit_image_whatever_the_blocks(
    block: tuple[int, int, int], options: dict[str, object]
) -> None:
    part = Box((5, 20, 4), (37, 141, 33)) if options else Box.from_shape((41, 150, 37))
    made, truth = (data[part.slices] for data in smooth_pair())
    assert plan_evaluation("made.npy", "truth.npy", **options).box == part  # type: ignore[arg-type]
    scores = image_scores_of(block=block, **options)["output"]
    assert scores.psnr == pytest.approx(metrics.peak_signal_noise_ratio(truth, made, data_range=255), 1e-9)
    assert scores.ssim == pytest.approx(metrics.structural_similarity(truth, made, data_range=255), rel=1e-9)


def test_what_is_the_same_scores_full_and_an_offset_as_its_square() -> None:
    data = np.random.default_rng(3).integers(0, 256, (20, 20, 20)).astype(np.float64)
    same, brighter = (of_one_block(PSNR, data + more, data, 255.0) for more in (0, 10))
    assert same == np.inf and of_one_block(SSIM, data, data, 255.0) == pytest.approx(1.0)
    assert brighter == pytest.approx(20 * np.log10(255 / 10))


def test_similarity_of_values_far_from_zero_is_that_of_values_nearer_to_it() -> None:
    """Where the range is small beside them, their squares leave nothing of a variance."""
    rng = np.random.default_rng(6)
    truth = rng.random((24, 24, 24))
    made = truth + rng.normal(0, 0.2, truth.shape)
    scored = [of_one_block(SSIM, made + far, truth + far, 1.0) for far in (1e3, 1e6)]
    assert scored[1] == pytest.approx(scored[0], abs=1e-6)


# ---- Fourier shell correlation


def test_two_pictures_with_noise_of_their_own_correlate_by_their_signal() -> None:
    """With white signal and noise of equal power in both, the correlation of every shell is 1/2."""
    rng = np.random.default_rng(4)
    spectra = np.zeros((2, 3, CUBE // 2 + 1))
    for _ in range(6):
        signal, one, other = rng.normal(size=(3, CUBE, CUBE, CUBE))
        spectra += shells(signal + one, signal + other)
    for part in spectra:
        np.testing.assert_allclose(shell_correlation(part)[8:], 0.5, atol=0.06)


def test_a_picture_without_its_fine_detail_correlates_up_to_where_that_begins() -> None:
    rng = np.random.default_rng(5)
    truth, frequency = rng.normal(size=(CUBE,) * 3), np.fft.fftfreq(CUBE)
    length = np.sqrt(frequency[:, None, None] ** 2 + frequency[:, None] ** 2 + frequency**2)
    blurred = np.fft.ifftn(np.fft.fftn(truth) * (length < 0.25)).real + 0.3 * rng.normal(size=truth.shape)
    curve = shell_correlation(shells(blurred, truth)[0])
    assert crossing(curve, 0.5) == pytest.approx(0.25, abs=0.02)
    assert curve[4:14].min() > 0.9 and curve[19:].max() < 0.2


def test_detail_lost_along_z_is_seen_along_z_alone() -> None:
    rng = np.random.default_rng(6)
    truth = rng.normal(size=(CUBE,) * 3)
    along_z = np.abs(np.fft.fftfreq(CUBE))[:, None, None]
    made = np.fft.ifftn(np.fft.fftn(truth) * (along_z < 0.2)).real + 0.1 * rng.normal(size=truth.shape)
    everywhere, cone = (shell_correlation(part) for part in shells(made, truth))
    assert cone[20:].max() < 0.35 and everywhere[20:30].min() > cone[20:30].max()


def test_a_curve_is_cut_between_the_shells() -> None:
    assert crossing(np.array([1.0, 0.9, 0.3, 0.6]), 0.5) == pytest.approx((1 + 4 / 6) / CUBE)
    assert crossing(np.array([1.0, 0.9]), 0.5) is None


# ---- labels


@pytest.mark.parametrize(
    ("dtype", "number", "ignore"),
    [
        (np.uint64, 0xFFFFFFFFFFFFFFFD, None), (np.uint32, 0xFFFFFFFF, None), (np.int64, -1, None),
        (np.int32, -3, None), (np.int16, -2, 2**64 - 2), (np.uint16, 77, 77), (np.uint8, 200, (199, 200)),
    ],
)  # fmt: skip
def test_voxels_of_which_the_reference_knows_nothing_are_left_out(
    dtype: type, number: int, ignore: int | tuple[int, ...] | None
) -> None:
    truth = np.kron(np.arange(12).reshape(2, 2, 3), np.ones((4, 8, 8), int)).astype(dtype)
    made, known = np.roll(truth, 3, axis=2), np.ones(truth.shape, bool)
    known[:, 4:10] = False
    save(made=np.where(np.arange(24) < 2, dtype(number), made), truth=np.where(known, truth, dtype(number)))
    result = evaluated(kind="labels", ignore=ignore)
    cleared = np.where(np.arange(24) < 2, 0, made)
    expected = label_scores(overlaps(cleared[known], truth[known]))
    assert result.scores == Scores({**expected.values, "num_ignored": int((~known).sum())})
    assert [note for note in result.notes if f"{(~known).sum():,} voxels of the reference" in note]


def test_reserved_numbers_that_are_counted_are_told() -> None:
    labels = np.kron(np.arange(12).reshape(2, 2, 3), np.ones((4, 8, 8), int))
    labels[labels == 11] = -1
    save(made=labels)
    result = evaluated(names=("made.npy", "made.npy"), kind="labels", ignore=())
    assert isinstance(result.scores, Scores)
    assert (result.scores.num_truth, result.scores.num_reserved) == (11, 2)
    assert "2 objects of" in result.notes[0] and "(-1, -2, -3); name these to --ignore" in result.notes[0]


def test_label_scores_are_those_of_scikit_image_whatever_the_blocks() -> None:
    parts = zip(np.array_split(FOUND, 7, 1), np.array_split(TRUTH, 7, 1), strict=True)
    scored = label_scores(total(pickle.loads(pickle.dumps(overlaps(*part))) for part in parts))
    known = metrics.variation_of_information(TRUTH, FOUND, ignore_labels=[0])
    assert (scored.split, scored.merge) == pytest.approx(known) and min(known) > 0.1
    assert scored.rand_error == pytest.approx(metrics.adapted_rand_error(TRUTH, FOUND)[0])
    save(made=FOUND.astype(np.uint16), truth=TRUTH.astype(np.uint16))
    assert scores_of(kind="labels", block=(8, 16, 16)) == label_scores(overlaps(FOUND, TRUTH))


@pytest.mark.parametrize("above", [0, 2**32 - 20, 2**40])
def test_a_table_counts_the_voxels_of_each_pair_whatever_the_size_of_its_numbers(above: int) -> None:
    found, truth = (data.astype(np.uint64) + np.uint64(above) for data in (FOUND, TRUTH))
    pairs, counts = np.unique(np.stack([truth.ravel(), found.ravel()]), axis=1, return_counts=True)
    np.testing.assert_array_equal(overlaps(found, truth), np.vstack([pairs, counts.astype(np.uint64)]))
    halves = [overlaps(found[:9], truth[:9]), overlaps(found[9:], truth[9:])]
    np.testing.assert_array_equal(total(halves), overlaps(found, truth))


def test_object_scores_are_those_of_every_pair_compared() -> None:
    scored = label_scores(overlaps(FOUND, TRUTH))
    objects = [[data == number for number in np.unique(data[data > 0])] for data in (TRUTH, FOUND)]
    ious = np.array([[(t & f).sum() / (t | f).sum() for f in objects[1]] for t in objects[0]])
    hits = [(ious >= threshold).sum() for threshold in np.arange(0.5, 1, 0.05) + 1e-9]
    precisions = [hit / (sum(ious.shape) - hit) for hit in hits]
    assert (scored.mean_iou, scored.precision_50) == pytest.approx((ious.max(axis=1).mean(), precisions[0]))
    assert scored.mean_precision == pytest.approx(np.mean(precisions))
    assert 0 < scored.mean_precision < scored.precision_50 < 1
    assert scored.foreground_iou == pytest.approx(((TRUTH > 0) & (FOUND > 0)).sum() / ((TRUTH > 0) | (FOUND > 0)).sum())
    assert (scored.num_truth, scored.num_found) == ious.shape


def test_label_scores_of_extremes() -> None:
    """One segment of four objects merges two bits; no reference judges nothing; an IoU of 0.5 could be either half."""
    quarters, ones, halves = np.repeat([1, 2, 3, 4], 16), np.ones(64, int), np.repeat([1, 2], 32)
    merged = label_scores(overlaps(ones, quarters))
    assert (merged.split, merged.merge) == (0, pytest.approx(2.0))
    unjudged = label_scores(overlaps(np.arange(64), np.zeros(64, int)))
    assert np.isnan([unjudged.split, unjudged.merge, unjudged.rand_error, unjudged.mean_iou]).all()
    assert (unjudged.foreground_iou, unjudged.mean_precision, unjudged.num_truth, unjudged.num_found) == (0, 0, 0, 63)
    assert label_scores(overlaps(halves, ones)).precision_50 == 0
    assert np.isnan(label_scores(total([])).split)


# ---- interpolation


@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("factors", [(4, 1, 1), (2, 3, 1)])
def test_interpolation_is_that_of_scipy(method: str, factors: tuple[int, int, int]) -> None:
    from scipy import ndimage

    coarse = np.random.default_rng(7).integers(0, 256, (20, 14, 16)).astype(np.uint8)
    tifffile.imwrite("c.tif", coarse)
    places = [(np.arange(n * f) + 0.5) / f - 0.5 for n, f in zip(coarse.shape, factors, strict=True)]
    order, grid = {"nearest": 0, "linear": 1, "cubic": 3}[method], np.meshgrid(*places, indexing="ij")
    known = ndimage.map_coordinates(coarse.astype(float), grid, order=order, mode="mirror")
    for part in (Box.from_shape(known.shape), Box((11, 5, 3), (38, 13, 15))):
        finer = interpolated(open_volume("c.tif").open(), part, factors, method)
        np.testing.assert_allclose(finer, known[part.slices], atol=1e-4)


def test_interpolations_stand_beside_an_output_with_more_voxels() -> None:
    truth = np.broadcast_to(127 + 100 * np.sin(np.arange(64)[:, None, None] / 3), (64, 20, 20))
    coarse = np.rint(truth.reshape(16, 4, 20, 20).mean(1)).astype(np.uint8)
    save(truth=np.rint(truth).astype(np.uint8), coarse=coarse, made=np.repeat(coarse, 4, axis=0))
    scores = image_scores_of(given="coarse.npy", margin=(8, 0, 0))
    assert scores["output"] == scores["nearest"]  # which is what the output is
    assert scores["nearest"].psnr < scores["linear"].psnr < scores["cubic"].psnr


def test_a_score_sees_no_more_voxels_around_a_block_than_it_asks_for() -> None:
    """So that its sums stay the same whatever other scores reach for."""
    data = np.random.default_rng(8).random((2, 30, 20, 25))
    block = ScoredBlock(data[0], data[1], (slice(4, 12), slice(0, 20), slice(9, 22)))
    seen = block.with_margin(3)
    assert seen.own == (slice(3, 11), slice(0, 20), slice(3, 16))
    np.testing.assert_array_equal(seen.data, data[0, 1:15, :, 6:25])
    np.testing.assert_array_equal(seen.truth[seen.own], data[1, 4:12, :, 9:22])


def test_scores_are_attributes_and_travel_as_they_are() -> None:
    scores = Scores({"psnr": np.inf, "classes": [{"dice": np.nan, "num": 3}]})
    assert pickle.loads(pickle.dumps(scores)).psnr == np.inf
    with pytest.raises(AttributeError, match=r"^there is no score ssim; those are psnr, classes$"):
        _ = scores.ssim
    assert scores.to_json() == {"psnr": None, "classes": [{"dice": None, "num": 3}]}


def test_counters_are_nothing_while_tensorstore_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = transferred()
    monkeypatch.setitem(sys.modules, "tensorstore", ModuleType("tensorstore"))  # as it is before its body has run
    assert transferred().read <= before.read
