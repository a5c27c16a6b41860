"""How far a training is while it runs, as whoever shows progress takes it: steps, loss, score and time left.

Not here: what is made of it (display.progress), or how a training that is under way is looked at (workflow.status).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from volpipe.blockwise.phase import Progress
from volpipe.blockwise.stage import Stage
from volpipe.training.logs import PACE_BYTES, SCORES, last_entries, read_pace, sampled_log

TRAIN = "train"  # name of the stage
LABELS = {"psnr": "PSNR", "auc": "AUC", "mean dice": "mean Dice"}


@dataclass
class TrainingProgress:
    """The progress of the training in `folder`, by its log; `began` as of `time.perf_counter`."""

    folder: Path
    began: float = field(default_factory=time.perf_counter)
    _score: str | None = field(default=None, init=False)

    def at(self, num_done: int, whole: int) -> Progress:
        """Return the progress after `num_done` of all steps, with the last loss and the last score."""
        stage, pace = Stage(TRAIN, whole), read_pace(self.folder)
        stage.mark_all(np.arange(min(num_done, whole)))
        loss = "" if pace is None else f"loss {pace.loss:.4g}"
        left = None if pace is None or not pace.speed else max(0, whole - num_done) / pace.speed
        words = ", ".join(filter(None, (loss, self._last_score())))
        return Progress([stage], self.began, words=words, seconds_left=left)

    def _last_score(self) -> str:
        """Return the last score in words, "" before the first; it may be far from the end of the log."""
        is_first, self._score = self._score is None, self._score or ""
        for entry in sampled_log(self.folder, 1, _is_scored) if is_first else last_entries(self.folder, PACE_BYTES):
            for name in SCORES:
                if name in entry and not math.isnan(entry[name]):
                    self._score = f"{LABELS[name]} {entry[name]:.4g} at step {int(entry['step']):,}"
        return self._score


def _is_scored(line: bytes) -> bool:
    """Return whether a line of the log has a score."""
    return any(f'"{name}"'.encode() in line for name in SCORES)
