"""Valid small volumes of every format that volpipe reads, as the bytes of their files, and the voxels in them.

Not here: what is done to them (mutations). Libraries other than volpipe write all but the groups of levels.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

SHAPE, CHUNK = (6, 10, 12), (3, 5, 6)
Tree = dict[str, Any]  # Any: JSON
CODECS: Mapping[str, Callable[[bytes], bytes]] = {
    "raw": bytes,
    "gzip": partial(gzip.compress, mtime=0),
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@dataclass(frozen=True)
class Original:
    """A valid volume.

    Attributes:
        name: such as "n5 gzip"; its first word is the format.
        location: of the volume, counted from the folder that it is laid down in.
        files: their bytes, by name.
        data: all voxels, in stored axes.
        chunks: shape of the chunks that are files of their own, None where they are not.
    """

    name: str
    location: str
    files: Mapping[str, bytes] = field(repr=False)
    data: np.ndarray = field(repr=False)
    chunks: tuple[int, ...] | None = None

    @property
    def format(self) -> str:
        return self.name.partition(" ")[0]


def voxels(dtype: str = "uint16") -> np.ndarray:
    """Return noise over a ramp, (z, y, x): no two chunks alike, and no zeros."""
    noise = np.random.default_rng(1).integers(1, 60, SHAPE)
    return (noise + np.arange(SHAPE[0])[:, None, None] * 30).astype(dtype)


def _n5(folder: Path, codec: str) -> None:
    """Write an N5 array by the letter of the specification; blosc and zstd through numcodecs."""
    import numcodecs

    more = {"blosc": numcodecs.Blosc("lz4", 5).encode, "zstd": numcodecs.Zstd(3).encode}
    settings: Tree = {"cname": "lz4", "clevel": 5, "shuffle": 1} if codec == "blosc" else {}
    data = voxels()
    metadata = {
        "dimensions": SHAPE[::-1],
        "blockSize": CHUNK[::-1],
        "dataType": "uint16",
        "compression": {"type": codec, **settings},
        "resolution": [4, 4, 40],
        "offset": [1, 2, 3],
    }
    (folder / "v.n5/a").mkdir(parents=True)
    (folder / "v.n5/attributes.json").write_text('{"n5": "2.0.0"}')
    (folder / "v.n5/a/attributes.json").write_text(json.dumps(metadata))
    for index in np.ndindex(*(n // c for n, c in zip(SHAPE, CHUNK, strict=True))):
        part = data[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, CHUNK, strict=True))]
        head = np.array([0, 3], ">u2").tobytes() + np.array(CHUNK[::-1], ">u4").tobytes()
        file = folder.joinpath("v.n5/a", *map(str, reversed(index)))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(head + bytes((CODECS.get(codec) or more[codec])(part.astype(">u2").tobytes())))


def _zarr(folder: Path, version: Literal[2, 3], **settings: Any) -> None:  # Any: zarr-python's own
    import zarr

    path = str(folder / "v.zarr")
    array = zarr.create_array(path, shape=SHAPE, chunks=CHUNK, dtype="uint16", zarr_format=version, **settings)
    array.attrs["transform"] = {"axes": ["z", "y", "x"], "scale": [40, 4, 4], "units": ["nm"] * 3}
    array[...] = voxels()


def _zarr2(folder: Path, codec: str) -> None:
    import numcodecs

    made = {
        "zlib": numcodecs.Zlib(1), "gzip": numcodecs.GZip(1), "bz2": numcodecs.BZ2(1), "lz4": numcodecs.LZ4(),
        "blosc": numcodecs.Blosc("lz4", 5), "zstd": numcodecs.Zstd(3), "lzma": numcodecs.LZMA(),
    }  # fmt: skip
    if codec == "delta":
        _zarr(folder, 2, compressors=numcodecs.Blosc("zstd", 3), filters=[numcodecs.Delta("<u2"), numcodecs.Shuffle(2)])
    else:
        _zarr(folder, 2, compressors=made.get(codec))


def _zarr3(folder: Path, codec: str) -> None:
    from zarr import codecs

    made = {
        "gzip": codecs.GzipCodec(), "zstd": codecs.ZstdCodec(level=1, checksum=True), "blosc": codecs.BloscCodec(),
        "crc32c": codecs.Crc32cCodec(),
    }  # fmt: skip
    if codec == "shards":
        _zarr(folder, 3, shards=SHAPE, compressors=[made["zstd"]])
    elif codec == "transposed":
        _zarr(folder, 3, filters=[codecs.TransposeCodec(order=(2, 0, 1))], compressors=[made["gzip"]])
    else:
        _zarr(folder, 3, compressors=[made[codec]] if codec in made else [])


def _levels(folder: Path, format: str) -> None:
    """Write a group of two levels with volpipe's own metadata."""
    from volpipe.geometry.grid import Box
    from volpipe.volumes.formats.container import folders_of
    from volpipe.volumes.volume import ArraySpec, Level, Multiscale, create_array, create_multiscale, open_writer

    data = voxels()
    path = folder / ("v.n5" if format == "n5" else "v.zarr")
    for level, part in enumerate((data, data[::2, ::2, ::2])):
        spec = ArraySpec(part.shape, part.dtype, CHUNK)
        create_array(path, f"s{level}", spec, folders_of(format).name)
        open_writer(path, f"s{level}").write(Box.from_shape(part.shape), part)
    levels = (Level("s0"), Level("s1", (2.0, 2.0, 2.0)))
    create_multiscale(path, Multiscale(levels, voxel_size_nm=(40.0, 4.0, 4.0)), format=format)


