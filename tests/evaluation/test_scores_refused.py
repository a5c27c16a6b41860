"""What an evaluation refuses, blocks that are lost and scored by the same call, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from arrays import make
from command import Give, giver
from inline import Inline
from scored import Workers, cut_pair, evaluated, image_scores_of, save, scores_of, smooth_pair
from skimage import metrics
from volumes import noise

import volpipe as vp
from volpipe.errors import PlanError, RunError, RunStopped
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.geometry.grid import Box

PLACED = {"resolution": [40.0, 4.0, 4.0]}
CUT = ("made.zarr", "truth.zarr")


@pytest.fixture(autouse=True)
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Return what gives a command in a folder of the test, where all works."""
    monkeypatch.chdir(tmp_path)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("output", "options", "sentence"),
    [
        ("small", {}, "give --roi, a box that both have"),
        ("small", {"roi": "0:41,0:150,0:37", "margin": (21, 0, 0)}, "is empty or leaves the output"),
        ("small", {"roi": ":,:,:"}, "is empty or leaves the output"),
        *(("made", {"data_range": value}, "give a number above 0") for value in (0.0, -1.0, np.nan, np.inf)),
    ],
)
def test_volumes_and_options_that_do_not_fit_are_refused(output: str, options: dict[str, Any], sentence: str) -> None:
    save(small=smooth_pair()[0][:40])
    with pytest.raises(PlanError, match=sentence):
        plan_evaluation(f"{output}.npy", "truth.npy", **options)


def test_a_reference_of_floats_needs_a_range() -> None:
    made, truth = smooth_pair()
    save(truth=truth.astype(np.float32))
    with pytest.raises(PlanError, match=r"give --data-range"):
        plan_evaluation("made.npy", "truth.npy")
    known = metrics.peak_signal_noise_ratio(truth, made, data_range=100)
    assert image_scores_of(data_range=100.0)["output"].psnr == pytest.approx(known)


def test_an_output_of_a_part_is_refused_beside_a_reference_that_is_not_cut_likewise(tmp_path: Path) -> None:
    make(tmp_path / "raw.zarr", noise((24, 24, 24)))
    settings = ["net.name=identity", "input.roi=8:24,0:24,4:24"]
    for out in ("made.zarr", "cut.zarr"):
        vp.run("raw.zarr", out=out, site=Inline(), settings=settings)
    with pytest.raises(PlanError, match=r"shows the box 8:24,0:24,4:24 of its input.* net.name=identity --roi 8:24,0"):
        plan_evaluation("made.zarr", "raw.zarr", roi="8:16,0:8,4:12")
    assert image_scores_of(names=("made.zarr", "cut.zarr"), roi="8:16,0:8,4:12")["output"].psnr == np.inf


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (
            {"offset": [0.0, 40.0, 0.0]},
            "axis y: the output begins at 0 nm, the reference at 40 nm: .* or give --any-p",
        ),
        ({"resolution": [40.0, 4.0, 8.0]}, "axis x: voxels of the output are 4 nm long, of the reference 8 nm"),
    ],
)
def test_a_reference_that_lies_elsewhere_is_refused_unless_that_is_meant(
    reference: dict[str, list[float]], sentence: str
) -> None:
    with h5py.File("pair.h5", "w") as file:
        for name, attributes in (("made", PLACED), ("truth", PLACED | reference)):
            file.create_dataset(name, data=noise((9, 20, 20))).attrs.update(attributes)
    names = ("pair.h5/made", "pair.h5/truth")
    with pytest.raises(PlanError, match=sentence):
        plan_evaluation(*names)
    assert image_scores_of(names=names, any_place=True)["output"].psnr == np.inf
    save(truth=noise((9, 20, 20)))
    (note,) = plan_evaluation(names[0], "truth.npy").notes
    assert "truth.npy has no voxel size, so that nobody knows whether it lies where the output does" in note


@pytest.mark.parametrize("name", ["made", "truth"])
def test_what_is_no_number_stops_it_wherever_it_is(name: str) -> None:
    ones = np.ones((9, 9, 9), np.float32)
    save(**{"made": ones, "truth": ones, name: np.where(np.arange(9) == 3, np.float32(np.nan), ones)})
    sentence = (
        r"(?m)^comparing voxels \(evaluate\) failed, .*: "
        rf".*{name}\.npy has NaN or infinite voxels in 0:9,0:9,0:9.*--roi$"
    )
    with pytest.raises(RunStopped, match=sentence):
        evaluated(data_range=1.0)


# ---- blocks that are lost


def test_a_lost_worker_costs_its_blocks_and_three_stop_it() -> None:
    smooth_pair()
    losing = Workers(lost=2)
    assert scores_of(losing) == scores_of()
    assert sorted(losing.blocks) == [0, 0, 1, 1]
    with pytest.raises(
        RunStopped, match=r"(?m)^comparing voxels \(evaluate\) failed for 2 parts and worked for none, .* killed$"
    ):
        evaluated(Workers(lost=100))


