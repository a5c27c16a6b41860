"""Speeds of a net: what windows cost it by each arithmetic, on a core or on a GPU, as plans choose windows by them.

Not here: the choice (window_choice), where speeds are kept (nets.cache), or what windows cost as a recipe has them
(window_search).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from volpipe.blockwise.malloc import keep_freed_memory, share_heap
from volpipe.blockwise.usage import peak_bytes
from volpipe.errors import NetError, VolpipeError
from volpipe.estimation.window_search import LAYOUTS, call, count_peak, laid_out, windows_to_try
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.inference.runner import autocast, take_precision
from volpipe.inference.tiling import aligned_halo
from volpipe.nets.facts import FLOAT32, Arithmetic, NetFacts, NetSpeeds, WindowSpeed, WindowSpeeds
from volpipe.recipes.inference import NetChoice, Precision
from volpipe.units import shape

if TYPE_CHECKING:
    from torch import nn

MEASURED_VOXELS = (84**3, 116**3)  # of windows by which the memory of a net is measured; it varies by a fifth
REPEATS, MOST_REPEATED = 3, 10.0  # of a call that is timed, the fastest counts; no more after so many seconds
THOROUGH_SECONDS = 60.0  # of calls of a net by one arithmetic
MOST_WAIT = 180.0  # seconds, for processes that load torch and the net
LEAST_VOXELS = 32**3  # smaller windows are no choice, and too short to be timed
GPU_PRECISIONS: tuple[Precision, ...] = ("tf32", "bfloat16")  # that may be faster on a GPU than float32
FIXED_BYTES = 64 << 20  # that a net takes for any window (2026-11)

log = logging.getLogger(__name__)


def measure_speeds(
    choice: NetChoice,
    facts: NetFacts,
    search_path: str = "",
    *,
    most_seconds: float = math.inf,
    known: Sequence[WindowSpeeds] = (),
) -> NetSpeeds:
    """Return what windows of the net cost on one core of this machine, by each arithmetic that is not `known`.

    A window is not tried with which the calls of one arithmetic would take more than `most_seconds`, nor one beyond a
    window that fails, or is killed for its memory.
    """
    windows = [window for window in windows_to_try(facts, aligned_halo(facts)) if math.prod(window) >= LEAST_VOXELS]
    new = [each for each in arithmetics_here() if each not in {speeds.arithmetic for speeds in known}]
    times = [_times_here(choice, facts, windows, each, search_path, most_seconds) for each in new]
    with ThreadPoolExecutor(2) as pool:
        memory = pool.map(lambda each: bytes_per_voxel(choice, facts, FIXED_BYTES, search_path, arithmetic=each), new)
    measured = [
        WindowSpeeds(arithmetic=each, bytes_per_voxel=round(num_bytes), windows=speeds)
        for each, num_bytes, speeds in zip(new, memory, times, strict=True)
    ]
    return NetSpeeds(processor=processor(), speeds=(*known, *measured))


def measure_speeds_on_gpu(
    choice: NetChoice,
    facts: NetFacts,
    gpu: str,
    search_path: str = "",
    *,
    most_seconds: float = math.inf,
    device: str = "cuda",
) -> NetSpeeds:
    """Return what windows of the net cost on this process's `device`, whose name is `gpu`; see `measure_speeds`.

    Memory is the device's.

    Raises:
        NetError: not even the smallest window could be timed, as on a GPU that others have filled.
    """
    import torch

    torch.backends.cudnn.deterministic = True  # as workers have it

    def speeds(arithmetic: Arithmetic) -> WindowSpeeds:
        net, per_voxel = laid_out(choice, search_path, arithmetic.channels_last).to(device), [0.0]

        def attempt(window: Triple) -> tuple[float, float]:
            seconds, total, num_bytes = _time_on_gpu(net, (1, facts.in_channels, *window), arithmetic, device)
            per_voxel.append(num_bytes / math.prod(window))
            return seconds, total

        times = tuple(_timed(windows_to_try(facts, aligned_halo(facts), on_gpu=True), attempt, most_seconds))
        return WindowSpeeds(arithmetic=arithmetic, bytes_per_voxel=max(per_voxel), windows=times)

    measured = tuple(map(speeds, _arithmetics(("float32", *GPU_PRECISIONS))))
    if not any(each.windows for each in measured):
        raise NetError(f"no window of net {facts.label} could be timed on {gpu}; others may use its memory: try again")
    return NetSpeeds(processor=gpu, speeds=measured)


def thorough_speeds(choice: NetChoice, facts: NetFacts, search_path: str) -> NetSpeeds:
    """Return what `measure_speeds` does, over all windows that a plan may take: it takes some minutes.

    Raises:
        NetError: a net without parameters, or one of which not even the smallest window could be timed.
    """
    if not facts.num_parameters:
        raise NetError(f"net {facts.label} has no parameters, and takes next to no time")
    speeds = measure_speeds(choice, facts, search_path, most_seconds=THOROUGH_SECONDS)
    if not any(each.windows for each in speeds.speeds):
        raise NetError(f"no window of net {facts.label} could be timed here; see that memory is free, and try again")
    return speeds


def _time_on_gpu(net: nn.Module, shape: Sequence[int], arithmetic: Arithmetic, device: str) -> tuple[float, float, int]:
    """Return the seconds of the fastest call, those of all of them, and the bytes that they took beyond the net."""
    import torch

    take_precision(arithmetic.precision)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    began = time.perf_counter()
    with torch.inference_mode(), autocast(device, arithmetic.precision):
        while len(times) <= REPEATS and time.perf_counter() - began < MOST_REPEATED:
            started = time.perf_counter()
            call(net, torch.zeros(tuple(shape), device=device), channels_last=arithmetic.channels_last)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    total = time.perf_counter() - began
    return min(times[1:] or times), total, torch.cuda.max_memory_allocated() - held


def arithmetics_here() -> list[Arithmetic]:
    """Return the arithmetics by which a net may be fast on this machine's processor."""
    return _arithmetics(("float32", "bfloat16") if has_bfloat16() else ("float32",))


