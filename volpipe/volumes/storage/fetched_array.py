"""Arrays in buckets and on web servers: each chunk is fetched by one request, and decoded as it comes.

What comes says which version of the file it is of, so that nobody has to ask for that beside it. Of a shard, of Zarr v3
or precomputed, the index is fetched once, and chunks that lie together come by one request. Not here: requests
(object_store), or decoding (tensorstore). Arrays whose shards are of a rarer kind are read by tensorstore alone.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

import numpy as np

from volpipe.errors import ChangedError
from volpipe.geometry.grid import Box, Index, cells
from volpipe.volumes.storage import object_store, tensorstore
from volpipe.volumes.storage.chunk_files import ABSENT, ENTRY_BYTES, ChunkFiles, Minishards, chunk_number, gunzip
from volpipe.volumes.storage.damage import CHUNKED, check_content
from volpipe.volumes.storage.indexing import bounds
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.object_store import Part, Remote, Stamp
from volpipe.volumes.storage.requests import each, room

TURNS = 64  # locks of shards, some of which share one
LARGEST_BYTES = 8 << 20  # of one request for chunks of a shard
GAP_BYTES = 64 << 10  # between chunks of a shard that are fetched together: less than what a request costs in time
INDEX_BYTES = 16 << 20  # of the indices of shards that an array keeps
MOST_REREADS = 3

_stamps: ContextVar[dict[Remote, Stamp | None] | None] = ContextVar("stamps", default=None)
_numbers = itertools.count()


@contextmanager
def noting_stamps() -> Iterator[dict[Remote, Stamp | None]]:
    """Give the stamps of the files that this thread reads voxels of meanwhile; None of those that are not there."""
    stamps: dict[Remote, Stamp | None] = {}
    token = _stamps.set(stamps)
    try:
        yield stamps
    finally:
        _stamps.reset(token)


@dataclass(frozen=True)
class ShardIndex:
    """The index of a shard: offset and length of each of its chunks, (…, 2), uint64, and the stamp of its file."""

    places: np.ndarray
    stamp: Stamp

    def span(self, chunk: Index) -> tuple[int, int] | None:
        """Return the first byte of `chunk` and that after its last, None where it is not stored."""
        entry = self.places[tuple(i % n for i, n in zip(chunk, self.places.shape[:-1], strict=True))]
        if entry[0] == ABSENT:
            return None
        offset, length = map(int, entry)
        return offset, offset + length


@dataclass(frozen=True)
class MinishardIndex:
    """The index of a shard of the precomputed array of `header`, as far as it was read, and the stamp of its file."""

    header: Header
    shard: Minishards
    stamp: Stamp

    def minishard(self, chunk: Index) -> int:
        """Return the minishard that `chunk` is in."""
        return self.shard.minishard(chunk_number(self.header, chunk))

    def span(self, chunk: Index) -> tuple[int, int] | None:
        """Return the first byte of `chunk` and that after its last, None where it is not stored."""
        return self.shard.span(chunk_number(self.header, chunk))


@dataclass
class ChunkCache:
    """Chunks as they are stored, up to `limit` bytes of them; those used last stay."""

    limit: int
    _chunks: OrderedDict[tuple[int, Index], Part] = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    _coming: dict[tuple[int, Index], Future[Part | None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: tuple[int, Index]) -> Part | None:
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
            return self._chunks.get(key)

    def get_or(self, key: tuple[int, Index], fetch: Callable[[], Part | None]) -> Part | None:
        """Return a chunk that is kept, or what `fetch` gives, once for all who ask meanwhile; None if not stored."""
        with self._lock:
            coming = self._coming.get(key)
            own = self._coming.setdefault(key, Future()) if coming is None and key not in self._chunks else None
        if coming is not None:
            return coming.result()
        if own is None:
            return self.get(key) or fetch()  # it may have gone again
        try:
            part = fetch()
            if part is not None:
                self.put(key, part)
            own.set_result(part)
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._coming[key]
        return part

    def drop(self, key: tuple[int, Index]) -> None:
        """Keep this chunk no longer."""
        with self._lock:
            part = self._chunks.pop(key, None)
            self._num_bytes -= 0 if part is None else len(part.data)

    def put(self, key: tuple[int, Index], part: Part) -> None:
        if len(part.data) > self.limit:
            return
        with self._lock:
            self._num_bytes += len(part.data) - len(self._chunks[key].data if key in self._chunks else b"")
            self._chunks[key] = part
            self._chunks.move_to_end(key)
            while self._num_bytes > self.limit:
                self._num_bytes -= len(self._chunks.popitem(last=False)[1].data)


class FetchedArray:
    """An array of `header` in a remote place, for reading by several threads.

    Chunks that neighbouring boxes share are kept as they are stored, up to `cache_bytes` of them for all arrays of the
    process with the same number; the stamp that is noted for them is that of what was read. Where it is `live`, each
    read compares the stamps of what is kept with those of the files, by a request without voxels.
    """

    def __init__(self, header: Header, cache_bytes: int = 0, *, live: bool = False) -> None:
        self._header, self._live = header, live
        self._inner = _in_chunk_files(header)
        self._number, self._cache = next(_numbers), _cache(cache_bytes)
        self._indices: OrderedDict[Remote, ShardIndex | MinishardIndex] = OrderedDict()
        bits = ChunkFiles(header).minishards
        self._is_packed = bits is not None and bits.get("data_encoding") == "gzip"
        self._memory, self._lock = threading.local(), threading.Lock()
        # Boxes at the same time would fetch chunks of a shard twice that they share.
        self._turns = [] if header.shards is None else [threading.Lock() for _ in range(TURNS)]
        self._at_once = room(math.prod(header.chunks) * header.dtype.itemsize)

    def can_read(self, index: tensorstore.Index) -> bool:
        """Return whether `index` is a box; of others tensorstore fetches only the chunks that they touch."""
        is_box = all(isinstance(along, int) or along.step in (None, 1) for along in index)
        return is_box and not bounds(index, self._header.shape).is_empty

    def read(self, index: tensorstore.Index) -> np.ndarray:
        """Return the voxels at `index`, a box, and note the stamps of their files.

        Raises:
            ChangedError: a shard is written again and again meanwhile.
        """
        box = bounds(index, self._header.shape)
        data = np.empty(box.shape, self._header.dtype)
        for attempt in range(MOST_REREADS + 1):
            try:
                with ExitStack() as stack:
                    for turn in self._turns_of(box):
                        stack.enter_context(turn)
                    stamps = self._fill(box, data)
                break
            except ChangedError:
                self._indices.clear()
                if attempt == MOST_REREADS:
                    raise
        noted = _stamps.get()
        if noted is not None:
            noted.update(stamps)
        return data[tuple(0 if isinstance(along, int) else slice(None) for along in index)]

    def _turns_of(self, box: Box) -> Iterator[threading.Lock]:
        """Yield the locks of the shards of `box`, in an order that all keep, so that nobody waits for who waits."""
        if self._turns:
            for number in sorted({hash(unit) % TURNS for unit in cells(box, self._header.write_unit)}):
                yield self._turns[number]

    def _fill(self, box: Box, data: np.ndarray) -> dict[Remote, Stamp | None]:
        """Read the voxels of `box` into `data`; return the stamps of their files."""
        units = list(cells(box, self._header.write_unit))
        files = list(map(self._file, units))
        if self._header.shards is None:
            stamps = each([partial(self._fill_chunk, box, data, unit) for unit in units])
            return dict(zip(files, stamps, strict=True))
        parts = each([partial(self._find, box, data, unit) for unit in units])
        each([
            partial(self._fill_group, box, data, file, index, group)
            for file, (index, groups) in zip(files, parts, strict=True) if index is not None for group in groups
        ])  # fmt: skip
        return {file: None if index is None else index.stamp for file, (index, _) in zip(files, parts, strict=True)}

    def _file(self, unit: Index) -> Remote:
        """Return the file of the chunk, or the shard, at `unit` of the grid of files."""
        assert isinstance(self._header.folder, Remote)
        return self._header.folder / ChunkFiles(self._header).name(unit)

    def _fill_chunk(self, box: Box, data: np.ndarray, chunk: Index) -> Stamp | None:
        """Read what lies in `box` of a chunk that is a file; return the stamp of that."""
        key = (self._number, chunk)
        if self._live and (kept := self._cache.get(key)) and object_store.stamp(self._file(chunk)) != kept.stamp:
            self._cache.drop(key)
        part = self._cache.get_or(key, lambda: self._fetch(self._file(chunk)))
        self._decode(box, data, chunk, None if part is None else part.data)
        return None if part is None else part.stamp

    def _find(
        self, box: Box, data: np.ndarray, shard: Index
    ) -> tuple[ShardIndex | MinishardIndex | None, list[list[tuple[tuple[int, int], Index]]]]:
        """Return the index of `shard` and its chunks in `box` that are to be fetched, with their bytes, in groups.

        Those that are in memory or not stored are read at once; so is a small shard that is read whole.
        """
        file, index = self._file(shard), None
        chunks = list(cells(box & self._shard_box(shard), self._header.chunks))
        with self._lock:
            index = self._indices.get(file)
        if self._live and index is not None and object_store.stamp(file) != index.stamp:
            index = None
        whole = None
        if index is None and self._is_small(shard, len(chunks)):
            whole = self._fetch(file)
            index = None if whole is None else self._parsed(file, whole, whole.data)
        elif index is None:
            index = self._fetch_index(file)
        if isinstance(index, MinishardIndex):
            self._learn(file, index, {index.minishard(chunk) for chunk in chunks}, whole)
        left = []
        for chunk in chunks:
            span = None if index is None else index.span(chunk)
            cached = self._cache.get((self._number, chunk))
            if span is not None and whole is not None:
                content = whole.data[slice(*span)]
                self._cache.put((self._number, chunk), Part(content, whole.stamp))
                self._decode(box, data, chunk, content)
            elif span is None or index is None:
                self._decode(box, data, chunk, None)
            elif cached is not None and cached.stamp == index.stamp:
                self._decode(box, data, chunk, cached.data)
            else:
                left.append((span, chunk))
        return index, _grouped(left)

    def _shard_box(self, shard: Index) -> Box:
        unit = self._header.write_unit
        return Box((0,) * len(unit), unit).shift(tuple(i * n for i, n in zip(shard, unit, strict=True)))

    def _is_small(self, shard: Index, num_chunks: int) -> bool:
        """Return whether `num_chunks` are all of `shard`, and may come by one request."""
        inside = self._shard_box(shard) & Box.from_shape(self._header.shape)
        size = math.prod(self._header.write_unit) * self._header.dtype.itemsize
        return size <= LARGEST_BYTES and sum(1 for _ in cells(inside, self._header.chunks)) == num_chunks

    def _fetch_index(self, file: Remote) -> ShardIndex | MinishardIndex | None:
        files = ChunkFiles(self._header)
        bits = files.minishards
        num_bytes, at_end = files.index_bytes() if bits is None else (Minishards.table_bytes(bits), False)
        part = self._fetch(file, (-num_bytes, 0) if at_end else (0, num_bytes))
        return None if part is None else self._parsed(file, part, part.data)

    def _parsed(self, file: Remote, part: Part, data: bytes) -> ShardIndex | MinishardIndex:
        """Return the index in `data`, a shard or the part of it with the index, and keep it."""
        files, file_bytes = ChunkFiles(self._header), part.stamp.num_bytes
        index: ShardIndex | MinishardIndex
        if (bits := files.minishards) is None:
            index = ShardIndex(files.parse_index(data, file_bytes), part.stamp)
            num_bytes = index.places.nbytes
        else:
            index = MinishardIndex(self._header, Minishards.parse(bits, data, file_bytes), part.stamp)
            num_bytes = index.shard.table.nbytes + (ENTRY_BYTES << bits["preshift_bits"] + bits["minishard_bits"])
        with self._lock:
            self._indices[file] = index
            while len(self._indices) > max(1, INDEX_BYTES // num_bytes):
                self._indices.popitem(last=False)
        return index

    def _learn(self, file: Remote, index: MinishardIndex, minishards: set[int], whole: Part | None) -> None:
        """Read the indices of those `minishards` that are not known yet; they are in `whole` where that was fetched."""
        missing = {number: index.shard.index_span(number) for number in minishards - index.shard.known.keys()}
        for number in [number for number, (start, stop) in missing.items() if start == stop]:
            index.shard.learn(number, b"", index.stamp.num_bytes)
            del missing[number]
        for group in _grouped([(span, (number,)) for number, span in missing.items()]):
            start, stop = group[0][0][0], max(span[1] for span, _ in group)
            data = self._range(file, index, start, stop).data if whole is None else whole.data[start:stop]
            for span, (number,) in group:
                index.shard.learn(number, data[span[0] - start : span[1] - start], index.stamp.num_bytes)

    def _fill_group(
        self,
        box: Box,
        data: np.ndarray,
        file: Remote,
        index: ShardIndex | MinishardIndex,
        group: Sequence[tuple[tuple[int, int], Index]],
    ) -> None:
        """Read those chunks of a shard that lie together, by one request."""
        start, stop = group[0][0][0], max(span[1] for span, _ in group)
        part = self._range(file, index, start, stop)
        for span, chunk in group:
            content = part.data[span[0] - start : span[1] - start]
            self._cache.put((self._number, chunk), Part(content, part.stamp))
            self._decode(box, data, chunk, content)

    def _range(self, file: Remote, index: ShardIndex | MinishardIndex, start: int, stop: int) -> Part:
        """Return these bytes of a shard, which must be the one of `index` still."""
        part = self._fetch(file, (start, stop), index.stamp.tag)
        if part is None or part.stamp != index.stamp:
            raise ChangedError(f"{file} changed while it was read")
        return part

    def _fetch(self, file: Remote, span: tuple[int, int] | None = None, tag: str = "") -> Part | None:
        with self._at_once:
            part = object_store.fetch(file, span, tag)
        tensorstore.count(read=0 if part is None else len(part.data))
        return part

    def _decode(self, box: Box, data: np.ndarray, chunk: Index, content: bytes | None) -> None:
        """Put what lies in `box` of a chunk into `data`; fill values where it has no content."""
        start = tuple(i * c for i, c in zip(chunk, self._header.chunks, strict=True))
        inner = box & Box((0,) * len(start), self._header.chunks).shift(start)
        if content is not None and self._is_packed:
            content = gunzip(content, 2 * math.prod(self._header.chunks) * self._header.dtype.itemsize + GAP_BYTES)
        if content is not None:
            check_content(self._inner, chunk, content)
        here = self._own_memory()
        name = ChunkFiles(self._inner).name(chunk)
        if content is not None:
            here.put(name, content)
        try:
            data[inner.relative_to(box.start).slices] = here.read(inner.slices)
        finally:
            if content is not None:
                here.put(name, None)

    def _own_memory(self) -> tensorstore.ArrayInMemory:
        """Return this thread's array in memory: another one would take its chunks away."""
        if not hasattr(self._memory, "array"):
            self._memory.array = tensorstore.ArrayInMemory(self._inner)
        array: tensorstore.ArrayInMemory = self._memory.array
        return array


