"""The chunk and shard files of an array: their names, and the chunks in a shard.

Not here: voxels (tensorstore), or sampling (survey).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from volpipe.geometry.grid import Grid
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.decoded_size import unpack
from volpipe.volumes.storage.metadata import Header, Tree
from volpipe.volumes.storage.paths import Location

ABSENT = np.uint64(2**64 - 1)  # offset and length of a chunk that a shard lacks
OFFSET_BYTES, CHECKSUM_BYTES = 16, 4
ENTRY_BYTES = 24  # of a chunk in the index of a minishard
EXTENSION = re.compile(r"\.[A-Za-z]\w*$")
SPAN = re.compile(r"(-?\d+)-(-?\d+)")  # of a precomputed chunk along an axis
SHARD = ".shard"
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
class Style:
    """How chunk files are named: what stands before the numbers of a chunk, between them, and after them."""

    prefix: str = ""
    separator: str = ""
    suffix: str = ""


ZARR_STYLES = (Style("", "."), Style("", "/"), Style("c/", "/"), Style("c.", "."))
RARE_STYLES = (Style("", "_"), Style("", "-"), Style("c/", "."))


@dataclass(frozen=True)
class ChunkFiles:
    """The files of the array of `header`, one for each chunk, or for each shard where it has any."""

    header: Header

    @cached_property
    def grid(self) -> Grid:
        """The chunks or shards, in stored axes: one is one file."""
        return Grid(self.header.shape, self.header.write_unit)

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        return self.grid.counts

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole array, in shards or not."""
        return math.prod(Grid(self.header.shape, self.header.chunks).counts)

    def name(self, index: tuple[int, ...], style: Style | None = None) -> str:
        """Return the name of the file at `index` of the grid, counted from the array's folder, in another `style` too.

        Of precomputed, "" where a shard is no box of the grid: its chunks are anywhere.
        """
        style = style or self.style
        if self.header.format == "precomputed":
            words = _precomputed_words(self.header, index)
            return style.prefix + style.separator.join(words) + style.suffix if words else ""
        numbers = index[::-1] if self.header.format == "n5" else index
        return style.prefix + style.separator.join(map(str, numbers)) + style.suffix

    def index(self, name: str) -> tuple[int, ...] | None:
        """Return where in the grid the file `name` belongs, None where it is no chunk's or shard's."""
        return self._index(name, self.style)

    def parse(self, name: str) -> tuple[tuple[int, ...], Style] | None:
        """Return where in the grid the file `name` belongs, and its style; None where no style gives such a name."""
        index = self.index(name)
        if index is not None:
            return index, self.style
        match = EXTENSION.search(name)
        for extension in ("", match[0]) if match else ("",):
            for style in (*self.styles, *(() if self.header.format == "precomputed" else RARE_STYLES)):
                index = self._index(name.removesuffix(extension), style)
                if index is not None:
                    return index, replace(style, suffix=style.suffix + extension)
        return None

    def is_of_another_grid(self, name: str) -> bool:
        """Return whether the file `name` is named as a chunk or shard, of an array of other lengths."""
        return self._place(name, self.style) is not None and self.index(name) is None

    def _place(self, name: str, style: Style) -> tuple[int, ...] | None:
        """Return the place, in the grid or not, that a name of `style` says; None where it says none."""
        inner = name.removeprefix(style.prefix).removesuffix(style.suffix)
        words = inner.split(style.separator) if style.separator else [inner]
        place = _precomputed_place(self.header, words) if self.header.format == "precomputed" else _numbers(words)
        if place is None or len(place) != len(self.header.shape):
            return None
        return tuple(place[::-1] if self.header.format == "n5" else place)

    def _index(self, name: str, style: Style) -> tuple[int, ...] | None:
        index = self._place(name, style)
        if index is None:
            return None
        inside = all(0 <= i < n for i, n in zip(index, self._counts, strict=True))
        return index if inside and self.name(index, style) == name else None

    @cached_property
    def style(self) -> Style:
        """How the metadata say that chunk files are named."""
        known = self.header.known
        if self.header.format == "precomputed":
            return Style(suffix=SHARD) if "sharding" in known["scale_metadata"] else Style("", "_")
        if self.header.format == "n5":
            return Style("", "/")
        if self.header.format == "zarr2":
            return Style("", str(known["dimension_separator"]))
        encoding = known["chunk_key_encoding"]
        settings = encoding.get("configuration") or {}
        if encoding.get("name") == "v2":
            return Style("", str(settings.get("separator", ".")))
        separator = str(settings.get("separator", "/"))
        return Style(f"c{separator}", separator)

    @cached_property
    def styles(self) -> tuple[Style, ...]:
        """How chunk files of the format are named, that of the metadata first, something that packs them apart."""
        if self.header.format == "precomputed":
            return (self.style,) if self.style.suffix else (Style("", "_"), Style("", "/"))
        others = (Style("", "/"), Style("", ".")) if self.header.format == "n5" else ZARR_STYLES
        return tuple(dict.fromkeys((self.style, *others)))

    def count_in_shard(self, index: tuple[int, ...], style: Style | None = None) -> int | None:
        """Return how many chunks of the array lie in the shard at `index`, which exists, by a name of `style`.

        None where it is unknown: nested or transposed shards, an index with its own encoding, a damaged file.
        """
        if self.minishards is not None:
            return self._count_in_minishards(self.minishards, self.header.folder / self.name(index, style))
        places = self.places_in_shard(index, style)
        if places is None:
            return None
        is_stored = (places != ABSENT).any(axis=-1)
        total = zip(Grid(self.header.shape, self.header.chunks).counts, index, is_stored.shape, strict=True)
        inside = tuple(slice(0, n - i * per) for n, i, per in total)  # the array may end within the shard
        return int(is_stored[inside].sum())

    def _count_in_minishards(self, bits: Tree, file: Location) -> int | None:
        num_bytes = paths.size(file)
        try:
            shard = Minishards.parse(bits, paths.read(file, Minishards.table_bytes(bits)) or b"", num_bytes or 0)
            for number, (first, last) in enumerate(shard.table.tolist()):
                if first < last:
                    shard.learn(number, paths.read_part(file, first, last - first), num_bytes or 0)
        except ValueError:
            return None
        return sum(len(chunks[0]) for chunks in shard.known.values())

    def places_in_shard(self, index: tuple[int, ...], style: Style | None = None) -> np.ndarray | None:
        """Return offset and length of each chunk of the shard at `index`, (…, 2), uint64; None as above."""
        if self.sharding is None:
            return None
        file, (num_bytes, at_end) = self.header.folder / self.name(index, style), self.index_bytes()
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
            data = unpack(data, "gzip", ENTRY_BYTES << int(self.bits["preshift_bits"]))
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


