"""Differences of two outputs of one input: sums over blocks of images, and matches of labels; both add.

Not here: blocks, and reading them (compare). What a block returns is small; the sums of all blocks are
exact until the end, so that they are the same whatever worker did which, and in whatever order.

Of labels A and B the numbers mean nothing, so that objects are matched first: a label of A and one of B are matched
where each has the most voxels in the other. A voxel differs where its two labels are no match. 0 is no object, and
matches 0 alone::

    A  1 1 1 2 2 2 0 0        matched: 1 and 7, 2 and 5
    B  7 7 7 7 5 5 0 3        differ:        ^       ^
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from volpipe.evaluation.image_scores import ErrorSums, psnr
from volpipe.evaluation.label_scores import Overlaps, adapted_rand_error, variation_of_information

PlainDifference = tuple[int, float, int, int, int, int, int, float, float, float]  # the fields of DifferenceSums
Pairs = np.ndarray  # (2, pairs), uint64: labels of A and of B that are matched, sorted by A


@dataclass(frozen=True)
class DifferenceSums(ErrorSums):
    """Sums over voxels of two images; `num` and `squares` are of voxels that have a number in both.

    Attributes:
        num_voxels: all of them.
        num_differ: voxels that are not the same; two NaN are, and two infinities of one sign.
        num_unlike: of these, voxels that are NaN or infinite in one, and in the other are not, or otherwise.
        num_nonfinite_a, num_nonfinite_b: voxels that are NaN or infinite.
        absolute, signed, largest: sum of |B - A|, sum of B - A, and the largest |B - A|.
    """

    num_voxels: int = 0
    num_differ: int = 0
    num_unlike: int = 0
    num_nonfinite_a: int = 0
    num_nonfinite_b: int = 0
    absolute: float = 0.0
    signed: float = 0.0
    largest: float = 0.0

    def __add__(self, other: DifferenceSums) -> DifferenceSums:
        sums: list[Any] = [a + b for a, b in zip(self.to_list(), other.to_list(), strict=True)]  # Any: of each field
        return dataclasses.replace(DifferenceSums(*sums), largest=max(self.largest, other.largest))

    def exact(self) -> DifferenceSums:
        """Return the same, with fractions in place of floats, which add up to the same in any order."""
        return self._each(lambda value: Fraction(value) if math.isfinite(value) else value)

    def rounded(self) -> DifferenceSums:
        """Return the same, with floats in place of fractions."""
        return self._each(float)

    def _each(self, convert: Callable[[Any], Any]) -> DifferenceSums:  # Any: float or Fraction
        sums = {name: convert(getattr(self, name)) for name in ("squares", "absolute", "signed")}
        return dataclasses.replace(self, **sums)

    def to_list(self) -> PlainDifference:
        """Return plain values, to travel as JSON."""
        values: PlainDifference = dataclasses.astuple(self)
        return values


def difference_sums(a: np.ndarray, b: np.ndarray) -> DifferenceSums:
    """Return the sums of a block, (z, y, x) of one type, or both of floating point."""
    if a.dtype.kind != "f":
        return _sums(a, b, num_differ=int(np.count_nonzero(a != b)))
    finite_a, finite_b = np.isfinite(a), np.isfinite(b)
    both = finite_a & finite_b
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    counts = {
        "num_differ": int(a.size - np.count_nonzero(same)),
        "num_unlike": int(np.count_nonzero(~both & ~same)),
        "num_nonfinite_a": int(a.size - np.count_nonzero(finite_a)),
        "num_nonfinite_b": int(b.size - np.count_nonzero(finite_b)),
    }
    return dataclasses.replace(_sums(a[both], b[both], **counts), num_voxels=a.size)


def _sums(a: np.ndarray, b: np.ndarray, **counts: int) -> DifferenceSums:
    change = change_of(a, b)
    gap = np.abs(change)
    return DifferenceSums(
        a.size, float(np.square(change).sum()), a.size, **counts,
        absolute=float(gap.sum()), signed=float(change.sum()), largest=float(gap.max(initial=0.0)),
    )  # fmt: skip


def change_of(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return B - A as float64; of whole numbers of 64 bits the exact difference, rounded once."""
    if a.dtype.kind in "iu" and a.dtype.itemsize == 8:
        one, other = a.view(np.uint64), b.view(np.uint64)
        gap = np.where(b >= a, other - one, one - other).astype(np.float64)  # what wraps around is right again
        return np.where(b >= a, gap, -gap)
    change: np.ndarray = b.astype(np.float64) - a.astype(np.float64)
    return change


