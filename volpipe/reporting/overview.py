"""The whole of an input and an output, at levels that are coarse enough, with a frame around what the slices show.

Not here: the slices at full resolution (comparison).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box, Index
from volpipe.reporting import frames
from volpipe.reporting.comparison import ShownOutput, damage_notes, field_of, image_of, limits_of, outer
from volpipe.reporting.frames import EDGE
from volpipe.reporting.page import Item, Picture, Sentence
from volpipe.reporting.shades import Image2D
from volpipe.reporting.slices import PLANES, Patch, Sight, num_chunks, slice_at
from volpipe.volumes.places import levels_of

MOST_BYTES = 8 * 2**20  # of decoded chunks that are read of each volume
MOST_SHRUNK = 3  # voxels of a level for each pixel, at most; a picture shows one of them
SMALL_BYTES, SMALL_FILE = 2**19, 4_000  # of chunks that are read for a small picture, decoded; of its file
FEW_KNOWN = 0.5  # of the voxels, below which a picture shows little but hatching
NEARLY_ALL = 0.9  # of each axis: slices that show as much need no overview


@dataclass(frozen=True)
class WholeLevel:
    """A level of a volume that is shown whole.

    Attributes:
        factor: voxels of the finest level per voxel.
        region: its part that is shown, in voxels of the level.
        at: the voxel in which slices meet.
        voxel: lengths of a voxel.
    """

    name: str
    level: int
    sight: Sight
    factor: tuple[float, ...]
    region: Box
    at: Index
    voxel: tuple[float, ...]

    @property
    def pixel(self) -> float:
        """The length that a pixel shows: a voxel, or more where more than EDGE pixels were needed."""
        longest = max(n * v for n, v in zip(self.region.shape, self.voxel, strict=True))
        return max(min(self.voxel), longest / EDGE)

    def sides(self, axis: int) -> tuple[float, float]:
        """Return the lengths (down, across) of a slice across `axis`."""
        return frames.sides_of(self.region.shape, self.voxel, axis)

    def is_affordable(self, *axes: int) -> bool:
        """Return whether the slices across `axes` are neither too large nor in too many chunks."""
        if self.pixel > MOST_SHRUNK * min(self.voxel):
            return False
        chunks = self.sight.volume.spatial_chunks
        nums = [num_chunks(slice_at(self.region, axis, self.at), chunks) for axis in axes]
        return sum(nums) <= self.sight.most_chunks


def overview_of(shown_output: ShownOutput) -> list[Item]:
    """Return pictures of the whole input and output, at levels that are coarse enough; none of small ones."""
    sights, _ = shown_output.sights
    if not sights:
        return []
    field = field_of(shown_output, sights)
    if all(n >= NEARLY_ALL * m for n, m in zip(field.shape, shown_output.region.shape, strict=True)):
        return []
    frames_of, items = {"input": field, "output": outer(shown_output, field)[0]}, list[Item]()
    for name in sights:
        whole = next((whole for whole in _levels(shown_output, name, MOST_BYTES) if whole.is_affordable(0, 1, 2)), None)
        items += [] if whole is None else _pictures(shown_output, whole, frames_of[name])
    if not items:
        return [Sentence("There is no picture of the whole: no level of it is coarse enough to be read for a report.")]
    if not any(isinstance(item, Picture) for item in items):
        return items
    frame = "The yellow frame is what the slices at full resolution show. "
    return [Sentence(f"{frame}Coarser levels average, so that noise is weaker in them."), *items]


def main_picture(shown_output: ShownOutput, title: str) -> Picture | None:
    """Return the slice xy through the whole output, None where no level of it is coarse enough to be read for it."""
    whole = next((whole for whole in _levels(shown_output, "output", MOST_BYTES) if whole.is_affordable(0)), None)
    if whole is None:
        return None
    patch = whole.sight.read(slice_at(whole.region, 0, whole.at))
    file = frames.drawn(_image(shown_output, patch), whole.sides(0), whole.pixel, is_known=shown_output.is_sized)
    return Picture(title, patch.problem or f"xy, level {whole.level}", *file)


def small_picture(shown_output: ShownOutput, edge: int) -> tuple[bytes, str] | None:
    """Return the slice xy through the middle of the whole output, with up to `edge` pixels, and its media type.

    It is of the coarsest level that has half as many voxels; None where that is too large to be read for it, or cannot
    be read.
    """
    wholes = [*_levels(shown_output, "output", 3 * SMALL_BYTES)]
    whole = next((whole for whole in reversed(wholes) if 2 * max(whole.region.shape[1:]) >= edge), wholes[0])
    if 3 * whole.sight.chunk_bytes > whole.sight.most_bytes:
        return None
    try:
        patch = whole.sight.read(whole.sight.affordable(slice_at(whole.region, 0, whole.at), 0, whole.at))
    except (VolpipeError, OSError):
        return None
    if not patch.is_known.any():
        return None
    sides = frames.sides_of(patch.box.shape, whole.voxel, 0)
    down, across = (max(1, round(edge * side / max(sides))) for side in sides)
    return frames.encoded(frames.resized(_image(shown_output, patch), (down, across)), SMALL_FILE)


def _image(shown_output: ShownOutput, patch: Patch) -> Image2D:
    """Return a slice xy of the output in greys of its own."""
    return image_of(patch, 0, None if shown_output.plan.is_labels else limits_of([patch]))


def _levels(shown_output: ShownOutput, name: str, most_bytes: int) -> Iterator[WholeLevel]:
    """Yield the levels of the output, or of the input, the finest first."""
    if name == "output":
        plan, at, size = shown_output.plan, outer(shown_output, shown_output.region)[1], shown_output.voxel
        factors: list[tuple[float, ...]] = [*plan.factors]
        if plan.finest:  # others lie on another grid than level 0
            shapes = [plan.level_shape(level) for level in range(len(factors))]
            factors = [tuple(n / m for n, m in zip(shapes[0], shape, strict=True)) for shape in shapes]
        sights = [shown_output.output(level, most_bytes) for level in range(len(factors))]
        regions = [Box.from_shape(plan.level_shape(level)) for level in range(len(factors))]
    else:
        volume, at, size = shown_output.plan.source.volume().parts[0], shown_output.at, shown_output.input_voxel
        sights = [Sight(level, most_bytes=most_bytes) for level in levels_of(volume)]
        shapes = [sight.volume.spatial_shape for sight in sights]
        factors = [tuple(n / m for n, m in zip(volume.spatial_shape, shape, strict=True)) for shape in shapes]
        whole = zip(factors, shapes, strict=True)
        regions = [_coarse_box(shown_output.region, factor) & Box.from_shape(shape) for factor, shape in whole]
    for level, (sight, factor, region) in enumerate(zip(sights, factors, regions, strict=True)):
        place = tuple(min(int(a / f), b - 1) for a, f, b in zip(at, factor, region.stop, strict=True))
        voxel = tuple(v * f for v, f in zip(size, factor, strict=True))
        yield WholeLevel(name, level, sight, factor, region, place, voxel)


def _coarse_box(box: Box, factor: Sequence[float]) -> Box:
    """Return the voxels, each of `factor` finer ones, that `box` touches."""
    start = tuple(int(a / f) for a, f in zip(box.start, factor, strict=True))
    stop = tuple(max(s + 1, int(np.ceil(b / f))) for s, b, f in zip(start, box.stop, factor, strict=True))
    return Box(start, stop)


def _pictures(shown_output: ShownOutput, whole: WholeLevel, part: Box) -> Iterator[Item]:
    """Yield the three slices of a volume, with a frame around `part`, in voxels of the finest level."""
    patches = [whole.sight.read(slice_at(whole.region, axis, whole.at)) for axis in PLANES.values()]
    known = sum(int(patch.is_known.sum()) for patch in patches)
    if known < FEW_KNOWN * sum(patch.is_known.size for patch in patches):
        why = patches[0].problem or "a shard of it waits for all finer ones below it, and most are not written yet"
        yield Sentence(f"There is no picture of the whole {whole.name} at level {whole.level}: {why}.", "warning")
        return
    yield from damage_notes(patches)
    limits = None if whole.name == "output" and shown_output.plan.is_labels else limits_of(patches)
    frame = _coarse_box(part, whole.factor).relative_to(whole.region.start)
    caption = f"Level {whole.level}, {' × '.join(map(str, whole.region.shape))} voxels"
    for (name, axis), patch in zip(PLANES.items(), patches, strict=True):
        sides = [i for i in range(3) if i != axis]
        flat_frame = Box(tuple(frame.start[i] for i in sides), tuple(frame.stop[i] for i in sides))
        file = frames.drawn(
            image_of(patch, axis, limits),
            whole.sides(axis),
            whole.pixel,
            is_known=shown_output.is_sized,
            part=flat_frame,
        )
        yield Picture(f"Whole {whole.name}, {name}", caption, *file)
