"""Volumes in S3 and on web servers, over real servers on loopback."""

from __future__ import annotations

import functools
import http.server
import multiprocessing
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import z5py
import zarr
from bucket import ACCESS_KEY, SECRET_KEY, Bucket, Server
from remote_volumes import DATA, LAYOUTS, make, plan_of

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
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

GROUPS = {"ome-zarr-0.5": "zarr3", "ome-zarr-0.4": "zarr2", "n5": "n5", "zarr2": "zarr2"}


def make_group(path: Path, format: str) -> None:
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
def test_others_read_what_was_written_to_s3(bucket: Bucket, tmp_path: Path, layout: str) -> None:
    make("s3://cells/some where/a.n5", layout=layout)
    download(bucket, tmp_path)
    path = tmp_path / "some where/a.n5"
    found = (
        z5py.File(str(path), mode="r")["raw"][...] if layout == "n5" else zarr.open_array(path / "raw", mode="r")[...]
    )
    assert np.array_equal(np.asarray(found), DATA)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_reads_the_same_from_s3_and_the_web_as_from_a_disk(
    bucket: Bucket, tmp_path: Path, layout: str
) -> None:
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


@pytest.mark.parametrize("format", GROUPS)
def test_a_pyramid_written_to_s3_is_that_written_to_a_disk(bucket: Bucket, tmp_path: Path, format: str) -> None:
    make_group(tmp_path / "p.zarr", format)
    make_group("s3://cells/p.zarr", format)  # type: ignore[arg-type]
    download(bucket, tmp_path / "s3")
    files = {f.relative_to(tmp_path): f.read_bytes() for f in (tmp_path / "p.zarr").rglob("*") if f.is_file()}
    assert len(files) > 20
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
def test_a_server_that_fails_while_a_volume_is_opened_makes_no_other_volume(
    bucket: Bucket, tmp_path: Path, format: str
) -> None:
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


def try_to_open(location: str, answer: Any) -> None:
    try:
        answer.put(str(open_volume(location).open()[0, 0, 0]))
    except VolumeError as error:
        answer.put(str(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_forked_process_is_told_and_a_spawned_one_reads(bucket: Bucket, method: str) -> None:
    make("s3://cells/a.zarr")
    processes = multiprocessing.get_context(method)
    answer = processes.SimpleQueue()
    child = processes.Process(target=try_to_open, args=("s3://cells/a.zarr", answer))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    said = str(answer.get())
    assert "was forked from one" in said if method == "fork" else said == str(DATA[0, 0, 0])


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
