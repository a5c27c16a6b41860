"""A lesson: what a worker does of a training, from its folder's newest checkpoint to the end; and that folder.

Not here: the steps (train), or the driver that sends lessons (course). What arrives is names, what goes back a record.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from volpipe.errors import RunError
from volpipe.formats.files import atomic_write
from volpipe.journal import Record
from volpipe.lock import check_holder
from volpipe.seats import ALONE, PEER_LOST, Seat
from volpipe.task import Outcomes, work
from volpipe.training import TrainRecipe

TRAINING_FILE = "training.json"
STAGE = "train"


class Training(BaseModel):
    """What a folder says of its training.

    Attributes:
        recipe: what is done.
        search_path: folder that the recipe's relative names count from.
    """

    model_config = ConfigDict(frozen=True)

    recipe: TrainRecipe
    search_path: str

    def store(self, folder: Path) -> None:
        """Write this into `folder`, whole or not at all."""
        atomic_write(folder / TRAINING_FILE, self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: Path) -> Training | None:
        """Return what `folder` says, None where it says nothing.

        Raises:
            RunError: it is damaged.
        """
        path = folder / TRAINING_FILE
        if not path.is_file():
            return None
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            raise RunError(f"{path} is damaged, or another version wrote it; use --fresh to start over") from error


def learn(folder: str, session: str, seat: Seat = ALONE) -> Record:
    """Train in `folder` until all steps are taken, for the driver that holds it as `session`, as one of its ranks."""
    lost: list[str] = []

    def check() -> None:
        check_holder(Path(folder), session)

    def outcomes() -> Outcomes:
        from volpipe.ranks import PeerLost, joined
        from volpipe.train import train

        training = Training.load(Path(folder))
        assert training is not None, "the driver stores it before it sends anything"
        try:
            with joined(seat, Path(folder), check) as crew:
                train(training.recipe, Path(folder), training.search_path, check, crew)
        except PeerLost:
            lost.append(PEER_LOST)
            raise
        yield seat.rank, None

    return dataclasses.replace(work(STAGE, [seat.rank], outcomes()), result=tuple(lost))
