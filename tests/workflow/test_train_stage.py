"""A training as a stage: its weights go to the run that names it, and all goes on, or begins again, as it must."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from command import begin, finish, giver, wait_until
from inline import Inline, Stopped
from volumes import fingerprint

import volpipe as vp
from volpipe.blockwise.usage import peak_bytes
from volpipe.cli.workflow import cost_table
from volpipe.errors import PlanError, RecipeError, RunError, VolpipeError
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_origin
from volpipe.runs.run_folder import RunFolder
from volpipe.training.driver import run_training
from volpipe.training.logs import read_log
from volpipe.training.pages import training_page
from volpipe.training.task import Training, newest_step
from volpipe.units import size
from volpipe.workflow.cost import forecast_flow
from volpipe.workflow.execute import FlowReport
from volpipe.workflow.outcome import run_command
from volpipe.workflow.pages import flow_page
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.prepare import prepare
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.stage_table import stage_rows
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute, preview

LEARN = """
[[stage]]
name = "learn"
kind = "train"
net = { name = "unet3d", options = { features = [4, 8], out_channels = 3, output = "sigmoid" } }
affinities = { offsets = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]] }
samples = { shape = [8, 16, 16], margin = [1, 2, 2] }
[[stage.data]]
path = "volume"
labels = "l.tif"
held_out = "16:32,:,:"
[stage.train]
steps = 8
warm_up = 2
learning_rate = 2e-2
checkpoint_every = 4
validate_every = 4
threads = 1
"""
REST = """
[[stage]]
name = "affinities"
net = "learn"
windows = { shape = [32, 36, 36], block = [1, 1, 1] }

[[stage]]
name = "labels"
kind = "label"
input = { stage = "affinities", offsets = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]] }

