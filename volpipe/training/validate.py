"""Validation of a training: scores of its net over the held-out boxes, tiled as in a run, and predictions of windows.

Not here: the intervals (loop). Held-out boxes are degraded once, and stored in the training's folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from volpipe.errors import PlanError
from volpipe.geometry.grid import Box, triple
from volpipe.inference.infer import block_sums
from volpipe.inference.intensity import to_dtype
from volpipe.inference.output import finish
from volpipe.inference.plan import make_plan
from volpipe.inference.runner import Runner
from volpipe.inference.scratch import DIMENSIONS, SOURCE_KEY
from volpipe.inference.selection import Selection
from volpipe.inference.windows import StreamedWindows
from volpipe.nets.facts import NetFacts
from volpipe.nets.trained import BoxScores
from volpipe.recipes.inference import Infer, Recipe, Windows
from volpipe.recipes.training import TENSORS, TRUTH_KEY, TrainRecipe
from volpipe.training.data.augment import PairMaker, targets_of
from volpipe.training.data.labelled import densest
from volpipe.training.data.samples import Sampler, SampleSource
from volpipe.training.data.targets import (
    APART,
    UNKNOWN,
    accuracy,
    channels_known,
    class_numbers,
    confusion,
    dice,
    histograms,
    region_counts,
    region_dice,
    roc_auc,
    signed,
)
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer

EDGE = 160  # longest edge, in voxels of the truth, of the validated middle of a held-out box
TEST_EDGE = 256  # of the middle of a test box, which is scored once
INPUTS = "validation.zarr"
NUM_WINDOWS = 4  # predicted


@dataclass(frozen=True)
class KeptBox:
    """The scored part of a box that is kept from the windows of a training, held out or for the test.

    Attributes:
        name: of the volume of `source`, as the recipe has it; `box` is in its voxels.
        truth: (c, z, y, x) in its own type; of labels, their targets (offset or 1, z, y, x), int8.
        key: the array of the net's input in `INPUTS`.
    """

    source: SampleSource
    name: str
    box: Box
    truth: np.ndarray
    key: str

    def __str__(self) -> str:
        return f"{self.box} of {self.name}"


def prepare_held_out(sampler: Sampler, folder: Path) -> list[KeptBox]:
    """Return the held-out box of each volume, its input degraded and stored in `folder`; the same at each call.

    Raises:
        PlanError: no volume holds out voxels.
    """
    boxes = [None if source.stored is not None else source.held_out for source in sampler.sources]
    kept = kept_boxes(sampler, boxes, EDGE, folder, "s")
    if not kept:
        raise PlanError("validation and predictions need a volume with data.held_out, not stored windows; give one")
    return kept


def prepare_test(sampler: Sampler, folder: Path) -> list[KeptBox]:
    """Return the test box of each volume that has one, as `prepare_held_out`."""
    return kept_boxes(sampler, [source.test for source in sampler.sources], TEST_EDGE, folder, "t")


def tested_scores(net: nn.Module, facts: NetFacts, sampler: Sampler, folder: Path) -> BoxScores | None:
    """Return the scores of `net` in the test boxes; None where the recipe has none."""
    boxes = prepare_test(sampler, folder)
    if not boxes:
        return None
    scores = validate(net, facts, sampler.recipe, boxes, folder)
    return BoxScores(boxes=tuple(map(str, boxes)), scores=finite_or_none(scores))


def finite_or_none(scores: Mapping[str, float]) -> dict[str, float | None]:
    """Return `scores` for JSON, which has no NaN and no infinity."""
    return {name: value if math.isfinite(value) else None for name, value in scores.items()}


def kept_boxes(sampler: Sampler, boxes: Sequence[Box | None], edge: int, folder: Path, letter: str) -> list[KeptBox]:
    """Return the middles of `boxes`, one of each volume, their input degraded and stored in `folder`.

    Args:
        edge: the longest edge of a middle, in voxels.
        letter: of the names of the arrays there, by which the draws of held-out and test boxes differ too.
    """
    kept, maker = [], PairMaker(sampler)
    for i, (source, whole) in enumerate(zip(sampler.sources, boxes, strict=True)):
        if whole is None:
            continue
        box = middle(whole, edge, sampler.scale)
        if sampler.is_sparse(source) and box != whole:
            box = densest(whole, triple(box.shape), source.labels_in, sampler.recipe.ignore)
        labels = source.read_labels(box)
        if labels is None:
            truth = source.reader.read(box)
        else:
            truth = targets_of(sampler.recipe, signed(labels)[None], labels.dtype, [source.annotated])[0].numpy()
        stream = 2 if letter == "s" else 3
        window = sampler.plain(source, box, np.random.default_rng((sampler.recipe.train.seed, i, stream)))
        inputs = maker.degraded(maker.load(window).voxels[None].float(), [window])[0].numpy()
        spec = ArraySpec(inputs.shape, source.volume.dtype, inputs.shape, axes=("c", "z", "y", "x"))
        key = f"{letter}{i}"
        create_array(folder / INPUTS, key, spec, "zarr3")
        open_writer(folder / INPUTS, key).write(Box.from_shape(inputs.shape), to_dtype(inputs, spec.dtype))
        kept.append(KeptBox(source, sampler.recipe.data[i].path, box, truth, key))
    return kept


def check_scorable(recipe: TrainRecipe, boxes: Sequence[KeptBox], key: str = "data.held_out") -> None:
    """Refuse boxes whose labels give no score: without a class, or without both kinds of pairs of voxels.

    Raises:
        PlanError: naming the labels.
    """
    known = {int(target) for box in boxes for target in np.unique(box.truth)} - {UNKNOWN}
    if recipe.learns_labels and len(known) < (1 if recipe.learns_classes else 2):
        labels = ", ".join(str(box.source.labels) for box in boxes)
        what = (
            "no known label" if not known else "no two voxels of one object" if known == {APART} else "one object alone"
        )
        raise PlanError(
            f"the middle of {key} has {what} in {labels}, by which nothing can be scored; "
            f"{'hold out' if key == 'data.held_out' else 'test in'} another box"
        )


def validate(
    net: nn.Module, facts: NetFacts, recipe: TrainRecipe, held_out: Sequence[KeptBox], folder: Path
) -> dict[str, float]:
    """Return the scores of `net` over all boxes of `held_out`, by name.

    psnr: in dB, over the range of the type. Of affinities, auc and accuracy: `targets.roc_auc`, `targets.accuracy`. Of
    classes, "dice NAME" is the Dice coefficient of each that occurs, and "mean dice" their mean. Where a box does not
    annotate a class, it counts as the first one there; of regions it does not count.

    The net runs over windows with its halo, block by block; its outputs are rounded and clipped as in a run.
    """
    if recipe.learns_classes:
        names, is_regions = recipe.classes.names, recipe.classes.regions
        tables = []
        for volume in held_out:
            truth, number_of = volume.truth, np.arange(len(names))
            if len(truth) > 1 and not is_regions:
                number_of[~channels_known(torch.from_numpy(truth)[None])[0].numpy()] = 0  # left out: of the first class
                truth = class_numbers(torch.from_numpy(truth)[None])[0].numpy()
            for box, outputs in tiled(net, facts, recipe, volume, folder):
                inside = truth[:, *box.slices]
                if is_regions:
                    tables.append(region_counts(outputs, inside))
                else:
                    tables.append(confusion(number_of[outputs], inside, len(names)))
        of_each = region_dice(np.sum(tables, 0)) if is_regions else dice(np.sum(tables, 0))
        named = {f"dice {name}": float(each) for name, each in zip(names, of_each, strict=True) if np.isfinite(each)}
        return {"mean dice": float(np.mean(list(named.values()))) if named else math.nan, **named}
    if recipe.learns_labels:
        levels = sum(
            histograms(outputs, volume.truth[:, *box.slices])
            for volume in held_out
            for box, outputs in tiled(net, facts, recipe, volume, folder)
        )
        return {"auc": roc_auc(np.asarray(levels)), "accuracy": accuracy(np.asarray(levels))}
    squares, num = 0.0, 0
    for volume in held_out:
        for box, outputs in tiled(net, facts, recipe, volume, folder):
            truth = volume.truth[:, *box.slices]
            squares += float(np.square(outputs.astype(np.float64) - truth).sum())
            num += truth.size
    ends = list[float]()  # of the truths' types; of floats, of their values
    for volume in held_out:
        if np.issubdtype(volume.truth.dtype, np.floating):
            ends += [float(volume.truth.min()), float(volume.truth.max())]
        else:
            info = np.iinfo(volume.truth.dtype)
            ends += [float(info.min), float(info.max)]
    span = max(ends) - min(ends) or 1.0
    return {"psnr": 10 * math.log10(span**2 * num / squares) if squares else math.inf}


def tiled(
    net: nn.Module, facts: NetFacts, recipe: TrainRecipe, held_out: KeptBox, folder: Path
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yield boxes (z, y, x) of the output and their voxels (c, z, y, x), as a run of `net` would store them."""
    choice = recipe.net.model_copy(update={"accept_tile_variance": True, "weights": None})
    volume = open_volume(folder / INPUTS, held_out.key)
    threads = Infer(threads=torch.get_num_threads())  # as the training has them
    cropped = Windows(blend="crop", placement="lattice")  # so that no block adds to another
    tree = Recipe(net=choice, normalise=recipe.normalise, windows=cropped, infer=threads, output=recipe.scored_output)
    plan = make_plan(tree, volume, facts, out=folder / "validated.zarr")
    normalise, selection = held_out.source.normalise, Selection(plan)
    runner = Runner(plan, next(net.parameters()).device.type, _net=net)
    windows = StreamedWindows(volume, plan.lattice, normalise)
    for _, outcome in block_sums(selection, normalise, runner, windows, range(len(plan.blocks))):
        if isinstance(outcome, Exception):
            raise outcome
        part = outcome.part(outcome.box)
        yield outcome.box, part if outcome.is_finished else finish(plan, normalise, part)


