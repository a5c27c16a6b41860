"""A volume is used as an array: it slices, becomes numpy's or dask's, has levels, and shows itself."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from arrays import invented, make, write_all

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.volume import (
    ArraySpec,
    Level,
    Multiscale,
    View,
    Volume,
    create_array,
    create_multiscale,
    open_volume,
)


def test_it_slices_as_numpy_does_also_after_a_journey(tmp_path: Path) -> None:
    data = invented((7, 9, 10), "uint16")
    volume = make(tmp_path / "a", data)
    for index in (np.s_[3, :4, :4], np.s_[...], np.s_[-1], np.s_[1:6:2, ..., 5], np.s_[:, 2]):
        np.testing.assert_array_equal(volume[index], data[index])
    again = pickle.loads(pickle.dumps(volume))
    assert again == volume and hash(again) == hash(volume)
    np.testing.assert_array_equal(again[2], data[2])


def test_numpy_takes_it(tmp_path: Path) -> None:
    data = invented((5, 6, 7), "uint8")
    volume = make(tmp_path / "a", data)
    np.testing.assert_array_equal(np.asarray(volume), data)
    assert np.asarray(volume, np.float32).dtype == np.float32
    assert np.subtract(volume, data).max() == 0
    with pytest.raises(ValueError, match="leave out copy=False"):
        np.array(volume, copy=False)


@pytest.mark.parametrize(
    "order", [("z", "y", "x"), ("x", "z", "y"), ("c", "z", "y", "x"), ("t", "x", "y", "z", "c"), ("y", "x")]
)
def test_dask_has_it_by_stored_chunks(tmp_path: Path, order: tuple[str, ...]) -> None:
    length = {"t": 1, "c": 3, "z": 5, "y": 6, "x": 7}
    data = invented(tuple(length[axis] for axis in order), "uint8")
    volume = make(tmp_path / "a", data, axes=order)
    array = volume.dask()
    axes = [axis for axis in "czyx" if axis in order]
    expected = volume.crop(Box((0, 0, 0), volume.spatial_shape))
    assert array.shape == tuple(length[axis] for axis in axes) and array.dtype == np.uint8
    assert array.chunksize == tuple(min(4, length[axis]) for axis in axes)
    np.testing.assert_array_equal(array.compute(scheduler="threads"), expected.reshape(array.shape))
    np.testing.assert_array_equal(array[..., ::-1].compute(), expected.reshape(array.shape)[..., ::-1])


def test_dask_reads_a_chunk_only_when_it_is_needed(tmp_path: Path) -> None:
    volume = make(tmp_path / "a", np.ones((4, 4, 8), np.uint8), format="zarr2")
    (last,) = [path for path in (tmp_path / "a").rglob("*1") if path.is_file()]
    last.write_bytes(b"broken")
    array = volume.dask()
    assert array[..., :4].sum().compute() == 64
    with pytest.raises(VolumeError):
        array.compute()


def test_a_chosen_channel_is_what_is_read_or_slices_are_refused(tmp_path: Path) -> None:
    data = invented((3, 5, 6, 7), "uint8")
    make(tmp_path / "a", data)
    volume = open_volume(tmp_path / "a", view=View(channel=1))
    np.testing.assert_array_equal(volume.dask().compute(), data[1])
    np.testing.assert_array_equal(volume.crop(Box((1, 2, 3), (4, 5, 6))), data[1:2, 1:4, 2:5, 3:6])
    for use in (lambda: volume[0], lambda: np.asarray(volume)):
        with pytest.raises(VolumeError, match=r"all stored axes \(c, z, y, x\).*use crop\(box\) or dask\(\)"):
            use()


def test_a_crop_leaves_no_volume(tmp_path: Path) -> None:
    volume = make(tmp_path / "a", invented((5, 6, 7), "uint8"))
    with pytest.raises(VolumeError, match="leaves the volume"):
        volume.crop(Box((0, 0, 0), (5, 6, 8)))


def pyramid(path: Path, shape: tuple[int, ...], axes: tuple[str, ...]) -> list[np.ndarray]:
    """Write two levels at `path` and return their voxels."""
    half = tuple(n // 2 if axis in "zyx" else n for n, axis in zip(shape, axes, strict=True))
    arrays = [invented(shape, "uint8"), invented(half, "uint8", seed=1)]
    for key, data in zip(("s0", "s1"), arrays, strict=True):
        create_array(path, key, ArraySpec(data.shape, data.dtype, (4,) * data.ndim, axes=axes), "zarr3")
        write_all(path, key, data)
    levels = (Level("s0"), Level("s1", (2.0, 2.0, 2.0)))
    create_multiscale(path, Multiscale(levels, axes, (16.0, 8.0, 8.0)))
    return arrays


def test_a_level_leads_to_the_others(tmp_path: Path) -> None:
    arrays = pyramid(tmp_path / "a", (8, 8, 8), ("z", "y", "x"))
    finest = open_volume(tmp_path / "a")
    coarse = finest.level(1)
    assert coarse == open_volume(tmp_path / "a", level=1) and coarse.voxel_size_nm == (32, 16, 16)
    np.testing.assert_array_equal(coarse[...], arrays[1])
    assert coarse.level(0) == finest
    for number in (2, -1):
        with pytest.raises(VolumeError, match=f"has no level {number}; its levels are 0 to 1"):
            finest.level(number)
    with pytest.raises(VolumeError, match="none: it is an array by itself"):
        make(tmp_path / "b", arrays[0]).level(0)


def test_a_level_keeps_the_channel_and_takes_no_foreign_size(tmp_path: Path) -> None:
    arrays = pyramid(tmp_path / "a", (2, 8, 8, 8), ("c", "z", "y", "x"))
    coarse = open_volume(tmp_path / "a", view=View(channel=1)).level(1)
    assert "channel 1 of 2" in coarse.notes
    np.testing.assert_array_equal(coarse.dask().compute(), arrays[1][1])
    with pytest.raises(VolumeError, match="open level 1 with its own"):
        open_volume(tmp_path / "a", view=View(voxel_size_nm=(9, 9, 9))).level(1)


def test_it_shows_itself_briefly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = make(tmp_path / "a", invented((5, 6, 7), "uint8"))
    assert repr(volume) == f"<Volume {tmp_path / 'a'}: (5, 6, 7) uint8, voxel size unknown>"
    monkeypatch.chdir(tmp_path)  # where a notebook is, names are as they were given there
    assert repr(volume) == "<Volume a: (5, 6, 7) uint8, voxel size unknown>"
    assert "<caption>a</caption>" in volume._repr_html_() and str(volume) == str(tmp_path / "a")
    monkeypatch.chdir("/")
    pyramid(tmp_path / "b", (8, 8, 8), ("z", "y", "x"))
    assert repr(open_volume(tmp_path / "b")) == f"<Volume {tmp_path / 'b'}:s0: (8, 8, 8) uint8, 16 × 8 × 8 nm>"


def test_it_shows_itself_as_a_table_whatever_its_name(tmp_path: Path) -> None:
    pyramid(tmp_path / "<b>&.zarr", (8, 8, 8), ("z", "y", "x"))
    table = open_volume(tmp_path / "<b>&.zarr")._repr_html_()
    assert "&lt;b&gt;&amp;.zarr:s0" in table and "<b>" not in table
    for part in ("(8, 8, 8) (z, y, x)", "uint8", "16 × 8 × 8 nm", "(4, 4, 4)", "zstd", "s0, s1", "512 bytes"):
        assert part in table
    np.save(tmp_path / "c.npy", np.zeros((8, 8, 8), np.uint8))
    size = (tmp_path / "c.npy").stat().st_size
    assert f"<tr><th>on disk</th><td>{size:,} bytes</td></tr>" in Volume._repr_html_(open_volume(tmp_path / "c.npy"))
