"""Copies that are killed leave nothing under their name, and go on to the end of those that were not."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest
from boxes import MiB
from bucket import Bucket
from command import Give
from conftest import ROOT
from volumes import fingerprint, noise

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes import convert as module
from volpipe.volumes.convert import Choice, CopyTally, convert
from volpipe.volumes.volume import ArraySpec, Volume, create_array, open_volume, open_writer

SHAPE = (48, 40, 56)
CHOICES = {
    "n5": Choice("n5", (8, 8, 8)),
    "zarr2": Choice("zarr2", (8, 8, 8)),
    "ome-zarr-0.4": Choice("ome-zarr-0.4", (8, 8, 8)),
    "ome-zarr-0.5": Choice("ome-zarr-0.5", (8, 8, 8), (16, 16, 16)),
    "precomputed": Choice("precomputed", (8, 8, 8), (16, 16, 16)),
    "hdf5": Choice("hdf5", (8, 8, 8)),
}
KILLED = """
import os, signal, sys
from volpipe.volumes import convert as module
from volpipe.volumes.volume import open_volume

def die(done, total):
    if done == 5:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    module.MIN_BOX_BYTES = 1
    source, out, format, shard, workers = sys.argv[1:]
    choice = module.Choice(format, (8, 8, 8), (16, 16, 16) if shard else None)
    module.convert(open_volume(source), out, choice, workers=int(workers), on_progress=die)
"""


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_BOX_BYTES", 1)


def make(path: Path) -> Volume:
    """Write a volume with a few empty chunks, of which copies store no chunk."""
    data = noise(SHAPE, "uint16")
    data[:8, :8, 8:24] = 0
    attributes = {"resolution": [4, 4, 4], "units": ["nm"] * 3}
    create_array(path, "raw", ArraySpec(SHAPE, data.dtype, (8, 8, 8), attributes=attributes), "n5")
    open_writer(path, "raw").write(Box.from_shape(SHAPE), data)
    return open_volume(path)


def kill(folder: Path, source: Volume, out: str, format: str, workers: int) -> None:
    """Copy in a process that is killed after five boxes."""
    script = folder / "killed.py"
    script.write_text(KILLED)
    arguments = [source.path, out, format, "16" if CHOICES[format].shard else "", str(workers)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, str(script), *arguments], env=environment) as process:
        assert process.wait(120) == -signal.SIGKILL
    script.unlink()


def chunks(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of each chunk's file."""
    found = (path for path in folder.rglob("*") if path.name.isdecimal() and path.is_file())
    return {str(path.relative_to(folder)): (path.stat().st_ino, path.stat().st_mtime_ns) for path in found}


@pytest.mark.parametrize(
    ("format", "workers"),
    [
        ("n5", 1),
        ("ome-zarr-0.5", 2),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("n5", 2), ("ome-zarr-0.4", 1))),
    ],
)
def test_a_killed_copy_goes_on_to_the_same_bytes(tmp_path: Path, format: str, workers: int) -> None:
    source = make(tmp_path / "a.n5")
    (tmp_path / "whole").mkdir()
    convert(source, tmp_path / "whole/b.out", CHOICES[format])
    out, work = tmp_path / "b.out", tmp_path / "b.out.partial"
    kill(tmp_path, source, str(out), format, workers)
    assert not out.exists()
    before = chunks(work / "b.out")
    tally = CopyTally(work / "copied.json", {})
    assert tally.load()
    assert len(tally) == 5
    told: list[tuple[int, int]] = []
    convert(source, out, CHOICES[format], workers=workers, on_progress=lambda *n: told.append(n))
    assert [done for done, _ in told] == list(range(6, told[-1][1] + 1))
    after = chunks(out)
    again = [name for name, state in before.items() if after[name] != state]
    assert len(again) <= (0 if workers == 1 else 4)  # each of two workers had two boxes that nobody was told of
    assert fingerprint(out) == fingerprint(tmp_path / "whole/b.out")
    assert not work.exists()


