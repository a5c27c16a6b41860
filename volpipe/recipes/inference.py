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
from volpipe.geometry.grid import Placement, Triple
from volpipe.recipes.toml import Section, UserPath, load_tree, one_or_more, typed
from volpipe.resolve import default_recipe
from volpipe.volumes.formats.container import folders_of
from volpipe.volumes.storage.metadata import Lengths, lengths
from volpipe.volumes.volume import View

Auto = Literal["auto"]
Precision = Literal["float32", "tf32", "bfloat16", "float16"]
Dtype = Literal["auto", "uint8", "uint16", "int16", "uint32", "int32", "float32"]
Augment = Literal["none", "flips", "rotations"]
Factor = int | float
Plane = Literal["yx", "zx", "zy"]
RATIO_ERROR = 0.02  # of one over a factor of a scale, so that 0.333 is a third


def _to_lengths(value: object) -> object:
    """Return three lengths in nm, z, y, x, from what the user wrote; None stays."""
    sizes = lengths(value)
    if value is not None and sizes is None:
        raise ValueError('write three lengths z, y, x: [16, 8, 8] in nm, or with a unit, such as "1,0.5,0.5 um"')
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
    """Which array is read, and its voxel size and origin in nm (z, y, x) where they replace the file's."""

    key: str | None = None
    """The array or group that is read, where the container has several; of a file without a header its shape, type and
    offset, `ZxYxX,TYPE[,OFFSET]`."""
    level: int = Field(0, ge=0)
    """Level of a multiscale group; 0 is the finest."""
    channel: Channel = None
    """The one channel that is read: its number from 0, or its name in OME. Without it, all are read."""
    time: Annotated[int | None, BeforeValidator(_to_time)] = None
    """The point in time that is read, from 0; needed where the array has several."""
    voxel_size_nm: Annotated[Lengths | None, BeforeValidator(_to_size)] = None
    """Voxel size z, y, x in nm, or with a unit such as "1,0.5,0.5 um"; it replaces that of the file."""
    origin_nm: Annotated[Lengths | None, BeforeValidator(_to_lengths)] = None
    """Centre of the first voxel z, y, x in nm, or with a unit; it replaces that of the file."""
    incomplete: bool = False
    """Read an output of volpipe, or a mask, that is not complete: what is not written yet is zeros."""

    @property
    def view(self) -> View:
        """The channel, point in time, voxel size and origin, as far as they are given."""
        return View(self.channel, self.time, self.voxel_size_nm, self.origin_nm, self.incomplete)


def typed_lengths(option: str, text: str) -> Lengths:
    """Return three lengths z, y, x in nm, which an option gives as the keys of a recipe do.

    Raises:
        RecipeError: it gives none.
    """
    sizes = lengths(text) or lengths(f"{text} nm")
    if sizes is None:
        raise RecipeError(f"{option} {text!r}: write three lengths z,y,x in nm, such as 16,8,8")
    return sizes


def typed_view(
    *,
    channel: str | None = None,
    time: int | None = None,
    voxel_size_nm: str | None = None,
    origin_nm: str | None = None,
    incomplete: bool = False,
) -> View:
    """Return the view of an array that the options of a command describe.

    Raises:
        RecipeError: a length is none.
    """
    size = None if voxel_size_nm is None else typed_lengths("--voxel-size-nm", voxel_size_nm)
    place = None if origin_nm is None else typed_lengths("--origin-nm", origin_nm)
    if size is not None and min(size) <= 0:
        raise RecipeError(f"--voxel-size-nm {voxel_size_nm!r}: a voxel has three lengths above 0")
    return View(int(channel) if channel is not None and channel.isdecimal() else channel, time, size, place, incomplete)


