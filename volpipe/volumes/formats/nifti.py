"""NIfTI-1 and NIfTI-2 (.nii, .nii.gz, .hdr with .img): one array, x fastest, read where it lies or from its gzip.

Not here: gzip (gzipped), or what an affine map means (dialects.affine). Format: nifti.nimh.nih.gov/nifti-1 (nifti1.h)
and /nifti-2 (nifti2.h); the order of the three ways to say a place is that of nibabel and ITK.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.volumes.dialects.affine import affine_place, decimals
from volpipe.volumes.dialects.attributes import COLOUR_CHANNELS
from volpipe.volumes.formats import gzipped
from volpipe.volumes.formats.flat import check_size, num_bytes
from volpipe.volumes.formats.format import Format, ReadRow, one_array
from volpipe.volumes.storage.metadata import Header, Place, flat_chunk, shown, voxel_dtype, voxels
from volpipe.volumes.storage.paths import check_links
from volpipe.volumes.storage.tensorstore import Index, StoredArray

NAMES = ["size", "shape", "datatype", "pixdim", "offset", "slope", "inter", "units", "qform", "sform", "quaternion",
         "qoffset", "srow"]  # fmt: skip
FIELDS = {
    348: np.dtype(
        {
            "names": NAMES,
            "formats": ["<i4", "8<i2", "<i2", "8<f4", "<f4", "<f4", "<f4", "u1", "<i2", "<i2", "3<f4", "3<f4",
                        "(3,4)<f4"],
            "offsets": [0, 40, 70, 76, 108, 112, 116, 123, 252, 254, 256, 268, 280],
            "itemsize": 348,
        }
    ),
    540: np.dtype(
        {
            "names": NAMES,
            "formats": ["<i4", "8<i8", "<i2", "8<f8", "<i8", "<f8", "<f8", "<i4", "<i4", "<i4", "3<f8", "3<f8",
                        "(3,4)<f8"],
            "offsets": [0, 16, 12, 104, 168, 176, 184, 500, 344, 348, 352, 376, 400],
            "itemsize": 540,
        }
    ),
}  # fmt: skip
"""Of the two versions, by the size that their first field says."""
MARKS = {348: (344, b"n+1\0", b"ni1\0"), 540: (4, b"n+2\0", b"ni2\0")}
"""Where each version has its mark, and which: voxels in the same file, or in another."""
LEAST_OFFSETS = {348: 352, 540: 544}  # of voxels in the same file
TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
COLOURS = {128: 3, 2304: 4}  # samples of a byte each
OTHER_TYPES = {1: "bits", 32: "complex floats", 1536: "floats of 128 bits", 1792: "complex floats",
               2048: "complex floats"}  # fmt: skip
UNITS = {0: "", 1: "m", 2: "mm", 3: "um"}
PLACE_DIFFERS = 0.01  # of a length of a voxel, from one way to say it to another


class ScaledArray:
    """An array whose voxels are slope × stored + inter."""

    def __init__(self, array: StoredArray, slope: float, inter: float, dtype: np.dtype) -> None:
        self._array, self._slope, self._inter, self._dtype = array, slope, inter, dtype

    def read(self, index: Index) -> np.ndarray:
        values = self._array.read(index).astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            values *= self._slope
            values += self._inter
            return values.astype(self._dtype, copy=False)


def is_nifti(file: Path, start: bytes) -> bool:
    """Return whether a file that begins with `start` is NIfTI in gzip, the voxels of a pair, or its forerunner."""
    if start.startswith(gzipped.MAGIC):
        return _header_size(gzipped.unpacked_start(start, max(FIELDS)))[0] > 0
    if file.suffix.lower() == ".hdr":
        return any(int.from_bytes(start[:4], order) == 348 for order in ("little", "big"))
    return _header_beside(file) is not None


def _header_size(head: bytes) -> tuple[int, bool]:
    """Return the size of the header that begins with `head`, 0 where that is none, and whether it is of a pair."""
    marks = ((size, head[at : at + 4], alone, pair) for size, (at, alone, pair) in MARKS.items())
    return next(((size, mark == pair) for size, mark, alone, pair in marks if mark in (alone, pair)), (0, False))


def _header_beside(file: Path) -> Path | None:
    """Return the header of the pair whose voxels are in `file`, None where it is of none."""
    header = file.with_suffix(".hdr")
    if file.suffix.lower() != ".img" or not header.is_file():
        return None
    with header.open("rb") as stream:
        return header if _header_size(stream.read(max(FIELDS)))[1] else None


def read_header(file: Path) -> Header:
    """Return the header of the array in `file`.

    Raises:
        VolumeError: it is broken or cut short, or holds what volpipe does not read.
    """
    if (header := _header_beside(file)) is not None:
        raise VolumeError(f"{file} has the voxels of a NIfTI pair; name its header, {header}")
    try:
        with file.open("rb") as stream:
            start = stream.read(2 * max(FIELDS))
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    is_packed = start.startswith(gzipped.MAGIC)
    head = gzipped.unpacked_start(start, max(FIELDS)) if is_packed else start
    size, is_pair = _header_size(head)
    if not size:
        raise VolumeError(f"{file} is ANALYZE 7.5, which does not say where left is; save it as NIfTI")
    if len(head) < size:
        raise VolumeError(f"{file} has {len(start)} bytes, of {size} of its header {len(head)}: it is cut short")
    fields = np.frombuffer(head[:size], FIELDS[size])[0]
    if int(fields["size"]) != size:
        fields = np.frombuffer(head[:size], FIELDS[size].newbyteorder(">"))[0]
    if int(fields["size"]) != size:
        raise VolumeError(f"{file}: a NIfTI header of {fields['size']} bytes cannot be; it is damaged")
    return _make_header(file, fields, is_packed=is_packed, is_pair=is_pair)


def _make_header(file: Path, fields: np.void, *, is_packed: bool, is_pair: bool) -> Header:
    shape, axes = _stored_shape(fields, file)
    stored = _stored_type(fields, file)
    samples = COLOURS.get(int(fields["datatype"]))
    if samples is not None and "c" in axes:
        raise VolumeError(f"{file} has colours and a fourth axis; volpipe reads one of the two: save it without one")
    if samples is not None:
        shape, axes = (*shape, samples), (*axes, "c")
    least = 0 if is_pair else LEAST_OFFSETS[int(fields["size"])]
    offset = float(fields["offset"])
    if not (offset == 0 or least <= offset < 2**62) or offset % 1:
        raise VolumeError(f"{file}: voxels from byte {offset:g} on cannot be; its header is damaged")
    first = max(least, int(offset))
    known: dict[str, object] = {"offset": first, "stored": stored}
    data_files: tuple[Path, ...] = ()
    if is_pair:
        data_files, is_packed = _voxels_of_pair(file)
    if is_packed:
        known["gzip_at"] = 0
    else:
        check_size(data_files[0] if is_pair else file, first, shape, stored)
    dtype, scale = voxel_dtype(stored, file), None if samples else _value_scale(fields, file)
    if scale is not None:
        dtype = np.dtype(np.float32 if stored.itemsize <= 2 or stored.name == "float32" else np.float64)
        known["scale"] = scale
    with np.errstate(all="ignore"):  # of a damaged header, whose numbers may be any
        place, place_notes = _read_place(fields)
    return Header(
        folder=file,
        format="nifti",
        shape=shape,
        dtype=dtype,
        chunks=flat_chunk(shape) if samples is None else (1, *shape[1:]),
        codec="gzip" if is_packed else "raw",
        axes=axes,
        known=known,
        unsupported="a NIfTI file",
        place=place,
        notes=(
            *_value_notes(fields, dtype, scale, samples),
            *place_notes,
            *(gzipped.slow_notes(num_bytes(shape, stored)) if is_packed else ()),
        ),
        data_files=data_files,
    )


def _stored_shape(fields: np.void, file: Path) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return shape and axes as stored: z, y, x, and before these the one further axis that has several entries."""
    rank, *lengths = (int(n) for n in fields["shape"])
    if not 1 <= rank <= 7:
        raise VolumeError(f"{file}: {rank} axes cannot be; its header is damaged")
    lengths = [*lengths[:rank], 1, 1][: max(rank, 3)]
    further = [n for n in lengths[3:] if n != 1]
    shape = voxels([*further, *lengths[2::-1]], "shape", file)
    if len(further) > 1:
        raise VolumeError(
            f"{file} has the axes {' × '.join(map(str, lengths))}; volpipe reads x, y, z and one more, as channels: "
            "save a part of it"
        )
    return shape, ("c", "z", "y", "x")[-len(shape) :]


