"""Notebooks that are run from their first cell to their last, and stored without a trace of the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "notebooks"
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
WIDGET = "application/vnd.jupyter.widget-view+json"  # which names a widget that is gone with its kernel
SECONDS = 170  # of a cell: a notebook takes less than three minutes


def executed(path: Path, folder: Path) -> Any:  # Any: nbformat's
    """Return the notebook at `path` with the outputs of its cells, which work in `folder`; their errors are raised."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    places = {"PYTHONPATH": str(ROOT), "JUPYTER_RUNTIME_DIR": str(folder), "IPYTHONDIR": str(folder / ".ipython")}
    client = NotebookClient(
        notebook, timeout=SECONDS, kernel_name="python3", record_timing=False, store_widget_state=False,
        resources={"metadata": {"path": str(folder)}},
    )  # fmt: skip
    client.execute(env=os.environ | places)
    notebook.metadata = nbformat.from_dict(KERNEL)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            output.get("data", {}).pop(WIDGET, None)
    return notebook
