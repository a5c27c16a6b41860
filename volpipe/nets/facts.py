"""The facts of nets, the checks of a recipe against them, and the facts of shipped nets, from models/facts.json.

Not here: building a net to examine it (load). scripts/describe writes models/facts.json, by hashes of the nets' code,
weights and options: planning with an unchanged net needs no import of torch, and a changed one is built.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from volpipe.errors import PlanError, VolpipeError
from volpipe.geometry.grid import triple
from volpipe.nets.files import FUNCTION, is_program, place_of
from volpipe.nets.identity import NetIdentity
from volpipe.nets.net_geometry import BY_SPLINES, Interpolation, LabelRegion, NetArray
from volpipe.recipes.inference import NetChoice, Normalise, Output, Precision, Recipe, Windows
from volpipe.resolve import default_recipe, nearest, shipped
from volpipe.volumes.formats.known import FORMATS, format_named
from volpipe.volumes.on_grid import resampled
from volpipe.volumes.resampling import Resampling
from volpipe.volumes.storage.metadata import Lengths, shown
from volpipe.volumes.values import zero_faces
from volpipe.volumes.volume import Volume

Sizes = tuple[PositiveInt, PositiveInt, PositiveInt]
Sides = tuple[NonNegativeInt, NonNegativeInt, NonNegativeInt]
FILE = "facts.json"
SAME_SIZE = 0.01  # of a voxel's length, by which sizes may differ that were rounded
SHIPPED_WEIGHTS = "volpipe:"
OF_THE_RUN = {  # not of the net itself
    "accept_tile_variance", "offsets", "spacing", "trained_range", "trust_model", "untrained",
}  # fmt: skip
S = TypeVar("S", Windows, Output)
UNITS = (1e-1, 1.0, 1e3, 1e6)  # nm in the units that makers count in: Å, nm, µm, mm
RESAMPLED_UNITS = UNITS[1:]  # far enough apart that the sizes of a volume tell which is meant
FARTHEST = 4.0  # times as long voxels, on the mean of the axes: beyond that another unit may be meant
OPTIONAL = {
    "combine",
    "context",
    "ensemble",
    "margin",
    "output",
    "plane",
    "remainder",
}  # which no hash of a net without them holds

log = logging.getLogger(__name__)


class NetFacts(BaseModel):
    """The facts of a net that a plan needs; sizes in input voxels (z, y, x).

    A window of w voxels gives (w - 2 * margin) * scale // shrink along each axis::

        input   |mm|ssss|ssss|mm|   w = remainder + k * stride
        output     |oooo|oooo|      output voxels at least halo - margin from its faces equal those of the whole

    Attributes:
        stride: period of the net's own grid; a multiple of `shrink`.
        halo: at least `margin`; equal to it where no layer pads, else beyond it in whole strides.
        margin: input voxels that a window loses on each side, as by convolutions without padding; where a net loses one
            more behind than before, the larger, and the first output voxel is dropped.
        remainder: the net takes windows of remainder + k * stride voxels, and gives for them what it gives for the
            whole.
        shrink: input voxels per output voxel where the output is coarser; scale is 1 there.
        integers: it takes whole numbers of any type as well, and gives the same type.
        outputs: name and shape of each, of a net with several.
        arrays: the outputs that are joined in one, if they are; of one that is taken out of these, that one.
        planes: that a net of slices is run over, such as "yx"; none of a net of volumes.
        context: neighbouring slices on each side that such a net gets as channels.
        windows, output: keys of a recipe that the net's maker gives, taken where the recipe leaves them open.
        padding: of each channel, normalised: what windows hold outside a volume that is smaller; nothing for zeros.
        spacing: lengths of a voxel (z, y, x) that it was trained on, in the unit that `interpolation` says, else in
            some unit; 0 along an axis where any will do.
        interpolation: how volumes of other voxels are resampled to these; None where they are refused.
        dtype: of what a function on arrays gives, which gets voxels as they are stored; "" of a net.
        given: channels and type of each volume that a function gets, of several.
        identity: by which a user's net differs from others, beside its weights and its source.
        crops_zeros: its maker's tools leave out borders of zeros before they measure grey levels and place windows.
        regions: one for each channel where these are no exclusive classes.
        least: the smallest window that its maker allows.
        has_open_axes: its maker's tools load volumes, some of them with axes x, y, z, and nobody says in which order it
            counts axes.
        axcodes: to where x, y and z run in the volumes that it knows, such as "RAS"; "" where that is not said.
        members: those of the nets of an ensemble, in its order, but for their identities, which its own has.
        combine: what is taken of their outputs; "" of a single net.
    """

    model_config = ConfigDict(frozen=True)

    label: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # it is part of paths
    in_channels: PositiveInt
    out_channels: PositiveInt
    scale: Sizes
    stride: Sizes
    halo: Sides
    window: Sizes
    intensity: Literal["same", "unit", "raw"]
    tile_invariant: bool
    num_parameters: int
    weights_sha256: str
    fixed: Sides = (0, 0, 0)
    normalise: Normalise | None = None
    integers: bool = False
    margin: Sides = (0, 0, 0)
    remainder: Sides = (0, 0, 0)
    shrink: Sizes = (1, 1, 1)
    outputs: tuple[str, ...] = ()
    arrays: tuple[NetArray, ...] = ()
    planes: tuple[str, ...] = ()
    context: NonNegativeInt = 0
    windows: Windows | None = None
    output: Output | None = None
    padding: tuple[float, ...] = ()
    spacing: tuple[NonNegativeFloat, NonNegativeFloat, NonNegativeFloat] | None = None
    interpolation: Interpolation | None = None
    crops_zeros: bool = False
    regions: tuple[LabelRegion, ...] = ()
    least: Sizes = (1, 1, 1)
    has_open_axes: bool = False
    axcodes: str = ""
    dtype: str = ""
    given: tuple[tuple[int, str], ...] = ()
    identity: NetIdentity = NetIdentity()
    members: tuple[NetFacts, ...] = ()
    combine: Literal["", "mean", "median", "vote"] = ""

    @model_serializer(mode="wrap")
    def _of_net(self, dump: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Return the facts as a dictionary, without the rare ones that this net does not have."""
        tree: dict[str, object] = dump(self)
        is_set = {
            "dtype": self.dtype, "regions": self.regions, "least": max(self.least) > 1,
            "identity": self.identity != NetIdentity(), "members": self.members, "combine": self.combine,
            "given": self.given, "has_open_axes": self.has_open_axes, "axcodes": self.axcodes,
        }  # fmt: skip
        return {key: value for key, value in tree.items() if is_set.get(key, True)}

    def as_begun(self, begun: NetFacts) -> NetFacts:
        """Return these facts, with the identity as of `begun`, if that is the same net."""
        if begun.identity.differences(self.identity):
            return self
        return self.model_copy(update={"identity": begun.identity})

    def of_array(self, array: NetArray) -> NetFacts:
        """Return the facts of `array`, one of the outputs that are joined."""
        sizes = zip(self.scale, self.shrink, array.coarser, strict=True)
        ratios = [Fraction(scale, shrink * coarser) for scale, shrink, coarser in sizes]
        return self.model_copy(
            update={
                "label": f"{self.label}.{array.name}", "out_channels": array.stop - array.first,
                "scale": tuple(ratio.numerator for ratio in ratios), "shrink": tuple(r.denominator for r in ratios),
                "arrays": (array,),
            }
        )  # fmt: skip

    @property
    def each(self) -> tuple[NetFacts, ...]:
        """The facts of the nets of an ensemble; these where there is one net."""
        if not self.members:
            return (self,)
        pairs = zip(self.members, self.identity.members, strict=True)
        return tuple(own.model_copy(update={"identity": identity}) for own, identity in pairs)

    @property
    def num_stacked(self) -> int:
        """How many nets have their channels one after the other in `out_channels`, until windows are joined.

        A mean is taken before: that of joined windows is the same. Medians and votes are not.
        """
        return len(self.members) if self.combine in ("median", "vote") else 1

    @property
    def combined_channels(self) -> int:
        """Channels of the output, those of the nets of an ensemble combined."""
        return self.out_channels // self.num_stacked

    @property
    def across(self) -> int | None:
        """The axis across the slices of a net that runs over those of one plane."""
        return {"yx": 0, "zx": 1, "zy": 2}[self.planes[0]] if len(self.planes) == 1 else None

    def output_shape(self, window: Iterable[int]) -> tuple[int, ...]:
        """Return the shape (z, y, x) of the net's output for a window of the shape `window`."""
        sizes = zip(window, self.margin, self.scale, self.shrink, strict=True)
        return tuple((w - 2 * m) * s // u for w, m, s, u in sizes)


class Arithmetic(NamedTuple):
    """How a net computes: with which layout of tensors, and how precisely."""

    channels_last: bool
    precision: Precision

    @property
    def words(self) -> str:
        """Both, for people; channels first is not said."""
        return f"{self.precision}, channels last" if self.channels_last else self.precision


FLOAT32 = Arithmetic(channels_last=False, precision="float32")


class WindowSpeed(BaseModel):
    """Seconds of one call of a net for one window (z, y, x), on one core or on one GPU."""

    model_config = ConfigDict(frozen=True)

    window: Sizes
    seconds: PositiveFloat


class WindowSpeeds(BaseModel):
    """What windows of ascending sizes cost a net in one arithmetic.

    Attributes:
        bytes_per_voxel: memory that the net takes per voxel of a window.
        windows: none of a net without parameters, which is as fast in any, and where none was timed.
    """

    model_config = ConfigDict(frozen=True)

    arithmetic: Arithmetic
    bytes_per_voxel: NonNegativeFloat
    windows: tuple[WindowSpeed, ...] = ()

    def seconds(self, voxels: int) -> float | None:
        """Return the seconds of a call for so many `voxels`, from the measured windows next in size; None without any.

        What a voxel takes lies on lines between measured sizes, over their logarithm; beyond them it stays.
        """
        measured = sorted((math.prod(speed.window), speed.seconds) for speed in self.windows)
        if not measured:
            return None
        sizes = [math.log(size) for size, _ in measured]
        per_voxel = [seconds / size for size, seconds in measured]
        return voxels * float(np.interp(math.log(voxels), sizes, per_voxel))


class NetSpeeds(BaseModel):
    """What windows cost a net by each arithmetic, on a kind of processor or GPU, whose name is as the system has it."""

    model_config = ConfigDict(frozen=True)

    processor: str
    speeds: tuple[WindowSpeeds, ...] = ()

    def of(self, arithmetic: Arithmetic) -> WindowSpeeds | None:
        """Return what was measured of `arithmetic`; None where nothing was. TF32 of a processor is float32."""
        found = {speeds.arithmetic: speeds for speeds in self.speeds}
        is_tf32 = arithmetic.precision == "tf32" and arithmetic not in found
        return found.get(arithmetic._replace(precision="float32") if is_tf32 else arithmetic)


def speeds_of_members(speeds: Sequence[NetSpeeds]) -> NetSpeeds:
    """Return what windows cost nets that are called one after the other, as far as all of them were measured."""
    first, *others = speeds
    joined = list[WindowSpeeds]()
    for own in first.speeds:
        rest = [found for each in others if (found := each.of(own.arithmetic)) is not None]
        if len(rest) < len(others):
            continue
        windows = []
        for speed in own.windows:
            seconds = [each.seconds(math.prod(speed.window)) for each in rest]
            if None not in seconds:
                windows.append(speed.model_copy(update={"seconds": speed.seconds + math.fsum(filter(None, seconds))}))
        most = max(each.bytes_per_voxel for each in (own, *rest))
        joined.append(WindowSpeeds(arithmetic=own.arithmetic, bytes_per_voxel=most, windows=tuple(windows)))
    return NetSpeeds(processor=first.processor, speeds=tuple(joined))


class PrecisionDifference(BaseModel):
    """How the output of a net in another precision differs from that in float32, over an invented volume of 8 bits.

    Attributes:
        normalise: of that volume.
        relative: the largest difference, as a share of the range of the output.
        levels: the largest in grey levels, once both are rounded to 8 bits; None of an output that is no grey levels.
        share: of these voxels that differ, 0 to 1.
    """

    model_config = ConfigDict(frozen=True)

    normalise: Normalise
    relative: NonNegativeFloat
    levels: NonNegativeInt | None = None
    share: NonNegativeFloat = 0.0


def models_folder() -> Path:
    import volpipe.models

    return Path(volpipe.models.__path__[0])


def weights_path(weights: str, search_path: str) -> Path:
    """Return the file of weights: "volpipe:NAME" is a shipped one, anything else a path of the user's."""
    if weights.startswith(SHIPPED_WEIGHTS):
        return models_folder() / weights.removeprefix(SHIPPED_WEIGHTS)
    return Path(search_path) / weights


def is_shipped(choice: NetChoice) -> bool:
    """Return whether the net's code ships with volpipe, that of all nets of an ensemble."""
    return not any(":" in member.name or is_program(member.name) for member in choice.members)


def facts_key(choice: NetChoice) -> str | None:
    """Return the key in facts.json of a net with shipped code and weights; None for the user's code or weights."""
    own = choice.ensemble is None and (choice.weights or SHIPPED_WEIGHTS).startswith(SHIPPED_WEIGHTS)
    return choice_digest(choice, "", [models_folder() / f"{choice.name}.py"]) if own and is_shipped(choice) else None


def choice_digest(choice: NetChoice, search_path: str, files: Iterable[Path], *more: str) -> str | None:
    """Return the hash of a net's section, of its weights and of these `files`; None where one is missing."""
    unset = {key for key in OPTIONAL if getattr(choice, key) is None}
    result = hashlib.sha256(" ".join((*more, choice.model_dump_json(exclude=OF_THE_RUN | unset))).encode())
    weights = [weights_path(each.weights, search_path) for each in choice.members if each.weights is not None]
    for file in (*files, *weights):
        if not file.is_file():
            return None  # build_net refuses it
        with file.open("rb") as stream:
            result.update(hashlib.file_digest(stream, "sha256").digest())
    return result.hexdigest()


def recipes_for(name: str) -> list[str]:
    """Return the names of the shipped recipes that run the net `name` with weights."""
    recipes = []
    for file in sorted(default_recipe().parent.glob("*.toml")):
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
        net = tree.get("net", {})
        if net.get("name") == name and "weights" in net and "data" not in tree:  # which a training has
            recipes.append(file.stem)
    return recipes


def look_up(choice: NetChoice) -> Mapping[str, Any] | None:  # Any: JSON
    """Return the facts of the net of `choice` in facts.json; None without an entry.

    Facts of random weights hold for the release of torch that drew them.
    """
    known = _shipped_facts().get(facts_key(choice))
    if known is None or known["torch"] not in (None, torch_version()):
        return None
    facts: Mapping[str, Any] = known["facts"]
    return facts


def shipped_speeds(choice: NetChoice) -> NetSpeeds | None:
    """Return what windows of the net of `choice` cost on a CPU; None if facts.json lacks it.

    That does not depend on the weights.
    """
    key = shape_key(choice)
    return next((NetSpeeds.model_validate(e["speeds"]) for e in _shipped_facts().values() if e["shape"] == key), None)


def shipped_difference(choice: NetChoice) -> PrecisionDifference | None:
    """Return the difference of the net of `choice` in bfloat16, with its weights; None if facts.json lacks it."""
    known = _shipped_facts().get(facts_key(choice), {}).get("difference")
    return None if known is None else PrecisionDifference.model_validate(known)


def _shipped_facts() -> dict[str | None, dict[str, Any]]:  # Any: JSON
    """Return the entries of facts.json; none where it is missing, as in some checkouts: nets are built then."""
    try:
        entries: dict[str | None, dict[str, Any]] = json.loads((models_folder() / FILE).read_text(encoding="utf-8"))
        return entries
    except (OSError, ValueError):
        return {}


def bytes_per_voxel(choice: NetChoice, arithmetic: Arithmetic = FLOAT32) -> float | None:
    """Return the bytes on a CPU per voxel of a window for the net of `choice`; None if facts.json lacks it."""
    speeds = shipped_speeds(choice)
    known = None if speeds is None else speeds.of(arithmetic)
    return None if known is None else known.bytes_per_voxel


def shape_key(choice: NetChoice) -> str | None:
    """Return the hash of a shipped net's code and options, without its weights; None for a user's net."""
    return None if choice.ensemble else facts_key(NetChoice(name=choice.name, options=choice.options))


@cache
def torch_version() -> str:
    """Return the installed version of torch, without its build."""
    return version("torch").partition("+")[0]


def check_trained(choice: NetChoice, facts: NetFacts) -> None:
    """Refuse a net whose parameters are not trained: its output would be noise.

    Files and packages have their weights in them; nets without parameters need none.

    Raises:
        PlanError: with the ways out.
    """
    if choice.ensemble is not None:
        for member, own in zip(choice.members, facts.each, strict=True):
            check_trained(member, own)
        return
    if not facts.num_parameters or choice.weights is not None or choice.untrained or is_program(choice.name):
        return
    if is_shipped(choice):
        recipes = " or ".join(f"--recipe {name}" for name in recipes_for(choice.name))
        ways = f"set net.weights to a file of them{recipes and f', take {recipes}, which have weights for it'}"
        rest = "set net.untrained=true to try it without"
    else:
        ways = "save its state dict with torch.save, and set net.weights to that file"
        rest = "set net.untrained=true if its code sets them itself, to the same values at each call"
    raise PlanError(
        f"net {facts.label} has {facts.num_parameters:,} parameters and no weights, so that its output would be noise; "
        f"{ways}, or {rest}"
    )


def check_thickness(volume: Volume, net: NetFacts) -> None:
    """Refuse a volume of one slice for a net that sees its neighbours, which would all be that slice, mirrored.

    Raises:
        PlanError: with the way to make slices a volume.
    """
    for axis, size, halo in zip("zyx", volume.spatial_shape, net.halo, strict=True):
        if size == 1 and halo:
            raise PlanError(
                f"{volume} is one voxel thick along {axis}, and net {net.label} sees {halo} voxels to either side, "
                "which would all be mirror images of that one. To make slices a volume, put them as TIFF files into a "
                "folder and name that; for single images choose a net that is 2D"
            )


def check_net(recipe: Recipe, volume: Volume, net: NetFacts) -> None:
    """Refuse a net that the volume or the recipe does not fit.

    Raises:
        PlanError: for its channels, its axes, its voxels, or its offsets.
    """
    if net.in_channels != volume.num_channels:
        raise PlanError(
            f"net {net.label} takes {_channel_count(net.in_channels)}, the volume {volume} has {volume.channels}; "
            + _remedy(volume, net)
        )
    _check_axes(volume, net)
    _check_spacing(volume, net)
    offsets = recipe.net.offsets
    channels = [array.stop - array.first for array in net.arrays] or [net.combined_channels]
    if offsets is not None and channels.count(len(offsets)) != 1:
        raise PlanError(
            f"net.offsets names {_channel_count(len(offsets))}, net {net.label} makes "
            f"{' and '.join(map(str, channels))}; give one for each, or leave them out where they are no affinities"
        )


def with_spacing(choice: NetChoice, net: NetFacts) -> NetFacts:
    """Return `net` with the voxel size of its training that a recipe gives, if it does.

    Raises:
        PlanError: the net's maker says it, and how other volumes are resampled.
    """
    if choice.spacing is None:
        return net
    if net.interpolation is not None and not net.interpolation.in_nm:
        raise PlanError(
            f"net {net.label} says itself which voxels it was trained on, {_trained_size(net)}, and how others are "
            "resampled; leave out net.spacing"
        )
    return net.model_copy(update={"spacing": choice.spacing, "interpolation": BY_SPLINES})


def on_trained_grid(volume: Volume, net: NetFacts) -> Volume:
    """Return `volume` on the grid of voxels that the net was trained on, where its maker resamples others."""
    size, how = volume.voxel_size_nm, net.interpolation
    if how is None or size is None or volume.resampling is not None or _is_any(net) or _has_spacing(size, net):
        return volume
    assert net.spacing is not None
    given = [(v, s) for v, s in zip(size, net.spacing, strict=True) if s]
    mean = math.prod(v / s for v, s in given) ** (1 / len(given))
    unit = 1.0 if how.in_nm else min(RESAMPLED_UNITS, key=lambda unit: abs(math.log(mean / unit)))
    if not how.in_nm and not 1 / FARTHEST <= mean / unit <= FARTHEST:
        return volume
    old = triple(v / unit for v in size)
    new = triple(s or v for v, s in zip(old, net.spacing, strict=True))
    shape = triple(max(1, round(a / b * n)) for a, b, n in zip(old, new, volume.spatial_shape, strict=True))
    grid = Resampling(shape, volume.spatial_shape, volume.dtype.name, how.orders(old, new), how.limits)
    return resampled(volume, grid.smoothed() if how.smooths else grid)


def spacing_notes(volume: Volume, net: NetFacts) -> list[str]:
    """Return what a user should know of the level from which voxels are interpolated for a net, in sentences."""
    grid, size, how = volume.resampling, volume.voxel_size_nm, net.interpolation
    if grid is None or size is None or how is None or not how.in_nm:
        return []
    stored, notes = triple(v / step for v, step in zip(size, grid.steps, strict=True)), []
    if any(step < 1 / FARTHEST for step in grid.steps):
        notes.append(
            f"voxels of {volume} are {shown(stored)} nm, and net {net.label} was trained on those of {shown(size)} nm: "
            "interpolation adds no such detail; is net.spacing in nm, and the voxel size right?"
        )
    if len(volume.levels) > 1 and volume.view.voxel_size_nm is None and volume.view.origin_nm is None:
        sizes = [volume.level(number).voxel_size_nm or stored for number in range(len(volume.levels))]
        longest = [s * (1 + SAME_SIZE) if s else math.inf for s in net.spacing or size]
        fine = [n for n, each in enumerate(sizes) if all(v <= most for v, most in zip(each, longest, strict=True))]
        best, own = max(fine, default=0), volume.levels.index(volume.key)
        if best != own:
            fewer = "is read faster" if best > own else f"has detail that level {own} lacks"
            notes.append(
                f"level {best} of {volume} has voxels of {shown(sizes[best])} nm, nearer to those of the training of "
                f"net {net.label}: input.level={best} {fewer}"
            )
    return notes


def border_notes(volume: Volume, net: NetFacts) -> list[str]:
    """Return a sentence if faces of `volume` seem to be zeros, which the tools of the net's maker leave out."""
    faces = zero_faces(volume) if net.crops_zeros else []
    if not faces:
        return []
    return [
        f"{volume} is 0 on its {'face' if len(faces) == 1 else 'faces'} {', '.join(faces)}, as far as was looked: the "
        "tools of the net's maker cut off borders of zeros before they measure grey levels and place windows, which is "
        "not done here; expect other numbers, or write the part within the borders as an array of its own"
    ]


def _is_any(net: NetFacts) -> bool:
    """Return whether nothing is known of the voxels of the net's training."""
    return net.spacing is None or not any(net.spacing)


def _has_spacing(size: Lengths, net: NetFacts) -> bool:
    """Return whether voxels of `size` are those of the net's training, in some unit."""
    ratios = [v / s for v, s in zip(size, net.spacing or size, strict=True) if s]
    units = (1.0,) if net.interpolation is not None and net.interpolation.in_nm else UNITS
    return any(all(abs(ratio / unit - 1) <= SAME_SIZE for ratio in ratios) for unit in units)


def _check_axes(volume: Volume, net: NetFacts) -> None:
    """Refuse volumes that the tools of the net's maker may have given it with other axes, or mirrored."""
    for part in volume.parts:
        if net.has_open_axes and (form := format_named(part.format)).is_x_first:
            raise PlanError(
                f"net {net.label} may have learned from {form.title} with axes x, y, z, as its maker's tools load it, "
                f"and volpipe reads {part} as z, y, x; set net.options.axes=xyz if it did, or net.options.axes=zyx if "
                "it learned from z, y, x"
            )
        if net.axcodes and part.axcodes != net.axcodes:
            own, way = f"{part} does not say where its axes run", "take Orientation out if they run so"
            if part.axcodes:
                own = f"those of {part} run to {', '.join(part.axcodes)}"
                way = "write the volume anew in that direction"
            raise PlanError(
                f"net {net.label} knows volumes whose axes x, y, z run to {', '.join(net.axcodes)}, as Orientation in "
                f"its bundle turns them, and {own}; {way}"
            )


def axes_notes(volume: Volume, net: NetFacts) -> list[str]:
    """Return a sentence if nobody says in which order the net counts axes, for a volume that is no reason to refuse."""
    if not net.has_open_axes:
        return []
    titles = " and ".join(form.title for form in FORMATS if form.is_x_first)
    return [
        f"net {net.label} gets the axes z, y, x of {volume}, and its maker's tools load {titles} as x, y, z: set "
        "net.options.axes=xyz if it learned from these, or net.options.axes=zyx if it did not"
    ]


def _check_spacing(volume: Volume, net: NetFacts) -> None:
    """Refuse a volume of other voxels than the net was trained on, if it is not resampled as its maker's tools do."""
    if _is_any(net) or volume.resampling is not None:
        return
    size, spacing, trained = volume.voxel_size_nm, net.spacing or (0.0, 0.0, 0.0), _trained_size(net)
    if size is None:
        raise PlanError(
            f"net {net.label} was trained on voxels of {trained} (z, y, x), and the voxel size of {volume} is unknown; "
            f"give it, such as --set input.voxel_size_nm={','.join(f'{n or 1:g}' for n in spacing)}"
        )
    if not _has_spacing(size, net) and on_trained_grid(volume, net) is volume:
        far = "" if net.interpolation is None else f" where voxels are more than {FARTHEST:g} times as long or short"
        ways = "resample it before" if far else "set net.spacing to the size in nm, to have voxels interpolated"
        raise PlanError(
            f"net {net.label} was trained on voxels of {trained} (z, y, x), those of {volume} are "
            f"{' × '.join(f'{n:g}' for n in size)} nm: its maker's tools would resample the volume, which is not done "
            f"here{far}; choose another input.level, or {ways}"
        )


def _trained_size(net: NetFacts) -> str:
    """Return the size of the voxels of the net's training, for people."""
    unit = " nm" if net.interpolation is not None and net.interpolation.in_nm else ""
    return " × ".join(f"{n:g}" if n else "any" for n in net.spacing or ()) + unit


def _channel_count(count: int) -> str:
    return "1 channel" if count == 1 else f"{count} channels"


def _remedy(volume: Volume, net: NetFacts) -> str:
    """Return the remedy for a volume and a net of different numbers of channels."""
    other_net = f"a net of {volume.num_channels} in_channels"
    if net.planes and volume.num_channels == 1 and net.in_channels % 2:
        return (
            f"it is a net of slices: set net.context={net.in_channels // 2} if its channels are a slice and its "
            f"neighbours, or choose an array of {_channel_count(net.in_channels)}"
        )
    if net.in_channels == 1:
        return f"choose a channel, such as --set input.channel=0, or {other_net}"
    if volume.view.channel is not None and volume.num_stored_channels == net.in_channels:
        return f"leave out input.channel, or choose {other_net}"
    more = ", or give the volumes of the other channels as input.also" if volume.num_channels < net.in_channels else ""
    return f"choose {other_net}, or an array of {_channel_count(net.in_channels)}{more}"


def cautions(recipe: Recipe, facts: NetFacts) -> list[str]:
    """Return warnings about the net of a run, before it begins."""
    choice, windows = recipe.net, recipe.windows
    sentences = []
    if choice.untrained and facts.num_parameters and not is_program(choice.name):
        sentences.append(
            f"net {facts.label} runs with the {facts.num_parameters:,} parameters that its code makes "
            "(net.untrained=true): without training, its output is noise"
        )
    if len(facts.outputs) > 1 and choice.output is None:
        sentences.append(
            f"net {facts.label} gives {len(facts.outputs)} outputs ({', '.join(facts.outputs)}), of which the one "
            "on the grid of its input is taken; net.output names another"
        )
    if not facts.tile_invariant and windows.placement == "lattice" and any(map(int.__lt__, facts.margin, facts.halo)):
        sentences.append(
            f"net {facts.label} sees further than the halo of {list(facts.halo)} voxels that its windows have, by how "
            "far is not known: seams may show, faint ones if it sees little of what is so far; if you know its halo, "
            "set net.halo"
        )
    elif not facts.tile_invariant and windows.placement == "lattice":
        sentences.append(
            f"net {facts.label} looks at whole windows, and windows.placement=lattice shows it other surroundings than "
            "its maker's tools: expect seams, and another output for other windows"
        )
    elif not facts.tile_invariant and (facts.windows is None or windows.shape != facts.windows.shape):
        sentences.append(
            f"net {facts.label} looks at whole windows, tiled as MONAI and nnU-Net do (windows.placement="
            f"{windows.placement}): outputs depend on the window's size; set windows.shape to that of its training"
        )
    return sentences


def with_normalisation(recipe: Recipe, facts: NetFacts) -> Recipe:
    """Return `recipe` with the normalisation that its net needs, if the recipe has none.

    Raises:
        PlanError: the recipe has another.
    """
    needed, own = facts.normalise, recipe.normalise
    if needed is None or needed == own:
        return recipe
    if own == Normalise():
        log.info("net %s asks for normalise.method=%s", facts.label, needed.method)
        return recipe.model_copy(update={"normalise": needed})
    if own == needed.model_copy(update={"eps": own.eps, "per_channel": own.per_channel}):
        return recipe.model_copy(update={"normalise": needed})
    numbers = "zscore" if own.mean is not None else "percentile" if own.low is not None else "auto"
    method = numbers if own.method == "auto" else own.method
    if method == needed.method and (own.percentiles == needed.percentiles or own.low is not None):
        return recipe  # with the user's own numbers
    percentiles = f", normalise.percentiles={list(needed.percentiles)}" if needed.method == "percentile" else ""
    raise PlanError(
        f"net {facts.label} asks for normalise.method={needed.method}{percentiles}, not {method}; leave the recipe's "
        "[normalise] out"
    )


def with_net_defaults(recipe: Recipe, facts: NetFacts) -> Recipe:
    """Return `recipe` with what its net asks of windows and output, where the recipe leaves that open.

    Nets that look at whole windows are tiled as their makers do.
    """
    recipe = recipe.model_copy(
        update={
            "windows": _net_defaults(recipe.windows, facts.windows),
            "output": _net_defaults(recipe.output, facts.output),
        }
    )  # fmt: skip
    windows = recipe.windows
    is_free = facts.tile_invariant
    blend = windows.blend if windows.blend != "auto" else "crop" if is_free else "gaussian"
    placed = "lattice" if is_free or blend == "crop" else "edge"
    placement = windows.placement if windows.placement != "auto" else placed
    if (blend, placement) == (windows.blend, windows.placement):
        return recipe
    return recipe.model_copy(update={"windows": windows.model_copy(update={"blend": blend, "placement": placement})})


def _net_defaults(own: S, asked: S | None) -> S:
    """Return the section `own` of a recipe with what a net asks for, where it gives nothing itself."""
    if asked is None:
        return own
    return own.model_copy(update={key: getattr(asked, key) for key in asked.model_fields_set - own.model_fields_set})


def check_shipped(name: str) -> None:
    """Refuse the name of a net that does not ship with volpipe.

    Raises:
        VolpipeError: with the names that there are, and other ways to name a net.
    """
    known = shipped("volpipe.models")
    if name not in known:
        raise VolpipeError(
            f"no net {name!r}{nearest(name, known)}; shipped are {', '.join(known)}, or module:function, "
            "file.py:function, file.pt, file.pt2, file.onnx, package.zip, ./folder of a package, nnunet:FOLDER, "
            "monai:FOLDER"
        )


def check_named(choice: NetChoice, folder: Path) -> None:
    """Refuse a net, or weights, that are not there, as far as that is known without loading them.

    Raises:
        VolpipeError: with what is wrong.
    """
    if choice.ensemble is not None:
        for member in choice.members:
            check_named(member, folder)
        return
    place = "" if is_program(choice.name) else choice.name.removeprefix(FUNCTION).rpartition(":")[0]
    if is_program(choice.name) or place.endswith(".py"):
        file = folder / (place or place_of(choice.name))
        if not file.exists():
            what = "Python file" if place else "net"
            raise VolpipeError(f"no {what} at {file}, which net.name={choice.name} names; give another path")
    elif not place:
        check_shipped(choice.name)
    if choice.weights is not None and not weights_path(choice.weights, str(folder)).is_file():
        raise VolpipeError(f"no weights at {weights_path(choice.weights, str(folder))}")
