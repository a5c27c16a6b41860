"""Segmentations in the process of a test, by workers that end in any order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from inline import Stopped, perform
from scipy import ndimage

from volpipe.blockwise.journal import read_records
from volpipe.errors import WorkerLost
from volpipe.geometry.affinities import affinities
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.runs.options import RunOptions
from volpipe.segmentation.driver import SegmentationResult, plan_segmentation, segment
from volpipe.segmentation.tasks import RESULTS
from volpipe.volumes.volume import open_volume


class Crowd:
    """Workers for tests, threads of this process; after `most` units the driver is interrupted.

    Attributes:
        tasks: app and units of each that was sent, in this order.
    """

    def __init__(self, slots: int = 1, most: int | None = None, lost: int = 0) -> None:
        self.slots = {"cpu": slots, "gpu": slots}
        self.worker_bytes: int | None = None
        self.tasks: list[tuple[str, list[int]]] = []
        self._most, self._lost = most, lost

    @property
    def num_sent(self) -> int:
        """Units that were sent."""
        return sum(len(units) for _, units in self.tasks)

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        if self._most is not None and self.num_sent >= self._most:
            raise Stopped
        self.tasks.append((app, arguments[1]))
        if self._lost:
            self._lost -= 1
            future: Future[Any] = Future()
            future.set_exception(WorkerLost("killed"))
            return future
        return self._pool.submit(perform, app, *arguments)

    @contextmanager
    def start(self, folder: Path) -> Iterator[Crowd]:
        with ThreadPoolExecutor(self.slots["cpu"]) as self._pool:
            yield self


def recipe(block: Sequence[int], kind: str = "affinities", **objects: Any) -> SegmentRecipe:
    return SegmentRecipe.model_validate(
        {"input": {"kind": kind}, "objects": objects, "output": {"block": block, "chunk": (2, 2, 2)}}
    )


def led_recipe(block: Sequence[int], kind: str, stitch: float = 0, **rules: Any) -> SegmentRecipe:
    """Return the recipe of a `kind` whose voxels lead to their object, by its own `rules`."""
    output = {"block": block, "chunk": (2, 2, 2)}
    tree = {"input": {"kind": kind}, "objects": {"stitch": stitch}, kind: rules, "output": output}
    return SegmentRecipe.model_validate(tree)


def random_leads(rng: np.random.Generator, kind: str, shape: Sequence[int], axes: int = 3) -> np.ndarray:
    """Return channels (c, z, y, x), float32, of a `kind` that lead anywhere; of few heights, so that many are equal."""
    leads = rng.normal(0, 4, (axes, *shape))
    if kind == "flows":
        smooth = [np.stack([ndimage.gaussian_filter(lead, 1.5) for lead in 8 * leads])]
        return np.concatenate([*smooth, rng.normal(0.5, 1, (1, *shape))]).astype(np.float32)
    heat = rng.choice([0.0, 0.2, 0.4, 0.6], (1, *shape), p=[0.7, 0.1, 0.1, 0.1])
    return np.concatenate([rng.random((1, *shape)), heat, leads]).astype(np.float32)


def labelled(
    source: Path, out: Path, chosen: SegmentRecipe, workers: Crowd | None = None, **options: Any
) -> tuple[np.ndarray, SegmentationResult]:
    """Return the labels (z, y, x) that are made of `source`, and how that ended."""
    plan = plan_segmentation(str(source), chosen, out, out.parent)
    made = segment(plan, (workers or Crowd()).start, RunOptions(**options))
    found = open_volume(out)
    return np.asarray(found.open().read_raw(...)), made


def num_noted(out: Path, stopped: Crowd) -> int:
    """Return how many units are noted of the labels `out`, of all that `stopped` had done; four of it were under way.

    A unit counts each time that it is noted.
    """
    noted = sum(
        len(record.done) for record in read_records(out.with_name(f"{out.name}.run") / "journal.jsonl", RESULTS)
    )
    assert sum(len(units) for _, units in stopped.tasks[:-4]) <= noted <= stopped.num_sent
    return noted


def tree(folder: Path) -> dict[str, bytes]:
    """Return what is in `folder`, but for when it was made."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): p.read_bytes() for p in files if p.relative_to(folder).parts[0] != "run"}


def blobs(shape: tuple[int, int, int], seed: int = 0) -> np.ndarray:
    """Return labels (z, y, x) of cells around random points, each voxel in the cell of the nearest."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(0, shape, (12, 3))
    grid = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1)
    return 1 + np.linalg.norm(grid[..., None, :] - points, axis=-1).argmin(-1)


def noisy(labels: np.ndarray, strength: float, seed: int = 1) -> np.ndarray:
    """Return affinities of `labels`, uint8, with noise of so much of the full range."""
    near, _ = affinities(labels)
    data = near + np.random.default_rng(seed).normal(0, strength, near.shape)
    return np.rint(255 * data.clip(0, 1)).astype(np.uint8)
