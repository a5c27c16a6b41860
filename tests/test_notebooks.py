"""Notebooks run from their first cell to their last, and store what their cells show."""

from __future__ import annotations

import html
import io
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from notebooks import FOLDER, KERNEL, executed

# of each notebook
PICTURES = {"tiles": 5, "your_net": 4, "seams": 5, "superres": 4, "segmentation": 4, "labels_to_objects": 3}
MOST_BYTES = 400_000
NUMBER = re.compile(r"\d[\d.,]*(?:e[-+]\d+)?|never")  # also where there is none
MEASURED = re.compile(r"[\d.,]+ (?:(?:h|min) \d+ (?:min|s)|s|B|[KMG]iB)\b")  # of this machine
LARGEST = re.compile(r"<table><caption>the largest objects.*?</table>")  # those of nearly one size may change places
PATHS = re.compile(r"/(work|home|root|tmp|usr|var|dev)/|[A-Z]:\\|\.pyenv")


def outputs_of(notebook: Any) -> list[Any]:  # Any: nbformat's
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def pictures_of(notebook: Any) -> list[np.ndarray]:
    """Return the pictures (y, x), grey, that a notebook holds."""
    pngs = [output.data["image/png"] for output in outputs_of(notebook) if "image/png" in output.get("data", {})]
    return [np.asarray(Image.open(io.BytesIO(b64decode(png))).convert("L"), np.float64) for png in pngs]


def texts_of(notebook: Any) -> list[list[str]]:
    """Return what each cell shows, as text and as tables, without times, bytes and spaces."""
    return [
        [" ".join(MEASURED.sub("…", shown(output)).split()) for output in cell.get("outputs", ())]
        for cell in notebook.cells
    ]


def shown(output: Any) -> str:  # Any: nbformat's
    data = output.get("data", {})
    table = html.unescape(re.sub("<[^>]*>", " ", LARGEST.sub("", str(data.get("text/html", "")))))
    return f"{data.get('text/plain', output.get('text', ''))} {table} {' '.join(sorted(data))}"


def words_of(text: str) -> str:
    return NUMBER.sub("#", text)


def numbers_of(text: str) -> list[float]:
    """Return the numbers of a text; a correlation that never falls is one of all frequencies, up to 0.5."""
    matches = [match.group().rstrip(".,").replace(",", "") for match in NUMBER.finditer(text)]
    return [0.5 if match == "never" else float(match) for match in matches if match.count(".") < 2]


def is_near(now: float, stored: float) -> bool:
    """Return whether two numbers are the same, but for how another machine rounds and divides work."""
    low, high = sorted((now, stored))
    if low == 0 or high < 1e-3:  # nothing missing is nothing; and what is rounding alone
        return high == 0 or (low > 0 and high <= 10 * low)
    slack = 3 if now % 1 == stored % 1 == 0 else 0  # of counts
    return high - low <= max(0.2 * high, slack)


@pytest.mark.parametrize(
    ("stored", "now", "is_same"),
    [
        ("RMSE 2.215, PSNR 41.22 dB, largest 24", "RMSE 2.3, PSNR 41.02 dB, largest 23", True),
        ("RMSE 2.215, PSNR 41.22 dB", "RMSE 4.43, PSNR 35.2 dB", False),
        ("objects 38, 1,204 voxels", "objects 40, 1,199 voxels", True),
        ("objects 38", "objects 12", False),
        ("missing 0", "missing 1", False),
        ("RMSE 7.31e-06", "RMSE 2.1e-05", True),
        ("RMSE 7.31e-06", "RMSE 0.0211", False),
        ("FSC never", "FSC 0.43", True),
        ("FSC never", "FSC 0.2", False),
    ],
)
def test_a_number_that_changes_grossly_is_noticed(stored: str, now: str, is_same: bool) -> None:
    assert words_of(stored) == words_of(now)
    assert all(map(is_near, numbers_of(now), numbers_of(stored))) == is_same


def test_the_notebooks_are_those_that_are_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PICTURES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name != "your_net" else ()) for name in PICTURES],
)
def test_every_cell_runs_and_shows_what_is_stored(name: str, tmp_path: Path) -> None:
    import nbformat  # which takes a second, in each process that collects tests

    stored, now = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4), executed(FOLDER / f"{name}.ipynb", tmp_path)
    for cell, before in zip(texts_of(now), texts_of(stored), strict=True):
        assert [*map(words_of, cell)] == [*map(words_of, before)]
        for text, past in zip(cell, before, strict=True):
            far = [pair for pair in zip(numbers_of(text), numbers_of(past), strict=True) if not is_near(*pair)]
            assert not far, f"{text}\nwas\n{past}"
    pictures = pictures_of(now)
    assert len(pictures) == PICTURES[name]
    for picture, before in zip(pictures, pictures_of(stored), strict=True):
        assert picture.shape == before.shape and min(picture.shape) >= 240
        assert picture.std() > 20  # neither blank nor grey alone
        assert np.corrcoef(picture.ravel(), before.ravel())[0, 1] > 0.9  # the same, but for how another machine rounds


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_stored_is_small_whole_and_of_no_machine(name: str) -> None:
    import nbformat

    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert len(text) < MOST_BYTES
    assert notebook.metadata == KERNEL and not any(cell.metadata for cell in notebook.cells)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs_of(notebook))
    shown = [str(value) for output in outputs_of(notebook) for kind, value in output.get("data", {}).items()
             if not kind.startswith("image")]  # fmt: skip
    assert not any(PATHS.search(part) for part in shown)