@pytest.mark.long
@pytest.mark.parametrize("format", ["n5", pytest.param("zarr2", marks=pytest.mark.long), "ome-zarr-0.5"])
def test_a_killed_copy_into_a_bucket_goes_on_to_the_same_bytes(bucket: Bucket, tmp_path: Path, format: str) -> None:
    source = make(tmp_path / "a.n5")
    convert(source, "s3://cells/whole/b.out", CHOICES[format], workers=2)
    bucket.requests.clear()
    kill(tmp_path, source, "s3://cells/b.out", format, 2)
    marks = [path for verb, path in bucket.requests if verb == "PUT" and path.endswith("copied.json")]
    assert len(marks) == 6  # one at the start, five boxes
    with pytest.raises(VolumeError, match=r"no volume|holds no arrays"):  # to readers it is not there yet
        open_volume("s3://cells/b.out")
    put = {path for verb, path in bucket.requests if verb == "PUT"}
    bucket.requests.clear()
    told: list[int] = []
    convert(source, "s3://cells/b.out", CHOICES[format], workers=2, on_progress=lambda done, total: told.append(done))
    assert told[0] == 6
    again = {path for verb, path in bucket.requests if verb == "PUT"} & put
    chunks_again = {path for path in again if path.rpartition("/")[2].isdecimal()}
    assert len(chunks_again) <= 4  # two workers had at most two boxes each under way, or written and not yet told of
    assert not [key for key in bucket.files if "partial" in key]
    whole = {key.removeprefix("whole/"): data for key, data in bucket.files.items() if key.startswith("whole/")}
    assert {key: data for key, data in bucket.files.items() if not key.startswith("whole/")} == whole
    read = open_volume("s3://cells/b.out").open()[...]
    assert np.array_equal(read, source.open()[...])


def test_metadata_come_after_all_chunks_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    convert(make(tmp_path / "a.n5"), "s3://cells/b.zarr", CHOICES["ome-zarr-0.5"])
    put = [path for verb, path in bucket.requests if verb == "PUT" and ".partial" not in path]
    is_chunk = [path.rpartition("/")[2].isdecimal() for path in put]
    assert is_chunk == sorted(is_chunk, reverse=True)
    assert any(is_chunk)


