"""The geometry of a net, as it was measured: scale, stride and how far it sees; and a net asked for one output.

Not here: the measuring (reach, probes).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from volpipe.errors import VolpipeError
from volpipe.grid import align_up

if TYPE_CHECKING:
    import torch

Triple = tuple[int, int, int]


class UnmeasurableError(VolpipeError):
    """A net that cannot be measured from outside; the message says why."""


class SlowNetError(UnmeasurableError):
    """A net whose measuring took too long; the message says what is known by then, and what is missing."""


@dataclass(frozen=True)
class Geometry:
    """What was measured of a net, in input voxels (z, y, x).

    Attributes:
        scale: output voxels per input voxel.
        stride: by which its own grid repeats: windows, halos and their places must be multiples of it.
        out_channels: of the output.
        before, after: how far the input that acts on an output voxel lies below and above it, at most.
    """

    scale: Triple
    stride: Triple
    before: Triple
    after: Triple
    out_channels: int = 1

    @property
    def halo(self) -> Triple:
        """The exact halo: with it, tiles are the whole."""
        z, y, x = map(max, self.before, self.after)
        return z, y, x

    def aligned_halo(self, share: float = 1) -> Triple:
        """Return `share` of the halo, in whole strides, as windows have it."""
        whole = (align_up(n, stride) for n, stride in zip(self.halo, self.stride, strict=True))
        z, y, x = (align_up(math.ceil(n * share), stride) for n, stride in zip(whole, self.stride, strict=True))
        return z, y, x

    @property
    def field(self) -> Triple:
        """The receptive field."""
        z, y, x = (b + 1 + a for b, a in zip(self.before, self.after, strict=True))
        return z, y, x


def run_net(net: Callable[[torch.Tensor], torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
    """Return what `net` makes of `windows` (n, c, z, y, x).

    Raises:
        UnmeasurableError: it takes no such windows, or returns no tensor.
    """
    import torch

    try:
        with torch.inference_mode():
            out: Any = net(windows)  # Any: whatever the net's code returns
    except UnmeasurableError:
        raise
    except Exception as error:  # whatever the net's code makes of such a window
        raise UnmeasurableError(f"windows of {tuple(windows.shape[2:])} voxels are not taken: {error}") from error
    if not isinstance(out, torch.Tensor):
        raise UnmeasurableError(f"it returns {type(out).__name__}, not a tensor")
    return out
