"""Outputs to compare, one with one or many with many: those of two batches, or of the stages of two flows.

Not here: how two outputs are compared (evaluation). Of an output that is not complete nothing is
compared: what is not written yet reads as zeros.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import volpipe
from volpipe.blockwise.pool import Start
from volpipe.blockwise.work import Ended, Steps, Together, Work
from volpipe.errors import PlanError
from volpipe.evaluation.compare import ComparisonPlan
from volpipe.evaluation.driver import comparison_work
from volpipe.evaluation.limits import Limit
from volpipe.evaluation.results import MOST_SHOWN, ComparisonResult, ComparisonRow, Filed, page_of_many, row_sheet
from volpipe.geometry.grid import Box
from volpipe.reporting.page import Page, Sheet
from volpipe.runs.held_work import HeldWork
from volpipe.runs.options import RunOptions
from volpipe.runs.presence import Presence
from volpipe.runs.provenance import read_provenance
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.verify import check_present
from volpipe.stages.entry import Entry
from volpipe.tables import html_table
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import write_json
from volpipe.volumes.volume import Volume, absolute
from volpipe.workflow.batch_table import DatasetRow, find_batch, read_table
from volpipe.workflow.entries import find_entries
from volpipe.workflow.kinds import KINDS, find_work

T = TypeVar("T")
AT_ONCE = 8  # pairs at work at a time: the tail of one is filled by the next
MOST_NAME = 60  # characters of a place in the name of a folder
COMPARISONS_FILE = "comparisons.json"  # in the folder of many comparisons: what is compared


@dataclass(frozen=True)
class OutputPair:
    """Two outputs to compare, by the name of their dataset or stage."""

    name: str
    a: str
    b: str


@dataclass
class Pairs:
    """Outputs of two batches or flows.

    Attributes:
        pairs: complete in both.
        only_a, only_b: names of what one of them has alone.
        incomplete: names of what both have, and why it cannot be compared.
    """

    pairs: list[OutputPair] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    incomplete: list[tuple[str, str]] = field(default_factory=list)

    def shared(self, of_a: Mapping[str, T], of_b: Mapping[str, T], prefix: str = "") -> Iterator[tuple[str, T, T]]:
        """Yield the name of what both have, in order, with that of A and of B; note what one has alone."""
        self.only_a += [f"{prefix}{name}" for name in sorted(of_a.keys() - of_b.keys())]
        self.only_b += [f"{prefix}{name}" for name in sorted(of_b.keys() - of_a.keys())]
        return ((f"{prefix}{name}", of_a[name], of_b[name]) for name in sorted(of_a.keys() & of_b.keys()))

    def add_stages(self, stages_a: Sequence[Entry], stages_b: Sequence[Entry], prefix: str = "") -> Pairs:
        """Take the stages of one name that make a volume."""
        of_a, of_b = ({e.name: e for e in stages if KINDS[e.kind].maker is not None} for stages in (stages_a, stages_b))
        for name, a, b in self.shared(of_a, of_b, prefix):
            lacking = [which for which, entry in (("A", a), ("B", b)) if not KINDS[entry.kind].is_done(entry)]
            if lacking:
                verb = "is" if len(lacking) == 1 else "are"
                self.incomplete.append((name, f"{' and '.join(lacking)} {verb} not complete"))
            else:
                self.pairs.append(OutputPair(name, a.out, b.out))
        return self

    def table(self, a: str, b: str, limits: tuple[Limit, ...]) -> ComparisonTable:
        """Return the table of both, `a` and `b`, in which nothing is compared yet."""
        incomplete = [ComparisonRow(name, reason=why) for name, why in self.incomplete]
        return ComparisonTable(a, b, incomplete, tuple(sorted(self.only_a)), tuple(sorted(self.only_b)), limits)


def find_pairs(a: str, b: str) -> Pairs | None:
    """Return the pairs of two batches, or of the stages of two flows; None where `a` and `b` are outputs themselves.

    Raises:
        PlanError: one is a batch or a flow and the other is not, or datasets cannot be told apart.
    """
    batches = [find_batch(place) for place in (a, b)]
    for place, batch in zip((a, b), batches, strict=True):
        if batch is None and place.lower().endswith(".toml") and "://" not in place:
            raise PlanError(
                f"{place}: no batch of that name was begun; `volpipe batch {shlex.quote(str(place))}` runs it"
            )
    if batches[0] is not None and batches[1] is not None:
        return _of_batches(read_table(batches[0]) or [], read_table(batches[1]) or [])
    entries = [find_entries(place) if batch is None else None for place, batch in zip((a, b), batches, strict=True)]
    if entries[0] is not None and entries[1] is not None:
        return Pairs().add_stages(entries[0], entries[1])
    words = [
        "a batch" if batch is not None else "a folder of stages" if stages is not None else ""
        for batch, stages in zip(batches, entries, strict=True)
    ]
    if words[0] or words[1]:
        one, other = (word or "one output" for word in words)
        raise PlanError(f"A is {one}, B {other}: {a} and {b}; compare two of a kind")
    return None


def _of_batches(rows_a: Sequence[DatasetRow], rows_b: Sequence[DatasetRow]) -> Pairs:
    """Return the pairs of datasets with the same input, or else the same recipe or name of the output."""
    for i in range(3):
        of_a, of_b = ({_names_of_dataset(row)[i]: row for row in rows} for rows in (rows_a, rows_b))
        if len(of_a) == len(rows_a) and len(of_b) == len(rows_b):
            break
    else:
        raise PlanError(
            "datasets have no names of their own: several of a batch have the same volume, recipe and name of the "
            "output; compare their outputs one by one"
        )
    pairs = Pairs()
    for name, a, b in pairs.shared(of_a, of_b):
        rows = [(which, row) for which, row in (("A", a), ("B", b)) if not row.is_complete]
        reasons = [
            f"{which} is not complete: {', '.join(filter(None, [row.ended, row.reason]))}" for which, row in rows
        ]
        entries = None if reasons else find_entries(a.out), None if reasons else find_entries(b.out)
        if reasons:
            pairs.incomplete.append((name, "; ".join(reasons)))
        elif entries[0] is not None and entries[1] is not None:
            pairs.add_stages(entries[0], entries[1], f"{name} ")
        else:
            pairs.pairs.append(OutputPair(name, a.out, b.out))
    return pairs


def _names_of_dataset(row: DatasetRow) -> tuple[str, str, str]:
    volume = str(paths.locate(row.volume))
    return volume, f"{volume} ({row.recipe})", f"{volume} ({paths.locate(row.out).name})"


def check_complete(name: str, output: str, volume: Volume, box: Box) -> None:
    """Refuse an `output`, open as `volume`, that is not complete in `box`, as far as its run or its attributes say.

    Raises:
        PlanError: naming it, as the one that is called `name`.
        RunError: files of it are gone.
    """
    mark, place = volume.incomplete, absolute(volume.path)
    if mark is not None and (volume.view.incomplete or mark.has(box)):
        return
    work = find_work(RunFolder.find(str(place)))
    if work is not None and not isinstance(place, Path) and paths.locate(work.plan.out) != place:
        work = None  # in this folder, by the same name, of another output in a bucket
    missing = int((read_provenance(place).get("run") or {}).get("missing") or 0)
    if (work is not None and not work.is_complete) or (work is None and missing):
        parts = len(work.records.ledger().missing) if work is not None else missing
        why = f"{parts:,} of its parts failed" if parts else "its run is not done"
        raise PlanError(
            f"{name} is not complete, {why}: {output}; what is missing reads as zeros: "
            + ("give its own command again first" if mark is None else mark.advice)
        )
    volume.check_written(box)
    if work is not None:
        check_present(str(place), work.shards())  # which may have been moved


def pair_name(a: str, b: str) -> str:
    """Return a name of two places, by the parts at their ends that tell them apart."""
    one, other = ([place.stem, *(parent.name for parent in place.parents)] for place in map(paths.locate, (a, b)))
    depth = next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)
    names = ["_".join(reversed(parts[: depth + 1])) for parts in (one, other)]
    return "_".join(re.sub(r"[^\w.-]+", "_", name)[-MOST_NAME:] for name in dict.fromkeys(names))


# ---- many


@dataclass(repr=False)
class ComparisonTable(Filed):
    """How the outputs of two batches, or of the stages of two flows, differ.

    Attributes:
        a, b: the batches.
        rows: those that were compared, images and labels each in the order of how much differs, the most first; then
            those that were not.
        only_a, only_b: names of what one has alone.
        limits: that were given.
    """

    a: str
    b: str
    rows: list[ComparisonRow]
    only_a: tuple[str, ...] = ()
    only_b: tuple[str, ...] = ()
    limits: tuple[Limit, ...] = ()

    @property
    def given(self) -> dict[str, str]:
        """What the folder of the comparisons is known by."""
        return {"a": self.a, "b": self.b}

    @property
    def is_complete(self) -> bool:
        """Whether every output of both was compared."""
        return bool(self.rows) and not (self.only_a or self.only_b) and all(row.is_complete for row in self.rows)

    @property
    def violations(self) -> list[str]:
        """A sentence for each limit that is violated, with the dataset, and for each that no dataset has."""
        sentences = [f"{row.name}: {line}" for row in self.rows if row.result for line in row.result.violations]
        used = {limit for row in self.rows if row.result for limit in row.result.limits}
        return sentences + [f"{limit}: nothing that was compared has it" for limit in self.limits if limit not in used]

    @property
    def is_within(self) -> bool:
        """Whether all was compared, and no limit is violated."""
        return self.is_complete and not self.violations

    def __repr__(self) -> str:
        return f"<ComparisonTable: A {self.a}, B {self.b}, {len(self.rows)} outputs>"

    def _repr_html_(self) -> str:
        return html_table(self.sheet.names, self.sheet.rows)

    @property
    def sheet(self) -> Sheet:
        """A line of each row."""
        return row_sheet(self.rows)

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values; infinity and NaN are None."""
        rows = [
            {"name": row.name, "reason": row.reason, "a": row.a, "b": row.b}
            | ({} if row.result is None else {"comparison": row.result.to_json()})
            for row in self.rows
        ]
        return {
            "version": volpipe.__version__,
            "a": self.a,
            "b": self.b,
            "outputs": rows,
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "limits": [str(limit) for limit in self.limits],
            "violations": self.violations,
            "is_within": self.is_within,
        }

    def page(self, most: int = MOST_SHOWN) -> Page:
        """Return the page, with pictures of the `most` outputs that changed most."""
        only = (self.only_a, self.only_b)
        return page_of_many((self.a, self.b), self.rows, only, self.violations, most)


