"""Bombs: small files that unpack to far more than their metadata say are refused, and memory does not grow."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numcodecs
import numpy as np
import pytest
import tifffile
from conftest import ROOT
from metadata import ZARR3, lay, n5, zarr2, zarr3

NUM_BYTES = 2**27  # of zeros, in each bomb
MOST_BYTES = 2**24  # by which a reader may grow

CHILD = """
import sys
from pathlib import Path
from volpipe.errors import VolpipeError
from volpipe.volumes.volume import open_volume

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

reader = open_volume(sys.argv[1]).open()
if sys.argv[2] == "chunks":
    reader[4:, 4:, 4:]  # what is there of the format is loaded
Path("/proc/self/clear_refs").write_text("5")
before = peak()
try:
    reader[:4, :4, :4]
except VolpipeError as error:
    print(peak() - before, type(error).__name__, error)
else:
    print(peak() - before, "read")
"""


def deflated(bits: int) -> bytes:
    packer = zlib.compressobj(9, wbits=bits)
    return b"".join(packer.compress(bytes(2**20)) for _ in range(NUM_BYTES >> 20)) + packer.flush()


def zstd() -> bytes:
    """Return a frame that does not say its size: blocks of 128 KiB of one byte, 4 bytes each (RFC 8878, 3.1.1.2)."""
    size = 2**17
    last = NUM_BYTES // size - 1
    blocks = (struct.pack("<I", size << 3 | 1 << 1 | (i == last))[:3] + b"\0" for i in range(last + 1))
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)


BOMBS: dict[str, Callable[[], bytes]] = {
    "gzip": lambda: deflated(31),
    "zlib": lambda: deflated(15),
    "zstd": zstd,
    "bz2": lambda: bz2.compress(bytes(NUM_BYTES)),
    "xz": lambda: lzma.compress(bytes(NUM_BYTES), preset=0),
    "blosc": lambda: bytes(numcodecs.Blosc("zstd", 1).encode(np.zeros(NUM_BYTES, "u1"))),
    "lz4": lambda: bytes(numcodecs.LZ4().encode(np.zeros(NUM_BYTES, "u1"))),
}
BLOSC = {"cname": "zstd", "clevel": 1, "shuffle": 1}
DELTA = {"filters": [{"id": "delta", "dtype": "|u1"}]}


def chain(name: str, **settings: object) -> dict[str, object]:
    return {"codecs": [{"name": "bytes"}, {"name": name, "configuration": settings}]}


CASES = {
    "n5 gzip": (n5(compression={"type": "gzip"}), "0/0/0", "gzip"),
    "n5 zstd": (n5(compression={"type": "zstd"}), "0/0/0", "zstd"),
    "n5 bzip2": (n5(compression={"type": "bzip2"}), "0/0/0", "bz2"),
    "n5 xz": (n5(compression={"type": "xz"}), "0/0/0", "xz"),
    "n5 blosc": (n5(compression={"type": "blosc", **BLOSC}), "0/0/0", "blosc"),
    "zarr2 gzip": (zarr2(compressor={"id": "gzip"}), "0.0.0", "gzip"),
    "zarr2 zlib": (zarr2(compressor={"id": "zlib"}), "0.0.0", "zlib"),
    "zarr2 zstd": (zarr2(compressor={"id": "zstd"}), "0.0.0", "zstd"),
    "zarr2 bz2": (zarr2(compressor={"id": "bz2"}), "0.0.0", "bz2"),
    "zarr2 blosc": (zarr2(compressor={"id": "blosc", **BLOSC}), "0.0.0", "blosc"),
    "zarr2 lz4": (zarr2(compressor={"id": "lz4"}), "0.0.0", "lz4"),
    "zarr2 lzma": (zarr2(compressor={"id": "lzma"}), "0.0.0", "xz"),
    "filtered gzip": (zarr2(compressor={"id": "gzip"}, **DELTA), "0.0.0", "gzip"),
    "filtered zstd": (zarr2(compressor={"id": "zstd"}, **DELTA), "0.0.0", "zstd"),
    "filtered bz2": (zarr2(compressor={"id": "bz2"}, **DELTA), "0.0.0", "bz2"),
    "zarr3 gzip": (zarr3(**chain("gzip", level=1)), "c/0/0/0", "gzip"),
    "zarr3 zstd": (zarr3(**chain("zstd", level=1, checksum=False)), "c/0/0/0", "zstd"),
    "zarr3 blosc": (
        zarr3(**chain("blosc", cname="zstd", clevel=1, shuffle="noshuffle", typesize=1, blocksize=0)),
        "c/0/0/0",
        "blosc",
    ),
}  # fmt: skip


def grown(path: Path, what: str = "chunks") -> tuple[int, str]:
    """Return by how many bytes a fresh process grows while the first chunk is read, and what it says."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), what], env=environment, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0 and ended.stdout, ended.stderr
    number, _, said = ended.stdout.partition(" ")
    return int(number), said


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_bomb_takes_no_more_memory_than_its_chunk(tmp_path: Path, case: str) -> None:
    files, name, codec = CASES[case]
    lay(tmp_path / "v", files)
    file = tmp_path / "v" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    text = BOMBS[codec]()
    file.write_bytes(struct.pack(">HH3I", 0, 3, 4, 4, 4) + text if case.startswith("n5") else text)
    assert file.stat().st_size < NUM_BYTES / 100
    num_bytes, said = grown(tmp_path / "v")
    assert said.startswith("ChunkError") and str(file) in said
    assert num_bytes < MOST_BYTES


