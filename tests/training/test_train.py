"""Trainings: they learn, and one that was killed and went on comes to the same losses, to the bit."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
import tifffile
import torch
from command import begin, finish, giver, processes_in, wait_until
from PIL import Image
from safetensors.torch import load_file
from trainings import Threads, make_folder

from volpipe.errors import RecipeError, RunError, RunStopped
from volpipe.models.superres import superres
from volpipe.nets.load import describe
from volpipe.recipes.inference import load_recipe
from volpipe.recipes.training import LOSSES, WEIGHTS, Steps, TrainRecipe, check_same, load_training
from volpipe.training import loop
from volpipe.training.data.volumes import check_net
from volpipe.training.driver import TrainingResult, run_training
from volpipe.training.logs import last_step
from volpipe.training.loop import (
    SINGLE_RANK,
    TrainLog,
    TrainState,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
    train,
)
from volpipe.training.task import Training
from volpipe.volumes.storage.lock import check_holder
from volpipe.volumes.volume import open_volume

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")

TRAIN = """
[train]
steps = 12
batch = 2
accumulate = 2
warm_up = 2
learning_rate = 2e-3
checkpoint_every = 4
threads = 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, train=TRAIN)


def losses_in(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / LOSSES).read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def recipe(folder: Path, *settings: str) -> TrainRecipe:
    return load_training(folder / "recipe.toml", settings)


# ---- steps


def test_the_loss_falls_well_below_that_of_the_interpolation(folder: Path) -> None:
    train(recipe(folder, "train.steps=120", "train.learning_rate=1e-2"), folder / "t", str(folder))
    losses = [loss for _, loss in losses_in(folder / "t")]
    assert np.mean(losses[-10:]) < 0.5 * np.mean(losses[:5])


def test_what_is_saved_loads_into_the_net(folder: Path) -> None:
    train(recipe(folder), folder / "t", str(folder))
    net = superres(factor=2, features=4, num_blocks=1)
    start = net.last.weight.clone()
    net.load_state_dict(load_file(folder / "t" / WEIGHTS))
    assert (net.last.weight - start).abs().max() > 0


