"""Time of an evaluation, forecast from one block that each worker scores.

Not here: the scores (evaluate). Zeros stand in for an output that does not exist yet, the reference for labels.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from volpipe.blockwise.pool import WorkerPool
from volpipe.blockwise.work import Steps, each
from volpipe.estimation.calibrate import MOST_WORKERS
from volpipe.evaluation.evaluate import Evaluation
from volpipe.segmentation.estimate import elapsed
from volpipe.volumes.placeholder import zeros_like
from volpipe.volumes.storage.paths import delete


@dataclass(frozen=True)
class ScoreTime:
    """Forecast `seconds` of an evaluation, from first task to last; a guess where volumes do not exist yet."""

    seconds: float
    is_guess: bool


def calibrate_evaluation(
    evaluation: Evaluation, missing: Collection[str], workers: WorkerPool, folder: Path
) -> Steps[ScoreTime]:
    """Return the forecast of `evaluation`, from a block that all `workers` score at the same time.

    Placeholders of volumes that are `missing`, by their paths, lie in `folder`, which is deleted.

    Raises:
        RunStopped: the block cannot be scored.
    """
    output, given, num_workers = evaluation.output, evaluation.given, max(1, workers.slots["cpu"])
    is_guess = any(volume.path in missing for volume in (output, given) if volume is not None)
    try:
        if output.path in missing:
            output = evaluation.reference if evaluation.kind == "labels" else zeros_like(output, folder / "output")
        if given is not None and given.path in missing:
            given = zeros_like(given, folder / "given")
        trial = dataclasses.replace(evaluation, b=output, given=given)
        middle = tuple(max(0, n // b - 1) // 2 for n, b in zip(trial.box.shape, trial.block, strict=True))
        block = trial.blocks.number(middle)  # a whole one if any
        num = min(num_workers, MOST_WORKERS)
        records = yield from each("trial", "reduce", lambda number: (trial, [block]), num)
    finally:
        delete(folder)
    seconds = sum(record.usage.seconds for record in records) / len(records)
    whole = seconds / trial.blocks.box(block).num_voxels * evaluation.box.num_voxels
    return ScoreTime(elapsed(whole, len(evaluation.blocks), num_workers), is_guess)
