"""After an update the output is that of a fresh run over the input as it is now, byte for byte; no more is computed."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
from bucket import Bucket
from command import Give, giver, set_each
from conftest import examples
from disturbance import COUNTS, ONE_WORKER, Slow, in_threads
from growing import edit, edits
from hypothesis import given
from hypothesis import strategies as st
from inline import Inline, Stopped
from nets import SMOOTH
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.blockwise.journal import read_records
from volpipe.errors import PlanError, RunError, RunStopped, VolumeError
from volpipe.geometry.blend import FAMILIES
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.reporting.page import Sheet
from volpipe.runs import update
from volpipe.runs.provenance import read_provenance
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.updates import from_ranges, to_ranges, updates_in
from volpipe.runs.worker import RESULTS
from volpipe.volumes import file_states, node_cache
from volpipe.volumes.file_states import FileStates, KnownStates, read_known
from volpipe.volumes.reader import Reader
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.driver import Report, RunWork, execute
from volpipe.workflow.prepare import prepare
from volpipe.workflow.status import find_status

SLOW = examples(5, 12)
FLOATS = ("net.intensity=same", "output.dtype=float32", "normalise.low=0", "normalise.high=255")
SHAPE = (16, 16, 48)
ROW = ("net.name=identity", *windowed((16, 16, 8), (0, 0, 0), (1, 1, 1), "crop"))  # six blocks


def planned(folder: Path, *settings_: str, volume: str = "in.n5") -> Plan:
    (folder / "smooth.py").write_text(SMOOTH)
    return prepare(
        volume if "://" in volume else str(folder / volume), load_recipe(None, settings_), folder / "out.zarr", folder
    )


def ran(plan: Plan, inline: Inline | None = None, **options: Any) -> Report:
    report = execute(plan, (inline or Inline()).start, **options)
    assert report.missing == []
    return report


def computed(report: Report) -> tuple[int, int]:
    """Return how many blocks had changed, and how many were computed again."""
    return sum(update.changed for update in report.updates), sum(update.computed for update in report.updates)


def assert_fresh(plan: Plan) -> None:
    """Compare the output with that of a fresh run in its place, which stays there."""
    updated = Path(plan.out).with_name("updated.zarr")
    shutil.rmtree(updated, ignore_errors=True)
    shutil.move(plan.out, updated)
    shutil.rmtree(f"{plan.out}.run")
    ran(plan)
    found, expected = (fingerprint(out) for out in (updated, plan.out))
    assert found == expected


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[str]]:
    """A volume's shape, and windows, overlap, block and blend that divide it somehow."""
    shape = tuple(draw(st.integers(6, 26)) for _ in range(3))
    window = tuple(draw(st.integers(5, 12)) for _ in range(3))
    overlap = tuple(draw(st.integers(1, w // 3)) * 2 for w in window)
    block = tuple(draw(st.integers(1, 3)) for _ in range(3))
    return shape, windowed(window, overlap, block, draw(st.sampled_from(FAMILIES)))


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
                execute(plan, Inline(seed, 2, int(rng.integers(0, 60))).start, update=True)
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


def write_n5(folder: Path, data: np.ndarray) -> str:
    shutil.rmtree(folder / "in.n5", ignore_errors=True)
    write_volume(folder / "in.n5", data, chunk=8)
    return "in.n5"


def write_zarr(format: str, **layout: Any) -> Callable[[Path, np.ndarray], str]:
    def write(folder: Path, data: np.ndarray) -> str:
        name = "in.precomputed" if format == "precomputed" else "in.zarr"
        spec = ArraySpec(data.shape, data.dtype, (8, 8, 8), axes=("z", "y", "x"), **layout)
        shutil.rmtree(folder / name, ignore_errors=True)
        create_array(folder / name, "s0" if format == "precomputed" else "raw", spec, format)
        open_writer(folder / name, "s0" if format == "precomputed" else "raw").write(Box.from_shape(data.shape), data)
        return name

    return write


def write_slices(folder: Path, data: np.ndarray) -> str:
    (folder / "slices").mkdir(exist_ok=True)
    for z, plane in enumerate(data):
        file = folder / "slices" / f"{z:03}.tif"
        if not file.exists() or not np.array_equal(tifffile.imread(file), plane):
            tifffile.imwrite(file, plane)
    return "slices"


def write_hdf5(folder: Path, data: np.ndarray) -> str:
    with h5py.File(folder / "new.h5", "w") as file:
        file.create_dataset("raw", data=data, chunks=(8, 8, 8), compression="gzip")
    (folder / "new.h5").replace(folder / "in.h5")
    return "in.h5"


def write_tiff(folder: Path, data: np.ndarray) -> str:
    tifffile.imwrite(folder / "in.tif", data)
    return "in.tif"


def write_npy(folder: Path, data: np.ndarray) -> str:
    np.save(folder / "in.npy", data)
    return "in.npy"


FORMATS: dict[str, Callable[[Path, np.ndarray], str]] = {
    "n5": write_n5,
    "zarr2": write_zarr("zarr2"),
    "zarr3": write_zarr("zarr3"),
    "shards": write_zarr("zarr3", shards=(16, 16, 16)),
    "slices": write_slices,
    "hdf5": write_hdf5,
    "tiff": write_tiff,
    "npy": write_npy,
}


@pytest.mark.parametrize("format", FORMATS)
def test_one_changed_block_of_six_is_computed_again(tmp_path: Path, format: str) -> None:
    """Also where all voxels are in one file, and where all files were written again."""
    data = noise(SHAPE)
    name = FORMATS[format](tmp_path, data)
    plan = planned(tmp_path, *ROW, volume=name)
    ran(plan)
    assert ran(plan, update=True).was_complete
    data[3, 4, 20] += 1
    assert FORMATS[format](tmp_path, data) == name
    assert computed(ran(plan, update=True)) == (1, 1)
    np.testing.assert_array_equal(open_volume(plan.out).open()[...], data)
    assert_fresh(plan)


def test_precomputed_and_one_channel_of_several(tmp_path: Path) -> None:
    data = noise((3, *SHAPE))
    create_array(
        tmp_path / "in.zarr", "raw", ArraySpec(data.shape, data.dtype, (1, 8, 8, 8), axes=("c", "z", "y", "x")), "zarr3"
    )
    writer = open_writer(tmp_path / "in.zarr", "raw")
    writer.write(Box.from_shape(data.shape), data)
    plan = planned(tmp_path, *ROW, "input.channel=1", volume="in.zarr")
    ran(plan)
    for channel, expected in ((0, (0, 0)), (1, (1, 1))):
        data[channel, 3, 4, 20] += 1
        part = Box((channel, 0, 0, 16), (channel + 1, 8, 8, 24))
        writer.write(part, data[part.slices])
        assert computed(ran(plan, update=True)) == expected
    assert_fresh(plan)


def upload(folder: Path, bucket: Bucket, key: str) -> None:
    bucket.files |= {f"{key}/{f.relative_to(folder)}": f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_volume_in_a_bucket_is_known_by_its_tags_and_listed(tmp_path: Path, bucket: Bucket) -> None:
    upload(write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8), bucket, "in.n5")
    plan = planned(tmp_path, *ROW, volume="s3://cells/in.n5/raw")
    ran(plan)
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)))
    upload(tmp_path / "in.n5", bucket, "in.n5")
    assert computed(ran(plan, update=True)) == (1, 1)
    bucket.requests.clear()
    assert ran(plan, update=True).was_complete
    assert sum(method == "HEAD" for method, _ in bucket.requests) < 30  # of the 16 boxes of the identity
    assert_fresh(plan)


