"""The journal: which units of work are done, and what each task took; the one file that a resume rests on.

Not here: what a unit is (schedule). JSON lines, appended by the driver alone after the data that they speak of is in
place; a line that was cut off by a crash is dropped when the journal is opened again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from volpipe.blockwise.usage import Usage
from volpipe.errors import RunError

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
Kinds = tuple[type, ...]  # classes of results that a journal may hold: frozen dataclasses, told apart by their names
KEYS = {"stage", "done", "failed"}  # of a line, beside those of its usage and its result


@dataclass(frozen=True)
class Record(Generic[R_co]):
    """The outcome of one task, as it travels back from its worker.

    Attributes:
        done: units finished, ascending.
        failed: unit and reason of each that could not be; in a journal, of those that were set aside.
        result: of the units that were finished, of a class that each kind of task has for it; None where it has none.
        permanent: those of `failed` that another attempt would not help, as long as the input is what it is.
        warnings: of its worker, for the log.
        fatal: whether no task can do better: its worker's net is not the plan's, or another driver has its folder.
    """

    stage: str
    done: tuple[int, ...]
    failed: tuple[tuple[int, str], ...] = ()
    result: R_co | None = None
    usage: Usage = field(default_factory=Usage)
    permanent: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()
    fatal: bool = False

    @property
    def units(self) -> Iterator[tuple[str, int]]:
        """Stage and number of every unit that was finished, of other stages too: those that a result has `finished`."""
        yield from getattr(self.result, "finished", ())
        yield from ((self.stage, unit) for unit in self.done)

    def to_line(self) -> str:
        """Return the line of a journal: one flat object, in which "result" names the class of the result."""
        fields: dict[str, object] = {"stage": self.stage, "done": self.done}
        if self.failed:
            fields["failed"] = self.failed
        if self.result is not None:
            fields |= {"result": type(self.result).__name__} | _changed_fields(self.result)
        # Fractions, and numbers of numpy: whoever reads them knows their type.
        return json.dumps(fields | _changed_fields(self.usage), separators=(",", ":"), default=str) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes, kinds: Kinds) -> Record[Any]:  # Any: one of `kinds`
        """Return the record of a journal's line, whose result, if any, is of one of `kinds`.

        Raises:
            ValueError: it is no line that `to_line` gives.
        """
        fields = json.loads(line)
        if not isinstance(fields, dict):
            raise ValueError("it is no JSON object")
        result: object = None
        if (name := fields.pop("result", None)) is not None:
            kind = next((kind for kind in (*kinds, Attempt) if kind.__name__ == name), None)
            if kind is None:
                raise ValueError(f"its result is {name}")
            result = _take(kind, fields)
        usage = _take(Usage, fields)
        if not fields.keys() <= KEYS:
            raise ValueError(f"it has {', '.join(sorted(fields.keys() - KEYS))}")
        return _validate(cls, fields | {"result": result, "usage": usage})


@dataclass(frozen=True)
class Attempt:
    """Result of a task that failed, whether its units are tried again or not; every journal may hold it.

    The usage beside it is the task's; where a worker was lost, from sending to loss. Of a task that other units came
    through, which have a line of their own, it says where and when alone.

    Attributes:
        units: that failed.
        reason: of the first of them, a line.
        number: of the attempt, counted from 1, for that one.
    """

    units: tuple[int, ...]
    reason: str
    number: int


def _changed_fields(value: Any) -> dict[str, object]:  # Any: a dataclass
    """Return the fields of `value` that are not their defaults."""
    entries = ((f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value))
    return {name: entry for name, entry, default in entries if entry != default}


def _take(kind: type[T], fields: dict[str, Any]) -> T:  # Any: JSON
    """Return a `kind` of those of `fields` that are its own, which are removed."""
    names = [field.name for field in dataclasses.fields(kind) if field.name in fields]  # type: ignore[arg-type]
    return _validate(kind, {name: fields.pop(name) for name in names})


_adapters: dict[type, Any] = {}  # Any: pydantic's, which take milliseconds to make


def _validate(kind: type[T], fields: dict[str, Any]) -> T:
    if kind not in _adapters:
        from pydantic import TypeAdapter

        _adapters[kind] = TypeAdapter(kind)
    result: T = _adapters[kind].validate_python(fields)
    return result


@dataclass
class Journal:
    """An open journal, whose results are of `kinds`; use it as a context manager, in one process at a time."""

    path: Path
    kinds: Kinds
    _fd: int = field(default=-1, repr=False)

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, _whole_bytes(self.path))
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self._fd = -1

    def append(self, record: Record[object]) -> None:
        """Write one line and wait until it is on disk; of a line that does not go whole, nothing stays."""
        line, size = record.to_line().encode(), os.fstat(self._fd).st_size
        try:
            while line:  # a disk that is nearly full takes a part, and says nothing
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def records(self) -> Iterator[Record[Any]]:  # Any: one of its kinds
        """Yield what was written so far, oldest first."""
        yield from read_records(self.path, self.kinds)

    def results(self, kind: type[T]) -> Iterator[T]:
        """Yield the results of `kind` that were written so far, oldest first."""
        yield from read_results(self.path, self.kinds, kind)


def read_records(path: Path, kinds: Kinds) -> Iterator[Record[Any]]:  # Any: one of `kinds`
    """Yield the whole records in the journal at `path`, oldest first; none where there is no file.

    Raises:
        RunError: a line is damaged, or its result is of none of `kinds`.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):  # a crash cut it off
                return
            yield _parse(line, kinds, number, path)


