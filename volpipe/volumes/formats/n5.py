"""N5: metadata in its dialects, COSEM's also of Zarr v2, new arrays, and whole chunks written in bulk.

Not here: reading voxels (tensorstore). The only file that imports z5py. N5 counts axes x, y, z and its arrays are
turned to C order here; no block holds more than its array, and a group need have no metadata at all. Specification:
github.com/saalfeldlab/n5; dialects: the n5-ij wiki, neuroglancer's N5 page,
and github.com/janelia-cosem/schemas, multiscale.md, whose lists follow their `axes`, in practice (z, y, x).
"""

from __future__ import annotations

import shutil
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Grid
from volpipe.volumes.dialects import bigdataviewer
from volpipe.volumes.dialects.attributes import (
    named_axes,
    read_axes,
    size_keys,
    transform_place,
    units_by_axis,
    value_notes,
    viewer_place,
)
from volpipe.volumes.dialects.attributes import read_place as read_listed_place
from volpipe.volumes.formats import ome
from volpipe.volumes.formats.format import (
    DEFAULT_KEY,
    ArrayFolders,
    FolderReader,
    Format,
    ReadRow,
    Writing,
    stated_place,
)
from volpipe.volumes.formats.ome import ListedLevel
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.storage.metadata import (
    AXES,
    ArraySpec,
    ChunkCodec,
    ChunkScheme,
    Header,
    Lengths,
    Level,
    Multiscale,
    Place,
    Style,
    Tree,
    check_aligned,
    floats,
    mapping,
    merge_json,
    place,
    plain,
    read_json,
    usual_axes,
    voxels,
)
from volpipe.volumes.storage.paths import Location, locate, sync

FILE = "attributes.json"
VERSION = "2.0.0"  # that of z5py
CORE = ("dimensions", "blockSize", "dataType", "compression", "compressionType", "n5")
DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float32", "float64")
PYTHON = ("axis_names", "_ARRAY_DIMENSIONS")  # of funlib and xarray, all of whose lists are in the order of numpy
JAVA = ("axes", "dimension_names")  # in the order of `dimensions`
CODECS: Mapping[str, tuple[str, ...]] = {
    "raw": (),
    "gzip": ("level", "useZlib"),
    "bzip2": ("blockSize",),
    "xz": ("preset",),
    "zstd": ("level",),
    "blosc": ("cname", "clevel", "shuffle", "blocksize"),
}  # the settings that tensorstore knows; it refuses others, such as the `nthreads` that Java needs
BULK_CODECS = ("raw", "gzip", "zstd")
SIZES_START = 4  # of a chunk: behind its mode and its number of axes, 2 bytes each
MODE_VARLENGTH, MODE_OBJECT = b"\0\1", b"\0\2"
MAX_SHOWN = 40  # letters of an attribute in a note


class N5Scheme(ChunkScheme):
    """Axes x, y, z; a chunk begins with its mode, its number of axes and its shape (N5 specification, block format)."""

    driver = "n5"
    is_reversed = True

    def style(self, header: Header) -> Style:
        return Style("", "/")

    def styles(self, header: Header) -> tuple[Style, ...]:
        return Style("", "/"), Style("", ".")

    def words(self, header: Header, index: Sequence[int]) -> list[str]:
        return super().words(header, index[::-1])

    def index(self, header: Header, words: Sequence[str]) -> list[int] | None:
        return super().index(header, words[::-1])

    def codec(self, header: Header) -> ChunkCodec:
        return ChunkCodec(str(header.known["compression"]["type"]))

    def head_bytes(self, rank: int) -> int:
        return SIZES_START + 4 * rank

    def start(self, rank: int, content: bytes) -> int:
        return self.head_bytes(rank) + (4 if content[:2] == MODE_VARLENGTH else 0)

    def stated_shape(self, rank: int, head: bytes) -> tuple[int, ...] | None:
        if len(head) != self.head_bytes(rank):
            return None
        return struct.unpack(f">{rank}I", head[SIZES_START:])[::-1]

    def as_tensorstore_reads(self, header: Header, content: bytes) -> bytes:
        """Return the `content` of a chunk of mode 1, which has the number of its elements behind its shape, as mode 0.

        Java's writers make such chunks.

        Raises:
            VolumeError: it holds objects.
        """
        mode = content[:2] if len(content) >= SIZES_START else b""
        if mode == MODE_OBJECT:
            raise VolumeError(f"{header.folder}: a block is of N5 mode 2, which holds an object, not voxels")
        if mode != MODE_VARLENGTH:
            return content
        shape_end = self.head_bytes(len(header.shape))
        return b"\0\0" + content[2:shape_end] + content[self.start(len(header.shape), content) :]

    def count_folders(self, counts: Sequence[int]) -> int:
        return super().count_folders(counts[::-1])