def test_a_file_in_a_bucket_tells_its_state_with_its_voxels(tmp_path: Path, bucket: Bucket) -> None:
    """Of six blocks in a row each reads its neighbours' chunks too: what is kept of them is fetched once."""
    upload(write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8), bucket, "in.n5")
    volume = open_volume("s3://cells/in.n5/raw")
    reader, boxes = volume.open(cache_bytes=2**20), [Box((0, 0, 8 * x - 4), (16, 16, 8 * x + 12)) for x in range(6)]
    bucket.requests.clear()
    marks = [read_known(reader, box)[1] for box in boxes]
    asked = [(method, path) for method, path in bucket.requests if not path.endswith("attributes.json")]
    assert len(asked) == len(set(asked)) == 24
    assert {method for method, _ in asked} == {"GET"}
    assert marks == [
        f"{FileStates(volume).hash(box)}:{mark.partition(':')[2]}" for box, mark in zip(boxes, marks, strict=True)
    ]
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)))
    upload(tmp_path / "in.n5", bucket, "in.n5")
    voxels, mark = read_known(volume.open(session="another"), boxes[2])
    assert mark == f"{FileStates(volume).hash(boxes[2])}:{mark.partition(':')[2]}" != marks[2]
    np.testing.assert_array_equal(voxels, open_volume(tmp_path / "in.n5").open().read_mirrored(boxes[2]))


