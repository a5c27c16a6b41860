"""The app of a training: one for each of its ranks.

Not here: what it does (volpipe.training.task).
"""

from __future__ import annotations

from volpipe.apps.app import App, Resources
from volpipe.blockwise.journal import Record
from volpipe.training import task
from volpipe.training.rank_info import RankInfo


def train(
    folder: str, session: str, rank: RankInfo, parsl_resource_specification: Resources
) -> Record[task.RankResult]:
    return task.train_task(folder, session, rank)


APPS = {"train": App(train, "gpu")}
