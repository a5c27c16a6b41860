"""Drivers of labellings and of stages, killed in the middle: the same command goes on, to the bytes of one go."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import make
from command import Give, begin, finish, giver, processes_in, wait_until
from growing import edit
from volumes import fingerprint, noise, write_volume

from volpipe.blockwise.journal import Record, read_records
from volpipe.geometry.grid import Box
from volpipe.runs import worker
from volpipe.segmentation import tasks

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")

# As the site that SITE names, for drivers that are to be killed: once it has marked so many units of the stage in the
# journal in HOLD, the driver says so by the file "held", and waits there for good, its workers busy. They notice sooner
# than elsewhere that it is gone.
HOLDING = """
import importlib, os, threading
from pathlib import Path
from volpipe.blockwise.journal import Journal

def config(run_dir):
    made = importlib.import_module("volpipe.configs." + os.environ["SITE"]).config(run_dir)
    for executor in made.executors:
        executor.heartbeat_period, executor.heartbeat_threshold = 1, 3
    return made

if "HOLD" in os.environ:
    folder, stage, number = os.environ["HOLD"].split("/")
    append, units = Journal.append, []
    def append_and_hold(self, record):
        append(self, record)
        if (self.path.parent.name, record.stage) == (folder, stage):
            units.extend(record.done)
            if len(units) >= int(number):
                Path("held").touch()
                threading.Event().wait()
    Journal.append = append_and_hold
"""
# A net that gives the affinity of each voxel to the ones before it, from how much alike the two are.
NET = """
import torch
from torch import nn

class Alike(nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=3, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(1, 1, 1), window=(10, 10, 10), intensity="unit"
    )

    def forward(self, x):
        return torch.cat([1 - (x - x.roll(1, axis)).abs() / 255 for axis in (2, 3, 4)], 1)

def net():
    return Alike()
"""
KINDS = (*worker.RESULTS, *tasks.RESULTS)
OFFSETS = [[-1, 0, 0], [0, -1, 0], [0, 0, -1]]
FLOW = f"""
[[stage]]
name = "near"
net = {{ name = "net.py:net" }}
normalise = {{ method = "none" }}
windows = {{ shape = [10, 10, 10], overlap = 2, block = [1, 1, 1] }}
output = {{ chunk = [8, 8, 8], shard = [8, 8, 8] }}

