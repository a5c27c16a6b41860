"""The tables of docs/formats.md: what volpipe reads and writes, as the objects of the formats say.

The text around them is written by hand. A table lies between two comments, `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from volpipe.volumes.formats.format import Format
from volpipe.volumes.formats.known import FORMATS

TABLE = re.compile(r"(?<=<!-- table: )(\w+) -->\n.*?\n(?=<!-- end -->)", re.DOTALL)


def read_table(formats: Sequence[Format] = FORMATS) -> str:
    """Return the table of formats that volpipe reads."""
    rows = [(row.title, row.reads, row.voxel_size) for row in (each.row for each in formats) if row is not None]
    return "\n".join(["| format | what is read | voxel size from |", "|---|---|---|", *map(_row, rows)])


def written_table(formats: Sequence[Format] = FORMATS) -> str:
    """Return the table of formats that `volpipe convert` writes."""
    head = [
        "| `--format` | chosen by | codec, the default first | shards | to `s3://` | limits |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for each in formats:
        if each.writing is None:
            continue
        suffixes, codecs = ", ".join(f"`{suffix}`" for suffix in each.suffixes), ", ".join(each.writing.codecs)
        is_sharded, is_folder = each.arrays is not None and each.arrays.is_sharded, each.arrays is not None
        limits = [
            each.writing.limits,
            "" if each.writing.has_record else "keeps no [record](concepts/provenance.md#keep-it)",
        ]
        cells = (f"`{each.name}`", suffixes, codecs, _yes(is_sharded), _yes(is_folder), "; ".join(filter(None, limits)))
        rows.append(_row(cells))
    return "\n".join([*head, *rows])


def page(path: Path, formats: Sequence[Format] = FORMATS) -> str:
    """Return the page at `path` with its tables as the code has them."""
    tables: Mapping[str, str] = {"read": read_table(formats), "written": written_table(formats)}
    text, number = TABLE.subn(lambda table: f"{table[1]} -->\n\n{tables[table[1]]}\n\n", path.read_text("utf-8"))
    if number != len(tables):
        raise SystemExit(f"{path} has {number} of the {len(tables)} tables; put the comments back")
    return text


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "–"
