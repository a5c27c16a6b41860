"""`volpipe train`: train a net by a recipe on a site's workers, and resume an interrupted training.

Not here: the training (api.training, training). Exit codes as in app.
"""

from __future__ import annotations

from typing import Any

import volpipe
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.cli.options import Parents
from volpipe.display import console
from volpipe.display.console import check_folder, interruptible, result_is_in_files, tell_report
from volpipe.display.progress import showing


@command(Group.MOST_USED, "train", place=9)
def train(recipe: str, out: str | None, *, parents: Parents = False, **options: Any) -> None:  # Any: values of options
    """Train a net by RECIPE; run the same command again to continue from the newest checkpoint."""
    from volpipe.api.training import training_folder
    from volpipe.training.progress import TrainingProgress

    result_is_in_files()
    folder = training_folder(recipe, out, options["start"])
    check_folder(f"--out {folder}", folder, parents=parents)
    with interruptible("run the same command again to continue from the newest checkpoint"), showing() as show:
        state, listener = TrainingProgress(folder), show()
        result = volpipe.train(
            recipe, out=folder, on_progress=lambda step, steps: listener(state.at(step, steps)), **options
        )
    if result.was_complete:
        console.out.print(f"{folder} has its {result.steps:,} steps already; nothing to do (--fresh starts over)")
    if result.was_stopped:
        console.out.print(
            f"stopped after {result.steps:,} steps, as {folder}/stop asks; run the same command again to continue"
        )
        return
    if not result.was_complete:
        console.out.print(f"took {result.steps:,} steps; the weights are in {result.weights}")
    for line in result.summary:
        console.out.print(line)
    if result.curve is not None:
        console.out.print(f"the curve is in {result.curve}")
    if not result.was_complete:
        tell_report(folder)
    if result.run_command:
        console.out.print(f"use the weights: {result.run_command}")
