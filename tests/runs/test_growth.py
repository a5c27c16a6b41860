"""A volume that grows: the output grows with it, and is that of a fresh run, byte for byte; no more is computed."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import signal
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from command import Give, begin, finish, giver, set_each, wait_until
from conftest import examples
from growing import GROWING, edit, edits, grow
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from renames import Renames
from updates import FLOATS, MEASURED, assert_fresh, divisions, planned, ran, write_n5, write_slices, write_zarr
from volumes import noise, windowed, write_volume

from volpipe.blockwise.journal import Record
from volpipe.errors import RunError
from volpipe.geometry.grid import Box
from volpipe.runs import worker
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_provenance
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import RunWork
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute

SLOW = examples(2, 10)
CORES = ("net.name=identity", *windowed((8, 16, 16), (0, 0, 0), (1, 1, 1), "crop"))  # blocks of 8 slices


@SLOW
@given(st.data(), divisions(), st.sampled_from(["stored", "streamed"]), st.integers(0, 2), st.integers(0, 2**16))
def test_the_output_of_a_grown_volume_is_that_of_a_fresh_run(
    data: st.DataObject, drawn: tuple[tuple[int, ...], list[str]], mode: str, levels: int, seed: int
) -> None:
    """Grown along any axes and edited, interrupted anywhere, also before the first run was complete."""
    shape, division = drawn
    more = [*FLOATS, "net.name=smooth.py:smooth", f"tensors.mode={mode}", f"output.levels={levels}", *division]
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        volume = write_volume(folder / "in.n5", noise(shape), chunk=5)
        for _ in range(data.draw(st.integers(1, 4))):
            with contextlib.suppress(Stopped):
                execute(
                    planned(folder, *more), Inline(seed, 2, int(rng.integers(0, 60))).start, RunOptions(update=True)
                )
            before = open_volume(volume).open()[...]
            shape = tuple(n + data.draw(st.integers(0, 7)) for n in shape)
            after = noise(shape, seed=len(shape))
            after[tuple(map(slice, before.shape))] = before
            grow(volume, after, chunk=5)
            for box, other in data.draw(edits(shape)):
                edit(volume, box, other)
        plan = ran(planned(folder, *more), Inline(seed, 2), update=True).plan
        assert plan.source.shape == shape
        assert ran(planned(folder, *more), update=True).was_complete
        assert_fresh(plan)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["n5", "shards", "slices"])
def test_only_new_blocks_and_the_one_at_the_old_face_are_computed(tmp_path: Path, kind: str) -> None:
    """Three blocks, the last of which is cut; then five: the cut one was taken back."""
    write: Any = {"n5": write_n5, "shards": write_zarr("zarr3", shards=(8, 16, 16)), "slices": write_slices}[kind]
    data = noise((40, 16, 16))
    name = write(tmp_path, data[:20])
    ran(planned(tmp_path, *CORES, volume=name))
    if kind == "n5":
        grow(tmp_path / "in.n5", data, chunk=8)
    else:
        write(tmp_path, data)
    report = ran(planned(tmp_path, *CORES, volume=name), update=True)
    lines = (RunFolder.from_output(Path(report.plan.out)).journal).read_text().splitlines()
    marked = [json.loads(line)["done"] for line in lines if json.loads(line)["stage"] == "infer"]
    assert sorted(unit for done in marked for unit in done) == [0, 1, 2, 3, 4]
    assert str(report.updates[0]).startswith(
        "the volume has grown from 20 × 16 × 16 to 40 × 16 × 16: 1 block lay at a face"
    )
    np.testing.assert_array_equal(open_volume(report.plan.out).open()[...], data)
    assert_fresh(report.plan)


@pytest.mark.parametrize(("shard", "before", "now"), [(8, 40, 44), (8, 16, 20), (7, 21, 28), (7, 14, 15), (8, 48, 80)])
def test_coarser_levels_go_on_where_the_old_face_ended_whole_blocks(
    tmp_path: Path, shard: int, before: int, now: int
) -> None:
    """No block changes; at 40 slices a shard of 8 of level 2 is cut, at 21 one of level 1 shows half a slice."""
    data = noise((now, 16, 16))
    sizes = windowed((shard, 16, 16), (0, 0, 0), (1, 1, 1), "crop")
    layout = (f"output.shard=[{shard},16,16]", f"output.chunk=[{shard},8,8]", "output.levels=2")
    more = ("net.name=identity", *sizes, *layout)
    write_n5(tmp_path, data[:before])
    ran(planned(tmp_path, *more))
    grow(tmp_path / "in.n5", data, chunk=8)
    assert_fresh(ran(planned(tmp_path, *more), update=True).plan)


class Netless(Inline):
    """Executors whose driver is killed before the net is run."""

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        if app == "infer":
            raise Stopped
        return super().submit(app, *arguments)


@pytest.mark.parametrize("has_grown", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_driver_killed_at_a_rename_leaves_the_old_run_or_the_new_one(tmp_path: Path, *, has_grown: bool) -> None:
    """Journal and plan agree at every moment: either of before the update, or of after it."""
    data = noise((20, 16, 16))
    write_n5(tmp_path, data[:12])
    more = ("net.name=identity", *windowed((8, 8, 8), (4, 4, 4), (1, 1, 1), "hann"))
    plan = ran(planned(tmp_path, *more)).plan
    made = [Path(plan.out), Path(f"{plan.out}.run")]
    for folder in made:
        shutil.copytree(folder, tmp_path / "kept" / folder.name)
    if has_grown:
        grow(tmp_path / "in.n5", data, chunk=8)
    edit(tmp_path / "in.n5", Box((1, 1, 1), (2, 2, 2)))
    states = []
    for number in itertools.count():
        for folder in made:
            shutil.rmtree(folder)
            shutil.copytree(tmp_path / "kept" / folder.name, folder)
        renames = Renames(("journal.jsonl", "plan.json", "next_plan.json"), number)
        with renames.counted(), pytest.raises(Stopped):
            ran(planned(tmp_path, *more), Netless(), update=True)
        infer = (status := find_status(plan.out)).stages["infer"]
        states.append((status.is_complete, infer.done < infer.all))
        ran(planned(tmp_path, *more), update=True)
        assert RunWork(planned(tmp_path, *more)).verify().differences == []
        if not renames.is_killed:
            break
        if number % 2:
            assert_fresh(planned(tmp_path, *more))
    assert states == [(True, False)] * states.count((True, False)) + [(False, True)] * states.count((False, True))
    assert states[0] != states[-1] and len(states) >= (5 if has_grown else 3)


@pytest.mark.parametrize("kind", ["n5", "shards", "slices"])
def test_what_comes_behind_a_volume_while_it_is_run_changes_nothing(tmp_path: Path, kind: str) -> None:
    """Nor for workers that start then: voxels at the face are mirrored as for those before."""
    data = noise((40, 24, 24))

    def output(folder: Path, then: np.ndarray) -> np.ndarray:
        """Return the output over 20 slices of `data`, whose volume is `then` after some tasks."""
        folder.mkdir()
        volume = GROWING[kind](folder)
        volume.show(data[:20])

        class Late(Inline):
            def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
                if self.num_tasks == 2:
                    volume.show(then)
                worker._open_source.cache_clear()
                return super().submit(app, *arguments)

        sizes = windowed((8, 16, 16), (2, 2, 2), (1, 1, 1), "crop")
        plan = planned(folder, *FLOATS, "net.name=smooth.py:smooth", *sizes, volume=volume.name)
        return open_volume(ran(plan, Late()).plan.out, level=0).open()[...]

    still, growing = output(tmp_path / "still", data[:20]), output(tmp_path / "growing", data)
    assert growing.shape == (20, 24, 24)
    np.testing.assert_array_equal(growing, still)


def test_a_slice_that_comes_between_others_stops_a_run(tmp_path: Path) -> None:
    """All workers would else read slices in other places than those before, if they start then."""
    data = noise((20, 24, 24))
    write_slices(tmp_path, data)
    plan = planned(tmp_path, *CORES, volume="slices")

    class Late(Inline):
        def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
            tifffile.imwrite(tmp_path / "slices/000a.tif", data[0])
            worker._open_source.cache_clear()
            return super().submit(app, *arguments)

    with pytest.raises(RunError, match="has other slices than when it was opened"):
        execute(plan, Late().start)


def test_levels_are_added_and_sizes_stay(tmp_path: Path) -> None:
    """A fresh run would choose other blocks for the larger volume; the output goes on in those that it has."""
    data = noise((64, 64, 150))
    write_n5(tmp_path, data[..., :60])
    before = ran(planned(tmp_path, "net.name=identity")).plan
    grow(tmp_path / "in.n5", data, chunk=8)
    alone = planned(tmp_path, "net.name=identity")
    report = ran(alone, update=True)
    assert (report.plan.block, report.plan.shard) == (before.block, before.shard) != (alone.block, alone.shard)
    assert len(report.plan.factors) > len(before.factors)
    assert_fresh(report.plan)


def test_levels_that_were_begun_keep_their_factors_and_others_follow(tmp_path: Path) -> None:
    """Three slices are one in the second level already; those of a thicker volume would be halved once more."""
    data = noise((80, 64, 200))
    write_n5(tmp_path, data[:3, :, :100])
    before = ran(planned(tmp_path, "net.name=identity", "output.levels=3")).plan
    assert before.factors == ((1, 1, 1), (2, 2, 2), (4, 4, 4), (4, 8, 8))
    grow(tmp_path / "in.n5", data, chunk=8)
    grown = ran(planned(tmp_path, "net.name=identity", "output.levels=3"), update=True).plan
    assert grown.factors == before.factors
    assert ran(planned(tmp_path, "net.name=identity", "output.levels=3"), update=True).was_complete
    assert_fresh(grown)


def test_statistics_of_a_smaller_volume_are_kept(tmp_path: Path) -> None:
    data = noise((16, 16, 48))
    write_n5(tmp_path, data[..., :20])
    ran(planned(tmp_path, *MEASURED, *FLOATS[:2]))
    grow(tmp_path / "in.n5", data, chunk=8)
    before = read_provenance(tmp_path / "out.zarr")["normalise"]
    ran(planned(tmp_path, *MEASURED, *FLOATS[:2]), update=True)
    assert read_provenance(tmp_path / "out.zarr")["normalise"] == before
    assert open_volume(tmp_path / "out.zarr").shape == data.shape


def test_a_volume_that_shrank_or_is_of_another_type_is_refused(tmp_path: Path) -> None:
    data = noise((20, 16, 16))
    write_n5(tmp_path, data)
    ran(planned(tmp_path, *CORES))
    write_n5(tmp_path, data[:18])
    with pytest.raises(RunError, match=r"axis z: the volume .* had 20 voxels and has 18; --update follows a volume"):
        ran(planned(tmp_path, *CORES), update=True)
    write_n5(tmp_path, np.pad(data, ((0, 4), (0, 0), (0, 0))).astype(np.uint16))
    with pytest.raises(RunError, match=r"source\.dtype: uint8 -> uint16"):
        ran(planned(tmp_path, *CORES), update=True)
    write_n5(tmp_path, data)
    assert ran(planned(tmp_path, *CORES), update=True).was_complete


def test_precomputed_does_not_grow(tmp_path: Path) -> None:
    data = noise((40, 16, 16))
    write_n5(tmp_path, data[:20])
    more = (*CORES, "output.format=precomputed", "input.voxel_size_nm=[1,1,1]")
    ran(planned(tmp_path, *more))
    grow(tmp_path / "in.n5", data, chunk=8)
    with pytest.raises(RunError, match="is precomputed, which numbers its chunks by the shape"):
        ran(planned(tmp_path, *more), update=True)


def test_a_volume_of_which_empty_space_is_left_out_does_not_grow(tmp_path: Path) -> None:
    data = noise((40, 16, 16))
    write_n5(tmp_path, data[:20])
    ran(planned(tmp_path, *CORES, "input.empty=0"))
    grow(tmp_path / "in.n5", data, chunk=8)
    with pytest.raises(RunError, match=r"has grown, and mask or input\.empty leave out parts of it"):
        ran(planned(tmp_path, *CORES, "input.empty=0"), update=True)


def test_a_folder_of_slices_grows_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(tmp_path, monkeypatch, capsys)
    data = noise((120, 16, 16))
    write_slices(tmp_path, data[:20])
    command = ("run", "--config", "threads", *set_each(*CORES), "-o", "out.zarr", "slices", "--update")
    assert give(*command).code == 0
    for z in range(30, 121, 50):
        write_slices(tmp_path, data[:z])
        said = " ".join(give("status", "--changes", "out.zarr").out.split())
        assert f"its input has grown along z by {10 if z == 30 else 50}" in said
        ended = give(*command)
        assert ended.code == 0, ended.err
        assert f"to {z} × 16 × 16" in " ".join(ended.out.split())
    np.testing.assert_array_equal(open_volume(tmp_path / "out.zarr").open()[...], data[:80])
    assert give("verify", "out.zarr").code == 0


# A site that halts its driver at the point that HALT names, to be killed there: in a write, or between two.
HALTING = """
import os, threading
from pathlib import Path
from volpipe.configs.threads import config

