"""What is there of a work, in every combination: how it stands, what follows of that, and that just this is done."""

from __future__ import annotations

import itertools
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
from updates import planned, ran
from volumes import noise, windowed, write_volume

from volpipe.blockwise.journal import Attempt, Journal, Record
from volpipe.errors import RunError
from volpipe.inference.plan import Plan
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.standing import Act, Asked, Standing, WorkState, act_on
from volpipe.runs.worker import RESULTS
from volpipe.volumes.formats.container import METADATA_NAMES
from volpipe.workflow.driver import RunWork

NOTHING_MADE = {
    WorkState.FRESH, WorkState.CLEARING, WorkState.UNSTARTED, WorkState.SUPERSEDED, WorkState.UNWRITTEN,
}  # fmt: skip
OF_OTHERS = {WorkState.FOREIGN, WorkState.OCCUPIED}
MIXED = {WorkState.GROWN, WorkState.UNFOLLOWABLE, WorkState.OUTDATED, WorkState.ELSEWHERE}
BROKEN = {WorkState.DAMAGED, WorkState.LOST}


def acts(state: WorkState) -> dict[Asked, Act]:
    return {asked: act_on(state, asked) for asked in Asked}


def states_where(act: Act, asked: Asked) -> set[WorkState]:
    return {state for state in WorkState if act_on(state, asked) is act}


def test_fresh_deletes_all_but_what_other_work_made() -> None:
    assert states_where(Act.CLEAR, Asked.FRESH) == set(WorkState) - {WorkState.FOREIGN}
    assert set(acts(WorkState.FOREIGN).values()) == {Act.REFUSE}


@pytest.mark.parametrize("asked", [Asked.RESUME, Asked.UPDATE])
def test_nothing_that_was_made_is_deleted_unless_that_is_asked_for(asked: Asked) -> None:
    assert states_where(Act.CLEAR, asked) == {WorkState.CLEARING, WorkState.SUPERSEDED} < NOTHING_MADE


def test_an_update_of_a_flow_deletes_what_is_outdated_and_else_does_what_one_of_an_output_does() -> None:
    differing = {state for state in WorkState if act_on(state, Asked.RENEW) is not act_on(state, Asked.UPDATE)}
    assert differing == {WorkState.OUTDATED}
    assert act_on(WorkState.OUTDATED, Asked.RENEW) is Act.CLEAR


def test_two_outputs_are_never_mixed() -> None:
    assert {state for state in WorkState if state.is_other} == MIXED
    for state, asked in itertools.product(MIXED | BROKEN | {WorkState.CHANGED}, (Asked.RESUME, Asked.UPDATE)):
        compared = asked is Asked.UPDATE and state in (WorkState.CHANGED, WorkState.GROWN)
        assert act_on(state, asked) is not Act.GO_ON
        assert (act_on(state, asked) is Act.REFUSE) == (not compared)


def test_what_no_update_asked_for_goes_on_unless_other_work_changed_its_input() -> None:
    going_on = set(WorkState) - OF_OTHERS - MIXED - BROKEN - {WorkState.CHANGED, WorkState.CLEARING}
    assert states_where(Act.GO_ON, Asked.RESUME) == going_on - {WorkState.SUPERSEDED, WorkState.UNCOMPARED}
    assert states_where(Act.UPDATE, Asked.RESUME) == {WorkState.UNCOMPARED}
    assert states_where(Act.FOLLOW, Asked.UPDATE) == {WorkState.GROWN}
    begun = going_on - {WorkState.FRESH, WorkState.SUPERSEDED} | {WorkState.CHANGED}
    assert states_where(Act.UPDATE, Asked.UPDATE) == begun


def test_scores_are_made_again_rather_than_refused() -> None:
    assert states_where(Act.REFUSE, Asked.REMAKE) == OF_OTHERS


def test_an_update_is_refused_with_its_own_sentence_where_it_has_one() -> None:
    plain, update = RunError("plain"), RunError("update")
    for asked in Asked:
        is_update = asked in (Asked.UPDATE, Asked.RENEW)
        assert Standing(WorkState.UNFOLLOWABLE, plain, update).refusal_of(asked) is (update if is_update else plain)
        assert Standing(WorkState.LOST, plain).refusal_of(asked) is plain


# ---- what is there, in every combination

