"""Files of blocks that are computed slab by slab: when they are put in their places, and what one that fails leaves."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from slabs import NORMALISE, planned, slabs_of, source_of
from volumes import noise, windowed, write_volume

from volpipe.blockwise.notes import Reporter
from volpipe.geometry.grid import Box
from volpipe.inference import reassemble
from volpipe.inference.infer import infer
from volpipe.inference.output import ShardFile, create_output
from volpipe.inference.plan import Plan
from volpipe.inference.runner import Bus, Runner
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.volumes.writer import ShardStream

ONE_EACH = ("net.name=identity", "output.levels=0", "output.chunk=[16,16,16]")


def in_a_row(folder: Path, num: int) -> Plan:
    """Return a plan of `num` blocks in a row, of several slabs each, whose output exists."""
    volume = write_volume(folder / "in.n5", noise((96, 16, 16 * num)))
    settings = (*ONE_EACH, *windowed((16, 16, 16), (0, 0, 0), (6, 1, 1), "crop"))
    plan = planned(folder, volume, "out.zarr", *settings)
    create_output(plan, {})
    return plan


def test_while_a_file_is_put_in_its_place_the_next_block_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU would wait for it."""
    computed, windows, close = threading.Event(), list[int](), reassemble.close_shard

    class Counter(Reporter):
        def add(self, num_windows: int) -> None:
            windows.append(num_windows)
            if len(windows) == 12:  # all of both blocks
                computed.set()

    def slow(plan: Plan, shard: int, stream: ShardFile) -> str:
        assert computed.wait(20)
        return close(plan, shard, stream)

    monkeypatch.setattr(reassemble, "close_shard", slow)
    with slabs_of(1):
        plan = in_a_row(tmp_path, 2)
        outcomes = list(
            infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0, 1], Counter())
        )
    assert [(block, isinstance(outcome, Exception)) for block, outcome in outcomes] == [(0, False), (1, False)]


def test_a_file_that_cannot_be_put_in_its_place_fails_its_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = reassemble.close_shard

    def full(plan: Plan, shard: int, stream: ShardFile) -> str:
        if shard == 1:
            raise OSError("disk full")
        return close(plan, shard, stream)

    monkeypatch.setattr(reassemble, "close_shard", full)
    with slabs_of(1):
        plan = in_a_row(tmp_path, 4)
        outcomes = dict(infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), range(4)))
    assert {block: isinstance(outcome, OSError) for block, outcome in outcomes.items()} == {
        0: False, 1: True, 2: False, 3: False,
    }  # fmt: skip
    files = [path for path in (tmp_path / "out.zarr/s0").rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert sorted(path.name for path in files) == ["0", "2", "3"]


class Dismissed(Reporter):
    """A reporter that counts into `windows`, and is dismissed once there are more than `after`."""

    def __init__(self, windows: list[int], after: int) -> None:
        super().__init__()
        self.windows, self.after = windows, after

    def add(self, num_windows: int) -> None:
        self.windows.append(num_windows)
        self.is_dismissed = sum(self.windows) > self.after


@pytest.mark.parametrize("voxels", [1, None])  # of a slab; None for blocks that are computed as a whole
def test_once_it_is_over_blocks_that_were_begun_are_finished_and_no_other_begins(
    tmp_path: Path, voxels: int | None
) -> None:
    windows = list[int]()
    with slabs_of(voxels) if voxels else nullcontext():
        plan = in_a_row(tmp_path, 4)
        everything = Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), range(4)
        outcomes = infer(*everything, Dismissed(windows, after=6))
        done = [(block, isinstance(outcome, Exception)) for block, outcome in outcomes]
        dismissed = Reporter()
        dismissed.is_dismissed = True
        assert list(infer(*everything, dismissed)) == []
    assert plan.has_slabs == (voxels is not None)
    assert (done, sum(windows)) == ([(0, False), (1, False)], 12)


def test_what_fails_while_a_file_is_stored_for_good_fails_its_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk tells of a write that failed once, to whoever asks first; the end of the block would not hear of it."""
    failures = [OSError("input/output error")]

    def persist(stream: ShardStream) -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(ShardStream, "persist", persist)
    with slabs_of(1):
        plan = in_a_row(tmp_path, 2)
        outcomes = dict(infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0, 1]))
    assert {block: isinstance(outcome, OSError) for block, outcome in outcomes.items()} == {0: True, 1: False}
    files = [path for path in (tmp_path / "out.zarr/s0").rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert [path.name for path in files] == ["1"]


def test_a_block_that_fails_last_hides_none_that_is_still_put_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = reassemble.close_shard

    def slow(plan: Plan, shard: int, stream: ShardFile) -> str:
        time.sleep(0.3)
        return close(plan, shard, stream)

    monkeypatch.setattr(reassemble, "close_shard", slow)
    with slabs_of(1):
        plan = in_a_row(tmp_path, 2)
        (tmp_path / "in.n5/raw/1/0/0").write_bytes(b"rubbish")  # N5 counts x, y, z: block 1
        outcomes = dict(infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0, 1]))
    assert {block: isinstance(outcome, Exception) for block, outcome in outcomes.items()} == {0: False, 1: True}


def test_slabs_that_wait_for_their_turn_are_not_written_once_their_block_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, which computes one more while one is written."""
    bus = Bus("cpu")
    monkeypatch.setattr(Bus, "is_gpu", property(lambda self: True))
    monkeypatch.setattr(Bus, "mark", lambda self: None)
    monkeypatch.setattr(Runner, "bus", property(lambda self: bus))
    monkeypatch.setattr(Runner, "computing", lambda self: nullcontext())
    write, failures = reassemble.append_voxels, [OSError("disk full")]

    def append(plan: Plan, file: ShardFile, box: Box, data: np.ndarray) -> None:
        time.sleep(0.05)  # so that the next slab waits by then
        if failures:
            raise failures.pop()
        write(plan, file, box, data)

    monkeypatch.setattr(reassemble, "append_voxels", append)
    with slabs_of(1):
        plan = in_a_row(tmp_path, 2)
        outcomes = list(infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), [0, 1]))
    assert [(block, isinstance(outcome, Exception)) for block, outcome in outcomes] == [(0, True), (1, False)]
    files = [path for path in (tmp_path / "out.zarr/s0").rglob("*") if path.is_file() and path.name != "zarr.json"]
    assert [path.name for path in files] == ["1"]
