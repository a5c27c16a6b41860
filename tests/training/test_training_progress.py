"""What is told of a training while it runs: its steps, the last loss and score, and the time that is left."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import pytest

from volpipe.display.progress import bar_counts, progress_line
from volpipe.recipes.training import LOSSES
from volpipe.training.logs import PACE_BYTES
from volpipe.training.progress import TrainingProgress

NOW = time.time()


def write_log(folder: Path, num_steps: int, scores: dict[int, dict[str, float]]) -> None:
    """Write the log of a training of two steps a second, whose loss is 1 / step."""
    with (folder / LOSSES).open("w") as file:
        for step in range(1, num_steps + 1):
            entry = {"step": step, "loss": 1 / step, "seconds": 0.5, "time": NOW - (num_steps - step) / 2}
            file.write(json.dumps(entry | scores.get(step, {})) + "\n")


@pytest.mark.parametrize(("name", "label"), [("psnr", "PSNR"), ("auc", "AUC"), ("mean dice", "mean Dice")])
def test_a_training_tells_its_last_loss_and_score(tmp_path: Path, name: str, label: str) -> None:
    write_log(tmp_path, 40, {10: {name: 0.5}, 30: {name: 0.875}})
    progress = TrainingProgress(tmp_path, time.perf_counter() - 20).at(40, 100)
    assert progress.words == f"loss 0.025, {label} 0.875 at step 30"
    assert progress.seconds_left == pytest.approx(30, rel=1e-3)
    line = progress_line(progress, 0.0)
    assert re.fullmatch(rf"20\.\d s: train 40/100; loss 0\.025, {label} 0\.875 at step 30, 30\.0 s left", line)
    assert list(bar_counts(progress)) == [("train", 40.0, 100.0, "step")]


def test_a_training_that_has_not_begun_tells_neither_tasks_nor_losses(tmp_path: Path) -> None:
    line = progress_line(TrainingProgress(tmp_path, time.perf_counter()).at(0, 100), 0.0)
    assert re.fullmatch(r"[\d.]+ m?s: starting", line)


def test_a_score_is_told_until_the_next_however_long_the_log_has_become(tmp_path: Path) -> None:
    write_log(tmp_path, 3, {2: {"auc": 0.75}})
    standing = TrainingProgress(tmp_path)
    assert standing.at(3, 5_000).words == "loss 0.3333, AUC 0.75 at step 2"
    write_log(tmp_path, 2_000, {2: {"auc": 0.75}})
    assert (tmp_path / LOSSES).stat().st_size > 1.5 * PACE_BYTES
    for each in (standing, TrainingProgress(tmp_path)):  # also of a training that continues
        assert each.at(2_000, 5_000).words == "loss 0.0005, AUC 0.75 at step 2"
    write_log(tmp_path, 2_000, {2: {"auc": 0.75}, 1_999: {"auc": math.nan}})  # labels alike: no score
    assert standing.at(2_000, 5_000).words == "loss 0.0005, AUC 0.75 at step 2"
    write_log(tmp_path, 2_000, {2: {"auc": 0.75}, 1_998: {"auc": 0.8}})
    assert standing.at(2_000, 5_000).words == "loss 0.0005, AUC 0.8 at step 1,998"
