"""Differences of two outputs of one input: sums over blocks of images, and matches of labels; both add.

Not here: blocks, and reading them (subject, compare). What a block returns is small; the sums of all blocks are
exact until the end, so that they are the same whatever worker did which, and in whatever order.

Of labels A and B the numbers mean nothing, so that objects are matched first: a label of A and one of B are matched
where each has the most voxels in the other. A voxel differs where its two labels are no match. 0 is no object, and
matches 0 alone::

    A  1 1 1 2 2 2 0 0        matched: 1 and 7, 2 and 5
    B  7 7 7 7 5 5 0 3        differ:        ^       ^
"""

from __future__ import annotations

import math
from dataclasses import asdict, astuple, dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from volpipe.evaluation.label_scores import Overlaps, adapted_rand_error, variation_of_information
from volpipe.evaluation.psnr import psnr
from volpipe.evaluation.score import plain
from volpipe.evaluation.texts import number, share_line
from volpipe.geometry.grid import Box

PlainDifference = tuple[int, float, int, int, int, int, int, float, float, float]  # of an ImageDifference, its sums
Pairs = np.ndarray  # (2, pairs), uint64: labels of A and of B that are matched, sorted by A


@dataclass(frozen=True)
class ImageDifference:
    """Sums over voxels of two images, or of one channel of them, and what follows from these.

    Attributes:
        num, squares: voxels that have a number in both, and the sum of their squared differences.
        num_voxels: all of them.
        num_differ: voxels that are not the same; two NaN are, and two infinities of one sign.
        num_unlike: of these, voxels that are NaN or infinite in one, and in the other are not, or otherwise.
        num_nonfinite_a, num_nonfinite_b: voxels that are NaN or infinite.
        absolute, signed, largest: sum of |B - A|, sum of B - A, and the largest |B - A|, 0 without any.
        data_range: the greatest value less the least that there may be; None where nobody knows.
    """

    num: int = 0
    squares: float = 0.0
    num_voxels: int = 0
    num_differ: int = 0
    num_unlike: int = 0
    num_nonfinite_a: int = 0
    num_nonfinite_b: int = 0
    absolute: float = 0.0
    signed: float = 0.0
    greatest: float = 0.0
    data_range: float | None = None

    @classmethod
    def exact(cls, sums: PlainDifference, data_range: float | None) -> ImageDifference:
        """Return a difference with fractions in place of floats, which add up to the same in any order."""
        values: list[Any] = [  # Any: of each field
            Fraction(value) if isinstance(value, float) and math.isfinite(value) else value for value in sums
        ]
        return replace(cls(*values), data_range=data_range)

    def __add__(self, other: ImageDifference) -> ImageDifference:
        sums: list[Any] = [a + b for a, b in zip(self.to_list(), other.to_list(), strict=True)]  # Any: of each field
        return replace(ImageDifference(*sums), greatest=max(self.greatest, other.greatest), data_range=self.data_range)

    def to_list(self) -> PlainDifference:
        """Return the sums as plain values, to travel as JSON."""
        values: PlainDifference = astuple(self)[:-1]
        return values

    @property
    def differ(self) -> float:
        """Share of voxels that differ, 0 to 1."""
        return self.num_differ / self.num_voxels if self.num_voxels else 0.0

    @property
    def is_identical(self) -> bool:
        return not self.num_differ

    @property
    def num_nonfinite(self) -> int:
        """Voxels that are NaN or infinite, of both together."""
        return self.num_nonfinite_a + self.num_nonfinite_b

    @property
    def mean(self) -> float:
        """Mean of |B - A|; not a number where no voxel has a number in both."""
        return float(self.absolute) / self.num if self.num else math.nan

    @property
    def shift(self) -> float:
        """Mean of B - A."""
        return float(self.signed) / self.num if self.num else math.nan

    @property
    def largest(self) -> float:
        """Largest |B - A|."""
        return float(self.greatest) if self.num else math.nan

    @property
    def psnr(self) -> float | None:
        """Peak signal-to-noise ratio of B against A in dB; None where the range is not known."""
        return None if self.data_range is None else psnr(self.num, self.squares, self.data_range)

    @property
    def rank(self) -> tuple[float, ...]:
        """The order of how much differs: first voxels that are NaN in one output alone, then squared differences."""
        squares = float(self.squares) / self.num / (self.data_range or 1.0) ** 2 if self.num else 0.0
        return self.num_unlike, squares, self.differ

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values; infinity and NaN are None."""
        names = ("num_voxels", "num_differ", "differ", "mean", "shift", "largest", "psnr")
        nonfinite = {"a": self.num_nonfinite_a, "b": self.num_nonfinite_b, "in_one": self.num_unlike}
        counts = {f"nonfinite_{name}": num for name, num in nonfinite.items()}
        return {name: plain(getattr(self, name)) for name in names} | counts

    @property
    def cells(self) -> dict[str, str]:
        """The cells of a table by the names of their columns."""
        ratio, shift = self.psnr, self.shift
        return {
            "voxels that differ": share_line(self.num_differ, self.num_voxels),
            "largest": number(self.largest),
            "mean": number(self.mean),
            "mean of B - A": f"{shift:+,.4g}" if shift else number(shift),
            "PSNR dB": f"{ratio:.2f}" if ratio is not None and math.isfinite(ratio) else number(ratio),
        }

    @property
    def object_cells(self) -> dict[str, str]:
        """No more cells for the row of all boxes together: there are none of images."""
        return {}

    @property
    def distance(self) -> str:
        """How far both are from each other, in one number: PSNR in dB."""
        return self.cells["PSNR dB"]


def difference_sums(a: np.ndarray, b: np.ndarray) -> ImageDifference:
    """Return the sums of a block, (z, y, x) of one type, or both of floating point."""
    counts, num_voxels, same = {}, a.size, a == b
    if np.issubdtype(a.dtype, np.floating):
        finite_a, finite_b = np.isfinite(a), np.isfinite(b)
        both, same = finite_a & finite_b, same | (np.isnan(a) & np.isnan(b))
        counts = {
            "num_unlike": int(np.count_nonzero(~both & ~same)),
            "num_nonfinite_a": int(num_voxels - np.count_nonzero(finite_a)),
            "num_nonfinite_b": int(num_voxels - np.count_nonzero(finite_b)),
        }
        a, b = a[both], b[both]
    change = change_of(a, b)
    gap = np.abs(change)
    return ImageDifference(
        a.size, float(np.square(change).sum()), num_voxels, int(num_voxels - np.count_nonzero(same)), **counts,
        absolute=float(gap.sum()), signed=float(change.sum()), greatest=float(gap.max(initial=0.0)),
    )  # fmt: skip


def change_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return B - A as float64; of whole numbers of 64 bits the exact difference, rounded once."""
    if np.issubdtype(a.dtype, np.integer) and a.dtype.itemsize == 8:
        one, other = a.view(np.uint64), b.view(np.uint64)
        gap = np.where(b >= a, other - one, one - other).astype(np.float64)  # what wraps around is right again
        return np.where(b >= a, gap, -gap)
    change: np.ndarray = b.astype(np.float64) - a.astype(np.float64)
    return change


