"""Damaged chunks: refused with dataset, box, chunk and file, whatever the format; the others are read all the same."""

from __future__ import annotations

import gzip
import lzma
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
import zarr
from arrays import invented, make
from metadata import lay, n5, zarr2
from numcodecs import LZ4, Blosc, Delta

from volpipe.errors import ChunkError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import Volume, open_volume

DATA = invented((8, 10, 12), "uint8")
WHOLE = bytes(range(1, 65))


def head(*shape: int, mode: int = 0) -> bytes:
    """Return the header of an N5 chunk of `shape`, x first."""
    return struct.pack(f">HH{len(shape)}I", mode, len(shape), *shape)


def folder_chunk(format: str, file: str) -> Callable[[Path], tuple[Path, Path]]:
    """Return what makes a volume whose chunk (1, 0, 1) lies in `file`."""

    def make_it(path: Path) -> tuple[Path, Path]:
        make(path / "v", DATA, format, chunks=(4, 10, 6), codec="gzip" if format == "n5" else "zstd")
        return path / "v", path / "v" / file

    return make_it


def delta(path: Path) -> tuple[Path, Path]:
    array = zarr.create_array(
        str(path / "v"), shape=DATA.shape, chunks=(4, 10, 6), dtype="u1", zarr_format=2, filters=[Delta("u1")],
        compressors=Blosc(),
    )  # fmt: skip
    array[...] = DATA
    return path / "v", path / "v/1.0.1"


CASES = {
    "n5": (folder_chunk("n5", "1/0/1"), r"\(1, 0, 1\)"),
    "zarr2": (folder_chunk("zarr2", "1/0/1"), r"\(1, 0, 1\)"),
    "zarr3": (folder_chunk("zarr3", "c/1/0/1"), r"\(1, 0, 1\)"),
    "through zarr-python": (delta, r"\(1, 0, 1\)"),
}
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda text: b"",
    "short": lambda text: text[:-5],
    "noise": lambda text: b"\x07" * len(text),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("case", CASES)
def test_a_damaged_chunk_is_named_and_the_others_are_read(tmp_path: Path, case: str, damage: str) -> None:
    make_it, index = CASES[case]
    path, file = make_it(tmp_path)
    file.write_bytes(DAMAGES[damage](file.read_bytes()))
    reader = open_volume(path).open()
    with pytest.raises(ChunkError, match=rf"{path}, voxels 0:8,0:10,0:12: chunk {index} in {file} "):
        reader.read(Box.from_shape(DATA.shape))
    np.testing.assert_array_equal(reader[:4], DATA[:4])
    np.testing.assert_array_equal(reader[4:, :, :6], DATA[4:, :, :6])


def test_a_chunk_that_is_gone_is_fill_and_one_put_right_is_read(tmp_path: Path) -> None:
    path, file = CASES["n5"][0](tmp_path)
    whole = file.read_bytes()
    reader = open_volume(path).open()
    file.write_bytes(whole[:20])
    with pytest.raises(ChunkError):
        reader[...]
    file.unlink()
    assert not reader[4:, :, 6:].any()
    file.write_bytes(whole)
    np.testing.assert_array_equal(reader[...], DATA)


def test_a_damaged_chunk_within_a_shard_is_named(tmp_path: Path) -> None:
    volume = make(tmp_path / "v", DATA, chunks=(4, 10, 6), shards=(8, 10, 12), codec="zstd")
    file = tmp_path / "v/c/0/0/0"
    text = bytearray(file.read_bytes())
    offset, size = struct.unpack("<QQ", text[-4 - 4 * 16 :][:16])  # of the first of four, before the checksum
    text[offset : offset + size] = bytes(size)
    file.write_bytes(text)
    with pytest.raises(ChunkError, match=rf"voxels 0:8,0:10,0:12: chunk \(0, 0, 0\) in {file}"):
        volume.open()[...]
    np.testing.assert_array_equal(volume.open()[4:], DATA[4:])


N5_CHUNKS = {
    "fewer columns": head(2, 4, 4) + WHOLE[:32],
    "no voxels": head(0, 4, 4),
    "fewer columns than it says": head(4, 4, 4) + WHOLE[:60],
    "more voxels than it says": head(4, 4, 4) + WHOLE + b"x",
    "a larger chunk": head(8, 4, 4) + WHOLE * 2,
    "2^96 voxels": head(2**32 - 1, 2**32 - 1, 2**32 - 1) + WHOLE,
    "two axes": head(8, 8) + WHOLE,
    "a length of its own": head(4, 4, 4, 64, mode=1) + WHOLE,
    "an unknown mode": head(4, 4, 4, mode=3) + WHOLE,
    "half a header": head(4, 4, 4)[:7],
}


