"""The journal: which units of work are done, and what each task took; the one file that a resume rests on.

Not here: what a unit is (schedule). JSON lines, appended by the driver alone after the data that they speak of is in
place; a line that was cut off by a crash is dropped when the journal is opened again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints

from volpipe.blockwise.usage import Usage
from volpipe.errors import RunError

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
# Classes of results that a journal may hold: frozen dataclasses, told apart by their names. One may have a FINISHED, by
# the names of fields the stages of which these have the numbers of units that a task finished as well.
Kinds = tuple[type, ...]
KEYS = {"stage", "done", "failed"}  # of a line, beside those of its usage and its result
RESULT = re.compile(rb'"result":\s*"(\w*)"')  # within a text its quotes would have backslashes
LINES_AT_ONCE = 4096


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
        """Stage and number of every unit that was finished, of other stages too: see `Kinds`."""
        for name, stage in finished_by(type(self.result)).items():
            yield from ((stage, unit) for unit in getattr(self.result, name))
        yield from ((self.stage, unit) for unit in self.done)

    def to_line(self) -> str:
        """Return the line of a journal: one flat object, in which "result" names the class of the result."""
        fields: dict[str, object] = {"stage": self.stage, "done": self.done}
        if self.failed:
            fields["failed"] = self.failed
        if self.result is not None:
            fields |= {"result": type(self.result).__name__} | _changed_fields(self.result)
        fields |= _changed_fields(self.usage)
        try:
            text = _dump(fields)
        except ValueError:  # JSON has no such numbers
            text = _dump(_finite(fields))
        return text.encode(errors="replace").decode() + "\n"  # half characters, of names of files that are no text

    @classmethod
    def from_line(cls, line: str | bytes, kinds: Kinds) -> Record[Any]:  # Any: one of `kinds`
        """Return the record of a journal's line, whose result, if any, is of one of `kinds`.

        Raises:
            ValueError: it is no line that `to_line` gives.
        """
        return _Line.of(line.encode() if isinstance(line, str) else line, kinds).record()


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


def _dump(fields: object) -> str:
    return json.dumps(fields, separators=(",", ":"), default=_plain, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    """Return the fields of a dataclass; fractions and numbers of numpy as text: whoever reads them knows their type."""
    return _changed_fields(value) if dataclasses.is_dataclass(value) else str(value)


def _finite(value: object) -> object:
    """Return `value` with names for numbers that are infinite or none; whoever reads them knows their type."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class _Form:
    """What lines look like that have a result of `kind`, or none: one flat object, which is checked in one go.

    Attributes:
        validate: returns an object with the fields of a line.
        usage_names, result_names: fields of both, in their order.
    """

    kind: type | None
    validate: Callable[[bytes], Any]  # Any: a class of its own
    usage_names: tuple[str, ...]
    result_names: tuple[str, ...]

    @classmethod
    def from_kind(cls, kind: type | None) -> _Form:
        import msgspec

        parts = (Usage,) if kind is None else (Usage, kind)
        line = msgspec.defstruct(
            "line",
            [("stage", str), ("done", tuple[int, ...]), ("failed", tuple[tuple[int, str], ...], ())]
            + ([] if kind is None else [("result", Literal[kind.__name__])])
            + [_copied(part, own) for part in parts for own in dataclasses.fields(part)],
            kw_only=True,
            forbid_unknown_fields=True,
            gc=False,
        )
        names = [tuple(own.name for own in dataclasses.fields(part)) for part in (*parts, *parts)]
        decoder = msgspec.json.Decoder(line, strict=False, dec_hook=lambda hint, value: hint(value))
        return cls(kind, decoder.decode, names[0], names[1] if kind is not None else ())


class _Line(NamedTuple):
    """A line that was checked: its fields, and the form that they have."""

    form: _Form
    fields: Any  # Any: a class of its own

    @classmethod
    def of(cls, line: bytes, kinds: Kinds) -> _Line:
        """Return the line; it need not be one, or of one of `kinds`: a ValueError says so."""
        name, forms = RESULT.search(line), _forms(kinds)
        key = name[1] if name is not None else b""
        if key not in forms:
            raise ValueError(f"its result is {key.decode()}")
        return cls(forms[key], forms[key].validate(line))

    def usage(self) -> Usage:
        return Usage(*(getattr(self.fields, name) for name in self.form.usage_names))

    def record(self) -> Record[Any]:  # Any: one of its kinds
        form, fields = self
        result = form.kind and form.kind(*(getattr(fields, name) for name in form.result_names))
        return Record(fields.stage, fields.done, fields.failed, result, self.usage())


def finished_by(kind: type | None) -> Mapping[str, str]:
    """Return the stages of which a result of `kind` has units, by the names of its fields."""
    return getattr(kind, "FINISHED", {})


def _copied(kind: type, own: dataclasses.Field[Any]) -> tuple[str, Any, Any]:
    """Return a field of `kind` as that of another class, with the type that its annotation means."""
    import msgspec

    values: dict[str, Any] = {name: getattr(own, name) for name in ("default", "default_factory")}
    defaults = {name: value for name, value in values.items() if value is not dataclasses.MISSING}
    return own.name, get_type_hints(kind)[own.name], msgspec.field(**defaults)