def halt():
    Path("halted").touch()
    threading.Event().wait()

if point := os.environ.get("HALT"):
    from volpipe.blockwise.journal import Journal
    from volpipe.inference import output
    from volpipe.runs.run_folder import RunFolder
    from volpipe.runs import output_files
    from volpipe.runs.update_records import Updated
    remainder = Updated.remainder
    append, store, grow, num_blocks = Journal.append, RunFolder.store, output.grow_array, [0]

    def write_half_and_halt(update):
        rest, num = remainder(update), [0]

        def halting(record):
            num[0] += 1
            return halt() if num[0] == 3 else rest(record)

        return halting

    if point == "half a journal":
        Updated.remainder = write_half_and_halt

    def append_and_halt(journal, record):
        append(journal, record)
        num_blocks[0] += record.stage == "infer"
        if point == "blocks" and num_blocks[0] == 3:
            halt()

    def store_and_halt(folder, plan):
        if point == "before the plan":
            halt()
        store(folder, plan)
        if point == "after the plan":
            halt()

    def grow_and_halt(*arguments):
        grow(*arguments)
        if point == "first array":
            halt()

    def create_and_halt(*arguments):
        if point == "before the metadata":
            halt()
        return create(*arguments)

    create, output_files.create_output = output_files.create_output, create_and_halt
    Journal.append, RunFolder.store, output.grow_array = append_and_halt, store_and_halt, grow_and_halt
