"""TIFF files, as many programs write them: in strips and tiles, of pages that differ, damaged, and real ones."""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from boxes import boxes_of, check_reads
from volumes import noise

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats import container, tiff
from volpipe.volumes.storage.metadata import Place
from volpipe.volumes.volume import ArraySpec, list_arrays, open_volume

ZYX, ZCYX = ("z", "y", "x"), ("z", "c", "y", "x")


def write(path: Path, data: np.ndarray, **settings: Any) -> Path:
    """Write `data` as grey planes unless told otherwise; tifffile takes three or four planes for colours."""
    tifffile.imwrite(path, data, **{"photometric": "minisblack"} | settings)
    return path


@pytest.mark.parametrize(
    ("compression", "settings"),
    [
        ("lzw", {}),
        ("lzw", {"predictor": True}),
        ("zlib", {"predictor": True}),
        ("zstd", {}),
        ("packbits", {}),
        ("lzma", {}),
        (None, {}),
    ],
)
@pytest.mark.parametrize("layout", [{"rowsperstrip": 5}, {"rowsperstrip": 1}, {}, {"tile": (16, 32)}])
def test_strips_and_tiles_of_every_compression(
    tmp_path: Path, compression: str | None, settings: dict[str, Any], layout: dict[str, Any]
) -> None:
    data = noise((3, 37, 41), "uint16")
    volume = open_volume(write(tmp_path / "a.tif", data, compression=compression, **settings, **layout))
    assert volume.codec == {None: "raw", "zlib": "deflate"}.get(compression, compression)
    strip = (1, layout.get("rowsperstrip", 37) if compression else 37, 41)  # of plain ones planes are read
    assert volume.chunks == (1, *layout["tile"]) if "tile" in layout else volume.chunks == strip
    check_reads(volume, data)


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("axes", ["ZCYX", "CZYX"])
@pytest.mark.parametrize("kind", ["ome", "imagej", "plain"])
def test_channels_come_first_whatever_their_place_in_the_file(
    tmp_path: Path, kind: str, axes: str, compression: str | None
) -> None:
    if kind == "imagej" and (axes == "CZYX" or compression):
        axes, compression = "ZCYX", None  # all that ImageJ has
    data = noise((4, 3, 17, 19) if axes == "ZCYX" else (3, 4, 17, 19), "uint16")
    form = {"ome": {"ome": True}, "imagej": {"imagej": True}, "plain": {}}[kind]
    volume = open_volume(write(tmp_path / "a.tif", data, metadata={"axes": axes}, compression=compression, **form))
    assert volume.axes == tuple(axes.lower())
    check_reads(volume, data)
    expected = data.swapaxes(0, 1) if axes == "ZCYX" else data
    assert (volume.num_channels, volume.spatial_shape) == (3, (4, 17, 19))
    for box in boxes_of((4, 17, 19)):
        assert np.array_equal(volume.open().read(box), expected[(slice(None), *box.slices)])


@pytest.mark.parametrize(("planar", "axes"), [("contig", ("z", "y", "x", "c")), ("separate", ZCYX)])
@pytest.mark.parametrize(
    "layout", [{}, {"compression": "zlib", "tile": (16, 16)}, {"compression": "lzw", "rowsperstrip": 4}]
)
def test_colours_are_channels(tmp_path: Path, planar: str, axes: tuple[str, ...], layout: dict[str, Any]) -> None:
    data = noise((4, 20, 22, 3) if planar == "contig" else (4, 3, 20, 22))
    volume = open_volume(write(tmp_path / "a.tif", data, photometric="rgb", planarconfig=planar, **layout))
    assert volume.axes == axes
    check_reads(volume, data)


def test_volumetric_tiles(tmp_path: Path) -> None:
    data = noise((40, 33, 35))
    volume = open_volume(write(tmp_path / "a.tif", data, volumetric=True, tile=(16, 16, 16), compression="zlib"))
    assert volume.chunks == (16, 16, 16)
    check_reads(volume, data)


