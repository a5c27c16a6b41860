"""Lines and bytes of each part of the repository stay below numbers that only go down."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Lines and bytes of the Python files in a folder, and bytes of texts but the pages of docs/reference, which the code
# gives. Who needs more says in the commit for which user.
MOST = {
    "apps": (3_380, 153_000),
    "scripts": (6_790, 289_000),
    "tests": (61_370, 2_782_000),
    "volpipe": (70_400, 3_135_000),
    "volpipe/api": (1_990, 89_000),
    "volpipe/blockwise": (3_160, 125_000),
    "volpipe/cli": (3_240, 134_000),
    "volpipe/display": (1_780, 79_000),
    "volpipe/estimation": (3_180, 143_000),
    "volpipe/evaluation": (2_690, 126_000),
    "volpipe/geometry": (1_220, 58_000),
    "volpipe/inference": (5_190, 238_000),
    "volpipe/monitoring": (1_170, 49_000),
    "volpipe/nets": (5_990, 276_000),
    "volpipe/notebook": (1_970, 89_000),
    "volpipe/recipes": (1_850, 89_000),
    "volpipe/reporting": (2_510, 112_000),
    "volpipe/runs": (4_870, 218_000),
    "volpipe/segmentation": (3_430, 156_000),
    "volpipe/sites": (550, 21_000),
    "volpipe/synthetic": (750, 35_000),
    "volpipe/training": (3_770, 168_000),
    "volpipe/viewer": (1_990, 86_000),
    "volpipe/volumes": (14_330, 638_000),
    "volpipe/workflow": (4_380, 196_000),
}
TEXT = {"docs": 262_000, "CHANGELOG.md": 7_000}


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
