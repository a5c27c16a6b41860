"""The app of a training: one for each of its ranks.

Not here: what it does (volpipe.lesson).
"""

from __future__ import annotations

from volpipe import lesson
from volpipe.apps.app import App, Resources
from volpipe.blockwise.journal import Record
from volpipe.seats import RankInfo


def train(folder: str, session: str, rank: RankInfo, parsl_resource_specification: Resources) -> Record:
    return lesson.train_task(folder, session, rank)


APPS = {"train": App(train, "gpu")}
