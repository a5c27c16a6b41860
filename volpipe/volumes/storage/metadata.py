"""What formats have in common: metadata, read and written, checked, in C order and nanometres, and names of chunks.

Not here: what any one format calls things (formats), the files of chunks (chunk_files), or voxels (tensorstore).
"""

from __future__ import annotations

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from volpipe.errors import VolumeError
from volpipe.text import decoded
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import Location

Lengths = tuple[float, float, float]
Tree = dict[str, Any]  # Any: JSON, checked where it is used

MAX_RANK = 8
MAX_LENGTH = 2**62  # voxels per axis; beyond it sums of offsets overflow
MAX_BYTES = 2**63 - 1  # beyond it products of lengths overflow
MAX_CHUNK_BYTES = 2**36  # a chunk is held in memory whole
MAX_JSON_BYTES = 2**24  # which takes up to 20 times that as objects
AXES = ("t", "c", "z", "y", "x")
SYNONYMS = {
    **dict.fromkeys(("channel", "channels", "ch"), "c"),
    **dict.fromkeys(("time", "timepoint", "timepoints"), "t"),
    **dict.fromkeys(("depth", "plane", "planes", "slice", "slices"), "z"),
    **dict.fromkeys(("height", "row", "rows"), "y"),
    **dict.fromkeys(("width", "col", "cols", "column", "columns"), "x"),
}
MAX_COLOURS, LEAST_PLANE = 4, 16  # entries of a last axis that may be of colours, and of the two before it
UNKNOWN_SIZE, GUESSED_SIZE = "voxel size unknown", "voxel size guessed"
MAX_LEVEL = {"raw": 0, "gzip": 9, "zstd": 22, "compressed_segmentation": 0}
NANOMETRES = {
    **dict.fromkeys(("picometer", "pm"), 1e-3),
    **dict.fromkeys(("angstrom", "ångström", "ångstrom", "å"), 0.1),
    **dict.fromkeys(("nanometer", "nm"), 1.0),
    **dict.fromkeys(("micrometer", "micron", "um", "\u03bcm"), 1e3),  # U+00B5, the other micro sign, becomes U+03BC
    **dict.fromkeys(("millimeter", "mm"), 1e6),
    **dict.fromkeys(("centimeter", "cm"), 1e7),
    **dict.fromkeys(("meter", "m"), 1e9),
}
LENGTH = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s.+-]*)\s*")


