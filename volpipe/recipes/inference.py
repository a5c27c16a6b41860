"""The recipe: what to do to a volume, as the user writes it in TOML, checked and typed.

Not here: whether it fits a volume (inference.plan), or where it runs (sites).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from volpipe.errors import RecipeError
from volpipe.geometry.affinities import Offset
from volpipe.geometry.blend import Family
from volpipe.geometry.grid import Triple
from volpipe.recipes.toml import Section, load_tree, typed
from volpipe.resolve import default_recipe
from volpipe.volumes.reader import View
from volpipe.volumes.storage.metadata import Lengths, lengths

Auto = Literal["auto"]
Augment = Literal["none", "flips", "rotations"]


def _to_lengths(value: object) -> object:
    """Return three lengths in nm, z, y, x, from what the user wrote; None stays."""
    sizes = lengths(value)
    if value is not None and sizes is None:
        raise ValueError('write three lengths z, y, x: [16, 8, 8] in nm, or with a unit, such as "16x8x8nm"')
    return sizes


def _to_size(value: object) -> object:
    size = _to_lengths(value)
    if isinstance(size, tuple) and min(size) <= 0:
        raise ValueError("a voxel has three lengths above 0")
    return size


def _to_channel(value: object) -> object:
    if isinstance(value, bool) or not (value is None or isinstance(value, int | str)) or value == "":
        raise ValueError("write the number of a channel, the first is 0, or its name")
    if isinstance(value, int) and value < 0:
        raise ValueError("channels count from 0")
    return value


def _to_time(value: object) -> object:
    if isinstance(value, bool) or not (value is None or isinstance(value, int)) or (value or 0) < 0:
        raise ValueError("write the number of a point in time, the first is 0")
    return value


Channel = Annotated[int | str | None, BeforeValidator(_to_channel)]


class ArrayInput(Section):
    """Which array is read, and its voxel size and origin in nm (z, y, x) where they replace the file's.

    channel: the only one that is read, by number or by its name in OME. time: the point in time that is read.
    """

    key: str | None = None
    level: int = Field(0, ge=0)
    channel: Channel = None
    time: Annotated[int | None, BeforeValidator(_to_time)] = None
    voxel_size_nm: Annotated[Lengths | None, BeforeValidator(_to_size)] = None
    origin_nm: Annotated[Lengths | None, BeforeValidator(_to_lengths)] = None

    @property
    def view(self) -> View:
        """The channel, point in time, voxel size and origin, as far as they are given."""
        return View(self.channel, self.time, self.voxel_size_nm, self.origin_nm)


def typed_view(
    *, channel: str | None = None, time: int | None = None, voxel_size: str | None = None, origin: str | None = None
) -> View:
    """Return the view of an array that the options of a command describe.

    Raises:
        RecipeError: a length has no unit, or is none.
    """
    for option, text in (("--voxel-size", voxel_size), ("--origin", origin)):
        if text is not None and lengths(text) is None:
            raise RecipeError(f"{option} {text!r}: write three lengths z, y, x and their unit, such as 16x8x8nm")
    size, place = lengths(voxel_size), lengths(origin)
    if size is not None and min(size) <= 0:
        raise RecipeError(f"--voxel-size {voxel_size!r}: a voxel has three lengths above 0")
    return View(int(channel) if channel is not None and channel.isdecimal() else channel, time, size, place)


class Input(ArrayInput):
    """Which array of the volume is read, and which part of it is wanted.

    `roi` is a box, ``z0:z1,y0:y1,x0:x1``, in voxels or with units; `mask` a volume, nonzero where voxels are wanted.
    `empty` is a value: windows that hold nothing else are not wanted; or "missing": windows without a stored chunk.
    """

    roi: str | None = None
    mask: str | None = None
    empty: Literal["missing"] | Annotated[float, Field(allow_inf_nan=False)] | None = None


class NetChoice(Section):
    """The net: a shipped name, ``module:function``, ``file.py:function``, a file, or a package of bioimage.io.

    TorchScript and torch.export are code that their maker wrote, and are loaded only where `trust_model` says so.
    `scale`, `stride`, `halo`, `intensity` and `out_channels` are for nets from outside that do not say them.
    `weights_key` names the part of a checkpoint that has the weights. `untrained` allows a net without weights: those
    that its code makes, which must be the same at each call.
    `trained_range` is what the plan prints beside the volume's grey levels: those that -1 and 1 stood for in training.
    `offsets`, of affinities: to which voxel (z, y, x) each channel leads; channels are named by them, and
    `volpipe segment` compares them with its own.
    """

    name: str = "unet3d"
    weights: str | None = None
    weights_key: str | None = None
    untrained: bool = False
    options: dict[str, Any] = Field(default_factory=dict)  # Any: whatever the net's function takes
    scale: Triple | None = None
    stride: Triple | None = None
    halo: Triple | None = None
    out_channels: int | None = Field(None, ge=1)
    intensity: Literal["same", "unit", "raw"] | None = None
    trained_range: tuple[float, float] | None = None
    offsets: tuple[Offset, ...] | None = None
    accept_tile_variance: bool = False
    trust_model: bool = False

    @model_validator(mode="after")
    def _agrees(self) -> NetChoice:
        if self.untrained and self.weights is not None:
            raise ValueError(f"untrained = true and weights {self.weights!r} exclude each other; leave one out")
        if self.weights_key is not None and self.weights is None:
            raise ValueError(f"weights_key {self.weights_key!r} is a part of weights, and there are none; give weights")
        return self


class Normalise(Section):
    """Global statistics: given here, or measured once over the whole volume, never per window.

    range: [low, high] to [-1, 1]; where they are not given, the ends of the type, or of a volume of floats its own.
    zscore: mean 0, standard deviation 1. percentile: the two percentiles to [-1, 1]. none: values as they are.
    auto: what is given, low and high or mean and std; else the range of types of 8 bits, and percentiles of others.
    eps: added to a deviation, and to the distance of two percentiles, that are measured; packages ask for it.
    """

    method: Literal["auto", "none", "range", "zscore", "percentile"] = "auto"
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    std: float | None = Field(None, gt=0)
    percentiles: tuple[float, float] = (0.5, 99.5)
    eps: float = Field(0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _pairs(self) -> Normalise:
        if (self.low is None) != (self.high is None) or (self.mean is None) != (self.std is None):
            raise ValueError("give low and high together, and mean and std together")
        if self.mean is not None and (self.low is not None or self.method not in ("auto", "zscore")):
            raise ValueError("mean and std are for method zscore, without low and high; leave out what is not meant")
        if self.low is not None and self.method not in ("auto", "range", "percentile"):
            raise ValueError(f"low and high are for method range, not {self.method}; leave out what is not meant")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if not 0 <= self.percentiles[0] < self.percentiles[1] <= 100:
            raise ValueError(f"percentiles {list(self.percentiles)} must ascend within 0..100")
        return self


class Windows(Section):
    """What the net sees at once, in voxels (z, y, x), and how windows are joined; `block` counts windows."""

    shape: Triple | Auto = "auto"
    overlap: Triple | int | Auto = "auto"
    blend: Family = "crop"
    block: Triple | Auto = "auto"


class Tensors(Section):
    """Whether windows are stored between factor and infer, and how."""

    mode: Literal["auto", "stored", "streamed"] = "auto"
    format: Literal["n5", "zarr3"] = "n5"
    codec: Literal["gzip", "zstd", "raw"] = "gzip"
    level: int = Field(1, ge=0, le=22)


class Infer(Section):
    """How the net is run, and whether a block with NaN or infinity in its output fails or is kept.

    `augment` is what test-time augmentation takes the mean of: all 8 mirrored forms of a window, or 16 that are also
    turned by quarters about z; it takes as many times as long.

    threads: of the CPU, in each worker, to compute a window, the same on every site: another number sums in another
    order, and changes last bits.

    precision: of convolutions and matrices. tf32 is float32 of which GPUs, from Ampere on, multiply only the first 10
    bits of the fraction; other devices compute it in float32.

    On a CPU, `exact` makes a window's bits independent of its shape, several times slower: without it oneDNN chooses
    the order of sums by shape, so that windows agree with the whole volume to about 1e-6 of float32, not to the bit.
    """

    batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    threads: int = Field(1, ge=1, le=1024)
    precision: Literal["float32", "tf32", "bfloat16", "float16"] = "float32"
    channels_last: bool = False
    compile: bool = False
    exact: bool = False
    nonfinite: Literal["refuse", "keep"] = "refuse"
    augment: Augment = "none"


class Output(Section):
    """What is written: format, type, and the sizes of chunk and shard in output voxels (z, y, x).

    A shard of precomputed has as many chunks along z as along y and x, 1, 2, 4, 8 …
    """

    format: Literal["ome-zarr-0.5", "ome-zarr-0.4", "n5", "zarr2", "precomputed"] = "ome-zarr-0.5"
    dtype: Literal["auto", "uint8", "uint16", "int16", "uint32", "int32", "float32"] = "auto"
    intensity: Literal["auto", "same", "unit", "raw"] = "auto"
    kind: Literal["image", "labels"] = "image"
    chunk: Triple | Auto = "auto"
    shard: Triple | Auto = "auto"
    codec: Literal["auto", "zstd", "gzip", "raw"] = "auto"
    codec_level: int = Field(1, ge=0, le=22)
    levels: Annotated[int, Field(ge=0)] | Auto = "auto"


class Recipe(Section):
    """All that decides the bytes of the output, beside the volume itself."""

    input: Input = Input()
    net: NetChoice = NetChoice()
    normalise: Normalise = Normalise()
    windows: Windows = Windows()
    tensors: Tensors = Tensors()
    infer: Infer = Infer()
    output: Output = Output()


def load_recipe(path: Path | None, settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe in the TOML file at `path` with ``key=value`` settings on top; without a path, the default one.

    That is the shipped configs/default.toml, as on the command line.

    `path` may be the name of a shipped recipe, such as superres_z4, or "none": every key has its default.

    Setting ``net.name`` to another net drops the options and weights that the file has for its own.

    Raises:
        RecipeError: no such file, no TOML, an unknown key or a value that does not fit; the message names it.
    """
    path = path or default_recipe()
    return typed(Recipe, load_tree(path, settings), path, settings)
