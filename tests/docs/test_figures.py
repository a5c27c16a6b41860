"""Drawings of docs/ that are made from what a page shows are those of the page as it is."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader

from conftest import ROOT


def test_the_drawing_of_a_flow_is_that_of_the_recipe_on_its_page() -> None:
    loader = SourceFileLoader("figures", str(ROOT / "scripts" / "figures"))
    spec = spec_from_loader("figures", loader)
    assert spec is not None
    figures = module_from_spec(spec)
    loader.exec_module(figures)
    drawing = (ROOT / "docs" / "figures" / "flow.svg").read_text(encoding="utf-8")
    assert drawing == figures.flow_drawing(), "scripts/figures draws it anew"
