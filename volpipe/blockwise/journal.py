"""The journal: which units of work are done, and what each task took; the one file that a resume rests on.

Not here: what a unit is (schedule), or what the lines say of all units (ledger). JSON lines, appended by the driver
alone after the data that they speak of is in place; a line that was cut off by a crash is dropped when the journal is
opened again. What a line says counts. A result that takes units back begins a new generation: the journal is written
anew without them, and renamed over the old one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Self, TypeVar, get_type_hints

from volpipe.blockwise.usage import Usage
from volpipe.errors import RunError
from volpipe.volumes.storage.paths import naming_full_disk, whole_file

R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")
# Classes of results that a journal may hold: frozen dataclasses, told apart by their names. One may have a FINISHED, by
# the names of fields the stages of which these have the numbers of units that a task finished as well.
Kinds = tuple[type, ...]
KEYS = {"stage", "done", "failed"}  # of a line, beside those of its usage and its result
RESULT = re.compile(rb'"result":\s*"(\w*)"')  # within a text its quotes would have backslashes


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

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing, not even what a task took whose units were all taken back."""
        return not (self.done or self.failed or self.usage.seconds) and self.result is None

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
        return Line.of(line.encode() if isinstance(line, str) else line, kinds).record()


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


class TakesBack(ABC):
    """A result with which units that were done before count no more: noting it begins a new generation of a journal."""

    @abstractmethod
    def remainder(self) -> Callable[[Record[Any]], Record[Any]]:
        """Return a function that gives what still counts of an earlier record: itself where nothing was taken back."""

    @abstractmethod
    def noted(self) -> Self:
        """Return it without what only the beginning of the generation needs."""


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
    def from_kind(cls, kind: type | None, *, is_strict: bool = True) -> _Form:
        import msgspec

        parts = (Usage,) if kind is None else (Usage, kind)
        line = msgspec.defstruct(
            "line",
            [("stage", str), ("done", tuple[int, ...]), ("failed", tuple[tuple[int, str], ...], ())]
            + ([] if kind is None else [("result", Literal[kind.__name__])])
            + [_copied(part, own) for part in parts for own in dataclasses.fields(part)],
            kw_only=True,
            forbid_unknown_fields=is_strict,
            gc=False,
        )
        names = [tuple(own.name for own in dataclasses.fields(part)) for part in (*parts, *parts)]
        decoder = msgspec.json.Decoder(line, strict=False, dec_hook=lambda hint, value: hint(value))
        return cls(kind, decoder.decode, names[0], names[1] if kind is not None else ())


class Line(NamedTuple):
    """A line that was checked.

    Attributes:
        text: as it is written.
        form: that it has.
        fields: of the line, by their names: its units, its usage and its result.
    """

    text: bytes
    form: _Form
    fields: Any  # Any: a class of its own

    @classmethod
    def of(cls, text: bytes, kinds: Kinds | None) -> Line:
        """Return the line; it need not be one, or of one of `kinds`: a ValueError says so.

        Where no kinds are given, it may have any result, which is left out.
        """
        name = RESULT.search(text)
        form = _forms(kinds).get(name[1] if name is not None else b"")
        if form is None and kinds is not None:
            raise ValueError("its result is of another kind")
        form = form or _loose_form()
        return cls(text, form, form.validate(text))

    @property
    def kind(self) -> type | None:
        """The class of its result."""
        return self.form.kind

    def record(self) -> Record[Any]:  # Any: one of its kinds
        """Return what it says."""
        form, fields = self.form, self.fields
        result = form.kind and form.kind(*(getattr(fields, name) for name in form.result_names))
        usage = Usage(*(getattr(fields, name) for name in form.usage_names))
        return Record(fields.stage, fields.done, fields.failed, result, usage)


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
def _forms(kinds: Kinds | None) -> Mapping[bytes, _Form]:
    """Return the forms of lines by the names of results; b"" of lines without one."""
    known = (*(kinds or ()), Attempt)
    return {b"": _Form.from_kind(None)} | {kind.__name__.encode(): _Form.from_kind(kind) for kind in known}


@cache
def _loose_form() -> _Form:
    """Return the form of a line with a result of any kind, which is left out."""
    return _Form.from_kind(None, is_strict=False)


