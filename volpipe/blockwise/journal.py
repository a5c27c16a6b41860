"""The journal: which units of work are done, and what each task took; the one file that a resume rests on.

Not here: what a unit is (schedule). JSON lines, appended by the driver alone after the data that they speak of is in
place; a line that was cut off by a crash is dropped when the journal is opened again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from volpipe.blockwise.usage import Usage
from volpipe.errors import RunError

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
# Classes of results that a journal may hold: frozen dataclasses, told apart by their names. One may have a FINISHED, by
# the names of fields the stages of which these have the numbers of units that a task finished as well.
Kinds = tuple[type, ...]
KEYS = {"stage", "done", "failed"}  # of a line, beside those of its usage and its result
RESULT = re.compile(rb'"result":\s*"(\w*)"')  # within a text its quotes would have backslashes
INTEGER = r"(?:0|-?[1-9]\d*)"
SCALARS = {
    int: INTEGER,
    float: r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:e[-+]\d+)?",
    str: r'"[ !#-\[\]-~]*"',
}  # as lines have them
NUMBERS = rf"\[((?:{INTEGER}(?:,{INTEGER})*)?)\]"
READ_AT_ONCE = 1 << 22  # bytes


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
        # Fractions, and numbers of numpy: whoever reads them knows their type.
        return json.dumps(fields | _changed_fields(self.usage), separators=(",", ":"), default=str) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes, kinds: Kinds) -> Record[Any]:  # Any: one of `kinds`
        """Return the record of a journal's line, whose result, if any, is of one of `kinds`.

        Raises:
            ValueError: it is no line that `to_line` gives.
        """
        line = line.encode() if isinstance(line, str) else line
        form = _form(line, kinds)
        fields = form.validate(line)
        return cls(fields.stage, fields.done, fields.failed, form.result(fields), form.usage(fields))


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
        from pydantic import ConfigDict, TypeAdapter

        parts = (Usage,) if kind is None else (Usage, kind)
        line = dataclasses.make_dataclass(
            "line",
            [("stage", str), ("done", tuple[int, ...]), ("failed", tuple[tuple[int, str], ...], field(default=()))]
            + ([] if kind is None else [("result", Literal[kind.__name__])])
            + [_copied(kind, own) for kind in parts for own in dataclasses.fields(kind)],
            kw_only=True,
        )
        line.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined]  # as pydantic says it
        names = [tuple(own.name for own in dataclasses.fields(part)) for part in (*parts, *parts)]
        return cls(kind, TypeAdapter(line).validate_json, names[0], names[1] if kind is not None else ())

    def usage(self, line: Any) -> Usage:
        """Return the usage in a line that was validated."""
        return Usage(*map(vars(line).__getitem__, self.usage_names))

    def result(self, line: Any) -> Any:  # Any: of its kind
        """Return the result in a line that was validated."""
        return None if self.kind is None else self.kind(*map(vars(line).__getitem__, self.result_names))


def finished_by(kind: type | None) -> Mapping[str, str]:
    """Return the stages of which a result of `kind` has units, by the names of its fields."""
    return getattr(kind, "FINISHED", {})


def _copied(kind: type, own: dataclasses.Field[Any]) -> tuple[str, Any, Any]:
    """Return a field of `kind` as that of another class, with the type that its annotation means."""
    copy: Any = field(default=own.default, default_factory=own.default_factory)
    return own.name, get_type_hints(kind)[own.name], copy


@cache
def _forms(kinds: Kinds) -> Mapping[bytes, _Form]:
    """Return the forms of lines by the names of results; b"" of lines without one."""
    return {b"": _Form.from_kind(None)} | {kind.__name__.encode(): _Form.from_kind(kind) for kind in (*kinds, Attempt)}


def _form(line: bytes, kinds: Kinds) -> _Form:
    """Return the form of a line; it need not have that, or any."""
    name = RESULT.search(line)
    key, forms = name[1] if name is not None else b"", _forms(kinds)
    if key not in forms:
        raise ValueError(f"its result is {key.decode()}")
    return forms[key]


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
    keys = [f'"{name}":'.encode() for name in fields]
    return _read(path, lambda line: Record.from_line(line, kinds), keys)


def read_usages(path: Path, kinds: Kinds) -> Iterator[Usage]:
    """Yield what each task took that finished units, by the journal at `path`, as `read_records`."""
    return (usage for usage in _read(path, lambda line: _usage(line, kinds)) if usage is not None)


def read_units(path: Path, kinds: Kinds) -> Iterator[Mapping[str, list[int]]]:
    """Yield the units that the journal at `path` has as finished, by stage, of many lines at a time.

    They are those that `read_records` would give; of 10^6 lines they take seconds.

    Raises:
        RunError: as `read_records`.
    """
    if not path.is_file():
        return
    pattern, stages = _plain(kinds)
    number = 0
    with path.open("rb") as file:
        while lines := file.readlines(READ_AT_ONCE):
            texts, units = defaultdict[bytes, list[bytes]](list), defaultdict[str, list[int]](list)
            for line in lines:
                number += 1
                match = pattern.fullmatch(line)
                if match is not None:
                    own, done, *others = match.groups()
                    texts[own].append(done)
                    for name, text in zip(stages, others, strict=True):
                        texts[name].append(text)
                elif line.endswith(b"\n"):  # or a crash cut it off
                    for stage, unit in _parsed(line, lambda line: Record.from_line(line, kinds), number, path).units:
                        units[stage].append(unit)
            for own, parts in texts.items():
                if numbers := b",".join(filter(None, parts)):
                    units[own.decode()] += map(int, numbers.split(b","))
            yield units


@cache
def _plain(kinds: Kinds) -> tuple[re.Pattern[bytes], list[bytes]]:
    """Return what most lines look like, and the stages of the units that their groups have after stage and done.

    `Record.from_line` takes each line that matches, and others; to parse one takes three times as long.
    """
    stages, results = list[bytes](), [""]
    for kind in (*kinds, Attempt):
        finished, parts = finished_by(kind), _plain_fields(kind)
        if parts is not None:
            stages += [stage.encode() for stage in finished.values()]
            results.append(f',"result":"{kind.__name__}"{parts}')
    start = rf'{{"stage":"([ !#-\[\]-~]*+)","done":{NUMBERS}'
    return re.compile(rf"{start}(?:{'|'.join(reversed(results))}){_plain_fields(Usage)}}}\n".encode()), stages


def _plain_fields(kind: type) -> str | None:
    """Return what the fields of a dataclass look like in a line, with a group for units; None where it cannot be said.

    Fields follow one another as in the class, and those that are their defaults are left out.
    """
    hints, text = get_type_hints(kind), ""
    for own in dataclasses.fields(kind):
        value = NUMBERS if own.name in finished_by(kind) else _plain_value(hints[own.name])
        if value is None:
            return None
        is_needed = own.default is dataclasses.MISSING
        text += rf',"{own.name}":{value}' if is_needed else rf'(?:,"{own.name}":{value})?+'
    return text


def _plain_value(hint: Any) -> str | None:  # Any: a type
    """Return what values of a type look like in a line; None where that is not said."""
    if get_origin(hint) is not tuple:
        return SCALARS.get(hint)
    parts = [_plain_value(part) for part in get_args(hint) if part is not Ellipsis]
    if None in parts:
        return None
    texts = ",".join(filter(None, parts))
    return rf"\[(?:{texts}(?:,{texts})*+)?+\]" if get_args(hint)[-1] is Ellipsis else rf"\[{texts}\]"


def _usage(line: bytes, kinds: Kinds) -> Usage | None:
    form = _form(line, kinds)
    fields = form.validate(line)
    return form.usage(fields) if fields.done else None


def _read(path: Path, parse: Callable[[bytes], T], keys: Sequence[bytes] = ()) -> Iterator[T]:
    """Yield what `parse` gives of each whole line that has one of `keys`, if there are any.

    Args:
        parse: may raise a ValueError.
        keys: as they are written; within a text their quotes would have backslashes.
    """
    if not path.is_file():
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):  # a crash cut it off
                return
            if not keys or any(key in line for key in keys):
                yield _parsed(line, parse, number, path)


def _parsed(line: bytes, parse: Callable[[bytes], T], number: int, path: Path) -> T:
    try:
        return parse(line)
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
                record = _parsed(line, lambda line: Record.from_line(line, self.kinds), self._number + 1, self.path)
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
