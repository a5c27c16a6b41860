"""Requests for chunks of volumes in S3: how many, and what damaged or forbidden files give."""

from __future__ import annotations

import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from at_once import Together
from bucket import Bucket
from remote_volumes import DATA, LAYOUTS, make

from volpipe.errors import ChunkError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes import checksums
from volpipe.volumes.file_states import read_known
from volpipe.volumes.formats.container import GROUP_NAMES, USUAL_NAMES, create_groups, read_header
from volpipe.volumes.identity import identify
from volpipe.volumes.storage import object_store, requests
from volpipe.volumes.volume import (
    ArraySpec,
    create_array,
    open_volume,
    open_writer,
)


def chunk_requests(bucket: Bucket) -> list[tuple[str, str]]:
    """Return the requests for chunks or shards since it was last asked, without those for metadata."""
    result = [(method, path) for method, path in bucket.requests if path[-1].isdecimal()]
    bucket.requests.clear()
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_is_fetched_by_one_request_and_written_by_one(bucket: Bucket, layout: str) -> None:
    make("s3://cells/a.n5", layout=layout)
    num_files = 8 if layout == "shards" else 3 * 3 * 4
    chunk_requests(bucket)
    sums = open_writer("s3://cells/a.n5", "raw").write_summed(Box.from_shape(DATA.shape), DATA)
    asked = chunk_requests(bucket)
    assert len(asked) == len(set(asked)) == num_files
    assert {method for method, _ in asked} == {"PUT"}
    volume = open_volume("s3://cells/a.n5")
    chunk_requests(bucket)
    voxels, _ = read_known(volume.open(), Box.from_shape(DATA.shape))
    assert np.array_equal(voxels[0], DATA)
    asked = chunk_requests(bucket)
    assert len(asked) == len(set(asked)) == num_files
    assert {method for method, _ in asked} == {"GET"}
    header = open_writer("s3://cells/a.n5", "raw").header
    assert sums == checksums.take(header, Box.from_shape(DATA.shape))


def test_the_index_of_a_shard_is_fetched_once_and_chunks_that_lie_together_at_once(bucket: Bucket) -> None:
    data = np.random.default_rng(1).integers(0, 255, (16, 16, 64)).astype(np.uint8)
    create_array("s3://cells/a.zarr", "raw", ArraySpec(data.shape, data.dtype, (8, 8, 8), data.shape), "zarr3")
    open_writer("s3://cells/a.zarr", "raw").write(Box.from_shape(data.shape), data)
    reader = open_volume("s3://cells/a.zarr").open()
    for start, num_requests in ((0, 2), (16, 1), (48, 1)):  # the index first, and then chunks, all near
        chunk_requests(bucket)
        box = Box((0, 0, start), (16, 16, start + 16))
        assert np.array_equal(reader.read(box)[0], data[box.slices])
        assert len(chunk_requests(bucket)) == num_requests


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_folder_says_of_itself_is_asked_for_side_by_side(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    make("s3://cells/a.zarr", layout=layout)
    folder = object_store.parse("s3://cells/a.zarr/raw")
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "read", Together(object_store.read, len(USUAL_NAMES)))
        header = read_header(folder)
    assert header is not None
    assert header.shape == DATA.shape
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "read", Together(object_store.read, 2 * len(GROUP_NAMES)))
        with pytest.raises(VolumeError, match=r"a\.zarr/raw.* is an array"):
            create_groups(folder, "s0", header.format)


