"""The input by way of a node's own disk: files fetched once for all, whole; the same output; and nothing stays."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil
import pytest
from command import IDENTITY, Give, begin, finish, is_pool, processes_in, set_each, wait_until
from disks import small_disk
from disturbance import Slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from volumes import fingerprint, noise, write_volume

from volpipe.apps.htex.launch import grouped
from volpipe.apps.htex.processes import SOCKETS
from volpipe.blockwise.journal import read_records
from volpipe.geometry.grid import Box
from volpipe.runs.worker import RESULTS
from volpipe.volumes import node_cache
from volpipe.volumes.node_cache import LOCK_FILE, NodeCache, open_cache, remove_stale
from volpipe.volumes.storage import tensorstore
from volpipe.volumes.volume import ArraySpec, Volume, create_array, open_volume, open_writer

SHAPE = (20, 30, 26)
LAYOUTS = {
    "n5": ArraySpec(SHAPE, np.dtype(np.uint8), (8, 8, 8), codec="gzip"),
    "zarr2": ArraySpec(SHAPE, np.dtype(np.uint8), (8, 8, 8), codec="gzip"),
    "zarr3": ArraySpec(SHAPE, np.dtype(np.uint8), (4, 4, 4), shards=(16, 16, 16), codec="zstd"),
}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder that the site names on this node, for this process; emptied by all that it opened."""
    node_cache.take_warnings()
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv(node_cache.VARIABLE, "$HERE/node")
    yield tmp_path / "node"
    node_cache.close_caches()
    assert not (tmp_path / "node").exists() or caches(tmp_path / "node") == []


def written(folder: Path, layout: str, data: np.ndarray) -> Volume:
    """Return a volume of which the corner beyond 16 is not stored."""
    create_array(folder, "raw", LAYOUTS[layout], layout)
    writer = open_writer(folder, "raw")
    writer.write(Box((0, 0, 0), (16, *SHAPE[1:])), data[:16])
    return open_volume(folder / "raw")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_box_is_what_it_is_without(node: Path, tmp_path: Path, layout: str) -> None:
    data = noise(SHAPE)
    data[16:] = 0  # not stored
    volume = node_cache.through_cache(written(tmp_path / "in", layout, data), "a run")
    assert isinstance(volume, node_cache.CachedVolume)

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.tuples(*(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True).map(sorted) for n in SHAPE)))
    def check(ends: tuple[list[int], ...]) -> None:
        box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
        for cache_bytes in (0, 1 << 20):
            np.testing.assert_array_equal(volume.open(cache_bytes=cache_bytes).read(box)[0], data[box.slices])

    check()
    assert node_cache.take_warnings() == ()
    assert volume.open().is_stored(Box((0, 0, 0), (16, 16, 16)))
    assert not volume.open().is_stored(Box((16, 0, 0), (20, 16, 16)))


def test_a_chunk_file_is_fetched_once_however_often_it_is_read(node: Path, tmp_path: Path) -> None:
    data = noise((16, *SHAPE[1:]))
    volume = node_cache.through_cache(written(tmp_path / "in", "n5", data), "a run")
    stored = sum(
        file.stat().st_size for file in (tmp_path / "in/raw").rglob("*") if file.is_file() and file.name.isdecimal()
    )
    before = tensorstore.transferred().read
    for _ in range(3):
        volume.open().read(Box.from_shape((16, *SHAPE[1:])))
    assert tensorstore.transferred().read - before == stored


@pytest.mark.parametrize(
    "spoil", [lambda file: file.write_bytes(b"no chunk"), lambda file: file.write_bytes(file.read_bytes()[:-9])]
)
def test_a_spoilt_copy_is_read_where_it_comes_from_and_said_to_be(node: Path, tmp_path: Path, spoil: object) -> None:
    data = noise((16, *SHAPE[1:]))
    volume = node_cache.through_cache(written(tmp_path / "in", "n5", data), "a run")
    box = Box((0, 0, 0), (8, 8, 8))
    volume.open().read(box)
    (copy,) = [file for file in node.glob("*/*") if file.name.startswith("0_0_0@")]
    spoil(copy)  # type: ignore[operator]  # as parametrised
    np.testing.assert_array_equal(volume.open().read(box)[0], data[box.slices])
    (word,) = node_cache.take_warnings()
    assert word.startswith(f"the input is read straight, not by way of {node}: ")
    np.testing.assert_array_equal(volume.open().read(box)[0], data[box.slices])
    assert copy.read_bytes() == (tmp_path / "in/raw/0/0/0").read_bytes()


