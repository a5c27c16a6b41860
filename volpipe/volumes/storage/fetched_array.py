"""Arrays whose chunk files are read by us: those in buckets and on web servers, and odd ones on a disk.

Each chunk is fetched by one request, and decoded as it comes. What comes says which version of the file it is of, so
that nobody has to ask for that beside it. The index of a shard is fetched once, if it is of the usual kind, and chunks
that lie together come by one request; shards of other kinds are read by tensorstore alone. On a disk tensorstore reads
all but what it cannot: chunks by other names, and forms that other decoders know. Not here: requests (object_store),
names (chunk_files), or decoding (tensorstore).
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
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from volpipe.errors import ChangedError, VolumeError
from volpipe.geometry.grid import Index
from volpipe.geometry.indexing import ChunkedIndex, pieces, ranges
from volpipe.volumes.storage import object_store, tensorstore
from volpipe.volumes.storage.chunk_files import (
    ABSENT,
    ChunkFiles,
    ChunkSource,
    as_fill,
    in_one_member,
    is_other_form,
)
from volpipe.volumes.storage.damage import check_content
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.object_store import Fetched, Remote, Stamp
from volpipe.volumes.storage.paths import Location
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


@dataclass
class ChunkCache:
    """Chunks as they are stored, up to `limit` bytes of them; those used last stay."""

    limit: int
    _chunks: OrderedDict[tuple[int, Index], Fetched] = field(default_factory=OrderedDict)
    _num_bytes: int = 0
    _coming: dict[tuple[int, Index], Future[Fetched | None]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, key: tuple[int, Index]) -> Fetched | None:
        with self._lock:
            if key in self._chunks:
                self._chunks.move_to_end(key)
            return self._chunks.get(key)

    def get_or(self, key: tuple[int, Index], fetch: Callable[[], Fetched | None]) -> Fetched | None:
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

    def put(self, key: tuple[int, Index], part: Fetched) -> None:
        if len(part.data) > self.limit:
            return
        with self._lock:
            self._num_bytes += len(part.data) - len(self._chunks[key].data if key in self._chunks else b"")
            self._chunks[key] = part
            self._chunks.move_to_end(key)
            while self._num_bytes > self.limit:
                self._num_bytes -= len(self._chunks.popitem(last=False)[1].data)


class FetchedArray:
    """An array of `header`, for reading by several threads.

    Chunks that neighbouring boxes share are kept as they are stored, up to `cache_bytes` of them for all arrays of the
    process with the same number; the stamp that is noted for them is that of what was read. Where it is `live`, each
    read compares the stamps of what is kept with those of the files, by a request without voxels.
    """

    def __init__(
        self,
        header: Header,
        cache_bytes: int = 0,
        check_missing: Callable[[Index], None] = as_fill,
        *,
        live: bool = False,
    ) -> None:
        self._header, self._live = header, live
        self._scheme = ChunkFiles(header).scheme
        self._inner = self._scheme.without_shards(header)
        self._number, self._cache = next(_numbers), _cache(cache_bytes)
        self._source = ChunkSource(header, check_missing)
        self._indices: OrderedDict[Location, ShardIndex] = OrderedDict()
        self._memory, self._lock = threading.local(), threading.Lock()
        # Boxes at the same time would fetch chunks of a shard twice that they share.
        self._turns = [] if header.shards is None else [threading.Lock() for _ in range(TURNS)]
        self._at_once = room(math.prod(header.chunks) * header.dtype.itemsize)

    def read(self, index: tensorstore.Index) -> np.ndarray:
        """Return the voxels at `index`, and note the stamps of their files.

        Raises:
            ChangedError: a shard is written again and again meanwhile.
        """
        region = self._region_of(index)
        data = np.empty(tuple(map(len, ranges(index, self._header.shape))), self._header.dtype)
        for attempt in range(MOST_REREADS + 1):
            try:
                with ExitStack() as stack:
                    # In an order that all keep, so that nobody waits for who waits.
                    for number in sorted({hash(unit) % TURNS for unit in region.units()} if self._turns else ()):
                        stack.enter_context(self._turns[number])
                    stamps = self._fill_region(region, data)
                break
            except ChangedError:
                self._indices.clear()
                if attempt == MOST_REREADS:
                    raise
        noted = _stamps.get()
        if noted is not None:
            noted.update((file, stamp) for file, stamp in stamps.items() if isinstance(file, Remote))
        return data[tuple(0 if isinstance(along, int) else slice(None) for along in index)]

    def _region_of(self, index: tensorstore.Index) -> ChunkedIndex:
        header = self._header
        return ChunkedIndex.of(index, header.shape, header.chunks, header.write_unit)

    def is_stored(self, index: tensorstore.Index) -> bool:
        """Return whether some chunk at `index` is stored; no chunk is read."""
        return tensorstore.open_array(self._header).is_stored(index) or self.is_elsewhere(index)

    def is_elsewhere(self, index: tensorstore.Index) -> bool:
        """Return whether a file of the voxels at `index`, none of which is there, is there by another name."""
        return any(map(self._source.is_elsewhere, self._region_of(index).units()))

    def _fill_region(self, region: ChunkedIndex, data: np.ndarray) -> dict[Location, Stamp | None]:
        """Read the voxels of `region` into `data`; return the stamps of their files."""
        units = region.units()
        files = list(map(self._file, units))
        if self._header.shards is None:
            stamps = each([partial(self._fill_chunk, region, data, unit) for unit in units])
            return dict(zip(files, stamps, strict=True))
        parts = each([partial(self._plan_shard, region, data, unit) for unit in units])
        each([
            partial(self._fill_group, region, data, unit, index, group)
            for unit, (index, groups) in zip(units, parts, strict=True) if index is not None for group in groups
        ])  # fmt: skip
        return {file: None if index is None else index.stamp for file, (index, _) in zip(files, parts, strict=True)}

    @staticmethod
    def _stamp(file: Location) -> Stamp | None:
        """Return the stamp of a file in a remote place; None of one on a disk, whose chunks are read anew."""
        return object_store.stamp(file) if isinstance(file, Remote) else None

    def _file(self, unit: Index) -> Location:
        """Return the file of the chunk, or the shard, at `unit` of the grid of files, by its usual name."""
        return self._header.folder / ChunkFiles(self._header).name(unit)

    def _fill_chunk(self, region: ChunkedIndex, data: np.ndarray, chunk: Index) -> Stamp | None:
        """Read what lies in `region` of a chunk that is a file; return the stamp of that."""
        key = (self._number, chunk)
        if self._live and (kept := self._cache.get(key)) and self._stamp(self._file(chunk)) != kept.stamp:
            self._cache.drop(key)
        part = self._cache.get_or(key, lambda: self._fetch(chunk))
        self._decode_chunk(region, data, chunk, None if part is None else part.data)
        return None if part is None else part.stamp

    def _plan_shard(
        self, region: ChunkedIndex, data: np.ndarray, shard: Index
    ) -> tuple[ShardIndex | None, list[list[tuple[tuple[int, int], Index]]]]:
        """Return the index of `shard` and its chunks in `region` that are to be fetched, with their bytes, in groups.

        Those that are in memory or not stored are read at once; so is a small shard that is read whole.
        """
        file, index = self._file(shard), None
        chunks = region.chunks_in(shard)
        with self._lock:
            index = self._indices.get(file)
        if self._live and index is not None and self._stamp(file) != index.stamp:
            index = None
        whole = None
        if index is None and self._is_small(shard, len(chunks)):
            whole = self._fetch(shard)
            index = None if whole is None else self._keep_index(file, whole, whole.data)
        elif index is None:
            index = self._fetch_index(shard)
        left = []
        for chunk in chunks:
            span = None if index is None else index.span(chunk)
            cached = self._cache.get((self._number, chunk))
            if span is not None and whole is not None:
                content = whole.data[slice(*span)]
                self._cache.put((self._number, chunk), Fetched(content, whole.stamp))
                self._decode_chunk(region, data, chunk, content)
            elif span is None or index is None:
                self._decode_chunk(region, data, chunk, None)
            elif cached is not None and cached.stamp == index.stamp:
                self._decode_chunk(region, data, chunk, cached.data)
            else:
                left.append((span, chunk))
        return index, _grouped(left)

    def _is_small(self, shard: Index, num_chunks: int) -> bool:
        """Return whether `num_chunks` are all of `shard`, and may come by one request."""
        unit, chunks = self._header.write_unit, self._header.chunks
        axes = zip(self._header.shape, shard, unit, chunks, strict=True)
        num_inside = math.prod(-(-min(u, n - i * u) // c) for n, i, u, c in axes)
        return math.prod(unit) * self._header.dtype.itemsize <= LARGEST_BYTES and num_inside == num_chunks

    def _fetch_index(self, shard: Index) -> ShardIndex | None:
        num_bytes, at_end = ChunkFiles(self._header).index_bytes()
        part = self._fetch(shard, (-num_bytes, 0) if at_end else (0, num_bytes))
        return None if part is None else self._keep_index(self._file(shard), part, part.data)

    def _keep_index(self, file: Location, part: Fetched, data: bytes) -> ShardIndex:
        """Return the index in `data`, a shard or the part of it with the index, and keep it."""
        index = ShardIndex(ChunkFiles(self._header).parse_index(data, part.file_bytes), part.stamp)
        with self._lock:
            self._indices[file] = index
            while len(self._indices) > max(1, INDEX_BYTES // index.places.nbytes):
                self._indices.popitem(last=False)
        return index

    def _fill_group(
        self,
        region: ChunkedIndex,
        data: np.ndarray,
        shard: Index,
        index: ShardIndex,
        group: Sequence[tuple[tuple[int, int], Index]],
    ) -> None:
        """Read those chunks of a shard that lie together, by one request."""
        start, stop = group[0][0][0], max(span[1] for span, _ in group)
        part = self._range(shard, index, start, stop)
        for span, chunk in group:
            content = part.data[span[0] - start : span[1] - start]
            self._cache.put((self._number, chunk), Fetched(content, part.stamp))
            self._decode_chunk(region, data, chunk, content)

    def _range(self, shard: Index, index: ShardIndex, start: int, stop: int) -> Fetched:
        """Return these bytes of a shard, which must be the one of `index` still."""
        part = self._fetch(shard, (start, stop), index.stamp.tag)
        if part is None or part.stamp != index.stamp:
            raise ChangedError(f"{self._file(shard)} changed while it was read")
        return part

    def _fetch(self, unit: Index, span: tuple[int, int] | None = None, tag: str = "") -> Fetched | None:
        with self._at_once:
            part = self._source.fetch(unit, span, tag)
        tensorstore.count(read=0 if part is None else len(part.data))
        return part

    def _decode_chunk(self, region: ChunkedIndex, data: np.ndarray, chunk: Index, content: bytes | None) -> None:
        """Put what lies in `region` of a chunk into `data`; fill values where it has no content."""
        target, place = region.places(chunk)
        here = self._own_memory()
        if content is None:
            data[target] = here.read(place)
            return
        content = self._scheme.as_tensorstore_reads(self._inner, content)
        try:
            data[target] = self._decoded(here, chunk, content, place)
        except ValueError as error:
            joined = in_one_member(self._inner, content) if is_other_form(error) else None
            if joined is None:
                raise
            data[target] = self._decoded(here, chunk, joined, place)

    def _decoded(
        self, here: tensorstore.ArrayInMemory, chunk: Index, content: bytes, place: tuple[slice, ...]
    ) -> np.ndarray:
        """Return the voxels at `place` in the array, which are in `chunk`."""
        check_content(self._inner, chunk, content)
        name = ChunkFiles(self._inner).name(chunk)
        here.put(name, content)
        try:
            return here.read(place)
        finally:
            here.put(name, None)

    def _own_memory(self) -> tensorstore.ArrayInMemory:
        """Return this thread's array in memory: another one would take its chunks away."""
        if not hasattr(self._memory, "array"):
            self._memory.array = tensorstore.ArrayInMemory(self._inner)
        array: tensorstore.ArrayInMemory = self._memory.array
        return array


