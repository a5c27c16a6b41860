"""Sharded precomputed arrays in a bucket: their voxels, and damaged indices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from bucket import ACCESS_KEY, SECRET_KEY, Bucket, serving

from volpipe.errors import ChunkError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import Reader, open_volume

SIZE, CHUNK = (75, 64, 50), (8, 8, 8)  # x, y, z
DATA = np.random.default_rng(0).integers(0, 1 << 40, SIZE[::-1], np.uint64)
ONE_MINISHARD = {"hash": "identity", "preshift_bits": 6, "minishard_bits": 0, "shard_bits": 5}
SEVERAL = {"hash": "identity", "preshift_bits": 2, "minishard_bits": 4, "shard_bits": 5}
HASHED = {"hash": "murmurhash3_x86_128", "preshift_bits": 2, "minishard_bits": 3, "shard_bits": 3}
BOXES = [
    Box((0, 0, 0), (8, 8, 8)),
    Box((8, 16, 0), (32, 32, 16)),
    Box((3, 30, 7), (50, 64, 75)),
    Box((40, 0, 70), (41, 1, 75)),
]


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    with serving() as bucket:
        monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
        yield bucket


def served(bucket: Bucket, folder: Path, bits: dict[str, Any], packed: str, encoding: str = "raw") -> Reader:
    """Return the reader of DATA as tensorstore writes it, but for a part that is empty, served by `bucket`."""
    scale: dict[str, Any] = {
        "key": "s0", "size": SIZE, "resolution": [8, 8, 8], "voxel_offset": [3, 5, 7], "chunk_size": CHUNK,
        "encoding": encoding,
        "sharding": {"@type": "neuroglancer_uint64_sharded_v1", "minishard_index_encoding": packed,
                     "data_encoding": packed, **bits},
    }  # fmt: skip
    if encoding == "compressed_segmentation":
        scale["compressed_segmentation_block_size"] = [8, 8, 8]
    spec = {
        "driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{folder}/"}, "create": True,
        "multiscale_metadata": {"type": "image", "data_type": "uint64", "num_channels": 1}, "scale_metadata": scale,
    }  # fmt: skip
    ts.open(spec).result()[ts.d[:].translate_to[0]][..., 0].write(stored().T).result()
    for file in filter(Path.is_file, folder.rglob("*")):
        bucket.files[f"in.precomputed/{file.relative_to(folder)}"] = file.read_bytes()
    return open_volume("s3://cells/in.precomputed/s0").open()


def stored() -> np.ndarray:
    """Return DATA (z, y, x) with chunks of zeros, which are not stored."""
    data = DATA.copy()
    data[8:24, 16:32, :40] = 0
    return data


@pytest.mark.parametrize("encoding", ["raw", "compressed_segmentation"])
@pytest.mark.parametrize("packed", ["raw", "gzip"])
@pytest.mark.parametrize("bits", [ONE_MINISHARD, SEVERAL, HASHED], ids=["one", "several", "hashed"])
def test_voxels_are_those_that_were_written(
    bits: dict[str, Any], packed: str, encoding: str, bucket: Bucket, tmp_path: Path
) -> None:
    reader = served(bucket, tmp_path / "a", bits, packed, encoding)
    for box in [*BOXES, Box.from_shape(DATA.shape)]:
        assert np.array_equal(reader.read(box)[0], stored()[box.slices])


@pytest.mark.parametrize("packed", ["raw", "gzip"])
@pytest.mark.parametrize("part", ["table", "minishard", "chunk", "end"])
def test_a_damaged_shard_is_named(part: str, packed: str, bucket: Bucket, tmp_path: Path) -> None:
    reader = served(bucket, tmp_path / "a", ONE_MINISHARD, packed)
    name = min(name for name in bucket.files if name.endswith(".shard"))
    data = bytearray(bucket.files[name])
    first, last = np.frombuffer(data[:16], "<u8").tolist()
    if part == "table":
        data[6:8] = b"\xff\xff"
    elif part == "minishard":
        data[16 + first : 16 + last] = b"\xff" * (last - first)
    elif part == "chunk" and packed == "gzip":
        data[16 : 16 + 100] = b"\xff" * 100
    else:
        data = data[:10]
    bucket.files[name] = bytes(data)
    with pytest.raises(ChunkError, match=r"in\.precomputed/s0/00?\.shard"):
        reader.read(BOXES[0])
