"""Standing: how what is there of a work compares with the work that is asked for, and what follows: the one table.

Not here: how a kind of work finds its standing, in its folder, its output and its plan (runs.output_work,
evaluation.driver, training.driver, workflow.train_stage), or what an update computes (runs.update). A flow, a batch and
a work that begins all ask the same table::

    standing = work.standing()
    standing.act(Asked.RESUME)     go on, clear, update, follow, or refuse with the standing's own sentence
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from volpipe.errors import VolpipeError
from volpipe.runs.options import RunOptions


class WorkState(Enum):
    """What is there of a work; the words say it in a sentence."""

    FRESH = "nothing was begun"
    CLEARING = "a kill interrupted its deletion"
    FOREIGN = "other work made the folder, or what is in the output's place"
    OCCUPIED = "the folder holds files that no work made"
    UNSTARTED = "it was begun, and no task has done anything"
    SUPERSEDED = "it was begun by another recipe, and no task has done anything"
    UNWRITTEN = "the input was scanned or measured, and nothing was written"
    BEGUN = "a part is done"
    COMPLETE = "all is done"
    UNCOMPARED = "other work of the flow has changed what it reads"
    CHANGED = "its input has changed"
    GROWN = "its volume has grown"
    UNFOLLOWABLE = "its input, or its recipe, has changed such that no update can follow"
    OUTDATED = "another recipe made it, or no part of it outlives its input, which has changed"
    ELSEWHERE = "it was made of another volume, or in another place"
    DAMAGED = "what is stored of it cannot be understood"
    LOST = "its output is gone, or the journal of that is damaged"

    @property
    def is_other(self) -> bool:
        """Whether something else was made than the plan says, so that going on would mix two outputs."""
        return self in (WorkState.GROWN, WorkState.UNFOLLOWABLE, WorkState.OUTDATED, WorkState.ELSEWHERE)


class Asked(Enum):
    """What a user asks for, where something may be there."""

    RESUME = "the command alone"
    UPDATE = "--update of one output"
    RENEW = "--update of a flow, which makes outdated stages anew"
    REMAKE = "any command whose work is cheap: scores are made again rather than refused"
    FRESH = "--fresh"

    @classmethod
    def of(cls, options: RunOptions) -> Asked:
        """Return what `options` ask for of one output."""
        return cls.FRESH if options.fresh else cls.UPDATE if options.update else cls.RESUME


class Act(Enum):
    """What a work does about what is there."""

    GO_ON = "go on"
    CLEAR = "clear"  # and begin
    UPDATE = "update"  # compare the input, and take back what has changed
    FOLLOW = "follow"  # let the plan of the grown volume take the place of the old one, and update
    REFUSE = "refuse"

    @property
    def compares(self) -> bool:
        """Whether the input, which must be there and stay for that, is compared with what was read of it."""
        return self in (Act.UPDATE, Act.FOLLOW)


# fmt: off
TABLE: dict[WorkState, tuple[str, ...]] = {
    #                        RESUME     UPDATE     RENEW      REMAKE     FRESH
    WorkState.FRESH:        ("go on",   "go on",   "go on",   "clear",   "clear"),
    WorkState.CLEARING:     ("clear",   "clear",   "clear",   "clear",   "clear"),
    WorkState.FOREIGN:      ("refuse",  "refuse",  "refuse",  "refuse",  "refuse"),
    WorkState.OCCUPIED:     ("refuse",  "refuse",  "refuse",  "refuse",  "clear"),
    WorkState.UNSTARTED:    ("go on",   "update",  "update",  "go on",   "clear"),
    WorkState.SUPERSEDED:   ("clear",   "clear",   "clear",   "clear",   "clear"),
    WorkState.UNWRITTEN:    ("go on",   "update",  "update",  "go on",   "clear"),
    WorkState.BEGUN:        ("go on",   "update",  "update",  "go on",   "clear"),
    WorkState.COMPLETE:     ("go on",   "update",  "update",  "go on",   "clear"),
    WorkState.UNCOMPARED:   ("update",  "update",  "update",  "clear",   "clear"),
    WorkState.CHANGED:      ("refuse",  "update",  "update",  "clear",   "clear"),
    WorkState.GROWN:        ("refuse",  "follow",  "follow",  "clear",   "clear"),
    WorkState.UNFOLLOWABLE: ("refuse",  "refuse",  "refuse",  "clear",   "clear"),
    WorkState.OUTDATED:     ("refuse",  "refuse",  "clear",   "clear",   "clear"),
    WorkState.ELSEWHERE:    ("refuse",  "refuse",  "refuse",  "clear",   "clear"),
    WorkState.DAMAGED:      ("refuse",  "refuse",  "refuse",  "clear",   "clear"),
    WorkState.LOST:         ("refuse",  "refuse",  "refuse",  "clear",   "clear"),
}
# fmt: on


def act_on(state: WorkState, asked: Asked) -> Act:
    """Return what follows from a state for what is asked, by the table."""
    return Act(TABLE[state][list(Asked).index(asked)])


@dataclass(frozen=True)
class Standing:
    """How what is there of a work compares with the plan of it.

    Attributes:
        refusal: the error that says so, where the state is one that may be refused.
        update_refusal: that of an update, where it has a sentence of its own.
    """

    state: WorkState
    refusal: VolpipeError | None = None
    update_refusal: VolpipeError | None = None

    def act(self, asked: Asked) -> Act:
        """Return what follows, by the table."""
        return act_on(self.state, asked)

    def refusal_of(self, asked: Asked) -> VolpipeError:
        """Return the error with which `asked` is refused."""
        is_update = asked in (Asked.UPDATE, Asked.RENEW)
        error = self.update_refusal if is_update and self.update_refusal is not None else self.refusal
        assert error is not None, self.state  # whoever finds a state that may be refused gives its sentence
        return error
