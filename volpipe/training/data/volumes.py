"""Training data: the opened volumes of a training, and checks that its windows and its net fit them.

Not here: reading windows (samples). Nothing here reads more than a sample of voxels, or needs torch, so that the driver
can refuse unusable volumes before a worker starts.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe.errors import NOTICE, PlanError, RecipeError, RunError
from volpipe.geometry.grid import Box
from volpipe.geometry.labels import Ignore, is_ignored
from volpipe.inference.roi import find_roi
from volpipe.inference.scratch import SOURCE_KEY
from volpipe.inference.statistics import affine, in_numbers, mapping_notes, needs_measuring
from volpipe.nets.facts import NetFacts
from volpipe.nets.trained import Trained
from volpipe.recipes.inference import Normalise, Recipe
from volpipe.recipes.training import Classes, Data, TrainRecipe
from volpipe.training.data.degrade import coarsening, context
from volpipe.training.data.labelled import SPARSE, are_sparse
from volpipe.units import count
from volpipe.volumes.identity import (
    Identity,
    changes,
    has_moved,
    identify,
    identify_whole,
    is_alike,
    read_identities,
    real_place,
)
from volpipe.volumes.label_values import class_notes
from volpipe.volumes.lines import line_contrast
from volpipe.volumes.orientation import orientation_notes
from volpipe.volumes.places import MEND, Paired, check_same_place, find_part, places
from volpipe.volumes.storage.metadata import Lengths
from volpipe.volumes.values import constant_notes, image_share, size_notes, stored_notes, take_sample
from volpipe.volumes.volume import View, Volume, open_volume

log = logging.getLogger(__name__)

AXES = "zyx"
ADVICE = f"{MEND}, or set any_place=true in this [[data]] to pair them voxel by voxel all the same"
OF_A_PART = f"give labels of the volume's shape, or {MEND}; level and labels_key choose levels of one voxel size"
TINY = 1e-6  # of a voxel: sums of lengths are not exact
CACHE_BYTES = 1 << 30  # of decoded chunks of each volume, in memory or shared


@dataclass(frozen=True)
class TrainingData:
    """A volume to learn from, its held-out box and its labels, None without; windows come from the box `part`.

    `extent` is where the labels lie, all without; `test` is the box by which nothing is chosen. Boxes are in voxels of
    the volume.
    """

    volume: Volume
    held_out: Box | None
    labels: Volume | None
    part: Box
    extent: Box
    test: Box | None = None

    @property
    def closed(self) -> tuple[Box, ...]:
        """The boxes that no window may touch."""
        return tuple(box for box in (self.held_out, self.test) if box is not None)


def open_data(data: Data, normalise: Normalise, search_path: str) -> TrainingData:
    """Return the opened volumes of `data`, which is not of stored windows.

    Raises:
        VolpipeError: no such volume, one that is not complete, a box outside of it, or a normalisation that needs
            measuring.
    """
    view = View(incomplete=data.incomplete)
    volume = open_volume(resolve_address(data.path, search_path), data.key, level=data.level, view=view)
    volume.check_written()
    if needs_measuring(normalise, volume.dtype):
        raise PlanError(
            f"normalise.method {normalise.method} of {volume.dtype} needs numbers that a training does not measure: "
            "give normalise.low and high, or mean and std (volpipe info prints them), so that all volumes share them"
        )
    labels = None if data.labels is None else open_labels(data, data.labels, volume, search_path)
    extent = Box.from_shape(volume.spatial_shape) if labels is None else labelled_box(data, volume, labels)
    counted = volume if labels is None or labels.spatial_shape == volume.spatial_shape else labels
    with named(data, "held_out"):
        held_out = None if data.held_out is None else find_roi(data.held_out, counted).shift(extent.start)
    with named(data, "test"):
        test = None if data.test is None else find_roi(data.test, counted).shift(extent.start)
    with named(data, "box"):
        part = find_roi(data.box, counted).shift(extent.start)
    return TrainingData(volume, held_out, labels, part, extent, test)


@contextmanager
def named(data: Data, key: str) -> Iterator[None]:
    """Begin errors about the box `key` of `data` with its key and volume."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"data.{key} of {data.path}: {str(error).removeprefix('roi, ')}") from error


