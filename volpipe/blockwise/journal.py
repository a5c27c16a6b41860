"""The journal: which units of work are done, and what each task took; the one file that a resume rests on.

Not here: what a unit is (schedule). JSON lines, appended by the driver alone after the data that they speak of is in
place; a line that was cut off by a crash is dropped when the journal is opened again.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """What one task did and what it took; plain values, so that it travels and unpickles anywhere.

    Attributes:
        stage: name of the stage.
        done: units finished, ascending.
        failed: unit and reason of each that could not be; in a journal, of those that were set aside.
        result: what a measuring stage found in its units; of "infer", shards that its blocks share with earlier ones
            and wrote; () otherwise.
        started: time of start, seconds since 1970.
        seconds, cpu_seconds: wall and processor time.
        peak_bytes: highest resident memory of the process so far.
        read_bytes, written_bytes: of chunks as they are stored, by all threads of the process; where tasks run in them
            side by side, since the last of them ended, so that the sum over tasks is true.
        scratch_bytes: by how much the run's scratch grew; below zero where it shrank.
        device: what the net ran on, "" where there was none; with the seconds that it computed and its peak memory.
        host, pid: where.
        nonfinite: block, number of NaN and number of infinite voxels of each block where the net gave some, and they
            were kept.
        clipped: voxels of the output that were clipped to its type.
        sums: level, number and checksums (`checksums.take`) of each shard of the output that the task wrote.
        hopeless: those of `failed` that another attempt would not help, as long as the input is what it is.
        told: what its worker has to say, for the log.
        fatal: whether its worker is not what the plan says, so that nothing that it computes can be right.
    """

    stage: str
    done: tuple[int, ...]
    failed: tuple[tuple[int, str], ...] = ()
    result: tuple[Any, ...] = ()  # Any: numbers, texts and lists of them
    started: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    scratch_bytes: int = 0
    device: str = ""
    device_seconds: float = 0.0
    device_peak_bytes: int = 0
    host: str = ""
    pid: int = 0
    nonfinite: tuple[tuple[int, int, int], ...] = ()
    clipped: int = 0
    sums: tuple[tuple[int, int, str], ...] = ()
    hopeless: tuple[int, ...] = ()
    told: tuple[str, ...] = ()
    fatal: bool = False

    @property
    def units(self) -> Iterator[tuple[str, int]]:
        """Stage and number of every unit that was finished: shards that "infer" wrote need no reassembly."""
        if self.stage == "infer":
            yield from (("reassemble", int(shard)) for shard in self.result)
        yield from ((self.stage, unit) for unit in self.done)

    def to_line(self) -> str:
        fields = {k: v for k, v in dataclasses.asdict(self).items() if v not in ("", 0, None, ())}
        return json.dumps(fields, separators=(",", ":"), default=float) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Record:
        fields = json.loads(line)
        fields["done"] = tuple(fields.get("done", ()))
        fields["failed"] = tuple((unit, reason) for unit, reason in fields.get("failed", ()))
        fields["hopeless"] = tuple(fields.get("hopeless", ()))
        fields["result"] = tuple(fields.get("result", ()))
        fields["nonfinite"] = tuple((block, nan, infinite) for block, nan, infinite in fields.get("nonfinite", ()))
        fields["sums"] = tuple((level, shard, sums) for level, shard, sums in fields.get("sums", ()))
        return cls(**fields)


@dataclass
class Journal:
    """An open journal; use it as a context manager, in one process at a time."""

    path: Path
    _fd: int = field(default=-1, repr=False)

    def __enter__(self) -> Journal:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._fd, _whole_bytes(self.path))
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)
        self._fd = -1

    def append(self, record: Record) -> None:
        """Write one line and wait until it is on disk; of a line that does not go whole, nothing stays."""
        line, size = record.to_line().encode(), os.fstat(self._fd).st_size
        try:
            while line:  # a disk that is nearly full takes a part, and says nothing
                line = line[os.write(self._fd, line) :]
            os.fsync(self._fd)
        except OSError:
            os.ftruncate(self._fd, size)
            raise

    def records(self) -> Iterator[Record]:
        """Yield what was written so far, oldest first."""
        yield from read_records(self.path)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the whole records in the journal at `path`, oldest first; none where there is no file."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):
                yield Record.from_line(line)


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
    """What the tasks of one stage took, added up; peak is the highest of any worker."""

    units: int = 0
    tasks: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0

    def add(self, record: Record) -> None:
        self.units += len(record.done)
        self.tasks += 1
        self.seconds += record.seconds
        self.cpu_seconds += record.cpu_seconds
        self.peak_bytes = max(self.peak_bytes, record.peak_bytes)
        self.read_bytes += record.read_bytes
        self.written_bytes += record.written_bytes
