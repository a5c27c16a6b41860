"""Zarr v2 and v3: read and check metadata, create arrays, and read odd arrays through zarr-python.

Not here: reading voxels in the ordinary way (tensorstore), or what OME-Zarr adds (ome). The only file that imports
zarr. Specifications: zarr-specs.readthedocs.io, v2 and v3.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.attributes import read_axes, value_notes
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
from volpipe.volumes.formats.n5 import cosem_multiscale, cosem_transform
from volpipe.volumes.formats.ome import ListedLevel
from volpipe.volumes.storage import decoded_size, paths
from volpipe.volumes.storage.chunk_files import ChunkFiles, ChunkSource
from volpipe.volumes.storage.metadata import (
    MAX_JSON_BYTES,
    MAX_RANK,
    ArraySpec,
    ChunkCodec,
    ChunkScheme,
    Header,
    IndexPlace,
    Multiscale,
    Style,
    Tree,
    mapping,
    merge_json,
    plain,
    read_json,
    voxels,
)
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.tensorstore import Index, StoredArray

if TYPE_CHECKING:
    import zarr

INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
DTYPES = ("bool", *INTEGERS, "float16", "float32", "float64")
CODECS_V2: Mapping[str, tuple[str, ...]] = {
    "zlib": ("level",),
    "gzip": ("level",),
    "bz2": ("level",),
    "zstd": ("level",),
    "blosc": ("cname", "clevel", "shuffle", "blocksize"),
}  # the settings that tensorstore knows
CODECS_V3: Mapping[str, tuple[str, ...]] = {
    "bytes": ("endian",),
    "transpose": ("order",),
    "crc32c": (),
    "gzip": ("level",),
    "zstd": ("level", "checksum"),
    "blosc": ("typesize", "cname", "clevel", "shuffle", "blocksize"),
    "sharding_indexed": ("chunk_shape", "codecs", "index_codecs", "index_location"),
}
KEYS_V3 = ("zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding", "fill_value", "codecs")
OTHER_KEYS_V3 = ("attributes", "dimension_names", "storage_transformers", "consolidated_metadata")
# Filters of v2 that are read; the rest of numcodecs makes objects of bytes (pickle above all), and is code.
FILTERS = ("adler32", "astype", "bitround", "crc32", "crc32c", "delta", "fixedscaleoffset", "fletcher32",
           "jenkins_lookup3", "packbits", "quantize", "shuffle")  # fmt: skip
FILTER_DTYPE = re.compile(r"[<>|=]?(b1|bool|[iuf][1248]|u?int(8|16|32|64)|float(16|32|64))")
PROBED_NAMES = 1000
SHARDING, CHECKSUM = "sharding_indexed", "crc32c"  # codecs


class ZarrScheme(ChunkScheme):
    """Chunks in C order, by one of the names that programs have given them."""

    def styles(self, header: Header) -> tuple[Style, ...]:
        return Style("", "."), Style("", "/"), Style("c/", "/"), Style("c.", ".")


class Zarr2Scheme(ZarrScheme):
    """A compressor, and the numbers of a chunk in its name."""

    driver = "zarr"

    def style(self, header: Header) -> Style:
        return Style("", str(header.known["dimension_separator"]))

    def codec(self, header: Header) -> ChunkCodec:
        return ChunkCodec(str((header.known["compressor"] or {}).get("id", "")))


class Zarr3Scheme(ZarrScheme):
    """A chain of codecs, the last of which may put chunks into shards, and names with a prefix or without."""

    driver = "zarr3"

    def style(self, header: Header) -> Style:
        encoding = header.known["chunk_key_encoding"]
        settings = encoding.get("configuration") or {}
        if encoding.get("name") == "v2":
            return Style("", str(settings.get("separator", ".")))
        separator = str(settings.get("separator", "/"))
        return Style(f"c{separator}", separator)

    def codec(self, header: Header) -> ChunkCodec:
        codecs = header.known.get("codecs", ())
        while codecs and codecs[-1]["name"] == SHARDING:
            codecs = codecs[-1]["configuration"]["codecs"]
        names = [codec["name"] for codec in codecs]
        others = [name for name in names if name != CHECKSUM]
        return ChunkCodec(others[-1] if others else "", is_last=names[-1:] != [CHECKSUM])

    def index_place(self, header: Header) -> IndexPlace | None:
        settings = _shard_settings(header)
        if settings is None:
            return None
        has_checksum = len(settings["index_codecs"]) == 2
        return IndexPlace(settings.get("index_location", "end") == "end", has_checksum)

    def without_shards(self, header: Header) -> Header:
        settings = _shard_settings(header)
        if settings is None:
            return header
        grid = {"name": "regular", "configuration": {"chunk_shape": list(header.chunks)}}
        return replace(header, shards=None, known={**header.known, "chunk_grid": grid, "codecs": settings["codecs"]})

    def count_folders(self, counts: Sequence[int]) -> int:
        return 1 + super().count_folders(counts)


SCHEME_V2, SCHEME_V3 = Zarr2Scheme(), Zarr3Scheme()


def _shard_settings(header: Header) -> Tree | None:
    """Return the settings of an array's shards, None where there are none, or their index is of no usual kind."""
    codecs = header.known.get("codecs") or []
    if len(codecs) != 1 or codecs[0]["name"] != SHARDING:
        return None
    settings: Tree = codecs[0]["configuration"]
    inner = [codec["name"] for codec in settings["codecs"]]
    index = settings.get("index_codecs") or []
    if [codec["name"] for codec in index] not in (["bytes"], ["bytes", CHECKSUM]) or SHARDING in inner:
        return None
    return settings if (index[0].get("configuration") or {}).get("endian", "little") == "little" else None


