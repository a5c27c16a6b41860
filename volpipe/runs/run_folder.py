"""The folder of a run: its plan, journal, log and scratch, and the lock that keeps a second driver out.

Not here: what is planned or run. The folder lies beside the output and is named after it.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from volpipe.errors import RunError
from volpipe.inference.plan import Plan
from volpipe.inference.selection import Selection, read_selection
from volpipe.nets.files import short_hash
from volpipe.recipes.toml import differences
from volpipe.runs.worker import PLAN_FILE, SELECTION_FILE
from volpipe.volumes.storage.lock import LOCK_FILE, held
from volpipe.volumes.storage.paths import Location, atomic_write, delete, partial_files

CHANGES = {"weights_sha256": ": the weights changed", "code_sha256": ": the code of the net changed"}


@dataclass(frozen=True)
class RunFolder:
    """The folder at `path`; it need not exist yet."""

    path: Path

    @classmethod
    def from_output(cls, out: Location) -> RunFolder:
        """Return the folder of the run that writes `out`: beside it, or in the current folder if `out` is remote.

        Of a remote one that a stage writes, it is the stage's, once that has been planned on workers, or begun.
        """
        if isinstance(out, Path):
            return cls(out.parent / f"{out.name}.run")
        stage = cls.for_stage(out)
        return stage if stage.path.is_dir() else cls(Path.cwd() / f"{out.name}.run")

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

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def sessions(self) -> Path:
        """A journal of the drivers that worked here, and of the output's metadata when they left."""
        return self.path / "sessions.jsonl"

    @property
    def log(self) -> Path:
        return self.path / "volpipe.log"

    @property
    def parsl(self) -> Path:
        return self.path / "parsl"

    @property
    def discards(self) -> Path:
        """Exists once tensors may have been discarded."""
        return self.path / "discards"

    @property
    def rehearsal(self) -> Path:
        return self.path / "rehearsal"

    @property
    def rates_file(self) -> Path:
        return self.path / "rates.json"

    @property
    def scan(self) -> Path:
        """The journal of the scan, until the selection is complete."""
        return self.path / "scan.jsonl"

    @property
    def selection_file(self) -> Path:
        """The selected cells, once they are known."""
        return self.path / SELECTION_FILE

    @property
    def inputs(self) -> Path:
        """The identities of the volume and the mask when the run was begun."""
        return self.path / "inputs.json"

    @property
    def plan_file(self) -> Path:
        return self.path / PLAN_FILE

    def load_plan(self) -> Plan | None:
        """Return the plan that was stored here, or None.

        Raises:
            RunError: there is one, but of another version or damaged.
        """
        if not self.plan_file.is_file():
            return None
        try:
            return Plan.model_validate_json(self.plan_file.read_text(encoding="utf-8"))
        except ValidationError as error:
            raise RunError(
                f"{self.plan_file} cannot be understood (written by another version?); run with --fresh to start over"
            ) from error

    def load_selection(self, plan: Plan) -> Selection | None:
        """Return what is wanted of `plan`, or None where a scan has still to tell.

        Raises:
            RunError: what is stored is damaged.
        """
        if not plan.needs_scan:
            return Selection(plan)
        return read_selection(self.selection_file, plan) if self.selection_file.is_file() else None

    def store_plan(self, plan: Plan) -> None:
        """Store `plan` whole, or leave what was there."""
        atomic_write(self.plan_file, plan.model_dump_json(indent=1).encode())

    def check_same(self, plan: Plan) -> None:
        """Refuse to go on with a run whose plan is not `plan`; going on would mix two outputs.

        Raises:
            RunError: with the keys that differ.
        """
        old = self.load_plan()
        if old is None or old.identity == plan.identity:
            return
        changed = plan_changes(old, plan)
        raise RunError(
            f"{self.path} holds a run with another recipe or input ({'; '.join(changed) or 'other sizes'}); "
            "restore it to go on, choose another --out, or use --fresh to start over"
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
            raise RunError(f"no folder can be made at {self.path}: {error.strerror}; choose another --out") from error
        with _unwritable_by_others(self.path):
            yield from self._locked()

    def _locked(self) -> Iterator[str]:
        session = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%F %T')} ({time.time_ns()})"
        with held(self.path, session, RunError):
            for path in partial_files(self.path):
                path.unlink(missing_ok=True)
            yield session

    def clear(self) -> None:
        """Delete what a run left here, but for the lock."""
        for entry in self.path.iterdir():
            if entry.name == LOCK_FILE:
                continue
            if entry.is_dir():
                delete(entry)
            else:
                entry.unlink()


def plan_changes(old: Plan, new: Plan) -> list[str]:
    """Return one line for each key in which two plans differ, in recipe, volume, net or place: ``key: old -> new``."""
    changes = differences(old.recipe, new.recipe)
    for name in ("source", "net"):
        before, after = (getattr(plan, name).model_dump() for plan in (old, new))
        changes += [
            f"{name}.{key}: {_short(before[key])} -> {_short(after[key])}{CHANGES.get(key, '')}"
            for key in before
            if before[key] != after[key]
        ]
    for name in ("code_sha256", "search_path", "out"):
        before, after = getattr(old, name), getattr(new, name)
        if before != after:
            changes.append(f"{name}: {_short(before)} -> {_short(after)}{CHANGES.get(name, '')}")
    return changes


def _short(value: object) -> str:
    """Return a value of a plan as a sentence has it: a hash by its beginning, sizes as z × y × x."""
    if isinstance(value, str):
        return short_hash(value) if re.fullmatch("[0-9a-f]{64}", value) else value or "none"
    if isinstance(value, tuple):
        return " × ".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


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
    before = os.umask(0o077)
    os.umask(before | stat.S_IWOTH)
    try:
        yield
    finally:
        os.umask(before)