@dataclass(frozen=True)
class Place:
    """Where an array lies, (z, y, x): voxel size, None where unknown, and the centre of its first voxel.

    `reason` says why a size that is incomplete, or in another unit, counts as unknown, or what was assumed of a known
    one; "" where there is none. `has_origin` is whether the origin was stated; else it counts as 0. `axcodes` says to
    where x, y and z run, such as "RAS" (right, anterior, superior); "" where nothing says it.
    """

    voxel_size_nm: Lengths | None = None
    origin_nm: Lengths = (0.0, 0.0, 0.0)
    has_origin: bool = field(default=False, compare=False)
    reason: str = field(default="", compare=False)
    axcodes: str = field(default="", compare=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the size, for `Volume.notes`."""
        unknown = f"{UNKNOWN_SIZE}: " if self.voxel_size_nm is None else ""
        return (f"{unknown}{self.reason}",) if self.reason else ()


@dataclass(frozen=True)
class Style:
    """How chunk files are named: what stands before the numbers of a chunk, between them, and after them."""

    prefix: str = ""
    separator: str = ""
    suffix: str = ""


@dataclass(frozen=True)
class ChunkCodec:
    """The codec of the voxels of a chunk, "" for none, and whether nothing, such as a checksum, follows it."""

    name: str = ""
    is_last: bool = True


@dataclass(frozen=True)
class IndexPlace:
    """Where the index of a shard stands in its file: at the end or the start, with a checksum or without."""

    at_end: bool
    has_checksum: bool


@dataclass(frozen=True)
class ChunkScheme:
    """A scheme of plain chunk files in C order, one for each chunk; formats replace what is different with them.

    Attributes:
        driver: tensorstore's name of the format.
        is_reversed: whether tensorstore has the fastest axis first, from any number on, and channels always.
        is_regular: whether a file's name follows from its place in the grid alone, and stays as the array grows.
        tells_stored: whether tensorstore tells which chunks are stored.
        rare_styles: in which something that packs or copies them may.
    """

    driver: ClassVar[str]
    is_reversed: ClassVar[bool] = False
    is_regular: ClassVar[bool] = True
    tells_stored: ClassVar[bool] = True
    rare_styles: ClassVar[tuple[Style, ...]] = (Style("", "_"), Style("", "-"), Style("c/", "."))

    def style(self, header: Header) -> Style:
        """Return how the metadata say that chunk files are named."""
        raise NotImplementedError

    def styles(self, header: Header) -> tuple[Style, ...]:
        """Return how other programs name chunk files."""
        return ()

    def words(self, header: Header, index: Sequence[int]) -> list[str]:
        """Return the words in the name of the file at `index` of the grid; [] where its chunks are no box of that."""
        return list(map(str, index))

    def index(self, header: Header, words: Sequence[str]) -> list[int] | None:
        """Return the place, in the grid or not, that the `words` in a name say; None where they say none."""
        return [int(word) for word in words] if all(word.isdecimal() for word in words) else None

    def codec(self, header: Header) -> ChunkCodec:
        """Return the codec of a chunk, in a shard or not."""
        return ChunkCodec()

    def index_place(self, header: Header) -> IndexPlace | None:
        """Return where the index of a shard stands; None where there are no shards, or none of the usual kind."""
        return None

    def without_shards(self, header: Header) -> Header:
        """Return `header` of the same array with each chunk in a file of its own."""
        return header

    def count_in_shard(self, header: Header, index: Sequence[int]) -> int | None:
        """Return the number of chunks in the shard at `index` where it has no index of the usual kind, None if unknown.

        Raises:
            ValueError: it is damaged.
        """
        return None

    def head_bytes(self, rank: int) -> int:
        """Return the usual number of bytes before the voxels of a chunk of `rank` axes."""
        return 0

    def start(self, rank: int, content: bytes) -> int:
        """Return where the voxels begin in a chunk of this `content`, of which the first bytes are enough."""
        return 0

    def stated_shape(self, rank: int, head: bytes) -> tuple[int, ...] | None:
        """Return the shape, C order, that the `head` of a chunk says, None where chunks do not say it."""
        return None

    def as_tensorstore_reads(self, header: Header, content: bytes) -> bytes:
        """Return the `content` of a chunk file in the form that tensorstore knows.

        Raises:
            VolumeError: it holds no voxels.
        """
        return content

    def metadata(self, header: Header) -> dict[str, Any]:  # Any: JSON
        """Return the metadata as tensorstore's spec has them."""
        return {"metadata": dict(header.known)}

    def key(self, header: Header) -> str:
        """Return the key of the array below the folder that tensorstore opens, "" where it is that folder."""
        return ""

    def count_folders(self, counts: Sequence[int]) -> int:
        """Return the folders of an array, its own too, with as many files along each stored axis as `counts`.

        Their names are those that arrays of ours have.
        """
        return 1 + sum(math.prod(counts[:depth]) for depth in range(1, len(counts)))


@dataclass(frozen=True)
class Header:
    """The checked metadata of one array, in C order.

    Attributes:
        folder: where it lies, in a file or a folder.
        format: its name, such as "n5".
        shape, chunks, shards: as stored; `shards` is None where a chunk is a file of its own.
        dtype: in native byte order; bool is uint8, 0 or 1.
        codec: for people, such as "gzip 5".
        axes: as the array itself names them, None where it does not.
        is_guessed: whether `axes` are a guess of the format's.
        odd_axes: its own names of the axes where they are not understood, for people; "" where there are none.
        channel_names: as the array itself has them, () where it has none.
        attributes: what users stored with it.
        known: its metadata less all that tensorstore does not know; or what else its format needs to open it.
        unsupported: why tensorstore cannot read it, "" where it can.
        place: where it lies, None where its attributes and those around it say so.
        notes: what a user should know of it, each a sentence.
        scheme: how its chunk files are named and begin; None where chunks are no files.
        data_files: other files that its voxels lie in, which may be beside its own; None where its reader alone knows.
    """

    folder: Location
    format: str
    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None = None
    codec: str = "raw"
    axes: tuple[str, ...] | None = None
    is_guessed: bool = False
    odd_axes: str = ""
    channel_names: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)  # Any: JSON
    known: Mapping[str, Any] = field(default_factory=dict, hash=False)  # Any: JSON
    unsupported: str = ""
    place: Place | None = None
    notes: tuple[str, ...] = ()
    scheme: ChunkScheme | None = None
    data_files: tuple[Path, ...] | None = ()

    def __post_init__(self) -> None:
        for file in self.data_files or ():
            paths.check_beside(str(file), self.path)
        if len(self.chunks) != len(self.shape):
            raise VolumeError(f"{self.folder}: shape {self.shape} and chunk {self.chunks} differ in axes")
        if math.prod(self.shape) * self.dtype.itemsize > MAX_BYTES:
            raise VolumeError(f"{self.folder}: shape {self.shape} of {self.dtype} is more bytes than can be counted")
        size = math.prod(self.chunks) * self.dtype.itemsize
        if size > MAX_CHUNK_BYTES:
            raise VolumeError(
                f"{self.folder}: a chunk {self.chunks} of {self.dtype} takes {size >> 30} GiB; "
                f"volpipe reads chunks of up to {MAX_CHUNK_BYTES // 2**30} GiB"
            )

    @property
    def path(self) -> Path:
        """Where it lies on a disk, which arrays of formats that are files always do."""
        assert isinstance(self.folder, Path)
        return self.folder

    @property
    def has_regular_names(self) -> bool:
        """Whether it has chunk files whose names follow from their place in the grid alone, so that it may grow."""
        return self.scheme is not None and self.scheme.is_regular

    @property
    def has_slices(self) -> bool:
        """Whether it is a folder of slices: files whose names it lists."""
        return "names" in self.known

    def slice_name(self, place: Sequence[int]) -> str:
        """Return the name of the file with the voxel at `place`, stored axes; of a folder of slices alone."""
        number = 0
        for i, count in zip(place, self.known["counts"], strict=False):
            number = number * count + i
        return str(self.known["names"][number])

    @property
    def write_unit(self) -> tuple[int, ...]:
        """Voxels per stored axis that are written at once: a shard, or a chunk."""
        return self.shards or self.chunks


