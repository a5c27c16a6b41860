"""Cost of windows: seconds and memory of a call of the net, each in a process of its own; and the fastest window.

Not here: what a whole run costs (estimate), or how large a halo must be (receptive_field).
"""

from __future__ import annotations

import contextlib
import itertools
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
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from volpipe.blockwise.malloc import keep_freed_memory, share_heap
from volpipe.blockwise.usage import peak_bytes
from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.inference.runner import autocast, is_shortage, take_precision
from volpipe.inference.tiling import aligned_halo, own_window
from volpipe.nets.facts import FLOAT32, Arithmetic, NetFacts, NetSpeeds, WindowSpeed, WindowSpeeds
from volpipe.nets.load import build_net
from volpipe.recipes.inference import Infer, NetChoice, Precision

if TYPE_CHECKING:
    import torch
    from torch import nn

GROWTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # of the core of the net's own window: shards hold whole cores
LAYOUTS = (False, True)  # channels first, channels last
GPU_BATCHES = (1, 2, 4, 8)
MEASURED_VOXELS = (84**3, 116**3)  # of windows by which the memory of a net is measured; it varies by a fifth
LONGEST_CALL = 20.0  # seconds; larger windows are not tried after one that took so long
REPEATS, MOST_REPEATED = 3, 10.0  # of a call that is timed, the fastest counts; no more after so many seconds
MOST_WAIT = 180.0  # seconds, for processes that load torch and the net
LEAST_VOXELS = 32**3  # smaller windows are no choice, and too short to be timed
FIXED_BYTES = 64 << 20  # that a net takes for any window (2026-11)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WindowCost:
    """One call of a net.

    Attributes:
        window: input voxels (z, y, x).
        kept: of them, those outside the halo.
        channels_last: the layout of tensors.
        seconds: of the call.
        num_bytes: highest memory of the process, or of the GPU where there is one.
    """

    window: Triple
    batch: int
    kept: int
    seconds: float
    num_bytes: int
    channels_last: bool = False

    @property
    def speed(self) -> float:
        """Input voxels outside the halo per second."""
        return self.kept * self.batch / self.seconds


def windows_to_try(facts: NetFacts, halo: Triple) -> list[Triple]:
    """Return windows (z, y, x) around the net's own, in whole strides, with a core inside `halo`.

    Along an axis of a fixed size they have that size.
    """
    windows = []
    for growth in GROWTHS:
        grown = []
        for size, stride, outside in zip(own_window(facts), facts.stride, halo, strict=True):
            edge = align_up(outside, stride)
            grown.append(align_up(max(round(growth * (size - 2 * edge)), stride), stride) + 2 * edge)
        windows.append(triple(only or size for only, size in zip(facts.fixed, grown, strict=True)))
    return list(dict.fromkeys(windows))


def measure_windows(
    choice: NetChoice, infer: Infer, facts: NetFacts, halo: Triple, search_path: str
) -> Iterator[WindowCost]:
    """Yield the cost of windows of ascending sizes, up to one that takes too long or too much memory."""

    def attempt(shape: Sequence[int], channels_last: bool) -> tuple[float, int] | None:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=keep_freed_memory) as pool:
            try:
                return pool.submit(_try, choice, infer, shape, channels_last, search_path).result()
            except BrokenProcessPool:  # killed for its memory
                return None

    return _costs(attempt, LAYOUTS if infer.channels_last == "auto" else (infer.channels_last,), facts, halo)


