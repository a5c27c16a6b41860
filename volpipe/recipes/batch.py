"""The batch: volumes, what to do with them, and a name for each output; settings of single datasets; parsed, listed.

Not here: whether the datasets can be run (workflow.batch), or their recipes (inference, workflow).

    recipe = "superres_z4"                          [[dataset]]
    volumes = ["raw/*.n5/em", "more.csv"]           volume = "raw/thick.n5/em"
    out = "restored/{stem}_{recipe}.zarr"           normalise.low = 20
"""

from __future__ import annotations

import csv
import glob
import json
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from volpipe.errors import RecipeError, VolpipeError, VolumeError
from volpipe.recipes.complaints import keys
from volpipe.recipes.inference import Input, Recipe
from volpipe.recipes.toml import Section, UserPath, leaves, load_tree, one_or_more, typed
from volpipe.resolve import nearest, path_of, with_home
from volpipe.text import read_text
from volpipe.volumes.formats.container import SUFFIXES, check_suffix, locate
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.object_store import Remote, parse
from volpipe.volumes.storage.paths import Location

FIELDS = ("stem", "key", "recipe")  # of an output's name
OWN = ("volume", "recipe", "out")  # what a table or a line of a CSV says beside settings
LISTS = (".csv", ".txt")
Mistake = tuple[str, str]  # a dataset, or the file that lists it, and a sentence


class BatchRecipe(Section):
    """What a batch's file says."""

    out: UserPath
    """The name of each output, by {stem}, {key} and {recipe}, or a folder for all of them."""
    volumes: Annotated[tuple[UserPath, ...], BeforeValidator(one_or_more)] = ()
    """Places, patterns, CSV files, text files of places, and prefixes of buckets."""
    recipe: UserPath | None = None
    """A shipped recipe or a TOML file, for all datasets that name none."""
    at_once: int | None = Field(None, ge=1)
    """Datasets that run at a time, at most."""
    dataset: tuple[dict[str, Any], ...] = ()  # Any: TOML values
    """A `[[dataset]]` for each volume with settings of its own: volume, recipe, out, and keys of its recipe."""


@dataclass(frozen=True, slots=True)
class BatchDataset:
    """A volume and what to do with it.

    Attributes:
        volume: its place.
        recipe: a shipped name or a file; None for the default one.
        out: where its output goes; a run's may lack the suffix.
        settings: ``key=value``, on top of the recipe.
        region: ``input.key=value``, on top of what reads the volume.
        line: where it is listed, "" where a pattern or the user names it.
    """

    volume: str
    recipe: str | None = None
    out: str = ""
    settings: tuple[str, ...] = ()
    region: tuple[str, ...] = ()
    line: str = ""

    @property
    def recipe_name(self) -> str:
        return Path(self.recipe).stem if self.recipe else "default"


def load_batch(path: Path) -> BatchRecipe:
    """Return the batch in the TOML file at `path`.

    Raises:
        RecipeError: no such file, no TOML, an unknown key or a value that does not fit.
    """
    if not path.is_file():
        raise RecipeError(f"no batch at {path}; give a TOML file, or volumes with --recipe and -o")
    tree = load_tree(path)
    if "stage" in tree or "net" in tree:
        raise RecipeError(f'{path} is a recipe, not a batch; name it in one, as recipe = "{path}", or give --recipe')
    return typed(BatchRecipe, tree, path)


def list_datasets(batch: BatchRecipe) -> tuple[list[BatchDataset], list[Mistake]]:
    """Return the datasets of `batch`, each with its output's place, and what is wrong with those that are left out.

    A table or a line of a CSV stands in place of what a pattern gives for the same volume.
    """
    mistakes: list[Mistake] = []
    tables: list[BatchDataset] = []
    for number, table in enumerate(batch.dataset, 1):
        with _collected(f"[[dataset]] {number}", mistakes):
            tables += _from_table(table, f"[[dataset]] {number}")
    plain: list[BatchDataset] = []
    for volume in batch.volumes:
        with _collected(volume, mistakes):
            listed = list(_datasets_of_entry(volume, mistakes))
            (tables if volume.lower().endswith(".csv") else plain).extend(listed)
    own = {str(paths.locate(table.volume)) for table in tables}
    datasets = [dataset for dataset in plain if str(paths.locate(dataset.volume)) not in own] + tables
    whole = []
    for dataset in datasets:
        with _collected(dataset.volume, mistakes):
            named = replace(dataset, recipe=dataset.recipe or batch.recipe)
            whole.append(
                replace(named, out=str(paths.locate(_named_output(dataset.out or template(batch.out), named))))
            )
    if not datasets and not mistakes:
        mistakes.append(("volumes", "the batch names no volume; give volumes, or a [[dataset]]"))
    return whole, mistakes