def test_where_a_store_tells_nothing_voxels_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_states, "file_state", lambda file: file_states.UNTOLD)
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    assert ran(plan, update=True).was_complete
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)))
    assert computed(ran(plan, update=True)) == (1, 1)


def num_looked(plan: Plan) -> int:
    """Return how many blocks were read without being computed, over all sessions."""
    records = read_records(RunFolder.from_output(Path(plan.out)).journal, RESULTS)
    return sum(len(record.done) for record in records if record.stage.startswith("reread"))


def test_what_was_only_written_again_is_read_once_and_not_computed(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    write_n5(tmp_path, noise(SHAPE))
    for _ in range(2):
        assert ran(plan, update=True).was_complete
        assert num_looked(plan) == 6
    assert ran(plan).was_complete


def test_a_file_with_the_old_time_and_size_has_changed_all_the_same(tmp_path: Path) -> None:
    """As after a clock that was set back, or a copy that keeps times."""
    np.save(tmp_path / "in.npy", noise(SHAPE))
    before = (tmp_path / "in.npy").stat()
    plan = planned(tmp_path, *ROW, volume="in.npy")
    ran(plan)
    with (tmp_path / "in.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 255]))
    os.utime(tmp_path / "in.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert computed(ran(plan, update=True)) == (1, 1)
    assert_fresh(plan)


def test_files_are_known_alike_one_by_one_and_all_together(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    (tmp_path / "in.n5/raw/0/0/0").unlink()
    volume = open_volume(tmp_path / "in.n5")
    single, together = FileStates(volume), KnownStates(volume)
    boxes = [Box((z - 2, -1, 5), (z + 9, 17, 55)) for z in (0, 4, 9)]
    hashes = [single.hash(box) for box in boxes]
    assert [together.hash(box) for box in boxes] == hashes
    assert len(set(hashes)) == 3


class Changing:
    """Writes into a volume while it is read, the first `times`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, volume: Path, times: int) -> None:
        self.num_reads = 0
        read = Reader.read_mirrored

        def changing(reader: Reader, box: Box) -> np.ndarray:
            voxels = read(reader, box)
            self.num_reads += 1
            if self.num_reads <= times:
                edit(volume, Box((0, 0, 0), (1, 1, 1)), seed=self.num_reads)
            return voxels

        monkeypatch.setattr(Reader, "read_mirrored", changing)


@pytest.mark.parametrize("times", [1, 3])
def test_a_block_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    write_n5(tmp_path, noise(SHAPE))
    node_cache.take_warnings()
    changing = Changing(monkeypatch, tmp_path / "in.n5", times)
    volume = open_volume(tmp_path / "in.n5")
    voxels, _ = read_known(volume.open(cache_bytes=2**20, live=True), Box.from_shape((8, 8, 8)))
    assert changing.num_reads == times + 1
    np.testing.assert_array_equal(voxels[0], volume.crop(Box.from_shape((8, 8, 8)))[0])
    assert any(
        "changed while its voxels 0:8,0:8,0:8 were read; they are read again" in w for w in node_cache.take_warnings()
    )


def test_a_block_that_does_not_stop_changing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_n5(tmp_path, noise(SHAPE))
    Changing(monkeypatch, tmp_path / "in.n5", 4)
    with pytest.raises(VolumeError, match="changed 4 times while its voxels 0:8,0:8,0:8 were read; let whoever writes"):
        read_known(open_volume(tmp_path / "in.n5").open(), Box.from_shape((8, 8, 8)))


@pytest.mark.parametrize("is_cached", [False, True])
def test_chunks_in_memory_and_on_the_nodes_disk_are_not_taken_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """Neighbouring blocks share chunks, which may change between them."""
    write_n5(tmp_path, noise(SHAPE))
    if is_cached:
        monkeypatch.setenv(node_cache.VARIABLE, str(tmp_path / "node"))
    volume = node_cache.through_cache(open_volume(tmp_path / "in.n5"), "a run")
    assert isinstance(volume, node_cache.CachedVolume) == is_cached
    for seed in range(3):
        reader = volume.open(cache_bytes=2**20, session="one", live=True)
        voxels, _ = read_known(reader, Box.from_shape(SHAPE))
        np.testing.assert_array_equal(voxels, open_volume(tmp_path / "in.n5").crop(Box.from_shape(SHAPE)))
        edit(tmp_path / "in.n5", Box((0, 0, 0), (1, 1, 1)), seed=seed)
    node_cache.close_caches()


def test_a_slice_that_is_written_again_is_opened_again(tmp_path: Path) -> None:
    data = noise((4, 16, 16))
    volume = open_volume(tmp_path / write_slices(tmp_path, data))
    np.testing.assert_array_equal(volume.open(cache_bytes=2**20).read(Box.from_shape(data.shape))[0], data)
    tifffile.imwrite(tmp_path / "slices/002.tif", data[2] ^ 255)
    data[2] ^= 255
    np.testing.assert_array_equal(volume.open(cache_bytes=2**20).read(Box.from_shape(data.shape))[0], data)


MEASURED = ("net.name=identity", "normalise.method=zscore", *windowed((16, 16, 8), (0, 0, 0), (1, 1, 1), "crop"))


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
            execute(plan, Inline(0, 1, most_tasks).start, update=True, measure_again=True)
    ran(plan)
    assert len(updates_in(RunFolder.from_output(Path(plan.out)).journal, RESULTS, plan.identity)) == 1
    assert_fresh(plan)


def test_the_output_says_when_it_was_updated_and_of_what(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    before = read_provenance(plan.out)["input"]["fingerprint"]
    edit(tmp_path / "in.n5", Box((0, 0, 0), (16, 16, 48)))
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)), seed=3)
    with pytest.raises(Stopped):
        execute(plan, Inline(0, 1, 8).start, update=True)  # six looks, two blocks
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
    """Make the run's journal one of an earlier version."""
    journal = RunFolder.from_output(Path(plan.out)).journal
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        line.pop("seen", None)
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_output_of_an_earlier_version_is_computed_again_or_adopted(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    without_fingerprints(plan)
    assert ran(plan, update=True, adopt=3).was_complete
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)))
    assert computed(ran(plan, update=True)) == (1, 1)
    without_fingerprints(plan)
    report = ran(plan, update=True)
    assert computed(report) == (6, 6)
    assert report.updates[0].why.startswith("6 blocks of an earlier version")
    assert_fresh(plan)


def test_an_output_that_is_not_of_this_input_is_not_adopted(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    without_fingerprints(plan)
    edit(tmp_path / "in.n5", Box((0, 0, 0), (16, 16, 48)))
    with pytest.raises(
        RunError, match=r"--adopt: .*out.zarr is not what the net makes of .* voxels of its box .* differ"
    ):
        ran(plan, update=True, adopt=2)


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
        ({"adopt": 1}, "--measure-again and --adopt say how --update goes"),
        ({"update": True, "keep_tensors": True}, "--keep-tensors would keep some of two inputs"),
        ({"update": True, "measure_again": True}, "--measure-again: nothing is measured in this run"),
    ):
        with pytest.raises(RunError, match=sentence):
            ran(plan, **options)
    ran(plan, update=True)  # of nothing: a run like any other
    lost = next(path for path in Path(plan.out, "s0/c").rglob("*") if path.is_file())
    lost.unlink()
    with pytest.raises(RunError, match="has lost files that its run wrote"):
        ran(plan, update=True)


def blotted(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Return noise with boxes of zeros, uint8 from 1 elsewhere."""
    data = np.maximum(noise(shape, seed=int(rng.integers(99))), 1)
    for _ in range(int(rng.integers(1, 5))):
        start = [int(rng.integers(n)) for n in shape]
        data[tuple(slice(a, a + int(rng.integers(3, 20))) for a in start)] = 0
    return data


def rewritten(folder: Path, name: str, data: np.ndarray) -> None:
    """Write `data` over the volume, chunks of zeros left out; those that are as they were are not touched."""
    write_volume(folder / "new.n5", data, chunk=5)
    (folder / name).mkdir(exist_ok=True)
    new, old = folder / "new.n5", folder / name
    for file in {f.relative_to(root) for root in (new, old) for f in root.rglob("*") if f.is_file()}:
        if not (new / file).exists():
            (old / file).unlink()
        elif not (old / file).exists() or (old / file).read_bytes() != (new / file).read_bytes():
            (old / file).parent.mkdir(parents=True, exist_ok=True)
            (new / file).replace(old / file)
    shutil.rmtree(new)


@examples(3, 8)
@given(
    divisions(), st.sampled_from(["stored", "streamed"]), st.sampled_from(["0", "missing", "mask", "both"]),
    st.integers(0, 2), st.integers(0, 2**16),
)  # fmt: skip
def test_an_output_of_what_is_wanted_is_that_of_a_fresh_run_where_other_parts_are(
    drawn: tuple[tuple[int, ...], list[str]], mode: str, kind: str, levels: int, seed: int
) -> None:
    """Mask and empty space change, grow and shrink, and the run is interrupted anywhere."""
    shape, division = drawn
    empty = {"0": ["input.empty=0"], "missing": ['input.empty="missing"'], "mask": [], "both": ["input.empty=0"]}[kind]
    mask = ["input.mask=mask.n5/raw"] if kind in ("mask", "both") else []
    more = [*FLOATS, "net.name=smooth.py:smooth", f"tensors.mode={mode}", f"output.levels={levels}", *empty, *mask]
    rng = np.random.default_rng(seed)
    coarse = tuple(-(-n // 2) for n in shape)

    def change(folder: Path) -> None:
        if rng.random() < 0.7:
            rewritten(
                folder, "in.n5", blotted(shape, rng) if kind != "mask" else noise(shape, seed=int(rng.integers(9)))
            )
        if mask:
            rewritten(folder, "mask.n5", (blotted(coarse, rng) > 100).astype(np.uint8))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rewritten(folder, "in.n5", blotted(shape, rng))
        rewritten(folder, "mask.n5", np.ones(coarse, np.uint8))
        plan = planned(folder, *more, *division)
        for _ in range(4):
            try:
                execute(plan, Inline(seed, 2, int(rng.integers(0, 60))).start, update=True)
            except (Stopped, PlanError, RunError) as error:
                assert isinstance(error, Stopped) or "nothing is wanted" in str(error)
            change(folder)
        rewritten(folder, "in.n5", np.maximum(blotted(shape, rng), (np.arange(shape[2]) < 3).astype(np.uint8)))
        if mask:
            rewritten(folder, "mask.n5", (np.arange(coarse[2]) < 4) * np.ones(coarse, np.uint8))
        ran(plan, Inline(seed, 2), update=True)
        assert ran(plan, update=True).was_complete
        assert RunWork(plan).verify().differences == []
        assert_fresh(plan)


MASKED = ("input.mask=mask.n5/raw", "output.shard=[16,16,8]", "output.chunk=[8,8,8]")


def test_a_mask_that_changes_brings_what_is_new_in_it_and_takes_the_rest_away(tmp_path: Path) -> None:
    """Of six blocks in a row the second and third are wanted, then the third and fourth."""
    data = noise(SHAPE)
    write_n5(tmp_path, data)
    mask = np.zeros(SHAPE, np.uint8)
    mask[..., 8:24] = 1
    write_volume(tmp_path / "mask.n5", mask, chunk=8)
    plan = planned(tmp_path, *ROW, *MASKED)
    ran(plan)
    assert ran(plan, update=True).was_complete and num_looked(plan) == 0
    mask = np.roll(mask, 8, axis=2)
    rewritten(tmp_path, "mask.n5", mask)
    report = ran(plan, update=True)
    assert report.updates[0].why.startswith("other parts of the volume are wanted")
    assert report.totals["infer"].units == 1
    np.testing.assert_array_equal(open_volume(plan.out).open()[...], np.where(mask, data, 0))
    assert RunWork(plan).verify().differences == []
    assert_fresh(plan)


def test_empty_space_that_is_filled_is_computed_and_what_was_emptied_goes(tmp_path: Path) -> None:
    data = np.maximum(noise(SHAPE), 1)
    data[..., 24:] = 0
    write_n5(tmp_path, data)
    plan = planned(tmp_path, *ROW, "input.empty=0", *MASKED[1:])
    ran(plan)
    data[..., 40:] = 7
    data[..., :8] = 0
    write_n5(tmp_path, data)
    report = ran(plan, update=True)
    assert report.totals["infer"].units == 1
    np.testing.assert_array_equal(open_volume(plan.out).open()[...], data)
    assert_fresh(plan)
    write_n5(tmp_path, np.zeros(SHAPE, np.uint8))
    with pytest.raises(RunError, match=r"is empty .*nothing is wanted; --update would leave an output without voxels"):
        ran(plan, update=True)


def test_a_driver_killed_around_the_record_of_another_selection_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the record counts, after it, and before the shards that are wanted no more are deleted."""
    data = np.maximum(noise(SHAPE), 1)
    write_n5(tmp_path, data)
    plan = planned(tmp_path, *ROW, "input.empty=0", *MASKED[1:])
    ran(plan)
    data[..., :8] = 0
    write_n5(tmp_path, data)

    def killed(*arguments: object, **named: object) -> None:
        raise Stopped

    for name in ("Updated", "take_selection", "remove"):
        with monkeypatch.context() as patched, pytest.raises(Stopped):
            patched.setattr(update, name, killed)
            ran(plan, update=True)
    ran(plan, update=True)
    assert_fresh(plan)


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
    assert "1 of 6 blocks read files that have changed; `volpipe run --update` compares their voxels" in said
    tree = json.loads(give("status", "--changes", "--json", "out.zarr").out)
    assert tree["changes"] == {"changed": 1, "blocks": 6, "grown": [0, 0, 0]}
    ended = give(*command, "--update")
    assert ended.code == 0 and "1 block of 6 read voxels that have changed; 1 is computed again" in ended.out
    assert "is complete, and nothing has changed" in give(*command, "--update").out


def test_ranges_of_units_come_back() -> None:
    for units in ([], [4], [0, 1, 2, 3, 7], [5, 9, 10], list(range(1000))):
        assert [unit for part in from_ranges(to_ranges(units)) for unit in part] == units
    assert to_ranges([0, 1, 2, 3, 7]) == "0-3,7"


class Updating(Slow):
    """A run that is given with --update."""

    @property
    def command(self) -> list[str]:
        return [*super().command, "--update"]


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
