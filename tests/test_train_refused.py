"""Nets that come as files can be run but not trained: they are refused before a folder is made or a worker starts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from command import Give, giver
from graphs import export_onnx
from trainings import Threads, make_folder
from zoo import Smooth, description, out_of, scripted, write_package, zipped

from volpipe.course import check_trainable, follow
from volpipe.errors import RecipeError
from volpipe.nets import build_net
from volpipe.recipe import NetChoice
from volpipe.sweep import load_sweep, run_sweep
from volpipe.train import make_trainee
from volpipe.training import TrainRecipe, load_training
from volpipe.tune import load_tuning, run_tuning

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


@pytest.mark.parametrize("name", AS_FILES)
def test_the_command_refuses_a_net_that_is_a_file_in_one_sentence(folder: Path, give: Give, name: str) -> None:
    write_net(folder, name)
    ended = give("train", "recipe.toml", "--out", "t", "--set", f"net.name={name}", "--set", "net.trust_model=true")
    assert (ended.code, ended.out) == (2, "")
    sentence = " ".join(ended.err.split())
    assert sentence.startswith(f"volpipe: net {name} {AS_FILES[name]}, which can be run but not trained; give a net")
    assert not (folder / "t").exists()


@pytest.mark.parametrize("name", list(AS_FILES)[:4])
def test_what_is_refused_runs_and_could_not_have_been_trained(folder: Path, name: str) -> None:
    write_net(folder, name)
    choice = NetChoice(name=name, trust_model=True)
    seen = torch.from_numpy(SEEN)
    assert torch.allclose(build_net(choice, str(folder))(seen), Smooth().eval()(seen), atol=1e-5)
    with pytest.raises((RuntimeError, NotImplementedError, ValueError)):
        make_trainee(with_net(name), str(folder))


def test_no_workers_start_and_nothing_is_deleted_for_what_cannot_be_trained(folder: Path) -> None:
    (folder / "t").mkdir()
    (folder / "t" / "precious").touch()
    recipe, sweep = load_training(folder / "recipe.toml", ["net.name=cells.pt2"]), load_sweep(folder / "recipe.toml")
    with pytest.raises(RecipeError, match=r"net cells.pt2 is a file of torch.export"):
        follow(recipe, folder / "t", unwanted, search_path=folder, fresh=True)
    with pytest.raises(RecipeError, match=r"net cells.onnx is a file of ONNX"):
        run_sweep(sweep, folder / "t", unwanted, search_path=folder, fresh=True)
    with pytest.raises(RecipeError, match=r"net cells.onnx is a file of ONNX"):
        run_tuning(load_tuning(folder / "recipe.toml"), folder / "t", unwanted, search_path=folder, fresh=True)
    assert (folder / "t" / "precious").exists()


@pytest.mark.parametrize("name", ["superres", "package.module:function", "some/file.py:function"])
def test_nets_that_are_code_are_not_refused(name: str) -> None:
    check_trainable(NetChoice(name=name))
