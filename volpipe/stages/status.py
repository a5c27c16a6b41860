"""How far the work on an output is, in the one form that every kind of work gives, and everybody shows.

Not here: finding what is made at a place (workflow.status), or printing (cli, display).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from volpipe.blockwise.failures import Missing
from volpipe.blockwise.notes import StageNote
from volpipe.blockwise.usage import Totals
from volpipe.errors import RemoteError, RunError
from volpipe.geometry.grid import Triple, triple
from volpipe.runs.output_work import OutputWork
from volpipe.runs.presence import Driver
from volpipe.runs.provenance import is_sealed
from volpipe.runs.verify import check_present
from volpipe.runs.worker import Written
from volpipe.training.logs import TrainingPace
from volpipe.units import count
from volpipe.volumes.storage import paths

UNCOMPARED = "but what it reads is changed by another stage; the same command compares it"
State = Literal["complete", "running", "unseen", "interrupted", "incomplete", "not begun"]
View = Literal["units", "steps", "datasets"]
T = TypeVar("T")


@dataclass(frozen=True)
class Changes:
    """How much an update of an output may compute, as the states of the input's files tell.

    Attributes:
        changed: blocks whose files are not as they were; voxels were not compared.
        blocks: of the run.
        grown: voxels (z, y, x) by which the volume is longer than it was.
    """

    changed: int
    blocks: int
    grown: Triple = (0, 0, 0)

    def sentence(self, update: str) -> str:
        """Return it in words; the command `update` brings the output up to date."""
        longer = ", ".join(f"{axis} by {n:,}" for axis, n in zip("zyx", self.grown, strict=True) if n)
        grown = f"its input has grown along {longer}; " if longer else ""
        if not self.changed:
            return f"{grown}its input has not changed"
        return (
            f"{grown}{self.changed:,} of {count(self.blocks, 'block')} read files that have changed; `{update}` "
            "compares their voxels, and computes what rests on others"
        )


@dataclass(frozen=True)
class Status:
    """How far the work on an output is.

    Attributes:
        output: that is made, or the folder of a training.
        totals: what their tasks took, over all sessions.
        missing: what failed when it was last tried.
        changes: what an update would find, where that was asked for.
        parts: the stages of several, in their order.
        datasets: of a batch; `at_work` has the status of those that are under way, by number.
        folder: of the run, where its workers leave their signs of life.
        name: of one of several stages or trials.
        pace: of a training that has taken a step.
        goes: whether its folder goes once it is complete.
        view: what a watcher is shown: units of stages, steps of trainings, or datasets.
        is_volume: whether the output is a volume.
    """

    kind: str
    output: str
    is_complete: bool
    driver: Driver
    stages: Mapping[str, StageNote] = field(default_factory=dict)
    totals: dict[str, Totals] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)
    remark: str = ""
    changes: Changes | None = None
    parts: tuple[Status, ...] = ()
    datasets: tuple[Any, ...] = ()  # Any: rows of a table, of a package above
    at_work: Mapping[int, Status] = field(default_factory=dict)
    folder: Path | None = None
    name: str = ""
    pace: TrainingPace | None = None
    goes: bool = False
    view: View = "units"
    is_volume: bool = False

    @property
    def state(self) -> State:
        """One word; "running": somebody works on it, "unseen": that cannot be known from here."""
        if self.driver.is_at_work or any(part.state == "running" for part in self.parts):
            return "running"
        if self.is_complete:
            return "complete"
        if self.driver.state == "unseen":
            return "unseen"
        if self.driver.state == "interrupted":
            return "interrupted"
        return "incomplete" if self.stages or self.parts else "not begun"

    @property
    def seconds_left(self) -> float | None:
        """The time that it still takes, as its driver said last, or as its steps were fast; None where unknown."""
        if self.pace is not None and self.pace.speed and self.driver.is_at_work:
            return sum(stage.all - stage.done for stage in self.stages.values()) / self.pace.speed
        return None if self.driver.note is None else self.driver.note.seconds_left

    def to_json(self) -> dict[str, Any]:  # Any: plain values
        """Return the same in plain values; the keys are those of docs/reference/machines.md."""
        driver, note = self.driver, self.driver.note
        return {
            "kind": self.kind,
            "output": self.output,
            "name": self.name or None,
            "state": self.state,
            "process": int(driver.process) if driver.process else None,
            "host": driver.host or None,
            "since": driver.since or None,
            "last_sign_seconds": driver.silent_seconds,
            "command": (note.command or None) if note is not None else None,
            "folder": (note.folder or None) if note is not None else None,
            "done": note.part if note is not None else None,
            "seconds_left": self.seconds_left,
            "waits_until": driver.waits or None,
            "loss": self.pace.loss if self.pace is not None else None,
            "steps_per_second": self.pace.speed if self.pace is not None else None,
            "stages": {name: asdict(stage) for name, stage in self.stages.items()},
            "changes": None if self.changes is None else asdict(self.changes),
            "missing": [asdict(part) | {"box": str(part.box)} for part in self.missing],
            "parts": [part.to_json() for part in self.parts],
            "datasets": [asdict(row) for row in self.datasets],
        }


class Looker(Protocol):
    """Who looks at work, again and again, as kinds of work see him."""

    def driver(self, folder: Path, journal: Path) -> Driver:
        """Return the driver in `folder`; of one that was seen before, a new sign counts, not what its clock says."""

    def kept(self, file: Path, read: Callable[[], T]) -> T:
        """Return what `read` gave when `file` was last changed."""


def output_status(work: OutputWork[Any, Any], driver: Driver, kind: str) -> Status:
    """Return how far the `work` on a volume is, of that `kind`: by its journal, and by what is there of its output."""
    ledger, out, is_complete = work.records.ledger(), work.plan.out, work.is_complete
    notes = {s.name: StageNote(s.num_done, s.num_units, 0, len(s.failed)) for s in ledger.schedule.shown}
    if driver.is_at_work and driver.note is not None:  # it alone knows what is in flight, and of some stages at all
        noted = driver.note.stages
        flying = {
            name: StageNote(each.done, each.all, noted[name].in_flight if name in noted else 0, each.failed)
            for name, each in notes.items()
        }
        notes = {name: each for name, each in noted.items() if name not in notes} | flying
    remark = work.remark if is_complete else UNCOMPARED if work.is_uncompared else ""
    if is_complete and work.has_moved:
        remark = f"but its input has changed since: {work.remedy}"
    has_output = any(issubclass(result, Written) for result in ledger.results)
    try:
        if not driver.is_at_work and has_output and not paths.exists(paths.locate(out)):
            fresh = again(driver, "--fresh") or f"{work.goes_on} --fresh"
            is_complete, remark = False, f"its output is gone; `{fresh}` makes it again"
        elif is_complete and not driver.is_at_work and not is_sealed(work.folder):
            command = again(driver) or work.goes_on
            is_complete, remark = False, f"all is computed, and `{command}` again closes the output"
        elif is_complete and not driver.is_at_work:
            check_present(out, work.shards())
    except RunError as error:
        is_complete, remark = False, str(error)
    except RemoteError as error:
        remark = f"so its journal says; whether the output is there cannot be seen: {error}"
    return Status(
        kind, out, is_complete, driver, notes, ledger.totals, ledger.missing, remark,
        folder=work.folder.path, is_volume=True,
    )  # fmt: skip


def again(driver: Driver, *options: str) -> str:
    """Return the command of a driver with more `options`, as it works from this folder; "" where it is not known."""
    return "" if driver.note is None else driver.note.again(*options)


def noted_stages(driver: Driver) -> Mapping[str, StageNote]:
    """Return the stages as their driver told of them last; of work whose plan is not stored."""
    return {} if driver.note is None else driver.note.stages


def changes_of(work: OutputWork[Any, Any]) -> Changes:
    """Return how much an update of `work` may compute."""
    source = work.plan.source
    now = zip(source.volume().spatial_shape, source.shape, strict=True)
    return Changes(work.compared().num_open, work.plan.num_active, triple(n - before for n, before in now))
