"""What a task takes, as its process counts it, and the sums of tasks: time, memory, bytes, seconds on a device.

Not here: the task (worker), or what becomes of the figures (journal, ledger, loop). torch asks NVML how busy a GPU is,
by the package nvidia-ml-py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from volpipe.volumes.storage.tensorstore import Transferred, transferred

GPU_SECONDS = 0.2  # between two samples of a GPU; NVML's own are of 1/6 s to 1 s


@dataclass(frozen=True)
class Usage:
    """What a task took.

    Attributes:
        started: time of start, seconds since 1970.
        seconds, cpu_seconds: wall and processor time.
        peak_bytes: highest resident memory of the process so far.
        read_bytes, written_bytes: of chunks as they are stored, by all threads of the process; where tasks run in them
            side by side, since the last of them ended, so that the sum over tasks is true.
        scratch_bytes: by how much the run's scratch grew; below zero where it shrank.
        device: what the net ran on, "" where there was none; with the seconds that it computed and its peak memory.
        queued_seconds: from sending to start, by the driver; the clocks of two machines may differ.
        device_percent, device_used_bytes: mean utilisation of the GPU meanwhile and the most memory in use on it, of
            all processes; 0 where NVML does not say.
    """

    started: float = 0.0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    scratch_bytes: int = 0
    device: str = ""
    device_seconds: float = 0.0
    device_peak_bytes: int = 0
    host: str = ""
    pid: int = 0
    queued_seconds: float = 0.0
    device_percent: float = 0.0
    device_used_bytes: int = 0


@dataclass(slots=True)
class Totals:
    """What tasks took, added up; peaks are the highest of any worker.

    Attributes:
        seconds, cpu_seconds, queued_seconds: of tasks, and before their starts.
        device_seconds, device_task_seconds: that nets computed on devices, and of tasks that used one.
        device_busy_seconds: of GPUs at work, by NVML, of any process.
        attempts, lost_seconds: tasks that failed, or some of whose units did, and the time of those that gave nothing.
        failed: units that were set aside.
        began, ended: of the first and the last task, seconds since 1970; 0 where nobody says.
    """

    units: int = 0
    tasks: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    queued_seconds: float = 0.0
    device_seconds: float = 0.0
    device_task_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    device_peak_bytes: int = 0
    device_used_bytes: int = 0
    attempts: int = 0
    lost_seconds: float = 0.0
    failed: int = 0
    began: float = 0.0
    ended: float = 0.0

    @property
    def device_bytes(self) -> int:
        """The most memory in use on a device."""
        return max(self.device_peak_bytes, self.device_used_bytes)

    def add(self, num_units: int, usage: Usage) -> None:
        """Add a task that did so many units."""
        self.units += num_units
        self.tasks += 1
        self.seconds += usage.seconds
        self.cpu_seconds += usage.cpu_seconds
        self.queued_seconds += usage.queued_seconds
        self.read_bytes += usage.read_bytes
        self.written_bytes += usage.written_bytes
        self.peak_bytes = max(self.peak_bytes, usage.peak_bytes)
        if usage.device or usage.device_percent:
            self.device_seconds += usage.device_seconds
            self.device_task_seconds += usage.seconds
            self.device_busy_seconds += usage.device_percent / 100 * usage.seconds
            self.device_peak_bytes = max(self.device_peak_bytes, usage.device_peak_bytes)
            self.device_used_bytes = max(self.device_used_bytes, usage.device_used_bytes)
        if usage.started:
            self.began = min(self.began, usage.started) if self.began else usage.started
            self.ended = max(self.ended, usage.started + usage.seconds)

    def add_attempt(self, usage: Usage) -> None:
        """Add a task that failed, or some of whose units did."""
        self.attempts += 1
        self.lost_seconds += usage.seconds

    def join(self, other: Totals) -> None:
        """Add what other tasks took."""
        began = min(filter(None, (self.began, other.began)), default=0.0)
        for each in dataclasses.fields(Totals):
            both = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(both) if each.name in HIGHEST else sum(both))
        self.began = began


HIGHEST = {"peak_bytes", "device_peak_bytes", "device_used_bytes", "ended"}


@dataclass
class Meter:
    """A measured stretch of work, with its `usage` once it has ended."""

    usage: Usage = Usage()


Device = Callable[[], tuple[str, float]]  # its name, and the seconds that it has computed so far


def _no_device() -> tuple[str, float]:
    return "", 0.0


_device: Device = _no_device


@dataclass(frozen=True)
class _Counters:
    """What this process has counted so far, by all of its tasks."""

    moved: Transferred = field(default_factory=Transferred)
    grown: int = 0
    device_seconds: float = 0.0

    @classmethod
    def now(cls) -> _Counters:
        return cls(transferred(), _grown, _device()[1])


class _Shares:
    """Shares out what a process counts: a task gets what was counted since it began, or since one beside it ended.

    So all tasks together get it once, also where they run side by side in threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_tasks = 0
        self._given = _Counters()

    def begin(self) -> None:
        with self._lock:
            if self._num_tasks == 0:  # what was counted between tasks is nobody's
                self._given = _Counters.now()
            self._num_tasks += 1

    def end(self) -> _Counters:
        with self._lock:
            before, self._given = self._given, _Counters.now()
            self._num_tasks -= 1
            return _Counters(
                self._given.moved - before.moved,
                self._given.grown - before.grown,
                max(0.0, self._given.device_seconds - before.device_seconds),
            )


