"""How long an evaluation takes, from one block that each worker scores.

Not here: the scores (evaluate). Of an output that does not exist yet, zeros are scored, which takes as long; of labels,
the reference itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from volpipe.evaluate import BLOCK, Evaluation, score
from volpipe.journal import Record
from volpipe.label_cost import elapsed
from volpipe.rehearsal import MOST_WORKERS
from volpipe.stand_in import nothing
from volpipe.tasks import Workers, gather
from volpipe.tensors import delete


@dataclass(frozen=True)
class ScoreTime:
    """How long an evaluation takes: `seconds` from its first task to its last, a guess where volumes are not there."""

    seconds: float
    is_guess: bool


def calibrate_scores(found: Evaluation, missing: Collection[str], workers: Workers, folder: Path) -> ScoreTime:
    """Return how long `found` takes, from a block that every worker scores at the same time.

    Args:
        found: what is compared.
        missing: paths of the volumes in it that do not exist yet.
        workers: who does it.
        folder: for what stands in for those; it is deleted.

    Raises:
        RunStopped: the block cannot be scored.
    """
    num_workers = max(1, workers.slots["cpu"])
    try:
        tried = _instead(found, missing, folder)
        block = _whole_block(tried)
        units = range(min(num_workers, MOST_WORKERS))
        took = [each for (each,) in gather(workers, try_block, (tried, block), units, "tried")]
    finally:
        delete(folder)
    rate = sum(took) / len(took) / tried.blocks.box(block).num_voxels
    whole = rate * found.box.num_voxels
    read = {volume.path for volume in (found.output, found.given) if volume is not None}
    return ScoreTime(elapsed(whole, len(found.blocks), num_workers), not read.isdisjoint(missing))


def _instead(found: Evaluation, missing: Collection[str], folder: Path) -> Evaluation:
    """Return `found` with what stands in for volumes that do not exist yet."""
    output, given = found.output, found.given
    if output.path in missing:
        output = found.reference if found.kind == "labels" else nothing(output, folder / "output")
    if given is not None and given.path in missing:
        given = nothing(given, folder / "given")
    return dataclasses.replace(found, output=output, given=given)


def _whole_block(found: Evaluation) -> int:
    """Return a block in the middle, a whole one if there is any."""
    middle = tuple(max(0, n // b - 1) // 2 for n, b in zip(found.box.shape, BLOCK, strict=True))
    return found.blocks.number(middle)


def try_block(job: tuple[Evaluation, int], number: int) -> Record:
    """Score a block; the record's result is how long that took."""
    record = score(*job)
    return dataclasses.replace(record, result=(record.seconds,))
