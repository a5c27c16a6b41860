"""An input that has changed since its output was begun is refused, with what differs; one that was touched may pass."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import tifffile
from bucket import Bucket
from command import IDENTITY, Give, giver, set_each
from volumes import noise, windowed, write_volume

from volpipe.geometry.grid import Box
from volpipe.volumes.identity import Identity, changes, identify, identify_whole, is_alike
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer

SHAPE = (16, 16, 24)
WINDOWS = set_each(*windowed((8, 8, 8), (0, 0, 0), (2, 1, 1), "crop"), "output.levels=0")
COMPLETE = "is complete already; nothing to do"


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


def run(give: Give, volume: str, *options: str) -> tuple[int, str]:
    """Return the exit code of a run, and what it printed on one line."""
    ended = give("run", "--config", "threads", *IDENTITY, *WINDOWS, *options, "-o", "out.zarr", volume)
    return ended.code, " ".join((ended.out + ended.err).split())


def touch(path: Path, seconds: float = 5) -> None:
    """Give `path` a later time than it has."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + int(seconds * 1e9)))


def test_a_tiff_that_was_written_again_is_refused(tmp_path: Path, give: Give) -> None:
    """It was "complete already", with the voxels of the first."""
    tifffile.imwrite(tmp_path / "in.tif", noise(SHAPE))
    assert run(give, "in.tif")[0] == 0
    assert COMPLETE in run(give, "in.tif")[1]
    tifffile.imwrite(tmp_path / "in.tif", noise(SHAPE, seed=1))
    touch(tmp_path / "in.tif")
    code, said = run(give, "in.tif", "--same-input")
    assert code == 2
    size = f"{(tmp_path / 'in.tif').stat().st_size:,} bytes of 20"
    assert f"the volume {tmp_path}/in.tif has changed since this output was begun: in.tif was {size}" in said
    assert f"and is now {size}" in said
    assert "the voxels that were compared differ in 1 of 1 box, such as 0:16,0:16,0:24. Put the old one back" in said
    assert "use --fresh to start over" in said
    assert run(give, "in.tif", "--fresh")[0] == 0
    np.testing.assert_array_equal(open_volume(tmp_path / "out.zarr").open()[...], noise(SHAPE, seed=1))


def test_voxels_count_where_time_and_size_do_not_tell(tmp_path: Path, give: Give) -> None:
    np.save(tmp_path / "in.npy", noise(SHAPE))
    before = (tmp_path / "in.npy").stat()
    assert run(give, "in.npy")[0] == 0
    np.save(tmp_path / "in.npy", noise(SHAPE, seed=1))
    os.utime(tmp_path / "in.npy", ns=(before.st_atime_ns, before.st_mtime_ns))
    code, said = run(give, "in.npy")
    assert (code, "has changed since this output was begun: the voxels that were compared differ" in said) == (2, True)


def test_a_file_that_was_only_touched_passes_when_that_is_said(tmp_path: Path, give: Give) -> None:
    tifffile.imwrite(tmp_path / "in.tif", noise(SHAPE))
    assert run(give, "in.tif")[0] == 0
    touch(tmp_path / "in.tif")
    code, said = run(give, "in.tif")
    assert code == 2
    assert "the voxels that were compared (1 box) are the same. If it was only copied or touched" in said
    assert "use --same-input to continue with it; else use --update to compute what has changed, or use --fresh" in said
    assert COMPLETE in run(give, "in.tif", "--same-input")[1]
    assert COMPLETE in run(give, "in.tif")[1]  # which has noted the new time


