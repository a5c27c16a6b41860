"""What commands have in common: options with their completion on Tab, and a help that groups the commands.

Not here: any command. What Tab asks for is read from names of files and types of keys; no heavy package is imported.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup
from typer.models import OptionInfo

import volpipe as vp
from volpipe.display.console import err
from volpipe.monitoring.command import current

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typer._click import Context, HelpFormatter  # typer's own copy of click, which has no other name

GROUPS = {
    "Most used": ("run", "plan", "view", "status", "batch", "segment", "convert", "info", "train", "evaluate"),
    "Outputs": ("report", "verify", "compare", "reproduce", "top"),
    "Nets and recipes": ("recipes", "nets", "net", "sample"),
    "Search for settings": ("sweep", "tune"),
    "Sites and clusters": ("sites", "slurm", "k8s"),
}
LEAST_SECONDS = 0.1  # between two looks at work
Choices = Iterator[tuple[str, str]]  # what may stand there, each with a word about it


class Whole(TyperGroup):
    """Commands, each with its whole first sentence."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _sentence(each.help or "")) for name, each in self.commands.items()])


class Grouped(TyperGroup):
    """Commands in groups, each with its whole first sentence."""

    def list_commands(self, ctx: Context) -> list[str]:
        """Return the commands in the order of their groups."""
        return sorted(self.commands, key=[name for names in GROUPS.values() for name in names].index)

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the groups."""
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name, _sentence(self.commands[name].help or "")) for name in names])


def _sentence(text: str) -> str:
    """Return the first paragraph of a help text, on a line."""
    return " ".join(text.partition("\n\n")[0].split())


def complete_site(incomplete: str) -> Choices:
    """Yield the shipped sites, and Python files, that begin so."""
    from volpipe.sites.find import list_sites

    yield from ((name, line) for name, line in list_sites().items() if name.startswith(incomplete))
    yield from _files(incomplete, ".py")


def complete_recipe(incomplete: str) -> Choices:
    """Yield the shipped recipes, and TOML files, that begin so."""
    from volpipe.resolve import shipped_recipes

    yield from ((name, "shipped") for name in shipped_recipes() if name.startswith(incomplete))
    yield from _files(incomplete, ".toml")


def complete_volumes(incomplete: str) -> Choices:
    """Yield the TOML, CSV and text files, the volumes and the folders, that begin so."""
    yield from _files(incomplete, ".toml", ".csv", ".txt", ".h5", ".hdf5", ".tif", ".tiff", ".mrc", ".npy")


def complete_net(incomplete: str) -> Choices:
    """Yield the shipped nets, and files of nets, that begin so."""
    from volpipe.resolve import shipped

    yield from ((name, "shipped") for name in shipped("volpipe.models") if name.startswith(incomplete))
    yield from _files(incomplete, ".py", ".pt", ".pt2", ".onnx", ".zip")


def _files(incomplete: str, *suffixes: str) -> Choices:
    """Yield the files with one of `suffixes`, and the folders, whose paths begin with `incomplete`."""
    folder = Path(incomplete) if incomplete.endswith("/") else Path(incomplete).parent
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        name = f"{path}/" if path.is_dir() else str(path)
        if name.startswith(incomplete) and not path.name.startswith(".") and (path.is_dir() or path.suffix in suffixes):
            yield name, ""


Site = Annotated[
    str,
    typer.Option(
        "--config",
        metavar="SITE",
        help="Where to run: a shipped site (see `volpipe sites`) or a Python file.",
        autocompletion=complete_site,
    ),
]
RecipeFile = Annotated[
    Path | None,
    typer.Option(
        "--recipe",
        metavar="RECIPE",
        help="What to do: a shipped recipe (see `volpipe recipes`) or a TOML file; without one, the default recipe.",
        autocompletion=complete_recipe,
    ),
]


def _settings(example: str, recipe: Callable[[], type[BaseModel]]) -> OptionInfo:
    """Return the option for ``key=value`` of a kind of `recipe`, with an `example` in its help."""

    def complete(incomplete: str) -> Choices:
        from volpipe.recipes.complaints import keys

        yield from ((f"{key}=", "") for key in keys(recipe()) if key.startswith(incomplete))

    text = f"Change a key of the recipe, such as {example}; may be given several times."
    option: OptionInfo = typer.Option("--set", metavar="KEY=VALUE", help=text, autocompletion=complete)
    return option


Settings = Annotated[list[str] | None, _settings("windows.blend=hann", lambda: vp.Recipe)]
LabelSettings = Annotated[list[str] | None, _settings("objects.threshold=0.4", lambda: vp.SegmentRecipe)]
TrainSettings = Annotated[list[str] | None, _settings("train.steps=500", lambda: vp.TrainRecipe)]
SameInput = Annotated[
    bool, typer.Option("--same-input", help="Go on with a volume that was copied or touched, not changed.")
]
Incomplete = Annotated[
    bool,
    typer.Option(
        "--incomplete", help="Read outputs of volpipe that are not complete as they are; what is missing is zeros."
    ),
]
Update = Annotated[
    bool,
    typer.Option("--update", help="Compute again what rests on voxels of the input that changed, and no more."),
]
MeasureAgain = Annotated[
    bool, typer.Option("--measure-again", help="With --update: measure VOLUME again, and compute everything.")
]
Trust = Annotated[
    bool, typer.Option("--trust-model", help="Load a net's file that is code, TorchScript or torch.export.")
]
Parents = Annotated[bool, typer.Option("--parents", help="Make the folder of the output, where there is none.")]


def of_incomplete(is_read: bool) -> list[str]:
    """Return the settings of a recipe by which an input that is not complete is read, or none."""
    return ["input.incomplete=true"] if is_read else []


def whole(text: str) -> int:
    """Return `text` as a whole number from 0."""
    return _whole(text, 0)


def positive(text: str) -> int:
    """Return `text` as a whole number from 1."""
    return _whole(text, 1)


def _whole(text: str | int, least: int) -> int:
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


Follow = Annotated[
    float | None,
    typer.Option(
        "--follow",
        metavar="SECONDS",
        parser=pause,
        help="As --update, and so long after each end once more, until Ctrl-C or a file `stop` in the run's folder.",
    ),
]
Tolerate = Annotated[
    float,
    typer.Option(metavar="SHARE", help="Share of the blocks begun that may fail before the work stops.", parser=share),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first block that fails for good.")]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="PORT|HOST:PORT|FILE",
        help="Let Prometheus read how far it is: at a port of this machine, of HOST for others, or in FILE.prom.",
    ),
]
LogJsonOption = Annotated[
    str | None,
    typer.Option(
        "--log-json",
        metavar="FILE|-",
        help="Append the log to FILE as JSON lines; -: to standard error, in place of all else there.",
    ),
]
NotifyOption = Annotated[
    str | None,
    typer.Option(
        "--notify",
        metavar="URL",
        envvar="VOLPIPE_NOTIFY",
        help="Post a JSON object there at the end, also where it stops or is refused.",
    ),
]
WATCHED = {"metrics": MetricsOption, "log_json": LogJsonOption, "notify": NotifyOption}


def monitored(command: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives `command` the options by which machines watch it."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> None:  # Any: the command's own
            options = [named.pop(name) for name in WATCHED]
            place = current().begin(command, named.get("recipe"), *options)
            if place:
                err.print(f"metrics are at {place}")
            function(*arguments, **named)

        signature = inspect.signature(function, eval_str=True)
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, kind, default=None, annotation=option) for name, option in WATCHED.items()]
        parameters = [*signature.parameters.values(), *added]
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": None}
        return run

    return decorate
