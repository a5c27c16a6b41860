"""How an evaluation or a comparison ended: as numbers, as JSON, as a notebook shows it, and as a page.

Not here: the work (driver), sentences and tables (lines), pictures (pictures), or HTML (reporting.render).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import volpipe
from volpipe.blockwise.failures import last_line
from volpipe.estimation.estimate import StageTimes
from volpipe.evaluation import lines
from volpipe.evaluation.compare import ComparisonPlan
from volpipe.evaluation.differences import Differences
from volpipe.evaluation.evaluate import evaluation_of
from volpipe.evaluation.evaluation import SUMS, Evaluation
from volpipe.evaluation.limits import Limit
from volpipe.evaluation.origins import differing
from volpipe.evaluation.pictures import draw, worst_drafts
from volpipe.evaluation.score import Scores
from volpipe.reporting.page import Draft, FactTable, Item, Page, PageSection, Sentence, Sheet, sections_of
from volpipe.reporting.render import render
from volpipe.runs.pages import Parts
from volpipe.runs.report import WorkReport
from volpipe.tables import html_table
from volpipe.units import count
from volpipe.volumes.storage.paths import shown
from volpipe.volumes.storage.result_file import ResultFile, json_bytes, json_kind, page_kind, png_bytes, png_kind

MOST_SHOWN = 6  # boxes with pictures
VIOLATED = "Limit violated: {}"
SCORES_JSON, SCORES_PNG = json_kind("volpipe evaluate --json"), png_kind("volpipe evaluate --picture")
SCORES_PAGE = page_kind("volpipe evaluate --report")
COMPARED_JSON, COMPARED_PAGE = json_kind("volpipe compare --json"), page_kind("volpipe compare --page")


class Filed:
    """A result that can be written to files, as JSON and as a page."""

    to_json: Callable[[], dict[str, object]]
    page: Callable[[], Page]

    def write_json(self, file: str | Path) -> None:
        """Write what `to_json` returns to `file`, whole or not at all; no other file than such a one is replaced.

        Raises:
            VolpipeError: something else is there, or it cannot be written.
        """
        data = json_bytes(COMPARED_JSON.writer, self.to_json())
        ResultFile.named("file", file, COMPARED_JSON).write(data)

    def write_page(self, file: str | Path) -> None:
        """Write the page, with pictures of what differs most, to `file`; as `write_json`."""
        data = render(self.page(), COMPARED_PAGE.writer).encode()
        ResultFile.named("file", file, COMPARED_PAGE).write(data)


@dataclass(repr=False)
class EvaluationResult(WorkReport):
    """How an evaluation ended.

    Attributes:
        plan: the evaluation: volumes and box that were compared.
        by_candidate: the scores of the output, and of an image those of interpolations of its input, by name; None
            where blocks are missing.
    """

    plan: Evaluation
    by_candidate: dict[str, Scores] | None = None

    @property
    def scores(self) -> Scores | dict[str, Scores] | None:
        """Of labels; or of an image and of interpolations of its input, by name. None where blocks are missing."""
        return None if self.by_candidate is None else self.plan.result(self.by_candidate)

    @property
    def notes(self) -> list[str]:
        """What a user should know of the volumes and their labels, in sentences."""
        return [*self.plan.notes, *([] if self.by_candidate is None else self.plan.label_notes(self.by_candidate))]

    def closing_lines(self, planned: StageTimes | None = None) -> list[str]:
        """Return which volume is judged by which."""
        return [f"output     {self.plan.output}", f"reference  {self.plan.truth}"]

    @property
    def closing_sheets(self) -> list[Sheet]:
        """The scores of each candidate, the best PSNR first, or of labels."""
        return [] if self.by_candidate is None else self.plan.sheets(self.by_candidate)

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        numbers = {} if self.by_candidate is None else self.plan.numbers(self.by_candidate)
        texts = {name.replace("_", " "): f"{n:,}" if isinstance(n, int) else f"{n:.4f}" for name, n in numbers.items()}
        return {"output": shown(self.plan.output), "reference": shown(self.plan.truth), **texts, **super().facts()}

    def _repr_html_(self) -> str:
        """Return a table of images, the best PSNR first, or of neurons or classes, above how it ended."""
        sheets = [] if self.by_candidate is None else self.plan.notebook_sheets(self.by_candidate)
        tables = (html_table(sheet.names, sheet.rows, caption=sheet.caption) for sheet in sheets)
        return "".join(tables) + super()._repr_html_()

    def to_json(self) -> dict[str, object]:
        """Return the scores and their volumes as JSON values; infinite numbers are None."""
        assert self.by_candidate is not None
        return self.plan.describe_scores(self.by_candidate)

    def write_json(self, file: str | Path) -> None:
        """Write what `to_json` returns to `file`, whole or not at all; no other file than such a one is replaced.

        Raises:
            VolpipeError: something else is there, or it cannot be written.
        """
        ResultFile.named("file", file, SCORES_JSON).write(json_bytes(SCORES_JSON.writer, self.to_json()))

    def draw(self, path: str | Path) -> None:
        """Write slices and errors of images to the PNG at `path`; no other file than such a one is replaced.

        Raises:
            VolpipeError: something else is there, or it cannot be written.
        """
        ResultFile.named("path", path, SCORES_PNG).write(png_bytes(SCORES_PNG.writer, draw(self.plan)))


@dataclass(repr=False)
class ComparisonResult(WorkReport, Filed):
    """How two outputs differ.

    Attributes:
        plan: the comparison: volumes, box and kind.
        differences: over the boxes that could be compared; None where none could. Those of `missing` could not.
        limits: that were given.
    """

    plan: ComparisonPlan
    differences: Differences | None = None
    limits: tuple[Limit, ...] = ()

    @property
    def is_same(self) -> bool:
        """Whether all was compared, and no voxel differs; of labels, whether the objects are the same."""
        return self.is_complete and self.differences is not None and not self.differences.together.num_differ

    @property
    def violated(self) -> dict[str, list[str]]:
        """The limits, each with a sentence for each channel that violates it, and for all together."""
        return {str(limit): limit.violations(self.differences) for limit in self.limits if self.differences is not None}

    @property
    def violations(self) -> list[str]:
        """A sentence for each limit that is violated."""
        return [sentence for sentences in self.violated.values() for sentence in sentences]

    @property
    def is_within(self) -> bool:
        """Whether all was compared, and no limit is violated."""
        return self.is_complete and self.differences is not None and not self.violations

    @property
    def made_otherwise(self) -> list[tuple[str, str, str]]:
        """The facts on which the makings of both outputs differ: name, A's and B's value."""
        return differing(self.plan.made_a, self.plan.made_b)

    @property
    def summary(self) -> list[str]:
        """How they differ, in sentences."""
        return lines.summary(self.plan, self.differences, len(self.missing))

    def closing_lines(self, planned: StageTimes | None = None) -> list[str]:
        return self.summary

    @property
    def sheets(self) -> list[Sheet]:
        """How much differs, and where most."""
        return [] if self.differences is None else lines.difference_sheets(self.plan, self.differences)

    def pictures(self, most: int = MOST_SHOWN, name: str = "") -> Iterator[Draft]:
        """Yield the pictures of up to `most` of the boxes that differ most, of outputs that are called `name`."""
        if self.differences is not None:
            yield from worst_drafts(self.plan, self.differences, most, name)

    @property
    def made(self) -> Sheet | None:
        """A table of the facts on which the makings of both outputs differ; None without any."""
        title, rows = "What both say of how they were made, where it differs", self.made_otherwise
        return Sheet(title, ("", "A", "B"), rows) if rows else None

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        return {"A": shown(self.plan.a), "B": shown(self.plan.b), "": self.summary[0], **super().facts()}

    def _repr_html_(self) -> str:
        """Return tables of channels and of the boxes that differ most, above how it ended."""
        sheets = filter(None, [*self.sheets, self.made])
        tables = [html_table(sheet.names, sheet.rows, caption=sheet.title) for sheet in sheets]
        return "".join(tables) + super()._repr_html_()

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values; infinity and NaN are None."""
        return {
            "version": volpipe.__version__,
            **self.plan.describe(),
            "notes": list(self.plan.notes),
            "made_otherwise": [{"what": what, "a": a, "b": b} for what, a, b in self.made_otherwise],
            "missing": [{"box": str(part.box), "reason": part.reason} for part in self.missing],
            "differences": None if self.differences is None else self.differences.to_json(),
            "limits": {name: {"is_violated": bool(why), "why": why} for name, why in self.violated.items()},
            "is_within": self.is_within,
        }

    def page(self) -> Page:
        """Return the page, with pictures of the boxes that differ most."""
        plan, line = self.plan, self.summary[0]
        facts = {"A": str(plan.a), "B": str(plan.b), "compared as": f"{plan.kind} ({plan.why})", "box": str(plan.box)}
        warnings = _warning_notes([*map(VIOLATED.format, self.violations), *plan.notes])
        sections = [
            PageSection(
                "Comparison", [FactTable("Outputs", {**facts, "result": self.summary}), *warnings, *self.sheets]
            ),
            PageSection("How they were made", [_made_item(self)]),
            *sections_of(self.pictures()),
        ]
        if self.missing:
            rows = [(str(part.box), last_line(part.reason)) for part in self.missing]
            sections.append(PageSection("Not compared", [Sheet("Boxes", ("box z,y,x", "reason"), rows)]))
        state = "limit violated" if self.violations else "the same" if self.is_same else "they differ"
        state = state if self.is_complete else "not whole"
        return Page("Comparison of two outputs", state, sections, self.is_within, line)