def _parse(line: bytes, kinds: Kinds, number: int, path: Path) -> Record[Any]:  # Any: one of `kinds`
    try:
        return Record.from_line(line, kinds)
    except ValueError as error:
        raise RunError(
            f"line {number} of {path} is damaged, or another version wrote it; restore the file to go on, or "
            "use --fresh to start over"
        ) from error


@dataclass
class JournalReader:
    """A journal that is read on from where it was read last, while its driver writes to it.

    Attributes:
        on_anew: called before the first record of a journal that is not the one that was read: it was deleted,
            shortened or replaced.
    """

    path: Path
    kinds: Kinds
    on_anew: Callable[[], None]
    _file: tuple[int, int] | None = None  # device and inode
    _offset: int = 0
    _number: int = 0  # of lines
    _last: bytes = b""  # line that was read

    def records(self) -> Iterator[Record[Any]]:  # Any: one of its kinds
        """Yield the whole records that were not read yet, oldest first; none where there is no file.

        Raises:
            RunError: as `read_records`.
        """
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            self._begin_anew(None)
            return
        with file:
            if not self._goes_on(file.fileno()):
                status = os.fstat(file.fileno())
                self._begin_anew((status.st_dev, status.st_ino))
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                record = _parse(line, self.kinds, self._number + 1, self.path)
                self._offset, self._number, self._last = self._offset + len(line), self._number + 1, line
                yield record

    def _goes_on(self, fd: int) -> bool:
        """Return whether the file is the one that was read: an inode may be another file's, so the last line counts."""
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
            return False
        return os.pread(fd, len(self._last), self._offset - len(self._last)) == self._last

    def _begin_anew(self, file: tuple[int, int] | None) -> None:
        if self._file is not None:
            self.on_anew()
        self._file, self._offset, self._number, self._last = file, 0, 0, b""


def read_results(path: Path, kinds: Kinds, kind: type[T]) -> Iterator[T]:
    """Yield the results of `kind` in the journal at `path`, as `read_records`."""
    return (record.result for record in read_records(path, kinds) if isinstance(record.result, kind))


def _whole_bytes(path: Path) -> int:
    """Return the size of the file up to its last whole line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        while size:
            start = max(0, size - 65536)
            file.seek(start)
            cut = file.read(size - start).rfind(b"\n")
            if cut >= 0:
                return start + cut + 1
            size = start
    return 0


@dataclass
class Totals:
    """What the tasks of one stage took, added up; peaks are the highest of any worker.

    `device_busy_seconds` are those of GPUs at work, by NVML, of any process.
    """

    units: int = 0
    tasks: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    queued_seconds: float = 0.0
    device_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    device_peak_bytes: int = 0
    device_used_bytes: int = 0

    def add(self, record: Record[object]) -> None:
        usage = record.usage
        self.units += len(record.done)
        self.tasks += 1
        self.seconds += usage.seconds
        self.cpu_seconds += usage.cpu_seconds
        self.peak_bytes = max(self.peak_bytes, usage.peak_bytes)
        self.read_bytes += usage.read_bytes
        self.written_bytes += usage.written_bytes
        self.queued_seconds += usage.queued_seconds
        self.device_seconds += usage.device_seconds
        self.device_busy_seconds += usage.device_percent / 100 * usage.seconds
        self.device_peak_bytes = max(self.device_peak_bytes, usage.device_peak_bytes)
        self.device_used_bytes = max(self.device_used_bytes, usage.device_used_bytes)
