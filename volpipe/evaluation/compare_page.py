"""The page of a comparison: how much differs, what was done otherwise, and pictures of the boxes that differ most.

Not here: HTML (reporting.render). Of each box that is shown both outputs and their input are read once, for the slice
that differs most: its input, A, B and their difference stand side by side.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from volpipe.blockwise.failures import Missing, last_line
from volpipe.errors import VolpipeError
from volpipe.evaluation.compare import Comparison, Differences, WorstBox
from volpipe.evaluation.compare_lines import (
    CHANNEL_COLUMNS,
    ROW_COLUMNS,
    WORST_COLUMNS,
    channel_lines,
    worst_lines,
)
from volpipe.evaluation.differences import Pairs, change_of
from volpipe.evaluation.evaluate import read_block
from volpipe.evaluation.origins import shared_input
from volpipe.evaluation.pictures import panel
from volpipe.geometry.grid import Box
from volpipe.reporting.frames import resized
from volpipe.reporting.page import Draft, Facts, Item, Note, Page, Picture, Section, Sheet, sections_of
from volpipe.reporting.shades import Image2D, colours, display_change, display_range, diverge, grey
from volpipe.units import count
from volpipe.volumes.volume import Volume

MOST_SHOWN = 6  # boxes with pictures
RED, WHITE = (200, 30, 30), (255, 255, 255)


class Result(Protocol):
    """How two outputs differ; see `compare_driver.ComparisonResult`."""

    plan: Any  # a Comparison
    missing: list[Missing]
    differences: Differences | None

    @property
    def is_complete(self) -> bool: ...
    @property
    def is_same(self) -> bool: ...
    @property
    def is_within(self) -> bool: ...
    @property
    def summary(self) -> list[str]: ...
    @property
    def violations(self) -> list[str]: ...
    @property
    def made_otherwise(self) -> list[tuple[str, str, str]]: ...


class Row(Protocol):
    """One of many pairs; see `compare_driver.ComparisonRow`."""

    @property
    def name(self) -> str: ...
    @property
    def result(self) -> Result | None: ...
    @property
    def rank(self) -> tuple[float, ...]: ...
    @property
    def line(self) -> tuple[str, ...]: ...


def page_of(result: Result) -> Page:
    """Return the page of one comparison."""
    plan: Comparison = result.plan
    facts = {"A": str(plan.a), "B": str(plan.b), "compared as": f"{plan.kind} ({plan.why})", "box": str(plan.box)}
    items: list[Item] = [Facts("Outputs", {**facts, "result": result.summary})]
    items += [Note(f"Limit violated: {sentence}", "warning") for sentence in result.violations]
    items += [Note(note, "warning") for note in plan.notes]
    sections = [Section("Comparison", [*items, *_sheets(result)])]
    sections += [Section("How they were made", [_made(result)]), *sections_of(_drafts("", result, MOST_SHOWN))]
    if result.missing:
        rows = [(str(part.box), last_line(part.reason)) for part in result.missing]
        sections.append(Section("Not compared", [Sheet("Boxes", ("box z,y,x", "reason"), rows)]))
    return Page("Comparison of two outputs", _state(result), sections, result.is_within, result.summary[0])


def _state(result: Result) -> str:
    if not result.is_complete:
        return "not whole"
    if result.violations:
        return "limit violated"
    return "the same" if result.is_same else "they differ"


def _sheets(result: Result) -> Iterator[Item]:
    kind, differences = result.plan.kind, result.differences
    if differences is None:
        return
    yield Sheet("How much differs", CHANNEL_COLUMNS[kind], list(channel_lines(result.plan, differences)))
    if differences.worst:
        yield Sheet("Boxes that differ most", WORST_COLUMNS[kind], list(worst_lines(differences)))


def _made(result: Result) -> Item:
    if rows := result.made_otherwise:
        return Sheet("What both say of how they were made, where it differs", ("", "A", "B"), rows)
    if result.plan.made_a and result.plan.made_b:
        return Note("Both were made alike: by the same recipe, net, weights and versions.")
    return Note("Neither says how it was made.")


def page_of_many(
    a: str,
    b: str,
    rows: Sequence[Row],
    *,
    only: tuple[Sequence[str], Sequence[str]],
    violations: Sequence[str],
    most: int = MOST_SHOWN,
) -> Page:
    """Return the page of many comparisons.

    Args:
        a, b: the batches.
        only: names of what each of them has alone.
        violations: sentences on limits.
        most: outputs with a picture.
    """
    alone = {f"in {name} only": list(names) for name, names in zip("AB", only, strict=True) if names}
    items: list[Item] = [Facts("Batches", {"A": a, "B": b, **alone})]
    items += [Note(f"Limit violated: {sentence}", "warning") for sentence in violations]
    items.append(Sheet("Outputs, those that differ most first", ROW_COLUMNS, [row.line for row in rows]))
    compared = [(row.name, row.result) for row in rows if row.result is not None and row.rank]
    differing = [(name, result) for name, result in compared if not result.is_same]
    drafts = [draft for name, result in differing[:most] for draft in _drafts(f"{name}, ", result, 1)]
    sections = [Section("Comparison", items)]
    if compared:
        sections.append(Section("How they were made", [_made(compared[0][1]), Note(f"This is of {compared[0][0]}.")]))
    num_open = sum(row.result is None or not row.result.is_complete for row in rows)
    is_complete = not num_open and not alone
    state = "not all compared" if not is_complete else "limit violated" if violations else "within its limits"
    line = f"{count(len(compared), 'output')} compared, of which {len(differing):,} differ; {num_open:,} not all of it"
    sections += sections_of(drafts)
    return Page("Comparison of many outputs", state, sections, is_complete and not violations, line)


def _drafts(name: str, result: Result, most: int) -> Iterator[Draft]:
    worst = () if result.differences is None else result.differences.worst
    for box in worst[:most]:
        yield Draft(f"{name}box {box.box}", partial(_pictures, name, result.plan, box), "Boxes that differ most")


def _pictures(name: str, comparison: Comparison, worst: WorstBox) -> list[Item]:
    """Return the picture of the slice of a box that differs most."""
    a, b = (read_block(volume, worst.box) for volume in (comparison.a, comparison.b))
    is_image = comparison.kind == "image"
    amount = _amount(a, b, worst.pairs)
    channel, at = divmod(int(amount.sum(axis=(2, 3)).argmax()), amount.shape[1])
    one, other = a[channel, at], b[channel, at]
    images = _of_images(one, other) if is_image else _of_labels(one, other, amount[0, at], worst.pairs)
    z, rest = worst.box.start[0] + at, str(worst.box).split(",", 1)[1]
    slice_box = Box((z, *worst.box.start[1:]), (z + 1, *worst.box.stop[1:]))
    source, remark = _input(comparison, slice_box, one.shape)
    data = io.BytesIO()
    panel(data, [*source, *images], columns=4)
    of = f", channel {channel}" if comparison.a.num_channels > 1 else ""
    caption = f"xy at z {z}, y,x {rest}{of}: the slice of the box that differs most{remark}"
    return [Picture(f"{name}box {worst.box}", caption, data.getvalue(), is_wide=True)]


def _amount(a: np.ndarray, b: np.ndarray, pairs: Pairs | None) -> np.ndarray:
    """Return how much each voxel (c, z, y, x) differs: of labels 0 or 1."""
    if pairs is not None:
        return _is_other(a, b, pairs).astype(np.float64)
    with np.errstate(invalid="ignore"):  # of infinities
        amount = np.square(change_of(a, b))
    finite = np.isfinite(amount)
    same = (a == b) | ((a != a) & (b != b))  # NaN is not itself
    result: np.ndarray = np.where(finite, amount, np.where(same, 0.0, 1.0 + amount[finite].sum()))
    return result


def _is_other(a: np.ndarray, b: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Return whether the labels of a voxel are no match."""
    result: np.ndarray = _translated(a, pairs) != b.astype(np.uint64)
    return result


