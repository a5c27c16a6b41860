"""Scores equal scikit-image's on what it can hold, whatever the blocks; and known answers where it has none."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import tifffile
from arrays import make
from command import giver
from scored import evaluated, image_scores_of, scores_of
from skimage import metrics

from volpipe.errors import RunError
from volpipe.evaluation import subject
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.evaluation.image_scores import CUBE, crossing, image_sums, psnr, shell_correlation, shells, ssim
from volpipe.evaluation.interpolate import interpolated
from volpipe.evaluation.label_scores import LabelScores, label_scores, overlaps, total
from volpipe.geometry.grid import Box
from volpipe.volumes.storage.tensorstore import transferred
from volpipe.volumes.volume import open_volume


@pytest.fixture
def pair(tmp_path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A smooth volume and a noisy one, (z, y, x), uint8, at truth.tif and made.tif."""
    rng = np.random.default_rng(1)
    z, y, x = np.mgrid[:41, :150, :37]
    truth = (127 + 80 * np.sin(z / 5 + y / 9) * np.cos(x / 4)).astype(np.uint8)
    made = np.clip(truth + rng.normal(0, 12, truth.shape), 0, 255).astype(np.uint8)
    tifffile.imwrite(tmp_path / "truth.tif", truth)
    tifffile.imwrite(tmp_path / "made.tif", made)
    return made, truth


@pytest.fixture
def labelled() -> tuple[np.ndarray, np.ndarray]:
    """Labels that split, merge and miss those of a reference, (z, y, x)."""
    rng = np.random.default_rng(2)
    truth = np.kron(rng.integers(0, 9, (5, 4, 6)), np.ones((6, 7, 5), int))
    found = np.where(truth == 3, 4, truth) * 2
    found[:9] += found[:9] > 0
    found[rng.random(found.shape) < 0.1] = 0
    return found, truth


# ---- images


