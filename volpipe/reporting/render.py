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
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import volpipe
from volpipe.reporting.page import Chart, FactTable, Item, Page, Picture, ReportLink, Sentence, Sheet
from volpipe.volumes.storage.paths import whole_file

FOLDER = Path(__file__).parent
WRITER = "volpipe"  # of pages in the folders of works; that of a file which an option names is the option
SCRIPTS = ("vega", "vega-lite", "vega-embed")
MOST_BYTES = 3_000_000  # of a page
MOST_PICTURES = 1_200_000  # of these, of all pictures in base64
MOST_CHARTS = 600_000  # of the data of all charts
MOST_TEXT = 300_000  # of the cells of tables and facts
MOST_CELL = 2_000  # characters of one
SHORT = 14  # characters of a text that is not broken
MACROS: dict[type[Item], str] = {
    FactTable: "facts", Sheet: "sheet", Picture: "picture", Chart: "chart", Sentence: "note",
}  # fmt: skip  # of page.html, and classes of its style sheet
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


def write_page(page: Page, file: Path) -> int:
    """Write `page` to `file` of a folder of ours, whole or not at all, and return its bytes."""
    data = render(page).encode()
    with whole_file(file, lasting=False) as partial:  # it can be made again at any time
        partial.write_bytes(data)
    return len(data)


def render(page: Page, writer: str = WRITER) -> str:
    """Return `page` as HTML that names `writer` as what made it."""
    budget = _Budget()
    sections = [
        replace(section, items=[_within_budget(item, budget) for item in section.items]) for section in page.sections
    ]
    charts = any(isinstance(item, Chart) for section in sections for item in section.items)
    facts = {
        "version": volpipe.__version__,
        "writer": writer,
        "moment": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    }
    result: str = _template().render(page=page, sections=sections, scripts=_scripts() if charts else (), **facts)
    return result


@cache  # it is compiled once
def _template() -> Any:  # Any: jinja2.Template, which is imported where it is used
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(FOLDER)
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=loader, autoescape=True, **options)
    environment.filters |= {"data_url": _data_url, "heads": _heads, "drawing": _drawing}
    environment.globals["macro_of"] = lambda item: MACROS[type(item)]
    return environment.get_template("page.html")


@cache
def _scripts() -> list[tuple[str, str]]:
    """Return licence and code of each script; none holds text that would end its element of the page."""
    files = [(FOLDER / "vega" / f"LICENSE.{name}", FOLDER / "vega" / f"{name}.min.js") for name in SCRIPTS]
    pairs = [(a.read_text(encoding="utf-8"), b.read_text(encoding="utf-8")) for a, b in files]
    return [(licence, code.partition("//# sourceMappingURL")[0]) for licence, code in pairs]


# ---- what fits into a page


def _within_budget(item: Item, budget: _Budget) -> Item:
    """Return `item`, cut to the room that is left; a sentence in place of a picture or chart that is too large."""
    match item:
        case FactTable():
            entries = {_clipped(name): _values(value, budget) for name, value in item.entries.items()}
            return replace(item, entries=entries)
        case Sheet():
            return _sheet_within_budget(item, budget)
        case Picture() if not budget.takes("pictures", len(_data_url(item))):
            return _left_out(item)
        case Chart():
            columns = {name: _json_values(column) for name, column in item.data.items()}
            fits = budget.takes("charts", len(json.dumps(columns, separators=(",", ":"))))
            return replace(item, data=columns) if fits else _left_out(item)
    return item


def _left_out(item: Picture | Chart) -> Sentence:
    return Sentence(f"{item.title}: left out, as the page would be too large.")


def _values(value: str | Sequence[str], budget: _Budget) -> list[str]:
    values = [_clipped(text) for text in ([value] if isinstance(value, str) else value)]
    fitting = [text for text in values if budget.takes("text", len(text.encode()) + 40)]
    return fitting + ([f"… and {len(values) - len(fitting):,} more"] if len(fitting) < len(values) else [])


def _sheet_within_budget(sheet: Sheet, budget: _Budget) -> Sheet:
    """Return `sheet` with cells of texts and links alone, and a sentence on the rows that are left out."""
    rows, remarks = list[list[str | ReportLink]](), list(map(_clipped, sheet.remarks)) or [""] * len(sheet.rows)
    for row, remark in zip(sheet.rows, remarks, strict=True):
        cells = [_cell_within_budget(value, budget) for value in row]
        texts = [remark, *(cell if isinstance(cell, str) else cell.text + cell.target for cell in cells)]
        if not budget.takes("text", sum(len(text.encode()) + 20 for text in texts)):
            break
        rows.append(cells)
    more = len(sheet.rows) - len(rows)
    caption = f"{sheet.caption} {more:,} more lines are not shown: the page would be too large.".strip()
    return replace(sheet, rows=rows, remarks=remarks[: len(rows)], caption=caption if more else sheet.caption)


def _cell_within_budget(value: object, budget: _Budget) -> str | ReportLink:
    if isinstance(value, ReportLink):
        fits = bool(value.image) and budget.takes("pictures", len(_data_url(value)))
        return replace(value, text=_clipped(value.text), target=quote(value.target), image=value.image * fits)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "" if value is None else _clipped(str(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _clipped(text: str) -> str:
    return text if len(text) <= MOST_CELL else f"{text[:MOST_CELL]} …"


# ---- what the template asks for


def _heads(sheet: Sheet) -> list[tuple[str, str]]:
    """Return name and kind of each column: numbers, short texts, or texts."""
    rows = [[cell.text if isinstance(cell, ReportLink) else str(cell) for cell in row] for row in sheet.rows]
    return [(name, _column_kind([row[i] for row in rows])) for i, name in enumerate(sheet.names)]


def _column_kind(texts: Sequence[str]) -> str:
    if any(texts) and all(NUMBER.fullmatch(text) for text in texts if text):
        return "number"
    return "short" if all(len(text) <= SHORT for text in texts) else ""


def _data_url(item: Picture | ReportLink) -> str:
    return f"data:{item.media_type};base64,{base64.b64encode(item.image).decode()}"


def _drawing(chart: Chart) -> dict[str, object]:
    """Return the specification of a chart and its data."""
    spec = json.loads((FOLDER / "charts" / f"{chart.kind}.json").read_text(encoding="utf-8"))
    return {"spec": _merged(spec, chart.changes), "columns": chart.data}


def _json_values(column: Sequence[object]) -> list[object]:
    """Return the values of a list, or of an array of numpy, as JSON has them: no number that is not finite."""
    as_list = getattr(column, "tolist", None)
    values = list(column) if as_list is None else as_list()
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Return `old` with the values of `new`, objects merged."""
    result = dict(old)
    for key, value in new.items():
        inner = result.get(key)
        both = isinstance(value, Mapping) and isinstance(inner, Mapping)
        result[key] = _merged(inner, value) if both else value  # type: ignore[arg-type]
    return result
