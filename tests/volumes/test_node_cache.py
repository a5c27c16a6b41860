"""A cache on a node's disk: each file fetched once for all, whole, and deleted when no process holds the cache."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from command import wait_until
from disks import small_disk

from volpipe.volumes.node_cache import LOCK_FILE, NodeCache, open_cache, remove_stale

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
