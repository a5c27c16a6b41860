"""A batch: many datasets on one pool of workers; planned and checked together, then run, each by itself.

Not here: the file (recipes.batch), the table (batch_table), how one dataset runs (driver, execute), or printing
(cli.batch). Each output keeps a run of its own, by which it is resumed. Of a dataset only its row is kept, never its
plan, which is made again when its turn comes.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from volpipe.blockwise.phase import Progress
from volpipe.blockwise.pool import Start
from volpipe.blockwise.work import Ended, Steps, Together, Work
from volpipe.errors import BatchError, RunError, VolpipeError
from volpipe.estimation.limits import disk_limits, of_quota, room_warning
from volpipe.nets.cache import remembering
from volpipe.recipes.batch import BatchDataset, Mistake
from volpipe.runs.held_work import Counts, HeldWork
from volpipe.runs.options import RunOptions
from volpipe.runs.presence import Presence
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.stage_work import Listener
from volpipe.runs.standing import Act, Asked, act_on
from volpipe.stages.kind import StagePlan
from volpipe.stages.needs import NOTHING
from volpipe.units import listed, sizes
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.object_store import Remote, try_writing
from volpipe.volumes.storage.paths import Location
from volpipe.workflow.batch_table import BatchReport, DatasetRow, Table, read_table
from volpipe.workflow.execute import FlowListener
from volpipe.workflow.output_state import STANDINGS, State, findings, share_left
from volpipe.workflow.pages import batch_page
from volpipe.workflow.work_plan import WorkPlan

AT_ONCE = 8  # datasets at work at a time, where nobody says: the tail of one is filled by the next
MOST_NAMED = 3  # datasets that a sentence is about
Prepare = Callable[[BatchDataset], WorkPlan]
ROOM = (
    "output_bytes", "output_files", "output_folders", "scratch_bytes", "scratch_files", "scratch_folders", "is_measured"
)  # fmt: skip  # of what a dataset needs, in its row


@dataclass
class BatchPlan:
    """Datasets that can be run, a row for each, and the batch's folder.

    Attributes:
        datasets, rows, identities: of the same length; of each plan a hash of what decides the output's bytes.
        notes: sentences about all of them.
    """

    folder: RunFolder
    datasets: list[BatchDataset]
    rows: list[DatasetRow]
    identities: list[str]
    notes: list[str] = field(default_factory=list)


OnRow = Callable[[int, DatasetRow], None]  # of the row of that number
OnWork = Callable[[int, str, Progress], None]  # of the row of that number, of that stage of several


def plan_batch(
    folder: RunFolder,
    datasets: Sequence[BatchDataset],
    prepare: Prepare,
    *,
    mistakes: Iterable[Mistake] = (),
    options: RunOptions,
    at_once: int = AT_ONCE,
    check_out: Callable[[Location], None] = lambda out: None,
    on_dataset: Callable[[int], None] = lambda number: None,
) -> BatchPlan:
    """Return the plan of all `datasets`; whatever is wrong with any of them is refused together.

    Args:
        prepare: returns the plan of a dataset.
        mistakes: of datasets that could not be listed.
        check_out: refuses the place of an output.
        on_dataset: called with the number of datasets that are planned.

    Raises:
        BatchError: with every mistake.
    """
    wrong, rows, places = list(mistakes), list[DatasetRow](), _Places()
    kept: list[tuple[BatchDataset, str]] = []
    with remembering():
        for number, dataset in enumerate(datasets, 1):
            try:
                plan = prepare(dataset)
                check_out(paths.locate(plan.out))
                rows.append(_dataset_row(dataset, plan, options))
                kept.append((dataset, plan.identity))
                places.add(dataset, plan)
            except (VolpipeError, OSError) as error:
                wrong.append((_dataset_name(dataset), str(error)))
            on_dataset(number)
    notes = list(_mapped_otherwise(rows))
    wrong += [*places.mistakes(), *(("all datasets", why) for why in _check_room(rows, at_once, notes))]
    if wrong:
        num = "1 thing is" if len(wrong) == 1 else f"{len(wrong):,} things are"
        remedy = "; mend what is wrong, or give the other volumes in a .txt file, one on each line" if rows else ""
        raise BatchError(f"{num} wrong, and nothing was begun{remedy}", wrong)
    return BatchPlan(folder, [each for each, _ in kept], rows, [identity for _, identity in kept], notes)


def _mapped_otherwise(rows: Sequence[DatasetRow]) -> Iterator[str]:
    """Yield a sentence for each recipe that maps grey levels of its datasets by several rules."""
    for recipe in dict.fromkeys(row.recipe for row in rows):
        rules = dict[str, list[str]]()
        for row in rows:
            if row.recipe == recipe and row.grey:
                rules.setdefault(row.grey_rule, []).append(row.volume)
        if len(rules) > 1:
            groups = "; ".join(f"by {rule} those of {listed(names, MOST_NAMED)}" for rule, names in rules.items())
            yield (
                f"{recipe} maps grey levels otherwise for some datasets, so that one tissue comes out otherwise: "
                f"{groups}; set normalise.low and high of each [[dataset]] to the grey levels that match"
            )


def _dataset_name(dataset: BatchDataset) -> str:
    return f"{dataset.volume} ({dataset.line})" if dataset.line else dataset.volume


def _dataset_row(dataset: BatchDataset, plan: WorkPlan, options: RunOptions) -> DatasetRow:
    state, why = _output_state(plan, options)
    is_done = state == "unchanged" and not options.fresh and not options.updates
    stages = plan.stages
    needs = [each for stage in stages if (each := stage.needs()) is not None]
    times, total = [seconds for _, seconds in needs], sum((need for need, _ in needs), start=NOTHING)
    row = DatasetRow(
        dataset.volume, str(plan.out), dataset.recipe_name, state, why,
        ended="unchanged" if is_done else "waiting",
        shape=stages[0].given.spatial_shape,
        num_blocks=sum(stage.num_blocks for stage in stages),
        **{name: getattr(total, name) for name in ROOM},
        worker_seconds=None if None in times else sum(filter(None, times)),
        share_left=share_left(stages, state),
        warnings=tuple(plan.warnings()),
        grey=next((rule for stage in stages if (rule := stage.grey) is not None), ""),
    )  # fmt: skip
    return replace(row, **findings(stages)) if is_done else row


def _output_state(plan: WorkPlan, options: RunOptions) -> tuple[State, str]:
    """Return how the output of `plan` stands, and what differs; of one that is updated, its volume may have grown."""
    if not options.updates or not any(stage.work().grown() for stage in plan.stages):
        return plan.state(same_input=options.same_input)
    return "input changed", "its volume has grown"


class _Places:
    """The places of inputs, outputs and runs of all datasets, by their names."""

    def __init__(self) -> None:
        self.inputs: dict[Location, str] = {}
        self.outputs: dict[Location, list[str]] = {}
        self.runs: dict[Path, list[str]] = {}
        self._folders: dict[Path, Path] = {}

    def add(self, dataset: BatchDataset, plan: WorkPlan) -> None:
        """Take note of what a dataset reads and writes."""
        out, name = paths.locate(plan.out), _dataset_name(dataset)
        self.outputs.setdefault(self._resolved(out), []).append(name)
        self.runs.setdefault(plan.folder.path, []).append(name)
        for volume, _ in (each for stage in plan.stages for each in stage.outside()):
            self.inputs.setdefault(self._resolved(paths.locate(volume.path)), name)

    def _resolved(self, place: Location) -> Location:
        """Return `place` with links followed; each folder is looked up once."""
        if not isinstance(place, Path):
            return place
        if place.is_symlink():
            return place.resolve()
        if place.parent not in self._folders:
            self._folders[place.parent] = place.parent.resolve()
        return self._folders[place.parent] / place.name

    def mistakes(self) -> Iterator[Mistake]:
        """Yield outputs that meet another output, or the input of another dataset."""
        for out, names in self.outputs.items():
            if len(names) > 1:
                advice = "put {stem}, {key} or {recipe} into out, or give each its own"
                yield listed(names, MOST_NAMED), f"they have one output, {out}; {advice}"
            for above in out.parents:
                if above in self.outputs:
                    yield names[0], f"its output {out} lies in that of {self.outputs[above][0]}; give it another out"
                if above in self.inputs:
                    yield names[0], f"its output {out} lies in the input of {self.inputs[above]}; give it another out"
        for run, names in self.runs.items():
            if len(names) > 1 and names not in self.outputs.values():
                advice = "give their outputs other names"
                yield listed(names, MOST_NAMED), f"their runs would share the folder {run}; {advice}"
        for place, name in self.inputs.items():
            makers = next(
                (self.outputs[folder] for folder in (place, *place.parents) if folder in self.outputs), [name]
            )
            if makers != [name]:
                yield name, f"its input {place} is the output of {makers[0]}; run it in a second batch"
        for folder in {out.parent for out in self.outputs if isinstance(out, Remote)}:
            try:
                try_writing(folder)
            except VolpipeError as error:
                yield str(folder), str(error)


def _check_room(rows: Sequence[DatasetRow], at_once: int, notes: list[str]) -> Iterator[str]:
    """Yield what file systems have no room for, all datasets together; what may become too much goes to `notes`.

    Bytes count only of datasets whose blocks were tried: the compression of others is not known.
    """
    groups: dict[int, tuple[Path, list[DatasetRow]]] = {}
    for row in rows:
        out = paths.locate(row.out)
        if isinstance(out, Path) and row.share_left:
            place = next(parent for parent in (out, *out.parents) if parent.exists())
            groups.setdefault(place.stat().st_dev, (place, []))[1].append(row)
    for place, group in groups.values():
        limits = disk_limits(place)
        if limits.free_files is not None and (inodes := _most_inodes(group, at_once)) > limits.free_files:
            yield (
                f"they need {inodes:,.0f} files and folders, and {place} may have {limits.free_files:,}"
                f"{of_quota(limits.files_by)}; use larger output.shard or output.chunk, or another out"
            )
        if limits.free_bytes is None:
            continue
        if (known := _most_bytes([row for row in group if row.is_measured], at_once)) > limits.free_bytes:
            need, free = sizes(known, limits.free_bytes)
            quota = of_quota(limits.bytes_by)
            yield f"they need {need} and {place} has {free} free{quota}; free some, give another out, or fewer datasets"
        elif warning := room_warning("outputs and scratch", _most_bytes(group, at_once), place, limits):
            notes.append(warning)


def _most_bytes(rows: Sequence[DatasetRow], at_once: int) -> float:
    return _highest([(row.share_left * row.output_bytes, row.share_left * row.scratch_bytes) for row in rows], at_once)


def _most_inodes(rows: Sequence[DatasetRow], at_once: int) -> float:
    outputs = (row.share_left * (row.output_files + row.output_folders) for row in rows)
    scratch = (row.share_left * (row.scratch_files + row.scratch_folders) for row in rows)
    return _highest(list(zip(outputs, scratch, strict=True)), at_once)


def _highest(needs: Sequence[tuple[float, float]], at_once: int) -> float:
    """Return all outputs, which stay, and the largest scratch of datasets that are at work at a time."""
    scratch = sorted((each for _, each in needs), reverse=True)
    return sum(output for output, _ in needs) + sum(scratch[:at_once])


WAYS_OUT: dict[State, str] = {
    "input changed": "use --same-input to continue where the volume was only copied or touched, --update to compute "
    "what rests on voxels that have changed, or --replace to make it again",
    "files lost": "use --replace to make it again",
}
"""States of single datasets that others need not wait for, and what to do."""


def check_changed(plan: BatchPlan, options: RunOptions) -> None:
    """Refuse outputs that were made otherwise, unless they are to be replaced, or others can go on without them.

    Raises:
        BatchError: with each.
    """
    changed = [row for row in plan.rows if _is_changed(row, options)]
    can_leave = all(row.state in WAYS_OUT for row in changed) and len(changed) < len(plan.rows)
    if not changed or can_leave:
        return
    ways = dict.fromkeys(WAYS_OUT[row.state] for row in changed if row.state in WAYS_OUT)
    advice = "; ".join(ways) or "--replace makes them again"
    raise BatchError(
        f"{len(changed):,} of {len(plan.rows):,} outputs were made otherwise, and nothing was begun; {advice}, another "
        "out (with {recipe}, say) puts new ones beside them",
        [(row.volume, f"{row.out}: {row.state}: {row.why}") for row in changed],
    )


def _is_changed(row: DatasetRow, options: RunOptions) -> bool:
    """Return whether going on with the output of `row` would mix two, and none of `options` says what to do."""
    return _act_on_row(row, options) is Act.REFUSE


def _act_on_row(row: DatasetRow, options: RunOptions) -> Act:
    """Return what is done about what is there of a dataset; what would be refused is cleared by --replace."""
    act = act_on(STANDINGS[row.state], Asked.of(options))
    return Act.CLEAR if act is Act.REFUSE and options.replace else act


def _set_aside(row: DatasetRow, options: RunOptions) -> DatasetRow:
    """Return `row`, as failed if its output was made otherwise, so that its dataset is left alone."""
    if not _is_changed(row, options):
        return row
    return replace(row, ended="failed", reason=f"left alone: {row.state}: {row.why}; {WAYS_OUT[row.state]}")


@dataclass(frozen=True)
class BatchListener:
    """Whom a batch tells: of the number of datasets that are planned, of all rows, and how each goes on.

    Attributes:
        on_dataset: called with how many are planned, and of how many.
        on_plan: called with the plan, before anything runs.
        on_begin, on_end: called with the number and the row of a dataset.
        on_progress: called with the number of a dataset, its stage, "" where it has no several, and how far that is.
    """

    on_dataset: Callable[[int, int], None] = lambda number, count: None
    on_plan: Callable[[BatchPlan], None] = lambda plan: None
    on_begin: OnRow = lambda number, row: None
    on_end: OnRow = lambda number, row: None
    on_progress: OnWork = lambda number, stage, progress: None


def execute_batch(
    plan: BatchPlan,
    start: Start,
    prepare: Prepare,
    options: RunOptions,
    at_once: int,
    listener: BatchListener,
) -> BatchReport:
    """Run the datasets of `plan` that are not complete on one pool of workers, and return how each ended.

    What fails of one dataset is its own: the others go on.

    Args:
        start: starts the workers once, where anything is to be done; it is given a folder for their files.
        prepare: returns the plan of a dataset, when its turn comes.
        at_once: how many datasets are at work at a time, at most.

    Raises:
        BatchError: outputs were made otherwise, and no other can go on.
        RunError: another driver is at work on the batch.
        SiteError: the site cannot be used.
    """
    check_changed(plan, options)
    batch = _Batch(plan, prepare, options, at_once, listener)
    with remembering():
        return batch.work().run(start)


@dataclass
class _Batch:
    """The datasets of a plan, and the table of how they end; attributes as the arguments of `execute_batch`."""

    plan: BatchPlan
    prepare: Prepare
    options: RunOptions
    at_once: int
    listener: BatchListener

    def __post_init__(self) -> None:
        self.table = Table(self.plan.folder.path, self.plan.rows)  # until the folder is held

    def work(self) -> HeldWork[BatchReport]:
        """Return the work of the datasets that are not complete, side by side."""
        folder = self.plan.folder
        return HeldWork(
            "batch", folder, claim=self._write_table, held_steps=self._datasets_steps, page=partial(batch_page, folder),
            counts=self._count_datasets,
        )  # fmt: skip

    def _write_table(self) -> None:
        """Write the table, as it is before anything runs."""
        rows = [_set_aside(row, self.options) for row in _with_times(self.plan)]
        self.table = Table(self.plan.folder.path, rows)
        self.table.store()

    def _count_datasets(self) -> Counts:
        return {"datasets": Counter(row.ended for row in list(self.table.rows))}

    def _datasets_steps(self, name: str, presence: Presence) -> Steps[BatchReport]:
        """Run the datasets that are left."""
        began, table = time.monotonic(), self.table

        def keep(ended: Ended[Any]) -> None:  # Any: why a dataset is not complete
            number = ended.work.number
            changes = ended.result or {"ended": "failed", "reason": str(ended.error)}
            table.set(number, replace(table.rows[number], wall_seconds=ended.seconds, **changes))
            self.listener.on_end(number, table.rows[number])
            presence.tell({"datasets": table.note}, table.note.done / table.note.all)

        left = (
            Work(row.volume, partial(self._dataset_steps, number), "dataset", number)
            for number, row in enumerate(table.rows)
            if row.ended == "waiting"
        )
        for number, row in enumerate(table.rows):
            if row.ended == "failed":
                self.listener.on_end(number, row)
        try:
            yield Together(left, keep, at_once=self.at_once, on_tick=table.keep_up)
        finally:
            stopped = [number for number, row in enumerate(table.rows) if row.ended == "running"]
            for number in stopped:
                table.set(number, replace(table.rows[number], ended="interrupted"))
            table.store()
            for number in stopped:
                self.listener.on_end(number, table.rows[number])
        return BatchReport(table.rows, self.plan.folder.path, time.monotonic() - began, self.plan.notes)

    def _dataset_steps(self, number: int) -> Steps[dict[str, Any]]:  # Any: values of a row
        """Do what is left of a dataset, and return what its row says of that; its plan is made anew, and not kept."""
        row, asked = self.table.rows[number], self.options
        self.table.set(number, replace(row, ended="running"))
        self.listener.on_begin(number, self.table.rows[number])
        plan = _planned_again(self.plan, number, self.prepare)
        fresh = _act_on_row(row, asked) is Act.CLEAR
        updates = asked.updates and not fresh
        options = replace(asked, fresh=fresh, update=updates)

        def listener(stage: StagePlan) -> Listener:
            return Listener(on_progress=partial(self.listener.on_progress, number, stage.name))

        report = yield from plan.work(options, FlowListener(of_stage=listener)).steps()
        ended = "incomplete" if report.open_reason else "unchanged" if updates and report.was_complete else "done"
        changes = {}
        if updates and row.state != "new":  # nobody updates what was not there
            changed = (update.changed for each in report.reports for update in each.updates)
            computed = (each.num_computed for each in report.reports)
            changes = {"changed_blocks": sum(changed), "computed_blocks": sum(computed)}
        return {"ended": ended, "reason": report.open_reason, **findings(plan.stages), **changes}


def _with_times(plan: BatchPlan) -> list[DatasetRow]:
    """Return the rows of `plan`, those with nothing to do with the time that they took when they were done."""
    try:
        past = {row.out: row for row in read_table(plan.folder.path) or ()}
    except RunError:  # another version's, which is written anew
        past = {}
    return [
        replace(row, wall_seconds=past[row.out].wall_seconds) if row.is_complete and row.out in past else row
        for row in plan.rows
    ]


def _planned_again(plan: BatchPlan, number: int, prepare: Prepare) -> WorkPlan:
    """Return the plan of a dataset, which must be as it was when the batch was checked."""
    work = prepare(plan.datasets[number])
    if work.identity != plan.identities[number]:
        raise RunError("its recipe, its net or its volume changed after the batch began; give the same command again")
    return work
