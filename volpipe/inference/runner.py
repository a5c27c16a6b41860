"""The runner: the net on its device, loaded once per process, and the bus between its device and this machine's memory.

Where memory is too little, batches are halved; where one window is too much, it names one that would fit. Not here: the
choice of windows (windows), or memory that a plan knows without the net (memory, limits).
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from volpipe.blockwise import usage
from volpipe.blockwise.malloc import keep_freed_memory
from volpipe.errors import NetError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.inference.plan import Plan
from volpipe.nets.files import code_hash_of, short_hash
from volpipe.nets.identity import NetIdentity
from volpipe.nets.load import Built, build, check_identity, check_same_net, weights_digest
from volpipe.nets.net_geometry import is_shortage
from volpipe.nets.tta import mean_of_forms

if TYPE_CHECKING:
    import torch

LARGEST_BATCH = 64
# Voxels of the windows of a call that keep a GPU at work: four of 84³ are 1.07 to 1.16 times as fast as one by one,
# those of 148³ and more as fast alone (unet3d on an H100, 2026-11-26).
ENOUGH_VOXELS = 1 << 22
WHOLE_BYTES = 2 << 20  # of windows of whole numbers that go through a net on a CPU at once

log = logging.getLogger(__name__)
_counting = threading.Lock()


class Bus:
    """The way to a device and back, and the bytes that took it; on the CPU they stay where they are.

    A GPU copies on streams of its own, from and to pinned memory, while it computes; the calling thread waits.

    Attributes:
        up_bytes, down_bytes: that went to the device, and that came from there.
    """

    def __init__(self, device: str) -> None:
        self.device, self.up_bytes, self.down_bytes = device, 0, 0
        self._upward: torch.cuda.Stream | None = None
        self._downward: torch.cuda.Stream | None = None
        if self.is_gpu:
            import torch

            self._upward, self._downward = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    @property
    def is_gpu(self) -> bool:
        """Whether the device computes on its own: to ask for a value makes the caller wait, and then the device."""
        return self.device != "cpu"

    def up(self, array: np.ndarray) -> torch.Tensor:
        """Return `array`, of any type, on the device, where it is by then."""
        import torch

        native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
        host = torch.from_numpy(native if native.flags.writeable else native.copy())
        self.up_bytes += host.nbytes
        if self._upward is None:
            return host
        with torch.cuda.stream(self._upward):
            tensor = host.pin_memory().to(self.device, non_blocking=True)
        self._upward.synchronize()
        tensor.record_stream(torch.cuda.default_stream())  # which computes with it, so that its memory stays as long
        return tensor

    def down(self, make: Callable[[], torch.Tensor], ready: torch.cuda.Event | None = None) -> np.ndarray:
        """Return in this machine's memory what `make` gives on the device, once the event `ready` is over."""
        import torch

        with torch.inference_mode():
            if self._downward is None:
                host = make()
            else:
                with torch.cuda.stream(self._downward):
                    if ready is not None:
                        self._downward.wait_event(ready)
                    tensor = make().contiguous()
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                    host.copy_(tensor, non_blocking=True)
                self._downward.synchronize()
        self.down_bytes += host.nbytes
        return host.numpy()

    def mark(self) -> torch.cuda.Event | None:
        """Return the event for which `down` waits: all that this thread has asked of the device so far."""
        if not self.is_gpu:
            return None
        import torch

        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event