[[stage]]
name = "scores"
kind = "evaluate"
labels = true
reference = "learn"
"""
ALL = LEARN + REST
NETS = """
[stage.sweep]
combine = "zip"
"net.options.features" = [[4, 8], [3, 6], [6, 12]]
"net.options.anisotropic" = [false, false, true]
"train.learning_rate" = [1e-9, 2e-2, 2e-2]
"normalise.low" = [0, 20, 0]
"normalise.high" = [255, 220, 200]
"""
OF_NETS = REST.replace("[32, 36, 36]", "[36, 36, 36]")  # other shards with the halo of each net
SEARCHED = LEARN + NETS + OF_NETS
NAMES = ["learn", "affinities", "labels", "scores"]


def prepare_folder(folder: Path) -> Path:
    """Write a volume of bright blocks between dark walls, and the number of each block."""
    z, y, x = (np.arange(n) for n in (32, 32, 32))
    wall = (z % 8 == 0)[:, None, None] | (y % 10 == 0)[:, None] | (x % 10 == 0)
    labels = 1 + (z // 8)[:, None, None] * 16 + (y // 10)[:, None] * 4 + x // 10
    labels[wall] = 0
    noise = np.random.default_rng(1).normal(0, 10, wall.shape)
    tifffile.imwrite(folder / "v.tif", np.clip(np.where(wall, 70, 170) + noise, 0, 255).astype(np.uint8))
    tifffile.imwrite(folder / "l.tif", labels.astype(np.uint16))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a volume and labels, where commands are given."""
    monkeypatch.chdir(tmp_path)
    return prepare_folder(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What the stages make that nobody interrupts."""
    return outputs_of(ALL, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What they make with the best of several nets."""
    return outputs_of(SEARCHED, tmp_path_factory.mktemp("searched"))


def outputs_of(text: str, folder: Path) -> dict[str, object]:
    prepare_folder(folder)
    with contextlib.chdir(folder):
        run(plan_of(folder, text))
    return outputs(folder / "out")


def plan_of(folder: Path, text: str = ALL, *settings: str, out: str = "out", volume: str = "v.tif") -> FlowPlan:
    (folder / "flow.toml").write_text(text)
    flow = find_flow(folder / "flow.toml", settings)
    assert flow is not None
    return plan_flow(flow, str(folder / volume), folder / out, folder)


def run(plan: FlowPlan, workers: Inline | None = None, *, update: bool = False) -> FlowReport:
    return execute(plan, (workers or Inline()).start, RunOptions(update=update))


def outputs(folder: Path) -> dict[str, object]:
    """Return what the stages made: weights of all trainings, voxels, scores, and the shapes of blocks and shards."""
    scores = json.loads((folder / "scores.json").read_text())["scores"]
    weights = b"".join(file.read_bytes() for file in sorted((folder / "learn").rglob("weights.safetensors")))
    plans = [
        json.loads((folder / name).read_text())
        for name in ("affinities.zarr.run/plan.json", "labels.zarr.run/label.json")
    ]
    sizes = [(plan["block"], plan["shard"], plan["chunk"]) for plan in plans]
    return {
        "learn": weights, "scores": scores, "sizes": sizes,
        **{name: fingerprint(folder / f"{name}.zarr" / "s0") for name in ("affinities", "labels")},
    }  # fmt: skip


TESTED = ('held_out = "16:32,:,:"', 'held_out = "16:24,:,:"\ntest = "24:32,:,:"')
FLATTERED = "box 16:32,:,: chooses the net of stage learn, so that scores there flatter it; give learn.data.test"


def test_an_evaluation_scores_the_test_and_warns_where_the_held_out_box_chose_the_net(folder: Path) -> None:
    tested = ALL.replace(*TESTED)
    for text, box, is_flattered in ((tested, "24:32,0:32,0:32", False), (SEARCHED, "16:32,0:32,0:32", True)):
        plan = plan_of(folder, text)
        assert str(plan.stages[-1].plan.box) == box
        assert any(FLATTERED in warning for warning in plan.warnings()) == is_flattered


def test_an_evaluation_knows_which_classes_the_labels_of_a_training_leave_out(folder: Path) -> None:
    classes = tifffile.imread(folder / "l.tif") % 3
    tifffile.imwrite(folder / "l.tif", np.where(classes == 2, 0, classes).astype(np.uint8))
    text = f"""{LEARN}
[stage.classes]
names = ["wall", "odd", "even"]

[[stage]]
name = "out"
net = "learn"

[[stage]]
name = "scores"
kind = "evaluate"
classes = true
reference = "learn"
"""
    text = text.replace("affinities = {", "# affinities = {").replace('output = "sigmoid"', 'output = "none"')
    for named, left_out in (('annotated = ["odd"]', (2,)), ("", ())):
        plan = plan_of(folder, text.replace("[stage.train]", f"{named}\n[stage.train]"))
        assert plan.stages[-1].plan.left_out == left_out


@pytest.mark.long
def test_labels_of_a_part_are_learned_from_and_scored_where_they_lie(folder: Path) -> None:
    """The box that is held out counts in their voxels; labels that are corrected are a change, as any are."""
    voxels, labels = (tifffile.imread(folder / f"{name}.tif") for name in "vl")
    size = [10.0, 10.0, 20.0]

    def store(name: str, data: np.ndarray, offset: tuple[int, ...] = (0, 0, 0)) -> None:
        with h5py.File(folder / "new.h5", "w") as file:
            file.create_dataset("a", data=data).attrs.update(resolution=size, offset=np.multiply(offset, size))
        (folder / "new.h5").replace(folder / f"{name}.h5")

    store("v", voxels)
    store("whole", labels)
    store("part", labels[8:, 2:, 4:], (8, 2, 4))
    text = ALL.replace("l.tif", "part.h5").replace("16:32", "16:24")

    def planned() -> FlowPlan:
        return plan_of(folder, text, volume="v.h5")

    preview(planned(), Inline().start)
    assert run(planned()).is_complete
    tree = json.loads((folder / "out" / "scores.json").read_text())
    assert tree["box"] == "24:32,2:32,4:32"
    scored = vp.evaluate("out/labels.zarr", "whole.h5", labels=True, roi=tree["box"], site=Inline())
    assert tree["scores"] == json.loads(json.dumps(scored.to_json()))["scores"]
    before = outputs(folder / "out")["learn"]
    store("part", np.where(labels == 1, 2, labels)[8:, 2:, 4:][::-1], (8, 2, 4))
    with pytest.raises(RunError, match="labels 1"):
        run(planned())
    assert run(planned(), update=True).is_complete
    assert outputs(folder / "out")["learn"] != before


def test_stages_make_what_a_training_and_a_run_given_one_by_one_make(folder: Path) -> None:
    plan = plan_of(folder)
    assert not plan.warnings()  # that the net has no weights yet is none
    report = run(plan)
    assert report.is_complete
    recipe = plan.stages[0].plan.recipe
    run_training(recipe, folder / "alone", Inline().start, search_path=folder)
    run_command(recipe, folder / "alone", str(folder))
    alone = load_recipe(folder / "alone" / "run.toml", ["windows.shape=[32,36,36]", "windows.block=[1,1,1]"])
    execute(prepare("v.tif", alone, folder / "alone.zarr", folder), Inline().start)
    made = outputs(folder / "out")
    assert made["learn"] == (folder / "alone" / "weights.safetensors").read_bytes()
    assert made["affinities"] == fingerprint(folder / "alone.zarr" / "s0")
    origin = read_origin(folder / "out" / "affinities.zarr")
    assert origin.recipe.net.offsets == ((-1, 0, 0), (0, -1, 0), (0, 0, -1))
    assert json.loads((folder / "out" / "scores.json").read_text())["box"] == "16:32,0:32,0:32"
    assert run(plan_of(folder)).was_complete


@pytest.mark.parametrize(
    ("text", "most_tasks"),
    [
        (ALL, 4),
        (SEARCHED, 3),
        *(pytest.param(ALL, number, marks=pytest.mark.long) for number in (1, 2, 9)),
        *(pytest.param(SEARCHED, number, marks=pytest.mark.long) for number in (2, 4)),
    ],
)
def test_one_that_was_interrupted_goes_on_to_the_same_bytes(
    folder: Path, whole: dict[str, object], searched: dict[str, object], text: str, most_tasks: int
) -> None:
    with pytest.raises(Stopped):
        run(plan_of(folder, text), Inline(most_tasks=most_tasks))
    assert run(plan_of(folder, text)).is_complete
    assert outputs(folder / "out") == (whole if text == ALL else searched)


def test_a_plan_from_before_the_training_goes_on_with_the_net_that_was_trained(
    folder: Path, whole: dict[str, object]
) -> None:
    plan = plan_of(folder)
    with pytest.raises(Stopped):
        run(plan, Inline(most_tasks=1))  # when the weights are there
    assert run(plan).is_complete
    assert outputs(folder / "out") == whole


TUNED = """
[stage.tune]
trials = 2
pruner = "none"
"net.options.features" = { choices = [[4, 8], [6, 12]] }
"normalise.high" = { low = 200, high = 255 }
"""


@pytest.mark.parametrize(
    ("varied", "num_nets", "features"),
    [
        (NETS, 3, [4, 8]),
        pytest.param(TUNED.replace('"normalise.high"', '#"'), 2, [6, 12], marks=pytest.mark.long),
        pytest.param(TUNED, 3, [6, 12], marks=pytest.mark.long),
    ],
)
def test_the_best_of_several_nets_makes_what_it_makes_alone(
    folder: Path, varied: str, num_nets: int, features: list[int]
) -> None:
    text = LEARN.replace("affinities =", "normalise = { low = 0, high = 255 }\naffinities =") + varied + OF_NETS
    plan = plan_of(folder, text)
    longest = plan.stages[1].plan
    assert longest.notes.net == f"the longest of {num_nets} nets that stage learn tries"
    assert longest.recipe.net.options["features"] == features
    report = run(plan)
    best = report.stages[0].report.trained
    training = Training.load(best)
    run_training(training.recipe, folder / "alone", Inline().start, search_path=folder)
    assert (best / "weights.safetensors").read_bytes() == (folder / "alone" / "weights.safetensors").read_bytes()
    run_command(training.recipe, folder / "alone", str(folder))
    alone = load_recipe(folder / "alone" / "run.toml", ["windows.shape=[36,36,36]", "windows.block=[1,1,1]"])
    execute(prepare("v.tif", alone, folder / "alone.zarr", folder), Inline().start)
    assert fingerprint(folder / "out" / "affinities.zarr" / "s0") == fingerprint(folder / "alone.zarr" / "s0")
    settled = report.plan.stages[1].plan
    assert settled.recipe.net.options == training.recipe.net.options
    assert settled.recipe.normalise == alone.normalise
    assert settled.shard != longest.shard or varied != NETS
    assert run(plan_of(folder, text)).was_complete
    assert plan_of(folder, text).stages[1].plan == settled


def test_a_plan_shows_the_net_that_takes_longest_of_all_that_were_timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = preview(plan_of(folder, SEARCHED), Inline().start).stages[1]
    assert len(cost.others) == 2
    assert all(cost.seconds >= other.estimate.seconds for other in cost.others)
    shown = giver(folder, monkeypatch, capsys)("plan", "--recipe", "flow.toml", "v.tif", "-o", "out", "--quick")
    assert "the longest of 3 nets that stage learn tries" in shown.out


@pytest.mark.long
def test_an_update_that_makes_another_net_the_best_makes_its_run_anew(folder: Path) -> None:
    text = SEARCHED.replace("1e-9", "2e-2")
    best = run(plan_of(folder, text)).stages[0].report.trained
    labels = tifffile.imread(folder / "l.tif")
    labels[3:6] = 99
    tifffile.imwrite(folder / "l.tif", labels)
    report = run(plan_of(folder, text), update=True)
    assert report.is_complete and report.stages[0].report.trained.name != best.name
    run(plan_of(folder, text, out="fresh"))
    assert outputs(folder / "out") == outputs(folder / "fresh")
    assert run(plan_of(folder, text), update=True).was_complete


def test_a_training_learns_from_what_an_earlier_stage_makes(folder: Path, whole: dict[str, object]) -> None:
    text = '[[stage]]\nname = "copy"\nkind = "convert"\n' + ALL.replace('path = "volume"', 'path = "copy"')
    text = text.replace('net = "learn"', 'net = "learn"\ninput = "volume"')
    plan = plan_of(folder, text)
    assert [stage.read_from for stage in plan.stages] == ["volume", "copy", "volume", "affinities", "labels"]
    with pytest.raises(Stopped):
        run(plan, Inline(most_tasks=1))  # when the copy is there
    assert not (folder / "out" / "learn" / "weights.safetensors").exists()
    assert run(plan_of(folder, text)).is_complete
    assert outputs(folder / "out") == whole
    assert run(plan_of(folder, text)).was_complete
    tifffile.imwrite(folder / "v.tif", 255 - tifffile.imread(folder / "v.tif"))
    assert run(plan_of(folder, text), update=True).is_complete
    run(plan_of(folder, out="fresh"))
    assert outputs(folder / "out") == outputs(folder / "fresh") != whole


def test_status_and_report_show_a_training_as_its_own(folder: Path) -> None:
    plan = plan_of(folder)
    with pytest.raises(Stopped):
        run(plan, Inline(most_tasks=1))
    learn, *rest = find_status(str(folder / "out")).parts
    assert (learn.name, learn.kind, learn.is_complete, learn.stages["train"].done) == ("learn", "training", True, 8)
    assert not any(part.is_complete for part in rest)
    run(plan)
    status = find_status(str(folder / "out"))
    assert status.is_complete
    assert next(stage_rows(str(folder / "out"))).tasks == 1
    assert [part.name for part in status.parts] == NAMES
    page = str(flow_page(plan.folder, str(plan.out)))
    assert "learn/report.html" in page
    assert "Losses and scores of stage learn" in page


def test_the_command_plans_and_does_all_stages(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = giver(folder, monkeypatch, capsys)
    (folder / "flow.toml").write_text(ALL.replace("[[stage.data]]", "[stage.data]").replace('labels = "l.tif"\n', ""))
    how = ("--recipe", "flow.toml", "v.tif", "--config", "threads", "-o", "out")
    bare = given("plan", *how, "--quick")
    assert bare.code == 2
    assert "stage learn: affinities are learnt from labels; give data.labels" in bare.err
    planned = given("plan", *how, "--quick", "--set", "learn.data.labels=l.tif")
    assert planned.code == 0, planned.err
    ended = given("run", *how, "--set", "learn.data.labels=l.tif")
    assert ended.code == 0, ended.err
    told = by_heading(ended.out)
    assert [*told] == [
        "stage 1 of 4: learn, train of volume", "stage 2 of 4: affinities, run of volume",
        "stage 3 of 4: labels, label of affinities", "stage 4 of 4: scores, evaluate of labels", "all stages",
    ]  # fmt: skip
    learn, affinities, labels, scores, whole = told.values()
    own = ((learn, "held out: auc"), (affinities, "first task after"), (labels, " objects to "),
           (scores, "adapted Rand error"), (whole, "\nlearn "))  # fmt: skip
    for text, words in own:
        assert words in text
        assert ended.out.count(words) == text.count(words)  # below no other heading
    assert re.search(r"^learn +train +[\d.]+ m?s +[\d.]+ KiB +[\d.]+ KiB +1 ", ended.out, re.MULTILINE)
    assert "adapted Rand error" in ended.out


def by_heading(printed: str) -> dict[str, str]:
    """Return all that was printed below each heading, in the order in which these came first."""
    found: dict[str, str] = {}
    heading = ""
    for line in printed.splitlines():
        if re.match(r"stage \d of \d: |all stages$", line):
            heading = line
        if heading:
            found[heading] = f"{found.get(heading, '')}\n{line}"
    return found


def test_a_plan_says_what_steps_take_where_some_were_tried_and_writes_nothing(folder: Path) -> None:
    plan = plan_of(folder)
    assert forecast_flow(plan).stages[0].seconds is None
    cost = preview(plan, Inline().start)
    assert cost.stages[0].seconds is not None
    assert 0 < cost.stages[0].seconds < 60
    assert cost.is_guess
    assert not (folder / "out" / "learn").exists()
    assert peak_bytes() <= (cost.stages[0].memory_bytes or 0) < 1.5 * peak_bytes()
    memory = next(column for column in cost_table(cost).columns if column.header == "memory")
    assert [*memory.cells] == [
        size(cost.stages[0].memory_bytes or 0),
        *(size(each.memory_bytes or 0) for each in cost.stages[1:3]),
        "",
        "",
    ]
    poor = Inline()
    poor.worker_bytes = 50 << 20
    for refused in (preview(plan_of(folder, LEARN), poor.start), forecast_flow(plan_of(folder, LEARN), poor)):
        with pytest.raises(PlanError, match=r"^stage learn: a worker needs .* and has 0.0 GiB; use a smaller train.ba"):
            refused.check()


def test_corrected_labels_train_anew_with_update_and_with_it_what_rests_on_the_weights(folder: Path) -> None:
    apart = '[[stage]]\nname = "apart"\nnet = { name = "identity" }\n'
    both = LEARN + apart + REST
    run(plan_of(folder, both))
    before, when = outputs(folder / "out"), (folder / "out" / "apart.zarr").stat().st_mtime_ns
    correct(folder, 99)
    with pytest.raises(RunError, match=r"stage learn: .*learned from has changed since: labels 1 .*--update"):
        run(plan_of(folder, both))
    assert outputs(folder / "out") == before
    assert run(plan_of(folder, both), update=True).is_complete
    run(plan_of(folder, out="fresh"))
    assert outputs(folder / "out") == outputs(folder / "fresh") != before
    assert (folder / "out" / "apart.zarr").stat().st_mtime_ns == when
    assert run(plan_of(folder, both), update=True).was_complete


SWEPT = LEARN + '[stage.sweep]\n"train.learning_rate" = [2e-2]\n' + REST


@pytest.mark.parametrize(
    ("text", "setting", "kept"),
    [
        pytest.param(ALL, "labels.objects.threshold=0.7", ["learn", "affinities"], marks=pytest.mark.long),
        (ALL, "affinities.output.dtype=float32", ["learn"]),
        pytest.param(ALL, "learn.train.seed=3", [], marks=pytest.mark.long),
        pytest.param(ALL, "learn.net.options.features=[4,6]", [], marks=pytest.mark.long),
        (SWEPT, "learn.train.seed=3", []),
    ],
)
def test_with_update_a_changed_recipe_makes_its_stage_anew_and_what_rests_on_it(
    folder: Path, text: str, setting: str, kept: list[str]
) -> None:
    run(plan_of(folder, text))
    out, before = folder / "out", outputs(folder / "out")
    places = [out / {"learn": "learn/weights.safetensors"}.get(name, f"{name}.zarr/zarr.json") for name in kept]
    times = [place.stat().st_mtime_ns for place in places]
    with pytest.raises(RunError, match=rf"stage {setting.partition('.')[0]}: .*to keep those before it, give --update"):
        run(plan_of(folder, text, setting))
    assert outputs(out) == before
    assert run(plan_of(folder, text, setting), update=True).is_complete
    run(plan_of(folder, text, setting, out="fresh"))
    assert outputs(out) == outputs(folder / "fresh") != before
    assert [place.stat().st_mtime_ns for place in places] == times
    assert run(plan_of(folder, text, setting), update=True).was_complete


def test_an_update_deletes_nothing_that_was_made_of_another_volume_or_elsewhere(folder: Path) -> None:
    run(plan_of(folder))
    before = outputs(folder / "out")
    (folder / "w.tif").write_bytes((folder / "v.tif").read_bytes())
    with pytest.raises(RunError, match=r"stage learn: it was made of .*v.tif in .*, and now would be of .*w.tif in"):
        run(plan_of(folder, volume="w.tif"), update=True)
    assert outputs(folder / "out") == before
    for name in ("out", "out.run"):
        (folder / name).rename(folder / name.replace("out", "moved"))
    with pytest.raises(RunError, match=r"stage learn: it was made .* in .*out/learn, and now .* in .*moved/learn"):
        run(plan_of(folder, out="moved"), update=True)
    assert outputs(folder / "moved") == before


def correct(folder: Path, label: int) -> None:
    """Give the voxels of three slices that are learned from another label."""
    labels = tifffile.imread(folder / "l.tif")
    labels[3:6] = label
    tifffile.imwrite(folder / "l.tif", labels)


def test_an_update_goes_on_from_the_checkpoint_to_the_bits_of_one_training_of_more_steps(folder: Path) -> None:
    text = ALL.replace("[stage.train]", '[stage.train]\nschedule = "constant"\ncontinue_steps = 4')
    run(plan_of(folder, text))
    before, learn = outputs(folder / "out"), folder / "out" / "learn"
    os.utime(folder / "l.tif", ns=(0, 0))  # the same labels, as of another time
    with pytest.raises(RunError, match=r"labels 1 l.tif was .*; put it back, use --update to continue and make again"):
        run(plan_of(folder, text))
    lines = run(plan_of(folder, text), update=True).stages[0].report.lines
    run(plan_of(folder, text, "learn.train.steps=12", out="longer"))
    assert outputs(folder / "out") == outputs(folder / "longer") != before
    assert run(plan_of(folder, text), update=True).was_complete
    sentence = (
        rf"continued from step 9 on \({time.localtime().tm_year}-.*\) over other volumes than before: labels 1 l.tif"
    )
    assert any(re.match(sentence, line) for line in lines)
    assert "from step 9 on" in str(training_page(RunFolder(learn)))
    with pytest.raises(RunError, match=r"stage learn: .* \(train.learning_rate: 0.02 -> 0.01\); take that back"):
        run(plan_of(folder, text, "learn.train.learning_rate=1e-2"))
    correct(folder, 99)
    assert run(plan_of(folder, text, "learn.train.continue_steps=2"), update=True).is_complete
    first, second = json.loads((learn / "training.json").read_text())["rounds"]
    assert (first["after"], first["planned"], second["after"], second["planned"]) == (8, 8, 12, 12)
    assert newest_step(learn) == 14
    execute(plan_of(folder, text), Inline().start, RunOptions(fresh=True))
    assert newest_step(learn) == 8


def test_a_round_that_was_killed_comes_to_the_same_bits_and_rates(folder: Path) -> None:
    text = LEARN.replace("checkpoint_every = 4", "checkpoint_every = 2\nkeep = 9\ncontinue_steps = 5")
    run(plan_of(folder, text))
    correct(folder, 99)
    learn = folder / "out" / "learn"
    kept = {name: (learn / name).read_bytes() for name in ("training.json", "inputs.json")}
    assert run(plan_of(folder, text), update=True).is_complete
    weights = (learn / "weights.safetensors").read_bytes()
    rates = [entry["rate"] for entry in read_log(learn)]
    assert rates[8:] == pytest.approx([1e-2 * (1 + math.cos(math.pi * i / 5)) for i in range(5)])
    for steps in ((13, 12), (13, 12, 10)):  # killed after a checkpoint, and before the first
        (learn / "weights.safetensors").unlink()
        for step in steps:
            (learn / "checkpoints" / f"{step:09}.pt").unlink()
        if len(steps) == 3:  # and before it was noted what is learned from now
            (learn / "inputs.json").write_bytes(kept["inputs.json"])
        assert run(plan_of(folder, text), update=True).is_complete
        assert (learn / "weights.safetensors").read_bytes() == weights
    for name, content in kept.items():
        assert (learn / name).read_bytes() != content
    assert len(json.loads((learn / "training.json").read_text())["rounds"]) == 1


@pytest.mark.long
def test_a_training_goes_on_over_what_a_stage_before_it_makes_again(folder: Path) -> None:
    copy = '[[stage]]\nname = "copy"\nkind = "convert"\n'
    text = copy + ALL.replace('path = "volume"', 'path = "copy"').replace(
        "[stage.train]", "[stage.train]\ncontinue_steps = 4"
    )
    text = text.replace('net = "learn"', 'net = "learn"\ninput = "volume"')
    run(plan_of(folder, text))
    alone, learn = (
        text.replace(REST.replace('net = "learn"', 'net = "learn"\ninput = "volume"'), ""),
        folder / "alone" / "learn",
    )
    run(plan_of(folder, alone, out="alone"))
    (learn / "weights.safetensors").unlink()
    (learn / "checkpoints" / "000000008.pt").unlink()
    assert run(plan_of(folder, alone, out="alone"), update=True).is_complete  # which learns from the same copy
    assert json.loads((learn / "training.json").read_text())["rounds"] == []
    shutil.copytree(folder, folder / "other", ignore=shutil.ignore_patterns("other", "alone*"))
    before = outputs(folder / "out")
    tifffile.imwrite(folder / "v.tif", 255 - tifffile.imread(folder / "v.tif"))
    assert run(plan_of(folder, text), update=True).is_complete
    assert newest_step(folder / "out" / "learn") == 12
    assert run(plan_of(folder, text), update=True).was_complete
    made = outputs(folder / "out")
    assert made != before
    for most_tasks in (1, 2, 3, 5):
        shutil.rmtree(folder / "out")
        shutil.rmtree(folder / "out.run")
        for name in ("out", "out.run"):
            shutil.copytree(folder / "other" / name, folder / name)
        with pytest.raises(Stopped):
            run(plan_of(folder, text), Inline(most_tasks=most_tasks), update=True)
        assert run(plan_of(folder, text), update=True).is_complete
        assert outputs(folder / "out") == made


@pytest.mark.parametrize(
    "varied",
    [
        '[stage.sweep]\n"train.learning_rate" = [1e-9, 2e-2, 1e-8]\n',
        '[stage.tune]\ntrials = 3\npruner = "none"\n"train.learning_rate" = { choices = [1e-9, 2e-2] }\n',
    ],
)
def test_the_best_of_several_trainings_goes_on(folder: Path, whole: dict[str, object], varied: str) -> None:
    text = LEARN + varied + REST
    report = run(plan_of(folder, text))
    assert report.is_complete
    best = json.loads((folder / "out" / "learn" / "table.json").read_text())
    name = next(f"{row['trial']:03}" for row in best if row["train.learning_rate"] == 2e-2)
    assert f"the best of 3 trainings is {name}" in report.stages[0].report.lines
    totals, row = report.stages[0].totals, next(stage_rows(str(folder / "out")))
    assert (totals.tasks, totals.cpu_seconds) == (row.tasks, row.cpu_seconds) and totals.tasks == 3
    assert (folder / "out" / "learn" / name / "weights.safetensors").read_bytes() == whole["learn"]
    assert fingerprint(folder / "out" / "affinities.zarr" / "s0") == whole["affinities"]
    assert run(plan_of(folder, text)).was_complete
    assert find_status(str(folder / "out")).is_complete
    assert "learn/report.html" in (folder / "out.run" / "report.html").read_text()


def test_where_no_training_has_a_score_none_is_the_best(folder: Path) -> None:
    z = np.arange(1, 33, dtype=np.uint16)
    tifffile.imwrite(
        folder / "l.tif", np.broadcast_to(z[:, None, None], (32, 32, 32))
    )  # y and x have one kind of pairs
    report = run(plan_of(folder, SEARCHED))
    assert not report.is_complete
    assert "got no score" in report.open_reason
    assert not (folder / "out" / "affinities.zarr").exists()


NOT_HELD_OUT = ALL.replace('held_out = "16:32,:,:"', "").replace("validate_every = 4", "")
OTHER_OFFSETS = "[[[-1, 0, 0], [0, -1, 0], [0, 0, -1]], [[-1, 0, 0], [0, -1, 0], [0, 0, -2]]]"
UP = """
import torch
class Up(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.factor = factor
        self.volpipe = dict(
            in_channels=1, out_channels=1, scale=(factor, 1, 1), stride=(1, 1, 1), halo=(1, 1, 1), intensity="same"
        )
        self.conv = torch.nn.Conv3d(1, 1, 3, padding=1)
    def forward(self, x):
        return self.conv(x).repeat_interleave(self.factor, 2)
def up(factor):
    return Up(factor)
"""
FINER = """
[[stage]]
name = "learn"
kind = "train"
net = { name = "up.py:up", options = { factor = 1 } }
degrade = { kind = "bin" }
samples = { shape = [8, 16, 16] }
data = { path = "volume", held_out = "16:32,:,:" }
train = { validate_every = 4 }
sweep = { "net.options.factor" = [1, 2] }

[[stage]]
name = "finer"
net = "learn"
"""


@pytest.mark.parametrize(
    ("text", "error", "sentence"),
    [
        (REST, RecipeError, "stage affinities, net: there is no stage learn"),
        (REST + LEARN, RecipeError, "stage affinities, net: learn comes after it; move"),
        (
            '[[stage]]\nname = "learn"\nrecipe = "default"\n' + REST,
            RecipeError,
            "affinities, net: learn makes volume and no weights; name a stage that does$",
        ),
        (
            LEARN + '[[stage]]\nname = "next"\ninput = "learn"\nrecipe = "default"\n',
            RecipeError,
            "stage next, input: learn makes weights and no volume; name a stage that does, or volume",
        ),
        (ALL.replace('path = "volume"', 'path = "labels"'), RecipeError, "learn, data.0.path: labels comes after it"),
        (ALL.replace("[[stage.d", 'input = "volume"\n[[stage.d'), RecipeError, "learn: input is no key of a stage of"),
        (ALL.replace('"learn"\nw', '"learn"\nrecipe = "default"\nw'), RecipeError, "its net is that of stage learn"),
        (NOT_HELD_OUT, PlanError, "stage scores: stage learn holds out no part of its labels"),
        (ALL.replace("[-1, 0, 0], ", "", 1), RecipeError, "stage learn: .*gives 3 channels, affinities.offsets are 2"),
        (
            LEARN + 'continue_steps = 4\n[stage.sweep]\n"train.seed" = [0, 1]\n',
            RecipeError,
            "stage learn: over corrected labels another training of a search may be the best, so all are made anew",
        ),
        (
            f'{LEARN}[stage.sweep]\n"affinities.offsets" = {OTHER_OFFSETS}\n{REST}',
            PlanError,
            r"affinities: stage learn tries nets of other outputs, offsets .*0, -1\)\) and .*0, -2\)\) \(net.offsets: ",
        ),
        (
            FINER,
            PlanError,
            r"finer: .* outputs, voxels \(z, y, x\) \(32, 32, 32\) and \(64, 32, 32\) \(net.options.factor: 1 -> 2\)",
        ),
        (
            ALL.replace("[0, 0, -1]] }\n\n", "[0, 0, -1], [0, 0, -2]] }\n\n"),
            PlanError,
            "stage labels: .*holds affinities of the offsets .*, as its maker noted",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_trained(
    folder: Path, text: str, error: type[VolpipeError], sentence: str
) -> None:
    (folder / "up.py").write_text(UP)
    with pytest.raises(error, match=sentence):
        plan_of(folder, text)
    assert not (folder / "out").exists()


@pytest.mark.long
@pytest.mark.parametrize(("text", "training"), [(ALL, "learn"), (SEARCHED, "learn/000")])
@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_one_that_was_killed_while_it_trained_and_while_it_ran_goes_on_to_the_same_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str, training: str
) -> None:
    goes_on = text == ALL  # a search is made anew over corrected labels
    steps = "steps = 200\ncontinue_steps = 100" if goes_on else "steps = 200"
    (folder / "flow.toml").write_text(text.replace("steps = 8", steps))
    command = ("run", "--recipe", "flow.toml", "v.tif", "--config", "threads", "-o")
    give = giver(folder, monkeypatch, capsys)
    whole = give(*command, "whole")
    assert whole.code == 0, whole.err
    learn = folder / "out" / training
    for is_there in (lambda: newest_step(learn) >= 20, lambda: (folder / "out" / "affinities.zarr.run").is_dir()):
        process = begin(folder, *command, "out")
        wait_until(is_there, 100)
        process.send_signal(signal.SIGKILL)
        assert finish(folder, process, 60).code == -signal.SIGKILL
        assert newest_step(learn) < 200 or not (folder / "out" / "scores.json").exists()
    ended = finish(folder, begin(folder, *command, "out"), 100)
    assert ended.code == 0, ended.err
    assert outputs(folder / "out") == outputs(folder / "whole")
    if not goes_on:
        return
    correct(folder, 99)
    updated = give(*command, "whole", "--update")
    assert updated.code == 0, updated.err
    process = begin(folder, *command, "out", "--update")
    wait_until(lambda: newest_step(learn) >= 220, 100)
    process.send_signal(signal.SIGKILL)
    assert finish(folder, process, 60).code == -signal.SIGKILL
    assert newest_step(learn) < 300
    ended = finish(folder, begin(folder, *command, "out"), 100)
    assert ended.code == 0, ended.err
    assert outputs(folder / "out") == outputs(folder / "whole")
