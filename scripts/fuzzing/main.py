"""`scripts/fuzz`: hands inputs to processes of their own, watches them, and prints what came of all, by format."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path

from fuzzing import usage
from fuzzing.originals import NAMES, make
from fuzzing.trial import FAILED, GOOD, Outcome, attempt, lay

BATCH = 100  # inputs that are handed out at once
HANG_SECONDS = 30.0
START_SECONDS = 300.0  # to import all packages, on a machine that is busy
PROBE_SECONDS = 10.0
MEMORY_BYTES = 2**28  # more than this and a chunk, as stored and turned, is too much for one input
ADDRESS_BYTES = 2**34  # beyond which the system gives a process nothing
MIB = 1 << 20
MAX_SHOWN = 10

Batch = tuple[str, int, range]  # the original, the seed, and the numbers of the inputs


@dataclass
class Row:
    """What came of the inputs of a format."""

    kinds: Counter[str] = field(default_factory=Counter)
    slowest: tuple[float, str] = (0.0, "")
    most_bytes: tuple[int, str] = (0, "")


@dataclass
class Summary:
    """What came of all inputs, by format, and those that failed: name, seed, number, kind, why."""

    rows: dict[str, Row] = field(default_factory=lambda: defaultdict(Row))
    failures: list[tuple[str, int, int, Outcome]] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)

    def add(self, name: str, seed: int, number: int, outcome: Outcome, seconds: float, num_bytes: int) -> None:
        if outcome.kind in GOOD and num_bytes > MEMORY_BYTES + 2 * outcome.chunk_bytes:
            outcome = Outcome("memory", f"{num_bytes // MIB} MiB; {outcome.kind}: {outcome.text}")
        row = self.rows[name.partition(" ")[0]]
        row.kinds[outcome.kind] += 1
        which = f"--seed {seed} --number {number} {name!r}"
        row.slowest, row.most_bytes = max(row.slowest, (seconds, which)), max(row.most_bytes, (num_bytes, which))
        if outcome.kind == "differs":
            self.differing.append(f"{which}: {outcome.text}")
        if outcome.kind in FAILED:
            self.failures.append((name, seed, number, outcome))


def _peak_bytes() -> int:
    """Return the most memory that this process has held since `_forget_peak`."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def work(pipe: Connection, folder: str) -> None:
    """Try batch after batch; tell of each input before and after."""
    from volpipe.volumes.formats import hdf5_probe

    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_BYTES, ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["VOLPIPE_THREADS"] = "2"
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # for as long as the process lives
    hdf5_probe.SECONDS = PROBE_SECONDS
    with hdf5_probe.keep_process():
        _try_batches(pipe, Path(folder))
    pipe.close()


def _try_batches(pipe: Connection, place: Path) -> None:
    while (batch := pipe.recv()) is not None:
        name, seed, numbers = batch
        pristine = place / name.replace(" ", "-")
        if not pristine.exists():
            original = make(name)
            lay(original, dict(original.files), pristine, pristine)
        for number in numbers:
            pipe.send((number, None))
            _forget_peak()
            before, started = _peak_bytes(), time.perf_counter()
            outcome = attempt(name, seed, number, pristine, place / "input")
            seconds = time.perf_counter() - started
            pipe.send((number, (outcome, seconds, _peak_bytes() - before)))


def context() -> SpawnContext:
    """Return what starts processes that share nothing with this one."""
    return multiprocessing.get_context("spawn")


