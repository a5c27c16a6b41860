"""Volumes: found by location and key, opened once by a process, and carried to another by value."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays import invented, make
from conftest import ROOT
from metadata import ARRAY, GROUP, ZARR3, lay

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.volume import Volume, list_arrays, open_volume, open_writer

# ---- finding


def test_the_only_volume_is_found(tmp_path: Path) -> None:
    lay(tmp_path / "a.n5", {"volumes/raw/attributes.json": ARRAY})
    for location, key in [
        ("a.n5", None),
        ("a.n5", "volumes/raw"),
        ("a.n5", "/volumes/raw/"),
        ("a.n5/volumes", None),
        ("a.n5/volumes/raw", None),
        ("a.n5/volumes", "raw"),
        ("./x/../a.n5", None),
    ]:
        volume = open_volume(tmp_path / location, key)
        assert (volume.path, volume.key, volume.levels) == (str(tmp_path / "a.n5"), "volumes/raw", ())


def test_an_array_is_its_own_container(tmp_path: Path) -> None:
    lay(tmp_path / "plain", {"zarr.json": ZARR3})
    volume = open_volume(f"file://{tmp_path}/plain")
    assert (volume.path, volume.key) == (str(tmp_path / "plain"), "")


def test_several_volumes_are_named(tmp_path: Path) -> None:
    lay(tmp_path / "a.n5", {f"{key}/attributes.json": ARRAY for key in ("raw", "em/s0", "em/s1")})
    with pytest.raises(VolumeError, match="holds 2 volumes; choose one by its key: em, raw"):
        open_volume(tmp_path / "a.n5")
    with pytest.raises(VolumeError, match=r"no volume at .*rwa; .*a.n5 holds em, raw"):
        open_volume(tmp_path / "a.n5", "rwa")
    assert [volume.key for volume in list_arrays(tmp_path / "a.n5")] == ["em/s0", "em/s1", "raw"]
    assert open_volume(tmp_path / "a.n5", "em", 1).key == "em/s1"
    assert open_volume(tmp_path / "a.n5", "em").levels == ("em/s0", "em/s1")
    assert open_volume(tmp_path / "a.n5/em/s1").levels == ("em/s0", "em/s1")
    with pytest.raises(VolumeError, match="no level 2; its levels are 0 to 1"):
        open_volume(tmp_path / "a.n5", "em", 2)
    with pytest.raises(VolumeError, match="no level 1"):
        open_volume(tmp_path / "a.n5", "raw", 1)


def test_arrays_that_cannot_be_read_are_listed_as_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lay(tmp_path / "a.n5", {"good/attributes.json": ARRAY, "bad/attributes.json": ARRAY | {"dataType": "object"}})
    assert [volume.key for volume in list_arrays(tmp_path / "a.n5")] == ["good"]
    assert "bad/attributes.json: dataType 'object'" in caplog.text


def test_nothing_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "empty/deep").mkdir(parents=True)
    (tmp_path / "stack.tif").write_bytes(b"II")
    with pytest.raises(VolumeError, match=r"attributes.json.*zarray.*zarr.json.*OME-Zarr"):
        open_volume(tmp_path / "empty")
    with pytest.raises(VolumeError, match=f"no volume at {tmp_path}/typo"):
        open_volume(tmp_path / "typo")
    with pytest.raises(VolumeError, match="is a file"):
        open_volume(tmp_path / "stack.tif")
    with pytest.raises(VolumeError, match="not ftp://"):
        open_volume("ftp://host/a.zarr")
    with pytest.raises(VolumeError, match="leaves the container"):
        open_volume(tmp_path / "empty", "../typo")
    with pytest.raises(VolumeError, match="no volume at"):
        list_arrays(tmp_path / "typo")


def test_a_series_in_time_is_refused(tmp_path: Path) -> None:
    data = np.zeros((3, 4, 4, 4), np.uint8)
    with pytest.raises(VolumeError, match="3 points in time"):
        make(tmp_path / "a", data, axes=("t", "z", "y", "x"))


def test_a_plate_lists_its_images(tmp_path: Path) -> None:
    lay(
        tmp_path / "p.zarr",
        {
            ".zgroup": GROUP,
            ".zattrs": {"plate": {"wells": [{"path": "A/1"}, {"path": "B/2"}]}},
            "A/1/.zattrs": {"well": {"images": [{"path": "0"}, {"path": "1"}]}},
            "B/2/.zattrs": {"well": {"images": [{"path": "0"}]}},
        },
    )
    with pytest.raises(VolumeError, match="plate of images; choose one by its key: A/1/0, A/1/1, B/2/0"):
        open_volume(tmp_path / "p.zarr")


# ---- opening, here and in other processes


def test_volumes_and_readers_travel_by_value(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "int32")
    volume = make(tmp_path / "a", data)
    assert pickle.loads(pickle.dumps(volume)) == volume
    assert len(pickle.dumps(volume)) < 1000
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(volume.open(cache_bytes=1000)))[...], data)


def test_a_process_opens_a_volume_once_until_it_changes(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "int32")
    volume = make(tmp_path / "a", data)
    assert volume.open() is open_volume(tmp_path / "a").open()
    assert volume.open() is not volume.open(cache_bytes=10_000)
    assert open_writer(tmp_path / "a", "") is open_writer(str(tmp_path / "a"), "")
    before = volume.open()
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data + 1, codec="gzip")
    assert volume.open() is not before
    np.testing.assert_array_equal(volume.open()[...], data + 1)
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data[:4])
    with pytest.raises(VolumeError, match="open it again"):
        volume.open()


@pytest.mark.parametrize("array_format", ["n5", "zarr2", "zarr3"])
def test_a_volume_that_has_grown_is_read_as_it_was(tmp_path: Path, array_format: str) -> None:
    data = invented((10, 8, 6), "int32")
    before = make(tmp_path / "a", data[:6], format=array_format)
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data, format=array_format)
    reader = before.open()
    assert reader.shape == (6, 8, 6)
    np.testing.assert_array_equal(reader[...], data[:6])
    np.testing.assert_array_equal(reader.read_mirrored(Box((4, 0, 0), (8, 8, 6)))[0], data[[4, 5, 4, 3]])
    with pytest.raises(VolumeError, match="leaves the volume"):
        reader.read(Box((0, 0, 0), (7, 8, 6)))
    shutil.rmtree(tmp_path / "a")
    make(tmp_path / "a", data.astype("int16"), format=array_format)
    with pytest.raises(VolumeError, match="open it again"):
        before.open()


def test_importing_brings_no_format_library() -> None:
    code = "import sys, volpipe.volumes.volume; print({'tensorstore', 'zarr', 'z5py', 'torch'} & set(sys.modules))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == "set()"


def try_to_read(volume: Volume, answer: Any) -> None:  # Any: a queue, of a type that its process chooses
    """Put the first voxel, or what was said instead, in the queue `answer`."""
    try:
        answer.put(volume.open()[0, 0, 0])
    except VolumeError as error:
        answer.put(str(error))


@pytest.mark.parametrize(("method", "fact"), [("fork", "forked"), ("spawn", "0")])
def test_a_forked_process_is_told_and_a_spawned_one_reads(tmp_path: Path, method: str, fact: str) -> None:
    volume = make(tmp_path / "a", invented((8, 8, 8), "uint8"))
    volume.open()[...]
    processes = multiprocessing.get_context(method)
    answer = processes.SimpleQueue()
    child = processes.Process(target=try_to_read, args=(volume, answer))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert fact in str(answer.get())


def test_threads_are_limited_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLPIPE_THREADS", "3")
    assert tensorstore.num_threads() == 3
    monkeypatch.setenv("VOLPIPE_THREADS", "many")
    with pytest.raises(VolumeError, match="VOLPIPE_THREADS"):
        tensorstore.num_threads()
    monkeypatch.delenv("VOLPIPE_THREADS")
    assert tensorstore.num_threads() == os.cpu_count()