def open_labels(data: Data, path: str, volume: Volume, search_path: str) -> Volume:
    """Return the opened labels at `path` of `volume`, which `data` names.

    Raises:
        VolpipeError: the labels are missing, not complete, no integers, of another shape, or lie elsewhere.
    """
    view = View(incomplete=data.incomplete)
    labels = open_volume(resolve_address(path, search_path), data.labels_key, view=view)
    labels.check_written()
    if not np.issubdtype(labels.dtype, np.integer):
        raise PlanError(f"the labels {labels} have {labels.dtype} voxels; give whole numbers, one for each object")
    if labels.num_channels != 1 or (data.any_place and labels.spatial_shape != volume.spatial_shape):
        advice = "; labels of a part are paired by their place: leave any_place out" if data.any_place else ""
        raise PlanError(
            f"the labels {labels} have shape {labels.shape}, their volume {volume} has {volume.spatial_shape} voxels "
            f"(z, y, x); give labels of that shape{advice}"
        )
    return labels


def labelled_box(data: Data, volume: Volume, labels: Volume) -> Box:
    """Return the voxels of `volume` at which its `labels` lie: all, or a part by voxel sizes and origins.

    Raises:
        PlanError: they lie elsewhere, or leave the volume; with both places.
    """
    whole, pair = Box.from_shape(volume.spatial_shape), (Paired("the volume", volume), Paired("its labels", labels))
    if labels.spatial_shape == volume.spatial_shape:
        if not data.any_place:
            check_same_place(*pair, ADVICE)
        return whole
    box = find_part(*pair, OF_A_PART)
    if not whole.contains(box):
        raise PlanError(
            f"the labels lie at {box} of the volume, which is {whole}: {places(*pair)}; {MEND}, or cut the labels to "
            "what lies in the volume"
        )
    return box


def data_notes(data: Data, opened: TrainingData, normalise: Normalise) -> list[str]:
    """Return sentences for the user about places and values of the volumes of `data`.

    Raises:
        PlanError: the labels are an image.
    """
    labels, sample = opened.labels, take_sample(opened.volume, opened.extent)
    notes = stored_notes(opened.volume, labels)
    if labels is not None and not data.any_place:
        if labels.spatial_shape == opened.volume.spatial_shape:
            notes += check_same_place(Paired("the volume", opened.volume), Paired("its labels", labels), ADVICE)
        else:
            unknown = "" if opened.volume.has_origin else ", which states no origin, so that this counts as 0"
            notes.append(
                f"the labels {labels} lie at {opened.extent} (z, y, x) of {opened.volume}{unknown}; windows come from "
                "there alone"
            )
    share = None if labels is None or (voxels := take_sample(labels)) is None else image_share(voxels)
    if share is not None:
        raise PlanError(
            f"{labels} looks like an image, not like labels: of neighbouring voxels only {share:.0%} are alike, and "
            "within objects all are; name the labels"
        )
    notes += size_notes(opened.volume)
    if labels is not None and labels.spatial_shape == opened.extent.shape:
        notes += orientation_notes(labels, opened.volume, opened.extent.start)
    if sample is not None:
        notes += [*constant_notes(sample), *mapping_notes(Recipe(normalise=normalise), sample)]
    return notes


def learned_from(recipe: TrainRecipe, scale: Sequence[int], search_path: str) -> Trained:
    """Return voxel sizes, contrasts and normalisation of the volumes of `recipe`, as far as they are known.

    Args:
        scale: of the net, whose input has voxels so many times as long as its volumes.

    Raises:
        VolpipeError: a volume is not there.
    """
    sizes, contrasts, normalisations = list[Lengths](), list[float](), list[Normalise]()
    for data in recipe.data:
        if data.stored:
            continue
        volume = open_data(data, recipe.normalise, search_path).volume
        if volume.voxel_size_nm is not None:
            z, y, x = volume.voxel_size_nm
            sizes.append((z * scale[0], y * scale[1], x * scale[2]))
        contrast = line_contrast(volume)
        contrasts += [] if contrast is None else [round(contrast, 2)]
        normalisations.append(in_numbers(recipe.normalise, affine(recipe.normalise, volume.dtype, None)))
    is_one = len(normalisations) == len(recipe.data) and all(each == normalisations[0] for each in normalisations)
    return Trained(
        voxel_sizes_nm=tuple(dict.fromkeys(sizes)), line_contrasts=tuple(contrasts),
        normalise=normalisations[0] if is_one else None,
    )  # fmt: skip