def test_an_imagej_stack_beyond_its_first_page_is_read_whole(tmp_path: Path) -> None:
    """ImageJ writes one page for stacks beyond 4 GiB, and the voxels of all behind it."""
    data = noise((6, 13, 21), "uint16")
    first = struct.pack("<2sHI", b"II", 42, 8)
    text = b"ImageJ=1.54f\nimages=6\nslices=6\nunit=\\u00B5m\nspacing=0.5\n\0"
    tags = [
        (256, 4, 1, 21), (257, 4, 1, 13), (258, 3, 1, 16), (262, 3, 1, 1), (270, 2, len(text), 300), (273, 4, 1, 512),
        (277, 3, 1, 1), (278, 3, 1, 13), (279, 4, 1, 13 * 21 * 2), (282, 5, 1, 400), (283, 5, 1, 408),
    ]  # fmt: skip
    table = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    head = (first + table).ljust(300, b"\0") + text
    head = head.ljust(400, b"\0") + struct.pack("<IIII", 4, 1, 5, 1)
    (tmp_path / "a.tif").write_bytes(head.ljust(512, b"\0") + data.tobytes())
    volume = open_volume(tmp_path / "a.tif")
    assert volume.axes == ZYX
    assert volume.voxel_size_nm == pytest.approx((500.0, 200.0, 250.0))
    check_reads(volume, data)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"imagej": True, "resolution": (1 / 4, 1 / 5), "metadata": {"spacing": 6.5, "unit": "nm"}}, (6.5, 5, 4)),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"spacing": 0.3, "unit": "um"}}, (300, 200, 100)),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"unit": "micron"}}, (1000, 200, 100)),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"spacing": 0.3, "unit": "pixel"}}, None),
        ({"imagej": True, "metadata": {"spacing": 0.3, "unit": "um"}}, (300, 1000, 1000)),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"spacing": 3, "unit": "um", "yunit": "nm",
          "zunit": "pm"}}, (0.003, 0.2, 100)),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"spacing": 3, "unit": "um", "zunit": "pixel"}}, None),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"spacing": 3, "unit": "\\u03bcm"}}, (3000, 200, 100)),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"spacing": 3, "unit": "\\u00B5m"}}, (3000, 200, 100)),
        ({"imagej": True, "resolution": (10, 5), "resolutionunit": "CENTIMETER",
          "metadata": {"spacing": 3, "unit": "cm"}}, (3e7, 2e6, 1e6)),
        ({"imagej": True, "resolution": (10, 5), "metadata": {"spacing": 3, "unit": ""}}, None),
        ({"ome": True, "metadata": {f"PhysicalSize{axis}{end}": value for axis in "XYZ"
                                    for end, value in (("", 3), ("Unit", "Å"))}}, (0.3, 0.3, 0.3)),
        ({"ome": True, "metadata": {"PhysicalSizeX": 4, "PhysicalSizeXUnit": "nm", "PhysicalSizeY": 5,
          "PhysicalSizeYUnit": "nm", "PhysicalSizeZ": 0.03}}, (30, 5, 4)),
        ({"ome": True, "metadata": {"PhysicalSizeX": 4, "PhysicalSizeY": 5}}, None),
        ({"ome": True}, None),
        ({"metadata": {"spacing": 8, "unit": "nm"}, "resolution": (0.25, 0.2)}, (8, 5, 4)),
        ({"resolution": (300, 300), "resolutionunit": "inch"}, None),
        ({"resolution": (1e6, 1e6), "resolutionunit": "centimeter"}, None),
        ({}, None),
    ],
)  # fmt: skip
def test_voxel_sizes(tmp_path: Path, settings: dict[str, Any], expected: tuple[float, ...] | None) -> None:
    settings = settings | {"metadata": {"axes": "ZYX"} | settings.get("metadata", {})}
    volume = open_volume(write(tmp_path / "a.tif", noise((5, 12, 13)), **settings))
    assert volume.voxel_size_nm == (None if expected is None else pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resolution": (1e6, 5e5), "resolutionunit": "centimeter"}, "y 2e-06 cm, x 1e-06 cm, and nothing of z"),
        ({"imagej": True, "resolution": (1, 2), "metadata": {"unit": "cm"}}, "y 0.5 cm, x 1 cm, and nothing of z"),
        ({"ome": True, "metadata": {"PhysicalSizeX": 4, "PhysicalSizeY": 5}}, "y 5 µm, x 4 µm, and nothing of z"),
        (
            {"imagej": True, "resolution": (25000, 25000), "resolutionunit": "CENTIMETER", "metadata": {"unit": "um"}},
            "x 4e-05 cm by its resolution, and the unit 'um' in its description",
        ),
        (
            {"imagej": True, "resolution": (72, 72), "resolutionunit": "INCH", "metadata": {"unit": "nm"}},
            "x 0.0138889 inch by its resolution, and the unit 'nm' in its description",
        ),
        (
            {"resolution": (25000, 25000), "resolutionunit": "CENTIMETER", "metadata": {"unit": "nm", "spacing": 3}},
            "x 4e-05 cm by its resolution, and the unit 'nm' in its description",
        ),
        (
            {"imagej": True, "resolution": (10, 5), "metadata": {"unit": "inch", "spacing": 3}},
            "z, y, x 3 × 0.2 × 0.1 in the unit 'inch'",
        ),
        (
            {"imagej": True, "resolution": (10, 5), "metadata": {"unit": "pixel", "spacing": 3}},
            "z, y, x 3 × 0.2 × 0.1 in the unit 'pixel'",
        ),
        (
            {
                "ome": True,
                "metadata": {
                    f"PhysicalSize{axis}{end}": value for axis in "XYZ" for end, value in (("", 3), ("Unit", "pixel"))
                },
            },
            "z, y, x 3 × 3 × 3 in the unit 'pixel'",
        ),
    ],
)
def test_an_unsaid_voxel_size_is_unknown_with_the_reason(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    volume = open_volume(write(tmp_path / "a.tif", noise((12, 13)), **settings))
    assert volume.voxel_size_nm is None
    assert volume.notes == (f"voxel size unknown: it says {words}",)


def test_an_image_that_says_its_thickness_has_a_size(tmp_path: Path) -> None:
    settings = {"imagej": True, "resolution": (1, 2), "metadata": {"unit": "nm", "spacing": 7}}
    assert open_volume(write(tmp_path / "a.tif", noise((12, 13)), **settings)).voxel_size_nm == (7, 0.5, 1)


def test_points_in_time_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", noise((5, 4, 12, 13), "uint16"), imagej=True, metadata={"axes": "TZYX"})
    with pytest.raises(VolumeError, match="has 5 points in time"):
        open_volume(path)
    path = write(tmp_path / "b.tif", noise((1, 4, 1, 12, 13), "uint16"), imagej=True, metadata={"axes": "TZCYX"})
    assert open_volume(path).axes == ZYX


def test_several_images_in_a_file_are_chosen_by_number(tmp_path: Path) -> None:
    first, second = noise((3, 12, 13), "uint16"), noise((5, 20, 21), "uint8")
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        for data, size in ((first, 4), (second, 7)):
            sizes = {f"PhysicalSize{axis}": size for axis in "XYZ"} | {
                f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"
            }
            file.write(data, photometric="minisblack", metadata={"axes": "ZYX"} | sizes)
    with pytest.raises(VolumeError, match="holds 2 volumes; choose one by its key: 0, 1"):
        open_volume(tmp_path / "a.ome.tif")
    volume = open_volume(tmp_path / "a.ome.tif", "1")
    assert volume.voxel_size_nm == (7.0, 7.0, 7.0)
    check_reads(volume, second)
    check_reads(open_volume(tmp_path / "a.ome.tif/0"), first)
    assert [(v.key, v.shape) for v in list_arrays(tmp_path / "a.ome.tif")] == [("0", first.shape), ("1", second.shape)]
    with pytest.raises(VolumeError, match="no volume at"):
        open_volume(tmp_path / "a.ome.tif", "2")


def test_levels_of_an_ome_tiff(tmp_path: Path) -> None:
    data = noise((4, 64, 48), "uint16")
    sizes = {f"PhysicalSize{axis}": 4 for axis in "XYZ"} | {f"PhysicalSize{axis}Unit": "nm" for axis in "XYZ"}
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        file.write(data, subifds=2, tile=(16, 16), photometric="minisblack", metadata={"axes": "ZYX"} | sizes)
        file.write(data[:, ::2, ::2], subfiletype=1, tile=(16, 16), photometric="minisblack")
        file.write(data[:, ::4, ::4], subfiletype=1, tile=(16, 16), photometric="minisblack")
    finest = open_volume(tmp_path / "a.ome.tif")
    assert (finest.key, finest.levels) == ("s0", ("s0", "s1", "s2"))
    assert finest.voxel_size_nm == (4.0, 4.0, 4.0)
    check_reads(finest, data)
    coarse = open_volume(tmp_path / "a.ome.tif", level=2)
    assert (coarse.voxel_size_nm, coarse.origin_nm) == ((4.0, 16.0, 16.0), (0.0, 6.0, 6.0))
    check_reads(coarse, data[:, ::4, ::4])
    check_reads(open_volume(tmp_path / "a.ome.tif/s1"), data[:, ::2, ::2])
    assert [v.key for v in list_arrays(tmp_path / "a.ome.tif")] == ["s0", "s1", "s2"]
    with pytest.raises(VolumeError, match="has no level 3; its levels are 0 to 2"):
        open_volume(tmp_path / "a.ome.tif", level=3)


def test_an_image_in_another_file_of_an_ome_tiff_is_read_from_there(tmp_path: Path) -> None:
    """Voxels lie one after another in either file, at the same place."""
    first, second = noise((4, 16, 24)), noise((4, 16, 24), seed=1)
    images = "".join(
        f'<Image ID="Image:{i}"><Pixels ID="Pixels:{i}" DimensionOrder="XYZCT" Type="uint8" SizeX="24" SizeY="16" '
        'SizeZ="4" SizeC="1" SizeT="1"><TiffData IFD="0" FirstZ="0" PlaneCount="4">'
        f'<UUID FileName="{name}.ome.tif">urn:uuid:{name}</UUID></TiffData></Pixels></Image>'
        for i, name in enumerate("ab")
    )
    for name, data in zip("ab", (first, second), strict=True):
        text = f'<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{name}">{images}</OME>'
        write(tmp_path / f"{name}.ome.tif", data, description=text, metadata=None)
    check_reads(open_volume(tmp_path / "a.ome.tif", "0"), first)
    check_reads(open_volume(tmp_path / "a.ome.tif", "1"), second)


def test_an_ome_tiff_in_several_files_is_one_volume_and_a_missing_file_is_named(tmp_path: Path) -> None:
    data = noise((2, 12, 13), "uint16")
    ids = [f"urn:uuid:0000000{i}-0000-0000-0000-000000000000" for i in range(2)]
    planes = "".join(
        f'<TiffData IFD="0" FirstZ="{i}" PlaneCount="1"><UUID FileName="z{i}.ome.tif">{ids[i]}</UUID></TiffData>'
        for i in range(2)
    )
    for i in range(2):
        text = (
            f'<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="{ids[i]}">'
            '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint16" SizeX="13" SizeY="12" '
            f'SizeZ="2" SizeC="1" SizeT="1"><Channel ID="Channel:0"/>{planes}</Pixels></Image></OME>'
        )
        tifffile.imwrite(tmp_path / f"z{i}.ome.tif", data[i], description=text, metadata=None)
    check_reads(open_volume(tmp_path / "z0.ome.tif"), data)
    (tmp_path / "z1.ome.tif").unlink()
    with pytest.raises(VolumeError, match="1 of 2 pages are missing"):
        open_volume(tmp_path / "z0.ome.tif")


def test_pages_that_go_in_circles_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tif", noise((3, 8, 9)), compression="zlib")
    with tifffile.TiffFile(path) as file:
        first, last = file.pages[0].offset, file.pages[2].offset
        place = last + 2 + 12 * len(file.pages[2].tags)
    with path.open("r+b") as stream:
        stream.seek(place)
        assert stream.read(4) == bytes(4)
        stream.seek(place)
        stream.write(struct.pack("<I", first))
    with pytest.raises(VolumeError, match="go in circles"):
        open_volume(path)


def test_types_and_compressions_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VolumeError, match="holds complex64"):
        open_volume(write(tmp_path / "a.tif", np.zeros((3, 12, 13), np.complex64)))
    path = write(tmp_path / "b.tif", noise((3, 12, 13)), compression="zlib")
    whole = path.read_bytes()
    entry = struct.pack("<HHI", 259, 3, 1)
    assert whole.count(entry) == 3
    path.write_bytes(whole.replace(entry + struct.pack("<H", 8), entry + struct.pack("<H", 34661)))  # JBIG
    with pytest.raises(VolumeError, match=r"compressed with .*cannot be undone here"):
        open_volume(path)


