"""A whole run through the engine, whose tasks are stand-ins: what the driver takes for each block, and to go on again.

Plan, journal, schedule, loop, output's metadata, closing and report are real; a stand-in gives at once what a worker
would, as if it had taken half a minute, and writes a few bytes in place of each shard. Not here: workers (scaling).
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import DEFAULT_RECIPE, IDENTITY, environment, in_process
from volpipe.blockwise.journal import Record
from volpipe.blockwise.pool import Capacity
from volpipe.blockwise.usage import Usage, peak_bytes
from volpipe.estimation.estimate import UnitCosts
from volpipe.geometry.grid import Box, triple
from volpipe.inference.output import stored_box, write_voxels
from volpipe.inference.output_plan import level_key
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Inferred, Written
from volpipe.volumes import checksums
from volpipe.volumes.storage.metadata import Header
from volpipe.volumes.storage.paths import locate
from volpipe.volumes.volume import ArraySpec, create_array, open_writer
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

MIB = 2**20
# What stand-ins say they took per unit: each block is a task of its own, as in runs that are worth so many.
SECONDS = {"infer": 30.0, "reassemble": 5.0, "pyramid": 5.0}
OTHER_SECONDS = 0.01
COUNTS = {
    20: (5, 2, 2), 80: (5, 4, 4), 160: (8, 5, 4), 320: (8, 8, 5), 640: (10, 8, 8), 1_280: (16, 10, 8),
    2_560: (16, 16, 10), 5_120: (20, 16, 16), 20_480: (32, 32, 20),
    1_000: (10, 10, 10), 10_000: (25, 20, 20), 100_000: (50, 50, 40), 1_000_000: (100, 100, 100),
}  # blocks (z, y, x)  # fmt: skip
NUM_LEFT = 64  # blocks
LOOKS = {"status": ["status"], "verify": ["verify", "--fast"], "report": ["report"]}
WINDOW, STRIDE, BLOCK = 16, 8, (4, 5, 5)
COSTS = UnitCosts(3, 1.0, 1e-9, 0.0, SECONDS["infer"] / 100, 1e-9, 1e-8, 1e-9, 0.0, 0.0, 1.0, 1.0, 300 * MIB)


class StandIns:
    """A pool that gives, when a task is submitted, what a worker would give.

    Attributes:
        cpu: seconds of the processor that stand-ins took themselves.
        first: when the first block was submitted, by the performance counter and by the processor time; () before.
        most: units that are done; the next is met by an interrupt.
    """

    shared: bool = True
    is_here: bool = False
    on_gpu: bool = False
    address: str = "127.0.0.1"
    worker_bytes: int | None = None
    worker_threads: int | None = None
    node_directory: str | None = None
    capacity: Capacity | None = None

    def __init__(self, plan: Plan, num_workers: int = 64, *, most: int | None = None) -> None:
        self.slots: Mapping[str, int] = {"cpu": num_workers, "gpu": num_workers}
        self.plan, self.most = plan, most
        self.cpu, self.first, self.num_tasks = 0.0, tuple[float, ...](), 0
        self._done = np.zeros(len(plan.blocks), bool)
        self._files = cache(self._file)

    def num_connected(self) -> int:
        return self.slots["cpu"]

    def submit(self, app: str, *arguments: Any) -> Future[Record[Any]]:
        """Return what the app would give, at once."""
        if app == "infer" and not self.first:
            self.first = time.perf_counter(), time.process_time()
        if self.most is not None and app == "infer" and self.num_tasks >= self.most:
            raise KeyboardInterrupt
        started, future = time.thread_time(), Future[Record[Any]]()
        _, units, *others = arguments  # the first is the job
        future.set_result(self._record(app, tuple(units), *others))
        self.num_tasks += 1
        self.cpu += time.thread_time() - started
        return future

    def _record(self, app: str, units: tuple[int, ...], *arguments: Any) -> Record[Any]:
        stage = " ".join(map(str, (app, *arguments)))
        if app == "calibrate":
            return Record(stage, units, result=COSTS, usage=_usage(0.0))
        usage = _usage(SECONDS.get(app, OTHER_SECONDS) * len(units))
        result: Written | None = None
        if app == "infer":
            result = self._inferred(units)
        elif app in ("reassemble", "pyramid"):
            level = arguments[0] if arguments else 0
            result = Written(tuple((level, shard, self._write(level, shard)) for shard in units))
        return Record(stage, units, result=result, usage=usage)

    def _inferred(self, blocks: tuple[int, ...]) -> Inferred:
        """Return what the net's stage gives: shards whose last block comes are written by it."""
        self._done[list(blocks)] = True
        shards = sorted({shard for block in blocks for shard in self.plan.shards_of_block(block)})
        whole = [shard for shard in shards if self._done[list(self.plan.blocks_of_shard(shard))].all()]
        sums = tuple((0, shard, self._write(0, shard)) for shard in whole)
        shared = tuple(shard for shard in whole if not self.plan.is_direct(shard))
        return Inferred(sums, shared=shared, seen=tuple((block, f"{block:016x}") for block in blocks))

    def _write(self, level: int, shard: int) -> str:
        """Write the file of a shard, and return its checksum."""
        header, content, crc = self._files(level)
        box = stored_box(self.plan, self.plan.shards(level).box(shard))
        for file in _paths(header, box):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return crc

    def _file(self, level: int) -> tuple[Header, bytes, str]:
        """Return the header of a level, and content and checksum of the file of a shard of ones."""
        header = open_writer(self.plan.out, level_key(level)).header
        box = self.plan.shards(level).box(0)
        write_voxels(self.plan, level, box, np.ones((1, *box.shape), self.plan.dtype))
        (file,) = _paths(header, stored_box(self.plan, box))
        return header, file.read_bytes(), checksums.take(header, stored_box(self.plan, box))