def _tiff(folder: Path, kind: str) -> None:
    import tifffile

    settings: dict[str, Tree] = {
        "plain": {"photometric": "minisblack", "rowsperstrip": 3},
        "imagej": {"imagej": True, "metadata": {"axes": "ZYX", "spacing": 40}, "resolution": (1 / 4, 1 / 4)},
        "ome": {"ome": True, "metadata": {"axes": "ZYX", "PhysicalSizeZ": 40, "PhysicalSizeZUnit": "nm"}},
        "big": {"bigtiff": True, "compression": "zstd", "byteorder": ">"},
        "deflate": {"compression": "zlib", "predictor": True, "rowsperstrip": 4},
        "lzw": {"compression": "lzw", "rowsperstrip": 5},
        "tiles": {"tile": (16, 16), "compression": "zlib"},
        "packbits": {"compression": "packbits"},
        "jpeg": {"compression": "jpeg", "tile": (16, 16)},
        "png": {"compression": "png", "tile": (16, 16)},
        "jpeg2000": {"compression": "jpeg2000", "tile": (16, 16)},
        "webp": {"compression": "webp", "photometric": "rgb", "tile": (16, 16)},
    }  # fmt: skip
    data = voxels("uint8" if kind == "jpeg" else "uint16")
    if kind == "slices":
        (folder / "v").mkdir()
        for z, plane in enumerate(data):
            tifffile.imwrite(folder / f"v/s_{z}.tif", plane, compression="zlib")
    elif kind == "pyramid":
        with tifffile.TiffWriter(folder / "v.tif", ome=True) as tif:
            tif.write(data, subifds=1, tile=(16, 16), metadata={"axes": "ZYX"})
            tif.write(data[:, ::2, ::2], subfiletype=1, tile=(16, 16))
    elif kind == "webp":
        tifffile.imwrite(folder / "v.tif", np.stack([voxels("uint8")[0]] * 3, -1), **settings[kind])
    else:
        tifffile.imwrite(folder / "v.tif", data, **settings[kind])


