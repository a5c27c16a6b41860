"""Neuroglancer precomputed: the file `info` of a folder, its levels as arrays in C order, and new ones, sharded.

Not here: voxels (tensorstore), or file names (chunk_files). Axes are stored x, y, z, channel, and turned here; a chunk
has all channels. A voxel at index i reaches from i to i + 1 times the resolution, in nm. Specification:
github.com/google/neuroglancer, src/datasource/precomputed: volume.md and sharded.md (read 2026-11).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from volpipe.errors import RemoteError, VolumeError
from volpipe.geometry.grid import Triple
from volpipe.geometry.indexing import ChunkedIndex, ranges
from volpipe.volumes.formats.format import ArrayFolders, FolderReader, Format, ReadRow, Writing
from volpipe.volumes.formats.ome import ListedLevel, is_inner
from volpipe.volumes.storage import decoded_size, tensorstore
from volpipe.volumes.storage.fetched_array import FetchedArray
from volpipe.volumes.storage.metadata import (
    ArraySpec,
    ChunkScheme,
    Header,
    Level,
    Multiscale,
    Place,
    Style,
    Tree,
    check_same,
    floats,
    lengths,
    mapping,
    merge_json,
    plain,
    read_json,
    voxels,
    write_json,
)
from volpipe.volumes.storage.object_store import Remote
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.tensorstore import Index, StoredArray

log = logging.getLogger(__name__)

FILE = "info"
SUFFIX = ".precomputed"
TYPE = "neuroglancer_multiscale_volume"
PROPERTIES = "segment_properties"  # the key of `info`, and the folder that it names here
SHARDING = "neuroglancer_uint64_sharded_v1"
DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "float32")
LABELS = ("uint32", "uint64")  # the types that compressed_segmentation has
SEGMENTATION = "compressed_segmentation"
JXL = "jxl"  # JPEG XL, which tensorstore has not
ENCODINGS = ("raw", "jpeg", "png", SEGMENTATION, JXL)
MOST_GROWTH = 4  # a picture may have colours, or transparency, that a chunk has not
SETTINGS = ("encoding", "jpeg_quality", "png_level", "compressed_segmentation_block_size")
SPAN = re.compile(r"(-?\d+)-(-?\d+)")  # of a chunk along an axis, in its name
SHARD = ".shard"
KEY_PARTS = 2  # of a level, at most
MAX_LEVELS = 100
EVEN_CHUNK = 40_000  # between 32³ and 64³
MINISHARD_BITS = 9  # chunks below a minishard's index, as powers of two: 512, as tensorstore has it
ORIGIN = "volpipe_origin_nm"  # (z, y, x), centre of the first voxel, with the half voxel that voxel_offset lacks


class PrecomputedScheme(ChunkScheme):
    """Axes x, y, z, channel. A chunk is named by its box, a shard by a part of the Morton codes of its chunks.

    Both change as an array grows.
    """

    driver = "neuroglancer_precomputed"
    is_reversed = True
    is_regular = False
    tells_stored = False
    rare_styles = ()

    def style(self, header: Header) -> Style:
        return Style(suffix=SHARD) if "sharding" in header.known["scale_metadata"] else Style("", "_")

    def styles(self, header: Header) -> tuple[Style, ...]:
        return () if "sharding" in header.known["scale_metadata"] else (Style("", "/"),)

    def words(self, header: Header, index: Sequence[int]) -> list[str]:
        scale, place = header.known["scale_metadata"], index[:-4:-1]
        if "sharding" not in scale:
            axes = zip(place, scale["chunk_size"], scale["size"], scale["voxel_offset"], strict=True)
            return [f"{i * c + first}-{min((i + 1) * c, n) + first}" for i, c, n, first in axes]
        if header.shards is None:
            return []
        bits, chunk = scale["sharding"], scale["chunk_size"]
        chunks = [i * n // c for i, n, c in zip(place, header.shards[::-1], chunk, strict=False)]
        code = morton(chunks, axis_bits(scale["size"], chunk))
        number = code >> bits["preshift_bits"] + bits["minishard_bits"] if bits["shard_bits"] else 0
        return [f"{number:0{-(-bits['shard_bits'] // 4)}x}"]

    def index(self, header: Header, words: Sequence[str]) -> list[int] | None:
        scale, more = header.known["scale_metadata"], [0] * (len(header.shape) - 3)
        if "sharding" not in scale:
            spans = [SPAN.fullmatch(word) for word in words]
            if len(spans) != 3 or None in spans:
                return None
            axes = zip(spans, scale["voxel_offset"], scale["chunk_size"], strict=True)
            place = [(int(span[1]) - first) // c for span, first, c in axes if span is not None]
            return [*more, *place[::-1]]
        if header.shards is None or not re.fullmatch(r"[0-9a-f]{1,16}", words[0]):
            return None
        bits, chunk = scale["sharding"], scale["chunk_size"]
        number = int(words[0], 16) << bits["preshift_bits"] + bits["minishard_bits"]
        chunks, used = [0, 0, 0], [0, 0, 0]
        for bit, axis in enumerate(morton_bits(axis_bits(scale["size"], chunk))):
            chunks[axis] |= (number >> bit & 1) << used[axis]
            used[axis] += 1
        place = [i * c // n for i, n, c in zip(chunks, header.shards[::-1], chunk, strict=False)]
        return [*more, *place[::-1]]

    def count_in_shard(self, header: Header, index: Sequence[int]) -> int | None:
        (word,) = self.words(header, index) or ("",)
        if not word:
            return None
        sharding = header.known["scale_metadata"]["sharding"]
        base = tensorstore.kvstore_of(header.folder)
        spec = {"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": sharding}
        bits = sharding["preshift_bits"] + sharding["minishard_bits"]
        # Names of chunks are their numbers.
        first, last = (((int(word, 16) + i) << bits).to_bytes(8, "big") for i in range(2))
        return tensorstore.count_keys(spec, first, last)

    def metadata(self, header: Header) -> Tree:
        return dict(header.known)

    def key(self, header: Header) -> str:
        return str(header.known["scale_metadata"]["key"])

    def count_folders(self, counts: Sequence[int]) -> int:
        return 1


class JxlScheme(PrecomputedScheme):
    """The same, each chunk a picture in JPEG XL: its rows are those of the chunk, one after the other."""

    def as_tensorstore_reads(self, header: Header, content: bytes) -> bytes:
        """Return the voxels of a chunk as the encoding "raw" has them: x fastest, channels slowest."""
        import imagecodecs

        num_channels = math.prod(header.chunks[:-3])
        num_values, most = decoded_size.count_values(content), math.prod(header.chunks)
        if not content.startswith((decoded_size.JXL, decoded_size.JXL_BOXES)) or num_values is None:
            raise ValueError("DATA_LOSS: the chunk is no picture in JPEG XL")
        if num_values > MOST_GROWTH * most:
            raise ValueError(
                f"DATA_LOSS: the picture unpacks to more than {MOST_GROWTH} times the chunk's {most} voxels"
            )
        try:
            picture = imagecodecs.jpegxl_decode(content)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise ValueError(f"DATA_LOSS: JPEG XL: {error}") from None
        values = picture.reshape(*picture.shape[:2], -1)
        if picture.dtype != header.dtype or values.shape[-1] != num_channels:
            raise ValueError(
                f"DATA_LOSS: the picture has {values.shape[-1]} channels of {picture.dtype}, the metadata say "
                f"{num_channels} of {header.dtype}"
            )
        return np.moveaxis(values, -1, 0).astype(header.dtype.newbyteorder("<")).tobytes()


SCHEME, JXL_SCHEME = PrecomputedScheme(), JxlScheme()


class ShardedPictures:
    """An array whose chunks are pictures in shards, read chunk by chunk."""

    def __init__(self, header: Header) -> None:
        self._header = header
        sharding = header.known["scale_metadata"]["sharding"]
        base = tensorstore.kvstore_of(header.folder)
        self._shards = {"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": sharding}

    def read(self, index: Index) -> np.ndarray:
        """Return the voxels at `index`; chunks that are not stored are zeros."""
        header, scale = self._header, self._header.known["scale_metadata"]
        region = ChunkedIndex.of(index, header.shape, header.chunks, header.chunks)
        data = np.zeros(tuple(map(len, ranges(index, header.shape))), header.dtype)
        per_axis = axis_bits(scale["size"], scale["chunk_size"])
        for chunk in region.units():
            number = morton(chunk[:-4:-1], per_axis)
            content = tensorstore.read_key(self._shards, number.to_bytes(8, "big"))  # numbers are the names of chunks
            if content is None:
                continue
            axes = list(zip(chunk, header.chunks, header.shape, strict=True))
            shape = tuple(min(c, n - i * c) for i, c, n in axes)
            voxels = np.frombuffer(JXL_SCHEME.as_tensorstore_reads(header, content), header.dtype.newbyteorder("<"))
            if voxels.size != math.prod(shape):
                raise ValueError(f"DATA_LOSS: the picture has {voxels.size} voxels, the chunk {math.prod(shape)}")
            target, place = region.places(chunk)
            starts = [i * c for i, c, _ in axes]
            within = (slice(at.start - a, at.stop - a, at.step) for at, a in zip(place, starts, strict=True))
            data[target] = voxels.reshape(shape)[tuple(within)]
        return data[tuple(0 if isinstance(along, int) else slice(None) for along in index)]


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


def read_info(folder: Location) -> Tree | None:
    """Return what the file `info` in `folder` says of a volume, None where there is none that describes one.

    Raises:
        VolumeError: a folder named .precomputed has a broken one.
    """
    try:
        tree = read_json(folder / FILE)
    except RemoteError:
        raise
    except VolumeError:
        if folder.suffix.lower() == SUFFIX:
            raise
        return None  # a file of that name may be anybody's
    is_volume = tree is not None and isinstance(tree.get("scales"), list) and "data_type" in tree
    return tree if is_volume else None


def read_header(folder: Location) -> Header | None:
    """Return the header of the level at `folder`, None where the folders around it name none.

    Raises:
        VolumeError: its metadata are broken, or say what volpipe cannot read.
    """
    for root in roots(folder):
        info = _read_info_around(root)
        parts = folder.parts[len(root.parts) :]
        for scale in info["scales"] if info is not None else ():
            if isinstance(scale, dict) and _key_parts(scale) == parts:
                _scales(info or {}, root)
                return _scale_header(folder, root, info or {}, scale)
    return None


def roots(folder: Location) -> Sequence[Location]:
    """Return the folders whose file `info` may name the level at `folder`, nearest first."""
    around: tuple[Location, ...] = tuple(folder.parents[:KEY_PARTS])
    named = [root for root in around if root.suffix.lower() == SUFFIX]
    return named[:1] or (around[:1] if isinstance(folder, Remote) else around)  # each costs a request there


def _read_info_around(root: Location) -> Tree | None:
    """Return what `read_info` does; None where a server gives no answer about a folder that may be no volume's."""
    try:
        return read_info(root)
    except RemoteError as error:
        if root.suffix.lower() == SUFFIX:
            raise
        log.info("%s", error)
        return None


