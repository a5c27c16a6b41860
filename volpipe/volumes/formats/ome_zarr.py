"""OME-Zarr 0.4 to 0.6, written: arrays of Zarr v2 and v3 in a group that says what they are.

Labels may lie in the image's own group: `image.zarr/labels/cells`. Not here: the group's metadata (ome), or the arrays
(zarr), which read all of them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from volpipe.errors import NOTICE
from volpipe.volumes.formats import ome, zarr
from volpipe.volumes.formats.format import Format, Writing
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import Multiscale, Tree, merge_json, read_json, write_json
from volpipe.volumes.storage.paths import Location

log = logging.getLogger(__name__)

LABELS = "labels"  # the group of an image's labels, and what lists them
SUFFIX = ".zarr"


@dataclass(frozen=True)
class LabelPlace:
    """A place in the labels of an image: the folder of the image, and the name of the labels, which may have parts."""

    image: Location
    name: str

    @property
    def source(self) -> str:
        """The image, as the labels name it."""
        return "../" * (2 + self.name.count("/"))


def label_place(folder: Location) -> LabelPlace | None:
    """Return the place that `folder` is in the labels of an image, by its name alone; None of another.

    The image is named .zarr, or lies in what is.
    """
    for group in folder.parents:
        image = group.parent
        if group.name == LABELS and any(each.suffix.lower() == SUFFIX for each in (image, *image.parents)):
            return LabelPlace(image, "/".join(folder.parts[len(group.parts) :]))
    return None


def image_version(folder: Location) -> str:
    """Return the version of OME-Zarr of the image at `folder`, "" where there is none."""
    attributes = zarr.read_attributes(folder)
    tree = attributes.get("ome", attributes)
    images = tree.get("multiscales") if isinstance(tree, dict) else None
    if not isinstance(images, list) or not images or not isinstance(images[0], dict):
        return ""
    return str(tree.get("version") or images[0].get("version") or "?")[:20]


def list_labels(place: LabelPlace, version: str) -> None:
    """Add the labels at `place` to the list of those of their image, whose own files stay as they are."""
    group = place.image / LABELS
    is_v2 = version == OME_ZARR_04.ome_version
    file = group / (".zattrs" if is_v2 else "zarr.json")
    tree = read_json(file) or ({} if is_v2 else {"zarr_format": 3, "node_type": "group"})
    attributes = tree if is_v2 else tree.get("attributes") or {}
    listing = attributes if is_v2 else attributes.get("ome") or {}
    listed = listing.get(LABELS)
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    if place.name in names:
        return
    new: Tree = {LABELS: [*names, place.name]}
    if is_v2:
        if not paths.is_file(group / ".zgroup"):
            write_json(group / ".zgroup", {"zarr_format": 2})
        write_json(file, tree | new)
    else:
        write_json(file, tree | {"attributes": attributes | {"ome": {"version": version} | listing | new}})
    if zarr.consolidated_arrays(place.image) is not None:
        log.warning(
            "%s has consolidated metadata, by which readers will not find %s: consolidate them again by zarr-python",
            place.image,
            place.name,
            extra=NOTICE,
        )


def _write_group(version: str, folder: Location, multiscale: Multiscale, own: Tree, is_incomplete: bool) -> None:
    place = label_place(folder) if multiscale.is_labels else None
    source = "" if place is None else place.source
    new = ome.named(ome.group_attributes(multiscale, version, own, source=source), is_incomplete=is_incomplete)
    if version == OME_ZARR_04.ome_version:
        merge_json(folder / ".zattrs", new)
    else:
        merge_json(folder / "zarr.json", {"attributes": zarr.read_attributes(folder) | new})
    if place is not None:
        list_labels(place, version)


OME_ZARR_04 = Format(
    name="ome-zarr-0.4",
    folders=zarr.FOLDERS,
    arrays=zarr.ZARR2.arrays,
    write_group=partial(_write_group, "0.4"),
    ome_version="0.4",
    writing=Writing(zarr.CODECS),
)
OME_ZARR_05 = Format(
    name="ome-zarr-0.5",
    suffixes=(".zarr",),
    folders=zarr.FOLDERS,
    arrays=zarr.ZARR3.arrays,
    write_group=partial(_write_group, "0.5"),
    ome_version="0.5",
    writing=Writing(zarr.CODECS),
)
OME_ZARR_06 = Format(
    name="ome-zarr-0.6",
    folders=zarr.FOLDERS,
    arrays=zarr.ZARR3.arrays,
    write_group=partial(_write_group, "0.6"),
    ome_version="0.6",
    writing=Writing(zarr.CODECS),
)
