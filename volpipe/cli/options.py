"""What commands have in common: how options are typed, and completed on Tab.

Not here: any command (groups lists them), or what an option means, which its function says (generate). What Tab asks
for is read from names of files and types of keys; no heavy package is imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option
from typer.models import ArgumentInfo, OptionInfo

import volpipe as vp
from volpipe.errors import VolpipeError

if TYPE_CHECKING:
    from pydantic import BaseModel

LEAST_SECONDS = 0.1  # between two looks at work
Choices = Iterator[tuple[str, str]]  # what may stand there, each with a word about it


def complete_site(incomplete: str) -> Choices:
    """Yield the shipped sites, and Python files, that begin so."""
    from volpipe.sites.find import list_sites

    yield from ((name, line) for name, line in list_sites().items() if name.startswith(incomplete))
    yield from _complete_files(incomplete, ".py")


def complete_recipe(incomplete: str) -> Choices:
    """Yield the shipped recipes, and TOML files, that begin so."""
    from volpipe.resolve import shipped_recipes

    yield from ((name, "shipped") for name in shipped_recipes() if name.startswith(incomplete))
    yield from _complete_files(incomplete, ".toml")


def complete_start(incomplete: str) -> Choices:
    """Yield the shipped recipes whose weights can be trained on, and folders, that begin so."""
    from volpipe.resolve import shipped_starts

    yield from ((name, "shipped") for name in shipped_starts() if name.startswith(incomplete))
    yield from _complete_files(incomplete)


def complete_volumes(incomplete: str) -> Choices:
    """Yield the TOML, CSV and text files, the volumes and the folders, that begin so."""
    from volpipe.volumes.formats.known import FORMATS

    suffixes = (suffix for each in FORMATS if each.files is not None for suffix in each.suffixes)
    yield from _complete_files(incomplete, ".toml", ".csv", ".txt", *suffixes)


def complete_net(incomplete: str) -> Choices:
    """Yield the shipped nets, and files of nets, that begin so."""
    from volpipe.resolve import shipped

    yield from ((name, "shipped") for name in shipped("volpipe.models") if name.startswith(incomplete))
    yield from _complete_files(incomplete, ".py", ".pt", ".pt2", ".onnx", ".zip")


def _complete_files(incomplete: str, *suffixes: str) -> Choices:
    """Yield the files with one of `suffixes`, and the folders, whose paths begin with `incomplete`."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = f"{path}/" if path.is_dir() else str(path)
        is_one = path.is_dir() or path.name.endswith(suffixes)
        if name.startswith(incomplete) and not path.name.startswith(".") and is_one:
            yield name, ""


def of_incomplete(is_read: bool) -> list[str]:
    """Return the setting by which a recipe reads an input that is not complete; none unless `is_read`."""
    return ["input.incomplete=true"] if is_read else []


def whole(text: str) -> int:
    """Return `text` as a whole number from 0."""
    return _whole_number(text, 0)


def positive(text: str) -> int:
    """Return `text` as a whole number from 1."""
    return _whole_number(text, 1)


def parse_sizes(text: str, option: str) -> tuple[int, int, int]:
    """Return three numbers z, y, x from text such as "64,128,128", "64x128x128", or "64" for all three.

    Raises:
        VolpipeError: they are none; `option` is named.
    """
    try:
        sizes = [int(part) for part in text.replace("x", ",").split(",")]
    except ValueError:
        sizes = []
    if len(sizes) == 1:
        sizes *= 3
    if len(sizes) != 3 or min(sizes) < 1:
        raise VolpipeError(f"{option} {text!r}: write one number above 0, or three, z,y,x, such as 64,128,128")
    z, y, x = sizes
    return z, y, x


