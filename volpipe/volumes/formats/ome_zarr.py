"""OME-Zarr 0.4 and 0.5, written: arrays of Zarr v2 and v3 in a group that says what they are.

Not here: the group's metadata (ome), or the arrays (zarr), which read both.
"""

from __future__ import annotations

from volpipe.volumes.formats import ome, zarr
from volpipe.volumes.formats.format import Format, Writing
from volpipe.volumes.storage.metadata import Multiscale, Tree, merge_json
from volpipe.volumes.storage.paths import Location


def _write_group_04(folder: Location, multiscale: Multiscale, own: Tree, is_incomplete: bool) -> None:
    new = ome.group_attributes(multiscale, "0.4", own)
    merge_json(folder / ".zattrs", ome.named(new, is_incomplete=is_incomplete))


def _write_group_05(folder: Location, multiscale: Multiscale, own: Tree, is_incomplete: bool) -> None:
    new = ome.named(ome.group_attributes(multiscale, "0.5", own), is_incomplete=is_incomplete)
    merge_json(folder / "zarr.json", {"attributes": zarr.read_attributes(folder) | new})


OME_ZARR_04 = Format(
    name="ome-zarr-0.4",
    folders=zarr.FOLDERS,
    arrays=zarr.ZARR2.arrays,
    write_group=_write_group_04,
    is_ome=True,
    writing=Writing(zarr.CODECS),
)
OME_ZARR_05 = Format(
    name="ome-zarr-0.5",
    suffixes=(".zarr",),
    folders=zarr.FOLDERS,
    arrays=zarr.ZARR3.arrays,
    write_group=_write_group_05,
    is_ome=True,
    writing=Writing(zarr.CODECS),
)
