"""An output that has lost files says so to whoever reads it as a volume; what was never written is no loss."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from bucket import Bucket
from command import Give
from inline import Inline
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.noted_files import note

SHAPE = (16, 16, 16)
FORMATS = {"o5.zarr": "ome-zarr-0.5", "o4.zarr": "ome-zarr-0.4", "z2.zarr": "zarr2", "o.n5": "n5", "o.precomputed": ""}
METADATA = ("zarr.json", ".zarray", ".zattrs", ".zgroup", "attributes.json", "info")


@pytest.fixture(autouse=True)
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    voxels = noise(SHAPE) | 1  # no voxel is 0
    voxels[:8, :8] = 0  # but for shards that nobody writes
    write_volume(tmp_path / "raw.n5", voxels, 8)
    monkeypatch.chdir(tmp_path)
    return voxels


def run(out: str, *settings: str) -> None:
    window = windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop")
    chosen = ["net.name=identity", *window, "output.shard=[8,8,8]", "output.chunk=[8,8,8]", "output.levels=2"]
    name = out.rpartition("/")[2]
    chosen += [f"output.format={FORMATS[name]}"] if FORMATS.get(name) else []
    report = vp.run("raw.n5/raw", out=out, site=Inline(), settings=[*chosen, "input.voxel_size_nm=8,8,8", *settings])
    assert isinstance(report, vp.Report) and report.is_complete


def files_of(out: str, level: int) -> list[Path]:
    return sorted(file for file in Path(out, f"s{level}").rglob("*") if file.is_file() and file.name not in METADATA)


@pytest.mark.parametrize("has_run", [True, False], ids=["with its run", "alone"])
@pytest.mark.parametrize("out", FORMATS)
def test_each_lost_file_of_each_level_is_missed_whoever_reads(data: np.ndarray, out: str, has_run: bool) -> None:
    """And the boxes that the others hold are read; without the run's folder and elsewhere, too."""
    run(out)
    if not has_run:
        shutil.rmtree(f"{out}.run")
        shutil.move(out, f"moved_{out}")
        out = f"moved_{out}"
    for level in range(2):
        volume = vp.open(out, level=level)
        whole = volume[...]
        assert level or np.array_equal(whole, data)
        files = files_of(out, level)
        assert len(files) == (6, 1)[level]  # two shards are zeros alone
        for file in files:
            shutil.move(file, "kept")
            with pytest.raises(VolumeError, match=f"lost files that were written, such as .*{file.name}"):
                vp.open(out, level=level)[...]
            with pytest.raises(VolumeError, match="lost files"):
                vp.open(out, level=level).check_written()
            read = np.zeros_like(whole)
            for place in np.ndindex(*(-(-n // 8) for n in whole.shape)):
                box = Box((0, 0, 0), (8, 8, 8)).shift(tuple(8 * i for i in place)) & Box.from_shape(whole.shape)
                try:
                    read[box.slices] = volume.crop(box)[0]
                except VolumeError:
                    assert whole[box.slices].any()
                    continue
                assert np.array_equal(read[box.slices], whole[box.slices])
            as_it_is = vp.open(out, level=level, view=vp.View(incomplete=True))
            np.testing.assert_array_equal(as_it_is[...], read)
            shutil.move("kept", file)
        np.testing.assert_array_equal(vp.open(out, level=level)[...], whole)


@pytest.mark.parametrize("settings", [['input.mask="mask.n5/raw"'], ["input.roi=4:12,:,:"], ["input.empty=0"]])
def test_what_is_not_written_is_no_loss(tmp_path: Path, data: np.ndarray, settings: list[str]) -> None:
    mask = np.zeros(SHAPE, np.uint8)
    mask[8:, 8:] = 1
    write_volume(tmp_path / "mask.n5", mask)
    run("o5.zarr", *settings)
    assert len(files_of("o5.zarr", 0)) < 8
    for level in range(2):
        volume = vp.open("o5.zarr", level=level)
        volume.check_written()
        assert volume[...].size


def test_an_output_in_a_bucket_that_lost_an_object_is_refused(bucket: Bucket) -> None:
    out = "s3://cells/o5.zarr"
    run(out)
    whole = vp.open(out)[...]
    key = next(key for key in sorted(bucket.files) if "o5.zarr/s0/c/1" in key)
    content = bucket.files.pop(key)
    for read in (lambda: vp.open(out)[...], lambda: vp.convert(out, "copy.npy")):
        with pytest.raises(VolumeError, match="lost files"):
            read()
    bucket.files[key] = content
    np.testing.assert_array_equal(vp.open(out)[...], whole)


def test_an_output_that_is_updated_knows_its_new_files(data: np.ndarray) -> None:
    """Of what became zeros no file is missed; of what was zeros one is."""
    run("o5.zarr")
    changed = data.copy()
    changed[:8, :8, :8], changed[8:, 8:, 8:] = 7, 0
    write_volume(Path("raw.n5"), changed, 8)
    window = windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop")
    vp.run(
        "raw.n5/raw", out="o5.zarr", site=Inline(), update=True,
        settings=["net.name=identity", *window, "output.shard=[8,8,8]", "output.chunk=[8,8,8]", "output.levels=2",
                  "output.format=ome-zarr-0.5", "input.voxel_size_nm=8,8,8"],
    )  # fmt: skip
    np.testing.assert_array_equal(vp.open("o5.zarr")[...], changed)
    Path("o5.zarr/s0/c/0/0/0").unlink()
    with pytest.raises(VolumeError, match="lost files"):
        vp.open("o5.zarr")[...]


@pytest.mark.parametrize("command", ["info", "convert", "plan", "run", "compare", "evaluate", "segment", "status"])
def test_every_command_says_what_is_lost(tmp_path: Path, give: Give, command: str) -> None:
    site = ("--config", "threads")
    settings = ("--set", "net.name=identity")
    assert give("run", *site, *settings, "raw.n5/raw", "-o", "a.zarr").code == 0
    shutil.copytree("a.zarr", "b.zarr")
    shards = files_of("a.zarr", 0)
    shards[0].unlink()
    given = {
        "info": ["info", "a.zarr"], "convert": ["convert", "a.zarr", "a.npy"], "status": ["status", "a.zarr"],
        "plan": ["plan", *site, *settings, "a.zarr", "-o", "o.zarr"],
        "run": ["run", *site, *settings, "a.zarr", "-o", "o.zarr"],
        "compare": ["compare", "a.zarr", "b.zarr"],
        "evaluate": ["evaluate", "--data-range", "255", "a.zarr", "b.zarr"],
        "segment": ["segment", *site, "--set", "input.kind=foreground", "a.zarr", "-o", "o.zarr"],
    }[command]  # fmt: skip
    ended = give(*given)
    assert "lost files" in ended.out + ended.err and str(shards[0]) in ended.out + ended.err, ended
    if command == "status":
        assert "complete" not in ended.out.replace("incomplete", "")
    else:
        assert ended.code == 2 and "run --config threads" in ended.err and "--fresh" in ended.err


def test_what_is_noted_of_millions_of_files_is_small() -> None:
    flags = np.ones((100, 320, 320), bool)
    assert len(str(note({"s0": flags}, ""))) < 4096
    flags = np.random.default_rng(0).random((100, 320, 320)) < 0.5
    assert len(str(note({"s0": flags}, ""))) < 1.4 * flags.size / 6
