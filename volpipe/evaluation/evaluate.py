"""Evaluate: an output against a reference, and interpolation of its input beside it.

Not here: the scores of images and labels (image_scores, label_scores), or how they are shown (lines).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

import numpy as np

from volpipe.errors import PlanError
from volpipe.evaluation import image_scores, subject
from volpipe.evaluation.image_scores import ImageScores, ImageSums, plain
from volpipe.evaluation.interpolate import METHODS, interpolated
from volpipe.evaluation.label_scores import LabelScores, label_scores, total
from volpipe.evaluation.origins import makings_of
from volpipe.evaluation.subject import BlockSums, Results, Subject, read_block
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.geometry.labels import Ignore, ignored, in_64_bits, reserved
from volpipe.inference.intensity import to_dtype
from volpipe.inference.roi import find_roi
from volpipe.units import count
from volpipe.volumes.identity import fingerprint
from volpipe.volumes.places import MEND, Paired, check_same_place
from volpipe.volumes.values import labels_note, take_sample
from volpipe.volumes.volume import View, Volume, open_volume

FINGERPRINT = "reference_fingerprint"
OUTPUT = "output"
Scores = dict[str, ImageScores] | LabelScores  # of an image and of interpolations of its input, by name; or of labels


@dataclass(frozen=True, kw_only=True)
class Evaluation(Subject):
    """An output B, of one channel, and its reference A.

    Attributes:
        given: the input of the output, a coarser volume, or None.
        ignore: labels of the reference of which nothing is known, and of the output that are none; None for RESERVED.
    """

    data_range: float
    given: Volume | None = None
    ignore: Ignore = None
    stage = "evaluate"
    mark = "evaluation.json"

    @property
    def output(self) -> Volume:
        return self.b

    @property
    def reference(self) -> Volume:
        return self.a

    @property
    def identity(self) -> str:
        """Everything that the scores depend on, for times that are kept."""
        return str(self.describe())

    @property
    def factors(self) -> Triple:
        """Voxels of the output per voxel of its input; ones without an input."""
        coarse = self.output.spatial_shape if self.given is None else self.given.spatial_shape
        return triple(n // m for n, m in zip(self.output.spatial_shape, coarse, strict=True))

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names to score: the output, and interpolations where it has more voxels than its input."""
        return (OUTPUT, *METHODS) if max(self.factors) > 1 and self.kind == "image" else (OUTPUT,)

    def read_box(self, block: int) -> Box:
        reach = image_scores.REACH if self.kind == "image" else 0
        return self.own_box(block).grown((reach,) * 3) & self.box

    def inputs(self) -> dict[str, Volume]:
        given = {} if self.given is None else {"given": self.given}
        return {"output": self.output, "reference": self.reference, **given}

    def describe(self) -> dict[str, object]:
        """Return everything that the scores depend on, as JSON values: against another reference they are stale."""
        labels = {"ignore": self.ignore} if self.kind == "labels" else {}
        return {"given": None, **super().describe(), **labels, FINGERPRINT: fingerprint(self.reference)}

    def image_sums(self, block: int, session: str) -> BlockSums:
        box, sums = self.read_box(block), {}
        own = self.own_box(block).relative_to(box.start).slices
        truth = _finite(self.reference, read_block(self.reference, box, session)[0], box)
        for name in self.candidates:
            data = _finite(self.output, self.voxels(name, box, session), box)
            sums[name] = image_scores.image_sums(data, truth, own, self.data_range).to_list()
        return BlockSums(scores={block: sums})

    def voxels(self, name: str, box: Box, session: str = "") -> np.ndarray:
        """Return the voxels of a candidate in `box`; interpolations as the output stores them, rounded and clipped."""
        if name == OUTPUT or self.given is None:
            return np.asarray(read_block(self.output, box, session)[0])
        coarse = self.given.open(cache_bytes=subject.CACHE_BYTES, session=session)
        return to_dtype(interpolated(coarse, box, self.factors, name).astype(np.float32), self.output.dtype)

    def scores(self, results: Results) -> Scores:
        """Return the scores from the sums of all blocks, in order: floats add up to another sum in another."""
        if self.kind == "labels":
            dtypes = (self.reference.dtype, self.output.dtype)
            left_out, no_objects = ([in_64_bits(n) for n in ignored(dtype, self.ignore)] for dtype in dtypes)
            suspects = [in_64_bits(n) for dtype in {*dtypes} for n in reserved(dtype)]
            return label_scores(total(table for _, table in subject.tables(results)), left_out, no_objects, suspects)
        totals = {name: ImageSums() for name in self.candidates}
        for _, sums in sorted(BlockSums.joined(results()).scores.items()):
            totals = {name: whole + ImageSums.from_list(sums[name]) for name, whole in totals.items()}
        return {name: ImageScores.from_sums(whole, self.data_range) for name, whole in totals.items()}

    def describe_scores(self, scores: Scores) -> dict[str, object]:
        """Return `scores` and what they are of, as JSON values; infinity and NaN are None."""
        by_name = scores if isinstance(scores, dict) else {OUTPUT: scores}
        values = {name: {key: plain(v) for key, v in asdict(entry).items()} for name, entry in by_name.items()}
        return self.describe() | {"notes": [*self.notes, *self.label_notes(scores)], "scores": values}

    def label_notes(self, scores: Scores) -> list[str]:
        """Return which labels were not counted, or look as if they should not have been, in sentences."""
        notes, (truth, labels) = [], (self.reference, self.output)
        if isinstance(scores, LabelScores) and scores.num_ignored:
            notes.append(
                f"{count(scores.num_ignored, 'voxel')} of the reference {truth} left out: their label, one of "
                f"{', '.join(map(str, ignored(truth.dtype, self.ignore)))}, means that nothing is known of them; "
                "--ignore none (ignore=()) counts them"
            )
        if isinstance(scores, LabelScores) and scores.num_reserved:
            numbers = ", ".join(map(str, reserved(truth.dtype) or reserved(labels.dtype)))
            notes.append(
                f"{count(scores.num_reserved, 'object')} of {truth} and {labels} with numbers by which data sets mean "
                f"that nothing is known ({numbers}); name these to --ignore if they are no objects"
            )
        return notes

    def check_labels(self) -> None:
        """Refuse images where labels are to be scored."""
        for volume in (self.output, self.reference) if self.kind == "labels" else ():
            subject.refuse_image(volume, self.box)


