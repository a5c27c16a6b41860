"""Every table of scores on a page or a card says from which box they are: learned from, held out, or test."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

PAGES = sorted(
    path for folder in ("docs", "models") for path in (ROOT / folder).rglob("*.md") if "reference" not in path.parts
)
BOX = re.compile(r"\*Box: (test|held out|learned from)\b")
SCORE = re.compile(r"\b(PSNR|SSIM|AUC|accuracy|VOI|bits|Rand|Dice|dB|FSC)\b")
PRINTED = re.compile(r"PSNR dB|VOI split|adapted Rand|mean Dice|^(?:held out|test): \w+ [\d.]+|psnr \d")
DECIMAL = re.compile(r"\d\.\d")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield the blocks of a page: their kind, "table", "code" or "text", and their lines."""
    for part in re.split(r"\n(?=```)|(?<=```)\n|\n\s*\n", re.sub(r"(?ms)^```.*?^```$", sealed, text)):
        lines = part.strip("\n").replace("\0", "\n")
        if lines.strip():
            kind = "code" if lines.startswith("```") else "table" if lines.lstrip().startswith("|") else "text"
            yield kind, lines


def sealed(match: re.Match[str]) -> str:
    """Return a block of code in one line."""
    return match[0].replace("\n", "\0")


def unnamed(text: str) -> list[str]:
    """Return the first lines of tables, and of blocks that a command printed, with scores of no box."""
    page, faults = [each for each in blocks(text) if not each[1].startswith("<!--")], []
    for number, (kind, lines) in enumerate(page):
        head, *rows = lines.splitlines()
        is_scores = kind == "table" and bool(SCORE.search(head)) and bool(DECIMAL.search("".join(rows)))
        is_printed = kind == "code" and any(PRINTED.search(row) and DECIMAL.search(lines) for row in rows)
        around = [page[at][1] for at in (number - 1, number + 1) if 0 <= at < len(page) and page[at][0] == "text"]
        if (is_scores or is_printed) and not any(BOX.search(each) for each in around):
            faults.append(head if kind == "table" else next(row for row in rows if PRINTED.search(row)))
    return faults


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(Path(path).relative_to(ROOT)))
def test_scores_say_from_which_box_they_are(page: Path) -> None:
    assert not unnamed(page.read_text(encoding="utf-8"))


def test_a_table_of_scores_without_a_box_is_found() -> None:
    table = "Scores of the net.\n\n| | PSNR dB |\n|---|---|\n| net | 31.2 |\n"
    printed = "It prints:\n\n```text\n\nadapted Rand error  0.12\n```\n"
    assert unnamed(table) == ["| | PSNR dB |"] and unnamed(printed) == ["adapted Rand error  0.12"]
    for text in (table, printed):
        assert not unnamed(f"{text}\n*Box: test*, of a seed that chose nothing.\n")
        assert unnamed(f"# Head\n\n{text}\n# Next\n\n*Box: test*\n\nMore.\n\n{text}")
    assert not unnamed("| score | PSNR |\n|---|---|\n| what | it hides blur |\n")