def _stored_type(fields: np.void, file: Path) -> np.dtype:
    code = int(fields["datatype"])
    if code not in TYPES and code not in COLOURS:
        known = sorted({np.dtype(name).name for name in TYPES.values()})
        raise VolumeError(
            f"{file} holds {OTHER_TYPES.get(code, 'voxels')} (datatype {code}); volpipe reads {', '.join(known)} and "
            "RGB"
        )
    order = ">" if fields.dtype["size"].str.startswith(">") else "<"
    return np.dtype(order + TYPES.get(code, "u1"))


def _voxels_of_pair(file: Path) -> tuple[tuple[Path, ...], bool]:
    """Return the file with the voxels of the pair whose header is `file`, and whether it is packed."""
    for suffix in (".img", ".img.gz"):
        other = file.with_name(file.name.removesuffix(".gz")).with_suffix(suffix)
        if other.is_file():
            return (other,), suffix == ".img.gz"
    raise VolumeError(f"{file} is the header of a NIfTI pair, and its voxels, {file.stem}.img, are not beside it")


def _value_scale(fields: np.void, file: Path) -> tuple[float, float] | None:
    """Return slope and intercept of the values, None where they are as stored: a slope of 0, or one that changes none.

    Raises:
        VolumeError: there is a slope, and no number to add.
    """
    slope, inter = float(fields["slope"]), float(fields["inter"])
    if not math.isfinite(slope) or slope == 0 or (slope, inter) == (1, 0):
        return None
    if not math.isfinite(inter):
        raise VolumeError(
            f"{file}: values are {slope:g} × stored + {inter}, which are no numbers; its header is damaged"
        )
    return slope, inter