def read_header(folder: Location) -> Header | None:
    """Return the header of the Zarr array at `folder`, v3 before v2, None where there is none.

    Raises:
        VolumeError: its metadata is broken, or says what volpipe cannot read.
    """
    tree = read_json(folder / "zarr.json")
    if tree is not None and tree.get("node_type") == "array":
        return _header_v3(tree, folder)
    tree = read_json(folder / ".zarray")
    return None if tree is None else _header_v2(tree, folder)


def _header_v2(tree: Tree, folder: Location) -> Header:
    file = folder / ".zarray"
    if tree.get("zarr_format") != 2:
        raise VolumeError(f"{file}: zarr_format {tree.get('zarr_format')!r} is not 2")
    shape = voxels(tree.get("shape"), "shape", file)
    chunks = voxels(tree.get("chunks"), "chunks", file, rank=len(shape))
    stored, dtype = _dtype_v2(tree.get("dtype"), file)
    compressor = mapping(tree.get("compressor"), "compressor", file)
    attributes = read_json(folder / ".zattrs") or {}
    known = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": chunks,
        "dtype": stored.str,
        "order": tree.get("order", "C"),
        "filters": None,
        "dimension_separator": _separator(tree, folder, len(shape)),
        "compressor": _known_settings(compressor, CODECS_V2.get(str(compressor.get("id")), ()), "id") or None,
        "fill_value": _stored_fill(tree.get("fill_value"), stored),
    }
    axes, odd_axes = read_axes(attributes, len(shape))
    unsupported = ""
    if tree.get("filters"):
        unsupported = "filters"
    if compressor and str(compressor.get("id")) not in CODECS_V2:
        unsupported = f"compressor {compressor.get('id')!r}"
    return Header(
        folder=folder,
        format="zarr2",
        shape=shape,
        dtype=dtype,
        chunks=chunks,
        codec=_label(str(compressor.get("id", "raw")), compressor),
        attributes=attributes,
        known=plain(known),
        axes=axes,
        odd_axes=odd_axes,
        unsupported=unsupported,
        notes=value_notes(attributes),
        scheme=SCHEME_V2,
    )


def _dtype_v2(name: object, file: Location) -> tuple[np.dtype, np.dtype]:
    """Return the dtype as stored, and in native byte order with bool as uint8."""
    if not isinstance(name, str) or not re.fullmatch(r"[<>|]?(b1|[iu][1248]|f[248])", name):
        raise VolumeError(f"{file}: dtype {name!r} is not supported; volpipe reads integers, floats and bool")
    stored = np.dtype(name)
    return stored, np.dtype(np.uint8) if stored.kind == "b" else stored.newbyteorder("=")


def _stored_fill(value: object, stored: np.dtype) -> object:
    return bool(value) if stored.kind == "b" and isinstance(value, int | float) else value


