"""Whether the voxels of a volume are what they are meant as, by a sample: probabilities, labels, an image.

Not here: what a recipe means by them (recipes), or statistics of all voxels (inference.statistics). A sample is a few
boxes of one chunk each, spread over the volume, so that it costs little whatever the volume's size. What is wrong
beyond doubt is refused, what looks wrong is told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from volpipe.errors import PlanError, VolpipeError
from volpipe.geometry.grid import Box, Triple
from volpipe.units import count
from volpipe.volumes.storage.metadata import shown
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

NUM_BOXES, MOST_BOXES, EDGE = 9, 27, 32  # more than NUM_BOXES while all that was read is one value
SECONDS, FEWEST_BOXES = 2.0, 3  # of reading, after which no further box is read; but so many are, in a bucket no more
BASES = (2, 3, 5)  # of Halton's sequence along z, y and x: its points are spread, wherever it ends
LEAST_PAIRS = 1000  # of neighbouring voxels that tell labels from an image
ALIKE_IN_IMAGES, ALIKE_IN_LABELS = 0.5, 0.8  # of the pairs along x: of real labels 0.9, of FIB-SEM of 8 bits 0.1
CLEAR = 0.1  # of the range of probabilities: so far beyond it or so near to its ends
SURE = (
    0.25  # of a map of probabilities, at least, is that near: of four it was 0.65 to 0.82, of EM at most 0.1 (2026-11)
)
SLIVER = 1e-3  # of the range, which rounding may leave
FAINT, WEAK = 0.01, 0.5  # the greatest value, by that of 1: a mistake, and a doubt
FAR, FAR_DEVIATIONS = 3.0, 10.0  # from the middle, where -1 … 1 is meant, and where deviations are
NARROW = 0.01  # of -1 … 1
SMALLEST_NM, LARGEST_NM = 0.1, 1e6  # of a voxel: an atom, and 1 mm
WIDER = {"um": 1e3, "mm": 1e6, "m": 1e9}  # nm


@dataclass(frozen=True, eq=False)
class Sample:
    """Boxes (c, z, y, x) of a volume."""

    volume: Volume
    boxes: tuple[np.ndarray, ...]

    @cached_property
    def values(self) -> np.ndarray:
        """All values that are numbers, in one row, as float64."""
        values = np.concatenate([box.ravel() for box in self.boxes]).astype(np.float64)
        return values[np.isfinite(values)]

    @property
    def num_nonfinite(self) -> int:
        """How many values are NaN or infinite."""
        return sum(box.size for box in self.boxes) - self.values.size

    @property
    def is_constant(self) -> bool:
        return not self.values.size or bool(self.values.min() == self.values.max())

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The least and the greatest value; 0 and 0 where none is a number."""
        return (float(self.values.min()), float(self.values.max())) if self.values.size else (0.0, 0.0)

    @property
    def seen(self) -> str:
        """What was seen, for people."""
        low, high = self.ends
        span = f"{low:g} alone" if low == high else f"{low:g} to {high:g}"
        return f"{self.volume} has {self.volume.dtype} voxels of {span} in {count(len(self.boxes), 'sampled box')}"


def take_sample(volume: Volume, within: Box | None = None, *, num_channels: int | None = None) -> Sample | None:
    """Return a sample of `volume`, of the box `within` if there is one; None where nothing can be read.

    Workers name what they cannot read, with its box: here it is left out.
    """
    box, stop = within or Box.from_shape(volume.spatial_shape), time.monotonic() + SECONDS
    boxes: list[np.ndarray] = []
    is_flat, num_boxes = True, FEWEST_BOXES if "://" in volume.path else NUM_BOXES
    for number, part in enumerate(spread(volume, box)):
        if (number >= num_boxes and not is_flat) or (len(boxes) >= FEWEST_BOXES and time.monotonic() > stop):
            break
        try:
            boxes.append(volume.open(live=True).read(part, num_channels=num_channels))
        except (VolpipeError, OSError) as error:
            log.info("box %s of %s is not looked at: %s", part, volume, error)
            continue
        is_flat = is_flat and bool((boxes[-1] == boxes[0].flat[0]).all())
    return Sample(volume, tuple(boxes)) if boxes else None


