"""Volumes in S3 and on web servers, over real servers on loopback: their voxels, the requests they take, and runs."""

from __future__ import annotations

import functools
import http.server
import itertools
import math
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from at_once import Together
from bucket import ACCESS_KEY, SECRET_KEY, Bucket, Server
from command import Give
from inline import Inline, Stopped
from remote_volumes import DATA, LAYOUTS, SETTINGS, make, plan_of

from volpipe.errors import ChunkError, PlanError, RunError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes import checksums
from volpipe.volumes.file_states import read_known
from volpipe.volumes.formats.container import GROUP_NAMES, USUAL_NAMES, create_groups, read_header
from volpipe.volumes.identity import identify
from volpipe.volumes.storage import object_store, requests
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    create_array,
    create_multiscale,
    list_arrays,
    open_volume,
    open_writer,
)
from volpipe.workflow.work_plan import execute

GROUPS = {"ome-zarr-0.5": "zarr3", "ome-zarr-0.4": "zarr2", "n5": "n5", "zarr2": "zarr2"}


def make_group(path: str | Path, format: str) -> None:
    """Write a pyramid of two levels, the coarser one made of every second voxel."""
    create_array(path, "s0", ArraySpec(DATA.shape, DATA.dtype, (8, 8, 8)), GROUPS[format])
    create_array(path, "s1", ArraySpec((10, 12, 14), DATA.dtype, (8, 8, 8)), GROUPS[format])
    open_writer(path, "s0").write(Box.from_shape(DATA.shape), DATA)
    open_writer(path, "s1").write(Box.from_shape((10, 12, 14)), DATA[::2, ::2, ::2])
    levels = (Level("s0"), Level("s1", (2.0, 2.0, 2.0)))
    create_multiscale(path, Multiscale(levels, voxel_size_nm=(16.0, 8.0, 8.0)), format=format)


