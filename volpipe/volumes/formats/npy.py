"""NumPy's .npy: one array, in C or Fortran order, of either byte order, read where it lies.

Not here: the reading itself (flat). Pickled objects are never read. Format: numpy.lib.format.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.syntax import one_thread
from volpipe.volumes.formats.flat import Part, check_size, num_bytes, write_planes
from volpipe.volumes.formats.format import Format, ReadRow, Writing, one_array
from volpipe.volumes.storage.metadata import ArraySpec, Header, Place, flat_chunk, voxel_dtype, voxels
from volpipe.volumes.storage.paths import check_links

MAGIC = b"\x93NUMPY"


def read_header(file: Path) -> Header:
    """Return the header of the array in `file`.

    Raises:
        VolumeError: it is no array of numbers, or is cut short.
    """
    try:
        with one_thread, file.open("rb") as stream:
            version = np.lib.format.read_magic(stream)
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise VolumeError(f"{file} is .npy version {version}, which is not known; save it with numpy.save")
            # Version 3 differs from 2 in the names of fields, which an array of numbers has not.
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, turned, stored = read(stream)
            offset = stream.tell()
    except VolumeError:
        raise
    except OSError as error:
        check_links(file)
        raise VolumeError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # the header is parsed as Python, whose parsers raise what they like
        raise VolumeError(f"{file} is no array that NumPy wrote: {error}") from error
    dtype = voxel_dtype(stored, file)
    shape = voxels(shape, "shape", file)
    check_size(file, offset, shape, stored)
    return Header(
        folder=file,
        format="npy",
        shape=shape,
        dtype=dtype,
        chunks=flat_chunk(shape[::-1])[::-1] if turned else flat_chunk(shape),
        place=Place(),
        known={"offset": offset, "turned": turned, "stored": dtype if stored.kind == "b" else stored},
        unsupported="a .npy file",
    )


def write(path: Path, key: str, spec: ArraySpec, where: Place, parts: Iterable[Part]) -> None:
    """Write an array to the file `path` from its parts, whole planes, in any order; `.npy` says no voxel size."""
    header = {"descr": np.lib.format.dtype_to_descr(spec.dtype), "fortran_order": False, "shape": spec.shape}
    with path.open("wb") as stream:
        np.lib.format.write_array_header_2_0(stream, header)
        offset = stream.tell()
        stream.truncate(offset + num_bytes(spec.shape, spec.dtype))
        for box, data in parts:
            write_planes(stream, offset, spec.shape[-3], box.start[0], data)


NPY = Format(
    name="npy",
    title=".npy",
    row=ReadRow("NumPy `.npy`", "C and Fortran order", "–"),
    suffixes=(".npy",),
    magics=((0, MAGIC),),
    files=one_array(read_header),
    writing=Writing(("raw",), "keeps no voxel size", write, has_keys=False, has_chunks=False, has_record=False),
)
