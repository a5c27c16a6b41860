"""A volume decoded on a node's disk: the same voxels, written once for all, never those of an earlier state."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import small_disk
from volumes import noise

from volpipe.geometry.grid import Box
from volpipe.volumes import node_cache
from volpipe.volumes.decoded import decoded
from volpipe.volumes.formats import npy
from volpipe.volumes.volume import ArraySpec, View, Volume, create_array, open_volume, open_writer

SHAPE = (2, 40, 26, 30)  # c, z, y, x
WHOLE = Box.from_shape(SHAPE[1:])
MOST = 1 << 20
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the site names on this node, for this process; emptied by all that it opened."""
    node_cache.take_warnings()
    monkeypatch.setenv(node_cache.VARIABLE, str(tmp_path / "node"))
    yield tmp_path / "node"
    node_cache.close_caches()
    assert not list((tmp_path / "node").glob("*"))


def written(folder: Path, dtype: str = "uint8") -> Volume:
    spec = ArraySpec(SHAPE, np.dtype(dtype), (1, 16, 16, 16), axes=("c", "z", "y", "x"), codec="gzip")
    create_array(folder, "raw", spec, "n5")
    open_writer(folder, "raw").write(Box.from_shape(SHAPE), noise(SHAPE, dtype))
    return open_volume(folder / "raw")


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that this process writes, one after another."""
    files: list[Path] = []
    write = npy.write

    def noted(path: Path, *rest: Any) -> None:
        files.append(path)
        time.sleep(0.2)
        write(path, *rest)

    monkeypatch.setattr(npy, "write", noted)
    return files


@pytest.mark.parametrize(("dtype", "channel"), [("uint8", None), ("float32", None), ("uint64", 1)])
def test_the_copy_has_the_voxels_of_the_volume_and_is_written_once_for_all(
    node: Path, tmp_path: Path, writes: list[Path], dtype: str, channel: int | None
) -> None:
    written(tmp_path / "in", dtype)
    volume = open_volume(tmp_path / "in/raw", view=View(channel=channel))
    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(lambda _: decoded(volume, MOST), range(8)))
    assert {Path(copy.path).parent.parent for copy in copies} == {node}
    assert (len(writes), len(set(copies))) == (1, 1)
    for box in (WHOLE, Box((3, 1, 2), (39, 25, 9)), Box((-4, 20, 0), (8, 30, 30))):
        expected, voxels = (each.open().read_mirrored(box) for each in (volume, copies[0]))
        np.testing.assert_array_equal(voxels, expected, strict=True)
    part = Box((3, 1, 2), (39, 25, 9))
    np.testing.assert_array_equal(decoded(volume, MOST, part).open()[...], volume.open().read(part), strict=True)


def test_a_volume_that_has_changed_is_another_one(node: Path, tmp_path: Path, writes: list[Path]) -> None:
    volume = written(tmp_path / "in")
    first = decoded(volume, MOST)
    open_writer(tmp_path / "in", "raw").write(Box((0, 16, 0, 0), (2, 32, 16, 16)), np.zeros((2, 16, 16, 16), np.uint8))
    second = decoded(open_volume(tmp_path / "in/raw"), MOST)
    assert (len(writes), first.path == second.path) == (2, False)
    assert not second.open().read(Box((16, 0, 0), (32, 16, 16))).any()
    np.testing.assert_array_equal(first.open().read(WHOLE), noise(SHAPE))


def test_a_volume_that_changes_while_it_is_copied_is_read_itself(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume, write = written(tmp_path / "in"), npy.write

    def late(*arguments: Any) -> None:
        write(*arguments)
        os.utime(tmp_path / "in/raw/0/0/0/0")

    monkeypatch.setattr(npy, "write", late)
    assert decoded(volume, MOST) is volume
    (warning,) = node_cache.take_warnings()
    assert "changed while it was read" in warning
    assert not list(node.glob("*/*.npy*"))


def die_half_way(base: str, path: str, ready: Any) -> None:
    os.environ[node_cache.VARIABLE] = base

    def half(file: Path, *rest: object) -> None:
        file.write_bytes(b"\x93NUMPY, and not all of it")
        ready.set()
        time.sleep(600)

    npy.write = half  # type: ignore[assignment]
    decoded(open_volume(path), MOST)


def test_a_copy_whose_worker_is_killed_is_made_by_one_that_waits(node: Path, tmp_path: Path) -> None:
    volume, ready = written(tmp_path / "in"), SPAWN.Event()
    worker = SPAWN.Process(target=die_half_way, args=(str(node), str(tmp_path / "in/raw"), ready))
    worker.start()
    assert ready.wait(60)
    with ThreadPoolExecutor(1) as pool:
        copy = pool.submit(decoded, volume, MOST)
        time.sleep(0.2)
        assert not copy.done()
        worker.kill()
        worker.join()
        np.testing.assert_array_equal(copy.result().open().read(WHOLE), noise(SHAPE))


def test_what_cannot_be_shared_is_read_itself(node: Path, tmp_path: Path) -> None:
    volume = written(tmp_path / "in")
    assert decoded(volume, volume.num_channels * WHOLE.num_voxels - 1) is volume
    np.save(tmp_path / "flat.npy", noise(SHAPE))
    flat = open_volume(tmp_path / "flat.npy")
    assert decoded(flat, MOST) is flat
    assert not node.exists()
    (tmp_path / "in/raw/0/0/0/0").write_bytes(b"no chunk")
    assert decoded(volume, MOST) is volume
    (warning,) = node_cache.take_warnings()
    assert warning.startswith(f"{volume} is not shared by the trainings of this node: ChunkError: ")


def test_a_disk_that_is_full_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_cache.take_warnings()
    (tmp_path / "node").mkdir()
    with small_disk(tmp_path / "node", "size=64k"):
        monkeypatch.setenv(node_cache.VARIABLE, str(tmp_path / "node"))
        volume = written(tmp_path / "in", "uint64")
        assert decoded(volume, MOST) is volume
        (warning,) = node_cache.take_warnings()
        assert "less than 5% of the disk is free" in warning
        assert not list((tmp_path / "node").glob("*/*.npy*"))
        node_cache.close_caches()