@contextmanager
def _collected(what: str, mistakes: list[Mistake]) -> Iterator[None]:
    """Take note of an error that is about `what`, and go on."""
    try:
        yield
    except (VolpipeError, OSError) as error:
        mistakes.append((what, str(error)))


def _from_table(table: Mapping[str, Any], line: str) -> list[BatchDataset]:  # Any: TOML values
    if not isinstance(table.get("volume"), str):
        raise RecipeError('it names no volume; write volume = "…"')
    for key in ("recipe", "out"):
        if not isinstance(table.get(key, ""), str):
            raise RecipeError(f"{key} = {table[key]!r} is not a text")
    tree = {key: value for key, value in table.items() if key not in OWN}
    return _datasets(table, {key: json.dumps(value) for key, value in leaves(tree)}, line)


def _datasets(head: Mapping[str, Any], settings: Mapping[str, str], line: str) -> list[BatchDataset]:  # Any: TOML
    """Return the datasets of a table; settings of the input, whose section may be left out, are kept apart."""
    places = expand(head["volume"])
    check_keys(settings)
    keyed = {f"input.{key}" if key in Input.model_fields else key: value for key, value in settings.items()}
    lines = [f"{key}={value}" for key, value in keyed.items()]
    region = tuple(line for line in lines if line.startswith("input."))
    rest = tuple(line for line in lines if not line.startswith("input."))
    recipe, out = head.get("recipe") and with_home(head["recipe"]), with_home(head.get("out") or "")
    return [BatchDataset(place, recipe or None, out, rest, region, line) for place in places]


def check_keys(names: Sequence[str] | Mapping[str, str]) -> None:
    """Refuse a key that no recipe has; one that begins with the name of a stage is known to that alone.

    Raises:
        RecipeError: with the key that it may mean.
    """
    known = (*OWN, *Input.model_fields, *keys(Recipe))
    for name in names:
        section = name.partition(".")[0]
        is_key = name in known or any(name.startswith(f"{key}.") for key in known)
        is_of_stage = "." in name and section not in Recipe.model_fields
        if not is_key and not is_of_stage:
            raise RecipeError(
                f"there is no setting {name!r}{nearest(name, known)}; give {', '.join(OWN)}, a key of [input] such as "
                "roi, mask or level, or any other with its section, such as normalise.low"
            )


