"""What an evaluation refuses, and blocks that are lost: set aside, and scored by the same call."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
from arrays import make
from inline import Inline
from scored import Here, evaluated, image_scores_of, scores_of
from skimage import metrics
from volumes import noise

import volpipe as vp
from volpipe.errors import PlanError, RunStopped, WorkerLost
from volpipe.evaluation import subject
from volpipe.evaluation.driver import EvaluationWork, finish
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.geometry.grid import Box
from volpipe.runs.run_folder import RunFolder


class Broken(Here):
    """Workers that cannot do one block."""

    def __init__(self, block: int) -> None:
        super().__init__()
        self._block = block

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        future = super().submit(app, *arguments)
        if self._block in arguments[1]:
            future = Future()
            future.set_exception(WorkerLost("killed"))
        return future


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "give --roi, a box that both have"),
        ({"roi": "0:41,0:150,0:37", "margin": (21, 0, 0)}, "is empty or leaves the output"),
        ({"roi": ":,:,:"}, "is empty or leaves the output"),
    ],
)
def test_volumes_that_do_not_fit_are_refused(
    pair: tuple[np.ndarray, np.ndarray], tmp_path: Path, options: dict[str, Any], sentence: str
) -> None:
    tifffile.imwrite(tmp_path / "small.tif", pair[0][:40])
    with pytest.raises(PlanError, match=sentence):
        plan_evaluation(str(tmp_path / "small.tif"), str(tmp_path / "truth.tif"), **options)


def test_an_output_of_a_part_is_refused_beside_a_reference_that_is_not_cut_likewise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "raw.zarr", noise((24, 24, 24)))
    part = {"net.name": "identity", "input.roi": "8:24,0:24,4:24"}
    for out in ("made.zarr", "cut.zarr"):
        vp.run("raw.zarr", out=out, site=Inline(), settings=[f"{key}={value}" for key, value in part.items()])
    with pytest.raises(PlanError, match=r"shows the box 8:24,0:24,4:24 of its input.* net.name=identity --roi 8:24,0"):
        plan_evaluation("made.zarr", "raw.zarr", roi="8:16,0:8,4:12")
    scores = image_scores_of(plan_evaluation("made.zarr", "cut.zarr", roi="8:16,0:8,4:12"), tmp_path)
    assert scores["output"].psnr == np.inf


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (
            {"offset": [0.0, 40.0, 0.0]},
            r"axis y: the output begins at 0 nm, the reference at 40 nm: .* or give --any-pl",
        ),
        ({"resolution": [40.0, 4.0, 8.0]}, r"axis x: voxels of the output are 4 nm long, of the reference 8 nm"),
    ],
)
def test_a_reference_that_lies_elsewhere_is_refused_unless_that_is_meant(
    reference: dict[str, list[float]], sentence: str, tmp_path: Path
) -> None:
    place = {"resolution": [40.0, 4.0, 4.0]}
    with h5py.File(tmp_path / "pair.h5", "w") as file:
        for name, attributes in (("made", place), ("truth", place | reference)):
            file.create_dataset(name, data=noise((9, 20, 20))).attrs.update(attributes)
    made, truth = (str(tmp_path / "pair.h5" / name) for name in ("made", "truth"))
    with pytest.raises(PlanError, match=sentence):
        plan_evaluation(made, truth)
    assert image_scores_of(plan_evaluation(made, truth, any_place=True), tmp_path)["output"].psnr == np.inf


def test_a_reference_without_a_voxel_size_is_scored_with_a_note(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "made.h5", "w") as file:
        file.create_dataset("made", data=noise((9, 20, 20))).attrs["resolution"] = [40.0, 4.0, 4.0]
    np.save(tmp_path / "truth.npy", noise((9, 20, 20)))
    (note,) = plan_evaluation(str(tmp_path / "made.h5"), str(tmp_path / "truth.npy")).notes
    assert "truth.npy has no voxel size, so that nobody knows whether it lies where the output does" in note


def test_a_reference_of_floats_needs_a_range(pair: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "f.tif", pair[1].astype(np.float32))
    with pytest.raises(PlanError, match=r"give --data-range"):
        plan_evaluation(str(tmp_path / "made.tif"), str(tmp_path / "f.tif"))
    plan = plan_evaluation(str(tmp_path / "made.tif"), str(tmp_path / "f.tif"), data_range=100.0)
    known = metrics.peak_signal_noise_ratio(pair[1], pair[0], data_range=100)
    scores = image_scores_of(plan, tmp_path)
    assert scores["output"].psnr == pytest.approx(known)


@pytest.mark.parametrize("data_range", [0.0, -1.0, np.nan, np.inf])
def test_a_range_that_is_no_difference_is_refused(
    pair: tuple[np.ndarray, np.ndarray], data_range: float, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match="give a number above 0"):
        plan_evaluation(str(tmp_path / "made.tif"), str(tmp_path / "truth.tif"), data_range=data_range)


@pytest.mark.parametrize("name", ["made", "truth"])
def test_what_is_no_number_stops_it_wherever_it_is(name: str, tmp_path: Path) -> None:
    for each in ("made", "truth"):
        data = np.ones((9, 9, 9), np.float32)
        data[3, 3, 3] = np.nan if each == name else 1
        np.save(tmp_path / f"{each}.npy", data)
    found = plan_evaluation(str(tmp_path / "made.npy"), str(tmp_path / "truth.npy"), data_range=1.0)
    where = r"0:9,0:9,0:9"
    sentence = (
        rf"(?m)^comparing voxels \(evaluate\) failed, .*: .*{name}\.npy has NaN or infinite voxels in {where}.*--roi$"
    )
    with pytest.raises(RunStopped, match=sentence):
        evaluated(found, tmp_path)


def test_a_lost_worker_costs_its_blocks_and_three_stop_it(pair: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    found = plan_evaluation(str(tmp_path / "made.tif"), str(tmp_path / "truth.tif"))
    whole = scores_of(found, tmp_path)
    losing = Here(lost=2)
    assert scores_of(found, tmp_path, losing) == whole
    assert sorted(losing.blocks) == [0, 0, 1, 1]
    with pytest.raises(
        RunStopped, match=r"(?m)^comparing voxels \(evaluate\) failed for 2 parts and worked for none, .* killed$"
    ):
        evaluated(found, tmp_path, Here(lost=100))


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


def test_a_block_that_cannot_be_read_is_set_aside_and_scored_by_the_same_call(
    cut: tuple[Path, bytes], tmp_path: Path
) -> None:
    found = plan_evaluation(str(tmp_path / "made.zarr"), str(tmp_path / "truth.zarr"))
    first = evaluated(found, tmp_path, workers := Here())
    assert first.scores is None
    (missing,) = first.missing
    assert (missing.stage, missing.unit) == ("evaluate", 1)
    assert str(tmp_path / "made.zarr") in missing.reason
    assert missing.box == Box((128, 0, 0), (256, 30, 30))
    assert sorted(set(workers.blocks)) == [0, 1, 2]

    chunk, whole = cut
    chunk.write_bytes(whole)
    second = evaluated(found, tmp_path, workers := Here())
    assert workers.blocks == [1]
    assert second.scores == scores_of(found, tmp_path)
    assert not (tmp_path / "scores.run").exists()


def test_where_nothing_is_tolerated_the_first_block_that_cannot_be_read_stops_it(
    cut: tuple[Path, bytes], tmp_path: Path
) -> None:
    found = plan_evaluation(str(tmp_path / "made.zarr"), str(tmp_path / "truth.zarr"))
    with pytest.raises(RunStopped, match=r"^comparing voxels \(evaluate 1\) failed, so .* stops: .*made\.zarr"):
        evaluated(found, tmp_path, tolerated=0)


def test_scores_are_the_same_in_whatever_order_blocks_come_back(
    pair: tuple[np.ndarray, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "BLOCK", (16, 32, 9))
    found = plan_evaluation(str(tmp_path / "made.tif"), str(tmp_path / "truth.tif"))
    known = scores_of(found, tmp_path)
    for seed in (1, 2):
        shuffled = finish(EvaluationWork(found, RunFolder(tmp_path / "scores.run")), Inline(seed, slots=3).start)
        assert shuffled.scores == known


@pytest.mark.parametrize("changed", ["made", "truth", "coarse"])
def test_what_was_scored_of_volumes_that_have_changed_is_scored_again(changed: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(9)
    for name, length in (("made", 300), ("truth", 300), ("coarse", 150)):
        np.save(tmp_path / f"{name}.npy", rng.integers(0, 256, (length, 20, 20)).astype(np.uint8))
    names = (str(tmp_path / f"{name}.npy") for name in ("made", "truth", "coarse"))
    output, reference, given = names
    found = plan_evaluation(output, reference, given=given)
    assert [part.unit for part in evaluated(found, tmp_path, Broken(2)).missing] == [2]
    np.save(tmp_path / f"{changed}.npy", np.load(tmp_path / f"{changed}.npy")[::-1])
    again = evaluated(found, tmp_path, workers := Here())
    assert sorted(workers.blocks) == [0, 1, 2]
    assert again.scores == scores_of(found, tmp_path)
