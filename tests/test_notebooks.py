"""Notebooks run from their first cell to their last."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "outputs are not committed"
            exec(compile("".join(cell["source"]), str(path), "exec"), names)
    if path.stem == "tiles":
        cropped, blended = names["cropped"], names["blended"]
        assert isinstance(cropped, np.ndarray) and isinstance(blended, np.ndarray)
        assert cropped.shape == blended.shape == (48, 128, 128)
        assert (tmp_path / "tiles" / "blends.png").is_file()
