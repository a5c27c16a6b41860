"""The GPU of this process as its driver sees it: how busy it is and how much of its memory is in use, of all processes.

Not here: the seconds and bytes that a net itself takes (usage). torch asks NVML, by the package nvidia-ml-py.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

SECONDS = 0.2  # between two samples; NVML's own are of 1/6 s to 1 s


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
def sampling_gpu(take: Callable[[], GpuSample | None] = sample_gpu, seconds: float = SECONDS) -> Iterator[GpuSamples]:
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
