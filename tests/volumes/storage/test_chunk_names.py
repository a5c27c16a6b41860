"""Chunk files that have other names than the metadata give, or are packed once more: read where they can be."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import zarr
from bucket import Bucket
from chunk_layouts import DATA, LAYOUTS, METADATA, chunk_files, root, write
from numcodecs import Delta, GZip

import volpipe as vp
from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.node_cache import through_cache
from volpipe.volumes.survey import measure_footprint
from volpipe.volumes.volume import open_volume

Rename = Callable[[str, bytes], tuple[str, bytes]]
RENAMES: dict[str, Rename] = {
    "gz": lambda name, data: (f"{name}.gz", gzip.compress(data)),
    "br": lambda name, data: (f"{name}.br", imagecodecs.brotli_encode(data)),
    "gz in name": lambda name, data: (f"{name}.gz", data),
    "slash": lambda name, data: (name.replace(".", "/"), data),
    "dot": lambda name, data: (name.replace("/", "."), data),
    "no c": lambda name, data: (name.removeprefix("c/"), data),
    "v2": lambda name, data: (name.removeprefix("c/").replace("/", "."), data),
    "nested": lambda name, data: (name.replace("_", "/"), data),
    "nested gz": lambda name, data: (name.replace("_", "/") + ".gz", gzip.compress(data)),
    "lz4": lambda name, data: (f"{name}.lz4", data),
}
READ = [
    *((layout, how) for layout in ("zarr2", "zarr3", "n5", "precomputed") for how in ("gz", "br", "gz in name")),
    *((layout, how) for layout in ("zarr3", "zarr3 shards") for how in ("dot", "no c", "v2")),
    ("zarr2", "slash"), ("n5", "dot"), ("precomputed", "nested"), ("precomputed", "nested gz"),
]  # fmt: skip
REFUSED = [*((layout, "lz4") for layout in LAYOUTS), ("zarr3 shards", "gz"), ("precomputed shards", "gz")]


def rename(folder: Path, how: str, *, some: bool = False) -> str:
    """Rename the chunk files below `folder`, or every third of them; return the new name of one."""
    names = [str(file.relative_to(folder)) for file in chunk_files(folder)][:: 3 if some else 1]
    for name in names:
        new, data = RENAMES[how](name, (folder / name).read_bytes())
        (folder / name).unlink()
        (folder / new).parent.mkdir(parents=True, exist_ok=True)
        (folder / new).write_bytes(data)
    return new


def put(path: Path, bucket: Bucket, key: str) -> None:
    bucket.files |= {f"{key}/{f.relative_to(path)}": f.read_bytes() for f in path.rglob("*") if f.is_file()}


def written_otherwise(folder: Path, bucket: Bucket, layout: str, how: str, *, some: bool) -> Path:
    """Return an array in `folder`, and in the bucket by the same name, whose chunk files have other names."""
    path = folder / ("a.n5" if layout == "n5" else "a")
    write(path, layout)
    rename(root(path, layout), how, some=some)
    put(path, bucket, path.name)
    return path


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(("layout", "how"), READ)
def test_chunks_by_other_names_are_read(bucket: Bucket, tmp_path: Path, layout: str, how: str, some: bool) -> None:
    path = written_otherwise(tmp_path, bucket, layout, how, some=some)
    bucket.readable = bucket.listable = True
    for place in (path, f"s3://cells/{path.name}", f"{bucket.url}/cells/{path.name}"):
        volume = open_volume(f"{place}/k" if layout.startswith("precomputed") else place)
        np.testing.assert_array_equal(volume.open()[...], DATA)
        np.testing.assert_array_equal(volume.open()[3:17:5, 2, ::3], DATA[3:17:5, 2, ::3])
        assert volume.open().is_stored(Box((0, 0, 0), (8, 8, 8)))
        if not str(place).startswith("http"):  # where it cannot be listed two chunks are asked for
            assert any("chunk files are named" in note for note in volume.notes)
            found = measure_footprint(volume, seconds=60.0)
            assert found.num_stored == found.num_chunks == 3 * 3 * 2


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(("layout", "how"), REFUSED)
def test_chunks_by_strange_names_are_refused(bucket: Bucket, tmp_path: Path, layout: str, how: str, some: bool) -> None:
    path = written_otherwise(tmp_path, bucket, layout, how, some=some)
    for place in (path, f"s3://cells/{path.name}"):
        with pytest.raises(VolumeError, match=rf"\.{how}, and its metadata name"):
            open_volume(f"{place}/k" if layout.startswith("precomputed") else place)


@pytest.mark.parametrize("layout", ["zarr2", "n5", "precomputed"])
def test_the_first_missing_chunks_are_asked_for_by_other_names(bucket: Bucket, tmp_path: Path, layout: str) -> None:
    """A store that cannot be listed: of a sparse array only the last chunks are stored, all by the other name."""
    path = tmp_path / ("a.n5" if layout == "n5" else "a")
    files = write(path, layout)
    rename(root(path, layout), "gz")
    for file in chunk_files(path)[:-1]:
        file.unlink()
    assert len(files) == 18
    stored = open_volume(root(path, layout)).open()[...]
    assert np.count_nonzero(stored) == np.count_nonzero(stored == DATA) > 0
    put(path, bucket, path.name)
    bucket.readable = bucket.listable = True
    place = f"{bucket.url}/cells/{root(path, layout).relative_to(tmp_path)}"
    np.testing.assert_array_equal(open_volume(place).open()[...], stored)


@pytest.mark.parametrize("how", ["slash", "gz"])
def test_one_chunk_by_another_name_among_thousands_is_read(tmp_path: Path, how: str) -> None:
    data = np.arange(1, 1401, dtype="u2").reshape(14, 10, 10)
    metadata = {"zarr_format": 2, "shape": data.shape, "chunks": (1, 1, 1), "dtype": "<u2", "compressor": None,
                "fill_value": 0, "order": "C", "filters": None, "dimension_separator": "."}  # fmt: skip
    (tmp_path / ".zarray").write_text(json.dumps(metadata))
    for index in np.ndindex(data.shape):
        name, content = ".".join(map(str, index)), data[index].tobytes()
        name, content = RENAMES[how](name, content) if index == (7, 3, 9) else (name, content)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    np.testing.assert_array_equal(open_volume(tmp_path).open()[...], data)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_sparse_array_is_fill_and_costs_no_more_requests(bucket: Bucket, tmp_path: Path, layout: str) -> None:
    path = tmp_path / ("a.n5" if layout == "n5" else "a")
    first, *others = write(path, layout)
    for file in others:
        file.unlink()
    for name in (".DS_Store", f"._{first.name}", ".nfs0001", f"{first.name}.__lock", "notes.md"):
        (first.parent / name).write_bytes(b"1")
    put(path, bucket, path.name)
    key = root(path, layout).relative_to(tmp_path)
    local, remote = open_volume(tmp_path / key), open_volume(f"s3://cells/{key}")
    assert not any("chunk" in note for note in (*local.notes, *remote.notes))
    expected = local.open()[...]
    assert 0 < np.count_nonzero(expected) < expected.size
    assert measure_footprint(local, seconds=60.0).num_stored == np.count_nonzero(
        [expected[z : z + 8, y : y + 8, x : x + 8].any() for z in (0, 8, 16) for y in (0, 8, 16) for x in (0, 8)]
    )
    bucket.requests.clear()
    np.testing.assert_array_equal(remote.open()[...], expected)
    names = [path.partition("?")[0] for _, path in bucket.requests]
    asked = [name for name in names if f"/{key}/" in name and not name.endswith((*METADATA, ".zattrs"))]
    assert sorted(asked) == sorted(set(asked)) and not any(name.endswith((".gz", ".br")) for name in asked)


def test_files_none_of_which_is_a_chunk_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    for file in write(path, "zarr2"):
        file.rename(path / f"block-{file.name}.raw")
    with pytest.raises(VolumeError, match=r"it holds block-\d\.\d\.\d\.raw, and its metadata name a chunk 0\.0\.0"):
        open_volume(path)


def test_chunks_of_another_grid_are_refused_when_a_chunk_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a", "precomputed")
    info = json.loads((tmp_path / "a/info").read_text())
    info["scales"][0]["voxel_offset"] = [0, 0, 0]
    (tmp_path / "a/info").write_text(json.dumps(info))
    volume = open_volume(tmp_path / "a")
    assert any("no file in it has the name of a chunk" in note for note in volume.notes)
    with pytest.raises(VolumeError, match="its metadata name a chunk 0-8_0-8_0-8"):
        volume.open().read(Box((0, 0, 0), (4, 4, 4)))


def test_a_node_cache_keeps_chunks_by_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", "zarr2")
    rename(tmp_path / "a", "gz", some=True)
    monkeypatch.setenv("VOLPIPE_NODE_DIRECTORY", str(tmp_path / "node"))
    volume = through_cache(open_volume(tmp_path / "a"), "run")
    for _ in range(2):
        np.testing.assert_array_equal(volume.open().read(Box((0, 0, 0), DATA.shape))[0], DATA)
    assert len([file for file in (tmp_path / "node").rglob("0.*") if file.is_file()]) == 6


@pytest.mark.parametrize("separator", [".", "/", None])
def test_filtered_chunks_by_the_other_separator_are_read(tmp_path: Path, separator: str | None) -> None:
    """Of arrays that zarr-python reads, which are named by the metadata on disk."""
    array = zarr.create_array(
        tmp_path / "a", shape=DATA.shape, chunks=(8, 8, 8), dtype="u2", zarr_format=2, filters=[Delta(dtype="u2")],
        chunk_key_encoding={"name": "v2", "separator": "." if separator == "/" else "/"},
    )  # fmt: skip
    array[...] = DATA
    metadata = json.loads((tmp_path / "a/.zarray").read_text()) | {"dimension_separator": separator}
    (tmp_path / "a/.zarray").write_text(json.dumps({k: v for k, v in metadata.items() if v is not None}))
    np.testing.assert_array_equal(open_volume(tmp_path / "a").open()[...], DATA)


def test_a_run_reads_chunks_by_other_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", "precomputed")
    rename(tmp_path / "a/k", "nested gz")
    vp.run("a/k", out="out.zarr", site="threads", settings=["net.name=identity", "output.levels=1"])
    np.testing.assert_array_equal(np.asarray(vp.open("out.zarr"))[...], DATA)


# ---- files with a Content-Encoding


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": imagecodecs.brotli_encode,
    "zstd": imagecodecs.zstd_encode,
    "deflate": zlib.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    "aws-chunked,gzip": gzip.compress,
    "identity": lambda data: data,
}


def put_packed(path: Path, bucket: Bucket, encoding: str, *, is_packed: bool = True) -> None:
    """Put the files below `path` into `bucket`, each with its Content-Encoding, and so packed."""
    bucket.readable = bucket.listable = True
    for file in path.rglob("*"):
        if file.is_file():
            key, data = f"{path.name}/{file.relative_to(path)}", file.read_bytes()
            bucket.files[key] = PACK[encoding](data) if is_packed else data
            bucket.encodings[key] = encoding


def places(bucket: Bucket, key: object) -> tuple[str, str]:
    return f"s3://cells/{key}", f"{bucket.url}/cells/{key}"


@pytest.mark.parametrize(
    ("layout", "encoding"), [*((layout, "gzip") for layout in LAYOUTS[:-1]), *(("precomputed", name) for name in PACK)]
)
def test_files_with_an_encoding_are_unpacked(bucket: Bucket, tmp_path: Path, layout: str, encoding: str) -> None:
    path = tmp_path / ("a.n5" if layout == "n5" else "a")
    write(path, layout)
    put_packed(path, bucket, encoding)
    for place in places(bucket, root(path, layout).relative_to(tmp_path)):
        reader = open_volume(place).open()
        np.testing.assert_array_equal(reader.read(Box((3, 0, 9), (5, 17, 10)))[0], DATA[3:5, :17, 9:10])
        np.testing.assert_array_equal(reader[...], DATA)


@pytest.mark.parametrize("layout", ["zarr2", "zarr3", "n5"])
def test_chunks_that_are_gzip_themselves_are_unpacked_once(bucket: Bucket, tmp_path: Path, layout: str) -> None:
    """Without the header; with it though nothing packed them again; and packed twice, as it says."""
    path = tmp_path / ("a.n5" if layout == "n5" else "a")
    write(path, layout)
    if layout == "zarr2":
        array = zarr.create_array(
            path, shape=DATA.shape, chunks=(8, 8, 8), dtype="u2", zarr_format=2, compressors=GZip(1), overwrite=True
        )
        array[...] = DATA
    for encoding, is_packed in (("identity", True), ("gzip", False), ("gzip", True)):
        put_packed(path, bucket, encoding, is_packed=is_packed)
        for place in places(bucket, path.name):
            np.testing.assert_array_equal(open_volume(place).open()[...], DATA)


def test_filtered_chunks_with_an_encoding_are_unpacked(bucket: Bucket, tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a", shape=DATA.shape, chunks=(8, 8, 8), dtype="u2", zarr_format=2, filters=[Delta(dtype="u2")]
    )
    array[...] = DATA
    put_packed(tmp_path / "a", bucket, "gzip")
    for place in places(bucket, "a"):
        np.testing.assert_array_equal(open_volume(place).open()[...], DATA)


@pytest.mark.parametrize("what", ["cut", "bomb", "unknown", "large"])
def test_a_wrong_encoding_is_refused(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    layout = "zarr3 shards" if what == "large" else "precomputed"
    files = write(tmp_path / "a", layout)
    key = f"a/{files[0].relative_to(tmp_path / 'a')}"
    put_packed(tmp_path / "a", bucket, "gzip")
    bombs = {"cut": bucket.files[key][:-20], "bomb": gzip.compress(bytes(10**7))}
    bucket.files[key] = bombs.get(what, bucket.files[key])
    expected = "Content-Encoding: gzip"
    if what == "unknown":
        bucket.encodings[key], expected = "compress", "has Content-Encoding compress"
    if what == "large":
        monkeypatch.setattr("volpipe.volumes.storage.object_store.MOST_ENCODED_BYTES", 100)
        expected = "no part of its [0-9]+ bytes can be read by itself"
    place = places(bucket, root(tmp_path / "a", layout).relative_to(tmp_path))[0]
    with pytest.raises(VolumeError, match=expected):
        open_volume(place).open()[:4, :17, :4]
