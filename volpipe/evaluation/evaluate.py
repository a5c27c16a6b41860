"""Evaluate: an output against a reference, and interpolation of its input beside it.

Not here: scores of each kind (image_scores, label_scores, class_scores, run_lengths), or how they are shown (lines).
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from volpipe.errors import PlanError, VolpipeError
from volpipe.evaluation import image_scores, run_lengths, subject
from volpipe.evaluation.class_scores import TOO_MANY, ClassScores, class_scores
from volpipe.evaluation.image_scores import ImageScores, ImageSums, plain
from volpipe.evaluation.interpolate import METHODS, interpolated
from volpipe.evaluation.label_scores import LabelScores, label_scores, overlaps, total
from volpipe.evaluation.origins import makings_of
from volpipe.evaluation.run_lengths import Nodes, SkeletonScores, skeleton_scores
from volpipe.evaluation.skeletons import check_makeable, read_skeletons, skeletons_of
from volpipe.evaluation.subject import BlockSums, Pair, Results, read_block
from volpipe.geometry.grid import Box, Triple, triple
from volpipe.geometry.labels import Ignore, ignored, in_64_bits, reserved
from volpipe.inference.intensity import to_dtype
from volpipe.inference.roi import find_roi
from volpipe.recipes.training import MOST_CLASSES
from volpipe.training.task import Training
from volpipe.units import count
from volpipe.volumes.identity import fingerprint
from volpipe.volumes.label_values import class_notes
from volpipe.volumes.orientation import orientation_notes
from volpipe.volumes.places import MEND, Paired, check_same_place, find_part
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.values import labels_note, stored_notes, take_sample
from volpipe.volumes.volume import View, Volume, open_volume

FINGERPRINT = "reference_fingerprint"
OUTPUT = "output"
ADVICE = f"{MEND}, or give --any-place (any_place=True) to score them voxel by voxel all the same"
MOST_NAMED = 5  # labels in a sentence
# Of an image and of interpolations of its input, by name; or of labels, by voxels or by skeletons; or of classes.
Scores = dict[str, ImageScores] | LabelScores | SkeletonScores | ClassScores


@dataclass(frozen=True, kw_only=True)
class Evaluation(Pair):
    """An output B, of one channel, and its reference A, which is B itself where skeletons in files stand in for it.

    Attributes:
        given: the input of the output, a coarser volume, or None.
        ignore: labels of the reference of which nothing is known, and of the output that are none; None for RESERVED.
        skeletons, fingerprint: of these, the path, or OF_LABELS, and what they hold; "" without.
        nodes: file of the `Nodes`, on workers; "" elsewhere.
        names: of classes 0, 1, …; () where nobody knows.
    """

    data_range: float
    given: Volume | None = None
    ignore: Ignore = None
    skeletons: str = ""
    fingerprint: str = ""
    nodes: str = ""
    names: tuple[str, ...] = ()
    stage = "evaluate"
    mark = "evaluation.json"

    @property
    def output(self) -> Volume:
        return self.b

    @property
    def reference(self) -> Volume:
        return self.a

    @property
    def outside(self) -> tuple[str, ...]:
        return ("reference",)

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
        named = {"reference": None if self.fingerprint else self.reference, "given": self.given}
        return {"output": self.output, **{name: volume for name, volume in named.items() if volume is not None}}

    def describe(self) -> dict[str, object]:
        """Return everything that the scores depend on, as JSON values: against another reference they are stale."""
        labels: dict[str, object] = {} if self.kind == "image" else {"ignore": self.ignore}
        if self.names:
            labels["classes"] = list(self.names)
        if self.skeletons:
            labels |= {"skeletons": self.skeletons, "skeletons_fingerprint": self.fingerprint}
        if not self.fingerprint:
            labels[FINGERPRINT] = fingerprint(self.reference)
        return {"given": None, **super().describe(), **labels}

    def store_nodes(self, path: Path) -> None:
        """Write the nodes of the skeletons to `path`, for workers; those that are there stay.

        Raises:
            PlanError: they have changed since they were planned.
        """
        if not self.skeletons or path.is_file():
            return
        place = _placed(self.output, self.reference)
        if self.fingerprint:
            skeletons = read_skeletons(self.skeletons)
            if skeletons.fingerprint != self.fingerprint:
                raise PlanError(f"{self.skeletons} has changed since it was looked at; give the command again")
        else:
            start = tuple(o + n * s for o, n, s in zip(place.origin_nm, self.box.start, _size(place), strict=True))
            skeletons = skeletons_of(self.read_a(self.box)[0], _size(place), triple(start), self.ignore)
            run_lengths.check_extent(skeletons, place, self.box)
        Nodes.placed(skeletons, place, self.box, self.block).store(path)

    def sums(self, block: int, session: str) -> BlockSums:
        if self.kind == "classes":
            box = self.own_box(block)
            found, truth = self.voxels(OUTPUT, box, session), self.read_a(box, session)[0]
            return BlockSums(tables={block: overlaps(found, truth).tolist()})
        if self.kind != "skeletons":
            return super().sums(block, session)
        voxels = run_lengths.voxels_in(Path(self.nodes), block) if self.nodes else np.zeros((0, 3), int)
        if not len(voxels):
            return BlockSums()
        start = voxels.min(axis=0)
        box = Box(triple(start.tolist()), triple((voxels.max(axis=0) + 1).tolist()))
        labels = read_block(self.output, box, session)[0][tuple((voxels - start).T)]
        return BlockSums(nodes={block: labels.astype(np.uint64).tolist()})

    def image_sums(self, block: int, session: str) -> BlockSums:
        box, sums = self.read_box(block), {}
        own = self.own_box(block).relative_to(box.start).slices
        truth = _finite(self.reference, self.read_a(box, session)[0], box)
        for name in self.candidates:
            data = _finite(self.output, self.voxels(name, box, session), box)
            sums[name] = image_scores.image_sums(data, truth, own, self.data_range).to_list()
        return BlockSums(scores={block: sums})

    def voxels(self, name: str, box: Box, session: str = "") -> np.ndarray:
        """Return the voxels of a candidate in `box`; interpolations as the output stores them, rounded and clipped.

        Of chances of classes, a channel for each, the class with the largest.
        """
        if name == OUTPUT or self.given is None:
            data = read_block(self.output, box, session)
            return np.asarray(_finite(self.output, data, box).argmax(0) if len(data) > 1 else data[0])
        coarse = self.given.open(cache_bytes=subject.CACHE_BYTES, session=session)
        return to_dtype(interpolated(coarse, box, self.factors, name).astype(np.float32), self.output.dtype)

    def scores(self, results: Results) -> Scores:
        """Return the scores from the sums of all blocks, in order: floats add up to another sum in another."""
        if self.kind == "skeletons":
            parts = sorted(BlockSums.joined(results()).nodes.items())
            labels = np.array([label for _, part in parts for label in part], np.uint64)
            no_objects = [in_64_bits(n) for n in ignored(self.output.dtype, self.ignore)]
            labels[np.isin(labels, np.array(no_objects, np.uint64))] = 0
            return skeleton_scores(Nodes.load(Path(self.nodes)), labels)
        if self.kind == "classes":
            left_out = [in_64_bits(n) for n in ignored(self.reference.dtype, self.ignore)]
            return class_scores(total(table for _, table in subject.tables(results)), self.names, left_out)
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
        if isinstance(scores, LabelScores | ClassScores) and scores.num_ignored:
            notes.append(
                f"{count(scores.num_ignored, 'voxel')} of the reference {truth} left out: their label, one of "
                f"{', '.join(map(str, ignored(truth.dtype, self.ignore)))}, means that nothing is known of them; "
                "--ignore none (ignore=()) counts them"
            )
        if isinstance(scores, ClassScores) and self.names and (more := scores.classes[len(self.names) :]):
            numbers = ", ".join(each.name for each in more[:MOST_NAMED]) + " …" * (len(more) > MOST_NAMED)
            notes.append(
                f"labels {numbers} are none of the {count(len(self.names), 'class')} of the output, and are scored as "
                "more; name them to --ignore if nothing is known there"
            )
        if isinstance(scores, LabelScores) and scores.num_truth == 1:
            notes.append(
                f"the reference {truth} has one object alone, which nothing can be merged with: VOI and Rand say next "
                "to nothing there; if its label is a class, score with --classes, or give a number to each object"
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
        own = self.box.relative_to(self.a_start)
        for volume, box in ((self.output, self.box), (self.reference, own)) if self.kind != "image" else ():
            if volume.num_channels == 1:
                subject.refuse_image(volume, box)


def _finite(volume: Volume, data: np.ndarray, box: Box) -> np.ndarray:
    """Return `data`, the voxels of `volume` in `box`; refuse NaN and infinity."""
    if not np.isfinite(data).all():
        raise PlanError(f"{volume} has NaN or infinite voxels in {box}, which no score takes; leave them out by --roi")
    return data


def plan_evaluation(
    output: Volume | str, reference: Volume | str | None, given: Volume | str | None = None, *, roi: str | None = None,
    margin: Triple = (0, 0, 0), kind: str = "image", data_range: float | None = None, ignore: Ignore = None,
    skeletons: str = "", any_place: bool = False, incomplete: bool = False,
) -> Evaluation:  # fmt: skip
    """Return the evaluation of the volume `output` against `reference`, checked against both.

    Args:
        output, reference: the volumes, which need not exist yet; or their locations. None where skeletons are in files.
        skeletons: of the kind "skeletons": their path, or OF_LABELS to make them of the reference.
        given: the input of the output, to interpolate beside it.
        roi: box of the reference z0:z1,y0:y1,x0:x1; without it, one of the volumes must hold the other.
        margin: voxels (z, y, x) to leave out at each face of the box.
        any_place: whether the first voxels are paired whatever voxel sizes and origins say.
        incomplete: whether locations may be of outputs that are not complete, whose missing voxels are zeros.

    Raises:
        VolumeError: a volume is not there, or not complete in the box.
        PlanError: they do not fit each other, lie elsewhere, show other parts, or the range of values is not known.
    """
    view, is_of_files = View(incomplete=incomplete), reference is None
    named = (output, output if reference is None else reference)
    output, truth = (v if isinstance(v, Volume) else open_volume(v, view=view) for v in named)
    source = given if given is None or isinstance(given, Volume) else open_volume(given, view=view)
    for volume in filter(None, (output, truth, source)):
        if volume.num_channels != 1 and not (kind == "classes" and volume is output):
            raise PlanError(f"{volume} has {volume.num_channels} channels; save the one to score as an array")
    for making in makings_of(output) if output.spatial_shape != truth.spatial_shape else ():
        check_part(output, making.roi, truth)
    extent, notes = _extent(output, truth, roi, any_place=any_place)
    box = find_roi(roi, truth).shift(extent.start) if roi is not None else extent & Box.from_shape(output.spatial_shape)
    box = box.grown(tuple(-n for n in margin))
    if box.is_empty or not Box.from_shape(output.spatial_shape).contains(box):
        shape = " × ".join(map(str, output.spatial_shape))
        raise PlanError(f"box {box} is empty or leaves the output {output}, which has {shape} voxels")
    names, known = _classes_of(output) if kind == "classes" else ((), None)
    ignore = known if ignore is None else ignore
    evaluation = Evaluation(
        a=truth, b=output, a_start=extent.start,
        given=source, box=box, kind=kind, data_range=_range(kind, output, truth, data_range),
        block=subject.BLOCK, ignore=ignore, skeletons=skeletons, names=names,
    )  # fmt: skip
    for axis, fine, coarse in zip("zyx", output.spatial_shape, source.spatial_shape, strict=True) if source else ():
        if fine % coarse:
            raise PlanError(
                f"axis {axis}: the output has {fine} voxels and {source} has {coarse}, of which {fine} is no whole "
                "multiple; give --given what the output was made from, or leave it out"
            )
    own = box.relative_to(extent.start)  # in voxels of the reference
    output.check_written(box)
    truth.check_written(own)
    if source is not None:
        source.check_written()
    notes += [] if any_place else _check_places(evaluation)
    notes += stored_notes(output, truth, source)
    if is_of_files:
        read = read_skeletons(skeletons)
        notes += run_lengths.check_extent(read, output, box)
        evaluation = replace(evaluation, fingerprint=read.fingerprint)
    elif kind == "skeletons":
        check_makeable(box)
        _size(_placed(output, truth))
    if kind == "classes":
        notes += _check_classes((output, box), (truth, own))
    notes += _swapped(output, truth)
    if kind == "labels":
        notes += [*class_notes(truth, ignore, own), *class_notes(output, None, box)]
    is_within = Box.from_shape(output.spatial_shape).contains(extent)
    if kind in ("labels", "classes") and output.num_channels == 1 and is_within:
        notes += orientation_notes(truth, output, extent.start)
    samples = [take_sample(volume, part) for volume, part in ((output, box), (truth, own)) if kind == "image"]
    notes += [note for sample in filter(None, samples) for note in labels_note(sample, "score with --labels")]
    return replace(evaluation, notes=tuple(notes))


def _swapped(output: Volume, truth: Volume) -> list[str]:
    """Return a sentence if volpipe made the reference and not the output, as if one were given for the other."""
    if truth.is_planned or output.is_planned:  # a flow says which is which
        return []
    made, judged = makings_of(truth), makings_of(output)
    if not made or judged or made[0].is_copy:
        return []
    return [
        f"the reference {truth} is an output of volpipe, and the output {output} is none: are they exchanged? The "
        "first is judged by the second; exchanged, splits are counted as mergers"
    ]


def _range(kind: str, output: Volume, truth: Volume, data_range: float | None) -> float:
    """Return the range of the values, after a look at the types of both."""
    for volume in (output, truth):
        if kind == "image" and data_range is None and volume.dtype.kind in "iu" and volume.dtype.itemsize > 2:
            raise PlanError(
                f"{volume} has {volume.dtype} voxels, as labels have, whose numbers are no grey levels; score labels "
                "with --labels, or give --data-range if these are grey levels"
            )
        if kind != "image" and volume.dtype.kind not in "iu" and volume.num_channels == 1:
            raise PlanError(f"{volume} has {volume.dtype} voxels, labels are whole numbers; leave --{kind} out")
    if data_range is not None and not 0 < data_range < math.inf:
        raise PlanError(f"data_range {data_range:g} is no difference of two values; give a number above 0")
    known = data_range or (1.0 if kind != "image" else subject.type_range(truth))
    if known is None:
        raise PlanError(
            f"the reference {truth} has {truth.dtype} voxels, whose range says nothing of its data; give --data-range, "
            "the same for all that you compare"
        )
    return known


def _classes_of(output: Volume) -> tuple[tuple[str, ...], Ignore]:
    """Return names of classes 0, 1, … and labels to ignore, by the training of the net; or the channels of `output`."""
    with suppress(VolpipeError, KeyError, IndexError, TypeError):
        weights = makings_of(output)[0].said["recipe"]["net"]["weights"]
        if (training := Training.load(Path(weights).parent)) is not None and training.recipe.learns_classes:
            return training.recipe.classes.names, training.recipe.classes.ignore
    return output.channel_names if output.num_channels > 1 else (), None


def _check_classes(output: tuple[Volume, Box], truth: tuple[Volume, Box]) -> list[str]:
    """Refuse objects where classes are to be scored, by a sample; return what is taken for classes, in a sentence."""
    for volume, box in (truth, output):
        sample = take_sample(volume, box) if volume.num_channels == 1 else None
        if sample is not None and (num := len(np.unique(sample.values))) > MOST_CLASSES:
            raise PlanError(TOO_MANY.format(volume, num, MOST_CLASSES))
    num = output[0].num_channels
    return [f"channels 0 to {num - 1} of {output[0]} are taken for classes: a voxel has the largest"] if num > 1 else []


def _placed(output: Volume, truth: Volume) -> Volume:
    """Return that of both, paired voxel by voxel, of which the place is known."""
    return output if output.voxel_size_nm is not None else truth


def _size(volume: Volume) -> Lengths:
    if volume.voxel_size_nm is None:
        raise PlanError(run_lengths.UNPLACED.format(volume))
    return volume.voxel_size_nm


def _extent(output: Volume, truth: Volume, roi: str | None, *, any_place: bool) -> tuple[Box, list[str]]:
    """Return the voxels of `output` at which those of `truth` lie, and a sentence where that is by their places.

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
    """Refuse volumes of one shape that lie elsewhere; return what is not known of their places, in sentences.

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
    """Refuse an output of a `part` of its input beside a reference of another shape, unless their places are known.

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
