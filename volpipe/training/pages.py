"""The report of a training: how far it is, its losses and scores, its recipe, and predictions of held-out windows.

Not here: what is logged (loop), which windows are predicted (validate), or the reports of many (training.search).
Nothing is computed: torch is not needed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from volpipe.blockwise.stage import Schedule, Stage
from volpipe.errors import RunError
from volpipe.inference.scratch import SOURCE_KEY
from volpipe.nets.trained import Trained
from volpipe.recipes.toml import Section as RecipeSection
from volpipe.recipes.training import TENSORS, TRUTH_KEY, WEIGHTS, TrainRecipe
from volpipe.reporting import frames
from volpipe.reporting.page import Chart, Draft, FactTable, Item, Page, Picture, Sentence, Sheet, columns_of
from volpipe.reporting.shades import Range, display_range, shaded
from volpipe.runs.pages import Parts, Taken, page_of
from volpipe.runs.provenance import toml
from volpipe.runs.run_folder import RunFolder
from volpipe.training.logs import near_chance, no_better, read_log, sampled_log
from volpipe.training.task import STAGE, RankResult, Training, newest_step
from volpipe.units import brief
from volpipe.volumes.volume import Volume, open_volume

SHOWN = ("loss", "psnr", "ssim", "auc", "mean dice")
HIGHER = ("psnr", "ssim", "auc", "mean dice")  # is better
MOST_POINTS = 400  # of a curve
SCORES = {
    "psnr": "PSNR, dB",
    "auc": "area under the curve",
    "accuracy": "accuracy",
    "mean dice": "mean Dice coefficient",
}
OTHERS = ("step", "time", "seconds", "waited", "rate", "norm", *SCORES)  # what is no loss
MOST_WINDOWS, MOST_BYTES = 4, 16 * 2**20  # of windows that are shown, decoded
EDGE = 240  # pixels of a window, about

Points = Mapping[str, Sequence[tuple[float, float]]]  # step and value, by series


def training_page(folder: RunFolder, *, with_pictures: bool = True) -> Page:
    """Return the report of the training in `folder`; of its pictures, those of losses, scores and held-out windows.

    Raises:
        RunError: there is no training.
    """
    training = Training.load(folder.path)
    if training is None:
        raise RunError(f"{folder.path} holds no training")
    recipe, newest, entries = training.recipe, newest_step(folder.path), list[dict[str, float]]()
    with contextlib.suppress(ValueError):  # a damaged log
        entries = read_log(folder.path)
    schedule = Schedule(Stage(STAGE, recipe.train.ranks, marked=False))
    taken = Taken.read(folder, lambda: schedule, (RankResult,))
    done = max([newest, *(int(entry["step"]) for entry in entries[-1:])])
    facts: dict[str, str | Sequence[str]] = {
        "net": f"{recipe.net.name}" + (f", {toml(recipe.net.options)}" if recipe.net.options else ""),
        "data": [f"{data.path}" for data in recipe.data],
        "steps": f"{done:,} of {recipe.train.steps:,}; newest checkpoint after step {newest:,}",
        "time of steps": brief(sum(float(entry.get("seconds", 0.0)) for entry in entries)),
    }
    facts |= {"continued": [str(each) for each in training.rounds]} if training.rounds else {}
    weights = folder.path / WEIGHTS
    if weights.is_file():
        facts["weights"] = str(weights)
        if (known := Trained.of(weights)) is not None and known.held_out is not None:
            facts["held out"] = known.held_out.summary()
        if known is not None and known.test is not None:
            facts["test"] = known.test.summary()
    is_complete = weights.is_file() and newest >= recipe.train.steps
    origin: list[Item] = [FactTable("Recipe: what differs from the defaults", changed_keys(recipe))]
    what = f"The training of {recipe.net.name}."
    pictures = [
        Draft("Losses and scores", lambda: [*curves(folder.path)], "Losses and scores"),
        Draft("Held-out windows", lambda: [*held_out_pictures(folder.path, recipe)], "Held-out windows"),
    ]
    said = filter(None, [no_better(folder.path), near_chance(folder.path)] if is_complete else [])
    scores = [*_scores(entries), *(Sentence(sentence, "warning") for sentence in said)]
    parts = Parts(folder.path.name, what, facts, scores, pictures if with_pictures else (), origin)
    return page_of(folder, taken, parts, is_complete=is_complete)


def changed_keys(recipe: RecipeSection) -> dict[str, str]:
    """Return the keys of a recipe that differ from the defaults, with their sections, and values as TOML has them."""
    entries: dict[str, str] = {}
    for name, section in recipe.model_dump(mode="json", exclude_defaults=True).items():
        tables = section if isinstance(section, list) else [section]
        for number, table in enumerate(tables):
            prefix = f"{name}.{number}" if tables is section else name
            values = table if isinstance(table, Mapping) else {"": table}
            entries |= {f"{prefix}.{key}".rstrip("."): toml(value) for key, value in values.items()}
    return entries


def _scores(entries: Sequence[Mapping[str, Any]]) -> list[Item]:
    """Return the first, the last and the best of losses and scores."""
    rows = []
    for name in SHOWN:
        values = [(int(entry["step"]), float(entry[name])) for entry in entries if entry.get(name) is not None]
        if not values:
            continue
        best = (max if name in HIGHER else min)(values, key=lambda pair: pair[1])
        rows.append((name, *(f"{value:.4g} (step {step:,})" for step, value in (values[0], values[-1], best))))
    if not rows:
        return [Sentence("No step is logged yet.")]
    return [Sheet("Losses and scores", ("", "first", "last", "best"), rows)]


# ---- curves and pictures


def curves(folder: Path) -> Iterator[Item]:
    """Yield charts of losses, scores and the learning rate in a training's log; a table of those with one value."""
    names = [f'"{name}"'.encode() for name in SCORES]
    entries = [*sampled_log(folder, MOST_POINTS, lambda line: any(name in line for name in names))]
    if not entries:
        yield Sentence("There is no step in the log yet.")
        return
    losses = dict.fromkeys(
        name for entry in entries for name in entry if not (name in OTHERS or name.startswith("dice "))
    )
    charts = {"Losses": ("loss", _points(entries, losses))}
    scores = [name for name in SCORES if any(name in entry for entry in entries)]
    charts |= {f"Score of held-out voxels: {SCORES[n]}": (SCORES[n], _points(entries, [n])) for n in scores}
    charts |= {"Learning rate": ("learning rate", _points(entries, ["rate"]))}
    single = []
    for title, (name, points) in charts.items():
        if any(len(some) > 1 for some in points.values()):
            yield curve(title, name, points, is_wide=title == "Losses")
        else:
            single += [(series, f"{y:.4g}", f"{x:,}") for series, some in points.items() for x, y in some]
    if single:
        yield Sheet("Values of one step", ("", "value", "after step"), single)
    if not scores:
        yield Sentence(
            "Nothing was held out and scored: data.held_out and train.validate_every tell how good the net is."
        )


