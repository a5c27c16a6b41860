"""A net measured: what windows cost it by each arithmetic, on a core or on a GPU, and what other precisions change.

Not here: the choice by it (window_choice), where it is kept (nets.cache), or what windows cost as a recipe has them
(window_search).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from pydantic import BaseModel, validate_call
from pydantic_core import to_json

from volpipe.blockwise.journal import Record
from volpipe.blockwise.malloc import keep_freed_memory, share_heap
from volpipe.blockwise.pool import Gpu
from volpipe.blockwise.task import work_once
from volpipe.blockwise.usage import peak_bytes
from volpipe.errors import NetError, VolpipeError
from volpipe.estimation.window_search import LAYOUTS, call, count_peak, free_memory, laid_out, windows_to_try
from volpipe.geometry.grid import Box, Triple, align_up, triple
from volpipe.inference.intensity import Affine, to_dtype, unit_scale
from volpipe.inference.runner import autocast, take_precision
from volpipe.inference.statistics import sampled_affine
from volpipe.inference.tiling import aligned_halo, around_core
from volpipe.nets.cache import keep_speeds, store_measured
from volpipe.nets.facts import FLOAT32, Arithmetic, NetFacts, NetSpeeds, PrecisionDifference, WindowSpeed, WindowSpeeds
from volpipe.nets.load import build_net
from volpipe.process import environment, module_command
from volpipe.recipes.inference import NetChoice, Normalise, Precision
from volpipe.synthetic.volume import SyntheticVolume

if TYPE_CHECKING:
    from torch import nn

MEASURED_VOXELS = (84**3, 116**3)  # of windows by which the memory of a net is measured: either may take more a voxel
REPEATS, MOST_REPEATED = 3, 10.0  # of a call that is timed, the fastest counts; no more after so many seconds
THOROUGH_SECONDS = 60.0  # of calls of a net by one arithmetic
MOST_WAIT = 180.0  # seconds, for processes that load torch and the net
COMPARE_WAIT = 60.0  # seconds, for a process that compares two precisions
MEASURE_SECONDS = 4.0  # of calls of the net, in each layout and precision; and to compare two precisions
MEASURE_SECONDS_ON_GPU = 2.0
LEAST_VOXELS = 32**3  # smaller windows are no choice, and too short to be timed
GPU_PRECISIONS: tuple[Precision, ...] = ("tf32", "bfloat16")  # that may be faster on a GPU than float32
FIXED_BYTES = 64 << 20  # that a net takes for any window (2026-11)
CORE = 64  # voxels along an axis on which precisions are compared, at least: the core is in whole strides

log = logging.getLogger(__name__)
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class GpuTimes:
    """What a worker found of a net on its GPU: speeds of windows, and what other precisions change in the output."""

    gpu: Gpu
    speeds: NetSpeeds
    differences: Mapping[Precision, PrecisionDifference]

    def keep(self, choice: NetChoice, normalise: Normalise, facts: NetFacts, search_path: str) -> bool:
        """Remember them for plans; return whether that can be."""
        for precision, measured in self.differences.items():
            store_measured(choice, search_path, difference_key(precision, normalise, facts, self.gpu.name), measured)
        return keep_speeds(choice, facts, search_path, self.speeds)


def time_net(choice: NetChoice, normalise: Normalise, facts: NetFacts, search_path: str) -> Record[GpuTimes]:
    """Return what windows of a net cost on this worker's GPU; the record of a task of one unit."""
    return work_once("time", 0, lambda: _time_on_worker(choice, normalise, facts, search_path))


