"""Tables of results as HTML, by which they show themselves in a notebook; every text in them is escaped.

Not here: the tables of the command line (display), or what stands in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape


def html_table(head: Sequence[str], rows: Iterable[Sequence[object]], *, caption: str = "") -> str:
    """Return a table with the names of its columns in `head`, and a line for each of `rows`."""
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return f"<table>{_caption(caption)}<tr>{titles}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def html_facts(facts: Mapping[str, object], *, caption: str = "") -> str:
    """Return a table of names and values, one a line."""
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in facts.items())
    return f"<table>{_caption(caption)}{''.join(lines)}</table>"


def _caption(text: str) -> str:
    return f"<caption>{escape(text)}</caption>" if text else ""
