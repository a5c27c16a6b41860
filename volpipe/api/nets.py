"""Nets: one with its weights, and what is measured of it.

Not here: the nets (models), how they are built and measured (nets), what windows cost (estimation), or printing (cli).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from volpipe.errors import PlanError
from volpipe.geometry.grid import triple
from volpipe.nets.facts import NetFacts, with_normalisation
from volpipe.nets.files import is_function, is_program
from volpipe.nets.load import build_net, cached_geometry, describe, normalising_layers
from volpipe.nets.net_geometry import Geometry, UnmeasurableError
from volpipe.recipes.inference import NetChoice, Recipe, load_recipe
from volpipe.resolve import homes_known
from volpipe.units import count

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, repr=False)
class NetReport:
    """A net as it declares itself, and as it is measured; sizes in input voxels (z, y, x).

    Attributes:
        facts: scale, stride, halo, window, channels and parameters, as declared or given.
        geometry: channels, scale, stride, margin, halo and receptive field, as measured; None where that cannot be.
        problem: why it cannot be measured, "" if it is.
        whole_window_layers: layers that look at whole windows, so that tiles differ from the whole.
        notes: how a package's own test went, and what to know of it.
        recipe: with which the net is run, its normalisation included.
    """

    facts: NetFacts
    geometry: Geometry | None
    problem: str
    whole_window_layers: tuple[str, ...]
    notes: tuple[str, ...]
    recipe: Recipe

    def __repr__(self) -> str:
        facts = self.facts
        lines = [
            f"<NetReport of {facts.label}: {count(facts.num_parameters, 'parameter')}, scale {_words(facts)}, "
            f"stride {facts.stride}, halo {facts.halo}>",
            f"cannot be measured: {self.problem}" if self.problem else "",
            *self.untruths,
            *self.notes,
        ]
        return "\n".join(filter(None, lines))

    @property
    def untruths(self) -> list[str]:
        """A sentence for each thing that the net declares and that is not so; a larger halo or stride is safe."""
        if self.geometry is None:
            return []
        facts, geometry = self.facts, self.geometry
        sentences = []
        if (facts.scale, facts.shrink) != (geometry.scale, geometry.shrink):
            sentences.append(f"scale is {_words(geometry)}, not {_words(facts)}: no window gives what the net declares")
        if facts.margin != geometry.margin:
            sentences.append(f"margin is {geometry.margin}, not {facts.margin}: no window gives what the net declares")
        if geometry.whole_window:
            return [f"net {facts.label}: {sentence}; set net.{sentence.split()[0]} to it" for sentence in sentences]
        if any(map(int.__mod__, facts.stride, geometry.stride)):
            sentences.append(
                f"stride is {geometry.stride}, not {facts.stride}: windows will disagree wherever they lie"
            )
        if any(map(int.__lt__, facts.halo, geometry.halo)):
            sentences.append(f"halo is {geometry.halo}, not {facts.halo}: windows will disagree at their faces")
        return [f"net {facts.label}: {sentence}; set net.{sentence.split()[0]} to it" for sentence in sentences]


def _words(sizes: NetFacts | Geometry) -> str:
    """Return scales as they are written: (2, 1, 0.5)."""
    factors = (scale / shrink for scale, shrink in zip(sizes.scale, sizes.shrink, strict=True))
    return f"({', '.join(f'{factor:g}' for factor in factors)})"


@homes_known
def load_net(name: str, *settings: str, recipe: str | Path | None = None, trust_model: bool = False) -> nn.Module:
    """Return a net as a torch module (n, c, z, y, x) in evaluation mode on the CPU, with its weights.

    Args:
        name: a shipped net (see `volpipe nets`), module:function, file.py:function, a file or a package.
        settings: ``key=value`` of a recipe's section net, such as ``net.weights="mine.safetensors"``.
        recipe: a shipped recipe (see `volpipe recipes`) or a TOML file, for its other keys of the net.
        trust_model: load a file that is code.

    Raises:
        VolpipeError: no such net, options that it does not take, weights that do not fit, or untrusted code.
    """
    return build_net(_recipe(name, settings, recipe, trust_model=trust_model).net, str(Path.cwd()))


@homes_known
def net_report(name: str, *settings: str, recipe: str | Path | None = None, trust_model: bool = False) -> NetReport:
    """Return what a net declares and what is measured of it.

    Args:
        name, settings, recipe, trust_model: as of `load_net`.

    Raises:
        VolpipeError: as `load_net`, or a package that does not reproduce its own test.
    """
    chosen = _recipe(name, settings, recipe, trust_model=trust_model)
    if chosen.net.ensemble is not None:
        raise PlanError("net.ensemble names several nets, and here one is looked at; leave it out, and name that one")
    folder = str(Path.cwd())
    hint = None if chosen.windows.shape == "auto" else triple(chosen.windows.shape)
    facts = describe(chosen.net, folder, hint)
    module = build_net(chosen.net, folder)
    layers = tuple(normalising_layers(module))
    notes = (*_about_package(module), *_about_buffers(chosen.net, module))
    geometry, problem = None, ""
    try:
        geometry = cached_geometry(chosen.net, folder, window=hint)
    except UnmeasurableError as error:
        problem = str(error)
    return NetReport(facts, geometry, problem, layers, notes, with_normalisation(chosen, facts))


def _recipe(name: str, settings: Sequence[str], recipe: str | Path | None, *, trust_model: bool) -> Recipe:
    if is_function(name):
        raise PlanError(f"{name} is a function on arrays, and no net; `volpipe plan` tries it over a volume's type")
    trust = ["net.trust_model=true"] if trust_model else []
    path = None if recipe is None else Path(recipe)
    return load_recipe(path, [f"net.name={json.dumps(name)}", *settings, *trust])


def _about_buffers(choice: NetChoice, module: nn.Module) -> list[str]:
    """Return what is not measured of a user's net without weights: what its buffers of zeros will do once loaded."""
    if choice.weights is not None or is_program(choice.name):
        return []
    zeros = [
        name.removeprefix("net.")
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and not name.endswith("running_mean") and not bool(buffer.any())
    ]
    return [
        f"buffer {name} is all zeros, as before weights are loaded: what it does then is not measured; set net.weights"
        for name in zeros
    ]


def _about_package(module: nn.Module) -> list[str]:
    """Return how a package's own test goes, and what should be known of it; nothing for other nets."""
    from volpipe.nets.bioimageio import PackageNet

    if not isinstance(module, PackageNet):
        return []
    outcome = module.test()
    return [
        f"package {module.package.name}, {module.kind} weights; its own test is reproduced: the largest difference is "
        f"{outcome.largest:.2g}, where values reach {outcome.expected:.2g}",
        *module.notes,
    ]
