"""References in a file: followed beside it and below, refused elsewhere, and never in a circle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import tifffile
from arrays import invented
from hypothesis import given, settings
from hypothesis import strategies as st
from metadata import GROUP, GROUP3, ZARRAY, lay

from volpipe.errors import ChunkError, VolumeError
from volpipe.volumes.formats import hdf5_probe
from volpipe.volumes.formats.zarr import consolidated_arrays
from volpipe.volumes.storage.paths import check_beside
from volpipe.volumes.volume import list_arrays, open_volume

pytestmark = pytest.mark.usefixtures("_one_hdf5_process")

DATA = invented((4, 6, 8), "uint8")
SECRET = np.full(DATA.shape, 77, "u1")


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """Return a folder that a stranger sent; what is beside it is none of the stranger's business."""
    (tmp_path / "sent").mkdir()
    (tmp_path / "secret.raw").write_bytes(SECRET.tobytes())
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["raw"] = SECRET
    return tmp_path / "sent"


@pytest.mark.parametrize("name", ["{}/secret.raw", "../secret.raw", "a/../../secret.raw"])
def test_voxels_in_an_external_file_elsewhere_are_refused(stranger: Path, name: str) -> None:
    with h5py.File(stranger / "a.h5", "w") as file:
        file.create_dataset("raw", DATA.shape, "u1", external=[(name.format(stranger.parent), 0, DATA.nbytes)])
    with pytest.raises(VolumeError, match=r"secret\.raw, which does not lie in its folder .*sent; put it there"):
        open_volume(stranger / "a.h5")


@pytest.mark.parametrize("name", ["{}/secret.h5", "../secret.h5"])
def test_virtual_datasets_over_files_elsewhere_are_refused(stranger: Path, name: str) -> None:
    layout = h5py.VirtualLayout(DATA.shape, "u1")
    layout[:] = h5py.VirtualSource(name.format(stranger.parent), "raw", DATA.shape)
    with h5py.File(stranger / "a.h5", "w") as file:
        file.create_virtual_dataset("raw", layout)
    outer = h5py.VirtualLayout(DATA.shape, "u1")
    outer[:] = h5py.VirtualSource("a.h5", "raw", DATA.shape)
    with h5py.File(stranger / "b.h5", "w") as file:
        file.create_virtual_dataset("raw", outer)
    for file_name in ("a.h5", "b.h5"):
        with pytest.raises(VolumeError, match=r"a\.h5 refers to .*secret\.h5, which does not lie in its folder"):
            open_volume(stranger / file_name)


def test_links_to_files_elsewhere_are_refused_alone(stranger: Path, caplog: pytest.LogCaptureFixture) -> None:
    with h5py.File(stranger / "a.h5", "w") as file:
        file["raw"] = DATA
        file["linked"] = h5py.ExternalLink("../secret.h5", "raw")
        file["soft"] = h5py.SoftLink("/linked")
        file["circle"] = h5py.SoftLink("/circle")
    for key in ("linked", "soft"):
        with pytest.raises(VolumeError, match=r"secret\.h5, which does not lie in its folder"):
            open_volume(stranger / "a.h5", key)
    assert [volume.key for volume in list_arrays(stranger / "a.h5")] == ["raw"]
    assert "secret.h5" in caplog.text