def root_of(header: Header) -> Location:
    """Return the folder with the file `info` that names the level of `header`."""
    return header.folder.parents[len(_key_parts(header.known["scale_metadata"])) - 1]


def read_datasets(folder: Location) -> tuple[ListedLevel, ...] | None:
    """Return the levels of the volume at `folder`, as it lists them; None where there is none.

    Raises:
        VolumeError: its metadata are broken.
    """
    info = read_info(folder)
    if info is None:
        return None
    scales = _scales(info, folder)
    for key in (scale.get("key") for scale in scales):
        if not isinstance(key, str) or not _is_inner(key):
            raise VolumeError(f"{folder / FILE}: the key {str(key)[:60]!r} of a level is no folder inside; mend it")
    return tuple(ListedLevel(str(scale["key"]), coarseness=_coarseness(scale)) for scale in scales)


def _coarseness(scale: Mapping[str, Any]) -> float:
    """Return the size of a voxel of a level, to be compared with other levels'; 0 where that is not stated."""
    size = floats(scale.get("resolution"))
    return math.prod(size) if size is not None and len(size) == 3 and min(size) > 0 else 0.0


def read_attributes(folder: Location) -> Tree:
    """Return what the volume at `folder` says of itself, beside its levels; {} where there is none."""
    return {key: value for key, value in (read_info(folder) or {}).items() if key != "scales"}


