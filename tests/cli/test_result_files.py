"""An option that names a file to write replaces what it wrote itself, or an empty file, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import IDENTITY, THREADS, Give, giver
from typer.main import get_command

import volpipe as vp
from volpipe.cli.app import app
from volpipe.cli.options import RESULT_FILES
from volpipe.errors import VolpipeError

SHAPE = (8, 16, 16)
# Commands whose option is given a file, by the parameter of the option; and how that file's name must end.
COMMANDS: dict[str, tuple[list[str], str]] = {
    "evaluate json_file": (["evaluate", *THREADS, "a.npy", "b.npy", "--json"], ".json"),
    "evaluate picture": (["evaluate", *THREADS, "a.npy", "b.npy", "--picture"], ".png"),
    "evaluate report": (["evaluate", *THREADS, "a.npy", "b.npy", "--report"], ".html"),
    "compare json_file": (
        ["compare", *THREADS, "a.npy", "b.npy", "--page", "own.html", "--any-input", "--json"],
        ".js",
    ),
    "compare page": (["compare", *THREADS, "a.npy", "b.npy", "--any-input", "--page"], ".html"),
    "segment json_file": (
        ["segment", *THREADS, "grey.npy", "-o", "labels.zarr", "--set", "input.kind=foreground", "--json"],
        ".json",
    ),
    "status table": (["status", "o.zarr", "--csv"], ".csv"),
    "report file": (["report", "o.zarr", "-o"], ".html"),
    "reproduce recipe_out": (["reproduce", "o.zarr", "--recipe-out"], ".toml"),
    "run metrics": (["run", *THREADS, *IDENTITY, "a.npy", "-o", "p.zarr", "--metrics"], ".prom"),
    "run log_json": (["run", *THREADS, *IDENTITY, "a.npy", "-o", "p.zarr", "--log-json"], ".jsonl"),
}
# Of commands whose other option or whose kind of file is tried as well: with -m long.
ALIKE = {
    "evaluate json_file",
    "evaluate report",
    "compare page",
    "compare json_file",
    "segment json_file",
    "run log_json",
}
NEVER = "reproduce recipe_out"  # users go on with a recipe
GROWS = "run log_json"
INPUTS = {command: next((word for word in words if word in ("a.npy", "grey.npy")), "o.zarr")
          for command, (words, _) in COMMANDS.items()}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield a folder with volumes, an output, and a result of each of the options."""
    folder = tmp_path_factory.mktemp("results")
    np.save(folder / "a.npy", np.random.default_rng(0).integers(1, 256, SHAPE, np.uint8))
    np.save(folder / "b.npy", np.random.default_rng(1).integers(1, 256, SHAPE, np.uint8))
    np.save(folder / "grey.npy", np.full(SHAPE, 200, np.uint8))
    np.save(folder / "other.npy", np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        vp.run("a.npy", out="o.zarr", site="threads", settings=["net.name=identity"])
        yield folder


@pytest.fixture
def folder(results: Path, tmp_path: Path) -> Path:
    shutil.copytree(results, tmp_path, dirs_exist_ok=True, symlinks=True)
    return tmp_path


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(folder, monkeypatch, capsys)


def content(folder: Path) -> dict[str, object]:
    """Return what each file below `folder` holds, and where each link leads."""
    return {
        str(path.relative_to(folder)): path.readlink() if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_every_option_that_names_a_file_is_known() -> None:
    known, named = {command.split()[1] for command in COMMANDS}, set()
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        for parameter in getattr(command, "params", ()):
            if re.search(r"FILE|HTML|PNG|CSV|JSON", parameter.metavar or ""):
                named.add(parameter.name)
    assert named == set(RESULT_FILES) == known


@pytest.mark.parametrize(
    "command", [pytest.param(name, marks=[pytest.mark.long] * (name in ALIKE)) for name in COMMANDS]
)
def test_what_the_option_did_not_write_stays_and_is_refused_first(give: Give, folder: Path, command: str) -> None:
    words, suffix = COMMANDS[command]
    others = [each for each in COMMANDS if COMMANDS[each][0] != words]
    np.save(folder / "volume", np.load(folder / "other.npy"))
    (folder / "volume.npy").rename(folder / f"volume{suffix}")
    shutil.copytree(folder / "o.zarr", folder / f"chunks{suffix}")
    (folder / f"text{suffix}").write_text("what I found out\n")
    (folder / f"object{suffix}").write_text('{"time": 3}\n')
    (folder / f"link{suffix}").symlink_to("other.npy")
    (folder / f"nowhere{suffix}").symlink_to("disk/that/is/away")
    (folder / f"input{suffix}").symlink_to(INPUTS[command])
    names = [f"{name}{suffix}" for name in ("volume", "chunks", "text", "object", "link", "nowhere", "input")]
    names += [f"no/such/x{suffix}"]
    for number, other in enumerate(others):
        name = f"other{number}{suffix}"
        result = folder / f"x{COMMANDS[other][1]}"
        if not (folder / name).exists() and give(*COMMANDS[other][0], result.name).code == 0:
            result.rename(folder / name)
            names.append(name)
        break_up(folder)
    assert len(names) == 8 + len(others)
    before = content(folder)
    for name in names:
        ended = give(*words, name)
        assert ended.code == 2, (name, ended.out)
        assert re.match(rf"volpipe: {words[-1]} \S*{re.escape(name)}: ", ended.err.replace("--out", words[-1])), (
            ended.err
        )
        assert len(ended.err.splitlines()) == 1
        assert content(folder) == before, name


def break_up(folder: Path) -> None:
    """Delete what a command made beside its result."""
    for path in (*folder.glob("labels.zarr*"), *folder.glob("p.zarr*")):
        shutil.rmtree(path)
    (folder / "own.html").unlink(missing_ok=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_empty_file_and_an_older_result_are_replaced_by_a_whole_one(give: Give, folder: Path, command: str) -> None:
    words, suffix = COMMANDS[command]
    (folder / f"new{suffix}").touch()
    ended = give(*words, f"new{suffix}")
    assert ended.code == 0, ended.err
    first = (folder / f"new{suffix}").read_bytes()
    assert first
    (folder / f"link{suffix}").symlink_to(f"new{suffix}")
    ended = give(*words, f"link{suffix}")
    second = (folder / f"new{suffix}").read_bytes()
    assert (folder / f"link{suffix}").is_symlink()
    if command == NEVER:
        assert ended.code == 2 and second == first
        return
    assert ended.code == 0, ended.err
    assert second.startswith(first) if command == GROWS else second[:60] == first[:60]
    assert not [path for path in folder.rglob(".*") if re.search(r"\.[0-9a-f]{32}$", path.name)]


@pytest.mark.parametrize("command", [name for name in COMMANDS if "json_file" in name])
def test_json_says_first_by_which_option_it_was_written(give: Give, folder: Path, command: str) -> None:
    words, _ = COMMANDS[command]
    assert give(*words, "x.json").code == 0
    tree = json.loads((folder / "x.json").read_text())
    assert next(iter(tree.items())) == ("written_by", f"volpipe {words[0]} --json")


def test_an_older_result_outlasts_a_refusal_and_not_a_failure(give: Give, folder: Path) -> None:
    vp.convert(folder / "a.npy", folder / "a.n5/raw", chunk=(8, 8, 8))
    words = ["evaluate", *THREADS, "a.n5", "b.npy", "--json", "x.json", "--picture", "x.png"]
    assert give(*words).code == 0
    before = {name: (folder / name).read_bytes() for name in ("x.json", "x.png")}
    assert give(*words, "--roi", "0:99,0:1,0:1").code == 2
    assert before == {name: (folder / name).read_bytes() for name in before}
    chunk = next(path for path in sorted((folder / "a.n5/raw").rglob("*")) if path.is_file() and path.name.isdigit())
    chunk.write_bytes(chunk.read_bytes()[:-9])
    assert give(*words).code == 1
    assert not any((folder / name).exists() for name in before)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("evaluate a.npy b.npy --json x.png --picture x.png", "--picture x.png"),
        ("evaluate a.npy b.npy --json x.json --report ./x.json", "--report ./x.json"),
        ("evaluate a.npy b.npy --json x.json --log-json x.json", "--log-json x.json"),
        ("run a.npy -o new.zarr --recipe empty.toml --log-json empty.toml", "--log-json empty.toml"),
        ("run a.npy -o new.zarr --set net.weights=empty.toml --log-json empty.toml", "--log-json empty.toml"),
    ],
)
def test_two_uses_of_one_file_are_refused(give: Give, folder: Path, words: str, named: str) -> None:
    (folder / "empty.toml").touch()
    before = content(folder)
    ended = give(*words.split(), *THREADS)
    assert ended.code == 2 and f"volpipe: {named}: the command has this file for something else" in ended.err
    assert content(folder) == before


def test_streams_are_written_and_stay(give: Give, folder: Path) -> None:
    words, _ = COMMANDS["evaluate json_file"]
    assert give(*words, "/dev/null").code == 0
    os.mkfifo(folder / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((folder / "pipe").read_text()))
    reader.start()
    assert give(*words, "pipe").code == 0
    reader.join(20)
    assert json.loads(read[0])["written_by"] == "volpipe evaluate --json"
    with (folder / "out.txt").open("wb") as out:
        assert give(*words, f"/dev/fd/{out.fileno()}").code == 0
    assert json.loads((folder / "out.txt").read_text())["scores"]


def test_functions_of_python_replace_no_more_than_their_options(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    scored = vp.evaluate("a.npy", "b.npy", site="threads")
    compared = vp.compare("a.npy", "b.npy", site="threads", any_input=True)
    before = content(folder)
    for write in (
        lambda file: vp.evaluate("a.npy", "b.npy", site="threads", report=file),
        lambda file: vp.compare("a.npy", "b.npy", site="threads", any_input=True, json_file=file),
        lambda file: vp.compare("a.npy", "b.npy", site="threads", any_input=True, page=file),
        lambda file: vp.report("o.zarr", file),
        lambda file: vp.draw_comparison(file, np.zeros(SHAPE), np.ones(SHAPE)),
        lambda file: vp.run(
            "a.npy", out="o.zarr", site="threads", settings=["net.name=identity"], metrics=f"{file}.prom"
        ),
        scored.draw, scored.write_json, compared.write_json, compared.write_page,
    ):  # fmt: skip
        np.save(folder / "mine.prom", np.zeros(3))
        (folder / "mine.prom.npy").rename(folder / "mine.prom")
        (folder / "mine").write_bytes((folder / "other.npy").read_bytes())
        with pytest.raises(VolpipeError, match=r"mine.*it is not replaced; name another file"):
            write(folder / "mine")
        for name in ("mine", "mine.prom"):
            (folder / name).unlink()
        assert content(folder) == before
