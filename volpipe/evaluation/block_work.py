"""Work that looks at volumes block by block on workers, and adds up what blocks gave; scores and comparisons alike.

Not here: what a block gives, or what becomes of that (driver, compare_driver). It is kept in the work's folder, so that
the same work again goes on.
"""

from __future__ import annotations

import dataclasses
import json
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, Protocol, Self, TypeVar

from volpipe.blockwise.feed import FedSchedule, Feed, fed
from volpipe.blockwise.journal import Record
from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.stage import Stage
from volpipe.blockwise.work import POOL, Steps
from volpipe.errors import RunError
from volpipe.geometry.grid import Box, Grid
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.work import PLAIN, SILENT, FolderWork, Listener, Options, WorkSession, check_kind
from volpipe.volumes.identity import Identity, changes, identify, read_identities, store_identities
from volpipe.volumes.storage.metadata import read_json, write_json
from volpipe.volumes.volume import Volume

R = TypeVar("R", bound=WorkReport)


class Blocks(Protocol):
    """What is looked at: blocks of a box that several volumes have."""

    @property
    def blocks(self) -> Grid: ...

    def own_box(self, block: int) -> Box:
        """Return the voxels (z, y, x) of the volumes that belong to `block`."""

    def read_box(self, block: int) -> Box:
        """Return the voxels of the volumes that are read for `block`."""

    def describe(self) -> dict[str, object]:
        """Return everything that the results depend on, as JSON values."""


@dataclasses.dataclass(frozen=True)
class ByBlock:
    """Results of blocks: every field is a dict by the number of the block."""

    @classmethod
    def joined(cls, parts: Iterable[Self]) -> Self:
        """Return all `parts` as one."""
        fields: list[dict[int, Any]] = [{} for _ in dataclasses.fields(cls)]  # Any: of the field
        for part in parts:
            for whole, field in zip(fields, dataclasses.fields(cls), strict=True):
                whole.update(getattr(part, field.name))
        return cls(*fields)


class BlockSchedule(FedSchedule):
    """One stage, whose units are blocks; `feed` is what other work still writes."""

    def __init__(self, name: str, subject: Blocks, feed: Feed | None = None) -> None:
        self.subject = subject
        super().__init__(
            fed(Stage(name, len(subject.blocks), doing="comparing voxels"), feed, subject.read_box), feed=feed
        )

    def box(self, stage: Stage, unit: int) -> Box:
        """Return the voxels (z, y, x) that belong to block `unit`."""
        return self.subject.own_box(unit)


class BlockWork(FolderWork[R]):
    """Work on the blocks of `subject`; what they gave is kept in the folder. Other arguments as of `FolderWork`.

    Attributes:
        mark: file in the folder that says what is looked at.
        stage, app: names of the stage, and of the app that does its units.
        passing: keys of the description that change by themselves, and are not compared.
    """

    mark: ClassVar[str]
    stage: ClassVar[str]
    app: ClassVar[str]
    passing: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        subject: Blocks,
        folder: RunFolder,
        options: Options = PLAIN,
        listener: Listener = SILENT,
        feed: Feed | None = None,
    ) -> None:
        super().__init__(folder, options, listener, feed)
        self.subject = subject

    @property
    def is_begun(self) -> bool:
        return self.folder.journal.is_file()

    @abstractmethod
    def volumes(self) -> Mapping[str, Volume | None]:
        """Return what it reads that others may change, by what that is."""

    @abstractmethod
    def report(self, schedule: BlockSchedule | None, session: WorkSession, **facts: Any) -> R:
        """Return how it ended, with what blocks gave; `facts` are those of a `WorkReport`.

        Without a `schedule` all was done before.
        """

    def grids(self) -> dict[str, Grid]:
        """Return the blocks of the one stage; see `FolderWork`."""
        return {self.stage: self.subject.blocks}

    def sent(self) -> Blocks:
        """Return what travels to workers with each task: the subject, or what they need of it."""
        return self.subject

    def described(self) -> dict[str, object]:
        """Return what is looked at, as it is read back from a file."""
        described: dict[str, object] = json.loads(json.dumps(self.subject.describe()))
        return described

    def schedule(self) -> BlockSchedule:
        """Return the one stage."""
        return BlockSchedule(self.stage, self.subject, self.feed)

    def claim(self) -> None:
        """Forget what was found in other volumes, or otherwise: it costs little, and is made again.

        Raises:
            RunError: the folder is that of other work.
        """
        self.check_free()
        mark, states = self.folder.path / self.mark, self._states()
        if self.options.fresh or read_json(mark) != self._given or self._has_changed(states):
            self.clear()
            write_json(mark, self._given)
        store_identities(self.folder.inputs, states)

    @property
    def _given(self) -> dict[str, object]:
        """What the file says by which the folder is known."""
        return {key: value for key, value in self.described().items() if key not in self.passing}

    def remove(self) -> None:
        """Delete the folder, when the workers have stopped, unless another command has taken it meanwhile."""
        self.folder.remove(self.mark, self._given)

    def check_free(self) -> None:
        """Refuse a folder that other work made."""
        check_kind(self.folder, self.mark)

    def clear(self) -> None:
        """Delete what is known of the blocks; see `FolderWork`."""
        self.folder.clear()

    def _states(self) -> dict[str, Identity]:
        """Return the present state of what is read."""
        return {name: identify(volume) for name, volume in self.volumes().items() if volume is not None}

    def _has_changed(self, now: Mapping[str, Identity]) -> bool:
        """Return whether volumes differ from those that were looked at, but for parts that could not be read."""
        try:
            before = read_identities(self.folder.inputs) or {}
        except RunError:  # damaged
            return True
        return before.keys() != now.keys() or any(changes(before[name], state) for name, state in now.items())

    def session_steps(self, session: WorkSession) -> Steps[R]:
        """Look at the blocks that are left, and add up what all gave."""
        if self.is_complete:
            return self.report(None, session, was_complete=True)
        pool: WorkerPool = yield POOL
        began, schedule, sent = time.perf_counter(), self.schedule_left(), self.sent()
        self.listener.on_plan(self.subject, self.folder)

        def submit(stage: str, units: Sequence[int]) -> Future[Record[Any]]:
            return pool.submit(self.app, sent, list(units), session.name, str(self.folder.path))

        phase = yield from session.finish(self.phase(session, schedule, submit))
        return self.report(
            schedule, session,
            missing=schedule.missing(phase.reasons), totals=session.totals,
            seconds=time.perf_counter() - began, first_task=session.first_task,
        )  # fmt: skip

    def schedule_left(self) -> BlockSchedule:
        """Return the stage less the blocks that the journal has."""
        schedule = self.resumed()[0]
        assert isinstance(schedule, BlockSchedule)
        return schedule
