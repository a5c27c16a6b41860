"""Sweeps: every combination is trained as if it were alone, once, and one that fails stops no other."""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from command import begin, finish, giver, processes_in, wait_until
from trainings import Threads, losses_in, make_folder

from volpipe.blockwise.notes import WORKERS
from volpipe.errors import RecipeError, RunError, SiteError, VolpipeError
from volpipe.geometry.grid import Box
from volpipe.recipes.training import WEIGHTS, load_training
from volpipe.runs.run_folder import RunFolder
from volpipe.training import loop as module
from volpipe.training.data import volumes as training_volumes
from volpipe.training.logs import last_step
from volpipe.training.loop import train
from volpipe.training.search.grid import Sweep, combined
from volpipe.training.search.optuna import Tuning
from volpipe.training.search.trials import OnEnd, TrialResult, run_search, with_overrides
from volpipe.volumes import node_cache
from volpipe.volumes.identity import Identity, identify_whole, read_identities
from volpipe.volumes.values import take_sample
from volpipe.volumes.volume import ArraySpec, Volume, create_array, open_volume, open_writer

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")

SWEEP = """
[sweep]
"train.learning_rate" = [1e-3, 1e-2]
net.options.features = [4, 6]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, SWEEP)


def swept(
    folder: Path, workers: Threads, *settings: str, fresh: bool = False, on_end: OnEnd = lambda result: None
) -> list[TrialResult]:
    sweep = Sweep.load(folder / "recipe.toml", settings)
    return run_search(sweep, folder / "s", workers.start, search_path=folder, fresh=fresh, on_end=on_end)


# ---- which trainings


def test_a_product_has_every_combination_and_zip_pairs_them() -> None:
    lists = {"a": [1, 2], "b": ["x", "y"]}
    assert combined(lists, "product") == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")]
    assert combined(lists, "zip") == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]
    with pytest.raises(RecipeError, match="zip needs lists of one length: a has 1, b has 2"):
        combined(lists | {"a": [1]}, "zip")


def test_values_are_put_at_their_keys_and_the_recipe_stays_as_it_was() -> None:
    tree: dict[str, Any] = {"data": [{"path": "a"}, {"path": "b"}], "train": {"steps": 1}}
    found = with_overrides(tree, {"data.1.path": "c", "net.options.features": 8, "train.steps": 2})
    assert found["data"] == [{"path": "a"}, {"path": "c"}]
    assert (found["net"], found["train"]) == ({"options": {"features": 8}}, {"steps": 2})
    assert tree == {"data": [{"path": "a"}, {"path": "b"}], "train": {"steps": 1}}
    with pytest.raises(RecipeError, match="the recipe has no 2 there, but 2 tables"):
        with_overrides(tree, {"data.2.path": "c"})
    with pytest.raises(RecipeError, match="steps is 1, not a table"):
        with_overrides(tree, {"train.steps.more": 1})


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("", r"has no \[sweep\]; add one"),
        ('[sweep]\n"train.learning_rate" = 1e-3', r"train.learning_rate is 0.001; give a list"),
        ('[sweep]\n"train.learning_rte" = [1]', r"trial 0: unknown key train.learning_rte \(did you mean"),
        (
            '[sweep]\n"train.learning_rate" = [1e-3, -1]',
            r"trial 1: train.learning_rate: -1 is not a number above 0$",
        ),
        ('[sweep]\ncombine = "both"\n"train.seed" = [1]', r"combine is 'both'; write product or zip"),
    ],
)
def test_a_sweep_that_is_wrong_is_refused_before_it_starts(tmp_path: Path, table: str, sentence: str) -> None:
    make_folder(tmp_path, table)
    with pytest.raises(RecipeError, match=sentence):
        Sweep.load(tmp_path / "recipe.toml")


def test_one_recipe_may_have_tables_for_a_sweep_and_a_search_and_be_trained_as_it_is(tmp_path: Path) -> None:
    more = '[sweep]\n"train.seed" = [1, 2]\n[tune]\n"train.seed" = { low = 1, high = 2 }'
    path = make_folder(tmp_path, f"validate_every = 2\n{more}") / "recipe.toml"
    assert [each.train.seed for each in Sweep.load(path).recipes] == [1, 2]
    assert Tuning.load(path).recipe == load_training(path)


# ---- trainings side by side


def test_each_trial_learns_as_it_would_alone(folder: Path) -> None:
    workers = Threads(2)
    rows = swept(folder, workers)
    assert [(row.number, row.values) for row in rows] == [
        (0, {"train.learning_rate": 1e-3, "net.options.features": 4}),
        (1, {"train.learning_rate": 1e-3, "net.options.features": 6}),
        (2, {"train.learning_rate": 1e-2, "net.options.features": 4}),
        (3, {"train.learning_rate": 1e-2, "net.options.features": 6}),
    ]
    assert {row.state for row in rows} == {"done"}
    assert (workers.sent, workers.most) == (["000", "001", "002", "003"], 2)
    alone = Sweep.load(folder / "recipe.toml").recipes[2]
    train(alone, folder / "alone", str(folder))
    assert losses_in(folder / "s" / "002") == losses_in(folder / "alone")
    assert (folder / "s" / "002" / WEIGHTS).read_bytes() == (folder / "alone" / WEIGHTS).read_bytes()
    assert losses_in(folder / "s" / "000") != losses_in(folder / "s" / "002")
    assert rows[2].loss == losses_in(folder / "alone")[-1]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the site names on this node, for this process."""
    monkeypatch.setenv(node_cache.VARIABLE, str(tmp_path / "node"))
    yield tmp_path / "node"
    node_cache.close_caches()


