"""The outcome of a training: losses and scores as text, their curves as a picture, and a recipe to run the weights.

Not here: the training (training.driver, training.task), or printing. Everything is read from the log in the training's
folder.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from pathlib import Path

from volpipe.errors import VolumeError
from volpipe.inference.statistics import affine, in_numbers
from volpipe.nets.trained import UNITS, Trained
from volpipe.recipes.inference import Recipe
from volpipe.recipes.training import RUN_RECIPE, WEIGHTS, TrainRecipe, run_sections
from volpipe.reporting.panels import Panel, curve, panels_png
from volpipe.runs.provenance import settings_of
from volpipe.training.data.volumes import resolve_address
from volpipe.training.logs import SCORES, near_chance, no_better, read_log
from volpipe.training.task import Training
from volpipe.volumes.volume import open_volume

CURVE = "curve.png"  # in a training's folder
Points = list[tuple[int, float]]  # step and value


def read_points(folder: Path, name: str) -> Points:
    """Return step and value of each log entry in `folder` with the key `name`."""
    return [(int(entry["step"]), entry[name]) for entry in read_log(folder) if name in entry]


def outcome_lines(folder: Path) -> Iterator[str]:
    """Yield a line of losses, one of each score, and one of each round over volumes that had changed."""
    losses = read_points(folder, "loss")
    if losses:
        shown = dict(losses[index] for index in (0, len(losses) // 2, -1))
        yield f"loss: {', '.join(f'{loss:.4g} at step {step:,}' for step, loss in shown.items())}"
    scored = False
    for name in SCORES:
        if points := read_points(folder, name):
            scored, (step, last), best = True, points[-1], max(points, key=lambda point: point[1])
            unit = UNITS.get(name, "")
            if math.isnan(last):
                yield f"held out: {name} is nan: labels are alike there; give data.held_out, a box with more in it"
                continue
            before = "" if points[0][0] else f"{points[0][1]:.4g}{unit} before, "
            of_all = f" of {len(points)} values" if len(points) > 1 else ""
            most = f"best{of_all} {best[1]:.4g}{unit} at step {best[0]:,}"
            yield f"held out: {name} {before}{last:.4g}{unit} at step {step:,}, {most}"
    if not scored:
        yield "nothing was held out and scored: data.held_out and train.validate_every tell how good the net is"
    yield from box_lines(folder)
    for each in () if (training := Training.load(folder)) is None else training.rounds:
        yield f"continued {each}"
    yield from filter(None, (no_better(folder), near_chance(folder)))


def box_lines(folder: Path) -> Iterator[str]:
    """Yield a line on what the held-out boxes of a training chose, and one of the scores in its test boxes."""
    trained = Trained.of(folder / WEIGHTS)
    if trained is None:
        return
    if trained.held_out is not None and trained.held_out.chose:
        advice = "" if trained.test is not None else "; data.test gives a box by which nothing is chosen"
        yield f"held out: {trained.held_out.summary()}{advice}"
    if trained.test is not None:
        yield f"test: {trained.test.summary()}"


def draw_curve(folder: Path) -> Path | None:
    """Draw losses and scores over the steps, and return the picture's path in `folder`; None without a log."""
    rows = []
    for name in ("loss", *SCORES):
        points = read_points(folder, name)
        if points:
            low, high = min(value for _, value in points), max(value for _, value in points)
            title = f"{name}, {low:.3g} (bottom) to {high:.3g} (top), steps {points[0][0]:,} to {points[-1][0]:,}"
            rows.append([Panel(title, curve(points))])
    if not rows:
        return None
    (folder / CURVE).write_bytes(panels_png(rows))
    return folder / CURVE


def run_command(recipe: TrainRecipe, folder: Path, search_path: str) -> str:
    """Write a recipe that runs the weights in `folder` on volumes like the training's; return the command with it.

    It holds the training's normalisation in numbers, so that it does not depend on a volume's type, of images the
    intensity "same": the net learnt normalised grey levels, and of affinities their offsets.

    Raises:
        VolumeError: the volume is gone, and no such recipe was written before.
    """
    first, weights = recipe.data[0], folder / WEIGHTS
    try:
        normalise = recipe.normalise
        if not first.stored:
            dtype = open_volume(resolve_address(first.path, search_path), first.key, level=first.level).dtype
            normalise = in_numbers(normalise, affine(normalise, dtype, None))
    except VolumeError:  # the volume may go once its training is done
        if not (folder / RUN_RECIPE).is_file():
            raise
    else:
        chosen = Recipe.model_validate(run_sections(recipe))
        net = chosen.net.model_copy(update={"weights": str(weights.absolute())})
        chosen = chosen.model_copy(update={"net": net, "normalise": normalise})
        (folder / RUN_RECIPE).write_text("\n".join(settings_of(chosen)) + "\n", encoding="utf-8")
    volume = "VOLUME" if first.stored else f"{first.path}/{first.key}" if first.key else first.path
    return shlex.join(["volpipe", "run", "--recipe", str(folder / RUN_RECIPE), volume])
