"""What has a name but cannot be opened is a fault in each format, whoever reads it; what has no name is fill."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import tensorstore
import tifffile
import zarr
from chunk_layouts import DATA, HASHLESS, LAYOUTS, chunk_files, root, write
from command import Give
from numcodecs import Delta
from volumes import noise

import volpipe as vp
from volpipe.errors import VolumeError
from volpipe.estimation.limits import check_access
from volpipe.geometry.grid import Box
from volpipe.volumes.node_cache import through_cache
from volpipe.volumes.storage import tensorstore as storage
from volpipe.volumes.survey import measure_footprint
from volpipe.volumes.volume import Reader, list_arrays, open_volume

ANNEX = "/nonexistent/.git/annex/objects/a1"


def _into_a_socket(file: Path) -> None:
    here = Path.cwd()
    os.chdir(file.parent)  # the whole path may be too long for a socket
    try:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.bind(file.name)
    finally:
        os.chdir(here)


FAULTS: dict[str, Callable[[Path], object]] = {
    "dead link": lambda file: file.symlink_to(f"{ANNEX}/{file.name}"),
    "link beside it": lambda file: file.symlink_to("gone"),
    "link to a link": lambda file: (file.symlink_to("on"), (file.parent / "on").symlink_to("gone")),
    "link in a circle": lambda file: file.symlink_to(file.name),
    "link through a file": lambda file: file.symlink_to("/etc/passwd/a"),
    "link to a folder": lambda file: file.symlink_to("/tmp"),
    "folder": Path.mkdir,
    "socket": _into_a_socket,
    "pipe": os.mkfifo,
}
BOTH = (*LAYOUTS, "zarr-python", "hashed shards")


def written(path: Path, layout: str) -> list[Path]:
    """Write DATA at `path`; return its chunk files, or shards."""
    if layout == "zarr-python":  # tensorstore knows no filters
        array = zarr.create_array(
            path, shape=DATA.shape, dtype=DATA.dtype, chunks=(8, 8, 8), zarr_format=2, filters=[Delta("u2")]
        )
        array[...] = DATA
        return chunk_files(path)
    if layout != "hashed shards":
        return write(path, layout)
    scale = {
        "key": "k", "size": DATA.shape[::-1], "encoding": "raw", "chunk_size": [8, 8, 8], "resolution": [8, 8, 30],
        "voxel_offset": [0, 0, 0], "sharding": HASHLESS | {"hash": "murmurhash3_x86_128"},
    }  # fmt: skip
    spec = {
        "driver": "neuroglancer_precomputed", "kvstore": f"file://{path}/", "create": True,
        "multiscale_metadata": {"type": "image", "data_type": "uint16", "num_channels": 1}, "scale_metadata": scale,
    }  # fmt: skip
    tensorstore.open(spec).result()[...] = DATA.T[..., None]
    return chunk_files(path)


def place_of(path: Path, layout: str) -> Path:
    return root(path, "precomputed" if layout == "hashed shards" else layout)


def name(layout: str) -> str:
    return "a.n5" if layout == "n5" else "a"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at the files of a read that takes as long as a pipe does, soon."""
    monkeypatch.setattr(storage, "LOOK_SECONDS", 0.2)


BOXES = [
    Box(start, tuple(min(a + 8, n) for a, n in zip(start, DATA.shape, strict=True)))
    for start in [(8 * z, 8 * y, 8 * x) for z, y, x in np.ndindex(3, 3, 2)]
]


