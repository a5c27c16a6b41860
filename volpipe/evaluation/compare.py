"""Compare: two outputs of one input, block by block on workers: how much differs, and where most.

Not here: the sums and the matching of labels (differences), how both outputs were made (origins), or printing (cli). No
process holds more than a block of both; a block returns a few numbers of each channel, or the table of its labels.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from volpipe.blockwise.heartbeat import Beater
from volpipe.blockwise.journal import Record
from volpipe.blockwise.task import work_each
from volpipe.errors import PlanError
from volpipe.evaluation.block_work import ByBlock
from volpipe.evaluation.differences import (
    DifferenceSums,
    ImageDifference,
    LabelDifference,
    Pairs,
    PlainDifference,
    by_number,
    difference_sums,
    label_difference,
    matches,
)
from volpipe.evaluation.evaluate import read_block, refuse_image
from volpipe.evaluation.label_scores import Overlaps, PlainOverlaps, overlaps, total
from volpipe.evaluation.origins import Making, check_same_input, makings_of
from volpipe.geometry.grid import Box, Grid, Triple
from volpipe.inference.roi import find_roi
from volpipe.units import count, shape
from volpipe.volumes.places import Paired, check_same_place
from volpipe.volumes.volume import View, Volume, open_volume

BLOCK, SMALL_BLOCK = (128, 128, 128), (64, 64, 64)  # voxels per axis; of many channels the small one
MANY_CHANNELS = 4
MOST_PAIRS = 1 << 18  # of labels in tables of blocks, before they are added up
MOST_BOXES = 10  # boxes that are named, of those that differ most


@dataclass(frozen=True)
class Comparison:
    """Two outputs of one input, and the box in which they are compared.

    Attributes:
        a, b: the volumes, of one shape (z, y, x) and as many channels.
        box: the part to compare, in voxels (z, y, x) of both.
        kind: "image", "labels" of objects, whose numbers mean nothing, or "classes", whose numbers do.
        why: what tells the kind, for people.
        data_range: of images, the greatest value less the least that there may be; None where nobody knows.
        block: voxels (z, y, x) that are compared at once.
        made_a, made_b: how they were made, and what they were made of, the output itself first; () where it says
            nothing.
        notes: what a user should know of how both were made, in sentences.
    """

    a: Volume
    b: Volume
    box: Box
    kind: str
    why: str
    data_range: float | None
    block: Triple
    made_a: tuple[Making, ...] = ()
    made_b: tuple[Making, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def blocks(self) -> Grid:
        return Grid(self.box.shape, self.block)

    def own_box(self, block: int) -> Box:
        """Return the voxels of both volumes that are compared in `block`."""
        return self.blocks.box(block).shift(self.box.start)

    def read_box(self, block: int) -> Box:
        """Return the voxels of both volumes that are read to compare `block`."""
        return self.own_box(block)

    def describe(self) -> dict[str, object]:
        """Return the volumes and the box, as JSON values."""
        return {
            "a": str(self.a),
            "b": str(self.b),
            "kind": self.kind,
            "box": str(self.box),
            "data_range": self.data_range,
            "block": self.block,
            **({"incomplete": True} if self.a.view.incomplete or self.b.view.incomplete else {}),
        }


def plan_comparison(
    a: Volume | str,
    b: Volume | str,
    *,
    labels: bool = False,
    roi: str | None = None,
    data_range: float | None = None,
    any_input: bool = False,
    incomplete: bool = False,
) -> Comparison:
    """Return the comparison of the outputs `a` and `b`, checked against both.

    Args:
        a, b: the volumes, or their locations.
        labels: whether both hold labels, whatever they say of themselves; 0 is none.
        roi: box z0:z1,y0:y1,x0:x1 of both; all without it.
        data_range: of images, the greatest value less the least that there may be; None for that of whole numbers of 8
            and 16 bits, of others there is no PSNR.
        any_input: whether they may have been made of different inputs, or show different parts of it.
        incomplete: whether locations may be of outputs that are not complete, whose missing voxels are zeros.

    Raises:
        VolumeError: one is not there.
        PlanError: they do not fit each other, or were not made of the same input.
    """
    view = View(incomplete=incomplete)
    first, second = (each if isinstance(each, Volume) else open_volume(each, view=view) for each in (a, b))
    _check_shapes(first, second)
    made = makings_of(first), makings_of(second)
    kind, why = _kind(first, second, made, labels=labels, is_grey=data_range is not None)
    _check_types(first, second, kind, why)
    if data_range is not None and (kind != "image" or not 0 < data_range < math.inf):
        wrong = "labels have none" if kind != "image" else f"{data_range:g} is no difference of two values"
        raise PlanError(f"data_range is of grey levels: {wrong}; leave it out, or give a number above 0")
    notes = [f"A and B are the same volume, {first}"] if first == second else []
    if not any_input:
        advice = "give --any-input to compare them voxel by voxel all the same"
        notes += check_same_place(Paired("A", first), Paired("B", second), advice)
        notes += check_same_input(first, second, *made)
    block = BLOCK if first.num_channels <= MANY_CHANNELS else SMALL_BLOCK
    comparison = Comparison(
        first, second, find_roi(roi, first), kind, why, _range(kind, first, data_range), block, *made, tuple(notes)
    )
    for volume, makings in zip((first, second), made, strict=True):
        if kind == "labels" and not (makings and makings[0].kind == "labels"):
            refuse_image(volume, comparison.box)
    return comparison


def _check_shapes(a: Volume, b: Volume) -> None:
    for what, one, other in (
        ("voxels (z, y, x)", shape(a.spatial_shape), shape(b.spatial_shape)),
        ("channels", a.num_channels, b.num_channels),
    ):
        if one != other:
            raise PlanError(
                f"A has {one} {what}, B {other}: {a} and {b}; compare outputs of the same input by nets of one kind"
            )


def _kind(
    a: Volume, b: Volume, made: tuple[tuple[Making, ...], tuple[Making, ...]], *, labels: bool, is_grey: bool
) -> tuple[str, str]:
    """Return the kind of both, and what tells that."""
    if labels:
        return "labels", "as --labels says"
    kinds = [making[0].kind if making else "" for making in made]
    if all(kinds) and kinds[0] != kinds[1]:
        words = {"labels": "labels of `volpipe segment`", "image": "an image of a net", "classes": "classes of a net"}
        raise PlanError(f"A is {words[kinds[0]]}, B {words[kinds[1]]}: {a} and {b}; compare two of a kind")
    if kinds[0] or kinds[1]:
        return kinds[0] or kinds[1], "as its attributes say" if not all(kinds) else "as their attributes say"
    is_wide = all(volume.dtype.kind in "iu" and volume.dtype.itemsize > 2 for volume in (a, b))
    if is_wide and not is_grey:
        return "labels", f"as voxels are {a.dtype}; --data-range compares grey levels"
    return "image", f"as voxels are {a.dtype}; --labels compares labels"


def _check_types(a: Volume, b: Volume, kind: str, why: str) -> None:
    """Refuse voxels whose numbers do not mean the same, and labels that are none."""
    if kind != "image":
        for name, volume in (("A", a), ("B", b)):
            if volume.dtype.kind not in "iu" or volume.num_channels > 1:
                channels = count(volume.num_channels, "channel")
                raise PlanError(
                    f"{name} has {volume.dtype} voxels and {channels}, labels ({why}) are whole numbers of one "
                    f"channel: {volume}; leave --labels out, or name the labels"
                )
        return
    if a.dtype != b.dtype and not a.dtype.kind == b.dtype.kind == "f":
        raise PlanError(
            f"A has {a.dtype} voxels, B {b.dtype}: {a} and {b}; a grey level of one is none of the other: run one of "
            "them again with the output.dtype of the other, or `volpipe convert` it"
        )


def _range(kind: str, volume: Volume, data_range: float | None) -> float | None:
    if data_range is not None or kind != "image" or volume.dtype.kind not in "iu" or volume.dtype.itemsize > 2:
        return data_range
    info = np.iinfo(volume.dtype)
    return float(info.max) - float(info.min)


@dataclass(frozen=True)
class BlockDifferences(ByBlock):
    """Result of comparing blocks: sums of each channel, or tables of labels, by block; as plain values."""

    sums: dict[int, list[PlainDifference]] = field(default_factory=dict)
    tables: dict[int, PlainOverlaps] = field(default_factory=dict)


RESULTS = (BlockDifferences,)


def compare_blocks(
    comparison: Comparison, units: Sequence[int], session: str = "", run: str | None = None
) -> Record[BlockDifferences]:
    """Return what differs in blocks `units`, by block; on a worker.

    Args:
        session: of the driver.
        run: folder of the comparison, where the worker's sign of life goes.
    """

    def one(block: int) -> BlockDifferences:
        box = comparison.own_box(block)
        a, b = (read_block(volume, box, session) for volume in (comparison.a, comparison.b))
        if comparison.kind != "image":
            return BlockDifferences(tables={block: overlaps(labels=b[0], truth=a[0]).tolist()})
        return BlockDifferences({block: [difference_sums(*pair).to_list() for pair in zip(a, b, strict=True)]})

    beater = Beater(None if run is None else Path(run), session, comparison.own_box)
    return work_each("compare", units, one, BlockDifferences.joined, beater=beater)


@dataclass(frozen=True)
class WorstBox:
    """A box that differs, and its block: how much does; of labels also those that are matched in it."""

    block: int
    box: Box
    difference: ImageDifference | LabelDifference
    pairs: Pairs | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values."""
        return {"box": str(self.box), **self.difference.to_json()}


