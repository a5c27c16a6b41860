"""The journal survives what a crash leaves."""

from __future__ import annotations

import errno
import os
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volpipe.blockwise.journal import (
    KEYS,
    Attempt,
    Journal,
    Kinds,
    Record,
    read_records,
    read_results,
)
from volpipe.blockwise.ledger import Ledger
from volpipe.blockwise.stage import Schedule, Stage, Unit
from volpipe.blockwise.usage import Usage
from volpipe.errors import RunError
from volpipe.runs import run_folder, worker
from volpipe.segmentation import tasks


@dataclass(frozen=True)
class Sums:
    """A result with fields of every type that results have."""

    FINISHED: ClassVar[Mapping[str, str]] = {"shared": "reassemble"}

    total: Fraction
    counts: dict[int, int]
    shards: tuple[tuple[int, int, str], ...] = ()
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plain:
    """A result with numbers that are no whole ones."""

    FINISHED: ClassVar[Mapping[str, str]] = {"shared": "reassemble"}

    entries: tuple[tuple[int, float, str], ...]
    shared: tuple[int, ...] = ()
    name: str = ""


KINDS = (Sums, Plain)
USAGE = Usage(1.5, 2.5, 3.5, 4, 5, 6, -7, "cpu", 0.25, 7, "host", 8, 0.5, 97.5, 9)
FULL = Record(
    "infer", (3, 4), ((5, "ValueError: no"),), Sums(Fraction(1, 3), {255: 2}, ((0, 3, "0123abcd"),), (3,)), USAGE
)  # fmt: skip


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal", KINDS) as journal:
        journal.append(FULL)
        journal.append(Record("factor", ()))
    assert list(read_records(tmp_path / "journal", KINDS)) == [FULL, Record("factor", ())]


def test_what_the_loop_alone_needs_is_not_written(tmp_path: Path) -> None:
    sent = replace(FULL, permanent=(5,), warnings=("the disk is nearly full",), fatal=True)
    assert pickle.loads(pickle.dumps(sent)) == sent
    assert Record.from_line(sent.to_line(), KINDS) == FULL


def test_numbers_of_numpy_come_back_as_numbers() -> None:
    record = Record("infer", (1,), result=Sums(Fraction(1), {}, ((0, np.int64(7), "ab"),)))  # type: ignore[arg-type]
    assert Record.from_line(record.to_line(), KINDS) == record


def test_numbers_that_json_has_no_names_for_come_back() -> None:
    record = Record("infer", (1,), result=Plain(((1, float("inf"), ""), (2, -float("inf"), ""))))
    assert Record.from_line(record.to_line(), KINDS) == record


def test_a_name_that_is_no_text_leaves_the_journal_readable() -> None:
    record = Record("infer", (), ((1, "no such file: bl\udcf6cke.tif"),))
    assert Record.from_line(record.to_line(), KINDS).failed == ((1, "no such file: bl?cke.tif"),)


def test_a_result_names_units_of_other_stages_that_its_task_finished() -> None:
    assert list(FULL.units) == [("reassemble", 3), ("infer", 3), ("infer", 4)]
    assert list(Record("factor", (1,)).units) == [("factor", 1)]


@pytest.mark.parametrize("kinds", [worker.RESULTS, tasks.RESULTS, run_folder.NOTES, (Attempt,)])
def test_no_two_parts_of_a_line_have_one_name(kinds: Kinds) -> None:
    taken = KEYS | {"result"} | {field.name for field in fields(Usage)}
    assert len({kind.__name__ for kind in kinds}) == len(kinds)
    for kind in kinds:
        assert taken.isdisjoint(field.name for field in fields(kind))


LINES = (
    FULL,
    Record("factor", (1, 2)),
    Record("graph", (0,), result=Attempt((0,), 'it said "result":"Sums" and "counts":{}', 2)),
    Record("infer", (), ((7, "no"),)),
    Record("infer", (), result=Sums(Fraction(2), {}, shared=(9,))),
    Record("infer", (12, 0), result=Plain(((0, 1e-9, "ab"), (-7, 2.0, "")), (0, 120), "a b"), usage=USAGE),
    Record("infer", (1,), result=Plain(((1, float("inf"), 'é\\"{'),))),
)


STAGES = ("infer", "factor", "graph", "reassemble")
SIZE = 200


def units_in(path: Path, kinds: Kinds = KINDS) -> list[Unit]:
    """Return the units that a ledger has as done."""
    schedule = Ledger(path, kinds, lambda: Schedule(*(Stage(name, SIZE) for name in STAGES))).look().schedule
    return sorted((stage.name, unit) for stage in schedule.stages for unit in np.flatnonzero(stage.done).tolist())


