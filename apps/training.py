"""The app of a training: one for each of its ranks."""

from __future__ import annotations

from volpipe.apps.app import App

APPS = {"train": App("volpipe.training.task:train_task", "gpu")}
