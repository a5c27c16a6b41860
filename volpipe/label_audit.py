"""How far a labelling is, what of it failed, and whether what it wrote is whole: from its journal, or made again.

Not here: the labelling (labelling), or printing (cli_label, cli_verify).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from volpipe import checksums
from volpipe.access import Reader
from volpipe.driver import Missing
from volpipe.errors import RunError
from volpipe.folder import RunFolder
from volpipe.formats import files
from volpipe.label_pieces import find_pieces
from volpipe.label_plan import LABEL_FILE, LabelPlan
from volpipe.label_tasks import TABLE
from volpipe.labelling import Noted, stages_of
from volpipe.output import level_key
from volpipe.run import Totals, last_line
from volpipe.verify import Recomputed, Verdict, check_files, judge
from volpipe.volume import open_writer


@dataclass(frozen=True)
class LabelStanding:
    """How far a labelling is, as its journal says.

    Attributes:
        units: tasks in all, by stage, in their order.
        totals: what those took that are done, by stage, in the same order.
        missing: what failed when it was last tried.
        num_objects: None before the graph is done.
        is_complete: whether all labels are written, and the output is there.
        is_gone: whether there should be an output, and is none.
    """

    plan: LabelPlan
    folder: Path
    units: dict[str, int]
    totals: dict[str, Totals]
    missing: list[Missing]
    num_objects: int | None
    is_complete: bool
    is_gone: bool

    @property
    def table(self) -> Path:
        return self.folder / TABLE


def find_labels(output: str | Path) -> tuple[RunFolder, LabelPlan] | None:
    """Return folder and plan of the labelling that writes `output`, or whose folder it is; None where there is none.

    Raises:
        RunError: the plan is damaged, or of another version.
    """
    place = files.locate(output) if "://" in str(output) else Path(output).absolute()
    is_folder = isinstance(place, Path) and (place / LABEL_FILE).is_file()
    folder = RunFolder(place) if is_folder and isinstance(place, Path) else RunFolder.of_output(place)
    plan = LabelPlan.load(folder.path)
    return None if plan is None else (folder, plan)


def inspect_labels(output: str | Path) -> LabelStanding | None:
    """Return the standing of the labelling that writes `output`, or whose folder it is; None where there is none."""
    found = find_labels(output)
    if found is None:
        return None
    folder, plan = found
    noted, stages = Noted.of(folder.journal), {stage.name: stage for stage in stages_of(plan)}
    is_gone = bool(noted.results["paint"]) and not files.exists(files.locate(plan.out))
    return LabelStanding(
        plan,
        folder.path,
        {name: stage.num_units(plan) for name, stage in stages.items()},
        {name: noted.totals.get(name, Totals()) for name in stages},
        [
            Missing(name, unit, stages[name].box(plan, unit), last_line(reason))
            for (name, unit), reason in sorted(noted.failed.items())
        ],
        noted.num_objects if noted.results["graph"] else None,
        noted.is_complete(plan) and not is_gone,
        is_gone,
    )


def verify_labels(folder: RunFolder, plan: LabelPlan) -> Verdict:
    """Read every file of labels and their table, and compare each with what was noted.

    Raises:
        RunError: there is no journal, or nothing is written yet.
    """
    if not folder.journal.is_file():
        raise RunError(
            f"{folder.path} holds no journal, which alone knows what the output's files should hold; "
            "restore the folder, or segment with --fresh to make both again"
        )
    noted = Noted.of(folder.journal)
    if not noted.sums:
        raise RunError(f"the labelling in {folder.path} has not written any labels; `volpipe segment` goes on with it")
    verdict = check_files(plan.out, noted.shards(plan), noted.metadata, len(plan.factors))
    if noted.table_sum is not None and noted.table_sum != checksums.ABSENT:
        verdict.num_files += 1
        judge(verdict.differences, folder.path / TABLE, noted.table_sum, "")
    verdict.num_unwritten = sum(len(plan.shards(level)) for level in range(len(plan.factors))) - len(noted.sums)
    return verdict


def recompute_labels(folder: RunFolder, plan: LabelPlan, num_blocks: int, seed: int = 0) -> Iterator[Recomputed]:
    """Yield random blocks that were cut into pieces again, compared with the labels as they are stored.

    Which pieces are one object only the graph of all of them tells, so that what is compared is whether a piece has one
    label.

    Raises:
        RunError: another volume lies where the one was that was labelled.
    """
    reader = _reader(plan)
    written = sorted(Noted.of(folder.journal).results["paint"])
    dice = np.random.default_rng(seed)
    chosen = dice.choice(written, size=min(num_blocks, len(written)), replace=False)
    for block in sorted(map(int, chosen)):
        box = plan.blocks.box(block)
        labels = open_writer(plan.out, level_key(0)).read(box)
        ids = find_pieces(plan, reader, block).ids
        yield Recomputed(block, box, num_misfits(ids, labels, plan.recipe.objects.min_voxels))


def _reader(plan: LabelPlan) -> Reader:
    """Return what reads the volume that was labelled."""
    volume = plan.source()
    then = (plan.num_channels, *plan.shape), plan.source_dtype
    now = (volume.num_channels, *volume.spatial_shape), str(volume.dtype)
    if now != then:
        raise RunError(
            f"{volume} is {now[1]} {now[0]} (c, z, y, x), and was {then[1]} {then[0]} when it was labelled; put that "
            "back, or segment what is there with --fresh"
        )
    return volume.open()


def num_misfits(ids: np.ndarray, labels: np.ndarray, min_voxels: int) -> int:
    """Return how many voxels of `labels` (z, y, x) are not as the pieces `ids`, 0 for none, let them be.

    Outside of pieces that is 0; of a piece it is what most of its voxels have, and 0 only if the piece is smaller than
    `min_voxels`, as an object is that gets no label.
    """
    names, place = np.unique(labels, return_inverse=True)
    pairs, count = np.unique(ids.ravel().astype(np.int64) * len(names) + place.ravel(), return_counts=True)
    piece, is_none = pairs // len(names), names[pairs % len(names)] == 0
    size = np.bincount(ids.ravel())
    may_be = np.where(is_none, (piece == 0) | (size[piece] < min_voxels), piece > 0)
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, piece[may_be], count[may_be])
    return int(ids.size - most.sum())
