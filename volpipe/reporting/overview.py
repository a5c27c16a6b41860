"""The whole of an input and an output, at levels that are coarse enough, with a frame around what the slices show.

Not here: the slices at full resolution (comparison).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Box, Index
from volpipe.reporting import frames
from volpipe.reporting.comparison import (
    Subject,
    damage_notes,
    field_of,
    limits_of,
    outer,
    sides_of,
)
from volpipe.reporting.frames import EDGE, Scale
from volpipe.reporting.page import Item, Note, Picture
from volpipe.reporting.shades import Range, coloured, shaded
from volpipe.reporting.slices import PLANES, Patch, Sight, flat, num_chunks, slice_at
from volpipe.volumes.places import levels_of
from volpipe.volumes.volume import Volume

MOST_BYTES = 8 * 2**20  # of decoded chunks that are read of each volume
MOST_SHRUNK = 3  # voxels of a level for each pixel, at most; a picture shows one of them
SMALL_BYTES, SMALL_FILE = 2**19, 4_000  # of chunks that are read for a small picture, decoded; of its file
FEW_KNOWN = 0.5  # of the voxels, below which a picture shows little but hatching
NEARLY_ALL = 0.9  # of each axis: slices that show as much need no overview


@dataclass(frozen=True)
class Whole:
    """A level of a volume that is shown whole.

    Attributes:
        region: its part that is shown, in voxels of the level.
        at: the voxel in which slices meet.
        frame: what is shown at full resolution.
        voxel: lengths of a voxel.
    """

    name: str
    level: int
    sight: Sight
    region: Box
    at: Index
    frame: Box
    voxel: tuple[float, ...]

    @property
    def pixel(self) -> float:
        """The length that a pixel shows: a whole part of a voxel, or more where more than EDGE pixels were needed."""
        longest = max(n * v for n, v in zip(self.region.shape, self.voxel, strict=True))
        zoom = max(1, int(EDGE * min(self.voxel) / longest * 1.000001))
        return max(min(self.voxel) / zoom, longest / EDGE)

    def sides(self, axis: int) -> tuple[float, float]:
        """Return the lengths (down, across) of a slice across `axis`."""
        return sides_of([n * v for n, v in zip(self.region.shape, self.voxel, strict=True)], axis)

    def is_affordable(self, *axes: int) -> bool:
        """Return whether the slices across `axes` are neither too large nor in too many chunks."""
        if self.pixel > MOST_SHRUNK * min(self.voxel):
            return False
        chunks = self.sight.volume.spatial_chunks
        nums = [num_chunks(slice_at(self.region, axis, self.at), chunks) for axis in axes]
        return sum(nums) <= self.sight.most_chunks


def overview_of(subject: Subject) -> list[Item]:
    """Return pictures of the whole input and output, at levels that are coarse enough; none of small ones."""
    sights, _ = subject.sights
    if not sights:
        return []
    field = field_of(subject, sights)
    if all(n >= NEARLY_ALL * m for n, m in zip(field.shape, subject.region.shape, strict=True)):
        return []
    chosen = [
        next((whole for whole in wholes if whole.is_affordable(0, 1, 2)), None)
        for wholes in _wholes(subject, sights, field)
    ]
    items = [item for whole in chosen if whole is not None for item in _pictures(subject, whole)]
    if not items:
        return [Note("There is no picture of the whole: no level of it is coarse enough to be read for a report.")]
    if not any(isinstance(item, Picture) for item in items):
        return items
    frame = "The yellow frame is what the slices at full resolution show. "
    return [Note(f"{frame}Coarser levels average, so that noise is weaker in them."), *items]


def _wholes(subject: Subject, sights: Mapping[str, Sight], field: Box) -> Iterator[Iterator[Whole]]:
    """Yield the levels of the input, and those of the output, as far as they can be opened."""
    if "input" in sights:
        yield _inputs(subject, sights["input"].volume, field)
    if "output" in sights:
        yield _outputs(subject, field, MOST_BYTES)


def main_picture(subject: Subject, title: str) -> Picture | None:
    """Return the slice xy through the whole output, None where no level of it is coarse enough to be read for it."""
    whole = next((whole for whole in _outputs(subject, subject.region, MOST_BYTES) if whole.is_affordable(0)), None)
    if whole is None:
        return None
    patch = whole.sight.read(slice_at(whole.region, 0, whole.at))
    image = _image(patch, 0, None if subject.plan.is_labels else limits_of([patch]))
    file = frames.drawn(image, whole.sides(0), whole.pixel, is_known=subject.is_sized)
    return Picture(title, patch.problem or f"xy, level {whole.level}", *file)


def small_picture(subject: Subject, edge: int) -> tuple[bytes, str] | None:
    """Return the slice xy through the middle of the whole output, with up to `edge` pixels, and its media type.

    It is of the coarsest level that has half as many voxels; None where that is too large to be read for it, or cannot
    be read.
    """
    wholes = [*_outputs(subject, subject.region, 3 * SMALL_BYTES)]
    whole = next((whole for whole in reversed(wholes) if 2 * max(whole.region.shape[1:]) >= edge), wholes[0])
    if 3 * whole.sight.chunk_bytes > whole.sight.most_bytes:
        return None
    try:
        patch = whole.sight.read(whole.sight.affordable(slice_at(whole.region, 0, whole.at), 0, whole.at))
    except (VolpipeError, OSError):
        return None
    if not patch.is_known.any():
        return None
    image = _image(patch, 0, None if subject.plan.is_labels else limits_of([patch]))
    sides = [n * v for n, v in zip(patch.box.shape[1:], whole.voxel[1:], strict=True)]
    down, across = (max(1, round(edge * side / max(sides))) for side in sides)
    return frames.encoded(frames.resized(image, (down, across)), SMALL_FILE)


def _outputs(subject: Subject, field: Box, most_bytes: int) -> Iterator[Whole]:
    """Yield the levels of the output, the finest first."""
    plan = subject.plan
    frame, at = outer(subject, field)
    for level, factor in enumerate(plan.factors):
        voxel = tuple(v * f for v, f in zip(subject.voxel, factor, strict=True))
        shape = plan.level_shape(level)
        place = tuple(min(a // f, n - 1) for a, f, n in zip(at, factor, shape, strict=True))
        yield Whole(
            "output", level, subject.output(level, most_bytes), Box.from_shape(shape), place,
            _coarser(frame, factor), voxel,
        )  # fmt: skip


def _inputs(subject: Subject, volume: Volume, field: Box) -> Iterator[Whole]:
    """Yield the levels of the input, the finest first."""
    for number, level in enumerate(levels_of(volume)):
        ratios = tuple(n / m for n, m in zip(volume.spatial_shape, level.spatial_shape, strict=True))
        region = _coarser(subject.region, ratios) & Box.from_shape(level.spatial_shape)
        at = tuple(min(int(a / r), b - 1) for a, r, b in zip(subject.at, ratios, region.stop, strict=True))
        size = tuple(v * r for v, r in zip(subject.input_voxel, ratios, strict=True))
        yield Whole("input", number, Sight(level, most_bytes=MOST_BYTES), region, at, _coarser(field, ratios), size)


def _coarser(box: Box, factor: Sequence[float]) -> Box:
    """Return the voxels, each of `factor` finer ones, that `box` touches."""
    start = tuple(int(a / f) for a, f in zip(box.start, factor, strict=True))
    stop = tuple(max(s + 1, int(np.ceil(b / f))) for s, b, f in zip(start, box.stop, factor, strict=True))
    return Box(start, stop)


def _pictures(subject: Subject, whole: Whole) -> Iterator[Item]:
    """Yield the three slices of a volume."""
    patches = [whole.sight.read(slice_at(whole.region, axis, whole.at)) for axis in PLANES.values()]
    known = sum(int(patch.is_known.sum()) for patch in patches)
    if known < FEW_KNOWN * sum(patch.is_known.size for patch in patches):
        why = patches[0].problem or "a shard of it waits for all finer ones below it, and most are not written yet"
        yield Note(f"There is no picture of the whole {whole.name} at level {whole.level}: {why}.", "warning")
        return
    yield from damage_notes(patches)
    is_labels = whole.name == "output" and subject.plan.is_labels
    limits = (0.0, 1.0) if is_labels else limits_of(patches)
    for (name, axis), patch in zip(PLANES.items(), patches, strict=True):
        image = frames.resized(_image(patch, axis, None if is_labels else limits), _shape(whole, axis))
        image = frames.outlined(image, _frame(whole, axis))
        data, media_type = frames.encoded(frames.framed(image, Scale(whole.pixel, subject.is_sized)))
        caption = f"Level {whole.level}, {' × '.join(map(str, whole.region.shape))} voxels"
        yield Picture(f"Whole {whole.name}, {name}", caption, data, media_type)


def _image(patch: Patch, axis: int, limits: Range | None) -> np.ndarray:
    data, known = flat(patch.data, axis), flat(patch.is_known, axis)
    return frames.hatched(coloured(data[0]) if limits is None else shaded(data, limits), known)


def _shape(whole: Whole, axis: int) -> tuple[int, int]:
    """Return the pixels of a slice across `axis`."""
    down, across = (max(1, round(side / whole.pixel)) for side in whole.sides(axis))
    return down, across


def _frame(whole: Whole, axis: int) -> Box:
    """Return the frame in pixels of a slice across `axis`."""
    frame, shape = whole.frame.relative_to(whole.region.start), _shape(whole, axis)
    axes = [i for i in range(3) if i != axis]
    ratios = [n / whole.region.shape[i] for i, n in zip(axes, shape, strict=True)]
    start = tuple(min(int(frame.start[i] * r), n - 1) for i, r, n in zip(axes, ratios, shape, strict=True))
    stop = tuple(
        min(max(s + 1, round(frame.stop[i] * r)), n) for s, i, r, n in zip(start, axes, ratios, shape, strict=True)
    )
    return Box(start, stop)
