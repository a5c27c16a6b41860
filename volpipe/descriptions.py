"""The facts of nets, the checks of a recipe against them, and the facts of shipped nets, from models/facts.json.

Not here: building a net to examine it (nets). scripts/describe writes models/facts.json, by hashes of the nets' code,
weights and options: planning with an unchanged net needs no import of torch, and a changed one is built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from volpipe import programs
from volpipe.errors import PlanError
from volpipe.recipe import NetChoice, Normalise, Recipe
from volpipe.resolve import default_recipe

Sizes = tuple[PositiveInt, PositiveInt, PositiveInt]
FILE = "facts.json"
SHIPPED_WEIGHTS = "volpipe:"
OF_THE_RUN = {  # they say what is allowed, or what is known beside the net, not what the net is
    "accept_tile_variance",
    "offsets",
    "trained_range",
    "trust_model",
    "untrained",
}

log = logging.getLogger(__name__)


class NetFacts(BaseModel):
    """What a plan must know of a net; sizes in input voxels (z, y, x)."""

    model_config = ConfigDict(frozen=True)

    label: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # it is part of paths
    in_channels: PositiveInt
    out_channels: PositiveInt
    scale: Sizes
    stride: Sizes
    halo: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
    window: Sizes
    intensity: Literal["same", "unit", "raw"]
    tile_invariant: bool
    num_parameters: int
    weights_sha256: str
    fixed: tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt] = (0, 0, 0)
    normalise: Normalise | None = None


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


def check_trained(choice: NetChoice, facts: NetFacts) -> None:
    """Refuse a net whose parameters are not trained: its output would be noise.

    Files and packages have their weights in them; nets without parameters need none.

    Raises:
        PlanError: with the ways out.
    """
    if not facts.num_parameters or choice.weights is not None or choice.untrained or programs.is_program(choice.name):
        return
    if is_shipped(choice):
        recipes = " or ".join(f"--recipe {name}" for name in recipes_for(choice.name))
        ways = f"set net.weights to a file of them{recipes and f', take {recipes}, which have weights for it'}"
        rest = "set net.untrained=true to try it without"
    else:
        ways = "save its state dict with torch.save, and set net.weights to that file"
        rest = "set net.untrained=true if its code sets them itself, to the same values at each call"
    raise PlanError(
        f"net {facts.label} has {facts.num_parameters:,} parameters and no weights, so that its output would be noise; "
        f"{ways}, or {rest}"
    )


def cautions(choice: NetChoice, facts: NetFacts) -> list[str]:
    """Return what a user should know of the net of a run before it begins."""
    sentences = []
    if choice.untrained and facts.num_parameters and not programs.is_program(choice.name):
        sentences.append(
            f"net {facts.label} runs with the {facts.num_parameters:,} parameters that its code makes "
            "(net.untrained=true): without training, its output is noise"
        )
    if choice.accept_tile_variance and not facts.tile_invariant:
        sentences.append(
            f"net {facts.label} looks at whole windows (net.accept_tile_variance=true): expect seams, and another "
            "output for other windows"
        )
    return sentences


def normalised(recipe: Recipe, facts: NetFacts) -> Recipe:
    """Return `recipe` with the normalisation that its net asks for, where it leaves that open.

    Raises:
        PlanError: it says another.
    """
    due, said = facts.normalise, recipe.normalise
    if due is None or due == said:
        return recipe
    if said == Normalise():
        log.info("net %s asks for normalise.method=%s", facts.label, due.method)
        return recipe.model_copy(update={"normalise": due})
    if said == due.model_copy(update={"eps": said.eps}):
        return recipe.model_copy(update={"normalise": due})
    numbers = "zscore" if said.mean is not None else "percentile" if said.low is not None else "auto"
    method = numbers if said.method == "auto" else said.method
    if method == due.method and (said.percentiles == due.percentiles or said.low is not None):
        return recipe  # with numbers that are given
    percentiles = f", normalise.percentiles={list(due.percentiles)}" if due.method == "percentile" else ""
    raise PlanError(
        f"net {facts.label} asks for normalise.method={due.method}{percentiles}, not {method}; leave the recipe's "
        "[normalise] out"
    )
