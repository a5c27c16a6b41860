"""Validation of a training: its net runs over what is held out, tiled as a run is; and what it makes of some windows.

Not here: when that is done (train). What is held out is degraded once, and lies in the training's folder from then on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from volpipe.errors import PlanError
from volpipe.grid import Box
from volpipe.infer import block_sums
from volpipe.nets import NetFacts
from volpipe.output import finish
from volpipe.plan import make_plan
from volpipe.recipe import Infer, Output, Recipe
from volpipe.runner import Runner
from volpipe.samples import Sampler, Source
from volpipe.targets import accuracy, area, counts
from volpipe.tensors import DIMENSIONS, SOURCE_KEY
from volpipe.training import TrainRecipe
from volpipe.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.wanted import Selection
from volpipe.windows import StreamedWindows, batches

EDGE = 160  # voxels of the truth per axis that are validated at most, from the middle of what is held out
GIVEN = "validation.zarr"
TENSORS = "tensors.n5"
TRUTH_KEY = "tensors/truth"
NUM_WINDOWS = 4  # that are predicted


@dataclass(frozen=True)
class Held:
    """What is held out of one volume: the truth, and the array of what the net is given.

    Attributes:
        truth: (z, y, x) in its own type; where there are labels, their targets (offset, z, y, x), int8.
    """

    source: Source
    truth: np.ndarray
    key: str


def hold(sampler: Sampler, folder: Path) -> list[Held]:
    """Return what is held out of each volume, degraded and stored in `folder`; the same whenever it is made."""
    held = []
    for i, source in enumerate(sampler.sources):
        if source.held_out is None or source.stored is not None:
            continue
        box = middle(source.held_out, EDGE, sampler.scale)
        labels = source.labels_in(box)
        truth = source.reader.read(box)[0] if labels is None else sampler.targets(labels).astype(np.int8)
        given = sampler.seen(source, box, np.random.default_rng((sampler.recipe.train.seed, i, 2)))
        key, spec = f"s{i}", ArraySpec(given.shape, source.volume.dtype, given.shape)
        create_array(folder / GIVEN, key, spec, "zarr3")
        open_writer(folder / GIVEN, key).write(Box.of(given.shape), given.astype(source.volume.dtype))
        held.append(Held(source, truth, key))
    if not held:
        raise PlanError("validation and predictions need a volume with data.held_out, not stored windows; give one")
    return held


def validate(
    net: nn.Module, facts: NetFacts, recipe: TrainRecipe, held: Sequence[Held], folder: Path
) -> dict[str, float]:
    """Return the scores of what `net` makes of all that is held out, by name.

    psnr: in dB, over the range of the type. Of affinities, auc and accuracy: see `targets.area` and `targets.accuracy`.

    The net runs over windows with its halo, block by block, and what it gives is rounded and clipped as in a run.
    """
    if recipe.learns_labels:
        found = sum(
            counts(made, one.truth[:, *box.slices])
            for one in held
            for box, made in tiled(net, facts, recipe, one, folder)
        )
        return {"auc": area(np.asarray(found)), "accuracy": accuracy(np.asarray(found))}
    squares, num, span = 0.0, 0, 1.0
    for one in held:
        for box, made in tiled(net, facts, recipe, one, folder):
            truth = one.truth[box.slices]
            squares += float(np.square(made[0].astype(np.float64) - truth).sum())
            num += truth.size
        span = _span(one.truth)
    return {"psnr": 10 * math.log10(span**2 * num / squares) if squares else math.inf}


def tiled(
    net: nn.Module, facts: NetFacts, recipe: TrainRecipe, held: Held, folder: Path
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yield boxes of the output (z, y, x) and what `net` gives there (c, z, y, x), as a run of it would store them."""
    choice = recipe.net.model_copy(update={"accept_tile_variance": True, "weights": None})
    volume = open_volume(folder / GIVEN, held.key)
    output = Output(dtype="uint8", intensity="unit") if recipe.learns_labels else Output()
    threads = Infer(threads=torch.get_num_threads())  # as the training has them
    tree = Recipe(net=choice, normalise=recipe.normalise, infer=threads, output=output)
    plan = make_plan(tree, volume, facts, out=folder / "validated.zarr")
    normalise, selection = held.source.normalise, Selection(plan)
    runner = Runner(plan, next(net.parameters()).device.type, _net=net)
    windows = StreamedWindows(volume, plan.lattice, normalise)
    for block, outcome in block_sums(selection, normalise, runner, batches(windows, range(len(plan.blocks)), 1)):
        if isinstance(outcome, Exception):
            raise outcome
        windows.forget(block)
        box = plan.blocks.box(block).scaled(facts.scale)
        part = outcome.part(box)
        yield box, part if outcome.is_finished else finish(plan, normalise, part)