def open_inputs(recipe: TrainRecipe, search_path: str) -> dict[str, Volume]:
    """Return all volumes that `recipe` reads, named as messages name them, such as "labels 2".

    Raises:
        VolpipeError: one is missing.
    """
    volumes: dict[str, Volume] = {}
    for number, data in enumerate(recipe.data, 1):
        key = (data.key or SOURCE_KEY) if data.stored else data.key
        for what, path, inner in (("volume", data.path, key), ("labels", data.labels, data.labels_key)):
            if path is not None:
                level = data.level if what == "volume" else 0
                volumes[f"{what} {number}"] = open_volume(resolve_address(path, search_path), inner, level)
    return volumes


def cached_bytes(recipe: TrainRecipe, scale: Sequence[int], search_path: str) -> float:
    """Return about how many bytes of decoded chunks a worker holds after the steps of `recipe`.

    They are up to half too many, for chunks at faces are touched less often.
    """
    steps, total = recipe.train, 0.0
    num_windows = steps.steps * steps.batch * steps.accumulate / len(recipe.data)
    window = [n * s for n, s in zip(recipe.samples.shape, scale, strict=True)]
    for data in (data for data in recipe.data if not data.stored):
        opened = open_data(data, recipe.normalise, search_path)
        axes = [*zip(opened.part.shape, window, opened.volume.spatial_chunks, strict=True)]
        whole, touched = opened.part.num_voxels, math.prod(min(n, w + c) for n, w, c in axes)
        share = -math.expm1(-num_windows * touched / whole)  # that at least one of windows at random has touched
        for volume in filter(None, (opened.volume, opened.labels)):
            total += min(CACHE_BYTES, share * whole * volume.num_channels * volume.dtype.itemsize)
    return total


def identities(
    recipe: TrainRecipe, search_path: str, known: dict[Volume, Identity] | None = None
) -> dict[str, Identity]:
    """Return the present identities of all volumes that `recipe` reads, with the states of all of their files.

    Those that are `known` are not made again while files are as they were; others are added to them.
    """
    known = {} if known is None else known
    volumes = open_inputs(recipe, search_path)
    for volume in volumes.values():
        if volume not in known or has_moved(known[volume], volume):
            known[volume] = identify_whole(volume)
    return {what: known[volume] for what, volume in volumes.items()}


def check_unchanged(inputs: Path, recipe: TrainRecipe, search_path: str) -> None:
    """Refuse to keep weights that were learned from volumes which have changed since the file `inputs` noted them.

    Voxels are compared only where files are not as they were.

    Raises:
        RunError: with what differs.
    """
    noted = read_identities(inputs) or {}
    for what, volume in open_inputs(recipe, search_path).items():
        if what not in noted or not has_moved(noted[what], volume):
            continue
        now = identify(volume)
        if not is_alike(noted[what], now):
            raise RunError(
                f"the {what} {volume} changed while the net learned from it: {'; '.join(changes(noted[what], now))}. "
                "What was learned since the last checkpoint is not kept: put the old one back and give the command "
                "again, or use --fresh to start over"
            )


def touched_box(box: Box, of: Volume, other: Volume) -> Box:
    """Return the box in `other`, another level of the volume `of`, that `box` of `of` touches."""
    if of.spatial_shape == other.spatial_shape:
        return box
    edges: list[tuple[int, int]] = []
    for axis, (a, b) in enumerate(zip(box.start, box.stop, strict=True)):
        if of.voxel_size_nm is None or other.voxel_size_nm is None:
            ratio, shift = other.spatial_shape[axis] / of.spatial_shape[axis], 0.0
        else:
            size, fine = other.voxel_size_nm[axis], of.voxel_size_nm[axis]
            corner, start = (v.origin_nm[axis] - s / 2 for v, s in ((other, size), (of, fine)))
            ratio, shift = fine / size, (start - corner) / size
        edges.append((math.floor(a * ratio + shift + TINY), math.ceil(b * ratio + shift - TINY)))
    return Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))


def resolve_address(path: str, search_path: str) -> str:
    """Return the address of `path`, which may be relative to `search_path`."""
    return path if "://" in path else str(Path(search_path) / path)