[[stage]]
name = "objects"
kind = "label"
input = {{ stage = "near", offsets = {OFFSETS} }}
objects = {{ threshold = 0.7 }}
output = {{ block = [8, 8, 8], chunk = [4, 4, 4] }}
"""
SHAPE, BLOCKS = (24, 24, 32), 3 * 3 * 4


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Give]:
    """The command in this process; the site and the net lie in its folder."""
    (tmp_path / "site.py").write_text(HOLDING)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "flow.toml").write_text(FLOW)
    yield giver(tmp_path, monkeypatch, capsys)


def kill(folder: Path, site: str, command: list[str], run: Path, stage: str, number: int) -> list[Record[Any]]:
    """Give the command, kill its driver at its `number`th unit of `stage` in `run`, and return what the journal has."""
    held = folder / "held"
    held.unlink(missing_ok=True)
    process = begin(folder, *command, SITE=site, VOLPIPE_WORKERS="2", HOLD=f"{run.name}/{stage}/{number}")
    wait_until(lambda: process.poll() is not None or held.exists(), 120)
    os.kill(process.pid, signal.SIGKILL)
    ended = finish(folder, process)
    assert ended.code == -signal.SIGKILL, ended.err
    return noted(run)


def noted(run: Path) -> list[Record[Any]]:
    """Return what the journal in `run` has."""
    return list(read_records(run / "journal.jsonl", KINDS))


def units(records: list[Record[Any]]) -> list[tuple[str, int]]:
    """Return every stage and unit that `records` say is done, as often as they say so."""
    return sorted((record.stage, unit) for record in records for unit in record.done)


def num_of(records: list[Record[Any]], stage: str) -> int:
    """Return how many units of `stage` are done, by `records`."""
    return sum(name == stage for name, _ in units(records))


def test_a_labelling_whose_driver_is_killed_twice_goes_on_to_the_same_bytes(tmp_path: Path, give: Give) -> None:
    make(tmp_path / "a.zarr", noise((3, *SHAPE)), chunks=(3, 8, 8, 8))
    given = ["--set", "output.block=[8, 8, 8]", "--set", "output.chunk=[4, 4, 4]", "--set", f"input.offsets={OFFSETS}"]
    given += ["--set", "output.levels=2"]
    whole = give("segment", "a.zarr", "-o", "known/l.zarr", "--parents", "--config", "threads", *given)
    assert whole.code == 0, whole.err

    command, run = ["segment", "a.zarr", "-o", "l.zarr", "--config", "site.py", *given], tmp_path / "l.zarr.run"
    early = kill(tmp_path, "threads", command, run, "edges", 5)
    assert 5 <= num_of(early, "edges") < BLOCKS
    assert num_of(early, "paint") == 0
    first = kill(tmp_path, "local", command, run, "pyramid 1", 3)
    assert (num_of(first, "pieces"), num_of(first, "edges"), num_of(first, "graph")) == (BLOCKS, BLOCKS, 1)
    assert 3 <= num_of(first, "pyramid 1") < 8
    assert first[: len(early)] == early
    (run / ".objects.csv.0123456789abcdef0123456789abcdef").touch()  # as a worker leaves it that is killed just then

    ended = finish(tmp_path, begin(tmp_path, *command, SITE="local", VOLPIPE_WORKERS="2"))
    assert ended.code == 0, ended.err
    once = [(stage, block) for stage in ("edges", "paint", "pieces") for block in range(BLOCKS)]
    assert noted(run)[: len(first)] == first
    graph = [(stage, 0) for stage in ("solve", "number", "name", "graph")]  # a box, a slab
    coarser = [("pyramid 1", shard) for shard in range(2 * 2 * 2)] + [("pyramid 2", 0)]
    assert units(noted(run)) == sorted([*once, *graph, *coarser])
    assert fingerprint(tmp_path / "l.zarr") == fingerprint(tmp_path / "known" / "l.zarr")
    assert (run / "objects.csv").read_bytes() == (tmp_path / "known" / "l.zarr.run" / "objects.csv").read_bytes()
    known = {path.name for path in (tmp_path / "known" / "l.zarr.run").iterdir()}
    assert {path.name for path in run.iterdir()} == known
    wait_until(lambda: not processes_in(tmp_path), 25)


@pytest.mark.long
def test_stages_whose_driver_is_killed_in_the_second_go_on_to_the_same_bytes(tmp_path: Path, give: Give) -> None:
    grey = np.random.default_rng(0).integers(0, 4, [n // 4 for n in SHAPE], np.uint8).repeat(4, 0)
    write_volume(tmp_path / "in.n5", 60 * grey.repeat(4, 1).repeat(4, 2) + noise(SHAPE) // 16)
    given = ["run", "--recipe", "flow.toml", "-o", "out", "in.n5"]
    whole = give(*given, "--config", "threads")
    assert whole.code == 0, whole.err
    out, known, table = tmp_path / "out", tmp_path / "known", Path("objects.zarr.run") / "objects.csv"
    out.rename(known)  # not made there: an output says where its input was
    (tmp_path / "out.run").rename(tmp_path / "known.run")

    command, run = [*given, "--config", "site.py"], out / "objects.zarr.run"
    first = kill(tmp_path, "threads", command, run, "paint", 7)
    assert (num_of(first, "pieces"), num_of(first, "edges"), num_of(first, "graph")) == (BLOCKS, BLOCKS, 1)
    assert 7 <= num_of(first, "paint") < BLOCKS
    before = noted(out / "near.zarr.run")

    ended = finish(tmp_path, begin(tmp_path, *command, SITE="threads", VOLPIPE_WORKERS="2"))
    assert ended.code == 0, ended.err
    assert noted(out / "near.zarr.run") == before
    assert noted(run)[: len(first)] == first
    assert len(units(noted(run))) == 3 * BLOCKS + 4
    for name in ("near.zarr", "objects.zarr"):
        assert fingerprint(out / name) == fingerprint(known / name), name
    assert (out / table).read_bytes() == (known / table).read_bytes()
    assert len((out / table).read_text().splitlines()) > 10
    wait_until(lambda: not processes_in(tmp_path), 25)


@pytest.mark.long
def test_stages_killed_while_they_are_updated_go_on_to_the_bytes_of_a_fresh_flow(tmp_path: Path, give: Give) -> None:
    """Killed in the net, among the fragments and among the labels; the last time --update is not given again."""
    write_volume(tmp_path / "in.n5", noise(SHAPE) // 2, chunk=8)
    given = ["run", "--recipe", "flow.toml", "-o", "out", "in.n5"]
    assert give(*given, "--config", "threads").code == 0
    edit(tmp_path / "in.n5", Box((4, 4, 4), (12, 12, 12)))
    command, out = [*given, "--config", "site.py"], tmp_path / "out"
    for name, stage in (("near", "infer"), ("objects", "pieces"), ("objects", "paint")):
        more = ["--update"] if stage != "paint" else []
        assert num_of(noted(out / f"{name}.zarr.run"), stage) == BLOCKS
        records = kill(tmp_path, "threads", [*command, *more], out / f"{name}.zarr.run", stage, 1)
        assert 0 < num_of(records, stage) < BLOCKS  # the update took some back, and not all were marked again
    ended = finish(tmp_path, begin(tmp_path, *command, SITE="threads", VOLPIPE_WORKERS="2"))
    assert ended.code == 0, ended.err
    updated, table = tmp_path / "updated", Path("objects.zarr.run") / "objects.csv"
    out.rename(updated)
    (tmp_path / "out.run").rename(tmp_path / "updated.run")
    assert give(*given, "--config", "threads").code == 0
    for name in ("near.zarr", "objects.zarr"):
        assert fingerprint(out / name) == fingerprint(updated / name), name
    assert (out / table).read_bytes() == (updated / table).read_bytes()
    wait_until(lambda: not processes_in(tmp_path), 25)
