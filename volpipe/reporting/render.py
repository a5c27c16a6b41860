"""A report as one HTML file that needs no network: Jinja2 escapes every text, Vega-Lite draws the charts.

Not here: what stands on it (page). The file stays below MOST_BYTES whatever it is given: pictures, charts and lines of
tables that are too much are left out, and a sentence stands in their place.
"""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import volpipe
from volpipe.reporting.page import Chart, Facts, Item, Link, Page, Picture, Sheet
from volpipe.volumes.storage.paths import whole_file

FOLDER = Path(__file__).parent
SCRIPTS = ("vega", "vega-lite", "vega-embed")
MOST_BYTES = 3_000_000  # of a page
MOST_PICTURES = 1_200_000  # of these, of all pictures in base64
MOST_CHARTS = 600_000  # of the data of all charts
MOST_TEXT = 300_000  # of the cells of tables and facts
MOST_CELL = 2_000  # characters of one
SHORT = 14  # characters of a text that is not broken
NUMBER = re.compile(
    r"[≈≤<+−-]* ?(\d[\d,.]*(e[+-]?\d+)?|nan|inf)( ?(%|×|[KMGTP]?iB|B|m?s|dB|days|years|h \d+ min|min \d+ s))?"
)


@dataclass
class _Budget:
    """Bytes that are left for pictures, charts and texts of a page."""

    pictures: int = MOST_PICTURES
    charts: int = MOST_CHARTS
    text: int = MOST_TEXT

    def takes(self, kind: str, num_bytes: int) -> bool:
        """Return whether there was room for so many bytes of `kind`, which is taken then."""
        left = getattr(self, kind) - num_bytes
        if left < 0:
            return False
        setattr(self, kind, left)
        return True


@dataclass(frozen=True)
class _Cell:
    """A cell of a table as the template shows it; the head of a column says whether that has numbers."""

    text: str
    is_number: bool = False
    is_short: bool = False
    target: str = ""
    image: str = ""


@dataclass(frozen=True)
class _View:
    """An item as the template shows it: `kind` is the macro of it; others are what that reads."""

    kind: str
    title: str = ""
    caption: str = ""
    lines: Sequence[Any] = ()  # Any: of facts, names and their values; of a table, rows of cells, each with a sentence
    heads: Sequence[_Cell] = ()
    image: str = ""
    is_pixelated: bool = False
    is_wide: bool = False
    spec: Mapping[str, object] = field(default_factory=dict)


def write_page(page: Page, file: Path) -> int:
    """Write `page` to `file`, whole or not at all, and return its bytes."""
    data = render(page).encode()
    with whole_file(file, lasting=False) as partial:  # it can be made again at any time
        partial.write_bytes(data)
    return len(data)


def render(page: Page) -> str:
    """Return `page` as HTML."""
    budget = _Budget()
    sections = [(section, [_view(item, budget) for item in section.items]) for section in page.sections]
    charts = any(view.kind == "chart" for _, views in sections for view in views)
    facts = {"version": volpipe.__version__, "moment": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}
    result: str = _template().render(page=page, sections=sections, scripts=_scripts() if charts else (), **facts)
    return result


@cache  # it is compiled once
def _template() -> Any:  # Any: jinja2.Template, which is imported where it is used
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(FOLDER)
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    return Environment(loader=loader, autoescape=True, **options).get_template("page.html")


@cache
def _scripts() -> list[tuple[str, str]]:
    """Return licence and code of each script; none of them holds what would end its element."""
    files = [(FOLDER / "vega" / f"LICENSE.{name}", FOLDER / "vega" / f"{name}.min.js") for name in SCRIPTS]
    pairs = [(a.read_text(encoding="utf-8"), b.read_text(encoding="utf-8")) for a, b in files]
    return [(licence, code.partition("//# sourceMappingURL")[0]) for licence, code in pairs]


def _view(item: Item, budget: _Budget) -> _View:
    if isinstance(item, Facts):
        return _facts(item, budget)
    if isinstance(item, Sheet):
        return _table(item, budget)
    if isinstance(item, Picture):
        return _picture(item, budget)
    if isinstance(item, Chart):
        return _chart(item, budget)
    return _View(item.kind, caption=item.text)


