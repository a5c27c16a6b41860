"""Tables of results as HTML, by which they show themselves in a notebook, every text escaped; and as lines of text.

Not here: the tables of the command line (display), or what stands in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def html_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "", marked: int | None = None
) -> str:
    """Return a table with the names of its columns in `head`, and a line for each of `rows`; `marked` is in bold."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    bold = ' style="font-weight:bold"'
    body = "".join(f"<tr{bold if i == marked else ''}>{line}</tr>" for i, line in enumerate(lines))
    return f"<table>{_caption(caption)}<tr>{titles}</tr>{body}</table>"


def html_facts(facts: Mapping[str, object], *, caption: str = "") -> str:
    """Return a table of names and values, one a line."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<table>{_caption(caption)}{''.join(lines)}</table>"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return `rows` below `head` as lines of text, in columns."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join(line.rstrip() for line in lines)


def _caption(text: str) -> str:
    return f"<caption>{escape(text)}</caption>" if text else ""