class Normalise(Section):
    """Grey levels as the net sees them. Global: given here, or measured once over the volume, never per window."""

    method: Literal["auto", "none", "range", "zscore", "percentile", "bytes"] = "auto"
    """"range": low and high to -1 and 1, without them the ends of the type (of floats, those of the volume). "zscore":
    mean 0, standard deviation 1. "percentile": the two percentiles to -1 and 1. "none": values as they are. "bytes":
    low and high to -1 and 1, without them 0 and 255, of floats also 0 and 1, if all voxels lie there; else as
    percentile. "auto": by what is given; else the range for types of 8 bits, and percentile for others, or bytes where
    `net.trained_range` is known and a sample has grey levels of 8 bits in another type."""
    low: float | None = None
    """The grey level that the net gets as -1; give it with high. Of 8 bits, -255 and 255 give the net image / 255."""
    high: float | None = None
    """The grey level that the net gets as 1; give it with low."""
    mean: float | None = None
    """The grey level that the net gets as 0, with zscore; give it with std."""
    std: float | None = Field(None, gt=0)
    """The standard deviation, in grey levels, that becomes 1 with zscore; give it with mean."""
    percentiles: tuple[float, float] = (0.5, 99.5)
    """The two percentiles that become -1 and 1, where they are measured."""
    per_channel: bool = False
    """Whether each channel of a volume is measured, and mapped, for itself."""
    eps: float = Field(0.0, ge=0)
    """Added to a deviation, and to the distance of two percentiles, that are measured; packages of bioimage.io ask for
    it."""

    @model_validator(mode="after")
    def _pairs(self) -> Normalise:
        if (self.low is None) != (self.high is None) or (self.mean is None) != (self.std is None):
            raise ValueError("give low and high together, and mean and std together")
        if self.mean is not None and (self.low is not None or self.method not in ("auto", "zscore")):
            raise ValueError("mean and std are for method zscore, without low and high; leave out what is not meant")
        if self.low is not None and self.method not in ("auto", "range", "percentile", "bytes"):
            raise ValueError(f"low and high are for method range, not {self.method}; leave out what is not meant")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low {self.low} must be below high {self.high}")
        if not 0 <= self.percentiles[0] < self.percentiles[1] <= 100:
            raise ValueError(f"percentiles {list(self.percentiles)} must ascend within 0..100")
        return self


class AlsoInput(ArrayInput):
    """A volume that is read with the first one: which array of it, and how its grey levels are mapped."""

    from_text = True
    path: UserPath
    """The volume, which has the shape, the voxel size and the origin of the first; in a flow also a stage."""
    normalise: Normalise | None = None
    """As the section `normalise`, for this volume alone. Without it, as that says, but measured for itself."""


def to_inputs(value: object) -> object:
    """Return volumes, of which a text is the place; also of a text with commas, as shells have."""
    if isinstance(value, str):
        value = [part.strip() for part in value.strip("[] ").split(",")]
    if not isinstance(value, list | tuple):
        return value
    return [{"path": entry} if isinstance(entry, str) else entry for entry in value]


class Input(ArrayInput):
    """Which array of the volume is read, and which part of it is selected."""

    roi: str | None = None
    """The box that is computed, `z0:z1,y0:y1,x0:x1`, in voxels, as lengths such as 100nm:900nm or as shares such as
    25%:75%; a bare : is a whole axis."""
    mask: UserPath | None = None
    """A volume of any resolution; voxels where it is not 0 are selected."""
    also: Annotated[tuple[AlsoInput, ...] | None, BeforeValidator(to_inputs)] = None
    """Volumes of the same grid whose channels follow those of the volume: their places, or tables such as
    {path = "mask.zarr", normalise = {method = "none"}}. A net gets all channels; a function gets each volume for
    itself."""
    empty: Literal["missing"] | float | None = None
    """Windows that hold nothing but this value are skipped; "missing": windows without a stored chunk."""


def _to_scale(value: object) -> object:
    """Return the factors of a scale, whole numbers as such; None stays."""
    if not isinstance(value, list | tuple) or not all(isinstance(factor, int | float) for factor in value):
        return value
    for factor in value:
        ratio = 0.0 if factor <= 0 else max(factor, 1 / factor)
        if not ratio or abs(ratio - round(ratio)) > RATIO_ERROR:
            raise ValueError(f"{factor} is neither a whole number nor one over a whole number, such as 0.5")
    return value


class EnsembleMember(Section):
    """A net of an ensemble: keys that stand here in place of those of `net`."""

    from_text = True
    name: UserPath | None = None
    """As `net.name`; a net of another name takes no options of `net`."""
    weights: UserPath | None = None
    """As `net.weights`."""
    weights_key: str | None = None
    """As `net.weights_key`."""
    options: dict[str, Any] | None = None  # Any: whatever the net's function takes
    """As `net.options`."""
    output: int | str | None = None
    """As `net.output`."""


def _to_members(value: object) -> object:
    """Return the members of an ensemble, of which a text is the weights; also of a text with commas, as shells have."""
    if isinstance(value, str):
        value = [part.strip() for part in value.strip("[] ").split(",")]
    if not isinstance(value, list | tuple):
        return value
    return [{"weights": entry} if isinstance(entry, str) else entry for entry in value]