def chunk_number(header: Header, chunk: Sequence[int]) -> int:
    """Return the number of the chunk at the index `chunk`, stored axes, of a precomputed array."""
    scale = header.known["scale_metadata"]
    return morton(chunk[:-4:-1], axis_bits(scale["size"], scale["chunk_size"]))


def _numbers(words: Sequence[str]) -> list[int] | None:
    return [int(word) for word in words] if all(word.isdecimal() for word in words) else None


def _precomputed_words(header: Header, index: tuple[int, ...]) -> list[str]:
    """Return the words in the name of the chunk or shard of a precomputed array at `index` of its grid, (c,) z, y, x.

    None where a shard is no box of the grid.
    """
    scale, place = header.known["scale_metadata"], index[:-4:-1]
    if "sharding" not in scale:
        axes = zip(place, scale["chunk_size"], scale["size"], scale["voxel_offset"], strict=True)
        return [f"{i * c + first}-{min((i + 1) * c, n) + first}" for i, c, n, first in axes]
    if header.shards is None:
        return []
    bits, chunk = scale["sharding"], scale["chunk_size"]
    per_axis = axis_bits(scale["size"], chunk)
    chunks = [i * n // c for i, n, c in zip(place, header.shards[::-1], chunk, strict=False)]
    number = morton(chunks, per_axis) >> bits["preshift_bits"] + bits["minishard_bits"] if bits["shard_bits"] else 0
    return [f"{number:0{-(-bits['shard_bits'] // 4)}x}"]


def _precomputed_place(header: Header, words: Sequence[str]) -> list[int] | None:
    """Return the place in the grid, (c,) z, y, x, of the chunk or shard whose name has these `words`."""
    scale, more = header.known["scale_metadata"], [0] * (len(header.shape) - 3)
    if "sharding" not in scale:
        spans = [SPAN.fullmatch(word) for word in words]
        if len(spans) != 3 or None in spans:
            return None
        axes = zip(spans, scale["voxel_offset"], scale["chunk_size"], strict=True)
        place = [(int(span[1]) - first) // c for span, first, c in axes if span is not None]
    else:
        if header.shards is None or not re.fullmatch(r"[0-9a-f]{1,16}", words[0]):
            return None
        bits, chunk = scale["sharding"], scale["chunk_size"]
        number = int(words[0], 16) << bits["preshift_bits"] + bits["minishard_bits"]
        chunks = [0, 0, 0]
        used = [0, 0, 0]
        for bit, axis in enumerate(morton_bits(axis_bits(scale["size"], chunk))):
            chunks[axis] |= (number >> bit & 1) << used[axis]
            used[axis] += 1
        place = [i * c // n for i, n, c in zip(chunks, header.shards[::-1], chunk, strict=False)]
    return [*more, *place[::-1]]


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
