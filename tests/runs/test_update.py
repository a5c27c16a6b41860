"""After an update the output is that of a fresh run over the input as it is now, byte for byte; no more is computed."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import get_origin, get_type_hints

import numpy as np
import pytest
from command import Give, giver, set_each
from conftest import examples
from disturbance import COUNTS, ONE_WORKER, Slow, in_threads
from growing import edit, edits
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from nets import SMOOTH
from updates import FLOATS, MEASURED, ROW, SHAPE, assert_fresh, computed, divisions, planned, ran, write_n5
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.errors import RunError, RunStopped
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.inference.statistics import Statistics
from volpipe.reporting.page import Sheet
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_provenance
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.update_records import UnitResult, Updated, from_ranges, to_ranges, updates_in
from volpipe.runs.worker import RESULTS, Cells
from volpipe.segmentation import tasks
from volpipe.workflow.driver import RunWork
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute

SLOW = examples(3, 12)


@SLOW
@given(st.data(), divisions(), st.sampled_from(["stored", "streamed"]), st.integers(0, 2**16))
def test_an_updated_output_is_that_of_a_fresh_run(
    data: st.DataObject, drawn: tuple[tuple[int, ...], list[str]], mode: str, seed: int
) -> None:
    """Interrupted anywhere, also before the first run was complete, and edited again meanwhile."""
    shape, division = drawn
    with tempfile.TemporaryDirectory() as name:
        folder, rng = Path(name), np.random.default_rng(seed)
        write_volume(folder / "in.n5", noise(shape), chunk=5)
        plan = planned(folder, "net.name=smooth.py:smooth", *FLOATS, f"tensors.mode={mode}", *division)
        for _ in range(data.draw(st.integers(1, 4))):
            with contextlib.suppress(Stopped):
                execute(plan, Inline(seed, 2, int(rng.integers(0, 60))).start, RunOptions(update=True))
            for box, other in data.draw(edits(shape)):
                edit(folder / "in.n5", box, other)
        ran(plan, Inline(seed, 2), update=True)
        assert ran(plan, update=True).was_complete
        assert not list((folder / "out.zarr.run").glob("tensors.*"))
        assert_fresh(plan)


def test_a_changed_block_brings_its_neighbours_where_windows_blend(tmp_path: Path) -> None:
    """Blocks of 8 voxels along x reach 4 into the next: the third adds to shards of its neighbours, and they to its."""
    write_volume(tmp_path / "in.n5", noise((8, 8, 64)), chunk=8)
    plan = planned(tmp_path, "net.name=identity", *windowed((8, 8, 8), (0, 0, 4), (1, 1, 2), "hann"))
    ran(plan)
    assert len(plan.blocks) == 8
    edit(tmp_path / "in.n5", Box((0, 0, 40), (8, 8, 41)))
    changed, again = computed(ran(plan, update=True))
    assert 1 <= changed < again < 8
    assert_fresh(plan)


def test_statistics_are_kept_and_the_output_says_so(tmp_path: Path) -> None:
    """Two runs with the normalisation of the old volume agree; measured again, all is computed."""
    data = noise(SHAPE)
    write_n5(tmp_path, data)
    plan = planned(tmp_path, *MEASURED, *FLOATS[:2])
    ran(plan)
    before = read_provenance(plan.out)["normalise"]
    edit(tmp_path / "in.n5", Box((0, 0, 16), (16, 16, 24)))
    assert computed(ran(plan, update=True)) == (1, 1)
    attributes = read_provenance(plan.out)
    assert attributes["normalise"] == before
    assert attributes["run"]["statistics"] == "of the volume as it was before the updates"
    assert computed(ran(plan, update=True, measure_again=True)) == (6, 6)
    assert read_provenance(plan.out)["normalise"] != before
    assert "statistics" not in read_provenance(plan.out)["run"]
    assert_fresh(plan)


def test_measured_again_and_interrupted_it_goes_on(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *MEASURED, *FLOATS[:2])
    ran(plan)
    edit(tmp_path / "in.n5", Box((0, 0, 16), (16, 16, 24)))
    for most_tasks in (2, 4, 3):
        with pytest.raises(Stopped):
            execute(plan, Inline(0, 1, most_tasks).start, RunOptions(update=True, measure_again=True))
    ran(plan)
    assert len(updates_in(RunFolder.from_output(Path(plan.out)).journal, RESULTS)) == 1
    assert_fresh(plan)


def test_the_output_says_when_it_was_updated_and_of_what(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    before = read_provenance(plan.out)["input"]["fingerprint"]
    edit(tmp_path / "in.n5", Box((0, 0, 0), (16, 16, 48)))
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)), seed=3)
    with pytest.raises(Stopped):
        execute(plan, Inline(0, 1, 8).start, RunOptions(update=True))  # six looks, two blocks
    run = read_provenance(plan.out)["run"]
    assert run["updating"] is True and [entry["computed"] for entry in run["updates"]] == [6]
    assert find_status(plan.out).state != "complete"
    ran(plan)  # without the option: the journal knows what is open
    attributes = read_provenance(plan.out)
    assert attributes["input"]["fingerprint"] != before
    (update,) = attributes["run"]["updates"]
    assert (update["changed"], update["computed"], update["blocks"]) == (6, 6, 6)
    assert "updating" not in attributes["run"] and attributes["run"]["missing"] == 0
    assert RunWork(plan).verify().differences == []
    assert_fresh(plan)


def test_an_input_that_changed_where_no_block_reads_renews_the_fingerprint_alone(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW, "input.roi=0:16,0:16,0:16")
    ran(plan)
    edit(tmp_path / "in.n5", Box((0, 0, 30), (16, 16, 48)))
    with pytest.raises(RunError, match=r"has changed since this output was begun: .* use --update to compute what has"):
        ran(plan, update=False)
    assert ran(plan, update=True).was_complete
    assert ran(plan).was_complete
    assert_fresh(plan)


def without_fingerprints(plan: Plan) -> None:
    """Make the run's journal one without what blocks read."""
    journal = RunFolder.from_output(Path(plan.out)).journal
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        line.pop("seen", None)
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_blocks_that_did_not_note_what_they_read_are_computed_again(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    without_fingerprints(plan)
    report = ran(plan, update=True)
    assert computed(report) == (6, 6)
    assert_fresh(plan)


def test_the_report_lists_updates_and_says_that_another_would_find_something(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    assert "Updates" not in sections(RunWork(plan))
    for seed in (1, 2):
        edit(tmp_path / "in.n5", Box((0, 0, 0), (1, 1, 9)), seed=seed)
        assert "Files of the input have changed since: `volpipe status --changes`" in sections(RunWork(plan))
        ran(plan, update=True)
    page = sections(RunWork(plan))
    assert "Files of the input have changed" not in page
    (sheet,) = [item for item in RunWork(plan).page(with_pictures=False).sections[0].items if isinstance(item, Sheet)
                and item.title == "Updates"]  # fmt: skip
    assert [list(row[1:]) for row in sheet.rows] == [[2, 2, 6]] * 2


def sections(work: RunWork) -> str:
    """Return the first section of the report of `work`, as text."""
    return str(work.page(with_pictures=False).sections[0])


def test_clipped_voxels_are_counted_once(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        SMOOTH.replace("Smooth", "Twice").replace("smooth", "twice").replace("/ 27", "* 2")
    )
    write_n5(tmp_path, noise(SHAPE))
    for blend in ("crop", "hann"):
        division = windowed((16, 16, 12), (4, 4, 4), (1, 1, 1), blend)
        plan = planned(tmp_path, "net.name=twice.py:twice", "net.intensity=same", "normalise.method=none", *division)
        ran(plan, fresh=True)
        edit(tmp_path / "in.n5", Box((0, 0, 20), (9, 9, 30)), seed=len(division) + ord(blend[0]))
        assert computed(report := ran(plan, update=True))[0] > 0
        assert report.clipped == ran(plan, fresh=True).clipped
        assert report.clipped[0] > 1000


def test_what_cannot_be_updated_is_refused(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    for options, sentence in (
        ({"measure_again": True}, r"measure.again says how (--)?update goes"),
        ({"update": True, "keep_tensors": True}, "keep.tensors would keep some of two inputs"),
        ({"update": True, "measure_again": True}, "measure.again: nothing is measured in this run"),
    ):
        with pytest.raises(RunError, match=sentence):
            ran(plan, **options)
    ran(plan, update=True)  # of nothing: a run like any other
    lost = next(path for path in Path(plan.out, "s0/c").rglob("*") if path.is_file())
    lost.unlink()
    with pytest.raises(RunError, match="has lost files that its run wrote"):
        ran(plan, update=True)


def test_an_input_that_cannot_be_read_stops_an_update_that_goes_on_when_it_is_mended(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    chunk = tmp_path / "in.n5/raw/2/0/0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:40])
    with pytest.raises(
        RunStopped, match=r"block 2 of the input cannot be read, so that nobody can tell what has changed"
    ):
        ran(plan, update=True)
    chunk.write_bytes(whole)
    assert ran(plan, update=True).was_complete


def test_status_says_that_the_input_changed_and_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(tmp_path, monkeypatch, capsys)
    write_n5(tmp_path, noise(SHAPE))
    command = ("run", "--config", "threads", *set_each(*ROW), "-o", "out.zarr", "in.n5")
    assert give(*command).code == 0
    assert "its input has not changed" in give("status", "--changes", "out.zarr").out
    edit(tmp_path / "in.n5", Box((0, 0, 0), (1, 1, 1)))
    said = " ".join(give("status", "out.zarr").out.split())
    assert "complete, but its input has changed since: `volpipe status --changes` counts the blocks" in said
    said = " ".join(give("status", "--changes", "out.zarr").out.split())
    told = re.search(r"1 of 6 blocks read files that have changed; `volpipe (.+?)` compares their voxels", said)
    assert told is not None
    update = shlex.split(told[1])
    assert "--update" in update
    tree = json.loads(give("status", "--changes", "--json", "out.zarr").out)
    assert tree["changes"] == {"changed": 1, "blocks": 6, "grown": [0, 0, 0]}
    ended = give(*update)
    assert ended.code == 0 and "1 block of 6 read voxels that have changed; 1 is computed again" in ended.out
    assert "is complete, and nothing has changed" in give(*command, "--update").out


def test_ranges_of_units_come_back() -> None:
    for units in ([], [4], [0, 1, 2, 3, 7], [5, 9, 10], list(range(1000))):
        assert [unit for part in from_ranges(to_ranges(units)) for unit in part] == units
    assert to_ranges([0, 1, 2, 3, 7]) == "0-3,7"


def test_a_result_says_of_which_units_each_of_its_lists_is_so_that_an_update_can_take_them_back() -> None:
    """But for a scan, of which the last of a block counts, and which no grown volume has; and numbers of the whole."""
    whole = {Cells, Statistics, Updated}
    for kind in {*RESULTS, *tasks.RESULTS} - whole:
        lists = {name for name, annotation in get_type_hints(kind).items() if get_origin(annotation) is tuple}
        entries = kind.ENTRIES if issubclass(kind, UnitResult) else {}
        assert lists == entries.keys(), kind


class Updating(Slow):
    """A run that is given with --update."""

    @property
    def command(self) -> list[str]:
        return [*super().command, "--update"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_a_driver_killed_while_it_updates_goes_on_to_the_bytes_of_a_fresh_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed twice by the system, while the net is at work."""
    slow = Updating(tmp_path / "updated", seconds=0.0, mode="streamed", environment=ONE_WORKER)
    give = giver(slow.folder, monkeypatch, capsys)
    assert give(*in_threads(slow.command)).code == 0
    edit(tmp_path / "in.n5", Box((0, 0, 0), (2, 2, 2)))
    (slow.folder / "seconds").write_text("0.1")
    for calls in (3, 5):
        slow.begin()
        slow.wait_for_calls(calls)
        assert slow.process is not None
        slow.process.kill()
        slow.finish()
    slow.hurry()
    slow.begin()
    assert slow.finish().code == 0
    windows = [line for n in (1, 2, 3) for line in (slow.folder / f"calls.{n}").read_text().splitlines()]
    assert 8 <= len(windows) < math.prod(COUNTS)
    shutil.rmtree(slow.run)
    kept = fingerprint(slow.out)
    shutil.rmtree(slow.out)
    ended = give(*in_threads(slow.command))
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == kept