@dataclass(frozen=True)
class Level:
    """One array of a multiscale group: its key there, and how many voxels (z, y, x) of the finest it joins in one."""

    key: str
    factor: Lengths = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Display:
    """How viewers show a channel at first: its name, the least and greatest value, and those shown black and white."""

    name: str
    limits: tuple[float, float]
    window: tuple[float, float]


@dataclass(frozen=True)
class Multiscale:
    """A group of arrays that show the same volume, finest first.

    Attributes:
        levels: each voxel of level l is the mean, or the like, of `factor` voxels (z, y, x) of the finest.
        axes: of every array, C order, such as ("c", "z", "y", "x").
        voxel_size_nm: of the finest level (z, y, x), None where unknown.
        origin_nm: centre of the finest level's first voxel (z, y, x).
        name: for people.
        displays: of each channel, as OME-Zarr has them; () where nothing is known of them.
        is_labels: whether voxels are numbers of objects.
    """

    levels: tuple[Level, ...]
    axes: tuple[str, ...] = ("z", "y", "x")
    voxel_size_nm: Lengths | None = None
    origin_nm: Lengths = (0.0, 0.0, 0.0)
    name: str = "volume"
    displays: tuple[Display, ...] = ()
    is_labels: bool = False

    def __post_init__(self) -> None:
        if not self.levels or len({level.key for level in self.levels}) != len(self.levels):
            raise VolumeError(f"a multiscale group needs levels of different keys, not {self.levels}")

    def scale(self, level: Level) -> tuple[float, ...]:
        """Return the voxel size of `level` per axis of the array: in nm, or in finest voxels if unknown."""
        size = self.voxel_size_nm or (1.0, 1.0, 1.0)
        return self._by_axis(tuple(f * v for f, v in zip(level.factor, size, strict=True)), 1.0)

    def shift(self, level: Level) -> tuple[float, ...]:
        """Return the centre of the first voxel of `level` per axis: (factor - 1) / 2 past the finest's."""
        size = self.voxel_size_nm or (1.0, 1.0, 1.0)
        places = zip(self.origin_nm, level.factor, size, strict=True)
        return self._by_axis(tuple(o + (f - 1) / 2 * v for o, f, v in places), 0.0)

    def factors(self, level: Level) -> tuple[float, ...]:
        """Return the factor of `level` per axis of the array."""
        return self._by_axis(level.factor, 1.0)

    def _by_axis(self, values: Sequence[float], other: float) -> tuple[float, ...]:
        named = dict(zip("zyx", values, strict=True))
        return tuple(named.get(axis, other) for axis in self.axes)


