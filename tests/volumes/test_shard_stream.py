"""Shards that are written layer by layer: the bytes are those of a shard that is written at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from volpipe.geometry.grid import Box
from volpipe.volumes.checksums import stored_files
from volpipe.volumes.storage import growing
from volpipe.volumes.storage.growing import GrowingFile
from volpipe.volumes.storage.tensorstore import Transferred, transferred
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.volumes.writer import ShardStream

CASES = [
    pytest.param((70, 50, 45), (48, 32, 48), (16, 16, 16), "uint8", "zstd", id="ends-within-chunks"),
    pytest.param((2, 40, 32, 32), (2, 32, 32, 32), (1, 16, 8, 32), "float32", "gzip", id="channels"),
    pytest.param((20, 32, 192), (16, 16, 192), (8, 8, 16), "uint8", "zstd", id="twelve-chunks"),
    pytest.param((33, 64, 64), (32, 64, 64), (32, 16, 64), "uint16", "raw", id="one-layer-more"),
]


def voxels(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return noise with a hole, which is not stored."""
    data = np.random.default_rng(len(shape)).integers(1, 200, shape).astype(dtype)
    data[..., 16:32, :16, :] = 0
    return data


@pytest.mark.parametrize(("thickness", "threads"), [(1, 1), (7, 3), (16, 2), (33, 64)])
@pytest.mark.parametrize(("shape", "shard", "chunk", "dtype", "codec"), CASES)
def test_layers_make_the_bytes_of_a_shard_that_is_written_at_once(
    tmp_path: Path, shape: tuple[int, ...], shard: tuple[int, ...], chunk: tuple[int, ...], dtype: str, codec: str,
    thickness: int, threads: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("VOLPIPE_THREADS", str(threads))  # as many chunks are encoded at a time, about
    spec = ArraySpec(shape, np.dtype(dtype), chunk, shard, ("c", "z", "y", "x")[-len(shape) :], codec, 1)
    data, whole = voxels(shape, dtype), Box.from_shape(shape)
    for key in ("at-once", "layers"):
        create_array(tmp_path / "a.zarr", key, spec, "zarr3")
    writer = open_writer(tmp_path / "a.zarr", "layers")
    for corner in np.ndindex(*(-(-n // s) for n, s in zip(shape, shard, strict=True))):
        start = tuple(i * s for i, s in zip(corner, shard, strict=True))
        box = Box(start, tuple(a + s for a, s in zip(start, shard, strict=True))) & whole
        open_writer(tmp_path / "a.zarr", "at-once").write(box, data[box.slices])
        stream = ShardStream(writer, box)
        for first in range(box.start[-3], box.stop[-3], thickness):
            layers = box.along(len(shape) - 3, first, min(first + thickness, box.stop[-3]))
            stream.append(data[layers.slices])
        stream.close()
    expected, result = (sorted((tmp_path / "a.zarr" / key / "c").rglob("*")) for key in ("at-once", "layers"))
    assert len(result) == len(expected) > 4
    for one, other in zip(expected, result, strict=True):
        assert one.is_dir() == other.is_dir()
        assert one.is_dir() or one.read_bytes() == other.read_bytes()
    assert (open_volume(tmp_path / "a.zarr", "layers").open().read_raw(()) == data).all()


def made(tmp_path: Path) -> tuple[ShardStream, Path]:
    """Return the stream of the only shard of an array, and its file."""
    spec = ArraySpec((32, 32, 32), np.dtype("uint8"), (16, 16, 16), (32, 32, 32), ("z", "y", "x"), "zstd", 1)
    create_array(tmp_path / "a.zarr", "s0", spec, "zarr3")
    writer, box = open_writer(tmp_path / "a.zarr", "s0"), Box.from_shape((32, 32, 32))
    (file,) = stored_files(writer.header, box)
    assert isinstance(file, Path)
    return ShardStream(writer, box), file


def test_a_shard_appears_when_it_is_whole(tmp_path: Path) -> None:
    stream, file = made(tmp_path)
    stream.append(np.ones((16, 32, 32), np.uint8))
    assert not file.exists()
    stream.append(np.ones((16, 32, 32), np.uint8))
    assert not file.exists()
    stream.close()
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_what_is_stored_for_good_while_a_shard_grows_is_read_back_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(growing, "PERSISTED_BYTES", 1)
    synced = []
    monkeypatch.setattr(growing, "sync", lambda path: synced.append(path.stat().st_size))
    stream, file = made(tmp_path)
    stream.persist()
    assert synced == []  # there is no file yet
    data = np.random.default_rng(0).integers(0, 256, (32, 32, 32), np.uint8)
    stream.append(data[:16])
    stream.persist()
    stream.persist()
    assert len(synced) == 1 and synced[0] > 2**13
    stream.append(data[16:])
    stream.close()
    read: list[int] = []
    extend = google_crc32c.extend
    monkeypatch.setattr(google_crc32c, "extend", lambda crc, piece: read.append(len(piece)) or extend(crc, piece))
    assert stream.checksum() == google_crc32c.value(file.read_bytes())
    assert sum(read) == file.stat().st_size - synced[0]


def test_a_file_may_be_stored_for_good_just_before_its_first_bytes_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, which comes after the first slab and finds the second on its way."""
    stream, file = made(tmp_path)
    plain = GrowingFile.write

    def write(growing: GrowingFile, pieces: Sequence[bytes]) -> None:
        stream.persist()
        plain(growing, pieces)

    monkeypatch.setattr(GrowingFile, "write", write)
    stream.append(np.ones((32, 32, 32), np.uint8))
    stream.close()
    assert stream.checksum() == google_crc32c.value(file.read_bytes())


def test_a_stream_that_is_given_up_leaves_what_was_there(tmp_path: Path) -> None:
    stream, file = made(tmp_path)
    stream.append(np.ones((32, 32, 32), np.uint8))
    stream.close()
    before = file.read_bytes()
    again, _ = made(tmp_path)
    again.append(np.full((16, 32, 32), 7, np.uint8))
    again.abort()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_a_shard_of_nothing_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    stream, file = made(tmp_path)
    stream.append(np.ones((32, 32, 32), np.uint8))
    stream.close()
    again, _ = made(tmp_path)
    again.append(np.zeros((32, 32, 32), np.uint8))
    again.close()
    assert not list(file.parent.iterdir())


def test_the_bytes_of_a_shard_are_counted_as_written(tmp_path: Path) -> None:
    before = transferred()
    stream, file = made(tmp_path)
    stream.append(voxels((32, 32, 32), "uint8"))
    stream.close()
    assert transferred() - before == Transferred(read=0, written=file.stat().st_size)
