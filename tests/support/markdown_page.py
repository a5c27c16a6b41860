"""Pages of Markdown as tests read them: their blocks of code, and the comments that say how these are run.

A page is README.md or a file below docs/. What a block may be:

    ```bash                 run, in the page's folder, after the blocks above it; must end with 0
    ```python               run likewise; a page is one namespace
    ```console              lines that begin with "$ " are run, the others are what they print
    ```text                 what the last block that is run prints; "…" stands for anything, alone on a line for lines
    ```toml, yaml, json     must be readable as that; csv, html, dockerfile, mermaid and bibtex are not looked at
    # NAME.EXT, NAME.EXT: … on the first line of a block of toml, python or yaml: it is a file of that name, and not run
    ```diff                 changes of files of the page's folder: `--- NAME`, then hunks, with `@@` between two

Comments, each on a line of its own:

    <!-- fixture: a, b -->      prepares the page's folder from here on, by functions of fixtures.py
    <!-- file: NAME -->         the next block is written to that file, and not run
    <!-- ends with: 1 -->       the next block of bash ends with that exit code
    <!-- not run: REASON -->    the next block is not run, or a text not compared; REASON is one of runner.REASONS
    <!-- long -->               the next block, and its text, are run by `pytest -m long` alone
    <!-- long from here -->     so is the rest of the page

Not here: how blocks are run (runner).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,})(?P<language>[\w+-]*)[^`\n]*$")
COMMENT = re.compile(
    r"^ *<!-- *(?P<verb>fixture|file|ends with|not run|long from here|long)(?:: *(?P<value>.*?))? *-->$"
)
FILE = re.compile(r"^(?:#|//) ([\w./-]+\.(?:toml|py|yaml|yml|csv|txt|ini))(?::.*)?$")
RUN = ("bash", "python", "console")
SHOWN = ("text",)
DATA = ("toml", "yaml", "json")
CHANGES = ("diff",)
OTHER = ("csv", "html", "dockerfile", "mermaid", "bibtex", "ini", "slurm", "yml")
LANGUAGES = (*RUN, *SHOWN, *DATA, *CHANGES, *OTHER)


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    Attributes:
        line: of its opening fence, from 1.
        fixtures: what must be prepared before it.
        file: the name of the file that it is; "" if none.
        not_run: why it is not run; "" where it is.
        code: the exit code that it ends with.
        is_long: whether it is run by `pytest -m long` alone.
    """

    language: str
    text: str
    line: int
    fixtures: tuple[str, ...] = ()
    file: str = ""
    not_run: str = ""
    code: int = 0
    is_long: bool = False

    @property
    def is_run(self) -> bool:
        return self.language in RUN and not self.file and not self.not_run


def pages() -> list[Path]:
    """Return all pages that are written by hand; docs/reference is written by the code, and has a test of its own."""
    written = (path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "reference")
    return [ROOT / "README.md", *sorted(written)]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    return list(_blocks(text.splitlines()))


def fixtures_of(text: str) -> set[str]:
    """Return the names of all fixtures of a page."""
    return {name for block in blocks_of(text) for name in block.fixtures}


def _blocks(lines: list[str]) -> Iterator[Block]:
    blank = Block("", "", 0)
    coming, is_long, number = blank, False, 0
    while number < len(lines):
        if comment := COMMENT.match(lines[number]):
            is_long |= comment["verb"] == "long from here"
            coming = _noted(coming, comment["verb"], comment["value"] or "")
        elif fence := FENCE.match(lines[number]):
            end = _end_of(lines, number, fence["ticks"])
            body = [line[len(fence["indent"]) :] for line in lines[number + 1 : end]]
            first = FILE.match(body[0]) if body else None
            file = coming.file or (first[1] if first else "")
            yield replace(
                coming, language=fence["language"], text="\n".join(body) + "\n", line=number + 1, file=file,
                is_long=coming.is_long or is_long,
            )  # fmt: skip
            coming, number = blank, end
        number += 1


def _noted(block: Block, verb: str, value: str) -> Block:
    """Return the block that comes, with what a comment says of it."""
    match verb:
        case "fixture":
            return replace(block, fixtures=(*block.fixtures, *(name.strip() for name in value.split(","))))
        case "file":
            return replace(block, file=value)
        case "ends with":
            return replace(block, code=int(value))
        case "not run":
            return replace(block, not_run=value)
        case "long":
            return replace(block, is_long=True)
    return block


def _end_of(lines: list[str], start: int, ticks: str) -> int:
    """Return the line of the fence that closes the one at `start`."""
    for number in range(start + 1, len(lines)):
        if lines[number].strip() == ticks:
            return number
    raise ValueError(f"line {start + 1}: this block is never closed")
