"""What tells that an input has changed, in every format and in buckets; and blocks that change while they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
from bucket import Bucket
from growing import edit
from updates import ROW, SHAPE, assert_fresh, computed, num_looked, planned, ran, write_n5, write_slices, write_zarr
from volumes import noise, write_volume

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes import file_states, node_cache
from volpipe.volumes.file_states import FileStates, KnownStates, read_known
from volpipe.volumes.formats.container import USUAL_NAMES
from volpipe.volumes.volume import ArraySpec, Reader, create_array, open_volume, open_writer


def write_hdf5(folder: Path, data: np.ndarray) -> str:
    with h5py.File(folder / "new.h5", "w") as file:
        file.create_dataset("raw", data=data, chunks=(8, 8, 8), compression="gzip")
    (folder / "new.h5").replace(folder / "in.h5")
    return "in.h5"


def write_tiff(folder: Path, data: np.ndarray) -> str:
    tifffile.imwrite(folder / "in.tif", data)
    return "in.tif"


def write_npy(folder: Path, data: np.ndarray) -> str:
    np.save(folder / "in.npy", data)
    return "in.npy"


FORMATS: dict[str, Callable[[Path, np.ndarray], str]] = {
    "n5": write_n5,
    "zarr2": write_zarr("zarr2"),
    "zarr3": write_zarr("zarr3"),
    "shards": write_zarr("zarr3", shards=(16, 16, 16)),
    "slices": write_slices,
    "hdf5": write_hdf5,
    "tiff": write_tiff,
    "npy": write_npy,
}


@pytest.mark.parametrize("format", FORMATS)
def test_one_changed_block_of_six_is_computed_again(tmp_path: Path, format: str) -> None:
    """Also where all voxels are in one file, and where all files were written again."""
    data = noise(SHAPE)
    name = FORMATS[format](tmp_path, data)
    plan = planned(tmp_path, *ROW, volume=name)
    ran(plan)
    assert ran(plan, update=True).was_complete
    data[3, 4, 20] += 1
    assert FORMATS[format](tmp_path, data) == name
    assert computed(ran(plan, update=True)) == (1, 1)
    np.testing.assert_array_equal(open_volume(plan.out).open()[...], data)
    assert_fresh(plan)


def test_precomputed_and_one_channel_of_several(tmp_path: Path) -> None:
    data = noise((3, *SHAPE))
    create_array(
        tmp_path / "in.zarr", "raw", ArraySpec(data.shape, data.dtype, (1, 8, 8, 8), axes=("c", "z", "y", "x")), "zarr3"
    )
    writer = open_writer(tmp_path / "in.zarr", "raw")
    writer.write(Box.from_shape(data.shape), data)
    plan = planned(tmp_path, *ROW, "input.channel=1", volume="in.zarr")
    ran(plan)
    for channel, expected in ((0, (0, 0)), (1, (1, 1))):
        data[channel, 3, 4, 20] += 1
        part = Box((channel, 0, 0, 16), (channel + 1, 8, 8, 24))
        writer.write(part, data[part.slices])
        assert computed(ran(plan, update=True)) == expected
    assert_fresh(plan)


def upload(folder: Path, bucket: Bucket, key: str) -> None:
    bucket.files |= {f"{key}/{f.relative_to(folder)}": f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_a_volume_in_a_bucket_is_known_by_its_tags_and_listed(tmp_path: Path, bucket: Bucket) -> None:
    upload(write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8), bucket, "in.n5")
    plan = planned(tmp_path, *ROW, volume="s3://cells/in.n5/raw")
    ran(plan)
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)))
    upload(tmp_path / "in.n5", bucket, "in.n5")
    assert computed(ran(plan, update=True)) == (1, 1)
    bucket.requests.clear()
    assert ran(plan, update=True).was_complete
    assert sum(method == "HEAD" for method, _ in bucket.requests) < 30  # of the 16 boxes of the identity
    assert_fresh(plan)


def test_a_file_in_a_bucket_tells_its_state_with_its_voxels(tmp_path: Path, bucket: Bucket) -> None:
    """Of six blocks in a row each reads its neighbours' chunks too: what is kept of them is fetched once."""
    upload(write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8), bucket, "in.n5")
    volume = open_volume("s3://cells/in.n5/raw")
    reader, boxes = volume.open(cache_bytes=2**20), [Box((0, 0, 8 * x - 4), (16, 16, 8 * x + 12)) for x in range(6)]
    bucket.requests.clear()
    marks = [read_known(reader, box)[1] for box in boxes]
    asked = [(method, path) for method, path in bucket.requests if path.rpartition("/")[2] not in USUAL_NAMES]
    assert len(asked) == len(set(asked)) == 24
    assert {method for method, _ in asked} == {"GET"}
    assert marks == [
        f"{FileStates(volume).hash(box)}:{mark.partition(':')[2]}" for box, mark in zip(boxes, marks, strict=True)
    ]
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)))
    upload(tmp_path / "in.n5", bucket, "in.n5")
    voxels, mark = read_known(volume.open(session="another"), boxes[2])
    assert mark == f"{FileStates(volume).hash(boxes[2])}:{mark.partition(':')[2]}" != marks[2]
    np.testing.assert_array_equal(voxels, open_volume(tmp_path / "in.n5").open().read_mirrored(boxes[2]))


def test_where_a_store_tells_nothing_voxels_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_states, "file_state", lambda file: file_states.UNTOLD)
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    assert ran(plan, update=True).was_complete
    edit(tmp_path / "in.n5", Box((0, 0, 20), (1, 1, 21)))
    assert computed(ran(plan, update=True)) == (1, 1)