def test_stopped_anywhere_and_gone_on_it_comes_to_the_same_losses_and_weights(folder: Path) -> None:
    train(recipe(folder), folder / "whole", str(folder))
    train(recipe(folder, "train.steps=4", "train.schedule=constant"), folder / "other", str(folder))
    calls = iter(range(100))

    def interrupt() -> None:  # at its start, and before it writes each checkpoint
        if next(calls) == 2:
            raise RunError("interrupted")

    with pytest.raises(RunError, match="interrupted"):
        train(recipe(folder), folder / "cut", str(folder), interrupt)
    assert [path.stem for path in checkpoints(folder / "cut" / "checkpoints")] == ["000000004"]
    assert losses_in(folder / "cut")[-1][0] == 8
    train(recipe(folder), folder / "cut", str(folder))
    assert losses_in(folder / "cut") == losses_in(folder / "whole")
    assert (folder / "cut" / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()
    assert losses_in(folder / "other")[:4] != losses_in(folder / "whole")[:4]  # equality was not for want of change


def test_one_batch_of_four_learns_as_two_of_two(folder: Path) -> None:
    """Gradients are averaged over the same windows; only the order of sums differs."""
    train(recipe(folder), folder / "two", str(folder))
    train(recipe(folder, "train.batch=4", "train.accumulate=1"), folder / "one", str(folder))
    two, one = (np.array([loss for _, loss in losses_in(folder / name)]) for name in ("two", "one"))
    np.testing.assert_allclose(two, one, rtol=1e-4)


def test_bfloat16_learns_nearly_the_same(folder: Path) -> None:
    train(recipe(folder), folder / "full", str(folder))
    train(recipe(folder, "train.precision=bfloat16", "train.channels_last=true"), folder / "half", str(folder))
    full, half = (np.array([loss for _, loss in losses_in(folder / name)]) for name in ("full", "half"))
    np.testing.assert_allclose(full, half, rtol=0.05)
    assert (full != half).any()


def test_the_average_lags_behind_the_net(folder: Path) -> None:
    train(recipe(folder), folder / "t", str(folder))
    state = load_checkpoint(checkpoints(folder / "t" / "checkpoints")[-1])
    now, mean = state["net"]["last.weight"], state["average"]["last.weight"]
    assert 0 < mean.abs().sum() < now.abs().sum()
    assert state["step"] == 12


def test_a_loss_that_is_no_number_stops_the_training(folder: Path) -> None:
    with pytest.raises(RunError, match=r"the (loss|gradient's norm) is (nan|inf); give a smaller train.learning_rate"):
        train(recipe(folder, "train.learning_rate=1e30", "train.clip=0"), folder / "t", str(folder))


def test_a_gradient_that_is_no_number_stops_the_training(folder: Path) -> None:
    """The loss of the same step is one, and the weights after it are not."""
    (folder / "steep.py").write_text(
        "import torch\n\n"
        "class Steep(torch.nn.Module):\n"
        "    volpipe = dict(in_channels=1, out_channels=1, intensity='same', window=(8, 8, 8), halo=(0, 0, 0))\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.zeros(1))\n"
        "    def forward(self, x):\n"
        "        return x + torch.sqrt(self.weight)\n\n"
        "net = Steep\n"
    )
    net = ("net.name=steep.py:net", "degrade.kind=none", "train.steps=1", "train.warm_up=0")
    one = recipe(folder, *net)
    with pytest.raises(RunError, match=r"step 1: the gradient's norm is (nan|inf); give a smaller train.learning_rate"):
        train(one, folder / "t", str(folder))
    assert not (folder / "t" / "weights.safetensors").exists()


def test_a_discriminator_that_is_no_number_is_in_no_checkpoint(folder: Path) -> None:
    """The net does not learn from it yet."""
    asked = ("adversary.weight=0.1", "adversary.features=4", "adversary.start=100", "adversary.learning_rate=1e30")
    with pytest.raises(RunError, match=r"the discriminator's loss is (nan|inf); give a smaller adversary\.learning"):
        train(recipe(folder, *asked, "train.checkpoint_every=1"), folder / "t", str(folder))
    newest = load_checkpoint(checkpoints(folder / "t" / "checkpoints")[-1])
    assert newest["step"] == 1


def test_a_net_that_gives_other_channels_than_it_declares_is_refused(folder: Path) -> None:
    (folder / "three.py").write_text(
        "import torch\n\n"
        "class Three(torch.nn.Module):\n"
        "    volpipe = dict(in_channels=1, out_channels=1, intensity='same', window=(8, 8, 8), halo=(0, 0, 0))\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Conv3d(1, 3, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n\n"
        "net = Three\n"
    )
    one = recipe(folder, "net.name=three.py:net", "degrade.kind=none")
    with pytest.raises(RecipeError, match=r"three.py:net gave \(2, 3, .* are learnt; correct what it, or \[net\]"):
        train(one, folder / "t", str(folder))


def test_the_first_weights_of_a_net_are_those_of_the_seed(folder: Path) -> None:
    (folder / "plain.py").write_text("import torch\n\nnet = lambda: torch.nn.Conv3d(1, 1, 3, padding=1)\n")

    def first_loss(name: str, seed: int) -> float:
        torch.manual_seed(torch.seed())
        settings = ("net.name=plain.py:net", "net.options={}", "degrade.kind=none", "train.steps=1")
        train(recipe(folder, *settings, f"train.seed={seed}"), folder / name, str(folder))
        return losses_in(folder / name)[0][1]

    assert first_loss("a", 3) == first_loss("b", 3) != first_loss("c", 4)


def test_any_seed_is_one(folder: Path) -> None:
    assert train(recipe(folder, f"train.seed={2**62}", "train.steps=1"), folder / "t", str(folder)) == 1


def test_numbers_that_are_read_later_are_logged_in_order_and_stop_before_a_checkpoint(folder: Path) -> None:
    """As on a GPU, of which steps are read together."""
    (folder / "checkpoints").mkdir()
    written: list[Mapping[str, float]] = []
    chosen = recipe(folder, "train.checkpoint_every=5")
    nothing = cast(Any, None)  # Any: what is not asked here
    train_log = TrainLog(chosen, nothing, nothing, folder, nothing, SINGLE_RANK, written.append, read_every=3)
    for step, loss in enumerate([1.0, 2.0, 3.0, math.nan], 1):
        entry = {"step": step, "loss": torch.tensor(loss), "norm": torch.tensor(0.5)}
        assert not train_log.write(cast(TrainState, SimpleNamespace(step=step)), entry)
        assert [each["loss"] for each in written] == ([] if step < 3 else [1.0, 2.0, 3.0])
    with pytest.raises(RunError, match=r"step 4: the loss is nan"):
        train_log.write(
            cast(TrainState, SimpleNamespace(step=5)), {"step": 5, "loss": torch.ones(()), "norm": torch.ones(())}
        )
    assert [each["step"] for each in written] == [1, 2, 3] and not list((folder / "checkpoints").iterdir())


# ---- rates


def test_schedules_rise_and_fall_as_they_say() -> None:
    cosine = Steps(steps=100, warm_up=10, learning_rate=1.0)
    assert cosine.rate(0) == pytest.approx(0.1, rel=0.01)
    assert cosine.rate(50) == pytest.approx(0.5)
    assert cosine.rate(99) < 0.001
    further = cosine.model_copy(update={"steps": 120})
    assert [further.rate(step, 100) for step in (100, 105, 110)] == pytest.approx([1, (2 + 2**0.5) / 4, 0.5])
    trapezoid = Steps(steps=100, warm_up=10, learning_rate=1.0, schedule="trapezoid", decay=20)
    assert [trapezoid.rate(step) for step in (4, 50, 80, 90, 99)] == pytest.approx([0.5, 1, 1, 0.5, 0.05])
    longer = trapezoid.model_copy(update={"steps": 200})
    assert all(trapezoid.rate(step) == longer.rate(step) for step in range(81))


# ---- recipes


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("train.learning_rte=1", r"unknown key train.learning_rte \(did you mean 'learning_rate'\?\)"),
        ("samples.margin=[2,0,0]", "margin 2 leaves nothing of shape 4 on axis z"),
        ("samples.shape=[4,16,18]", "swap needs as many voxels on y as on x"),
        ("train.schedule=linear", "--set train.schedule=linear: 'linear' is not one of constant, cosine, trapezoid$"),
        ("loss.l1=0", "every weight is 0"),
        ("degrade.missing=1", "--set degrade.missing=1: 1 is not a number from 0 and below 1$"),
        ("train.learning_rate=inf", "inf is not a finite number above 0$"),
        ('samples.flips=["z","z"]', "name an axis twice; name it once"),
        ("classes.ignore=255", "classes have no names; give classes.names"),
    ],
)
def test_bad_recipes_are_refused_by_name(folder: Path, setting: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        recipe(folder, setting)


def test_consistency_is_not_asked_with_slices_that_are_missing(folder: Path) -> None:
    recipe(folder, "degrade.missing=0.1")
    recipe(folder, "loss.consistency=1")
    with pytest.raises(RecipeError, match=r"would teach the slices that degrade.missing takes away"):
        recipe(folder, "degrade.missing=0.1", "loss.consistency=1")


@pytest.mark.parametrize(
    ("settings", "scale", "sentence"),
    [
        (["loss.consistency=1", "degrade.kind=subsample"], (2, 1, 1), "compares means .* degrade.kind = 'subsample'"),
        (["loss.consistency=1", "degrade.kind=gaussian"], (1, 2, 2), "compares means .* degrade.kind = 'gaussian'"),
        ([], (1, 2, 1), r"has scale \(1, 2, 1\), so that y and x cannot be exchanged; set samples.swap = false"),
    ],
)
def test_what_the_scale_of_a_net_does_not_allow_is_refused(
    folder: Path, settings: list[str], scale: tuple[int, int, int], sentence: str
) -> None:
    facts = describe(recipe(folder).net)
    plain, scaled = (facts.model_copy(update={"scale": each, "stride": (1, 1, 1)}) for each in ((1, 1, 1), scale))
    check_net(recipe(folder, *settings), plain)
    with pytest.raises(RecipeError, match=sentence):
        check_net(recipe(folder, *settings), scaled)
    check_net(recipe(folder, "loss.consistency=1", "samples.swap=false"), scaled)


def test_a_misspelt_key_of_a_volume_is_named(folder: Path) -> None:
    text = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(text.replace("held_out", "held_ot"))
    with pytest.raises(RecipeError, match=r"unknown key data.0.held_ot \(did you mean 'held_out'\?\)"):
        recipe(folder)


def test_steps_may_be_added_until_the_rate_falls() -> None:
    net = {"net": {"name": "identity"}, "data": [{"path": "v"}]}
    old = TrainRecipe.model_validate(net | {"train": {"steps": 100, "schedule": "trapezoid", "decay": 20}})
    new = TrainRecipe.model_validate(net | {"train": {"steps": 200, "schedule": "trapezoid", "decay": 50}})
    check_same(old, new, 80)
    with pytest.raises(RecipeError, match="on which the rate depended already"):
        check_same(old, new, 81)
    other = TrainRecipe.model_validate(
        net | {"train": {"steps": 100, "schedule": "trapezoid", "decay": 20, "batch": 2}}
    )
    with pytest.raises(RecipeError, match=r"train.batch: 1 -> 2"):
        check_same(old, other, 1)


# ---- checkpoints and the folder


def test_fewer_steps_than_were_taken_are_refused_as_such() -> None:
    net = {"net": {"name": "identity"}, "data": [{"path": "v"}]}
    old, new = (TrainRecipe.model_validate(net | {"train": {"steps": n, "schedule": "constant"}}) for n in (20, 10))
    check_same(old, new, 10)
    with pytest.raises(RecipeError, match=r"train\.steps: 20 -> 10, and 11 are taken already"):
        check_same(old, new, 11)


def test_weights_of_fewer_steps_do_not_pass_for_those_of_all(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver may be killed between the last checkpoint and the weights."""
    give = giver(folder, monkeypatch, capsys)
    base = ("train", "recipe.toml", "--config", "threads", "--set", "train.schedule=constant")
    weights = folder / "recipe.train" / WEIGHTS
    assert give(*base, "--set", "train.steps=4").code == 0
    early = weights.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("volpipe.training.loop.save_weights", lambda path, state: None)
        assert give(*base, "--set", "train.steps=6").code == 0
    assert not weights.exists()
    assert give(*base, "--set", "train.steps=6").code == 0
    assert weights.read_bytes() != early


def test_a_damaged_checkpoint_is_named(folder: Path) -> None:
    train(recipe(folder), folder / "t", str(folder))
    newest = checkpoints(folder / "t" / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    with pytest.raises(RunError, match=r"cannot be read .* delete it to continue from the one before"):
        train(recipe(folder), folder / "t", str(folder))


def test_a_checkpoint_that_is_code_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (tmp_path / "sprung",)  # type: ignore[return-value]

    torch.save({"net": Trap()}, tmp_path / "000000001.pt")
    with pytest.raises(RunError, match="cannot be read"):
        load_checkpoint(tmp_path / "000000001.pt")
    assert not (tmp_path / "sprung").exists()


def test_only_as_many_checkpoints_are_kept_as_asked(folder: Path) -> None:
    train(recipe(folder, "train.keep=1"), folder / "t", str(folder))
    assert [path.stem for path in checkpoints(folder / "t" / "checkpoints")] == ["000000012"]
    assert list((folder / "t" / "checkpoints").glob(".*")) == []


def test_a_worker_of_a_driver_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("another\n")
    with pytest.raises(RunError, match="no longer held by this, but by another"):
        check_holder(tmp_path, "this")
    check_holder(tmp_path, "another")


# ---- the command


def check_outcome(folder: Path, said: str) -> None:
    """See that what was printed, and drawn, is what the log has."""
    losses = losses_in(folder / "recipe.train")
    first, last = losses[0], losses[-1]
    assert f"loss: {first[1]:.4g} at step 1, " in said and f"{last[1]:.4g} at step 12\n" in said
    assert "nothing was held out and scored" in said
    image = np.asarray(Image.open(folder / "recipe.train/curve.png").convert("L"))
    assert image.shape[1] > 600 and (image < 50).sum() > 600  # a line from end to end


def test_the_command_trains_goes_on_and_refuses_another_recipe(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(folder, monkeypatch, capsys)
    base = ("train", "recipe.toml", "--config", "threads", "--set", "train.schedule=constant")
    ended = give(*base)
    assert ended.code == 0
    took, *_, use = ended.out.splitlines()
    assert took == f"took 12 steps; the weights are in {folder}/recipe.train/{WEIGHTS}"
    check_outcome(folder, ended.out)
    used = give(*use.removeprefix("use the weights: volpipe ").split(), "--config", "threads", "-o", "used.zarr")
    assert used.code == 0, used.err
    assert open_volume(folder / "used.zarr").spatial_shape == (80, 32, 32)
    run_recipe = load_recipe(folder / "recipe.train/run.toml")
    assert run_recipe.net.weights == str(folder / "recipe.train" / WEIGHTS)
    assert (run_recipe.normalise.low, run_recipe.normalise.high) == (0, 255)
    assert "has its 12 steps already; nothing to do" in give(*base).out
    (folder / "recipe.train" / "stop").touch()
    assert give(*base, "--set", "train.steps=16").code == 0
    assert [step for step, _ in losses_in(folder / "recipe.train")] == list(range(1, 17))
    refused = give(*base, "--set", "train.steps=16", "--set", "samples.swap=false")
    assert refused.code == 2
    assert "samples.swap: true -> false" in refused.err
    (folder / "full").mkdir()
    (folder / "full" / "precious").touch()
    assert "holds precious and no training" in give(*base, "--out", "full").err
    failed = give(*base, "--out", "t", "--set", "samples.shape=[40,16,16]")
    assert failed.code == 2  # before a worker started
    assert failed.err.startswith("volpipe: axis z: a window of 80 voxels") and "longer than the volume" in failed.err


def test_a_volume_that_is_exchanged_is_noticed_by_who_goes_on_and_before_each_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recipe(folder, "train.checkpoint_every=4", "train.schedule=constant")
    first, other = (folder / "v.tif").read_bytes(), tifffile.imread(folder / "v.tif")[::-1].copy()

    def trained(out: str, **options: Any) -> TrainingResult:
        return run_training(chosen, folder / out, Threads(1).start, search_path=folder, **options)

    def save_and_exchange(*arguments: Any) -> None:
        save_checkpoint(*arguments)
        tifffile.imwrite(folder / "v.tif", other)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "save_checkpoint", save_and_exchange)
        with pytest.raises(RunStopped, match=r"volume 1 .*v.tif changed while the net learned from it"):
            trained("t")
    assert [path.stem for path in checkpoints(folder / "t" / "checkpoints")] == ["000000004"]
    with pytest.raises(RunError, match=r"volume 1 .* has changed since this training was begun.*Put the old one back"):
        trained("t")
    (folder / "v.tif").write_bytes(first)
    with pytest.raises(RunError, match="use --same-input to continue"):
        trained("t")
    assert trained("t", same_input=True).steps == 12
    whole = trained("whole")
    assert whole.weights.read_bytes() == (folder / "t" / WEIGHTS).read_bytes()


def test_over_a_volume_that_changed_it_continues_where_the_recipe_says_so(folder: Path) -> None:
    def trained(out: str, *settings: str, **options: Any) -> TrainingResult:
        chosen = recipe(folder, "train.schedule=constant", *settings)
        return run_training(chosen, folder / out, Threads(1).start, search_path=folder, **options)

    first = trained("t").weights.read_bytes()
    os.utime(folder / "v.tif", ns=(0, 0))
    assert trained("t").was_complete and trained("t", "train.continue_steps=6", same_input=True).was_complete
    os.utime(folder / "v.tif", ns=(1, 1))
    with pytest.raises(RecipeError, match=r"train\.seed: 0 -> 1"):
        trained("t", "train.continue_steps=6", "train.seed=1")
    assert (folder / "t" / WEIGHTS).read_bytes() == first
    told: list[tuple[int, int]] = []
    result = trained("t", "train.continue_steps=6", on_step=lambda *step: told.append(step))
    assert (result.steps, result.was_complete, told[-1]) == (18, False, (18, 18))
    assert result.weights.read_bytes() == trained("whole", "train.steps=18").weights.read_bytes() != first
    (folder / "v.tif").rename(folder / "gone.tif")
    assert trained("t", "train.continue_steps=6").was_complete and trained("t").was_complete


def test_what_is_left_is_taken_as_well_where_that_is_more() -> None:
    tree = {"net": {"name": "superres"}, "data": [{"path": "v"}], "train": {"steps": 100, "continue_steps": 10}}
    training = Training(recipe=TrainRecipe.model_validate(tree), search_path="")
    early = training.continued(40, {"labels 1": ["a"]})
    again = early.continued(40, {"labels 1": ["a", "b"]})  # before there was another checkpoint
    late = again.continued(95, {"volume 1": ["c"]})
    assert [each.recipe.train.steps for each in (early, again, late)] == [100, 100, 105]
    assert [(each.after, each.planned, each.changed) for each in late.rounds] == [
        (40, 100, ("labels 1 a", "labels 1 b")), (95, 100, ("volume 1 c",)),
    ]  # fmt: skip
    assert (training.begun, early.begun, late.begun) == (0, 40, 95)


def test_after_an_edit_of_its_net_a_training_is_refused_whether_complete_or_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "from torch import nn\n\n\ndef net():\n    return nn.Sequential(nn.Conv3d(1, 1, 1){})\n"
    (folder / "net.py").write_text(code.format(""))
    give = giver(folder, monkeypatch, capsys)
    changes = ("net.name=net.py:net", "net.options={}", "degrade.kind=none", "train.schedule=constant")
    base = ("--config", "threads", *(word for change in changes for word in ("--set", change)))
    for command in (("train", "recipe.toml", *base), ("sweep", "swept.toml", *base)):
        (folder / "swept.toml").write_text((folder / "recipe.toml").read_text() + '[sweep]\n"train.seed" = [1]\n')
        (folder / "net.py").write_text(code.format(""))
        assert give(*command).code == 0
        (folder / "net.py").write_text(code.format(", nn.ReLU()"))
        for steps in (12, 16):
            refused = give(*command, "--set", f"train.steps={steps}")
            assert refused.code == 2
            assert "the training at step 12 has other code of net net.py:net" in " ".join(refused.err.split())
        assert give(*command, "--fresh").code == 0


@pytest.mark.long
@pytest.mark.slow
def test_killed_with_its_workers_it_goes_on_to_the_same_losses(folder: Path) -> None:
    """By SIGKILL of every process, where no code of ours can tidy up."""
    settings = ["--set", "train.steps=200", "--set", "train.checkpoint_every=5"]
    train(recipe(folder, *settings[1::2]), folder / "whole", str(folder))
    command = ("train", "recipe.toml", "--out", "cut", *settings)
    process = begin(folder, *command, VOLPIPE_WORKERS="1")
    wait_until(lambda: last_step(folder / "cut") > 7, 90)
    for killed in [process, *processes_in(folder)]:
        with suppress(psutil.NoSuchProcess):  # some end with those before them
            killed.send_signal(signal.SIGKILL)
    assert finish(folder, process).code == -signal.SIGKILL
    wait_until(lambda: not processes_in(folder), 30)
    assert 5 <= last_step(folder / "cut") < 200
    again = begin(folder, *command, VOLPIPE_WORKERS="1")
    ended = finish(folder, again, 200)
    assert ended.code == 0, ended.err
    assert losses_in(folder / "cut") == losses_in(folder / "whole")
    assert (folder / "cut" / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()