@dataclass(frozen=True)
class Differences:
    """How two outputs differ, over the blocks that could be compared.

    Attributes:
        together: all channels.
        channels: each of several, () of one and of labels.
        worst: boxes that differ most, the worst first; none that is the same.
        num_boxes, num_boxes_differ: that were compared, and of these those that differ.
        nonfinite_at: the first box with voxels that are NaN or infinite, None without.
    """

    together: ImageDifference | LabelDifference
    channels: tuple[ImageDifference, ...]
    worst: tuple[WorstBox, ...]
    num_boxes: int
    num_boxes_differ: int
    nonfinite_at: Box | None = None

    @property
    def is_same(self) -> bool:
        """Whether no voxel differs; of labels, whether the objects are the same, whatever their numbers."""
        difference = self.together
        return difference.num_differ == 0 if isinstance(difference, LabelDifference) else not difference.sums.num_differ

    @property
    def rank(self) -> tuple[float, ...]:
        """How much differs: the greater, the more."""
        return self.together.rank

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values; infinity and NaN are None."""
        return {
            "identical": is_identical(self.together),
            "together": self.together.to_json(),
            "channels": [channel.to_json() for channel in self.channels],
            "boxes": self.num_boxes,
            "boxes_that_differ": self.num_boxes_differ,
            "worst": [box.to_json() for box in self.worst],
            "nonfinite_first_in": None if self.nonfinite_at is None else str(self.nonfinite_at),
        }


def is_identical(difference: ImageDifference | LabelDifference) -> bool:
    """Return whether every voxel is the same."""
    if isinstance(difference, LabelDifference):
        return difference.num_renumbered == 0
    return difference.sums.num_differ == 0


Results = Callable[[], Iterable[BlockDifferences]]  # what blocks gave, in any order, as often as it is called


def sum_differences(comparison: Comparison, results: Results) -> Differences | None:
    """Return what blocks gave, added up; None without any.

    Sums are exact until the end, so that neither the order of blocks nor that of workers changes a bit of them, and no
    more than the boxes that differ most is kept of many blocks.
    """
    if comparison.kind == "image":
        return _image_differences(comparison, results)
    return _label_differences(comparison, results)


@dataclass
class _Boxes:
    """The boxes that were looked at.

    Attributes:
        num, num_differ: how many, and how many differ.
    """

    comparison: Comparison
    num: int = 0
    num_differ: int = 0

    def worst(self, blocks: Iterable[tuple[int, ImageDifference | LabelDifference]]) -> tuple[WorstBox, ...]:
        """Return the boxes that differ most, of equal ones the first, of `blocks`, each with what differs."""
        largest = heapq.nlargest(MOST_BOXES, self._differing(blocks), key=lambda pair: (pair[1].rank, -pair[0]))
        return tuple(WorstBox(block, self.comparison.own_box(block), difference) for block, difference in largest)

    def _differing(
        self, blocks: Iterable[tuple[int, ImageDifference | LabelDifference]]
    ) -> Iterator[tuple[int, ImageDifference | LabelDifference]]:
        for block, difference in blocks:
            self.num += 1
            if difference.differ:
                self.num_differ += 1
                yield block, difference


def _image_differences(comparison: Comparison, results: Results) -> Differences | None:
    channels = [DifferenceSums() for _ in range(comparison.a.num_channels)]
    boxes, nonfinite = _Boxes(comparison), len(comparison.blocks)

    def blocks() -> Iterator[tuple[int, ImageDifference]]:
        nonlocal channels, nonfinite
        for block, plain in (entry for part in results() for entry in part.sums.items()):
            parts = [DifferenceSums(*values).exact() for values in plain]
            channels = [whole + part for whole, part in zip(channels, parts, strict=True)]
            whole = _together(parts).rounded()
            if whole.num_nonfinite_a or whole.num_nonfinite_b:
                nonfinite = min(nonfinite, block)
            yield block, ImageDifference(whole, comparison.data_range)

    worst = boxes.worst(blocks())
    each = tuple(ImageDifference(channel.rounded(), comparison.data_range) for channel in channels)
    together = ImageDifference(_together(channels).rounded(), comparison.data_range)
    at = comparison.own_box(nonfinite) if nonfinite < len(comparison.blocks) else None
    result = Differences(together, each if len(each) > 1 else (), worst, boxes.num, boxes.num_differ, at)
    return result if boxes.num else None


def _together(parts: Sequence[DifferenceSums]) -> DifferenceSums:
    return sum(parts[1:], parts[0])


def _label_differences(comparison: Comparison, results: Results) -> Differences | None:
    whole = _total(table for part in results() for table in part.tables.values())
    pairs = matches(whole) if comparison.kind == "labels" else by_number(whole)
    boxes = _Boxes(comparison)
    worst = boxes.worst(
        (block, label_difference(np.array(table, np.uint64), pairs))
        for part in results()
        for block, table in part.tables.items()
    )
    if not boxes.num:
        return None
    numbers = {box.block for box in worst}
    labels = {block: table[0] for part in results() for block, table in part.tables.items() if block in numbers}
    shown = tuple(
        replace(box, pairs=pairs[:, np.isin(pairs[0], np.array(labels[box.block], np.uint64))]) for box in worst
    )
    return Differences(label_difference(whole, pairs), (), shown, boxes.num, boxes.num_differ)


def _total(tables: Iterable[PlainOverlaps]) -> Overlaps:
    """Return the sum of tables, of which no more than a few are kept."""
    whole, waiting, num_pairs = total([]), list[PlainOverlaps](), 0
    for table in tables:
        waiting.append(table)
        num_pairs += len(table[0])
        if num_pairs > max(MOST_PAIRS, whole.shape[1]):
            whole, waiting, num_pairs = total([whole, *waiting]), [], 0
    return total([whole, *waiting])