def check_data(recipe: TrainRecipe, facts: NetFacts, search_path: str, sampled: set[str] | None = None) -> None:
    """Refuse volumes without room for a window outside of the held-out box, or that the net of `facts` cannot take.

    Args:
        sampled: what others were sampled for, which is not done again; added to.

    Raises:
        VolpipeError: as `open_data` or `check_net`, or a window or a number of channels does not fit.
    """
    check_net(recipe, facts)
    window = tuple(n * s for n, s in zip(recipe.samples.shape, facts.scale, strict=True))
    around = context(recipe.degrade.kind, facts.scale)
    sampled = set() if sampled is None else sampled
    entries = [(data, open_data(data, recipe.normalise, search_path)) for data in recipe.data if not data.stored]
    check_apart(entries, around)
    closed = closed_boxes([(opened.volume, opened.closed) for _, opened in entries])
    for (data, opened), boxes in zip(entries, closed, strict=True):
        if opened.volume.num_channels != facts.in_channels:
            raise PlanError(
                f"{opened.volume} has {count(opened.volume.num_channels, 'channel')}, net {recipe.net.name} takes "
                f"{facts.in_channels}; give another volume, or a net of as many"
            )
        purpose = repr((data, recipe.normalise, recipe.classes))
        if purpose not in sampled:
            _check_values(data, opened, recipe)
            sampled.add(purpose)
        check_holds(opened.volume, window, opened.part)
        check_free(opened, boxes, tuple(n + 2 * c for n, c in zip(window, around, strict=True)), around)


def check_net(recipe: TrainRecipe, facts: NetFacts) -> None:
    """Refuse a net of `facts` that cannot learn by `recipe`, whatever the volumes.

    Raises:
        VolpipeError: its outputs are not what is learnt, voxel by voxel, or the windows are not those that it takes.
    """
    labels, classes, scale, kind = recipe.learns_labels, recipe.learns_classes, facts.scale, recipe.degrade.kind
    way = coarsening(kind)
    num = len(recipe.classes.names if classes else recipe.affinities.offsets)
    section, key = ("classes", "names") if classes else ("affinities", "offsets")
    for is_so, sentence in (
        (not facts.num_parameters, "has no parameters, so that it cannot learn; name another as net.name"),
        (recipe.net.output == "all", "gives all its outputs, and a training learns one: name it, such as net.output=0"),
        (
            recipe.net.spacing is not None,
            "learns from voxels as they are stored; net.spacing is for runs, leave it out",
        ),
        (any(facts.margin), f"gives {facts.margin} voxels (z, y, x) less at each face; pad its convolutions"),
        (max(facts.shrink) > 1, f"makes one voxel of {facts.shrink} (z, y, x); let it end on the grid of its input"),
        (
            recipe.samples.swap and scale[1] != scale[2],
            f"has scale {scale}, so that y and x cannot be exchanged; set samples.swap = false",
        ),
        (
            recipe.loss.consistency and not way.keeps_means and scale != (1, 1, 1),
            f"has scale {scale}, and loss.consistency compares means of its output with an input made by degrade.kind "
            f"= {kind!r}, from which means of the truth differ too; leave it out, or set degrade.kind = 'bin'",
        ),
        (labels and scale != (1, 1, 1), f"has scale {scale}, labels are learnt at scale 1; choose another"),
        (
            not way.is_coarser and max(scale) > 1,
            f"makes {' × '.join(map(str, scale))} voxels (z, y, x) of one, and degrade.kind is none, so that its input "
            "would be as fine as the truth; set degrade.kind to bin, subsample or gaussian",
        ),
        (
            not labels and facts.out_channels != facts.in_channels,
            f"takes {count(facts.in_channels, 'channel')} and gives {facts.out_channels}, and without data.labels it "
            "learns to give those of the volume; let it give as many as it takes",
        ),
        (
            labels and facts.out_channels != num,
            f"gives {count(facts.out_channels, 'channel')}, {section}.{key} are {num}; set the net's out_channels to "
            f"{num}, or give other {key}",
        ),
        (
            classes and facts.intensity == "unit",
            "gives intensity 'unit', classes are learnt from logits; take off its last sigmoid or softmax, such as by "
            'net.options.output = "none"',
        ),
        (
            labels and not classes and facts.intensity != "unit",
            f"gives intensity {facts.intensity!r}, affinities are chances from 0 to 1; give it a sigmoid at its end, "
            'such as net.options.output = "sigmoid", or net.intensity = "unit" if it has one',
        ),
    ):
        if is_so:
            raise RecipeError(f"net {recipe.net.name} {sentence}")
    _check_window(recipe, facts)


