"""Requests of a run from bucket to bucket, counted by a server on loopback."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bucket import ACCESS_KEY, SECRET_KEY, Bucket, serving
from inline import Inline
from volumes import noise, windowed

from volpipe.errors import VolumeError
from volpipe.estimation.memory import array_bytes
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.runs import worker
from volpipe.runs.worker import Job
from volpipe.volumes.rolling_box import pieces_at_once
from volpipe.volumes.storage import object_store, paths
from volpipe.volumes.storage.fetched_array import ChunkCache
from volpipe.volumes.storage.requests import InTurn, in_turn
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

SHAPE, CHUNK, SHARD = (256, 384, 384), (64, 64, 64), (128, 128, 128)
# Asked for beside what the blocks need, whatever the volume: 12 chunks for the estimate, 16 for the identity of the
# input, 27 for pictures of it; 27 of the output, 24 samples at faces of windows and 8 for viewers, with indices.
# Of the metadata, 8 look whether a run made the input, and noted its files then; 2 note those of the output.
MOST_OF_INPUT, MOST_OF_OUTPUT, MOST_METADATA = 12 + 16 + 27, 2 * 27 + 4 * 24 + 2 * 8, 140 + 8 + 2


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with serving() as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        yield bucket


def test_a_run_asks_once_for_each_chunk_and_puts_each_file_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What plan and report ask for beside that is bounded."""
    monkeypatch.chdir(tmp_path)
    data = noise(SHAPE)
    create_array("s3://cells/in.zarr", "raw", ArraySpec(SHAPE, data.dtype, CHUNK, codec="raw"), "zarr3")
    open_writer("s3://cells/in.zarr", "raw").write(Box.from_shape(SHAPE), data)
    settings = ["net.name=identity", "normalise.method=none", "output.levels=0", "output.codec=raw"]
    settings += [f"output.chunk={list(CHUNK)}", f"output.shard={list(SHARD)}"]
    recipe = load_recipe(None, [*settings, *windowed((64,) * 3, (0,) * 3, (2, 2, 2), "crop")])
    bucket.requests.clear()
    plan = prepare("s3://cells/in.zarr", recipe, "s3://cells/out.zarr", tmp_path)
    assert execute(plan, Inline().start).missing == []
    asked = Counter(bucket.requests)
    given = [count for (_, path), count in asked.items() if "in.zarr/raw/c/" in path]
    read = [count for (method, path), count in asked.items() if method == "GET" and "out.zarr/s0/c/" in path]
    files = [count for (method, path), count in asked.items() if method == "PUT" and "out.zarr/s0/c/" in path]
    assert (len(given), files) == (4 * 6 * 6, [1] * (2 * 3 * 3))
    assert sum(given) <= len(given) + MOST_OF_INPUT
    assert sum(read) <= MOST_OF_OUTPUT
    assert asked.total() - sum(given) - sum(read) - sum(files) <= MOST_METADATA
    assert np.array_equal(open_volume("s3://cells/out.zarr")[...], data)


def prepare_small(side: int, num_windows: int, level: int, folder: Path) -> Plan:
    """Return the plan of a run over a new cube of chunks of 8³ into shards of 8³; blocks have `num_windows` a side."""
    data = noise((side,) * 3)
    create_array("s3://cells/in.zarr", "raw", ArraySpec(data.shape, data.dtype, (8, 8, 8)), "zarr3")
    open_writer("s3://cells/in.zarr", "raw").write(Box.from_shape(data.shape), data)
    settings = ["net.name=identity", f"output.levels={level}", "output.chunk=[8,8,8]", "output.shard=[8,8,8]"]
    recipe = load_recipe(None, [*settings, *windowed((8,) * 3, (0,) * 3, (num_windows,) * 3, "crop")])
    return prepare("s3://cells/in.zarr", recipe, "s3://cells/out.zarr", folder)


