"""Shards that grow layer by layer, on a disk or in parts in a bucket: the bytes are those of one written at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import bucket as server
import google_crc32c
import numpy as np
import pytest
from bucket import Bucket
from hypothesis import given
from hypothesis import strategies as st

from volpipe.errors import ChangedError, RemoteError
from volpipe.geometry.grid import Box
from volpipe.volumes import checksums
from volpipe.volumes.storage import growing, object_store, paths
from volpipe.volumes.storage.growing import MOST_PARTS, GrowingFile, part_bytes
from volpipe.volumes.storage.tensorstore import Transferred, transferred
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.volumes.writer import ShardStream

PART = 1 << 15  # of most tests here, which the server takes, too
SHAPE, BOX = (64, 48, 48), Box.from_shape((64, 48, 48))
FILE = "a.zarr/s0/c/0/0/0"


@pytest.fixture
def bucket(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setattr(growing, "PART_BYTES", PART)
    monkeypatch.setattr(server, "LEAST_PART", PART)
    monkeypatch.setattr(object_store, "PAUSES_SECONDS", (0.001,) * 5)
    return bucket


@pytest.fixture(params=["disk", "bucket"])
def folder(request: pytest.FixtureRequest, bucket: Bucket, tmp_path: Path) -> str:
    """Return where arrays are made, on a disk or in the bucket."""
    return str(tmp_path) if request.param == "disk" else "s3://cells"


def noise(shape: tuple[int, ...], dtype: str = "uint8") -> np.ndarray:
    """Return noise with a hole, which is not stored."""
    data = np.random.default_rng(len(shape)).integers(1, 200, shape).astype(dtype)
    data[..., 16:32, :16, :] = 0
    return data


def stream_of(shape: tuple[int, ...] = SHAPE, folder: str = "s3://cells") -> ShardStream:
    """Return the stream of the only shard of an array of noise, uncompressed."""
    spec = ArraySpec(shape, np.dtype("uint8"), (16, 16, 16), shape, ("z", "y", "x"), "raw", 1)
    create_array(f"{folder}/a.zarr", "s0", spec, "zarr3")
    return ShardStream(open_writer(f"{folder}/a.zarr", "s0"), Box.from_shape(shape))


def write(stream: ShardStream, data: np.ndarray) -> None:
    for start in range(0, len(data), 16):
        stream.append(data[start : start + 16])


def content(folder: str, key: str = FILE) -> bytes | None:
    return paths.read(paths.locate(f"{folder}/{key}"), 1 << 30)


def names(folder: str, key: str) -> list[str]:
    """Return the names of all files below `key`, sorted."""
    return sorted(name for name, _ in paths.list_files(paths.locate(f"{folder}/{key}")))


CASES = [
    pytest.param((70, 50, 45), (48, 32, 48), (16, 16, 16), "uint8", "zstd", id="ends-within-chunks"),
    pytest.param((20, 32, 192), (16, 16, 192), (8, 8, 16), "uint8", "zstd", id="twelve-chunks"),
    pytest.param((33, 64, 64), (32, 64, 64), (32, 16, 64), "uint16", "raw", id="one-layer-more"),
    pytest.param((32, 32, 32), (32, 32, 32), (16, 8, 32), "float32", "gzip", id="a-part-or-two"),
    pytest.param((16, 16, 16), (16, 16, 16), (16, 16, 16), "uint8", "zstd", id="smaller-than-a-part"),
    pytest.param((32, 88, 176), (32, 88, 176), (16, 8, 16), "uint8", "zstd", id="eleven-chunks"),
    pytest.param((2, 40, 32, 32), (2, 32, 32, 32), (1, 16, 8, 32), "float32", "gzip", id="channels"),
]


@pytest.mark.parametrize(
    ("thickness", "threads"), [(1, 1), (7, 3), pytest.param(16, 2, marks=pytest.mark.long), (33, 64)]
)
@pytest.mark.parametrize(("shape", "shard", "chunk", "dtype", "codec"), CASES)
def test_layers_make_the_bytes_of_a_shard_that_is_written_at_once(
    folder: str, shape: tuple[int, ...], shard: tuple[int, ...], chunk: tuple[int, ...], dtype: str, codec: str,
    thickness: int, threads: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if len(shape) == 4 and folder.startswith("s3"):
        return  # a file in a bucket cannot be put in order
    monkeypatch.setenv("VOLPIPE_THREADS", str(threads))  # as many chunks are encoded at a time, about
    spec = ArraySpec(shape, np.dtype(dtype), chunk, shard, ("c", "z", "y", "x")[-len(shape) :], codec, 1)
    data, whole = noise(shape, dtype), Box.from_shape(shape)
    for key in ("at-once", "layers"):
        create_array(f"{folder}/a.zarr", key, spec, "zarr3")
    open_writer(f"{folder}/a.zarr", "at-once").write(whole, data)
    for corner in np.ndindex(*(-(-n // s) for n, s in zip(shape, shard, strict=True))):
        start = tuple(i * s for i, s in zip(corner, shard, strict=True))
        box = Box(start, tuple(a + s for a, s in zip(start, shard, strict=True))) & whole
        stream = ShardStream(open_writer(f"{folder}/a.zarr", "layers"), box)
        for first in range(box.start[-3], box.stop[-3], thickness):
            stream.append(data[box.along(len(shape) - 3, first, min(first + thickness, box.stop[-3])).slices])
        stream.close()
        stored = content(folder, f"a.zarr/layers/c/{'/'.join(map(str, corner))}")
        expected = checksums.ABSENT if stored is None else checksums.of_bytes(stored)
        assert stream.checksums() == checksums.joined([expected])
    assert names(folder, "a.zarr/layers") == names(folder, "a.zarr/at-once")
    for name in names(folder, "a.zarr/at-once"):
        assert content(folder, f"a.zarr/layers/{name}") == content(folder, f"a.zarr/at-once/{name}")
    assert (open_volume(f"{folder}/a.zarr", "layers").open().read_raw(()) == data).all()


def test_a_stream_that_is_given_up_leaves_what_was_there(folder: str, bucket: Bucket) -> None:
    write(first := stream_of(folder=folder), noise(SHAPE))
    first.close()
    before, again = content(folder), stream_of(folder=folder)
    again.append(noise(SHAPE)[:48] + 1)
    again.abort()
    again.abort()
    assert bucket.uploads == {}
    assert content(folder) == before and names(folder, "a.zarr/s0/c/0/0") == ["0"]


def test_a_shard_of_nothing_takes_the_place_of_the_one_before(folder: str) -> None:
    write(first := stream_of(folder=folder), noise(SHAPE))
    first.close()
    again = stream_of(folder=folder)
    write(again, np.zeros(SHAPE, np.uint8))
    again.close()
    assert content(folder) is None and again.checksums() == checksums.joined([checksums.ABSENT])


def test_a_shard_on_a_disk_appears_when_it_is_whole_and_its_bytes_are_counted(tmp_path: Path) -> None:
    stream, before = stream_of(folder=str(tmp_path)), transferred()
    for start in range(0, 64, 16):
        assert not (tmp_path / FILE).exists()
        stream.append(noise(SHAPE)[start : start + 16])
    assert not (tmp_path / FILE).exists()
    stream.close()
    assert [path.name for path in (tmp_path / FILE).parent.iterdir()] == ["0"]
    assert transferred() - before == Transferred(read=0, written=(tmp_path / FILE).stat().st_size)


def test_what_is_stored_while_a_shard_grows_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing, "PERSISTED_BYTES", 1)
    synced = []
    monkeypatch.setattr(growing, "sync", lambda path: synced.append(path.stat().st_size))
    stream, file = stream_of(folder=str(tmp_path)), tmp_path / FILE
    stream.persist()
    assert synced == []  # there is no file yet
    data = noise(SHAPE)
    stream.append(data[:32])
    stream.persist()
    stream.persist()
    assert len(synced) == 1 and synced[0] > 2**13
    stream.append(data[32:])
    stream.close()
    read: list[int] = []
    extend = google_crc32c.extend
    monkeypatch.setattr(google_crc32c, "extend", lambda crc, piece: read.append(len(piece)) or extend(crc, piece))
    assert stream.checksums() == checksums.joined([google_crc32c.value(file.read_bytes())])
    assert sum(read) == file.stat().st_size - synced[0]


def test_a_file_may_be_stored_before_its_first_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, which comes after the first slab and finds the second on its way."""
    stream, file = stream_of(folder=str(tmp_path)), tmp_path / FILE
    plain = GrowingFile.write

    def write(growing: GrowingFile, pieces: Sequence[bytes]) -> None:
        stream.persist()
        plain(growing, pieces)

    monkeypatch.setattr(GrowingFile, "write", write)
    stream.append(np.ones(SHAPE, np.uint8))
    stream.close()
    assert stream.checksums() == checksums.joined([google_crc32c.value(file.read_bytes())])


