"""The chunk and shard files of an array: their names, and the chunks in a shard.

Not here: voxels (tensorstore), or sampling (survey).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from volpipe.geometry.grid import Grid
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import Header, Tree

ABSENT = np.uint64(2**64 - 1)  # offset and length of a chunk that a shard lacks
OFFSET_BYTES, CHECKSUM_BYTES = 16, 4
ENTRY_BYTES = 24  # of a chunk in the index of a minishard
MOST_BITS = 16  # of the minishards of a shard, and of the chunks of a minishard, whose indices are read here


def count_folders(array_format: str, counts: Sequence[int]) -> int:
    """Return how many folders an array takes, its own too, with as many files along each stored axis as `counts`.

    Their names are those that arrays of ours have.
    """
    if array_format == "precomputed":
        return 1
    nested = counts[::-1] if array_format == "n5" else counts
    return 1 + int(array_format == "zarr3") + sum(math.prod(nested[:depth]) for depth in range(1, len(nested)))


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
    def minishards(self) -> Tree | None:
        """The sharding of a precomputed array whose shards are boxes of chunks, None of other arrays."""
        if self.header.format != "precomputed" or self.header.shards is None:
            return None
        bits: Tree = self.header.known["scale_metadata"]["sharding"]
        is_usual = max(bits["preshift_bits"], bits["minishard_bits"]) <= MOST_BITS and bits.get("hash") == "identity"
        return bits if is_usual else None

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


@dataclass
class Minishards:
    """The index of a shard of a precomputed array (neuroglancer_uint64_sharded_v1), as far as it was read.

    A shard begins with a table of its minishards: where the index of each lies, counted from the end of the table. That
    lists the chunks: numbers, offsets and lengths, numbers and offsets as differences.

    Attributes:
        bits: the sharding of the array's metadata.
        table: first byte of the index of each minishard in the file, and that after its last, (n, 2), uint64.
        known: of the minishards whose index was read, the chunks that they hold, in the order of their numbers: number,
            first byte and that after the last, (3, n), uint64.
    """

    bits: Tree
    table: np.ndarray
    known: dict[int, np.ndarray] = field(default_factory=dict)

    @staticmethod
    def table_bytes(bits: Tree) -> int:
        """Return the bytes of the table."""
        return int(OFFSET_BYTES << bits["minishard_bits"])

    @classmethod
    def parse(cls, bits: Tree, data: bytes, file_bytes: int) -> Minishards:
        """Return the index of a shard of `file_bytes`, which begins with `data`; no minishard is known yet.

        Raises:
            ValueError: it is cut short, or a minishard's index would lie outside the file.
        """
        size = cls.table_bytes(bits)
        if len(data) < size:
            raise ValueError(f"DATA_LOSS: a shard of {file_bytes} bytes is too short for its table of {size}")
        table = np.frombuffer(data, "<u8", size // 8).reshape(-1, 2)
        if (table[:, 0] > table[:, 1]).any() or (table > max(0, file_bytes - size)).any():
            raise ValueError(f"DATA_LOSS: the shard's table names bytes beyond the {file_bytes} of its file")
        return cls(bits, table + np.uint64(size))

    def minishard(self, number: int) -> int:
        """Return the minishard of the chunk `number`."""
        return number >> int(self.bits["preshift_bits"]) & (1 << int(self.bits["minishard_bits"])) - 1

    def index_span(self, minishard: int) -> tuple[int, int]:
        """Return the first byte of the index of `minishard` and that after its last; the same where it is empty."""
        first, last = map(int, self.table[minishard])
        return first, last

    def learn(self, minishard: int, data: bytes, file_bytes: int) -> None:
        """Note the chunks of `minishard` by its index, `data`.

        Raises:
            ValueError: it is damaged.
        """
        if self.bits.get("minishard_index_encoding") == "gzip" and data:
            data = gunzip(data, ENTRY_BYTES << int(self.bits["preshift_bits"]))
        if len(data) % ENTRY_BYTES:
            raise ValueError(f"DATA_LOSS: the index of a minishard has {len(data)} bytes, no multiple of {ENTRY_BYTES}")
        rows = np.frombuffer(data, "<u8").reshape(3, -1)
        numbers, gaps, sizes = np.cumsum(rows[0]), rows[1], rows[2]
        stops = np.cumsum(gaps) + np.cumsum(sizes) + np.uint64(self.table_bytes(self.bits))
        if (stops > file_bytes).any() or (sizes > stops).any():
            raise ValueError(f"DATA_LOSS: the index of a minishard names bytes beyond the {file_bytes} of its file")
        self.known[minishard] = np.stack([numbers, stops - sizes, stops])[:, np.argsort(numbers)]

    def span(self, number: int) -> tuple[int, int] | None:
        """Return the first byte of the chunk `number` and that after its last, None where it is not stored."""
        numbers, starts, stops = self.known[self.minishard(number)]
        at = int(np.searchsorted(numbers, np.uint64(number)))
        return (int(starts[at]), int(stops[at])) if at < len(numbers) and numbers[at] == number else None


def gunzip(data: bytes, most: int) -> bytes:
    """Return `data` unpacked.

    Raises:
        ValueError: it is no whole gzip stream, or holds more than `most` bytes.
    """
    decoder = zlib.decompressobj(wbits=31)
    try:
        unpacked = decoder.decompress(data, most + 1)
    except zlib.error as error:
        raise ValueError(f"DATA_LOSS: gzip: {error}") from None
    if len(unpacked) > most or not decoder.eof:
        raise ValueError(f"DATA_LOSS: gzip: cut short, or it unpacks to more than {most} bytes")
    return unpacked


def chunk_number(header: Header, chunk: Sequence[int]) -> int:
    """Return the number of the chunk at the index `chunk`, stored axes, of a precomputed array."""
    scale = header.known["scale_metadata"]
    return morton(chunk[:-4:-1], axis_bits(scale["size"], scale["chunk_size"]))


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