@dataclass(frozen=True)
class ArraySpec:
    """An array to be made; shapes in voxels, one entry per stored axis, C order.

    Attributes:
        codec: "zstd", "gzip", "raw", or of precomputed labels "compressed_segmentation".
        codec_level: up to 22 for zstd and 9 for gzip; others have none.
        fill: the value of voxels that were never written.
        attributes: JSON to be stored with the array.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None = None
    axes: tuple[str, ...] = ("z", "y", "x")
    codec: str = "zstd"
    codec_level: int = 1
    fill: int | float = 0
    attributes: Mapping[str, Any] = field(default_factory=dict, hash=False)  # Any: JSON

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype).newbyteorder("="))
        for name in ("shape", "chunks", "shards", "axes"):
            value = getattr(self, name)
            if value is not None:
                plain = tuple(value) if name == "axes" else tuple(int(n) for n in value)
                object.__setattr__(self, name, plain)
        self._check_shapes()
        if self.dtype.kind not in "iuf":
            raise VolumeError(f"dtype {self.dtype} cannot be stored; use an integer or float type")
        if self.codec not in MAX_LEVEL:
            raise VolumeError(f"codec {self.codec!r} is not known; use {', '.join(MAX_LEVEL)}")
        if MAX_LEVEL[self.codec] and not 0 <= self.codec_level <= MAX_LEVEL[self.codec]:
            raise VolumeError(f"{self.codec} has levels 0 to {MAX_LEVEL[self.codec]}, not {self.codec_level}")
        if self.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            if int(self.fill) != self.fill or not int(limits.min) <= self.fill <= int(limits.max):
                raise VolumeError(f"fill {self.fill} is no {self.dtype}")

    def _check_shapes(self) -> None:
        rank = len(self.shape)
        shards = self.shards or self.chunks
        if not 1 <= rank <= MAX_RANK or {len(self.chunks), len(shards), len(self.axes)} != {rank}:
            raise VolumeError(
                f"shape {self.shape}, chunk {self.chunks}, shard {self.shards} and axes "
                f"{self.axes} must have the same 1 to {MAX_RANK} axes"
            )
        for axis, n, c, s in zip(self.axes, self.shape, self.chunks, shards, strict=True):
            if min(n, c, s) < 1:
                raise VolumeError(f"axis {axis}: shape {n}, chunk {c} and shard {s} must be at least 1")
            if s % c:
                raise VolumeError(
                    f"axis {axis}: shard {s} is not a multiple of chunk {c}; use {s // c * c or c} or {-(-s // c) * c}"
                )


def read_json(file: Location) -> Tree | None:
    """Return the JSON object in `file`, None where there is no such file.

    Raises:
        VolumeError: it cannot be read, is no JSON object, or is absurdly large.
    """
    text = paths.read(file, MAX_JSON_BYTES + 1)
    if text is None:
        return None
    if len(text) > MAX_JSON_BYTES:
        raise VolumeError(f"{file} is larger than {MAX_JSON_BYTES >> 20} MiB; that is no array metadata")
    try:
        tree = json.loads(decoded(text))
    except (ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or an integer of 5000 digits
        raise VolumeError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(tree, dict):
        raise VolumeError(f"{file} holds a JSON {type(tree).__name__}, not an object")
    return tree


def write_json(file: Location, tree: Mapping[str, Any]) -> None:  # Any: JSON
    """Write `tree` to `file`, whole or not at all, also through a crash; its folders are made."""
    paths.write(file, json.dumps(tree, indent=1).encode())


def merge_json(file: Location, tree: Mapping[str, Any]) -> None:  # Any: JSON
    """Add `tree` to the object in `file`; a file that says all of it already is not touched."""
    old = read_json(file) or {}
    new = old | plain(tree)
    if new != old:
        write_json(file, new)


def plain(tree: Mapping[str, Any]) -> Tree:  # Any: JSON
    """Return `tree` as it comes back from a file: tuples as lists, keys as text.

    Raises:
        VolumeError: it holds what JSON cannot.
    """
    try:
        copy: Tree = json.loads(json.dumps(tree))
    except (TypeError, ValueError) as error:
        raise VolumeError(f"attributes cannot be written as JSON: {error}") from error
    return copy


def voxels(value: object, what: str, file: Location, *, rank: int | None = None) -> tuple[int, ...]:
    """Return `value`, a list of positive integers in the metadata `file`, as a tuple.

    Raises:
        VolumeError: it is something else, or absurd.
    """
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= MAX_RANK:
        raise VolumeError(f"{file}: {what} {_cut_repr(value)} is not a list of 1 to {MAX_RANK} integers")
    if rank is not None and len(value) != rank:
        raise VolumeError(f"{file}: {what} {_cut_repr(value)} has {len(value)} axes, the shape has {rank}")
    for n in value:
        if not isinstance(n, int) or isinstance(n, bool) or not 1 <= n <= MAX_LENGTH:
            raise VolumeError(f"{file}: {what} {_cut_repr(value)} holds {_cut_repr(n)}, no number of voxels")
    return tuple(value)


def mapping(value: object, what: str, file: Location) -> Tree:
    """Return `value`, a JSON object in `file`, {} where it is absent.

    Raises:
        VolumeError: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise VolumeError(f"{file}: {what} {_cut_repr(value)} is not an object")
    return value


