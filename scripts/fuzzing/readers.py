"""What other software reads in a damaged volume, to compare with: None where it refuses.

Not here: volpipe. HDF5 has one library, which volpipe uses too: there the comparison says only that it is used rightly.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fuzzing.originals import Original


def read(original: Original, place: Path, key: str) -> np.ndarray | None:
    """Return the voxels of the array `key` in what `original` has become at `place`."""
    reader = READERS.get(original.format)
    if reader is None or original.name in ("tiff slices", "tiff pyramid"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return reader(place / original.location, key)
        except Exception:  # whatever it makes of damaged bytes, it refuses
            return None


def _zarr(path: Path, key: str) -> np.ndarray:
    import zarr

    return np.asarray(zarr.open_array(str(path), mode="r")[...])


def _tiff(path: Path, key: str) -> np.ndarray:
    import tifffile

    with tifffile.TiffFile(path) as tif:
        return np.asarray(tif.series[int(key.partition("/")[0] or 0)].asarray(squeeze=True))


def _hdf5(path: Path, key: str) -> np.ndarray:
    import h5py

    with h5py.File(path, "r") as file:
        return np.asarray(file[key][...])


def _mrc(path: Path, key: str) -> np.ndarray:
    import mrcfile

    with mrcfile.open(path, permissive=False) as file:
        return np.asarray(file.data)


def _npy(path: Path, key: str) -> np.ndarray:
    return np.asarray(np.load(path, allow_pickle=False))


READERS: dict[str, Callable[[Path, str], np.ndarray]] = {
    "zarr2": _zarr, "zarr3": _zarr, "tiff": _tiff, "hdf5": _hdf5, "mrc": _mrc, "npy": _npy,
}  # fmt: skip
