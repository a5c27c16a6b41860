"""The page of what other machines read of work: JSON of status and workers, metrics, lines of the log, the last post.

A key that the code writes and this module does not describe stops it, and so does one that is described and not there.
Metrics and keys of the log are compared by tests, with what a run gives.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping

from reference_pages.runtime import check_described
from volpipe.monitoring import command
from volpipe.stages.status import Status
from volpipe.workflow.roster import Worker

HEAD = """# What machines read

[Runs](../runs.md#watch-it) says how to switch these on. Unknown values are null, or left out of the log.
Later versions may add keys; these keys stay.
"""
STATUS = {
    "kind": "run, labels, stages, evaluation, training, trials or batch",
    "output": "of the work",
    "name": "of a part: a stage, or a trial",
    "state": "complete, running, unseen, interrupted, incomplete or not begun",
    "process": "of the driver",
    "host": "of the driver",
    "since": "when the driver started",
    "last_sign_seconds": "since its last sign of life",
    "command": "how it was started",
    "folder": "where it was started",
    "done": "from 0 to 1",
    "seconds_left": "time left",
    "waits_until": "of a driver that follows a volume and waits: seconds since 1970",
    "stages": "each with `done`, `all`, `in_flight`, `failed`",
    "changes": "with `--changes`: blocks whose files have `changed`, and all `blocks`",
    "missing": "each with stage, unit, box, reason",
    "parts": "the same object for each stage or training",
    "loss": "of a training",
    "steps_per_second": "of a training",
    "datasets": "of a [batch](../batches.md): the lines of its table",
}
WORKERS = {
    "host": "of the process",
    "pid": "of the process",
    "cpu_percent": "100 is one processor",
    "memory_bytes": "of the process",
    "device_percent": "how busy its GPU is, by NVML",
    "device_used_bytes": "GPU memory that all processes use",
    "silent_seconds": "since its last file",
    "alive": "whether that is recent",
    "tasks": "each with `work` (the stage of a recipe, or the dataset of a batch), `stage`, `first` and `num_units` of "
    "its units, its present `unit` and `box`, `done` units, their `share` from 0 to 1, and `seconds`",
}
NOTIFY = {
    "what": "the command: run, batch, …",
    "output": "the output, or the folder of a batch or a training; null if the work did not begin",
    "state": "complete, incomplete, stopped (too much failed), interrupted, refused, failed (a fault of volpipe)",
    "exit_code": "of the command",
    "seconds": "since it was given",
    "missing": "number of missing parts; of a batch of datasets, of a sweep of trainings; null if nobody counted them",
    "message": 'why it is not complete, a sentence; "" where it is',
    "command": "to give it again",
    "folder": "where it was given",
    "report": "the path of the page about it",
}
LOG = {
    "time": "ISO 8601, UTC, to the millisecond",
    "level": "INFO, WARNING or ERROR",
    "logger": "the module that says it; `volpipe.terminal` for progress, warnings and refusals",
    "message": "the sentence; it may have several lines",
    "host": "of the driver",
    "process": "its number there",
    "output": "of the work, once it has begun: an output, or the folder of a batch or a training",
    "dataset": "of a batch",
    "trial": "of a sweep or a search, its number",
    "pair": "of a comparison of many outputs",
    "flow_stage": "of a recipe of stages",
    "stage": "of a unit that failed",
    "traceback": "of an error, in one string",
    "state": "of the last line: how the command ended, as in the metric `volpipe_state`",
    "exit_code": "of the last line",
    "seconds": "of the last line: since the command was given",
}
METRICS = {
    "volpipe_info": ("version, command, recipe", "1"),
    "volpipe_state": (
        "state: running, waiting (for a volume to change), complete, incomplete, stopped, interrupted, refused, failed",
        "1 for the one that it is in",
    ),
    "volpipe_elapsed_seconds": ("", "since the command began"),
    "volpipe_remaining_seconds": ("flow_stage", "time left, once it is known"),
    "volpipe_units": (
        "state: done, in_flight, failed, left", "blocks, shards and other units; `failed` have failed for good",
    ),
    "volpipe_progress_ratio": ("", "0 to 1, parts of tasks under way included"),
    "volpipe_voxels": ("flow_stage, state: done, left", "output voxels of a net"),
    "volpipe_tasks_total": ("", "tasks that have ended"),
    "volpipe_tasks_in_flight": ("", "tasks that workers have"),
    "volpipe_retries_total": ("", "failures of a unit after which it was tried again"),
    "volpipe_task_seconds_total": ("", "wall time of tasks"),
    "volpipe_queue_seconds_total": ("", "wait of tasks for a worker"),
    "volpipe_cpu_seconds_total": ("", "processor time of tasks"),
    "volpipe_read_bytes_total": ("", "as they are stored"),
    "volpipe_written_bytes_total": ("", "as they are stored"),
    "volpipe_gpu_seconds_total": ("", "the net on a GPU"),
    "volpipe_gpu_busy_seconds_total": ("", "GPUs busy meanwhile, by NVML, whoever used them"),
    "volpipe_worker_memory_peak_bytes": ("", "highest of any worker"),
    "volpipe_gpu_memory_peak_bytes": ("", "highest of any worker, by PyTorch"),
    "volpipe_gpu_memory_used_peak_bytes": ("", "highest in use by all processes, by NVML"),
    "volpipe_scratch_bytes": ("flow_stage", "growth of scratch in this session"),
    "volpipe_workers": ("state: `wanted`, `connected`", "at the most, by the site; and now"),
    "volpipe_driver_memory_bytes": ("", "the driver's own"),
    "volpipe_driver_cpu_seconds_total": ("", "the driver's own"),
    "volpipe_datasets": ("state, as in the batch's table", "of a batch"),
    "volpipe_trials": ("state: waiting, running, done, pruned, failed", "of a sweep; of a search, of this session"),
    "volpipe_training_steps": ("state: done, left", "of a training"),
}  # fmt: skip
OF_METRICS = """\
All metrics have the label `output`. Metrics of a stage have `stage` (infer, pyramid 1, …), and in a recipe of stages
`flow_stage`. Counters are for this session; gauges of units, voxels and steps are for all sessions. The same stages of
many datasets or trainings are added up: 10,000 datasets make as many series as one. Units of datasets that were not
begun are not counted.
"""
FIRST_KEYS = re.compile(r'^ {12}"(\w+)":', re.MULTILINE)
KEYS = re.compile(r'"(\w+)":')
NAMES = re.compile(r'"(\w+)"[,)]')


def page() -> str:
    """Return the page."""
    check_described("keys of `status --json`", STATUS, set(FIRST_KEYS.findall(inspect.getsource(Status.to_json))))
    source = inspect.getsource(Worker.to_json)
    listed = NAMES.findall(source.partition("names = ")[2].partition("tasks = ")[0])
    check_described("keys of a worker", WORKERS, {*listed, *KEYS.findall(source.partition("return ")[2])})
    post = inspect.getsource(command).partition('"what":')
    check_described("keys of a post", NOTIFY, {"what", *KEYS.findall(post[2].partition("}")[0])})
    metrics = "\n".join(f"| `{name}` | {labels} | {text} |" for name, (labels, text) in METRICS.items())
    return "\n".join(
        [
            HEAD,
            "## `volpipe status --json`\n", _table(STATUS),
            "## Workers: `volpipe status --workers --json`\n", _table(WORKERS),
            "## Metrics\n", OF_METRICS, f"| metric | labels besides | |\n|---|---|---|\n{metrics}\n",
            "## Lines of `--log-json`\n", _table(LOG),
            "## The post of `--notify`\n", _table(NOTIFY).rstrip("\n") + "\n",
        ]
    )  # fmt: skip


def _table(described: Mapping[str, str]) -> str:
    rows = "\n".join(f"| `{key}` | {text} |" for key, text in described.items())
    return f"| key | |\n|---|---|\n{rows}\n"