def _points(entries: Sequence[Mapping[str, float]], names: Sequence[str] | Mapping[str, None]) -> Points:
    """Return the points of each series, as many as a curve has at most: evenly spread ones of more."""
    points = {name: [(entry["step"], entry[name]) for entry in entries if name in entry] for name in names}
    return {name: some[:: max(1, -(-len(some) // (2 * MOST_POINTS)))] for name, some in points.items()}


def curve(title: str, name: str, points: Points, *, is_wide: bool = False) -> Chart:
    """Return a chart of series of points; `is_wide`: on a logarithmic axis where they span more than a decade."""
    rows = [(series, x, y) for series, some in points.items() for x, y in some if math.isfinite(y)]
    values = [y for _, _, y in rows if y > 0]
    is_log = is_wide and len(values) == len(rows) > 0 and max(values) > 10 * min(values)
    scale = {"type": "log"} if is_log else {"zero": False}
    encoding: dict[str, dict[str, object]] = {
        "x": {"title": "step", "axis": {"tickMinStep": 1, "tickCount": 10}},
        "y": {"title": name, "scale": scale},
    }
    if len(points) == 1:  # the axis says what it is
        encoding["color"] = {"legend": None}
    changes = {"encoding": encoding, "mark": {"point": len(rows) <= 2 * len(points) * 20}}
    return Chart(title, "", "lines", columns_of(("series", "x", "y"), rows), changes)


def held_out_pictures(folder: Path, recipe: TrainRecipe) -> Iterator[Item]:
    """Yield inputs, predictions (of weights to start from, and the newest) and truth of held-out windows, if stored."""
    known = {Path(SOURCE_KEY).name, Path(TRUTH_KEY).name}
    labels = [path for path in (folder / TENSORS / "tensors").glob("*") if path.is_dir() and path.name not in known]
    paths = [path for label in labels for path in label.glob("[0-9]*") if path.name.isdecimal()]
    predictions = {int(path.name): str(path.relative_to(folder / TENSORS)) for path in paths}
    if not predictions:
        yield Sentence(
            "No pictures of held-out windows: the training stores no predictions; train.predict_every and "
            "data.held_out make it do so."
        )
        return
    step = max(predictions)
    names = {"Before": 0, "Prediction": step} if step and 0 in predictions else {"Prediction": step}
    volumes = {"Input": SOURCE_KEY} | {name: predictions[at] for name, at in names.items()} | {"Truth": TRUTH_KEY}
    windows = {name: _shown_windows(open_volume(folder / TENSORS, key)) for name, key in volumes.items()}
    is_coarse = windows["Input"].shape[2] < windows["Truth"].shape[2]  # fewer slices: seen from the side
    limits = _limits(windows, recipe)
    view = "from the side, xz," if is_coarse else "in their middle slice, xy,"
    channels = (
        " The first three channels of affinities are red, green and blue."
        if recipe.learns_labels and not recipe.learns_classes
        else " The first three regions are red, green and blue."
        if recipe.classes.regions
        else ""
    )
    before = "before the first step and " if "Before" in names else ""
    yield Sentence(f"Held-out windows {view} with what the net made of them {before}after step {step:,}.{channels}")
    for number in range(len(windows["Truth"])):
        _, down, across = _plane(windows["Truth"][number], is_coarse=is_coarse).shape
        for name, data in windows.items():
            image = shaded(_plane(data[number], is_coarse=is_coarse), limits[name])
            file = frames.drawn(image, (down, across), 1.0, is_known=False, edge=EDGE)
            yield Picture(f"{name}, window {number}", "", *file)


def _shown_windows(volume: Volume) -> np.ndarray:
    """Return some windows (n, c, z, y, x), at most three channels of each."""
    window = math.prod(volume.shape[1:]) * volume.dtype.itemsize
    num = max(1, min(MOST_WINDOWS, volume.shape[0], MOST_BYTES // window))
    data: np.ndarray = volume.open().read_raw((slice(0, num), slice(0, 3)))
    return data


def _plane(window: np.ndarray, *, is_coarse: bool) -> np.ndarray:
    """Return the middle slice (c, down, across) of a window (c, z, y, x): xz of a coarse one, else xy."""
    axis = 2 if is_coarse else 1
    image: np.ndarray = window.take(window.shape[axis] // 2, axis)
    return image


def _limits(windows: Mapping[str, np.ndarray], recipe: TrainRecipe) -> dict[str, Range]:
    """Return the values shown as black and white: the truth's range for images, 0 and 1 for affinities, all classes."""
    names = ("Input", "Truth") if recipe.learns_labels else ("Truth", "Truth")
    own, truth = (display_range(windows[name]) for name in names)
    if recipe.learns_labels:
        is_number = recipe.learns_classes and not recipe.classes.regions
        truth = (0.0, len(recipe.classes.names) - 1.0 if is_number else 1.0)
    return {"Input": own} | dict.fromkeys(("Before", "Prediction", "Truth"), truth)