def _datasets_of_entry(volume: str, mistakes: list[Mistake]) -> Iterator[BatchDataset]:
    """Yield the datasets that an entry of `volumes` stands for."""
    path = path_of(volume)
    if "://" not in volume and path.suffix.lower() in LISTS and not glob.has_magic(volume):
        yield from (_from_csv if path.suffix.lower() == ".csv" else _from_text)(path, mistakes)
    else:
        yield from (BatchDataset(place) for place in expand(volume))


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError as error:
        raise VolumeError(f"there is no file {path}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise VolumeError(f"{path} cannot be read as text: {error}") from error


def _from_text(path: Path, mistakes: list[Mistake]) -> Iterator[BatchDataset]:
    """Yield a dataset for each line of a text file but empty ones and those that begin with #."""
    count = len(mistakes)
    lines = [line.strip() for line in _read_text(path).splitlines()]
    places = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    for number, line in places:
        with _collected(f"{path}, line {number}", mistakes):
            yield from [BatchDataset(place, line=f"{path}, line {number}") for place in expand(line)]
    if not places and len(mistakes) == count:
        raise RecipeError(f"{path} names no volume")


def _from_csv(path: Path, mistakes: list[Mistake]) -> Iterator[BatchDataset]:
    """Yield a dataset for each line of a CSV file; its columns are `volume`, and what a table may say."""
    rows = list(csv.reader(_read_text(path).splitlines(), skipinitialspace=True))
    names = [name.strip() for name in rows[0]] if rows else []
    if "volume" not in names:
        raise RecipeError(f"{path} has no column named volume{f', but {names}' if names else '; it is empty'}")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise RecipeError(f"{path} has several columns named {', '.join(sorted(twice))}; leave all but one out")
    check_keys(names)
    if not any(any(row) for row in rows[1:]):
        raise RecipeError(f"{path} names no volume")
    for number, row in enumerate(rows[1:], 2):
        line = f"{path}, line {number}"
        with _collected(line, mistakes):
            if any(row):
                yield from _from_cells(dict(zip(names, row, strict=False)), len(row) - len(names), line)


def _from_cells(cells: Mapping[str, str], surplus: int, line: str) -> list[BatchDataset]:
    if surplus > 0:
        raise RecipeError(f"it has {surplus} more cells than there are columns; put a roi into quotes")
    values = {name: cell.strip() for name, cell in cells.items() if cell.strip()}
    if "volume" not in values:
        raise RecipeError("it names no volume")
    settings = {key: value for key, value in values.items() if key not in OWN}
    return _datasets(values, settings, line)


def expand(pattern: str) -> list[str]:
    """Return the places that `pattern` stands for, sorted; what follows its last * ? or [] is a key in each.

    Raises:
        VolumeError: it matches nothing, or a bucket cannot be listed.
    """
    pattern = pattern.removeprefix("file://")
    if "://" in pattern:
        return _expand_remote(pattern)
    path = str(path_of(pattern))
    if not glob.has_magic(path) or Path(path).exists():
        return [path]
    parts = Path(path).parts
    last = max(number for number, part in enumerate(parts) if glob.has_magic(part))
    places = sorted(glob.glob(str(Path(*parts[: last + 1])), recursive=True))  # noqa: PTH207  # sorted, as texts
    places = [place for place in places if Path(place).suffix not in (".run", ".batch", ".partial")]
    if not places:
        raise VolumeError(f"nothing matches {pattern}; relative names count from {Path.cwd()}")
    return [str(Path(place, *parts[last + 1 :])) for place in places]


def _expand_remote(pattern: str) -> list[str]:
    """Return the places that a pattern, or a prefix of N5 and Zarr containers, stands for in a bucket."""
    place = parse(pattern)
    if not glob.has_magic(place.key):
        return [str(inner) for inner in _containers(place)]
    parts = place.parts
    last = max(number for number, part in enumerate(parts) if glob.has_magic(part))
    folders: list[Location] = [replace(place, parts=())]
    for part in parts[: last + 1]:
        folders = [inner for folder in folders for inner in _matching(folder, part)]
    if not folders:
        raise VolumeError(f"nothing matches {pattern}")
    return [str(folder.joinpath(*parts[last + 1 :])) for folder in folders]


def _matching(folder: Location, part: str) -> list[Location]:
    if not glob.has_magic(part):
        return [folder / part]
    return [folder / name for name in paths.list_folders(folder) if fnmatchcase(name, part)]


def _containers(place: Remote) -> list[Location]:
    """Return `place`, or the containers right in it, where nothing of its name says that it is in one."""
    if not place.is_s3 or any(part.lower().endswith(SUFFIXES) for part in place.parts):
        return [place]
    inner: list[Location] = [place / name for name in paths.list_folders(place) if name.lower().endswith(SUFFIXES)]
    return inner or [place]


def template(out: str) -> str:
    """Return the name of every output: `out`, which is one, or the folder that they go to."""
    check_suffix(f"out {out}", out.partition("?")[0].rstrip("/"))
    if "{" in out or Path(out.partition("?")[0]).suffix.lower() in SUFFIXES:
        return out
    if "://" in out:
        address, mark, settings = out.partition("?")
        return f"{address.rstrip('/')}/{{stem}}{mark}{settings}"
    return f"{out.rstrip('/') or '/'}/{{stem}}"


def home(out: str) -> Location:
    """Return the folder in which all outputs that `out` names lie."""
    address, _, settings = template(out).partition("?")
    folder = address.partition("{")[0].rpartition("/")[0] or ("/" if address.startswith("/") else ".")
    return paths.locate(f"{folder}?{settings}" if settings and "://" in out else folder)


def _named_output(template: str, dataset: BatchDataset) -> str:
    fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    if unknown := sorted(fields - set(FIELDS)):
        raise RecipeError(
            f"out = {template!r}: there is no {{{unknown[0]}}}{nearest(unknown[0], FIELDS)}; an output is named by "
            f"{', '.join(f'{{{field}}}' for field in FIELDS)}"
        )
    inner = next((line.partition("=")[2].strip('"') for line in dataset.region if line.startswith("input.key=")), None)
    container, key = locate(dataset.volume, inner)
    return template.format(stem=container.stem, key=key.replace("/", "_"), recipe=dataset.recipe_name)
