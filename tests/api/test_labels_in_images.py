"""Labels in the image's own OME-Zarr, image.zarr/labels/cells, and what is said of objects beside precomputed ones."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from arrays import make
from inline import Inline, Stopped
from ngff_zarr.validate import validate
from volumes import fingerprint, noise, write_volume

import volpipe as vp
from volpipe.runs.run_folder import RunFolder

VERSIONS = ("0.4", "0.5", "0.6")
SMALL = ["windows.shape=[8,8,8]", "windows.overlap=[0,0,0]", "windows.block=[8,8,8]", "output.chunk=[4,4,4]"]
IDENTITY = ["net.name=identity", "normalise.method=none", *SMALL]
LABELS = [*IDENTITY, "output.kind=labels"]
BLOCKS = ["input.kind=foreground", "objects.method=components", "output.block=[8,8,8]", "output.chunk=[4,4,4]"]


def image_of(folder: Path, version: str, levels: int = 1) -> Path:
    """Write an image of OME-Zarr with so many coarser levels, 16 × 16 × 24 voxels of 40 × 8 × 8 nm."""
    source = write_volume(folder / "image.n5", noise((16, 16, 24)), 8)
    size = ["input.voxel_size_nm=[40,8,8]", "input.origin_nm=[80,40,16]"]
    settings = [*IDENTITY, *size, f"output.levels={levels}", f"output.format=ome-zarr-{version}"]
    vp.run(source / "raw", out=folder / "image.zarr", site=Inline(), settings=settings)
    return folder / "image.zarr"


def numbered(folder: Path) -> Path:
    """Write labels (z, y, x) in N5, three of them; return the array."""
    data = np.zeros((16, 16, 24), np.uint32)
    data[2:6, 3:9, 4:20], data[8:12, 3:9, 4:20], data[9, 12:14, 2:4] = 7, 70_000, 9
    return write_volume(folder / "labels.n5", data, 8) / "raw"


def attributes_of(group: Path) -> dict[str, Any]:  # Any: JSON
    if (group / ".zattrs").exists():
        return dict(json.loads((group / ".zattrs").read_text()))
    tree = json.loads((group / "zarr.json").read_text())
    assert tree["node_type"] == "group"
    return dict(tree["attributes"]["ome"])


def check_labels(image: Path, version: str, *names: str) -> None:
    """Assert that these are the labels of `image`, each with the metadata that its version asks for."""
    assert attributes_of(image / "labels")["labels"] == list(names)
    for name in names:
        attributes = attributes_of(image / "labels" / name)
        assert attributes["image-label"]["source"] == {"image": "../" * (2 + name.count("/"))}
        assert ((image / "labels" / name) / attributes["image-label"]["source"]["image"]).resolve() == image.resolve()
        wrapped = attributes if version == "0.4" else {"ome": attributes}
        for model in ("image", "label"):
            validate(wrapped, version=version, model=model)
    assert (image / "labels/.zgroup").exists() == (version == "0.4")


@pytest.mark.parametrize("version", VERSIONS)
def test_run_and_convert_write_labels_into_the_image_and_touch_nothing_else(tmp_path: Path, version: str) -> None:
    image, labels = image_of(tmp_path, version), numbered(tmp_path)
    before = fingerprint(image)
    report = vp.run(labels, out=image / "labels/cells", site=Inline(), settings=LABELS)
    assert report.is_complete and report.folder == tmp_path / "image.zarr.labels.cells.run"
    copy = vp.convert(labels, image / "labels/by/hand")
    check_labels(image, version, "cells", "by/hand")
    for volume in (vp.open(image / "labels/cells"), copy):
        np.testing.assert_array_equal(volume[...], vp.open(labels)[...])
        assert volume.format == ("zarr2" if version == "0.4" else "zarr3")
    assert [len(vp.open(image / place).levels) for place in ("", "labels/cells")] == [2, 2]
    assert sorted(each.name for each in tmp_path.iterdir() if "labels" in each.name) == [
        "image.zarr.labels.cells.run", "labels.n5",
    ]  # fmt: skip
    again = vp.run(labels, out=image / "labels/cells", site=Inline(), settings=LABELS)
    assert again.was_complete
    for folder in sorted((image / "labels").rglob("*"), reverse=True):
        folder.rmdir() if folder.is_dir() else folder.unlink()
    (image / "labels").rmdir()
    assert fingerprint(image) == before


@pytest.mark.parametrize("version", VERSIONS[1:])
def test_segment_writes_labels_into_the_image_that_it_reads(tmp_path: Path, version: str) -> None:
    image = image_of(tmp_path, version, 2)
    workers = Inline()
    alone = vp.segment(image, out=tmp_path / "alone.zarr", site=workers, settings=BLOCKS)
    with pytest.raises(Stopped):
        stopped = Inline(most_tasks=workers.num_tasks - 2)
        vp.segment(image, out=image / "labels/cells", site=stopped, settings=BLOCKS)
    assert vp.open(image / "labels/cells").incomplete is not None
    result = vp.segment(image, out=image / "labels/cells", site=Inline(), settings=BLOCKS)
    assert result.is_complete and result.num_objects
    check_labels(image, version, "cells")
    volume = vp.open(image / "labels/cells")
    assert (volume.voxel_size_nm, volume.origin_nm, len(volume.levels)) == ((40, 8, 8), (80, 40, 16), 3)
    assert volume.incomplete is None
    np.testing.assert_array_equal(volume[...], vp.open(alone.out)[...])
    with vp.view(image / "labels/cells") as viewer:
        assert json.loads(urlopen(f"{viewer.url}still/0/objects/info", timeout=20).read())["inline"]["ids"]


@pytest.mark.parametrize(
    ("out", "settings", "words"),
    [
        ("image.zarr/labels/a", IDENTITY, "would be labels of .*image.zarr, and the output is an image; set output.ki"),
        ("none.zarr/labels/a", LABELS, "would be labels of .*none.zarr, which is no OME-Zarr image"),
        ("plain.zarr/labels/a", LABELS, "would be labels of .*plain.zarr, which is no OME-Zarr image"),
        ("old.zarr/labels/a", LABELS, "which is OME-Zarr 0.3, and volpipe writes 0.4, 0.5, 0.6"),
        ("image.zarr/labels/a.zarr", LABELS, "and have a name without the suffix of a container"),
        (
            "image.zarr/labels/a",
            [*LABELS, "output.format=ome-zarr-0.6"],
            "is ome-zarr-0.5, and output.format is ome-za",
        ),
        ("image.zarr/s0", LABELS, "would lie inside|would overwrite|exists"),
    ],
)
def test_what_is_no_place_for_labels_is_refused(tmp_path: Path, out: str, settings: list[str], words: str) -> None:
    image = image_of(tmp_path, "0.5")
    make(tmp_path / "plain.zarr", noise((4, 4, 4)))
    (tmp_path / "old.zarr").mkdir()
    (tmp_path / "old.zarr/.zattrs").write_text('{"multiscales": [{"version": "0.3", "datasets": [{"path": "0"}]}]}')
    before = fingerprint(image)
    with pytest.raises(vp.VolpipeError, match=words):
        vp.run(image, out=tmp_path / out, site=Inline(), settings=settings)
    assert fingerprint(image) == before


def test_copies_are_refused_where_they_would_be_no_labels_of_the_image(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    image, labels = image_of(tmp_path, "0.5"), numbered(tmp_path)
    with pytest.raises(vp.VolpipeError, match=r"its image is ome-zarr-0.5, not ome-zarr-0.4"):
        vp.convert(labels, image / "labels/a", format="ome-zarr-0.4")
    make(tmp_path / "grey.zarr", noise((4, 4, 4), "float32"))
    with pytest.raises(vp.VolpipeError, match=r"would be labels of .*, and .* has 1 × float32: labels are whole numb"):
        vp.convert(tmp_path / "grey.zarr", image / "labels/a")
    assert not (image / "labels").exists()
    with caplog.at_level(logging.WARNING):
        vp.convert(labels, image / "labels/a")
    assert (
        "image.zarr/labels/a do not lie as their image does: they have 16 × 16 × 24 voxels (of unknown size"
        in caplog.text
    )
    caplog.clear()
    placed = vp.View(voxel_size_nm=(40, 8, 8), origin_nm=(80, 40, 16))
    with caplog.at_level(logging.WARNING):
        vp.convert(vp.open(labels, view=placed), image / "labels/b")
    assert "do not lie" not in caplog.text
    assert "image.zarr has 2 levels and the copy has one: by OME-Zarr, labels have as many" in caplog.text
    with pytest.raises(vp.VolpipeError, match="exists already"):
        vp.convert(labels, image / "labels/a")


def test_an_image_of_several_points_in_time_has_labels_too(tmp_path: Path) -> None:
    import zarr

    axes = [{"name": "t", "type": "time"}] + [{"name": axis, "type": "space", "unit": "nanometer"} for axis in "zyx"]
    place = [{"type": "scale", "scale": [1, 40, 8, 8]}]
    datasets = [{"path": "s0", "coordinateTransformations": place}]
    group = zarr.open_group(tmp_path / "image.zarr", mode="w", zarr_format=3)
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": datasets}]}
    group.create_array("s0", data=noise((3, 16, 16, 24)), chunks=(1, 8, 8, 8), dimension_names=["t", "z", "y", "x"])
    vp.convert(numbered(tmp_path), tmp_path / "image.zarr/labels/a")
    check_labels(tmp_path / "image.zarr", "0.5", "a")


def test_labels_of_an_image_with_consolidated_metadata_are_listed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import zarr

    image = image_of(tmp_path, "0.4")
    zarr.consolidate_metadata(str(image))
    vp.convert(numbered(tmp_path), image / "labels/a")
    assert "has consolidated metadata, by which readers will not find a: consolidate them again" in caplog.text


# ---- what is known of each object, beside precomputed labels


def properties_in(labels: Path) -> dict[int, tuple[int, str]]:
    """Return voxels and description of each object, from what `info` names, which must be as Neuroglancer reads it."""
    info = json.loads((labels / "info").read_text())
    tree = json.loads((labels / info["segment_properties"] / "info").read_text())
    assert tree["@type"] == "neuroglancer_segment_properties"
    inline = tree["inline"]
    described, voxels = inline["properties"]
    assert (described["type"], voxels["type"], voxels["data_type"]) == ("label", "number", "uint32")
    assert len(inline["ids"]) == len(described["values"]) == len(voxels["values"]) == len(set(inline["ids"]))
    assert all(isinstance(label, str) for label in inline["ids"])
    return {
        int(label): (num, text)
        for label, num, text in zip(inline["ids"], voxels["values"], described["values"], strict=True)
    }


def test_segment_and_copies_of_its_labels_say_what_each_object_is(tmp_path: Path) -> None:
    grey = np.zeros((16, 16, 24), np.float32)
    grey[2:6, 3:9, 4:20], grey[8:12, 3:9, 4:20], grey[9, 12:14, 2:4] = 1, 1, 1
    make(tmp_path / "a.zarr", grey, attributes={"resolution": [40, 8, 8], "units": ["nm"] * 3})
    for suffix in (".precomputed", ".zarr"):
        vp.segment(tmp_path / "a.zarr", out=tmp_path / f"l{suffix}", site=Inline(), settings=BLOCKS)
    vp.convert(tmp_path / "l.zarr", tmp_path / "copy.precomputed")
    vp.convert(tmp_path / "l.zarr/s0", tmp_path / "level.precomputed")
    for name in ("l", "copy", "level"):
        labels = vp.open(tmp_path / f"{name}.precomputed")[...]
        known = properties_in(tmp_path / f"{name}.precomputed")
        values, counts = np.unique(labels[labels > 0], return_counts=True)
        assert {label: num for label, (num, _) in known.items()} == dict(
            zip(values.tolist(), counts.tolist(), strict=True)
        )
        for label, (num, text) in known.items():
            z, y, x = (slice(*map(int, part.split(":"))) for part in text.partition(", ")[0].split(","))
            assert np.count_nonzero(labels[z, y, x] == label) == num
        assert list(known) == sorted(known, key=lambda label: -known[label][0])
    vp.convert(tmp_path / "l.zarr/s0", tmp_path / "copy.n5")  # which has no place for it
    folder = RunFolder.from_output(tmp_path / "l.precomputed")
    assert vp.verify(tmp_path / "l.precomputed").differences == () and folder.path.is_dir()


def test_labels_without_a_table_have_no_properties(tmp_path: Path) -> None:
    source = vp.open(numbered(tmp_path), view=vp.View(voxel_size_nm=(40, 8, 8)))
    vp.convert(source, tmp_path / "a.precomputed")
    assert "segment_properties" not in json.loads((tmp_path / "a.precomputed/info").read_text())