class NetChoice(Section):
    """The net: where it comes from, its weights, and what it does not say of itself."""

    name: UserPath = "unet3d"
    """A shipped net (see `volpipe nets`), `module:function`, `file.py:function`, or a file: net.onnx, package.zip
    (bioimage.io), net.pt (TorchScript), net.pt2 (torch.export)."""
    weights: UserPath | None = None
    """The file of the weights, safetensors or a torch checkpoint; a net with parameters needs one."""
    weights_key: str | None = None
    """The part of a checkpoint that has the weights, where several fit."""
    ensemble: Annotated[tuple[EnsembleMember, ...] | None, BeforeValidator(_to_members)] = None
    """Several nets in one pass over the volume, in place of one: files of weights of the net `name`, or tables such as
    {name = "b.onnx"}, whose keys replace those here. All have the same grid, channels and normalisation; windows get
    the largest halo."""
    combine: Literal["mean", "median", "vote"] | None = None
    """What of an ensemble is taken, of the numbers that its nets give, before `output.activation`: their mean, as
    without this key, or their median; "vote", with `output.kind` = "classes": the class that most nets give, of several
    the first."""
    untrained: bool = False
    """Run a net with the parameters that its code makes, the same at each call. The output is noise: for tests."""
    options: dict[str, Any] = Field(default_factory=dict)  # Any: whatever the net's function takes
    """Arguments of the net's function."""
    output: int | str | None = None
    """Of a net with several outputs, the one that is taken: its number from 0 or its name; "all" writes
    each into an array of its own. Without it, the only one on the grid of the input."""
    plane: Annotated[tuple[Plane, ...] | None, BeforeValidator(one_or_more)] = None
    """For a net of slices (n, c, y, x): the plane of the slices, "yx", "zx" or "zy". Of a list of planes, such as
    ["yx", "zx", "zy"], the mean is taken. Without it, "yx"."""
    context: int | None = Field(None, ge=0)
    """For a net of slices that gets neighbours as channels: how many on each side. 2 is for a net of 5 channels."""
    scale: Annotated[tuple[Factor, Factor, Factor] | None, BeforeValidator(_to_scale)] = None
    """Output voxels per input voxel (z, y, x), such as [1, 0.5, 0.5]; measured where neither the net nor this says
    it."""
    margin: Triple | None = None
    """Voxels that the output lacks on each side of a window (z, y, x), as after convolutions without padding; measured
    where neither the net nor this says it."""
    remainder: Triple | None = None
    """The net takes windows of remainder + k · stride voxels (z, y, x); measured where neither the net nor this says
    it."""
    stride: Triple | None = None
    """Windows are multiples of it (z, y, x), in input voxels; measured where neither the net nor this says it."""
    halo: Triple | None = None
    """How far an output voxel sees (z, y, x), in input voxels; measured where neither the net nor this says it."""
    out_channels: int | None = Field(None, ge=1)
    """Channels of the output; measured where neither the net nor this says it."""
    intensity: Literal["same", "unit", "raw"] | None = None
    """What the net gives: "same", grey levels as its input has them; "unit", 0 to 1; "raw", other numbers."""
    trained_range: tuple[float, float] | None = None
    """The grey levels that -1 and 1 stood for in training. They are printed beside those of the volume, with a warning
    where they differ; see `normalise.method`, auto."""
    spacing: Annotated[Lengths | None, BeforeValidator(_to_size)] = None
    """Voxel size z, y, x in nm, or with a unit, that the net has learned. A volume of other voxels is interpolated to
    about that size as it is read: by a cubic spline, and smoothed before where voxels become longer. Without it, as
    the net declares; see `output.grid`."""
    offsets: tuple[Offset, ...] | None = None
    """For affinities: the voxel (z, y, x) that each channel leads to. Channels are named by them, and `volpipe segment`
    compares them with its own."""
    accept_tile_variance: bool = False
    """Run a net with a smaller `halo` than it sees, or one whose windows cannot be compared. It makes seams. Nets that
    look at whole windows run without this key: see `windows.placement`."""
    trust_model: bool = False
    """Load a file that is code, TorchScript or torch.export, or a package whose weights are code (`--trust-model`)."""

    @model_validator(mode="after")
    def _agrees(self) -> NetChoice:
        if self.untrained and self.weights is not None:
            raise ValueError(f"untrained = true and weights {self.weights!r} exclude each other; leave one out")
        if self.weights_key is not None and self.weights is None:
            raise ValueError(f"weights_key {self.weights_key!r} is a part of weights, and there are none; give weights")
        if self.ensemble is None:
            if self.combine is not None:
                raise ValueError(f"combine {self.combine!r} is of an ensemble, and there is none; give ensemble")
            return self
        if self.weights is not None:
            raise ValueError(f"ensemble and weights {self.weights!r} exclude each other; name them in the ensemble")
        if len(self.ensemble) < 2:
            raise ValueError("an ensemble has two nets or more; give the weights of one as weights")
        for i, entry in enumerate(self.ensemble):
            if entry in self.ensemble[:i]:
                raise ValueError(f"entries {self.ensemble.index(entry)} and {i} of the ensemble are the same net")
            if self.untrained and entry.weights is not None:
                raise ValueError(f"untrained = true and weights {entry.weights!r} exclude each other; leave one out")
            if entry.weights_key is not None and entry.weights is None:
                raise ValueError(f"weights_key {entry.weights_key!r} is a part of weights, and entry {i} has none")
        return self

    @property
    def members(self) -> tuple[NetChoice, ...]:
        """The nets of the ensemble, each as a choice of its own; this one where there is no ensemble."""
        if self.ensemble is None:
            return (self,)
        alone = self.model_copy(update={"ensemble": None, "combine": None})
        return tuple(
            alone.model_copy(
                update=({"options": {}} if entry.name not in (None, self.name) else {})
                | {key: value for key, value in entry if value is not None}
            )
            for entry in self.ensemble
        )