"""
POINTS = ("half a journal", "before the plan", "after the plan", "first array", "before the metadata", "blocks")


def kill_at(point: str, folder: Path, command: tuple[str, ...]) -> None:
    """Give the command in `folder`, and kill its driver at `point`."""
    driver = begin(folder, *command, HALT=point)
    try:
        wait_until(lambda: (folder / "halted").exists() or driver.poll() is not None, 200)
    finally:
        driver.send_signal(signal.SIGKILL)
        ended = finish(folder, driver)
    assert ended.code == -signal.SIGKILL, (point, ended.err)
    (folder / "halted").unlink()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_driver_killed_while_its_output_grows_goes_on_to_the_bytes_of_a_fresh_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at each point in turn, each driver going on with what the one before it left."""
    data = noise((28, 16, 16))
    write_n5(tmp_path, data[:14, :12, :12])
    more = ("net.name=identity", *windowed((8, 8, 8), (4, 4, 4), (1, 1, 1), "hann"), "output.levels=2")
    command = ("run", "--config", "site.py", *set_each(*more), "-o", "out.zarr", "in.n5", "--update")
    (tmp_path / "site.py").write_text(HALTING)
    give: Give = giver(tmp_path, monkeypatch, capsys)
    assert give(*command).code == 0
    grow(tmp_path / "in.n5", data, chunk=8)
    for point in POINTS:
        kill_at(point, tmp_path, command)
        assert not find_status(str(tmp_path / "out.zarr")).is_complete or point == POINTS[0]
    ended = give(*command)
    assert ended.code == 0, ended.err
    assert "is complete, and nothing has changed" in give(*command).out
    assert give("verify", "out.zarr").code == 0
    assert_fresh(planned(tmp_path, *more))