class Worker:
    """A process that tries inputs, one batch after another, and may die of one."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=folder))
        self.batch: Batch | None = None
        self.number = -1
        self.since = time.monotonic()
        self.pipe, other = context().Pipe()
        self.process: SpawnProcess = context().Process(target=work, args=(other, str(self.folder)), daemon=True)
        self.process.start()
        other.close()

    def give(self, batch: Batch | None) -> None:
        self.batch, self.number, self.since = batch, -1, time.monotonic()
        with contextlib.suppress(OSError):
            self.pipe.send(batch)

    @property
    def left(self) -> Batch:
        """The inputs of the batch after the one at hand."""
        assert self.batch is not None
        name, seed, numbers = self.batch
        return name, seed, range(max(self.number + 1, numbers.start), numbers.stop)

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        shutil.rmtree(self.folder, ignore_errors=True)


def fuzz(names: tuple[str, ...], seed: int, num_inputs: int, num_workers: int) -> Summary:
    """Return what comes of at least `num_inputs` inputs, spread over the originals `names`."""
    each = -(-num_inputs // len(names))
    batches = [(n, seed, range(i, min(i + BATCH, each))) for i in range(0, each, BATCH) for n in reversed(names)][::-1]
    summary = Summary()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        workers = [Worker(Path(folder)) for _ in range(num_workers)]
        try:
            for worker in workers:
                worker.give(batches.pop() if batches else None)
            while any(worker.batch for worker in workers):
                for i, worker in enumerate(workers):
                    if worker.batch and _is_over(worker, summary, batches):
                        worker.end()
                        workers[i] = Worker(Path(folder))
                        workers[i].give(batches.pop() if batches else None)
                wait([worker.pipe for worker in workers if worker.batch], timeout=1.0)
        finally:
            for worker in workers:
                worker.end()
    return summary


def _is_over(worker: Worker, summary: Summary, batches: list[Batch]) -> bool:
    """Take what `worker` has to tell; return whether it died, or had to be given up, of an input."""
    assert worker.batch is not None
    name, seed, numbers = worker.batch
    failure = None
    try:
        while worker.pipe.poll():
            worker.number, told = worker.pipe.recv()
            worker.since = time.monotonic()
            if told is not None:
                summary.add(name, seed, worker.number, *told)
                if worker.number == numbers[-1]:
                    worker.give(batches.pop() if batches else None)
                    return False
    except (EOFError, OSError):
        worker.process.join()
        failure = Outcome("crash", f"the process ended with {worker.process.exitcode}")
    limit = HANG_SECONDS if worker.number >= numbers.start else START_SECONDS
    if failure is None and time.monotonic() - worker.since > limit:
        failure = Outcome("hang", f"no answer for {limit:.0f} s")
    if failure is None:
        return False
    if worker.number < numbers.start:
        raise RuntimeError(f"a process ended before its first input, {failure.text}: are all packages installed?")
    summary.add(name, seed, worker.number, failure, time.monotonic() - worker.since, 0)
    if len(worker.left[2]):
        batches.append(worker.left)
    return True


def report(summary: Summary) -> Iterator[str]:
    """Yield the lines of the table, and one for each way of failing with the seed that makes it again."""
    shown = (*GOOD, *FAILED)
    yield " ".join(f"{word:>10}" for word in ("", "inputs", *shown, "slowest", "memory"))
    total = Row()
    for name, row in [*sorted(summary.rows.items()), ("all", total)]:
        numbers = [sum(row.kinds.values()), *(row.kinds[kind] for kind in shown)]
        words = [name, *map(str, numbers), f"{row.slowest[0]:.2f} s", f"{row.most_bytes[0] // MIB} MiB"]
        yield " ".join(f"{word:>10}" for word in words)
        total.kinds += row.kinds
        total.slowest, total.most_bytes = max(total.slowest, row.slowest), max(total.most_bytes, row.most_bytes)
    yield f"the slowest: scripts/fuzz {total.slowest[1]}; the most memory: scripts/fuzz {total.most_bytes[1]}"
    yield from (f"differs: scripts/fuzz {line}" for line in summary.differing[:MAX_SHOWN])
    seen: Counter[tuple[str, str]] = Counter()
    for name, seed, number, outcome in summary.failures:
        last = outcome.text.strip().splitlines()[-1] if outcome.text else ""
        seen[outcome.kind, last[:60]] += 1
        if seen[outcome.kind, last[:60]] <= 3:
            yield f"{outcome.kind}: scripts/fuzz --seed {seed} --number {number} {name!r}: {last}"


def _keep(name: str, seed: int, number: int, folder: Path) -> Outcome:
    """Lay one input down in `folder`, try a copy of it here, and return what came of it."""
    import numpy as np

    from fuzzing.mutations import mutate
    from fuzzing.trial import seed_of

    original = make(name)
    with tempfile.TemporaryDirectory() as pristine:
        lay(original, dict(original.files), Path(pristine), Path(pristine))
        changed = mutate(original.files, np.random.default_rng(seed_of(name, seed, number)))
        lay(original, {**original.files, **changed}, Path(pristine), folder)
        sys.stdout.write(f"{folder / original.location}: changed {', '.join(changed)}\n")
        sys.stdout.flush()
        return attempt(name, seed, number, Path(pristine), Path(pristine) / "input")


def fuzz_usage(names: Sequence[str], seed: int, numbers: range) -> Summary:
    """Return what comes of the cases `numbers` of the trials of usage `names`, one after another."""
    summary = Summary()
    for name in names:
        for number in numbers:
            began = time.perf_counter()
            outcome = usage.attempt(name, seed, number)
            summary.add(name, seed, number, outcome, time.perf_counter() - began, 0)
    return summary


def main() -> None:
    """Run the command line; exit with 1 where an input failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="originals, formats, or trials of usage; all by default")
    parser.add_argument("--inputs", type=int, default=120_000, help="how many, at least")
    parser.add_argument("--cases", type=int, default=300, help="of each trial of usage")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="try this input alone, and keep it in a folder")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    names = tuple(n for n in NAMES if not given.names or n in given.names or n.partition(" ")[0] in given.names)
    trials = [trial for trial in usage.TRIALS if not given.names or trial in given.names]
    if not names and not trials:
        parser.error(f"no original or trial {given.names}; there are {', '.join((*NAMES, *usage.TRIALS))}")
    if given.number is not None and trials and given.names:
        outcome = usage.attempt(trials[0], given.seed, given.number)
        sys.stdout.write(f"{outcome.kind}: {outcome.text}\n")
        sys.exit(int(outcome.kind in FAILED))
    if given.number is not None:
        outcome = _keep(names[0], given.seed, given.number, Path(tempfile.mkdtemp(prefix="input-")))
        sys.stdout.write(f"{outcome.kind}: {outcome.text}\n")
        sys.exit(int(outcome.kind in FAILED))
    started = time.perf_counter()
    summary = fuzz(names, given.seed, given.inputs, given.workers) if names else Summary()
    if trials:
        used = fuzz_usage(trials, given.seed, range(given.cases))
        summary.rows.update(used.rows)
        summary.failures += used.failures
    for line in report(summary):
        sys.stdout.write(f"{line}\n")
    sys.stdout.write(f"{time.perf_counter() - started:.0f} s, seed {given.seed}, {given.workers} processes\n")
    sys.exit(int(bool(summary.failures)))