@dataclass(frozen=True)
class ImageDifference:
    """Two images, or one channel of them.

    Attributes:
        sums: of all voxels.
        data_range: the greatest value less the least that there may be; None where nobody knows.
    """

    sums: DifferenceSums
    data_range: float | None = None

    @property
    def differ(self) -> float:
        """Share of voxels that differ, 0 to 1."""
        return self.sums.num_differ / self.sums.num_voxels if self.sums.num_voxels else 0.0

    @property
    def mean(self) -> float:
        """Mean of |B - A|; not a number where no voxel has a number in both."""
        return self.sums.absolute / self.sums.num if self.sums.num else math.nan

    @property
    def shift(self) -> float:
        """Mean of B - A."""
        return self.sums.signed / self.sums.num if self.sums.num else math.nan

    @property
    def largest(self) -> float:
        """Largest |B - A|."""
        return self.sums.largest if self.sums.num else math.nan

    @property
    def psnr(self) -> float | None:
        """Peak signal-to-noise ratio of B against A in dB; None where the range is not known."""
        return None if self.data_range is None else psnr(self.sums, self.data_range)

    @property
    def rank(self) -> tuple[float, ...]:
        """How much differs: what is NaN in one alone comes before any difference."""
        sums, whole = self.sums, self.data_range or 1.0
        return sums.num_unlike, sums.squares / sums.num / whole**2 if sums.num else 0.0, self.differ

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values; infinity and NaN are None."""
        values = {
            "num_voxels": self.sums.num_voxels, "num_differ": self.sums.num_differ, "differ": self.differ,
            "mean": self.mean, "shift": self.shift, "largest": self.largest, "psnr": self.psnr,
            "nonfinite_a": self.sums.num_nonfinite_a, "nonfinite_b": self.sums.num_nonfinite_b,
            "nonfinite_in_one": self.sums.num_unlike,
        }  # fmt: skip
        return {name: plain(value) for name, value in values.items()}


def plain(value: object) -> object:
    """Return a value for JSON, which has neither infinity nor NaN: None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- labels


@dataclass(frozen=True)
class LabelDifference:
    """Two segmentations.

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

    @property
    def differ(self) -> float:
        """Share of voxels that differ, 0 to 1."""
        return self.num_differ / self.num_voxels if self.num_voxels else 0.0

    @property
    def voi(self) -> float:
        """Variation of information, in bits."""
        return self.split + self.merge

    @property
    def rank(self) -> tuple[float, ...]:
        """How much differs."""
        return self.voi, self.differ

    def to_json(self) -> dict[str, object]:
        """Return the same as JSON values."""
        return {**dataclasses.asdict(self), "differ": self.differ, "voi": self.voi}


def matches(table: Overlaps) -> Pairs:
    """Return the labels that are matched: each has the most voxels in the other, of several the lowest number.

    Args:
        table: label of A, label of B, and the voxels that have both; 0 matches 0 alone, where there is any.
    """
    one, other, counts = table
    objects = (one != 0) & (other != 0)
    best = _best(one[objects], other[objects], counts[objects])
    back = _best(other[objects], one[objects], counts[objects])
    mutual = best[:, back[1][np.searchsorted(back[0], best[1])] == best[0]]
    pairs: Pairs = np.concatenate([np.zeros((2, 1), np.uint64), mutual], axis=1)
    return pairs


def by_number(table: Overlaps) -> Pairs:
    """Return each label with itself, where the same number means the same in A and B; arguments as of `matches`."""
    both = np.intersect1d(table[0], table[1])
    numbers = np.concatenate([np.zeros(1, np.uint64), both[both != 0]])
    return np.stack([numbers, numbers])


def _best(labels: np.ndarray, others: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return each of `labels` once and that of `others` with which it shares the most voxels, (2, labels)."""
    order = np.lexsort((others, counts.max(initial=0) - counts, labels))
    first = np.unique(labels[order], return_index=True)[1]
    return np.stack([labels[order][first], others[order][first]])


def unmatched(table: Overlaps, pairs: Pairs) -> int:
    """Return the number of voxels in `table` whose labels are not among `pairs`."""
    place = np.minimum(np.searchsorted(pairs[0], table[0]), pairs.shape[1] - 1)
    is_match = (pairs[0][place] == table[0]) & (pairs[1][place] == table[1])
    return int(table[2][~is_match].sum())


def label_difference(table: Overlaps, pairs: Pairs) -> LabelDifference:
    """Return how the segmentations of `table` differ, whose objects are matched by `pairs`."""
    one, other, counts = table
    inside = table[:, (one != 0) | (other != 0)]
    has_any = inside.shape[1] > 0
    split, merge = variation_of_information(inside) if has_any else (0.0, 0.0)
    return LabelDifference(
        num_voxels=int(counts.sum()),
        num_differ=unmatched(table, pairs),
        num_renumbered=int(counts[one != other].sum()),
        num_objects_a=int(np.unique(one[one != 0]).size),
        num_objects_b=int(np.unique(other[other != 0]).size),
        num_matched=pairs.shape[1] - 1,
        num_labelled=int(inside[2].sum()),
        split=split,
        merge=merge,
        rand_error=adapted_rand_error(inside) if has_any else 0.0,
    )