@dataclass
class Runner:
    """A net on its device, loaded once per process: windows in, outputs out.

    Attributes:
        device: "cpu" or "cuda".
        batch: windows per call.
        weights_sha256, code_sha256, identity: of the net that was loaded here.
    """

    plan: Plan
    device: str
    batch: int = 1
    weights_sha256: str = ""
    code_sha256: str = ""
    identity: NetIdentity = field(default_factory=NetIdentity)
    _net: Callable[..., torch.Tensor] | None = field(default=None, repr=False)
    _advice: str = ""
    _seconds: float = 0.0
    _is_counting: bool = False
    _spans: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=deque, repr=False)

    @cached_property
    def device_name(self) -> str:
        """The name of the GPU, or "cpu"."""
        import torch

        return torch.cuda.get_device_name() if self.device == "cuda" else self.device

    @classmethod
    def load(cls, plan: Plan, device: str = "") -> Runner:
        """Return the plan's net on `device`; where none is given, on the GPU if there is one, else on the CPU."""
        import torch

        is_function = bool(plan.net.dtype)  # on arrays of numpy
        device = device or ("cuda" if torch.cuda.is_available() and not is_function else "cpu")
        keep_freed_memory()  # also on a GPU: what comes back from there is a new array each time
        choice = plan.recipe.infer
        # The same sums on every device of a kind: TF32 only where it is asked for, no choice of algorithm by timing.
        take_precision(plan.precision)
        torch.backends.cudnn.deterministic = True
        take_threads(choice.threads)
        # oneDNN's order of sums depends on the window's shape.
        torch.backends.mkldnn.enabled = not choice.exact  # type: ignore[assignment]  # a descriptor
        net_choice, search_path = plan.recipe.net, plan.search_path
        # Windows that are tried where memory is short could make a net of volumes one of slices.
        built = build(net_choice, search_path, facts=plan.net)
        net, identity = built.net, _built_identity(built, plan)
        weights, code = weights_digest(net_choice, net, search_path), code_hash_of(net_choice, search_path)
        net = net.to(device)
        if plan.channels_last:
            net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # stubs lack 3d
        called = torch.compile(net) if choice.compile else net
        runner = cls(plan, device, weights_sha256=weights, code_sha256=code, identity=identity, _net=called)
        runner.batch = choice.batch if choice.batch != "auto" else runner._batch_that_fits()
        return runner

    def check(self) -> None:
        """Refuse to compute with another net than the plan's.

        Raises:
            NetError: with both hashes, and what to do.
        """
        check_same_net(self.plan.recipe.net, self.plan.net, self.weights_sha256)
        if self.code_sha256 != self.plan.code_sha256:
            raise NetError(
                f"the code of net {self.plan.net.label} is {short_hash(self.code_sha256)} on {socket.gethostname()}, "
                f"in the plan it is {short_hash(self.plan.code_sha256)}: it was edited after the run began, or "
                "differs on that machine; make it the same there, or start over with --fresh"
            )
        check_identity(self.plan.net.label, self.plan.net.identity, self.identity)

    @cached_property
    def bus(self) -> Bus:
        """The way to the net's device and back."""
        return Bus(self.device)

    def __call__(self, windows: np.ndarray) -> np.ndarray:
        """Return the net's output for `windows` (n, c, z, y, x), float32: (n, C, z', y', x'), float32; see `run`."""
        out = self.run(self.bus.up(windows))
        return self.bus.down(lambda: out, self.bus.mark())

    def run(self, windows: torch.Tensor) -> torch.Tensor:
        """Return the net's output for `windows` (n, c, z, y, x) on its device: (n, C, z', y', x'), float32, there.

        Whole numbers stay such. Batches are smaller from now on where they need more memory than there is.

        Raises:
            ValueError: the net's output has not the declared shape.
        """
        import torch

        while True:
            batch = self.batch
            try:
                outs = [self._compute(part, batch) for part in torch.split(windows, batch)]
                out = outs[0] if len(outs) == 1 else torch.cat(outs)
                break
            except Exception as error:
                if batch == 1 or not is_shortage(error):
                    raise
            self._halve(batch)
        expected = (len(windows), self.plan.net.out_channels, *self.plan.net.output_shape(windows.shape[2:]))
        if out.shape != expected:
            raise ValueError(f"net {self.plan.net.label} gave {tuple(out.shape)}, declared is {expected}")
        return out

    def _halve(self, batch: int) -> None:
        """Take half as many windows per call as `batch` from now on, or fewer where another thread did that too."""
        import torch

        self.batch = min(self.batch, batch // 2)
        log.warning(
            "%d windows of %s need more memory than %s has; from now on this worker computes %d at a time",
            batch, list(self.plan.window), self.device, self.batch,
        )  # fmt: skip
        if self.bus.is_gpu:
            torch.cuda.empty_cache()

    def _compute(self, windows: torch.Tensor, batch: int = 0) -> torch.Tensor:
        """Return the output of the net for `windows`, to which empty ones are added up to a whole `batch`.

        Libraries sum in another order for another batch size, so that a window's last bits would depend on its block.
        Whole numbers have no such bits.
        """
        import torch

        assert self._net is not None
        choice, num_windows = self.plan.recipe.infer, len(windows)
        as_they_are = self.plan.is_as_stored or not windows.is_floating_point()
        is_short = num_windows < batch and not as_they_are
        take_threads(choice.threads)
        with (
            self.computing(),
            torch.inference_mode(),
            autocast(self.device, self.plan.precision),
        ):
            if is_short:
                windows = torch.cat([windows, windows.new_zeros((batch - num_windows, *windows.shape[1:]))])
            if self.plan.channels_last:
                windows = windows.contiguous(memory_format=torch.channels_last_3d)
            if as_they_are:
                return self._net(windows)
            out = mean_of_forms(self._net, windows, choice.augment, self.plan.recipe.net.offsets).contiguous()
            return out[:num_windows] if is_short else out

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count the seconds that the device computes meanwhile, once; those of a GPU when they are over."""
        if self._is_counting:
            yield
            return
        self._is_counting = True
        try:
            if self.bus.is_gpu:
                import torch

                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                first.record()
                yield
                last.record()
                self._spans.append((first, last))
            else:
                started = time.perf_counter()
                yield
                self._seconds += time.perf_counter() - started
        finally:
            self._is_counting = False

    @property
    def seconds(self) -> float:
        """Time that the device spent computing so far."""
        with _counting:
            while self._spans and self._spans[0][1].query():  # type: ignore[no-untyped-call]
                first, last = self._spans.popleft()
                self._seconds += first.elapsed_time(last) / 1000
        return self._seconds

    def try_window(self, windows: np.ndarray) -> None:
        """Run the net over `windows` (n, c, z, y, x), float32, of any shape that it takes, and drop the output."""
        try:
            out = self._compute(self.bus.up(windows))
            self.bus.down(lambda: out.flatten()[:1], self.bus.mark())
        except Exception as error:
            raise self.explain(error) from error

    def _batch_that_fits(self) -> int:
        """Return the windows per call: on a GPU as many as fit and keep it at work; on a CPU one, or many small ones of
        whole numbers.

        More make no net faster there that computes much; one that computes little waits for Python between calls.
        """
        if self.device == "cpu":
            window_bytes = np.dtype(self.plan.source.dtype).itemsize * math.prod(self.plan.window)
            window_bytes *= self.plan.source.num_channels
            return max(1, min(LARGEST_BATCH, WHOLE_BYTES // window_bytes)) if self.plan.is_as_stored else 1
        enough = max(1, ENOUGH_VOXELS // math.prod(self.plan.window))
        most = min(LARGEST_BATCH, enough, self.plan.slab * math.prod(self.plan.lattice.places[1:]))
        try:
            size = largest_that_fits(lambda size: self._fits_memory(self.plan.window, size), most)
        except MemoryError as error:
            raise self.explain(error) from error
        self._spans.clear()
        self._seconds = 0.0
        return size

    def explain(self, error: Exception) -> Exception:
        """Return `error`; for too little memory, an error that names a window that would fit."""
        if not is_shortage(error):
            return error
        if not self._advice:  # it costs some windows
            self._advice = suggest_window(self.plan, self.batch, self.device, self._fits_memory)
        shortage = MemoryError(self._advice)
        shortage.__cause__ = error
        return shortage

    def _fits_memory(self, window: tuple[int, int, int], batch: int) -> bool:
        import torch

        try:
            self._compute(torch.zeros((batch, self.plan.source.num_channels, *window), device=self.device))
            if self.bus.is_gpu:
                torch.cuda.synchronize()
        except Exception as error:
            if not is_shortage(error):
                raise
            if self.bus.is_gpu:
                torch.cuda.empty_cache()
            return False
        return True


def take_precision(precision: str) -> None:
    """Let GPUs of this process multiply float32 as TF32 where `precision` is tf32, and not otherwise."""
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"


def autocast(device: str, precision: str) -> torch.autocast:
    """Return the context in which a net computes in `precision`: float32, unless that names a type of 16 bits."""
    import torch

    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(precision)
    return torch.autocast(device, dtype, enabled=dtype is not None)


def _built_identity(built: Built, plan: Plan) -> NetIdentity:
    """Return the identity of the net of `plan` as it was built here."""
    if not plan.net.dtype:
        return built.identified(plan.net)
    from volpipe.nets.functions import function_identity

    return function_identity(plan.recipe.net, plan.net, plan.source.given, plan.search_path)


def take_threads(num: int) -> None:
    """Let torch compute with `num` threads wherever the calling thread asks it to.

    The number is each thread's own. Setting it drops oneDNN's prepared kernels, so it is set only where it differs.
    """
    import torch

    if torch.get_num_threads() != num:
        torch.set_num_threads(num)


def largest_that_fits(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest power of two up to `most` that `fits`, tried upwards.

    Raises:
        MemoryError: not even one fits.
    """
    size = 1
    if not fits(size):
        raise MemoryError("not even one window fits the device; use a smaller windows.shape")
    while size * 2 <= most and fits(size * 2):
        size *= 2
    return size


_loaded: dict[str, Runner] = {}
_loading = threading.Lock()


def load_runner(plan: Plan) -> Runner:
    """Return the runner of `plan`, loaded at the first call in this process; one net is kept at a time."""
    with _loading:
        if plan.identity not in _loaded:
            _loaded.clear()
            _loaded[plan.identity] = Runner.load(plan)
            usage.count_device(_device)
        return _loaded[plan.identity]


def loaded_runner() -> Runner | None:
    """Return the runner that this process holds, if any."""
    return next(iter(_loaded.values()), None)


def _device() -> tuple[str, float]:
    """Return the device of the loaded net, "" without one, and the seconds that it has computed there."""
    runner = loaded_runner()
    return ("", 0.0) if runner is None else (runner.device_name, runner.seconds)


def suggest_window(plan: Plan, batch: int, device: str, fits: Callable[[Triple, int], bool]) -> str:
    """Return the remedy, a sentence, where `batch` windows of `plan` are too much for `device`.

    `fits` returns whether the net can run over so many windows of a shape.
    """
    number, need = ("one window", "needs") if batch == 1 else (f"{batch} windows", "need")
    problem = f"{number} of {list(plan.window)} {need} more memory than {device} has"
    if batch > 1 and fits(plan.window, 1):
        return f"{problem}, one fits; set infer.batch=auto, or to less than {batch}"
    smaller = next((window for window in smaller_windows(plan) if fits(window, 1)), None)
    if smaller is None:
        return f"{problem}, and so does the smallest window; use a smaller net, or a site with more memory"
    return (
        f"{problem}, {list(smaller)} fits; set windows.shape={list(smaller)} and windows.overlap={list(plan.overlap)}"
    )


def smaller_windows(plan: Plan) -> Iterator[Triple]:
    """Yield windows whose cores are a half, a quarter and so on of those of `plan`, in whole strides."""
    window, strides = plan.window, plan.net.stride
    while True:
        cores = (w - o for w, o in zip(window, plan.overlap, strict=True))
        sizes = zip(plan.overlap, cores, strides, strict=True)
        halved = (overlap + align_up(-(-core // 2), stride) for overlap, core, stride in sizes)
        taken = zip(halved, strides, plan.net.remainder, strict=True)
        smaller = triple(rest + align_up(size - rest, stride) for size, stride, rest in taken)
        if smaller == window:
            return
        window = smaller
        yield window