@pytest.mark.parametrize(("level", "num_blocks"), [(0, 2), (1, 4)])
def test_shards_are_put_side_by_side(
    level: int, num_blocks: int, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two of a task wait for each other: one after the other they would never go."""
    monkeypatch.chdir(tmp_path)
    plan = prepare_small(8 * num_blocks, num_blocks, level, tmp_path)
    assert (len(plan.blocks), len(plan.shards(level))) == (1, 8)
    if level:
        assert execute(plan, Inline().start).missing == []
    first_two, numbers = threading.Barrier(2, timeout=60), itertools.count()

    def fault(method: str, path: str) -> str:
        if method == "PUT" and f"/s{level}/c/" in path and next(numbers) < 2:
            first_two.wait()
        return ""

    bucket.fault = fault
    if level:
        before = {key: data for key, data in bucket.files.items() if "/s1/c/" in key}
        record = worker.coarsen(Job(str(next(tmp_path.glob("*.run"))), plan.identity), range(8), level)
        assert record.done == tuple(range(8))
        assert before == {key: data for key, data in bucket.files.items() if "/s1/c/" in key}
    else:
        assert execute(plan, Inline().start).missing == []
    assert next(numbers) == 8
    assert np.array_equal(open_volume("s3://cells/out.zarr")[...], open_volume("s3://cells/in.zarr", "raw")[...])


@pytest.fixture
def job(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """That of a finished run from bucket to bucket over eight blocks, each of one chunk and one shard."""
    monkeypatch.chdir(tmp_path)
    plan = prepare_small(16, 1, 0, tmp_path)
    assert len(plan.blocks) == len(plan.shards()) == 8
    assert execute(plan, Inline().start).missing == []
    return Job(str(next(tmp_path.glob("*.run"))), plan.identity)


def test_small_blocks_are_written_side_by_side(bucket: Bucket, job: Job) -> None:
    """The first three of a task wait for each other: one after the other they would never go."""
    first_three, numbers = threading.Barrier(3, timeout=60), itertools.count()

    def fault(method: str, path: str) -> str:
        if method == "PUT" and "/s0/c/" in path and next(numbers) < 3:
            first_three.wait()
        return ""

    before = dict(bucket.files)
    bucket.fault = fault
    record = worker.infer(job, range(8))
    assert (record.done, record.failed, next(numbers)) == (tuple(range(8)), (), 8)
    assert bucket.files == before


def test_of_blocks_that_are_written_side_by_side_only_those_fail_that_cannot_be_written(
    bucket: Bucket, job: Job
) -> None:
    bucket.fault = lambda method, path: "denied" if method == "PUT" and path.endswith("/s0/c/0/1/0") else ""
    record = worker.infer(job, range(8))
    failed = list(job.plan.shards().touching(Box((0, 8, 0), (8, 16, 8))))
    assert [block for block, _ in record.failed] == failed
    assert record.done == tuple(block for block in range(8) if block not in failed)


def test_the_plan_counts_blocks_that_are_written_side_by_side(job: Job) -> None:
    """Each takes its sum, its shard, and that encoded."""
    plan = job.plan
    local = plan.model_copy(update={"out": "/out.zarr"})
    assert (plan.blocks_behind, local.blocks_behind) == (32, 1)
    assert array_bytes(plan) - array_bytes(local) == 31 * 3 * 8**3 * plan.dtype.itemsize


def test_small_blocks_are_read_side_by_side(bucket: Bucket, job: Job) -> None:
    """The first four wait for each other."""
    four, numbers = threading.Barrier(4, timeout=60), itertools.count()

    def fault(method: str, path: str) -> str:
        if method == "GET" and "in.zarr/raw/c/" in path and next(numbers) < 4:
            four.wait()
        return ""

    before = dict(bucket.files)
    bucket.fault = fault
    record = worker.infer(job, range(8))
    assert (record.done, record.failed, next(numbers)) == (tuple(range(8)), (), 8)
    assert bucket.files == before


def test_the_plan_counts_blocks_that_are_read_at_a_time(job: Job) -> None:
    """Of blocks of 8³ voxels each is a piece; beside the one that is computed, a disk's plan has one."""
    plan = job.plan
    local = plan.model_copy(update={"source": plan.source.model_copy(update={"path": "/in.zarr"})})
    itemsize = np.dtype(plan.source.dtype).itemsize
    assert array_bytes(plan) - array_bytes(local) == (pieces_at_once(itemsize) - 1) * 8**3 * itemsize


def test_a_chunk_that_several_ask_for_at_a_time_is_fetched_once() -> None:
    cache, part = ChunkCache(100), object_store.Fetched(b"0123", object_store.Stamp(4))
    asking, all_ask, fetched = threading.Semaphore(0), threading.Event(), list[int]()

    def fetch() -> object_store.Fetched:
        fetched.append(threading.get_ident())
        assert all_ask.wait(60)
        return part

    def ask() -> object_store.Fetched | None:
        asking.release()
        return cache.get_or((0, (1, 2, 3)), fetch)

    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask) for _ in range(8)]
        for _ in answers:
            assert asking.acquire(timeout=60)
        all_ask.set()
        assert {id(answer.result(60)) for answer in answers} == {id(part)}
    assert len(fetched) == 1