# ---- labels


@dataclass(frozen=True)
class LabelDifference:
    """How two segmentations differ.

    Attributes:
        num_voxels: all of them.
        num_differ: voxels whose two labels are no match.
        num_renumbered: voxels whose two labels have other numbers, whether these are matched or not.
        num_objects_a, num_objects_b, num_matched: objects, and those that have a match.
        num_labelled: voxels that have a label in A or B.
        split, merge: the two halves of the variation of information over these, in bits: the uncertainty of the label
            of B given that of A, and the other way round; 0 counts there as one more label. 0 without such voxels.
        rand_error: adapted Rand error of B against A over these; 0 without such voxels.
    """

    num_voxels: int
    num_differ: int
    num_renumbered: int
    num_objects_a: int
    num_objects_b: int
    num_matched: int
    num_labelled: int
    split: float
    merge: float
    rand_error: float
    num_unlike: ClassVar[int] = 0  # none is NaN or infinite
    num_nonfinite: ClassVar[int] = 0

    @property
    def differ(self) -> float:
        """Share of voxels that differ, 0 to 1."""
        return self.num_differ / self.num_voxels if self.num_voxels else 0.0

    @property
    def is_identical(self) -> bool:
        return not self.num_renumbered

    @property
    def voi(self) -> float:
        """Variation of information, in bits."""
        return self.split + self.merge

    @property
    def rank(self) -> tuple[float, ...]:
        """The order of how much differs: first the variation of information, then the share of voxels."""
        return self.voi, self.differ

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values."""
        return {**asdict(self), "differ": self.differ, "voi": self.voi}

    @property
    def cells(self) -> dict[str, str]:
        """The cells of a table by the names of their columns."""
        return {
            "voxels that differ": share_line(self.num_differ, self.num_voxels),
            "VOI split + merge, bits": f"{self.split:.4f} + {self.merge:.4f}",
        }

    @property
    def object_cells(self) -> dict[str, str]:
        """More cells for the row of all boxes together: the Rand error and the numbers of objects."""
        objects = {"objects of A": self.num_objects_a, "of B": self.num_objects_b, "matched": self.num_matched}
        return {"Rand error": f"{self.rand_error:.4f}"} | {name: f"{n:,}" for name, n in objects.items()}

    @property
    def distance(self) -> str:
        """How far both are from each other, in one number: the variation of information in bits."""
        return f"{self.voi:.4f}"


Difference = ImageDifference | LabelDifference


def matches(table: Overlaps) -> Pairs:
    """Return the pairs of labels that share more voxels with each other than with any other label.

    Of several labels that share as many, the lowest counts. `table` has a label of A, one of B, and the voxels that
    have both; 0 matches 0 alone.
    """
    one, other, counts = table
    objects = (one != 0) & (other != 0)
    best = _most_shared(one[objects], other[objects], counts[objects])
    back = _most_shared(other[objects], one[objects], counts[objects])
    mutual = best[:, back[1][np.searchsorted(back[0], best[1])] == best[0]]
    pairs: Pairs = np.concatenate([np.zeros((2, 1), np.uint64), mutual], axis=1)
    return pairs


def by_number(table: Overlaps) -> Pairs:
    """Return each label with itself, where the same number means the same in A and B."""
    both = np.intersect1d(table[0], table[1])
    numbers = np.concatenate([np.zeros(1, np.uint64), both[both != 0]])
    return np.stack([numbers, numbers])


def _most_shared(labels: np.ndarray, others: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return (2, labels): each label once, and the one of `others` that shares most voxels with it."""
    order = np.lexsort((others, counts.max(initial=0) - counts, labels))
    first = np.unique(labels[order], return_index=True)[1]
    return np.stack([labels[order][first], others[order][first]])


