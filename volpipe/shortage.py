"""Too little memory for the net: told from other errors, and answered with the window that would fit.

Not here: memory that a plan can know without the net (estimate, limits).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from volpipe.grid import align_up
from volpipe.plan import Plan

Triple = tuple[int, int, int]


def is_shortage(error: BaseException) -> bool:
    """Return whether `error` says that memory, of the machine or of its GPU, was not enough."""
    import torch

    on_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch has no type for it
    return on_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def advice(plan: Plan, batch: int, device: str, fits: Callable[[Triple, int], bool]) -> str:
    """Return a sentence on what to change where `batch` windows of `plan` are too much for `device`.

    Args:
        fits: tells whether the net can be run over so many windows of a shape.
    """
    number = "one window" if batch == 1 else f"{batch} windows"
    problem = f"{number} of {list(plan.window)} need more memory than {device} has"
    if batch > 1 and fits(plan.window, 1):
        return f"{problem}, one fits; set infer.batch=auto, or to less than {batch}"
    found = next((window for window in smaller_windows(plan) if fits(window, 1)), None)
    if found is None:
        return f"{problem}, and so does the smallest window; use a smaller net, or a site with more memory"
    return f"{problem}, {list(found)} fits; set windows.shape={list(found)} and windows.overlap={list(plan.overlap)}"


def smaller_windows(plan: Plan) -> Iterator[Triple]:
    """Yield windows whose cores are a half, a quarter and so on of those of `plan`, in whole strides."""
    window, strides = plan.window, plan.net.stride
    while True:
        cores = (w - o for w, o in zip(window, plan.overlap, strict=True))
        sizes = zip(plan.overlap, cores, strides, strict=True)
        z, y, x = (overlap + align_up(-(-core // 2), stride) for overlap, core, stride in sizes)
        if (z, y, x) == window:
            return
        window = (z, y, x)
        yield window