def _value_notes(
    fields: np.void, dtype: np.dtype, scale: tuple[float, float] | None, samples: int | None
) -> Iterator[str]:
    if scale is not None:
        yield f"values are {scale[0]:g} × stored + {scale[1]:g} (scl_slope, scl_inter), as {dtype}"
    if samples is not None:
        yield COLOUR_CHANNELS
    further = [(axis, int(n)) for axis, n in enumerate(fields["shape"][4 : int(fields["shape"][0]) + 1], 4) if n > 1]
    for axis, n in further:
        meaning = ", time by the standard," if axis == 4 else ""
        yield f"its axis {axis}{meaning} is read as {n} channels; input.channel takes one"


def _read_place(fields: np.void) -> tuple[Place, tuple[str, ...]]:
    """Return the place by the affine map, or the lengths of a voxel where there is none, and notes on it."""
    code = int(fields["units"]) & 7
    unit = UNITS.get(code, f"number {code}")
    lengths = np.abs(decimals(fields["pixdim"][1:4]))
    for form, affine in (("sform", decimals(fields["srow"])), ("qform", _affine_of_quaternion(fields))):
        if int(fields[form]) > 0:
            place, notes = affine_place(affine[:, :3], affine[:, 3], unit, "RAS", guess=True)
            sizes = np.sqrt((affine[:, :3] ** 2).sum(axis=0))
            if form == "sform" and (np.abs(sizes - lengths) > PLACE_DIFFERS * sizes).any():
                numbers = (shown(each[::-1].tolist()) for each in (sizes, lengths))
                notes = (*notes, "a voxel is {} by its sform, which counts, and {} by its pixdim".format(*numbers))
            return place, notes
    return affine_place(np.diag(lengths), None, unit, "", guess=True)  # whose directions nobody says


def _affine_of_quaternion(fields: np.void) -> np.ndarray:
    """Return the affine map (3, 4) of the quaternion, the lengths of a voxel and the offset, as nifti1.h has it."""
    b, c, d = fields["quaternion"].astype(np.float64).tolist()
    rest = 1 - (b * b + c * c + d * d)
    if rest < 3 * float(np.finfo(fields["quaternion"].dtype).eps):  # by rounding, as nibabel: a turn of half a circle
        b, c, d = (each / math.sqrt(1 - rest) for each in (b, c, d))
        rest = 0.0
    a = math.sqrt(rest)
    turn = np.array(
        [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
        ]
    )
    pixdim = decimals(fields["pixdim"])
    sizes = np.abs(pixdim[1:4]) * [1, 1, -1 if pixdim[0] < 0 else 1]
    return np.column_stack([turn * sizes, decimals(fields["qoffset"])])


def open_array(header: Header, cache_bytes: int) -> StoredArray:
    """Return the array of `header`, with its values scaled where it says so."""
    array = gzipped.open_array(header, cache_bytes)
    if "scale" not in header.known:
        return array
    slope, inter = header.known["scale"]
    return ScaledArray(array, slope, inter, header.dtype)


NIFTI = Format(
    name="nifti",
    title="NIfTI",
    row=ReadRow(
        "NIfTI-1, NIfTI-2 (`.nii`, `.nii.gz`, `.hdr` with `.img`)",
        "integers, floats of 32 and 64 bits, RGB; slope and intercept are applied; [more](#nifti-and-nrrd)",
        "sform, qform, else pixdim; without a unit mm, with a note",
    ),
    suffixes=(".nii", ".nii.gz", ".hdr"),
    magics=tuple((at, mark) for at, *marks in MARKS.values() for mark in marks),
    recognises=is_nifti,
    files=one_array(read_header, open_array),
    is_x_first=True,
)
