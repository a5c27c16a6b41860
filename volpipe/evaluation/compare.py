"""Compare: two outputs of one input: how much differs, and where most.

Not here: the sums and the matching of labels (differences), how both outputs were made (origins), or how that is shown
(lines).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation import differences, subject
from volpipe.evaluation.differences import Difference, ImageDifference, Pairs, label_difference
from volpipe.evaluation.evaluate import FINGERPRINT
from volpipe.evaluation.label_scores import total
from volpipe.evaluation.origins import Making, check_same_input, makings_of
from volpipe.evaluation.subject import BlockSums, Pair, Results, read_block, tables
from volpipe.geometry.grid import Box, triple
from volpipe.inference.roi import find_roi
from volpipe.units import count, shape
from volpipe.volumes.places import Paired, check_same_place
from volpipe.volumes.values import stored_notes
from volpipe.volumes.volume import View, Volume, open_volume

MANY_CHANNELS = 4  # of more, blocks have half the edge
MOST_BOXES = 10  # boxes that are named, of those that differ most


@dataclass(frozen=True, kw_only=True)
class Comparison(Pair):
    """Two outputs of one input, with as many channels.

    Attributes:
        why: what tells the kind, for people.
        fingerprint: of B, where results are kept, and others may change it.
        made_a, made_b: how they were made, and what they were made of, the output itself first; () where it says
            nothing.
    """

    why: str
    made_a: tuple[Making, ...] = ()
    made_b: tuple[Making, ...] = ()
    fingerprint: str = ""
    stage = "compare"
    mark = "comparison.json"

    def inputs(self) -> dict[str, Volume]:
        return {"a": self.a, "b": self.b}

    def describe(self) -> dict[str, object]:
        stamp = {FINGERPRINT: self.fingerprint} if self.fingerprint else {}
        return {**super().describe(), "block": self.block, **stamp}

    @property
    def outside(self) -> tuple[str, ...]:
        return ("b",) if self.fingerprint else ()

    def check_labels(self) -> None:
        """Refuse images where labels are to be compared."""
        for volume in (self.a, self.b) if self.kind == "labels" else ():
            subject.refuse_image(volume, self.box)

    def image_sums(self, block: int, session: str) -> BlockSums:
        a, b = (read_block(volume, self.own_box(block), session) for volume in (self.a, self.b))
        channels = (differences.difference_sums(*pair).to_list() for pair in zip(a, b, strict=True))
        return BlockSums(differences={block: list(channels)})

    def differences(self, results: Results) -> Differences | None:
        """Return what blocks gave, added up; None without any.

        Sums are exact until the end, so that neither the order of blocks nor that of workers changes a bit of them, and
        no more than the boxes that differ most is kept of many blocks.
        """
        together, channels, pairs, blocks = (self._of_images if self.kind == "image" else self._of_labels)(results)
        num, num_differ, nonfinite = 0, 0, len(self.blocks)
        worst = list[tuple[tuple[float, ...], int, Difference, np.ndarray]]()
        for block, difference, labels in blocks:
            num += 1
            if difference.num_nonfinite:
                nonfinite = min(nonfinite, block)
            if difference.differ:
                num_differ += 1
                heapq.heappush(worst, (difference.rank, -block, difference, labels))  # of equal ones the first
                if len(worst) > MOST_BOXES:
                    heapq.heappop(worst)
        if not num:
            return None
        boxes = [WorstBox(self.own_box(-block), each) for _, block, each, _ in sorted(worst, reverse=True)]
        if pairs is not None:
            shown = np.concatenate([np.zeros(0, np.uint64), *(labels for *_, labels in worst)])
            pairs = pairs[:, np.isin(pairs[0], shown)]
        at = self.own_box(nonfinite) if nonfinite < len(self.blocks) else None
        return Differences(together, channels, tuple(boxes), num, num_differ, at, pairs)

    def _of_images(self, results: Results) -> Sums:
        def parts() -> Iterator[tuple[int, list[ImageDifference]]]:
            for block, channels in (entry for part in results() for entry in part.differences.items()):
                yield block, [ImageDifference.exact(sums, self.data_range) for sums in channels]

        whole = [ImageDifference(data_range=self.data_range)] * self.a.num_channels
        for _, each in parts():
            whole = [one + other for one, other in zip(whole, each, strict=True)]
        blocks = ((block, sum(each[1:], each[0]), np.zeros(0)) for block, each in parts())
        return sum(whole[1:], whole[0]), tuple(whole) if len(whole) > 1 else (), None, blocks

    def _of_labels(self, results: Results) -> Sums:
        whole = total(table for _, table in tables(results))
        pairs = differences.matches(whole) if self.kind == "labels" else differences.by_number(whole)
        arrays = ((block, np.array(table, np.uint64)) for block, table in tables(results))
        blocks = ((block, label_difference(table, pairs), table[0]) for block, table in arrays)
        return label_difference(whole, pairs), (), pairs, blocks


# Of all together, of each of several channels; labels that are matched; and by block how it differs, and labels of A.
Sums = tuple[
    Difference, tuple[ImageDifference, ...], Pairs | None, Iterable[tuple[int, Difference, np.ndarray]],
]  # fmt: skip


def plan_comparison(
    a: Volume | str, b: Volume | str, *, labels: bool = False, roi: str | None = None,
    data_range: float | None = None, any_input: bool = False, incomplete: bool = False, is_planned: bool = False,
) -> Comparison:  # fmt: skip
    """Return the comparison of the outputs `a` and `b`, checked against both.

    Args:
        a, b: the volumes, or their locations.
        labels: whether both hold labels, whatever they say of themselves; 0 is none.
        roi: box z0:z1,y0:y1,x0:x1 of both; all without it.
        data_range: as in Comparison; None for that of whole numbers of 8 and 16 bits, of others there is no PSNR.
        any_input: whether they may have been made of different inputs, or show different parts of it.
        incomplete: whether locations may be of outputs that are not complete, whose missing voxels are zeros.
        is_planned: whether the volumes need not exist yet: what they say of themselves, and voxels, are not looked at.

    Raises:
        VolumeError: one is not there.
        PlanError: they do not fit each other, or were not made of the same input.
    """
    view = View(incomplete=incomplete)
    first, second = (each if isinstance(each, Volume) else open_volume(each, view=view) for each in (a, b))
    shapes, channels = (
        [shape(each.spatial_shape) for each in (first, second)],
        (first.num_channels, second.num_channels),
    )
    for what, (one, other) in {"voxels (z, y, x)": shapes, "channels": channels}.items():
        if one != other:
            advice = "compare outputs of the same input by nets of one kind"
            raise PlanError(f"A has {one} {what}, B {other}: {first} and {second}; {advice}")
    made = ((), ()) if is_planned else (makings_of(first), makings_of(second))
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
    notes += stored_notes(first, second)
    box = find_roi(roi, first)
    for volume, makings in zip((first, second), made, strict=True):
        if kind == "labels" and not is_planned and not (makings and makings[0].kind == "labels"):
            subject.refuse_image(volume, box)
    return Comparison(
        a=first, b=second, box=box, kind=kind, why=why, made_a=made[0], made_b=made[1], notes=tuple(notes),
        data_range=subject.type_range(first) if data_range is None and kind == "image" else data_range,
        block=triple(edge // (1 if first.num_channels <= MANY_CHANNELS else 2) for edge in subject.BLOCK),
    )  # fmt: skip


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
    for name, volume in (("A", a), ("B", b)) if kind != "image" else ():
        if volume.dtype.kind not in "iu" or volume.num_channels > 1:
            raise PlanError(
                f"{name} has {volume.dtype} voxels and {count(volume.num_channels, 'channel')}, labels ({why}) are "
                f"whole numbers of one channel: {volume}; leave --labels out, or name the labels"
            )
    if kind == "image" and a.dtype != b.dtype and not a.dtype.kind == b.dtype.kind == "f":
        raise PlanError(
            f"A has {a.dtype} voxels, B {b.dtype}: {a} and {b}; a grey level of one is none of the other: run one of "
            "them again with the output.dtype of the other, or `volpipe convert` it"
        )


@dataclass(frozen=True)
class WorstBox:
    """A box that differs, and how much."""

    box: Box
    difference: Difference

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
        pairs: of labels, those that are matched and are in a box of `worst`.
    """

    together: Difference
    channels: tuple[ImageDifference, ...]
    worst: tuple[WorstBox, ...]
    num_boxes: int
    num_boxes_differ: int
    nonfinite_at: Box | None = None
    pairs: Pairs | None = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values; infinity and NaN are None."""
        return {
            "identical": self.together.is_identical,
            "together": self.together.to_json(),
            "channels": [channel.to_json() for channel in self.channels],
            "boxes": self.num_boxes,
            "boxes_that_differ": self.num_boxes_differ,
            "worst": [box.to_json() for box in self.worst],
            "nonfinite_first_in": None if self.nonfinite_at is None else str(self.nonfinite_at),
        }
