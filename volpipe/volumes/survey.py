"""A survey of a volume: its size on disk, its intensities, and the effect of other codecs and chunks.

Not here: printing (tables), or metadata (volume). Each part takes a bounded time whatever the volume's size: large
volumes are sampled, in an order that the seed decides, and the result says how much was sampled.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Grid, Triple, triple
from volpipe.volumes.formats.container import read_header
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.chunk_files import ChunkFiles, ChunkSource, is_named
from volpipe.volumes.storage.metadata import Style
from volpipe.volumes.volume import Volume, absolute

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.5  # each: listing files, then, if they are too many, looking for some by name; then reading shards
READ_SECONDS = 1.5
TRIAL_SECONDS = 1.5  # after which no other box is tried
MAX_SAMPLED = 2000  # files that are looked for by name
MAX_VOXELS = 2**23  # of which percentiles are taken
MAX_CELL = 256  # voxels per axis; of a larger chunk a part is taken
MAX_LISTED = 2**20  # cells that are shuffled; of more, some are drawn
PERCENTILES = (0.0, 0.5, 5.0, 50.0, 95.0, 99.5, 100.0)
EDGES = (32, 64, 128)  # voxels of the chunks that are tried
SHARD_EDGE = 512
TRIAL_BYTES = 2**21  # of a box that go through each codec, or one chunk if that is more
MAX_BOXES = 3
MAX_DRAWS = 8  # boxes that are read in search of one that is not all one value


@dataclass(frozen=True)
class Footprint:
    """The files of one array.

    Attributes:
        num_files, num_bytes: of its folder, metadata included; estimates unless `is_counted`.
        is_counted: whether every file was seen.
        num_chunks: of the array's grid; 0 where its format is not one of chunk files.
        num_stored: chunks that are there, the others being empty; None where that is not known.
        is_stored_counted: whether `num_stored` is exact.
        num_seen: files, or places where one might be, that the estimates rest on.
    """

    num_files: int
    num_bytes: int
    is_counted: bool
    num_chunks: int = 0
    num_stored: int | None = None
    is_stored_counted: bool = False
    num_seen: int = 0

    @property
    def stored_share(self) -> float:
        """The share of chunks that are there; 1 where that is not known."""
        return 1.0 if self.num_stored is None or not self.num_chunks else self.num_stored / self.num_chunks


@dataclass(frozen=True)
class Intensities:
    """Percentiles of what was read; NaN and infinities are left out of them.

    Attributes:
        percentiles: (percent, value); none where nothing was a number.
        num_cells: chunks, or parts of them, that were read, of `num_all`.
        num_voxels: values that were read.
        num_nonfinite: of them, NaN and infinite ones.
        seconds: how long one took to be read.
    """

    percentiles: tuple[tuple[float, float], ...]
    num_cells: int
    num_all: int
    num_voxels: int
    seconds: float
    num_nonfinite: int = 0


@dataclass(frozen=True)
class CodecTrial:
    """Size and speed of one codec and chunk shape, on one thread.

    Attributes:
        codec: such as "zstd 3".
        edge: voxels per axis of a chunk.
        raw_bytes, stored_bytes: of what went through the codec.
        encode_speed, decode_speed: raw bytes per second.
        num_files, num_shards: of the whole volume, with a chunk, or a shard of 512³, in a file.
    """

    codec: str
    edge: int
    raw_bytes: int
    stored_bytes: int
    encode_speed: float
    decode_speed: float
    num_files: int
    num_shards: int

    @property
    def ratio(self) -> float:
        """Stored bytes per raw byte."""
        return self.stored_bytes / self.raw_bytes


@dataclass(frozen=True)
class CodecTrials:
    """All trials, and the boxes (z, y, x) of the volume that they were made on."""

    trials: tuple[CodecTrial, ...]
    num_boxes: int
    box: Triple


Codec = tuple[Callable[[np.ndarray], bytes], Callable[[bytes], object]]  # to encode, and to decode


def measure_footprint(volume: Volume, *, seed: int = 0, seconds: float = LOOK_SECONDS) -> Footprint:
    """Return the files of `volume`, counted where `seconds` allow, otherwise estimated from a sample.

    Raises:
        VolumeError: the volume is gone, or one of its files is a link that leads nowhere.
    """
    container, header = absolute(volume.path), read_header(volume.folder)
    if isinstance(container, Path) and container.is_file():
        files = (container, *(() if header is None else header.data_files or ()))
        return Footprint(len(files), sum(file.stat().st_size for file in files), True, num_seen=len(files))
    chunks = ChunkFiles(header) if header is not None and is_named(header) else None  # not of TIFF slices
    listing = _list_files(volume, chunks, seconds)
    for file in (volume.folder / name for name in listing.empty):
        if isinstance(file, Path):
            paths.check_links(file)
    if not listing.is_complete and chunks is not None:
        return _estimate_footprint(chunks, listing, seed, seconds)
    footprint = Footprint(listing.num_files, listing.num_bytes, listing.is_complete, num_seen=listing.num_files)
    if chunks is None:
        return footprint
    stored: int | None = len(listing.indices)
    is_exact = True
    if volume.shards is not None:
        stored, is_exact = _count_in_shards(chunks, listing.indices, seed, seconds)
    return replace(footprint, num_chunks=chunks.num_chunks, num_stored=stored, is_stored_counted=is_exact)


@dataclass
class _Listing:
    """Files that a listing came across."""

    num_files: int = 0
    num_bytes: int = 0
    indices: dict[tuple[int, ...], Style | None] = field(default_factory=dict)  # of chunks, or shards
    empty: list[str] = field(default_factory=list)  # names of those without bytes
    is_complete: bool = False


def _list_files(volume: Volume, chunks: ChunkFiles | None, seconds: float) -> _Listing:
    """Return the files of the volume's folder, as far as they can be listed in `seconds`."""
    listing, stop = _Listing(), time.perf_counter() + seconds
    try:
        for name, size in paths.list_files(volume.folder):
            listing.num_files += 1
            listing.num_bytes += size
            if not size:
                listing.empty.append(name)
            place = None if chunks is None else chunks.parse(name)
            if place is not None:
                listing.indices[place[0]] = place[1]
            if time.perf_counter() > stop:
                return listing
    except VolumeError as error:
        log.info("%s", error)  # on the web, or in a bucket that may only be read
        return listing
    listing.is_complete = True
    return listing


