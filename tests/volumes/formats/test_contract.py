"""One contract for all formats: a library that is not ours writes an array, and all that volpipe promises holds of it.

A format is added by one entry of BACKENDS; what is odd in one format alone has a file of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import imagecodecs
import mrcfile
import nibabel
import nrrd
import numpy as np
import pytest
import tensorstore
import tifffile
import z5py
import zarr
from arrays import AXES, invented, write_all
from boxes import MiB, boxes_of, check_reads, indexes, memory_of_boxes
from dm_files import write_dm
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numcodecs import Delta, Zstd
from PIL import Image
from volumes import noise, outcomes_of_damage

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box, Grid
from volpipe.volumes.file_states import FileStates
from volpipe.volumes.formats import precomputed
from volpipe.volumes.formats.container import METADATA_NAMES, read_header
from volpipe.volumes.storage.chunk_files import ChunkFiles
from volpipe.volumes.volume import ArraySpec, Reader, Volume, create_array, list_arrays, open_volume, open_writer

pytestmark = pytest.mark.usefixtures("_one_hdf5_process")

DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64")
ALL_DTYPES = (*DTYPES, "float16")


def write_n5(path: Path, data: np.ndarray) -> None:
    with z5py.N5File(str(path), "w") as file:
        file.create_dataset("raw", data=data, chunks=tuple(min(8, n) for n in data.shape), compression="gzip")


def zarr_writer(version: int, **choices: Any) -> Callable[[Path, np.ndarray], None]:  # Any: zarr-python's
    def write(path: Path, data: np.ndarray) -> None:
        zarr.create_array(str(path), data=data, **{"chunks": (8,) * data.ndim} | choices, zarr_format=version)

    return write


def precomputed_writer(**scale: Any) -> Callable[[Path, np.ndarray], None]:  # Any: JSON
    known = {"key": "s0", "chunk_size": [8, 8, 8], "encoding": "raw", "resolution": [4, 5, 6]} | scale

    def write(path: Path, data: np.ndarray) -> None:
        array = by_tensorstore(path, data.dtype.name, size=data.shape[::-1], voxel_offset=[10, 10, 0], **known)
        array[..., 0].write(data.T).result()

    return write


def jxl_writer(**scale: Any) -> Callable[[Path, np.ndarray], None]:  # Any: JSON
    """Return a writer of chunks in JPEG XL, in shards by tensorstore, which numbers chunks but knows no JPEG XL."""

    def write(path: Path, data: np.ndarray) -> None:
        precomputed_writer(**scale)(path, data)
        info = json.loads((path / "info").read_text())
        level, size, first = info["scales"][0], data.shape[::-1], [10, 10, 0]
        for file in (path / "s0").glob("*"):
            file.unlink()
        base = {"driver": "file", "path": f"{path}/s0/"}
        shards = {"driver": "neuroglancer_uint64_sharded", "base": base, "metadata": level.get("sharding")}
        store = tensorstore.KvStore.open(shards if "sharding" in level else base).result()
        bits = precomputed.axis_bits(size, [8, 8, 8])
        for place in np.ndindex(*(-(-n // 8) for n in size)):
            box = [(i * 8, min(i * 8 + 8, n)) for i, n in zip(place, size, strict=True)]
            voxels = data[tuple(slice(*span) for span in box[::-1])]
            name = "_".join(f"{a + f}-{b + f}" for (a, b), f in zip(box, first, strict=True))
            number = precomputed.morton(place, bits).to_bytes(8, "big")
            picture = imagecodecs.jpegxl_encode(voxels.reshape(-1, voxels.shape[2]), lossless=True)
            store.write(number if "sharding" in level else name, picture).result()
        level["encoding"] = "jxl"
        (path / "info").write_text(json.dumps(info))

    return write


def zip_writer(version: int, **choices: Any) -> Callable[[Path, np.ndarray], None]:  # Any: zarr-python's
    def write(path: Path, data: np.ndarray) -> None:
        with zarr.storage.ZipStore(path, mode="w") as store:
            zarr.create_array(store, data=data, **{"chunks": (8,) * data.ndim} | choices, zarr_format=version)

    return write


SHARDING = {"@type": precomputed.SHARDING, "hash": "identity", "preshift_bits": 1, "minishard_bits": 1, "shard_bits": 4,
            "minishard_index_encoding": "gzip", "data_encoding": "gzip"}  # fmt: skip


def by_tensorstore(folder: Path, dtype: str = "", **scale: Any) -> tensorstore.TensorStore:  # Any: JSON
    """Return the first level of a precomputed volume (x, y, z, channel), made where a `scale` is given."""
    spec = {"driver": "neuroglancer_precomputed", "kvstore": f"file://{folder}/"}
    made = {"multiscale_metadata": {"data_type": dtype, "num_channels": 1, "type": "image"}, "scale_metadata": scale}
    return tensorstore.open(spec | (made if scale else {}), create=bool(scale), open=not scale).result()


def write_hdf5(path: Path, data: np.ndarray) -> None:
    with h5py.File(path, "w") as file:
        file["raw"] = data


def tiff_writer(**choices: Any) -> Callable[[Path, np.ndarray], None]:  # Any: tifffile's
    def write(path: Path, data: np.ndarray) -> None:
        order = ">" if data.dtype.byteorder == ">" else "<"
        grey = {} if data.dtype == bool else {"photometric": "minisblack"}
        tifffile.imwrite(path, data, byteorder=order, metadata={"axes": "ZYX"}, **grey, **choices)

    return write


def write_slices(path: Path, data: np.ndarray) -> None:
    path.mkdir()
    for z, plane in enumerate(data):
        tifffile.imwrite(path / f"slice_{z}.tif", plane, photometric="minisblack", compression="zlib")


def write_pictures(path: Path, data: np.ndarray) -> None:
    path.mkdir()
    for z, plane in enumerate(data):
        Image.fromarray(plane).save(path / f"z{z}.png")


def write_mrc(path: Path, data: np.ndarray) -> None:
    with mrcfile.new(path, overwrite=True) as file:
        file.set_data(data)


def nifti_writer(image: Callable[..., Any], header: Callable[..., Any]) -> Callable[[Path, np.ndarray], None]:
    def write(path: Path, data: np.ndarray) -> None:  # Any: nibabel's classes
        made = header(endianness=">" if data.dtype.byteorder == ">" else "<")
        image(data.T, np.eye(4), made, dtype=data.dtype).to_filename(path)

    return write


def nrrd_writer(encoding: str) -> Callable[[Path, np.ndarray], None]:
    return lambda path, data: nrrd.write(str(path), data, {"encoding": encoding}, index_order="C")


def headerless_key(data: np.ndarray) -> str:
    order = ">" if data.dtype.byteorder == ">" else ""
    return f"{'x'.join(map(str, data.shape))},{order}{data.dtype.str[1:] if order else data.dtype.name},5"


@dataclass(frozen=True)
class Backend:
    """How a library writes `data` (z, y, x) to a place, what volpipe calls the format, and the types that it has.

    `key` is what the user must name of it.
    """

    write: Callable[[Path, np.ndarray], None]
    format: str
    name: str = "a"
    dtypes: tuple[str, ...] = ALL_DTYPES
    is_both: bool = False  # whether it has both byte orders
    is_file: bool = False
    has_bool: bool = False
    key: Callable[[np.ndarray], str | None] = lambda data: None

    def make(self, folder: Path, data: np.ndarray) -> Volume:
        """Return the volume that `data` makes in `folder`, in place of the one before."""
        place = folder / self.name
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        self.write(place, data)
        return open_volume(place, self.key(data))


OF_NUMPY: dict[str, Any] = {"is_both": True, "is_file": True, "has_bool": True}  # Any: of Backend
DM_DTYPES = tuple(dtype for dtype in DTYPES if not dtype.endswith("int64"))
NIFTI_1 = nifti_writer(nibabel.Nifti1Image, nibabel.Nifti1Header)
NIFTI_2 = nifti_writer(nibabel.Nifti2Image, nibabel.Nifti2Header)
BACKENDS = {
    "n5": Backend(write_n5, "n5", "a.n5", DTYPES),
    "zarr2": Backend(zarr_writer(2, compressors=Zstd(3, checksum=True)), "zarr2", is_both=True, has_bool=True),
    "zarr2 in Fortran order": Backend(zarr_writer(2, order="F"), "zarr2", is_both=True, has_bool=True),
    "zarr2 by zarr-python": Backend(zarr_writer(2, filters=[Delta("<i4")]), "zarr2", dtypes=("int32",)),
    "zarr3": Backend(zarr_writer(3), "zarr3"),
    "zarr3 shards": Backend(zarr_writer(3, chunks=(4, 4, 4), shards=(8, 8, 8)), "zarr3"),
    "precomputed": Backend(precomputed_writer(), "precomputed", dtypes=precomputed.DTYPES),
    "precomputed shards": Backend(precomputed_writer(sharding=SHARDING), "precomputed", dtypes=precomputed.DTYPES),
    "precomputed jxl": Backend(jxl_writer(), "precomputed", dtypes=("uint8", "uint16")),
    "precomputed jxl shards": Backend(jxl_writer(sharding=SHARDING), "precomputed", dtypes=("uint8", "uint16")),
    "zarr2 in a zip": Backend(zip_writer(2), "zarr2", "a.zip", **OF_NUMPY),
    "zarr3 shards in a zip": Backend(zip_writer(3, chunks=(4, 4, 4), shards=(8, 8, 8)), "zarr3", "a.ozx", is_file=True),
    "hdf5": Backend(write_hdf5, "hdf5", "a.h5", **OF_NUMPY),
    "tiff": Backend(tiff_writer(), "tiff", "a.tif", **OF_NUMPY),
    "tiff strips": Backend(tiff_writer(rowsperstrip=3, compression="lzw"), "tiff", "a.tif", **OF_NUMPY),
    "tiff tiles": Backend(tiff_writer(tile=(16, 16), compression="zlib", bigtiff=True), "tiff", "a.tif", **OF_NUMPY),
    "tiff in JPEG XL": Backend(
        tiff_writer(tile=(16, 16), compression="jpegxl", compressionargs={"lossless": True}),
        "tiff",
        "a.tif",
        ("uint8", "uint16"),
        is_file=True,
    ),
    "slices": Backend(write_slices, "tiff"),
    "pictures": Backend(write_pictures, "picture", dtypes=("uint8", "uint16")),
    "mrc": Backend(write_mrc, "mrc", "a.mrc", ("int8", "int16", "float32", "uint16", "float16"), True, is_file=True),
    "nifti": Backend(NIFTI_1, "nifti", "a.nii", DTYPES, True, is_file=True),
    "nifti 2": Backend(NIFTI_2, "nifti", "a.nii", DTYPES, True, is_file=True),
    "nifti in gzip": Backend(NIFTI_1, "nifti", "a.nii.gz", DTYPES, True, is_file=True),
    "nifti 2 in gzip": Backend(NIFTI_2, "nifti", "a.nii.gz", ("int16",), True, is_file=True),
    "nifti pair": Backend(
        nifti_writer(nibabel.Nifti1Pair, nibabel.Nifti1Pair.header_class), "nifti", "a.hdr", DTYPES, True, is_file=True
    ),
    "nrrd": Backend(nrrd_writer("raw"), "nrrd", "a.nrrd", DTYPES, True, is_file=True),
    "nrrd in gzip": Backend(nrrd_writer("gzip"), "nrrd", "a.nrrd", DTYPES, True, is_file=True),
    "nrrd detached": Backend(nrrd_writer("raw"), "nrrd", "a.nhdr", DTYPES, True, is_file=True),
    "nrrd detached in gzip": Backend(nrrd_writer("gzip"), "nrrd", "a.nhdr", ("int16",), True, is_file=True),
    "dm3": Backend(write_dm, "dm", "a.dm3", DM_DTYPES, True, is_file=True),
    "dm4": Backend(lambda path, data: write_dm(path, data, 4), "dm", "a.dm4", DM_DTYPES, True, is_file=True),
    "npy": Backend(np.save, "npy", "a.npy", **OF_NUMPY),
    "raw": Backend(
        lambda path, data: path.write_bytes(b"12345" + data.tobytes()) and None,
        "raw",
        "a.raw",
        key=headerless_key,
        **OF_NUMPY,
    ),
}
EACH = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
EACH_FILE = pytest.mark.parametrize(
    "backend", [each for each in BACKENDS.values() if each.is_file], ids=lambda b: b.name
)


@EACH
def test_every_type_is_read_in_every_byte_order(tmp_path: Path, backend: Backend) -> None:
    for dtype in backend.dtypes:
        for order in ("<", ">") if backend.is_both else ("<",):
            data = noise((6, 19, 23), dtype)
            volume = backend.make(tmp_path, data.astype(data.dtype.newbyteorder(order)))
            assert (volume.format, volume.axes, volume.shape) == (backend.format, ("z", "y", "x"), data.shape)
            check_reads(volume, data)
    if backend.has_bool:  # which is read as 0 and 1
        check_reads(backend.make(tmp_path, data > 9), (data > 9).astype(np.uint8))


@settings(max_examples=150)
@given(st.data(), st.sampled_from(list(BACKENDS.values())))
def test_any_index_is_what_numpy_has_there(draw: st.DataObject, backend: Backend) -> None:
    shape = tuple(draw.draw(st.integers(1, most)) for most in (4, 40, 40))
    assume(shape[0] > 1 or backend.format != "picture")  # a folder of one picture is no stack
    with tempfile.TemporaryDirectory() as folder:
        data = noise(shape, draw.draw(st.sampled_from(backend.dtypes)), 3)
        volume = backend.make(Path(folder), data)
        assert volume.spatial_shape == shape  # an axis of one may be left out
        expected = data.reshape(volume.shape)
        index = draw.draw(indexes(expected.shape))
        read = volume.open()[index]
    assert read.shape == expected[index].shape
    assert np.array_equal(read, expected[index])


@EACH
def test_boxes_are_those_of_numpy_mirrored_at_the_faces_or_refused(tmp_path: Path, backend: Backend) -> None:
    data = noise((9, 20, 30), backend.dtypes[0])
    volume = backend.make(tmp_path, data)
    mirrored = np.pad(data, 3, mode="reflect")[np.newaxis]
    for reader in (volume.open(), volume.open(cache_bytes=2**20)):
        for box in boxes_of(data.shape) * 2:
            assert np.array_equal(reader.read(box)[0], data[box.slices])
        assert np.array_equal(reader.read_mirrored(Box((-3, -3, -3), (12, 23, 33))), mirrored)
        for box in (Box((0, 0, 0), (9, 20, 31)), Box((-1, 0, 0), (2, 2, 2)), Box((1, 1, 1), (1, 2, 2))):
            with pytest.raises(VolumeError, match="is empty or leaves the volume"):
                reader.read(box)


@EACH
def test_what_is_cut_short_is_refused_by_the_name_of_its_file(tmp_path: Path, backend: Backend) -> None:
    volume = backend.make(tmp_path, noise((9, 20, 30), backend.dtypes[0]))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    whole = file.read_bytes()
    lengths = [int(len(whole) * part) for part in (0.02, 0.3, 0.6, 0.9)]
    for length in (*lengths, len(whole) - 40) if backend.is_file else lengths:
        file.write_bytes(whole[:length])
        size = rf".*\b{length}\b" if backend.is_file and length > 1024 else ""  # the longest header is MRC's
        with pytest.raises(VolumeError, match=re.escape(str(file)) + size):
            open_volume(volume.path, volume.key).open()[...]


@EACH_FILE
def test_any_damaged_byte_is_an_error_or_a_volume(tmp_path: Path, backend: Backend) -> None:
    volume = backend.make(tmp_path, noise((3, 8, 9), backend.dtypes[0]))
    outcomes = outcomes_of_damage(Path(volume.path), min(Path(volume.path).stat().st_size, 1024), 80, volume.key)
    assert outcomes == ({"read", "refused"} if backend.format != "raw" else {"read"})  # which has no header


@EACH
def test_what_was_written_anew_is_opened_anew(tmp_path: Path, backend: Backend) -> None:
    volume = backend.make(tmp_path, noise((4, 9, 20), backend.dtypes[0]))
    volume.open()
    data = noise((4, 9, 19), backend.dtypes[0])
    again = backend.make(tmp_path, data)
    changed = r"was .*\(4, 9, 20\) and is now .*\(4, 9, 19\); open it again"
    with pytest.raises(VolumeError, match=changed if volume.format != "raw" else "36 bytes too late"):
        volume.open()
    check_reads(again, data)


@EACH
def test_a_change_of_any_file_that_holds_voxels_is_seen(tmp_path: Path, backend: Backend) -> None:
    """Of each file without which the voxels are others, or none; states that are not told are compared by reading."""
    data = noise((6, 9, 20), backend.dtypes[0])
    volume = backend.make(tmp_path, data)
    box, num_seen = Box.from_shape(volume.spatial_shape), 0
    for file in [each for each in tmp_path.rglob("*") if each.is_file() and each.name not in METADATA_NAMES]:
        before, whole = FileStates(volume).hash(box), file.read_bytes()
        file.write_bytes(b"")
        try:
            is_needed = not np.array_equal(open_volume(volume.path, volume.key)[...].reshape(data.shape), data)
        except VolumeError:
            is_needed = True
        file.write_bytes(whole)
        assert is_needed
        assert before == "" or FileStates(volume).hash(box) != before
        num_seen += 1
    assert num_seen


def read_all(opened: Volume | Reader) -> np.ndarray:
    return opened[...]


def test_another_process_reads_the_same(tmp_path: Path) -> None:
    volumes = []
    for number, backend in enumerate(BACKENDS.values()):
        (tmp_path / str(number)).mkdir()
        volumes.append(backend.make(tmp_path / str(number), noise((4, 9, 20), backend.dtypes[0])))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        for volume, read in zip(volumes, pool.map(read_all, volumes), strict=True):
            assert np.array_equal(read, volume.open()[...])
        for volume, read in zip(volumes, pool.map(read_all, [volume.open() for volume in volumes]), strict=True):
            assert np.array_equal(read, volume.open()[...])


@EACH_FILE
def test_a_file_has_no_other_keys_levels_or_writers(tmp_path: Path, backend: Backend) -> None:
    volume = backend.make(tmp_path, noise((4, 9, 20), backend.dtypes[0]))
    assert [each.key for each in list_arrays(volume.folder if volume.format == "raw" else volume.path)] == [volume.key]
    with pytest.raises(VolumeError, match=rf"no volume at .*{backend.name}/none; .*{backend.name} holds "):
        open_volume(volume.path, "none")
    with pytest.raises(VolumeError, match="has no level 1"):
        open_volume(volume.path, volume.key, level=1)
    with pytest.raises(VolumeError, match=r"(a|an) \S+ file cannot be written"):
        open_writer(volume.path, volume.key)
    with pytest.raises(VolumeError, match="is a file; zarr3 needs a folder"):
        create_array(volume.path, "raw", ArraySpec((4, 4, 4), np.dtype("uint8"), (4, 4, 4)))


# ---- what volpipe writes


@st.composite
def arrays(draw: st.DrawFn, format: str, dtypes: tuple[str, ...]) -> tuple[np.ndarray, ArraySpec]:
    """Small arrays of one to four axes: any chunk, shard and codec; of precomputed shards of a power of two chunks."""
    is_pre = format == "precomputed"
    rank = draw(st.integers(3, 4) if is_pre else st.integers(1, 4))
    shape = tuple(draw(st.integers(1, 13)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1 + is_pre, 7)) for _ in range(rank))
    edges = [2 ** draw(st.integers(0, 3))] * rank if is_pre else [draw(st.integers(1, 3)) for _ in range(rank)]
    if is_pre and rank == 4:  # a chunk has all channels
        shape, chunks, edges[0] = (2, *shape[1:]), (2, *chunks[1:]), 1
    codec = draw(st.sampled_from(["raw", "gzip", precomputed.SEGMENTATION if is_pre else "zstd"]))
    dtype = draw(st.sampled_from(precomputed.LABELS if codec == precomputed.SEGMENTATION else dtypes))
    shards = tuple(c * n for c, n in zip(chunks, edges, strict=True)) if is_pre or format == "shards" else None
    data = invented(shape, dtype, draw(st.integers(0, 99)))
    return data, ArraySpec(shape, data.dtype, chunks, shards, AXES[-rank:], codec)


def read_by_others(path: Path, format: str) -> np.ndarray:
    if format == "precomputed":
        return np.asarray(by_tensorstore(path).read().result()).T
    return z5py.N5File(str(path), "r")["raw"][...] if format == "n5" else zarr.open_array(path / "raw", mode="r")[...]


WRITTEN = {
    "n5": DTYPES, "zarr2": ALL_DTYPES, "zarr3": ALL_DTYPES, "shards": ALL_DTYPES, "precomputed": precomputed.DTYPES
}  # fmt: skip


@pytest.mark.parametrize("format", WRITTEN)
def test_what_is_written_is_read_alike_by_us_and_by_others(format: str) -> None:
    @settings(max_examples=20)
    @given(arrays(format, WRITTEN[format]))
    def check(drawn: tuple[np.ndarray, ArraySpec]) -> None:
        data, spec = drawn
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"a.{format}"
            array_format = "zarr3" if format == "shards" else format
            create_array(path, "raw", spec, array_format)
            write_all(path, "raw", data)  # unit by unit: a second write to one would lose the first
            volume = open_volume(path)
            assert (volume.key, volume.format, volume.axes) == ("raw", array_format, spec.axes)
            shards = precomputed.stored_shards(spec) if format == "precomputed" else spec.shards
            assert (volume.dtype, volume.chunks, volume.shards) == (data.dtype, spec.chunks, shards)
            np.testing.assert_array_equal(volume.open()[...], data)
            np.testing.assert_array_equal(read_by_others(path, format).reshape(data.shape), data)
            header = read_header(path / "raw")
            assert header is not None
            units = Grid(header.shape, header.write_unit)
            filled = filter(lambda number: data[units.box(number).slices].any(), range(len(units)))
            names = {ChunkFiles(header).name(units.index(number)) for number in filled}
            files = {str(file.relative_to(path / "raw")) for file in (path / "raw").rglob("*") if file.is_file()}
            assert files - {"zarr.json", ".zarray", ".zattrs", "attributes.json"} == names

    check()


# ---- memory


def large_npy(path: Path, shape: tuple[int, ...] = (3000, 5000, 4000)) -> Path:
    with (path / "a.npy").open("wb") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        stream.truncate(stream.tell() + int(np.prod(shape)))
    return path / "a.npy"


def large_mrc(path: Path) -> Path:
    write_mrc(path / "a.mrc", noise((1, 1, 1), "float32"))
    with (path / "a.mrc").open("r+b") as stream:
        stream.write(np.array([4000, 4000, 2000], "<i4").tobytes())
        stream.truncate(1024 + 4000 * 4000 * 2000 * 4)
    return path / "a.mrc"


def large_nifti(path: Path) -> Path:
    NIFTI_1(path / "a.nii", noise((1, 1, 1)))
    with (path / "a.nii").open("r+b") as stream:
        stream.seek(42)
        stream.write(np.array([30000, 20000, 2000], "<i2").tobytes())
        stream.truncate(352 + 30000 * 20000 * 2000)
    return path / "a.nii"


def packed_nifti(path: Path) -> Path:
    NIFTI_1(path / "a.nii.gz", np.zeros((64, 1200, 1200), np.uint8))
    return path / "a.nii.gz"


def large_hdf5(path: Path, **choices: Any) -> Path:  # Any: h5py's
    with h5py.File(path / "a.h5", "w") as file:
        dataset = file.create_dataset("raw", (3000, 5000, 6000), "u1", **choices)
        dataset[1468:1532, 2468:2532, 2968:3032] = 1
        dataset[2999, 4999, 5999] = 1
    return path / "a.h5"


def large_tiff(path: Path, **choices: Any) -> Path:  # Any: tifffile's
    if not choices:
        shape = (400, 16000, 16000)
        tifffile.memmap(path / "a.tif", shape=shape, dtype=np.uint8, bigtiff=True, photometric="minisblack")
        return path / "a.tif"
    with tifffile.TiffWriter(path / "a.tif", bigtiff=True) as file:
        for _ in range(3):
            file.write(np.zeros((8000, 8000), np.uint8), metadata=None, compression="zlib", **choices)
    return path / "a.tif"


def large_slices(path: Path) -> Path:
    tifffile.memmap(path / "first.tif", shape=(20000, 20000), dtype=np.uint8)
    (path / "slices").mkdir()
    for i in range(70):
        (path / f"slices/{i}.tif").hardlink_to(path / "first.tif")
    return path / "slices"


LARGE: dict[str, Callable[[Path], Path]] = {
    "npy": large_npy,
    "npy of wide planes": lambda path: large_npy(path, (600, 10000, 10000)),
    "mrc": large_mrc,
    "nifti": large_nifti,
    "nifti in gzip": packed_nifti,
    "hdf5": large_hdf5,
    "hdf5 chunks": lambda path: large_hdf5(path, chunks=(64, 64, 64), compression="gzip"),
    "tiff": large_tiff,
    "tiff tiles": lambda path: large_tiff(path, tile=(256, 256)),
    "tiff strips": lambda path: large_tiff(path, rowsperstrip=16),
    "slices": large_slices,
}


LONG = ("npy of wide planes", "hdf5", "tiff", "tiff tiles")  # a sibling of each is shorter


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in LARGE])
def test_a_box_of_a_volume_beyond_memory_takes_the_memory_of_the_box(tmp_path: Path, name: str) -> None:
    assert memory_of_boxes(LARGE[name](tmp_path)) < 8 * MiB