def unmatched(one: np.ndarray, other: np.ndarray, pairs: Pairs) -> np.ndarray:
    """Return whether each voxel's label of A and label of B, uint64, are not matched by `pairs`."""
    place = np.minimum(np.searchsorted(pairs[0], one), pairs.shape[1] - 1)
    result: np.ndarray = (pairs[0][place] != one) | (pairs[1][place] != other)
    return result


def label_difference(table: Overlaps, pairs: Pairs) -> LabelDifference:
    """Return how the segmentations of `table` differ, whose objects are matched by `pairs`."""
    one, other, counts = table
    inside = table[:, (one != 0) | (other != 0)]
    has_any = inside.shape[1] > 0
    split, merge = variation_of_information(inside) if has_any else (0.0, 0.0)
    return LabelDifference(
        num_voxels=int(counts.sum()),
        num_differ=int(counts[unmatched(one, other, pairs)].sum()),
        num_renumbered=int(counts[one != other].sum()),
        num_objects_a=int(np.unique(one[one != 0]).size), num_objects_b=int(np.unique(other[other != 0]).size),
        num_matched=pairs.shape[1] - 1,
        num_labelled=int(inside[2].sum()),
        split=split, merge=merge, rand_error=adapted_rand_error(inside) if has_any else 0.0,
    )  # fmt: skip


# ---- all blocks


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
