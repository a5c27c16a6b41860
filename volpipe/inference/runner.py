"""The runner: the net on its device, loaded once per process; where memory is too little, a window that would fit.

Not here: the choice of windows (windows), or memory that a plan knows without the net (memory, limits).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from volpipe.blockwise import usage
from volpipe.blockwise.malloc import keep_freed_memory
from volpipe.errors import NetError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.inference.plan import Plan
from volpipe.nets.files import code_hash, short_hash
from volpipe.nets.load import build_net, check_same_net, weights_digest
from volpipe.nets.tta import mean_of_forms

if TYPE_CHECKING:
    import torch

LARGEST_BATCH = 64


@dataclass
class Runner:
    """A net on its device, loaded once per process: windows in, outputs out, both as float32 arrays.

    Attributes:
        device: "cpu" or "cuda".
        batch: windows per call.
        seconds: time spent computing so far.
        weights_sha256, code_sha256: of the net that was loaded here.
    """

    plan: Plan
    device: str
    batch: int = 1
    seconds: float = 0.0
    weights_sha256: str = ""
    code_sha256: str = ""
    _net: Callable[..., torch.Tensor] | None = field(default=None, repr=False)
    _advice: str = ""

    @property
    def device_name(self) -> str:
        """The name of the GPU, or "cpu"."""
        import torch

        return torch.cuda.get_device_name() if self.device == "cuda" else self.device

    @classmethod
    def load(cls, plan: Plan, device: str = "") -> Runner:
        """Return the plan's net on `device`; where none is given, on the GPU if there is one, else on the CPU."""
        import torch

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        keep_freed_memory()  # also on a GPU: each call's output comes back as a new array of the whole batch
        # The same sums on every device of a kind: no TF32, no choice of algorithm by timing.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True
        choice = plan.recipe.infer
        take_threads(choice.threads)
        # oneDNN's order of sums depends on the window's shape.
        torch.backends.mkldnn.enabled = not choice.exact  # type: ignore[assignment]  # a descriptor
        net_choice, search_path = plan.recipe.net, plan.search_path
        net = build_net(net_choice, search_path)
        weights, code = weights_digest(net_choice, net, search_path), code_hash(net_choice.name, search_path)
        net = net.to(device)
        if choice.channels_last:
            net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # stubs lack 3d
        called = torch.compile(net) if choice.compile else net
        runner = cls(plan, device, weights_sha256=weights, code_sha256=code, _net=called)
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
                "differs on that machine; restore it, or start over with --fresh"
            )

    def __call__(self, windows: np.ndarray) -> np.ndarray:
        """Return the net's output for `windows` (n, c, z, y, x): (n, C, z', y', x'), float32.

        Raises:
            ValueError: the net's output has not the declared shape.
        """
        started = time.perf_counter()
        out = self._run(self._filled(windows))[: len(windows)]
        self.seconds += time.perf_counter() - started
        sizes = (w * s for w, s in zip(windows.shape[2:], self.plan.net.scale, strict=True))
        expected = (len(windows), self.plan.net.out_channels, *sizes)
        if out.shape != expected:
            raise ValueError(f"net {self.plan.net.label} gave {out.shape}, declared is {expected}")
        return out

    def _run(self, windows: np.ndarray) -> np.ndarray:
        import torch

        assert self._net is not None
        choice = self.plan.recipe.infer
        take_threads(choice.threads)
        with (
            torch.inference_mode(),
            torch.autocast(self.device, getattr(torch, choice.precision), enabled=choice.precision != "float32"),
        ):
            data = torch.from_numpy(windows)
            if self.device == "cuda":
                data = data.pin_memory().to(self.device, non_blocking=True)
            if choice.channels_last:
                data = data.contiguous(memory_format=torch.channels_last_3d)
            out: np.ndarray = mean_of_forms(self._net, data, choice.augment).contiguous().cpu().numpy()
        return out

    def try_window(self, windows: np.ndarray) -> None:
        """Run the net over `windows` (n, c, z, y, x), float32, of any shape that it takes, and drop the output."""
        try:
            self._run(windows)
        except Exception as error:
            raise self.explain(error) from error

    def _filled(self, windows: np.ndarray) -> np.ndarray:
        """Return `windows` with empty ones added up to a whole batch.

        Libraries sum in another order for another batch size, so that a window's last bits would depend on its block.
        """
        missing = self.batch - len(windows)
        if missing <= 0:
            return windows
        return np.concatenate([windows, np.zeros((missing, *windows.shape[1:]), np.float32)])

    def _batch_that_fits(self) -> int:
        """Return the windows per call: one on a CPU, where more are no faster, else the most that fit its memory."""
        if self.device == "cpu":
            return 1
        import torch

        shape = (self.plan.source.num_channels, *self.plan.window)

        def fits(size: int) -> bool:
            try:
                self(np.zeros((size, *shape), np.float32))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                return False
            return True

        try:
            size = largest_that_fits(fits, min(LARGEST_BATCH, self.plan.lattice.windows_per_block))
        except MemoryError as error:
            raise self.explain(error) from error
        self.seconds = 0.0
        return size

    def explain(self, error: Exception) -> Exception:
        """Return `error`; for too little memory, an error that names a window that would fit."""
        if not is_shortage(error):
            return error
        if not self._advice:  # it costs some windows
            self._advice = suggest_window(self.plan, self.batch, self.device, self._fits)
        shortage = MemoryError(self._advice)
        shortage.__cause__ = error
        return shortage

    def _fits(self, window: tuple[int, int, int], batch: int) -> bool:
        import torch

        try:
            self._run(np.zeros((batch, self.plan.source.num_channels, *window), np.float32))
        except Exception as error:
            if not is_shortage(error):
                raise
            if self.device == "cuda":
                torch.cuda.empty_cache()
            return False
        return True


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


def is_shortage(error: BaseException) -> bool:
    """Return whether `error` means too little memory, of the machine or of its GPU."""
    import torch

    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch has no type for it
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def suggest_window(plan: Plan, batch: int, device: str, fits: Callable[[Triple, int], bool]) -> str:
    """Return the remedy, a sentence, where `batch` windows of `plan` are too much for `device`.

    `fits` returns whether the net can run over so many windows of a shape.
    """
    number = "one window" if batch == 1 else f"{batch} windows"
    problem = f"{number} of {list(plan.window)} need more memory than {device} has"
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
        smaller = triple(overlap + align_up(-(-core // 2), stride) for overlap, core, stride in sizes)
        if smaller == window:
            return
        window = smaller
        yield window
