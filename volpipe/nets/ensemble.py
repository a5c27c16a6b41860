"""An ensemble of nets as one net: all of them get a window, and the mean of what they give is taken, or all of it.

Not here: whether nets go together (ensemble_facts), or medians and votes, which are taken once windows are joined
(inference.output): of windows that are blended they would be others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from volpipe.nets.declared import ServedNet


def mean_of(outputs: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the mean of `outputs`, added in their order, of which no more than one is in memory beside the sum."""
    total: torch.Tensor | None = None
    number = 0
    for out in outputs:
        total = out if total is None else total + out
        number += 1
    assert total is not None
    return total / number if number > 1 else total


class Ensemble(ServedNet):
    """Several nets (n, c, z, y, x) -> (n, C, z', y', x') as one, of the same grid and channels.

    Args:
        nets: in their order.
        combine: "mean"; else the channels of all come one after the other.
    """

    def __init__(self, nets: Sequence[nn.Module], combine: str) -> None:
        super().__init__()
        self.nets, self.combine = nn.ModuleList(nets), combine

    def to(self, *args: Any, **kwargs: Any) -> Any:  # Any: as torch has it
        for net in self.nets:
            net.to(*args, **kwargs)  # in its own way: one of slices has other layouts
        return self

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        if self.combine == "mean":
            return mean_of(net(windows).float() for net in self.nets)
        return torch.cat([net(windows) for net in self.nets], dim=1)
