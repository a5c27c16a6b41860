"""What is known of shipped nets without building them: models/facts.json, which scripts/describe writes.

Not here: what the facts are (nets). They are found by a hash of the net's code, weights and options, so that a changed
net is built and asked instead, and planning with an unchanged one costs no import of torch.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from volpipe import programs
from volpipe.recipe import NetChoice
from volpipe.resolve import default_recipe

FILE = "facts.json"
SHIPPED_WEIGHTS = "volpipe:"
OF_THE_RUN = {  # they say what is allowed, or what is known beside the net, not what the net is
    "accept_tile_variance",
    "offsets",
    "trained_range",
    "trust_model",
    "untrained",
}


def models_folder() -> Path:
    import volpipe.models

    return Path(volpipe.models.__path__[0])


def weights_path(weights: str, search_path: str) -> Path:
    """Return the file of weights: "volpipe:NAME" is a shipped one, anything else a path of the user's."""
    if weights.startswith(SHIPPED_WEIGHTS):
        return models_folder() / weights.removeprefix(SHIPPED_WEIGHTS)
    return Path(search_path) / weights


def is_shipped(choice: NetChoice) -> bool:
    """Return whether the code of the net is ours; that of others may be anywhere."""
    return not (":" in choice.name or programs.is_program(choice.name))


def key_of(choice: NetChoice) -> str | None:
    """Return the hash under which a shipped net with weights of its own or of the package is described."""
    own = (choice.weights or SHIPPED_WEIGHTS).startswith(SHIPPED_WEIGHTS)
    return digest(choice, "", [models_folder() / f"{choice.name}.py"]) if own and is_shipped(choice) else None


def digest(choice: NetChoice, search_path: str, files: Iterable[Path], *more: str) -> str | None:
    """Return the hash of a net's section, of its weights and of these `files`; None where one is missing."""
    found = hashlib.sha256(" ".join((*more, choice.model_dump_json(exclude=OF_THE_RUN))).encode())
    weights = [] if choice.weights is None else [weights_path(choice.weights, search_path)]
    for file in (*files, *weights):
        if not file.is_file():
            return None  # which building it will tell
        with file.open("rb") as stream:
            found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def recipes_for(name: str) -> list[str]:
    """Return the names of the shipped recipes that run the net `name` with weights."""
    recipes = []
    for file in sorted(default_recipe().parent.glob("*.toml")):
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        net = tree.get("net", {})
        if net.get("name") == name and "weights" in net and "data" not in tree:  # which a training has
            recipes.append(file.stem)
    return recipes


def look_up(choice: NetChoice) -> Mapping[str, Any] | None:  # Any: JSON
    """Return the facts of the net of `choice`, None where nobody wrote them down.

    Weights that torch draws at random are those of the torch that described them.
    """
    key = key_of(choice)
    try:
        known = json.loads((models_folder() / FILE).read_text(encoding="utf-8")).get(key)
    except (OSError, ValueError, AttributeError):  # a checkout without it: nets are built, as any other
        return None
    if known is None or known["torch"] not in (None, release()):
        return None
    facts: Mapping[str, Any] = known["facts"]
    return facts


def bytes_per_voxel(choice: NetChoice) -> float | None:
    """Return the memory that the net of `choice` takes on a CPU per voxel of a window; None if facts.json lacks it.

    Other weights of a shipped net's own shape take as much as those that it was measured with.
    """
    key = shape_of(choice)
    try:
        known = json.loads((models_folder() / FILE).read_text(encoding="utf-8"))
        return max((float(e["bytes_per_voxel"]) for e in known.values() if e.get("shape") == key), default=None)
    except (OSError, ValueError, AttributeError, KeyError):  # a checkout without it
        return None


def shape_of(choice: NetChoice) -> str | None:
    """Return the hash of a shipped net's code and options, whatever its weights; None for code of others."""
    if not is_shipped(choice):
        return None
    plain = NetChoice(name=choice.name, options=choice.options)
    return digest(plain, "", [models_folder() / f"{choice.name}.py"])


def release() -> str:
    """Return the version of torch that is installed, whatever it was built for."""
    return version("torch").partition("+")[0]
