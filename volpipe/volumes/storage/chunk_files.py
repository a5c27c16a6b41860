"""The chunk and shard files of an array: their names, and the chunks in a shard.

Not here: voxels (tensorstore), or sampling (survey).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.geometry.grid import Grid
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import Header, Tree

ABSENT = np.uint64(2**64 - 1)  # offset and length of a chunk that a shard lacks
OFFSET_BYTES, CHECKSUM_BYTES = 16, 4


@dataclass(frozen=True)
class ChunkFiles:
    """The files of the array of `header`, one for each chunk, or for each shard where it has any."""

    header: Header

    @property
    def grid(self) -> Grid:
        """The chunks or shards, in stored axes: one is one file."""
        return Grid(self.header.shape, self.header.write_unit)

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole array, in shards or not."""
        return math.prod(Grid(self.header.shape, self.header.chunks).counts)

    def name(self, index: tuple[int, ...]) -> str:
        """Return the name of the file at `index` of the grid, counted from the array's folder.

        Of precomputed, "" where a shard is no box of the grid: its chunks are anywhere.
        """
        if self.header.format == "precomputed":
            return _precomputed_name(self.header, index)
        prefix, separator = self._naming
        numbers = index[::-1] if self.header.format == "n5" else index
        return prefix + separator.join(map(str, numbers))

    def index(self, name: str) -> tuple[int, ...] | None:
        """Return where in the grid the file `name` belongs, None where it is no chunk's or shard's."""
        prefix, separator = self._naming
        numbers = name.removeprefix(prefix).split(separator)
        if not name.startswith(prefix) or not all(number.isdecimal() for number in numbers):
            return None
        index = tuple(map(int, numbers[::-1] if self.header.format == "n5" else numbers))
        counts = self.grid.counts
        inside = len(index) == len(counts) and all(i < n for i, n in zip(index, counts, strict=True))
        return index if inside else None

    @property
    def _naming(self) -> tuple[str, str]:
        """The prefix of a file's name, and the separator of its numbers."""
        known = self.header.known
        if self.header.format == "n5":
            return "", "/"
        if self.header.format == "zarr2":
            return "", str(known["dimension_separator"])
        encoding = known["chunk_key_encoding"]
        settings = encoding.get("configuration") or {}
        if encoding.get("name") == "v2":
            return "", str(settings.get("separator", "."))
        separator = str(settings.get("separator", "/"))
        return f"c{separator}", separator

    def count_in_shard(self, index: tuple[int, ...]) -> int | None:
        """Return how many chunks of the array lie in the shard at `index`, which exists.

        None where it is unknown: nested or transposed shards, an index with its own encoding, a damaged file.
        """
        places = self.places_in_shard(index)
        if places is None:
            return None
        is_stored = (places != ABSENT).any(axis=-1)
        total = zip(Grid(self.header.shape, self.header.chunks).counts, index, is_stored.shape, strict=True)
        inside = tuple(slice(0, n - i * per) for n, i, per in total)  # the array may end within the shard
        return int(is_stored[inside].sum())

    def places_in_shard(self, index: tuple[int, ...]) -> np.ndarray | None:
        """Return offset and length of each chunk of the shard at `index`, (…, 2), uint64; None as above."""
        if self.sharding is None:
            return None
        file, (num_bytes, at_end) = self.header.folder / self.name(index), self.index_bytes()
        data = paths.read_end(file, num_bytes) if at_end else paths.read(file, num_bytes)
        return self._places(data) if data is not None and len(data) >= num_bytes else None

    def index_bytes(self) -> tuple[int, bool]:
        """Return the bytes of the index of a shard, with its checksum, and whether they are the last of its file."""
        tail = CHECKSUM_BYTES if self._has_checksum else 0
        at_end = (self.sharding or {}).get("index_location", "end") == "end"
        return OFFSET_BYTES * math.prod(self._chunks_per_shard) + tail, at_end

    def parse_index(self, data: bytes, file_bytes: int) -> np.ndarray:
        """Return offset and length of each chunk, (…, 2), uint64, from a shard, or its part with the index.

        Raises:
            ValueError: it is damaged: cut short, its checksum is wrong, or a chunk would lie outside the file.
        """
        import google_crc32c

        num_bytes, at_end = self.index_bytes()
        index = data[-num_bytes:] if at_end else data[:num_bytes]
        if len(index) < num_bytes:
            raise ValueError(f"DATA_LOSS: a shard of {file_bytes} bytes is too short for its index of {num_bytes}")
        entries, tail = index[: num_bytes - CHECKSUM_BYTES], index[num_bytes - CHECKSUM_BYTES :]
        if self._has_checksum and google_crc32c.value(entries) != int.from_bytes(tail, "little"):
            raise ValueError("DATA_LOSS: the checksum of the shard's index is wrong")
        places = self._places(index)
        stored = places[places[..., 0] != ABSENT]
        if (stored > file_bytes).any() or (stored.sum(axis=-1) > file_bytes).any():
            raise ValueError(f"DATA_LOSS: the shard's index names bytes beyond the {file_bytes} of its file")
        return places

    def _places(self, index: bytes) -> np.ndarray:
        counts = self._chunks_per_shard
        return np.frombuffer(index, "<u8", 2 * math.prod(counts)).reshape(*counts, 2)

    @property
    def _chunks_per_shard(self) -> tuple[int, ...]:
        return tuple(s // c for s, c in zip(self.header.write_unit, self.header.chunks, strict=True))

    @property
    def _has_checksum(self) -> bool:
        return len((self.sharding or {}).get("index_codecs", ())) == 2

    @property
    def sharding(self) -> Tree | None:
        """The settings of the array's shards, None where there are none, or none of the usual kind."""
        codecs = self.header.known.get("codecs") or []
        if len(codecs) != 1 or codecs[0]["name"] != "sharding_indexed":
            return None
        settings: Tree = codecs[0]["configuration"]
        inner = [codec["name"] for codec in settings["codecs"]]
        index = [codec["name"] for codec in settings.get("index_codecs") or []]
        usual = index in (["bytes"], ["bytes", "crc32c"]) and "sharding_indexed" not in inner
        little = usual and (settings["index_codecs"][0].get("configuration") or {}).get("endian", "little") == "little"
        return settings if little else None


def _precomputed_name(header: Header, index: tuple[int, ...]) -> str:
    """Return the name of the chunk or shard of a precomputed array at `index` of its grid, (c,) z, y, x."""
    scale, place = header.known["scale_metadata"], index[:-4:-1]
    if "sharding" not in scale:
        axes = zip(place, scale["chunk_size"], scale["size"], scale["voxel_offset"], strict=True)
        return "_".join(f"{i * c + first}-{min((i + 1) * c, n) + first}" for i, c, n, first in axes)
    if header.shards is None:
        return ""
    bits, chunk = scale["sharding"], scale["chunk_size"]
    per_axis = axis_bits(scale["size"], chunk)
    chunks = [i * n // c for i, n, c in zip(place, header.shards[::-1], chunk, strict=False)]
    number = morton(chunks, per_axis) >> bits["preshift_bits"] + bits["minishard_bits"] if bits["shard_bits"] else 0
    return f"{number:0{-(-bits['shard_bits'] // 4)}x}.shard"


def axis_bits(size: Sequence[int], chunk: Sequence[int]) -> list[int]:
    """Return how many bits the place of a chunk has along each axis of an array of `size` voxels."""
    return [(-(-n // c) - 1).bit_length() for n, c in zip(size, chunk, strict=True)]


def morton(place: Sequence[int], per_axis: Sequence[int]) -> int:
    """Return the number of the chunk at `place` (x, y, z), the bits of its places interleaved, x lowest."""
    number, used = 0, [0] * len(place)
    for bit, axis in enumerate(morton_bits(per_axis)):
        number |= (place[axis] >> used[axis] & 1) << bit
        used[axis] += 1
    return number


def morton_bits(per_axis: Sequence[int]) -> Iterator[int]:
    """Yield the axis that each bit of a compressed Morton code is of, lowest first, given the bits of each axis."""
    for level in range(max(per_axis)):
        yield from (axis for axis, bits in enumerate(per_axis) if level < bits)