def _translated(labels: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Return the label that each of `labels` is matched with; one that none has, where there is no match."""
    numbers, place = np.unique(labels.astype(np.uint64), return_inverse=True)
    at = np.minimum(np.searchsorted(pairs[0], numbers), pairs.shape[1] - 1)
    other = np.where(pairs[0][at] == numbers, pairs[1][at], np.iinfo(np.uint64).max)
    result: np.ndarray = other[place.reshape(labels.shape)]
    return result


def _of_images(a: np.ndarray, b: np.ndarray) -> list[tuple[str, Image2D]]:
    limits = display_range(a, b)
    with np.errstate(invalid="ignore"):
        change = change_of(a, b)
    full = display_change(change)
    shown = diverge(np.where(np.isfinite(change), change, 0.0), full)
    return [
        (f"A, {limits[0]:.4g} to {limits[1]:.4g}", _shaded(a, limits)),
        ("B, same greys", _shaded(b, limits)),
        (f"B - A: red +, blue -{full:.3g}", shown),
    ]


def _shaded(data: np.ndarray, limits: tuple[float, float]) -> Image2D:
    """Return `data` (y, x) in greys, red where it is NaN or infinite."""
    finite = np.isfinite(data)
    image = grey(np.where(finite, data, limits[0]), limits)
    return image if finite.all() else np.where(finite[..., None], image[..., None], np.array(RED, np.uint8))


def _of_labels(a: np.ndarray, b: np.ndarray, other: np.ndarray, pairs: Pairs | None) -> list[tuple[str, Image2D]]:
    """Return labels (y, x) in colours, those of B in the colours of their matches; and where they are none."""
    assert pairs is not None
    back = _translated(b, pairs[::-1][:, np.argsort(pairs[1])])
    alone = np.where(back == np.iinfo(np.uint64).max, ~b.astype(np.uint64), back)  # a colour of its own
    marked = np.where(other[..., None] > 0, np.array(RED, np.uint8), np.array(WHITE, np.uint8))
    return [
        ("A", _coloured(a)),
        ("B, matches in A's colours", _coloured(alone)),
        ("red: no match", marked),
    ]


def _coloured(labels: np.ndarray) -> Image2D:
    """Return labels (y, x) in colours of their own, 0 in black."""
    numbers, place = np.unique(labels.astype(np.uint64), return_inverse=True)
    table = np.where(numbers[:, None] == 0, 0, colours(numbers)).astype(np.uint8)
    image: Image2D = table[place.reshape(labels.shape)]
    return image


def _input(comparison: Comparison, box: Box, shape: tuple[int, ...]) -> tuple[list[tuple[str, Image2D]], str]:
    """Return the slice of the input that both outputs have, and "", or none and why."""
    last = shared_input(comparison.made_a, comparison.made_b)
    if last is None:
        return [], "; what both were made of is not known"
    for making in comparison.made_a[: last + 1]:
        box = making.input_box(box)
    try:
        source = comparison.made_a[last].open_input()
        data = _part(source, box)
    except (VolpipeError, OSError) as error:
        return [], f"; the input cannot be shown: {error}"
    down, across = shape[-2:]
    return [("input, greys of its own", resized(_shaded(data, display_range(data)), (down, across)))], ""


def _part(source: Volume, box: Box) -> np.ndarray:
    """Return the first slice (y, x) of the first channel of `source` in `box`."""
    part: np.ndarray = read_block(source, box & Box.from_shape(source.spatial_shape))[0, 0]
    return part
