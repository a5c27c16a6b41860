"""Progress of the public functions: one display below a notebook's cell, drawn again in place; silence in a script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import TEST_PATH
from kernel import Kernel, Shown, kernel
from volumes import noise, write_volume

import volpipe as vp

SETTINGS = ("net.name=identity", "windows.shape=[8,8,8]", "windows.block=[1,1,1]", "output.levels=0")
BEGIN = f"""
import volpipe as vp
import volpipe.display.cell
volpipe.display.cell.DRAW_SECONDS = 0  # so that every state is drawn, however quick the machine
same = dict(site="threads", settings={SETTINGS!r})
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("cells")
    write_volume(place / "in.n5", noise((16, 16, 16)))
    write_volume(place / "<script>.n5", noise((16, 16, 16)))
    mask = np.zeros((16, 16, 16), np.float32)
    mask[2:6, 2:14, 2:14] = mask[9:13, 2:14, 2:14] = 1
    write_volume(place / "mask.n5", mask)
    return place


@pytest.fixture(scope="module")
def notebook(folder: Path) -> Iterator[Kernel]:
    with kernel(folder) as started:
        started.run(BEGIN)
        yield started


def drawings(shown: Shown) -> list[dict[str, str]]:
    """Return the drawings of the one display of a cell, in plain text and as HTML; there is no other text."""
    assert shown.text == ""
    assert len(shown.displays) == 1
    return next(iter(shown.displays.values()))


def test_a_run_is_one_display_that_moves_and_returns_a_table(notebook: Kernel) -> None:
    shown = notebook.run("vp.run('in.n5', out='out.zarr', **same)")
    texts = [drawing["text/plain"] for drawing in drawings(shown)]
    assert len(texts) > 1 and "100 %" not in texts[0]
    assert "infer" in texts[-1] and "100 % 8 of 8 windows" in texts[-1]
    assert shown.result["text/html"].startswith("<table>")
    assert "<td>infer</td><td>8</td><td>8</td>" in shown.result["text/html"]


def test_stages_of_a_recipe_have_bars_of_their_own(notebook: Kernel, folder: Path) -> None:
    stage = 'kind = "run"\nnet.name = "identity"\nwindows.shape = [8, 8, 8]\nwindows.block = [1, 1, 1]\n'
    recipe = "\n".join(f'[[stage]]\nname = "{name}"\n{stage}' for name in ("first", "second"))
    (folder / "two.toml").write_text(recipe)
    shown = notebook.run("vp.run('in.n5', 'two.toml', out='two', site='threads')")
    last = drawings(shown)[-1]["text/plain"]
    assert "first: infer" in last and "second: infer" in last
    assert "<caption>2 of 2 stages" in shown.result["text/html"]


def test_a_segmentation_and_an_evaluation_are_shown_too(notebook: Kernel) -> None:
    settings = ["input.kind=foreground", "objects.method=components"]
    shown = notebook.run(f"vp.segment('mask.n5', out='labels.zarr', site='threads', settings={settings!r})")
    assert "pieces" in drawings(shown)[-1]["text/plain"]
    assert "<tr><th>objects</th><td>2</td></tr>" in shown.result["text/html"]
    shown = notebook.run("vp.evaluate('labels.zarr', 'labels.zarr', labels=True, site='threads')")
    assert "evaluate" in drawings(shown)[-1]["text/plain"]
    assert "<tr><th>num truth</th><td>2</td></tr>" in shown.result["text/html"]


def test_a_batch_is_a_table_with_a_line_for_each_dataset(notebook: Kernel) -> None:
    shown = notebook.run("vp.batch(['in.n5', '<script>.n5'], out='done', at_once=1, **same)")
    texts = [drawing["text/plain"] for drawing in drawings(shown)]
    assert "planned" in texts[0]
    assert any("running" in text and "waiting" in text and "infer" in text for text in texts)
    lines = [line.split() for line in texts[-1].splitlines()]
    assert [line[1:3] for line in lines if line and line[0] in ("in.n5", "<script>.n5")] == [["new", "done"]] * 2
    pages = [drawings(shown)[-1]["text/html"], shown.result["text/html"]]
    assert all("&lt;script&gt;.n5" in page and "<script" not in page for page in pages)


def test_a_table_for_the_log_is_not_shown_below_the_cell(notebook: Kernel) -> None:
    shown = notebook.run("from volpipe.display.console import rendered\nrendered('a table')")
    assert (shown.displays, shown.text, shown.result["text/plain"]) == ({}, "", "'a table\\n'")


def test_nothing_is_shown_to_who_listens_or_does_not_want_it(notebook: Kernel) -> None:
    shown = notebook.run(
        "vp.run('in.n5', out='a.zarr', progress=False, **same)\n"
        "seen = []\n"
        "vp.run('in.n5', out='b.zarr', on_progress=seen.append, **same)\n"
        "len(seen) > 0"
    )
    assert (shown.displays, shown.text) == ({}, "")
    assert shown.result["text/plain"] == "True"


@pytest.mark.parametrize(
    ("call", "bar"),
    [("vp.convert('in.n5', 'told.npy', {})", "convert"), ("vp.sample('told.n5', (16, 24, 24), {})", "sample")],
)
def test_who_listens_and_wants_a_display_gets_both(notebook: Kernel, call: str, bar: str) -> None:
    asked = call.format("progress=True, on_progress=lambda done, whole: seen.append((done, whole))")
    shown = notebook.run(f"seen = []\n{asked}\nseen[-1][0] == seen[-1][1] > 0")
    assert shown.result["text/plain"] == "True"
    last = drawings(shown)[-1]["text/plain"]
    assert bar in last and "100 %" in last


def test_what_fails_leaves_its_display_where_it_stopped(notebook: Kernel) -> None:
    shown = notebook.run(
        "def stop(progress):\n    if progress.stages[0].num_done >= 4:\n        raise RuntimeError('enough')\n"
        "try:\n    vp.run('in.n5', out='c.zarr', progress=True, on_progress=stop, **same)\n"
        "except RuntimeError as error:\n    result = str(error)\n"
        "result"
    )
    assert "RuntimeError: enough" in shown.result["text/plain"]
    assert "of 8 windows" in drawings(shown)[-1]["text/plain"]
    assert "100 %" not in drawings(shown)[-1]["text/plain"]


def test_a_script_prints_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    report = vp.run("in.n5", out="script.zarr", site="threads", settings=SETTINGS)
    assert not report.was_complete
    assert capfd.readouterr() == ("", "")


def test_a_script_loads_no_notebook(folder: Path) -> None:
    code = (
        "import sys, volpipe as vp; vp.convert('in.n5', 'b.npy'); assert not {'IPython', 'rich'} & sys.modules.keys()"
    )
    environment = os.environ | {"PYTHONPATH": TEST_PATH}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
