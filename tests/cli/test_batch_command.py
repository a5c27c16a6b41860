"""`volpipe batch` as people give it: forty datasets on the site `local`, a killed driver, exit codes, its words."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from command import THREADS, Give, begin, finish, giver, set_each, wait_until
from volumes import fingerprint, noise, windowed, write_volume

import volpipe as vp

SHAPE = (12, 16, 16)
FORMATS = {
    "n5": ".n5", "zarr2": ".2.zarr", "zarr3": ".3.zarr", "ome-zarr-0.4": ".o4.zarr", "ome-zarr-0.5": ".o5.zarr",
    "hdf5": ".h5", "tiff": ".tif", "mrc": ".mrc", "npy": ".npy",
}  # fmt: skip
HUNGRY, WAITING = 7, 9  # grey values of volumes that a net takes all memory for, or waits with
NET = f"""
import pathlib, time, torch
class Net(torch.nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 8, 8), intensity="raw"
    )
    def forward(self, x):
        if (x == {HUNGRY}).all():
            raise MemoryError("can't allocate memory")
        while (x == {WAITING}).all() and pathlib.Path("wait").exists():
            time.sleep(0.05)
        return x
def build():
    return Net()
"""
RECIPE = """
[net]
name = "net.py:build"
[normalise]
method = "none"
[windows]
shape = [8, 8, 8]
overlap = 0
block = [1, 2, 2]
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "mine.toml").write_text(RECIPE)
    (tmp_path / "raw").mkdir()
    return giver(tmp_path, monkeypatch, capsys)


def rows(folder: Path, name: str) -> dict[str, dict[str, object]]:
    """Return the lines of a batch's table, by the name of the volume's file."""
    table = json.loads((folder / f"{name}.batch" / "batch.json").read_text())
    return {Path(row["volume"]).name: row for row in table["datasets"]}


def told(folder: Path, name: str) -> dict[str, int]:
    states = [str(row["ended"]) for row in rows(folder, name).values()]
    return {state: states.count(state) for state in sorted(set(states))}


def write_forty(folder: Path) -> None:
    """Write forty volumes of all formats: two are the same, one is damaged, one is too much for the net."""
    for number in range(37):
        format, suffix = list(FORMATS.items())[number % len(FORMATS)]
        np.save(folder / "whole.npy", noise(SHAPE, seed=number))
        vp.convert(folder / "whole.npy", folder / "raw" / f"v{number:02}{suffix}", format=format)
    (folder / "whole.npy").unlink()
    shutil.copytree(folder / "raw" / "v00.n5", folder / "raw" / "same.n5")
    write_volume(folder / "raw" / "damaged.n5", noise(SHAPE, seed=50))
    chunk = next(
        path for path in (folder / "raw" / "damaged.n5" / "raw").rglob("*") if path.is_file() and not path.suffix
    )
    chunk.write_bytes(chunk.read_bytes()[:-9] + bytes(9))
    write_volume(folder / "raw" / "hungry.n5", np.full(SHAPE, HUNGRY, np.uint8))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_forty_datasets_of_all_formats_on_local_workers(tmp_path: Path, give: Give) -> None:
    write_forty(tmp_path)
    (tmp_path / "forty.toml").write_text('volumes = "raw/*"\nrecipe = "mine.toml"\nout = "done"\n')
    command = ("batch", "forty.toml", "--tolerate", "1")
    ended = finish(tmp_path, begin(tmp_path, *command, VOLPIPE_WORKERS="2"))
    assert ended.code == 1, ended.err
    table = rows(tmp_path, "forty")
    assert len(table) == 40 and told(tmp_path, "forty") == {"done": 38, "failed": 1, "incomplete": 1}
    assert (table["damaged.n5"]["ended"], table["hungry.n5"]["ended"]) == ("incomplete", "failed")
    assert "memory" in str(table["hungry.n5"]["reason"]), table["hungry.n5"]["reason"]
    assert re.search(r"raw/hungry\.n5 .*failed", ended.out) and "40 datasets: " in ended.out
    for name, row in table.items():
        if row["ended"] == "done":
            np.testing.assert_array_equal(vp.open(str(row["out"]))[...], vp.open(tmp_path / "raw" / name)[...])
    assert fingerprint(tmp_path / "done" / "v00.zarr" / "s0") == fingerprint(tmp_path / "done" / "same.zarr" / "s0")

    shutil.rmtree(tmp_path / "raw" / "v09.n5")
    write_volume(tmp_path / "raw" / "v09.n5", noise(SHAPE, seed=99))
    dry = give("batch", "forty.toml", "--dry-run")
    assert dry.code == 0
    states = dict(re.findall(r"^raw/(\S+) +(unchanged|incomplete|input changed|new) ", dry.out, re.MULTILINE))
    assert len(states) == 40 and list(states.values()).count("unchanged") == 37
    assert (states["v09.n5"], states["damaged.n5"], states["hungry.n5"]) == (
        "input changed",
        "incomplete",
        "incomplete",
    )
    assert give(*command, *THREADS).code == 1
    assert told(tmp_path, "forty") == {"failed": 2, "incomplete": 1, "unchanged": 37}
    assert "left alone: input changed: " in str(rows(tmp_path, "forty")["v09.n5"]["reason"])
    again = give(*command, *THREADS, "--replace")
    assert (again.code, told(tmp_path, "forty")) == (1, {"done": 1, "failed": 1, "incomplete": 1, "unchanged": 37})
    np.testing.assert_array_equal(vp.open(tmp_path / "done" / "v09.zarr")[...], vp.open(tmp_path / "raw/v09.n5")[...])
    assert f"\nto see it again: volpipe status {tmp_path}/forty.batch\n" in again.out
    (tmp_path / "some.txt").write_text("raw/v09.n5\n")
    assert "name its folder, such as `volpipe status forty.batch`" in give("status", "some.txt").err
    status = give("status", "forty.toml")
    assert status.code == 1 and "40 datasets: " in status.out
    assert json.loads(give("status", "--json", "forty.batch").out)["stages"]["datasets"]["failed"] == 2


