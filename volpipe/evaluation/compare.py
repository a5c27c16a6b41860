"""Compare: two outputs of one input: how much differs, and where most.

Not here: the sums and the matching of labels (differences), how both outputs were made (origins), or how that is shown
(lines).
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation import differences, limits, subject
from volpipe.evaluation.differences import (
    Difference,
    Differences,
    ImageDifference,
    LabelDifference,
    Pairs,
    WorstBox,
    label_difference,
)
from volpipe.evaluation.label_scores import Overlaps, overlaps, total
from volpipe.evaluation.limits import Limit, Measure
from volpipe.evaluation.origins import Provenance, check_same_input, provenances_of
from volpipe.evaluation.score import CLASSES, IMAGE, LABELS
from volpipe.evaluation.subject import FINGERPRINT, BlockSums, Results, Subject, read_block, tables
from volpipe.geometry.grid import triple
from volpipe.inference.roi import find_roi
from volpipe.units import count, shape
from volpipe.volumes.places import Paired, check_same_place
from volpipe.volumes.values import stored_notes
from volpipe.volumes.volume import View, Volume, open_volume

MANY_CHANNELS = 4  # of more, blocks have half the edge
MOST_BOXES = 10  # boxes that are named, of those that differ most
BlockDifference = tuple[int, Difference, np.ndarray]  # number of a block, how it differs, and its labels of A


@dataclass(frozen=True)
class WholeDifference:
    """The difference of all blocks together, and that of each block.

    Attributes:
        together: all channels.
        channels: each of several; () of one and of labels.
        pairs: labels that are matched; None of images.
        blocks: each block, in any order.
    """

    together: Difference
    channels: tuple[ImageDifference, ...]
    pairs: Pairs | None
    blocks: Iterable[BlockDifference]


@dataclass(frozen=True, kw_only=True)
class ComparisonPlan(Subject):
    """Two outputs of one input, with as many channels.

    Attributes:
        why: what tells the kind, for people.
        fingerprint: of B, where results are kept, and others may change it.
        made_a, made_b: how they were made, and what they were made of, the output itself first; () where it says
            nothing.
        plural, called: outputs of this kind, and one of them that volpipe made, for people.
        measures: numbers by which outputs of this kind differ, of which there may be limits.
    """

    why: str
    made_a: tuple[Provenance, ...] = ()
    made_b: tuple[Provenance, ...] = ()
    fingerprint: str = ""
    stage = "compare"
    mark = "comparison.json"
    plural: ClassVar[str]
    called: ClassVar[str]
    measures: ClassVar[tuple[Measure, ...]]

    def inputs(self) -> dict[str, Volume]:
        return {"a": self.a, "b": self.b}

    def describe(self) -> dict[str, object]:
        stamp = {FINGERPRINT: self.fingerprint} if self.fingerprint else {}
        return {**super().describe(), "block": self.block, **stamp}

    @property
    def outside(self) -> tuple[str, ...]:
        return ("b",) if self.fingerprint else ()

    @classmethod
    @abstractmethod
    def check_types(cls, a: Volume, b: Volume, why: str) -> None:
        """Refuse voxels whose numbers do not mean the same, or are not of this kind, which `why` tells."""

    @classmethod
    @abstractmethod
    def range_of(cls, a: Volume, data_range: float | None) -> float | None:
        """Return the range of grey levels that is given, or that of the type of A; None where nobody knows.

        Raises:
            PlanError: it is none, or there are no grey levels.
        """

    @abstractmethod
    def whole(self, results: Results) -> WholeDifference:
        """Return the difference of all blocks together, and that of each block."""

    @abstractmethod
    def sentences(self, found: Differences) -> list[str]:
        """Return how much differs, in sentences."""

    def check_labels(self) -> None:
        """Refuse images where labels are to be compared."""

    def check_foreign(self) -> None:
        """Refuse images where labels are to be compared, but for outputs that say themselves that they are labels."""

    def has(self, limit: Limit) -> bool:
        """Whether outputs of this kind have the measure that `limit` bounds."""
        return limit.measure in self.measures

    def check_limit(self, limit: Limit) -> None:
        """Refuse a limit on a measure that outputs of this kind do not have, or that nobody knows of these two.

        Raises:
            PlanError: with what it may be of.
        """
        if not self.has(limit):
            names = ", ".join(measure.name for measure in limits.MEASURES if measure in self.measures)
            raise PlanError(
                f"limit {limit}: {self.a} and {self.b} are compared as {self.plural} ({self.why}), which have no "
                f"{limit.measure.name}; limits of {self.plural} are {names}"
            )
        if limit.measure.needs_range and self.data_range is None:
            raise PlanError(
                f"limit {limit}: {self.a} has {self.a.dtype} voxels, whose range says nothing of its data; "
                "give --data-range, the greatest value less the least, the same for all that you compare"
            )

    def differences(self, results: Results) -> Differences | None:
        """Return how the outputs differ over all blocks that were compared; None without any.

        Sums are exact until the end, so that neither the order of blocks nor that of workers changes a bit of them, and
        no more than the boxes that differ most is kept of many blocks.
        """
        whole, num, num_differ, nonfinite = self.whole(results), 0, 0, len(self.blocks)
        worst = list[tuple[tuple[float, ...], int, Difference, np.ndarray]]()
        for block, difference, labels in whole.blocks:
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
        pairs = whole.pairs
        if pairs is not None:
            named = np.concatenate([np.zeros(0, np.uint64), *(labels for *_, labels in worst)])
            pairs = pairs[:, np.isin(pairs[0], named)]
        at = self.own_box(nonfinite) if nonfinite < len(self.blocks) else None
        return Differences(whole.together, whole.channels, tuple(boxes), num, num_differ, at, pairs)


@dataclass(frozen=True, kw_only=True)
class ImageComparison(ComparisonPlan):
    """Two images, voxel by voxel and channel by channel."""

    kind = IMAGE
    plural = "images"
    called = "an image of a net"
    measures = (limits.PSNR, limits.DIFFER, limits.MEAN, limits.LARGEST)

    @classmethod
    def check_types(cls, a: Volume, b: Volume, why: str) -> None:
        if a.dtype != b.dtype and not (np.issubdtype(a.dtype, np.floating) and np.issubdtype(b.dtype, np.floating)):
            raise PlanError(
                f"A has {a.dtype} voxels, B {b.dtype}: {a} and {b}; a grey level of one is none of the other: run one "
                "of them again with the output.dtype of the other, or `volpipe convert` it"
            )

    @classmethod
    def range_of(cls, a: Volume, data_range: float | None) -> float | None:
        if data_range is not None and not 0 < data_range < math.inf:
            raise PlanError(NO_RANGE.format(f"{data_range:g} is no difference of two values"))
        return subject.type_range(a) if data_range is None else data_range

    def sums(self, block: int, session: str) -> BlockSums:
        a, b = (read_block(volume, self.own_box(block), session) for volume in (self.a, self.b))
        channels = (differences.difference_sums(*pair).to_list() for pair in zip(a, b, strict=True))
        return BlockSums(differences={block: list(channels)})

    def whole(self, results: Results) -> WholeDifference:
        def parts() -> Iterator[tuple[int, list[ImageDifference]]]:
            for block, channels in (entry for part in results() for entry in part.differences.items()):
                yield block, [ImageDifference.exact(sums, self.data_range) for sums in channels]

        whole = [ImageDifference(data_range=self.data_range)] * self.a.num_channels
        for _, each in parts():
            whole = [one + other for one, other in zip(whole, each, strict=True)]
        blocks = ((block, sum(each[1:], each[0]), np.zeros(0)) for block, each in parts())
        return WholeDifference(sum(whole[1:], whole[0]), tuple(whole) if len(whole) > 1 else (), None, blocks)

    def sentences(self, found: Differences) -> list[str]:
        together = found.together
        assert isinstance(together, ImageDifference)
        num_a, num_b = together.num_nonfinite_a, together.num_nonfinite_b
        lines = [f"{'identical: ' if together.is_identical else ''}{differing_voxels(together)} differ"]
        if num_a or num_b:
            lines.append(
                f"NaN or infinite: {num_a:,} voxels of A, {num_b:,} of B, first in {found.nonfinite_at}; "
                f"{together.num_unlike:,} are so in one alone or otherwise, and count as differing but in no mean"
            )
        if together.data_range is None:
            lines.append("the PSNR is not known: give --data-range, the greatest value less the least")
        return lines


@dataclass(frozen=True, kw_only=True)
class LabelComparison(ComparisonPlan):
    """Labels of objects, whose numbers mean nothing: objects that share most voxels are matched."""

    kind = LABELS
    plural = "labels"
    called = "labels of `volpipe segment`"
    measures = (limits.DIFFER, limits.VOI)
    checks_labels = True
    other_stands_in = True

    @classmethod
    def check_types(cls, a: Volume, b: Volume, why: str) -> None:
        check_whole_numbers(a, b, why)

    @classmethod
    def range_of(cls, a: Volume, data_range: float | None) -> float | None:
        check_no_range(data_range)
        return None

    def check_labels(self) -> None:
        for volume in (self.a, self.b):
            subject.refuse_image(volume, self.box)

    def check_foreign(self) -> None:
        for volume, provenances in ((self.a, self.made_a), (self.b, self.made_b)):
            if not (provenances and provenances[0].is_segmentation):
                subject.refuse_image(volume, self.box)

    def sums(self, block: int, session: str) -> BlockSums:
        return table_sums(self, block, session)

    def whole(self, results: Results) -> WholeDifference:
        table = total(table for _, table in tables(results))
        return difference_of_tables(results, table, differences.matches(table))

    def sentences(self, found: Differences) -> list[str]:
        together = found.together
        assert isinstance(together, LabelDifference)
        differ = differing_voxels(together)
        if together.is_identical:
            return [f"identical: {differ} differ"]
        if together.num_differ:
            return [f"{differ} differ: their labels are not each other's best match"]
        moved = f"{together.num_renumbered:,} have another number"
        return [f"the same objects, numbered otherwise: VOI 0, {differ} differ, and {moved}"]


@dataclass(frozen=True, kw_only=True)
class ClassComparison(ComparisonPlan):
    """Classes, whose numbers mean the same in both outputs."""

    kind = CLASSES
    plural = "classes"
    called = "classes of a net"
    measures = LabelComparison.measures

    @classmethod
    def check_types(cls, a: Volume, b: Volume, why: str) -> None:
        check_whole_numbers(a, b, why)

    @classmethod
    def range_of(cls, a: Volume, data_range: float | None) -> float | None:
        check_no_range(data_range)
        return None

    def sums(self, block: int, session: str) -> BlockSums:
        return table_sums(self, block, session)

    def whole(self, results: Results) -> WholeDifference:
        table = total(table for _, table in tables(results))
        return difference_of_tables(results, table, differences.by_number(table))

    def sentences(self, found: Differences) -> list[str]:
        differ = differing_voxels(found.together)
        return [f"identical: {differ} differ" if found.together.is_identical else f"{differ} have another class"]


COMPARISONS: tuple[type[ComparisonPlan], ...] = (ImageComparison, LabelComparison, ClassComparison)
NO_RANGE = "data_range is of grey levels: {}; leave it out, or give a number above 0"


def comparison_of(kind: str) -> type[ComparisonPlan]:
    """Return the class of the comparisons of images, labels or classes."""
    return next(each for each in COMPARISONS if each.kind == kind)


def differing_voxels(difference: Difference) -> str:
    """Return how many of all voxels differ, such as "3 of 25,200 voxels"."""
    return f"{difference.num_differ:,} of {count(difference.num_voxels, 'voxel')}"


# ---- what comparisons of labels and of classes share


def check_whole_numbers(a: Volume, b: Volume, why: str) -> None:
    """Refuse voxels that are no labels, though `why` says that they are."""
    for name, volume in (("A", a), ("B", b)):
        if not np.issubdtype(volume.dtype, np.integer) or volume.num_channels > 1:
            raise PlanError(
                f"{name} has {volume.dtype} voxels and {count(volume.num_channels, 'channel')}, labels ({why}) are "
                f"whole numbers of one channel: {volume}; leave --labels out, or name the labels"
            )


def check_no_range(data_range: float | None) -> None:
    """Refuse a range of grey levels, which labels do not have."""
    if data_range is not None:
        raise PlanError(NO_RANGE.format("labels have none"))


def table_sums(comparison: ComparisonPlan, block: int, session: str) -> BlockSums:
    """Return the table of the labels of A and B in a block."""
    box = comparison.own_box(block)
    one, other = (read_block(volume, box, session)[0] for volume in (comparison.a, comparison.b))
    return BlockSums(tables={block: overlaps(other, one).tolist()})


def difference_of_tables(results: Results, whole: Overlaps, pairs: Pairs) -> WholeDifference:
    """Return how labels differ, from the table `whole` of all blocks and from the labels that are matched, `pairs`."""
    arrays = ((block, np.array(table, np.uint64)) for block, table in tables(results))
    blocks = ((block, label_difference(table, pairs), table[0]) for block, table in arrays)
    return WholeDifference(label_difference(whole, pairs), (), pairs, blocks)


# ---- the plan


def plan_comparison(
    a: Volume | str, b: Volume | str, *, labels: bool = False, roi: str | None = None,
    data_range: float | None = None, any_input: bool = False, incomplete: bool = False, is_planned: bool = False,
) -> ComparisonPlan:  # fmt: skip
    """Return the comparison of the outputs `a` and `b`, checked against both.

    Args:
        a, b: the volumes, or their locations.
        labels: whether both hold labels, whatever they say of themselves; 0 is none.
        roi: box z0:z1,y0:y1,x0:x1 of both; all without it.
        data_range: as in ComparisonPlan; None for that of whole numbers of 8 and 16 bits, of others there is no PSNR.
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
    made = ((), ()) if is_planned else (provenances_of(first), provenances_of(second))
    chosen, why = _kind_of_both(first, second, made, labels=labels, is_grey=data_range is not None)
    chosen.check_types(first, second, why)
    known_range = chosen.range_of(first, data_range)
    notes = [f"A and B are the same volume, {first}"] if first == second else []
    if not any_input:
        advice = "give --any-input to compare them voxel by voxel all the same"
        notes += check_same_place(Paired("A", first), Paired("B", second), advice)
        notes += check_same_input(first, second, *made)
    comparison = chosen(
        a=first, b=second, box=find_roi(roi, first), why=why, made_a=made[0], made_b=made[1],
        notes=(*notes, *stored_notes(first, second)), data_range=known_range,
        block=triple(edge // (1 if first.num_channels <= MANY_CHANNELS else 2) for edge in subject.BLOCK),
    )  # fmt: skip
    if not is_planned:
        comparison.check_foreign()
    return comparison


def _kind_of_both(
    a: Volume, b: Volume, made: tuple[tuple[Provenance, ...], tuple[Provenance, ...]], *, labels: bool, is_grey: bool
) -> tuple[type[ComparisonPlan], str]:
    """Return the class of comparison for two outputs, and the reason for that choice in words."""
    if labels:
        return LabelComparison, "as --labels says"
    kinds = [chain[0].kind if chain else "" for chain in made]
    if all(kinds) and kinds[0] != kinds[1]:
        one, other = (comparison_of(kind).called for kind in kinds)
        raise PlanError(f"A is {one}, B {other}: {a} and {b}; compare two of a kind")
    if kinds[0] or kinds[1]:
        why = "as its attributes say" if not all(kinds) else "as their attributes say"
        return comparison_of(kinds[0] or kinds[1]), why
    is_wide = all(np.issubdtype(volume.dtype, np.integer) and volume.dtype.itemsize > 2 for volume in (a, b))
    if is_wide and not is_grey:
        return LabelComparison, f"as voxels are {a.dtype}; --data-range compares grey levels"
    return ImageComparison, f"as voxels are {a.dtype}; --labels compares labels"
