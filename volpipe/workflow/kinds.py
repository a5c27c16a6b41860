"""The kinds of work that may be stages of a flow: their list, and what is found in a folder by it.

Not here: what a kind is (stages.kind), or any of them. A further kind is a line of KINDS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from volpipe.evaluation.kinds import CompareStage, MeasureStage, ScoreStage
from volpipe.runs.output_work import OutputWork
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation.kind import LabelStage
from volpipe.stages.kind import StagePlan
from volpipe.workflow.run_stages import ConvertStage, FunctionStage, RunStage
from volpipe.workflow.train_stage import TrainStage

KINDS: Mapping[str, type[StagePlan]] = {
    kind.kind: kind
    for kind in (
        RunStage,
        LabelStage,
        ConvertStage,
        FunctionStage,
        TrainStage,
        ScoreStage,
        CompareStage,
        MeasureStage,
    )
}


def find_work(folder: RunFolder) -> OutputWork[Any, Any] | None:
    """Return the work on a volume whose plan lies in `folder`, of whatever kind; None where there is none.

    Raises:
        RunError: what is stored there is damaged.
    """
    works = (kind.stored(folder) for kind in KINDS.values())
    return next((work for work in works if work is not None), None)
