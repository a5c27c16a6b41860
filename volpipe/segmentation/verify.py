"""Status and verification of labels: from the run's journal, or by cutting blocks into fragments again.

Not here: the segmentation (driver), or printing (cli.segment, cli.verify).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from volpipe.errors import RunError
from volpipe.inference.output import level_key
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.verify import Recomputed, Verdict, check_files, judge, metadata_of, written
from volpipe.segmentation.driver import SegmentWork, objects_of
from volpipe.segmentation.fragments import find_fragments
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.tasks import RESULTS, TABLE
from volpipe.volumes.reader import Reader
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import open_writer


def find_labels(output: str | Path) -> tuple[RunFolder, SegmentPlan] | None:
    """Return run folder and plan of the labels `output`, or of that folder itself; None of anything else.

    Raises:
        RunError: the plan is damaged, or of another version.
    """
    place = paths.locate(output) if "://" in str(output) else Path(output).absolute()
    is_folder = isinstance(place, Path) and (place / SegmentPlan.FILE).is_file()
    folder = RunFolder(place) if is_folder and isinstance(place, Path) else RunFolder.from_output(place)
    plan = folder.load(SegmentPlan)
    return None if plan is None else (folder, plan)


def verify_labels(folder: RunFolder, plan: SegmentPlan) -> Verdict:
    """Compare every file of the labels and their table with the journal's checksums.

    Raises:
        RunError: there is no journal, or no label is written yet.
    """
    if not folder.journal.is_file():
        raise RunError(
            f"{folder.path} holds no journal, which alone knows what the output's files should hold; "
            "restore the folder, or segment with --fresh to make both again"
        )
    shards, objects = SegmentWork(plan).shards(), objects_of(folder)
    if not shards:
        raise RunError(f"the segmentation in {folder.path} has written no labels; `volpipe segment` goes on with it")
    verdict = check_files(plan.out, shards, metadata_of(folder), len(plan.factors))
    if objects is not None:
        verdict.num_files += 1
        judge(verdict.differences, folder.path / TABLE, objects.table_checksum, "")
    verdict.num_unwritten = sum(len(plan.shards(level)) for level in range(len(plan.factors))) - len(shards)
    return verdict


def recompute_labels(folder: RunFolder, plan: SegmentPlan, num_blocks: int, seed: int = 0) -> Iterator[Recomputed]:
    """Yield random blocks, cut into fragments again and compared with the stored labels.

    Only the graph of all blocks knows which fragments are one object, so each fragment is checked to have one label.

    Raises:
        RunError: the input volume has another shape or type now.
    """
    reader = _reader(plan)
    blocks = sorted(shard for level, shard in written(folder, RESULTS) if level == 0)
    rng = np.random.default_rng(seed)
    sample = rng.choice(blocks, size=min(num_blocks, len(blocks)), replace=False)
    for block in sorted(map(int, sample)):
        box = plan.blocks.box(block)
        labels = open_writer(plan.out, level_key(0)).read(box)
        ids = find_fragments(plan, reader, block).ids
        yield Recomputed(block, box, num_misfits(ids, labels, plan.recipe.objects.min_voxels))


def _reader(plan: SegmentPlan) -> Reader:
    """Return a reader of the input volume, refusing another shape or type than planned."""
    volume = plan.source()
    expected = (plan.num_channels, *plan.shape), plan.source_dtype
    actual = (volume.num_channels, *volume.spatial_shape), str(volume.dtype)
    if actual != expected:
        raise RunError(
            f"{volume} is {actual[1]} {actual[0]} (c, z, y, x), its labels are of {expected[1]} {expected[0]}; put "
            "that back, or segment what is there with --fresh"
        )
    return volume.open()


def num_misfits(ids: np.ndarray, labels: np.ndarray, min_voxels: int) -> int:
    """Return the number of voxels of `labels` (z, y, x) that contradict the fragments `ids`, of the same shape.

    Background has label 0. A fragment has the label of most of its voxels, 0 only if it is smaller than `min_voxels`.
    """
    names, place = np.unique(labels, return_inverse=True)
    pairs, count = np.unique(ids.ravel().astype(np.int64) * len(names) + place.ravel(), return_counts=True)
    fragment, is_none = pairs // len(names), names[pairs % len(names)] == 0
    size = np.bincount(ids.ravel())
    may_be = np.where(is_none, (fragment == 0) | (size[fragment] < min_voxels), fragment > 0)
    most = np.zeros(len(size), np.int64)
    np.maximum.at(most, fragment[may_be], count[may_be])
    return int(ids.size - most.sum())