@cache
def _forms(kinds: Kinds) -> Mapping[bytes, _Form]:
    """Return the forms of lines by the names of results; b"" of lines without one."""
    return {b"": _Form.from_kind(None)} | {kind.__name__.encode(): _Form.from_kind(kind) for kind in (*kinds, Attempt)}


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


def read_records(path: Path, kinds: Kinds, fields: Sequence[str] = ()) -> Iterator[Record[Any]]:  # Any: of `kinds`
    """Yield the whole records in the journal at `path`, oldest first; none where there is no file.

    Args:
        fields: those records alone in which one of these is not its default; the others are not looked at.

    Raises:
        RunError: a line is damaged, or its result is of none of `kinds`.
    """
    return (line.record() for line in _read(path, kinds, [f'"{name}":'.encode() for name in fields]))


def read_usages(path: Path, kinds: Kinds) -> Iterator[Usage]:
    """Yield what each task took that finished units, by the journal at `path`, as `read_records`."""
    return (line.usage() for line in _read(path, kinds) if line.fields.done)


def read_units(path: Path, kinds: Kinds) -> Iterator[Mapping[str, list[int]]]:
    """Yield the units that the journal at `path` has as finished, by stage, of many lines at a time.

    They are those that `read_records` would give; of 10^6 lines they take seconds.

    Raises:
        RunError: as `read_records`.
    """
    units = defaultdict[str, list[int]](list)
    for number, (form, fields) in enumerate(_read(path, kinds), 1):
        units[fields.stage].extend(fields.done)
        for name, stage in finished_by(form.kind).items():
            units[stage].extend(getattr(fields, name))
        if number % LINES_AT_ONCE == 0:
            yield units
            units = defaultdict(list)
    yield units


def _read(path: Path, kinds: Kinds, keys: Sequence[bytes] = ()) -> Iterator[_Line]:
    """Yield each whole line that has one of `keys`, if there are any.

    Args:
        keys: as they are written; within a text their quotes would have backslashes.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):  # a crash cut it off
                return
            if not keys or any(key in line for key in keys):
                yield _checked(line, kinds, number, path)


def _checked(line: bytes, kinds: Kinds, number: int, path: Path) -> _Line:
    try:
        return _Line.of(line, kinds)
    except ValueError as error:
        raise RunError(
            f"line {number} of {path} is damaged, or another version wrote it; restore the file to continue, or "
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
                record = _checked(line, self.kinds, self._number + 1, self.path).record()
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


@dataclass(slots=True)
class Totals:
    """What tasks took, added up; peaks are the highest of any worker.

    Attributes:
        seconds, cpu_seconds, queued_seconds: of tasks, and before their starts.
        device_seconds, device_task_seconds: that nets computed on devices, and of tasks that used one.
        device_busy_seconds: of GPUs at work, by NVML, of any process.
        attempts, lost_seconds: tasks that failed, or some of whose units did, and the time of those that gave nothing.
        failed: units that were set aside.
        began, ended: of the first and the last task, seconds since 1970; 0 where nobody says.
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
    device_task_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    device_peak_bytes: int = 0
    device_used_bytes: int = 0
    attempts: int = 0
    lost_seconds: float = 0.0
    failed: int = 0
    began: float = 0.0
    ended: float = 0.0

    @property
    def device_bytes(self) -> int:
        """The most memory in use on a device."""
        return max(self.device_peak_bytes, self.device_used_bytes)

    def add(self, record: Record[object]) -> None:
        """Add a task."""
        self.add_task(len(record.done), vars(record.usage))

    def add_task(self, num_units: int, usage: Mapping[str, Any]) -> None:  # Any: numbers and names, as of `Usage`
        """Add a task that did so many units; what `usage` leaves out is 0."""
        get = usage.get
        began, seconds = get("started", 0.0), get("seconds", 0.0)
        self.units += num_units
        self.tasks += 1
        self.seconds += seconds
        self.cpu_seconds += get("cpu_seconds", 0.0)
        self.queued_seconds += get("queued_seconds", 0.0)
        self.read_bytes += get("read_bytes", 0)
        self.written_bytes += get("written_bytes", 0)
        self.peak_bytes = max(self.peak_bytes, get("peak_bytes", 0))
        if get("device") or get("device_percent"):
            self.device_seconds += get("device_seconds", 0.0)
            self.device_task_seconds += seconds
            self.device_busy_seconds += get("device_percent", 0.0) / 100 * seconds
            self.device_peak_bytes = max(self.device_peak_bytes, get("device_peak_bytes", 0))
            self.device_used_bytes = max(self.device_used_bytes, get("device_used_bytes", 0))
        if began:
            self.began = min(self.began, began) if self.began else began
            self.ended = max(self.ended, began + seconds)

    def join(self, other: Totals) -> None:
        """Add what other tasks took."""
        began = min(filter(None, (self.began, other.began)), default=0.0)
        for each in dataclasses.fields(Totals):
            both = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(both) if each.name in HIGHEST else sum(both))
        self.began = began


HIGHEST = {"peak_bytes", "device_peak_bytes", "device_used_bytes", "ended"}
