"""A notebook that was run and is exported as a page, without Python behind it, still has its pictures."""

from __future__ import annotations

import base64
import os
import re
from pathlib import Path

import pytest
from conftest import ROOT
from volumes import noise, write_volume

import volpipe as vp

WIDGETS = "widget-view+json"


@pytest.mark.parametrize("has_state", [False, True], ids=["saved", "with the state of widgets"])
def test_a_volume_that_is_shown_stays_a_picture_in_an_exported_page(tmp_path: Path, has_state: bool) -> None:
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    volume = write_volume(tmp_path / "a.n5", noise((16, 20, 24)))
    cell = nbformat.v4.new_code_cell(f"import volpipe as vp\nvp.open({str(volume)!r}, 'raw').show()")
    notebook = nbformat.v4.new_notebook(cells=[cell])
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", store_widget_state=has_state)
    places = {"PYTHONPATH": str(ROOT), "JUPYTER_RUNTIME_DIR": str(tmp_path), "IPYTHONDIR": str(tmp_path / ".ipython")}
    client.execute(env=os.environ | places)
    page, _ = HTMLExporter().from_notebook_node(notebook)
    page = page.replace("\\/", "/")  # as JSON in a page has it
    assert (WIDGETS in page) == has_state  # else nothing stands in for the picture
    pictures = {base64.b64decode(text) for text in re.findall(r"data:image/png;base64,([\w+/=]+)", page)}
    assert vp.open(volume, "raw").show().png() in pictures