class Windows(Section):
    """What the net sees at once, in voxels (z, y, x), and how windows are joined."""

    shape: Triple | Auto = "auto"
    """Voxels of a window (z, y, x), multiples of the net's stride. auto: with crop the fastest measured windows that
    fit the memory of the site's workers; the net's own where nothing was measured, or no site is known."""
    overlap: Triple | int | Auto = "auto"
    """Voxels that neighbouring windows share (z, y, x). auto: twice the net's halo for crop; else a quarter of the
    window, and half of it at the edge."""
    blend: Family | Auto = "auto"
    """How windows are joined. crop: each keeps its core. The others are weights that overlap, and sum to one at every
    voxel. auto: crop; gaussian for nets that look at whole windows."""
    placement: Placement | Auto = "auto"
    """Where windows lie. lattice: their cores begin with the volume, and they see it mirrored at its faces. edge: they
    begin with the volume, and the last one along an axis ends with it, as in MONAI. even: spread so, as in nnU-Net.
    Volumes smaller than a window are padded with zeros there. auto: lattice; edge for nets that look at whole
    windows."""
    block: Triple | Auto = "auto"
    """Windows of a block (z, y, x), which is the unit of work. auto: by the volume and the workers of the site; a run
    that was begun keeps its own."""


class Tensors(Section):
    """Whether windows are stored between factor and infer, and how."""

    mode: Literal["auto", "stored", "streamed"] = "auto"
    """streamed: windows are cut where the net runs. stored: the stage factor writes them first. auto: the cheaper."""
    format: Literal["n5", "zarr3"] = "n5"
    """Of stored windows. n5: a window is a file. zarr3: a block is a file."""
    codec: Literal["gzip", "zstd", "raw"] = "gzip"
    """Compression of stored windows."""
    level: int = Field(1, ge=0, le=22)
    """Level of that compression; gzip has 0 to 9."""

    @property
    def is_sharded(self) -> bool:
        """Whether the windows of a block are one file, and not one each."""
        return folders_of(self.format).is_sharded


class Infer(Section):
    """How the net is run."""

    batch: Annotated[int, Field(ge=1)] | Auto = "auto"
    """Windows of one pass. auto: one on a CPU, as many as keep a GPU at work. A batch that is too much is halved."""
    threads: int = Field(1, ge=1, le=1024)
    """Threads of a CPU in each worker. Another number sums in another order and changes last bits, so it is the
    recipe's, not the site's."""
    precision: Precision | Auto = "float32"
    """Of the net's arithmetic; sums over windows are float32. tf32: float32 of which GPUs, from Ampere on, multiply
    only the first 10 bits of the fraction; other devices compute in float32. auto: bfloat16, or tf32 on a GPU, where it
    was measured to be faster on the processors or GPUs of the site, and to change voxels of 8 bits by no more than one
    grey level, those of floats by no more than a thousandth of the output's range; else float32."""
    channels_last: bool | Auto = "auto"
    """Lay tensors out with channels last. It changes last bits. auto: where the net was measured to be faster so on the
    processors of the site."""
    compile: bool = False
    """Compile the net with torch.compile."""
    exact: bool = False
    """On a CPU: make a window's bits independent of its shape, several times slower. Without it, windows agree with the
    whole volume to about 1e-6 of float32."""
    nonfinite: Literal["refuse", "keep"] = "refuse"
    """refuse: a block with NaN or infinity in the output of the net fails. keep: they are counted and kept, in outputs
    of float32."""
    augment: Augment = "none"
    """Test-time augmentation: the mean over 8 mirrored forms (flips), or 16 that are also turned about z (rotations);
    it takes as many times as long. Affinities (`net.offsets`) are means over the same pair of voxels."""