def is_taken_for_empty(reader: Reader, box: Box) -> bool:
    """Return whether `box` is said to hold nothing that is stored."""
    try:
        return not reader.is_stored(box)
    except VolumeError:
        return False


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("layout", BOTH)
def test_a_chunk_that_cannot_be_opened_is_never_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, fault: str
) -> None:
    """The whole, each chunk alone, whether something is stored there, and all by way of a node's own disk."""
    monkeypatch.setenv("VOLPIPE_NODE_DIRECTORY", str(tmp_path / "node"))
    path = tmp_path / ("a.n5" if layout == "n5" else "a")
    file = written(path, layout)[-1]
    content = file.read_bytes()
    file.unlink()
    FAULTS[fault](file)
    volume = open_volume(place_of(path, layout))
    for each in (volume, through_cache(volume, fault)):
        with pytest.raises(VolumeError, match=file.name):
            each.open()[...]
    reader, num_refused = volume.open(), 0
    for box in BOXES:
        assert not is_taken_for_empty(reader, box)
        try:
            np.testing.assert_array_equal(reader.read(box)[0], DATA[box.slices])
        except VolumeError:
            num_refused += 1
    assert num_refused > 0
    shutil.rmtree(file) if file.is_dir() and not file.is_symlink() else file.unlink()
    file.write_bytes(content)
    (file.parent / "on").unlink(missing_ok=True)
    np.testing.assert_array_equal(volume.open()[...], DATA)


@pytest.mark.parametrize("layout", BOTH)
def test_a_chunk_without_a_name_is_fill(tmp_path: Path, layout: str) -> None:
    path = tmp_path / ("a.n5" if layout == "n5" else "a")
    written(path, layout)[-1].unlink()
    data = open_volume(place_of(path, layout)).open()[...]
    assert ((data == 0) | (data == DATA)).all() and 0 < np.count_nonzero(data == 0) < data.size


@pytest.mark.parametrize("fault", ["dead link", "link in a circle", "socket"])
@pytest.mark.parametrize("layout", [layout for layout in BOTH if layout not in ("zarr2", "zarr-python")])
def test_a_folder_of_chunks_that_cannot_be_opened_is_never_fill(tmp_path: Path, layout: str, fault: str) -> None:
    """The folder of the last chunk, of all in a nested layout, or that of a level."""
    path = tmp_path / ("a.n5" if layout == "n5" else "a")
    folder = written(path, layout)[-1].parent
    shutil.move(folder, tmp_path / "elsewhere")
    FAULTS[fault](folder)
    with pytest.raises(VolumeError, match=f"/{folder.name}(/[^ ]*)? is a |holds {folder.name}"):
        open_volume(place_of(path, layout)).open()[...]


@pytest.mark.parametrize("number", [150, 1199])
def test_one_dead_link_among_more_files_than_are_listed_is_met_where_it_is_read(tmp_path: Path, number: int) -> None:
    array = zarr.create_array(tmp_path / "a", shape=(1200, 2, 2), dtype="u1", chunks=(1, 2, 2), zarr_format=2)
    array[...] = 7
    file = tmp_path / f"a/{number}.0.0"
    file.unlink()
    file.symlink_to(f"{ANNEX}/{number}")
    volume = open_volume(tmp_path / "a")
    with pytest.raises(VolumeError, match=f"{number}.0.0 is a link that leads nowhere: it names {ANNEX}/{number}"):
        volume.open()[...]
    with pytest.raises(VolumeError, match="leads nowhere"):
        volume.open()[number]
    np.testing.assert_array_equal(volume.open()[:number], 7)
    with pytest.raises(VolumeError, match="leads nowhere"):
        measure_footprint(volume)


def _slices(path: Path) -> Path:
    path.mkdir()
    for z in range(8):
        tifffile.imwrite(path / f"s{z:03}.tif", noise((16, 16), seed=z))
    return path / "s005.tif"


def _virtual(path: Path) -> Path:
    source = path.with_name("source.h5")
    with h5py.File(source, "w") as file:
        file["raw"] = noise((8, 16, 16))
    layout = h5py.VirtualLayout((8, 16, 16), "u1")
    layout[...] = h5py.VirtualSource("source.h5", "raw", (8, 16, 16))
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("raw", layout)
    return source


def _outside(path: Path) -> Path:
    source = path.with_name("source.h5")
    with h5py.File(source, "w") as file:
        file["raw"] = noise((8, 16, 16))
    with h5py.File(path, "w") as file:
        file["raw"] = h5py.ExternalLink("source.h5", "raw")
    return source