SCHEME = N5Scheme()


def read_header(folder: Location) -> Header | None:
    """Return the header of the N5 array at `folder`, None where there is no N5 array.

    Raises:
        VolumeError: its metadata is broken, or says what volpipe cannot read.
    """
    file = folder / FILE
    tree = read_json(file)
    if tree is None or "dimensions" not in tree:
        return None
    dimensions = voxels(tree["dimensions"], "dimensions", file)
    block = voxels(tree.get("blockSize"), "blockSize", file, rank=len(dimensions))
    if tree.get("dataType") not in DTYPES:
        raise VolumeError(f"{file}: dataType {tree.get('dataType')!r} is not one that N5 has: {', '.join(DTYPES)}")
    compression = _compression(tree, file)
    known = {"dimensions": dimensions, "blockSize": block, "dataType": tree["dataType"], "compression": compression}
    attributes = {key: value for key, value in tree.items() if key not in CORE}
    axes, odd_axes = _named_axes_of(tree, len(block))
    return Header(
        folder=folder,
        format="n5",
        shape=dimensions[::-1],
        dtype=np.dtype(tree["dataType"]),
        chunks=block[::-1],
        codec=_label(compression),
        axes=axes,
        odd_axes=odd_axes,
        attributes=attributes,
        known=plain(known),
        notes=(*_order_notes(tree, axes), *value_notes(attributes)),
        scheme=SCHEME,
    )


def _named_axes_of(tree: Tree, rank: int) -> tuple[tuple[str, ...] | None, str]:
    """Return the names of the axes in C order, None and what they are called where that is odd.

    Python's programs list them as numpy does. Neuroglancer and others list `axes` as N5 does `dimensions`.
    """
    if any(key in tree for key in PYTHON):
        return read_axes({key: tree[key] for key in PYTHON if key in tree}, rank)
    axes, odd = read_axes({key: tree[key] for key in JAVA if key in tree}, rank)
    return axes[::-1] if axes else None, odd


def _order_notes(tree: Tree, axes: tuple[str, ...] | None) -> list[str]:
    """Return what a user should know where another reader may take the axes in another order."""
    spatial = [axis for axis in axes or AXES[-3:] if axis in "zyx"]
    notes = []
    if spatial != sorted(spatial, reverse=True) and not any(key in tree for key in PYTHON):
        key = next(key for key in JAVA if named_axes(tree.get(key), len(axes or ())))
        notes.append(
            f"axes {', '.join(axes or ())}: its attribute {key} is in the order of dimensions, the fastest first"
        )
    transform = tree.get("transform")
    named = transform.get("axes") if isinstance(transform, dict) else None
    other = [name for name in named if name in ("z", "y", "x")] if isinstance(named, list) else []
    if other and other != spatial:
        notes.append(f"its transform lists the axes as {', '.join(other)}; the voxels are {', '.join(spatial)}")
    return notes