def _key_parts(scale: Mapping[str, Any]) -> tuple[str, ...]:
    return PurePosixPath(str(scale.get("key"))).parts


def _is_inner(key: str) -> bool:
    return 1 <= len(PurePosixPath(key).parts) <= KEY_PARTS and is_inner(key)


def _scales(info: Tree, root: Location) -> list[Tree]:
    scales = info["scales"]
    if not 1 <= len(scales) <= MAX_LEVELS:
        raise VolumeError(f"{root / FILE} has {len(scales)} scales; volpipe reads 1 to {MAX_LEVELS}")
    return [mapping(scale, "scales", root / FILE) for scale in scales]


def _scale_header(folder: Location, root: Location, info: Tree, scale: Tree) -> Header:
    file = root / FILE
    dtype, encoding = info.get("data_type"), scale.get("encoding")
    if dtype not in DTYPES:
        raise VolumeError(f"{file}: data_type {str(dtype)[:20]!r} is not one that volpipe reads: {', '.join(DTYPES)}")
    if encoding not in ENCODINGS:
        raise VolumeError(
            f"{file}: encoding {str(encoding)[:30]!r} is not read; volpipe reads {', '.join(ENCODINGS)}: copy it to "
            "one of them by cloud-volume"
        )
    size = voxels(scale.get("size"), "size", file, rank=3)
    sizes = scale.get("chunk_sizes")
    chunk = voxels(sizes[0] if isinstance(sizes, list) and sizes else None, "chunk_sizes", file, rank=3)
    (count,) = voxels([info.get("num_channels", 1)], "num_channels", file)
    offset = _offset(scale, file)
    sharding = _sharding(scale, file)
    is_jxl = encoding == JXL
    known = {
        "multiscale_metadata": {"data_type": dtype, "num_channels": count, "type": str(info.get("type", "image"))},
        "scale_metadata": {
            "key": scale["key"], "size": size, "chunk_size": chunk, "voxel_offset": offset,
            "resolution": floats(scale.get("resolution")) or (1.0, 1.0, 1.0),
            **{name: scale[name] for name in SETTINGS if name in scale},
            **({"encoding": "raw"} if is_jxl else {}),  # as which chunks are given to tensorstore
            **({} if sharding is None else {"sharding": sharding}),
        },
    }  # fmt: skip
    channels = (count,) if count > 1 else ()
    box = None if sharding is None else shard_box(size, chunk, sharding)
    return Header(
        folder=folder,
        format="precomputed",
        shape=(*channels, *size[::-1]),
        dtype=np.dtype(dtype),
        chunks=(*channels, *chunk[::-1]),
        shards=None if box is None else (*channels, *box[::-1]),
        codec="gzip" if encoding == "raw" and (sharding or {}).get("data_encoding") == "gzip" else encoding,
        axes=("c", "z", "y", "x") if channels else ("z", "y", "x"),
        known=plain(known),
        place=_scale_place(info, scale, offset),
        unsupported="an array of JPEG XL" if is_jxl else "",
        scheme=JXL_SCHEME if is_jxl else SCHEME,
    )