def _arithmetics(precisions: Sequence[Precision]) -> list[Arithmetic]:
    return [Arithmetic(layout, precision) for precision in precisions for layout in LAYOUTS]


def measured_speeds(
    choice: NetChoice, facts: NetFacts, search_path: str, *, most_seconds: float, gpu: str = ""
) -> NetSpeeds | None:
    """Return what `measure_speeds` does, or on a `gpu` of that name `measure_speeds_on_gpu`; None where it fails.

    It is done by a process that is none of the caller's program: one that the caller's own starts would run a script of
    the user's anew.
    """
    question = {
        "choice": choice.model_dump(), "facts": facts.model_dump(), "search_path": search_path,
        "most_seconds": most_seconds, "gpu": gpu,
    }  # fmt: skip
    answer = ask("volpipe.estimation.net_speeds", question, MOST_WAIT + 8 * most_seconds)
    return None if answer is None else NetSpeeds.model_validate_json(answer)


def ask(module: str, question: Mapping[str, object], most_seconds: float) -> str | None:
    """Return the answer of `module` to a question, by a process of its own; None where it fails or takes too long."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(
            [sys.executable, "-m", module], input=json.dumps(question), env=environment, text=True,
            capture_output=True, timeout=most_seconds, check=True,
        )  # fmt: skip
        return done.stdout.splitlines()[-1]
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        log.info("nets could not be measured: %s", error)
        return None


def _answer() -> None:
    """Answer the question of `measured_speeds`, in its process."""
    question = json.loads(sys.stdin.read())
    choice, facts = NetChoice.model_validate(question["choice"]), NetFacts.model_validate(question["facts"])
    folder, most_seconds, gpu = question["search_path"], question["most_seconds"], question["gpu"]
    if gpu:
        speeds = measure_speeds_on_gpu(choice, facts, gpu, folder, most_seconds=most_seconds)
    else:
        speeds = measure_speeds(choice, facts, folder, most_seconds=most_seconds)
    sys.stdout.write(speeds.model_dump_json())


def _times_here(
    choice: NetChoice,
    facts: NetFacts,
    windows: Iterable[Triple],
    arithmetic: Arithmetic,
    search_path: str,
    most_seconds: float,
) -> tuple[WindowSpeed, ...]:
    """Return the speed of `windows`, ascending, in a process of their own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def attempt(window: Triple) -> tuple[float, float]:
            log.info("times windows of %s in %s", shape(window), arithmetic.words)
            return pool.submit(_time, choice, (1, facts.in_channels, *window), arithmetic, search_path).result()

        return tuple(_timed(windows, attempt, most_seconds))