def _separator(tree: Tree, folder: Location, rank: int) -> str:
    """Return "." or "/", whichever parts the numbers in the names of chunks.

    Old nested stores say nothing and nest all the same; read by the letter of the specification they would show
    nothing but fill, so the names are looked at.
    """
    separator = tree.get("dimension_separator")
    if separator in (".", "/"):
        return str(separator)
    if separator is not None:
        raise VolumeError(f"{folder / '.zarray'}: dimension_separator {separator!r} is neither '.' nor '/'")
    if rank == 1:
        return "."
    names = paths.list_names(folder, PROBED_NAMES)
    nested = any(name.isdecimal() for name in names)
    flat = any("." in name and name.replace(".", "").isdecimal() for name in names)
    return "/" if nested and not flat else "."


def _known_settings(settings: Tree, names: tuple[str, ...], *more: str) -> Tree:
    return {key: settings[key] for key in (*more, *names) if key in settings}


def _label(name: str, settings: Tree) -> str:
    level = settings.get("level", settings.get("clevel", ""))
    return " ".join(word for word in (name, str(settings.get("cname", "")), str(level)) if word)


def _header_v3(tree: Tree, folder: Location) -> Header:
    file = folder / "zarr.json"
    _refuse_extensions(tree, file)
    shape = voxels(tree.get("shape"), "shape", file)
    if tree.get("data_type") not in DTYPES:
        raise VolumeError(
            f"{file}: data_type {tree.get('data_type')!r} is not supported; volpipe reads {', '.join(DTYPES)}"
        )
    grid = mapping(tree.get("chunk_grid"), "chunk_grid", file)
    if grid.get("name") != "regular":
        raise VolumeError(f"{file}: chunk_grid {grid.get('name')!r} is not supported; volpipe reads regular grids")
    outer = voxels(
        mapping(grid.get("configuration"), "chunk_grid", file).get("chunk_shape"), "chunk_shape", file, rank=len(shape)
    )
    _check_encoding(tree.get("chunk_key_encoding"), file)
    codecs = _Codecs(tree.get("codecs"), outer, file)
    stored = np.dtype(tree["data_type"])
    known = {key: tree[key] for key in KEYS_V3 if key in tree}
    known |= {"codecs": codecs.known, "fill_value": _stored_fill(tree.get("fill_value", 0), stored)}
    attributes = mapping(tree.get("attributes"), "attributes", file)
    axes, odd_axes = read_axes(attributes, len(shape), tree.get("dimension_names"))
    return Header(
        folder=folder,
        format="zarr3",
        shape=shape,
        dtype=np.dtype(np.uint8) if stored.kind == "b" else stored,
        chunks=codecs.chunks,
        shards=outer if codecs.sharded else None,
        codec=codecs.label,
        axes=axes,
        odd_axes=odd_axes,
        known=plain(known),
        attributes=attributes,
        unsupported=codecs.unsupported,
        notes=value_notes(attributes),
        scheme=SCHEME_V3,
    )


def _refuse_extensions(tree: Tree, file: Location) -> None:
    if tree.get("zarr_format") != 3:
        raise VolumeError(f"{file}: zarr_format {tree.get('zarr_format')!r} is not 3")
    if tree.get("storage_transformers"):
        raise VolumeError(f"{file}: storage_transformers are not supported")
    for key, value in tree.items():
        optional = isinstance(value, dict) and value.get("must_understand") is False
        if key not in KEYS_V3 + OTHER_KEYS_V3 and not optional:
            raise VolumeError(f"{file}: {key!r} is an extension that volpipe does not know")


def _check_encoding(value: object, file: Location) -> None:
    """Raise unless `value` says how chunks are named; it has no default."""
    encoding = mapping(value, "chunk_key_encoding", file)
    separator = mapping(encoding.get("configuration"), "chunk_key_encoding", file).get("separator", "/")
    if encoding.get("name") not in ("default", "v2") or separator not in ("/", "."):
        raise VolumeError(f"{file}: chunk_key_encoding {str(value)[:60]} is neither default nor v2, with '/' or '.'")