def test_a_run_that_was_interrupted_does_not_go_on_over_another_volume(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    assert run(give, "in.n5/raw", "--only", "0:8,0:8,0:8")[0] == 0
    write_volume(tmp_path / "other.n5", noise(SHAPE, seed=1))
    shutil.copyfile(tmp_path / "other.n5/raw/0/0/0", tmp_path / "in.n5/raw/0/0/0")
    touch(tmp_path / "in.n5/raw/0/0/0")
    code, said = run(give, "in.n5/raw")
    assert code == 2
    assert "has changed since this output was begun: 0/0/0 was" in said
    assert "the voxels that were compared differ" in said


def test_other_chunks_of_the_same_voxels_are_another_volume(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    assert run(give, "in.n5/raw")[0] == 0
    shutil.rmtree(tmp_path / "in.n5")
    write_volume(tmp_path / "in.n5", noise(SHAPE), chunk=8)
    code, said = run(give, "in.n5/raw")
    assert (code, "chunks [16, 16, 16] is now [8, 8, 8]" in said) == (2, True)


def test_a_mask_that_has_changed_is_refused(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    mask = np.zeros(SHAPE, np.uint8)
    mask[:, :, :8] = 1
    write_volume(tmp_path / "mask.n5", mask)
    assert run(give, "in.n5/raw", "--mask", "mask.n5/raw")[0] == 0
    mask[:, :, 8:] = 1
    shutil.rmtree(tmp_path / "mask.n5")
    write_volume(tmp_path / "mask.n5", mask)
    code, said = run(give, "in.n5/raw", "--mask", "mask.n5/raw")
    assert (code, f"the mask {tmp_path}/mask.n5:raw has changed" in said) == (2, True)


def test_a_run_of_an_earlier_version_is_known_by_its_outputs_fingerprint(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    assert run(give, "in.n5/raw")[0] == 0
    (tmp_path / "out.zarr.run/inputs.json").unlink()
    assert COMPLETE in run(give, "in.n5/raw")[1]
    (tmp_path / "out.zarr.run/inputs.json").unlink()
    shutil.rmtree(tmp_path / "in.n5")
    write_volume(tmp_path / "in.n5", noise(SHAPE, seed=1))
    code, said = run(give, "in.n5/raw")
    assert (code, "is not the one that this output was made of" in said) == (2, True)


def test_a_chunk_that_was_damaged_and_is_mended_is_no_other_volume(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    chunk = tmp_path / "in.n5/raw/0/0/0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:50])
    assert run(give, "in.n5/raw")[0] == 1
    chunk.write_bytes(whole)
    touch(chunk)
    assert run(give, "in.n5/raw")[0] == 0


def test_labels_and_the_stages_of_a_flow_know_their_volume(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    (tmp_path / "flow.toml").write_text(
        '[[stage]]\nname = "same"\nrecipe = "same.toml"\n'
        '[[stage]]\nname = "labels"\nkind = "label"\ninput = { kind = "foreground" }\n'
    )
    (tmp_path / "same.toml").write_text('[net]\nname = "identity"\n[windows]\nshape = [8, 8, 8]\n')
    flow = ["run", "--config", "threads", "--recipe", "flow.toml", "-o", "out", "in.n5/raw"]
    segment = ["segment", "--config", "threads", "--set", "input.kind=foreground", "-o", "labels.zarr", "in.n5/raw"]
    for command in (flow, segment):
        ended = give(*command)
        assert ended.code == 0, ended.err
        assert COMPLETE in give(*command).out
    touch(tmp_path / "out/same.zarr/zarr.json")  # of a stage, which no one but the flow writes
    assert COMPLETE in give(*flow).out
    touch(tmp_path / "in.n5/raw/attributes.json")
    for command in (flow, segment):
        ended = give(*command)
        assert ended.code == 2
        assert "has changed since this output was begun: attributes.json was" in " ".join(ended.err.split())
        assert COMPLETE in give(*command, "--same-input").out


def upload(folder: Path, bucket: Bucket, key: str) -> None:
    bucket.files |= {f"{key}/{f.relative_to(folder)}": f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def test_an_object_that_was_replaced_is_known_by_its_tag(bucket: Bucket, tmp_path: Path) -> None:
    upload(write_volume(tmp_path / "in.n5", noise(SHAPE)), bucket, "in.n5")
    volume = open_volume("s3://cells/in.n5/raw")
    before = identify(volume)
    assert changes(before, identify(volume)) == []
    assert all(stamp is not None and stamp.tag for stamp in before.files.values())
    upload(write_volume(tmp_path / "other.n5", noise(SHAPE, seed=1)), bucket, "in.n5")
    found = changes(before, identify(volume))
    assert found[0].startswith("0/0/0 was")
    assert "differ" in found[-1]


def test_a_whole_identity_sees_files_in_which_no_compared_box_begins(tmp_path: Path) -> None:
    data = np.zeros((64, 1280, 64), np.uint8)
    volume = open_volume(write_volume(tmp_path / "v.n5", data, 64))
    before, whole = identify(volume), identify_whole(volume)
    y = next(y for y in range(0, 1280, 64) if f"0:64,{y}:{y + 64},0:64" not in {each.box for each in before.boxes})
    assert identify_whole(volume) == whole
    open_writer(tmp_path / "v.n5", "raw").write(Box((0, y, 0), (64, y + 64, 64)), data[:, :64] + 1)
    assert not changes(before, identify(volume))
    after = identify_whole(volume)
    assert changes(whole, after)[0] == "files beside those of the voxels that are compared were written since"
    assert is_alike(whole, after)  # which --same-input accepts


def test_a_million_files_cost_as_much_as_ten(tmp_path: Path) -> None:
    """A volume of 10^6 chunks, of which none is stored: what is looked at are 17 files and 16 boxes."""
    create_array(tmp_path / "large.zarr", "", ArraySpec((6400, 6400, 6400), np.dtype(np.uint8), (64, 64, 64)), "zarr3")
    volume = open_volume(tmp_path / "large.zarr")
    identify(volume)
    started = time.process_time()
    identity = identify(volume)
    assert len(identity.files) == 17
    assert time.process_time() - started < 0.3
    assert Identity.model_validate(json.loads(identity.model_dump_json())) == identity
    assert is_alike(identity, identity)


@pytest.mark.parametrize("whole", [False, True])
def test_an_output_that_lost_files_is_not_complete(tmp_path: Path, give: Give, whole: bool) -> None:
    write_volume(tmp_path / "in.n5", noise(SHAPE))
    assert run(give, "in.n5")[0] == 0
    assert COMPLETE in run(give, "in.n5")[1]
    lost = next(path for path in (tmp_path / "out.zarr/s0/c").rglob("*") if path.is_file())
    shutil.rmtree(tmp_path / "out.zarr/s0/c") if whole else lost.unlink()
    code, said = run(give, "in.n5")
    assert code == 2 and "out.zarr has lost files that its run wrote, such as" in said
    assert f"({6 if whole else 1} of 6 that were looked at)" in said
    assert run(give, "in.n5", "--fresh")[0] == 0
    np.testing.assert_array_equal(open_volume(tmp_path / "out.zarr").open()[...], noise(SHAPE))