@pytest.mark.parametrize("kind", N5_CHUNKS)
def test_an_n5_chunk_of_another_length_or_shape_is_refused(tmp_path: Path, kind: str) -> None:
    lay(tmp_path / "v", n5())
    file = tmp_path / "v/1/0/0"  # x first
    file.parent.mkdir(parents=True)
    file.write_bytes(N5_CHUNKS[kind])
    reader = open_volume(tmp_path / "v").open()
    for index in ((slice(None),) * 3, (0, slice(0, 4), slice(4, 8)), (slice(0, 4, 3), 3, slice(1, 8, 2))):
        with pytest.raises(ChunkError, match=rf"{tmp_path}/v, voxels [0-9:,]+: chunk \(0, 0, 1\) in {file}"):
            reader[index]
    assert not reader[:, :, :4].any()


XZ = lzma.compress(WHOLE)
XZ_CHUNKS = {
    **{f"cut after {n} bytes": (XZ[:n], "it is cut short") for n in (0, 1, 9, 12, 40)},
    "followed by something": (XZ + b"more", "4 bytes follow its end"),
    "a byte changed": (XZ[:30] + b"\xff" + XZ[31:], "Corrupt input data"),
    "too much": (lzma.compress(WHOLE * 2), "unpacks to more than the 64 bytes of a chunk"),
}


@pytest.mark.parametrize("kind", XZ_CHUNKS)
def test_a_damaged_xz_chunk_is_refused_before_a_library_ends_the_process(tmp_path: Path, kind: str) -> None:
    text, reason = XZ_CHUNKS[kind]
    lay(tmp_path / "v", n5(compression={"type": "xz"}))
    for name, stored in (("0/0/0", XZ), ("1/0/0", text)):  # x first
        (tmp_path / "v" / name).parent.mkdir(parents=True)
        (tmp_path / "v" / name).write_bytes(head(4, 4, 4) + stored)
    reader = open_volume(tmp_path / "v").open()
    with pytest.raises(ChunkError, match=rf"chunk \(0, 0, 1\) in {tmp_path}/v/1/0/0 cannot be read: xz: .*{reason}"):
        reader[...]
    assert reader[:4, :4, :4].tobytes() == WHOLE


def test_an_n5_chunk_cut_at_the_end_of_the_array_is_right(tmp_path: Path) -> None:
    """Java writes only the voxels that are in the array; zeros in them are not taken for missing ones."""
    lay(tmp_path / "v", n5())
    file = tmp_path / "v/0/2/0"
    file.parent.mkdir(parents=True)
    file.write_bytes(head(4, 2, 4) + WHOLE[:31] + b"\0")
    found = open_volume(tmp_path / "v").open()[0:4, 8:10, 0:4]
    np.testing.assert_array_equal(found, np.frombuffer(WHOLE[:31] + b"\0", "u1").reshape(4, 2, 4))


def in_file(path: Path, kind: str) -> Volume:
    """Return a volume in one file whose second half, planes 4 to 8, is damaged."""
    if kind == "hdf5":
        with h5py.File(path / "a.h5", "w") as file:
            place = file.create_dataset("raw", data=DATA, chunks=(4, 10, 12), compression="gzip").id.get_chunk_info(1)
        target, offset = path / "a.h5", place.byte_offset
    else:
        tifffile.imwrite(path / "a.tif", DATA, compression="zlib", photometric="minisblack")
        with tifffile.TiffFile(path / "a.tif") as tif:
            target, offset = path / "a.tif", tif.pages[4].dataoffsets[0]
    with target.open("r+b") as stream:
        stream.seek(offset)
        stream.write(bytes(20))
    return open_volume(target)


@pytest.mark.parametrize(
    ("kind", "words"), [("hdf5", r"\(1, 0, 0\) in "), ("tiff", r"\(4, 0, 0\) in .*: the strip or tile at byte \d+: ")]
)
def test_a_damaged_chunk_of_a_file_is_named(tmp_path: Path, kind: str, words: str) -> None:
    volume = in_file(tmp_path, kind)
    with pytest.raises(ChunkError, match=rf"{volume}, voxels 2:8,0:10,3:5: chunk {words}"):
        volume.open()[2:8, :, 3:5]
    np.testing.assert_array_equal(volume.open()[:4], DATA[:4])


