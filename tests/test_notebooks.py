"""Notebooks run from their first cell to their last, and store what their cells show."""

from __future__ import annotations

import io
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest
from PIL import Image

from notebooks import FOLDER, KERNEL, executed

PICTURES = {"tiles": 5, "your_net": 4, "seams": 5, "superres": 4, "segmentation": 4}  # of each notebook
MOST_BYTES = 400_000
NUMBER = re.compile(r"[\d.,]+(e[-+]\d+)?|never")  # also where there is none
PATHS = re.compile(r"/(work|home|root|tmp|usr|var|dev)/|[A-Z]:\\|\.pyenv")


def outputs_of(notebook: Any) -> list[Any]:  # Any: nbformat's
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def pictures_of(notebook: Any) -> list[np.ndarray]:
    """Return the pictures (y, x), grey, that a notebook holds."""
    pngs = [output.data["image/png"] for output in outputs_of(notebook) if "image/png" in output.get("data", {})]
    return [np.asarray(Image.open(io.BytesIO(b64decode(png))).convert("L"), np.float64) for png in pngs]


def words_of(notebook: Any) -> list[list[str]]:
    """Return what each cell shows, without numbers, bars and spaces: the words and the kinds of data."""
    return [
        [
            " ".join(NUMBER.sub("#", str(output.get("data", {}).get("text/plain", output.get("text", "")))).split())
            + " ".join(sorted(output.get("data", {})))
            for output in cell.get("outputs", ())
        ]
        for cell in notebook.cells
    ]


def test_the_notebooks_are_those_that_are_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == set(PICTURES)


@pytest.mark.parametrize("name", PICTURES)
def test_every_cell_runs_and_shows_what_is_stored(name: str, tmp_path: Path) -> None:
    stored, now = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4), executed(FOLDER / f"{name}.ipynb", tmp_path)
    assert words_of(now) == words_of(stored)
    pictures = pictures_of(now)
    assert len(pictures) == PICTURES[name]
    for picture, before in zip(pictures, pictures_of(stored), strict=True):
        assert picture.shape == before.shape and min(picture.shape) >= 240
        assert picture.std() > 20  # neither blank nor grey alone
        assert np.corrcoef(picture.ravel(), before.ravel())[0, 1] > 0.9  # the same, but for how another machine rounds


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_stored_is_small_whole_and_of_no_machine(name: str) -> None:
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
