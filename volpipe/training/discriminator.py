"""The adversary of a training: a discriminator that learns to part outputs from truth, and the losses of both nets.

Not here: the discriminator's layers (models.srgan3d), or its schedule (loop). Least squares as in Mao et al. 2017
(arXiv 1611.04076): the targets of its logits are 1 for the truth and 0 for outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from volpipe.geometry.grid import Triple
from volpipe.recipes.training import Adversary
from volpipe.resolve import load_function
from volpipe.training.optimizer import Adam


@dataclass
class Discriminator:
    """A discriminator in training.

    Attributes:
        net: (n, 1 or 2, z, y, x) to logits.
    """

    choice: Adversary
    net: nn.Module
    optimiser: torch.optim.Optimizer

    @classmethod
    def from_choice(cls, choice: Adversary, device: str) -> Discriminator | None:
        """Return the discriminator of `choice`, None where its weight is 0."""
        if not choice.weight:
            return None
        make = load_function("volpipe.models.srgan3d:discriminator")
        net = make(
            features=choice.features, strides=choice.strides, conditional=choice.conditional, seed=choice.seed
        ).to(device)
        return cls(choice, net, Adam(net.parameters(), choice.learning_rate, choice.betas))

    def state_dict(self) -> dict[str, Any]:  # Any: tensors and numbers
        return {"net": self.net.state_dict(), "optimiser": self.optimiser.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # Any: tensors and numbers
        self.net.load_state_dict(state["net"])
        self.optimiser.load_state_dict(state["optimiser"])

    def generator_loss(self, outputs: Tensor, inputs: Tensor, scale: Triple) -> Tensor:
        """Return the loss of the net whose `outputs` are to pass for truth; the discriminator gets no gradient."""
        self.net.requires_grad_(False)
        logits = self.net(self._conditioned(outputs, inputs, scale))
        self.net.requires_grad_(True)
        loss: Tensor = (logits - 1).square().mean()
        return loss

    def discriminator_loss(self, outputs: Tensor, truth: Tensor, inputs: Tensor, scale: Triple, share: float) -> Tensor:
        """Add the discriminator's gradient, times `share`, and return its loss."""
        real = self.net(self._conditioned(truth, inputs, scale))
        fake = self.net(self._conditioned(outputs.detach(), inputs, scale))
        loss = 0.5 * ((real - 1).square().mean() + fake.square().mean())
        (loss * share).backward()
        detached: Tensor = loss.detach()
        return detached

    def update(self) -> None:
        """Update the discriminator by its gradient."""
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def _conditioned(self, data: Tensor, inputs: Tensor, scale: Triple) -> Tensor:
        """Return `data` (n, 1, z, y, x), for a conditional discriminator with the upsampled `inputs` as channel 1."""
        if not self.choice.conditional:
            return data
        return torch.cat([data, interpolate(inputs, scale_factor=[float(s) for s in scale])], dim=1)
