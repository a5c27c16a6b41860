"""Pictures of an output before anything of it is computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from volpipe.reporting.page import Sentence
from volpipe.runs.output_pictures import OutputPictures


def test_before_anything_is_computed_a_sentence_stands_in_for_each_picture() -> None:
    arrays: Any = SimpleNamespace(arrays=(SimpleNamespace(out="cells.zarr"), SimpleNamespace(out="walls.zarr")))
    folder = SimpleNamespace(journal=None)
    nothing: Any = SimpleNamespace(taken=lambda: SimpleNamespace(schedule=None), folder=folder)
    pictures: OutputPictures[Any] = OutputPictures(arrays, nothing, lambda plan, schedule: None)
    drafts = pictures.drafts(nothing)
    names = [f"{what} of {name}" for name in ("cells.zarr", "walls.zarr") for what in ("Slices", "Overview")]
    assert [draft.title for draft in drafts] == names
    assert [list(draft.make()) for draft in drafts] == [[Sentence("Nothing is computed yet.")]] * 4
    assert pictures.main("Output") is None