def test_a_chunk_that_could_not_be_fetched_is_asked_for_again() -> None:
    cache, part = ChunkCache(100), object_store.Fetched(b"0123", object_store.Stamp(4))

    def fail() -> None:
        raise OSError("no answer")

    with pytest.raises(OSError, match="no answer"):
        cache.get_or((0, (1, 2, 3)), fail)
    assert cache.get_or((0, (1, 2, 3)), lambda: None) is None
    assert cache.get_or((0, (1, 2, 3)), lambda: part) is part
    assert cache.get_or((0, (1, 2, 3)), fail) is part


def test_small_files_asked_for_once_are_those_that_were_written_meanwhile(bucket: Bucket) -> None:
    file = object_store.parse("s3://cells/out.zarr/zarr.json")
    with paths.reading_once():
        assert not paths.is_file(file)
        assert paths.read(file, 10) is None
        paths.write(file, b"0123456789")
        assert (paths.read(file, 4), paths.read(file, 100)) == (b"0123", b"0123456789")
        assert paths.is_file(file)
        assert [method for method, _ in bucket.requests] == ["GET", "PUT"]
        paths.delete(file.parent)
        assert not paths.is_file(file)
    bucket.files["out.zarr/zarr.json"] = b"0123456789"
    with paths.reading_once():
        assert (paths.read(file, 4), paths.read(file, 100)) == (b"0123", b"0123456789")


@pytest.mark.parametrize("at_once", [1, 3])
def test_works_in_turn_keep_their_order_and_no_more_are_taken_than_run(at_once: int) -> None:
    num_taken = num_ended = most = 0
    lock = threading.Lock()

    def work(number: int) -> int:
        nonlocal num_ended
        time.sleep(0.001 * (number % 4))
        with lock:
            num_ended += 1
        return number

    def works() -> Iterator[Callable[[], int]]:
        nonlocal num_taken, most
        for number in range(20):
            with lock:
                num_taken += 1
                most = max(most, num_taken - num_ended)
            yield partial(work, number)

    assert in_turn(works(), at_once) == list(range(20))
    assert 1 <= most <= at_once


def test_an_error_comes_once_works_that_were_begun_have_ended() -> None:
    may_end, ended = threading.Event(), list[int]()

    def work(number: int) -> None:
        if number == 0:
            may_end.set()
            raise VolumeError("no")
        may_end.wait(60)
        time.sleep(0.05)
        ended.append(number)

    with pytest.raises(VolumeError):
        in_turn((partial(work, number) for number in range(9)), 3)
    assert sorted(ended) == [1, 2]


def test_garbage_waits_for_no_work() -> None:
    """Whoever collects it may be who the work waits for."""
    may_end = threading.Event()
    turns = InTurn([lambda: True, lambda: may_end.wait(60)], 2)
    assert next(turns).result()
    knot = [turns]
    knot.append(knot)  # type: ignore[arg-type]
    del turns, knot
    started = time.monotonic()
    gc.collect()
    may_end.set()
    assert time.monotonic() - started < 30
