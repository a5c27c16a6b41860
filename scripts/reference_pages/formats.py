"""The tables of docs/formats.md: what volpipe reads and writes, from the modules of the formats and of `convert`.

The text around them is written by hand. A table lies between two comments, `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from volpipe.volumes import convert
from volpipe.volumes.formats.container import ARRAY_FORMATS, FILES, SHARDED
from volpipe.volumes.storage.metadata import Facts

READ = ("n5", "zarr", "precomputed", "hdf5", "tiff", "tiff_folder", "picture", "mrc", "npy")
MODULES = {"zarr2": "zarr", "zarr3": "zarr"}  # by array format, where the module has another name
TABLE = re.compile(r"(?<=<!-- table: )(\w+) -->\n.*?\n(?=<!-- end -->)", re.DOTALL)


def facts_of(module: str) -> Facts:
    """Return the facts of a module of volpipe.volumes.formats."""
    facts = import_module(f"volpipe.volumes.formats.{module}").FACTS
    assert isinstance(facts, Facts)
    return facts


def module_of(name: str) -> str:
    """Return the module of a format that `convert` writes."""
    stored = ARRAY_FORMATS.get(name, name)
    return MODULES.get(stored, stored)


def read_table() -> str:
    """Return the table of formats that volpipe reads.

    Raises:
        SystemExit: the code knows a format that READ lacks.
    """
    if missing := {*FILES, *map(module_of, convert.FORMATS)} - set(READ):
        raise SystemExit(f"formats not in scripts/reference_pages/formats.py: {', '.join(sorted(missing))}")
    rows = [(facts.title, facts.reads, facts.voxel_size) for facts in map(facts_of, READ)]
    return "\n".join(["| format | what is read | voxel size from |", "|---|---|---|", *map(_row, rows)])


def written_table() -> str:
    """Return the table of formats that `volpipe convert` writes."""
    head = [
        "| `--format` | chosen by | codec, the default first | shards | to `s3://` | limits |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for name, codecs in convert.CODECS.items():
        suffixes = [f"`{suffix}`" for suffix, format in convert.SUFFIXES.items() if format == name]
        is_sharded, is_folder = ARRAY_FORMATS.get(name) in SHARDED, name in ARRAY_FORMATS
        limits = facts_of(module_of(name)).limits
        cells = (f"`{name}`", ", ".join(suffixes), ", ".join(codecs), _yes(is_sharded), _yes(is_folder), limits)
        rows.append(_row(cells))
    return "\n".join([*head, *rows])


def page(path: Path) -> str:
    """Return the page at `path` with its tables as the code has them."""
    tables: Mapping[str, str] = {"read": read_table(), "written": written_table()}
    text, number = TABLE.subn(lambda table: f"{table[1]} -->\n\n{tables[table[1]]}\n\n", path.read_text("utf-8"))
    if number != len(tables):
        raise SystemExit(f"{path} has {number} of the {len(tables)} tables; put the comments back")
    return text


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _yes(value: bool) -> str:
    return "yes" if value else "–"