def compressed(folder: Path, fill: int) -> None:
    """Write the volume `v.n5`, in chunks that are to be decoded, and let the recipe learn from it."""
    create_array(folder / "v.n5", "", ArraySpec((24, 24, 24), np.dtype(np.uint8), (8, 8, 8), codec="gzip"), "n5")
    data = np.random.default_rng(fill).integers(0, 256, (24, 24, 24), np.uint8)
    open_writer(folder / "v.n5", "").write(Box.from_shape((24, 24, 24)), data)
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("v.tif", "v.n5"))


def test_trials_share_a_decoded_copy_and_learn_the_same_bytes_as_without(
    folder: Path, node: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    compressed(folder, 1)
    settings = ("train.steps=12", "train.validate_every=6")  # windows of as many voxels as there are
    assert [row.state for row in swept(folder, Threads(4), *settings)] == ["done"] * 4
    assert sum("is decoded for all trainings" in line for line in caplog.messages) == 1
    assert [file.name for file in node.glob("*/*.npy")] == ["voxels.npy"]
    copied = len(list(node.glob("*")))
    for number, recipe in enumerate(Sweep.load(folder / "recipe.toml", settings).recipes):
        alone, trial = folder / f"alone{number}", folder / "s" / f"00{number}"
        train(recipe, alone, str(folder))
        assert (trial / WEIGHTS).read_bytes() == (alone / WEIGHTS).read_bytes()
        assert losses_in(trial) == losses_in(alone)
    assert len(list(node.glob("*"))) == copied == 1
    swept(folder, Threads(1), *settings, "train.steps=11", fresh=True)  # of fewer steps: a part of it is enough
    assert len(list(node.glob("*"))) == copied


def test_volumes_are_sampled_once_for_all_trials_until_they_change(
    folder: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compressed(folder, 1)
    sampled: list[str] = []
    checked: list[str] = []

    def taken(volume: Volume, *box: Box) -> object:
        checked.append(str(volume))
        return take_sample(volume, *box)

    def noted(volume: Volume) -> Identity:
        sampled.append(str(volume))
        return identify_whole(volume)

    def change(result: TrialResult) -> None:
        if result.number == 1:
            compressed(folder, 2)

    monkeypatch.setattr(training_volumes, "identify_whole", noted)
    monkeypatch.setattr(training_volumes, "take_sample", taken)
    assert [row.state for row in swept(folder, Threads(1), on_end=change)][:2] == ["done"] * 2
    noted_first, noted_last = (read_identities(folder / "s" / name / "inputs.json") for name in ("001", "003"))
    assert noted_first is not None and noted_last is not None
    assert (sampled, noted_first == noted_last) == ([str(folder / "v.n5")] * 2, False)
    assert checked == [str(folder / "v.n5")]  # for two nets
    assert noted_last["volume 1"] == identify_whole(open_volume(folder / "v.n5"))


def test_what_is_done_is_left_alone_and_new_values_get_the_next_numbers(folder: Path) -> None:
    swept(folder, Threads(2))
    before = (folder / "s" / "001" / WEIGHTS).stat().st_mtime_ns
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace("[4, 6]", "[5, 6]"))
    workers = Threads(2)
    rows = swept(folder, workers)
    assert workers.sent == ["004", "005"]
    assert (folder / "s" / "001" / WEIGHTS).stat().st_mtime_ns == before
    assert [(row.number, row.values["net.options.features"]) for row in rows] == [(1, 6), (3, 6), (4, 5), (5, 5)]
    with pytest.raises(RecipeError, match=r"s/001: .*samples.swap: true -> false"):
        swept(folder, Threads(2), "samples.swap=false")
    workers = Threads(2)
    swept(folder, workers, "samples.swap=false", fresh=True)
    assert workers.sent == ["000", "001", "002", "003"]


def test_a_trial_that_fails_stops_no_other_and_is_named(folder: Path) -> None:
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.partition("[sweep]")[0] + '[sweep]\n"train.learning_rate" = [1e-3, 1e30]')
    rows = swept(folder, Threads(1), "train.clip=0")
    assert [row.state for row in rows] == ["done", "failed"]
    assert "give a smaller train.learning_rate" in rows[1].reason
    table = json.loads((folder / "s" / "table.json").read_text())
    assert [(line["trial"], line["state"], line["train.learning_rate"]) for line in table] == [
        (0, "done", 1e-3),
        (1, "failed", 1e30),
    ]
    with (folder / "s" / "table.csv").open() as file:
        assert [line["steps"] for line in csv.DictReader(file)] == ["6", "0"]