def _timed(
    windows: Iterable[Triple], attempt: Callable[[Triple], tuple[float, float]], most_seconds: float
) -> Iterator[WindowSpeed]:
    """Yield the speed of `windows`, ascending, for which `attempt` returns seconds of one call and of all of them."""
    spent = per_voxel = 0.0
    for window in windows:
        if spent + 2 * per_voxel * math.prod(window) > most_seconds:
            return
        try:
            seconds, total = attempt(window)
        except (BrokenProcessPool, RuntimeError, VolpipeError) as error:  # killed, or the net takes no such window
            log.debug("windows of %s could not be tried: %s", window, error)
            return
        spent, per_voxel = spent + total, seconds / math.prod(window)
        yield WindowSpeed(window=window, seconds=seconds)


def _time(choice: NetChoice, shape: Sequence[int], arithmetic: Arithmetic, search_path: str) -> tuple[float, float]:
    """Return the processor time of the fastest call, and the seconds of all of them; a slow one is not repeated."""
    import torch

    torch.set_num_threads(1)
    share_heap()
    keep_freed_memory()
    net = _laid_out_once(choice.model_dump_json(), search_path, arithmetic.channels_last)
    times: list[float] = []
    began = time.perf_counter()
    with torch.inference_mode(), autocast("cpu", arithmetic.precision):
        while len(times) <= REPEATS and time.perf_counter() - began < MOST_REPEATED:
            started = time.process_time()  # other work on the machine does not count
            call(net, torch.zeros(tuple(shape)), channels_last=arithmetic.channels_last)
            times.append(time.process_time() - started)
    return min(times[1:] or times), time.perf_counter() - began


@cache
def _laid_out_once(choice: str, search_path: str, channels_last: bool) -> nn.Module:
    """Return the net of a `choice` as JSON as `laid_out` does, built once in a process."""
    return laid_out(NetChoice.model_validate_json(choice), search_path, channels_last)


def processor() -> str:
    """Return the name of this machine's processor, as the system gives it."""
    return _of_processor("model name") or platform.machine()


def has_bfloat16() -> bool:
    """Return whether this machine's processor multiplies in bfloat16; others convert it, which is slower."""
    flags = (_of_processor("flags") or _of_processor("Features")).split()  # of x86, of ARM
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


@cache
def _of_processor(what: str) -> str:
    """Return what Linux says of the first processor; "" where it does not."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), "")
    return ""


def bytes_per_voxel(
    choice: NetChoice, facts: NetFacts, fixed_bytes: int, search_path: str = "", *, arithmetic: Arithmetic = FLOAT32
) -> float:
    """Return the bytes that a net takes on a CPU per voxel of a window, beyond the `fixed_bytes` of any window.

    Measured with two threads, which take somewhat more than one, over windows of the net's own proportions.
    """
    most = 0.0
    for window in _sized_as(facts, MEASURED_VOXELS):
        shape = (1, facts.in_channels, *window)
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            num_bytes = pool.submit(_net_bytes, choice, shape, arithmetic, search_path).result()
        most = max(most, (num_bytes - fixed_bytes) / math.prod(window))
    return most


def _sized_as(facts: NetFacts, num_voxels: Iterable[int]) -> list[Triple]:
    """Return windows near to so many voxels, in whole strides, in the proportions of the net's own."""
    windows = []
    for num in num_voxels:
        growth = (num / math.prod(facts.window)) ** (1 / 3)
        sizes = zip(facts.window, facts.stride, facts.fixed, facts.remainder, facts.margin, strict=True)
        windows.append(
            triple(
                only or rest + align_up(max(stride, 2 * margin + 1, round(growth * size)) - rest, stride)
                for size, stride, only, rest, margin in sizes
            )
        )
    return list(dict.fromkeys(windows))


def _net_bytes(choice: NetChoice, shape: Sequence[int], arithmetic: Arithmetic, search_path: str) -> int:
    """Return the bytes that calls of the net add to a process that keeps freed memory, as workers do."""
    import torch

    torch.set_num_threads(2)
    share_heap()
    keep_freed_memory()
    net = laid_out(choice, search_path, arithmetic.channels_last)
    count_peak()
    before = peak_bytes()
    with torch.inference_mode(), autocast("cpu", arithmetic.precision):
        for _ in range(2):
            call(net, torch.zeros(tuple(shape)), channels_last=arithmetic.channels_last)
    return peak_bytes() - before


if __name__ == "__main__":
    _answer()