def zero_faces(volume: Volume) -> list[str]:
    """Return the faces of `volume` that are zeros in a sample, such as "z first"; none that cannot be read."""
    whole, reader, faces = Box.from_shape(volume.spatial_shape), volume.open(), list[str]()
    for axis, name in enumerate("zyx"):
        size = whole.shape[axis]
        for side, at in (("first", 0), ("last", size - 1)):
            try:
                parts = (reader.read(part) for part in spread(volume, whole.along(axis, at, at + 1)))
                faces += [] if any(part.any() for part in parts) else [f"{name} {side}"]
            except (VolpipeError, OSError) as error:
                log.info("face %s %s of %s is not looked at: %s", name, side, volume, error)
    return faces


def spread(volume: Volume, box: Box, edges: Triple = (EDGE,) * 3) -> Iterator[Box]:
    """Yield boxes of `edges` voxels at most, each in one chunk, the middle of `box` first; each once."""
    known = set[Box]()
    for number in range(MOST_BOXES):
        shares = [0.5] * 3 if number == 0 else [_halton(number, base) for base in BASES]
        sides = []
        for share, a, b, chunk, edge in zip(shares, box.start, box.stop, volume.spatial_chunks, edges, strict=True):
            middle = a + int(share * (b - a))
            low, high = max(a, middle // chunk * chunk), min(b, (middle // chunk + 1) * chunk)
            start = min(max(low, middle - edge // 2), max(low, high - edge))
            sides.append((start, min(start + edge, high)))
        part = Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))
        if part not in known:
            known.add(part)
            yield part


def _halton(number: int, base: int) -> float:
    """Return the term of Halton's sequence in `base`, above 0 and below 1."""
    share, result = 1.0, 0.0
    while number:
        share /= base
        result += share * (number % base)
        number //= base
    return result


def constant_notes(sample: Sample) -> list[str]:
    """Return a sentence if all values of a sample are one."""
    return [f"{sample.seen}: is it the right array, and has it been written?"] if sample.is_constant else []


def size_notes(volume: Volume) -> list[str]:
    """Return a sentence if voxels of `volume` are smaller or larger than those of any microscope."""
    size = volume.voxel_size_nm
    if size is None or SMALLEST_NM <= min(size) <= max(size) <= LARGEST_NM:
        return []
    said = f"voxels of {volume} are {shown(size)} nm (z, y, x)"
    if max(size) > LARGEST_NM:
        return [f"{said}, above 1 mm: is another unit meant? input.voxel_size_nm gives them in nm"]
    unit = next((unit for unit, factor in WIDER.items() if min(size) * factor >= SMALLEST_NM), "m")
    meant = ",".join(f"{length * WIDER[unit]:.12g}" for length in size)
    return [
        f"{said}, below 0.1 nm: is another unit meant? If these numbers are in {unit}, give "
        f"--set input.voxel_size_nm={meant}"
    ]


def check_probabilities(sample: Sample, kind: str, ends: tuple[float, float], key: str) -> list[str]:
    """Refuse values that are no probabilities of `ends` for 0 and 1; return what looks wrong, in sentences.

    Args:
        kind: "affinities", "foreground" or "membrane".
        key: of the recipe, that says which values mean 0 and 1; "" where it was set: nothing is refused then.

    Raises:
        PlanError: with the values, and what to set.
    """
    zero, one = ends
    low, high = ((value - zero) / (one - zero) for value in sample.ends)
    expected = f"{kind} go from {zero:g} to {one:g} there, which mean 0 and 1"
    notes = []
    if sample.num_nonfinite:
        notes.append(
            f"{sample.volume} has NaN or infinite voxels, {sample.num_nonfinite:,} of {_num_sampled(sample):,} that "
            f"were sampled: as {kind} NaN counts as 0, infinity as 0 or 1"
        )
    if sample.is_constant:
        return [*notes, f"{sample.seen}, and {expected}: is it the right array?"]
    remedy = f"; set {key}=[{_range_end(sample.ends[0], 0)}, {_range_end(sample.ends[1], 1)}], say, {MEANT}"
    if key and (low < -CLEAR or high > 1 + CLEAR or high < FAINT):
        raise PlanError(f"{sample.seen}, and {expected}{remedy}")
    if low < -SLIVER or high > 1 + SLIVER:
        return [*notes, f"{sample.seen}, and {expected}: what is beyond counts as 0 or 1"]
    if high < WEAK:
        return [*notes, f"{sample.seen}, and {expected}{remedy if key else ': is it the right array?'}"]
    return [*notes, *_looks(sample, kind, (zero, one))]


MEANT = "if these are the values that mean 0 and 1 (numbers of a net before its sigmoid have none: run it with one)"


def _num_sampled(sample: Sample) -> int:
    return sum(box.size for box in sample.boxes)


def _range_end(value: float, end: int) -> str:
    """Return an end of a range that people use, next to a `value` that was seen at that end."""
    if end == 0:
        return "0" if value >= 0 else f"{value:g}"
    return f"{next((usual for usual in (1, 100, 255, 4095, 65535) if value <= usual), value):g}"


def _looks(sample: Sample, kind: str, ends: tuple[float, float]) -> list[str]:
    """Return a sentence if values look like those of something else than a map of probabilities."""
    share = (sample.values - ends[0]) / (ends[1] - ends[0])
    near = float(((share < CLEAR) | (share > 1 - CLEAR)).mean())
    if near < SURE:
        return [
            f"{sample.seen}, of which only {near:.1%} are near 0 or 1: so are grey levels of an image, and few maps of "
            f"{kind}; give what a net made of it"
        ]
    above = float((share > 0.5).mean())
    if kind == "membrane" and above > 0.5:
        return [
            f"{sample.seen}, of which {above:.0%} mean more than a half, as if most of the volume were membrane; is it "
            "a map of objects, input.kind=foreground?"
        ]
    return []


def grey_notes(sample: Sample, shift: float, scale: float, key: str, far: float = FAR) -> list[str]:
    """Return a sentence if a net that gets (value - shift) / scale would see numbers far from -1 … 1, or all but one.

    `key` says how that map came about.
    """
    if sample.is_constant:
        return []
    low, high = ((float(np.percentile(sample.values, percent)) - shift) / scale for percent in (1, 99))
    if max(-low, high) <= far and high - low >= 2 * NARROW:
        return []
    return [
        f"{sample.seen}, of which the net would see {low:.3g} to {high:.3g} (98 % of them) by {key}, where about -1 "
        "to 1 is meant; set normalise.low and high to the grey levels that -1 and 1 stood for in training"
    ]


def labels_note(sample: Sample, what: str) -> list[str]:
    """Return a sentence if a sample that is meant as grey levels, `what`, looks like labels: objects of one number."""
    if sample.volume.dtype.kind not in "iu":
        return []
    values, counts = np.unique(np.concatenate([box[0].ravel() for box in sample.boxes]), return_counts=True)
    # Empty space, and what is saturated.
    no_objects = [0, int(np.iinfo(sample.volume.dtype).max), int(values[counts.argmax()])]
    num = num_alike = 0
    for box in sample.boxes:
        before, after = box[0, ..., :-1], box[0, ..., 1:]
        is_inside = ~np.isin(before, no_objects) & ~np.isin(after, no_objects)
        num += int(np.count_nonzero(is_inside))
        num_alike += int(np.count_nonzero(is_inside & (before == after)))
    if num < LEAST_PAIRS or num_alike < ALIKE_IN_LABELS * num:
        return []
    return [
        f"{sample.volume} looks like labels, whose numbers are no grey levels: of neighbouring voxels "
        f"{num_alike / num:.0%} are alike; {what}"
    ]


def image_share(sample: Sample) -> float | None:
    """Return the share of neighbouring voxels within objects that are alike, if it is that of an image; else None."""
    num = num_alike = 0
    for box in sample.boxes:
        before, after = box[0, ..., :-1], box[0, ..., 1:]
        in_objects = (before != 0) | (after != 0)
        num += int(np.count_nonzero(in_objects))
        num_alike += int(np.count_nonzero(in_objects & (before == after)))
    return num_alike / num if num >= LEAST_PAIRS and num_alike < ALIKE_IN_IMAGES * num else None


def stored_notes(*volumes: Volume | None) -> list[str]:
    """Return what each of the volumes that are there says of its values, such as a palette, with its name."""
    return [f"{volume}: {note}" for volume in volumes if volume is not None for note in volume.value_notes]