def _estimate_footprint(chunks: ChunkFiles, listing: _Listing, seed: int, seconds: float) -> Footprint:
    """Return a footprint from looking for a sample of the files by name; at least those of `listing`."""
    grid, source, stop = chunks.grid, ChunkSource(chunks.header), time.perf_counter() + seconds
    entries: list[tuple[tuple[int, ...], int]] = []
    num_seen = 0
    for number in itertools.islice(_shuffle(grid, seed), MAX_SAMPLED):
        index = grid.index(number)
        is_there = source.is_usual(index) or source.is_elsewhere(index)
        size = paths.size(source.file(index)) if is_there else None
        num_seen += 1
        entries += [] if size is None else [(index, size)]
        if time.perf_counter() > stop:
            break
    scale = math.prod(grid.counts) / num_seen
    num_files = max(listing.num_files, round(len(entries) * scale))
    num_bytes = max(listing.num_bytes, round(sum(size for _, size in entries) * scale))
    stored: float | None = max(len(listing.indices), len(entries) * scale)
    if chunks.header.shards is not None:
        in_shards, _ = _count_in_shards(chunks, dict.fromkeys(index for index, _ in entries), seed, seconds)
        stored = None if in_shards is None else in_shards * scale
    is_exact = num_seen == math.prod(grid.counts) and chunks.header.shards is None
    rounded = None if stored is None else round(stored)
    return Footprint(num_files, num_bytes, False, chunks.num_chunks, rounded, is_exact, num_seen)