def voxel_dtype(stored: np.dtype, what: object) -> np.dtype:
    """Return the type as which voxels of type `stored` are read: native byte order, bool as uint8.

    Raises:
        VolumeError: they are no numbers that volpipe reads; `what` is named.
    """
    if stored.kind == "b":
        return np.dtype(np.uint8)
    if stored.kind not in "iuf" or stored.itemsize > 8 or stored.names is not None:
        raise VolumeError(f"{what} holds {stored}; volpipe reads integers, floats of 16 to 64 bits, and bool")
    return stored.newbyteorder("=")


def flat_chunk(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one plane, which is contiguous in an uncompressed file."""
    return (1,) * (len(shape) - 2) + shape[-2:]


def _cut_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def floats(value: object) -> tuple[float, ...] | None:
    """Return `value` as a tuple of finite floats, None where it is no list of numbers."""
    if not isinstance(value, list | tuple):
        return None
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in value):
        return None
    try:
        numbers = tuple(float(v) for v in value)
    except OverflowError:
        return None
    return numbers if all(map(math.isfinite, numbers)) else None


def nanometres(unit: object) -> float | None:
    """Return how many nanometres one `unit` has, None where it is unknown or no length."""
    if not isinstance(unit, str):
        return None
    name = unicodedata.normalize("NFKC", unit).strip().lower()
    if len(name) > 2:
        name = name.removesuffix("s").replace("metre", "meter")
    return NANOMETRES.get(name)


def lengths(value: object) -> Lengths | None:
    """Return three lengths z, y, x in nm, from numbers (of nm) or text: "16x8x8nm", "1, 0.5, 0.5 um", ["8 nm", …].

    In a text, a unit counts for the numbers before it that have none; a text without any is none.
    """
    if isinstance(value, str):
        parts = [LENGTH.fullmatch(part) for part in re.split(r"\s*[,×]\s*|\s*x\s*(?=[-+.\d])", value.strip())]
        pairs = [(part[1], part[2]) for part in parts if part is not None]
        units = [unit or next((u for _, u in pairs[i:] if u), "") for i, (_, unit) in enumerate(pairs)]
        factors = [nanometres(unit) for unit in units]
        if len(pairs) != len(parts) or None in factors:
            return None
        numbers = floats([float(number) * (factor or 1.0) for (number, _), factor in zip(pairs, factors, strict=True)])
    elif isinstance(value, list | tuple) and any(isinstance(entry, str) for entry in value):
        return lengths(", ".join(f"{entry} nm" if isinstance(entry, int | float) else str(entry) for entry in value))
    else:
        numbers = floats(value)
    if numbers is not None and len(numbers) == 3:
        return numbers[0], numbers[1], numbers[2]
    return None


def shown(numbers: Sequence[float]) -> str:
    """Return lengths or other numbers for people: "40 × 4 × 4"."""
    return " × ".join(f"{number:g}" for number in numbers)


def usual_axes(shape: Sequence[int]) -> tuple[str, ...]:
    """Return the names assumed for unnamed axes: x, yx, zyx, czyx, tczyx; further ones are d0, d1 …

    A last axis of 3 or 4, or of four axes and more of up to 4, behind two that are longer than 16, is of channels, as
    of colours: yxc, zyxc, tzyxc.
    """
    rank, channels = len(shape), 3 if len(shape) == 3 else 1
    if rank > 2 and channels <= shape[-1] <= MAX_COLOURS and min(shape[-3:-1]) >= LEAST_PLANE:
        return (*(axis for axis in usual_axes((1,) * rank) if axis != "c"), "c")[-rank:]
    extra = max(0, rank - len(AXES))
    return tuple(f"d{i}" for i in range(extra)) + AXES[len(AXES) - rank + extra :]


def place(scale: Mapping[str, float], shift: Mapping[str, float], units: Mapping[str, object]) -> Place:
    """Return the place of an array from its voxel sizes, shifts and units per axis name.

    An axis that the array lacks counts as one voxel of 1 nm. Where a unit is unknown or a size is not above zero the
    voxel size is None and the origin zero: a wrong size would do more harm than none.
    """
    spatial = {axis: scale[axis] for axis in "zyx" if axis in scale}
    factors = {axis: nanometres(units.get(axis)) for axis in spatial}
    if not spatial:
        return Place()
    if None in factors.values() or min(spatial.values()) <= 0:
        return Place(reason=_why_unknown(spatial, units, factors))
    size = [spatial.get(axis, 1.0) * (factors.get(axis) or 1.0) for axis in "zyx"]
    origin = [shift.get(axis, 0.0) * (factors.get(axis) or 1.0) for axis in "zyx"]
    return Place((size[0], size[1], size[2]), (origin[0], origin[1], origin[2]), has_origin=bool(shift))


def _why_unknown(spatial: Mapping[str, float], units: Mapping[str, object], factors: Mapping[str, float | None]) -> str:
    """Return why sizes without a known unit, or not above zero, count as unknown."""
    numbers = f"{', '.join(spatial)} {shown([*spatial.values()])}"
    odd = next((units.get(axis) for axis, factor in factors.items() if factor is None), None)
    if None not in factors.values():
        return f"it says {numbers}, which must be above 0"
    return f"it says {numbers} in the unit {str(odd)[:20]!r}" if odd else f"it says {numbers} without a unit"


def level_factor(lengths: Sequence[int]) -> int | None:
    """Return how many voxels of the finest level one of the last level joins, by their lengths along an axis.

    A level has the length of the one before, divided by a whole number and rounded up or down. None where several
    numbers, or none, may have been meant, unless one of them divided all levels before::

        33 -> 17 -> 9   2, then 2: 4, and not 33 / 9          12 -> 3        4 or 5: None
        7 -> 4 -> 2     2, then 2 or 3, of which 2 again: 4   100 -> 66      none: None
    """
    steps: list[int] = []
    for n, m in itertools.pairwise(lengths):
        if n == m and (n > 1 or lengths[0] == 1):
            continue
        low, high = n // (m + 1) + 1, (n - 1) // (m - 1) if m > 1 else MAX_LENGTH  # n / f is less than 1 from m
        again = steps[0] if len(set(steps)) == 1 else 0
        if n <= m or not (low == high or low <= again <= high):
            return None
        steps.append(low if low == high else again)
    return math.prod(steps)


def check_same(file: Location, name: str, was: object, value: object) -> None:
    """Raise unless what `file` says of `name` already is `value`."""
    if was != value:
        raise VolumeError(
            f"{file} exists already, with {name} {was!r} instead of {value!r}; remove it, or write to another place"
        )


def check_aligned(header: Header, start: Sequence[int], shape: Sequence[int]) -> None:
    """Raise unless a box is made of whole write units of the array, or ends where the array ends.

    A part of a unit would have to be read, changed and written back, and two tasks that do so lose voxels.
    """
    name = str(header.folder)
    rank = len(header.shape)
    if len(start) != rank or len(shape) != rank:
        raise VolumeError(f"{name} has {rank} axes, the box at {tuple(start)} of shape {tuple(shape)} has not")
    axes = header.axes or tuple(map(str, range(rank)))
    word = "shard" if header.shards else "chunk"
    for axis, a, n, unit, size in zip(axes, start, shape, header.write_unit, header.shape, strict=True):
        if n < 1 or a < 0 or a + n > size:
            raise VolumeError(f"{name}: box {a}:{a + n} on axis {axis} is empty or outside 0:{size}")
        if a % unit or ((a + n) % unit and a + n != size):
            raise VolumeError(
                f"{name}: box {a}:{a + n} on axis {axis} is not made of whole {word}s of {unit} "
                f"voxels (the array ends at {size}); write whole {word}s"
            )
