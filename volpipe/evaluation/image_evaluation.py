"""An evaluation of an image, and of interpolations of its input beside it.

Not here: the interpolation (interpolate), or what all kinds of evaluation share (evaluation).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation import subject
from volpipe.evaluation.evaluation import OUTPUT, Evaluation, checked_finite, checked_range
from volpipe.evaluation.interpolate import METHODS, interpolated
from volpipe.evaluation.score import IMAGE, ImageTotal, ScoredBlock, Scores
from volpipe.evaluation.subject import BlockSums, Results
from volpipe.geometry.grid import Box
from volpipe.inference.intensity import to_dtype
from volpipe.reporting.page import Sheet
from volpipe.reporting.panels import Panel
from volpipe.reporting.shades import display_range, diverge, grey
from volpipe.volumes.values import labels_note, take_sample
from volpipe.volumes.volume import Volume


@dataclass(frozen=True, kw_only=True)
class ImageEvaluation(Evaluation):
    """An evaluation of an image and, where that has more voxels than its input, of interpolations of the input."""

    data_range: float
    kind = IMAGE
    checks_labels = False
    interpolates = True
    about_pictures = "Errors are those against the reference: red is too bright, blue too dark."

    @property
    def needs_whole_inputs(self) -> bool:
        """Whether all inputs must be written before the first block: interpolations read beyond it."""
        return len(self.candidates) > 1

    @property
    def candidates(self) -> tuple[str, ...]:
        return (OUTPUT, *METHODS) if max(self.factors) > 1 else (OUTPUT,)

    @classmethod
    def range_of(cls, output: Volume, truth: Volume, data_range: float | None) -> float:
        for volume in (output, truth):
            if data_range is None and np.issubdtype(volume.dtype, np.integer) and volume.dtype.itemsize > 2:
                raise PlanError(
                    f"{volume} has {volume.dtype} voxels, as labels have, whose numbers are no grey levels; score "
                    "labels with --labels, or give --data-range if these are grey levels"
                )
        known = checked_range(data_range) or subject.type_range(truth)
        if known is None:
            raise PlanError(
                f"the reference {truth} has {truth.dtype} voxels, whose range says nothing of its data; give "
                "--data-range, the same for all that you compare"
            )
        return known

    def with_notes(self, exchanged: Sequence[str]) -> tuple[ImageEvaluation, list[str]]:
        own = self.box.relative_to(self.a_start)  # in voxels of the reference
        samples = [take_sample(self.output, self.box), take_sample(self.reference, own)]
        told = [note for sample in filter(None, samples) for note in labels_note(sample, "score with --labels")]
        return self, [*exchanged, *told]

    def voxels(self, name: str, box: Box, session: str = "") -> np.ndarray:
        """Return the voxels of the output or of an interpolation in `box`, rounded and clipped to the output's type."""
        if name == OUTPUT or self.given is None:
            return checked_finite(self.output, super().voxels(name, box, session), box)
        coarse = self.given.open(cache_bytes=subject.CACHE_BYTES, session=session)
        return to_dtype(interpolated(coarse, box, self.factors, name).astype(np.float32), self.output.dtype)

    def sums(self, block: int, session: str) -> BlockSums:
        box = self.read_box(block)
        own = self.own_box(block).relative_to(box.start).slices
        truth = checked_finite(self.reference, self.read_a(box, session)[0], box).astype(np.float64)
        sums = {}
        for name in self.candidates:
            data = checked_finite(self.output, self.voxels(name, box, session), box).astype(np.float64)
            sums[name] = self.own_sums(ScoredBlock(data, truth, own, self.data_range))
        return BlockSums(scores={block: sums})

    def scores(self, results: Results) -> dict[str, Scores]:
        totals = {name: ImageTotal(sums, self.data_range) for name, sums in self.added_sums(results).items()}
        return {name: Scores.from_total(self.scored_by, total) for name, total in totals.items()}

    def result(self, scores: Mapping[str, Scores]) -> Scores | dict[str, Scores]:
        """Return the scores of each candidate by its name."""
        return dict(scores)

    def sheets(self, scores: Mapping[str, Scores]) -> list[Sheet]:
        """Return a table with a row for each candidate, the best PSNR first."""
        rows, names = [], [""]
        for name, entry in sorted(scores.items(), key=lambda item: -item[1].psnr):
            cells: dict[str, str] = {}
            for score in self.scored_by:
                cells |= score.texts(entry.values, self.output)
            names = ["", *cells]
            rows.append((name, *cells.values()))
        return [Sheet("Scores", names, rows, "; ".join(filter(None, (score.caption for score in self.scored_by))))]

    def numbers(self, scores: Mapping[str, Scores]) -> dict[str, int | float]:
        """Return nothing: the table says it all."""
        return {}

    def panels(self, slices: dict[str, np.ndarray], title: str) -> tuple[list[Panel], list[Panel]]:
        """Return panels of slices (y, x) in the greys of the reference, and panels of the errors of all candidates.

        Red is too bright and blue too dark, by up to the largest error that one voxel in a hundred exceeds.
        """
        truth = slices["reference"]
        limits = display_range(truth)
        errors = [data.astype(np.float64) - truth for name, data in slices.items() if name != "reference"]
        largest = max(float(np.percentile(np.abs(error), 99)) for error in errors) or 1.0
        images = [Panel(f"{title} {name}", grey(data, limits)) for name, data in slices.items()]
        return images, [Panel(f"error, {largest:.3g} is full", diverge(error, largest)) for error in errors]