def test_where_a_folder_cannot_be_the_input_is_read(
    node: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = noise((16, *SHAPE[1:]))
    volume = written(tmp_path / "in", "n5", data)
    (tmp_path / "file").touch()
    for place, why in (("here", "is 'here'"), ("/$NOBODY/node", "NOBODY"), (f"{tmp_path}/file", "file")):
        monkeypatch.setenv(node_cache.VARIABLE, place)
        found = node_cache.through_cache(volume, "a run").open().read(Box((0, 0, 0), (8, 8, 8)))
        np.testing.assert_array_equal(found[0], data[:8, :8, :8])
        (word,) = node_cache.take_warnings()
        assert why in word


def test_what_is_no_file_of_a_chunk_is_read_where_it_lies(node: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "in.npy", noise((8, 8, 8)))
    volume = open_volume(tmp_path / "in.npy")
    assert node_cache.through_cache(volume, "a run") is volume
    assert node_cache.obstacle(volume) == "npy is read in parts of files"
    shards = ArraySpec((1024, 512, 512), np.dtype(np.uint8), (64, 64, 64), shards=(512, 512, 512), codec="zstd")
    create_array(tmp_path / "big", "raw", shards, "zarr3")
    large = open_volume(tmp_path / "big/raw")
    assert node_cache.through_cache(large, "a run") is large
    assert node_cache.obstacle(large) == "its shards hold 128 MiB, more than 64, and are read in part"


def test_the_plan_says_why_an_input_is_not_kept_on_nodes(node: Path, tmp_path: Path, give: Give) -> None:
    np.save(tmp_path / "in.npy", noise((16, 16, 16)))
    ended = give("plan", "--config", "threads", *IDENTITY, "--set", "normalise.method=none", "in.npy")
    assert ended.code == 0, ended.err
    said = "input is read where it lies, not by way of $HERE/node of each node: npy is read in parts of files"
    assert said in " ".join(ended.out.split())


ZSCORE = set_each(
    "net.name=identity", "normalise.method=zscore", "windows.shape=[16,16,16]", "windows.overlap=8",
    "windows.blend=hann", "tensors.mode=streamed", "output.shard=[16,16,16]", "output.chunk=[8,8,8]",
)  # fmt: skip


def run(folder: Path, volume: Path, node: str | None, *options: str) -> tuple[str, Path]:
    """Return the fingerprint of a run's output, and its folder; see that it left no process."""
    folder.mkdir()
    environment = {"VOLPIPE_WORKERS": "2", "HERE": str(folder.parent)}
    if node is not None:
        environment[node_cache.VARIABLE] = node
    ended = finish(folder, begin(folder, "run", *ZSCORE, *options, "-o", "out.zarr", str(volume), **environment))
    assert ended.code == 0, ended.err
    (folder / "said.txt").write_text(" ".join(ended.out.split()))
    assert processes_in(folder) == []
    return fingerprint(folder / "out.zarr"), folder / "out.zarr.run"


def fetched(folder: Path, *stages: str) -> int:
    return sum(r.usage.read_bytes for r in read_records(folder / "journal.jsonl", RESULTS) if r.stage in stages)


@pytest.mark.slow
def test_a_run_by_way_of_a_node_fetches_less_makes_the_same_bytes_and_leaves_nothing(tmp_path: Path) -> None:
    volume = write_volume(tmp_path / "in.n5", noise((48, 48, 48)))
    stored = sum(file.stat().st_size for file in volume.rglob("*") if file.is_file() and file.name.isdecimal())
    straight, straight_run = run(tmp_path / "straight", volume, None)
    assert fetched(straight_run, "measure", "infer") > 1.9 * stored
    by_way, its_run = run(tmp_path / "by-way", volume, "$HERE/node disk")
    assert by_way == straight
    assert fetched(its_run, "measure") == stored
    assert fetched(straight_run, "infer") - fetched(its_run, "infer") >= 0.9 * stored  # sums are read in both
    assert list((tmp_path / "node disk").iterdir()) == []
    said = "input by way of $HERE/node disk of each node: a chunk is fetched once there"
    assert said in (tmp_path / "by-way/said.txt").read_text()
    assert "each node" not in (tmp_path / "straight/said.txt").read_text()


@pytest.mark.slow
def test_a_run_whose_node_is_full_reads_straight_and_says_so(tmp_path: Path) -> None:
    volume = write_volume(tmp_path / "in.n5", noise((48, 48, 48)))
    straight, _ = run(tmp_path / "straight", volume, None)
    (tmp_path / "node").mkdir()
    with small_disk(tmp_path / "node", "size=200k"):
        (tmp_path / "node/theirs").write_bytes(bytes(190_000))
        by_way, its_run = run(tmp_path / "by-way", volume, "$HERE/node")
        assert [file.name for file in (tmp_path / "node").iterdir()] == ["theirs"]
    assert by_way == straight
    words = [line for line in (its_run / "volpipe.log").read_text().splitlines() if "read straight" in line]
    (word,) = words  # once for the node, not for each task
    assert f"not by way of {tmp_path}/node: OSError" in word
    assert "of the disk is free" in word


def caches(node: Path) -> list[Path]:
    return list(node.glob("volpipe-*"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("what", ["worker", pytest.param("pool", marks=pytest.mark.long), "driver", "all"])
def test_nothing_stays_on_a_node_whatever_is_killed(tmp_path: Path, what: str) -> None:
    """Where the pool's shell is killed as well, nobody is left to clean up but the next run's workers."""
    node = tmp_path / "node"
    slow = Slow(tmp_path / "run", mode="streamed", environment={node_cache.VARIABLE: str(node)})
    slow.begin()
    slow.wait_for_calls(20)
    assert len(caches(node)) == 1
    if what == "worker":
        slow.workers()[0].kill()
    elif what == "pool":
        next(filter(is_pool, processes_in(slow.folder))).kill()
    elif what == "driver":
        slow.interrupt(signal.SIGKILL)
    else:
        for process in processes_in(slow.folder):
            with suppress(psutil.NoSuchProcess):  # it may have ended with another
                process.kill()
    slow.hurry()
    code = slow.finish().code
    assert code == (-signal.SIGKILL if what in ("driver", "all") else 0)
    wait_until(lambda: not processes_in(slow.folder), 60)
    if what == "all":
        assert len(caches(node)) == 1
        slow.begin()
        assert slow.finish().code == 0
    wait_until(lambda: not caches(node), 20)


PLACES = ("worker_port", "heartbeat_period", "heartbeat_threshold")


def block(directory: str, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a pool in a block with this folder for its node, once all of the block has ended."""
    # Parsl formats the command twice.
    once = grouped("env", directory).format_map({**dict.fromkeys(PLACES, "1"), "addresses": "a"})
    command = ["bash", "-c", once.format(block_id=0)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def test_a_site_names_a_folder_in_the_words_of_its_node(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path), "USER": "me"}
    assert block("${TMPDIR}/$USER and more", environment)[node_cache.VARIABLE] == f"{tmp_path}/me and more"


def test_what_deletes_at_a_blocks_end_is_not_hit_by_another_signal_to_end(tmp_path: Path) -> None:
    """For a moment it is in the group of the shell that starts it, to which signals go."""
    (tmp_path / "bin").mkdir()
    for name in ("flock", "rm"):
        file = tmp_path / "bin" / name
        file.write_text(f'#!/bin/bash\nkill -TERM $$\nexec {shutil.which(name)} "$@"\n')
        file.chmod(0o755)
    cache = tmp_path / f"node/{node_cache.PREFIX}-{os.getuid()}-run"
    cache.mkdir(parents=True)
    (cache / node_cache.LOCK_FILE).touch()
    found = block(f"{tmp_path}/node", {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    assert not cache.exists()
    assert not Path(found[SOCKETS]).exists()


SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[NodeCache]:
    cache = open_cache(tmp_path / "node", "a run")
    yield cache
    cache.close()


def unwanted() -> bytes:
    raise AssertionError("fetched again")


def kept(cache: NodeCache) -> set[str]:
    return {file.name for file in cache.folder.iterdir()} - {LOCK_FILE}


def test_a_file_is_fetched_once_and_stays_as_it_was(cache: NodeCache) -> None:
    assert cache.get("0/1", lambda: b"voxels") == b"voxels"
    assert cache.get("0/1", unwanted) == b"voxels"
    assert cache.get("01", lambda: b"others") == b"others"


def test_what_there_is_not_is_asked_for_again_and_leaves_nothing(cache: NodeCache) -> None:
    assert cache.get("0/1", lambda: None) is None
    assert cache.get("0/2", lambda: b"") == b""
    assert kept(cache) == {"0_2"}
    assert cache.get("0/1", lambda: b"late") == b"late"


def test_what_goes_wrong_at_its_source_is_told_and_mended_by_the_next(cache: NodeCache) -> None:
    with pytest.raises(AssertionError, match="fetched again"):
        cache.get("0", unwanted)
    assert cache.get("0", lambda: b"voxels") == b"voxels"


def test_of_many_that_want_a_file_at_once_one_fetches_it(cache: NodeCache) -> None:
    fetched: list[int] = []
    found: list[bytes | None] = []
    start = threading.Barrier(8)

    def fetch() -> bytes:
        fetched.append(1)
        time.sleep(0.2)
        return b"voxels"

    def want() -> None:
        start.wait()
        found.append(cache.get("0", fetch))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(fetched), found) == (1, [b"voxels"] * 8)


def test_a_half_written_file_of_a_killed_worker_is_written_anew(cache: NodeCache) -> None:
    (cache.folder / "0.partial").write_bytes(b"vox, and more than that")
    assert cache.get("0", lambda: b"voxels") == b"voxels"
    assert cache.get("0", unwanted) == b"voxels"


def test_what_another_worker_is_writing_is_not_put_in_place(cache: NodeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began after the one that this worker had waited for was gone."""
    lock, partial = fcntl.flock, cache.folder / "0.partial"

    def wait(file: BinaryIO, how: int) -> None:
        lock(file, how)
        monkeypatch.setattr(fcntl, "flock", lock)
        partial.unlink()
        partial.write_bytes(b"vox")

    monkeypatch.setattr(fcntl, "flock", wait)
    assert cache.get("0", lambda: b"voxels") == b"voxels"
    assert cache.get("0", unwanted) == b"voxels"


def hold(base: str, ready: object) -> None:
    open_cache(Path(base), "a run").get("0", lambda: b"old")
    ready.set()  # type: ignore[attr-defined]  # an event
    time.sleep(600)


def test_what_a_killed_worker_held_is_deleted_by_the_next_one_and_what_others_hold_is_not(tmp_path: Path) -> None:
    ready = SPAWN.Event()
    holder = SPAWN.Process(target=hold, args=(str(tmp_path), ready))
    holder.start()
    assert ready.wait(60)
    other = open_cache(tmp_path, "another run")
    own = open_cache(tmp_path, "a run")
    assert own.get("0", unwanted) == b"old"  # held by both
    own.close()
    assert own.folder.is_dir()
    holder.kill()
    holder.join()
    again = open_cache(tmp_path, "a run")
    assert again.get("0", lambda: b"new") == b"new"  # it may have changed since
    again.close()
    assert list(tmp_path.iterdir()) == [other.folder]
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_cache_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = open_cache(tmp_path, "a run")
    assert cache.folder.stat().st_mode & 0o777 == 0o700
    theirs = open_cache(tmp_path, "their run").folder
    link = tmp_path / theirs.name
    theirs.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="another user's"):
        open_cache(tmp_path, "their run")
    cache.close()


def test_the_oldest_go_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m"):
        cache = open_cache(tmp_path, "a run")
        data = bytes(100_000)
        for number in range(30):
            assert cache.get(str(number), lambda: data) == data
            os.utime(cache.folder / str(number), (number, number))
        assert cache.get("29", unwanted) == data
        assert "0" not in kept(cache)
        assert len(kept(cache)) < 10
        cache.close()


def test_a_disk_that_others_fill_is_left_alone(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m"):
        cache = open_cache(tmp_path, "a run")
        (tmp_path / "theirs").write_bytes(bytes(1_000_000))
        with pytest.raises(OSError, match="less than 5% of the disk is free") as refused:
            cache.get("0", lambda: bytes(100_000))
        assert refused.value.errno == errno.ENOSPC
        cache.close()


def test_removing_stale_caches_while_opening_leaves_a_cache(tmp_path: Path) -> None:
    """Deleting and making the same folder, again and again: what is opened is never what another deletes."""
    until, failed = time.monotonic() + 2, []

    def work() -> None:
        while time.monotonic() < until:
            cache = open_cache(tmp_path, "a run")
            if cache.get("0", lambda: b"voxels") != b"voxels" or not (cache.folder / "0").is_file():
                failed.append(cache)
            cache.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    remove_stale(tmp_path)
    wait_until(lambda: not list(tmp_path.iterdir()), 5)
