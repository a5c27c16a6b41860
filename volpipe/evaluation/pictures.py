"""Pictures of slices: an output beside its input or reference, two outputs where they differ most, and their errors.

Not here: drawing (reporting.panels, reporting.frames), or numbers. Only the slices on a picture are read, and of a box
that differs all its voxels, once, to find the slice that differs most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from volpipe.errors import VolpipeError, VolumeError
from volpipe.evaluation.compare import ComparisonPlan
from volpipe.evaluation.differences import Differences, Pairs, change_of, unmatched
from volpipe.evaluation.evaluation import Evaluation
from volpipe.evaluation.origins import shared_input
from volpipe.evaluation.subject import read_block
from volpipe.geometry.grid import Box
from volpipe.reporting import frames
from volpipe.reporting.page import Draft, Item, Picture, Sentence
from volpipe.reporting.panels import Panel, panels_png
from volpipe.reporting.shades import coloured, display_change, display_range, diverge, grey, shaded
from volpipe.resolve import homes_known
from volpipe.volumes.storage.result_file import ResultFile, png_bytes, png_kind
from volpipe.volumes.volume import Volume

EDGE = 256  # voxels of a slice to show at most, from the middle
PLANES = {"xz": 1, "xy": 0}  # and the axis that each is across
MOST_CHUNK = 8 * 2**20  # bytes of a chunk, decoded, of which a report reads some
SHOWN = ("nearest", "cubic", "output")
RED, WHITE = (200, 30, 30), (255, 255, 255)
MOST_PIXELS = 1 << 14  # of a slice on a picture of whole volumes, along an axis
NONE = "red: no match"
WHOLE_PNG = png_kind("vp.draw_comparison")
Plane = tuple[int, Box, list[Panel], list[Panel]]  # axis that it is across, box, images, and their errors


def draw(evaluation: Evaluation) -> bytes:
    """Return a PNG of the middle xz and xy slices of all candidates, and of their errors."""
    return panels_png([row for _, _, shown, errors in _planes(evaluation) for row in (shown, errors) if row])


def evaluation_items(evaluation: Evaluation) -> Iterator[Item]:
    """Yield the slices that `draw` has as pictures for a report; those of labels in one colour for each object.

    Nothing of volumes whose chunks are too much to be read for it.
    """
    huge = [v for v in (evaluation.output, evaluation.reference) if math.prod(v.chunks) * v.dtype.itemsize > MOST_CHUNK]
    if huge:
        yield Sentence(f"No pictures: a chunk of {huge[0]} is more than is read for a report.")
        return
    if evaluation.about_pictures:
        yield Sentence(evaluation.about_pictures)
    size = evaluation.reference.voxel_size_nm
    voxel = size or (1.0, 1.0, 1.0)
    for axis, box, images, errors in _planes(evaluation):
        yield Sentence(f"Slice {box} (z, y, x):")
        sides = frames.sides_of(box.shape, voxel, axis)
        for panel in [*images, *errors]:
            file = frames.drawn(panel.pixels, sides, min(voxel), is_known=size is not None)
            yield Picture(panel.caption, "", *file)


def _planes(evaluation: Evaluation) -> Iterator[Plane]:
    """Yield the middle slices of an output and of what it is compared with."""
    for title, axis in PLANES.items():
        box = _middle_slice(evaluation.box, axis)
        names = [name for name in SHOWN if name in evaluation.candidates]
        slices = {name: evaluation.voxels(name, box).squeeze(axis) for name in names}
        slices["reference"] = evaluation.read_a(box)[0].squeeze(axis)
        yield axis, box, *evaluation.panels(slices, title)


def _middle_slice(box: Box, across: int) -> Box:
    """Return the middle slice of `box` across an axis, of up to EDGE voxels along the others."""
    shape = tuple(1 if axis == across else min(EDGE, n) for axis, n in enumerate(box.shape))
    start = tuple(a + (n - m) // 2 for a, n, m in zip(box.start, box.shape, shape, strict=True))
    return Box(start, tuple(a + m for a, m in zip(start, shape, strict=True)))


# ---- boxes that differ most


def worst_drafts(comparison: ComparisonPlan, differences: Differences, most: int, name: str = "") -> Iterator[Draft]:
    """Yield drafts of pictures of up to `most` boxes that differ most; titles begin with `name`."""
    for worst in differences.worst[:most]:
        title = f"{name}box {worst.box}"
        make = partial(_worst_items, title, comparison, worst.box, differences.pairs)
        yield Draft(title, make, "Boxes that differ most")


def _worst_items(title: str, comparison: ComparisonPlan, box: Box, pairs: Pairs | None) -> list[Item]:
    """Return the picture of the slice of a box that differs most: the input, A, B and their difference."""
    a, b = (read_block(volume, box) for volume in (comparison.a, comparison.b))
    if pairs is None:
        with np.errstate(invalid="ignore"):  # of infinities
            change = change_of(a, b)
            amount = _squares(a, b, change)
    else:
        amount = change = unmatched(a.astype(np.uint64), b.astype(np.uint64), pairs)
    channel, at = divmod(int(amount.sum(axis=(2, 3)).argmax()), amount.shape[1])
    one, other, changed = a[channel, at], b[channel, at], change[channel, at]
    images = _image_panels(one, other, changed) if pairs is None else _label_panels(one, other, changed, pairs)
    (z, *start), (_, *stop) = box.start, box.stop
    source, remark = _input_panels(comparison, Box((z + at, *start), (z + at + 1, *stop)), one.shape)
    of = f", channel {channel}" if comparison.a.num_channels > 1 else ""
    place = f"xy at z {z + at}, y,x {Box(tuple(start), tuple(stop))}{of}"
    caption = f"{place}: the slice of the box that differs most{remark}"
    return [Picture(title, caption, panels_png([[*source, *images]]), is_wide=True)]


def _squares(a: np.ndarray, b: np.ndarray, change: np.ndarray) -> np.ndarray:
    """Return the squared difference of each voxel; a NaN or infinity in one output alone counts most."""
    amount, same = np.square(change), (a == b) | ((a != a) & (b != b))  # NaN is not itself
    finite = np.isfinite(amount)
    result: np.ndarray = np.where(finite, amount, np.where(same, 0.0, 1.0 + amount[finite].sum()))
    return result


def _image_panels(a: np.ndarray, b: np.ndarray, change: np.ndarray) -> list[Panel]:
    limits, full = display_range(a, b), display_change(change)
    return [
        Panel(f"A, {limits[0]:.4g} to {limits[1]:.4g}", shaded(a[None], limits)),
        Panel("B, same greys", shaded(b[None], limits)),
        Panel(f"B - A: red +, blue -{full:.3g}", diverge(change, full)),
    ]


def _label_panels(a: np.ndarray, b: np.ndarray, is_other: np.ndarray, pairs: Pairs) -> list[Panel]:
    """Return panels of labels (y, x): A, B in the colours of the matches in A, and where labels have no match."""
    numbers, place = np.unique(b.astype(np.uint64), return_inverse=True)
    matches = dict(zip(pairs[1].tolist(), pairs[0].tolist(), strict=True))
    # without a match a colour of its own
    colours = np.array(
        [matches.get(number, np.iinfo(np.uint64).max - number) for number in numbers.tolist()], np.uint64
    )
    marked = np.where(is_other[..., None], np.array(RED, np.uint8), np.array(WHITE, np.uint8))
    return [
        Panel("A", coloured(a)),
        Panel("B, matches in A's colours", coloured(colours[place.reshape(b.shape)])),
        Panel(NONE, marked),
    ]


def _input_panels(comparison: ComparisonPlan, box: Box, shape: tuple[int, ...]) -> tuple[list[Panel], str]:
    """Return a panel of the input that both outputs have, and ""; or no panel, and a remark that says why."""
    last = shared_input(comparison.made_a, comparison.made_b)
    if last is None:
        return [], "; what both were made of is not known"
    for provenance in comparison.made_a[: last + 1]:
        box = provenance.input_box(box)
    try:
        source = comparison.made_a[last].open_input()
        data = read_block(source, box & Box.from_shape(source.spatial_shape))[:1, 0]
    except (VolpipeError, OSError) as error:
        return [], f"; the input cannot be shown: {error}"
    down, across = shape
    image = frames.resized(shaded(data, display_range(data)), (down, across))
    return [Panel("input, greys of its own", image)], ""


# ---- whole volumes


@homes_known
def draw_comparison(
    path: str | Path, before: Volume | np.ndarray, after: Volume | np.ndarray, *,
    titles: tuple[str, str] = ("input", "output"),
) -> None:  # fmt: skip
    """Write a PNG of two volumes and their difference: the middle xy slice, and below it the middle xz slice.

    Args:
        path: the file to write; its folder exists. No other file than one that this function wrote is replaced.
        before: the input (z, y, x) or (y, x), any number type.
        after: the output, of the same shape or a whole multiple of it per axis; the input's voxels are then
            repeated to match, and so count as unblurred in the difference.
        titles: captions of the two.

    Raises:
        VolumeError: the shapes do not fit each other, or a value of `after` is not finite.
        VolpipeError: something else is at `path`, or it cannot be written.
    """
    file = ResultFile.named("path", path, WHOLE_PNG)
    file.check()
    after, before = np.asarray(after), np.asarray(before)
    if not np.isfinite(after).all():
        raise VolumeError(f"{titles[1]} holds values that are not finite, which have no grey; mend them first")
    if before.ndim not in (2, 3) or before.ndim != after.ndim:
        raise VolumeError(f"cannot compare {before.shape} with {after.shape}; give both (z, y, x) or both (y, x)")
    for dim, (axis, small, large) in enumerate(zip("zyx"[-after.ndim :], before.shape, after.shape, strict=True)):
        if large % small:
            raise VolumeError(f"output {large} is not a multiple of input {small} on axis {axis}; crop one")
        before = before.repeat(large // small, axis=dim)
    is_bytes = before.dtype == after.dtype == np.uint8
    limits = (
        (0.0, 255.0) if is_bytes else (float(min(before.min(), after.min())), float(max(before.max(), after.max())))
    )
    z, y, all_of = after.shape[0] // 2, after.shape[1] // 2, slice(None)
    places = {f"xy at z {z}": (z, all_of, all_of), f"xz at y {y}": (all_of, y, all_of)}
    rows = []
    for place, index in places.items() if after.ndim == 3 else [("xy", (all_of, all_of))]:
        old, new = before[index], after[index]
        change = new.astype(np.float64) - old
        largest = float(np.abs(change).max())
        scale = f"blue -{largest:.3g}, red +{largest:.3g}" if largest > 0 else "none"
        rows.append([
            Panel(f"{titles[0]}, {place}, {limits[0]:g} to {limits[1]:g}", grey(old, limits)),
            Panel(f"{titles[1]}, {place}, same greys", grey(new, limits)),
            Panel(f"difference: {scale}", diverge(change, largest)),
        ])  # fmt: skip
    file.write(png_bytes(WHOLE_PNG.writer, panels_png(rows, most=MOST_PIXELS)))