@dataclass(repr=False)
class MeasurementResult(WorkReport):
    """How a measurement ended; `described` is the description of its table, empty where there is none."""

    described: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON

    @property
    def lines(self) -> list[str]:
        """How it ended, in sentences."""
        return [table_line(self.described)] if self.described else []

    def closing_lines(self, planned: StageTimes | None = None) -> list[str]:
        return self.lines

    def facts(self) -> dict[str, object]:
        """Return how it ended in numbers, for people."""
        return {**{name: self.described[name] for name in ("table", "rows") if self.described}, **super().facts()}


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
    def is_complete(self) -> bool:
        """Whether all of it was compared."""
        return self.result is not None and self.result.is_complete

    @property
    def rank(self) -> tuple[float, ...]:
        """How much differs: the greater, the more; () where that is not known."""
        differences = None if self.result is None else self.result.differences
        return () if differences is None else differences.together.rank

    @property
    def line(self) -> tuple[str, ...]:
        """The cells of the row, in the columns of `lines.ROW_COLUMNS`."""
        kind, found, violations = "", None, list[str]()
        if self.result is not None:
            kind, found, violations = self.result.plan.kind, self.result.differences, self.result.violations
        return lines.row_line(self.name, kind, found, "; ".join(filter(None, [self.reason, *violations])))