def measure_windows_here(
    choice: NetChoice, infer: Infer, facts: NetFacts, halo: Triple, search_path: str
) -> Iterator[WindowCost]:
    """Yield what `measure_windows` does, of a net that this process alone has, and whose memory it shares.

    Bytes are of the whole process, what it held before included; `held_memory` has that. A window for which the memory
    may not be enough is not tried: it would be the end of this process.
    """
    import torch

    per_voxel = 0.0  # bytes that the latest window took beyond what was held before

    def attempt(shape: Sequence[int], channels_last: bool) -> tuple[float, int] | None:
        nonlocal per_voxel
        if per_voxel * math.prod(shape) > free_memory():
            return None
        num_threads, held = torch.get_num_threads(), held_memory()
        try:
            _count_peak()
            seconds, num_bytes = _try(choice, infer, shape, channels_last, search_path)
        finally:
            torch.set_num_threads(num_threads)
        per_voxel = max(0, num_bytes - held) / math.prod(shape)
        return seconds, num_bytes

    layout = infer.channels_last is True  # its owner's net stays as it is, unless the recipe says otherwise
    return _costs(attempt, (layout,), facts, halo)


def _costs(
    attempt: Callable[[Sequence[int], bool], tuple[float, int] | None],
    layouts: Sequence[bool],
    facts: NetFacts,
    halo: Triple,
) -> Iterator[WindowCost]:
    """Yield the cost of windows, whose seconds and bytes `attempt` returns; None where memory is too little."""
    import torch

    batches = GPU_BATCHES if torch.cuda.is_available() else (1,)
    for window in windows_to_try(facts, halo):
        kept = 1
        for size, h, stride in zip(window, halo, facts.stride, strict=True):
            kept *= size - 2 * align_up(h, stride)
        for channels_last, batch in itertools.product(layouts, batches):
            try:
                result = attempt((batch, facts.in_channels, *window), channels_last)
            except Exception as error:
                if is_shortage(error):
                    return
                raise
            if result is None:
                return
            seconds, num_bytes = result
            yield WindowCost(window, batch, kept, seconds, num_bytes, channels_last)
            if seconds > LONGEST_CALL:
                return


def free_memory() -> int:
    """Return the memory, in bytes, that a window may take here: of the GPU, or of the machine."""
    import psutil
    import torch

    return int(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else psutil.virtual_memory().available)


def held_memory() -> int:
    """Return the memory, in bytes, that this process holds already where `free_memory` counts."""
    import psutil
    import torch

    return int(torch.cuda.memory_allocated() if torch.cuda.is_available() else psutil.Process().memory_info().rss)


def _count_peak() -> None:
    """Let the highest memory count from now.

    Raises:
        VolpipeError: the kernel does not let a process do so.
    """
    if not count_peak_anew():
        raise VolpipeError(
            "memory cannot be measured here: the kernel does not let a process count its highest memory anew "
            "(/proc/self/clear_refs); do it on another machine"
        )


def count_peak_anew() -> bool:
    """Let the highest memory of this process, and of its GPU, count from now; return whether that can be."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # the kernel does not let a process do so
        return False
    return True


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

    Memory is the device's. TF32 is float32 here: it makes all windows faster.
    """
    import torch

    torch.backends.cudnn.deterministic = True  # as workers have it
    take_precision("float32")
    windows = windows_to_try(facts, aligned_halo(facts))
    measured = []
    for arithmetic in _arithmetics(has_half=True):
        net, per_voxel = _laid_out(choice, search_path, arithmetic.channels_last).to(device), [0.0]

        def attempt(window: Triple) -> tuple[float, float]:
            shape = (1, facts.in_channels, *window)
            seconds, total, num_bytes = _time_on_gpu(net, shape, arithmetic, device)  # noqa: B023  # called before the next
            per_voxel.append(num_bytes / math.prod(window))  # noqa: B023
            return seconds, total

        times = tuple(_timed(windows, attempt, most_seconds))
        measured.append(WindowSpeeds(arithmetic=arithmetic, bytes_per_voxel=max(per_voxel), windows=times))
    return NetSpeeds(processor=gpu, speeds=tuple(measured))