def test_image_scores_are_those_of_scikit_image_whatever_the_blocks(
    pair: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, truth = pair
    found = plan_evaluation(str(tmp_path / "made.tif"), str(tmp_path / "truth.tif"))
    for block in ((128, 128, 128), (16, 32, 9), (64, 64, 64)):
        monkeypatch.setattr(subject, "BLOCK", block)
        scores = image_scores_of(found, tmp_path)
        assert scores["output"].psnr == pytest.approx(
            metrics.peak_signal_noise_ratio(truth, made, data_range=255), 1e-9
        )
        known = metrics.structural_similarity(truth, made, data_range=255)
        assert scores["output"].ssim == pytest.approx(known, rel=1e-9)


def test_a_box_is_scored_as_if_it_were_all_there_is(pair: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    made, truth = (data[5:37, 20:141, 4:33] for data in pair)
    found = plan_evaluation(
        str(tmp_path / "made.tif"), str(tmp_path / "truth.tif"), roi="2:40,20:141,:", margin=(3, 0, 4)
    )
    assert found.box == Box((5, 20, 4), (37, 141, 33))
    scores = image_scores_of(found, tmp_path)
    assert scores["output"].psnr == pytest.approx(metrics.peak_signal_noise_ratio(truth, made, data_range=255))
    assert scores["output"].ssim == pytest.approx(metrics.structural_similarity(truth, made, data_range=255))


def test_what_is_the_same_scores_full() -> None:
    data = np.random.default_rng(3).integers(0, 256, (20, 20, 20))
    sums = image_sums(data, data, (slice(0, 20),) * 3, 255.0)
    assert psnr(sums, 255.0) == np.inf
    assert ssim(sums) == pytest.approx(1.0)


def test_noise_of_known_strength_has_the_psnr_of_its_variance() -> None:
    truth = np.zeros((16, 16, 16))
    sums = image_sums(truth + 10.0, truth, (slice(0, 16),) * 3, 255.0)
    assert psnr(sums, 255.0) == pytest.approx(20 * np.log10(255 / 10))


def test_similarity_of_values_far_from_zero_is_that_of_values_nearer_to_it() -> None:
    """Where the range is small beside them, their squares leave nothing of a variance."""
    rng = np.random.default_rng(6)
    truth = rng.random((24, 24, 24))
    made = truth + rng.normal(0, 0.2, truth.shape)
    scored = [ssim(image_sums(made + far, truth + far, (slice(0, 24),) * 3, 1.0)) for far in (1e3, 1e6)]
    assert scored[1] == pytest.approx(scored[0], abs=1e-6)


# ---- Fourier shell correlation


def test_two_pictures_with_noise_of_their_own_correlate_by_their_signal() -> None:
    """With white signal and noise of equal power in both, the correlation of every shell is 1/2."""
    rng = np.random.default_rng(4)
    spectra = np.zeros((2, 3, CUBE // 2 + 1))
    for _ in range(6):
        signal = rng.normal(size=(CUBE,) * 3)
        spectra += shells(signal + rng.normal(size=signal.shape), signal + rng.normal(size=signal.shape))
    for part in spectra:
        curve = shell_correlation(part)
        np.testing.assert_allclose(curve[8:], 0.5, atol=0.06)


def test_a_picture_without_its_fine_detail_correlates_up_to_where_that_begins() -> None:
    rng = np.random.default_rng(5)
    truth = rng.normal(size=(CUBE,) * 3)
    frequency = np.fft.fftfreq(CUBE)
    length = np.sqrt(frequency[:, None, None] ** 2 + frequency[:, None] ** 2 + frequency**2)
    blurred = np.fft.ifftn(np.fft.fftn(truth) * (length < 0.25)).real + 0.3 * rng.normal(size=truth.shape)
    curve = shell_correlation(shells(blurred, truth)[0])
    cut = crossing(curve, 0.5)
    assert cut is not None
    assert cut == pytest.approx(0.25, abs=0.02)
    assert curve[4:14].min() > 0.9 and curve[19:].max() < 0.2


def test_detail_lost_along_z_is_seen_along_z_alone() -> None:
    rng = np.random.default_rng(6)
    truth = rng.normal(size=(CUBE,) * 3)
    along_z = np.abs(np.fft.fftfreq(CUBE))[:, None, None]
    made = np.fft.ifftn(np.fft.fftn(truth) * (along_z < 0.2)).real + 0.1 * rng.normal(size=truth.shape)
    everywhere, cone = (shell_correlation(part) for part in shells(made, truth))
    assert cone[20:].max() < 0.35
    assert everywhere[20:30].min() > cone[20:30].max()


def test_a_curve_is_cut_between_the_shells() -> None:
    assert crossing(np.array([1.0, 0.9, 0.3, 0.6]), 0.5) == pytest.approx((1 + 4 / 6) / CUBE)
    assert crossing(np.array([1.0, 0.9]), 0.5) is None


# ---- labels


@pytest.mark.parametrize(
    ("dtype", "number", "ignore"),
    [
        (np.uint64, 0xFFFFFFFFFFFFFFFD, None),
        (np.uint32, 0xFFFFFFFF, None),
        (np.int64, -1, None),
        (np.int32, -3, None),
        (np.int16, -2, 2**64 - 2),
        (np.uint16, 77, 77),
        (np.uint8, 200, (199, 200)),
    ],
)
def test_voxels_of_which_the_reference_knows_nothing_are_left_out(
    dtype: type, number: int, ignore: int | tuple[int, ...] | None, tmp_path: Path
) -> None:
    truth = np.kron(np.arange(12).reshape(2, 2, 3), np.ones((4, 8, 8), int)).astype(dtype)
    made = np.roll(truth, 3, axis=2)
    known = np.ones(truth.shape, bool)
    known[:, 4:10] = False
    np.save(tmp_path / "made.npy", np.where(np.arange(24) < 2, dtype(number), made))
    np.save(tmp_path / "truth.npy", np.where(known, truth, dtype(number)))
    plan = plan_evaluation(str(tmp_path / "made.npy"), str(tmp_path / "truth.npy"), kind="labels", ignore=ignore)
    result = evaluated(plan, tmp_path)
    cleared = np.where(np.arange(24) < 2, 0, made)
    expected = label_scores(overlaps(cleared[known], truth[known]))
    assert isinstance(result.scores, LabelScores)
    assert result.scores == replace(expected, num_ignored=int((~known).sum()))
    assert [note for note in result.notes if f"{(~known).sum():,} voxels of the reference" in note]


def test_reserved_numbers_that_are_counted_are_told(tmp_path: Path) -> None:
    labels = np.kron(np.arange(12).reshape(2, 2, 3), np.ones((4, 8, 8), int))
    labels[labels == 11] = -1
    np.save(tmp_path / "labels.npy", labels)
    place = str(tmp_path / "labels.npy")
    result = evaluated(plan_evaluation(place, place, kind="labels", ignore=()), tmp_path)
    assert isinstance(result.scores, LabelScores)
    assert (result.scores.num_truth, result.scores.num_reserved) == (11, 2)
    assert "2 objects of" in result.notes[0] and "(-1, -2, -3); name these to --ignore" in result.notes[0]


def test_label_scores_are_those_of_scikit_image_whatever_the_blocks(labelled: tuple[np.ndarray, np.ndarray]) -> None:
    found, truth = labelled
    tables = [overlaps(f, t) for f, t in zip(np.array_split(found, 7, 1), np.array_split(truth, 7, 1), strict=True)]
    travelled = [pickle.loads(pickle.dumps(table)) for table in tables]
    scored = label_scores(total(travelled))
    split, merge = metrics.variation_of_information(truth, found, ignore_labels=[0])
    assert (scored.split, scored.merge) == pytest.approx((split, merge))
    assert scored.split > 0.1 and scored.merge > 0.1
    assert scored.rand_error == pytest.approx(metrics.adapted_rand_error(truth, found)[0])


@pytest.mark.parametrize("above", [0, 2**32 - 20, 2**40])
def test_a_table_counts_the_voxels_of_each_pair_whatever_the_size_of_its_numbers(
    labelled: tuple[np.ndarray, np.ndarray], above: int
) -> None:
    found, truth = (data.astype(np.uint64) + np.uint64(above) for data in labelled)
    pairs, counts = np.unique(np.stack([truth.ravel(), found.ravel()]), axis=1, return_counts=True)
    np.testing.assert_array_equal(overlaps(found, truth), np.vstack([pairs, counts.astype(np.uint64)]))
    halves = [overlaps(found[:9], truth[:9]), overlaps(found[9:], truth[9:])]
    np.testing.assert_array_equal(total(halves), overlaps(found, truth))


def test_object_scores_are_those_of_every_pair_compared(labelled: tuple[np.ndarray, np.ndarray]) -> None:
    found, truth = labelled
    scored = label_scores(overlaps(found, truth))
    ious = np.array(
        [
            [
                ((truth == t) & (found == f)).sum() / ((truth == t) | (found == f)).sum()
                for f in np.unique(found[found > 0])
            ]
            for t in np.unique(truth[truth > 0])
        ]
    )
    assert scored.mean_iou == pytest.approx(ious.max(axis=1).mean())
    hits = [(ious >= threshold).sum() for threshold in np.arange(0.5, 1, 0.05) + 1e-9]
    precisions = [hit / (sum(ious.shape) - hit) for hit in hits]
    assert scored.precision_50 == pytest.approx(precisions[0])
    assert scored.mean_precision == pytest.approx(np.mean(precisions))
    assert 0 < scored.mean_precision < scored.precision_50 < 1
    assert scored.foreground_iou == pytest.approx(((truth > 0) & (found > 0)).sum() / ((truth > 0) | (found > 0)).sum())
    assert (scored.num_truth, scored.num_found) == ious.shape


def test_one_segment_splits_nothing_and_merges_all() -> None:
    truth = np.repeat([1, 2, 3, 4], 16).reshape(4, 4, 4)
    scored = label_scores(overlaps(np.ones_like(truth), truth))
    assert (scored.split, scored.merge) == (0, pytest.approx(2.0))  # of four equal labels, two bits


def test_a_reference_without_labels_judges_nothing() -> None:
    found = np.arange(64).reshape(4, 4, 4)
    scored = label_scores(overlaps(found, np.zeros_like(found)))
    assert np.isnan([scored.split, scored.merge, scored.rand_error, scored.mean_iou]).all()
    assert (scored.foreground_iou, scored.mean_precision, scored.num_truth, scored.num_found) == (0, 0, 0, 63)


def test_two_halves_of_an_object_are_no_matches_of_it() -> None:
    truth = np.ones((4, 4, 4), int)
    halves = np.repeat([1, 2], 32).reshape(4, 4, 4)
    assert label_scores(overlaps(halves, truth)).precision_50 == 0  # an IoU of exactly 0.5: either could be the one


def test_labels_are_scored_across_blocks(labelled: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    found, truth = labelled
    tifffile.imwrite(tmp_path / "f.tif", found.astype(np.uint16))
    tifffile.imwrite(tmp_path / "t.tif", truth.astype(np.uint16))
    plan = plan_evaluation(str(tmp_path / "f.tif"), str(tmp_path / "t.tif"), kind="labels")
    assert scores_of(plan, tmp_path) == label_scores(overlaps(found, truth))


# ---- interpolation


@pytest.mark.parametrize("method", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("factors", [(4, 1, 1), (2, 3, 1)])
def test_interpolation_is_that_of_scipy(method: str, factors: tuple[int, int, int], tmp_path: Path) -> None:
    from scipy import ndimage

    coarse = np.random.default_rng(7).integers(0, 256, (20, 14, 16)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "c.tif", coarse)
    places = [(np.arange(n * f) + 0.5) / f - 0.5 for n, f in zip(coarse.shape, factors, strict=True)]
    order = {"nearest": 0, "linear": 1, "cubic": 3}[method]
    grid = np.meshgrid(*places, indexing="ij")
    known = ndimage.map_coordinates(coarse.astype(float), grid, order=order, mode="mirror")
    reader = open_volume(tmp_path / "c.tif").open()
    whole = Box.from_shape(known.shape)
    np.testing.assert_allclose(interpolated(reader, whole, factors, method), known, atol=1e-4)
    part = Box((11, 5, 3), (38, 13, 15))
    np.testing.assert_allclose(interpolated(reader, part, factors, method), known[part.slices], atol=1e-4)


def test_interpolations_stand_beside_an_output_with_more_voxels(tmp_path: Path) -> None:
    z = np.arange(64)[:, None, None]
    truth = np.broadcast_to(127 + 100 * np.sin(z / 3), (64, 20, 20))
    tifffile.imwrite(tmp_path / "truth.tif", np.rint(truth).astype(np.uint8))
    coarse = np.rint(truth.reshape(16, 4, 20, 20).mean(1)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "coarse.tif", coarse)
    tifffile.imwrite(tmp_path / "made.tif", np.repeat(coarse, 4, axis=0))
    found = plan_evaluation(
        str(tmp_path / "made.tif"), str(tmp_path / "truth.tif"), given=str(tmp_path / "coarse.tif"), margin=(8, 0, 0)
    )
    scores = image_scores_of(found, tmp_path)
    assert scores["output"] == scores["nearest"]  # which is what the output is
    assert scores["nearest"].psnr < scores["linear"].psnr < scores["cubic"].psnr


@pytest.fixture
def cut(tmp_path: Path) -> tuple[Path, bytes]:
    """A chunk file of made.zarr that was cut, so that block 1 of three cannot be read, and what it held."""
    data = np.random.default_rng(7).integers(0, 256, (300, 30, 30)).astype(np.uint8)
    for name, values in (("made", data), ("truth", data // 2)):
        make(tmp_path / f"{name}.zarr", values, chunks=(32, 30, 30))
    chunk = tmp_path / "made.zarr" / "c" / "5" / "0" / "0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[: len(whole) // 2])
    return chunk, whole


# ---- the command


def test_the_command_prints_and_writes_what_it_found(
    pair: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made, truth = pair
    give = giver(tmp_path, monkeypatch, capsys)
    base = ("evaluate", "made.tif", "truth.tif", "--config", "threads")
    ended = give(*base, "--json", "s.json", "--picture", "p.png")
    assert ended.code == 0, ended.err
    known = metrics.peak_signal_noise_ratio(truth, made, data_range=255)
    assert ["output", f"{known:.2f}"] in [line.split()[:2] for line in ended.out.splitlines()]
    told = json.loads((tmp_path / "s.json").read_text())
    assert told["scores"]["output"]["psnr"] == pytest.approx(known)
    assert told["scores"]["output"]["half"] is None  # no cube fits
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    refused = give(*base, "--labels")
    assert refused.code == 2
    assert "made.tif looks like an image, not like labels: of neighbouring voxels in" in " ".join(refused.err.split())
    assert give(*base, "--margin", "4").err == "volpipe: --margin '4': write three numbers, z,y,x, such as 4,0,0\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.tif", "p.png", "s.json", "truth.tif"]


def test_the_command_names_blocks_without_scores_and_writes_none(
    cut: tuple[Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(tmp_path, monkeypatch, capsys)
    command = ("evaluate", "made.zarr", "truth.zarr", "--config", "threads", "--json", "s.json")
    ended = give(*command)
    assert (ended.code, ended.out, (tmp_path / "s.json").exists()) == (1, "", False)
    words = " ".join(ended.err.split())
    assert "128:256,0:30,0:30" in words and "1 part is missing; run the same command again" in words
    strict = give(*command, "--strict")
    assert (strict.code, strict.out, (tmp_path / "s.json").exists()) == (1, "", False)
    chunk, whole = cut
    chunk.write_bytes(whole)
    assert give(*command).code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.zarr", "s.json", "truth.zarr"]


def test_a_folder_of_other_work_is_left_alone(pair: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    (tmp_path / "scores.run").mkdir()
    (tmp_path / "scores.run" / "plan.json").write_text("{}")
    found = plan_evaluation(str(tmp_path / "made.tif"), str(tmp_path / "truth.tif"))
    with pytest.raises(RunError, match=r"scores\.run holds the run of a net"):
        evaluated(found, tmp_path)
    assert (tmp_path / "scores.run" / "plan.json").read_text() == "{}"


@pytest.mark.parametrize("option", ["--json", "--picture"])
@pytest.mark.parametrize(
    ("target", "why"), [("gone/x.png", "there is no folder gone"), ("folder.png", "it is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_scored(
    option: str,
    target: str,
    why: str,
    pair: tuple[np.ndarray, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder.png").mkdir()
    give = giver(tmp_path, monkeypatch, capsys)
    ended = give("evaluate", "made.tif", "truth.tif", "--config", "threads", option, target)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"volpipe: {option} {target}: {why}")


def test_sums_travel_as_they_are() -> None:
    rng = np.random.default_rng(8)
    sums = image_sums(rng.random((64,) * 3), rng.random((64,) * 3), (slice(0, 64),) * 3, 1.0)
    again = pickle.loads(pickle.dumps(sums))
    np.testing.assert_array_equal(again.spectra, sums.spectra)
    assert (again.num, again.squares, again.num_windows, again.similarity) == (
        sums.num, sums.squares, sums.num_windows, sums.similarity
    )  # fmt: skip
    assert isinstance(label_scores(total([])), LabelScores)


def test_counters_are_nothing_while_tensorstore_is_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = transferred()
    monkeypatch.setitem(sys.modules, "tensorstore", ModuleType("tensorstore"))  # as it is before its body has run
    assert transferred().read <= before.read