def _offset(scale: Tree, file: Location) -> tuple[int, ...]:
    offset = scale.get("voxel_offset", [0, 0, 0])
    is_offset = isinstance(offset, list) and len(offset) == 3
    if not is_offset or not all(isinstance(n, int) and not isinstance(n, bool) for n in offset):
        raise VolumeError(f"{file}: voxel_offset {str(offset)[:60]} is not three integers")
    return tuple(offset)


def _sharding(scale: Tree, file: Location) -> Tree | None:
    sharding = scale.get("sharding")
    if sharding is None:
        return None
    tree = mapping(sharding, "sharding", file)
    bits = [tree.get(name) for name in ("preshift_bits", "minishard_bits", "shard_bits")]
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= 64 for n in bits):
        raise VolumeError(f"{file}: the bits of its sharding, {str(bits)[:60]}, are not three numbers from 0 to 64")
    return tree


def shard_box(size: Sequence[int], chunk: Sequence[int], sharding: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the voxels (x, y, z) of a shard; None where shards are no boxes.

    A chunk's number interleaves the bits of its place along x, y and z. Where it is not hashed, a shard has the chunks
    whose numbers share all but the lowest bits: along each axis a power of two of them.
    """
    per_axis = axis_bits(size, chunk)
    low, high = sharding["preshift_bits"] + sharding["minishard_bits"], sharding["shard_bits"]
    if high and (sharding.get("hash") != "identity" or low + high < sum(per_axis)):
        return None
    box = list(chunk)
    for axis in list(morton_bits(per_axis))[: low if high else None]:
        box[axis] *= 2
    return tuple(box)


def _scale_place(info: Tree, scale: Tree, offset: Sequence[int]) -> Place:
    """Return the place of a level, its first voxel's centre half a voxel into it; exactly where ORIGIN says it."""
    size = floats(scale.get("resolution"))
    if size is None or len(size) != 3 or min(size) <= 0:
        return Place(reason=f"it says {str(scale.get('resolution'))[:40]}")
    centres = [(n + 0.5) * v for n, v in zip(offset, size, strict=True)]
    finest = min((tree for tree in info["scales"] if isinstance(tree, dict)), key=_coarseness)
    stored, fine = lengths(info.get(ORIGIN)), floats(finest.get("resolution"))
    if stored is not None and fine is not None and len(fine) == 3:
        shift = [o + (v - f) / 2 for o, v, f in zip(stored[::-1], size, fine, strict=True)]
        if all(abs(a - b) <= f / 2 * (1 + 1e-6) for a, b, f in zip(shift, centres, fine, strict=True)):
            centres = shift
    has_origin = stored is not None or "voxel_offset" in scale
    return Place((size[2], size[1], size[0]), (centres[2], centres[1], centres[0]), has_origin)


def check_spec(spec: ArraySpec) -> None:
    """Raise unless precomputed has arrays such as `spec`.

    Raises:
        VolumeError: with its value, and those that fit.
    """
    if spec.dtype.name not in DTYPES:
        raise VolumeError(
            f"precomputed has no {spec.dtype} voxels; it has {', '.join(DTYPES)}: choose one of them for the output, "
            "or write OME-Zarr"
        )
    if spec.axes not in (("z", "y", "x"), ("c", "z", "y", "x")):
        raise VolumeError(f"precomputed has axes (c,) z, y, x, not {', '.join(spec.axes)}")
    if spec.codec not in ("gzip", "raw", SEGMENTATION):
        raise VolumeError(f"precomputed is not written with codec {spec.codec!r}; use gzip, raw or {SEGMENTATION}")
    if spec.codec == SEGMENTATION and spec.dtype.name not in LABELS:
        raise VolumeError(
            f"{SEGMENTATION} is for {' and '.join(LABELS)}, the voxels are {spec.dtype}; use gzip, or another type"
        )
    if spec.fill != 0:
        raise VolumeError(f"precomputed fills with 0, not with {spec.fill}")
    shard_exponent(spec)


def shard_exponent(spec: ArraySpec) -> int:
    """Return k where a shard of `spec` has 2^k chunks along each axis, or all that there are.

    Only such shards are boxes at every level: chunks are numbered in Morton order.

    Raises:
        VolumeError: with the shard, the chunk, and a shard that fits.
    """
    shape, chunks, shards = (values[-3:] for values in (spec.shape, spec.chunks, spec.shards or spec.chunks))
    counts = [-(-n // c) for n, c in zip(shape, chunks, strict=True)]
    wish = [min(s // c, n) for s, c, n in zip(shards, chunks, counts, strict=True)]
    for k in range(max(counts).bit_length() + 1):
        if all(min(2**k, n) == w for n, w in zip(counts, wish, strict=True)):
            return k
    k = max(0, round(math.log2(max(s / c for s, c in zip(shards, chunks, strict=True)))))
    raise VolumeError(
        f"a shard {shards} of precomputed has as many chunks {chunks} along z as along y and x, 1, 2, 4, 8 …; use "
        f"shard {tuple(c * 2**k for c in chunks)}, or another chunk"
    )


def even_chunk(shard: Triple) -> Triple:
    """Return the chunk of which `shard` has the same power of two along each axis, EVEN_CHUNK voxels or more."""
    z, y, x = shard
    while not (z % 2 or y % 2 or x % 2) and z * y * x // 8 >= EVEN_CHUNK:
        z, y, x = z // 2, y // 2, x // 2
    return z, y, x


def stored_shards(spec: ArraySpec) -> tuple[int, ...]:
    """Return the shards of `spec`, per stored axis, as they are read back: no more chunks than a power of two needs."""
    scale = _scale(spec, "")
    box = shard_box(scale["size"], scale["chunk_sizes"][0], scale["sharding"]) or ()
    return (*spec.chunks[:-3], *box[::-1])


def _scale(spec: ArraySpec, key: str) -> Tree:
    shape, chunks = spec.shape[-3:], spec.chunks[-3:]
    per_axis = axis_bits(shape, chunks)
    k = shard_exponent(spec)
    inside = sum(min(k, bits) for bits in per_axis)
    preshift = min(inside, MINISHARD_BITS)
    is_labels = spec.codec == SEGMENTATION
    return {
        "key": key,
        "size": shape[::-1],
        "resolution": [1, 1, 1],
        "voxel_offset": [0, 0, 0],
        "chunk_sizes": [chunks[::-1]],
        "encoding": SEGMENTATION if is_labels else "raw",
        **({"compressed_segmentation_block_size": [8, 8, 8]} if is_labels else {}),
        "sharding": {
            "@type": SHARDING,
            "hash": "identity",
            "preshift_bits": preshift,
            "minishard_bits": inside - preshift,
            "shard_bits": sum(per_axis) - inside,
            "minishard_index_encoding": "gzip",
            "data_encoding": "raw" if spec.codec == "raw" else "gzip",
        },
    }


def check_place(multiscale: Multiscale) -> None:
    """Raise unless precomputed can say where the levels lie.

    Raises:
        VolumeError: the voxel size is unknown, or the first voxel of a coarser level is none of its grid from 0.
    """
    list(_scale_places(multiscale))


def write_group(root: Location, multiscale: Multiscale, own: Tree, is_incomplete: bool) -> None:
    """Write where the levels of the volume at `root` lie, and `own` beside; the arrays must exist."""
    info = read_json(root / FILE) or {}
    by_key = {scale["key"]: scale for scale in info.get("scales", [])}
    scales = [by_key[level.key] | place for level, place in _scale_places(multiscale)]
    kind = {"type": "segmentation"} if multiscale.is_labels else {}
    new = info | kind | plain(own) | {ORIGIN: list(multiscale.origin_nm), "scales": scales}
    if new != info:
        write_json(root / FILE, new)


def write_properties(root: Location, properties: Tree) -> None:
    """Write Neuroglancer's segment `properties` beside the labels at `root`, which then name them."""
    write_json(root / PROPERTIES / FILE, properties)
    merge_json(root / FILE, {PROPERTIES: PROPERTIES})


def _scale_places(multiscale: Multiscale) -> Iterator[tuple[Level, Tree]]:
    """Yield resolution and voxel_offset (x, y, z) of each level.

    The offset is in whole voxels, so that a first voxel whose centre is at 0 is shown half a voxel from there.
    """
    size = multiscale.voxel_size_nm
    if size is None:
        raise VolumeError(
            "the voxel size is unknown, and precomputed cannot do without; give it: --set input.voxel_size_nm=16,8,8 "
            "for a run, --voxel-size-nm 16,8,8 for a copy"
        )
    # of the voxel in which the origin lies, the later one on a border
    corner = [math.floor(o / v + 1e-6) for o, v in zip(multiscale.origin_nm, size, strict=True)]
    for level in multiscale.levels:
        for axis, n, f in zip("zyx", corner, level.factor, strict=True):
            if n % f:
                raise VolumeError(
                    f"axis {axis}: the first voxel is number {n} from the origin, no multiple of the {f:g} that level "
                    f"{level.key} joins, and precomputed counts voxels of every level from the origin; begin at "
                    f"{int(n - n % f)} or {int(n - n % f + f)}, make fewer levels (output.levels), set "
                    "input.origin_nm=0,0,0nm, or write OME-Zarr"
                )
        offset = [int(n // f) for n, f in zip(corner, level.factor, strict=True)]
        resolution = [f * v for f, v in zip(level.factor, size, strict=True)]
        yield level, {"resolution": resolution[::-1], "voxel_offset": offset[::-1]}


def _files_above(folder: Location) -> list[Location]:
    return [root / FILE for root in roots(folder)]


class PrecomputedFolders(ArrayFolders):
    """One file for all levels, in the folder around them; no groups, and none but one volume."""

    name = "precomputed"
    scheme = SCHEME
    marks = ()  # `info` is a name that other files may have
    metadata_file = ""
    attributes_file = FILE
    run_file = "attributes.json"
    metadata_names = (FILE,)
    is_sharded = is_one_volume = True
    properties_folder = PROPERTIES

    def owns(self, folder: Location) -> bool:
        return read_info(folder) is not None

    def new_files(self, container: Location, key: str, spec: ArraySpec) -> dict[Location, Tree]:
        """Return what `info` must say anew for the level `key`, at first of 1 nm."""
        check_spec(spec)
        old = read_json(container / FILE)
        own = {
            "@type": TYPE,
            "type": "segmentation" if spec.codec == SEGMENTATION else "image",
            "data_type": spec.dtype.name,
            "num_channels": spec.shape[0] if len(spec.shape) == 4 else 1,
        }
        info: Tree = {**own, "scales": []} | (old or {})
        scale = plain(_scale(spec, key))
        for name in ("data_type", "num_channels"):
            check_same(container / FILE, name, info.get(name), own[name])
        known = next((entry for entry in info["scales"] if entry.get("key") == key), None)
        if known is None:
            return {container / FILE: info | {"scales": [*info["scales"], scale]}}
        for name in ("size", "chunk_sizes", "encoding", "sharding"):
            check_same(container / FILE, name, known.get(name), scale[name])
        return {}

    def channel_chunk(self, channels: tuple[int, ...]) -> tuple[int, ...]:
        return channels

    def usual_chunk(self, shard: Triple) -> Triple | None:
        return even_chunk(shard)

    def as_read(self, spec: ArraySpec) -> tuple[tuple[int, ...] | None, str]:
        return stored_shards(spec), spec.codec

    def metadata_at(self, folder: Location, header: Header | None) -> Location:
        return (folder.parent if header is None else root_of(header)) / FILE

    def group_around(self, header: Header) -> Location:
        return root_of(header)

    def open_otherwise(self, header: Header) -> StoredArray | None:
        if header.scheme != JXL_SCHEME:
            return None
        is_sharded = "sharding" in header.known["scale_metadata"]
        return ShardedPictures(header) if is_sharded else FetchedArray(header)


PRECOMPUTED = Format(
    name="precomputed",
    title="Neuroglancer precomputed",
    row=ReadRow(
        "Neuroglancer precomputed (a folder with `info`), sharded or not",
        f"encodings {', '.join(ENCODINGS)}",
        "`resolution`, `voxel_offset`",
    ),
    suffixes=(SUFFIX,),
    folders=FolderReader(read_header, read_attributes, read_datasets, files_above=_files_above),
    arrays=PrecomputedFolders(),
    write_group=write_group,
    write_properties=write_properties,
    writing=Writing(
        ("gzip", "raw", SEGMENTATION),
        "needs a voxel size",
        has_keys=False,
        has_record=False,
        label_codecs=dict.fromkeys(LABELS, SEGMENTATION),
        check_spec=check_spec,
        check_place=check_place,
    ),
)
