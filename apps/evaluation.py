"""The apps of an evaluation: scores of one block each.

Not here: what they do (volpipe.evaluation.evaluate, volpipe.evaluation.estimate).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from volpipe.apps.app import App, Resources
from volpipe.blockwise.journal import Record

if TYPE_CHECKING:
    from volpipe.evaluation.evaluate import CandidateSums, Evaluation
    from volpipe.evaluation.label_scores import Overlaps


def score(
    evaluation: Evaluation, block: int, parsl_resource_specification: Resources
) -> Record[CandidateSums | Overlaps]:
    from volpipe.evaluation import evaluate

    return evaluate.score(evaluation, block)


def try_scoring(job: tuple[Evaluation, int], unit: int, parsl_resource_specification: Resources) -> Record[object]:
    from volpipe.evaluation import estimate

    return estimate.try_block(job, unit)


APPS = {"score": App(score, "cpu"), "try_scoring": App(try_scoring, "cpu")}
