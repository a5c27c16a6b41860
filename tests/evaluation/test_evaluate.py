"""What an evaluation refuses, blocks that are lost and scored by the same call, its folder, and the command."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from arrays import make
from command import Give, giver
from inline import Inline, Stopped
from scored import Workers, cut_pair, evaluated, image_scores_of, label_pair, save, scores_of, smooth_pair
from skimage import metrics
from volumes import noise, write_volume

import volpipe as vp
from volpipe.errors import PlanError, RunError, RunStopped
from volpipe.evaluation import subject
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.runs.held_work import HeldWork
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage import lock

PLACED = {"resolution": [40.0, 4.0, 4.0]}
CUT = ("made.zarr", "truth.zarr")
EIGHT = ("windows.shape=[8,8,8]", "windows.overlap=0")


@pytest.fixture(autouse=True)
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Return what gives a command in a folder of the test, where all works."""
    monkeypatch.chdir(tmp_path)
    return giver(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("output", "options", "sentence"),
    [
        ("small", {}, "give --roi, a box of the reference that both have"),
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


def placed(name: str, data: np.ndarray, offset: list[float] | None = None) -> None:
    """Store an array in pair.h5 whose voxels have a size, and an origin if there is one."""
    with h5py.File("pair.h5", "a") as file:
        attributes = {"resolution": [40.0, 8.0, 4.0]} | ({} if offset is None else {"offset": offset})
        file.create_dataset(name, data=data).attrs.update(attributes)


@pytest.mark.parametrize("kind", ["labels", "classes", "image"])
@pytest.mark.parametrize("roi", [None, "2:10,:,5:20"])
def test_a_reference_of_a_part_is_scored_where_it_lies(kind: str, roi: str | None) -> None:
    """Its own place says where; so does that of an output of a part. A box is one of the reference."""
    truth, made = (data.astype(np.uint8) for data in label_pair((4, 4, 4), (6, 6, 6)))
    box = np.s_[6:18, 3:23, 1:24]
    names = {"made": made, "truth": truth}
    for name, data in names.items():
        placed(name, data)
        placed(f"{name}_part", data[box], [240.0, 24.0, 4.0])
    whole_roi = "6:18,3:23,1:24" if roi is None else "8:16,3:23,6:21"
    known = scores_of(names=("pair.h5/made", "pair.h5/truth"), roi=whole_roi, block=(8, 8, 8), kind=kind)
    part = scores_of(names=("pair.h5/made", "pair.h5/truth_part"), roi=roi, block=(8, 8, 8), kind=kind)
    cut = scores_of(names=("pair.h5/made_part", "pair.h5/truth"), roi=roi and whole_roi, block=(8, 8, 8), kind=kind)
    assert part == cut == known
    (note, *_) = plan_evaluation("pair.h5/made", "pair.h5/truth_part", kind=kind).notes
    assert "truth_part lies at 6:18,3:23,1:24 (z, y, x) of" in note


@pytest.mark.parametrize(
    ("offset", "roi", "sentence"),
    [
        (
            [240.0, 24.0, 80.0],
            None,
            r"\(24, 24, 24\) voxels .* \(12, 20, 20\), which lie at 6:18,3:23,20:40; give --roi",
        ),
        ([240.0, 24.0, 80.0], "0:12,0:20,0:8", r"box 6:18,3:23,20:28 is empty or leaves the output"),
        ([240.0, 24.0, 6.0], "0:12,0:20,0:8", r"axis x: .* 1\.5 voxels of 4 nm, no whole number"),
        (None, "0:12,0:20,0:8", r"metadata of the reference state no origin"),
    ],
)
def test_a_reference_of_a_part_that_lies_nobody_knows_where_is_refused(
    offset: list[float] | None, roi: str | None, sentence: str
) -> None:
    placed("made", noise((24, 24, 24)))
    placed("truth", noise((12, 20, 20)), offset)
    with pytest.raises(PlanError, match=sentence):
        plan_evaluation("pair.h5/made", "pair.h5/truth", roi=roi)


def test_scores_against_a_reference_that_was_moved_are_others() -> None:
    names, plans = ("pair.h5/made", "pair.h5/truth"), []
    for start in (2, 0):
        Path("pair.h5").unlink(missing_ok=True)
        placed("made", noise((24, 24, 24)))
        placed("truth", noise((24, 24, 24))[2:20, 2:20, 2:20], [start * 40.0, start * 8.0, start * 4.0])
        plans.append(plan_evaluation(*names, roi=",".join([f"{4 - start}:{14 - start}"] * 3)))
    assert plans[0].box == plans[1].box and plans[0].describe() != plans[1].describe()
    assert image_scores_of(names=names, any_place=True, roi="0:10,0:10,0:10")["output"].psnr < 20


@pytest.mark.parametrize("name", ["made", "truth"])
def test_what_is_no_number_stops_it_wherever_it_is(name: str) -> None:
    ones = np.ones((9, 9, 9), np.float32)
    save(**{"made": ones, "truth": ones, name: np.where(np.arange(9) == 3, np.float32(np.nan), ones)})
    sentence = rf"{name}\.npy has NaN or infinite voxels in 0:9,0:9,0:9.*--roi$"
    with pytest.raises(RunStopped, match=rf"(?m)^comparing voxels \(evaluate\) failed, .*: .*{sentence}"):
        evaluated(data_range=1.0)


# ---- blocks that are lost


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


# ---- the folder


def test_a_folder_of_other_work_is_left_alone() -> None:
    smooth_pair()
    Path("scores.run").mkdir()
    Path("scores.run/plan.json").write_text("{}")
    with pytest.raises(RunError, match=r"scores\.run holds the run of a net"):
        evaluated()
    assert Path("scores.run/plan.json").read_text() == "{}"


@contextmanager
def ending_with(on_end: Callable[[RunFolder], object]) -> Iterator[None]:
    """Call `on_end` once with the folder of a work that has ended, before its command has."""

    def run_and_end(work: Any, start: Any) -> Any:
        patch.undo()
        result = work.run(start)
        on_end(work.folder)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeldWork, "run", run_and_end)
        yield


@pytest.fixture
def score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Return what scores one of two volumes here, in eight blocks; both use the same folder."""
    monkeypatch.setattr(subject, "BLOCK", (8, 8, 8))
    for seed, name in enumerate(("one", "two", "truth")):
        write_volume(tmp_path / f"{name}.n5", noise((16, 16, 16), seed=seed))
    return lambda name="one", site=None: evaluated(site, names=(f"{name}.n5", "truth.n5"), block=(8, 8, 8)).scores


@pytest.mark.parametrize("kind", ["evaluate", "compare", "batches"])
def test_a_folder_that_another_command_holds_stays_until_that_ends(kind: str, score: Callable[..., object]) -> None:
    taken, places, settings = list[RunFolder](), ["one.n5", "two.n5"], ("net.name=identity", *EIGHT)
    if kind == "batches":
        places = ["old", "new"]
        for out in places:
            vp.batch("one.n5/raw", out=out, settings=settings, site=Inline())
    command = score if kind == "evaluate" else partial(vp.compare, *places, site=Inline())
    with ExitStack() as stack:

        def take(folder: RunFolder) -> None:
            stack.enter_context(folder.locked())
            taken.append(folder)
            folder.log.write_text("of the other command")

        with ending_with(take):
            command()
        assert taken[0].log.read_text() == "of the other command"
    command()
    assert not taken[0].path.exists()


def test_what_another_evaluation_has_left_meanwhile_stays(score: Callable[..., object]) -> None:
    whole, second = Inline(), Inline()
    expected = score("two", whole)

    def interrupted(folder: RunFolder) -> None:
        with pytest.raises(Stopped):
            score("two", Inline(most_tasks=whole.num_tasks - 1))

    with ending_with(interrupted):
        score("one")
    assert score("two", second) == expected and 0 < second.num_tasks < whole.num_tasks
    assert not Path("scores.run").exists()


def test_a_folder_that_goes_while_its_lock_is_awaited_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, take = RunFolder(Path("scores.run")), lock._take

    def late(descriptor: int) -> None:
        (folder.path / lock.LOCK_FILE).unlink()
        take(descriptor)

    with folder.locked():
        pass
    monkeypatch.setattr(lock, "_take", late)
    with pytest.raises(RunError, match=r"was deleted by process .*; give the command again"), folder.locked():
        pass


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
    cut_pair()
    ended = give("evaluate", *CUT, "--config", "threads", "--json", "s.json")
    assert (ended.code, ended.out, Path("s.json").exists()) == (1, "", False)
    words = " ".join(ended.err.split())
    assert "128:256,0:30,0:30" in words and "1 part is missing; run the same command again" in words
