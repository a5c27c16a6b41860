"""A disk without room is one sentence that names the file; the same command goes on once there is room."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from volumes import noise, write_volume

import volpipe as vp
from volpipe.blockwise.journal import Journal, Record
from volpipe.errors import VolumeError
from volpipe.runs.run_folder import NOTES
from volpipe.volumes.storage import paths

COMMAND = (sys.executable, "-m", "volpipe", "run", "--set", "net.name=identity", "raw.n5/raw", "-o", "out.zarr")


@pytest.mark.parametrize(
    ("site", "kib"),
    [
        ("threads", 12),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("threads", 2), ("threads", 40), ("local", 12))),
    ],
)
def test_a_run_without_room_ends_in_a_sentence_and_goes_on_later(tmp_path: Path, site: str, kib: int) -> None:
    """Whichever file meets the limit first: a log, a shard, the journal, a report; files may have so many KiB."""
    data = noise((32, 64, 64)) | 1
    write_volume(tmp_path / "raw.n5", data)
    command = (*COMMAND, "--config", site)
    limited = ["bash", "-c", f'ulimit -f {kib}; exec "$@"', "bash", *command]
    ended = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    text = ended.stdout + ended.stderr
    assert ended.returncode in (1, 2), text
    assert "Traceback" not in text and "Logging error" not in text
    assert "File too large" in text and str(tmp_path) in text
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    np.testing.assert_array_equal(vp.open(tmp_path / "out.zarr")[...], data)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_file_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with Journal(tmp_path / "journal", NOTES) as journal, monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(VolumeError, match=f"journal cannot be written: {os.strerror(number)}; make room"):
            journal.append(Record("session", ()))
    refusal = f"page cannot be written: {os.strerror(number)}; make room"
    with pytest.raises(VolumeError, match=refusal), paths.whole_file(tmp_path / "page"):
        full()
    assert list(tmp_path.iterdir()) == [tmp_path / "journal"]
