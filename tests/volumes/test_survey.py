"""Surveys of volumes: exact where all was seen, honest where not, and soon in any case."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import tifffile
import zarr
from bucket import serving
from command import Give

from volpipe.display.volumes import intensity_line
from volpipe.geometry.grid import Box
from volpipe.volumes.convert import Choice, convert
from volpipe.volumes.survey import PERCENTILES, measure_footprint, measure_intensities, try_codecs
from volpipe.volumes.volume import ArraySpec, Volume, create_array, open_volume, open_writer

SHAPE, CHUNK = (20, 28, 36), 8
LONG = 60.0  # seconds: more than any part takes here, so that the clock decides nothing


def patchy(dtype: str = "uint16") -> np.ndarray:
    """Return noise (z, y, x) in which about every third chunk is empty, and so is the far end."""
    rng = np.random.default_rng(5)
    data = rng.integers(1, 250, SHAPE).astype(dtype)
    for corner in itertools.product(*(range(0, n, CHUNK) for n in SHAPE)):
        if rng.random() < 0.35:
            data[tuple(slice(a, a + CHUNK) for a in corner)] = 0
    data[16:] = 0
    return data


def num_filled(data: np.ndarray) -> int:
    """Return in how many chunks there is anything."""
    corners = itertools.product(*(range(0, n, CHUNK) for n in data.shape))
    return sum(bool(data[tuple(slice(a, a + CHUNK) for a in corner)].any()) for corner in corners)


def lay(path: Path, data: np.ndarray, layout: str) -> Volume:
    """Write `data` in chunks of 8³; empty ones are not stored."""
    if layout in ("flat", "flat 3"):
        keys = {"name": "v2", "separator": "."}
        more = {"zarr_format": 2} if layout == "flat" else {"zarr_format": 3, "chunk_key_encoding": keys}
        array = zarr.create_array(path, shape=data.shape, dtype=data.dtype, chunks=(CHUNK,) * 3, **more)  # type: ignore[arg-type]
        array[...] = data
        return open_volume(path)
    shards = (16, 16, 16) if layout == "shards" else None
    format = {"shards": "zarr3"}.get(layout, layout)
    create_array(path, "raw", ArraySpec(data.shape, data.dtype, (CHUNK,) * 3, shards), format)
    open_writer(path, "raw").write(Box.from_shape(data.shape), data)
    return open_volume(path, "raw")


@pytest.mark.parametrize("layout", ["n5", "zarr2", "zarr3", "shards", "flat", "flat 3"])
def test_files_bytes_and_empty_chunks_are_counted(tmp_path: Path, layout: str) -> None:
    data = patchy()
    volume = lay(tmp_path / "a.zarr", data, layout)
    files = [f for f in (tmp_path / "a.zarr" / volume.key).rglob("*") if f.is_file()]
    found = measure_footprint(volume, seconds=LONG)
    assert (found.num_files, found.num_bytes) == (len(files), sum(f.stat().st_size for f in files))
    assert (found.num_chunks, found.num_stored) == (3 * 4 * 5, num_filled(data))
    assert found.is_counted and found.is_stored_counted
    assert 0.2 < found.stored_share < 0.6


@pytest.mark.parametrize("where", ["start", "end"])
def test_an_index_is_read_at_either_end_of_a_shard(tmp_path: Path, where: str) -> None:
    data = patchy("float32")
    codec = zarr.codecs.ShardingCodec(chunk_shape=(CHUNK,) * 3, index_location=where)  # type: ignore[arg-type]
    array = zarr.create_array(
        tmp_path / "a.zarr", shape=SHAPE, dtype="float32", chunks=(16, 16, 16), serializer=codec, compressors=None
    )
    array[...] = data
    assert measure_footprint(open_volume(tmp_path / "a.zarr"), seconds=LONG).num_stored == num_filled(data)


def test_an_empty_array_has_no_chunks(tmp_path: Path) -> None:
    for layout in ("n5", "shards"):
        found = measure_footprint(lay(tmp_path / layout, np.zeros(SHAPE, np.uint8), layout), seconds=LONG)
        assert (found.num_files, found.num_stored, found.stored_share) == (1, 0, 0.0)


def test_other_files_are_no_chunks(tmp_path: Path) -> None:
    data = patchy()
    volume = lay(tmp_path / "a.n5", data, "n5")
    for name in ("raw/9/9/9", "raw/0/0/zero", "raw/0/0", "raw/notes.txt"):
        if not (tmp_path / "a.n5" / name).exists():
            (tmp_path / "a.n5" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "a.n5" / name).write_bytes(b"12345")
    assert measure_footprint(volume, seconds=LONG).num_stored == num_filled(data)


@pytest.mark.parametrize("layout", ["zarr3", "shards"])
def test_what_cannot_be_listed_is_looked_for_by_name(tmp_path: Path, layout: str) -> None:
    data = patchy()
    lay(tmp_path / "a.zarr", data, layout)
    folder = tmp_path / "a.zarr"
    chunks = {f for f in (folder / "raw/c").rglob("*") if f.is_file()}
    with serving() as bucket:
        bucket.files = {f"a.zarr/{f.relative_to(folder)}": f.read_bytes() for f in folder.rglob("*") if f.is_file()}
        bucket.readable = True
        found = measure_footprint(open_volume(f"{bucket.url}/cells/a.zarr/raw"), seconds=LONG)
    assert not found.is_counted
    assert found.num_seen == (2 * 2 * 3 if layout == "shards" else 3 * 4 * 5)
    assert (found.num_files, found.num_bytes) == (len(chunks), sum(f.stat().st_size for f in chunks))
    assert found.num_stored == num_filled(data)


def test_a_plain_file_is_one_file(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", patchy())
    num_bytes = (tmp_path / "a.npy").stat().st_size
    found = measure_footprint(open_volume(tmp_path / "a.npy"))
    assert (found.num_files, found.num_bytes, found.is_counted, found.num_stored) == (1, num_bytes, True, None)
    assert found.stored_share == 1.0


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32"])
def test_percentiles_of_a_small_volume_are_those_of_all_voxels(tmp_path: Path, dtype: str) -> None:
    data = (patchy().astype(np.float64) - 20).astype(dtype)
    found = measure_intensities(lay(tmp_path / "a.n5", data, "n5"), seconds=LONG)
    assert (found.num_cells, found.num_all, found.num_voxels) == (60, 60, data.size)
    assert dict(found.percentiles) == {p: pytest.approx(np.percentile(data.ravel(), p)) for p in PERCENTILES}


def test_percentiles_leave_out_what_is_no_number(tmp_path: Path) -> None:
    data = patchy("float32")
    data[data < 50] = np.nan
    data[0, 0, :5] = np.inf
    found = measure_intensities(lay(tmp_path / "a.zarr", data, "zarr3"), seconds=LONG)
    numbers = data[np.isfinite(data)].astype(np.float64)
    assert dict(found.percentiles) == {p: pytest.approx(np.percentile(numbers, p)) for p in PERCENTILES}
    assert found.num_nonfinite == data.size - numbers.size
    assert f"; {found.num_nonfinite:,} voxels NaN or infinite (all voxels)" in intensity_line(found)
    nothing = lay(tmp_path / "b.zarr", np.full((8, 8, 8), np.nan, np.float32), "zarr3")
    assert measure_intensities(nothing).percentiles == ()


def test_a_sample_is_near_the_whole_and_the_seed_decides_it(tmp_path: Path) -> None:
    data = np.random.default_rng(1).integers(0, 256, (32, 320, 1024)).astype(np.uint8)  # 2.5 times what is taken
    create_array(tmp_path / "a.zarr", "raw", ArraySpec(data.shape, data.dtype, (32, 64, 64), codec="raw"), "zarr2")
    open_writer(tmp_path / "a.zarr", "raw").write(Box.from_shape(data.shape), data)
    volume = open_volume(tmp_path / "a.zarr")
    first, again, other = (measure_intensities(volume, seed=seed, seconds=LONG) for seed in (0, 0, 1))
    assert first.num_cells < first.num_all == 80
    assert first.percentiles == again.percentiles
    assert dict(first.percentiles) == {p: pytest.approx(np.percentile(data, p), abs=1) for p in PERCENTILES}
    assert other.num_voxels == first.num_voxels


def test_trials_give_the_sizes_that_numcodecs_gives(tmp_path: Path) -> None:
    data = np.random.default_rng(2).normal(1000, 30, (40, 70, 50)).astype(np.uint16)
    found = try_codecs(lay(tmp_path / "a.n5", data, "n5"), seconds=LONG)
    codecs = {
        "gzip 1": numcodecs.GZip(1),
        "gzip 5": numcodecs.GZip(5),
        "zstd 1": numcodecs.Zstd(1),
        "zstd 3": numcodecs.Zstd(3),
        "zstd 9": numcodecs.Zstd(9),
        "blosc lz4 5 shuffle": numcodecs.Blosc("lz4", 5, 1),
        "blosc zstd 3 shuffle": numcodecs.Blosc("zstd", 3, 1),
    }
    assert (found.num_boxes, found.box) == (1, data.shape)
    assert {(t.codec, t.edge) for t in found.trials} == set(itertools.product([*codecs, "raw"], (32, 64, 128)))
    for trial in found.trials:
        corners = itertools.product(*(range(0, n, trial.edge) for n in data.shape))
        chunks = [np.ascontiguousarray(data[tuple(slice(a, a + trial.edge) for a in c)]) for c in corners]
        assert trial.raw_bytes == data.nbytes
        expected = data.nbytes if trial.codec == "raw" else sum(len(codecs[trial.codec].encode(c)) for c in chunks)
        assert trial.stored_bytes == expected
        assert trial.num_files == len(chunks)
        assert min(trial.encode_speed, trial.decode_speed) > 1e5


def test_trials_count_shards_and_channels(tmp_path: Path) -> None:
    spec = ArraySpec((3, 700, 40, 40), np.dtype(np.uint8), (1, 64, 40, 40), axes=("c", "z", "y", "x"))
    create_array(tmp_path / "a.zarr", "raw", spec)
    found = {trial.edge: trial for trial in try_codecs(open_volume(tmp_path / "a.zarr")).trials}
    assert (found[32].num_files, found[64].num_files) == (3 * 22 * 2 * 2, 3 * 11)
    assert found[32].num_shards == 3 * 2


def test_trials_look_for_boxes_with_something_in_them(tmp_path: Path) -> None:
    data = np.zeros((128, 128, 512), np.uint8)
    data[:, :, 384:] = np.random.default_rng(0).integers(0, 255, (128, 128, 128))
    create_array(tmp_path / "a.n5", "raw", ArraySpec(data.shape, data.dtype, (64, 64, 64)), "n5")
    open_writer(tmp_path / "a.n5", "raw").write(Box.from_shape(data.shape), data)
    found = try_codecs(open_volume(tmp_path / "a.n5"), seconds=LONG)
    assert found.num_boxes == 1
    assert min(trial.ratio for trial in found.trials) > 0.9  # noise does not compress


def test_a_volume_of_petabytes_is_surveyed_soon(tmp_path: Path) -> None:
    for layout, shards in (("n5", None), ("zarr3", (512, 512, 512))):
        spec = ArraySpec((100_000,) * 3, np.dtype(np.uint16), (64, 64, 64), shards)
        create_array(tmp_path / layout, "raw", spec, layout)
        volume = open_volume(tmp_path / layout)
        started = time.perf_counter()
        footprint = measure_footprint(volume)
        assert footprint.num_chunks == math.ceil(100_000 / 64) ** 3
        assert (footprint.num_files, footprint.num_stored) == (1, 0)
        intensities = measure_intensities(volume)
        assert {value for _, value in intensities.percentiles} == {0.0}
        assert try_codecs(volume, seconds_per_chunk=intensities.seconds).trials
        assert time.perf_counter() - started < 20  # 3 s where nothing else runs


def test_a_folder_with_too_many_files_is_estimated(tmp_path: Path) -> None:
    data = np.ones((32, 32, 64), np.uint8)
    data[:, :, 32:] = 0
    create_array(tmp_path / "a.n5", "raw", ArraySpec(data.shape, data.dtype, (2, 4, 4), codec="raw"), "n5")
    open_writer(tmp_path / "a.n5", "raw").write(Box.from_shape(data.shape), data)
    found = measure_footprint(open_volume(tmp_path / "a.n5"), seconds=1e-4)  # 1024 files take some ten times as long
    assert not found.is_counted and not found.is_stored_counted
    assert 0 < found.num_seen < 2048
    assert 0 < found.num_files <= 2048
    assert found.num_stored is not None and found.num_chunks == 2048


def test_info_prints_the_survey_and_fast_leaves_it_out(tmp_path: Path, give: Give) -> None:
    lay(tmp_path / "a.zarr", patchy(), "shards")
    fast, usual, full = give("info", "--fast", "a.zarr"), give("info", "a.zarr"), give("info", "--codecs", "a.zarr")
    assert (fast.code, usual.code, full.code) == (0, 0, 0)
    assert full.out.startswith(usual.out.rstrip()) and usual.out.startswith(fast.out)
    words = [line.split()[0] for line in full.out[len(fast.out) :].splitlines() if line]
    assert words[:5] == ["intensity", "on", "empty", "codec", "raw"]
    assert [line.split()[0] for line in usual.out.splitlines()][-3:] == words[:3]
    assert f"empty       {60 - num_filled(patchy())} of 60 chunks" in full.out
    assert "(all voxels)" in full.out


KINDS = ("n5", "zarr2", "zarr3", "ome-zarr-0.4", "ome-zarr-0.5", "hdf5", "tiff", "mrc", "npy")


@pytest.mark.parametrize("kind", [*KINDS, "slices"])
def test_info_goes_through_every_kind_of_volume(kind: str, tmp_path: Path, give: Give) -> None:
    data = patchy()
    location = tmp_path / "v"
    if kind == "slices":
        location.mkdir()
        for z, plane in enumerate(data):
            tifffile.imwrite(location / f"z_{z}.tif", plane)
    else:
        np.save(tmp_path / "in.npy", data)
        copy = convert(open_volume(tmp_path / "in.npy"), location, Choice(kind))
        location = Path(copy.path) / copy.key
    ended = give("info", location)
    assert (ended.code, ended.err) == (0, "")
    assert "20 × 28 × 36 (z, y, x)" in ended.out
    assert f"min {data.min()}" in ended.out and f"max {data.max()}" in ended.out
    assert ("20 files" in ended.out) == (kind == "slices")
