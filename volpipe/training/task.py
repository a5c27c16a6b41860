"""The task of a training: one rank's steps from the folder's newest checkpoint to the end; and the folder's record.

Not here: the steps (loop), or the driver that sends the tasks (driver). Arguments are names, the result is a record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from volpipe.blockwise.journal import Record
from volpipe.blockwise.notes import Reporter
from volpipe.blockwise.task import Outcomes, work
from volpipe.errors import RecipeError, RunError
from volpipe.nets.facts import is_shipped
from volpipe.nets.files import code_hash
from volpipe.nets.identity import NetIdentity
from volpipe.nets.load import describe
from volpipe.recipes.training import CHECKPOINTS, TrainRecipe, check_same
from volpipe.runs.run_folder import RunFolder
from volpipe.training.data.volumes import check_unchanged
from volpipe.training.rank_info import RankInfo
from volpipe.volumes.storage.lock import check_holder
from volpipe.volumes.storage.paths import atomic_write

TRAINING_FILE = "training.json"
STAGE = "train"


class Round(BaseModel):
    """The steps of a training that were taken after the step `after`, over volumes that had changed.

    Attributes:
        began: when they did, in seconds since 1970.
        changed: what differed of the volumes, in sentences.
        planned: how many steps there were to be until then.
    """

    model_config = ConfigDict(frozen=True)

    after: int
    began: float
    changed: tuple[str, ...]
    planned: int

    def __str__(self) -> str:
        when = time.strftime("%F %T", time.localtime(self.began))
        return f"from step {self.after + 1:,} on ({when}) over other volumes than before: {'; '.join(self.changed)}"


class Training(BaseModel):
    """The recipe of a training, as its folder stores it.

    Attributes:
        recipe: as the user gave it, with the steps of all rounds.
        search_path: folder that the recipe's relative names count from.
        code_sha256: of the code of the net when the training began; "" where it has none.
        net: the identity of the net, beside its code.
        is_trial: whether others like it read the same volumes, so that those of a node share decoded copies.
        rounds: over volumes that had changed, oldest first.
    """

    model_config = ConfigDict(frozen=True)

    recipe: TrainRecipe
    search_path: str
    code_sha256: str = ""
    net: NetIdentity = NetIdentity()
    is_trial: bool = False
    rounds: tuple[Round, ...] = ()

    @property
    def begun(self) -> int:
        """The step at which the learning rate's schedule began."""
        return self.rounds[-1].after if self.rounds else 0

    @classmethod
    def begin(cls, recipe: TrainRecipe, search_path: Path, *, is_trial: bool = False) -> Training:
        """Return the training of `recipe` with the code that its net has now."""
        folder = str(search_path)
        return cls(
            recipe=recipe, search_path=folder, code_sha256=code_hash(recipe.net.name, folder),
            net=NetIdentity() if is_shipped(recipe.net) else describe(recipe.net, folder).identity,
            is_trial=is_trial,
        )  # fmt: skip

    def check_same(self, other: Training, step: int) -> None:
        """Refuse to go on from `step` of this training as `other`, which would have made other weights by then.

        Raises:
            RecipeError: with the keys that differ, or the net whose code does.
        """
        recipe = self._with((), self.rounds[0].planned).recipe if self.rounds else self.recipe
        check_same(recipe, other.recipe, min(step, recipe.train.steps))
        if self.code_sha256 != other.code_sha256:
            raise RecipeError(
                f"the training at step {step} has other code of net {self.recipe.net.name}, which was edited since; "
                "undo the edit to continue, choose another --out, or use --fresh to start over"
            )
        if differences := self.net.differences(other.net):
            raise RecipeError(
                f"the training at step {step} has another net {recipe.net.name}: {'; '.join(differences)}; take that "
                "back to continue, choose another --out, or use --fresh to start over"
            )

    def resumed(self, folder: Path) -> Training:
        """Return this with the rounds of the training in `folder`, which is the same."""
        old = Training.load(folder)
        if old is None or not old.rounds:
            return self
        return self._with(old.rounds, max(self.recipe.train.steps, old.recipe.train.steps))

    def continued(self, step: int, changed: Mapping[str, Sequence[str]]) -> Training:
        """Return this training with a further round after `step`, in place of a round without a checkpoint.

        It takes the steps that are left, and `train.continue_steps` at least.

        Args:
            changed: what differs of the volumes, by what they are.
        """
        lines, planned = [f"{what} {line}" for what, each in changed.items() for line in each], self.recipe.train.steps
        if self.rounds and self.begun == step:
            lines, planned = [*dict.fromkeys((*self.rounds[-1].changed, *lines))], self.rounds[-1].planned
        last = Round(after=step, began=time.time(), changed=tuple(lines), planned=planned)
        rounds = (*(each for each in self.rounds if each.after < step), last)
        return self._with(rounds, max(planned, step + self.recipe.train.continue_steps))

    def _with(self, rounds: tuple[Round, ...], steps: int) -> Training:
        train = self.recipe.train.model_copy(update={"steps": steps})
        return self.model_copy(update={"recipe": self.recipe.model_copy(update={"train": train}), "rounds": rounds})

    def store(self, folder: Path) -> None:
        """Write this into `folder`, whole or not at all."""
        atomic_write(folder / TRAINING_FILE, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Training | None:
        """Return the training in `folder`, None where there is none.

        Raises:
            RunError: its file is damaged.
        """
        path = folder / TRAINING_FILE
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise RunError(f"{path} is damaged, or another version wrote it; use --fresh to start over") from error


def newest_step(folder: Path) -> int:
    """Return the step of the newest checkpoint in the training's `folder`, 0 without any."""
    return max((int(path.stem) for path in (folder / CHECKPOINTS).glob("[0-9]*.pt")), default=0)


@dataclass(frozen=True)
class RankResult:
    """Result of a rank: whether the end of another rank ended it."""

    peer_lost: bool


def train_task(folder: str, session: str, info: RankInfo) -> Record[RankResult]:
    """Train in `folder` as the rank of `info` until all steps are taken, for the driver that locks it as `session`."""
    peer_lost = False

    def check() -> None:
        check_holder(Path(folder), session)

    def outcomes() -> Outcomes:
        nonlocal peer_lost
        from volpipe.training.distributed import PeerLost, join_ranks
        from volpipe.training.loop import train

        training = Training.load(Path(folder))
        assert training is not None, "the driver stores it before it sends anything"
        recipe, search_path = training.recipe, training.search_path

        def check_all() -> None:
            check()
            check_unchanged(RunFolder(Path(folder)).inputs, recipe, search_path)

        try:
            with join_ranks(info, Path(folder), check) as group:
                trial, begun = training.is_trial, training.begun
                train(
                    recipe, Path(folder), search_path, check_all, group, is_trial=trial, begun=begun, net=training.net
                )
        except PeerLost:
            peer_lost = True
            raise
        yield info.rank, None

    return work(STAGE, [info.rank], outcomes(), lambda: RankResult(peer_lost), Reporter(Path(folder), session))
