"""Sums of what tasks took: of any tasks, added one by one or joined in parts, they are those of plain arithmetic."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from volpipe.blockwise.usage import GpuSample, GpuSamples, Totals, Usage, peak_bytes, sampling_gpu

seconds = st.integers(0, 50).map(float)
usages = st.builds(
    Usage, started=st.just(0.0) | st.integers(100, 200).map(float), seconds=seconds, cpu_seconds=seconds,
    peak_bytes=st.integers(0, 99), read_bytes=st.integers(0, 99), written_bytes=st.integers(0, 99),
    device=st.sampled_from(["", "cuda"]), device_seconds=seconds, device_peak_bytes=st.integers(0, 99),
    queued_seconds=seconds, device_percent=st.sampled_from([0.0, 50.0, 100.0]), device_used_bytes=st.integers(0, 99),
)  # fmt: skip
tasks = st.lists(st.tuples(st.integers(0, 5), usages), max_size=8)


def summed(some: list[tuple[int, Usage]]) -> Totals:
    result = Totals()
    for num_units, usage in some:
        result.add(num_units, usage)
    return result


@given(tasks)
def test_totals_are_sums_and_peaks_are_the_highest(some: list[tuple[int, Usage]]) -> None:
    own = [usage for _, usage in some]
    on_device = [usage for usage in own if usage.device or usage.device_percent]
    timed = [usage for usage in own if usage.started]

    def total(name: str, of: list[Usage] = own) -> float:
        return float(sum(getattr(usage, name) for usage in of))

    def most(name: str, of: list[Usage] = own) -> int:
        return max([0, *(getattr(usage, name) for usage in of)])

    result = summed(some)
    assert dataclasses.asdict(result) == {
        "units": sum(n for n, _ in some), "tasks": len(some), "seconds": total("seconds"),
        "cpu_seconds": total("cpu_seconds"), "peak_bytes": most("peak_bytes"), "read_bytes": total("read_bytes"),
        "written_bytes": total("written_bytes"), "queued_seconds": total("queued_seconds"),
        "device_seconds": total("device_seconds", on_device), "device_task_seconds": total("seconds", on_device),
        "device_busy_seconds": sum(usage.device_percent * usage.seconds for usage in on_device) / 100,
        "device_peak_bytes": most("device_peak_bytes", on_device),
        "device_used_bytes": most("device_used_bytes", on_device), "attempts": 0, "lost_seconds": 0.0, "failed": 0,
        "began": min((usage.started for usage in timed), default=0.0),
        "ended": max((usage.started + usage.seconds for usage in timed), default=0.0),
    }  # fmt: skip
    assert result.device_bytes == max(most("device_peak_bytes", on_device), most("device_used_bytes", on_device))


@given(tasks, tasks)
def test_joined_totals_are_those_of_all_tasks(some: list[tuple[int, Usage]], more: list[tuple[int, Usage]]) -> None:
    joined, other = summed(some), summed(more)
    for each, num in ((joined, 2), (other, 1)):
        each.failed += 3 * num
        for _ in range(num):
            each.add_attempt(Usage(seconds=2.0))
    joined.join(other)
    expected = summed([*some, *more])
    expected.failed, expected.attempts, expected.lost_seconds = 9, 3, 6.0
    assert joined == expected


def test_a_gpu_is_as_busy_as_the_mean_of_its_samples() -> None:
    samples = GpuSamples()
    assert (samples.percent, samples.used_bytes) == (0.0, 0)
    for percent, used in ((10.0, 7), (50.0, 9), (30.0, 8)):
        samples.add(GpuSample(percent, used))
    assert (samples.percent, samples.used_bytes) == (30.0, 9)


def test_a_gpu_is_asked_at_the_end_of_a_task_however_short() -> None:
    answers = iter([GpuSample(99.0, 99), GpuSample(40.0, 5)])
    with sampling_gpu(lambda: next(answers, None), seconds=60) as samples:
        assert samples.percent == 0.0
    assert (samples.percent, samples.used_bytes) == (40.0, 5)  # the first only says that there is one
    with sampling_gpu(lambda: None) as none:
        pass
    assert (none.percent, none.used_bytes) == (0.0, 0)


def test_the_peak_of_this_process_is_the_kernels() -> None:
    with Path("/proc/self/status").open(encoding="ascii") as lines:
        before = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    assert before * 1024 <= peak_bytes() < before * 1024 + (64 << 20)