DIVIDED = ("net.name=identity", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"), "output.shard=[8,8,8]")
MORE = (*DIVIDED, "output.chunk=[8,8,8]", "output.levels=0")
PlanFact = Literal["none", "same", "recipe", "volume", "shorter", "longer", "damaged"]
JournalFact = Literal["none", "attempt", "measured", "written", "damaged"]
OutputFact = Literal["none", "metadata", "voxels"]


class Case(NamedTuple):
    """What lies in a folder and in the place of its output."""

    plan: PlanFact
    journal: JournalFact
    output: OutputFact
    is_clearing: bool
    is_uncompared: bool
    has_other_mark: bool

    @property
    def is_idle(self) -> bool:
        return self.journal in ("none", "attempt") and self.output != "voxels"


ALL = [
    Case(*each)
    for each in itertools.product(
        ("none", "same", "recipe", "volume", "shorter", "longer", "damaged"),
        ("none", "attempt", "measured", "written", "damaged"),
        ("none", "metadata", "voxels"),
        (False, True), (False, True), (False, True),
    )
]  # fmt: skip
OTHER_PLANS = {
    "recipe": WorkState.OUTDATED, "volume": WorkState.ELSEWHERE, "shorter": WorkState.GROWN,
    "longer": WorkState.UNFOLLOWABLE,
}  # fmt: skip
RULES: list[tuple[WorkState, Callable[[Case], bool]]] = [  # the first that holds counts
    (WorkState.FOREIGN, lambda case: case.has_other_mark or (case.plan == "none" and case.output != "none")),
    (WorkState.CLEARING, lambda case: case.is_clearing),
    (WorkState.FRESH, lambda case: case.plan == "none"),
    (WorkState.DAMAGED, lambda case: case.plan == "damaged"),
    (WorkState.SUPERSEDED, lambda case: case.plan in OTHER_PLANS and case.is_idle),
    *((state, lambda case, plan=plan: case.plan == plan) for plan, state in OTHER_PLANS.items()),
    (WorkState.LOST, lambda case: case.output == "none" and case.journal in ("written", "damaged")),
    (WorkState.UNCOMPARED, lambda case: case.is_uncompared),
    (WorkState.UNSTARTED, lambda case: case.is_idle),
    (WorkState.UNWRITTEN, lambda case: case.output == "none" and case.journal == "measured"),
    (WorkState.BEGUN, lambda case: True),
]  # fmt: skip


def expected(case: Case) -> WorkState:
    return next(state for state, holds in RULES if holds(case))


@dataclass
class Bench:
    """A plan, what a run of it left, and other plans that may lie in its folder."""

    plan: Plan
    made: Path
    plans: dict[str, Plan]

    @property
    def out(self) -> Path:
        return Path(self.plan.out)

    @property
    def folder(self) -> RunFolder:
        return RunFolder.from_output(self.out)

    def lay(self, case: Case) -> None:
        """Lay out what `case` says, and nothing else."""
        for place in (self.out, self.folder.path):
            shutil.rmtree(place, ignore_errors=True)
        folder = self.folder
        folder.path.mkdir()
        if case.plan == "damaged":
            folder.plan_file.write_text("{")
        elif case.plan != "none":
            folder.store(self.plans[case.plan])
        if case.output != "none":
            shutil.copytree(self.made / self.out.name, self.out)
        for file in self.out.rglob("*") if case.output == "metadata" else ():
            if file.is_file() and file.name not in METADATA_NAMES:
                file.unlink()
        if case.journal == "written":
            shutil.copy(self.made / folder.path.name / folder.journal.name, folder.journal)
        elif case.journal == "damaged":
            folder.journal.write_text("{\n")
        elif case.journal != "none":
            record = Record("measure", (0,))
            if case.journal == "attempt":
                record = Record("infer", (), result=Attempt((0,), "no reason", 1))
            with Journal(folder.journal, RESULTS) as journal:
                journal.append(record)
        marks = {"clearing": case.is_clearing, "uncompared": case.is_uncompared, "label.json": case.has_other_mark}
        for name, is_there in marks.items():
            if is_there:
                (folder.path / name).write_bytes(b"")

    def content(self) -> dict[str, bytes]:
        """Return the bytes of all files of the output and the folder."""
        files = (file for place in (self.out, self.folder.path) for file in place.rglob("*") if file.is_file())
        return {str(file): file.read_bytes() for file in files}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    data, volume = noise((32, 8, 8)), tmp_path / "in.n5"
    write_volume(tmp_path / "other.n5", data[:24], chunk=8)
    plans = {"volume": planned(tmp_path, *MORE, volume="other.n5")}
    for length, name in ((16, "shorter"), (32, "longer"), (24, "same")):
        shutil.rmtree(volume, ignore_errors=True)
        write_volume(volume, data[:length], chunk=8)
        plans[name] = planned(tmp_path, *MORE)
    plans["recipe"] = planned(tmp_path, *MORE, "output.codec_level=2")
    plan = ran(plans["same"]).plan
    made = tmp_path / "made"
    for place in (Path(plan.out), Path(f"{plan.out}.run")):
        shutil.move(place, made / place.name)
    return Bench(plan, made, plans)


def test_each_combination_stands_as_the_rules_say(bench: Bench) -> None:
    found = Counter[WorkState]()
    for case in ALL:
        bench.lay(case)
        standing = RunWork(bench.plan).standing()
        assert standing.state is expected(case), case
        found[standing.state] += 1
        for asked in Asked:  # whatever is refused has a sentence
            assert standing.act(asked) is not Act.REFUSE or str(standing.refusal_of(asked))
    assert found.keys() == {state for state, _ in RULES}


CHANGED_BY_CLAIMS = ("inputs.json", "discards", "plan.json", "next_plan.json")  # of a folder that is gone on with


def test_a_claim_does_what_the_table_says_and_nothing_else(bench: Bench) -> None:
    """Of each state and for each option, in several combinations."""
    asked_by = {
        Asked.RESUME: RunOptions(), Asked.UPDATE: RunOptions(update=True), Asked.FRESH: RunOptions(fresh=True),
    }  # fmt: skip
    times, seen = Counter[tuple[WorkState, Asked]](), Counter[Act]()
    for case, (asked, options) in itertools.product(ALL, asked_by.items()):
        state = expected(case)
        times[state, asked] += 1
        if times[state, asked] > 6:
            continue
        bench.lay(case)
        before, act = bench.content(), act_on(state, asked)
        work = RunWork(bench.plan, options)
        if act is Act.REFUSE:
            with pytest.raises(RunError):
                work.claim()
            assert bench.content() == before, case
        elif act is Act.FOLLOW:
            work.claim()
            assert [update.plan for update in work.updates] == [bench.plan.identity]
        else:
            work.claim()
            after = bench.content()
            left = {name for name in after if not name.endswith(CHANGED_BY_CLAIMS)}
            kept = set() if act is Act.CLEAR else {name for name in before if not name.endswith(CHANGED_BY_CLAIMS)}
            assert left == kept, (case, asked)
            assert all(after[name] == before[name] for name in kept)
        seen[act] += 1
    assert seen.keys() == set(Act)
