"""The adversary of a training: a second net that learns to tell outputs from truth, and what that costs the first.

Not here: the discriminator itself (models.srgan3d), or when it joins in (train). Least squares as in Mao et al. 2017
(arXiv 1611.04076): logits are pulled to 1 for the truth and to 0 for outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from volpipe.adam import Adam
from volpipe.resolve import load_function
from volpipe.training import Adversary

Triple = tuple[int, int, int]


@dataclass
class Judge:
    """A discriminator in training.

    Attributes:
        choice: the recipe's section.
        net: (n, 1 or 2, z, y, x) to logits.
        optimiser: of its weights.
    """

    choice: Adversary
    net: nn.Module
    optimiser: torch.optim.Optimizer

    @classmethod
    def of(cls, choice: Adversary, device: str) -> Judge | None:
        """Return the discriminator that `choice` describes, None where it wants none."""
        if not choice.weight:
            return None
        make = load_function("volpipe.models.srgan3d:discriminator")
        net = make(
            features=choice.features, strides=choice.strides, conditional=choice.conditional, seed=choice.seed
        ).to(device)
        return cls(choice, net, Adam(net.parameters(), choice.learning_rate, choice.betas))

    def state(self) -> dict[str, Any]:  # Any: tensors and numbers
        return {"net": self.net.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load(self, state: Mapping[str, Any]) -> None:  # Any: tensors and numbers
        self.net.load_state_dict(state["net"])
        self.optimiser.load_state_dict(state["optimiser"])

    def fooled(self, out: Tensor, given: Tensor, scale: Triple) -> Tensor:
        """Return how far the discriminator is from taking `out` for the truth; its own weights get no gradient."""
        self.net.requires_grad_(False)
        logits = self.net(self._shown(out, given, scale))
        self.net.requires_grad_(True)
        lost: Tensor = (logits - 1).square().mean()
        return lost

    def learn(self, out: Tensor, truth: Tensor, given: Tensor, scale: Triple, share: float) -> float:
        """Add the gradient of telling `out` from `truth`, times `share`, and return that loss."""
        real = self.net(self._shown(truth, given, scale))
        made = self.net(self._shown(out.detach(), given, scale))
        loss = 0.5 * ((real - 1).square().mean() + made.square().mean())
        (loss * share).backward()
        return float(loss.detach())

    def update(self) -> None:
        """Change the discriminator by its gradient."""
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def _shown(self, data: Tensor, given: Tensor, scale: Triple) -> Tensor:
        """Return `data` (n, 1, z, y, x), with what the net was given as a second channel where that is asked for."""
        if not self.choice.conditional:
            return data
        return torch.cat([data, interpolate(given, scale_factor=[float(s) for s in scale])], dim=1)
