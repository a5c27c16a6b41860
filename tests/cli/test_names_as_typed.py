"""Names that users type are printed as they are: Rich's markup and its names of emoji are letters like others."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from command import IDENTITY, THREADS, Ended, Give, giver
from conftest import ROOT
from rich.table import Table
from volumes import noise, write_volume

from volpipe.display.cell import html_of
from volpipe.display.console import rendered
from volpipe.display.plain import plain_column, plain_console, plain_status

NAME = "[bold]a[/x] :two:"
NET = """
import torch
def two():
    net = torch.nn.Identity()
    net.volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 8, 8), intensity="same"
    )
    return net
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    (tmp_path / NAME).mkdir(parents=True)
    write_volume(tmp_path / NAME / "in.n5", noise((8, 16, 16)))
    np.save(tmp_path / NAME / "labels.npy", np.ones((8, 16, 16), np.uint32))
    (tmp_path / NAME / "nets.py").write_text(NET)
    monkeypatch.setenv("COLUMNS", "400")
    return giver(tmp_path, monkeypatch, capsys)


def check(ended: Ended, *, is_named: bool = True) -> None:
    """Fail unless the name stands in what was printed as it is, and nowhere as an emoji or escaped."""
    said = ended.out + ended.err
    assert not is_named or NAME in said
    assert "2️⃣" not in said and "\\[" not in said


@pytest.mark.parametrize(
    "line",
    [
        "info|{n}/in.n5",
        "info|{n}/in.n5/raw",
        "info|{n}/nothing.n5",
        "plan|--quick|{n}/in.n5/raw|-o|{n}/out.zarr",
        "plan|--quick|{n}/in.n5/raw|--set|net.name={n}/nets.py:two|-o|{n}/out.zarr",
        "plan|--quick|{n}/in.n5/raw|--set|net.name={n}/nets.py:none|-o|{n}/out.zarr",
        "net|--no-costs|{n}/nets.py:none",
        "convert|{n}/in.n5/raw|{n}/copy.zarr",
        "evaluate|{n}/in.n5/raw|{n}/nothing.n5",
        "compare|{n}/in.n5/raw|{n}/in.n5/raw",
        "segment|{n}/labels.npy|-o|{n}/seg.zarr",
        "status|{n}/nothing.zarr",
        "report|{n}/nothing.zarr",
        "view|{n}/nothing.zarr",
    ],
)
def test_a_command_prints_names_as_they_are_typed(give: Give, line: str) -> None:
    check(give(*line.format(n=NAME).split("|")))


def test_a_run_and_what_is_said_of_it_print_names_as_they_are_typed(give: Give, tmp_path: Path) -> None:
    out = f"{NAME}/out.zarr"
    ended = give("run", *THREADS, *IDENTITY, "-o", out, f"{NAME}/in.n5/raw")
    assert ended.code == 0, ended.err
    for each in (ended, give("status", out), give("report", out)):
        check(each)
    (tmp_path / out / "s0/c/0/0/0").unlink()
    check(give("verify", out), is_named=False)


def test_a_batch_prints_names_as_they_are_typed(give: Give, tmp_path: Path) -> None:
    write_volume(tmp_path / "plain.n5", noise((8, 16, 16)))
    for options in (("--dry-run",), ()):
        check(give("batch", "plain.n5/raw", "-o", f"{NAME}/batch/", *THREADS, *IDENTITY, *options))


def test_tables_bars_and_lines_show_a_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(NAME, title=NAME, caption=NAME)
    table.add_row(NAME)
    assert rendered(table, NAME).count(NAME) == 5
    assert html_of(table)["text/plain"].count(NAME) == 4
    terminal = plain_console(file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with plain_status(terminal, NAME):
        pass
    assert NAME in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert str(plain_column("{task}").render(NAME)) == NAME  # type: ignore[arg-type]


def test_only_one_module_makes_what_would_read_markup() -> None:
    files = [*(ROOT / "volpipe").rglob("*.py"), *(ROOT / "apps").rglob("*.py")]
    made = re.compile(
        r"\b(Console|TextColumn|SpinnerColumn|Status|Prompt)\(|from_markup|rich\.markup|markup=|from rich import"
    )
    assert [file.name for file in files if "rich" in (text := file.read_text()) and made.search(text)] == ["plain.py"]