def _paths(header: Header, box: Box) -> list[Path]:
    """Return the files of a box of an array on this disk."""
    return [Path(str(file)) for file in checksums.stored_files(header, box)]


def _usage(seconds: float) -> Usage:
    return Usage(time.time(), seconds, 0.97 * seconds, 300 * MIB, 2 * MIB, MIB, host="node-01", pid=4711)


def planned(folder: Path, num_blocks: int) -> Plan:
    """Return the plan of a run over blocks of 100 windows each, of a volume of which no chunk is stored."""
    shape = triple(count * block * STRIDE for count, block in zip(COUNTS[num_blocks], BLOCK, strict=True))
    create_array(folder / "in.zarr", "raw", ArraySpec(shape, np.dtype(np.uint8), (64, 64, 64)), "zarr2")
    sizes = (f"windows.shape={[WINDOW] * 3}", f"windows.overlap={WINDOW - STRIDE}", f"windows.block={list(BLOCK)}")
    recipe = load_recipe(DEFAULT_RECIPE, [IDENTITY[0], *sizes, "windows.blend=hann"])
    return prepare(f"{folder}/in.zarr/raw", recipe, folder / "out.zarr", folder)


def drive(folder: Path, num_blocks: int) -> dict[str, float]:
    """Return what a run over so many blocks takes the driver, without what its stand-ins take."""
    plan = planned(folder, num_blocks)
    pool = StandIns(plan)
    started, cpu = time.perf_counter(), time.process_time()
    report = execute(plan, lambda folder: nullcontext(pool))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert not report.missing
    blocks, windows = len(plan.blocks), math.prod(plan.lattice.counts)
    return {"seconds": seconds, "cpu": cpu - pool.cpu, "peak": peak_bytes(), "blocks": blocks, "windows": windows,
            "tasks": pool.num_tasks}  # fmt: skip


def begin_again(folder: Path, num_blocks: int) -> dict[str, float]:
    """Return what a run takes until its first task that goes on from a journal with a line for each block but a few."""
    plan = planned(folder, num_blocks)
    with suppress(KeyboardInterrupt):  # with folder and output in place
        execute(plan, lambda folder: nullcontext(StandIns(plan, most=0)))
    journal, left = RunFolder.from_output(locate(plan.out)).journal, {*range(num_blocks - NUM_LEFT, num_blocks)}
    with journal.open("a", encoding="utf-8") as lines:
        lines.writelines(map(Record.to_line, _lines(plan, left)))
    num_lines, pool = sum(1 for _ in journal.open("rb")), StandIns(plan, most=0)
    started, cpu = time.perf_counter(), time.process_time()
    with suppress(KeyboardInterrupt):
        execute(plan, lambda folder: nullcontext(pool))
    assert pool.first
    return {"seconds": pool.first[0] - started, "cpu": pool.first[1] - cpu, "lines": num_lines, "peak": peak_bytes()}