def upload(folder: Path, bucket: Bucket, key: str) -> None:
    bucket.files |= {f"{key}/{f.relative_to(folder)}": f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def download(bucket: Bucket, folder: Path) -> None:
    for key, data in bucket.files.items():
        (folder / key).parent.mkdir(parents=True, exist_ok=True)
        (folder / key).write_bytes(data)


@contextmanager
def web_server(folder: Path, gone: str = "") -> Iterator[str]:
    """Serve `folder` as Python's own web server does, and give its address; the path `gone` is answered with 410."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def send_head(self) -> Any:  # Any: as the library has it
            if self.path == gone:
                self.send_error(http.HTTPStatus.GONE)
                return None
            return super().send_head()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_reads_alike_from_s3_the_web_and_a_disk(bucket: Bucket, tmp_path: Path, layout: str) -> None:
    make(tmp_path / "a.n5", "in/raw", layout)
    upload(tmp_path / "a.n5", bucket, "x/a.n5")
    bucket.readable = True  # so that it is a web server as well
    local = open_volume(tmp_path / "a.n5/in/raw")
    for location in ("s3://cells/x/a.n5", "s3://cells/x/a.n5/in/raw", f"{bucket.url}/cells/x/a.n5/in/raw"):
        volume = open_volume(location)
        assert (volume.key, volume.codec, volume.dtype) == ("in/raw", local.codec, local.dtype)
        assert (volume.chunks, volume.shards) == (local.chunks, local.shards)
        assert np.array_equal(volume.open()[...], DATA)
        part = pickle.loads(pickle.dumps(volume.open())).read(Box((3, 1, 2), (9, 20, 5)))
        assert np.array_equal(part[0], DATA[3:9, 1:20, 2:5])


def test_a_simple_web_server_serves_all_but_parts_of_shards(tmp_path: Path) -> None:
    for layout in LAYOUTS:
        make(tmp_path / layout, layout=layout)
    with web_server(tmp_path) as address:
        for layout in LAYOUTS:
            assert np.array_equal(open_volume(f"{address}/{layout}/raw").open()[...], DATA)
        with pytest.raises(VolumeError, match="sends whole files alone, and sharded arrays are read in parts"):
            open_volume(f"{address}/shards/raw").open()[:3]


@pytest.mark.parametrize("name", ["a.zarr", "a"])
def test_a_server_that_says_nothing_of_a_neighbour_serves_volumes(tmp_path: Path, name: str) -> None:
    make_group(tmp_path / "x" / name, "ome-zarr-0.5")
    with web_server(tmp_path, gone="/x/info") as address:
        assert np.array_equal(open_volume(f"{address}/x/{name}").open()[...], DATA)


def test_a_level_whose_key_has_two_parts_is_read_from_s3(bucket: Bucket, tmp_path: Path) -> None:
    spec = ArraySpec(DATA.shape, DATA.dtype, (8, 8, 8), (32, 32, 32), codec="gzip")
    create_array(tmp_path / "a.precomputed", "em/s0", spec, "precomputed")
    open_writer(tmp_path / "a.precomputed", "em/s0").write(Box.from_shape(DATA.shape), DATA)
    upload(tmp_path / "a.precomputed", bucket, "x/a.precomputed")
    for location in ("s3://cells/x/a.precomputed", "s3://cells/x/a.precomputed/em/s0"):
        assert np.array_equal(open_volume(location).open()[...], DATA)


def test_a_server_that_says_nothing_of_a_volume_is_named(tmp_path: Path) -> None:
    create_array(
        tmp_path / "a.precomputed", "s0", ArraySpec(DATA.shape, DATA.dtype, (8, 8, 8), codec="gzip"), "precomputed"
    )
    with (
        web_server(tmp_path, gone="/a.precomputed/info") as address,
        pytest.raises(VolumeError, match=r"a\.precomputed/info.*410"),
    ):
        open_volume(f"{address}/a.precomputed/s0")


@pytest.mark.parametrize("name", ["a.zarr", "A.ZARR"])
def test_no_description_is_sought_above_a_container(bucket: Bucket, tmp_path: Path, name: str) -> None:
    make_group(tmp_path / name, "ome-zarr-0.5")
    upload(tmp_path / name, bucket, f"x/{name}")
    open_volume(f"s3://cells/x/{name}")
    assert "/cells/x/info" not in {path for _, path in bucket.requests}


@pytest.mark.parametrize("format", GROUPS)
def test_a_pyramid_is_found_in_s3_and_on_the_web(bucket: Bucket, tmp_path: Path, format: str) -> None:
    make_group(tmp_path / "p.zarr", format)
    upload(tmp_path / "p.zarr", bucket, "p.zarr")
    local = open_volume(tmp_path / "p.zarr", level=1)
    with web_server(tmp_path) as address:
        for location in ("s3://cells/p.zarr", f"{address}/p.zarr"):
            volume = open_volume(location, level=1)
            assert volume.levels == ("s0", "s1")
            assert (volume.voxel_size_nm, volume.origin_nm) == (local.voxel_size_nm, local.origin_nm)
            assert volume.voxel_size_nm == (32.0, 16.0, 16.0)
            assert np.array_equal(volume.open()[...], DATA[::2, ::2, ::2])


WRITES = {name: functools.partial(make, layout=name) for name in LAYOUTS}
WRITES |= {f"group of {name}": functools.partial(make_group, format=name) for name in GROUPS}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_to_s3_is_what_is_written_to_a_disk(bucket: Bucket, tmp_path: Path, name: str) -> None:
    for path in (tmp_path / "p.zarr", "s3://cells/p.zarr"):
        WRITES[name](path)
    download(bucket, tmp_path / "s3")
    files = {f.relative_to(tmp_path): f.read_bytes() for f in (tmp_path / "p.zarr").rglob("*") if f.is_file()}
    assert len(files) > (8 if name == "shards" else 20)
    assert files == {
        f.relative_to(tmp_path / "s3"): f.read_bytes() for f in (tmp_path / "s3").rglob("*") if f.is_file()
    }


def test_what_a_bucket_holds_is_listed_page_by_page(bucket: Bucket, tmp_path: Path) -> None:
    make(tmp_path / "a.n5", "one", "n5")
    make(tmp_path / "a.n5", "deep/two", "n5")
    upload(tmp_path / "a.n5", bucket, "a.n5")
    assert len(bucket.files) > 2 * 36  # several pages
    assert [volume.key for volume in list_arrays("s3://cells/a.n5")] == ["deep/two", "one"]
    with pytest.raises(VolumeError, match="holds 2 volumes; choose one by its key: deep/two, one"):
        open_volume("s3://cells/a.n5")
    with pytest.raises(VolumeError, match=r"no volume at s3://cells/a.n5/none.*holds deep/two, one"):
        open_volume("s3://cells/a.n5/none")


def test_the_web_names_arrays_only_where_metadata_do(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "v2.zarr", mode="w", zarr_format=2)
    group.create_array("one/raw", data=DATA, chunks=(8, 8, 8))
    make(tmp_path / "bare.n5")
    zarr.consolidate_metadata(tmp_path / "v2.zarr", zarr_format=2)
    with web_server(tmp_path) as address:
        assert open_volume(f"{address}/v2.zarr").key == "one/raw"
        with pytest.raises(VolumeError, match=r"a web server cannot be asked what it holds; .*name the array"):
            open_volume(f"{address}/bare.n5")
        with pytest.raises(VolumeError, match="no array"):
            open_volume(f"{address}/nothing.zarr/raw")
        group.create_array("two", data=DATA)
        zarr.consolidate_metadata(tmp_path / "v2.zarr", zarr_format=2)
        with pytest.raises(VolumeError, match="choose one by its key: one/raw, two"):
            open_volume(f"{address}/v2.zarr")


def test_missing_chunks_are_empty_also_from_afar(bucket: Bucket, tmp_path: Path) -> None:
    make(tmp_path / "a.zarr", layout="zarr2")
    (tmp_path / "a.zarr/raw/0/1/2").unlink()
    upload(tmp_path / "a.zarr", bucket, "a.zarr")
    expected = DATA.copy()
    expected[:8, 8:16, 16:24] = 0
    with web_server(tmp_path) as address:
        assert np.array_equal(open_volume("s3://cells/a.zarr").open()[...], expected)
        assert np.array_equal(open_volume(f"{address}/a.zarr/raw").open()[...], expected)


def test_codecs_that_are_left_to_zarr_python_are_read_from_s3(bucket: Bucket, tmp_path: Path) -> None:
    store = tmp_path / "odd.zarr"
    zarr.create_array(store, data=DATA, chunks=(8, 8, 8), compressors=numcodecs.LZ4(), zarr_format=2)
    upload(store, bucket, "odd.zarr")
    assert np.array_equal(open_volume("s3://cells/odd.zarr").open()[...], DATA)


def test_a_public_bucket_needs_no_credentials(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    make("s3://cells/a.zarr")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(VolumeError, match=r"access denied \(without credentials\)"):
        open_volume("s3://cells/a.zarr/raw")
    bucket.readable = True
    assert np.array_equal(open_volume("s3://cells/a.zarr/raw").open()[...], DATA)
    with pytest.raises(VolumeError, match=r"read but not listed, give the whole key"):
        open_volume("s3://cells/a.zarr")
    bucket.listable = True
    assert open_volume("s3://cells/a.zarr").key == "raw"
    with pytest.raises(VolumeError, match=r"access denied \(without credentials\)"):
        create_array("s3://cells/b.zarr", "raw", ArraySpec((8, 8, 8), np.dtype(np.uint8), (8, 8, 8)))


def test_a_profile_signs(bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make("s3://cells/a.zarr")
    text = "[other]\naws_access_key_id = nobody\naws_secret_access_key = nothing\n"
    text += f"[lab]\naws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
    (tmp_path / "credentials").write_text(text)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert np.array_equal(open_volume("s3://cells/a.zarr").open()[...], DATA)
    monkeypatch.setenv("AWS_PROFILE", "other")
    with pytest.raises(VolumeError, match=r"access denied \(credentials: profile\); set AWS_ACCESS_KEY_ID"):
        open_volume("s3://cells/a.zarr/raw")


def test_wrong_credentials_are_told_by_their_kind(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with pytest.raises(VolumeError, match=r"access denied \(credentials: environment\)"):
        open_volume("s3://cells/a.zarr")
    with pytest.raises(VolumeError, match=r"access denied \(credentials: environment\)"):
        create_array("s3://cells/a.zarr", "raw", ArraySpec((8, 8, 8), np.dtype(np.uint8), (8, 8, 8)))


def test_endpoint_and_region_travel_with_the_volume(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    make("s3://cells/a.zarr")
    volume = open_volume("s3://cells/a.zarr")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.delenv("AWS_REGION")
    assert volume.path == f"s3://cells/a.zarr?endpoint={bucket.url}&region=eu-west-1"
    assert open_volume(volume.path, volume.key) == volume
    assert str(volume) == f"s3://cells/a.zarr/raw?endpoint={bucket.url}&region=eu-west-1"
    assert open_volume(str(volume)) == volume
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert np.array_equal(open_volume(volume.path, volume.key).open()[...], DATA)


@pytest.mark.parametrize(
    ("location", "reason"),
    [
        ("s3://nothing/a.zarr", "there is no bucket nothing; check its name, and the endpoint"),
        ("s3://cells/a.zarr", "no volume at s3://cells/a.zarr"),
        ("s3://UPPER/a.zarr", "'UPPER' is no bucket's name"),
        ("s3://cells/../a.zarr", "may not have . or .. in it"),
        ("s3://cells/a.zarr?profile=me", "setting 'profile' is not known; use endpoint=URL and region=NAME"),
        ("s3://cells/a.zarr?endpoint=127.0.0.1:9000", "is not http"),
        ("gs://cells/a.zarr", "volpipe reads folders, s3:// and http.s.://, not gs://"),
        ("https:///a.zarr", "names no host"),
    ],
)
def test_a_location_that_leads_nowhere_is_refused(bucket: Bucket, location: str, reason: str) -> None:
    with pytest.raises(VolumeError, match=reason):
        open_volume(location)


@pytest.mark.parametrize("location", ["https://me:hush@127.0.0.1/a.zarr", "https://127.0.0.1/a.zarr?sig=hush"])
def test_secrets_in_an_address_are_refused_and_not_repeated(location: str) -> None:
    with pytest.raises(VolumeError, match="would be kept with the output") as caught:
        open_volume(location)
    assert "hush" not in str(caught.value)
    with pytest.raises(VolumeError) as caught:
        open_volume(f"s3://cells/a.zarr?endpoint={location}")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_server_that_is_not_there_is_told_soon(bucket: Bucket, scheme: str) -> None:
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        started = time.perf_counter()
        with pytest.raises(VolumeError, match=f"no answer from {address}; check the address"):
            open_volume(f"s3://cells/a.zarr?endpoint={address}" if scheme == "s3" else f"{address}/a.zarr/raw")
        assert time.perf_counter() - started < 10


@pytest.mark.long
def test_a_server_that_fails_under_way_is_told_soon(bucket: Bucket) -> None:
    make("s3://cells/a.zarr")
    reader = open_volume("s3://cells/a.zarr").open()
    bucket.broken = 500
    started = time.perf_counter()
    with pytest.raises(VolumeError, match=r"s3://cells/a.zarr/raw.*voxels.*500"):
        reader[...]
    with pytest.raises(VolumeError, match="500"):
        open_volume("s3://cells/a.zarr")
    assert time.perf_counter() - started < 20
    bucket.broken = 0
    assert np.array_equal(reader[...], DATA)


@pytest.mark.parametrize("format", [*GROUPS, "bare"])
def test_a_server_that_fails_at_opening_makes_no_other_volume(bucket: Bucket, tmp_path: Path, format: str) -> None:
    if format == "bare":
        make(tmp_path / "p.zarr", "deep/s0", "n5")
        make(tmp_path / "p.zarr", "deep/s1", "n5")
    else:
        make_group(tmp_path / "p.zarr", format)
    upload(tmp_path / "p.zarr", bucket, "p.zarr")
    whole = open_volume("s3://cells/p.zarr"), list_arrays("s3://cells/p.zarr")
    num_requests = len(bucket.requests)
    assert num_requests > 10
    bucket.broken = 400  # which nobody tries again
    for bucket.num_good in range(num_requests):
        with pytest.raises(VolumeError, match="400"):
            assert (open_volume("s3://cells/p.zarr"), list_arrays("s3://cells/p.zarr")) == whole


def test_a_damaged_chunk_is_named(bucket: Bucket) -> None:
    make("s3://cells/a.n5", layout="n5")
    bucket.files["a.n5/raw/0/0/0"] = bucket.files["a.n5/raw/0/0/0"][:30]
    with pytest.raises(VolumeError, match=r"s3://cells/a.n5/raw"):
        open_volume("s3://cells/a.n5").open()[...]


def test_an_array_that_is_made_anew_is_opened_anew(bucket: Bucket) -> None:
    make("s3://cells/a.zarr")
    first = open_writer("s3://cells/a.zarr", "raw")
    assert open_writer("s3://cells/a.zarr", "raw") is first
    bucket.files.clear()
    create_array("s3://cells/a.zarr", "raw", ArraySpec((4, 4, 4), np.dtype(np.uint8), (4, 4, 4)))
    assert open_writer("s3://cells/a.zarr", "raw").shape == (4, 4, 4)


def test_the_web_is_not_written_to(tmp_path: Path) -> None:
    with web_server(tmp_path) as address:
        make(tmp_path / "a.zarr")
        with pytest.raises(VolumeError, match="a web server, which is read only"):
            open_writer(f"{address}/a.zarr", "raw")
        with pytest.raises(VolumeError, match="read only; write to a folder or to s3://"):
            plan_of(tmp_path / "a.zarr", f"{address}/out.zarr", tmp_path)


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
def test_metadata_of_a_folder_are_read_side_by_side(
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


def test_a_run_into_s3_goes_on_to_its_bytes(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make("s3://cells/in.zarr")
    plan = plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path)
    with pytest.raises(Stopped):
        execute(plan, Inline(most_tasks=4).start)
    part = [key for key in bucket.files if key.startswith("out.zarr/")]
    assert execute(plan, Inline().start).missing == []
    whole = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    assert 2 < len(part) < len(whole)
    assert execute(plan, Inline().start).was_complete
    local = plan_of("s3://cells/in.zarr", tmp_path / "local.zarr", tmp_path)
    execute(local, Inline().start)
    for level in range(2):
        there = open_volume("s3://cells/out.zarr", level=level).open()[...]
        assert np.array_equal(there, open_volume(tmp_path / "local.zarr", level=level).open()[...])
        assert there.any()
    execute(plan, Inline().start, RunOptions(fresh=True))
    again = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    assert whole.keys() == again.keys()
    assert [key for key in whole if whole[key] != again[key]] == ["out.zarr/run/zarr.json"]  # it holds times


def test_no_output_in_s3_is_taken_over(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make("s3://cells/in.zarr")
    make("s3://cells/out.zarr")
    plan = plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path)
    for fresh in (False, True):
        with pytest.raises(RunError, match=r"s3://cells/out.zarr.* made"):
            execute(plan, Inline().start, RunOptions(fresh=fresh))
    with pytest.raises(PlanError, match="would overwrite the volume"):
        plan_of("s3://cells/in.zarr", "s3://cells/in.zarr", tmp_path)
    with pytest.raises(PlanError, match="would lie inside the volume"):
        plan_of("s3://cells/in.zarr", "s3://cells/in.zarr/out.zarr", tmp_path)


def test_a_read_only_output_is_refused_at_once(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make("s3://cells/in.zarr")
    bucket.readable = bucket.listable = True
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    workers = Inline()
    with pytest.raises(VolumeError, match=r"s3://cells/out.zarr/.volpipe: access denied \(without credentials\)"):
        execute(plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path), workers.start)
    assert workers.num_tasks == 0
    assert not (tmp_path / "out.zarr.run/plan.json").exists()


def test_a_sample_is_written_to_a_disk_alone(give: Give, tmp_path: Path) -> None:
    ended = give("sample", "s3://cells/a.n5")
    assert (ended.code, ended.out) == (2, "")
    assert "samples are written to a disk, not to s3://" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_runs_from_s3_to_s3_and_keeps_no_secret(bucket: Bucket, give: Give, tmp_path: Path) -> None:
    make("s3://cells/in.zarr")
    given = [part for setting in SETTINGS for part in ("--set", setting)]
    ended = give("run", *given, "-o", "s3://cells/out.zarr", "s3://cells/in.zarr")
    assert ended.code == 0, ended.err
    out = f"s3://cells/out.zarr?endpoint={bucket.url}&region=eu-west-1"
    assert ended.out.splitlines()[-1] == f"wrote {out}"
    assert give("status", "s3://cells/out.zarr").out.splitlines()[-1].strip() == f"{out}: complete"
    assert f"shape       {' × '.join(map(str, DATA.shape))} (z, y, x)" in give("info", "s3://cells/out.zarr").out
    kept = [*bucket.files.values(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())]
    assert (tmp_path / "out.zarr.run/plan.json").is_file()
    assert not [data for data in kept if SECRET_KEY.encode() in data or ACCESS_KEY.encode() in data]


def test_passing_faults_do_not_change_the_bytes(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(object_store, "SILENT_SECONDS", 1)
    monkeypatch.setattr(requests, "PAUSES_SECONDS", (0.01,) * 5)
    make("s3://cells/in.zarr")
    plan = plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path)
    assert execute(plan, Inline().start).missing == []
    calm = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    kinds = itertools.chain(("silent", "silent"), itertools.cycle(("500", "503", "429", "cut", "reset")))
    seen, lock = set[tuple[str, str]](), Lock()

    def fault(method: str, path: str) -> str:
        """Let each chunk and shard fail when it is first asked for, or written."""
        with lock:
            is_first = "/c/" in path and (method, path) not in seen
            seen.add((method, path))
            return next(kinds) if is_first else ""

    bucket.fault = fault
    assert execute(plan, Inline().start, RunOptions(fresh=True)).missing == []
    rough = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    assert calm.keys() == rough.keys()
    assert [key for key in calm if calm[key] != rough[key]] == ["out.zarr/run/zarr.json"]  # it holds times
    assert len({path for method, path in seen if method == "GET" and "/in.zarr/" in path}) >= 36
    folder = RunFolder(tmp_path / "out.zarr.run")
    assert '"failed"' not in folder.journal.read_text()  # requests were made again, and no task
    assert "requests made again: " in folder.log.read_text()


def test_a_store_that_fails_on_is_told_with_file_code_and_time(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "PAUSES_SECONDS", (0.01,) * 5)
    make("s3://cells/a.zarr")
    reader, writer = open_volume("s3://cells/a.zarr").open(), open_writer("s3://cells/a.zarr", "raw")
    bucket.fault = lambda method, path: "503"
    sentence = (
        r"s3://cells/a.zarr/raw/c/\d/\d/\d at http://127.0.0.1:\d+: .*503 Service Unav.*tried 6 times over \d+ s$"
    )
    with pytest.raises(VolumeError, match=rf"s3://cells/a.zarr/raw.*voxels .*: {sentence}"):
        reader[...]
    with pytest.raises(VolumeError, match=sentence):
        writer.write(Box.from_shape(DATA.shape), DATA)
