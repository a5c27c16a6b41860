"""What is wrong in a command is refused before a job gives it; what cannot be seen from here is a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from volumes import noise, write_volume

from volpipe.cli.job import check_command
from volpipe.errors import VolpipeError

NOWHERE = Path("/no/such/folder")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    (tmp_path / "batch.toml").write_text('volumes = ["in.n5"]\nout = "done"\n')
    (tmp_path / "odd.toml").write_text('volumes = ["in.n5"]\nout = "done"\nnormalise.lo = 3\n')
    table = '[[dataset]]\nvolume = "in.n5"\nrecipe = "lost.toml"\nout = "far"\n'
    (tmp_path / "table.toml").write_text(f'out = "done"\n{table}')
    return tmp_path


@pytest.mark.parametrize(
    ("name", "given", "sentence"),
    [
        ("run", {"volume": "lost.n5"}, "no volume at .*lost.n5"),
        ("run", {"volume": "in.n5", "settings": ["windows.blend=x"]}, "'x' is neither one of crop"),
        ("run", {"volume": "in.n5", "recipe": "lost.toml"}, "no recipe at .*lost.toml"),
        ("plan", {"volume": "in.n5", "settings": ["net.name=lost.py:net"]}, r"no Python file at .*lost\.py"),
        ("segment", {"affinities": "lost.zarr"}, "no volume at .*lost.zarr"),
        ("segment", {"affinities": "in.n5", "settings": ["objects.thresold=1"]}, "unknown key objects.thresold"),
        ("evaluate", {"output": "lost.n5", "reference": "in.n5"}, "no volume at .*lost.n5"),
        ("evaluate", {"output": "in.n5", "reference": "lost.n5"}, "no volume at .*lost.n5"),
        (
            "batch",
            {"volumes": ["in.n5"]},
            "batch: it needs a place for its outputs; give --out, a folder or a name with",
        ),
        ("batch", {"volumes": ["in.n5", "batch.toml"]}, "batch: it needs a place"),
        ("batch", {"volumes": ["odd.toml"]}, "odd.toml: unknown key normalise; there are out, volumes"),
        ("batch", {"volumes": ["lost.toml"]}, "lost.toml"),
        ("batch", {"volumes": ["table.toml"]}, "no recipe at .*lost.toml"),
        ("batch", {"volumes": ["in.n5"], "out": "o", "settings": ["windows.blend=x"]}, "'x' is neither one of crop"),
        ("batch", {"volumes": ["in.n5"], "out": "o", "recipe": "lost.toml"}, "no recipe at .*lost.toml"),
        ("train", {"recipe": "lost.toml"}, "no recipe at .*lost.toml"),
        ("sweep", {"recipe": "batch.toml"}, "batch.toml"),
        ("tune", {"recipe": "batch.toml"}, "batch.toml"),
    ],
)
def test_what_is_wrong_is_refused(folder: Path, name: str, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(VolpipeError, match=sentence):
        check_command(name, given, folder)


@pytest.mark.parametrize(
    ("name", "given", "outputs"),
    [
        ("run", {"volume": "in.n5"}, [("the folder of the job", "{}")]),
        ("run", {"volume": "in.n5", "out": "out.zarr"}, [("--out out.zarr", "out.zarr")]),
        ("run", {"volume": "in.n5", "out": "o", "log_json": "-"}, [("--out o", "o")]),
        ("run", {"volume": "in.n5", "out": "o", "log_json": "a"}, [("--out o", "o"), ("--log-json a", "a")]),
        ("evaluate", {"output": "in.n5", "reference": "in.n5", "json_file": "s.json"},
         [("--json s.json", "s.json"), ("the folder of the job", "{}")]),
        ("batch", {"volumes": ["batch.toml"]}, [('out = "done" of batch.toml', "done")]),
        ("batch", {"volumes": ["in.n5"], "out": "all"}, [("--out all", "all")]),
    ],
)  # fmt: skip
def test_what_is_right_names_its_outputs(
    folder: Path, name: str, given: dict[str, Any], outputs: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    told = list[tuple[str, str]]()
    check_command(name, given, folder, lambda what, place: told.append((what, place)))
    assert told == [(what, place.format(folder)) for what, place in outputs]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "given", "warning"),
    [
        ("run", {"volume": "in.n5"}, "in.n5 cannot be seen from here; whether it is there was not checked"),
        ("run", {"volume": "/far/off/in.n5"}, "/far/off is not here; whether in.n5 is in it was not checked"),
        (
            "batch",
            {"volumes": ["batch.toml"]},
            "batch.toml was read in this folder; the job reads it in its own, which",
        ),
        (
            "train",
            {"recipe": "/far/off/t.toml"},
            "/far/off/t.toml cannot be seen from here; whether it is there was not",
        ),
    ],
)
def test_what_cannot_be_seen_is_a_warning(
    folder: Path, name: str, given: dict[str, Any], warning: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command(name, given, NOWHERE)
    assert f"volpipe: warning: {warning}" in " ".join(capsys.readouterr().err.split())


def test_a_recipe_that_is_nowhere_near_is_refused_with_what_to_do(folder: Path) -> None:
    with pytest.raises(
        VolpipeError, match=r"there is no mine.toml in this folder, where it is read because the job's own"
    ):
        check_command("train", {"recipe": "mine.toml"}, NOWHERE)
