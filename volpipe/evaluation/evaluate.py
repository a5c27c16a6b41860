"""The plan of an evaluation: an output held against a reference, and checked with it.

Not here: the kinds of evaluation (evaluation lists what they share), or the scores (scores).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from volpipe.errors import PlanError
from volpipe.evaluation import subject
from volpipe.evaluation.evaluation import Evaluation
from volpipe.evaluation.image_evaluation import ImageEvaluation
from volpipe.evaluation.label_evaluation import ClassEvaluation, LabelEvaluation
from volpipe.evaluation.origins import provenances_of
from volpipe.evaluation.skeleton_evaluation import SkeletonEvaluation
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.geometry.labels import Ignore
from volpipe.inference.roi import find_roi
from volpipe.volumes.places import MEND, Paired, check_same_place, find_part
from volpipe.volumes.values import stored_notes
from volpipe.volumes.volume import View, Volume, open_volume

ADVICE = f"{MEND}, or give --any-place (any_place=True) to score them voxel by voxel all the same"
EVALUATIONS: tuple[type[Evaluation], ...] = (ImageEvaluation, LabelEvaluation, ClassEvaluation, SkeletonEvaluation)


def evaluation_of(kind: object) -> type[Evaluation]:
    """Return the class of the evaluations of labels, of classes, or of labels by skeletons; else that of images."""
    return next((each for each in EVALUATIONS if each.kind == kind), ImageEvaluation)


def plan_evaluation(
    output: Volume | str, reference: Volume | str | None, given: Volume | str | None = None, *, roi: str | None = None,
    margin: Triple = (0, 0, 0), kind: str = "image", data_range: float | None = None, ignore: Ignore = None,
    skeletons: str = "", annotated: Sequence[str] = (), any_place: bool = False, incomplete: bool = False,
) -> Evaluation:  # fmt: skip
    """Return the evaluation of the volume `output` against `reference`, checked against both.

    Args:
        output, reference: the volumes, which need not exist yet; or their locations. None where skeletons are in files.
        skeletons: of the kind "skeletons": their path, or OF_LABELS to make them of the reference.
        given: the input of the output, to interpolate beside it.
        roi: box of the reference z0:z1,y0:y1,x0:x1; without it, one of the volumes must hold the other.
        margin: voxels (z, y, x) to leave out at each face of the box.
        annotated: of the kind "classes": names of those that the reference annotates; none for all.
        any_place: whether the first voxels are paired whatever voxel sizes and origins say.
        incomplete: whether locations may be of outputs that are not complete, whose missing voxels are zeros.

    Raises:
        VolumeError: a volume is not there, or not complete in the box.
        PlanError: they do not fit each other, lie elsewhere, show other parts, or the range of values is not known.
    """
    chosen, view = evaluation_of(kind), View(incomplete=incomplete)
    named = (output, output if reference is None else reference)
    output, truth = (v if isinstance(v, Volume) else open_volume(v, view=view) for v in named)
    source = given if given is None or isinstance(given, Volume) else open_volume(given, view=view)
    for volume in filter(None, (output, truth, source)):
        if volume.num_channels != 1 and not (chosen.takes_channels and volume is output):
            raise PlanError(f"{volume} has {volume.num_channels} channels; save the one to score as an array")
    for provenance in provenances_of(output) if output.spatial_shape != truth.spatial_shape else ():
        check_part(output, provenance.roi, truth)
    extent, notes = _extent_of_truth(output, truth, roi, any_place=any_place)
    box = find_roi(roi, truth).shift(extent.start) if roi is not None else extent & Box.from_shape(output.spatial_shape)
    box = box.grown(tuple(-n for n in margin))
    if box.is_empty or not Box.from_shape(output.spatial_shape).contains(box):
        shape = " × ".join(map(str, output.spatial_shape))
        raise PlanError(f"box {box} is empty or leaves the output {output}, which has {shape} voxels")
    choices = chosen.choices_of(output, ignore, skeletons)
    evaluation = chosen(
        a=truth, b=output, a_start=extent.start, given=source, box=box, block=subject.BLOCK,
        data_range=chosen.range_of(output, truth, data_range), **choices,
    )  # fmt: skip
    if annotated:
        evaluation = evaluation.annotating(annotated)
    for axis, fine, coarse in zip("zyx", output.spatial_shape, source.spatial_shape, strict=True) if source else ():
        if fine % coarse:
            raise PlanError(
                f"axis {axis}: the output has {fine} voxels and {source} has {coarse}, of which {fine} is no whole "
                "multiple; give --given what the output was made from, or leave it out"
            )
    output.check_written(box)
    truth.check_written(box.relative_to(extent.start))
    if source is not None:
        source.check_written()
    notes += [] if any_place else _check_places(evaluation)
    notes += stored_notes(output, truth, source)
    evaluation, more = evaluation.with_notes(_exchanged_note(output, truth))
    return replace(evaluation, notes=(*notes, *more))


def _exchanged_note(output: Volume, truth: Volume) -> list[str]:
    """Return a note if output and reference seem exchanged: volpipe made the reference, and not the output."""
    if truth.is_planned or output.is_planned:  # a flow says which is which
        return []
    made, judged = provenances_of(truth), provenances_of(output)
    if not made or judged or made[0].is_copy:
        return []
    return [
        f"the reference {truth} is an output of volpipe, and the output {output} is none: are they exchanged? The "
        "first is judged by the second; exchanged, splits are counted as mergers"
    ]


def _extent_of_truth(output: Volume, truth: Volume, roi: str | None, *, any_place: bool) -> tuple[Box, list[str]]:
    """Return the box of `truth` in voxels of `output`, and a note where voxel sizes and origins told it.

    Raises:
        PlanError: neither holds the other, and there is no box to score; or as of `find_part`.
    """
    whole, extent, notes = Box.from_shape(output.spatial_shape), Box.from_shape(truth.spatial_shape), list[str]()
    if whole == extent:
        return extent, notes
    if not any_place and _are_placed(output, truth):
        extent = find_part(Paired("the output", output), Paired("the reference", truth), ADVICE)
        notes = [f"the reference {truth} lies at {extent} (z, y, x) of {output}, by voxel sizes and origins"]
    if roi is None and not (notes and (whole.contains(extent) or extent.contains(whole))):
        where = f", which lie at {extent}" if notes else ""
        raise PlanError(
            f"{output} has {output.spatial_shape} voxels (z, y, x), the reference {truth} {truth.spatial_shape}"
            f"{where}; give --roi, a box of the reference that both have"
        )
    return extent, notes


def _are_placed(output: Volume, truth: Volume) -> bool:
    return output.voxel_size_nm is not None and truth.voxel_size_nm is not None


def _check_places(evaluation: Evaluation) -> list[str]:
    """Refuse volumes that lie in different places; return notes on places that nobody knows.

    A coarser input may say of its first voxel where the first of the finer ones was: so much the volumes may be apart.
    """
    output, given, factors = Paired("the output", evaluation.output), evaluation.given, evaluation.factors
    truth, notes = evaluation.reference, list[str]()
    if output.volume.spatial_shape == truth.spatial_shape or not _are_placed(output.volume, truth):
        notes = check_same_place(output, Paired("the reference", truth), ADVICE, slack=factors)
    if given is not None and given.voxel_size_nm is not None:
        check_same_place(output, Paired("the input", given), ADVICE, factors=factors, slack=factors)
    return notes


def check_part(output: Volume, part: Box, truth: Volume) -> None:
    """Refuse to score an output of a `part` of its input by a reference of another shape whose place is unknown.

    Raises:
        PlanError: with the part, and how to cut the reference likewise.
    """
    if output.spatial_shape == truth.spatial_shape or not any(part.start) or _are_placed(output, truth):
        return
    factors = triple(max(1, n // m) for n, m in zip(output.spatial_shape, part.shape, strict=True))
    raise PlanError(
        f"{output} shows the box {part} of its input, and the reference {truth} has another shape: a voxel of one lies "
        "elsewhere in the other; cut the reference likewise, by `volpipe run --set net.name=identity --roi "
        f"{part.scaled(factors)}`, and score against that, without --roi"
    )