@dataclass
class Journal:
    """An open journal, whose results are of `kinds`; use it as a context manager, in one process at a time."""

    path: Path
    kinds: Kinds
    _fd: int = field(default=-1, repr=False)

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()
        os.ftruncate(self._fd, _whole_bytes(self.path))
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self._fd = -1

    def _open(self) -> int:
        return os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, record: Record[object]) -> None:
        """Write one line and wait until it is on disk; of a line that does not go whole, nothing stays.

        With one that takes units back the journal is written anew, and is the old one until it is whole.
        """
        if isinstance(record.result, TakesBack):
            self._begin_anew(record, record.result)
            return
        line, size = record.to_line().encode(), os.fstat(self._fd).st_size
        try:
            with naming_full_disk(self.path):
                while line:  # a disk that is nearly full takes a part, and says nothing
                    line = line[os.write(self._fd, line) :]
                os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def clear(self) -> None:
        """Forget all lines."""
        os.ftruncate(self._fd, 0)

    def _begin_anew(self, record: Record[object], result: TakesBack) -> None:
        """Write what still counts of each line, and then `record`; the rename is what makes it count."""
        remainder, reader = result.remainder(), JournalReader(self.path, self.kinds)
        with whole_file(self.path) as partial, partial.open("wb") as file:
            for line in reader.lines():
                before = line.record()
                after = remainder(before)
                if after is before:
                    file.write(line.text)
                elif not after.is_empty:
                    file.write(after.to_line().encode())
            file.write(dataclasses.replace(record, result=result.noted()).to_line().encode())
        os.close(self._fd)
        self._fd = self._open()


@dataclass
class JournalReader:
    """A journal that is read on from where it was read last, while its driver writes to it.

    Attributes:
        on_anew: called before the first line of a journal that is not the one that was read: it was deleted, shortened
            or replaced.
        on_damage: called with the sentence about a line that is damaged, which is passed by; what it raises ends the
            reading.
    """

    path: Path
    kinds: Kinds | None
    on_anew: Callable[[], None] = lambda: None
    on_damage: Callable[[RunError], None] | None = None
    _file: tuple[int, int] | None = None  # device and inode
    _offset: int = 0
    _number: int = 0  # of lines
    _last: bytes = b""  # line that was read

    def lines(self, keys: Sequence[bytes] = ()) -> Iterator[Line]:
        """Yield the whole lines that were not read yet, oldest first; none where there is no file.

        Args:
            keys: as they are written, of which lines must have one, if there are any; within a text their quotes would
                have backslashes.

        Raises:
            RunError: a line is damaged, or its result is of none of `kinds`.
        """
        try:
            file = self.path.open("rb")
        except (FileNotFoundError, NotADirectoryError):
            self._begin_anew(None)
            return
        with file:
            if not self._goes_on(file.fileno()):
                status = os.fstat(file.fileno())
                self._begin_anew((status.st_dev, status.st_ino))
            file.seek(self._offset)
            for text in file:
                if not text.endswith(b"\n"):  # it is being written, or a crash cut it off
                    return
                line = None if keys and not any(key in text for key in keys) else self._checked(text)
                self._offset, self._number, self._last = self._offset + len(text), self._number + 1, text
                if line is not None:
                    yield line

    def _checked(self, text: bytes) -> Line | None:
        try:
            return Line.of(text, self.kinds)
        except ValueError as error:
            damage = RunError(
                f"line {self._number + 1} of {self.path} is damaged, or another version wrote it; restore the file to "
                "continue, or use --fresh to start over"
            )
            if self.on_damage is None:
                raise damage from error
            self.on_damage(damage)
            return None

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


def read_records(path: Path, kinds: Kinds, fields: Sequence[str] = ()) -> Iterator[Record[Any]]:  # Any: of `kinds`
    """Yield the whole records in the journal at `path`, oldest first; none where there is no file.

    Args:
        fields: those records alone in which one of these is not its default; the others are not looked at.

    Raises:
        RunError: a line is damaged, or its result is of none of `kinds`.
    """
    return (line.record() for line in JournalReader(path, kinds).lines([f'"{name}":'.encode() for name in fields]))


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