def _finite(volume: Volume, data: np.ndarray, box: Box) -> np.ndarray:
    """Return `data`, the voxels of `volume` in `box`; refuse NaN and infinity."""
    if not np.isfinite(data).all():
        raise PlanError(f"{volume} has NaN or infinite voxels in {box}, which no score takes; leave them out by --roi")
    return data


def plan_evaluation(
    output: Volume | str, reference: Volume | str, given: Volume | str | None = None, *, roi: str | None = None,
    margin: Triple = (0, 0, 0), kind: str = "image", data_range: float | None = None, ignore: Ignore = None,
    any_place: bool = False, incomplete: bool = False,
) -> Evaluation:  # fmt: skip
    """Return the evaluation of the volume `output` against `reference`, checked against both.

    Args:
        output, reference: the volumes, which need not exist yet; or their locations.
        given: the input of the output, to interpolate beside it.
        roi: box of the reference z0:z1,y0:y1,x0:x1; without it, the volumes must be of one shape.
        margin: voxels (z, y, x) to leave out at each face of the box.
        any_place: whether voxel sizes and origins may say that the volumes lie elsewhere.
        incomplete: whether locations may be of outputs that are not complete, whose missing voxels are zeros.

    Raises:
        VolumeError: a volume is not there, or not complete in the box.
        PlanError: they do not fit each other, lie elsewhere, show other parts, or the range of values is not known.
    """
    view = View(incomplete=incomplete)
    output, truth = (v if isinstance(v, Volume) else open_volume(v, view=view) for v in (output, reference))
    source = given if given is None or isinstance(given, Volume) else open_volume(given, view=view)
    for volume in filter(None, (output, truth, source)):
        if volume.num_channels != 1:
            raise PlanError(f"{volume} has {volume.num_channels} channels; save the one to score as an array")
    if roi is None and output.spatial_shape != truth.spatial_shape:
        raise PlanError(
            f"{output} has {output.spatial_shape} voxels (z, y, x), the reference {truth} {truth.spatial_shape}; "
            "give --roi, a box that both have"
        )
    for making in makings_of(output) if output.spatial_shape != truth.spatial_shape else ():
        check_part(output, making.roi, truth)
    box = find_roi(roi, truth).grown(tuple(-n for n in margin))
    if box.is_empty or not Box.from_shape(output.spatial_shape).contains(box):
        shape = " × ".join(map(str, output.spatial_shape))
        raise PlanError(f"box {box} is empty or leaves the output {output}, which has {shape} voxels")
    evaluation = Evaluation(
        a=truth, b=output, given=source, box=box, kind=kind, data_range=_range(kind, output, truth, data_range),
        block=subject.BLOCK, ignore=ignore,
    )  # fmt: skip
    for axis, fine, coarse in zip("zyx", output.spatial_shape, source.spatial_shape, strict=True) if source else ():
        if fine % coarse:
            raise PlanError(
                f"axis {axis}: the output has {fine} voxels and {source} has {coarse}, of which {fine} is no whole "
                "multiple; give --given what the output was made from, or leave it out"
            )
    output.check_written(box)
    truth.check_written(box)
    if source is not None:
        source.check_written()
    notes = [] if any_place else _check_places(evaluation)
    samples = [take_sample(volume, box) for volume in (output, truth) if kind == "image"]
    notes += [note for sample in filter(None, samples) for note in labels_note(sample, "score with --labels")]
    return replace(evaluation, notes=tuple(notes))


