"""Stages that find something in a volume and write it into a file of JSON, anew each time rather than updated.

Not here: how it is found, which a kind says by its `find`; docs/design/extend.md makes one.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from volpipe.blockwise.work import Steps
from volpipe.errors import RunError
from volpipe.recipes.toml import Section
from volpipe.recipes.workflow import FlowStage, Makes
from volpipe.reporting.page import Page
from volpipe.reporting.tally import JournalTally
from volpipe.runs.options import PLAIN, RunOptions
from volpipe.runs.pages import Parts, Several, page_of
from volpipe.runs.presence import Presence
from volpipe.runs.report import WorkReport
from volpipe.runs.stage_work import SILENT, Listener, StageWork
from volpipe.runs.standing import Act, Asked, Standing, WorkState
from volpipe.stages.kind import Planning, StagePlan
from volpipe.units import duration
from volpipe.volumes.identity import changes, identify, read_identities, store_identities
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json, write_json
from volpipe.volumes.storage.paths import delete_file
from volpipe.volumes.volume import Volume


@dataclass(frozen=True)
class FilePlan:
    """What a file is of: the volume that is looked at, and what the stage says."""

    volume: Volume
    choice: Section

    def describe(self) -> dict[str, object]:
        """Return everything that the content depends on, as JSON values."""
        return {"input": str(self.volume), **self.choice.model_dump(mode="json")}

    @property
    def identity(self) -> str:
        return str(self.describe())

    def warnings(self) -> list[str]:
        return []


class FileStage(StagePlan):
    """A stage whose output is a file of JSON; its kind says by `find` what is in it."""

    has_recipe = False
    makes: ClassVar[Makes] = "scores"
    plan: FilePlan

    @abstractmethod
    def find(self, listener: Listener) -> Steps[Any]:  # Any: JSON values
        """Return what is found in the volume `given`, by the keys `plan.choice`."""

    @classmethod
    def planned(cls, stage: FlowStage, among: Planning) -> FileStage:
        given, out = among.given(stage), among.folder / f"{stage.name}.json"
        return cls(stage.name, stage.reads, given, out, FilePlan(given, stage.choice), stage.array, stage.beside)

    def work(self, options: RunOptions = PLAIN, listener: Listener = SILENT) -> FileWork:
        return FileWork(self, options, listener)


@dataclass(repr=False)
class FileReport(WorkReport):
    """How a stage ended whose output is a file."""

    file: str = ""

    def closing_lines(self, planned: Any = None) -> Iterable[str]:  # Any: as of `WorkReport`
        return (f"wrote {self.file} in {duration(self.seconds)}",)


class FileWork(StageWork[FileReport]):
    """The work of a stage whose output is a file; arguments as of `StageWork`."""

    def __init__(self, stage: FileStage, options: RunOptions, listener: Listener) -> None:
        super().__init__(stage.folder, options, listener, str(stage.out))
        self.plan, self.to = stage.plan, stage.out
        self.find: Callable[[Listener], Steps[Any]] = stage.find  # Any: JSON values

    @property
    def needs_all(self) -> bool:
        return True

    @property
    def is_begun(self) -> bool:
        return paths.exists(self.to)

    @property
    def is_complete(self) -> bool:
        """Whether the file is there, and is of this volume and by these keys."""
        tree = read_json(self.to) or {}
        return {key: tree.get(key) for key in self.plan.describe()} == self.plan.describe()

    @property
    def share_left(self) -> float:
        return 0.0 if self.is_complete else 1.0

    @property
    def asked(self) -> Asked:
        return Asked.FRESH if self.options.fresh else Asked.REMAKE

    def foreign(self) -> RunError | None:
        return self.folder.other_work("")

    def standing(self) -> Standing:
        if foreign := self.foreign():
            return Standing(WorkState.FOREIGN, foreign)
        if not self.is_begun:
            return Standing(WorkState.FRESH)
        return Standing(WorkState.COMPLETE if self.is_complete else WorkState.OUTDATED)

    def check_source(self, source: StageWork[Any], called: str) -> None:
        """Forget what was found in an output that is not complete, or is made anew."""
        if not source.is_complete:
            delete_file(self.to)

    def clear(self) -> None:
        delete_file(self.to)
        self.folder.clear()

    def claim(self) -> None:
        """Forget what was found in another volume, or in one that changed since: it is found anew."""
        standing = self.standing()
        if standing.act(self.asked) is Act.REFUSE:
            raise standing.refusal_of(self.asked)
        now = {"input": identify(self.plan.volume)} if self.options.is_outside else {}
        before = None
        with suppress(RunError):  # damaged
            before = read_identities(self.folder.inputs)
        if before is None or before.keys() != now.keys() or any(changes(before[n], now[n]) for n in now):
            standing = Standing(WorkState.CHANGED)
        if standing.act(self.asked) is Act.CLEAR:
            self.clear()
        store_identities(self.folder.inputs, now)

    def held_steps(self, name: str, presence: Presence) -> Steps[FileReport]:
        began, was_complete = time.perf_counter(), self.is_complete
        if not was_complete:
            write_json(self.to, {**self.plan.describe(), "found": (yield from self.find(self.listener))})
        seconds = time.perf_counter() - began
        return FileReport(
            self.plan, self.folder.path, seconds=seconds, was_complete=was_complete, file=paths.shown(self.to)
        )

    def witnesses(self) -> Sequence[Path]:
        return [self.to] if isinstance(self.to, Path) else []

    def page(self, *, with_pictures: bool = True) -> Page:
        facts = {key: str(value) for key, value in self.plan.describe().items()} | {"output": str(self.to)}
        parts = Parts(Path(self.name).name, "What was found in a volume.", facts)
        return page_of(self.folder, Several(JournalTally()), parts, is_complete=self.is_complete)