def _time_on_worker(choice: NetChoice, normalise: Normalise, facts: NetFacts, search_path: str) -> GpuTimes:
    import torch

    if not torch.cuda.is_available():
        raise NetError(f"the worker on {socket.gethostname()} sees no GPU; `volpipe sites check` says why")
    gpu = Gpu(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    speeds = measure_speeds_on_gpu(choice, facts, gpu.name, search_path, most_seconds=MEASURE_SECONDS_ON_GPU)
    compared = GPU_PRECISIONS if is_quick_to_compare(facts, speeds) else ()
    return GpuTimes(
        gpu,
        speeds,
        {
            each: measure_difference(choice, normalise, facts, search_path, precision=each, device="cuda")
            for each in compared
        },
    )


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
    window that fails, or for which memory is too little. An arithmetic that cannot be measured is left out.
    """
    windows = [window for window in windows_to_try(facts, aligned_halo(facts)) if math.prod(window) >= LEAST_VOXELS]
    new = [each for each in arithmetics_here() if each not in {speeds.arithmetic for speeds in known}]
    seconds, measured = min(most_seconds, MOST_WAIT), list[WindowSpeeds]()
    asked = {
        "choice": choice, "facts": facts, "search_path": search_path, "windows": windows, "most_seconds": seconds,
    }  # fmt: skip
    for each in new:
        log.info("times windows in %s", each.words)
        speeds = _in_own_process(speeds_on_core, WindowSpeeds, {**asked, "arithmetic": each}, MOST_WAIT + 8 * seconds)
        measured += [] if speeds is None else [speeds]
    return NetSpeeds(processor=processor(), speeds=(*known, *measured))


def speeds_on_core(
    choice: NetChoice,
    facts: NetFacts,
    search_path: str,
    windows: Sequence[Triple],
    arithmetic: Arithmetic,
    most_seconds: float,
) -> WindowSpeeds:
    """Return what `windows`, ascending, cost the net in this process, which does nothing else.

    Memory is measured with two threads, which take somewhat more than one.
    """
    import torch

    share_heap()
    keep_freed_memory()
    net = laid_out(choice, search_path, arithmetic.channels_last)
    torch.set_num_threads(2)
    count_peak()
    before, per_voxel = peak_bytes(), 0.0
    # First of all: what other windows have freed would be used again, and not be counted.
    for window in (_sized_as(facts, num) for num in MEASURED_VOXELS):
        _timed_calls(net, (1, facts.in_channels, *window), arithmetic, "cpu", time.process_time, repeats=1)
        per_voxel = max(per_voxel, (peak_bytes() - before - FIXED_BYTES) / math.prod(window))
    torch.set_num_threads(1)

    def attempt(window: Triple) -> tuple[float, float]:
        if per_voxel * math.prod(window) > free_memory():
            raise VolpipeError("the memory is too little for it")
        # by processor time, in which other work on the machine does not count
        return _timed_calls(net, (1, facts.in_channels, *window), arithmetic, "cpu", time.process_time)

    times = tuple(_timed(windows, attempt, most_seconds))
    return WindowSpeeds(arithmetic=arithmetic, bytes_per_voxel=round(per_voxel), windows=times)


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
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            times = _timed_calls(net, (1, facts.in_channels, *window), arithmetic, device, _gpu_clock)
            per_voxel.append((torch.cuda.max_memory_allocated() - held) / math.prod(window))
            return times

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
        VolpipeError: memory cannot be measured here.
    """
    if not facts.num_parameters:
        raise NetError(f"net {facts.label} has no parameters, and takes next to no time")
    count_peak()  # which fails where memory cannot be measured
    speeds = measure_speeds(choice, facts, search_path, most_seconds=THOROUGH_SECONDS)
    if not any(each.windows for each in speeds.speeds):
        raise NetError(f"no window of net {facts.label} could be timed here; see that memory is free, and try again")
    return speeds


def _timed_calls(
    net: nn.Module,
    shape: Sequence[int],
    arithmetic: Arithmetic,
    device: str,
    clock: Callable[[], float],
    repeats: int = REPEATS,
) -> tuple[float, float]:
    """Return the time of the fastest call by `clock`, and the seconds of all of them; a slow one is not repeated."""
    import torch

    take_precision(arithmetic.precision)
    times: list[float] = []
    began = time.perf_counter()
    with torch.inference_mode(), autocast(device, arithmetic.precision):
        while len(times) <= repeats and time.perf_counter() - began < MOST_REPEATED:
            started = clock()
            call(net, torch.zeros(tuple(shape), device=device), channels_last=arithmetic.channels_last)
            times.append(clock() - started)
    return min(times[1:] or times), time.perf_counter() - began


def _gpu_clock() -> float:
    """Return the seconds once the GPU has done what it was given."""
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def arithmetics_here() -> list[Arithmetic]:
    """Return the arithmetics by which a net may be fast on this machine's processor."""
    return _arithmetics(("float32", "bfloat16") if has_bfloat16() else ("float32",))


def _arithmetics(precisions: Sequence[Precision]) -> list[Arithmetic]:
    return [Arithmetic(layout, precision) for precision in precisions for layout in LAYOUTS]


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
        except (RuntimeError, VolpipeError) as error:  # too large, or the net takes no such window
            log.debug("windows of %s could not be tried: %s", window, error)
            return
        spent, per_voxel = spent + total, seconds / math.prod(window)
        yield WindowSpeed(window=window, seconds=seconds)


def _sized_as(facts: NetFacts, num_voxels: int) -> Triple:
    """Return a window near to so many voxels, in whole strides, in the proportions of the net's own."""
    growth = (num_voxels / math.prod(facts.window)) ** (1 / 3)
    sizes = zip(facts.window, facts.stride, facts.fixed, facts.remainder, facts.margin, strict=True)
    return triple(
        only or rest + align_up(max(stride, 2 * margin + 1, round(growth * size)) - rest, stride)
        for size, stride, only, rest, margin in sizes
    )


def processor() -> str:
    """Return the name of this machine's processor, as the system gives it."""
    return _of_processor("model name") or platform.machine()


def has_bfloat16() -> bool:
    """Return whether this machine's processor multiplies in bfloat16; others convert it, which is slower."""
    flags = (_of_processor("flags") or _of_processor("Features")).split()  # of x86, of ARM
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


@cache
def _of_processor(what: str) -> str:
    """Return the value of `what` of the first processor in /proc/cpuinfo; "" where there is none."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), "")
    return ""


def difference_key(precision: Precision, normalise: Normalise, net: NetFacts, processor: str) -> str:
    """Return the key by which the difference of a net in `precision`, measured on a `processor` or GPU, is stored."""
    return f"{precision} {normalise} {net.weights_sha256} {net.identity.digest} on {processor}"


def _compared_window(net: NetFacts) -> tuple[int, int, int]:
    """Return the window (z, y, x): a core with the halo around it, or the only size that the net takes."""
    sizes = zip(net.fixed, net.stride, *around_core(net, net.halo), strict=True)
    return triple(only or align_up(CORE, stride) + before + after for only, stride, before, after in sizes)


def measure_difference(
    choice: NetChoice,
    normalise: Normalise,
    net: NetFacts,
    search_path: str = "",
    *,
    precision: Precision = "bfloat16",
    device: str = "cpu",
) -> PrecisionDifference:
    """Return how the output of the net, with its weights, differs in `precision`, over an invented volume of 8 bits."""
    import torch

    torch.backends.cudnn.deterministic = True  # as workers have it
    window = _compared_window(net)
    raw = SyntheticVolume(window).raw(Box.from_shape(window))
    affine = sampled_affine(normalise, raw[None])
    data = torch.from_numpy(affine.apply(np.repeat(raw[None, None], net.in_channels, axis=1))).to(device)
    module = build_net(choice, search_path).to(device)
    # What the net gives of the window that is as of the whole.
    sizes = zip(window, net.margin, net.scale, net.shrink, *around_core(net, net.halo), strict=True)
    core = tuple(slice((b - m) * s // u, (w - a - m) * s // u) for w, m, s, u, b, a in sizes)

    def output(precision: str) -> np.ndarray:
        take_precision(precision)
        with torch.inference_mode(), autocast(device, precision):
            result: np.ndarray = module(data).float().cpu().numpy()[0][:, *core]
        return result

    return difference(output("float32"), output(precision), net, normalise, affine)


def difference(
    exact: np.ndarray, other: np.ndarray, net: NetFacts, normalise: Normalise, affine: Affine
) -> PrecisionDifference:
    """Return how `other` (c, z, y, x), float32, differs from `exact`, whose range is above 0."""
    if not np.isfinite(other).all():
        return PrecisionDifference(normalise=normalise, relative=1.0)
    relative = float(np.abs(other - exact).max() / np.ptp(exact))
    if net.intensity == "raw":
        return PrecisionDifference(normalise=normalise, relative=relative)
    levels = np.abs(_in_8_bits(other, net, affine).astype(np.int16) - _in_8_bits(exact, net, affine))
    share = np.count_nonzero(levels) / levels.size
    return PrecisionDifference(normalise=normalise, relative=relative, levels=int(levels.max()), share=share)


def _in_8_bits(data: np.ndarray, net: NetFacts, affine: Affine) -> np.ndarray:
    """Return the output of a net as the 8 bits that a run would store."""
    dtype = np.dtype(np.uint8)
    return to_dtype(data * np.float32(unit_scale(dtype)) if net.intensity == "unit" else affine.invert(data), dtype)


def is_quick_to_compare(net: NetFacts, speeds: NetSpeeds) -> bool:
    """Return whether a window that is computed to compare precisions takes little."""
    float32 = speeds.of(FLOAT32)
    seconds = None if float32 is None else float32.seconds(math.prod(_compared_window(net)))
    return seconds is not None and seconds <= MEASURE_SECONDS


def speeds_here(choice: NetChoice, facts: NetFacts, search_path: str, *, gpu: str = "") -> NetSpeeds | None:
    """Return what windows of the net cost on a core of this machine, or on its `gpu`; None where that fails."""
    if not gpu:
        measured = measure_speeds(choice, facts, search_path, most_seconds=MEASURE_SECONDS)
        return measured if measured.speeds else None
    asked = {
        "choice": choice, "facts": facts, "gpu": gpu, "search_path": search_path,
        "most_seconds": MEASURE_SECONDS_ON_GPU,
    }  # fmt: skip
    return _in_own_process(measure_speeds_on_gpu, NetSpeeds, asked, MOST_WAIT + 8 * MEASURE_SECONDS_ON_GPU)


def difference_here(
    choice: NetChoice, normalise: Normalise, net: NetFacts, search_path: str, *, precision: Precision, device: str
) -> PrecisionDifference:
    """Return how the output of the net differs in `precision` on a `device` here; by its whole range if that fails."""
    asked = {
        "choice": choice, "normalise": normalise, "net": net, "search_path": search_path, "precision": precision,
        "device": device,
    }  # fmt: skip
    measured = _in_own_process(measure_difference, PrecisionDifference, asked, COMPARE_WAIT)
    return measured or PrecisionDifference(normalise=normalise, relative=1.0)


def _in_own_process(
    measure: Callable[..., M], kind: type[M], arguments: Mapping[str, object], most_seconds: float
) -> M | None:
    """Return what `measure` of this module returns, a `kind`; None where it fails or takes longer than `most_seconds`.

    It is done by a process that is none of the caller's program: one that this starts would run a script of the user's
    anew.
    """
    question = to_json([measure.__name__, arguments]).decode()
    try:
        done = subprocess.run(
            module_command("volpipe.estimation.measure"), input=question, env=environment(), text=True,
            capture_output=True, timeout=most_seconds, check=True,
        )  # fmt: skip
        return kind.model_validate_json(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        log.info("nets could not be measured: %s", error)
        return None


def _answer_question() -> None:
    """Answer the question of `_in_own_process`; a net may have printed what it likes."""
    name, arguments = json.loads(sys.stdin.read())
    measure = {each.__name__: each for each in (speeds_on_core, measure_speeds_on_gpu, measure_difference)}[name]
    sys.stdout.write("\n" + validate_call(measure)(**arguments).model_dump_json())


if __name__ == "__main__":
    _answer_question()