def predict(net: nn.Module, sampler: Sampler, folder: Path, label: str, step: int) -> None:
    """Write the outputs of `net` for some held-out windows as the tensor `tensors/<label>/<step>`, (n, c, z, y, x).

    Inputs and truth are written beside it. All are float32, normalised.
    """
    maker = PairMaker(sampler)
    inputs, truth = maker.pair([maker.load(sampler.plain(source, box)) for source, box in _held_out_windows(sampler)])
    device = next(net.parameters()).device
    with torch.inference_mode():
        outputs = torch.cat([net(each[None].to(device)).float().cpu() for each in inputs])
    if sampler.recipe.classes.regions:
        outputs = outputs.sigmoid()
    elif sampler.recipe.learns_classes:
        outputs, truth = outputs.argmax(1, keepdim=True), class_numbers(truth)
    source = str(sampler.sources[0].volume)
    for key, data in ((SOURCE_KEY, inputs), (TRUTH_KEY, truth)):
        _write_tensor(folder, key, data.numpy(), {"dataset": source, "tensor": key.rpartition("/")[2], "iteration": 0})
    _write_tensor(
        folder, f"tensors/{label}/{step}", outputs.numpy(), {"dataset": source, "tensor": label, "iteration": step}
    )


def _write_tensor(folder: Path, key: str, data: np.ndarray, named: dict[str, object]) -> None:
    spec = ArraySpec(
        shape=data.shape,
        dtype=np.dtype(np.float32),
        chunks=(1, *data.shape[1:]),
        axes=DIMENSIONS[2:],
        codec="gzip",
        attributes={"volpipe": {"dimensions": list(DIMENSIONS)} | named},
    )
    create_array(folder / TENSORS, key, spec, "n5")
    open_writer(folder / TENSORS, key).write(Box.from_shape(data.shape), data.astype(np.float32))