def _lines(plan: Plan, left: set[int]) -> Iterator[Record[Any]]:
    """Yield what tasks noted of all blocks but those that are `left`, and of the shards of coarser levels."""
    usage, lost = _usage(SECONDS["infer"]), {shard for block in left for shard in plan.shards_of_block(block)}
    for block in range(len(plan.blocks)):
        if block not in left:
            shared = () if block in lost else (block,)
            sums = tuple((0, shard, "0123abcd") for shard in shared)
            yield Record("infer", (block,), result=Inferred(sums, shared=shared, seen=((block, f"{block:016x}"),)),
                         usage=usage)  # fmt: skip
    for level in range(1, len(plan.factors)):
        for shard in range(len(plan.shards(level)) - 2 * NUM_LEFT):
            yield Record(f"pyramid {level}", (shard,), result=Written(((level, shard, "0123abcd"),)), usage=usage)


def look_at(folder: Path) -> dict[str, float]:
    """Return the seconds of the processor that commands take which look at the run in `folder`, by their names."""
    return {name: _cpu_of([*command, f"{folder}/out.zarr"]) for name, command in LOOKS.items()}


def _cpu_of(command: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "volpipe", *command], env=environment(), check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@cache
def driven(folder: Path, turn: int, short: bool) -> tuple[dict[str, float], ...]:
    """Return `drive` over 10⁴ and 10⁵ blocks, each in a process of its own; all rows are made from one `turn`.

    The order changes from turn to turn; `short` leaves them at 10³ and 10⁴. The larger one has the times of `look_at`.
    """
    sizes = (1_000, 10_000) if short else (10_000, 100_000)
    found = {size: _driven(folder, size, looks=size == sizes[1]) for size in sizes[:: -1 if turn % 2 else 1]}
    return tuple(found[size] for size in sizes)


def _driven(folder: Path, size: int, *, looks: bool) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        found = in_process(__name__, "drive", scratch, size)
        return found | (look_at(Path(scratch)) if looks else {})


def measure_time(setting: Setting, repeats: int) -> Iterator[Outcome]:
    for turn in range(repeats):
        pair = driven(setting.cache, turn, setting.short)
        few, many = (found["cpu"] / found["blocks"] * 1e3 for found in pair)
        yield Outcome(many / few, {"ms per block, many": many, "ms, few": few, "s in all, many": pair[1]["seconds"]})


def measure_memory(setting: Setting, repeats: int) -> Iterator[Outcome]:
    for turn in range(repeats):
        few, many = (found["peak"] / MIB for found in driven(setting.cache, turn, setting.short))
        yield Outcome(many - few, {"many": many, "few": few})


def measure_replay(setting: Setting, repeats: int) -> Iterator[Outcome]:
    for _ in range(repeats):
        with tempfile.TemporaryDirectory(dir=setting.cache) as scratch:
            found = in_process(__name__, "replay", scratch, 100_000 if setting.short else 1_000_000)
        yield Outcome(found["cpu"], {"s": found["seconds"], "lines": found["lines"], "MiB": found["peak"] / MIB})


def measure_looks(setting: Setting, repeats: int) -> Iterator[Outcome]:
    for turn in range(repeats):
        found = driven(setting.cache, turn, setting.short)[1]
        yield Outcome(max(found[name] for name in LOOKS), {name: found[name] for name in LOOKS})


WHY = (
    "blocks of 100 windows, half an overlap, hann, levels; plan, journal, schedule, loop, closing and report are the "
    "engine's own, workers are stand-ins whose time is left out; processor time of the driver, start and end included"
)
quick = partial(Row, why=WHY, is_quick=True)
ROWS = [
    quick("engine", "driver's time per block, 10⁵ / 10⁴ blocks", 1.1, 1.0, measure_time),
    quick("engine-memory", "driver, 10⁵ blocks - 10⁴ blocks", 40.0, 30.0, measure_memory, unit="MiB"),
    quick("replay", "resumed run to its first task, 10⁶ lines", 7.0, 5.0, measure_replay, unit="s"),
    quick("looks", "status, verify, report of 10⁵ blocks, slowest", 30.0, 10.0, measure_looks, unit="s"),
]

if __name__ == "__main__":
    does = {"drive": drive, "replay": begin_again}[sys.argv[1]]
    print(json.dumps(does(Path(sys.argv[2]), int(sys.argv[3]))))
