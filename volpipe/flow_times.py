"""How long labellings and evaluations of a flow take, as its plan told: kept, so that a run need not try blocks again.

Not here: how that is found (label_cost, score_cost), or what is made of it (flow_cost).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from volpipe.evaluate import Evaluation, describe_evaluation
from volpipe.flow_plan import FlowPlan, StagePlan
from volpipe.formats.metadata import write_json
from volpipe.label_cost import SegmentTimes
from volpipe.score_cost import ScoreTime

TIMES_FILE = "times.json"

Taken = SegmentTimes | ScoreTime


class Told(BaseModel):
    """How long a stage takes, as blocks told that were tried; `of` is what it does."""

    model_config = ConfigDict(frozen=True)

    of: str
    times: Annotated[Taken, Field(union_mode="left_to_right")]


class Times(BaseModel):
    """What was told of labellings and evaluations, by the name of the stage, on how many workers."""

    model_config = ConfigDict(frozen=True)

    num_workers: int
    stages: Mapping[str, Told]


def _work_of(stage: StagePlan) -> str:
    """Return what `stage` does, in full or as a hash."""
    if isinstance(stage.work, Evaluation):
        return str(describe_evaluation(stage.work))
    return stage.work.identity


def store_times(plan: FlowPlan, tried: Iterable[tuple[StagePlan, Taken]], num_workers: int) -> None:
    """Keep how long labellings and evaluations take, so that a run can say so without trying any block."""
    told = {stage.name: Told(of=_work_of(stage), times=times) for stage, times in tried}
    found = Times(num_workers=num_workers, stages=told)
    write_json(plan.folder.path / TIMES_FILE, found.model_dump(mode="json"))


def known_times(plan: FlowPlan, num_workers: int) -> dict[str, Taken]:
    """Return what is kept of stages that do the same on as many workers, by name."""
    try:
        found = Times.model_validate_json((plan.folder.path / TIMES_FILE).read_bytes())
    except (OSError, ValidationError):  # none, or another version's
        return {}
    stages = {stage.name: stage for stage in plan.stages}
    return {
        name: told.times
        for name, told in found.stages.items()
        if found.num_workers == num_workers and name in stages and _work_of(stages[name]) == told.of
    }
