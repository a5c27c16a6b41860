"""The comparison of two outputs as work: its blocks compared on workers, what they gave kept, and added up.

Not here: what a block gives (compare), the page (compare_page), or many pairs of outputs (workflow.compare).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import volpipe
from volpipe.blockwise.journal import Kinds, read_results
from volpipe.blockwise.loop import perform
from volpipe.blockwise.pool import Start
from volpipe.evaluation.block_work import BlockSchedule, BlockWork
from volpipe.evaluation.compare import RESULTS, BlockDifferences, Comparison, Differences, sum_differences
from volpipe.evaluation.compare_lines import (
    CHANNEL_COLUMNS,
    WORST_COLUMNS,
    channel_lines,
    row_line,
    summary,
    worst_lines,
)
from volpipe.evaluation.compare_page import page_of
from volpipe.evaluation.limits import Limit, violations
from volpipe.evaluation.origins import differing
from volpipe.reporting.page import Note
from volpipe.reporting.render import write_page
from volpipe.runs.pages import Parts, Taken
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.work import SILENT, FolderWork, Listener, Options, WorkSession
from volpipe.tables import html_table
from volpipe.volumes.storage.metadata import write_json
from volpipe.volumes.storage.paths import shown
from volpipe.volumes.volume import Volume

COMPARISON_FILE = "comparison.json"  # in the folder of a comparison: what is compared


@dataclass(repr=False)
class ComparisonResult(WorkReport):
    """How two outputs differ.

    Attributes:
        plan: the comparison: volumes, box and kind.
        differences: over the boxes that could be compared; None where none could. Those of `missing` could not.
        limits: that were given.
    """

    differences: Differences | None = None
    limits: tuple[Limit, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether all was compared, and no voxel differs; of labels, whether the objects are the same."""
        return self.is_complete and self.differences is not None and self.differences.is_same

    @property
    def violations(self) -> list[str]:
        """A sentence for each limit that is violated."""
        return [] if self.differences is None else violations(self.limits, self.differences)

    @property
    def is_within(self) -> bool:
        """Whether all was compared, and no limit is violated."""
        return self.is_complete and self.differences is not None and not self.violations

    @property
    def made_otherwise(self) -> list[tuple[str, str, str]]:
        """What was done otherwise: what it is, and what A and B say of it."""
        return differing(self.plan.made_a, self.plan.made_b)

    @property
    def summary(self) -> list[str]:
        """How they differ, in sentences."""
        return summary(self.plan, self.differences, len(self.missing))

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        first = self.summary[0] if self.summary else ""
        return {"A": shown(self.plan.a), "B": shown(self.plan.b), "": first, **super().facts()}

    def _repr_html_(self) -> str:
        """Return tables of channels and of the boxes that differ most, above how it ended."""
        if self.differences is None:
            return super()._repr_html_()
        parts = [
            html_table(CHANNEL_COLUMNS[self.plan.kind], channel_lines(self.plan, self.differences)),
            html_table(WORST_COLUMNS[self.plan.kind], worst_lines(self.differences), caption="boxes that differ most"),
            html_table(("made by", "A", "B"), self.made_otherwise),
        ]
        return "".join(parts) + super()._repr_html_()

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values; infinity and NaN are None."""
        plan: Comparison = self.plan
        violated = {str(limit): list(limit.violations(self.differences)) for limit in self.limits if self.differences}
        return {
            "version": volpipe.__version__,
            **plan.describe(),
            "notes": list(plan.notes),
            "made_otherwise": [{"what": what, "a": a, "b": b} for what, a, b in self.made_otherwise],
            "missing": [{"box": str(part.box), "reason": part.reason} for part in self.missing],
            "differences": None if self.differences is None else self.differences.to_json(),
            "limits": {name: {"is_violated": bool(lines), "why": lines} for name, lines in violated.items()},
            "is_within": self.is_within,
        }

    def write_json(self, file: str | Path) -> None:
        """Write what `to_json` returns to `file`, whole or not at all."""
        write_json(Path(file), self.to_json())

    def write_page(self, file: str | Path) -> None:
        """Write the page, with pictures of the boxes that differ most, to `file`, whole or not at all."""
        write_page(page_of(self), Path(file))


@dataclass(frozen=True)
class ComparisonRow:
    """One of many pairs that were to be compared.

    Attributes:
        name: of the dataset or stage.
        a, b: places of the outputs; "" where they were not complete.
        result: None where it was not compared.
        reason: why it was not, or not whole.
    """

    name: str
    a: str = ""
    b: str = ""
    result: ComparisonResult | None = None
    reason: str = ""

    @property
    def rank(self) -> tuple[float, ...]:
        """How much differs: the greater, the more; () where that is not known."""
        differences = None if self.result is None else self.result.differences
        return () if differences is None else differences.rank

    @property
    def line(self) -> tuple[str, ...]:
        """The cells of the row, in the columns of ROW_COLUMNS."""
        if self.result is None:
            return row_line(self.name, "", None, self.reason)
        remark = "; ".join(filter(None, [self.reason, *self.result.violations]))
        return row_line(self.name, self.result.plan.kind, self.result.differences, remark)


class ComparisonWork(BlockWork[ComparisonResult]):
    """A comparison, block by block; what its blocks gave is kept in its folder.

    Args:
        comparison: from `plan_comparison`.
        folder, options, listener: as of `FolderWork`.
        limits: for the result.
    """

    kinds: ClassVar[Kinds] = RESULTS
    mark, stage, app = COMPARISON_FILE, "compare", "compare"

    def __init__(
        self,
        comparison: Comparison,
        folder: RunFolder,
        options: Options,
        listener: Listener = SILENT,
        limits: tuple[Limit, ...] = (),
    ) -> None:
        super().__init__(comparison, folder, options, listener)
        self.comparison, self.limits = comparison, limits

    @property
    def name(self) -> str:
        return f"{self.comparison.a} and {self.comparison.b}"

    @property
    def is_complete(self) -> bool:
        """Whether every block is compared."""
        return self.is_begun and self.resumed()[0].is_complete

    def check_source(self, source: FolderWork[Any], called: str) -> None:
        """Nothing else makes what is compared."""

    def sent(self) -> Comparison:
        """Return the comparison without what both say of how they were made, which may be long."""
        return replace(self.comparison, made_a=(), made_b=(), notes=())

    def volumes(self) -> dict[str, Volume | None]:
        """Return both outputs."""
        return {"a": self.comparison.a, "b": self.comparison.b}

    def parts(self, taken: Taken, *, is_complete: bool) -> Parts:
        """Return what is compared, and how both differ as far as they are; see `FolderWork`."""
        facts = {key: str(value) for key, value in self.described().items() if value is not None}
        differences = self._differences()
        items = [Note(line) for line in summary(self.comparison, differences, len(taken.missing))]
        return Parts(f"Comparison of {self.name}", "The comparison of two outputs.", facts, items)

    def report(self, schedule: BlockSchedule | None, session: WorkSession, **facts: Any) -> ComparisonResult:
        """Return how both differ, over the blocks that could be compared."""
        differences = self._differences()
        return ComparisonResult(self.comparison, self.folder.path, **facts, differences=differences, limits=self.limits)

    def _differences(self) -> Differences | None:
        read = partial(read_results, self.folder.journal, self.kinds, BlockDifferences)
        return sum_differences(self.comparison, read)


def compare(
    comparison: Comparison,
    start: Start,
    folder: RunFolder,
    *,
    listener: Listener = SILENT,
    limits: tuple[Limit, ...] = (),
    on_end: Callable[[ComparisonResult], None] = lambda result: None,
    **options: Any,
) -> ComparisonResult:
    """Compare all blocks, and return how both differ; `folder`, which holds what is done, goes when all is.

    Args:
        comparison: from `plan_comparison`.
        start: starts the workers in a folder for their files, and stops them on every way out.
        folder, listener, options: as of `FolderWork`.
        limits: how much both may differ.
        on_end: called with the result before the folder goes: what it raises leaves it there.

    Raises:
        PlanError: a limit is of what they do not have.
        RunStopped: too many blocks cannot be compared.
    """
    for limit in limits:
        limit.check(comparison)
    work = ComparisonWork(comparison, folder, Options(**options), listener, limits)
    result = perform(work, partial(start, folder.parsl))
    on_end(result)
    if result.is_complete:
        work.remove()
    return result
