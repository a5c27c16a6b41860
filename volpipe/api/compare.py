"""Outputs compared with each other: of an old and a new net over the same input.

Not here: the work (evaluation, workflow.compare), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from volpipe.api.arguments import site_of
from volpipe.api.progress import progress_shown
from volpipe.blockwise.phase import Show
from volpipe.blockwise.pool import WorkerPool
from volpipe.evaluation.compare import ComparisonPlan, plan_comparison
from volpipe.evaluation.driver import comparison_work, finish
from volpipe.evaluation.limits import Limit
from volpipe.evaluation.results import COMPARED_JSON, COMPARED_PAGE, ComparisonResult
from volpipe.monitoring.exposition import monitored
from volpipe.monitoring.results import results_of
from volpipe.resolve import homes_known
from volpipe.runs.options import RunOptions
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import Listener
from volpipe.volumes.storage.result_file import ResultFile
from volpipe.workflow.compare import (
    ComparisonTable,
    check_complete,
    compare_pairs,
    find_pairs,
    pair_name,
    pairs_work,
)
from volpipe.workflow.entries import location_of

COMPARE = "compare"  # the end of names of its folder and its page


@homes_known
def compare(
    a: str | Path | WorkReport,
    b: str | Path | WorkReport,
    *,
    labels: bool = False,
    roi: str | None = None,
    data_range: float | None = None,
    any_input: bool = False,
    incomplete: bool = False,
    limits: Sequence[str] = (),
    site: str | Path | WorkerPool = "local",
    tolerate: float = 0.1,
    json_file: str | Path | None = None,
    page: str | Path | None = None,
    progress: bool | None = None,
    on_progress: Show | None = None,
    on_pair: Callable[[int, int], None] = lambda done, num: None,
    metrics: str | int | Path | None = None,
) -> ComparisonResult | ComparisonTable:
    """Compare two outputs of one input, or those of two batches, block by block on the site's workers.

    Outputs say themselves whether they hold labels; of other volumes, whole numbers of more than 16 bits are. Labels
    are compared as objects: their numbers mean nothing. Call it again to continue an interrupted one.

    Args:
        a: an output, such as of the old net; or a batch's file or folder. Also the report of a run or a segmentation.
        b: another of the same input, such as of the new net; or another batch. Datasets of batches are paired by their
            volume, outputs of flows by their stage.
        labels: both hold labels, whatever they say of themselves; 0 is none.
        roi: box z0:z1,y0:y1,x0:x1 of both that is compared.
        data_range, incomplete: as of `evaluate`.
        any_input: compare outputs of different inputs, or of different parts of one. They are compared voxel by voxel.
        limits: how much they may differ, NAME=NUMBER: psnr (dB, at least), differ (share of voxels), mean, largest
            (grey levels), voi (bits). What violates one is told by `violations` and `is_within`.
        site, tolerate, progress, metrics: as of `run`.
        json_file: write the result to this file. No other file than such a one is replaced.
        page: file for an HTML page with pictures of the boxes that differ most. As `json_file`.
        on_progress: called at every change and every half second; of many comparisons not.
        on_pair: of many comparisons, called with how many are done, and of how many.

    Returns: how they differ; boxes that could not be compared are its `missing`, and the same call again tries them.

    Raises:
        PlanError: they do not fit each other, are not complete or of one input, or have nothing that a limit is of.
        VolpipeError, RunStopped: no volume is there, or the site cannot be used; too many blocks cannot be compared.
    """
    one, other = location_of(a, "a"), location_of(b, "b")
    files = [
        ResultFile.named(name, file, kind)
        for name, file, kind in (("json_file", json_file, COMPARED_JSON), ("page", page, COMPARED_PAGE))
        if file is not None
    ]
    for file in files:
        file.check()
    chosen, options = tuple(dict.fromkeys(map(Limit.parse, limits))), RunOptions(tolerated=tolerate)
    write, pairs, (start, _) = partial(_write_files, json_file, page), find_pairs(one, other), site_of(site)
    plan = partial(
        _plan_complete, labels=labels, roi=roi, data_range=data_range, any_input=any_input, incomplete=incomplete
    )  # fmt: skip
    folder = RunFolder(Path.cwd() / f"{default_name(one, other)}{'' if pairs is None else '_all'}.run")
    with monitored(metrics, COMPARE), results_of(*files):
        if pairs is not None:
            table = pairs.table(one, other, chosen)
            return compare_pairs(pairs_work(table, pairs, plan, folder, options, on_pair), start, write)
        comparison = plan(one, other)
        with progress_shown(progress, on_progress) as show:
            return finish(
                comparison_work(comparison, folder, options, Listener(on_progress=show), limits=chosen), start, write
            )  # fmt: skip


def _write_files(
    json_file: str | Path | None, page: str | Path | None, result: ComparisonResult | ComparisonTable
) -> None:
    """Write `result` to the files that are asked for."""
    if json_file is not None:
        result.write_json(json_file)
    if page is not None:
        result.write_page(page)


def _plan_complete(a: str, b: str, **options: Any) -> ComparisonPlan:  # Any: as `plan_comparison` takes them
    """Return the comparison of two outputs that are complete."""
    comparison = plan_comparison(a, b, **options)
    check_complete("A", a, comparison.a, comparison.box)
    check_complete("B", b, comparison.b, comparison.box)
    return comparison


def default_name(a: str, b: str) -> str:
    """Return the name of the page of a comparison in the current folder, without a suffix; its folder's begins so."""
    return f"volpipe_{pair_name(a, b)}_{COMPARE}"
