"""Evaluate: an output against a reference, block by block on workers, and interpolation of its input beside it.

Not here: the scores (image_scores, label_scores), or printing (cli). No process holds more than a block and its margin
for SSIM and interpolation; a block returns a few numbers, or the table of its labels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from volpipe.blockwise.heartbeat import Beater
from volpipe.blockwise.journal import Record
from volpipe.blockwise.task import work_each
from volpipe.errors import PlanError
from volpipe.evaluation import image_scores
from volpipe.evaluation.block_work import ByBlock
from volpipe.evaluation.image_scores import ImageSums, PlainSums
from volpipe.evaluation.interpolate import METHODS, interpolated
from volpipe.evaluation.label_scores import LabelScores, Overlaps, PlainOverlaps, label_scores, overlaps, total
from volpipe.evaluation.origins import makings_of
from volpipe.geometry.grid import Box, Grid, triple
from volpipe.geometry.labels import Ignore, ignored, in_64_bits, reserved
from volpipe.inference.intensity import to_dtype
from volpipe.inference.roi import find_roi
from volpipe.units import count
from volpipe.volumes.identity import fingerprint
from volpipe.volumes.places import MEND, Paired, check_same_place
from volpipe.volumes.values import image_share, labels_note, take_sample
from volpipe.volumes.volume import View, Volume, open_volume

AXES = "zyx"
FINGERPRINT = "reference_fingerprint"
BLOCK = (2 * image_scores.CUBE,) * 3  # whole cubes of the Fourier shell correlation
CACHE_BYTES = 1 << 27
OUTPUT = "output"


@dataclass(frozen=True)
class Evaluation:
    """An output, its reference, and the box in which they are compared.

    Attributes:
        output, reference: the volumes, of one channel.
        given: the input of the output, a coarser volume, or None.
        box: the part to compare, in voxels (z, y, x) of both.
        kind: "image" or "labels".
        data_range: between the smallest and the largest possible value.
        ignore: labels of the reference of which nothing is known, and of the output that are none; None for RESERVED.
        notes: what a user should know of the volumes, in sentences.
    """

    output: Volume
    reference: Volume
    given: Volume | None
    box: Box
    kind: str
    data_range: float
    ignore: Ignore = None
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def blocks(self) -> Grid:
        return Grid(self.box.shape, BLOCK)

    @property
    def identity(self) -> str:
        """Everything that the scores depend on."""
        return str(self.describe())

    @property
    def factors(self) -> tuple[int, ...]:
        """Voxels of the output per voxel of its input; ones without an input."""
        if self.given is None:
            return (1, 1, 1)
        shapes = zip(self.output.spatial_shape, self.given.spatial_shape, strict=True)
        return tuple(fine // coarse for fine, coarse in shapes)

    @property
    def candidates(self) -> tuple[str, ...]:
        """Names to score: the output, and interpolations where it has more voxels than its input."""
        return (OUTPUT, *METHODS) if max(self.factors) > 1 and self.kind == "image" else (OUTPUT,)

    def own_box(self, block: int) -> Box:
        """Return the voxels of both volumes that are compared in `block`."""
        return self.blocks.box(block).shift(self.box.start)

    def read_box(self, block: int) -> Box:
        """Return the voxels of both volumes that are read to score `block`."""
        own = self.own_box(block)
        reach = image_scores.REACH if self.kind == "image" else 0
        return Box(tuple(a - reach for a in own.start), tuple(b + reach for b in own.stop)) & self.box

    def describe(self) -> dict[str, object]:
        """Return the volumes and the box, as JSON values."""
        labels = {"ignore": self.ignore} if self.kind == "labels" else {}
        return {
            "output": str(self.output),
            "reference": str(self.reference),
            "given": self.given and str(self.given),
            "kind": self.kind,
            "box": str(self.box),
            "data_range": self.data_range,
            **labels,
            **({"incomplete": True} if self.output.view.incomplete or self.reference.view.incomplete else {}),
            FINGERPRINT: fingerprint(self.reference),  # scores against another reference are stale
        }

    def describe_scores(self, scores: Scores) -> dict[str, object]:
        """Return `scores` and what they are of, as JSON values; infinity and NaN are None."""
        by_name = scores if isinstance(scores, dict) else {OUTPUT: scores}
        values = {name: _plain(dataclasses.asdict(entry)) for name, entry in by_name.items()}
        return self.describe() | {"notes": [*self.notes, *label_notes(self, scores)], "scores": values}


SCORE_COLUMNS = ("PSNR dB", "SSIM", "FSC 0.5", "FSC 1/7", "along z 0.5", "along z 1/7")
SCORE_CAPTION = (
    f"FSC: cycles per voxel at which the Fourier shell correlation, over cubes of {image_scores.CUBE} voxels, first "
    "falls below; along z: of directions within 30 degrees of it"
)


@dataclass(frozen=True)
class ImageScores:
    """Scores of a candidate against the reference; frequencies in cycles per voxel, resolutions in nm.

    Attributes:
        psnr: dB.
        ssim: mean structural similarity.
        half, seventh: frequency at which the Fourier shell correlation falls below 0.5, and below 1/7; None if never.
        half_z, seventh_z: the same of directions within 30 degrees of z.
        curve: the correlation of each shell; shell i is i / 64 cycles per voxel.
    """

    psnr: float
    ssim: float
    half: float | None
    seventh: float | None
    half_z: float | None
    seventh_z: float | None
    curve: tuple[float, ...]

    @classmethod
    def from_sums(cls, sums: ImageSums, data_range: float) -> ImageScores:
        curves = [image_scores.shell_correlation(part) for part in sums.spectra]
        cuts = [image_scores.crossing(c, t) for c in curves for t in image_scores.THRESHOLDS.values()]
        has_cubes = sums.spectra.any()
        half, seventh, half_z, seventh_z = cuts if has_cubes else [None] * 4
        curve = tuple(float(c) for c in curves[0]) if has_cubes else ()
        return cls(
            image_scores.psnr(sums, data_range), image_scores.ssim(sums), half, seventh, half_z, seventh_z, curve
        )


Scores = dict[str, ImageScores] | LabelScores


def plan_evaluation(
    output: Volume | str,
    reference: Volume | str,
    given: Volume | str | None = None,
    *,
    roi: str | None = None,
    margin: tuple[int, int, int] = (0, 0, 0),
    kind: str = "image",
    data_range: float | None = None,
    ignore: Ignore = None,
    any_place: bool = False,
    incomplete: bool = False,
) -> Evaluation:
    """Return the evaluation of the volume `output` against `reference`, checked against both.

    Args:
        output, reference: the volumes, which need not exist yet; or their locations.
        given: the input of the output, to interpolate beside it.
        roi: box of the reference z0:z1,y0:y1,x0:x1; without it, the volumes must be of one shape.
        margin: voxels (z, y, x) to leave out at each face of the box.
        kind: "image" or "labels".
        data_range: as in Evaluation; None for that of the reference's type.
        ignore: as in Evaluation.
        any_place: whether voxel sizes and origins may say that the volumes lie elsewhere.
        incomplete: whether locations may be of outputs that are not complete, whose missing voxels are zeros.

    Raises:
        VolumeError: a volume is not there, or not complete in the box.
        PlanError: the volumes do not fit each other, or lie elsewhere, or the range of their values is not known; or
            the output shows a part of its input, and the reference another.
    """
    view = View(incomplete=incomplete)
    output, truth = _opened(output, view), _opened(reference, view)
    source = None if given is None else _opened(given, view)
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
    whole = find_roi(roi, truth)
    box = Box(
        tuple(a + m for a, m in zip(whole.start, margin, strict=True)),
        tuple(b - m for b, m in zip(whole.stop, margin, strict=True)),
    )
    if box.is_empty or not Box.from_shape(output.spatial_shape).contains(box):
        shape = " × ".join(map(str, output.spatial_shape))
        raise PlanError(f"box {box} is empty or leaves the output {output}, which has {shape} voxels")
    _check_kind(kind, output, truth, data_range)
    evaluation = Evaluation(output, truth, source, box, kind, _range(kind, truth, data_range), ignore)
    _check_factors(evaluation)
    output.check_written(box)
    truth.check_written(box)
    if source is not None:
        source.check_written()
    notes = [] if any_place else _check_places(evaluation)
    return replace(evaluation, notes=(*notes, *_check_values(evaluation)))


def _check_values(evaluation: Evaluation) -> list[str]:
    """Return a sentence for each volume that is scored as an image, and looks like labels, as far as it is there."""
    if evaluation.kind == "labels":
        return []
    samples = (take_sample(volume, evaluation.box) for volume in (evaluation.output, evaluation.reference))
    return [note for sample in samples if sample is not None for note in labels_note(sample, "score with --labels")]


def _check_places(evaluation: Evaluation) -> list[str]:
    """Refuse volumes that lie elsewhere; return what is not known of their places, in sentences.

    A coarser input may say of its first voxel where the first of the finer ones was: so much the volumes may be apart.
    """
    output, factors = Paired("the output", evaluation.output), triple(evaluation.factors)
    reference, advice = Paired("the reference", evaluation.reference), MEND
    advice += ", or give --any-place (any_place=True) to score them voxel by voxel all the same"
    notes = check_same_place(output, reference, advice, slack=factors)
    if evaluation.given is not None and evaluation.given.voxel_size_nm is not None:
        check_same_place(output, Paired("the input", evaluation.given), advice, factors=factors, slack=factors)
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


def _opened(volume: Volume | str, view: View) -> Volume:
    return volume if isinstance(volume, Volume) else open_volume(volume, view=view)


def _check_kind(kind: str, output: Volume, truth: Volume, data_range: float | None) -> None:
    for volume in (output, truth):
        if kind == "image" and data_range is None and volume.dtype.kind in "iu" and volume.dtype.itemsize > 2:
            raise PlanError(
                f"{volume} has {volume.dtype} voxels, as labels have, whose numbers are no grey levels; score labels "
                "with --labels, or give --data-range if these are grey levels"
            )
        if kind == "labels" and volume.dtype.kind not in "iu":
            raise PlanError(f"{volume} has {volume.dtype} voxels, labels are whole numbers; leave --labels out")


def _range(kind: str, truth: Volume, data_range: float | None) -> float:
    if data_range is not None:
        if not 0 < data_range < math.inf:
            raise PlanError(f"data_range {data_range:g} is no difference of two values; give a number above 0")
        return data_range
    if kind == "labels":
        return 1.0
    if truth.dtype.kind == "f" or truth.dtype.itemsize > 2:
        raise PlanError(
            f"the reference {truth} has {truth.dtype} voxels, whose range says nothing of its data; give --data-range, "
            "the same for all that you compare"
        )
    info = np.iinfo(truth.dtype)
    return float(info.max) - float(info.min)


def _check_factors(evaluation: Evaluation) -> None:
    if evaluation.given is None:
        return
    for axis, fine, coarse in zip(AXES, evaluation.output.spatial_shape, evaluation.given.spatial_shape, strict=True):
        if fine % coarse:
            raise PlanError(
                f"axis {axis}: the output has {fine} voxels and {evaluation.given} has {coarse}, of which {fine} is no "
                "whole multiple; give --given what the output was made from, or leave it out"
            )


@dataclass(frozen=True)
class BlockScores(ByBlock):
    """Result of scoring blocks: sums of each candidate by its name, or tables of labels, by block; as plain values."""

    sums: dict[int, dict[str, PlainSums]] = field(default_factory=dict)
    tables: dict[int, PlainOverlaps] = field(default_factory=dict)


RESULTS = (BlockScores,)


def sum_scores(evaluation: Evaluation, parts: BlockScores) -> Scores:
    """Return the scores from those of all blocks, in order: floats add up to another sum in another."""
    if evaluation.kind == "labels":
        table = total(table for _, table in sorted(parts.tables.items()))
        return _label_scores(evaluation, table)
    totals = {name: ImageSums() for name in evaluation.candidates}
    for _, sums in sorted(parts.sums.items()):
        totals = {name: whole + ImageSums.from_list(sums[name]) for name, whole in totals.items()}
    return {name: ImageScores.from_sums(whole, evaluation.data_range) for name, whole in totals.items()}


def _label_scores(evaluation: Evaluation, table: Overlaps) -> LabelScores:
    """Return the scores of `table`, but for labels of which nothing is known."""
    truth, labels = evaluation.reference.dtype, evaluation.output.dtype
    ignored_truth, no_objects = (
        [in_64_bits(number) for number in ignored(dtype, evaluation.ignore)] for dtype in (truth, labels)
    )
    suspects = [in_64_bits(number) for dtype in {truth, labels} for number in reserved(dtype)]
    return label_scores(table, ignored_truth, no_objects, suspects)


def label_notes(evaluation: Evaluation, scores: Scores) -> list[str]:
    """Return which labels were not counted, or look as if they should not have been, in sentences."""
    if isinstance(scores, dict):
        return []
    notes = []
    if scores.num_ignored:
        numbers = ", ".join(map(str, ignored(evaluation.reference.dtype, evaluation.ignore)))
        notes.append(
            f"{count(scores.num_ignored, 'voxel')} of the reference {evaluation.reference} left out: their label, one "
            f"of {numbers}, means that nothing is known of them; --ignore none (ignore=()) counts them"
        )
    if scores.num_reserved:
        numbers = ", ".join(map(str, reserved(evaluation.reference.dtype) or reserved(evaluation.output.dtype)))
        notes.append(
            f"{count(scores.num_reserved, 'object')} of {evaluation.reference} and {evaluation.output} with numbers "
            f"by which data sets mean that nothing is known ({numbers}); name these to --ignore if they are no objects"
        )
    return notes


def check_labels(evaluation: Evaluation) -> None:
    """Refuse images where labels are to be scored.

    Raises:
        PlanError: naming the volume.
    """
    if evaluation.kind == "labels":
        for volume in (evaluation.output, evaluation.reference):
            refuse_image(volume, evaluation.box)


def refuse_image(volume: Volume, box: Box) -> None:
    """Refuse an image, by a sample of `box`: voxels of an object are like their neighbours, grey levels seldom.

    Raises:
        PlanError: naming the volume.
    """
    sample = take_sample(volume, box)
    if sample is not None and (share := image_share(sample)) is not None:
        raise PlanError(
            f"{volume} looks like an image, not like labels: of neighbouring voxels in {box} only {share:.0%} are "
            "alike, by a sample, and within objects all are; leave --labels out, or name the labels"
        )


def score(
    evaluation: Evaluation, units: Sequence[int], session: str = "", run: str | None = None
) -> Record[BlockScores]:
    """Return the sums of each candidate in blocks `units`, or their tables of labels; on a worker.

    Args:
        session: of the driver.
        run: folder of the evaluation, where the worker's sign of life goes.
    """

    def one(block: int) -> BlockScores:
        if evaluation.kind == "labels":
            own = evaluation.own_box(block)
            labels, truth = (_read(volume, own, session) for volume in (evaluation.output, evaluation.reference))
            return BlockScores(tables={block: overlaps(labels, truth).tolist()})
        sums = _image_sums(evaluation, block, session)
        return BlockScores({block: {name: part.to_list() for name, part in sums.items()}})

    beater = Beater(None if run is None else Path(run), session, evaluation.own_box)
    return work_each("evaluate", units, one, BlockScores.joined, beater=beater)


def _image_sums(evaluation: Evaluation, block: int, session: str) -> dict[str, ImageSums]:
    own, box = evaluation.own_box(block), evaluation.read_box(block)
    reference = _read(evaluation.reference, box, session)
    _check_finite(evaluation.reference, reference, box)
    inner, sums = own.relative_to(box.start).slices, {}
    for name in evaluation.candidates:
        data = voxels(evaluation, name, box, session)
        _check_finite(evaluation.output, data, box)
        sums[name] = image_scores.image_sums(data, reference, inner, evaluation.data_range)
    return sums


def _check_finite(volume: Volume, data: np.ndarray, box: Box) -> None:
    if not np.isfinite(data).all():
        raise PlanError(f"{volume} has NaN or infinite voxels in {box}, which no score takes; leave them out by --roi")


def read_block(volume: Volume, box: Box, session: str = "") -> np.ndarray:
    """Return the voxels (c, z, y, x) of `volume` in `box`, as they are in this session."""
    return np.asarray(volume.open(cache_bytes=CACHE_BYTES, session=session).read(box))


def _read(volume: Volume, box: Box, session: str) -> np.ndarray:
    """Return the voxels (z, y, x) of `volume`, of one channel, in `box`."""
    return np.asarray(read_block(volume, box, session)[0])


def voxels(evaluation: Evaluation, name: str, box: Box, session: str = "") -> np.ndarray:
    """Return the voxels of a candidate in `box`; interpolations as the output stores them, rounded and clipped."""
    if name == OUTPUT:
        return _read(evaluation.output, box, session)
    assert evaluation.given is not None
    given = evaluation.given.open(cache_bytes=CACHE_BYTES, session=session)
    output = interpolated(given, box, evaluation.factors, name)
    return to_dtype(output.astype(np.float32), evaluation.output.dtype)


def resolution_nm(frequency: float | None, volume: Volume) -> float | None:
    """Return the resolution in nm of `frequency` in cycles per voxel; None unless the voxels of `volume` are cubes."""
    size = volume.voxel_size_nm
    if frequency is None or not frequency or size is None or not math.isclose(min(size), max(size), rel_tol=1e-3):
        return None
    return size[0] / frequency


def _plain(values: dict[str, object]) -> dict[str, object]:
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
