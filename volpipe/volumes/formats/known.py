"""The formats that volpipe knows, in the order in which docs/formats.md shows them and folders are tried.

Not here: what is known of each (its own module).
"""

from __future__ import annotations

from volpipe.errors import VolumeError
from volpipe.volumes.formats.dm import DM
from volpipe.volumes.formats.format import Format
from volpipe.volumes.formats.hdf5 import HDF5
from volpipe.volumes.formats.mrc import MRC
from volpipe.volumes.formats.n5 import N5
from volpipe.volumes.formats.nifti import NIFTI
from volpipe.volumes.formats.npy import NPY
from volpipe.volumes.formats.nrrd import NRRD
from volpipe.volumes.formats.ome_zarr import OME_ZARR_04, OME_ZARR_05, OME_ZARR_06
from volpipe.volumes.formats.picture import PICTURE
from volpipe.volumes.formats.precomputed import PRECOMPUTED
from volpipe.volumes.formats.raw import RAW
from volpipe.volumes.formats.tiff import TIFF
from volpipe.volumes.formats.tiff_folder import SLICES
from volpipe.volumes.formats.zarr import ZARR2, ZARR3

FORMATS: tuple[Format, ...] = (
    N5,
    ZARR2,
    ZARR3,
    PRECOMPUTED,
    OME_ZARR_04,
    OME_ZARR_05,
    OME_ZARR_06,
    HDF5,
    TIFF,
    SLICES,
    PICTURE,
    MRC,
    NIFTI,
    NRRD,
    DM,
    NPY,
    RAW,
)
BY_NAME = {each.name: each for each in FORMATS}


def format_named(name: str) -> Format:
    """Return the format of this name.

    Raises:
        VolumeError: there is none.
    """
    if name not in BY_NAME:
        raise VolumeError(f"format {name!r} is not known; use {', '.join(BY_NAME)}")
    return BY_NAME[name]