def test_what_was_only_written_again_is_read_once_and_not_computed(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    plan = planned(tmp_path, *ROW)
    ran(plan)
    write_n5(tmp_path, noise(SHAPE))
    for _ in range(2):
        assert ran(plan, update=True).was_complete
        assert num_looked(plan) == 6
    assert ran(plan).was_complete


def test_a_file_with_the_old_time_and_size_has_changed_all_the_same(tmp_path: Path) -> None:
    """As after a clock that was set back, or a copy that keeps times."""
    np.save(tmp_path / "in.npy", noise(SHAPE))
    before = (tmp_path / "in.npy").stat()
    plan = planned(tmp_path, *ROW, volume="in.npy")
    ran(plan)
    with (tmp_path / "in.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 255]))
    os.utime(tmp_path / "in.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert computed(ran(plan, update=True)) == (1, 1)
    assert_fresh(plan)


def test_files_are_known_alike_one_by_one_and_all_together(tmp_path: Path) -> None:
    write_n5(tmp_path, noise(SHAPE))
    (tmp_path / "in.n5/raw/0/0/0").unlink()
    volume = open_volume(tmp_path / "in.n5")
    single, together = FileStates(volume), KnownStates(volume)
    boxes = [Box((z - 2, -1, 5), (z + 9, 17, 55)) for z in (0, 4, 9)]
    hashes = [single.hash(box) for box in boxes]
    assert [together.hash(box) for box in boxes] == hashes
    assert len(set(hashes)) == 3


class Changing:
    """Writes into a volume while it is read, the first `times`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, volume: Path, times: int) -> None:
        self.num_reads = 0
        read = Reader.read_mirrored

        def changing(reader: Reader, box: Box, **named: int | None) -> np.ndarray:
            voxels = read(reader, box, **named)
            self.num_reads += 1
            if self.num_reads <= times:
                edit(volume, Box((0, 0, 0), (1, 1, 1)), seed=self.num_reads)
            return voxels

        monkeypatch.setattr(Reader, "read_mirrored", changing)


@pytest.mark.parametrize("times", [1, 3])
def test_a_block_that_changes_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    write_n5(tmp_path, noise(SHAPE))
    node_cache.take_warnings()
    changing = Changing(monkeypatch, tmp_path / "in.n5", times)
    volume = open_volume(tmp_path / "in.n5")
    voxels, _ = read_known(volume.open(cache_bytes=2**20, live=True), Box.from_shape((8, 8, 8)))
    assert changing.num_reads == times + 1
    np.testing.assert_array_equal(voxels[0], volume.crop(Box.from_shape((8, 8, 8)))[0])
    assert any(
        "changed while its voxels 0:8,0:8,0:8 were read; they are read again" in w for w in node_cache.take_warnings()
    )


def test_a_block_that_does_not_stop_changing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_n5(tmp_path, noise(SHAPE))
    Changing(monkeypatch, tmp_path / "in.n5", 4)
    with pytest.raises(VolumeError, match="changed 4 times while its voxels 0:8,0:8,0:8 were read; let whoever writes"):
        read_known(open_volume(tmp_path / "in.n5").open(), Box.from_shape((8, 8, 8)))


def test_a_volume_whose_mount_goes_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its chunks would be zeros, as those that were never written."""
    write_n5(tmp_path, noise(SHAPE))
    reader, box, read = open_volume(tmp_path / "in.n5").open(live=True), Box.from_shape(SHAPE), Reader.read_mirrored

    def going(self: Reader, box: Box, **settings: Any) -> np.ndarray:
        if (tmp_path / "in.n5").exists():
            (tmp_path / "in.n5").rename(tmp_path / "away")
        voxels = read(self, box, **settings)
        assert not voxels.any()
        return voxels

    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read_mirrored", going)
        with pytest.raises(VolumeError, match=r"no array at .*/raw any more"):
            read_known(reader, box)
    (tmp_path / "away").rename(tmp_path / "in.n5")
    assert read_known(reader, box)[0].any()


@pytest.mark.parametrize("is_cached", [False, True])
def test_chunks_in_memory_and_on_the_nodes_disk_are_not_taken_for_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_cached: bool
) -> None:
    """Neighbouring blocks share chunks, which may change between them."""
    write_n5(tmp_path, noise(SHAPE))
    if is_cached:
        monkeypatch.setenv(node_cache.VARIABLE, str(tmp_path / "node"))
    volume = node_cache.through_cache(open_volume(tmp_path / "in.n5"), "a run")
    assert isinstance(volume, node_cache.CachedVolume) == is_cached
    for seed in range(3):
        reader = volume.open(cache_bytes=2**20, session="one", live=True)
        voxels, _ = read_known(reader, Box.from_shape(SHAPE))
        np.testing.assert_array_equal(voxels, open_volume(tmp_path / "in.n5").crop(Box.from_shape(SHAPE)))
        edit(tmp_path / "in.n5", Box((0, 0, 0), (1, 1, 1)), seed=seed)
    node_cache.close_caches()


def test_a_slice_that_is_written_again_is_opened_again(tmp_path: Path) -> None:
    data = noise((4, 16, 16))
    volume = open_volume(tmp_path / write_slices(tmp_path, data))
    np.testing.assert_array_equal(volume.open(cache_bytes=2**20).read(Box.from_shape(data.shape))[0], data)
    tifffile.imwrite(tmp_path / "slices/002.tif", data[2] ^ 255)
    data[2] ^= 255
    np.testing.assert_array_equal(volume.open(cache_bytes=2**20).read(Box.from_shape(data.shape))[0], data)