def _held_out_windows(sampler: Sampler) -> Iterator[tuple[SampleSource, Box]]:
    """Yield volume and box of each predicted window, along the diagonals of the held-out boxes.

    A window that is larger than a box reaches beyond it, but not beyond where labels are, or the volume.
    """
    held_out = [source for source in sampler.sources if source.held_out is not None and source.stored is None]
    for i in range(NUM_WINDOWS):
        source = held_out[i % len(held_out)]
        assert source.held_out is not None
        room = zip(source.held_out.start, source.held_out.stop, sampler.shape, source.read_box.stop, strict=True)
        start = tuple(min(a + max(0, b - a - s) * i // max(1, NUM_WINDOWS - 1), n - s) for a, b, s, n in room)
        yield source, Box.from_shape(sampler.shape).shift(start)


def middle(box: Box, edge: int, scale: tuple[int, int, int]) -> Box:
    """Return the middle of `box`, up to `edge` voxels along each axis, in whole multiples of `scale`."""
    sizes = tuple(max(s, min(edge, n) // s * s) for n, s in zip(box.shape, scale, strict=True))
    margins = tuple(max(0, n - size) // 2 for n, size in zip(box.shape, sizes, strict=True))
    return Box.from_shape(sizes).shift(box.start).shift(margins)