def _whole_number(text: str | int, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise typer.BadParameter(f"{text} is not a whole number from {least}")
    return value


def share(text: str) -> float:
    """Return `text` as a number from 0 to 1."""
    value = amount(text)
    if value > 1:
        raise typer.BadParameter(f"{text} is not a number from 0 to 1")
    return value


def amount(text: str) -> float:
    """Return `text` as a number from 0."""
    value = number(text)
    if value < 0:
        raise typer.BadParameter(f"{text} is not a number from 0")
    return value


def seconds(text: str) -> float:
    """Return `text` as seconds between two looks; 0 for as often as is sensible."""
    value = amount(text)
    if 0 < value < LEAST_SECONDS:
        raise typer.BadParameter(f"{text} is less than {LEAST_SECONDS:g} s; give more")
    return value


def pause(text: str) -> float:
    """Return `text` as the seconds of a pause."""
    if not seconds(text):
        raise typer.BadParameter(f"{text} is no pause; give {LEAST_SECONDS:g} s or more")
    return seconds(text)


def number(text: str) -> float:
    """Return `text` as a number, neither infinite nor nan."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"{text} is not a number")
    return value


def sizes(option: typer.CallbackParam, text: str | None) -> tuple[int, int, int] | None:
    """Return the voxels (z, y, x) that `text` gives; one number is for all three."""
    return None if text is None else parse_sizes(text, option.opts[0])


def lengths(option: typer.CallbackParam, text: str) -> tuple[float, float, float]:
    """Return the lengths (z, y, x) in nm that `text` gives."""
    from volpipe.recipes.inference import typed_lengths

    return typed_lengths(option.opts[0], text)


def margin(option: typer.CallbackParam, text: str) -> tuple[int, int, int]:
    """Return the voxels (z, y, x), from 0, that `text` gives."""
    margins = _three(option, text, "three numbers, z,y,x, such as 4,0,0")
    if min(margins) < 0:
        raise VolpipeError(f"{option.opts[0]} {text!r}: give numbers from 0 up")
    return margins


def voxel(option: typer.CallbackParam, text: str | None) -> tuple[int, int, int] | None:
    """Return the voxel (z, y, x) that `text` names."""
    return None if text is None else _three(option, text, "three whole numbers, z,y,x, such as 24,512,512")


def _three(option: typer.CallbackParam, text: str, expected: str) -> tuple[int, int, int]:
    try:
        z, y, x = (int(part) for part in text.split(","))
    except ValueError:
        raise VolpipeError(f"{option.opts[0]} {text!r}: write {expected}") from None
    return z, y, x


Strict = Annotated[bool, Option("--strict", help="Stop at the first block that fails for good.")]
Parents = Annotated[bool, Option("--parents", help="Make the folder of the output, where there is none.")]
Incomplete = Annotated[
    bool,
    Option("--incomplete", help="Read outputs of volpipe that are not complete as they are; what is missing is zeros."),
]
WATCHED: Mapping[str, OptionInfo] = {
    "metrics": Option(
        metavar="PORT|HOST:PORT|FILE",
        help="Let Prometheus read how far it is: at a port of this machine, of HOST for others, or in FILE.prom.",
    ),
    "log_json": Option(
        metavar="FILE|-", help="Append the log to FILE as JSON lines; -: to standard error, in place of all else there."
    ),
    "notify": Option(
        metavar="URL", envvar="VOLPIPE_NOTIFY",
        help="Post a JSON object there at the end, also where it stops or is refused.",
    ),
}  # fmt: skip
"""Options of a command that machines watch."""
RESULT_FILES: Mapping[str, str] = {
    "file": "--out", "json_file": "--json", "log_json": "--log-json", "metrics": "--metrics", "page": "--page",
    "picture": "--picture", "recipe_out": "--recipe-out", "report": "--report", "table": "--csv",
}  # fmt: skip
"""Options that name one file to write, by their parameters."""


def _settings(example: str, recipe: Callable[[], type[BaseModel]]) -> OptionInfo:
    """Return the option for ``key=value`` of a kind of `recipe`, with an `example` in its help."""

    def complete(incomplete: str) -> Choices:
        from volpipe.recipes.complaints import keys

        yield from ((f"{key}=", "") for key in keys(recipe()) if key.startswith(incomplete))

    text = f"Change a key of the recipe, such as {example}; may be given several times."
    option: OptionInfo = Option("--set", metavar="KEY=VALUE", help=text, autocompletion=complete)
    return option


RECIPE_TO_TRAIN = Argument(metavar="RECIPE", autocompletion=complete_recipe)
TRAINING = Option("--out", "-o", metavar="FOLDER")
TRAIN_SETTINGS = _settings("train.steps=500", lambda: vp.TrainRecipe)
OPTIONS: Mapping[str, OptionInfo | ArgumentInfo] = {
    "annotated": Option(metavar="CLASS"),
    "at": Option(metavar="Z,Y,X", callback=voxel),
    "at_once": Option(metavar="N", parser=positive),
    "bin": Option(metavar="Z,Y,X", callback=sizes),
    "bind": Option(metavar="PORT"),
    "chunk": Option(metavar="Z,Y,X", help="Voxels; one number for all three.", callback=sizes),
    "codec": Option(metavar="CODEC"),
    "data_range": Option(metavar="NUMBER", parser=number),
    "file": Option("--out", "-o", metavar="FILE"),
    "folder": Option("--out", "-o", metavar="FOLDER"),
    "follow": Option(metavar="SECONDS", parser=pause),
    "format": Option(metavar="FORMAT"),
    "given": Option(metavar="VOLUME"),
    "ignore": Option(metavar="LABELS"),
    "json_file": Option("--json", metavar="FILE"),
    "level": Option(metavar="N", parser=whole),
    "limits": Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="Exit code 1 where it is violated: psnr=40 (dB, at least), differ=0.01 (share of voxels), mean=2, "
        "largest=9 (grey levels), voi=0.1 (bits); may be given several times.",
    ),
    "margin": Option(metavar="Z,Y,X", callback=margin),
    "mask": Option(metavar="VOLUME"),
    "only": Option(metavar="BOX"),
    "out": Option("--out", "-o", metavar="OUT"),
    "page": Option(
        metavar="FILE.html", help="The page with pictures; by default volpipe_A_B_compare.html in this folder."
    ),
    "recipe": Option(metavar="RECIPE", autocompletion=complete_recipe),
    "recompute": Option(metavar="K", parser=whole),
    "report": Option(metavar="HTML"),
    "roi": Option(metavar="BOX"),
    "seed": Option(metavar="N", parser=whole),
    "settings": _settings("windows.blend=hann", lambda: vp.Recipe),
    "shape": Option(metavar="Z,Y,X", callback=sizes),
    "shard": Option(metavar="Z,Y,X", callback=sizes),
    "skeletons": Option(metavar="PATH|labels"),
    "site": Option("--config", metavar="SITE", autocompletion=complete_site),
    "tolerate": Option(metavar="SHARE", parser=share),
    "voxel_size_nm": Option(metavar="Z,Y,X", callback=lengths),
    "wait_seconds": Option("--wait", metavar="SECONDS", parser=positive),
    "workers": Option(metavar="N", parser=positive),
    "batch.volumes": Argument(metavar="VOLUMES", autocompletion=complete_volumes),
    "check.site": Argument(metavar="SITE", autocompletion=complete_site),
    "check.volume": Argument(metavar="VOLUME"),
    "convert.out": Argument(metavar="OUT"),
    "evaluate.reference": Argument(metavar="REFERENCE"),
    "net.name": Argument(metavar="NAME", autocompletion=complete_net),
    "segment.settings": _settings("objects.threshold=0.4", lambda: vp.SegmentRecipe),
    "sweep.out": TRAINING,
    "sweep.recipe": RECIPE_TO_TRAIN,
    "sweep.settings": TRAIN_SETTINGS,
    "train.labels": Option(metavar="VOLUME"),
    "train.out": TRAINING,
    "train.recipe": RECIPE_TO_TRAIN,
    "train.settings": TRAIN_SETTINGS,
    "train.start": Option("--from", metavar="NAME|FOLDER", autocompletion=complete_start),
    "tune.out": TRAINING,
    "tune.recipe": RECIPE_TO_TRAIN,
    "tune.settings": TRAIN_SETTINGS,
    "view.output": Argument(metavar="OUT"),
    "view.volumes": Argument(metavar="VOLUME"),
}
"""What an argument of a function, or that of one command alone, is on the command line beyond its name and its type."""
