"""Runs of a net whose windows disagree, and what they must compute, found window by window."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from inline import Inline

from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume
from volpipe.workflow.driver import Report
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

# Windows disagree: what a voxel gets depends on its place in each window that it is in. Every call is noted.
NET = """
import multiprocessing, pathlib, threading, torch
def is_task(x):  # else a plan tries the net; or a worker, with fractions, to tell whether it is the plan's
    is_driver = threading.current_thread() is threading.main_thread() and multiprocessing.parent_process() is None
    return not is_driver and bool((x == x.round()).all())
class Ramp(torch.nn.Module):
    volpipe = dict(stride=(1, 1, 1), halo=(0, 0, 0))  # it sees one voxel, though by its place
    def __init__(self, scale, calls):
        super().__init__()
        self.scale, self.calls = tuple(scale), calls
    def forward(self, x):
        if self.calls and is_task(x):
            with pathlib.Path(self.calls).open("a") as file:
                file.write("called\\n" * len(x))
        for axis, factor in enumerate(self.scale):
            x = x.repeat_interleave(factor, 2 + axis)
        z, y, x_ = (torch.arange(n, device=x.device) for n in x.shape[2:])
        return x * (1 + 0.37 * z[:, None, None] + 0.11 * y[:, None] * y[:, None] + 0.053 * x_) + 1000
def ramp(scale=(1, 1, 1), calls=""):
    return Ramp(scale, calls)
"""
RAW = (
    "net.name=net.py:ramp", "net.accept_tile_variance=true", "normalise.method=none", "output.dtype=float32",
    "output.intensity=raw",
)  # fmt: skip


@dataclass
class Bench:
    """A volume and a net in `folder`, and runs over them."""

    folder: Path
    division: list[str]
    scale: tuple[int, ...] = (1, 1, 1)
    num_runs: int = 0

    def __post_init__(self) -> None:
        (self.folder / "net.py").write_text(NET)

    def plan(self, *more: str) -> Plan:
        self.num_runs += 1
        scale = list(self.scale)
        chosen = [
            *RAW,
            "infer.batch=1",
            f"net.scale={scale}",
            f"net.options={{scale={scale},calls='{self.calls}'}}",
            *self.division,
        ]
        recipe = load_recipe(None, [*chosen, *more])
        return prepare(str(self.folder / "in.n5"), recipe, self.folder / f"{self.num_runs}.zarr", self.folder)

    def run(self, *more: str, seed: int = 0) -> Plan:
        plan = self.plan(*more)
        ran(plan, seed)
        return plan

    @property
    def calls(self) -> Path:
        return self.folder / f"calls.{self.num_runs}"

    @property
    def num_calls(self) -> int:
        return len(self.calls.read_text().splitlines()) if self.calls.exists() else 0


def ran(plan: Plan, seed: int = 0) -> Report:
    report = execute(plan, Inline(seed, 2).start)
    assert report.missing == []
    return report


def result(plan: Plan, level: int = 0) -> np.ndarray:
    return open_volume(plan.out, level=level).open()[...]


def windows_that_meet(plan: Plan, wanted: np.ndarray) -> int:
    """Return how many windows add to a voxel of the volume (z, y, x) that is `wanted`, window by window."""
    sides = []
    for size, window, overlap in zip(plan.source.shape, plan.window, plan.overlap, strict=True):
        stride, before = window - overlap, overlap // 2
        own = (0, stride) if plan.recipe.windows.blend == "crop" else (-before, window - before)
        starts = range(0, size, stride)
        sides.append([slice(max(0, a + own[0]), min(size, a + own[1])) for a in starts])
    return sum(bool(wanted[window].any()) for window in itertools.product(*sides))
