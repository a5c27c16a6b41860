"""The geometry of a net: scale, stride and receptive field, and the grid of its training; one call of a net, checked.

Not here: the measuring (receptive_field, receptive_field_probe).
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.units import count
from volpipe.volumes.resampling import Order
from volpipe.volumes.storage.metadata import Lengths

if TYPE_CHECKING:
    import torch


KEYS = "set {keys}, which it does not declare"
ANISOTROPIC = 3.0  # nnU-Net's threshold (nnunetv2 2.8, configuration.py)
LONGEST_REASON = 200  # characters


class Interpolation(BaseModel):
    """How a net's maker resamples volumes of other voxels than those of the training.

    Attributes:
        order: of the spline: 0, the nearest voxel, 1, linear, or 3.
        order_z: along the axis of the longest voxels, where that is interpolated apart.
        apart: whether it is; None: where its voxels are more than ANISOTROPIC times as long as the shortest.
        limits: to which voxels are clipped before, of each channel; none where they are not.
        smooths: whether a Gaussian goes before where voxels become longer (`Resampling.smoothed`).
        in_nm: whether lengths of the training's voxels are in nm; else in a unit that the volume's tell.
    """

    model_config = ConfigDict(frozen=True)

    order: Order = 3
    order_z: Order = 0
    apart: bool | None = None
    limits: tuple[tuple[float, float] | None, ...] = ()
    smooths: bool = False
    in_nm: bool = False

    @model_serializer(mode="wrap")
    def _as_made(self, dump: SerializerFunctionWrapHandler) -> object:
        """Return the fields by their names; the last two only where they are set, which no maker's are."""
        tree = dump(self)
        for key in ("smooths", "in_nm"):
            if isinstance(tree, dict) and not tree[key]:
                del tree[key]
        return tree

    def orders(self, old: Lengths, new: Lengths) -> tuple[Order, Order, Order]:
        """Return the order along each axis (z, y, x), from voxels of lengths `old` to `new`."""
        longest = old if self.apart or max(old) > ANISOTROPIC * min(old) else new
        is_apart = self.apart if self.apart is not None else max(longest) > ANISOTROPIC * min(longest)
        axes = [axis for axis, length in enumerate(longest) if length == max(longest)]
        return triple(self.order_z if is_apart and axes == [axis] else self.order for axis in range(3))


# Of nets whose makers say the size of voxels alone: as scikit-image's `resize` with its defaults, and a cubic spline.
BY_SPLINES = Interpolation(order_z=3, apart=False, smooths=True, in_nm=True)


class LabelRegion(NamedTuple):
    """The region that a channel shows, of a net trained on overlapping regions with a channel each.

    Attributes:
        label: that its voxels have where no later channel's region is, 0 where its maker names none.
    """

    name: str
    label: int = 0


class UnmeasurableError(VolpipeError):
    """A net that cannot be measured from outside.

    The message is the fault; `remedy` says what to write, with "{keys}" for the recipe's keys that are missing.
    """

    def __init__(self, fault: str, remedy: str = KEYS) -> None:
        super().__init__(fault)
        self.remedy = remedy


class WholeWindowError(UnmeasurableError):
    """A net whose output depends on its whole window, or on the place of a voxel in it.

    `is_shown`: a trial shows that it depends on its whole window.
    """

    def __init__(self, fault: str, remedy: str = KEYS, *, is_shown: bool = False) -> None:
        super().__init__(fault, remedy)
        self.is_shown = is_shown


class FarReachError(UnmeasurableError):
    """A net whose output depends on voxels further away than was tried; `reach` is how far that was."""

    def __init__(self, fault: str, remedy: str = KEYS, *, reach: int = 0) -> None:
        super().__init__(fault, remedy)
        self.reach = reach


class OutputError(UnmeasurableError):
    """A net that returns no tensor, or several of which none was chosen: no other window mends that."""


class SlowNetError(UnmeasurableError):
    """A net whose measuring took too long; the message has the numbers known by then, and the missing ones."""


class Ratio(NamedTuple):
    """Output voxels per input voxel along an axis: scale / shrink, of which one is 1."""

    scale: int = 1
    shrink: int = 1

    def out(self, voxels: int) -> int:
        """Return the output voxels of so many input voxels."""
        return voxels * self.scale // self.shrink

    def back(self, place: int) -> int:
        """Return the first input voxel of an output voxel."""
        return place * self.shrink // self.scale


@dataclass(frozen=True)
class NetArray:
    """One of a net's outputs that are joined in one tensor, each channel on the grid of the finest.

    Attributes:
        output: its name in what the net returns, or its number.
        first, stop: its channels in the tensor.
        coarser: voxels (z, y, x) of the tensor in which each of its own is repeated.
    """

    output: str
    first: int
    stop: int
    coarser: Triple = (1, 1, 1)

    @property
    def name(self) -> str:
        """The name of the array that it is written to: its own, unless that is a number or no name of a folder."""
        plain = re.sub(r"[^\w.-]", "_", self.output).lstrip("._")
        return plain if re.fullmatch(r"(?!(s?\d+|run|c)$).+", plain) else f"output_{plain}"

    def cut(self, joined: torch.Tensor) -> torch.Tensor:
        """Return this output (C, z, y, x) of the `joined` ones, whose voxels begin with one of its own."""
        z, y, x = self.coarser
        return joined[self.first : self.stop, ::z, ::y, ::x]


