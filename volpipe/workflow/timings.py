"""Stored times of the labellings and evaluations of a flow: its plan measures them, its run need not.

Not here: measuring them (segmentation.estimate, evaluation.estimate), or the forecast of a flow (cost).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from volpipe.evaluation.estimate import ScoreTime
from volpipe.evaluation.evaluate import Evaluation
from volpipe.segmentation.estimate import SegmentTimes
from volpipe.volumes.storage.metadata import write_json
from volpipe.workflow.plan import FlowPlan, StagePlan

TIMES_FILE = "times.json"

StageTimes = SegmentTimes | ScoreTime


class StoredTimes(BaseModel):
    """Times of a stage, measured on a few of its blocks; `of` identifies its work."""

    model_config = ConfigDict(frozen=True)

    of: str
    times: Annotated[StageTimes, Field(union_mode="left_to_right")]


class Times(BaseModel):
    """Times of labellings and evaluations by the name of the stage, on `num_workers`."""

    model_config = ConfigDict(frozen=True)

    num_workers: int
    stages: Mapping[str, StoredTimes]


def _work_of(stage: StagePlan) -> str:
    """Return the work of `stage`, in full or as a hash."""
    if isinstance(stage.work, Evaluation):
        return str(stage.work.describe())
    return stage.work.identity


def store_times(plan: FlowPlan, times: Iterable[tuple[StagePlan, StageTimes]], num_workers: int) -> None:
    """Store `times` of labellings and evaluations, for a run to read without trying blocks."""
    stages = {stage.name: StoredTimes(of=_work_of(stage), times=measured) for stage, measured in times}
    write_json(plan.folder.path / TIMES_FILE, Times(num_workers=num_workers, stages=stages).model_dump(mode="json"))


def known_times(plan: FlowPlan, num_workers: int) -> dict[str, StageTimes]:
    """Return the stored times of stages with the same work on as many workers, by name."""
    try:
        stored = Times.model_validate_json((plan.folder.path / TIMES_FILE).read_bytes())
    except (OSError, ValidationError):  # none, or another version's
        return {}
    stages = {stage.name: stage for stage in plan.stages}
    return {
        name: entry.times
        for name, entry in stored.stages.items()
        if stored.num_workers == num_workers and name in stages and _work_of(stages[name]) == entry.of
    }