def test_an_array_joins_a_container_in_a_bucket(bucket: Bucket, tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5")
    convert(source, "s3://cells/b.n5/one")
    made = convert(source, "s3://cells/b.n5/in/two", Choice(chunk=(16, 16, 16)))
    assert (str(made), made.chunks) == (str(open_volume("s3://cells/b.n5/in/two")), (16, 16, 16))
    with pytest.raises(VolumeError, match="exists already"):
        convert(source, "s3://cells/b.n5/one")
    with pytest.raises(VolumeError, match="is n5; zarr3 cannot be written into it"):
        convert(source, "s3://cells/b.n5/three", Choice("zarr3"))
    with pytest.raises(VolumeError, match="hdf5 is written to a disk; what goes to S3 is n5, zarr2"):
        convert(source, "s3://cells/b.h5")
    with pytest.raises(VolumeError, match="which is read only"):
        convert(source, f"{bucket.url}/cells/c.n5")
    assert not [key for key in bucket.files if "partial" in key]


def test_a_killed_single_file_begins_anew(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5")
    kill(tmp_path, source, str(tmp_path / "b.h5"), "hdf5", 1)
    assert not (tmp_path / "b.h5").exists()
    told: list[int] = []
    made = convert(source, tmp_path / "b.h5", CHOICES["hdf5"], on_progress=lambda done, total: told.append(done))
    assert told[0] == 1
    assert np.array_equal(made.open()[...], source.open()[...])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.n5", "b.h5"]


def test_another_copy_does_not_go_on_with_this_one(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5")
    kill(tmp_path, source, str(tmp_path / "b.out"), "n5", 1)
    before = fingerprint(tmp_path / "b.out.partial/b.out")
    with pytest.raises(VolumeError, match=r"holds a part of another copy \(chunk .*\[8, 8, 8\] -> \[16, 16, 16\]"):
        convert(source, tmp_path / "b.out", Choice("n5", (16, 16, 16)))
    other = make(tmp_path / "c.n5")
    with pytest.raises(VolumeError, match=r"part of another copy \(volume .*a\.n5:raw -> .*c\.n5:raw\)"):
        convert(other, tmp_path / "b.out", CHOICES["n5"])
    assert fingerprint(tmp_path / "b.out.partial/b.out") == before
    (tmp_path / "b.out.partial/copied.json").write_text("{}")
    with pytest.raises(VolumeError, match=r"copied\.json is damaged; remove .*b\.out\.partial to start over"):
        convert(source, tmp_path / "b.out", CHOICES["n5"])


def test_a_copy_does_not_go_on_with_a_source_that_was_changed(tmp_path: Path) -> None:
    """It would be half of the one and half of the other."""
    source = make(tmp_path / "a.n5")
    kill(tmp_path, source, str(tmp_path / "b.out"), "n5", 1)
    open_writer(tmp_path / "a.n5", "raw").write(Box.from_shape(SHAPE), noise(SHAPE, "uint16", seed=1))
    with pytest.raises(VolumeError, match=r"part of another copy \(0/0/0 was .*voxels that were compared differ"):
        convert(source, tmp_path / "b.out", CHOICES["n5"])


def test_two_do_not_make_the_same_copy(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5")
    work = tmp_path / "b.out.partial"
    work.mkdir()
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 7 on elsewhere\n")
        lock.flush()
        with pytest.raises(VolumeError, match=r"b\.out\.partial is in use by process 7 on elsewhere; wait for it"):
            convert(source, tmp_path / "b.out", CHOICES["n5"])
    convert(source, tmp_path / "b.out", CHOICES["n5"])


def test_a_copy_that_met_damage_goes_on_when_that_is_mended(tmp_path: Path) -> None:
    source = make(tmp_path / "a.n5")
    chunk = tmp_path / "a.n5/raw/6/4/5"
    good = chunk.read_bytes()
    chunk.write_bytes(b"damage")
    with pytest.raises(
        VolumeError, match=r"a\.n5:raw.*b\.out\.partial keeps what is whole; run the same command again"
    ):
        convert(source, tmp_path / "b.out", CHOICES["n5"])
    chunk.write_bytes(good)
    told: list[tuple[int, int]] = []
    made = convert(source, tmp_path / "b.out", CHOICES["n5"], on_progress=lambda *n: told.append(n))
    assert told == [(told[0][1], told[0][1])]
    assert np.array_equal(made.open()[...], source.open()[...])


def test_the_command_copies_into_a_bucket(bucket: Bucket, tmp_path: Path, give: Give) -> None:
    source = make(tmp_path / "a.n5")
    ended = give("convert", "--workers", "2", "a.n5", "s3://cells/b.zarr")
    assert ended.code == 0, ended.err
    assert "wrote s3://cells/b.zarr in" in ended.out
    assert np.array_equal(open_volume("s3://cells/b.zarr").open()[...], source.open()[...])
    ended = give("convert", "a.n5", "s3://cells/b.zarr")
    assert (ended.code, "exists already" in ended.err) == (2, True)


ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
COMMAND = [sys.executable, "-m", "volpipe"]


@contextmanager
def copying(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """Give the command that makes a large copy `b.n5` in `folder`, once it has begun to write, and its workers."""
    with (folder / "a.npy").open("wb") as stream:
        header = {"descr": "|u1", "fortran_order": False, "shape": (1000, 2000, 2000)}
        np.lib.format.write_array_header_2_0(stream, header)
        stream.truncate(stream.tell() + 4 * 10**9)
    command = [*COMMAND, "convert", "--workers", "2", "--codec", "gzip", "a.npy", "b.n5"]
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        children: list[psutil.Process] = []
        while len(children) < 3 and time.monotonic() < deadline:  # two workers, and the tracker of their resources
            time.sleep(0.05)
            children = psutil.Process(process.pid).children(recursive=True)
        assert (folder / "b.n5.partial").exists()
        try:
            yield process, children
        finally:
            process.kill()
    _, alive = psutil.wait_procs(children, timeout=20)
    assert alive == []
    assert not (folder / "b.n5").exists()


def test_a_killed_copy_leaves_no_process_and_no_copy_under_its_name(tmp_path: Path) -> None:
    with copying(tmp_path) as (process, _):
        process.send_signal(signal.SIGKILL)
        assert process.wait(20) == -signal.SIGKILL
    assert (tmp_path / "b.n5.partial").exists()  # for the same command to go on with


def test_a_terminated_copy_leaves_nothing(tmp_path: Path) -> None:
    with copying(tmp_path) as (process, _):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]


def test_a_copy_whose_worker_is_killed_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with copying(tmp_path) as (process, children):
        next(child for child in children if "spawn_main" in " ".join(child.cmdline())).kill()
        _, printed = process.communicate(timeout=60)
        assert (process.returncode, "was killed" in printed) == (2, True)
    assert [p.name for p in tmp_path.iterdir()] == ["a.npy"]


COPY = """
import sys
from volpipe.volumes import convert
from volpipe.volumes.volume import open_volume

def peak():
    with open("/proc/self/status") as status:  # getrusage would count the process that started this one
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

convert.MIN_BOX_BYTES = convert.MAX_BOX_BYTES = 2**22
volume = open_volume(sys.argv[1])
convert.convert(open_volume(sys.argv[2]), "warm_" + sys.argv[3], convert.Choice(codec="raw"))
before = peak()
convert.convert(volume, sys.argv[3], convert.Choice(codec="raw"))
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["b.mrc", "b.tif", "b.h5", "b.n5"])
def test_memory_is_a_few_boxes_whatever_the_volume(tmp_path: Path, name: str) -> None:
    shape = (60, 1000, 2000)  # a plane is less than a box, also where bytes are stored as uint16
    with (tmp_path / "a.npy").open("wb") as stream:
        np.lib.format.write_array_header_2_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        stream.truncate(stream.tell() + int(np.prod(shape)))
    np.save(tmp_path / "small.npy", noise((9, 12, 13)))
    ended = subprocess.run(
        [sys.executable, "-c", COPY, "a.npy", "small.npy", name], cwd=tmp_path, env=ENVIRONMENT, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) < 6 * 4 * MiB
