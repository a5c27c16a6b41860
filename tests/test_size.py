"""Lines and bytes of each part of the repository stay below numbers that only go down."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Lines and bytes of the Python files in a folder, and bytes of texts but the pages of docs/reference, which the code
# gives. Who needs more says in the commit for which user.
MOST = {
    "apps": (3_350, 153_000),
    "scripts": (7_000, 297_000),
    "tests": (64_060, 2_924_000),
    "volpipe": (72_890, 3_263_000),
    "volpipe/api": (2_030, 89_000),
    "volpipe/blockwise": (3_200, 129_000),
    "volpipe/cli": (3_120, 133_000),
    "volpipe/display": (1_740, 78_000),
    "volpipe/estimation": (2_900, 132_000),
    "volpipe/evaluation": (3_750, 181_000),
    "volpipe/geometry": (1_220, 58_000),
    "volpipe/inference": (5_170, 237_000),
    "volpipe/monitoring": (1_120, 46_000),
    "volpipe/nets": (6_120, 283_000),
    "volpipe/notebook": (1_720, 79_000),
    "volpipe/recipes": (2_230, 108_000),
    "volpipe/reporting": (2_540, 115_000),
    "volpipe/runs": (4_740, 211_000),
    "volpipe/segmentation": (3_260, 147_000),
    "volpipe/sites": (550, 21_000),
    "volpipe/synthetic": (750, 35_000),
    "volpipe/training": (4_910, 226_000),
    "volpipe/viewer": (1_810, 77_000),
    "volpipe/volumes": (14_310, 635_000),
    "volpipe/workflow": (5_280, 235_000),
}
TEXT = {"docs": 298_000, "CHANGELOG.md": 10_000}


def python_files(folder: str) -> list[Path]:
    return [file for file in (ROOT / folder).rglob("*.py") if "__pycache__" not in file.parts]


@pytest.mark.parametrize("folder", sorted(MOST))
def test_a_part_is_no_larger_than_it_was(folder: str) -> None:
    texts = [file.read_bytes() for file in python_files(folder)]
    lines, size = sum(text.count(b"\n") for text in texts), sum(map(len, texts))
    most_lines, most_bytes = MOST[folder]
    assert lines <= most_lines and size <= most_bytes, f"{folder} has {lines:,} lines and {size:,} bytes"


def test_every_package_has_its_numbers() -> None:
    packages = {f"volpipe/{file.parent.name}" for file in (ROOT / "volpipe").glob("*/__init__.py")}
    assert packages <= set(MOST)


@pytest.mark.parametrize("place", sorted(TEXT))
def test_texts_are_no_longer_than_they_were(place: str) -> None:
    pages = (ROOT / place).rglob("*.md") if (ROOT / place).is_dir() else [ROOT / place]
    size = sum(page.stat().st_size for page in pages if page.parent.name != "reference")
    assert size <= TEXT[place], f"{place} has {size:,} bytes"