def test_shards_are_read_at_the_same_time_if_they_are_others(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    make("s3://cells/a.zarr", layout="shards")
    reader, boxes = (
        open_volume("s3://cells/a.zarr").open(),
        [Box((0, 0, 0), (8, 8, 8)), Box((16, 16, 16), (20, 24, 24))],
    )
    monkeypatch.setattr(object_store, "fetch", Together(object_store.fetch, len(boxes)))
    with ThreadPoolExecutor(len(boxes)) as pool:
        for box, voxels in zip(boxes, pool.map(reader.read, boxes), strict=True):
            assert np.array_equal(voxels[0], DATA[box.slices])


@pytest.mark.parametrize("num", [1, 4])
def test_as_many_boxes_of_an_identity_are_asked_for_as_have_room_for_their_chunks(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    chunk = (8, 128, 128)  # with a quarter of a box
    create_array("s3://cells/a.zarr", "raw", ArraySpec((8, 1024, 1024), np.dtype(np.uint8), chunk), "zarr3")
    open_writer("s3://cells/a.zarr", "raw").write(Box.from_shape((8, 1024, 1024)), np.ones((8, 1024, 1024), np.uint8))
    volume, fetch = open_volume("s3://cells/a.zarr"), Together(object_store.fetch, num)
    monkeypatch.setattr(object_store, "fetch", fetch)
    monkeypatch.setattr(requests, "BYTES_AT_ONCE", num * math.prod(chunk))
    identify(volume)
    assert fetch.most == num


def test_a_shard_that_is_written_anew_is_read_anew(bucket: Bucket) -> None:
    make("s3://cells/a.zarr", layout="shards")
    reader, box = open_volume("s3://cells/a.zarr").open(), Box((0, 0, 0), (8, 8, 16))
    first = read_known(reader, box)
    assert np.array_equal(first[0][0], DATA[box.slices])
    open_writer("s3://cells/a.zarr", "raw").write(Box.from_shape(DATA.shape), DATA[::-1].copy())
    again = read_known(reader, box)
    assert np.array_equal(again[0][0], DATA[::-1][box.slices])
    assert again[1].partition(":")[0] != first[1].partition(":")[0]


def test_requests_of_a_box_have_ended_before_another_tries_the_same() -> None:
    """Else one that is late writes what it got from an older file into the array of the next attempt."""
    begun, ended = threading.Event(), threading.Event()

    def late() -> None:
        begun.set()
        time.sleep(0.1)
        ended.set()

    def fail() -> None:
        begun.wait()
        raise VolumeError("it has changed")

    with pytest.raises(VolumeError, match="it has changed"):
        requests.each([fail, late])
    assert ended.is_set()


@pytest.mark.parametrize("place", [0, 20])
def test_a_damaged_index_of_a_shard_is_named(bucket: Bucket, place: int) -> None:
    make("s3://cells/a.zarr", layout="shards")
    shard = bytearray(bucket.files["a.zarr/raw/c/0/0/1"])
    shard[-4 - 16 * 8 + place] ^= 1  # 8 chunks, and the checksum
    bucket.files["a.zarr/raw/c/0/0/1"] = bytes(shard)
    reader = open_volume("s3://cells/a.zarr").open()
    with pytest.raises(
        ChunkError, match=r"chunk \(0, 0, 2\) in s3://cells/a.zarr/raw/c/0/0/1.*checksum of the shard's"
    ):
        reader.read(Box((0, 0, 8), (8, 8, 24)))
    assert np.array_equal(reader.read(Box((0, 0, 8), (8, 8, 16)))[0], DATA[:8, :8, 8:16])


def test_a_chunk_that_may_not_be_read_is_not_taken_for_zeros(bucket: Bucket) -> None:
    make("s3://cells/a.zarr")
    reader = open_volume("s3://cells/a.zarr").open()
    bucket.fault = lambda method, path: "403" if path.endswith("c/1/1/1") else ""
    with pytest.raises(VolumeError, match=r"voxels .* s3://cells/a.zarr/raw/c/1/1/1: access denied"):
        reader[...]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_in_memory_are_compared_with_the_bucket_where_somebody_looks_at_it(bucket: Bucket, layout: str) -> None:
    """A viewer showed voxels that had been written anew, as they had been."""
    make("s3://cells/a.n5", layout=layout)
    whole = Box.from_shape(DATA.shape)
    reader = open_volume("s3://cells/a.n5").open(cache_bytes=2**24, live=True)
    assert np.array_equal(reader.read(whole)[0], DATA)
    chunk_requests(bucket)
    assert np.array_equal(reader.read(whole)[0], DATA)
    assert {method for method, _ in chunk_requests(bucket)} == {"HEAD"}
    open_writer("s3://cells/a.n5", "raw").write(whole, DATA + 1)
    assert np.array_equal(reader.read(whole)[0], DATA + 1)
    for path in [path for path in bucket.files if path[-1].isdecimal()]:
        del bucket.files[path]
    assert not reader.read(whole).any()
