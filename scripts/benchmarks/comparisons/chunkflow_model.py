"""The default net as chunkflow's documentation wants a model: a file with these functions, of which it gives the path.

chunkflow feeds 0..1, and refuses an output above 1.0001: grey levels, which the net has in -1..1, are put there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.comparisons.default import default_net

if TYPE_CHECKING:
    from torch import Tensor, nn


def load_model(path: str) -> nn.Module:
    """Return the net; its weights lie beside its recipe, not at `path`."""
    return default_net()


def pre_process(patch: np.ndarray) -> Tensor:
    """Return what the net takes of a patch (1, 1, z, y, x) in 0..1."""
    import torch

    return torch.from_numpy(patch).mul(2).sub(1)


def post_process(output: Tensor) -> Tensor:
    return output.add(1).div(2).clamp(0, 1)
