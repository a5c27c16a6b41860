"""Limits of a comparison: how much an output may differ, and sentences on those that are violated.

Not here: how much it differs (differences, compare).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from volpipe.errors import PlanError
from volpipe.evaluation.compare import Comparison, Differences
from volpipe.evaluation.differences import Difference
from volpipe.resolve import nearest


@dataclass(frozen=True)
class Measure:
    """What a limit may be of.

    Attributes:
        value: of a difference, None where it is not known.
        kinds: of comparisons that have it.
        noun, unit: for sentences.
        is_least: whether the value may not fall below the limit, instead of rising above it.
    """

    value: Callable[[Difference], float | None]
    kinds: tuple[str, ...]
    noun: str
    unit: str = ""
    is_least: bool = False


OF_IMAGES, OF_LABELS = ("image",), ("labels", "classes")
MEASURES = {
    "psnr": Measure(lambda each: getattr(each, "psnr", None), OF_IMAGES, "the PSNR", " dB", is_least=True),
    "differ": Measure(lambda each: each.differ, OF_IMAGES + OF_LABELS, "the share of voxels that differ"),
    "mean": Measure(lambda each: getattr(each, "mean", None), OF_IMAGES, "the mean difference"),
    "largest": Measure(lambda each: getattr(each, "largest", None), OF_IMAGES, "the largest difference"),
    "voi": Measure(lambda each: getattr(each, "voi", None), OF_LABELS, "the variation of information", " bits"),
}


@dataclass(frozen=True)
class Limit:
    """A limit.

    Attributes:
        name: of MEASURES.
        value: in dB, bits, grey levels, or a share of 1.
    """

    name: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Return the limit that `text` gives, NAME=NUMBER.

        Raises:
            PlanError: it is none.
        """
        name, _, number = (part.strip() for part in text.partition("="))
        if name not in MEASURES:
            known = ", ".join(MEASURES)
            raise PlanError(f"limit {text!r}: there is none of {name!r}{nearest(name, MEASURES)}; those are {known}")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise PlanError(f"limit {text!r}: write {name}=NUMBER, a number from 0 up")
        if name == "differ" and value > 1:
            raise PlanError(f"limit {text!r}: it is a share, from 0 to 1; write {name}=0.01 for 1 %")
        return cls(name, value)

    def __str__(self) -> str:
        return f"{self.name}={self.value:g}"

    @property
    def measure(self) -> Measure:
        return MEASURES[self.name]

    def check(self, comparison: Comparison) -> None:
        """Refuse a limit of what `comparison` does not have.

        Raises:
            PlanError: with what it may be of.
        """
        if comparison.kind not in self.measure.kinds:
            names = ", ".join(name for name, measure in MEASURES.items() if comparison.kind in measure.kinds)
            raise PlanError(
                f"limit {self}: {comparison.a} and {comparison.b} are compared as {plural_of(comparison.kind)} "
                f"({comparison.why}), which have no {self.name}; limits of {plural_of(comparison.kind)} are {names}"
            )
        if self.name == "psnr" and comparison.data_range is None:
            raise PlanError(
                f"limit {self}: {comparison.a} has {comparison.a.dtype} voxels, whose range says nothing of its data; "
                "give --data-range, the greatest value less the least, the same for all that you compare"
            )

    def violations(self, differences: Differences) -> Iterator[str]:
        """Yield a sentence for each channel, and for all together, where the limit is violated."""
        parts = {f"channel {i}: ": channel for i, channel in enumerate(differences.channels)}
        for where, difference in ({"": differences.together} | parts).items():
            if (sentence := self._violation(difference)) is not None:
                yield f"{where}{sentence}"

    def _violation(self, difference: Difference) -> str | None:
        measure, value = self.measure, self.measure.value(difference)
        unlike = getattr(difference, "num_unlike", 0)  # labels have none
        if unlike and self.name != "differ":
            return (
                f"{self}: {unlike:,} voxels are NaN or infinite in one output alone, which {measure.noun} cannot count"
            )
        if value is None or math.isnan(value):  # all of it is NaN alike: nothing differs
            return None
        if value < self.value if measure.is_least else value > self.value:
            return f"{self}: {measure.noun} is {value:.6g}{measure.unit}"
        return None


def plural_of(kind: str) -> str:
    """Return a kind of outputs, several of them."""
    return "images" if kind == "image" else kind


def violations(limits: Sequence[Limit], differences: Differences) -> list[str]:
    """Return a sentence for each of `limits` that `differences` violate."""
    return [sentence for limit in limits for sentence in limit.violations(differences)]