class ArrayOutput(Section):
    """What is written of one of a net's outputs, where all of them are; what is left out is as for the others."""

    dtype: Dtype | None = None
    """As `output.dtype`."""
    intensity: Literal["auto", "same", "unit", "raw"] | None = None
    """As `output.intensity`."""
    kind: Literal["image", "labels", "classes"] | None = None
    """As `output.kind`."""
    activation: Literal["none", "sigmoid", "softmax"] | None = None
    """As `output.activation`."""


class Output(Section):
    """What is written: format, type and layout."""

    format: Literal["ome-zarr-0.5", "ome-zarr-0.6", "ome-zarr-0.4", "n5", "zarr2", "precomputed"] = "ome-zarr-0.5"
    """The format of the output. precomputed is Neuroglancer's, sharded."""
    dtype: Dtype = "auto"
    """The type of voxels. auto: that of the input for grey values. Integers are rounded half to even, then clipped."""
    intensity: Literal["auto", "same", "unit", "raw"] = "auto"
    """"same": back to the grey levels of the input. "unit": 0 to 1 become the range of the type. "raw": as the net
    gives them. auto: as the net says."""
    kind: Literal["image", "labels", "classes"] = "image"
    """How coarser levels are made, the mean of images or the mode of labels, and what viewers read about it. classes:
    the output is the number of the channel that is largest, 0 for the first; coarser levels as for labels."""
    grid: Literal["auto", "net", "input"] = "auto"
    """Where voxels are interpolated for the net (`net.spacing`): on which grid the output lies. "net": the net's.
    "input": the volume's, times the scale of a net that makes more voxels; labels and classes have the nearest voxel of
    the net's grid, others are interpolated linearly, and what the net gave stays beside them in the group `net`. auto:
    input for labels and classes, which lie on top of the image then; net for others, and for nnU-Net's folders."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """What is done to the net's numbers once its windows are joined; softmax goes over the channels."""
    labels: tuple[Annotated[int, Field(ge=0, le=65535)], ...] = ()
    """Of kind classes: the label that is written for each channel, in place of its number. With activation sigmoid,
    classes overlap: the label of the last channel above a half, 0 where none is, as nnU-Net's regions_class_order."""
    chunk: Triple | Auto = "auto"
    """Output voxels of a chunk (z, y, x), the unit of reading."""
    shard: Triple | Auto = "auto"
    """Output voxels of a shard (z, y, x), which is one file and is written once. One of precomputed has as many chunks
    along z as along y and x: 1, 2, 4, 8 …"""
    codec: Literal["auto", "zstd", "gzip", "raw"] = "auto"
    """Compression. auto: zstd with a checksum for Zarr, gzip for N5 and precomputed (labels:
    compressed_segmentation)."""
    codec_level: int = Field(1, ge=0, le=22)
    """Level of the compression; gzip has 0 to 9."""
    levels: Annotated[int, Field(ge=0)] | Auto = "auto"
    """Number of coarser levels beside level 0."""
    arrays: dict[str, ArrayOutput] = Field(default_factory=dict)
    """With `net.output` = "all": keys of one of the arrays, such as `arrays.distance.dtype`."""

    @model_validator(mode="after")
    def _labels_of_classes(self) -> Output:
        if self.labels and self.kind != "classes":
            raise ValueError("labels are written for kind classes; set kind, or leave labels out")
        return self


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

    Setting ``net.name`` to another net drops the options and weights that the file has for its own, and no setting:
    their order does not matter.

    Raises:
        RecipeError: no such file, no TOML, an unknown key or a value that does not fit; the message names it.
    """
    path = path or default_recipe()
    return typed(Recipe, load_tree(path, settings), path, settings)