def test_a_bomb_in_a_shard_takes_no_more_memory_than_its_chunk(tmp_path: Path) -> None:
    blosc = {"cname": "zstd", "clevel": 1, "shuffle": "noshuffle", "typesize": 1, "blocksize": 0}
    settings = {
        "chunk_shape": [4, 4, 4],
        "codecs": [{"name": "bytes"}, {"name": "blosc", "configuration": blosc}],
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    shards = {"name": "regular", "configuration": {"chunk_shape": [8, 8, 8]}}
    lay(tmp_path / "v", zarr3(chunk_grid=shards, codecs=[{"name": "sharding_indexed", "configuration": settings}]))
    bomb, file = BOMBS["blosc"](), tmp_path / "v/c/0/0/0"
    file.parent.mkdir(parents=True)
    absent = [2**64 - 1] * 14
    file.write_bytes(bytes(100) + bomb + struct.pack("<16Q", 100, len(bomb), *absent))
    num_bytes, said = grown(tmp_path / "v")
    assert said.startswith("ChunkError") and f"chunk (0, 0, 0) in {file} unpacks to {NUM_BYTES} bytes" in said
    assert num_bytes < MOST_BYTES


PICTURES: dict[str, Callable[[np.ndarray], bytes]] = {
    "jpeg": imagecodecs.jpeg_encode,
    "jpeg2000": imagecodecs.jpeg2k_encode,
    "png": imagecodecs.png_encode,
    "jpegxl": imagecodecs.jpegxl_encode,
    "zlib": lambda data: bytes(imagecodecs.zlib_encode(data.tobytes())),
    "lzma": lambda data: lzma.compress(data.tobytes(), preset=0),
    "packbits": imagecodecs.packbits_encode,
}


@pytest.mark.parametrize(
    "codec",
    [
        "jpeg",
        "jpegxl",
        "zlib",
        "lzma",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("jpeg2000", "png", "packbits")),
    ],
)
def test_a_strip_that_unpacks_to_more_than_it_should_is_refused(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.full((8, 16, 16), 9, "u1"), compression=codec, photometric="minisblack")
    bomb = PICTURES[codec](np.zeros((8192, 8192), "u1"))
    with tifffile.TiffFile(path, mode="r+b") as tif:
        tif.pages[0].tags["StripOffsets"].overwrite([path.stat().st_size])
        tif.pages[0].tags["StripByteCounts"].overwrite([len(bomb)])
    with path.open("ab") as stream:
        stream.write(bomb)
    num_bytes, said = grown(path, "file")
    assert (said.startswith("ChunkError") and str(path) in said) != (codec == "lzma")  # which reads what is due
    assert num_bytes < MOST_BYTES


def test_pictures_of_their_own_size_are_refused_where_nothing_bounds_them(tmp_path: Path) -> None:
    from volpipe.errors import VolumeError
    from volpipe.volumes.volume import open_volume

    tifffile.imwrite(tmp_path / "a.tif", np.zeros((16, 16), "u1"), compression="jpegxr")
    with pytest.raises(VolumeError, match="jpegxr, which takes memory that nothing bounds"):
        open_volume(tmp_path / "a.tif")


def test_an_entity_bomb_in_ome_xml_is_no_voxel_size(tmp_path: Path) -> None:
    from volpipe.volumes.formats.tiff import _ome

    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    text = f'<?xml version="1.0"?><!DOCTYPE OME [<!ENTITY e0 "xxxxxxxxxx">{entities}]><OME>&e11;</OME>'
    assert _ome(text, 0) == ({}, {})


def test_metadata_of_absurd_size_are_not_read(tmp_path: Path) -> None:
    from volpipe.errors import VolumeError
    from volpipe.volumes.volume import open_volume

    lay(tmp_path / "v", zarr3())
    (tmp_path / "v/zarr.json").write_text(json.dumps(ZARR3 | {"attributes": {"text": "x" * 2**24}}), encoding="utf-8")
    with pytest.raises(VolumeError, match=r"zarr\.json is larger than 16 MiB"):
        open_volume(tmp_path / "v")