def predict(net: nn.Module, sampler: Sampler, folder: Path, label: str, step: int) -> None:
    """Write what `net` makes of some held-out windows as the tensor `tensors/<label>/<step>`, (n, c, z, y, x).

    What it is given, and the truth, lie beside it. Windows and tensors are float32, normalised.
    """
    pairs = [sampler.pair(source, box) for source, box in _windows(sampler)]
    given = np.stack([pair.given for pair in pairs])
    device = next(net.parameters()).device
    with torch.inference_mode():
        made = np.concatenate([net(torch.from_numpy(g[None]).to(device)).float().cpu().numpy() for g in given])
    source = str(sampler.sources[0].volume)
    for key, data in ((SOURCE_KEY, given), (TRUTH_KEY, np.stack([pair.truth for pair in pairs]))):
        _write(folder, key, data, {"dataset": source, "tensor": key.rpartition("/")[2], "iteration": 0})
    _write(folder, f"tensors/{label}/{step}", made, {"dataset": source, "tensor": label, "iteration": step})


def _write(folder: Path, key: str, data: np.ndarray, named: dict[str, object]) -> None:
    spec = ArraySpec(
        shape=data.shape,
        dtype=np.dtype(np.float32),
        chunks=(1, *data.shape[1:]),
        axes=DIMENSIONS[2:],
        codec="gzip",
        attributes={"volpipe": {"dimensions": list(DIMENSIONS)} | named},
    )
    create_array(folder / TENSORS, key, spec, "n5")
    open_writer(folder / TENSORS, key).write(Box.of(data.shape), data.astype(np.float32))


def _windows(sampler: Sampler) -> Iterator[tuple[Source, Box]]:
    """Yield where the windows lie that are predicted: along the diagonals of what is held out, where they fit."""
    held = [source for source in sampler.sources if source.held_out is not None and source.stored is None]
    for i in range(NUM_WINDOWS):
        source = held[i % len(held)]
        assert source.held_out is not None
        room = zip(source.held_out.start, source.held_out.stop, sampler.shape, strict=True)
        start = tuple(a + max(0, b - a - s) * i // max(1, NUM_WINDOWS - 1) for a, b, s in room)
        yield source, Box(start, tuple(a + s for a, s in zip(start, sampler.shape, strict=True)))


def middle(box: Box, edge: int, scale: tuple[int, int, int]) -> Box:
    """Return the middle of `box`, of up to `edge` voxels per axis and of whole multiples of `scale`."""
    start, stop = [], []
    for a, b, s in zip(box.start, box.stop, scale, strict=True):
        size = max(s, min(edge, b - a) // s * s)
        first = a + max(0, b - a - size) // 2
        start.append(first)
        stop.append(first + size)
    return Box(tuple(start), tuple(stop))


def _span(truth: np.ndarray) -> float:
    """Return the range of the type of `truth`; of floats, that of its values."""
    if truth.dtype.kind == "f":
        return float(truth.max() - truth.min()) or 1.0
    info = np.iinfo(truth.dtype)
    return float(info.max) - float(info.min)
