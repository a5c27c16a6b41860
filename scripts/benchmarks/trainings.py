"""What the samples of a training cost beside its steps, by the shipped recipes of three kinds, on invented tissue.

Of a CPU in processor time. Of a GPU in seconds of a step, against a step on tensors that are there already; and what a
step waited for samples is beside it.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.row import Outcome, Row, Setting
from volpipe.recipes.training import TrainRecipe, load_training
from volpipe.resolve import shipped_recipe
from volpipe.synthetic.volume import SyntheticVolume, write_sample

if TYPE_CHECKING:
    from volpipe.training.data.augment import Pair

KINDS = {"superres": "train_superres_z4", "affinities": "train_affinities", "srgan3d": "train_srgan3d_z4"}
SETTINGS = ["train.validate_every=0", "adversary.start=0"]
WINDOW = {"superres": "[4,16,16]", "affinities": "[24,24,24]", "srgan3d": "[8,32,32]"}  # where sizes are short
EDGE = 160  # voxels of the volume
BATCHES = 4  # that are there before the clock starts, on the side without samples


def recipe_of(setting: Setting, kind: str) -> TrainRecipe:
    """Return the shipped recipe, of a volume of invented tissue."""
    place = setting.cache / f"tissue-{EDGE}.zarr"
    if not place.exists():
        write_sample(place, SyntheticVolume((EDGE,) * 3, 5, (10.0,) * 3), chunk=64, format="zarr3")
    short = [f"samples.shape={WINDOW[kind]}", "train.batch=1"] if setting.short else []
    recipe = load_training(shipped_recipe(Path(KINDS[kind])), [*SETTINGS[: 2 if kind == "srgan3d" else 1], *short])
    labels = str(place / "labels") if recipe.learns_labels else None
    data = recipe.data[0].model_copy(update={"path": str(place / "raw"), "labels": labels, "held_out": None})
    return recipe.model_copy(update={"data": (data,)})


def measure(setting: Setting, repeats: int, *, kind: str) -> Iterator[Outcome]:
    from volpipe.nets.load import describe
    from volpipe.training.data.augment import PairMaker
    from volpipe.training.data.samples import Sampler
    from volpipe.training.loop import make_train_state, take_step

    recipe, steps = recipe_of(setting, kind), 3 if setting.short else 10
    scale = describe(recipe.net).scale
    state, sampler = make_train_state(recipe), Sampler(recipe, scale)
    maker = PairMaker(sampler)
    size = recipe.train.batch

    def batch(number: int) -> Pair:
        return maker.pair([maker.load(sampler.window(n)) for n in range(number * size, (number + 1) * size)])

    there = [batch(number) for number in range(BATCHES)]
    taken = itertools.cycle(there)
    take_step(state, recipe, scale, taken)
    for repeat in range(1, repeats + 1):
        made = processor_seconds(lambda: [batch(repeat * steps + n) for n in range(steps)])  # noqa: B023  # called here
        stepped = processor_seconds(lambda: [take_step(state, recipe, scale, taken) for _ in range(steps)])
        yield Outcome(made / stepped, {"samples of a step": made / steps, "step": stepped / steps})


def processor_seconds(work: Callable[[], object]) -> float:
    """Return the processor time of all threads that `work` takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure_gpu(setting: Setting, repeats: int, *, kind: str) -> Iterator[Outcome]:
    import torch

    from volpipe.nets.load import describe
    from volpipe.training.data.augment import PairMaker
    from volpipe.training.data.samples import Sampler
    from volpipe.training.distributed import RankGroup
    from volpipe.training.loop import make_train_state, pairs, take_step

    recipe, steps = recipe_of(setting, kind), 10 if setting.short else 200
    scale = describe(recipe.net).scale
    state, sampler = make_train_state(recipe), Sampler(recipe, scale)
    maker = PairMaker(sampler, "cuda")
    maker.hold(0.5 * torch.cuda.mem_get_info()[0])
    fresh = pairs(recipe, sampler, maker, 0, RankGroup())
    there = itertools.cycle([next(fresh) for _ in range(BATCHES)])

    def timed(batches: Iterator[Pair]) -> tuple[float, float]:
        """Return the seconds of a step, and how long it waited for samples."""
        torch.cuda.synchronize()
        began, entries = time.perf_counter(), [take_step(state, recipe, scale, batches) for _ in range(steps)]
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / steps, sum(float(entry["waited"]) for entry in entries) / steps

    timed(there), timed(fresh)
    for _ in range(repeats):
        bare, _ = timed(there)
        step, waited = timed(fresh)
        yield Outcome(step / bare, {"step": step, "waited": waited, "without samples": bare})
    fresh.close()  # type: ignore[attr-defined]  # a generator


ROWS = [
    Row(
        f"train-{kind}",
        f"samples of a step ÷ the step, {kind}",
        0.05,
        0.02,
        functools.partial(measure, kind=kind),
        why=f"processor time of 10 batches of {recipe}, and of 10 steps on batches that are there",
        is_quick=kind == "affinities",
    )
    for kind, recipe in KINDS.items()
]
ON_GPU = [
    Row(
        f"train-{kind}-gpu",
        f"step with samples ÷ on tensors that are there, {kind}",
        1.05,
        1.02,
        functools.partial(measure_gpu, kind=kind),
        why=f"200 steps of {recipe} each; the volume lies on the GPU",
    )
    for kind, recipe in KINDS.items()
]