def test_a_shard_appears_when_it_is_whole_and_its_parts_go_meanwhile(bucket: Bucket) -> None:
    stream, before = stream_of(), transferred()
    bucket.requests.clear()
    write(stream, noise(SHAPE))
    stream.settle()
    assert FILE not in bucket.files
    ((key, parts),) = bucket.uploads.values()
    assert key == FILE
    assert {len(part) for part, _ in parts.values()} == {PART}
    assert len(parts) >= 3
    stream.close()
    assert bucket.uploads == {}
    data = bucket.files[FILE]
    assert transferred() - before == Transferred(read=0, written=len(data))
    methods = Counter(method for method, _ in bucket.requests)
    assert methods == {"POST": 2, "PUT": -(-len(data) // PART)}  # begun, completed, and each part once


def test_a_part_that_fails_in_passing_is_sent_again(bucket: Bucket) -> None:
    stream, failures = stream_of(), iter(("503", "reset", "500"))
    bucket.fault = lambda method, path: next(failures, "") if "partNumber=2&" in path else ""
    write(stream, noise(SHAPE))
    stream.close()
    sent = Counter(
        path.partition("partNumber=")[2].partition("&")[0] for _, path in bucket.requests if "partNumber" in path
    )
    bucket.fault, data = lambda method, path: "", bucket.files[FILE]
    open_writer("s3://cells/a.zarr", "s0").write(BOX, noise(SHAPE))
    assert bucket.files[FILE] == data
    assert sent.pop("2") == 4
    assert set(sent.values()) == {1}
    assert next(failures, "") == ""


@pytest.mark.parametrize(
    ("method", "path"),
    [("PUT", "partNumber=1&"), ("PUT", "partNumber=4&"), ("PUT", "partNumber=5&"), ("POST", "uploadId=")],
)
def test_an_upload_that_is_refused_leaves_what_was_there_and_no_part(bucket: Bucket, method: str, path: str) -> None:
    write(first := stream_of(), noise(SHAPE))
    first.close()
    before, again = bucket.files[FILE], stream_of()

    def fault(verb: str, request: str) -> str:
        if verb != method or path not in request:
            return ""
        time.sleep(0.2)  # the part is still on its way when the shard is closed
        return "403"

    bucket.fault = fault
    with pytest.raises(RemoteError, match=r"s3://cells/a.zarr/s0/c/0/0/0: access denied"):
        try:
            write(again, noise(SHAPE) + 1)
            again.close()
        finally:
            again.abort()
    assert bucket.uploads == {}
    assert bucket.files[FILE] == before


KILLED = """
import os, signal, sys
import numpy as np
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import open_writer
from volpipe.volumes.writer import ShardStream
stream = ShardStream(open_writer("s3://cells/a.zarr", "s0"), Box.from_shape((256, 256, 256)))
stream.append(np.random.default_rng(0).integers(1, 9, (250, 256, 256)).astype(np.uint8))
stream.settle()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_worker_leaves_no_shard(bucket: Bucket) -> None:
    stream_of((256, 256, 256))
    before = dict(bucket.files)
    ended = subprocess.run([sys.executable, "-c", KILLED], env=dict(os.environ), timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(bucket.uploads) == 1  # which the bucket's own rule deletes
    assert bucket.files == before


@given(st.integers(1, 1 << 45))
def test_parts_are_no_more_and_no_smaller_than_s3_takes(most_bytes: int) -> None:
    assert 5 << 20 <= part_bytes(most_bytes) <= 5 << 30
    assert -(-most_bytes // part_bytes(most_bytes)) <= MOST_PARTS == 10_000


def test_the_checksum_of_a_large_file_is_of_one_version(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "PIECE_BYTES", 100)
    file = object_store.parse("s3://cells/large")
    for num_bytes in (1, 99, 100, 101, 250, 300):
        bucket.files["large"] = bytes(range(256)) * 2
        bucket.files["large"] = bucket.files["large"][:num_bytes]
        bucket.requests.clear()
        assert checksums.checksum(file) == checksums.of_bytes(bucket.files["large"])
        assert len(bucket.requests) == -(-num_bytes // 100)
    assert checksums.checksum(object_store.parse("s3://cells/none")) == checksums.ABSENT

    def fault(method: str, path: str) -> str:
        if len(bucket.requests) == 2:
            bucket.files["large"] = b"1" * 300
        return ""

    bucket.requests.clear()
    bucket.fault = fault
    with pytest.raises(ChangedError):
        checksums.checksum(file)