def _check_window(recipe: TrainRecipe, facts: NetFacts) -> None:
    """Refuse windows that a net of `facts` does not take, or that are too short for an offset."""
    offsets = recipe.affinities.offsets if recipe.learns_labels and not recipe.learns_classes else ()
    for i, (axis, size, margin) in enumerate(zip(AXES, recipe.samples.shape, recipe.samples.margin, strict=True)):
        stride, remainder = facts.stride[i], facts.remainder[i]
        if (size - remainder) % stride:
            more = f"{remainder} more than " * (remainder > 0)
            raise PlanError(
                f"axis {axis}: samples.shape {size} is not {more}a multiple of the stride {stride} of net "
                f"{recipe.net.name}; use {size + (remainder - size) % stride}"
            )
        far = next((offset for offset in offsets if abs(offset[i]) >= size - margin), None)
        if far is not None:
            raise PlanError(
                f"axis {axis}: affinities.offsets has {list(far)}, and no pair of a window is so far apart: "
                f"samples.shape less samples.margin is {size - margin}; give a larger samples.shape, or shorter offsets"
            )


def _check_values(data: Data, opened: TrainingData, recipe: TrainRecipe) -> None:
    """Log sentences for the user about the volumes of `data`, and refuse labels that are no classes of `recipe`."""
    for note in data_notes(data, opened, recipe.normalise):
        log.warning("%s", note, extra=NOTICE)
    own = opened.part.relative_to(opened.extent.start)  # in voxels of the labels
    labels, share = opened.labels, recipe.samples.labelled
    if labels is None:
        return
    if share == "auto" and are_sparse(labels, own, lambda box: labels.open().read(box)[0], recipe.ignore):
        log.warning(
            "fewer than %.0f %% of the labels %s are known, by a sample: windows are drawn about those that are "
            "(samples.labelled)", 100 * SPARSE, labels, extra=NOTICE,
        )  # fmt: skip
    elif share in ("auto", 0.0) and not differs(labels, own, recipe.ignore):
        log.warning(
            "the labels %s are alike in all sampled boxes of %s, or ignored, so that there is nothing to tell apart; "
            "give data.box, the box where labels are", labels, own, extra=NOTICE,
        )  # fmt: skip
    if not recipe.learns_classes:
        for note in class_notes(labels, recipe.ignore, own):
            log.warning("%s", note, extra=NOTICE)
    elif (sample := take_sample(labels)) is not None:
        for part in sample.boxes:
            check_classes(labels, part, recipe.classes, data.annotated)


def check_holds(volume: Volume, window: Sequence[int], part: Box | None = None) -> None:
    """Refuse a `part` of a volume that is smaller than `window`, voxels (z, y, x).

    Raises:
        PlanError: with the axis, and both sizes.
    """
    whole = Box.from_shape(volume.spatial_shape)
    part = part or whole
    where = f"the volume {volume}" if part == whole else f"the part {part} of {volume} that windows come from"
    for axis, size, edge in zip(AXES, part.shape, window, strict=True):
        if edge > size:
            raise PlanError(
                f"axis {axis}: a window of {edge} voxels (samples.shape times the net's scale) is longer than "
                f"{where}, which has {size}; give a smaller samples.shape"
            )


def closed_boxes(entries: Sequence[tuple[Volume, Sequence[Box]]]) -> list[tuple[Box, ...]]:
    """Return for each volume the boxes kept from the same voxels by any of `entries`, by whatever name and level."""
    places = [real_place(volume) for volume, _ in entries]
    held = [(box, other, place) for (other, boxes), place in zip(entries, places, strict=True) for box in boxes]
    return [
        tuple(touched_box(box, other, volume) for box, other, of_other in held if of_other == place)
        for (volume, _), place in zip(entries, places, strict=True)
    ]


