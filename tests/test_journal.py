"""The journal survives what a crash leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from volpipe.journal import Journal, Record, read_records

FULL = Record(
    "infer", (3, 4), ((5, "ValueError: no"),), ("1/3", [1, 2]), 1.5, 2.5, 3.5, 4, 5, 6, "cpu", 0.25, 7, "host", 8,
    nonfinite=((3, 1, 2),), sums=((0, 3, "0123abcd"),),
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


def test_a_journal_without_a_whole_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"x" * 200_000)
    with Journal(path) as journal:
        assert list(journal.records()) == []
    assert path.stat().st_size == 0


def test_no_file_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none")) == []
