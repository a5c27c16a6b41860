"""Folders that other trainers write, as nets: what both kinds of them have in common.

Not here: reading nnU-Net's (nnunet) or MONAI's (monai_bundle). Nothing in such a folder is run: architectures are
looked up by name in the libraries of their makers, and weights are tensors.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.nets.declared import ServedNet
from volpipe.nets.ensemble import mean_of
from volpipe.text import read_text


@dataclass(frozen=True)
class Grey:
    """What a net's maker does to grey levels: clip them to `low` and `high`, less `mean`, by `std`."""

    mean: float = 0.0
    std: float = 1.0
    low: float | None = None
    high: float | None = None

    def __call__(self, data: torch.Tensor) -> torch.Tensor:
        """Return `data` of one channel, mapped."""
        if self.low is not None or self.high is not None:
            data = data.clamp(self.low, self.high)
        return (data - self.mean) / self.std


class MadeNet(ServedNet):
    """A net of a maker's folder, which gets grey levels as its maker's tools give them; a mean over several folds.

    Makers pad small volumes with zeros, after they map grey levels.

    Args:
        nets: (n, c, z, y, x) or (n, c, y, x) each.
        greys: what is done to each channel first, or one for all.
        flips: axes of a window, counted from z or y, of whose mirrored forms the mean is taken.
    """

    def __init__(self, nets: Collection[nn.Module], greys: Collection[Grey] = (), flips: Collection[int] = ()) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)
        self.greys = () if all(grey == Grey() for grey in greys) else tuple(greys)
        counts = range(len(flips) + 1)
        self.forms = [axes for count in counts for axes in itertools.combinations(sorted(flips), count)]

    @property
    def bare(self) -> MadeNet:
        """This net without its mapping of grey levels, whose clipping would hide its receptive field."""
        bare = MadeNet(list(self.nets))
        bare.forms, bare.declaration = self.forms, self.declaration
        return bare

    @property
    def padding(self) -> tuple[float, ...]:
        """What becomes zero by the mapping of grey levels, of each channel; nothing where none is mapped."""
        return tuple(grey.mean for grey in self.greys)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.greys:
            one, *others = self.greys
            x = torch.stack([grey(x[:, i]) for i, grey in enumerate(self.greys)], 1) if others else one(x)
        return mean_of(self._mirrored(net, x) for net in self.nets)

    def _mirrored(self, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the mean of what `net` gives for the mirrored forms of `x`, turned back."""
        forms = ([2 + axis for axis in form] for form in self.forms)
        return mean_of(torch.flip(net(torch.flip(x, axes)), axes) if axes else net(x) for axes in forms)


class TurnedNet(ServedNet):
    """A net whose axes are those of a volume in another `order`: its windows are turned, and all that it gives back.

    A net of slices has those of y and x in that order.
    """

    def __init__(self, net: nn.Module, order: Triple) -> None:
        super().__init__()
        self.net, self.order = net, order

    def forward(self, x: torch.Tensor) -> Any:  # Any: tensors in whatever the net returns
        rank = x.ndim - 2
        order = [axis + rank - 3 for axis in self.order if axis >= 3 - rank]
        back = [2 + order.index(axis) for axis in range(rank)]

        def turned_back(out: torch.Tensor) -> torch.Tensor:
            return out.permute(0, 1, *back) if out.ndim == x.ndim else out

        # Contiguous, as nets of makers that look at their memory (`view`) know windows.
        out = self.net(x.permute(0, 1, *(2 + axis for axis in order)).contiguous())
        return _pytree.tree_map_only(torch.Tensor, turned_back, out)


def read_json(path: Path) -> dict[str, Any]:  # Any: JSON
    """Return the object in the JSON file at `path`.

    Raises:
        VolpipeError: there is no such file, or it holds something else.
    """
    try:
        tree = json.loads(read_text(path))
    except OSError as error:
        raise VolpipeError(f"no {path.name} in {path.parent}: {error.strerror}") from error
    except ValueError as error:
        raise VolpipeError(f"{path} is no JSON: {error}") from error
    if not isinstance(tree, dict):
        raise VolpipeError(f"{path} holds {type(tree).__name__}, not an object")
    return tree


def library_class(name: str, allowed: Collection[str], extra: str) -> Callable[..., Any]:  # Any: of others' libraries
    """Return the class that a folder names, which lies in one of the `allowed` packages.

    Raises:
        VolpipeError: it lies elsewhere, is not there, or its library is not installed, which `extra` brings.
    """
    module, _, attribute = name.rpartition(".")
    if not any(module == package or module.startswith(f"{package}.") for package in allowed):
        raise VolpipeError(
            f"it names {name}, and classes come from {' and '.join(allowed)} alone; no other code is run"
        )
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise VolpipeError(f"it needs {error.name}, which is not installed: pip install 'volpipe[{extra}]'") from error
    except AttributeError as error:
        raise VolpipeError(f"{module} has no {attribute} in the version that is installed") from error
    return found
