"""Limits of a comparison: how much an output may differ, and sentences on those that are violated.

Not here: how much it differs (differences, compare).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from volpipe.errors import PlanError
from volpipe.evaluation.compare import Comparison, Differences
from volpipe.evaluation.differences import Difference
from volpipe.resolve import nearest

IMAGE, LABELS = ("image",), ("labels", "classes")
MEASURES = {  # by the name of what a difference has: kinds that have it, its noun and unit
    "psnr": (IMAGE, "the PSNR", " dB"),
    "differ": (IMAGE + LABELS, "the share of voxels that differ", ""),
    "mean": (IMAGE, "the mean difference", ""),
    "largest": (IMAGE, "the largest difference", ""),
    "voi": (LABELS, "the variation of information", " bits"),
}


@dataclass(frozen=True)
class Limit:
    """What a difference may be at most, and a PSNR at least; `value` is in dB, grey levels, bits, or a share of 1."""

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

    def is_of(self, kind: str) -> bool:
        """Whether outputs of a kind have it."""
        return kind in MEASURES[self.name][0]

    def check(self, comparison: Comparison) -> None:
        """Refuse a limit of what `comparison` does not have.

        Raises:
            PlanError: with what it may be of.
        """
        a, kind = comparison.a, comparison.kind
        if not self.is_of(kind):
            plural = "images" if kind == "image" else kind
            names = ", ".join(name for name, (kinds, *_) in MEASURES.items() if kind in kinds)
            raise PlanError(
                f"limit {self}: {a} and {comparison.b} are compared as {plural} ({comparison.why}), which have no "
                f"{self.name}; limits of {plural} are {names}"
            )
        if self.name == "psnr" and comparison.data_range is None:
            raise PlanError(
                f"limit {self}: {a} has {a.dtype} voxels, whose range says nothing of its data; "
                "give --data-range, the greatest value less the least, the same for all that you compare"
            )

    def violations(self, differences: Differences) -> list[str]:
        """Return a sentence for all together, and for each channel, where the limit is violated."""
        parts = {"": differences.together} | {f"channel {i}: ": part for i, part in enumerate(differences.channels)}
        sentences = {where: self._violation(part) for where, part in parts.items()}
        return [f"{where}{self}: {sentence}" for where, sentence in sentences.items() if sentence]

    def _violation(self, difference: Difference) -> str:
        (_, noun, unit), value = MEASURES[self.name], getattr(difference, self.name, None)
        if difference.num_unlike and self.name != "differ":
            return (
                f"{difference.num_unlike:,} voxels are NaN or infinite in one output alone, which {noun} cannot count"
            )
        if value is None or math.isnan(value):  # all of it is NaN alike: nothing differs
            return ""
        is_violated = value < self.value if self.name == "psnr" else value > self.value
        return f"{noun} is {value:.6g}{unit}" if is_violated else ""