class _Codecs:
    """The chain of codecs of a v3 array: the part that tensorstore knows, the shape of its chunks, and its name."""

    def __init__(self, entries: object, outer: tuple[int, ...], file: Location) -> None:
        self.chunks = outer
        self.sharded = False
        self.label = "raw"
        self.unsupported = ""
        self.known = self._read_chain(entries, file, 0)

    def _read_chain(self, entries: object, file: Location, depth: int) -> list[Tree]:
        if not isinstance(entries, list) or not entries or depth > MAX_RANK:
            raise VolumeError(f"{file}: codecs {str(entries)[:60]} is not a list of codecs")
        order = list(range(len(self.chunks)))
        return [self._read_one(entry, order, file, depth) for entry in entries]

    def _read_one(self, codec: object, order: list[int], file: Location, depth: int) -> Tree:
        entry = {"name": codec} if isinstance(codec, str) else mapping(codec, "a codec", file)
        name = str(entry.get("name"))
        settings = mapping(entry.get("configuration"), f"configuration of codec {name}", file)
        if name not in CODECS_V3:
            self.unsupported = f"codec {name!r}"
            self.label = _label(name, settings)
            return entry
        known = _known_settings(settings, CODECS_V3[name])
        if name == "transpose":
            order[:] = self._transposed(known.get("order"), order, file)
        elif name == SHARDING:
            known["codecs"] = self._enter_shard(known, order, file, depth)
        elif name not in ("bytes", "crc32c"):
            self.label = _label(name, settings)
        return {"name": name, "configuration": known} if known else {"name": name}

    def _transposed(self, permutation: object, order: list[int], file: Location) -> list[int]:
        """Return the array's axis of each encoded axis, after a transposition; "C" and "F" are from drafts."""
        if permutation in ("C", "F"):
            return order if permutation == "C" else order[::-1]
        if not isinstance(permutation, list) or sorted(map(str, permutation)) != sorted(map(str, order)):
            raise VolumeError(f"{file}: transpose order {permutation!r} does not name each of {len(order)} axes once")
        return [order[i] for i in permutation]

    def _enter_shard(self, settings: Tree, order: list[int], file: Location, depth: int) -> list[Tree]:
        inner = voxels(settings.get("chunk_shape"), "chunk_shape", file, rank=len(order))
        chunks = [0] * len(order)
        for axis, n in zip(order, inner, strict=True):
            chunks[axis] = n
        if any(outer % n for outer, n in zip(self.chunks, chunks, strict=True)):
            raise VolumeError(f"{file}: shard {self.chunks} is not a multiple of chunk {tuple(chunks)}")
        self.chunks = tuple(chunks)
        self.sharded = True
        return self._read_chain(settings.get("codecs"), file, depth + 1)


def read_attributes(folder: Location) -> Tree:
    """Return the attributes of the Zarr group at `folder`, {} where there is none."""
    tree = read_json(folder / "zarr.json")
    if tree is not None:
        return mapping(tree.get("attributes"), "attributes", folder / "zarr.json")
    return read_json(folder / ".zattrs") or {}


def consolidated_arrays(folder: Location) -> list[str] | None:
    """Return the sorted keys of the arrays that the group at `folder` says it holds; None where it does not say."""
    metadata = mapping(
        (read_json(folder / "zarr.json") or {}).get("consolidated_metadata"), "consolidated_metadata", folder
    )
    nodes = mapping(metadata.get("metadata"), "consolidated_metadata", folder)
    if nodes:
        named = (key for key, node in nodes.items() if isinstance(node, dict) and node.get("node_type") == "array")
        return sorted(key for key in named if ".." not in key.split("/"))
    files_v2 = mapping((read_json(folder / ".zmetadata") or {}).get("metadata"), "metadata", folder / ".zmetadata")
    keys = (key.removesuffix("/.zarray") for key in files_v2 if key.endswith("/.zarray"))
    return sorted(key for key in keys if ".." not in key.split("/")) or None


def read_datasets(folder: Location) -> tuple[ListedLevel, ...] | None:
    """Return the levels that the `multiscales` of the Zarr group at `folder` name, None where it has none."""
    return ome.read_datasets(read_attributes(folder), folder)


def _json_number(spec: ArraySpec) -> int | float | str:
    """Return the fill value as both versions write it: NaN and the infinities have names."""
    if spec.dtype.kind in "iu":
        return int(spec.fill)
    value = float(spec.fill)
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


class ZarrArray:
    """An array that tensorstore does not know, read through zarr-python; it cannot be written to."""

    def __init__(self, header: Header) -> None:
        outermost = _outermost(header)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of codecs that are in no specification: that is why we are here
                self._array = _open_array(header, outermost)
        except Exception as error:  # zarr-python lets through whatever odd metadata make Python raise
            why = header.unsupported or "its metadata"
            raise VolumeError(f"{header.folder}: {why} is not supported: {error}") from error

    def read(self, index: Index) -> np.ndarray:
        try:
            data = np.asarray(self._array[index])
        except VolumeError:
            raise
        except Exception as error:  # as above, and each codec has errors of its own
            raise VolumeError(f"{self._array.path or self._array.store}: {error}") from error
        return np.asarray(data, data.dtype.newbyteorder("="), order="C")


