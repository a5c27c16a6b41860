"""Evaluations and comparisons in the process of a test, of arrays in the current folder."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from arrays import make
from inline import Inline

from volpipe.errors import WorkerLost
from volpipe.evaluation.compare import plan_comparison
from volpipe.evaluation.driver import comparison_work, evaluation_work, finish
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.evaluation.limits import Limit
from volpipe.evaluation.results import ComparisonResult, EvaluationResult
from volpipe.evaluation.score import Scores
from volpipe.runs.run_folder import RunFolder


class Workers(Inline):
    """Workers that lose all tasks of the block `broken`; `blocks` were sent to them."""

    def __init__(self, broken: int = -1, **options: Any) -> None:
        super().__init__(**options)
        self.broken, self.blocks = broken, list[int]()

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        self.blocks += arguments[1]
        if self.broken not in arguments[1]:
            return super().submit(app, *arguments)
        future: Future[Any] = Future()
        future.set_exception(WorkerLost("killed"))
        return future


def save(**arrays: np.ndarray) -> None:
    """Store arrays here, as NAME.npy."""
    for name, data in arrays.items():
        np.save(f"{name}.npy", data)


def smooth_pair() -> tuple[np.ndarray, np.ndarray]:
    """Return a noisy volume and the smooth one that it was made of, (z, y, x), uint8: made.npy and truth.npy here."""
    z, y, x = np.mgrid[:41, :150, :37]
    truth = (127 + 80 * np.sin(z / 5 + y / 9) * np.cos(x / 4)).astype(np.uint8)
    made = np.clip(truth + np.random.default_rng(1).normal(0, 12, truth.shape), 0, 255).astype(np.uint8)
    save(made=made, truth=truth)
    return made, truth


def label_pair(counts: tuple[int, int, int], size: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return labels, and others that split, merge, miss and renumber them, (z, y, x)."""
    rng = np.random.default_rng(2)
    labels = np.kron(rng.integers(0, 9, counts), np.ones(size, int))
    others = np.where(labels == 3, 4, labels) * 2
    others[:9] += others[:9] > 0
    others[rng.random(others.shape) < 0.1] = 0
    return labels, others


def cut_pair() -> None:
    """Store made.zarr, in which a chunk file is cut, so that block 1 of three cannot be read, and truth.zarr."""
    data = np.random.default_rng(7).integers(0, 256, (300, 30, 30)).astype(np.uint8)
    for name, values in (("made", data), ("truth", data // 2)):
        make(Path(f"{name}.zarr").absolute(), values, chunks=(32, 30, 30))
    chunk = Path("made.zarr/c/5/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-99])


def evaluated(
    workers: Inline | None = None, *, names: tuple[str, str | None] = ("made.npy", "truth.npy"),
    block: tuple[int, int, int] = (128, 128, 128), **options: Any,
) -> EvaluationResult:  # fmt: skip
    """Return how the evaluation of two volumes here ended."""
    plan = replace(plan_evaluation(*names, **options), block=block)
    return finish(evaluation_work(plan, RunFolder(Path("scores.run"))), (workers or Workers()).start)


def scores_of(*workers: Inline, **options: Any) -> Scores | dict[str, Scores]:
    """Return the scores of an evaluation that leaves nothing here."""
    before = set(Path().iterdir())
    result = evaluated(*workers, **options)
    assert result.scores is not None and result.missing == []
    assert set(Path().iterdir()) == before
    return result.scores


def image_scores_of(**options: Any) -> dict[str, Scores]:
    scores = scores_of(**options)
    assert isinstance(scores, dict)
    return scores


def compared(a: np.ndarray, b: np.ndarray, workers: Inline | None = None, **options: Any) -> ComparisonResult:
    """Return how two arrays differ, (z, y, x) or (c, z, y, x)."""
    for name, data in (("a", a), ("b", b)):
        np.save(f"{name}.npy", data) if data.ndim == 3 else make(Path(f"{name}.zarr").absolute(), data)
    suffix, limits = "npy" if a.ndim == 3 else "zarr", tuple(map(Limit.parse, options.pop("limits", ())))
    plan = plan_comparison(f"a.{suffix}", f"b.{suffix}", **options)
    return finish(comparison_work(plan, RunFolder(Path("c.run")), limits=limits), (workers or Inline()).start)