def _hdf5(folder: Path, kind: str) -> None:
    import h5py

    settings: dict[str, Tree] = {
        "contiguous": {},
        "gzip": {"chunks": CHUNK, "compression": "gzip"},
        "checked": {"chunks": CHUNK, "shuffle": True, "fletcher32": True, "compression": "lzf"},
        "plain": {"chunks": CHUNK},
        "growing": {"chunks": CHUNK, "maxshape": (None, 10, 12)},
        "latest": {"chunks": CHUNK, "compression": "gzip"},
        "external": {"external": [("part.raw", 0, h5py.h5f.UNLIMITED)]},
    }
    with h5py.File(folder / "v.h5", "w", libver="latest" if kind == "latest" else None) as file:
        if kind == "virtual":
            file.create_dataset("parts", data=voxels()[:3])
            layout = h5py.VirtualLayout(SHAPE, "uint16")
            layout[:3] = h5py.VirtualSource(file["parts"])
            layout[3:] = h5py.VirtualSource("other.h5", "parts", (3, *SHAPE[1:]))
            file.create_virtual_dataset("volumes/raw", layout)
        else:
            place = str(folder)  # the file of an external dataset is counted from here
            if kind == "external":
                settings[kind]["external"] = [(f"{place}/part.raw", 0, h5py.h5f.UNLIMITED)]
            raw = file.create_dataset("volumes/raw", SHAPE, "uint16", **settings[kind])
            raw[...] = voxels()
            raw.attrs["resolution"] = (40.0, 4.0, 4.0)
            raw.dims[0].label = "z"
    if kind == "virtual":
        with h5py.File(folder / "other.h5", "w") as file:
            file.create_dataset("parts", data=voxels()[3:])


def _mrc(folder: Path, kind: str) -> None:
    import mrcfile

    with mrcfile.new(folder / "v.mrc", overwrite=True) as file:
        file.set_data(voxels("float32" if kind == "float" else "uint16"))
        file.voxel_size = (4, 4, 40)
        if kind == "extended":
            file.set_extended_header(np.zeros(200, "u1"))


def _npy(folder: Path, kind: str) -> None:
    data = voxels(">u2" if kind == "fortran" else "uint16")
    np.save(folder / "v.npy", np.asfortranarray(data) if kind == "fortran" else data)


def _timeless(text: bytes) -> bytes:
    """Return `text` without the time (MRC) and the random name (OME) that its writer gave it: a seed must reproduce."""
    text = re.sub(rb"urn:uuid:[-0-9a-f]{36}", b"urn:uuid:" + b"0" * 36, text)
    return re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", b"2000-01-01 00:00:00", text)


MAKERS: Mapping[str, tuple[str, Callable[[Path, str], None], tuple[str, ...]]] = {
    "n5": ("v.n5/a", _n5, ("raw", "gzip", "zstd", "bzip2", "xz", "blosc")),
    "zarr2": ("v.zarr", _zarr2, ("raw", "zlib", "gzip", "zstd", "bz2", "blosc", "lz4", "lzma", "delta")),
    "zarr3": ("v.zarr", _zarr3, ("raw", "crc32c", "gzip", "zstd", "blosc", "transposed", "shards")),
    "levels": ("", _levels, ("ome-zarr-0.5", "ome-zarr-0.6", "ome-zarr-0.4", "n5", "zarr2")),
    "tiff": ("v.tif", _tiff, ("plain", "imagej", "ome", "big", "deflate", "lzw", "tiles", "packbits", "jpeg", "png",
                              "jpeg2000", "webp", "pyramid", "slices")),
    "hdf5": ("v.h5", _hdf5, ("contiguous", "gzip", "checked", "plain", "growing", "latest", "virtual")),
    "mrc": ("v.mrc", _mrc, ("plain", "float", "extended")),
    "npy": ("v.npy", _npy, ("plain", "fortran")),
}  # fmt: skip
NAMES = tuple(f"{format} {kind}" for format, (_, _, kinds) in MAKERS.items() for kind in kinds)


@cache
def make(name: str) -> Original:
    """Return the original called `name`, made afresh and read as it is; it is the same in every process."""
    from volpipe.volumes.volume import open_volume

    format, kind = name.split(" ")
    location, write, _ = MAKERS[format]
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), kind)
        location = location or ("v.n5" if kind == "n5" else "v.zarr")
        location = "v" if kind == "slices" else location
        place = Path(folder)
        paths = (path for path in sorted(place.rglob("*")) if path.is_file())
        files = {str(path.relative_to(place)): _timeless(path.read_bytes()) for path in paths}
        volume = open_volume(place / location, "volumes/raw" if format == "hdf5" else None)
        data = volume.open()[...]
    if name not in ("tiff jpeg", "tiff webp"):
        assert np.array_equal(data.reshape(SHAPE), voxels()), name
    own_files = format in ("n5", "zarr2", "zarr3", "levels") and volume.shards is None
    return Original(name, location, files, data, volume.chunks if own_files else None)
