"""`~` and `~name` are homes in every path of a user's: options, arguments of Python, keys of recipes, tables."""

from __future__ import annotations

import inspect
import os
import pwd
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import IDENTITY, THREADS, Give, giver
from pydantic import BaseModel
from volumes import noise, write_volume

import volpipe as vp
from volpipe.errors import VolpipeError
from volpipe.recipes.batch import BatchRecipe, list_datasets, load_batch
from volpipe.recipes.inference import Recipe
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.toml import UserPath
from volpipe.recipes.training import TrainRecipe
from volpipe.resolve import path_of, typed_place, with_home
from volpipe.workflow.kinds import KINDS
from volpipe.workflow.recipe import Head

# Keys of recipes that are texts and no paths.
TEXTS = {
    "key", "roi", "channel", "weights_key", "output", "held_out", "box", "labels_key", "value", "input", "name", "by",
    "names", "dataset", "test", "annotated",
}  # fmt: skip
NET = """
import torch
def build():
    net = torch.nn.Identity()
    net.volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0),
        window=(8, 8, 8), intensity="same",
    )
    return net
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home with volumes, a net and recipes in it."""
    home = tmp_path / "home"
    home.mkdir()
    write_volume(home / "in.n5", noise((8, 16, 16)))
    np.save(home / "a.npy", noise((8, 16, 16)))
    np.save(home / "grey.npy", np.full((8, 16, 16), 200, np.uint8))
    (home / "net.py").write_text(NET)
    (home / "mine.toml").write_text('[net]\nname = "~/net.py:build"\n[input]\nmask = "~/in.n5/raw"\n')
    (home / "site.py").write_text("from volpipe.configs.threads import config\n")
    (home / "table.csv").write_text("volume,out,mask\n~/a.npy,~/from_csv.zarr,~/in.n5/raw\n")
    (home / "list.txt").write_text("~/in.n5/raw\n")
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.fixture
def give(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    (tmp_path / "here").mkdir()
    return giver(tmp_path / "here", monkeypatch, capsys)


def test_a_home_stands_for_what_a_path_begins_with_alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    me = pwd.getpwuid(os.getuid())
    assert with_home("~") == str(home) and with_home("~/x/~/y ") == f"{home}/x/~/y "
    assert with_home(f"~{me.pw_name}/x") == f"{me.pw_dir}/x"
    assert with_home("nnunet:~/x") == f"nnunet:{home}/x"
    for text in ("x/~", "./~/x", " ~/x", "s3://b/~/x", "net.py:build", "-~", "none"):
        assert with_home(text) == text
    assert path_of("./~/x") == home / "~/x" and typed_place("./~x") == str(home / "~x")
    assert typed_place(["~/x", Path("~/y"), 3]) == [f"{home}/x", home / "y", 3]
    with pytest.raises(VolpipeError, match=r"~nobody-here/x: there is no user 'nobody-here'.*write ./~nobody-here/x"):
        path_of("~nobody-here/x")


def models(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Yield `model` and the sections in it."""
    if model in seen:
        return
    seen.add(model)
    yield model
    for kind in typing.get_type_hints(model).values():
        for each in (kind, *typing.get_args(kind)):
            if isinstance(each, type) and issubclass(each, BaseModel):
                yield from models(each, seen)


def kinds_in(hint: object) -> Iterator[object]:
    """Yield what a hint is made of; an annotated one as it is."""
    yield hint
    if typing.get_origin(hint) is not typing.Annotated or hint != UserPath:
        for part in typing.get_args(hint):
            if not isinstance(part, str):
                yield from kinds_in(part)


def test_every_key_that_is_a_text_is_a_path_or_known_to_be_none(home: Path) -> None:
    seen: set[type[BaseModel]] = set()
    paths, texts = set(), set()
    for model in (Recipe, SegmentRecipe, TrainRecipe, BatchRecipe, Head, *(kind.keys for kind in KINDS.values())):
        for section in models(model, seen):
            for key, hint in typing.get_type_hints(section, include_extras=True).items():
                found = list(kinds_in(hint))
                if UserPath in found:
                    paths.add(key)
                elif str in found and typing.get_origin(hint) is not dict:
                    texts.add(f"{section.__name__}.{key}")
    assert {"mask", "name", "weights", "path", "labels", "reference", "given", "skeletons", "other", "function",
            "recipe", "out", "volumes"} <= paths  # fmt: skip
    assert {each for each in texts if each.partition(".")[2] not in TEXTS} == set()


def test_public_functions_know_homes() -> None:
    functions = [getattr(vp, name) for name in vp.__all__ if inspect.isfunction(getattr(vp, name))]
    functions += [vp.WindowDataset.from_tensors, vp.WindowDataset.from_volume]
    unaware = [each.__name__ for each in functions if not hasattr(each, "__wrapped__")]
    assert unaware == ["list_sites"]  # which has no arguments


def test_every_path_of_a_command_may_begin_with_a_home(give: Give, home: Path, tmp_path: Path) -> None:
    run = ("run", "--config", "~/site.py", "--recipe", "~/mine.toml")
    done = [
        give(*run, "~/a.npy", "--out=~/o.zarr", "--log-json", "~/log.jsonl", "--metrics", "~/m.prom"),
        give(*run, "~/a.npy", "--mask", "~/in.n5/raw", "-o", "~/p.zarr", "--set", "net.name=~/net.py:build"),
        give("convert", "~/a.npy", "~/c.h5"),
        give("sample", "~/s.n5", "--shape", "16"),
        give("info", "~/a.npy", "~/c.h5"),
        give("evaluate", *THREADS, "~/a.npy", "~/in.n5/raw", "--given", "~/a.npy", "--json", "~/e.json",
             "--report", "~/e.html", "--picture", "~/e.png"),
        give("compare", *THREADS, "~/o.zarr", "~/p.zarr", "--json", "~/d.json", "--page", "~/d.html"),
        give("segment", *THREADS, "~/grey.npy", "-o", "~/l.zarr", "--set", "input.kind=foreground",
             "--json", "~/l.json"),
        give("status", "~/o.zarr", "~/p.zarr", "--csv", "~/t.csv"),
        give("report", "~/o.zarr", "-o", "~/r.html"),
        give("verify", "~/o.zarr"),
        give("reproduce", "~/o.zarr", "--recipe-out", "~/again.toml"),
        give("batch", *THREADS, *IDENTITY, "~/table.csv", "~/list.txt", "~/*.npy", "-o", "~/batch"),
        give("net", "~/net.py:build", "--no-costs"),
    ]  # fmt: skip
    assert [(ended.code, ended.err) for ended in done if ended.code] == []
    made = "o.zarr p.zarr c.h5 s.n5 l.zarr from_csv.zarr batch/grey.zarr log.jsonl m.prom e.json e.html e.png d.json"
    for name in (*made.split(), "d.html", "l.json", "t.csv", "r.html", "again.toml"):
        assert (home / name).exists(), name
    assert list((tmp_path / "here").iterdir()) == []


def test_python_and_keys_know_homes_as_options_do(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    recipe = {"net": {"name": "~/net.py:build"}, "input": {"mask": "~/in.n5/raw"}}
    vp.run("~/a.npy", recipe, out=Path("~/o.zarr"), site="~/site.py")
    assert (
        vp.open("~/o.zarr").shape == (8, 16, 16) and vp.plan("~/a.npy", recipe).recipe.input.mask == f"{home}/in.n5/raw"
    )
    assert vp.report("~/o.zarr", "~/r.html") == home / "r.html"
    batch = home / "batch.toml"
    batch.write_text('out = "~/b/{stem}"\nvolumes = "~/a.npy"\n[[dataset]]\nvolume = "~/grey.npy"\nout = "~/g.zarr"\n')
    datasets, mistakes = list_datasets(load_batch(path_of("~/batch.toml")))
    assert mistakes == [] and {each.out for each in datasets} == {f"{home}/b/a", f"{home}/g.zarr"}
    assert list(Path().iterdir()) == []


def test_a_file_called_so_itself_is_named_with_a_dot(give: Give, home: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    for folder in ("~", "~root"):
        (here / folder).mkdir()
        np.save(here / folder / "a.npy", noise((8, 16, 16), seed=3))
        ended = give("convert", f"./{folder}/a.npy", f"./{folder}/c.npy")
        assert ended.code == 0, ended.err
        ended = give("run", *THREADS, *IDENTITY, f"./{folder}/a.npy", "-o", f"./{folder}/o.zarr")
        assert ended.code == 0, ended.err
        np.testing.assert_array_equal(np.load(here / folder / "c.npy"), noise((8, 16, 16), seed=3))
        np.testing.assert_array_equal(vp.open(here / folder / "o.zarr")[...], noise((8, 16, 16), seed=3))
    assert sorted(path.name for path in here.iterdir()) == ["~", "~root"]
    assert not (home / "c.npy").exists()