def _outermost(header: Header) -> str:
    """Return the codec that a chunk's bytes are in, "" for none; raise unless zarr-python can be trusted with all."""
    if header.shards:
        raise VolumeError(f"{header.folder}: {header.unsupported or 'its metadata'} is not supported in shards")
    if header.scheme == SCHEME_V2:
        tree = read_json(header.folder / ".zarray") or {}
        filters, last = tree.get("filters"), tree.get("compressor")
    else:
        tree = read_json(header.folder / "zarr.json") or {}
        chain = [_as_v2(entry) for entry in tree.get("codecs") or []]
        filters = [entry for entry in chain if entry["id"] not in decoded_size.COMPRESSORS + tuple(CODECS_V3)]
        last = chain[-1] if chain and chain[-1]["id"] in decoded_size.COMPRESSORS else None
        if any(entry["id"] in decoded_size.COMPRESSORS for entry in chain[:-1]):
            raise VolumeError(f"{header.folder}: codecs after a compressor are not supported")
    refused = _unsupported_codec(filters, last)
    if refused:
        known = ", ".join(decoded_size.COMPRESSORS + FILTERS)
        raise VolumeError(f"{header.folder}: {refused} is not supported; volpipe reads {known}")
    return str(last["id"]) if isinstance(last, dict) and last else ""


def _unsupported_codec(filters: object, compressor: object) -> str:
    """Return the first codec of a Zarr v2 array that is not read, "" where all are."""
    for entry in filters if isinstance(filters, list) else []:
        codec = entry if isinstance(entry, dict) else {}
        if codec.get("id") not in FILTERS:
            return f"filter {codec.get('id')!r}"
        types = {key: value for key, value in codec.items() if key.endswith(("dtype", "astype"))}
        for key, value in types.items():
            if value is not None and not FILTER_DTYPE.fullmatch(str(value)):
                return f"filter {codec['id']!r} with {key} {str(value)[:60]!r}"
    codec = compressor if isinstance(compressor, dict) else {}
    if codec and codec.get("id") not in decoded_size.COMPRESSORS:
        return f"compressor {codec.get('id')!r}"
    if codec.get("id") == "lzma" and codec.get("format", 1) not in (0, 1, 2):
        return "compressor 'lzma' without a header"
    return ""


def _as_v2(entry: object) -> Tree:
    """Return a codec of v3 as v2 writes it, such as "numcodecs.delta" as delta."""
    codec: Tree = entry if isinstance(entry, dict) else {"name": entry}
    settings = codec.get("configuration")
    name = str(codec.get("name")).removeprefix("numcodecs.")
    return (settings if isinstance(settings, dict) else {}) | {"id": name}


def _open_array(header: Header, outermost: str) -> zarr.Array[Any]:  # Any: of either version's metadata
    import asyncio

    import zarr
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import Buffer, BufferPrototype
    from zarr.storage import MemoryStore, WrapperStore

    num_bytes = math.prod(header.chunks) * header.dtype.itemsize
    files, source = ChunkFiles(header), ChunkSource(header)

    def read(key: str) -> bytes | None:
        place = files.parse(key)
        if place is None:
            return paths.read(header.folder / key, MAX_JSON_BYTES)
        part = source.fetch(place[0])
        if part is None:
            return None
        decoded_size.check(part.data, outermost, num_bytes)  # before a decoder takes the memory
        return part.data

    class ArrayStore(WrapperStore[Any]):  # Any: no other store is asked
        """The files of the array, its chunks by whatever name they have."""

        async def get(
            self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
        ) -> Buffer | None:
            data = await asyncio.to_thread(read, key)
            return None if data is None else prototype.buffer.from_bytes(data)

    return zarr.open_array(ArrayStore(MemoryStore(read_only=True)), mode="r")


