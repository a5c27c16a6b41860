"""What every command prints, on both streams, with which exit code and which files: refusals included.

The pages in golden/ are run as those of docs/ are; `scripts/pages golden` writes what they show anew. A change that
means to change no output changes none of them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import ROOT
from runner import WRITE, rewrite, run_page

PAGES = sorted((ROOT / "tests" / "docs" / "golden").glob("*.md"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", PAGES, ids=[path.stem for path in PAGES])
def test_golden_page_shows_what_its_commands_print(path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    page = run_page(path, tmp_path_factory.mktemp("g") / "page")
    if os.environ.get(WRITE):
        rewrite(page)
    else:
        assert [(block.line, printed) for block, printed in page.texts] == []


def test_every_command_stands_on_a_golden_page() -> None:
    from volpipe.cli.groups import commands

    given = set(re.findall(r"^(?:for .* )?golden (\w+)", "\n".join(map(Path.read_text, PAGES)), re.MULTILINE))
    assert {entry.name for entries in commands().values() for entry in entries} <= given
