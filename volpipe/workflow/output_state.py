"""The state of an output against the plan for it: new, incomplete, unchanged, or made otherwise, and what differs.

Not here: how far a run is in detail (status), or what is done about it (batch). Nothing is written, no worker is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Literal

import volpipe
from volpipe.blockwise.ledger import Ledger
from volpipe.blockwise.usage import Totals
from volpipe.errors import RunError
from volpipe.recipes.workflow import VOLUME, named
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import is_sealed, read_provenance
from volpipe.runs.standing import WorkState
from volpipe.runs.verify import check_present
from volpipe.stages.kind import StagePlan
from volpipe.units import count
from volpipe.volumes.formats.container import RUN_KEY
from volpipe.volumes.storage import paths

State = Literal[
    "new", "incomplete", "unchanged", "recipe changed", "weights changed", "code of the net changed", "input changed",
    "other version", "files lost",
]  # fmt: skip
CHANGED: tuple[State, ...] = (
    "recipe changed", "weights changed", "code of the net changed", "input changed", "other version", "files lost",
)  # fmt: skip
"""States in which a run would mix two outputs, the first to be named first."""
STANDINGS: dict[State, WorkState] = {
    "new": WorkState.FRESH, "incomplete": WorkState.BEGUN, "unchanged": WorkState.COMPLETE,
    "recipe changed": WorkState.OUTDATED, "weights changed": WorkState.OUTDATED,
    "code of the net changed": WorkState.OUTDATED, "input changed": WorkState.CHANGED,
    "other version": WorkState.DAMAGED, "files lost": WorkState.LOST,
}  # fmt: skip
"""What each is in the table of standings."""
RECIPE: State = "recipe changed"
STATES: dict[str, State] = {  # by the beginning of a line of `changes`; others are keys of the recipe
    "net.weights_sha256": "weights changed", "code_sha256": "code of the net changed",
    "net.identity": "code of the net changed", "source": "input changed",
}  # fmt: skip


def flow_state(stages: Sequence[StagePlan], *, same_input: bool) -> tuple[State, str]:
    """Return how the outputs of the `stages` of a flow stand, and what differs; as `stage_state`."""
    states: list[tuple[State, str]] = []
    for stage in stages:
        with named(stage.name):
            state, why = stage_state(stage, same_input=same_input)
            states.append((state, f"stage {stage.name}: {why}" if why else ""))
    changed = next((state for state in states if state[0] in CHANGED), None)
    if changed is not None:
        return changed
    if all(state == "unchanged" for state, _ in states):
        return "unchanged", ""
    if all(state == "new" for state, _ in states):
        return "new", ""
    open_stages = [stage.name for stage, (state, _) in zip(stages, states, strict=True) if state != "unchanged"]
    return "incomplete", f"left: {', '.join(open_stages)}"


def stage_state(stage: StagePlan, *, same_input: bool) -> tuple[State, str]:
    """Return how the output of `stage` stands; of an input that other work of ours makes, nothing is compared.

    Raises:
        RunError: something else is in its place.
    """
    work = stage.output_work(RunOptions(same_input=same_input, is_outside=stage.reads == VOLUME))
    if work is None:
        return ("unchanged" if stage.is_complete else "new"), ""
    plan, folder, out, standing = work.plan, work.folder, paths.locate(work.plan.out), work.standing()
    if standing.state is WorkState.CLEARING:
        return "new", ""
    if standing.state in (WorkState.FRESH, WorkState.FOREIGN) or not folder.journal.is_file():
        if paths.exists(out):
            raise RunError(f"{out} exists and no run in {folder.path} made it; give another out, or move it away")
        return "new", ""
    if standing.state is WorkState.DAMAGED:
        return "other version", str(standing.refusal)
    if standing.state is WorkState.SUPERSEDED:
        return "new", ""
    if standing.state.is_other:
        old = folder.load(type(plan))
        assert old is not None
        changed = old.changes(plan) or ["other sizes"]
        states = {
            next((state for start, state in STATES.items() if line.startswith(start)), RECIPE) for line in changed
        }
        return next(state for state in CHANGED if state in states), "; ".join(changed)
    if other := work.input_changes():
        is_unstarted = standing.state is WorkState.UNSTARTED and not paths.exists(out)
        is_unwritten = is_unstarted or standing.state is WorkState.UNWRITTEN
        return ("new", "") if is_unwritten else ("input changed", other)
    try:
        shards = work.shards()
        if shards and not paths.exists(out):
            return "files lost", f"the output is gone, of which {folder.path} speaks"
        if not work.is_complete or not is_sealed(folder):
            ledger = work.records.ledger()
            left = "; ".join(f"{s.name} {s.num_done:,} of {s.num_units:,}" for s in ledger.schedule.shown)
            return "incomplete", left + (f"; {count(len(ledger.missing), 'part')} failed" if ledger.missing else "")
        check_present(plan.out, shards)
    except RunError as error:
        return "files lost", str(error)
    version = read_provenance(plan.out).get("version")
    if version != volpipe.__version__:
        return "other version", f"it was made by {version or 'an earlier one'}, this is {volpipe.__version__}"
    return "unchanged", ""


def share_left(stages: Sequence[StagePlan], state: State) -> float:
    """Return the share of an output that is still to be written; what is replaced gives its room back."""
    if state != "incomplete":
        return 1.0 if state == "new" else 0.0
    shares = [stage.share_left for stage in stages]
    return sum(shares) / len(shares)


def findings(stages: Sequence[StagePlan]) -> dict[str, Any]:  # Any: JSON
    """Return what journals and outputs of `stages` say of how they were done, by the names of a batch's table."""
    taken, missing, seams, origins = Totals(), 0, dict[str, float](), []
    for stage in stages:
        if (work := stage.output_work()) is None:
            continue
        for totals in Ledger(work.folder.journal, work.kinds).look().totals.values():
            taken.join(totals)
        said = read_provenance(str(stage.out)) if paths.exists(stage.out) else {RUN_KEY: {}}
        run = said.pop(RUN_KEY)
        origins.append(said)
        missing += int(run.get("missing", 0))
        for axis, value in run.get("seams", {}).items():
            seams[axis] = max(value, seams.get(axis, value))
    digest = hashlib.sha256(json.dumps(origins, sort_keys=True).encode()).hexdigest()
    return {
        "cpu_seconds": taken.cpu_seconds,
        "read_bytes": taken.read_bytes,
        "written_bytes": taken.written_bytes,
        "missing": missing,
        "seams": seams,
        "provenance": digest[:32],
    }