def _time_on_gpu(net: nn.Module, shape: Sequence[int], arithmetic: Arithmetic, device: str) -> tuple[float, float, int]:
    """Return the seconds of the fastest call, those of all of them, and the bytes that they took beyond the net."""
    import torch

    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    began = time.perf_counter()
    with torch.inference_mode(), autocast(device, arithmetic.precision):
        while len(times) <= REPEATS and time.perf_counter() - began < MOST_REPEATED:
            started = time.perf_counter()
            _call(net, torch.zeros(tuple(shape), device=device), channels_last=arithmetic.channels_last)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
    total = time.perf_counter() - began
    return min(times[1:] or times), total, torch.cuda.max_memory_allocated() - held


def arithmetics_here() -> list[Arithmetic]:
    """Return the arithmetics by which a net may be fast on this machine's processor."""
    return _arithmetics(has_half=has_bfloat16())


def _arithmetics(*, has_half: bool) -> list[Arithmetic]:
    precisions: tuple[Precision, ...] = ("float32", "bfloat16") if has_half else ("float32",)
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
    answer = ask("volpipe.estimation.window_search", question, MOST_WAIT + 8 * most_seconds)
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
            _call(net, torch.zeros(tuple(shape)), channels_last=arithmetic.channels_last)
            times.append(time.process_time() - started)
    return min(times[1:] or times), time.perf_counter() - began


@cache
def _laid_out_once(choice: str, search_path: str, channels_last: bool) -> nn.Module:
    """Return the net of a `choice` as JSON as `_laid_out` does, built once in a process."""
    return _laid_out(NetChoice.model_validate_json(choice), search_path, channels_last)


def _laid_out(choice: NetChoice, search_path: str, channels_last: bool) -> nn.Module:
    """Return the net with its weights in a layout."""
    import torch

    net = build_net(choice, search_path)
    if channels_last:
        net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # stubs lack 3d
    return net


def _call(net: nn.Module, windows: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """Return the output of the net for `windows`, as a worker has it computed."""
    import torch

    if channels_last:
        windows = windows.contiguous(memory_format=torch.channels_last_3d)
    output: torch.Tensor = net(windows).contiguous()
    return output


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
        sizes = zip(facts.window, facts.stride, facts.fixed, strict=True)
        windows.append(triple(only or align_up(max(s, round(growth * w)), s) for w, s, only in sizes))
    return list(dict.fromkeys(windows))


def _net_bytes(choice: NetChoice, shape: Sequence[int], arithmetic: Arithmetic, search_path: str) -> int:
    """Return the bytes that calls of the net add to a process that keeps freed memory, as workers do."""
    import torch

    torch.set_num_threads(2)
    share_heap()
    keep_freed_memory()
    net = _laid_out(choice, search_path, arithmetic.channels_last)
    _count_peak()
    before = peak_bytes()
    with torch.inference_mode(), autocast("cpu", arithmetic.precision):
        for _ in range(2):
            _call(net, torch.zeros(tuple(shape)), channels_last=arithmetic.channels_last)
    return peak_bytes() - before


def fastest(costs: Iterable[WindowCost], most_bytes: int) -> WindowCost | None:
    """Return the fastest of `costs` that take no more than `most_bytes`; of equals, the smallest window."""
    fitting = [cost for cost in costs if cost.num_bytes <= most_bytes]
    return max(fitting, key=lambda cost: cost.speed, default=None)


def _try(
    choice: NetChoice, infer: Infer, shape: Sequence[int], channels_last: bool, search_path: str
) -> tuple[float, int]:
    """Return seconds and highest memory of a call with windows of `shape`; the first call is not counted."""
    import torch

    torch.set_num_threads(infer.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = _laid_out(choice, search_path, channels_last).to(device)
    windows = torch.zeros(tuple(shape), device=device)
    take_precision(infer.precision)
    with torch.inference_mode(), autocast(device, infer.precision):
        for _ in range(2):
            started = time.perf_counter()
            _call(net, windows, channels_last=channels_last).float().cpu()
            seconds = time.perf_counter() - started
            if seconds > LONGEST_CALL:
                break
    return seconds, torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes()


if __name__ == "__main__":
    _answer()
