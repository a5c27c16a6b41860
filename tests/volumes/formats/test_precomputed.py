"""Neuroglancer precomputed: tensorstore reads what volpipe writes, volpipe what others write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import tensorstore as ts
from bucket import Bucket
from command import IDENTITY, THREADS, Give, set_each
from volumes import fingerprint, noise

from volpipe.errors import ChunkError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.convert import Choice, convert
from volpipe.volumes.formats import precomputed
from volpipe.volumes.identity import changes, identify
from volpipe.volumes.storage.metadata import Level, Multiscale
from volpipe.volumes.volume import (
    ArraySpec,
    Reader,
    View,
    Volume,
    create_array,
    create_multiscale,
    open_volume,
    open_writer,
    with_view,
)

SIZE, ORIGIN = (30.0, 6.0, 8.0), (15.0, 63.0, 84.0)  # nm: the centres of voxels 0, 10 and 10
LABELS = precomputed.SEGMENTATION


def by_tensorstore(folder: Path, level: int = 0) -> tensorstore.TensorStore:
    """Return a level as tensorstore opens it from the folder alone, axes x, y, z, channel."""
    spec = {"driver": "neuroglancer_precomputed", "kvstore": f"file://{folder}/", "scale_index": level}
    return tensorstore.open(spec, open=True).result()


def made_by_tensorstore(folder: Path, data: np.ndarray, **scale: Any) -> Volume:  # Any: JSON
    """Return `data` (z, y, x) as tensorstore writes it, in chunks of 8."""
    known = {"size": data.shape[::-1], "resolution": SIZE[::-1], "chunk_size": [8, 8, 8], "encoding": "raw"}
    spec = {
        "driver": "neuroglancer_precomputed", "kvstore": f"file://{folder}/",
        "multiscale_metadata": {"data_type": data.dtype.name, "num_channels": 1, "type": "image"},
        "scale_metadata": known | {"voxel_offset": [10, 10, 0]} | scale,
    }  # fmt: skip
    tensorstore.open(spec, create=True).result()[..., 0].write(data.T).result()
    return open_volume(folder)


HASHED = {
    "@type": precomputed.SHARDING, "hash": "murmurhash3_x86_128", "preshift_bits": 1, "minishard_bits": 1,
    "shard_bits": 2, "minishard_index_encoding": "gzip", "data_encoding": "gzip",
}  # fmt: skip


@pytest.mark.parametrize("sharding", [{}, {"sharding": HASHED}], ids=["files", "hashed"])
def test_volumes_of_others_are_read_in_their_place(tmp_path: Path, sharding: dict[str, Any]) -> None:
    data = noise((20, 19, 30))
    volume = made_by_tensorstore(tmp_path / "image", data, key="8_6_30", **sharding)
    assert (volume.key, volume.shards) == ("8_6_30", None)
    assert (volume.voxel_size_nm, volume.origin_nm) == (SIZE, ORIGIN)
    np.testing.assert_array_equal(volume[...], data)
    np.testing.assert_array_equal(volume.crop(Box((3, 2, 1), (17, 15, 30)))[0], data[3:17, 2:15, 1:30])
    assert open_volume(tmp_path / "image/8_6_30") == volume
    copy = convert(volume, tmp_path / "b.zarr")
    np.testing.assert_array_equal(copy[...], data)
    assert (copy.voxel_size_nm, copy.origin_nm) == (SIZE, ORIGIN)


def test_levels_and_place_are_what_tensorstore_finds(tmp_path: Path) -> None:
    shapes, levels = [(8, 20, 24), (8, 10, 12)], (Level("s0"), Level("s1", (1.0, 2.0, 2.0)))
    for level, shape in zip(levels, shapes, strict=True):
        spec = ArraySpec(shape, np.dtype("uint8"), (4, 4, 4), (8, 8, 8), codec="gzip")
        create_array(tmp_path / "a.precomputed", level.key, spec, "precomputed")
    group = Multiscale(levels, voxel_size_nm=SIZE, origin_nm=ORIGIN)
    create_multiscale(tmp_path / "a.precomputed", group, format="precomputed", attributes={"recipe": "x"})
    for number, (size, offset) in enumerate([((8, 6, 30), (10, 10, 0)), ((16, 12, 30), (5, 5, 0))]):
        array, volume = (
            by_tensorstore(tmp_path / "a.precomputed", number),
            open_volume(tmp_path / "a.precomputed", level=number),
        )
        assert [unit.multiplier for unit in array.dimension_units[:3]] == list(size)
        assert (array.origin[:3], array.shape[:3]) == (offset, shapes[number][::-1])
        assert volume.voxel_size_nm == size[::-1]
        assert volume.origin_nm == tuple((o + 0.5) * v for o, v in zip(offset[::-1], size[::-1], strict=True))
    assert json.loads((tmp_path / "a.precomputed/info").read_text())["volpipe"] == {"recipe": "x"}


def test_an_origin_between_voxels_comes_back_and_is_shown_within_half_a_voxel(tmp_path: Path) -> None:
    source = with_view(made_by_tensorstore(tmp_path / "image", noise((8, 9, 10))), View(origin_nm=(0.0, 4.0, 39.0)))
    copy = convert(source, tmp_path / "a.precomputed")
    assert copy.origin_nm == (0.0, 4.0, 39.0)
    assert by_tensorstore(tmp_path / "a.precomputed").origin[:3] == (4, 0, 0)  # centres 36, 3 and 15 nm
    info = json.loads((tmp_path / "a.precomputed/info").read_text())
    info["scales"][0]["voxel_offset"] = [100, 0, 0]  # somebody moved it: what volpipe wrote is stale
    (tmp_path / "a.precomputed/info").write_text(json.dumps(info))
    assert open_volume(tmp_path / "a.precomputed").origin_nm == (15.0, 3.0, 804.0)


def test_runs_write_levels_that_others_read(tmp_path: Path, give: Give) -> None:
    data = noise((32, 40, 56))
    made_by_tensorstore(tmp_path / "a.precomputed", data)
    windows = set_each("windows.shape=[16,16,16]", "windows.block=[2,2,2]", "output.levels=1", "output.chunk=[8,8,8]")
    run = ("run", *THREADS, *IDENTITY, *windows)
    assert give(*run, "-o", "b.precomputed", "a.precomputed").code == 0
    assert give(*run, "-o", "c.zarr", "a.precomputed").code == 0
    for level in range(2):
        ours, zarr = open_volume(tmp_path / "b.precomputed", level=level), open_volume(tmp_path / "c.zarr", level=level)
        assert (ours.voxel_size_nm, ours.origin_nm) == (zarr.voxel_size_nm, zarr.origin_nm)
        np.testing.assert_array_equal(by_tensorstore(tmp_path / "b.precomputed", level).read().result().T[0], zarr[...])
    np.testing.assert_array_equal(open_volume(tmp_path / "b.precomputed")[...], data)
    before = fingerprint(tmp_path / "b.precomputed")
    assert give(*run, "-o", "b.precomputed", "a.precomputed").code == 0
    assert fingerprint(tmp_path / "b.precomputed") == before
    assert give("verify", "b.precomputed").code == 0
    shard = next((tmp_path / "b.precomputed/s0").iterdir())
    shard.unlink()
    assert shard.name in give("verify", "b.precomputed").out


def test_labels_are_a_segmentation_to_others(tmp_path: Path, give: Give) -> None:
    inside = np.zeros((24, 32, 40), np.uint8)
    inside[4:20, 4:14, 4:36] = inside[4:20, 18:28, 4:36] = 255
    made_by_tensorstore(tmp_path / "a.precomputed", inside)
    choices = set_each("input.kind=foreground", "objects.background=0.5", "output.block=[16,16,16]", "output.levels=1")
    labels = {}
    for out in ("b.precomputed", "c.zarr"):
        assert give("segment", *THREADS, *choices, "-o", out, "a.precomputed").code == 0
        labels[out] = [open_volume(tmp_path / out, level=level)[...] for level in range(2)]
    assert set(np.unique(labels["c.zarr"][0])) == {0, 1, 2}
    info = json.loads((tmp_path / "b.precomputed/info").read_text())
    assert (info["type"], info["data_type"]) == ("segmentation", "uint32")
    assert {scale["encoding"] for scale in info["scales"]} == {LABELS}
    for level in range(2):
        np.testing.assert_array_equal(labels["b.precomputed"][level], labels["c.zarr"][level])
        stored = by_tensorstore(tmp_path / "b.precomputed", level).read().result().T[0]
        np.testing.assert_array_equal(stored, labels["c.zarr"][level])
    assert give("verify", "b.precomputed").code == 0


@pytest.mark.parametrize(
    ("out", "dtype", "choice", "expected"),
    [
        ("a.precomputed", "float64", Choice(), "precomputed has no float64 voxels; it has uint8, .* float32"),
        ("a.precomputed", "int64", Choice(), "precomputed has no int64 voxels"),
        ("a.precomputed", "uint16", Choice(codec=LABELS), "is for uint32 and uint64, the voxels are uint16; use gzip"),
        ("a.precomputed", "uint8", Choice(codec="zstd"), "precomputed is not written with codec 'zstd'; use gzip, raw"),
        ("a.precomputed", "uint8", Choice(chunk=(8, 8, 8), shard=(8, 16, 16)), r"use shard \(16, 16, 16\)"),
        ("a.precomputed", "uint8", Choice(chunk=(8, 8, 8), shard=(24, 24, 24)), r"use shard \(32, 32, 32\)"),
        ("a.precomputed/em", "uint8", Choice(), "would be a folder of one volume; leave out 'em'"),
        ("there.precomputed", "uint8", Choice(), "exists already; remove it"),
    ],
)  # fmt: skip
def test_what_it_cannot_hold_is_refused(tmp_path: Path, out: str, dtype: str, choice: Choice, expected: str) -> None:
    np.save(tmp_path / "a.npy", np.zeros((40, 41, 42), dtype))
    (tmp_path / "there.precomputed").write_text("in the way")
    source = open_volume(tmp_path / "a.npy", view=View(voxel_size_nm=SIZE))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(VolumeError, match=expected):
        convert(source, tmp_path / out, choice)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_an_unknown_voxel_size_is_refused(tmp_path: Path, give: Give) -> None:
    np.save(tmp_path / "a.npy", np.zeros((20, 20, 20), np.uint8))
    for ended in (
        give("convert", "a.npy", "b.precomputed"),
        give("run", *THREADS, *IDENTITY, "-o", "b.precomputed", "a.npy"),
    ):
        assert ended.code == 2
        assert "voxel size is unknown, and precomputed cannot do without" in " ".join(ended.err.split())


def test_zeros_alone_are_stored_by_no_file_and_come_back(tmp_path: Path, give: Give) -> None:
    np.save(tmp_path / "a.npy", np.zeros((20, 20, 20), np.uint8))
    assert give("convert", "--voxel-size-nm", "30,6,8", "a.npy", "b.precomputed").code == 0
    assert [path.name for path in (tmp_path / "b.precomputed").iterdir()] == ["info"]
    volume = open_volume(tmp_path / "b.precomputed")
    assert open_volume(volume.path, volume.key) == volume
    assert volume.open().is_stored(Box((0, 0, 0), (8, 8, 8)))  # which only a read can tell
    assert not volume[...].any()


def test_an_output_whose_levels_lie_between_voxels_is_refused(tmp_path: Path, give: Give) -> None:
    made_by_tensorstore(tmp_path / "a.precomputed", noise((16, 64, 64)), voxel_offset=[0, 0, 0])
    run = ("run", *THREADS, *IDENTITY, *set_each("windows.shape=[16,16,16]", "output.levels=2"), "-o", "b.precomputed")
    refused = give(*run, "--set", "input.roi=0:16,3:35,0:32", "a.precomputed")
    assert refused.code == 2
    assert "axis y: the first voxel is number 3 from the origin, no multiple of the 2" in " ".join(refused.err.split())
    assert give(*run, "--set", "input.roi=0:16,4:36,0:32", "a.precomputed").code == 0


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"data_type": "float64"}, "data_type 'float64' is not one that volpipe reads"),
        ({"scales": []}, "has 0 scales"),
        ({"scales": [{"encoding": "kempressed"}]}, "encoding 'kempressed' is not read; volpipe reads raw, jpeg, png"),
        ({"scales": [{"key": "../outside"}]}, "the key '../outside' of a level is no folder inside"),
        ({"scales": [{"voxel_offset": [0.5, 0, 0]}]}, "voxel_offset .* is not three integers"),
        ({"scales": [{"voxel_offset": [True, 0, 0]}]}, "voxel_offset .* is not three integers"),
        ({"scales": [{"sharding": {"preshift_bits": -1}}]}, "the bits of its sharding"),
    ],
)
def test_broken_descriptions_are_refused(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    made_by_tensorstore(tmp_path / "a.precomputed", noise((8, 8, 8)))
    info = json.loads((tmp_path / "a.precomputed/info").read_text())
    scales = [info["scales"][0] | scale for scale in changes.get("scales", [{}])]
    (tmp_path / "a.precomputed/info").write_text(json.dumps(info | changes | {"scales": scales}))
    with pytest.raises(VolumeError, match=expected):
        open_volume(tmp_path / "a.precomputed")


def test_a_file_named_info_of_something_else_stands_in_nobodys_way(tmp_path: Path) -> None:
    data = noise((8, 8, 8))
    for name in ("a.n5", "b.zarr"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "info").write_text('{"microscope": "3"}')
    np.save(tmp_path / "a.npy", data)
    for name in ("a.n5/raw", "b.zarr/raw"):
        np.testing.assert_array_equal(convert(open_volume(tmp_path / "a.npy"), tmp_path / name)[...], data)
    made_by_tensorstore(tmp_path / "c", data)
    with pytest.raises(VolumeError, match="c is precomputed; zarr3 cannot be written into it"):
        create_array(tmp_path / "c", "raw", ArraySpec(data.shape, data.dtype, (8, 8, 8)), "zarr3")


def change_info(folder: Path, **scale: Any) -> None:  # Any: JSON
    info = json.loads((folder / "info").read_text())
    info["scales"][0] |= scale
    (folder / "info").write_text(json.dumps(info))


@pytest.mark.parametrize("key", ["em", "em/8_6_30"])
@pytest.mark.parametrize("name", ["image", "a.precomputed", "A.Precomputed"])
def test_changes_of_its_description_are_seen(tmp_path: Path, key: str, name: str) -> None:
    volume = made_by_tensorstore(tmp_path / name, noise((8, 9, 10)), key=key)
    reader, before = volume.open(), identify(volume)
    (tmp_path / name / key / "8-16_0-1_0-1").write_bytes(b"")  # as by a run that writes there
    assert volume.open() is reader
    change_info(tmp_path / name, size=[10, 9, 7])
    with pytest.raises(VolumeError, match="and is now uint8"):
        volume.open()
    assert any(change.startswith("info was") for change in changes(before, identify(open_volume(tmp_path / name))))


@pytest.mark.parametrize("key", ["em", "em/8_6_30"])
def test_its_identity_names_the_files_of_the_voxels_it_compares(tmp_path: Path, key: str) -> None:
    files = identify(made_by_tensorstore(tmp_path / "a", noise((8, 9, 10)), key=key)).files
    assert set(files) == {"info", f"{key}/10-18_10-18_0-8"}
    assert None not in files.values()
    hashed = identify(made_by_tensorstore(tmp_path / "b", noise((8, 9, 10)), key=key, sharding=HASHED))
    assert set(hashed.files) == {"info"}
    assert [sample.file for sample in hashed.boxes] == [""]


@pytest.mark.parametrize(
    "broken", ['{"scales": [], "data_type": "uint8"}', '{"scales": [7, {"key": "c"}], "data_type": "uint8"}', "notes"]
)
@pytest.mark.parametrize("name", ["b.zarr", "B.ZARR", "b"])
def test_a_broken_description_beside_other_volumes_is_left_alone(tmp_path: Path, broken: str, name: str) -> None:
    data = noise((8, 8, 8))
    create_array(tmp_path / name, "c/raw", ArraySpec(data.shape, data.dtype, (8, 8, 8)))
    open_writer(tmp_path / name, "c/raw").write(Box.from_shape(data.shape), data)
    (tmp_path / "info").write_text(broken)
    assert np.array_equal(open_volume(tmp_path / name)[...], data)
    assert open_volume(tmp_path / name / "c").shape == data.shape


# ---- shards in a bucket


SIDES, CHUNK = (75, 64, 50), (8, 8, 8)  # x, y, z
DATA = np.random.default_rng(0).integers(0, 1 << 40, SIDES[::-1], np.uint64)
ONE_MINISHARD = {"hash": "identity", "preshift_bits": 6, "minishard_bits": 0, "shard_bits": 5}
SEVERAL = {"hash": "identity", "preshift_bits": 2, "minishard_bits": 4, "shard_bits": 5}
BY_HASH = {"hash": "murmurhash3_x86_128", "preshift_bits": 2, "minishard_bits": 3, "shard_bits": 3}
BOXES = [
    Box((0, 0, 0), (8, 8, 8)),
    Box((8, 16, 0), (32, 32, 16)),
    Box((3, 30, 7), (50, 64, 75)),
    Box((40, 0, 70), (41, 1, 75)),
]


def served(bucket: Bucket, folder: Path, bits: dict[str, Any], packed: str, encoding: str = "raw") -> Reader:
    """Return the reader of DATA as tensorstore writes it, but for a part that is empty, served by `bucket`."""
    scale: dict[str, Any] = {
        "key": "s0", "size": SIDES, "resolution": [8, 8, 8], "voxel_offset": [3, 5, 7], "chunk_size": CHUNK,
        "encoding": encoding,
        "sharding": {"@type": "neuroglancer_uint64_sharded_v1", "minishard_index_encoding": packed,
                     "data_encoding": packed, **bits},
    }  # fmt: skip
    if encoding == "compressed_segmentation":
        scale["compressed_segmentation_block_size"] = [8, 8, 8]
    spec = {
        "driver": "neuroglancer_precomputed", "kvstore": {"driver": "file", "path": f"{folder}/"}, "create": True,
        "multiscale_metadata": {"type": "image", "data_type": "uint64", "num_channels": 1}, "scale_metadata": scale,
    }  # fmt: skip
    ts.open(spec).result()[ts.d[:].translate_to[0]][..., 0].write(stored().T).result()
    for file in filter(Path.is_file, folder.rglob("*")):
        bucket.files[f"in.precomputed/{file.relative_to(folder)}"] = file.read_bytes()
    return open_volume("s3://cells/in.precomputed/s0").open()


def stored() -> np.ndarray:
    """Return DATA (z, y, x) with chunks of zeros, which are not stored."""
    data = DATA.copy()
    data[8:24, 16:32, :40] = 0
    return data


@pytest.mark.parametrize("encoding", ["raw", "compressed_segmentation"])
@pytest.mark.parametrize("packed", ["raw", "gzip"])
@pytest.mark.parametrize("bits", [ONE_MINISHARD, SEVERAL, BY_HASH], ids=["one", "several", "hashed"])
def test_voxels_are_those_that_were_written(
    bits: dict[str, Any], packed: str, encoding: str, bucket: Bucket, tmp_path: Path
) -> None:
    reader = served(bucket, tmp_path / "a", bits, packed, encoding)
    for box in [*BOXES, Box.from_shape(DATA.shape)]:
        assert np.array_equal(reader.read(box)[0], stored()[box.slices])


@pytest.mark.parametrize("packed", ["raw", "gzip"])
@pytest.mark.parametrize("part", ["table", "minishard", "chunk", "end"])
def test_a_damaged_shard_is_named(part: str, packed: str, bucket: Bucket, tmp_path: Path) -> None:
    reader = served(bucket, tmp_path / "a", ONE_MINISHARD, packed)
    name = min(name for name in bucket.files if name.endswith(".shard"))
    data = bytearray(bucket.files[name])
    first, last = np.frombuffer(data[:16], "<u8").tolist()
    if part == "table":
        data[6:8] = b"\xff\xff"
    elif part == "minishard":
        data[16 + first : 16 + last] = b"\xff" * (last - first)
    elif part == "chunk" and packed == "gzip":
        data[16 : 16 + 100] = b"\xff" * 100
    else:
        data = data[:10]
    bucket.files[name] = bytes(data)
    with pytest.raises(ChunkError, match=r"in\.precomputed/s0/00?\.shard"):
        reader.read(BOXES[0])