def _range(kind: str, output: Volume, truth: Volume, data_range: float | None) -> float:
    """Return the range of the values, after a look at the types of both."""
    for volume in (output, truth):
        if kind == "image" and data_range is None and volume.dtype.kind in "iu" and volume.dtype.itemsize > 2:
            raise PlanError(
                f"{volume} has {volume.dtype} voxels, as labels have, whose numbers are no grey levels; score labels "
                "with --labels, or give --data-range if these are grey levels"
            )
        if kind == "labels" and volume.dtype.kind not in "iu":
            raise PlanError(f"{volume} has {volume.dtype} voxels, labels are whole numbers; leave --labels out")
    if data_range is not None and not 0 < data_range < math.inf:
        raise PlanError(f"data_range {data_range:g} is no difference of two values; give a number above 0")
    known = data_range or (1.0 if kind == "labels" else subject.type_range(truth))
    if known is None:
        raise PlanError(
            f"the reference {truth} has {truth.dtype} voxels, whose range says nothing of its data; give --data-range, "
            "the same for all that you compare"
        )
    return known


def _check_places(evaluation: Evaluation) -> list[str]:
    """Refuse volumes that lie elsewhere; return what is not known of their places, in sentences.

    A coarser input may say of its first voxel where the first of the finer ones was: so much the volumes may be apart.
    """
    output, given, factors = Paired("the output", evaluation.output), evaluation.given, evaluation.factors
    advice = f"{MEND}, or give --any-place (any_place=True) to score them voxel by voxel all the same"
    notes = check_same_place(output, Paired("the reference", evaluation.reference), advice, slack=factors)
    if given is not None and given.voxel_size_nm is not None:
        check_same_place(output, Paired("the input", given), advice, factors=factors, slack=factors)
    return notes


def check_part(output: Volume, part: Box, truth: Volume) -> None:
    """Refuse an output of a `part` of its input beside a reference of another shape: a box of both is two places.

    Raises:
        PlanError: with the part, and how to cut the reference likewise.
    """
    if output.spatial_shape == truth.spatial_shape or not any(part.start):
        return
    factors = triple(max(1, n // m) for n, m in zip(output.spatial_shape, part.shape, strict=True))
    raise PlanError(
        f"{output} shows the box {part} of its input, and the reference {truth} has another shape: a voxel of one lies "
        "elsewhere in the other; cut the reference likewise, by `volpipe run --set net.name=identity --roi "
        f"{part.scaled(factors)}`, and score against that, without --roi"
    )
