"""How busy a GPU is, is asked of torch while a net runs; where it cannot be had, nothing fails."""

from __future__ import annotations

import statistics
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from command import wait_until

from volpipe.blockwise.usage import GpuSample, measured, sample_gpu, sampling_gpu


class Cuda:
    """A double of torch.cuda: one GPU, which grows busier with each question."""

    def __init__(self, error: Exception | None = None) -> None:
        self.given, self.error = list[int](), error

    def is_available(self) -> bool:
        return True

    def utilization(self) -> int:
        if self.error is not None:
            raise self.error
        if threading.current_thread().name == "volpipe-notes":  # of a run of another test: no sample of a task
            return 0
        self.given.append(min(100, 10 * (len(self.given) + 1)))
        return self.given[-1]

    def device_memory_used(self) -> int:
        return 1000 - len(self.given)

    def max_memory_allocated(self) -> int:
        return 7


def test_a_net_task_has_the_mean_of_its_samples_and_the_most_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until(lambda: not any(thread.name == "volpipe-gpu" for thread in threading.enumerate()), 20)  # of other tests
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=(cuda := Cuda())))
    with measured("infer") as meter:
        wait_until(lambda: len(cuda.given) >= 3, 20)
    assert meter.usage.device_percent == statistics.mean(cuda.given[1:]) >= 25  # the first one says that there is one
    assert meter.usage.device_used_bytes == 998


def test_a_long_task_is_sampled_all_the_time_and_the_thread_ends_with_it() -> None:
    samples_due = iter([GpuSample(0.0, 0), *(GpuSample(float(n), n) for n in (10, 90, 20, 80))])
    taken = threading.Event()

    def take() -> GpuSample | None:
        sample = next(samples_due, None)
        if sample is None:
            taken.set()
        return sample

    with sampling_gpu(take, seconds=0.001) as samples:
        assert taken.wait(20)
    assert (samples.percent, samples.used_bytes) == (50.0, 90)
    assert not any(thread.name == "volpipe-gpu" for thread in threading.enumerate())


@pytest.mark.parametrize("error", [ModuleNotFoundError("nvidia-ml-py"), RuntimeError("NVMLError_NotSupported")])
def test_a_gpu_that_nobody_can_ask_costs_no_task(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda(error)))
    assert sample_gpu() is None
    with measured("infer") as meter:
        assert not any(thread.name == "volpipe-gpu" for thread in threading.enumerate())
    assert (meter.usage.device_percent, meter.usage.device_used_bytes) == (0.0, 0)


def test_a_torch_that_another_thread_imports_just_now_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))  # has no attributes yet
    assert sample_gpu() is None


def test_a_stage_without_a_net_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    with measured("factor"):
        pass
    assert not cuda.given