Plan = Callable[[str, str], ComparisonPlan]  # of two outputs


def pairs_work(
    table: ComparisonTable, pairs: Pairs, plan: Plan, folder: RunFolder, options: RunOptions,
    on_pair: Callable[[int, int], None],
) -> HeldWork[ComparisonTable]:  # fmt: skip
    """Return the work of comparing many pairs, side by side on one pool; an error of one stops no other.

    Args:
        table: gets a row for each pair; of its limits each counts for those that have it.
        plan: returns the comparison of two outputs.
        on_pair: called with the number of pairs that are done, and of all.
    """
    num = len(pairs.pairs)

    def page(*, with_pictures: bool = True) -> Page:
        return replace(table, rows=_most_first(table.rows)).page(MOST_SHOWN if with_pictures else 0)

    def claim() -> None:
        if foreign := folder.other_work(COMPARISONS_FILE):
            raise foreign
        write_json(folder.path / COMPARISONS_FILE, table.given)

    def keep(ended: Ended[Any]) -> None:  # Any: how two outputs differ
        pair, result = pairs.pairs[ended.work.number], ended.result
        reason = result.open_reason if result is not None else str(ended.error)
        table.rows.append(ComparisonRow(pair.name, pair.a, pair.b, result, reason))
        on_pair(len(table.rows) - len(pairs.incomplete), num)

    def compared(number: int, pair: OutputPair) -> Steps[ComparisonResult]:
        """Compare one pair, which is planned when its turn comes; limits that others have are left out."""
        comparison, own = plan(pair.a, pair.b), RunFolder(folder.path / f"{number + 1:05}.run")
        limits = [limit for limit in table.limits if comparison.has(limit)]
        return (yield from comparison_work(comparison, own, options, limits=limits).steps())

    def steps(name: str, presence: Presence) -> Steps[ComparisonTable]:
        works = (Work(pair.name, partial(compared, n, pair), "pair", n) for n, pair in enumerate(pairs.pairs))
        yield Together(works, keep, at_once=AT_ONCE)
        return replace(table, rows=_most_first(table.rows))

    return HeldWork("compare", folder, claim=claim, held_steps=steps, page=page)


def _most_first(rows: Sequence[ComparisonRow]) -> list[ComparisonRow]:
    """Return `rows` of each kind in the order of how much differs, those that were not compared last."""

    def key(row: ComparisonRow) -> tuple[object, ...]:
        kind = row.result.plan.kind if row.result is not None and row.rank else "~"
        return kind, tuple(-value for value in row.rank), row.name

    return sorted(rows, key=key)  # of a kind, ranks are alike


def compare_pairs(
    work: HeldWork[ComparisonTable], start: Start, on_end: Callable[[ComparisonTable], object]
) -> ComparisonTable:
    """Compare all pairs on one pool, and return how they differ; the folder of `work` goes when all is compared.

    Args:
        start: starts the workers once, and stops them on every way out.
        on_end: called with the result before the folder goes.

    Raises:
        RunError: another driver is at work on it.
        SiteError: the site cannot be used.
    """
    table = work.run(start)
    on_end(table)
    if all(row.result is None or row.result.is_complete for row in table.rows):
        work.folder.remove(COMPARISONS_FILE, table.given)
    return table
