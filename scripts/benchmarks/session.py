"""`volpipe run`, in two ways: on workers that are up already, or as the command that a user gives.

Not here: what it is compared with. Starting workers has a row of its own (start); every other time is taken on
workers that have loaded torch, as the other side has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from benchmarks import inputs, report
from benchmarks.row import Setting
from volpipe.apps.pool import on_site
from volpipe.blockwise.pool import WorkerPool
from volpipe.errors import VolpipeError
from volpipe.recipes.inference import load_recipe
from volpipe.stages.sizing import UNSIZED, Sizing
from volpipe.volumes.storage.paths import delete
from volpipe.workflow.driver import Report
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_RECIPE = ROOT / "configs" / "default.toml"
IDENTITY = ("net.name=identity", "output.levels=0")


@dataclass
class Session:
    """Workers that are up, and a folder for outputs."""

    executors: WorkerPool
    folder: Path
    report: Report | None = None

    @property
    def sizing(self) -> Sizing:
        """By what a plan takes its sizes: on a GPU as for a user, on cores the net's own."""
        return Sizing(self.executors.capacity) if report.gpu() else UNSIZED

    def run(
        self, location: str, *settings: str, sizing: Sizing = UNSIZED, recipe: Path | None = DEFAULT_RECIPE
    ) -> float:
        """Return the seconds that a run of `recipe` with `settings` takes, from plan to complete output."""
        out = self.folder / "out.zarr"
        remove(out)
        started = time.perf_counter()
        plan = prepare(location, load_recipe(recipe, settings), out, Path.cwd(), sizing)
        self.report = execute(plan, lambda folder: nullcontext(self.executors))
        seconds = time.perf_counter() - started
        if self.report.missing:
            raise VolpipeError(self.report.missing[0].reason)
        return seconds


@contextmanager
def session(setting: Setting) -> Iterator[Session]:
    """Start this machine's workers, one for each GPU where there are some, and let all of them load torch."""
    with on_site("local_gpu" if report.gpu() else "local")(setting.scratch / "parsl") as executors:
        started = Session(executors, setting.scratch)
        started.run(inputs.volume(setting, (128, 128, 128)), *IDENTITY, "windows.shape=[64,64,64]")
        yield started


def command(location: str, out: Path, settings: Sequence[str]) -> str:
    """Return what `volpipe run` prints, given as a command in a process of its own.

    Raises:
        VolpipeError: it ended with another code than 0.
    """
    remove(out)
    options = [part for setting in settings for part in ("--set", setting)]
    ended = subprocess.run(
        [sys.executable, "-m", "volpipe", "run", "--out", str(out), *options, location],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    if ended.returncode:
        raise VolpipeError(f"volpipe run ended with {ended.returncode}: {ended.stderr}")
    return ended.stdout


def environment() -> dict[str, str]:
    """Return this process's environment, in which volpipe and the bench can be imported."""
    paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def in_process(module: str, *arguments: object) -> dict[str, float]:
    """Return what `module` of the bench prints as JSON in its last line, in a process of its own.

    Raises:
        VolpipeError: it failed.
    """
    command = [sys.executable, "-m", module, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if ended.returncode:
        raise VolpipeError(ended.stderr)
    result: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return result


def remove(out: Path) -> None:
    """Delete an output and its run, if they are there."""
    for path in (out, run_folder(out)):
        if path.exists():
            delete(path)


def run_folder(out: Path) -> Path:
    return out.with_name(f"{out.name}.run")