def test_a_damaged_slice_is_named_by_its_own_file(tmp_path: Path) -> None:
    for z, plane in enumerate(DATA):
        tifffile.imwrite(tmp_path / f"s_{z}.tif", plane, compression="zlib")
    with tifffile.TiffFile(tmp_path / "s_5.tif") as tif:
        offset = tif.pages[0].dataoffsets[0]
    with (tmp_path / "s_5.tif").open("r+b") as stream:
        stream.seek(offset)
        stream.write(bytes(20))
    with pytest.raises(ChunkError, match=rf"chunk \(5, 0, 0\) in {tmp_path / 's_5.tif'}"):
        open_volume(tmp_path).open()[...]


def test_a_file_cut_short_after_it_was_opened_is_a_chunk_error(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", DATA)
    reader = open_volume(tmp_path / "a.npy").open()
    with (tmp_path / "a.npy").open("r+b") as stream:
        stream.truncate(128 + 5 * 120)
    with pytest.raises(ChunkError, match=r"voxels 0:8,0:10,0:12: chunk \(5, 0, 0\) in .*a\.npy.* ends at byte 728"):
        reader[...]
    np.testing.assert_array_equal(reader[:5], DATA[:5])


def test_chunk_errors_are_told_from_others_and_travel(tmp_path: Path) -> None:
    volume = in_file(tmp_path, "hdf5")
    with pytest.raises(VolumeError, match="leaves the volume") as outside:
        volume.open().read(Box((0, 0, 0), (9, 1, 1)))
    assert not isinstance(outside.value, ChunkError)
    with pytest.raises(ChunkError) as found:
        volume.open()[...]
    copy = pickle.loads(pickle.dumps(found.value))
    assert isinstance(copy, ChunkError) and isinstance(copy, OSError) and str(copy) == str(found.value)


def test_boxes_and_chunks_beyond_memory_are_refused_with_both_sizes(tmp_path: Path) -> None:
    lay(tmp_path / "large", n5(dimensions=[10**6] * 3))
    reader = open_volume(tmp_path / "large").open()
    with pytest.raises(VolumeError, match=r"takes 931,322,574\.6 GiB and this process may have [0-9.]+; read smaller"):
        reader[...]
    assert not reader[5:9, 999_999, -1:].any()
    lay(tmp_path / "chunk", zarr2(shape=[10**6] * 3, chunks=[4000, 4000, 4000]))
    with pytest.raises(VolumeError, match=r"chunk \(4000, 4000, 4000\) of uint8 takes 59\.6 GiB"):
        open_volume(tmp_path / "chunk").open()


REFUSED_CODECS = [
    {"filters": [{"id": "pickle"}]},
    {"filters": [{"id": "delta", "dtype": "|u1"}, {"id": "pickle"}]},
    {"filters": [{"id": "json2"}]},
    {"filters": [{"id": "astype", "encode_dtype": "|u1", "decode_dtype": "S100000000"}]},
    {"filters": [{"id": "fixedscaleoffset", "scale": 1, "offset": 0, "dtype": "|u1", "astype": "O"}]},
    {"compressor": {"id": "pickle"}},
    {"compressor": {"id": "vlen-bytes"}},
    {"compressor": {"id": "lzma", "format": 3}},
]


@pytest.mark.parametrize("more", REFUSED_CODECS, ids=str)
def test_codecs_that_make_objects_are_refused(tmp_path: Path, more: dict[str, object]) -> None:
    lay(tmp_path / "v", zarr2(**more))
    (tmp_path / "v/0.0.0").write_bytes(gzip.compress(WHOLE))
    with pytest.raises(VolumeError, match=r"is not supported; volpipe reads blosc, bz2"):
        open_volume(tmp_path / "v").open()[...]


def test_no_pickle_of_a_chunk_is_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
            return Path.touch, (tmp_path / "executed",)

    for more in REFUSED_CODECS[:2] + REFUSED_CODECS[5:6]:
        lay(tmp_path / "v", zarr2(**more))
        (tmp_path / "v/0.0.0").write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(VolumeError, match="'pickle'"):
            open_volume(tmp_path / "v").open()[...]
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("codec", [LZ4(), Blosc()], ids=lambda codec: str(codec.codec_id))
def test_a_truncated_chunk_is_not_given_to_decoders_that_read_past_its_end(tmp_path: Path, codec: object) -> None:
    array = zarr.create_array(
        str(tmp_path / "v"), shape=DATA.shape, chunks=DATA.shape, dtype="u1", zarr_format=2, compressors=codec,
        filters=[Delta("u1")],
    )  # fmt: skip
    array[...] = DATA
    file = tmp_path / "v/0.0.0"
    whole = file.read_bytes()
    for size in range(0, len(whole) - 1, 37):
        file.write_bytes(whole[:size])
        with pytest.raises(ChunkError, match=r"chunk \(0, 0, 0\)"):
            open_volume(tmp_path / "v").open()[...]