class LocalArray:
    """An array of `header` on a disk that tensorstore reads, all but what it cannot, or would take for fill values.

    Those are chunks by other names than the metadata give, and chunks and compressed streams in forms of others.
    """

    def __init__(
        self, header: Header, array: tensorstore.TensorStoreArray, check_missing: Callable[[Index], None] = as_fill
    ) -> None:
        self._header, self._array = header, array
        self._is_odd = False
        self._fetched = FetchedArray(header, 0, check_missing) if _is_usual(header) else None
        self._source = ChunkSource(header, check_missing)

    def read(self, index: tensorstore.Index) -> np.ndarray:
        if self._is_odd and self._fetched is not None:
            return self._fetched.read(index)
        try:
            data = self._array.read(index, lambda: self._check_names(index))
        except ValueError as error:
            return self._read_again(index, error)
        if not data.size or not self._is_elsewhere(index, data):
            return data
        if self._fetched is None:
            raise VolumeError(
                f"{self._header.folder}: shards are stored by other names than its metadata give; rename them, or mend "
                "the metadata"
            )
        self._is_odd = True
        return self._fetched.read(index)

    def is_stored(self, index: tensorstore.Index) -> bool:
        """Return whether some chunk at `index` is stored; no chunk is read."""
        is_stored = self._array.is_stored(index, lambda: self._check_names(index))
        return is_stored or any(map(self._is_missing_elsewhere, self._file_units(index)))

    def _file_units(self, index: tensorstore.Index) -> list[Index]:
        """Return the places of the files of the voxels at `index` in their grid."""
        header = self._header
        return ChunkedIndex.of(index, header.shape, header.chunks, header.write_unit).units()

    def _check_names(self, index: tensorstore.Index) -> None:
        """Raise where the name of a file of the voxels at `index` leads nowhere, or to what is no file."""
        for unit in self._file_units(index):
            self._source.is_usual(unit)

    def _is_missing_elsewhere(self, unit: Index) -> bool:
        """Return whether the file at `unit`, which tensorstore takes for missing, is there, or by another name.

        Raises:
            VolumeError: its name leads nowhere.
        """
        return not self._source.is_usual(unit) and self._source.is_elsewhere(unit)

    def _read_again(self, index: tensorstore.Index, error: ValueError) -> np.ndarray:
        """Return the voxels at `index`, which tensorstore could not read, if their form is one of others."""
        if self._fetched is None or not is_other_form(error):
            raise error
        try:
            return self._fetched.read(index)
        except VolumeError:
            raise
        except (ValueError, OSError, RuntimeError) as other:
            raise (other if "varlength" in str(error) else error) from None

    def _is_elsewhere(self, index: tensorstore.Index, data: np.ndarray) -> bool:
        """Return whether a chunk of `data`, the voxels at `index`, is missing and stored by another name.

        A chunk that is missing is fill values, so that files are looked for only where two voxels of it are the same.
        """
        along = zip(ranges(index, self._header.shape), self._header.write_unit, strict=True)
        axes = [pieces(positions, unit) for positions, unit in along]
        whole = data.reshape([len(positions) for positions in ranges(index, self._header.shape)])
        first = whole[np.ix_(*([place.start for place, _ in axis.values()] for axis in axes))]
        last = whole[np.ix_(*([place.stop - 1 for place, _ in axis.values()] for axis in axes))]
        is_same = (first == last) | ((first != first) & (last != last))  # NaN may be the fill value
        numbers = [list(axis) for axis in axes]
        for place in np.argwhere(is_same).tolist() if is_same.any() else ():
            unit = tuple(along[i] for along, i in zip(numbers, place, strict=True))
            if self._is_missing_elsewhere(unit):
                return True
        return False


def can_fetch(header: Header) -> bool:
    """Return whether the chunks of the array of `header`, in a remote place, can be fetched one by one."""
    return isinstance(header.folder, Remote) and _is_usual(header)


def _is_usual(header: Header) -> bool:
    """Return whether chunks of the array of `header` are files, or in shards of a usual kind."""
    if header.unsupported or header.scheme is None:
        return False
    if header.shards is not None:
        return ChunkFiles(header).index_place is not None
    return bool(ChunkFiles(header).name((0,) * len(header.shape)))


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