@dataclass(frozen=True)
class Geometry:
    """Sizes, channels and receptive field of a net, measured; in input voxels (z, y, x).

    Attributes:
        scale: output voxels per input voxel.
        stride: period of the net's own grid: windows, halos and their places are multiples of it.
        out_channels: number of the output's channels.
        before, after: largest distance of an input voxel that acts on an output voxel, below and above it; of a net
            with a margin, that after which output voxels are those of the whole.
        margin, remainder, shrink: as in NetFacts.
        in_channels: number of the input's channels.
        whole_window: why tiles differ from the whole, whatever the halo; "" where they do not.
        further: how far it sees at least, where its reach was not found; `before` and `after` are less than that then.
        fixed: the only sizes of windows that it takes; 0 along an axis where it takes others.
        uneven: input voxels that the output lacks less before than behind, 0 or 1; the margin is the larger.
        least: a small window that the net takes, and its output.
        outputs: name and shape of each output for it, of a net with several.
        arrays: the outputs that are joined in one, if they are; none of others.
    """

    scale: Triple
    stride: Triple
    before: Triple
    after: Triple
    out_channels: int = 1
    margin: Triple = (0, 0, 0)
    remainder: Triple = (0, 0, 0)
    shrink: Triple = (1, 1, 1)
    in_channels: int = 1
    whole_window: str = ""
    further: str = ""
    fixed: Triple = (0, 0, 0)
    uneven: Triple = (0, 0, 0)
    least: tuple[Triple, Triple] | None = None
    outputs: tuple[str, ...] = ()
    arrays: tuple[NetArray, ...] = ()

    @property
    def ratios(self) -> tuple[Ratio, Ratio, Ratio]:
        """Output voxels per input voxel along each axis."""
        z, y, x = map(Ratio, self.scale, self.shrink)
        return z, y, x

    @property
    def halo(self) -> Triple:
        """The exact halo: with it, tiles equal the whole."""
        return triple(map(max, self.before, self.after))

    def aligned_halo(self, share: float = 1) -> Triple:
        """Return the margin and `share` of the rest of the halo, in whole strides, as windows have it."""
        axes = list(zip(self.halo, self.margin, self.stride, strict=True))
        whole = [align_up(halo - margin, stride) for halo, margin, stride in axes]
        return triple(
            margin + align_up(math.ceil(n * share), stride) for n, (_, margin, stride) in zip(whole, axes, strict=True)
        )

    @property
    def receptive_field(self) -> Triple:
        return triple(b + 1 + a for b, a in zip(self.before, self.after, strict=True))


def is_shortage(error: BaseException) -> bool:
    """Return whether `error` means too little memory, of the machine or of its GPU."""
    import torch

    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch has no type for it
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def run_net(net: Callable[[torch.Tensor], torch.Tensor], windows: torch.Tensor) -> torch.Tensor:
    """Return the output of `net` for `windows` (n, c, z, y, x).

    Raises:
        UnmeasurableError: it takes no such windows, or returns no tensor.
    """
    import torch

    try:
        with torch.inference_mode(), _uncompiled(), np.errstate(all="ignore"):  # windows have very large values
            out: Any = net(windows)  # Any: whatever the net's code returns
    except UnmeasurableError:
        raise
    except ImportError as error:
        raise OutputError(f"its code needs what is not installed: {reason(error)}", "install it") from error
    except (Exception, SystemExit) as error:  # whatever the net's code makes of such a window
        raise refusal(windows, error) from error
    return only_tensor(out)


def refusal(windows: torch.Tensor, error: BaseException) -> UnmeasurableError:
    """Return the error of a net whose code fails with `error` for `windows` (n, c, z, y, x)."""
    _, channels, *shape = windows.shape
    return UnmeasurableError(
        f"it takes no window of {tuple(shape)} voxels and {count(channels, 'channel')}, "
        f"{str(windows.dtype).removeprefix('torch.')}: {reason(error)}",
        "let its forward, or that of a module around it, take (n, c, z, y, x) of any n, or slices (n, c, y, x), "
        "and nothing else; declare in its attribute volpipe in_channels, if it takes another number, and "
        "fixed, (z, y, x), if it takes windows of that size alone",
    )


def _uncompiled() -> contextlib.AbstractContextManager[None]:
    """Return in which the parts of a net that torch.compile made run as they are written: windows have many sizes."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled
        return contextlib.nullcontext()
    import torch

    stance: contextlib.AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def reason(error: BaseException) -> str:
    """Return why the code of a net failed, in one line: the last of a trace within TorchScript, else the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = lines[-1] if "TorchScript" in lines[0] else lines[0]
    return line if len(line) <= LONGEST_REASON else f"{line[:LONGEST_REASON]}…"


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