def _count_in_shards(
    chunks: ChunkFiles, shards: Mapping[tuple[int, ...], Style | None], seed: int, seconds: float
) -> tuple[int | None, bool]:
    """Return how many chunks `shards` hold, and whether each was looked into; None if they do not say."""
    stop, total, num_seen = time.perf_counter() + seconds, 0, 0
    indices = list(shards)
    for i in np.random.default_rng(seed).permutation(len(shards)):
        count = chunks.count_in_shard(indices[i], shards[indices[i]])
        if count is None:
            return None, False
        total, num_seen = total + count, num_seen + 1
        if time.perf_counter() > stop:
            break
    if num_seen == len(shards):
        return total, True
    return round(total * len(shards) / num_seen), False


def _shuffle(grid: Grid, seed: int) -> Iterator[int]:
    """Yield numbers of cells, each at most once, in an order that `seed` decides; all of them if they are not many."""
    rng, count = np.random.default_rng(seed), math.prod(grid.counts)
    if count <= MAX_LISTED:
        yield from rng.permutation(count).tolist()
        return
    drawn: set[int] = set()
    for number in rng.integers(0, count, MAX_SAMPLED * 4).tolist():
        if number not in drawn:
            drawn.add(number)
            yield number


def measure_intensities(volume: Volume, *, seed: int = 0, seconds: float = READ_SECONDS) -> Intensities:
    """Return percentiles of `volume` from its chunks, read in the order of `seed` for `seconds`, or all of them.

    Raises:
        VolumeError: a chunk cannot be read.
    """
    started = time.perf_counter()
    parts = list(sample_parts(volume, seed=seed, seconds=seconds))
    took = (time.perf_counter() - started) / len(parts)
    num_all = math.prod(Grid(volume.spatial_shape, _sampled_cell(volume)).counts)
    values = np.concatenate(parts)
    num_voxels = values.size
    if values.dtype.kind == "f":
        values = values[np.isfinite(values)].astype(np.float64)
    levels = np.percentile(values, PERCENTILES) if values.size else np.empty(0)
    pairs = tuple(zip(PERCENTILES, levels.tolist(), strict=False))
    return Intensities(pairs, len(parts), num_all, num_voxels, took, num_voxels - values.size)


def sample_parts(volume: Volume, *, seed: int = 0, seconds: float = READ_SECONDS) -> Iterator[np.ndarray]:
    """Yield the voxels (n,) of chunks of `volume` in the order of `seed`, for `seconds`, at least those of one.

    Raises:
        VolumeError: a chunk cannot be read.
    """
    reader, grid = volume.open(), Grid(volume.spatial_shape, _sampled_cell(volume))
    started, num_voxels = time.perf_counter(), 0
    for number in _shuffle(grid, seed):
        part = reader.read(grid.box(number)).ravel()
        yield part
        num_voxels += part.size
        if time.perf_counter() - started > seconds or num_voxels >= MAX_VOXELS:
            return


def _sampled_cell(volume: Volume) -> Triple:
    return triple(min(c, n, MAX_CELL) for c, n in zip(volume.spatial_chunks, volume.spatial_shape, strict=True))


