"""What the command line says of itself: help in groups, what ships, and what Tab completes."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import Give, giver
from conftest import ROOT
from typer.main import get_command

import volpipe
from volpipe.cli.app import app
from volpipe.cli.generate import arguments_of
from volpipe.cli.groups import commands
from volpipe.recipes.complaints import keys
from volpipe.recipes.inference import Recipe
from volpipe.resolve import shipped, shipped_recipes

NAMES = [entry.name for entries in commands().values() for entry in entries]
HEAVY = ("torch", "parsl", "tensorstore", "zarr", "z5py", "h5py", "dask")


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    monkeypatch.setenv("COLUMNS", "120")
    return giver(tmp_path, monkeypatch, capsys)


def test_every_command_has_one_group_and_run_comes_first(give: Give) -> None:
    grouped = NAMES
    registered = [info.name or info.callback.__name__ for info in app.registered_commands]  # type: ignore[union-attr]
    registered += [str(info.name) for info in app.registered_groups]
    assert sorted(grouped) == sorted(registered)
    said = give("--help").out
    places = [said.index(f"\n{group.value}:\n") for group in commands()]
    assert places == sorted(places)
    listed = re.findall(r"^  ([a-z0-9]+)  +[A-Z]", said[places[0] :], re.MULTILINE)
    assert listed == grouped and listed[0] == "run"
    often = {"run", "plan", "view", "segment", "batch", "status", "convert", "info", "train", "evaluate"}
    assert set(listed[: len(often)]) == often  # the rest is below
    assert "Start here:" in said and "volpipe run sample.n5/raw" in said


def test_no_sentence_of_the_help_is_cut(give: Give) -> None:
    said = give("--help").out
    assert "..." not in said.replace("[ARGS]...", "")
    assert "run the same command again to continue an interrupted run" in said


@pytest.mark.parametrize("name", NAMES)
def test_h_is_help_without_noise(give: Give, name: str) -> None:
    short, long = give(name, "-h"), give(name, "--help")
    assert short == long and short.code == 0 and short.out.startswith("Usage: volpipe")
    options = short.out.partition("\nOptions:\n")[2]
    assert re.findall(r"--no-(?!costs)\S+|<\S+>|\.\.\.", options) == []


def test_what_ships_is_listed_with_a_line_on_each(give: Give) -> None:
    recipes, nets = give("recipes"), give("nets")
    assert (recipes.code, nets.code) == (0, 0)
    for name in shipped_recipes():
        assert re.search(rf"^{name} +\w.{{20,}}", recipes.out, re.MULTILINE), name
    for name in shipped("volpipe.models"):
        assert re.search(rf"^{name} +\w.{{20,}}", nets.out, re.MULTILINE), name
    assert "trained weights: by the recipes superres_z2, superres_z2_noisy, superres_z4," in nets.out
    assert re.search(r"^identity.*\n.*\n +no trained weights", nets.out, re.MULTILINE)


PUBLIC = (
    "batch", "check_site", "compare", "convert", "evaluate", "info", "net_report", "plan", "report", "reproduce", "run",
    "sample", "segment", "status", "sweep", "train", "tune", "verify", "view",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_function_is_read_with_the_arguments_and_defaults_that_it_has(name: str) -> None:
    taken = inspect.signature(getattr(volpipe, name)).parameters
    read = arguments_of(name)
    assert list(read) == list(taken)
    assert [each for each in read if not read[each].text] == []
    for each, of in taken.items():
        if of.default is of.empty or isinstance(of.default, str | int | float | tuple | None):
            assert read[each].default == (() if of.kind == of.VAR_POSITIONAL else of.default), each


def test_each_option_says_in_a_sentence_what_it_is() -> None:
    def check(path: str, command: Any) -> None:  # Any: typer's own copy of click has no public name
        for each in command.params:
            assert re.fullmatch(r"\S.*\.", each.help or ""), f"{path} {each.name}: {each.help}"
        for name, below in getattr(command, "commands", {}).items():
            check(f"{path} {name}", below)

    check("volpipe", get_command(app))


COMPLETING = f"""
import os, sys, volpipe.cli.app
for line in sys.argv[1:]:
    os.environ |= {{"COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}}
    try:
        volpipe.cli.app.app(prog_name="volpipe")
    except SystemExit:
        print("|")
print(*[n for n in {HEAVY} if n in sys.modules], file=sys.stderr)
"""


def test_tab_completes_sites_recipes_nets_and_keys_without_heavy_packages(tmp_path: Path) -> None:
    """What Tab offers in bash after a line, whose last word is begun."""
    (tmp_path / "mine.toml").touch()
    (tmp_path / "mine.py").touch()
    (tmp_path / "volume.n5").mkdir()
    expected = {
        "volpipe run --config lo": ["local", "local_gpu"],
        "volpipe run --config m": ["mine.py"],
        "volpipe run --recipe superres_z4": ["superres_z4", "superres_z4_noisy", "superres_z4_sharp"],
        "volpipe train mi": ["mine.toml"],
        "volpipe batch mi": ["mine.toml"],
        "volpipe batch vo": ["volume.n5/"],
        "volpipe net un": ["unet3d"],
        "volpipe run --set windows.": [f"{key}=" for key in keys(Recipe) if key.startswith("windows.")],
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "_VOLPIPE_COMPLETE": "complete_bash"}
    command = [sys.executable, "-c", COMPLETING, *expected]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr.split() == []
    offered = [part.split() for part in ended.stdout.split("|")[:-1]]
    assert dict(zip(expected, offered, strict=True)) == expected
    assert len(offered[-1]) > 3
