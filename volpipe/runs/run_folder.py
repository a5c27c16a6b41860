"""The folder of a run: its plan, journal, log and scratch, and the lock that keeps a second driver out.

Not here: what is planned or run. The folder lies beside the output and is named after it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from volpipe.errors import RunError
from volpipe.inference.output_plan import OutputPlan
from volpipe.inference.plan import Plan
from volpipe.inference.selection import SELECTION_FILE, Selection, read_selection
from volpipe.volumes.formats.ome_zarr import SUFFIX, label_place
from volpipe.volumes.storage.lock import LOCK_FILE, held
from volpipe.volumes.storage.metadata import read_json
from volpipe.volumes.storage.paths import Location, atomic_write, check_links, delete, locate, partial_files

log = logging.getLogger(__name__)

P = TypeVar("P", bound=OutputPlan)


@dataclass(frozen=True)
class Session:
    """One driver's time on a run: its site, when it began, seconds since 1970, and the hash of the net's code."""

    site: str
    began: float
    code_sha256: str


@dataclass(frozen=True)
class Metadata:
    """Checksum of each file of metadata in an output, by its path there, as a driver left it."""

    checksums: dict[str, int]


MARKS = {
    "plan.json": "the run of a net",
    "label.json": "a segmentation",
    "evaluation.json": "an evaluation",
    "comparison.json": "a comparison",
    "comparisons.json": "comparisons of many outputs",
    "measurement.json": "a measurement",
}
"""What a folder holds, by the file that says so."""
NOTES = (Session, Metadata)  # the journal of sessions holds them


@dataclass(frozen=True)
class _Inside:
    """The path of what lies in a run's folder under `name`."""

    name: str

    def __get__(self, folder: RunFolder, kind: type[RunFolder]) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The folder at `path`; it need not exist yet."""

    path: Path

    @classmethod
    def from_output(cls, out: Location) -> RunFolder:
        """Return the folder of the run that writes `out`: beside it, or in the current folder if `out` is remote.

        That of labels of an image is beside the image, in which it would be no group.
        Of a remote one that a stage writes, it is the stage's, once that has been planned on workers, or begun.
        """
        if isinstance(out, Path):
            whole = Path(os.path.abspath(out))  # noqa: PTH100  # links stay as they are
            if label_place(whole) is None:
                return cls(out.parent / f"{out.name}.run")
            image = [each for each in whole.parents if each.suffix.lower() == SUFFIX][-1]
            return cls(image.parent / f"{'.'.join(whole.parts[len(image.parts) - 1 :])}.run")
        stage = cls.for_stage(out)
        return stage if stage.path.is_dir() else cls(Path.cwd() / f"{out.name}.run")

    @classmethod
    def find(cls, output: str | Path) -> RunFolder:
        """Return the folder of the run that writes `output`, or that folder itself; it need not exist.

        An output of several arrays may be named by one of them.
        """
        place = locate(output) if "://" in str(output) else Path(output)
        if isinstance(place, Path) and (place / LOCK_FILE).is_file():
            return cls(place)
        own, above = cls.from_output(place), cls.from_output(place.parent)
        if not own.path.is_dir() and above.holds(Plan):
            whole = above.load(Plan)
            if whole is not None and place.name in {array.folder for array in whole.arrays}:
                return above
        return own

    @classmethod
    def for_stages(cls, out: Location) -> RunFolder:
        """Return the folder of the stages whose outputs lie in `out`: beside it, or in the current one if it is remote.

        There it is named after all of `out`, for it holds the folders of the stages: they may not be another's.
        """
        if isinstance(out, Path):
            return cls.from_output(out)
        return cls(Path.cwd() / f"{'_'.join((out.root.partition('://')[2], *out.parts))}.run")

    @classmethod
    def for_stage(cls, out: Location) -> RunFolder:
        """Return the folder of the stage that writes `out`: beside it, or in that of all stages if `out` is remote."""
        if isinstance(out, Path):
            return cls.from_output(out)
        return cls(cls.for_stages(out.parent).path / f"{out.name}.run")

    journal = _Inside("journal.jsonl")
    sessions = _Inside("sessions.jsonl")  # a journal of drivers, and of the output's metadata when they left
    log = _Inside("volpipe.log")
    parsl = _Inside("parsl")
    discards = _Inside("discards")  # exists once tensors may have been discarded
    calibration = _Inside("calibration")
    rates_file = _Inside("rates.json")
    next_selection = _Inside("next_selection.npy")  # what an update selects, until the journal has it
    uncompared = _Inside("uncompared")  # exists once other work changes what this one reads, until that is compared
    selection_file = _Inside(SELECTION_FILE)  # the selected cells, once they are known
    clearing = _Inside("clearing")  # exists while the folder and its output are being deleted: nothing there counts
    inputs = _Inside("inputs.json")  # the identities of the volume and the mask when the run was begun
    plan_file = _Inside(Plan.FILE)

    def holds(self, kind: type[OutputPlan]) -> bool:
        """Return whether a plan of that kind was stored here, and the folder is not being cleared."""
        return (self.path / kind.FILE).is_file() and not self.clearing.is_file()

    def other_work(self, mark: str) -> RunError | None:
        """Return the refusal of a folder that holds work of another kind than that of the file `mark`, or None."""
        others = [name for name in MARKS if name != mark and (self.path / name).is_file()]
        return RunError(f"{self.path} holds {MARKS[others[0]]}; choose another --out") if others else None

    def load(self, kind: type[P]) -> P | None:
        """Return the plan of that kind that was stored here, or None; also where the folder is being cleared.

        Raises:
            RunError: there is one, but of another version or damaged.
        """
        if not self.holds(kind):
            return None
        grown = self._parse_plan(self._next_plan(kind), kind)
        return (
            grown if grown is not None and self._has_followed(grown) else self._parse_plan(self.path / kind.FILE, kind)
        )

    def _parse_plan(self, path: Path, kind: type[P]) -> P | None:
        try:
            return kind.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise RunError(
                f"{path} cannot be understood (written by another version?); use --fresh to start over"
            ) from error

    def _next_plan(self, kind: type[OutputPlan]) -> Path:
        return self.path / f"next_{kind.FILE}"

    def _has_followed(self, plan: OutputPlan) -> bool:
        """Return whether the journal is numbered as `plan` has it, which was stored to follow a volume that grew."""
        mark = f'"plan":"{plan.identity}"'.encode()
        if not self.journal.is_file():
            return False
        with self.journal.open("rb") as lines:
            return any(mark in line for line in lines)

    def load_selection(self, plan: Plan) -> Selection | None:
        """Return what is wanted of `plan`, or None where a scan has still to tell.

        Raises:
            RunError: what is stored is damaged.
        """
        if not plan.needs_scan:
            return Selection(plan)
        return read_selection(self.selection_file, plan) if self.selection_file.is_file() else None

    def store(self, plan: OutputPlan) -> None:
        """Store `plan` whole, or leave what was there."""
        atomic_write(self.path / plan.FILE, plan.model_dump_json(indent=1).encode())
        self._next_plan(type(plan)).unlink(missing_ok=True)

    def settle(self, kind: type[OutputPlan]) -> None:
        """Let the plan of a volume that grew, which the journal follows, take its place, after a kill before that."""
        plan = self.load(kind) if self._next_plan(kind).is_file() else None
        if plan is not None:
            self.store(plan)

    def store_next(self, plan: OutputPlan) -> None:
        """Store `plan` for when the journal says that it is followed: from then on it is the one that is here."""
        atomic_write(self._next_plan(type(plan)), plan.model_dump_json(indent=1).encode())

    def as_begun(self, plan: P) -> P:
        """Return `plan` with the sizes and the net of what was begun here, if all else is alike: perhaps on a site of
        other workers, or when the volume was smaller.

        Whatever else differs is refused later, with what that is, and so is a plan of another version.
        """
        try:
            old = self.load(type(plan))
        except RunError:
            return plan
        if old is None:
            return plan
        begun = plan.as_begun(old)
        return begun if begun.identity == old.identity else plan

    def difference(self, old: OutputPlan, plan: OutputPlan, what: str) -> RunError | None:
        """Return the refusal to go on with a `what`, such as "run", of the plan `old`, by another one: two outputs
        would be mixed. It names the keys that differ; None where none does.
        """
        if old.identity == plan.identity:
            return None
        changes = "; ".join(old.changes(plan)) or "other sizes"
        return RunError(
            f"{self.path} holds a {what} with another recipe or input ({changes}); "
            "take that back to continue, choose another --out, or use --fresh to start over"
        )

    @contextlib.contextmanager
    def locked(self) -> Iterator[str]:
        """Hold the folder, as the session that is given; the system lets go when this process ends, however it ends.

        Raises:
            RunError: another driver holds it, or it cannot be made.
        """
        try:
            self.path.mkdir(mode=0o750, parents=True, exist_ok=True)
        except OSError as error:
            check_links(self.path)
            raise RunError(f"no folder can be made at {self.path}: {error.strerror}; choose another --out") from error
        session = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')} ({time.time_ns()})"
        with _unwritable_by_others(self.path), held(self.path, session, RunError):
            for path in partial_files(self.path):
                if path.is_dir():
                    delete(path)
                else:
                    path.unlink(missing_ok=True)
            yield session

    def clear(self) -> None:
        """Delete what a run left here, but for the lock, and in the end the file that says so."""
        for entry in self.path.iterdir():
            if entry.name in (LOCK_FILE, self.clearing.name):
                continue
            if entry.is_dir():
                delete(entry)
            else:
                entry.unlink()
        self.clearing.unlink(missing_ok=True)

    def remove(self, mark: str, content: object) -> None:
        """Delete the folder of work that has ended, unless other work holds it, or left another `content` in `mark`."""
        if not self.path.is_dir():
            return
        try:
            with self.locked():
                if read_json(self.path / mark) in (None, content):
                    delete(self.path)
        except RunError as error:
            log.info("the folder is kept: %s", error)


_umasks: list[int] = []  # before each folder that is held: the first one counts, in whatever order they are left


@contextlib.contextmanager
def _unwritable_by_others(folder: Path) -> Iterator[None]:
    """Take from everybody the right to write to `folder`, and to what is made meanwhile by this process and its own.

    Raises:
        RunError: somebody else made the folder such that anybody may write to it.
    """
    mode = folder.stat().st_mode
    if mode & stat.S_IWOTH:
        try:
            folder.chmod(stat.S_IMODE(mode) & ~stat.S_IWOTH)
        except PermissionError as error:
            raise RunError(
                f"{folder} is another user's and anybody may write to it, the plan included; choose another --out"
            ) from error
    _umasks.append(os.umask(0o077))
    os.umask(_umasks[0] | stat.S_IWOTH)
    try:
        yield
    finally:
        if len(_umasks) == 1:
            os.umask(_umasks[0])
        _umasks.pop()