def test_a_block_that_cannot_be_read_is_set_aside_and_scored_by_the_same_call(tmp_path: Path) -> None:
    chunk, whole = cut_pair()
    with pytest.raises(RunStopped, match=r"^comparing voxels \(evaluate 1\) failed, so .* stops: .*made\.zarr"):
        evaluated(names=CUT, tolerated=0)
    first, again = Workers(), Workers()
    result = evaluated(first, names=CUT)
    (missing,) = result.missing
    assert (result.scores, missing.stage, missing.unit) == (None, "evaluate", 1)
    assert str(tmp_path / "made.zarr") in missing.reason and missing.box == Box((128, 0, 0), (256, 30, 30))
    chunk.write_bytes(whole)
    scores = evaluated(again, names=CUT).scores
    assert again.blocks == [1] and scores == scores_of(names=CUT)
    assert not Path("scores.run").exists()


@pytest.mark.parametrize("seed", [1, 2])
def test_scores_are_the_same_in_whatever_order_blocks_come_back(seed: int) -> None:
    smooth_pair()
    assert scores_of(Inline(seed, slots=3), block=(16, 32, 9)) == scores_of(block=(16, 32, 9))


@pytest.mark.parametrize("changed", ["made", "truth", "coarse"])
def test_what_was_scored_of_volumes_that_have_changed_is_scored_again(changed: str) -> None:
    rng = np.random.default_rng(9)
    lengths = {"made": 300, "truth": 300, "coarse": 150}
    save(**{name: rng.integers(0, 256, (n, 20, 20)).astype(np.uint8) for name, n in lengths.items()})
    assert [part.unit for part in evaluated(Workers(broken=2), given="coarse.npy").missing] == [2]
    save(**{changed: np.load(f"{changed}.npy")[::-1]})
    again = Workers()
    assert evaluated(again, given="coarse.npy").scores == scores_of(given="coarse.npy")
    assert sorted(again.blocks) == [0, 1, 2]


def test_a_folder_of_other_work_is_left_alone() -> None:
    smooth_pair()
    Path("scores.run").mkdir()
    Path("scores.run/plan.json").write_text("{}")
    with pytest.raises(RunError, match=r"scores\.run holds the run of a net"):
        evaluated()
    assert Path("scores.run/plan.json").read_text() == "{}"


# ---- the command


def test_the_command_prints_and_writes_what_it_found(give: Give) -> None:
    made, truth = smooth_pair()
    base = ("evaluate", "made.npy", "truth.npy", "--config", "threads")
    ended = give(*base, "--json", "s.json", "--picture", "p.png")
    assert ended.code == 0, ended.err
    known = metrics.peak_signal_noise_ratio(truth, made, data_range=255)
    assert ["output", f"{known:.2f}"] in [line.split()[:2] for line in ended.out.splitlines()]
    scores = json.loads(Path("s.json").read_text())["scores"]["output"]
    assert (scores["psnr"], scores["half"]) == (pytest.approx(known), None)  # no cube fits
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    refused = give(*base, "--labels")
    assert refused.code == 2
    assert "made.npy looks like an image, not like labels: of neighbouring voxels in" in " ".join(refused.err.split())
    assert give(*base, "--margin", "4").err == "volpipe: --margin '4': write three numbers, z,y,x, such as 4,0,0\n"
    assert sorted(path.name for path in Path().iterdir()) == ["made.npy", "p.png", "s.json", "truth.npy"]


def test_the_command_names_blocks_without_scores_and_writes_none(give: Give) -> None:
    chunk, whole = cut_pair()
    command = ("evaluate", *CUT, "--config", "threads", "--json", "s.json")
    for options in ([], ["--strict"]):
        ended = give(*command, *options)
        assert (ended.code, ended.out, Path("s.json").exists()) == (1, "", False)
        words = " ".join(ended.err.split())
        assert options or ("128:256,0:30,0:30" in words and "1 part is missing; run the same command again" in words)
    chunk.write_bytes(whole)
    assert give(*command).code == 0
    assert sorted(path.name for path in Path().iterdir()) == ["made.zarr", "s.json", "truth.zarr"]


@pytest.mark.parametrize("option", ["--json", "--picture"])
@pytest.mark.parametrize(
    ("target", "why"), [("gone/x.png", "there is no folder gone"), ("folder.png", "it is a folder")]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_scored(
    option: str, target: str, why: str, give: Give
) -> None:
    smooth_pair()
    Path("folder.png").mkdir()
    ended = give("evaluate", "made.npy", "truth.npy", "--config", "threads", option, target)
    assert (ended.code, ended.out) == (2, "") and ended.err.startswith(f"volpipe: {option} {target}: {why}")