_shares = _Shares()
_lock = threading.Lock()
_grown = 0  # bytes by which this process has made scratch grow so far


@contextmanager
def counting_growth(files: Sequence[Path]) -> Iterator[None]:
    """Count by how much `files`, scratch of a run, grow or shrink meanwhile."""
    global _grown
    before = sum(map(_file_bytes, files))
    try:
        yield
    finally:
        change = sum(map(_file_bytes, files)) - before
        with _lock:
            _grown += change


def _file_bytes(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return 0


@dataclass(frozen=True)
class GpuSample:
    """A GPU at one moment: utilisation in percent, bytes of its memory in use."""

    percent: float
    used_bytes: int


def sample_gpu() -> GpuSample | None:
    """Return how the current GPU is now; None without a GPU, or where NVML cannot be asked."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    try:  # another thread may be importing it
        if not torch.cuda.is_available():
            return None
        return GpuSample(float(torch.cuda.utilization()), int(torch.cuda.device_memory_used()))
    except Exception:  # no nvidia-ml-py, a part of a GPU (MIG), a driver without NVML: each has an error of its own
        return None


@dataclass
class GpuSamples:
    """Samples of a stretch of work."""

    _samples: list[GpuSample] = field(default_factory=list)

    def add(self, sample: GpuSample) -> None:
        self._samples.append(sample)

    @property
    def percent(self) -> float:
        """The mean utilisation, 0 without a sample."""
        return sum(sample.percent for sample in self._samples) / max(1, len(self._samples))

    @property
    def used_bytes(self) -> int:
        """The most memory in use, 0 without a sample."""
        return max((sample.used_bytes for sample in self._samples), default=0)


@contextmanager
def sampling_gpu(
    take: Callable[[], GpuSample | None] = sample_gpu, seconds: float = GPU_SECONDS
) -> Iterator[GpuSamples]:
    """Give samples that a thread takes now and then meanwhile; no thread where the first cannot be had."""
    samples, is_over = GpuSamples(), threading.Event()
    if take() is None:
        yield samples
        return

    def watch() -> None:
        while not is_over.wait(seconds):
            sample = take()
            if sample is not None:
                samples.add(sample)

    thread = threading.Thread(target=watch, name="volpipe-gpu", daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        thread.join()
        last = take()  # of a task that was shorter than the time between two
        if last is not None:
            samples.add(last)


@contextmanager
def measured(stage: str) -> Iterator[Meter]:
    """Give a meter that has, at the end, what was taken meanwhile."""
    meter, is_net = Meter(), stage in ("infer", "train")
    _shares.begin()
    started, clock, cpu, gpu = time.time(), time.perf_counter(), _cpu_seconds(), GpuSamples()
    try:
        with sampling_gpu() if is_net else nullcontext(gpu) as gpu:
            yield meter
    finally:
        share = _shares.end()
        meter.usage = Usage(
            started=started,
            seconds=time.perf_counter() - clock,
            cpu_seconds=_cpu_seconds() - cpu,
            peak_bytes=peak_bytes(),
            read_bytes=share.moved.read,
            written_bytes=share.moved.written,
            scratch_bytes=share.grown,
            device=_device()[0] if is_net else "",
            device_seconds=share.device_seconds if is_net else 0.0,
            device_peak_bytes=_device_peak_bytes() if is_net else 0,
            host=socket.gethostname(),
            pid=os.getpid(),
            device_percent=gpu.percent,
            device_used_bytes=gpu.used_bytes,
        )


def peak_bytes() -> int:
    """Return the highest resident memory of this process so far."""
    # Linux counts it anew for a new program; getrusage begins with the memory of the process that started it.
    with contextlib.suppress(OSError, StopIteration), Path("/proc/self/status").open(encoding="ascii") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _cpu_seconds() -> float:
    # Of one thread where tasks share a process, of the process (readers and writers included) where they do not.
    return time.process_time() if is_alone() else time.thread_time()


def is_alone() -> bool:
    """Return whether this process does one task at a time: where tasks share it, they run in threads."""
    return threading.current_thread() is threading.main_thread()


def count_device(device: Device) -> None:
    """Let tasks of this process count the seconds of `device`; whoever loads a net calls this."""
    global _device
    _device = device


def _device_peak_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.max_memory_allocated())