def test_trainings_of_several_ranks_share_the_workers_with_those_of_one(folder: Path) -> None:
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.partition("[sweep]")[0] + '[sweep]\n"train.ranks" = [1, 2, 3]')
    workers = Threads(3)
    assert [row.state for row in swept(folder, workers)] == ["done"] * 3
    assert (sorted(workers.sent), workers.most) == (["000", "001", "001", "002", "002", "002"], 3)


def test_a_trial_whose_folder_another_driver_holds_stops_the_sweep_by_name(folder: Path) -> None:
    with RunFolder(folder / "s" / "001").locked():
        (folder / "s" / "sweep.json").write_text("[]")
        with pytest.raises(RunError, match=r"s/001"):
            swept(folder, Threads(1))


def test_folders_of_others_and_trainings_in_use_are_refused(folder: Path) -> None:
    (folder / "s").mkdir()
    (folder / "s" / "precious").touch()
    with pytest.raises(RunError, match=r"holds precious and no sweep.json"):
        swept(folder, Threads(1))
    assert (folder / "s" / "precious").exists()


def test_more_ranks_than_workers_are_refused(folder: Path) -> None:
    with pytest.raises(SiteError, match=r"train.ranks is 3, and the site runs 2 tasks"):
        swept(folder, Threads(2), "train.ranks=3")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("degrade.kind=none", "degrade.kind is none, so that its input would be as fine as the truth"),
        ("samples.shape=[4,15,15]", "is not a multiple of the stride"),
        ("data.0.path=gone.tif", "gone.tif"),
    ],
)
def test_what_a_training_refuses_a_sweep_and_a_search_refuse(folder: Path, setting: str, sentence: str) -> None:
    more = '[tune]\n"train.learning_rate" = { low = 1e-4, high = 1e-2 }\n'
    make_folder(folder, "validate_every = 2\n" + SWEEP + more)
    workers = Threads(1)
    with pytest.raises(VolpipeError, match=sentence):
        swept(folder, workers, setting)
    tuning = Tuning.load(folder / "recipe.toml", [setting])
    with pytest.raises(VolpipeError, match=sentence):
        run_search(tuning, folder / "t", workers.start, search_path=folder)
    assert not list(folder.glob("s/[0-9]*")) and not (folder / "t").exists()


# ---- the commands


def test_a_training_that_is_asked_to_stop_says_so_and_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.partition("[sweep]")[0])
    give = giver(folder, monkeypatch, capsys)
    base = ("train", "recipe.toml", "--config", "threads")
    take_step = module.take_step

    def asking(state: module.TrainState, *rest: Any) -> dict[str, float]:
        if state.step == 2:
            (folder / "recipe.train" / "stop").touch()
        return take_step(state, *rest)

    monkeypatch.setattr(module, "take_step", asking)
    assert (
        give(*base).out == "stopped after 4 steps, as recipe.train/stop asks; run the same command again to continue\n"
    )
    monkeypatch.setattr(module, "take_step", take_step)
    assert give(*base).out.startswith("took 6 steps; the weights are in")


@pytest.mark.long
@pytest.mark.slow
def test_the_command_sweeps_on_processes_of_this_machine_one_of_which_is_killed(folder: Path) -> None:
    settings = ("train.steps=200", "train.checkpoint_every=5")  # a second or more, in which one is killed
    rows = swept(folder, Threads(2), *settings)
    options = [part for setting in settings for part in ("--set", setting)]
    process = begin(folder, "sweep", "recipe.toml", *options, VOLPIPE_WORKERS="2")
    trial = folder / "recipe.sweep" / "001"
    wait_until(lambda: last_step(trial) > 7 and any((trial / WORKERS).iterdir()), 120)
    (sign,) = (trial / WORKERS).iterdir()  # of the worker that trains it; another may have ended all others meanwhile
    psutil.Process(int(sign.name.rpartition("-")[2])).kill()
    assert last_step(trial) < 200
    ended = finish(folder, process, 200)
    assert ended.code == 0, ended.err
    lines = [line.split() for line in ended.out.splitlines()]
    assert lines[0] == [
        "trial",
        "train.learning_rate",
        "net.options.features",
        "steps",
        "loss",
        "score",
        "seconds",
        "state",
    ]
    assert [line[:4] for line in lines[1:5]] == [
        ["000", "0.001", "4", "200"],
        ["001", "0.001", "6", "200"],
        ["002", "0.01", "4", "200"],
        ["003", "0.01", "6", "200"],
    ]
    for row in rows:
        name = f"{row.number:03}"
        assert losses_in(folder / "recipe.sweep" / name) == losses_in(folder / "s" / name)
    wait_until(lambda: not processes_in(folder), 30)