def test_the_user_may_name_folders_that_are_trusted(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(stranger / "a.h5", "w") as file:
        file["linked"] = h5py.ExternalLink("../secret.h5", "raw")
    monkeypatch.setenv("VOLPIPE_LINKS", f"/nowhere{os.pathsep}{stranger.parent}")
    np.testing.assert_array_equal(open_volume(stranger / "a.h5", "linked").open()[...], SECRET)


def test_an_external_file_is_not_taken_from_the_current_folder(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(stranger / "a.h5", "w") as file:
        file.create_dataset("raw", DATA.shape, "u1", external=[("secret.raw", 0, DATA.nbytes)])
    (stranger / "secret.raw").write_bytes(DATA.tobytes())
    monkeypatch.chdir(stranger.parent)
    with pytest.raises(
        VolumeError, match=r"looks for in the current folder; set HDF5_EXTFILE_PREFIX to '\$\{ORIGIN\}'"
    ):
        open_volume(stranger / "a.h5")
    monkeypatch.chdir(stranger)
    np.testing.assert_array_equal(open_volume(stranger / "a.h5").open()[...], DATA)


def test_links_that_the_user_made_are_followed(stranger: Path) -> None:
    (stranger / "mine.h5").symlink_to(stranger.parent / "secret.h5")
    np.testing.assert_array_equal(open_volume(stranger / "mine.h5").open()[...], SECRET)


@pytest.mark.parametrize("sources", [["a.h5"], ["b.h5", "a.h5"], ["."]], ids=str)
def test_virtual_datasets_made_of_themselves_are_refused(tmp_path: Path, sources: list[str]) -> None:
    """HDF5 2.0 overflows its stack on them, and the process ends."""
    for name, source in zip(("a.h5", "b.h5"), sources, strict=False):
        layout = h5py.VirtualLayout(DATA.shape, "u1")
        layout[:] = h5py.VirtualSource(source, "raw", DATA.shape)
        with h5py.File(tmp_path / name, "w") as file:
            file.create_virtual_dataset("raw", layout)
    with pytest.raises(VolumeError, match="is a virtual dataset that is made of itself"):
        open_volume(tmp_path / "a.h5")


def test_numbered_sources_are_followed_once(tmp_path: Path) -> None:
    space = h5py.h5s.create_simple((2, *DATA.shape), (h5py.h5s.UNLIMITED, *DATA.shape))
    space.select_hyperslab((0, 0, 0, 0), (h5py.h5s.UNLIMITED, 1, 1, 1), block=(1, *DATA.shape))
    settings_ = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    settings_.set_virtual(space, b"part%b.h5", b"raw", h5py.h5s.create_simple((1, *DATA.shape)))
    with h5py.File(tmp_path / "part0.h5", "w") as file:
        h5py.h5d.create(file.id, b"raw", h5py.h5t.NATIVE_UINT8, space, settings_)
    with pytest.raises(VolumeError, match=r"part0\.h5, whose raw is virtual"):
        open_volume(tmp_path / "part0.h5")


OME = """<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" UUID="urn:uuid:{own}">
<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" SizeX="8" SizeY="6" SizeZ="2" SizeC="1"
 SizeT="1"><Channel ID="Channel:0:0" SamplesPerPixel="1"/>
<TiffData IFD="0" FirstZ="0" PlaneCount="1"><UUID FileName="a.ome.tif">urn:uuid:{own}</UUID></TiffData>
<TiffData IFD="0" FirstZ="1" PlaneCount="1"><UUID FileName="{name}">urn:uuid:{other}</UUID></TiffData>
</Pixels></Image></OME>"""


@pytest.mark.parametrize("name", ["../secret.ome.tif", "beside.ome.tif"])
def test_an_ome_tiff_is_read_from_files_beside_it_alone(stranger: Path, name: str) -> None:
    own, other = (f"00000000-0000-0000-0000-00000000000{i}" for i in (1, 2))
    for path, plane, uuid in ((stranger / "a.ome.tif", DATA[0], own), (stranger / name, SECRET[0], other)):
        text = OME.format(own=uuid, other=other, name=name)
        tifffile.imwrite(path, plane, description=text, metadata=None, photometric="minisblack")
    if name.startswith(".."):
        with pytest.raises(VolumeError, match=r"a\.ome\.tif refers to .*secret\.ome\.tif, which does not lie in"):
            open_volume(stranger / "a.ome.tif")
    else:
        np.testing.assert_array_equal(open_volume(stranger / "a.ome.tif").open()[...], [DATA[0], SECRET[0]])


@pytest.mark.parametrize("path", ["..", "../x", "/etc", "a/../../x"])
def test_plates_and_consolidated_metadata_lead_nowhere_else(tmp_path: Path, path: str) -> None:
    lay(tmp_path / "x", {".zgroup": GROUP, ".zattrs": {"well": {"images": [{"path": "found"}]}}})
    lay(tmp_path / "v", {".zgroup": GROUP, ".zattrs": {"plate": {"wells": [{"path": path}]}}})
    with pytest.raises(VolumeError, match="it names none"):
        open_volume(tmp_path / "v")
    array = {"node_type": "array"}
    lay(tmp_path / "c", {"zarr.json": GROUP3 | {"consolidated_metadata": {"metadata": {path: array, "a": array}}}})
    assert [key for key in consolidated_arrays(tmp_path / "c") or [] if ".." in key] == []
    lay(tmp_path / "d", {".zmetadata": {"metadata": {f"{path}/.zarray": ZARRAY, "a/.zarray": ZARRAY}}})
    assert [key for key in consolidated_arrays(tmp_path / "d") or [] if ".." in key] == []


def test_groups_of_hdf5_that_would_lead_out_of_the_file_are_left_out(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a/raw"] = DATA
        file.id.links.create_soft(b"..", b"/a")
    assert [volume.key for volume in list_arrays(tmp_path / "a.h5")] == ["a/raw"]


PARTS = st.lists(st.sampled_from(["..", ".", "a", "b", "sent"]), max_size=6)


@settings(max_examples=100)
@given(PARTS, st.sampled_from(["", "/", "/data/", "/data/sent/"]))
def test_a_reference_is_followed_where_it_stays_in_the_folder(parts: list[str], start: str) -> None:
    name = start + "/".join(parts)
    found = ["data", "sent"] if not start else []  # folders from the root, walked one part after the other
    for part in name.split("/"):
        found = found[:-1] if part == ".." else found if part in ("", ".") else [*found, part]
    if found[:2] == ["data", "sent"]:
        assert check_beside(name, Path("/data/sent/a.h5")) == Path("/", *found)
    else:
        with pytest.raises(VolumeError, match="does not lie in its folder /data/sent"):
            check_beside(name, Path("/data/sent/a.h5"))


def test_a_file_that_crashes_the_library_ends_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = DATA
    codes = {
        "crashes the HDF5 library, with code -11": f"import os; os.kill(os.getpid(), {int(signal.SIGSEGV)})",
        "kept the HDF5 library busy for 1 s": "import time; time.sleep(60)",
    }
    monkeypatch.setattr(hdf5_probe, "_idle", [])
    monkeypatch.setattr(hdf5_probe, "_keeping", False)
    for words, code in codes.items():
        started: list[subprocess.Popen[bytes]] = []

        def start(code: str = code, started: list[subprocess.Popen[bytes]] = started) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
            started.append(process)
            return process

        with monkeypatch.context() as patch:
            patch.setattr(hdf5_probe, "_start_probe", start)
            patch.setattr(hdf5_probe, "SECONDS", 1.0 if "sleep" in code else hdf5_probe.SECONDS)
            with pytest.raises(VolumeError, match=words):
                open_volume(tmp_path / "a.h5")
        assert [process.poll() is not None for process in started] == [True]
    np.testing.assert_array_equal(open_volume(tmp_path / "a.h5").open()[...], DATA)


def test_an_attribute_that_asks_for_much_memory_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["raw"] = DATA
        file["raw"].attrs["names"] = np.array(["z", "y", "x"], object)
        id = file["raw"].attrs.get_id("names")
        assert id.get_storage_size() == 48
    text = (tmp_path / "a.h5").read_bytes()
    heap = text.index(b"GCOL")
    reference = (1).to_bytes(4, "little") + heap.to_bytes(8, "little")  # length 1, then the address of the heap
    assert text.count(reference) == 3
    (tmp_path / "a.h5").write_bytes(text.replace(reference, (2**29).to_bytes(4, "little") + reference[4:]))
    with pytest.raises(VolumeError, match="too much memory"):
        open_volume(tmp_path / "a.h5")


def test_a_chunk_shorter_than_its_checksum_is_refused(tmp_path: Path) -> None:
    """HDF5 2.0 reads past its end, and the process ends."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        made = file.create_dataset("raw", DATA.shape, "u1", chunks=(2, 6, 8), fletcher32=True)
        made[...] = DATA
        made.id.write_direct_chunk((2, 0, 0), b"xy")
    reader = open_volume(tmp_path / "a.h5").open()
    np.testing.assert_array_equal(reader[:2], DATA[:2])
    with pytest.raises(ChunkError, match=r"chunk \(1, 0, 0\) in .*has 2 bytes, less than its checksum"):
        reader[...]


def test_damaged_trees_of_hdf5_are_volume_errors(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("group/raw", data=DATA, chunks=(2, 3, 4))
        file["group/raw"].dims[0].label = "z"
    text = (tmp_path / "a.h5").read_bytes()
    for mark in (b"TREE", b"HEAP", b"SNOD", b"GCOL"):
        assert mark in text
        (tmp_path / "a.h5").write_bytes(text.replace(mark, b"????"))
        try:
            np.testing.assert_array_equal(open_volume(tmp_path / "a.h5").open()[...], DATA)
        except VolumeError as error:
            assert "a.h5" in str(error)
        else:
            assert mark == b"GCOL"  # the names of axes alone


def test_an_npy_header_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (4, 6, 8 "
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(VolumeError, match=r"a\.npy is no array that NumPy wrote"):
        open_volume(tmp_path / "a.npy")


def test_offsets_of_strips_that_are_no_integers_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "a.tif", DATA[0], compression="zlib", rowsperstrip=3, bigtiff=True)
    text = bytearray((tmp_path / "a.tif").read_bytes())
    with tifffile.TiffFile(tmp_path / "a.tif") as tif:
        place = tif.pages[0].tags["StripOffsets"].offset
    text[place + 2 : place + 4] = (12).to_bytes(2, "little")  # DOUBLE, of as many bytes
    (tmp_path / "a.tif").write_bytes(text)
    with pytest.raises(VolumeError, match=r"a\.tif"):
        open_volume(tmp_path / "a.tif").open()[...]


def test_a_picture_of_another_type_than_its_page_is_refused(tmp_path: Path) -> None:
    data = DATA[0].astype("u2") + 1000
    tifffile.imwrite(tmp_path / "a.tif", data, compression="jpeg2000")
    np.testing.assert_array_equal(open_volume(tmp_path / "a.tif").open()[...], data)
    for bits in (8, 1):
        with tifffile.TiffFile(tmp_path / "a.tif", mode="r+b") as tif:
            tif.pages[0].tags["BitsPerSample"].overwrite(bits)
        with pytest.raises(ChunkError, match=r"a\.tif.* holds uint16 instead of (uint8|bool)"):
            open_volume(tmp_path / "a.tif").open()[...]


def test_pipes_in_place_of_metadata_are_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    os.mkfifo(tmp_path / "v/zarr.json")
    with pytest.raises(VolumeError, match="not valid JSON"):
        open_volume(tmp_path / "v")


def test_a_group_of_too_many_levels_is_refused(tmp_path: Path) -> None:
    lay(tmp_path / "v", {".zgroup": GROUP, "0/.zarray": ZARRAY})
    text = json.dumps({"multiscales": [{"datasets": [{"path": "0"}] * 101}]})
    (tmp_path / "v/.zattrs").write_text(text, encoding="utf-8")
    with pytest.raises(VolumeError, match="names 101 datasets"):
        open_volume(tmp_path / "v")
