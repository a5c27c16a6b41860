"""The measured geometry of a net: scale, stride and receptive field; and one call of a net, checked.

Not here: the measuring (receptive_field, receptive_field_probe).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.units import count

if TYPE_CHECKING:
    import torch


KEYS = "set {keys}, which it does not declare"


class UnmeasurableError(VolpipeError):
    """A net that cannot be measured from outside.

    The message is the fault; `remedy` says what to write, with "{keys}" for the recipe's keys that are missing.
    """

    def __init__(self, fault: str, remedy: str = KEYS) -> None:
        super().__init__(fault)
        self.remedy = remedy


class SlowNetError(UnmeasurableError):
    """A net whose measuring took too long; the message has the numbers known by then, and the missing ones."""


@dataclass(frozen=True)
class Geometry:
    """Scale, stride and receptive field of a net, measured; in input voxels (z, y, x).

    Attributes:
        scale: output voxels per input voxel.
        stride: period of the net's own grid: windows, halos and their places are multiples of it.
        out_channels: number of the output's channels.
        before, after: largest distance of an input voxel that acts on an output voxel, below and above it.
    """

    scale: Triple
    stride: Triple
    before: Triple
    after: Triple
    out_channels: int = 1

    @property
    def halo(self) -> Triple:
        """The exact halo: with it, tiles equal the whole."""
        return triple(map(max, self.before, self.after))

    def aligned_halo(self, share: float = 1) -> Triple:
        """Return `share` of the halo, in whole strides, as windows have it."""
        whole = (align_up(n, stride) for n, stride in zip(self.halo, self.stride, strict=True))
        return triple(align_up(math.ceil(n * share), stride) for n, stride in zip(whole, self.stride, strict=True))

    @property
    def receptive_field(self) -> Triple:
        return triple(b + 1 + a for b, a in zip(self.before, self.after, strict=True))


def run_net(net: Callable[[torch.Tensor], torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
    """Return the output of `net` for `windows` (n, c, z, y, x).

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
        _, channels, *shape = windows.shape
        raise UnmeasurableError(
            f"it takes no window of {tuple(shape)} voxels and {count(channels, 'channel')}: {error}",
            "correct its forward; give it the attribute in_channels, if it takes another number; or, if it takes "
            f"windows of one size alone, set windows.shape to that, and {KEYS.removeprefix('set ')}",
        ) from error
    return only_tensor(out)


def only_tensor(out: object) -> torch.Tensor:
    """Return `out`, which a net returned, if it is a tensor.

    Raises:
        UnmeasurableError: it is something else, such as a tuple.
    """
    import torch

    if not isinstance(out, torch.Tensor):
        raise UnmeasurableError(
            f"it returns {type(out).__name__}, not a tensor", "let its forward return one tensor (n, c, z, y, x)"
        )
    return out