def _compression(tree: Tree, file: Location) -> Tree:
    """Return the array's compression with the settings that tensorstore knows, legacy spelling included."""
    entry = tree.get("compression") or {"type": tree.get("compressionType", "raw")}
    entry = mapping({"type": entry} if isinstance(entry, str) else entry, "compression", file)
    name = str(entry.get("type"))
    if name == "lz4":
        raise VolumeError(
            f"{file}: N5 with lz4 has three forms, which look the same and which volpipe does not "
            "read; copy it to gzip with the software that wrote it"
        )
    if name not in CODECS:
        raise VolumeError(f"{file}: compression {name!r} is not known; volpipe reads {', '.join(CODECS)}")
    settings = {key: entry[key] for key in CODECS[name] if key in entry}
    if name == "gzip" and settings.get("level") not in range(10):
        settings.pop("level", None)
    if name == "blosc":
        settings = {"cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0} | settings
        if settings["shuffle"] not in (0, 1, 2):
            settings["shuffle"] = 1
    return {"type": name} | settings


def _label(compression: Tree) -> str:
    level = compression.get("level", compression.get("preset", compression.get("clevel", "")))
    words = [compression["type"], str(compression.get("cname", "")), str(level)]
    return " ".join(word for word in words if word)


def read_attributes(folder: Location) -> Tree:
    """Return the attributes of the N5 group at `folder`, {} where it has none."""
    return read_json(folder / FILE) or {}


def read_datasets(folder: Location) -> tuple[ListedLevel, ...] | None:
    """Return the levels that the `multiscales` of the N5 group at `folder` name, None where it has none.

    n5-universe lists their axes as N5 does dimensions.
    """
    named = ome.read_datasets(read_attributes(folder), folder)
    if named is None:
        return None
    return tuple(replace(each, axes=in_c_order(each.axes)) if each.axes else each for each in named)


def read_place(header: Header, parents: Sequence[Tree]) -> Place:
    """Return the place of an array, from its attributes and those of the groups around it, outermost first.

    `transform` (COSEM) is taken as it stands. Otherwise `resolution` or `pixelResolution`, nearest first, is the voxel
    size of the finest level, times the level's `downsamplingFactors` or the group's `scales`; these lists are in the
    order x, y, z. Without a unit the size is unknown: n5-universe means pixels, and the unit of BigDataViewer's is in a
    file of its own. Downsampling by f moves the centre of the first voxel by (f - 1) / 2 voxels of the finest level,
    unless the level states an `offset` of its own.
    """
    axes = header.axes or usual_axes(header.shape)
    if any(key in header.attributes for key in PYTHON):
        return read_listed_place(header.attributes, axes)
    result = transform_place(header.attributes.get("transform"), axes)
    if result is not None:
        return result
    near = [header.attributes, *reversed(parents)]
    scale, units = _resolution(near, axes)
    factors = _by_axis(_factors(header, near), axes) or {}
    is_of_group = not any(key in header.attributes for key in ("resolution", "pixelResolution"))
    if scale and not factors and is_of_group and _level_number(header):
        return Place(reason=f"the group says the size of s0, and nothing of how much coarser {header.folder.name} is")
    own = floats(header.attributes.get("offset"))
    offset = _by_axis(own or next((o for t in near if (o := floats(t.get("offset")))), None), axes) or {}
    has_origin = bool(offset)  # that of a coarser level follows from its factors alone
    if own is None:
        offset = {axis: offset.get(axis, 0.0) + (factors.get(axis, 1.0) - 1) / 2 * size for axis, size in scale.items()}
    size = {axis: value * factors.get(axis, 1.0) for axis, value in scale.items()}
    if any(axis not in size for axis in axes if axis in "zyx"):
        return viewer_place(header.attributes, axes) or _odd_size(near)
    return replace(place(size, offset, units), has_origin=has_origin)


def read_factors(header: Header, parents: Sequence[Tree]) -> Lengths | None:
    """Return how many voxels (z, y, x) of the finest level one of an array joins; None where it is not said."""
    axes = header.axes or usual_axes(header.shape)
    factors = _by_axis(_factors(header, [header.attributes, *reversed(parents)]), axes) or {}
    if not factors and _level_number(header):
        return None
    return factors.get("z", 1.0), factors.get("y", 1.0), factors.get("x", 1.0)


def in_c_order(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of OME's `multiscales` in N5 as they are stored: n5-universe lists them as N5 does dimensions."""
    spatial = [axis for axis in axes if axis in "zyx"]
    return axes[::-1] if len(spatial) > 1 and spatial == sorted(spatial) else axes


def _odd_size(near: Sequence[Mapping[str, Any]]) -> Place:
    """Return the unknown place of an array, with the attribute that may say its size in a way that is none of N5's."""
    for tree in near:
        for key in size_keys(tree):
            value = str(tree[key])[:MAX_SHOWN]
            return Place(reason=f"its {key} is {value}, and N5 has resolution or pixelResolution, a number per axis")
    return Place()


def cosem_transform(multiscale: Multiscale, level: Level) -> Tree:
    """Return COSEM's `transform` of the array of `level`."""
    return plain(
        {
            "axes": multiscale.axes,
            "scale": multiscale.scale(level),
            "translate": multiscale.shift(level),
            "units": ["nm" if axis in "zyx" else "" for axis in multiscale.axes],
        }
    )


def cosem_multiscale(group: Multiscale) -> Tree:
    """Return the one entry of the `multiscales` of a group, as COSEM has it."""
    datasets: list[Tree] = [{"path": level.key} for level in group.levels]
    if group.voxel_size_nm is not None:
        for dataset, level in zip(datasets, group.levels, strict=True):
            dataset["transform"] = cosem_transform(group, level)
    return {"name": group.name, "datasets": datasets}


def _resolution(near: Sequence[Mapping[str, Any]], axes: tuple[str, ...]) -> tuple[dict[str, float], dict[str, object]]:
    """Return voxel size and unit per axis of the finest level, from the nearest attributes that say them."""
    named = next((u for t in near if (u := t.get("units", t.get("unit"))) is not None), None)
    units = {} if named is None else units_by_axis(named, axes[::-1]) or dict.fromkeys(axes, str(named))
    for tree in near:
        pixel, unit = tree.get("pixelResolution"), ""
        if isinstance(pixel, dict):
            unit = str(pixel.get("unit", ""))
            pixel = pixel.get("dimensions")
        plain_size, viewer_size = _by_axis(floats(tree.get("resolution")), axes), _by_axis(floats(pixel), axes)
        if plain_size and (units or not (viewer_size and unit)):
            return plain_size, units
        if viewer_size:
            return viewer_size, dict.fromkeys(axes, unit)
    return {}, {}


def _factors(header: Header, near: Sequence[Mapping[str, Any]]) -> tuple[float, ...] | None:
    own = floats(header.attributes.get("downsamplingFactors"))
    if own:
        return own
    number = _level_number(header)
    if number is None:
        return None
    for tree in near[1:]:
        for key in ("downsamplingFactors", "scales"):
            scales = tree.get(key)
            if isinstance(scales, list) and number < len(scales):
                return floats(scales[number])
    return None


def _level_number(header: Header) -> int | None:
    """Return which level an array is by its name, s0, s1 …; None where its name is another."""
    name = header.folder.name
    return int(name[1:]) if name.startswith("s") and name[1:].isdecimal() else None


def _by_axis(values: Sequence[Any] | None, axes: tuple[str, ...]) -> dict[str, Any]:  # Any: floats or unit names
    """Return `values`, in the order x, y, z, by axis name; {} if their number fits no axes."""
    if not values:
        return {}
    if len(values) == len(axes):
        return dict(zip(axes, reversed(values), strict=True))
    spatial = [axis for axis in "xyz" if axis in axes]
    names = spatial if len(values) == len(spatial) else list("xyz")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def group_attributes(multiscale: Multiscale) -> Tree:
    """Return the attributes of a multiscale group, for n5-viewer, neuroglancer and COSEM's readers."""
    factors = [_whole_factors(multiscale.factors(level)[::-1]) for level in multiscale.levels]
    attributes: Tree = {"axes": multiscale.axes[::-1], "multiscales": [cosem_multiscale(multiscale)]}
    if None not in factors:
        attributes["scales"] = factors
    return plain(attributes | _size_attributes(multiscale))


def array_attributes(multiscale: Multiscale, level: Level) -> Tree:
    """Return the attributes of the array of `level`; `pixelResolution` is that of the finest level."""
    factors = _whole_factors(multiscale.factors(level)[::-1])
    attributes: Tree = {} if factors is None else {"downsamplingFactors": factors}
    if multiscale.voxel_size_nm is not None:
        attributes["transform"] = cosem_transform(multiscale, level)
        attributes["pixelResolution"] = _size_attributes(multiscale)["pixelResolution"]
    return plain(attributes)


def _size_attributes(multiscale: Multiscale) -> Tree:
    if multiscale.voxel_size_nm is None:
        return {}
    size = multiscale.scale(Level(""))[::-1]
    units = ["nm" if axis in "zyx" else "" for axis in multiscale.axes[::-1]]
    return {"resolution": size, "units": units, "pixelResolution": {"dimensions": size, "unit": "nm"}}


def _whole_factors(factors: Sequence[float]) -> list[int] | None:
    """Return `factors` as integers, as N5's dialects require; None if they are not whole."""
    return [int(f) for f in factors] if all(f == int(f) for f in factors) else None


def is_gzip(header: Header) -> bool:
    """Return whether the blocks of an array are compressed by gzip."""
    compression = header.known["compression"] if header.scheme == SCHEME else {}
    return compression.get("type") == "gzip" and not compression.get("useZlib")


def as_raw(header: Header) -> Header:
    """Return the header of the same array of blocks that are not compressed."""
    return replace(header, known={**header.known, "compression": {"type": "raw"}})


def gzipped(header: Header, block: bytes) -> bytes:
    """Return a raw `block` as an array of gzip has it: its first bytes, which give its shape, and the rest compressed.

    What tensorstore's zlib makes of the same voxels depends on the blocks that it has compressed before, where a block
    has about 32 KiB (0.1.86, 2026-11-28); libdeflate keeps nothing of these.
    """
    import imagecodecs

    start = SCHEME.head_bytes(len(header.shape))
    level = header.known["compression"].get("level", -1)
    return block[:start] + bytes(imagecodecs.gzip_encode(block[start:], None if level < 0 else level))


def write_chunks(path: str, key: str, start: tuple[int, ...], data: np.ndarray) -> None:
    """Write whole chunks of an N5 array at once, each whole or not at all, also through a crash or a power cut.

    z5py compresses gzip with libdeflate, twice as fast as tensorstore's zlib (measured 2026-11), but writes in place;
    so it writes a scratch container beside the array, whose files are then renamed. Chunks of zeros are removed.

    Args:
        path: the container.
        key: the array in it.
        start: first voxel per stored axis, C order, on a chunk's corner.
        data: in stored axes, of the array's dtype; whole chunks, or up to the array's end.

    Raises:
        VolumeError: no such array, another dtype, parts of chunks, or a codec that is not gzip, zstd or raw.
    """
    container = locate(path)
    if not isinstance(container, Path):
        raise VolumeError(f"{container}: chunks are written in bulk on disks alone; use a writer")
    folder = container / key
    header = read_header(folder)
    if header is None:
        raise VolumeError(f"no N5 array at {folder}; create it first")
    if data.dtype != header.dtype:
        raise VolumeError(f"{folder} holds {header.dtype}, the data is {data.dtype}; cast it first")
    check_aligned(header, start, data.shape)
    corner = tuple(a // c for a, c in zip(start, header.chunks, strict=True))
    scratch = container / f".scratch-{uuid.uuid4().hex}.n5"
    try:
        _encode(scratch, header, data)
        _move_chunks(scratch / "data", folder, corner, Grid(data.shape, header.chunks).counts)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _encode(scratch: Path, header: Header, data: np.ndarray) -> None:
    """Write `data` as an N5 array of its own under `scratch`."""
    import z5py

    compression = header.known["compression"]
    if compression["type"] not in BULK_CODECS or compression.get("useZlib"):
        raise VolumeError(
            f"{header.folder}: {header.codec} chunks cannot be written in bulk; "
            f"use {', '.join(BULK_CODECS)}, or a writer"
        )
    settings = {"level": compression["level"]} if "level" in compression else {}
    chunks = tuple(min(c, n) for c, n in zip(header.chunks, data.shape, strict=True))
    with z5py.N5File(str(scratch), "w") as file:
        array = file.create_dataset(
            "data", shape=data.shape, chunks=chunks, dtype=data.dtype.name, compression=compression["type"], **settings
        )
        array[...] = np.ascontiguousarray(data)


def _move_chunks(source: Path, folder: Path, corner: Sequence[int], counts: tuple[int, ...]) -> None:
    """Rename each chunk file to its place, counted from `corner`; chunks that the source lacks are removed."""
    touched = set()
    for index in np.ndindex(*counts):
        chunk = source.joinpath(*map(str, reversed(index)))
        target = folder.joinpath(*(str(i + c) for i, c in zip(reversed(index), reversed(corner), strict=True)))
        if not chunk.exists():
            target.unlink(missing_ok=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        sync(chunk)
        touched.add(target.parent)
        tensorstore.count(written=chunk.stat().st_size)
        chunk.replace(target)
    for parent in touched:
        sync(parent)


class N5Folders(ArrayFolders):
    """One file of metadata for all: of arrays, and of groups, which need none but at the root."""

    name = "n5"
    scheme = SCHEME
    marks = (FILE,)
    metadata_file = attributes_file = run_file = FILE
    metadata_names = (FILE,)

    def documents(self, spec: ArraySpec) -> dict[str, Tree]:
        if spec.shards:
            raise VolumeError(f"N5 has no shards; leave out shard {spec.shards} or use Zarr v3")
        if spec.dtype.name not in DTYPES:
            raise VolumeError(f"N5 has no {spec.dtype}; use {', '.join(DTYPES)}")
        if spec.fill != 0:
            raise VolumeError(f"N5 fills with 0, not with {spec.fill}")
        clash = set(spec.attributes) & {*CORE, "axes"}
        if clash:
            raise VolumeError(f"attribute {min(clash)!r} is N5's own; choose another name")
        compression: Tree = {"type": spec.codec}
        if spec.codec != "raw":
            compression["level"] = spec.codec_level
        if spec.codec == "gzip":
            compression["useZlib"] = False
        array = {
            "dimensions": spec.shape[::-1],
            "blockSize": spec.chunks[::-1],
            "dataType": spec.dtype.name,
            "compression": compression,
            "axes": spec.axes[::-1],
            **spec.attributes,
        }
        return {FILE: plain(array)}

    def group_documents(self, *, is_root: bool) -> dict[str, Tree]:
        return {FILE: {"n5": VERSION}} if is_root else {}

    def is_array(self, tree: Tree) -> bool:
        return "dimensions" in tree

    def read_place(self, header: Header, container: Location) -> Place:
        """Return where the array of `header` says that it lies, or the groups around it, or BigDataViewer's XML."""
        parts = header.folder.parts[len(container.parts) :]
        parents = [read_attributes(container.joinpath(*parts[:n])) for n in range(len(parts))]
        place = read_place(header, parents)
        if place.voxel_size_nm is not None or not isinstance(container, Path):
            return place
        factors = read_factors(header, parents)
        return (factors and bigdataviewer.read_n5_place(container, "/".join(parts), factors)) or place


def write_group(folder: Location, multiscale: Multiscale, own: Tree, is_incomplete: bool) -> None:
    """Write what n5-viewer, neuroglancer and COSEM's readers look for in a group of levels and in their arrays."""
    for level in multiscale.levels:
        merge_json(folder / level.key / FILE, array_attributes(multiscale, level))
    new = group_attributes(multiscale) | plain(own)
    merge_json(folder / FILE, ome.named(new, is_incomplete=is_incomplete))


def place_attributes(where: Place) -> Tree:
    """Return the attributes of a new array that say its place, x first."""
    return {name: value[::-1] for name, value in stated_place(where).items()}


N5 = Format(
    name="n5",
    title="N5",
    row=ReadRow("N5", f"codecs {', '.join(CODECS)}; also in a [zip](#zips)", "N5-viewer, COSEM"),
    suffixes=(".n5",),
    folders=FolderReader(read_header, read_attributes, read_datasets, usual_file=FILE),
    arrays=N5Folders(),
    write_group=write_group,
    writing=Writing(("gzip", "zstd", "raw"), default_key=DEFAULT_KEY, place_attributes=place_attributes),
)