def _pyramid(path: Path) -> Path:
    (path / "deep").mkdir(parents=True)
    (path / ".zgroup").write_text('{"zarr_format": 2}')
    zarr.create_array(path / "deep" / "raw", shape=(8, 16, 16), dtype="u1", chunks=(8, 8, 8), zarr_format=2)[...] = 1
    return path / "deep" / "raw"


def _in_format(suffix: str, name: str = "") -> Callable[[Path], Path]:
    def make(path: Path) -> Path:
        np.save(path.with_name("source.npy"), noise((8, 16, 16)))
        volume = vp.open(path.with_name("source.npy"), view=vp.View(voxel_size_nm=(8, 8, 8)))
        vp.convert(volume, path.with_suffix(suffix), progress=False)
        path.with_suffix(suffix).rename(path)
        return path / name if name else path

    return make


MADE: dict[str, Callable[[Path], Path]] = {
    **{f"whole {suffix}": _in_format(suffix) for suffix in (".npy", ".tif", ".mrc", ".h5", ".n5", ".zarr")},
    "slices": _slices, "virtual": _virtual, "outside": _outside, "array in a container": _pyramid,
    "attributes.json": _in_format(".n5", "attributes.json"), "zarr.json": _in_format(".zarr", "zarr.json"),
    "zarr.json of a level": _in_format(".zarr", "s0/zarr.json"), "level": _in_format(".zarr", "s0"),
    "info": _in_format(".precomputed", "info"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MADE)
def test_other_files_that_are_dead_links_are_named(tmp_path: Path, kind: str) -> None:
    """Whole volumes, metadata, slices, files that a file names, arrays in a container."""
    path = tmp_path / "volume"
    file = MADE[kind](path)
    shutil.move(file, tmp_path / "away")
    file.symlink_to(f"{ANNEX}/x")
    place = f"{path}/raw" if kind in ("virtual", "outside") else path
    with pytest.raises(VolumeError, match=f"{file.name}.* (is a link that leads nowhere|is missing)"):
        vp.open(place)[...]


@pytest.mark.parametrize("command", ["info", "convert", "plan", "run", "compare", "evaluate", "segment"])
def test_every_command_says_that_a_link_leads_nowhere(tmp_path: Path, give: Give, command: str) -> None:
    """Which it reads as a volume; none takes it for empty, or for another user's."""
    for name in ("a.zarr", "b.zarr"):
        array = zarr.create_array(tmp_path / name, shape=(16, 16, 16), dtype="u1", chunks=(8, 8, 8), zarr_format=2)
        array[...] = noise((16, 16, 16)) | 1
    (tmp_path / "a.zarr/1.1.1").unlink()
    (tmp_path / "a.zarr/1.1.1").symlink_to(f"{ANNEX}/x")
    site = ("--config", "threads")
    given = {
        "info": ["info", "a.zarr"], "convert": ["convert", "a.zarr", "a.npy"],
        "plan": ["plan", *site, "--set", "net.name=identity", "a.zarr", "-o", "o.zarr"],
        "run": ["run", *site, "--set", "net.name=identity", "a.zarr", "-o", "o.zarr"],
        "compare": ["compare", "a.zarr", "b.zarr"], "evaluate": ["evaluate", "--data-range", "255", "a.zarr", "b.zarr"],
        "segment": ["segment", *site, "--set", "input.kind=foreground", "a.zarr", "-o", "o.zarr"],
    }[command]  # fmt: skip
    ended = give(*given)
    assert ended.code in (1, 2) and "nowhere" in ended.out + ended.err, ended


def test_a_volume_whose_files_lead_nowhere_is_not_called_another_users(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/0").symlink_to(f"{ANNEX}/x")
    with pytest.raises(VolumeError, match="leads nowhere"):
        check_access(tmp_path / "a", tmp_path / "o")


def test_a_container_lists_what_it_has_beside_a_dead_link(tmp_path: Path) -> None:
    _pyramid(tmp_path / "g")
    (tmp_path / "g/notes").symlink_to("gone")
    assert [volume.key for volume in list_arrays(tmp_path / "g")] == ["deep/raw"]