def _left_out(item: Picture | Chart, reason: str) -> _View:
    return _View("remark", item.title, f"{item.title}: left out, {reason}.")


def _facts(facts: Facts, budget: _Budget) -> _View:
    lines = []
    for name, value in facts.entries.items():
        values = [_clipped(text) for text in ([value] if isinstance(value, str) else value)]
        fitting = [text for text in values if budget.takes("text", len(text.encode()) + 40)]
        more = [f"… and {len(values) - len(fitting):,} more"] if len(fitting) < len(values) else []
        lines.append((_clipped(name), fitting + more))
    return _View("facts", facts.title, lines=lines)


def _table(sheet: Sheet, budget: _Budget) -> _View:
    rows, remarks = list[list[_Cell]](), list(map(_clipped, sheet.remarks)) or [""] * len(sheet.rows)
    for row, remark in zip(sheet.rows, remarks, strict=True):
        cells = [_cell(value, budget) for value in row]
        texts = [remark, *(cell.text + cell.target for cell in cells)]
        if not budget.takes("text", sum(len(text.encode()) + 20 for text in texts)):
            break
        rows.append(cells)
    more = len(sheet.rows) - len(rows)
    caption = f"{sheet.caption} {more:,} more lines are not shown: the page would be too large.".strip()
    columns = [[row[i] for row in rows] for i in range(len(sheet.names))]
    heads = [
        _Cell(name, is_number=_is_numeric(cells), is_short=all(len(cell.text) <= SHORT for cell in cells))
        for name, cells in zip(sheet.names, columns, strict=True)
    ]
    lines = list(zip(rows, remarks, strict=False))
    return _View("table", sheet.title, caption if more else sheet.caption, lines=lines, heads=heads)


def _is_numeric(cells: Sequence[_Cell]) -> bool:
    """Return whether a column has numbers, and beside them nothing."""
    texts = [cell.text for cell in cells if cell.text]
    return bool(texts) and all(NUMBER.fullmatch(text) for text in texts)


def _cell(value: object, budget: _Budget) -> _Cell:
    if isinstance(value, Link):
        image = _data_url(value.image, value.media_type)
        fits = bool(value.image) and budget.takes("pictures", len(image))
        return _Cell(_clipped(value.text), target=quote(value.target), image=image if fits else "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return _Cell("" if value is None else _clipped(str(value)))
    return _Cell(f"{value:,}" if isinstance(value, int) else f"{value:,.4g}")


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_CELL else f"{text[:MOST_CELL]} …"


def _data_url(image: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(image).decode()}"


def _picture(picture: Picture, budget: _Budget) -> _View:
    url = _data_url(picture.image, picture.media_type)
    if not budget.takes("pictures", len(url)):
        return _left_out(picture, "as the page would be too large")
    return _View(
        "picture", picture.title, picture.caption,
        image=url, is_pixelated=picture.is_pixelated, is_wide=picture.is_wide,
    )  # fmt: skip


def _chart(chart: Chart, budget: _Budget) -> _View:
    columns = {name: list(map(_plain, _listed(column))) for name, column in chart.data.items()}
    if not budget.takes("charts", len(json.dumps(columns, separators=(",", ":")))):
        return _left_out(chart, "as the page would be too large")
    spec = json.loads((FOLDER / "charts" / f"{chart.kind}.json").read_text(encoding="utf-8"))
    spec = _merged(spec, chart.changes) | ({"height": chart.height} if chart.height else {})
    return _View("chart", chart.title, chart.caption, spec={"spec": spec, "columns": columns})


def _listed(column: Sequence[object]) -> list[object]:
    """Return a list of Python's own values of a list or an array of numpy."""
    as_list = getattr(column, "tolist", None)
    return list(column) if as_list is None else as_list()


def _plain(value: object) -> object:
    """Return a value as JSON has it: what is no number in one of floating point is none at all."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Return `old` with the values of `new`, objects merged."""
    result = dict(old)
    for key, value in new.items():
        inner = result.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return result
