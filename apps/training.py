"""The app of a training: one for each of its ranks.

Not here: what it does (volpipe.lesson).
"""

from __future__ import annotations

from volpipe import lesson
from volpipe.apps.app import App, Resources
from volpipe.journal import Record
from volpipe.seats import Seat


def train(folder: str, session: str, seat: Seat, parsl_resource_specification: Resources) -> Record:
    return lesson.learn(folder, session, seat)


APPS = {"train": App(train, "gpu")}