def test_a_cache_keeps_what_was_decoded(tmp_path: Path) -> None:
    data = noise((3, 40, 41), "uint16")
    path = write(tmp_path / "a.tif", data, compression="zlib", rowsperstrip=8)
    cached = open_volume(path).open(cache_bytes=data.nbytes // 2)
    kept = cached[0, :8]
    with path.open("r+b") as stream:
        stream.seek(0)
        stream.write(bytes(path.stat().st_size))
    assert np.array_equal(cached[0, :8], kept)


@pytest.mark.parametrize(("name", "dtype"), [("a.tif", "uint8"), ("a.ome.tif", "uint8"), ("b.tif", "int64")])
def test_what_is_written_reads_back_whatever_its_shape(tmp_path: Path, name: str, dtype: str) -> None:
    for shape in itertools.product(((), (3,)), (1, 2, 3), (1, 2, 4), (1, 3, 5)):
        data = noise((*shape[0], *shape[1:]), dtype)
        spec = ArraySpec(data.shape, data.dtype, data.shape, axes=("c", "z", "y", "x")[-data.ndim :], codec="raw")
        channels = data.reshape(-1, *data.shape[-3:])
        box = Box.from_shape(data.shape[-3:])
        tiff.write(tmp_path / name, "", spec, Place((3, 2, 1)), [(box, channels)])
        volume = open_volume(tmp_path / name)
        assert volume.voxel_size_nm == (3, 2, 1)
        assert np.array_equal(volume.open().read(box), channels)


@pytest.mark.real
@pytest.mark.parametrize("folder", ["confocal_plant", "fibsem_medulla", "gala_tinyfib", "snemi_mini", "vnc_sstem_NC"])
def test_real_stacks_have_the_hashes_that_were_noted(shared: Path, folder: str) -> None:
    noted = json.loads((shared / "MANIFEST.json").read_text())[folder]
    for entry in noted:
        volume = open_volume(shared / folder / entry["file"])
        data = volume.open()[...]
        assert (list(data.shape), data.dtype.name) == (entry["shape"], entry["dtype"])
        assert hashlib.sha256(data.tobytes()).hexdigest() == entry["sha256_array"]
    assert len(noted) >= 2


def test_many_compressed_files_do_not_stay_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MOST_OPENED", 4)
    files = [tmp_path / f"{i}/a.tif" for i in range(30)]
    for file in files:
        file.parent.mkdir()
        write(file, noise((9, 10)), compression="zlib")
    gc.collect()
    gc.disable()
    try:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for file in files:
            assert open_volume(file)[...].shape == (9, 10)
        assert len(list(Path("/proc/self/fd").iterdir())) - before <= 4
    finally:
        gc.enable()


ODD = 5  # the page that differs: tifffile itself compares four others


def write_pages(path: Path, data: np.ndarray, usual: dict[str, Any], odd: dict[str, Any]) -> Path:
    """Write each plane as a page, the one at ODD with `odd` settings."""
    with tifffile.TiffWriter(path) as file:
        for z, plane in enumerate(data):
            settings = {"photometric": "minisblack"} | usual | (odd if z == ODD else {})
            file.write(settings.pop("data", plane), metadata=None, contiguous=False, **settings)
    return path


def write_tag(path: Path, tag: int, value: int) -> None:
    """Give the page at ODD another value of a tag."""
    with tifffile.TiffFile(path) as file:
        place = file.pages[ODD].aspage().tags[tag].valueoffset
    with path.open("r+b") as stream:
        stream.seek(place)
        stream.write(struct.pack("<H", value))


@pytest.mark.parametrize("usual", [{}, {"compression": "lzw"}, {"compression": "lzw", "tile": (16, 16)}])
@pytest.mark.parametrize(
    "odd",
    [
        {"compression": "lzw", "predictor": 2},
        {"compression": "zlib"},
        {"compression": None},
        {"compression": "lzw", "rowsperstrip": 3},
        {"compression": "zstd", "tile": (32, 16), "predictor": 2},
    ],
)
def test_a_page_is_read_by_its_own_tags(tmp_path: Path, usual: dict[str, Any], odd: dict[str, Any]) -> None:
    data = noise((12, 20, 24), "uint16")
    check_reads(open_volume(write_pages(tmp_path / "a.tif", data, usual, odd)), data)


@pytest.mark.parametrize("form", [{"imagej": True}, {"ome": True}, {}])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_one_page_that_differs_is_read_right_or_named_in_every_dialect(
    tmp_path: Path, form: dict[str, Any], compression: str | None
) -> None:
    data = noise((12, 20, 24), "uint16")
    path = tmp_path / "a.tif"
    settings = {
        "photometric": "minisblack",
        "compression": compression,
        "rowsperstrip": 20,
        "metadata": {"axes": "ZYX"},
    }
    tifffile.imwrite(path, data, **settings | form)
    write_tag(path, 262, 0)  # white is 0
    with pytest.raises(VolumeError, match="grey whose white is 0"):
        open_volume(path)
    write_tag(path, 262, 1)
    check_reads(open_volume(path), data)
    write_tag(path, 257, 19)
    with pytest.raises(VolumeError, match=r"page 5, .*uint16 \(19, 24\) .*first uint16 \(20, 24\)"):
        open_volume(path)


@pytest.mark.parametrize("bits", [2, 4, 12, 14])
def test_packed_values_are_unpacked_whatever_is_white(tmp_path: Path, bits: int) -> None:
    data = (noise((5, 20, 25), "uint16") % 2**bits).astype(np.uint8 if bits < 9 else np.uint16)
    for photometric in ("minisblack", "miniswhite"):
        path = tmp_path / f"{photometric}.tif"
        tifffile.imwrite(path, data, bitspersample=bits, photometric=photometric)
        check_reads(open_volume(path), data)


@pytest.mark.parametrize(
    ("shape", "settings", "note"),
    [
        ((5, 32, 48), {"photometric": "palette", "colormap": noise((3, 256), "uint16")}, "palette"),
        ((5, 32, 48), {"photometric": "palette", "colormap": np.tile(np.arange(256, dtype="u2") * 257, (3, 1))}, ""),
        ((5, 32, 48, 3), {"photometric": "rgb"}, "red, green and blue"),
        ((5, 32, 48, 4), {"photometric": "rgb", "extrasamples": ["unassalpha"], "compression": "lzw"}, "red, green"),
        ((5, 4, 32, 48), {"photometric": "separated", "planarconfig": "separate"}, "CMYK"),
        ((5, 32, 48, 3), {"photometric": "cielab"}, "CIELAB"),
        ((5, 32, 48, 3), {"photometric": "ycbcr"}, "YCbCr"),
        ((5, 32, 48, 3), {"photometric": "rgb", "compression": "jpeg", "subsampling": (2, 2)}, "red, green"),
        ((5, 32, 48), {"photometric": "minisblack", "compression": "jpeg"}, ""),
    ],
)
def test_colours_are_what_tifffile_reads_and_named(
    tmp_path: Path, shape: tuple[int, ...], settings: dict[str, Any], note: str
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", noise(shape), **settings)
    volume = open_volume(tmp_path / "a.tif")
    check_reads(volume, tifffile.imread(tmp_path / "a.tif"))
    notes = [text for text in volume.notes if "guessed" not in text]
    assert len(notes) == bool(note)
    assert note in " ".join(notes)


@pytest.mark.parametrize("dtype", ["uint16", "float16", "float32", "float64"])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_predictors_of_both_byte_orders(tmp_path: Path, dtype: str, byteorder: str) -> None:
    data = noise((5, 20, 24), dtype)
    predictor = 2 if dtype == "uint16" else 3
    settings = {"photometric": "minisblack", "compression": "lzw", "predictor": predictor, "rowsperstrip": 7}
    tifffile.imwrite(tmp_path / "a.tif", data, byteorder=byteorder, **settings)
    check_reads(open_volume(tmp_path / "a.tif"), data)


def test_unknown_interpretations_are_refused_by_number(tmp_path: Path) -> None:
    write_pages(tmp_path / "a.tif", noise((ODD + 1, 20, 24)), {}, {})
    with tifffile.TiffFile(tmp_path / "a.tif", mode="r+b") as file:
        for page in file.pages:
            page.aspage().tags[262].overwrite(32845)
    with pytest.raises(VolumeError, match="photometric interpretation 32845"):
        open_volume(tmp_path / "a.tif")


@pytest.mark.parametrize("settings", [{}, {"compression": "zlib"}, {"photometric": "rgb"}])
@pytest.mark.parametrize("has_descriptions", [True, False])
def test_images_appended_are_a_stack(tmp_path: Path, settings: dict[str, Any], has_descriptions: bool) -> None:
    data = noise((12, 20, 24, 3) if settings.get("photometric") else (12, 20, 24))
    for plane in data:
        described = {} if has_descriptions else {"metadata": None}
        tifffile.imwrite(tmp_path / "a.tif", plane, append=True, **{"photometric": "minisblack"} | settings | described)
    volume = open_volume(tmp_path / "a.tif")
    check_reads(volume, data)
    assert any("12 images of one page" in note for note in volume.notes) == has_descriptions
    assert [each.key for each in list_arrays(tmp_path / "a.tif")] == [""]
    if has_descriptions:
        check_reads(open_volume(tmp_path / "a.tif", "7"), data[7])


def test_images_of_different_shapes_are_not_joined(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as file:
        for n in (20, 20, 21):
            file.write(noise((n, 24)))
    with pytest.raises(
        VolumeError, match=r"holds 3 volumes \(page 2, .*\(21, 24\).*\); choose one by its key: 0, 1, 2"
    ):
        open_volume(tmp_path / "a.tif")


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"data": noise((19, 24), "uint16")}, r"uint16 \(19, 24\) \(grey\) and the first uint16 \(20, 24\)"),
        ({"data": noise((20, 24), "int16")}, "int16"),
        ({"data": noise((20, 24, 3), "uint16"), "photometric": "rgb"}, "RGB"),
    ],
)
def test_a_page_of_another_kind_is_refused_by_its_number(tmp_path: Path, odd: dict[str, Any], words: str) -> None:
    path = write_pages(tmp_path / "a.tif", noise((12, 20, 24), "uint16"), {}, odd)
    with pytest.raises(VolumeError, match=f"page 5, counted from 0, is .*{words}.*choose one by its key: 0, 1"):
        open_volume(path)
    assert any("page 5 of the file" in note for note in open_volume(path, "0").notes)
