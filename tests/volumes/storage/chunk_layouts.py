"""An array as tensorstore writes it in each chunked format, and its chunk files under other names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

DATA = np.random.default_rng(5).integers(1, 60_000, (20, 18, 14)).astype(np.uint16)
METADATA = (".zarray", "zarr.json", "attributes.json", "info")
GZIPPED = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "gzip", "configuration": {"level": 1}}]
SHARDED = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [8, 8, 8], "codecs": GZIPPED}}]
HASHLESS = {
    "@type": "neuroglancer_uint64_sharded_v1", "hash": "identity", "preshift_bits": 1, "minishard_bits": 1,
    "shard_bits": 3, "minishard_index_encoding": "gzip", "data_encoding": "gzip",
}  # fmt: skip
LAYOUTS = ("zarr2", "zarr3", "zarr3 shards", "n5", "precomputed", "precomputed shards")


def _zarr3(codecs: list[Any], chunk: int) -> dict[str, Any]:  # Any: JSON
    grid = {"name": "regular", "configuration": {"chunk_shape": [chunk] * 3}}
    return {"shape": DATA.shape, "data_type": "uint16", "chunk_grid": grid, "codecs": codecs}


def _spec(layout: str) -> dict[str, Any]:  # Any: JSON
    if layout == "zarr2":
        metadata = {"shape": DATA.shape, "dtype": "<u2", "chunks": [8, 8, 8], "compressor": {"id": "zlib", "level": 1}}
        return {"driver": "zarr", "metadata": metadata | {"dimension_separator": "."}}
    if layout == "n5":
        metadata = {"dimensions": DATA.shape[::-1], "dataType": "uint16", "blockSize": [8, 8, 8]}
        return {"driver": "n5", "metadata": metadata | {"compression": {"type": "gzip"}}}
    if layout.startswith("zarr3"):
        return {"driver": "zarr3", "metadata": _zarr3(SHARDED, 16) if "shards" in layout else _zarr3(GZIPPED, 8)}
    sharding = {"sharding": HASHLESS} if "shards" in layout else {}
    return {
        "driver": "neuroglancer_precomputed",
        "multiscale_metadata": {"type": "image", "data_type": "uint16", "num_channels": 1},
        "scale_metadata": {
            "key": "k", "size": DATA.shape[::-1], "encoding": "raw", "chunk_size": [8, 8, 8], "resolution": [8, 8, 30],
            "voxel_offset": [-10, 5, 0], **sharding,
        },
    }  # fmt: skip


def write(path: Path, layout: str) -> list[Path]:
    """Write DATA at `path`; return its chunk files, or shards."""
    array = tensorstore.open(_spec(layout) | {"kvstore": f"file://{path}/", "create": True}).result()
    if layout.startswith("precomputed"):
        array[...] = DATA.T[..., None]
    else:
        array[...] = DATA.T if layout == "n5" else DATA
    return chunk_files(path)


def chunk_files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name not in METADATA)


def root(path: Path, layout: str) -> Path:
    """Return the folder that the names of chunk files count from."""
    return path / "k" if layout.startswith("precomputed") else path
