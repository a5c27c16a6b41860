"""The task of a training: one rank's steps from the folder's newest checkpoint to the end; and the folder's record.

Not here: the steps (loop), or the driver that sends the tasks (driver). Arguments are names, the result is a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from volpipe.blockwise.journal import Record
from volpipe.blockwise.notes import Reporter
from volpipe.blockwise.task import Outcomes, work
from volpipe.errors import RecipeError, RunError
from volpipe.nets.files import code_hash
from volpipe.recipes.training import CHECKPOINTS, TrainRecipe, check_same
from volpipe.runs.run_folder import RunFolder
from volpipe.training.data.volumes import check_unchanged
from volpipe.training.rank_info import RankInfo
from volpipe.volumes.storage.lock import check_holder
from volpipe.volumes.storage.paths import atomic_write

TRAINING_FILE = "training.json"
STAGE = "train"


class Training(BaseModel):
    """The recipe of a training, as its folder stores it.

    Attributes:
        search_path: folder that the recipe's relative names count from.
        code_sha256: of the code of the net when the training began; "" where it has none.
        is_trial: whether others like it read the same volumes, so that those of a node share decoded copies.
    """

    model_config = ConfigDict(frozen=True)

    recipe: TrainRecipe
    search_path: str
    code_sha256: str = ""
    is_trial: bool = False

    @classmethod
    def begin(cls, recipe: TrainRecipe, search_path: Path, *, is_trial: bool = False) -> Training:
        """Return the training of `recipe` with the code that its net has now."""
        code = code_hash(recipe.net.name, str(search_path))
        return cls(recipe=recipe, search_path=str(search_path), code_sha256=code, is_trial=is_trial)

    def check_same(self, other: Training, step: int) -> None:
        """Refuse to go on from `step` of this training as `other`, which would have made other weights by then.

        Raises:
            RecipeError: with the keys that differ, or the net whose code does.
        """
        check_same(self.recipe, other.recipe, step)
        if self.code_sha256 != other.code_sha256:
            raise RecipeError(
                f"the training at step {step} has other code of net {self.recipe.net.name}, which was edited since; "
                "undo the edit to continue, choose another --out, or use --fresh to start over"
            )

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
    """Result of a rank: whether it lost another rank, which ended it."""

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
                train(recipe, Path(folder), search_path, check_all, group, is_trial=training.is_trial)
        except PeerLost:
            peer_lost = True
            raise
        yield info.rank, None

    return work(STAGE, [info.rank], outcomes(), lambda: RankResult(peer_lost), Reporter(Path(folder), session))
