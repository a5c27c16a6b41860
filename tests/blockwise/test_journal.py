"""The journal survives what a crash leaves."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from volpipe.blockwise.journal import Journal, Record, read_records

FULL = Record(
    "infer", (3, 4), ((5, "ValueError: no"),), ("1/3", [1, 2]), 1.5, 2.5, 3.5, 4, 5, 6, "cpu", 0.25, 7, "host", 8,
    nonfinite=((3, 1, 2),), sums=((0, 3, "0123abcd"),), hopeless=(5,),
)  # fmt: skip


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal") as journal:
        journal.append(FULL)
        journal.append(Record("factor", ()))
    assert list(read_records(tmp_path / "journal")) == [FULL, Record("factor", ())]


@pytest.mark.parametrize("cut", range(1, len(FULL.to_line()) + 1))
def test_a_line_that_was_cut_off_is_dropped_and_the_next_is_whole(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append(Record("infer", (1,)))
        journal.append(FULL)
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path) as journal:
        journal.append(Record("infer", (2,)))
    assert [record.done for record in read_records(path)] == [(1,), (2,)]


@pytest.mark.parametrize("taken", [0, 1, 30])
def test_of_a_line_that_a_full_disk_took_a_part_of_nothing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    path, write = tmp_path / "journal", os.write
    parts = iter([taken] * 2)

    def nearly_full(fd: int, data: bytes) -> int:
        if (left := next(parts, 0)) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:left])

    with Journal(path) as journal:
        journal.append(Record("infer", (1,)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", nearly_full)
            with pytest.raises(OSError, match="No space left"):
                journal.append(FULL)
        journal.append(Record("infer", (2,)))
    assert [record.done for record in read_records(path)] == [(1,), (2,)]


def test_a_journal_without_a_whole_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"x" * 200_000)
    with Journal(path) as journal:
        assert list(journal.records()) == []
    assert path.stat().st_size == 0


def test_no_file_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none")) == []
