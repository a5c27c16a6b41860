"""Evaluations in the process of a test."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inline import perform

from volpipe.errors import WorkerLost
from volpipe.evaluation.driver import EvaluationWork, finish
from volpipe.evaluation.evaluate import Evaluation, Scores
from volpipe.evaluation.image_scores import ImageScores
from volpipe.evaluation.results import EvaluationResult
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.work import Options


class Here:
    """Workers for tests: what is sent is done at once; the first `lost` are lost on the way.

    Attributes:
        blocks: those that were sent, in this order, as often as they were.
    """

    def __init__(self, lost: int = 0) -> None:
        self.slots = {"cpu": 1, "gpu": 1}
        self.lost = lost
        self.blocks: list[int] = []

    def submit(self, app: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.blocks += arguments[1]
        self.lost -= 1
        if self.lost >= 0:
            future.set_exception(WorkerLost("killed"))
        else:
            future.set_result(perform(app, *arguments))
        return future

    @contextmanager
    def start(self, folder: Path) -> Iterator[Here]:
        yield self


def evaluated(evaluation: Evaluation, folder: Path, workers: Here | None = None, **options: Any) -> EvaluationResult:
    """Return how an evaluation ended whose folder is made in `folder`."""
    work = EvaluationWork(evaluation, RunFolder(folder / "scores.run"), Options(**options))
    return finish(work, (workers or Here()).start)


def scores_of(evaluation: Evaluation, folder: Path, workers: Here | None = None) -> Scores:
    """Return the scores of an evaluation that leaves nothing in `folder`."""
    before = set(folder.iterdir())
    result = evaluated(evaluation, folder, workers)
    assert result.scores is not None and result.missing == []
    assert set(folder.iterdir()) == before
    return result.scores


def image_scores_of(evaluation: Evaluation, folder: Path) -> dict[str, ImageScores]:
    scores = scores_of(evaluation, folder)
    assert isinstance(scores, dict)
    return scores
