"""What stands on a report: sections of facts, tables, pictures, charts and sentences, as values.

Not here: HTML (render), or where the numbers come from (tasks, and the works of runs that answer for themselves).
Texts are plain: the template escapes every one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from volpipe.errors import VolpipeError
from volpipe.resolve import describe_error

log = logging.getLogger(__name__)

REPORT = "report.html"  # the file, in the folder of a run


@dataclass(frozen=True)
class FactTable:
    """Names and values, a line for each.

    Attributes:
        entries: what lists (a sequence of texts) as value is shown a line each.
    """

    title: str
    entries: Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class ReportLink:
    """A cell of a table that leads to another report.

    Attributes:
        target: path of a file, relative to the folder of the report; never an address.
        image: picture above the text, with its type; empty where there is none.
    """

    text: str
    target: str
    image: bytes = field(default=b"", repr=False)
    media_type: str = "image/png"


@dataclass(frozen=True)
class Sheet:
    """A table: a cell is a text, a number, None or a `ReportLink`; numbers stand to the right.

    Attributes:
        names: of its columns.
        remarks: a sentence for each row, "" for none, on a line of its own below it.
    """

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[object]]
    caption: str = ""
    remarks: Sequence[str] = ()


@dataclass(frozen=True)
class Picture:
    """An image as a file has it; PNG, or JPEG or WebP where that is much smaller.

    Attributes:
        is_wide: whether it has a line of its own.
    """

    title: str
    caption: str
    image: bytes = field(repr=False)
    media_type: str = "image/png"
    is_wide: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart by Vega-Lite.

    Attributes:
        kind: names charts/KIND.json, a specification without its data.
        data: columns of one length: lists or arrays of numbers, texts and None; a number that is not finite is none.
        changes: keys of the specification that differ for this chart, such as its height; they are merged into it.
    """

    title: str
    caption: str
    kind: str
    data: Mapping[str, Sequence[object]] = field(repr=False)
    changes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Sentence:
    """A sentence, marked if it is a warning."""

    text: str
    kind: Literal["remark", "warning"] = "remark"


Item = FactTable | Sheet | Picture | Chart | Sentence


@dataclass(frozen=True)
class Draft:
    """Items that are made when the page is: by reading voxels, say. If that fails, a sentence stands in their place.

    Attributes:
        title: of what is made, for that sentence.
        make: returns the items; none where there is nothing to show.
        section: title of the section that they stand in, with those of other drafts of the same one.
    """

    title: str
    make: Callable[[], Sequence[Item]]
    section: str = "Pictures"


@dataclass(frozen=True)
class PageSection:
    """Items below one title."""

    title: str
    items: Sequence[Item]


@dataclass(frozen=True)
class Page:
    """A report.

    Attributes:
        title: what was made.
        state: one word or a few: complete, running, interrupted, 3 parts missing.
        is_well: whether that is how it should be.
        line: one sentence below the title.
    """

    title: str
    state: str
    sections: Sequence[PageSection]
    is_well: bool = True
    line: str = ""


def columns_of(names: Sequence[str], rows: Sequence[Sequence[object]]) -> dict[str, list[object]]:
    """Return the data of a chart from its rows."""
    return {name: [row[i] for row in rows] for i, name in enumerate(names)}


def filled(sheet: Sheet) -> Sheet:
    """Return `sheet` without columns that are empty in every line; the first stays."""
    shown = [i for i in range(len(sheet.names)) if not i or any(row[i] not in ("", None) for row in sheet.rows)]
    rows = [[row[i] for i in shown] for row in sheet.rows]
    return replace(sheet, names=[sheet.names[i] for i in shown], rows=rows)


def sections_of(drafts: Iterable[Draft]) -> list[PageSection]:
    """Return the sections that `drafts` make, in their order; where one fails, a sentence stands in its place."""
    items: dict[str, list[Item]] = {}
    for draft in drafts:
        section = items.setdefault(draft.section, [])
        try:
            section += draft.make()
        except Exception as error:  # whatever it is, the rest of the report is worth having
            log.info("%s: cannot be made for the report", draft.title, exc_info=True)
            section.append(Sentence(f"{draft.title}: it cannot be made ({reason_of(error)}).", "warning"))
    return [PageSection(title, inner) for title, inner in items.items() if inner]


def reason_of(error: Exception) -> str:
    """Return why something cannot be shown, on one line."""
    return str(error) if isinstance(error, VolpipeError) else describe_error(error)