def try_codecs(
    volume: Volume, *, seed: int = 0, seconds: float = TRIAL_SECONDS, seconds_per_chunk: float = 0.0
) -> CodecTrials:
    """Return size and speed of usual codecs and chunk shapes on boxes of `volume`, on one thread.

    Args:
        volume: of which the first channel is taken.
        seed: decides the boxes; those that are all one value are left out, unless there are only such.
        seconds: after which no other box is taken.
        seconds_per_chunk: what reading one takes; where that is much, smaller boxes are taken.
    """
    boxes = _filled_boxes(volume, seed, seconds, seconds_per_chunk)
    edges = [edge for edge in EDGES if edge == EDGES[0] or edge // 2 < max(boxes[0].shape)]
    totals: dict[tuple[str, int], list[float]] = {}
    stop, num_boxes = time.perf_counter() + seconds, 0
    with _one_thread():
        for data in boxes:
            for edge, (name, codec) in itertools.product(edges, _codecs(data.dtype).items()):
                result = _time_codec(codec, _pieces(data, edge))
                totals[name, edge] = [a + b for a, b in zip(totals.get((name, edge), [0.0] * 4), result, strict=True)]
            num_boxes += 1
            if time.perf_counter() > stop:
                break
    trials = tuple(_trial(volume, name, edge, total) for (name, edge), total in totals.items())
    return CodecTrials(trials, num_boxes, triple(boxes[0].shape))


def _filled_boxes(volume: Volume, seed: int, seconds: float, seconds_per_chunk: float) -> list[np.ndarray]:
    """Return boxes (z, y, x) of the first channel that are not all one value, or one that is."""
    reader, shape = volume.open(), volume.spatial_shape
    grid = Grid(shape, _box_shape(volume, seconds, seconds_per_chunk))
    boxes: list[np.ndarray] = []
    stop = time.perf_counter() + seconds
    for number in itertools.islice(_shuffle(grid, seed), MAX_DRAWS):
        data = reader.read(grid.box(number))[0]
        varies = bool((data != data.flat[0]).any())
        if varies and boxes and not (boxes[0] != boxes[0].flat[0]).any():
            boxes.clear()
        boxes += [data] if varies or not boxes else []
        if len(boxes) == MAX_BOXES or time.perf_counter() > stop:
            break
    return boxes


def _box_shape(volume: Volume, seconds: float, seconds_per_chunk: float) -> Triple:
    """Return the largest of EDGES as a box's edges, clipped to the volume, that can be read in `seconds`."""
    sizes = list(zip(volume.spatial_shape, volume.spatial_chunks, strict=True))
    for edge in reversed(EDGES):
        num_chunks = math.prod(-(-min(edge, n) // c) for n, c in sizes)
        if edge == EDGES[0] or num_chunks * seconds_per_chunk <= seconds:
            break
    return triple(min(edge, n) for n, _ in sizes)


def _codecs(dtype: np.dtype) -> dict[str, Codec]:
    """Return the codecs that are tried, by name; blosc shuffles bytes, or bits where a voxel is one byte."""
    from numcodecs import Blosc, GZip, Zstd

    shuffle = "bitshuffle" if dtype.itemsize == 1 else "shuffle"
    codecs = {f"gzip {level}": GZip(level) for level in (1, 5)}
    codecs |= {f"zstd {level}": Zstd(level) for level in (1, 3, 9)}
    names = (("lz4", 5), ("zstd", 3))
    codecs |= {f"blosc {name} {n} {shuffle}": Blosc(name, n, Blosc.AUTOSHUFFLE) for name, n in names}
    raw: dict[str, Codec] = {"raw": (np.ndarray.tobytes, bytearray)}
    return raw | {name: (codec.encode, codec.decode) for name, codec in codecs.items()}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keep blosc to one thread meanwhile, as the other codecs are."""
    from numcodecs import blosc

    before = blosc.use_threads
    blosc.use_threads = False
    try:
        yield
    finally:
        blosc.use_threads = before


def _pieces(data: np.ndarray, edge: int) -> list[np.ndarray]:
    """Return chunks of `edge` that lie spread over `data`, about TRIAL_BYTES of them."""
    grid = Grid(data.shape, (edge,) * data.ndim)
    numbers = range(0, len(grid), max(1, -(-data.nbytes // TRIAL_BYTES)))
    return [np.ascontiguousarray(data[grid.box(number).slices]) for number in numbers]


def _time_codec(codec: Codec, pieces: Sequence[np.ndarray]) -> list[float]:
    """Return raw bytes, stored bytes, and the seconds that encoding and decoding took of this thread.

    Not of the clock: what else the machine does would count as the codec's.
    """
    encode, decode = codec
    started = time.thread_time()
    stored = [encode(piece) for piece in pieces]
    encoded = time.thread_time()
    for chunk in stored:
        decode(chunk)
    decoded = time.thread_time()
    return [sum(p.nbytes for p in pieces), sum(map(len, stored)), encoded - started, decoded - encoded]


def _trial(volume: Volume, codec: str, edge: int, total: Sequence[float]) -> CodecTrial:
    raw, stored, encoding, decoding = total
    shard = max(SHARD_EDGE, edge)
    num_files, num_shards = (
        volume.num_channels * math.prod(-(-n // size) for n in volume.spatial_shape) for size in (edge, shard)
    )
    return CodecTrial(
        codec, edge, int(raw), int(stored), raw / max(encoding, 1e-9), raw / max(decoding, 1e-9), num_files, num_shards
    )
