"""The cost of the fingerprints that `--update` rests on: a run beside one without them, on a disk and in a bucket."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import DEFAULT_RECIPE, remove
from benchmarks.stores.bucket import NAME, served
from volpipe.apps.pool import on_site
from volpipe.blockwise.pool import WorkerPool
from volpipe.geometry.grid import Box
from volpipe.inference import windows
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import Reader
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

SETTINGS = (
    "net.name=identity", "tensors.mode=streamed", "windows.shape=[64,64,64]", "windows.overlap=32",
    "windows.block=[4,4,4]", "windows.blend=crop", "output.levels=0",
)  # fmt: skip
TURNS = 3  # of both sides


def _unmarked(reader: Reader, box: Box) -> tuple[np.ndarray, str]:
    """Return what `file_states.read_known` does, without a fingerprint."""
    return reader.read_mirrored(box), ""


def _run(pool: WorkerPool, location: str, out: Path) -> tuple[float, float]:
    """Return the processor time and the seconds of a run, from its plan to its complete output."""
    remove(out)
    began, started = time.process_time(), time.perf_counter()
    plan = prepare(location, load_recipe(DEFAULT_RECIPE, SETTINGS), out, Path.cwd())
    assert execute(plan, lambda folder: nullcontext(pool)).missing == []
    return time.process_time() - began, time.perf_counter() - started


def _compared(
    setting: Setting, location: str, repeats: int, requests: Callable[[], Counter[str]] = Counter
) -> Iterator[Outcome]:
    """Yield processor times with fingerprints by those without, in turn; threads of this process are the workers.

    Of each side the least of some runs counts: they take two seconds, and what is compared is a twentieth of it.
    """
    out = setting.scratch / "out.zarr"
    unmarked = mock.patch.object(windows, "read_known", _unmarked)
    ways: tuple[tuple[str, AbstractContextManager[object]], ...] = (("with", nullcontext()), ("without", unmarked))
    with on_site("threads")(setting.scratch / "parsl") as pool:
        _run(pool, location, out)  # imports, and files in memory
        for _ in range(repeats):
            runs: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}
            asked = dict[str, Counter[str]]()
            requests()
            for way, reading in ways * TURNS:
                with reading:
                    runs[way].append(_run(pool, location, out))
                asked[way] = requests()
            counts = {f"{method}, {way}": float(n) for way, each in asked.items()
                      for method, n in each.items() if method in ("GET", "HEAD")}  # fmt: skip
            (cpu, seconds), (plain_cpu, plain_seconds) = min(runs["with"]), min(runs["without"])
            sides = {"CPU s with": cpu, "CPU s without": plain_cpu, "s with": seconds, "s without": plain_seconds}
            yield Outcome(cpu / plain_cpu, sides | counts)


def on_disk(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Processor time with fingerprints by that without, of an N5 volume on this disk."""
    yield from _compared(setting, inputs.volume(setting, setting.cube(512)), repeats)


def in_bucket(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Processor time with fingerprints by that without, of an N5 volume in a bucket; requests are counted."""
    location = Path(inputs.volume(setting, setting.cube(256))).parent
    with served(location) as requests:
        yield from _compared(setting, f"s3://{NAME}/{location.name}/raw", repeats, requests)


ROWS = [
    Row(
        "fingerprints",
        "processor time of a run with fingerprints / without, N5",
        1.1,
        1.05,
        on_disk,
        why="512³ uint8, chunks 64³, identity, streamed blocks of 4³ windows of 64³; threads of one process, in turn",
    ),
    Row(
        "fingerprints-bucket",
        "processor time of a run with fingerprints / without, bucket",
        1.5,
        1.2,
        in_bucket,
        why="the same of 256³ in a bucket on loopback, served by another process",
    ),
]