def can_fetch(header: Header) -> bool:
    """Return whether the chunks of the array of `header` can be fetched one by one."""
    if not isinstance(header.folder, Remote) or header.unsupported:
        return False
    files = ChunkFiles(header)
    if header.shards is not None:
        return files.sharding is not None or files.minishards is not None
    is_plain = header.format == "precomputed" and "sharding" not in header.known["scale_metadata"]
    return is_plain or header.format in CHUNKED


def _in_chunk_files(header: Header) -> Header:
    """Return `header` of the same array with each chunk in a file of its own."""
    if ChunkFiles(header).minishards is not None:
        scale = {name: value for name, value in header.known["scale_metadata"].items() if name != "sharding"}
        return replace(header, shards=None, known={**header.known, "scale_metadata": scale})
    settings = ChunkFiles(header).sharding
    if settings is None:
        return header
    grid = {"name": "regular", "configuration": {"chunk_shape": list(header.chunks)}}
    return replace(header, shards=None, known={**header.known, "chunk_grid": grid, "codecs": settings["codecs"]})


def _grouped(spans: list[tuple[tuple[int, int], Index]]) -> list[list[tuple[tuple[int, int], Index]]]:
    """Return chunks of a shard, with their first byte and that after their last, in groups to be fetched together."""
    groups: list[list[tuple[tuple[int, int], Index]]] = []
    for span, chunk in sorted(spans):
        first = groups[-1][0][0][0] if groups else 0
        end = max(stop for (_, stop), _ in groups[-1]) if groups else 0
        if groups and span[0] - end <= GAP_BYTES and span[1] - first <= LARGEST_BYTES:
            groups[-1].append((span, chunk))
        else:
            groups.append([(span, chunk)])
    return groups


@lru_cache(maxsize=8)
def _cache(cache_bytes: int) -> ChunkCache:
    """Return this process's chunks of arrays that were opened with `cache_bytes`."""
    return ChunkCache(cache_bytes)
