"""Blocks that are computed slab by slab from bucket to bucket: the bytes are a disk's, each chunk is asked for once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, ValuesView
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import bucket as server
import numpy as np
import pytest
from bucket import ACCESS_KEY, SECRET_KEY, Bucket, serving
from inline import Inline, Stopped
from slabs import NORMALISE, slabs_of, source_of
from volumes import noise, windowed

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.inference import windows
from volpipe.inference.infer import infer
from volpipe.inference.output import create_output
from volpipe.inference.plan import Plan
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.recipes.inference import load_recipe
from volpipe.runs import worker
from volpipe.volumes import rolling_box
from volpipe.volumes.file_states import known_files
from volpipe.volumes.rolling_box import RollingBox
from volpipe.volumes.storage import growing
from volpipe.volumes.storage.requests import InTurn
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

SHAPE, PART = (96, 48, 48), 4096
AT_ONCE = 4  # pieces of uint8 that are read at a time


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bucket]:
    """A bucket with a volume, for runs whose slabs are layers of windows, and whose uploads have small parts."""
    monkeypatch.setattr(growing, "PART_BYTES", PART)
    monkeypatch.setattr(server, "LEAST_PART", PART)
    monkeypatch.chdir(tmp_path)
    with slabs_of(1), serving() as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        write_volume("in.zarr")
        yield bucket


def write_volume(name: str, shards: tuple[int, int, int] | None = None, seed: int = 0) -> str:
    """Write noise into the bucket, and return where it lies."""
    place, data = f"s3://cells/{name}", noise(SHAPE) ^ np.uint8(seed)
    create_array(place, "raw", ArraySpec(SHAPE, data.dtype, (16, 16, 16), shards, codec="raw"), "zarr3")
    open_writer(place, "raw").write(Box.from_shape(SHAPE), data)
    return place


def plan_of(out: str | Path, folder: Path, *settings: str) -> Plan:
    output = ["output.chunk=[16,16,16]", "output.codec=raw", "output.levels=1"]
    plan = prepare("s3://cells/in.zarr", load_recipe(None, [*output, *settings]), out, folder)
    assert plan.has_slabs
    return plan


CROP = ("net.name=shift", *windowed((12, 20, 22), (4, 4, 6), (6, 1, 2), "crop"))
HANN = ("net.name=shift", *windowed((12, 20, 22), (4, 4, 6), (6, 1, 2), "hann"))
BARS = ("net.name=identity", *windowed((16, 16, 16), (0, 0, 0), (6, 3, 1), "crop"))  # three blocks, three shards


def output(bucket: Bucket) -> dict[str, bytes]:
    """Return the files of voxels in the bucket's output."""
    files = {key.removeprefix("out.zarr/"): data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    return {key: data for key, data in files.items() if "/c/" in key}


@pytest.mark.long
@pytest.mark.parametrize("settings", [CROP, HANN, BARS], ids=["crop", "hann", "bars"])
@pytest.mark.parametrize("most_tasks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_run_into_a_bucket_has_the_bytes_of_one_onto_a_disk_also_if_it_is_interrupted(
    bucket: Bucket, tmp_path: Path, settings: tuple[str, ...], most_tasks: int
) -> None:
    folder = tmp_path / "local.zarr"
    assert execute(plan_of(folder, tmp_path, *settings), Inline().start).missing == []
    files = [path for path in folder.rglob("*") if path.is_file() and "c" in path.relative_to(folder).parts]
    expected = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    plan = plan_of("s3://cells/out.zarr", tmp_path, *settings)
    with pytest.raises(Stopped):
        execute(plan, Inline(most_tasks=most_tasks).start)
    assert execute(plan, Inline(seed=1, slots=2).start).missing == []
    assert output(bucket) == expected
    assert bucket.num_uploads >= 1
    assert bucket.uploads == {}


def test_each_chunk_is_asked_for_once_and_each_part_is_sent_once(bucket: Bucket, tmp_path: Path) -> None:
    plan = plan_of("s3://cells/out.zarr", tmp_path, *BARS)
    assert execute(plan, Inline().start).missing == []
    job = worker.Job(str(tmp_path / "out.zarr.run"), plan.identity)
    bucket.requests.clear()
    assert worker.infer(job, range(3)).failed == ()
    asked = Counter((method, path) for method, path in bucket.requests if "in.zarr/raw/c/" in path)
    assert {method for method, _ in asked} == {"GET"}
    assert (len(asked), asked.total()) == (6 * 3 * 3, 6 * 3 * 3)
    sent = Counter(path for method, path in bucket.requests if method == "PUT" and "/s0/c/" in path)
    sizes = [len(data) for key, data in output(bucket).items() if key.startswith("s0/")]
    assert set(sent.values()) == {1}
    assert len(sent) == sum(-(-size // PART) for size in sizes) > 3


def test_a_shard_that_is_refused_fails_alone_and_leaves_no_part(bucket: Bucket, tmp_path: Path) -> None:
    plan = plan_of("s3://cells/out.zarr", tmp_path, *BARS)
    assert len(plan.blocks) == len(plan.shards()) == 3
    assert execute(plan, Inline().start).missing == []
    before, job = output(bucket), worker.Job(str(tmp_path / "out.zarr.run"), plan.identity)
    bucket.fault = lambda method, path: "403" if "/s0/c/0/0/1" in path and "partNumber=3" in path else ""
    record = worker.infer(job, range(3))
    assert (record.done, [block for block, _ in record.failed]) == ((0, 2), [1])
    assert bucket.uploads == {}
    assert output(bucket) == before


def test_a_run_that_lost_its_lock_completes_no_shard(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is looked at before each slab is written, and once more before the shard is put in its place."""
    plan = plan_of("s3://cells/out.zarr", tmp_path, *BARS)
    assert execute(plan, Inline().start).missing == []
    job, looks = worker.Job(str(tmp_path / "out.zarr.run"), plan.identity), list[int]()
    for key in output(bucket):
        del bucket.files[f"out.zarr/{key}"]

    def check(job: worker.Job) -> None:
        looks.append(len(bucket.uploads))
        if len(looks) == 7:  # after the six slabs of the first block
            raise OSError("the lock is another's")

    monkeypatch.setattr(worker.Job, "check_session", check)
    record = worker.infer(job, [0])
    assert len(record.failed) == 1
    assert looks[-1] == 1
    assert bucket.uploads == {}
    assert output(bucket) == {}


def test_pieces_of_the_next_slabs_are_asked_for_before_one_is_cut(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[Box]()

    def noted(works: Iterable[partial[str]], at_once: int) -> InTurn[str]:
        assert at_once == AT_ONCE
        return InTurn((asked.append(work.args[0]) or work for work in works), at_once)

    monkeypatch.setattr(windows, "InTurn", noted)
    plan = plan_of(tmp_path / "out.zarr", tmp_path, *BARS)
    source = source_of(plan)
    slabs = [slab for block in range(3) for slab in Selection(plan).slabs(block)]
    pieces = [slab.seen.along(0, slab.seen.start[0], slab.seen.start[0] + 32) for slab in slabs[::2]]
    source.begin(range(3), Selection(plan).slabs)
    for number, slab in enumerate(slabs):
        source.voxels(*divmod(number, len(slabs) // 3), slab.numbers)
        assert asked == pieces[: number // 2 + AT_ONCE]
    assert asked == pieces
    source.close()


def test_nothing_is_read_ahead_any_more_where_a_run_ends_amid_a_block(bucket: Bucket, tmp_path: Path) -> None:
    plan = plan_of("s3://cells/out.zarr", tmp_path, *BARS)
    create_output(plan, {})
    begun = infer(Selection(plan), NORMALISE, ScratchTensors(plan, tmp_path), source_of(plan), range(3))
    assert next(begun)[0] == 0
    assert readers()
    begun.close()
    assert not readers()


def readers() -> list[str]:
    """Return the threads that read pieces of slabs ahead."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("volpipe-in-turn")]


@pytest.mark.parametrize("layer", [0, 3])
def test_pieces_that_were_asked_for_ahead_fail_with_their_own_block(bucket: Bucket, tmp_path: Path, layer: int) -> None:
    plan = plan_of("s3://cells/out.zarr", tmp_path, *BARS)
    assert execute(plan, Inline().start).missing == []
    before, job = output(bucket), worker.Job(str(tmp_path / "out.zarr.run"), plan.identity)
    bucket.fault = lambda method, path: "403" if f"in.zarr/raw/c/{layer}/0/1" in path else ""
    record = worker.infer(job, range(3))
    assert (record.done, [block for block, _ in record.failed]) == ((0, 2), [1])
    assert bucket.uploads == {}
    assert output(bucket) == before


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 0, 2), (2, 1)])
@pytest.mark.parametrize("settings", [CROP, BARS], ids=["crop", "bars"])
def test_slabs_are_those_that_are_asked_for_whatever_was_expected(
    bucket: Bucket, tmp_path: Path, settings: tuple[str, ...], order: tuple[int, ...]
) -> None:
    plan = plan_of(tmp_path / "out.zarr", tmp_path, *settings)
    source, reader = source_of(plan), plan.source.volume().open()
    source.begin(range(3), Selection(plan).slabs)
    for block in order:
        for index, slab in enumerate(Selection(plan).slabs(block)):
            voxels = source.voxels(block, index, slab.numbers)
            for number, place in zip(slab.numbers, voxels.places, strict=True):
                assert np.array_equal(voxels.data[place], reader.read_mirrored(plan.lattice.window_box(number)))
    source.close()


def boxes() -> list[Box]:
    return [Box((start, 0, 0), (start + 36, 48, 48)) for start in (-4, 28, 60)]


@pytest.mark.parametrize("shards", [None, (48, 48, 48)], ids=["chunks", "shards"])
def test_the_fingerprint_of_boxes_is_of_the_states_that_the_server_tells(
    bucket: Bucket, shards: tuple[int, int, int] | None
) -> None:
    reader = open_volume(write_volume("other.zarr", shards), "raw").open()  # as runs open what is in a bucket
    rolling = RollingBox(reader, boxes())
    expected = [reader.read_mirrored(box) for box in boxes()]
    bucket.requests.clear()
    for index in range(3):
        assert np.array_equal(rolling.read(index), expected[index])
    fingerprint = rolling.fingerprint()
    assert not [path for method, path in bucket.requests if method == "HEAD"]
    assert fingerprint.partition(":")[0] == known_files(reader.volume).hash(rolling.whole)


def test_files_between_boxes_of_which_some_are_not_read_count_too(bucket: Bucket) -> None:
    reader = open_volume(write_volume("other.zarr"), "raw").open(live=True)
    rolling = RollingBox(reader, boxes())
    rolling.read(0)
    assert rolling.fingerprint().partition(":")[0] == known_files(reader.volume).hash(rolling.whole)


def test_a_shard_that_is_written_between_two_boxes_is_noticed(bucket: Bucket) -> None:
    rolling = RollingBox(open_volume(write_volume("other.zarr", SHAPE), "raw").open(live=True), boxes())
    rolling.read(0)
    write_volume("other.zarr", SHAPE, seed=1)
    rolling.read(1)
    rolling.read(2)
    with pytest.raises(VolumeError, match="changed while its voxels"):
        rolling.fingerprint()


def test_what_one_thread_notices_of_a_change_another_does_not_forget(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at its own stamps while the other one notes what it found."""
    rolling = RollingBox(open_volume(write_volume("other.zarr"), "raw").open(live=True), boxes())

    class Stamps(dict[object, object]):
        def values(self) -> ValuesView[object]:
            rolling._is_changed = True
            return super().values()

    monkeypatch.setattr(rolling_box, "noting_stamps", lambda: nullcontext(Stamps(file="stamp")))
    rolling._read(boxes()[0], rolling._array(0), boxes()[0])
    assert rolling._is_changed