def three_volumes(folder: Path) -> None:
    """Write three volumes, of which the net waits with the second."""
    for name, data in (("a", noise(SHAPE)), ("b", np.full(SHAPE, WAITING, np.uint8)), ("c", noise(SHAPE, seed=2))):
        write_volume(folder / "raw" / f"{name}.n5", data)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), signal.SIGINT])
def test_a_batch_goes_on_to_the_same_bytes_after_a_signal(tmp_path: Path, give: Give, number: signal.Signals) -> None:
    three_volumes(tmp_path)
    command = ("batch", "raw/*.n5", "--recipe", "mine.toml", *THREADS, "-o")
    assert give(*command, "whole").code == 0
    (tmp_path / "wait").touch()
    process = begin(tmp_path, *command, "done/", "--at-once", "1")
    table = tmp_path / "done.batch" / "batch.json"
    wait_until(lambda: table.is_file() and rows(tmp_path, "done")["b.n5"]["ended"] == "running", 60)
    running = give("status", "done.batch")
    assert running.code == 3 and "is at work" in running.out
    held = give(*command, "done")
    assert held.code == 2 and "process" in held.err
    process.send_signal(number)
    (tmp_path / "wait").unlink()
    ended = finish(tmp_path, process)
    assert ended.code == (4 if number == signal.SIGINT else -signal.SIGKILL)
    assert ("raw/b.n5: interrupted; 2 left" in ended.err) == (number == signal.SIGINT)
    stopped = json.loads(give("status", "--json", "done").out)
    assert stopped["state"] == "interrupted"
    assert [row["ended"] for row in stopped["datasets"]] == ["done", "interrupted", "waiting"]
    assert "To continue: volpipe batch" in " ".join(give("status", "done").out.split())
    again = give(*command, "done/", "--json")
    assert again.code == 0
    assert [row["state"] for row in json.loads(again.out)["datasets"]] == ["unchanged", "incomplete", "new"]
    for name in "abc":
        assert fingerprint(tmp_path / "done" / f"{name}.zarr") == fingerprint(tmp_path / "whole" / f"{name}.zarr")
    assert "3 datasets: 3 unchanged; nothing to do" in give(*command, "done").out


def test_mistakes_are_a_table_and_nothing_is_written(tmp_path: Path, give: Give) -> None:
    three_volumes(tmp_path)
    (tmp_path / "cells.csv").write_text("volume\nraw/a.n5\nraw/gone1.n5\nraw/gone2.n5\n")
    before = sorted(tmp_path.rglob("*"))
    ended = give("batch", "cells.csv", "raw/no*", "--recipe", "mine.toml", "-o", "done")
    assert (ended.code, ended.out) == (2, "")
    assert "raw/gone1.n5 (cells.csv, line 3)  no volume at" in ended.err and "nothing matches raw/no*" in ended.err
    assert "3 things are wrong, and nothing was begun; mend what is wrong, or give the other volumes" in ended.err
    alike = give("batch", "raw/*.n5", *set_each("windows.shape=3"), "-o", "done")
    assert "raw/a.n5, raw/b.n5, raw/c.n5" in alike.err
    assert alike.err.splitlines()[-1] == "volpipe: 3 things are wrong, and nothing was begun"  # with all of them
    for words, sentence in (
        (("raw/*.n5",), "a batch needs a place for its outputs"),
        (("no.toml",), "no batch at no.toml"),
        (("mine.toml",), "is a recipe, not a batch"),
        (("mine.toml", "raw/a.n5"), "is a batch of its own"),
        (("raw/*.n5", "-o", "no/done/{stem}.zarr"), "there is no folder"),
        (("raw/*.n5", "-o", "done", "--at-once", "0"), "0 is not a whole number from 1"),
        (("raw/*.n5", "-o", "done", "--config", "nowhere"), "nowhere"),
    ):
        refused = give("batch", *words)
        assert (refused.code, sentence in refused.err) == (2, True), refused.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_terminal_is_told_of_each_dataset_and_json_has_nothing_else(tmp_path: Path, give: Give) -> None:
    three_volumes(tmp_path)
    settings = set_each("net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (1, 2, 2), "crop"))
    first = give("batch", "raw/*.n5", "-o", "done/{stem}_{key}.zarr", *settings, *THREADS)
    assert first.code == 0
    constant, *done = first.err.splitlines(keepends=True)
    assert constant.startswith("warning: ") and "raw/b.n5:raw has uint8 voxels of 9 " in constant
    assert re.fullmatch(r"(raw/[abc]\.n5: done after [\d.]+ s; [210] left\n){3}", "".join(done))
    assert "3 datasets: 3 new; still to be written: ≤ " in first.out
    again = give("batch", "raw/*.n5", "-o", "done/{stem}_{key}.zarr", *settings, *THREADS, "--json")
    assert json.loads(again.out)["datasets"][0]["ended"] == "unchanged"