def known(units: Iterable[Unit]) -> list[Unit]:
    return sorted({(name, unit) for name, unit in units if name in STAGES and 0 <= unit < SIZE})


def test_units_alone_are_those_of_the_records(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("".join(record.to_line() for record in LINES) + '{"stage":"inf')
    infer = [("infer", 3), ("infer", 4)]
    units = [("reassemble", 3), *infer, ("factor", 1), ("factor", 2), ("graph", 0), ("reassemble", 9)]
    units += [("reassemble", 0), ("reassemble", 120), ("infer", 12), ("infer", 0), ("infer", 1)]
    assert units_in(tmp_path / "journal") == known(units)
    assert [unit for record in read_records(tmp_path / "journal", KINDS) for unit in record.units] == units


@given(st.sampled_from(LINES), st.data())
def test_units_alone_are_those_of_the_records_whatever_byte_is_damaged(
    record: Record[object], data: st.DataObject
) -> None:
    line = bytearray(record.to_line().encode())
    where = data.draw(st.integers(0, len(line) - 2))
    line[where] = data.draw(st.sampled_from(b'0123456789-+.e,:"\\[]{} nax\xff\x00'))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "journal"
        path.write_bytes(line)
        try:
            units = [unit for record in read_records(path, KINDS) for unit in record.units]
        except RunError as error:
            with pytest.raises(RunError, match=f"^{re.escape(str(error))}$"):
                units_in(path)
        else:
            assert units_in(path) == known(units)


def test_records_with_a_field_are_those_that_say_it_themselves(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("".join(record.to_line() for record in LINES))
    assert list(read_records(tmp_path / "journal", KINDS, ["counts"])) == [LINES[0], LINES[4]]
    assert list(read_records(tmp_path / "journal", KINDS, ["number", "failed"])) == [LINES[0], LINES[2], LINES[3]]


BAD_LINES = {
    "cut in the middle": b'{"stage":"infer","do\n',
    "zeros": b"\0" * 64 + b"\n",
    "no text": b"\xff\xfe\n",
    "no object": b"[1]\n",
    "empty": b"\n",
    "without its units": b'{"stage":"infer"}\n',
    "units that are no numbers": b'{"stage":"infer","done":["x"]}\n',
    "without a part of its result": b'{"stage":"infer","done":[1],"result":"Sums","counts":{}}\n',
    "a wrong result": b'{"stage":"infer","done":[1],"result":"Sums","total":"a","counts":{}}\n',
    "a result of another kind": b'{"stage":"infer","done":[1],"result":"Cells","cells":[]}\n',
    "a result as it was": b'{"stage":"infer","done":[1],"result":[3]}\n',
    "a key of another version": b'{"stage":"infer","done":[1],"sums":[[0,1,"ab"]]}\n',
    "a usage that is no number": b'{"stage":"infer","done":[1],"seconds":"long"}\n',
}


@pytest.mark.parametrize("line", BAD_LINES.values(), ids=BAD_LINES)
def test_a_damaged_line_is_named_and_ends_the_reading(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(FULL.to_line().encode() + line + FULL.to_line().encode())
    with pytest.raises(RunError, match=rf"^line 2 of {path} is damaged, or another version wrote it; .* --fresh"):
        list(read_records(path, KINDS))
    with pytest.raises(RunError, match="line 2"):
        list(read_results(path, KINDS, Sums))
    with pytest.raises(RunError, match=rf"^line 2 of {path} is damaged, or another version wrote it; .* --fresh"):
        units_in(path)


@pytest.mark.parametrize("cut", range(1, len(FULL.to_line()) + 1))
def test_a_line_that_was_cut_off_is_dropped_and_the_next_is_whole(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    with Journal(path, KINDS) as journal:
        journal.append(Record("infer", (1,)))
        journal.append(FULL)
    path.write_bytes(path.read_bytes()[:-cut])
    with Journal(path, KINDS) as journal:
        journal.append(Record("infer", (2,)))
    assert [record.done for record in read_records(path, KINDS)] == [(1,), (2,)]


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

    with Journal(path, KINDS) as journal:
        journal.append(Record("infer", (1,)))
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", nearly_full)
            with pytest.raises(OSError, match="No space left"):
                journal.append(FULL)
        journal.append(Record("infer", (2,)))
    assert [record.done for record in read_records(path, KINDS)] == [(1,), (2,)]


def test_a_journal_without_a_whole_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_bytes(b"x" * 200_000)
    with Journal(path, KINDS) as journal:
        assert list(read_records(path, journal.kinds)) == []
    assert path.stat().st_size == 0


def test_no_file_no_records(tmp_path: Path) -> None:
    assert list(read_records(tmp_path / "none", KINDS)) == []
