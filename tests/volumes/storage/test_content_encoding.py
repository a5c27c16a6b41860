"""Files that a store sends with Content-Encoding, as cloud-volume and igneous put them there, are unpacked once."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import zarr
from bucket import Bucket
from chunk_layouts import DATA, LAYOUTS, root, write
from numcodecs import Delta, GZip

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import open_volume

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": imagecodecs.brotli_encode,
    "zstd": imagecodecs.zstd_encode,
    "deflate": zlib.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data)),
    "aws-chunked,gzip": gzip.compress,
    "identity": lambda data: data,
}


def put(path: Path, bucket: Bucket, encoding: str, *, is_packed: bool = True) -> None:
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
    put(path, bucket, encoding)
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
        put(path, bucket, encoding, is_packed=is_packed)
        for place in places(bucket, path.name):
            np.testing.assert_array_equal(open_volume(place).open()[...], DATA)


def test_filtered_chunks_with_an_encoding_are_unpacked(bucket: Bucket, tmp_path: Path) -> None:
    array = zarr.create_array(
        tmp_path / "a", shape=DATA.shape, chunks=(8, 8, 8), dtype="u2", zarr_format=2, filters=[Delta(dtype="u2")]
    )
    array[...] = DATA
    put(tmp_path / "a", bucket, "gzip")
    for place in places(bucket, "a"):
        np.testing.assert_array_equal(open_volume(place).open()[...], DATA)


@pytest.mark.parametrize("what", ["cut", "bomb", "unknown", "large"])
def test_what_cannot_be_unpacked_is_refused(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    layout = "zarr3 shards" if what == "large" else "precomputed"
    files = write(tmp_path / "a", layout)
    key = f"a/{files[0].relative_to(tmp_path / 'a')}"
    put(tmp_path / "a", bucket, "gzip")
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
