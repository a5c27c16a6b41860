"""Cost of windows: seconds and memory of a call of the net, each in a process of its own; and the fastest window.

Not here: what windows cost by each arithmetic, by which plans choose (measure), what a whole run costs (estimate),
or how large a halo must be (receptive_field).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from volpipe.blockwise.malloc import keep_freed_memory
from volpipe.blockwise.usage import peak_bytes
from volpipe.errors import VolpipeError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.inference.runner import autocast, take_precision
from volpipe.inference.tiling import around_core, own_window
from volpipe.nets.facts import NetFacts
from volpipe.nets.load import build_net
from volpipe.nets.net_geometry import is_shortage, refusal
from volpipe.process import starting_processes
from volpipe.recipes.inference import Infer, NetChoice

if TYPE_CHECKING:
    import torch
    from torch import nn

GROWTHS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)  # of the core of the net's own window: shards hold whole cores
LARGEST_ON_GPU = 4.0  # of these, on a GPU, where larger windows are as fast a voxel and compute less halo
LAYOUTS = (False, True)  # channels first, channels last
GPU_BATCHES = (1, 2, 4, 8)
LONGEST_CALL = 20.0  # seconds; larger windows are not tried after one that took so long


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


def windows_to_try(facts: NetFacts, halo: Triple, *, on_gpu: bool = False) -> list[Triple]:
    """Return windows (z, y, x) around the net's own, in whole strides, with a core inside `halo`.

    Along an axis of a fixed size they have that size.
    """
    windows = []
    around = [sum(sides) for sides in zip(*around_core(facts, halo), strict=True)]
    for growth in (*GROWTHS, LARGEST_ON_GPU) if on_gpu else GROWTHS:
        grown = [
            align_up(max(round(growth * (size - outside)), stride), stride) + outside
            for size, stride, outside in zip(own_window(facts), facts.stride, around, strict=True)
        ]
        least = [align_up(max(0, n - m), s) + m for n, m, s in zip(facts.least, around, facts.stride, strict=True)]
        windows.append(triple(only or max(sizes) for only, *sizes in zip(facts.fixed, grown, least, strict=True)))
    return list(dict.fromkeys(windows))


def measure_windows(
    choice: NetChoice, infer: Infer, facts: NetFacts, halo: Triple, search_path: str
) -> Iterator[WindowCost]:
    """Yield the cost of windows of ascending sizes, up to one that takes too long or too much memory."""

    def attempt(shape: Sequence[int], channels_last: bool) -> tuple[float, int] | None:
        with (
            starting_processes(),
            ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=keep_freed_memory) as pool,
        ):
            try:
                return pool.submit(_time_call, choice, infer, shape, channels_last, search_path).result()
            except BrokenProcessPool:  # killed for its memory
                return None

    return _costs(attempt, LAYOUTS if infer.channels_last == "auto" else (infer.channels_last,), facts, halo)


def measure_windows_here(
    choice: NetChoice, infer: Infer, facts: NetFacts, halo: Triple, search_path: str
) -> Iterator[WindowCost]:
    """Yield the cost of windows as `measure_windows` does, of a net that lives in this process alone.

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
            count_peak()
            seconds, num_bytes = _time_call(choice, infer, shape, channels_last, search_path)
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

    on_gpu = torch.cuda.is_available()
    batches = GPU_BATCHES if on_gpu else (1,)
    for window in windows_to_try(facts, halo, on_gpu=on_gpu):
        kept = math.prod(size - sum(sides) for size, *sides in zip(window, *around_core(facts, halo), strict=True))
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


def fastest(costs: Iterable[WindowCost], most_bytes: int) -> WindowCost | None:
    """Return the fastest of `costs` that take no more than `most_bytes`; of equals, the smallest window."""
    fitting = [cost for cost in costs if cost.num_bytes <= most_bytes]
    return max(fitting, key=lambda cost: cost.speed, default=None)


def _time_call(
    choice: NetChoice, infer: Infer, shape: Sequence[int], channels_last: bool, search_path: str
) -> tuple[float, int]:
    """Return seconds and highest memory of a call with windows of `shape`; the first call is not counted."""
    import torch

    torch.set_num_threads(infer.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = laid_out(choice, search_path, channels_last).to(device)
    windows = torch.zeros(tuple(shape), device=device)
    take_precision(infer.precision)
    with torch.inference_mode(), autocast(device, infer.precision):
        for _ in range(2):
            started = time.perf_counter()
            call(net, windows, channels_last=channels_last).float().cpu()
            seconds = time.perf_counter() - started
            if seconds > LONGEST_CALL:
                break
    return seconds, torch.cuda.max_memory_allocated() if device == "cuda" else peak_bytes()


def laid_out(choice: NetChoice, search_path: str, channels_last: bool) -> nn.Module:
    """Return the net with its weights in a layout."""
    import torch

    net = build_net(choice, search_path)
    if channels_last:
        net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # stubs lack 3d
    return net


def call(net: nn.Module, windows: torch.Tensor, *, channels_last: bool) -> torch.Tensor:
    """Return the output of the net for `windows`, as a worker has it computed."""
    import torch

    if channels_last:
        windows = windows.contiguous(memory_format=torch.channels_last_3d)
    try:
        output: torch.Tensor = net(windows).contiguous()
    except VolpipeError:
        raise
    except Exception as error:  # whatever the net's code makes of such a window
        if is_shortage(error):
            raise
        raise refusal(windows, error) from error
    return output


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


def count_peak() -> None:
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
