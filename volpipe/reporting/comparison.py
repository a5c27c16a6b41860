"""The output of a run beside its input: three slices of each and their difference, and their histograms.

Not here: reading (slices), or drawing (frames). Slices meet in one voxel of the input, and show the same place::

    input     |-------|-------|-------|      one voxel here
    output    |---|---|---|---|---|---|      is `scale` there: the input is shown enlarged, and from the mean of the
    difference|-------|-------|-------|      output's voxels in each of the input's that one is taken

A coarser output is enlarged itself, and the mean of the input's voxels in each of its own is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box, Index, Triple, triple
from volpipe.inference.output import planned_volume
from volpipe.inference.output_plan import OutputPlan
from volpipe.reporting import frames
from volpipe.reporting.frames import EDGE
from volpipe.reporting.histogram import histogram
from volpipe.reporting.page import Item, Picture, Sentence, reason_of
from volpipe.reporting.shades import Image2D, Range, coloured, display_change, display_range, diverge, shaded
from volpipe.reporting.slices import (
    MOST_BYTES,
    PLANES,
    Patch,
    Sight,
    averaged,
    flat,
    gone_in,
    inside,
    middle_of,
    missing_in,
    part_around,
    slice_at,
    voxel_at,
)
from volpipe.volumes.storage.metadata import Lengths

AXES = "zyx"


@dataclass(frozen=True)
class ShownOutput:
    """An output and what it was made of.

    Attributes:
        region: of the input, which the output shows.
        at: the voxel of the input in which the slices meet.
        scale: voxels of the output per voxel of the input.
        shrink: voxels of the input per voxel of the output, where that is coarser.
        is_alike: whether both have the same grey levels, so that their difference says something.
        is_missing: tells of a level of the output and a shard of that whether it is still to be written.
        is_gone: tells of one whether it was written, and its files are gone.
    """

    plan: OutputPlan
    region: Box
    at: Index
    scale: Triple = (1, 1, 1)
    shrink: Triple = (1, 1, 1)
    is_alike: bool = True
    is_missing: Callable[[int, int], bool] = lambda level, shard: False
    is_gone: Callable[[int, int], bool] = lambda level, shard: False

    @property
    def voxel(self) -> Lengths:
        """Lengths of a voxel of the output, in nm where they are known."""
        size = self.plan.group_of(0).voxel_size_nm
        return size if size is not None else triple(u / s for s, u in zip(self.scale, self.shrink, strict=True))

    @property
    def input_voxel(self) -> Lengths:
        """Lengths of a voxel of the input, in the unit of `voxel`."""
        return triple(v * s / u for v, s, u in zip(self.voxel, self.scale, self.shrink, strict=True))

    @property
    def is_sized(self) -> bool:
        """Whether lengths are in nm."""
        return self.plan.source.voxel_size_nm is not None

    @property
    def pixel(self) -> float:
        """The length that a pixel shows before pictures are enlarged."""
        return min(*self.voxel, *self.input_voxel)

    @cached_property
    def sights(self) -> tuple[dict[str, Sight], list[Item]]:
        """The input and the output as far as they can be opened, and a note for each that cannot."""
        sights, notes = dict[str, Sight](), list[Item]()
        for name in ("input", "output"):
            try:
                sight = Sight(self.plan.source.volume().parts[0]) if name == "input" else self.output()
                sight.volume.open()
                sight.within_reach(*((self.region, self.at) if name == "input" else outer(self, self.region)))
                sights[name] = sight
            except (VolpipeError, OSError) as error:
                notes.append(Sentence(f"The {name} cannot be shown: {reason_of(error)}", "warning"))
        return sights, notes

    def output(self, level: int = 0, most_bytes: int = MOST_BYTES) -> Sight:
        """Return a level of the output."""
        plan = self.plan
        missing = missing_in(plan.shards(level), partial(self.is_missing, level))
        gone = gone_in(plan.shards(level), partial(self.is_gone, level))
        return Sight(planned_volume(plan, level), missing, gone, most_bytes)


@dataclass(frozen=True)
class Plane:
    """One slice of input and output; its box is in voxels of the output.

    Attributes:
        source, output: of a volume that cannot be read None.
        change: output less input, (z, y, x), in the coarser voxels; NaN where one of them is not known.
    """

    name: str
    box: Box
    source: Patch | None
    output: Patch | None
    change: np.ndarray | None

    @property
    def axis(self) -> int:
        return PLANES[self.name]


def slices_of(shown_output: ShownOutput) -> list[Item]:
    """Return the pictures of three slices through the middle, what could not be read, and a histogram of the rest."""
    sights, notes = shown_output.sights
    planes = list(_planes(shown_output, sights)) if sights else []
    patches = [patch for plane in planes for patch in (plane.source, plane.output) if patch is not None]
    return [*notes, *damage_notes(patches), *Drawing(shown_output, planes).items(), *_histograms(shown_output, planes)]


def damage_notes(patches: Sequence[Patch]) -> list[Item]:
    """Return why parts of pictures are hatched."""
    problems = dict.fromkeys(patch.problem for patch in patches if patch.problem)
    notes: list[Item] = [Sentence(f"A part cannot be read, and is hatched: {text}", "warning") for text in problems]
    if any(not (patch.problem or patch.is_known.all()) for patch in patches):
        notes.append(Sentence("What is not written yet, or was set aside, is hatched.", "warning"))
    return notes


def outer(shown_output: ShownOutput, box: Box) -> tuple[Box, Index]:
    """Return the voxels of the output that show `box` of the input, and the one in which slices meet."""

    def shown(part: Box) -> Box:
        return inside(part.relative_to(shown_output.region.start), shown_output.shrink).scaled(shown_output.scale)

    return shown(box), middle_of(shown(voxel_at(shown_output.at)))


def _input_under(shown_output: ShownOutput, box: Box) -> Box:
    """Return the voxels of the input that lie wholly under `box` of the output."""
    return (
        inside(box, shown_output.scale).scaled(shown_output.shrink).shift(shown_output.region.start)
        & shown_output.region
    )


def field_of(shown_output: ShownOutput, sights: dict[str, Sight]) -> Box:
    """Return the part of the input that is shown."""
    sizes = tuple(max(1, int(EDGE * shown_output.pixel / v * 1.000001)) for v in shown_output.input_voxel)
    field = part_around(shown_output.region, shown_output.at, sizes)
    if "input" in sights:
        field = sights["input"].within_reach(field, shown_output.at)
    if "output" in sights:
        field = _input_under(shown_output, sights["output"].within_reach(*outer(shown_output, field)))
    return field


def _planes(shown_output: ShownOutput, sights: dict[str, Sight]) -> Iterator[Plane]:
    """Yield the three slices, with the voxels that are read for each."""
    field = field_of(shown_output, sights)
    source, output = sights.get("input"), sights.get("output")
    if source is not None:
        source.hold(field)
    if output is not None:
        output.hold(outer(shown_output, field)[0])
    for name, axis in PLANES.items():
        box = slice_at(field, axis, shown_output.at)
        if source is not None:
            box = source.affordable(box, axis, shown_output.at)
        if output is not None:
            shown, at = outer(shown_output, box)
            box = _input_under(shown_output, output.affordable(shown, axis, at))
        shown, _ = outer(shown_output, box)
        given = None if source is None else source.read(_input_under(shown_output, shown))
        result = None if output is None else output.read(shown)
        yield Plane(name, shown, given, result, _change(shown_output, given, result))


def _change(shown_output: ShownOutput, source: Patch | None, output: Patch | None) -> np.ndarray | None:
    """Return output less input of the first channel, (z, y, x), NaN where one is not known; None without both."""
    if source is None or output is None or not shown_output.is_alike:
        return None
    # The input has less than the voxels of a coarser one where it is thinner than that.
    shrink = triple(map(min, shown_output.shrink, source.box.shape))
    known = [
        averaged(patch.is_known.astype(np.float64), factor) == 1
        for patch, factor in ((output, shown_output.scale), (source, shrink))
    ]
    with np.errstate(invalid="ignore"):  # of infinities
        change = averaged(output.data[0].astype(np.float64), shown_output.scale) - averaged(
            source.data[0].astype(np.float64), shrink
        )
    return np.where(known[0] & known[1], change, np.nan)


@dataclass(frozen=True)
class Drawing:
    """The pictures of slices, which have one scale and the same greys."""

    shown_output: ShownOutput
    planes: Sequence[Plane]

    def items(self) -> Iterator[Item]:
        """Yield what greys and colours mean, and the pictures of each plane."""
        if self.planes:
            yield Sentence(self.legend)
        for plane in self.planes:
            if plane.source is not None:
                yield self._picture(plane, "Input", image_of(plane.source, plane.axis, self.limits["input"]))
        for plane in self.planes:
            if plane.output is not None and self.shown_output.plan.is_labels:
                yield self._picture(plane, "Objects", self._objects(plane, plane.output))
            elif plane.output is not None:
                yield self._picture(plane, "Output", image_of(plane.output, plane.axis, self.limits["output"]))
        for plane in self.planes:
            if plane.change is not None and self.largest:
                yield self._difference_picture(plane, plane.change)

    def _objects(self, plane: Plane, output: Patch) -> Image2D:
        """Return labels in colours, over the input where that is known."""
        labels, known, below = flat(output.data[0], plane.axis), flat(output.is_known, plane.axis), None
        if plane.source is not None:
            image = image_of(plane.source, plane.axis, self.limits["input"])
            down, across = map(max, labels.shape, image.shape[:2])
            labels, known, below = (frames.resized(each, (down, across)) for each in (labels, known, image))
        return frames.hatched(coloured(labels, below), known)

    def _difference_picture(self, plane: Plane, change: np.ndarray) -> Picture:
        image = flat(change, plane.axis)
        known = ~np.isnan(image)
        finite = image[np.isfinite(image)]
        mean = f"mean {finite.mean():+.2g}, of absolute values {np.abs(finite).mean():.2g}; " if finite.size else ""
        shown = frames.hatched(diverge(image, self.largest), known)
        return self._picture(plane, "Difference", shown, mean)

    def _picture(self, plane: Plane, title: str, image: Image2D, remark: str = "") -> Picture:
        """Return an image of a plane, in voxels of the input or the output, as a picture with square pixels."""
        shown_output = self.shown_output
        sides = frames.sides_of(plane.box.shape, shown_output.voxel, plane.axis)
        file = frames.drawn(image, sides, shown_output.pixel, is_known=shown_output.is_sized)
        return Picture(f"{title}, {plane.name}", f"{remark}{_where_it_lies(plane)}", *file)

    @cached_property
    def limits(self) -> dict[str, Range]:
        """The values of black and white of the input and of the output: the same where they are alike."""
        patches = {
            "input": [plane.source for plane in self.planes if plane.source is not None],
            "output": [plane.output for plane in self.planes if plane.output is not None],
        }
        if self.shown_output.is_alike:
            return dict.fromkeys(patches, limits_of(patches["input"] or patches["output"]))
        return {name: limits_of(each) for name, each in patches.items()}

    @cached_property
    def largest(self) -> float:
        """The difference that is full blue or red."""
        changes = [plane.change.ravel() for plane in self.planes if plane.change is not None]
        values = np.concatenate(changes) if changes else np.zeros(0)
        return display_change(values, is_whole=np.issubdtype(self.shown_output.plan.dtype, np.integer))

    @property
    def legend(self) -> str:
        """What greys and colours mean, in sentences."""
        shown_output, sentences = (
            self.shown_output,
            ["Three slices through the middle of what was computed, at full resolution."],
        )
        is_shown = {"input": any(p.source for p in self.planes), "output": any(p.output for p in self.planes)}
        ranges = {name: f"{low:.4g} (black) to {high:.4g} (white)" for name, (low, high) in self.limits.items()}
        if shown_output.is_alike and any(is_shown.values()):
            sentences.append(f"Greys go from {ranges['input']}, alike in input and output.")
        elif not shown_output.is_alike:
            names = [
                name for name in ranges if is_shown[name] and not (name == "output" and shown_output.plan.is_labels)
            ]
            sentences += [f"Greys of the {name} go from {ranges[name]}." for name in names]
        if shown_output.plan.num_channels > 1 and is_shown["output"]:
            sentences.append(_channel_colours(shown_output.plan))
        if any(plane.change is not None and np.isfinite(plane.change).any() for plane in self.planes):
            output, source = (
                f", of which the mean of {' × '.join(map(str, factor))} voxels is taken" if max(factor) > 1 else ""
                for factor in (shown_output.scale, shown_output.shrink)
            )
            colours = (
                f"red is brighter and blue darker, full at {self.largest:.3g}" if self.largest else "there is none"
            )
            sentences.append(f"The difference is output{output}{output and ','} less input{source}: {colours}.")
        return " ".join(sentences)


def image_of(patch: Patch, axis: int, limits: Range | None) -> Image2D:
    """Return a slice in greys, several channels in colours, labels (no `limits`) too; hatched where it is not known."""
    data = flat(patch.data, axis)
    return frames.hatched(coloured(data[0]) if limits is None else shaded(data, limits), flat(patch.is_known, axis))


def _channel_colours(plan: OutputPlan) -> str:
    """Return a sentence on which channel is shown in which colour."""
    names = plan.channel_names or [f"channel {i}" for i in range(plan.num_channels)]
    pairs = zip(("red", "green", "blue"), names, strict=False)
    shown = ", ".join(f"{colour} is {name}" for colour, name in pairs)
    return f"Of the {plan.num_channels} channels of the output {shown}."


def _where_it_lies(plane: Plane) -> str:
    """Return where a slice lies, in voxels of the output."""
    sides = zip(AXES, plane.box.start, plane.box.stop, strict=True)
    return ", ".join(f"{x} {(a + b) // 2}" if i == plane.axis else f"{x} {a}:{b}" for i, (x, a, b) in enumerate(sides))


def limits_of(patches: Sequence[Patch]) -> Range:
    """Return the values of black and white of all that is known."""
    return display_range(*(patch.values() for patch in patches))


def _histograms(shown_output: ShownOutput, planes: Sequence[Plane]) -> Iterator[Item]:
    """Yield the histograms of what the slices show: one of both where they are alike."""
    values = {
        "input": _series("input", [plane.source for plane in planes if plane.source is not None]),
        "output": _series("output", [plane.output for plane in planes if plane.output is not None]),
    }
    if shown_output.plan.is_labels:
        del values["output"]
    groups = [values["input"] | values["output"]] if shown_output.is_alike else list(values.values())
    for group in groups:
        if any(each.size for each in group.values()):
            series = " and ".join(dict.fromkeys(name.partition(",")[0] for name in group))
            yield histogram(f"Grey levels of {series}", group)


def _series(name: str, patches: Sequence[Patch]) -> dict[str, np.ndarray]:
    """Return the values of each channel that is shown, by its name."""
    if not patches:
        return {}
    num = len(patches[0].data)
    names = [name] if num == 1 else [f"{name}, channel {i}" for i in range(num)]
    return {each: np.concatenate([patch.values(i) for patch in patches]) for i, each in enumerate(names)}
