"""Files are written whole or not at all, and what killed writers leave is found and deleted."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage.paths import atomic_write, delete, delete_emptied, partial_files, whole_file

KILLED = """
import os, signal, sys
from pathlib import Path
from volpipe.volumes.storage.paths import whole_file
with whole_file(Path(sys.argv[1])) as partial:
    partial.write_bytes(b"ne")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_bytes(b"old")

    def cut_off(path: Path, data: bytes) -> int:
        with path.open("wb") as stream:
            stream.write(data[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", cut_off)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(tmp_path / "plan.json", b"new and longer")
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert (tmp_path / "plan.json").read_bytes() == b"old"


def test_only_what_must_last_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    for lasting, num_synced in ((False, 0), (True, 2)):  # the file and its folder
        with whole_file(tmp_path / "note", lasting=lasting) as partial:
            partial.write_bytes(b"new")
        assert (tmp_path / "note").read_bytes() == b"new" and len(synced) == num_synced


def test_the_next_driver_of_a_folder_deletes_what_a_killed_writer_left(tmp_path: Path) -> None:
    (tmp_path / ".mine").touch()
    (tmp_path / "plan.json").write_bytes(b"old")
    ended = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "plan.json")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert len(partial_files(tmp_path)) == 1
    with RunFolder(tmp_path).locked():
        assert {path.name for path in tmp_path.iterdir()} == {".mine", "plan.json", "lock"}
    assert (tmp_path / "plan.json").read_bytes() == b"old"


def test_folders_go_as_far_as_they_are_empty(tmp_path: Path) -> None:
    file = tmp_path / "c/7/0/0/0/0"
    file.parent.mkdir(parents=True)
    delete_emptied(file, 4)
    assert list(tmp_path.iterdir()) == [tmp_path / "c"]  # which blocks share
    delete_emptied(file, 4)  # another has deleted them
    assert (tmp_path / "c").is_dir()
    file.parent.mkdir(parents=True)
    (tmp_path / "c/7/0/1").touch()
    delete_emptied(file, 4)
    assert sorted(tmp_path.glob("c/7/**/*")) == [tmp_path / "c/7/0", tmp_path / "c/7/0/1"]


def test_what_is_not_there_is_deleted_already(tmp_path: Path) -> None:
    delete(tmp_path / "none")
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    delete(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_grows_while_it_is_deleted_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of a killed driver writes its last file meanwhile."""
    folder, real, tries = tmp_path / "a", shutil.rmtree, list[Path]()
    folder.mkdir()

    def grown(path: Path) -> None:
        tries.append(path)
        if len(tries) == 1:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        real(path)

    monkeypatch.setattr(shutil, "rmtree", grown)
    delete(folder)
    assert (len(tries), folder.exists()) == (2, False)


def test_a_folder_that_may_not_be_deleted_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = list[Path]()

    def forbidden(path: Path) -> None:
        tries.append(path)
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / "a").mkdir()
    monkeypatch.setattr(shutil, "rmtree", forbidden)
    with pytest.raises(PermissionError):
        delete(tmp_path / "a")
    assert len(tries) == 1
