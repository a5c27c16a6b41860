"""Nets that come as files can be run but not trained: they are refused before a folder is made or a worker starts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Give, giver, set_each
from graphs import export_onnx
from trainings import Threads, make_folder
from zoo import Smooth, description, out_of, scripted, write_package, zipped

from volpipe.errors import PlanError, RecipeError, VolpipeError
from volpipe.geometry.grid import Box
from volpipe.nets.load import build_net, describe
from volpipe.recipes.inference import NetChoice
from volpipe.recipes.training import TrainRecipe, load_training
from volpipe.training.data.degrade import context
from volpipe.training.data.volumes import TrainingData, check_data, check_free, check_net
from volpipe.training.driver import check_trainable, run_training
from volpipe.training.loop import make_train_state
from volpipe.training.search.grid import Sweep
from volpipe.training.search.optuna import Tuning
from volpipe.training.search.trials import run_search
from volpipe.volumes.volume import open_volume

TABLES = """
validate_every = 2

[sweep]
"net.name" = ["superres", "cells.onnx"]

[tune]
"net.name" = { choices = ["superres", "cells.onnx"] }
"""
SEEN = np.linspace(-1, 1, 4 * 16 * 16, dtype=np.float32).reshape(1, 1, 4, 16, 16)
AS_FILES = {
    "cells.onnx": "is a file of ONNX",
    "cells.pt": "is a file of TorchScript",
    "cells.pt2": "is a file of torch.export",
    "cells.zip": "is a bioimage.io package",
    "./cells": "is a bioimage.io package",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path, TABLES)


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(folder, monkeypatch, capsys)


def write_net(folder: Path, name: str) -> None:
    """Write one and the same net as the file, or the folder, `name`."""
    net, path = Smooth().eval(), folder / name
    if path.suffix == ".onnx":
        export_onnx(path, net)
    elif path.suffix == ".pt":
        path.write_bytes(scripted(Smooth))
    elif path.suffix == ".pt2":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.export.save(torch.export.export(net, (torch.from_numpy(SEEN),)), path)
    else:
        said = description("zyx")
        made = write_package(folder / "cells", said, net, SEEN, out_of(net, SEEN))
        if path.suffix:
            zipped(made, path)


def with_net(name: str) -> TrainRecipe:
    return TrainRecipe.model_validate({"net": {"name": name, "trust_model": True}, "data": [{"path": "v.tif"}]})


@contextmanager
def unwanted(folder: Path) -> Iterator[Threads]:
    raise AssertionError("workers are started")
    yield


@pytest.mark.long
@pytest.mark.parametrize("name", AS_FILES)
def test_the_command_refuses_a_net_that_is_a_file_in_one_sentence(folder: Path, give: Give, name: str) -> None:
    write_net(folder, name)
    ended = give("train", "recipe.toml", "--out", "t", "--set", f"net.name={name}", "--set", "net.trust_model=true")
    assert (ended.code, ended.out) == (2, "")
    sentence = " ".join(ended.err.split())
    assert sentence.startswith(f"volpipe: net {name} {AS_FILES[name]}, which can be run but not trained; give a net")
    assert not (folder / "t").exists()


@pytest.mark.long
@pytest.mark.parametrize("name", list(AS_FILES)[:4])
def test_what_is_refused_runs_and_could_not_have_been_trained(folder: Path, name: str) -> None:
    write_net(folder, name)
    choice = NetChoice(name=name, trust_model=True)
    seen = torch.from_numpy(SEEN)
    assert torch.allclose(build_net(choice, str(folder))(seen), Smooth().eval()(seen), atol=1e-5)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        make_train_state(with_net(name), str(folder))


def test_no_workers_start_and_nothing_is_deleted_for_what_cannot_be_trained(folder: Path) -> None:
    (folder / "t").mkdir()
    (folder / "t" / "precious").touch()
    recipe, sweep = load_training(folder / "recipe.toml", ["net.name=cells.pt2"]), Sweep.load(folder / "recipe.toml")
    with pytest.raises(RecipeError, match=r"net cells.pt2 is a file of torch.export"):
        run_training(recipe, folder / "t", unwanted, search_path=folder, fresh=True)
    with pytest.raises(RecipeError, match=r"net cells.onnx is a file of ONNX"):
        run_search(sweep, folder / "t", unwanted, search_path=folder, fresh=True)
    with pytest.raises(RecipeError, match=r"net cells.onnx is a file of ONNX"):
        run_search(Tuning.load(folder / "recipe.toml"), folder / "t", unwanted, search_path=folder, fresh=True)
    assert (folder / "t" / "precious").exists()


def test_a_program_of_one_size_is_not_run_without_a_halo(folder: Path, give: Give) -> None:
    """Its windows are too small to measure it by; a halo of 0 would make seams."""
    write_net(folder, "cells.pt2")
    base = ("plan", "--quick", "--trust-model", *set_each("net.name=cells.pt2", "windows.shape=[4,16,16]"), "v.tif")
    refused = give(*base)
    assert refused.code == 2
    assert "net cells.pt2: an output voxel may see more than the only window that it takes, of 4 voxels" in refused.err
    assert "set net.scale, net.stride, net.halo, which it does not declare" in refused.err
    assert (
        give(*base, *set_each("net.halo=[1,4,4]", "net.stride=[1,2,2]", "net.scale=[1,1,1]", "net.out_channels=2")).code
        == 0
    )


@pytest.mark.parametrize("name", ["superres", "package.module:function", "some/file.py:function"])
def test_nets_that_are_code_are_not_refused(name: str) -> None:
    check_trainable(NetChoice(name=name))


def write_volumes(folder: Path) -> None:
    """Write what a training of `LEANING` cannot learn from, beside its v.tif of 40 × 32 × 32 voxels."""
    np.save(folder / "two.npy", np.zeros((2, 40, 32, 32), np.uint8))
    np.save(folder / "short.npy", np.zeros((40, 32, 31), np.uint8))
    np.save(folder / "wide.npy", np.zeros((40, 32, 32), np.uint16))
    np.save(folder / "floats.npy", np.zeros((40, 32, 32), np.float32))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("data.0.path=gone.tif",), "no volume at"),
        (("data.0.path=two.npy",), "has 2 channels, net superres takes 1; give another volume"),
        (("data.0.box=:,:,90%:200%",), "data.box of v.tif: axis x: 29:64 leaves the volume of 32 voxels; use 29:32"),
        (
            ("data.0.stored=true", "train.validate_every=1"),
            "need a volume with held_out; .* of voxels",
        ),
        (("data.0.level=3",), "is one array, which has no level 3|level 3"),
        (("data.0.held_out=:,:,5:5",), "data.held_out of v.tif: axis x: 5:5 holds no voxel"),
        (("data.0.held_out=:,:,:",), "leaves no room in"),
        (("data.0.held_out=:,8:24,:", "samples.shape=[4,10,10]"), "leaves no room in"),
        (("samples.shape=[21,16,16]",), "axis z: a window of 42 voxels .* longer than the volume"),
        (("samples.shape=[4,15,15]",), "axis y: samples.shape 15 is not a multiple of the stride 2 .*; use 16"),
        (("net.options.bogus=1",), "net superres has no option bogus; it takes factor, "),
        (("net.weights=gone.pt",), "no weights at"),
        (("net.name=supperres",), "no net 'supperres'"),
        (("train.betas=[2,3]",), r"train.betas=\[2,3\]: \[2, 3\] is not a list of two numbers from 0 and below 1"),
        (("data.0.path=floats.npy",), "needs numbers that a training does not measure"),
    ],
)
def test_what_cannot_be_learnt_from_is_refused_in_one_sentence_before_a_worker_starts(
    folder: Path, give: Give, settings: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_volumes(folder)
    monkeypatch.setattr("volpipe.apps.pool.on_site", lambda *arguments: unwanted)
    ended = give("train", "recipe.toml", "--out", "t", *set_each(*settings))
    assert (ended.code, ended.out) == (2, "")
    assert len(ended.err.splitlines()) == 1 and re.search(sentence, ended.err)
    assert not (folder / "t").exists()


@pytest.mark.parametrize(
    ("facts", "settings", "sentence"),
    [
        ({"margin": (0, 2, 2)}, {}, r"gives \(0, 2, 2\) voxels \(z, y, x\) less at each face; pad its convolutions"),
        ({"shrink": (1, 2, 2)}, {}, r"makes one voxel of \(1, 2, 2\) .*; let it end on the grid of its input"),
        ({"num_parameters": 0}, {}, r"has no parameters, so that it cannot learn"),
        ({"out_channels": 3}, {}, r"takes 1 channel and gives 3, .* let it give as many as it takes"),
        (
            {"remainder": (1, 0, 0), "stride": (4, 2, 2)},
            {},
            r"8 is not 1 more than a multiple of the stride 4",
        ),
        (
            {},
            {"net": {"name": "superres", "output": "all"}},
            r"gives all its outputs, .* name it, such as net",
        ),
        (
            {"out_channels": 1, "intensity": "unit"},
            {"affinities": {"offsets": [[0, 0, 14]]}, "data": [{"path": "v.tif", "labels": "l.tif"}]},
            r"axis x: affinities.offsets has \[0, 0, 14\], and no pair .* less samples.margin is 14; give a larger",
        ),
    ],
)
def test_a_net_whose_outputs_are_not_those_that_are_learnt_is_refused(
    facts: dict[str, object], settings: dict[str, object], sentence: str
) -> None:
    samples = {"shape": [8, 16, 16], "margin": [0, 2, 2]}
    tree = {"net": {"name": "superres", "options": {"factor": 1}}, "data": [{"path": "v.tif"}], "samples": samples}
    known = describe(NetChoice(name="superres", options={"factor": 2})).model_copy(update={"scale": (1, 1, 1)})
    check_net(TrainRecipe.model_validate(tree), known)
    with pytest.raises(VolpipeError, match=sentence):
        check_net(TrainRecipe.model_validate(tree | settings), known.model_copy(update=facts))


@pytest.mark.parametrize("seed", range(40))
def test_room_for_a_window_is_found_wherever_there_is_some(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    np.save(tmp_path / "v.npy", np.zeros((5, 6, 7), np.uint8))
    starts = rng.integers(0, 4, (4, 3))
    closed = [Box(tuple(a), tuple(a + rng.integers(1, 5, 3))) for a in starts]
    part, around = Box((0, 0, 1), (5, 6, 7)), (1, 0, 0)
    window = tuple((rng.integers(1, 5, 3) + np.array([2, 0, 0])).tolist())
    free = np.ones((5 + 2, 6, 7), bool)  # with a slice of context at both ends
    free[..., 0] = False
    for box in closed:
        free[box.start[0] + 1 : box.stop[0] + 1, box.start[1] : box.stop[1], box.start[2] : box.stop[2]] = False
    has_room = np.lib.stride_tricks.sliding_window_view(free, window).all((3, 4, 5)).any()
    data = TrainingData(open_volume(tmp_path / "v.npy"), None, None, part, part)
    with nullcontext() if has_room else pytest.raises(PlanError, match="leaves no room in 0:5,0:6,1:7 of"):
        check_free(data, closed, window, around)


def test_all_that_is_held_out_of_a_volume_leaves_room_for_a_window(folder: Path) -> None:
    data = [{"path": "v.tif", "held_out": box} for box in ("0:18,:,:", "22:40,:,:")]
    told = {"net": {"name": "superres"}, "data": data, "degrade": {"kind": "bin"}, "samples": {"shape": [4, 16, 16]}}
    with pytest.raises(PlanError, match=r"held_out 0:18,0:32,0:32 and 22:40,0:32,0:32 leaves no room"):
        run_training(TrainRecipe.model_validate(told), folder / "t", unwanted, search_path=folder)


def test_labels_in_which_there_is_nothing_to_tell_apart_are_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = {"name": "unet3d", "options": {"features": [4, 8], "out_channels": 1, "output": "sigmoid"}}
    told = {"net": net, "samples": {"shape": [8, 16, 16]}, "affinities": {"offsets": [[0, 0, 1]]}}
    for inner, is_said in ((0, True), (1, False)):
        labels = np.zeros((40, 32, 32), np.uint8)
        labels[20:, :16] = inner
        np.save(folder / "l.npy", labels)
        caplog.clear()
        recipe = TrainRecipe.model_validate(told | {"data": [{"path": "v.tif", "labels": "l.npy"}]})
        check_data(recipe, describe(recipe.net), str(folder))
        assert ("there is nothing to tell apart; give data.box" in caplog.text) == is_said


def test_labels_that_do_not_fit_are_refused_before_a_worker_starts(folder: Path) -> None:
    write_volumes(folder)
    net = {"name": "unet3d", "options": {"features": [4, 8], "out_channels": 1, "output": "sigmoid"}}
    for labels, sentence in (("short.npy", "give labels of the volume's shape"), ("floats.npy", "give whole numbers")):
        told = {"net": net, "data": [{"path": "v.tif", "labels": labels}], "samples": {"shape": [8, 16, 16]}}
        told["affinities"] = {"offsets": [[0, 0, 1]]}
        with pytest.raises(PlanError, match=sentence):
            run_training(TrainRecipe.model_validate(told), folder / "t", unwanted, search_path=folder)


def test_what_is_held_out_may_leave_just_a_window(folder: Path, give: Give) -> None:
    """8 voxels along z and what the gaussian sees behind them; what it sees before them lies beyond the volume."""
    seen = context("gaussian", (2, 1, 1))[0]
    assert seen > 0
    base = ("train", "recipe.toml", "--config", "threads", *set_each("degrade.kind=gaussian", "train.steps=1"))
    assert give(*base, "--set", f"data.0.held_out={8 + seen}:40,:,:").code == 0
    refused = give(*base, "--out", "t", "--set", f"data.0.held_out={8 + seen - 1}:40,:,:")
    assert refused.code == 2 and "leaves no room" in refused.err


def test_a_typing_error_deletes_no_training(folder: Path, give: Give) -> None:
    done = ("train", "recipe.toml", "--config", "threads", "--set", "train.steps=1")
    assert give(*done).code == 0
    assert give(*done, "--fresh", "--set", "data.0.path=gone.tif").code == 2
    (folder / "v.tif").unlink()
    ended = give(*done)
    assert (ended.code, "nothing to do" in ended.out) == (0, True), ended.err


def test_voxels_that_are_no_numbers_are_named_not_the_learning_rate(folder: Path, give: Give) -> None:
    np.save(folder / "floats.npy", np.full((40, 32, 32), np.nan, np.float32))
    settings = set_each("data.0.path=floats.npy", "normalise.low=0", "normalise.high=255")
    ended = give("train", "recipe.toml", "--config", "threads", *settings)
    assert ended.code == 1
    assert "\nvolpipe: the training stops after step 0: " in ended.err and "Traceback" not in ended.err
    assert re.search(r"floats\.npy has NaN or infinite voxels in .*; learn from a copy without them", ended.err)


def test_a_net_that_makes_finer_voxels_needs_an_input_that_is_made_coarser(folder: Path, give: Give) -> None:
    ended = give("train", "--config", "threads", "recipe.toml", "--set", "degrade.kind=none")
    assert ended.code == 2
    assert "makes 2 × 1 × 1 voxels (z, y, x) of one, and degrade.kind is none" in ended.err
    assert not (folder / "recipe.train").exists()


def test_a_training_that_failed_before_its_first_checkpoint_begins_again_with_another_recipe(
    folder: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("train", "recipe.toml", "--config", "threads", "--out", "t")
    with monkeypatch.context() as patch:
        patch.setattr("volpipe.training.loop.take_step", lambda *arguments: 1 / 0)
        assert give(*given).code == 1
    assert give(*given, "--set", "samples.swap=false", "--set", "train.steps=2").code == 0
    refused = give(*given, "--set", "samples.swap=true", "--set", "train.steps=2")
    assert (refused.code, "samples.swap: false -> true" in refused.err) == (2, True)