# ---- pages


def evaluation_parts(described: Mapping[str, object], tree: Mapping[str, Any] | None) -> Parts:  # Any: JSON
    """Return the parts of the report of an evaluation: what was compared, and the scores stored in `tree`, if any."""
    facts = {key: str(value) for key, value in described.items() if value is not None and key != SUMS}
    notes = (tree or {}).get("notes")
    items: list[Item] = [*stored_sheets(tree)] or [Sentence("There are no scores yet: they need all blocks.")]
    truth = described.get("reference") or described.get("skeletons")
    title = f"Scores of {Path(str(described.get('output', ''))).name}"
    return Parts(title, f"The evaluation against {truth}.", facts, [*items, *_warning_notes(notes or ())])


def stored_sheets(tree: Mapping[str, Any] | None) -> list[Sheet]:  # Any: JSON
    """Return the tables of scores that are stored as `describe_scores` gives them; none of another file."""
    scores = (tree or {}).get("scores")
    return (
        evaluation_of((tree or {}).get("kind")).stored_sheets(scores) if isinstance(scores, Mapping) and scores else []
    )


def table_item(described: Mapping[str, Any] | None) -> Sheet | Sentence:  # Any: JSON
    """Return the first rows of the table that is `described`, or a note that there is no table yet."""
    if not described:
        return Sentence("There is no table yet: it needs all blocks.")
    return Sheet(table_line(described), described["columns"], described["first_rows"], "The first rows.")


def table_line(described: Mapping[str, Any]) -> str:  # Any: JSON
    """Return how many rows the table has, and where it is."""
    return f"{count(described['rows'], 'row')} in {shown(described['table'])}"


def page_of_many(
    places: tuple[str, str], rows: Sequence[ComparisonRow], only: tuple[Sequence[str], Sequence[str]],
    violations: Sequence[str], most: int = MOST_SHOWN,
) -> Page:  # fmt: skip
    """Return the page of many comparisons.

    Args:
        places: of both batches.
        only: names of what each of them has alone.
        violations: sentences on limits.
        most: outputs with a picture.
    """
    alone = {f"in {name} only": list(names) for name, names in zip("AB", only, strict=True) if names}
    facts = FactTable("Batches", {"A": places[0], "B": places[1], **alone})
    sections = [PageSection("Comparison", [facts, *_warning_notes(map(VIOLATED.format, violations)), row_sheet(rows)])]
    compared = [(row.name, row.result) for row in rows if row.result is not None and row.rank]
    for name, result in compared[:1]:
        sections.append(PageSection("How they were made", [_made_item(result), Sentence(f"This is of {name}.")]))
    differing = [(name, result) for name, result in compared if not result.is_same]
    sections += sections_of(draft for name, result in differing[:most] for draft in result.pictures(1, f"{name}, "))
    num_open = sum(not row.is_complete for row in rows)
    is_complete = not num_open and not alone
    state = "not all compared" if not is_complete else "limit violated" if violations else "within its limits"
    line = f"{count(len(compared), 'output')} compared, of which {len(differing):,} differ; {num_open:,} not all of it"
    return Page("Comparison of many outputs", state, sections, is_complete and not violations, line)


def row_sheet(rows: Sequence[ComparisonRow]) -> Sheet:
    """Return a table with a row for each of many comparisons."""
    return Sheet("Outputs, those that differ most first", lines.ROW_COLUMNS, [row.line for row in rows])


def _warning_notes(sentences: Iterable[str]) -> list[Item]:
    return [Sentence(sentence, "warning") for sentence in sentences]


def _made_item(result: ComparisonResult) -> Item:
    """Return a table of how the makings of both outputs differ, or a note that they do not."""
    is_known = result.plan.made_a and result.plan.made_b
    alike = "Both were made alike: by the same recipe, net, weights and versions."
    return result.made or Sentence(alike if is_known else "Neither says how it was made.")