def check_apart(entries: Sequence[tuple[Data, TrainingData]], around: Sequence[int]) -> None:
    """Refuse a test box that shares voxels with a held-out box, by which nets may be chosen.

    Args:
        around: voxels of context (z, y, x) that the input of a box is made of beside its own.

    Raises:
        PlanError: with both boxes.
    """
    volumes = [opened.volume for _, opened in entries]
    held_out = [[] if opened.held_out is None else [opened.held_out] for _, opened in entries]
    closed = closed_boxes([*zip(volumes, held_out, strict=True)])
    for (data, opened), boxes in zip(entries, closed, strict=True):
        for box in boxes if opened.test is not None else ():
            if opened.test is not None and not (opened.test & box.grown(tuple(around))).is_empty:
                context_too = " with the context of its input" if any(around) else ""
                raise PlanError(
                    f"data.test of {data.path}, {opened.test}, shares voxels with the held-out box {box}{context_too}; "
                    "nothing may be chosen by what is tested, so let them lie apart"
                )


def check_free(data: TrainingData, closed: Sequence[Box], window: Sequence[int], around: Sequence[int]) -> None:
    """Refuse a volume without room for a window outside of the `closed` boxes.

    A window that is free can be moved down each axis, until it begins with the volume or behind a box.

    Args:
        window: voxels (z, y, x) of a window with the context of its degradation.
        around: the context at each face; it may lie outside of the volume.

    Raises:
        PlanError: with the box, and the shapes of volume and window.
    """
    part = data.part.grown(tuple(around))
    starts = (
        sorted({part.start[axis], *(box.stop[axis] for box in closed if part.start[axis] < box.stop[axis])})
        for axis in range(3)
    )
    for corner in itertools.product(*starts):
        place = Box.from_shape(tuple(window)).shift(corner)
        if part.contains(place) and all((place & box).is_empty for box in closed):
            return
    keys = "held_out" if data.test is None else "held_out or test"
    raise PlanError(
        f"{keys} {' and '.join(map(str, closed))} leaves no room in {data.part} of {data.volume} for a window of "
        f"{tuple(window)} voxels (z, y, x); make samples.shape or held_out smaller"
    )


def differs(volume: Volume, box: Box, ignore: Ignore) -> bool:
    """Return whether a sample of the `box` has two different values, ignored labels aside."""
    sample = take_sample(volume, box)
    if sample is None:  # a worker says why
        return True
    values = [
        part[~is_ignored(part, ignore)] if np.issubdtype(volume.dtype, np.integer) else part for part in sample.boxes
    ]
    ends = [end for part in values if part.size for end in (part.min(), part.max())]
    return bool(ends) and min(ends) < max(ends)


def check_classes(volume: Volume | None, labels: np.ndarray, classes: Classes, annotated: Sequence[str] = ()) -> None:
    """Refuse labels that are no class, and are not ignored, or are of classes that are not `annotated` alone.

    Raises:
        PlanError: with the largest, and the classes that there are.
    """
    ignored = is_ignored(labels, classes.ignore)
    if annotated:
        flags = classes.are_annotated(annotated)
        by_name = [*zip(classes.names, classes.label_sets, flags, strict=True)]
        allowed = {label for _, numbers, is_known in by_name if is_known for label in numbers}
        for name, numbers, _ in by_name:
            left_out = [label for label in numbers if label not in allowed]
            if left_out and (np.isin(labels, left_out) & ~ignored).any():
                raise PlanError(
                    f"{volume} has labels of {name}, which data.annotated leaves out: it names {', '.join(annotated)}; "
                    "name it there too, or give other labels"
                )
    if classes.labels:
        listed = sorted(
            {label for numbers in classes.labels for label in numbers} | ({0} if classes.regions else set())
        )
        others = labels[~np.isin(labels, listed) & ~ignored]
        if others.size:
            raise PlanError(
                f"{volume} has label {others.max()}, which is of no class: classes.labels are "
                f"{', '.join(map(str, listed))}; list it there, or give classes.ignore = {others.max()} if nothing is "
                "known there"
            )
        return
    beyond = labels[((labels < 0) | (labels >= len(classes.names))) & ~ignored]
    if beyond.size:
        raise PlanError(
            f"{volume} has label {beyond.max()}, classes.names are {count(len(classes.names), 'class')}, 0 to "
            f"{len(classes.names) - 1}; name more, or give classes.ignore = {beyond.max()} if nothing is known there"
        )
