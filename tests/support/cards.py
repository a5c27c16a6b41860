"""Cards of shipped weights, held against the files that they speak of."""

from __future__ import annotations

import hashlib
from pathlib import Path

from conftest import ROOT

from volpipe.nets.facts import NetFacts
from volpipe.nets.load import describe
from volpipe.recipes.inference import load_recipe

MOST_BYTES = 8_000_000


def card(weights: str) -> str:
    return (ROOT / "models" / f"{weights}.md").read_text(encoding="utf-8")


def checked_facts(weights: str, recipe: Path) -> NetFacts:
    """Return the facts of the net of `recipe`; the card has them, and the size and the sums of its weights."""
    data = (ROOT / "models" / f"{weights}.safetensors").read_bytes()
    facts = describe(load_recipe(recipe).net)
    assert len(data) < MOST_BYTES
    for fact in (
        hashlib.sha256(data).hexdigest(),
        facts.weights_sha256,
        f"{len(data):,} bytes",
        f"{facts.num_parameters:,} parameters",
    ):
        assert fact in card(weights)
    return facts
