"""A shelf on a node's disk: each file fetched once for all, whole, and gone when nobody holds the shelf any more."""

from __future__ import annotations

import errno
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import wait_until
from disks import small_disk

from volpipe.shelf import LOCK_FILE, Shelf, open_shelf, sweep

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    shelf = open_shelf(tmp_path / "node", "a run")
    yield shelf
    shelf.close()


def unwanted() -> bytes:
    raise AssertionError("fetched again")


def kept(shelf: Shelf) -> set[str]:
    return {file.name for file in shelf.folder.iterdir()} - {LOCK_FILE}


def test_a_file_is_fetched_once_and_stays_as_it_was(shelf: Shelf) -> None:
    assert shelf.get("0/1", lambda: b"voxels") == b"voxels"
    assert shelf.get("0/1", unwanted) == b"voxels"
    assert shelf.get("01", lambda: b"others") == b"others"


def test_what_there_is_not_is_asked_for_again_and_leaves_nothing(shelf: Shelf) -> None:
    assert shelf.get("0/1", lambda: None) is None
    assert shelf.get("0/2", lambda: b"") == b""
    assert kept(shelf) == {"0_2"}
    assert shelf.get("0/1", lambda: b"late") == b"late"


def test_what_goes_wrong_at_its_source_is_told_and_mended_by_the_next(shelf: Shelf) -> None:
    with pytest.raises(AssertionError, match="fetched again"):
        shelf.get("0", unwanted)
    assert shelf.get("0", lambda: b"voxels") == b"voxels"


def test_of_many_that_want_a_file_at_once_one_fetches_it(shelf: Shelf) -> None:
    fetched: list[int] = []
    found: list[bytes | None] = []
    start = threading.Barrier(8)

    def fetch() -> bytes:
        fetched.append(1)
        time.sleep(0.2)
        return b"voxels"

    def want() -> None:
        start.wait()
        found.append(shelf.get("0", fetch))

    threads = [threading.Thread(target=want) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(fetched), found) == (1, [b"voxels"] * 8)


def test_a_half_written_file_of_a_killed_worker_is_written_anew(shelf: Shelf) -> None:
    (shelf.folder / "0.partial").write_bytes(b"vox, and more than that")
    assert shelf.get("0", lambda: b"voxels") == b"voxels"
    assert shelf.get("0", unwanted) == b"voxels"


def hold(base: str, ready: object) -> None:
    open_shelf(Path(base), "a run").get("0", lambda: b"old")
    ready.set()  # type: ignore[attr-defined]  # an event
    time.sleep(600)


def test_what_a_killed_worker_held_is_deleted_by_the_next_one_and_what_others_hold_is_not(tmp_path: Path) -> None:
    ready = SPAWN.Event()
    holder = SPAWN.Process(target=hold, args=(str(tmp_path), ready))
    holder.start()
    assert ready.wait(60)
    other = open_shelf(tmp_path, "another run")
    own = open_shelf(tmp_path, "a run")
    assert own.get("0", unwanted) == b"old"  # held by both
    own.close()
    assert own.folder.is_dir()
    holder.kill()
    holder.join()
    again = open_shelf(tmp_path, "a run")
    assert again.get("0", lambda: b"new") == b"new"  # it may have changed since
    again.close()
    assert list(tmp_path.iterdir()) == [other.folder]
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_shelf_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = open_shelf(tmp_path, "a run")
    assert shelf.folder.stat().st_mode & 0o777 == 0o700
    theirs = open_shelf(tmp_path, "their run").folder
    link = tmp_path / theirs.name
    theirs.rename(tmp_path / "elsewhere")
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="another user's"):
        open_shelf(tmp_path, "their run")
    shelf.close()


def test_the_oldest_go_when_the_disk_is_nearly_full(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m"):
        shelf = open_shelf(tmp_path, "a run")
        data = bytes(100_000)
        for number in range(30):
            assert shelf.get(str(number), lambda: data) == data
            os.utime(shelf.folder / str(number), (number, number))
        assert shelf.get("29", unwanted) == data
        assert "0" not in kept(shelf)
        assert len(kept(shelf)) < 10
        shelf.close()


def test_a_disk_that_others_fill_is_left_alone(tmp_path: Path) -> None:
    with small_disk(tmp_path, "size=1m"):
        shelf = open_shelf(tmp_path, "a run")
        (tmp_path / "theirs").write_bytes(bytes(1_000_000))
        with pytest.raises(OSError, match="less than 5% of the disk is free") as refused:
            shelf.get("0", lambda: bytes(100_000))
        assert refused.value.errno == errno.ENOSPC
        shelf.close()


def test_two_that_sweep_and_open_at_once_end_with_a_shelf_that_is_there(tmp_path: Path) -> None:
    """Deleting and making the same folder, again and again: what is opened is never what another deletes."""
    until, failed = time.monotonic() + 2, []

    def work() -> None:
        while time.monotonic() < until:
            shelf = open_shelf(tmp_path, "a run")
            if shelf.get("0", lambda: b"voxels") != b"voxels" or not (shelf.folder / "0").is_file():
                failed.append(shelf)
            shelf.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    sweep(tmp_path)
    wait_until(lambda: not list(tmp_path.iterdir()), 5)
