"""Limits of a comparison: how much an output may differ, and sentences on those that are violated.

Not here: how much it differs (differences), or which outputs have what a limit is of (compare).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from volpipe.errors import PlanError
from volpipe.evaluation.differences import Difference, Differences
from volpipe.resolve import nearest


@dataclass(frozen=True)
class Measure:
    """A number by which two outputs differ, of which there may be a limit.

    Attributes:
        name: in limits, and of the attribute of a `Difference` that is the number.
        noun, unit: for people.
        is_share: whether it is a share, from 0 to 1.
        is_floor: whether the least is limited, not the most.
        needs_range: whether nobody knows it where the range of grey levels is not known.
        counts_all: whether voxels count that are NaN or infinite in one output alone.
    """

    name: str
    noun: str
    unit: str = ""
    is_share: bool = False
    is_floor: bool = False
    needs_range: bool = False
    counts_all: bool = False


PSNR = Measure("psnr", "the PSNR", " dB", is_floor=True, needs_range=True)
DIFFER = Measure("differ", "the share of voxels that differ", is_share=True, counts_all=True)
MEAN = Measure("mean", "the mean difference")
LARGEST = Measure("largest", "the largest difference")
VOI = Measure("voi", "the variation of information", " bits")
MEASURES = (PSNR, DIFFER, MEAN, LARGEST, VOI)


@dataclass(frozen=True)
class Limit:
    """A bound for a measure: the most that it may be, of PSNR the least; in dB, grey levels, bits, or a share of 1."""

    measure: Measure
    value: float

    @classmethod
    def parse(cls, text: str) -> Limit:
        """Return the limit that `text` gives, NAME=NUMBER.

        Raises:
            PlanError: it is none.
        """
        name, _, number = (part.strip() for part in text.partition("="))
        known = {measure.name: measure for measure in MEASURES}
        if name not in known:
            raise PlanError(
                f"limit {text!r}: there is none of {name!r}{nearest(name, known)}; those are {', '.join(known)}"
            )
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            raise PlanError(f"limit {text!r}: write {name}=NUMBER, a number from 0 up")
        if known[name].is_share and value > 1:
            raise PlanError(f"limit {text!r}: it is a share, from 0 to 1; write {name}=0.01 for 1 %")
        return cls(known[name], value)

    def __str__(self) -> str:
        return f"{self.measure.name}={self.value:g}"

    def violations(self, differences: Differences) -> list[str]:
        """Return a sentence for all together, and for each channel, where the limit is violated."""
        parts = {"": differences.together} | {f"channel {i}: ": part for i, part in enumerate(differences.channels)}
        sentences = {where: self.violation(part) for where, part in parts.items()}
        return [f"{where}{self}: {sentence}" for where, sentence in sentences.items() if sentence]

    def violation(self, difference: Difference) -> str:
        """Return how `difference` violates the limit, "" where it does not."""
        measure = self.measure
        if difference.num_unlike and not measure.counts_all:
            num = difference.num_unlike
            return f"{num:,} voxels are NaN or infinite in one output alone, which {measure.noun} cannot count"
        value = getattr(difference, measure.name)
        if value is None or math.isnan(value):  # all of it is NaN alike: nothing differs
            return ""
        is_violated = value < self.value if measure.is_floor else value > self.value
        return f"{measure.noun} is {value:.6g}{measure.unit}" if is_violated else ""
