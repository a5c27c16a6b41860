"""How work on an output ended: in numbers, in a sentence, and as a notebook shows it.

Not here: the work (work), or what the command line prints of it (display).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from volpipe.blockwise.failures import Missing, last_line
from volpipe.blockwise.journal import Record
from volpipe.blockwise.usage import Totals
from volpipe.inference.intensity import ALL_FINITE, Nonfinite
from volpipe.inference.selection import Selection
from volpipe.runs.update_records import Updated
from volpipe.runs.worker import Inferred, Written
from volpipe.tables import html_facts, html_table
from volpipe.units import count, duration, size
from volpipe.volumes.storage import paths

if TYPE_CHECKING:
    from volpipe.reporting.page import Sheet

TOTALS = ("stage", "units", "tasks", "task time", "CPU time", "read", "written", "peak memory")  # columns in a notebook
MOST_MISSING = 20  # lines there
State = Literal["running", "waiting", "complete", "incomplete", "stopped", "interrupted", "refused", "failed"]
"""waiting: until a volume that is followed is looked at again · complete: nothing is missing of what was asked for ·
incomplete: it came to its end, and parts are missing · stopped: too much failed · interrupted: somebody stopped it ·
refused: nothing began · failed: a fault that nobody foresaw."""


@dataclass(frozen=True)
class Ending:
    """How work ended, in a word for machines.

    Attributes:
        missing: how many parts, datasets or trainings are missing, None where nobody counted them.
        message: why it is not complete, a sentence; "" where it is.
    """

    state: State
    missing: int | None = None
    message: str = ""

    @classmethod
    def of(cls, missing: int | None, message: str, *, is_complete: bool) -> Ending:
        return cls("complete", 0) if is_complete else cls("incomplete", missing, message)

    @classmethod
    def of_many(cls, reasons: Sequence[str], num_all: int, noun: str) -> Ending:
        """Return the ending of many works, of which those with `reasons` are not complete."""
        first = next(filter(None, reasons), "")
        some = f"{len(reasons):,} of {num_all:,} {noun} are not complete" + (f"; the first: {first}" if first else "")
        return cls.of(len(reasons), some, is_complete=not reasons)


@dataclass(repr=False)
class WorkReport:
    """How work on an output ended.

    Attributes:
        missing: what failed, and then what cannot be done without that.
        totals: what tasks took in this session, by stage.
        seconds: of this session, from its first task's submission.
        was_complete: whether there was nothing to do.
        asked: when the site was asked for workers, seconds since 1970.
        first_task: when the first of them began its first task.
        driver_peak_bytes: memory of the driver at its highest.
        updates: that the volume had grown, and what else had changed; none where nothing had, or nobody asked.
        estimate: what it was to take, where blocks were tried or counted when it began.
    """

    makes_volume: ClassVar[bool] = False  # whether the output is one
    computing: ClassVar[str] = ""  # the stage whose units are the blocks that are computed
    plan: Any  # of the work's kind
    folder: Path
    missing: list[Missing] = field(default_factory=list)
    totals: dict[str, Totals] = field(default_factory=dict)
    seconds: float = 0.0
    was_complete: bool = False
    asked: float = 0.0
    first_task: float = 0.0
    driver_peak_bytes: int = 0
    updates: tuple[Updated, ...] = ()
    estimate: Any = None  # Any: an Estimate, of a package above

    @property
    def reports(self) -> Sequence[WorkReport]:
        """This one alone: how the parts of work on several outputs ended."""
        return (self,)

    @property
    def num_computed(self) -> int:
        """Blocks that were computed in this session."""
        return self.totals[self.computing].units if self.computing in self.totals else 0

    @property
    def is_complete(self) -> bool:
        """Whether the output is complete: nothing is missing."""
        return not self.missing

    @property
    def open_reason(self) -> str:
        """How many parts are missing, and why the first is; "" if none is."""
        if not self.missing:
            return ""
        first = self.missing[0]
        missing = count(len(self.missing), "part")
        return f"{missing} missing, first {first.stage} {first.unit} ({first.box}): {first.reason}"

    @property
    def ending(self) -> Ending:
        """How it ended, of what was asked for."""
        return Ending.of(len(self.missing), self.open_reason, is_complete=not self.missing)

    def closing_lines(self, planned: Any = None) -> Iterable[str]:  # Any: StageTimes, of a package above
        """Return the sentences that a command ends with, beside the times that were `planned`."""
        return ()

    @property
    def notes(self) -> Sequence[str]:
        """What a user should know of what was worked on, in sentences."""
        return ()

    @property
    def closing_sheets(self) -> Iterable[Sheet]:
        """Tables that a command prints below these sentences."""
        return ()

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        time = "complete before" if self.was_complete else duration(self.seconds)
        return {"time": time, "missing": len(self.missing), "folder": paths.shown(self.folder)}

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" for name, value in self.facts().items())
        return f"<{type(self).__name__}: {facts}>"

    def _repr_html_(self) -> str:
        parts = [html_facts(self.facts())]
        if self.totals:
            parts.append(html_table(TOTALS, (_line(name, totals) for name, totals in self.totals.items())))
        if self.missing:
            lines = ((part.stage, part.unit, part.box, last_line(part.reason)) for part in self.missing[:MOST_MISSING])
            parts.append(html_table(("stage", "unit", "box z,y,x", "reason"), lines, caption="missing"))
        return "".join(parts)


def _line(stage: str, totals: Totals) -> tuple[object, ...]:
    """Return the cells of a stage, in the columns of TOTALS."""
    bytes_ = (size(value) for value in (totals.read_bytes, totals.written_bytes, totals.peak_bytes))
    times = (duration(totals.seconds), duration(totals.cpu_seconds))
    return stage, f"{totals.units:,}", f"{totals.tasks:,}", *times, *bytes_


def kept_in(records: Iterable[Record[Any]]) -> Nonfinite:  # Any: of a run
    """Return how many voxels of all sessions are not finite, and were kept."""
    entries = (entry for record in records if isinstance(record.result, Inferred) for entry in record.result.nonfinite)
    return sum((Nonfinite(nan, infinite) for _, nan, infinite in entries), ALL_FINITE)


def clipped_in(records: Iterable[Record[Any]], selection: Selection) -> tuple[int, float]:  # Any: of a run
    """Return how many voxels of all sessions were clipped to the output's type, and their share of what is wanted."""
    num = sum(record.result.clipped for record in records if isinstance(record.result, Written))
    return num, num / (selection.num_voxels * selection.plan.net.combined_channels)