class Zarr2Folders(ArrayFolders):
    """A file for what an array is, or that there is a group, and another for the attributes of both."""

    name = "zarr2"
    scheme = SCHEME_V2
    marks = (".zarray", ".zgroup")
    metadata_file = ".zarray"
    attributes_file = run_file = ".zattrs"
    metadata_names = (".zarray", ".zattrs", ".zgroup")
    num_files = 2

    def documents(self, spec: ArraySpec) -> dict[str, Tree]:
        if spec.shards:
            raise VolumeError(f"Zarr v2 has no shards; leave out shard {spec.shards} or use Zarr v3")
        compressor = None if spec.codec == "raw" else {"id": spec.codec, "level": spec.codec_level}
        array = {
            "zarr_format": 2,
            "shape": spec.shape,
            "chunks": spec.chunks,
            "dtype": spec.dtype.newbyteorder("<").str,
            "compressor": compressor,
            "fill_value": _json_number(spec),
            "order": "C",
            "filters": None,
            "dimension_separator": "/",
        }
        return {".zarray": plain(array), ".zattrs": plain({"_ARRAY_DIMENSIONS": spec.axes, **spec.attributes})}

    def group_documents(self, *, is_root: bool) -> dict[str, Tree]:
        return {".zgroup": {"zarr_format": 2}}

    def open_otherwise(self, header: Header) -> StoredArray | None:
        return ZarrArray(header)


class Zarr3Folders(ArrayFolders):
    """One file for an array or a group, which holds its attributes too."""

    name = "zarr3"
    scheme = SCHEME_V3
    marks = ("zarr.json",)
    metadata_file = attributes_file = run_file = "zarr.json"
    metadata_names = ("zarr.json",)
    is_sharded = is_streamed = True

    def documents(self, spec: ArraySpec) -> dict[str, Tree]:
        endian = {} if spec.dtype.itemsize == 1 else {"configuration": {"endian": "little"}}
        codecs: list[Tree] = [{"name": "bytes"} | endian]
        if spec.codec == "zstd":
            codecs.append({"name": "zstd", "configuration": {"level": spec.codec_level, "checksum": True}})
        elif spec.codec == "gzip":
            codecs.append({"name": "gzip", "configuration": {"level": spec.codec_level}})
        else:
            codecs.append({"name": "crc32c"})  # so that a damaged chunk is noticed with every codec
        if spec.shards:
            index: list[Tree] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            sharding = {"chunk_shape": spec.chunks, "codecs": codecs, "index_codecs": index, "index_location": "end"}
            codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        array = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": spec.shape,
            "data_type": spec.dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": spec.shards or spec.chunks}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": _json_number(spec),
            "codecs": codecs,
            "dimension_names": spec.axes,
            "attributes": dict(spec.attributes),
        }
        return {"zarr.json": plain(array)}

    def group_documents(self, *, is_root: bool) -> dict[str, Tree]:
        return {"zarr.json": {"zarr_format": 3, "node_type": "group", "attributes": {}}}

    def attributes_of(self, tree: Tree) -> Tree:
        return tree.get("attributes") or {}

    def with_attributes(self, tree: Tree, attributes: Tree) -> Tree:
        return tree | {"attributes": attributes}

    def open_otherwise(self, header: Header) -> StoredArray | None:
        return ZarrArray(header)


def write_group(folder: Location, multiscale: Multiscale, own: Tree, is_incomplete: bool) -> None:
    """Write what COSEM's readers look for in a group of levels and in their arrays, of Zarr v2."""
    for level in multiscale.levels if multiscale.voxel_size_nm else ():
        merge_json(folder / level.key / ".zattrs", {"transform": cosem_transform(multiscale, level)})
    new = {"multiscales": [cosem_multiscale(multiscale)], **own}
    merge_json(folder / ".zattrs", ome.named(new, is_incomplete=is_incomplete))


FOLDERS = FolderReader(read_header, read_attributes, read_datasets, usual_file="zarr.json")
CODECS = ("zstd", "gzip", "raw")
WRITING = Writing(CODECS, default_key=DEFAULT_KEY, place_attributes=stated_place)
ZARR2 = Format("zarr2", folders=FOLDERS, arrays=Zarr2Folders(), write_group=write_group, writing=WRITING)
ZARR3 = Format(
    name="zarr3",
    title="Zarr",
    row=ReadRow(
        "Zarr v2 and v3 (sharded or not), OME-Zarr 0.4 to 0.6",
        "all codecs; also in a [zip](#zips) (`.ozx`)",
        "OME-NGFF, COSEM, WEBKNOSSOS (axes too)",
    ),
    folders=FOLDERS,
    arrays=Zarr3Folders(),
    writing=WRITING,
)
