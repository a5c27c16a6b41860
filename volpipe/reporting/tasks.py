"""What tasks took, as sections of a report: tables of stages, workers, nodes and sessions, and a timeline.

Not here: adding up (tally), or what was planned and what came out (runs and others, which answer for themselves).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from volpipe.blockwise.failures import message_of
from volpipe.blockwise.usage import Totals
from volpipe.reporting.page import Chart, Item, PageSection, Sentence, Sheet, columns_of, filled
from volpipe.reporting.tally import ANY, MOST_SLOWEST, MOST_WORKERS, NUM_BINS, JournalTally, Task, Worker
from volpipe.units import brief, count, size

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2", "#d6b02a", "#9d755d", "#8a8f98", "#ff9da6", "#3d9c8c")
FAILED, FAILED_COLOUR = "failed attempt", "#d62728"
LOST = "lost workers"
TIME_UNITS = (("seconds", 1, 120.0), ("minutes", 60, 7200.0), ("hours", 3600, 3 * 86400.0), ("days", 86400, math.inf))
MOST_LANES = 48
LANE_PIXELS = 18
ZOOM = "Drag moves the picture, the wheel with the shift key zooms."
MOST_ROWS = 40  # of a table of workers, nodes or failures

K = TypeVar("K")
BoxOf = Callable[[str, int], object]  # the box of a unit of a stage, as a text, None where it has none


@dataclass(frozen=True)
class StageState:
    """How far a stage is: units done, and in all."""

    done: int
    all: int


def task_sections(
    tally: JournalTally,
    stages: Mapping[str, StageState] | None = None,
    box_of: BoxOf = lambda stage, unit: None,
    sites: Sequence[tuple[str, float]] = (),
    works: Sequence[str] = (),
) -> list[PageSection]:
    """Return timeline, tables, failures and the slowest of the tasks of `tally`.

    Args:
        stages: how far each is, in the order of a voxel's life.
        box_of: the box of a unit.
        sites: name and beginning of each session.
        works: the stages of a flow, with whose names and a colon the names of stages begin; each has one colour.
    """
    names = list(dict.fromkeys((*(stages or {}), *tally.stages)))
    if not tally.sums:
        return [PageSection("Tasks", [Sentence("No task has ended yet.")])]
    tables = [stage_sheet(tally, stages or {}, names), *_worker_sheets(tally), *_session_sheet(tally, sites)]
    sections = [PageSection("Timeline", [*timeline(tally, works or names, box_of)]), PageSection("Tasks", tables)]
    slowest = slowest_sheet(tally, box_of)
    failures = PageSection("Failures and retries", _failure_items(tally, box_of))
    others = [failures, PageSection("Slowest tasks", [slowest] if slowest else [])]
    return [*sections, *(section for section in others if section.items)]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""


Column = Callable[[Totals], object]
COLUMNS: dict[str, Column] = {
    "tasks": lambda s: s.tasks,
    "task time": lambda s: brief(s.seconds),
    "per task": lambda s: brief(s.seconds / s.tasks) if s.tasks else "",
    "CPU": lambda s: _percent(s.cpu_seconds, s.seconds),
    "read": lambda s: size(s.read_bytes),
    "written": lambda s: size(s.written_bytes),
    "peak memory": lambda s: size(s.peak_bytes) if s.peak_bytes else "",
    "GPU": lambda s: _percent(s.device_busy_seconds, s.device_task_seconds) if s.device_busy_seconds else "",
    "net on device": lambda s: _percent(s.device_seconds, s.device_task_seconds) if s.device_seconds else "",
    "GPU memory": lambda s: size(s.device_bytes) if s.device_bytes else "",
    "queued": lambda s: brief(s.queued_seconds / s.tasks) if s.queued_seconds and s.tasks else "",
    "waiting": lambda s: _percent(s.queued_seconds, s.queued_seconds + s.seconds) if s.queued_seconds else "",
    "failed attempts": lambda s: s.attempts or "",
    "time lost": lambda s: brief(s.lost_seconds) if s.lost_seconds else "",
    "set aside": lambda s: s.failed or "",
}
USAGE_COLUMNS = ("read", "written", "CPU", "peak memory", "GPU", "GPU memory")  # of a table of stages of a flow
MEANINGS = (
    "Task time is the sum over tasks, several of which ran at once; CPU is processor time by task time, above "
    "100 % where a task has several threads; peak memory is that of the largest worker process. Queued is the mean "
    "time between sending a task and its start, waiting its share of queue and work together: high where workers are "
    "busy or still to come."
)
GPU_MEANING = " GPU is the mean utilisation that NVML gave while tasks of the net ran, of all processes."
DEVICE_MEANING = " Net on device is the share of the tasks' time that the net itself computed."


def _totals_sheet(
    title: str, names: Sequence[str], rows: Iterable[tuple[Sequence[object], Totals]], caption: str = ""
) -> Sheet:
    """Return a table of sums, columns that are empty in all rows left out."""
    pairs = list(rows)
    cells = {name: [column(sums) for _, sums in pairs] for name, column in COLUMNS.items()}
    shown = [name for name, column in cells.items() if any(cell != "" for cell in column)]
    lines = [(*lead, *(cells[name][i] for name in shown)) for i, (lead, _) in enumerate(pairs)]
    return Sheet(title, [*names, *shown], lines, caption)


def stage_sheet(tally: JournalTally, stages: Mapping[str, StageState], names: Sequence[str]) -> Sheet:
    """Return what each stage took, and all together."""
    sums, total = tally.stages, tally.all
    rows = [((name, _progress_cell(stages.get(name), sums.get(name))), sums.get(name, Totals())) for name in names]
    if len(rows) > 1:
        rows.append((("all", ""), total))
    caption = MEANINGS + (GPU_MEANING if total.device_busy_seconds else "")
    caption += DEVICE_MEANING if total.device_seconds else ""
    return _totals_sheet("By stage", ["stage", "units"], rows, caption)


def _progress_cell(state: StageState | None, sums: Totals | None) -> str:
    if state is None:
        return f"{sums.units:,}" if sums is not None else ""
    return f"{state.done:,}" if state.done == state.all else f"{state.done:,} of {state.all:,}"


def _worker_sheets(tally: JournalTally) -> Iterator[Sheet]:
    """Yield what each node and each worker took, those of most time first."""
    workers = {worker: sums for worker, sums in tally.workers.items() if worker[0]}
    nodes = {host: sums for host, sums in tally.nodes.items() if host}
    if len(nodes) > 1:
        paces, counts = _paces(tally), dict[str, int]()
        for host, _ in workers:
            counts[host] = counts.get(host, 0) + 1
        rows = [((host, counts[host], paces.get(host, "")), sums) for host, sums in _largest(nodes)]
        caption = (
            "Pace: time per unit against the mean of all nodes, over the same stages; above 1 × the node is slow. "
        )
        yield _totals_sheet("By node", ["node", "workers", "pace"], rows, caption + _rest(len(nodes), "node"))
    rows_of_workers = [
        ((host, str(pid) if pid != ANY else "others", _share(sums)), sums) for (host, pid), sums in _largest(workers)
    ]
    caption = "At work: tasks' time by the time from its first task to its last; with threads, of all of them. "
    caption += _rest(len(workers), "worker")
    if len(workers) >= MOST_WORKERS:
        caption += f" Workers after the first {MOST_WORKERS:,} are counted as others of their node."
    yield _totals_sheet("By worker", ["node", "process", "at work"], rows_of_workers, caption)


def _largest(sums: Mapping[K, Totals]) -> list[tuple[K, Totals]]:
    return heapq.nlargest(MOST_ROWS, sums.items(), key=lambda item: item[1].seconds + item[1].lost_seconds)


def _rest(num: int, noun: str) -> str:
    more = num - MOST_ROWS
    return f"The {MOST_ROWS} of most time; {count(more, noun)} more are not shown." if more > 0 else ""


def _share(sums: Totals) -> str:
    span = sums.ended - sums.began
    return _percent(sums.seconds, span) if span > 0 else ""


def _paces(tally: JournalTally) -> dict[str, str]:
    """Return by node how long its units take against the mean of all nodes, weighted by their stages."""
    means = {name: sums.seconds / sums.units for name, sums in tally.stages.items() if sums.units}
    own, expected = dict[str, float](), dict[str, float]()
    for (stage, (host, _)), sums in tally.sums.items():
        if sums.units:
            own[host] = own.get(host, 0.0) + sums.seconds
            expected[host] = expected.get(host, 0.0) + sums.units * means[stage]
    return {host: f"{own[host] / expected[host]:.2f} ×" for host in own if expected[host] > 0}


def _session_sheet(tally: JournalTally, sites: Sequence[tuple[str, float]]) -> list[Sheet]:
    if not sites:
        return []
    sums = tally.by_session if len(tally.by_session) == len(sites) > 1 else [tally.all] * len(sites[:1])
    rows = []
    for number, ((site, began), own) in enumerate(zip(sites, sums, strict=False), 1):
        first = brief(max(0.0, own.began - began)) if own.began else ""
        span = brief(max(0.0, own.ended - began)) if own.ended else ""
        rows.append((number, site, moment(began), first, span, own.units, own.tasks, own.attempts or ""))
    names = ("session", "site", "began", "first task after", "last task after", "units", "tasks", "failed attempts")
    caption = "A session is one driver's time on this work: the command, and each time that it was given again."
    return [filled(Sheet("By session", names, rows, caption))]


def moment(seconds: float) -> str:
    """Return seconds since 1970 as date and time, UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name, all of them different: those of COLOURS, then paler and darker ones."""

    def shade(colour: str, turn: int) -> str:
        end, share = 255 * (turn % 2), 0.6 ** ((turn + 1) // 2)
        parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        return "#" + "".join(f"{round(end + share * (part - end)):02x}" for part in parts)

    return {name: shade(COLOURS[i % len(COLOURS)], i // len(COLOURS)) for i, name in enumerate(names)}


def timeline(tally: JournalTally, groups: Sequence[str], box_of: BoxOf) -> list[Item]:
    """Return what was at work when: by stage, and by worker; single tasks where they are few.

    `groups` are what has a colour each: stages, or what the names of several begin with.
    """
    bins, bars = tally.bins, list(_bars(tally)) if tally.tasks else []
    used = [i for i in range(NUM_BINS) if any(row[i] for row in bins.rows.values())]
    if not used:
        return [Sentence("No task says when it began.")]
    sent = [task.began - task.queued_seconds for _, task in bars]
    first, last = ((bins.first + i) * bins.seconds for i in (used[0], used[-1] + 1))
    colours, elapsed = colours_of(groups), _elapsed(min([first, *sent]), last)
    items: list[Item] = [_at_work(tally, range(used[0], min(used[-1] + 2, NUM_BINS)), colours, elapsed)]
    if tally.tasks and len({lane for lane, _ in bars}) <= MOST_LANES:
        return [*items, _bar_chart(tally, bars, colours, elapsed, box_of)]
    return [*items, _tile_chart(tally, colours, elapsed)]


def _colour_group(stage: str, colours: Mapping[str, str]) -> str:
    """Return whose colour a stage has: its own, or that of the work that its name begins with."""
    return stage if stage in colours else stage.partition(": ")[0]


def _coloured(changes: Mapping[str, Any], colours: Mapping[str, str]) -> dict[str, Any]:  # Any: JSON
    """Return the changes of a specification with a colour for each name."""
    scale = {"domain": list(colours), "range": list(colours.values())}
    return {**changes, "encoding": {**changes["encoding"], "color": {"scale": scale}}}


def _elapsed(first: float, last: float) -> dict[str, object]:
    """Return what makes the times of a chart, in ms since 1970, an axis that counts from `first`."""
    unit, seconds = next((name, n) for name, n, most in TIME_UNITS if last - first < most)
    return {
        "transform": [
            {"calculate": f"(datum.{field} - {_ms(first)}) / {_ms(seconds)}", "as": f"{field}_elapsed"}
            for field in ("sent", "began", "ended")
        ],
        "encoding": {"x": {"title": f"{unit} since {moment(first)}"}},
    }


def _at_work(tally: JournalTally, span: range, colours: Mapping[str, str], elapsed: Mapping[str, Any]) -> Chart:
    """Return how many tasks were at work at a time, by stage, in the bins of `span`."""
    bins = tally.bins
    rows = {group: [0.0] * NUM_BINS for group in colours}
    for (stage, _), seconds in bins.rows.items():
        group = _colour_group(stage, colours)
        rows[group] = [a + b for a, b in zip(rows[group], seconds, strict=True)]
    points = [
        (_ms((bins.first + i) * bins.seconds), stage, round(row[i] / bins.seconds, 3))
        for stage, row in rows.items()
        for i in (span if any(row) else ())
    ]
    columns = columns_of(("began", "stage", "tasks"), points)
    caption = f"Mean number of tasks at work in each {brief(bins.seconds)}, failed ones included."
    return Chart("Tasks at work", caption, "at_work", columns, _coloured(elapsed, colours))


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def _bars(tally: JournalTally) -> Iterator[tuple[str, Task]]:
    """Yield tasks, failed ones included, each with its lane: tasks of a worker that overlap get lanes of their own."""
    failures = [task for task in tally.failures if task.began]
    is_one = len({task.host for task in tally.tasks}) <= 1
    lanes: dict[Worker, list[float]] = {}
    for task in sorted((*tally.tasks, *failures), key=lambda task: (task.is_lost, task.worker, task.began)):
        ends = lanes.setdefault(task.worker, [])
        lane = next((i for i, end in enumerate(ends) if end <= task.began + 1e-3), len(ends))
        ends[lane : lane + 1] = [task.began + task.seconds]
        yield _lane_name(task.worker, is_one) + (f" #{lane + 1}" if lane else ""), task


def _lane_name(worker: Worker, is_one_host: bool) -> str:
    host, pid = worker
    if not host:
        return LOST
    return (f"process {pid}" if is_one_host else f"{host} {pid}") if pid != ANY else f"{host} others"


def _bar_chart(
    tally: JournalTally, bars: Sequence[tuple[str, Task]], colours: Mapping[str, str], elapsed: Mapping[str, Any],
    box_of: BoxOf,
) -> Chart:  # fmt: skip
    """Return a bar for each task."""
    names = ("worker", "colour", "stage", "units", "box", "sent", "began", "ended", "seconds", "queued", "read",
             "written", "memory", "failed", "retried")  # fmt: skip
    failures = {(task.stage, unit) for _, task in bars if task.reason for unit in task.units}

    def row(lane: str, task: Task) -> tuple[object, ...]:
        return (
            lane, FAILED if task.reason else _colour_group(task.stage, colours), task.stage,
            _units_text(task), _box_of_task(task, box_of),
            _ms(task.began - task.queued_seconds), _ms(task.began), _ms(task.began + task.seconds),
            round(task.seconds, 3), round(task.queued_seconds, 3), size(task.read_bytes), size(task.written_bytes),
            size(task.peak_bytes) if task.peak_bytes else None, message_of(task.reason)[:200] or None,
            next((f"{task.stage} {unit}" for unit in task.units if (task.stage, unit) in failures), None),
        )  # fmt: skip

    columns = columns_of(names, [row(lane, task) for lane, task in bars])
    shown = {name: column for name, column in columns.items() if any(value is not None for value in column)}
    caption = "A bar is a task, the thin line before it the time that it waited since it was sent. " + ZOOM
    if failures:
        caption += (
            " Attempts that failed are red, and a red line leads from each to the next attempt at the same part. If a "
            "worker was lost, its bar spans the time from sending the task to the loss."
        )
    lanes = list(dict.fromkeys(lane for lane, _ in bars))
    shown_colours = {**colours, **({FAILED: FAILED_COLOUR} if failures else {})}
    changes = _lanes(lanes, _coloured(elapsed, shown_colours))
    return Chart("Workers and their tasks", caption, "timeline", shown, changes)


def _units_text(task: Task) -> str:
    if not task.units:
        return "an update took them back"
    return f"{task.units[0]}" + (f" and {len(task.units) - 1} more" if len(task.units) > 1 else "")


def _box_of_task(task: Task, box_of: BoxOf) -> object:
    return box_of(task.stage, task.units[0]) if task.units else None


def _lanes(names: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Any]:  # Any: JSON
    """Return the changes of a specification with these lanes."""
    encoding = {**changes["encoding"], "y": {"scale": {"domain": names}}}
    return {**changes, "height": LANE_PIXELS * len(names), "encoding": encoding}


def _tile_chart(tally: JournalTally, colours: Mapping[str, str], elapsed: Mapping[str, Any]) -> Chart:
    """Return, for each worker or node, which stage took most of each stretch of time, and how busy it was."""
    bins = tally.bins
    hosts = {host for _, (host, _) in bins.rows}
    of_nodes = len({worker for _, worker in bins.rows}) > MOST_LANES
    rows: dict[str, dict[str, list[float]]] = {}
    for (stage, worker), row in sorted(bins.rows.items(), key=lambda item: item[0][1]):
        lane = (worker[0] or LOST) if of_nodes else _lane_name(worker, len(hosts) == 1)
        own = rows.setdefault(lane, {}).setdefault(_colour_group(stage, colours), [0.0] * NUM_BINS)
        own[:] = [a + b for a, b in zip(own, row, strict=True)]
    busiest = heapq.nlargest(MOST_LANES, rows, key=lambda lane: sum(map(sum, rows[lane].values())))
    lanes = [lane for lane in rows if lane in set(busiest)]
    names = ("worker", "colour", "began", "ended", "busy", "tasks")
    columns = columns_of(names, [tile for lane in lanes for tile in _tiles(lane, rows[lane], tally)])
    what = "node" if of_nodes else "worker"
    caption = (
        f"{tally.num_tasks:,} tasks are too many for a bar each: a tile is {brief(bins.seconds)} of a {what}, its "
        "colour the stage that took most of it, its strength how busy it was. " + ZOOM
    )
    if len(rows) > len(lanes):
        caption += f" The {MOST_LANES} busiest of {len(rows):,}."
    title = "Nodes and their tasks" if of_nodes else "Workers and their tasks"
    return Chart(title, caption, "tiles", columns, _lanes(lanes, _coloured(elapsed, colours)))


def _tiles(lane: str, stages: Mapping[str, Sequence[float]], tally: JournalTally) -> Iterator[tuple[object, ...]]:
    """Yield the stage that took most of each stretch of time, when that was, and how busy the lane was."""
    bins = tally.bins
    sums = [sum(row[i] for row in stages.values()) for i in range(NUM_BINS)]
    most = max(sums)
    for i, seconds in enumerate(sums):
        if seconds > 0.005 * most:
            largest = max(stages, key=lambda stage: stages[stage][i])
            began = (bins.first + i) * bins.seconds
            busy, tasks = round(seconds / most, 2), round(seconds / bins.seconds, 2)
            yield lane, largest, _ms(began), _ms(began + bins.seconds), busy, tasks


def _failure_items(tally: JournalTally, box_of: BoxOf) -> list[Item]:
    """Return how often tasks failed and why, and the slowest tasks."""
    items: list[Item] = []
    if tally.reasons:
        rows = [(num, stage, message_of(reason)) for (stage, reason), num in tally.reasons.most_common(MOST_ROWS)]
        items.append(Sheet("Why tasks failed", ("attempts", "stage", "reason"), rows))
    if tally.failures:
        latest = list(tally.failures)[-MOST_ROWS:]
        lines = [
            (
                moment(task.began) if task.began else "", task.stage,
                ", ".join(map(str, task.units[:4])) + (" …" if len(task.units) > 4 else ""), _box_of_task(task, box_of),
                f"{task.host} {task.pid}" if task.host else "lost", brief(task.seconds), message_of(task.reason),
            )
            for task in reversed(latest)
        ]  # fmt: skip
        names = ("when", "stage", "units", "box z,y,x", "worker", "after", "reason")
        more = tally.all.attempts - len(latest)
        caption = f"The latest {len(latest)}; {more:,} more are in the journal." if more else ""
        items.append(filled(Sheet("Failed attempts", names, lines, caption)))
    return items


def slowest_sheet(tally: JournalTally, box_of: BoxOf) -> Sheet | None:
    """Return the tasks whose units took longest; None where there are few tasks."""
    if tally.num_tasks <= 2 * MOST_SLOWEST:
        return None
    rows = [
        (task.stage, str(task.units[0]), box_of(task.stage, task.units[0]), brief(task.seconds / len(task.units)),
         len(task.units), f"{task.host} {task.pid}", moment(task.began) if task.began else "")
        for task in tally.slowest
    ]  # fmt: skip
    names = ("stage", "first unit", "box z,y,x", "per unit", "units", "worker", "began")
    caption = f"Of {tally.num_tasks:,} tasks. A first task of a worker loads the net as well."
    return filled(Sheet("The slowest tasks", names, rows, caption))


def damage_note(tally: JournalTally) -> Sentence | None:
    """Return a warning of lines that could not be read; None where there is none."""
    if not tally.num_damaged:
        return None
    lines, verb = count(tally.num_damaged, "line"), "is" if tally.num_damaged == 1 else "are"
    return Sentence(
        f"{lines} of the journal cannot be understood, damaged or by another version, and {verb} left out of the "
        f"numbers here; the first is {tally.first_damaged}.",
        "warning",
    )
