"""Recipes as files of TOML: read, changed by settings KEY=VALUE, made into typed values, and compared.

Not here: what may be set (inference, training, segmentation, workflow), or the words of refusals (complaints).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from volpipe.errors import RecipeError
from volpipe.recipes.complaints import complain, show_value
from volpipe.resolve import nearest, recipe_name, shipped_recipe, shipped_recipes, with_home
from volpipe.text import read_text, stand_in

NO_RECIPE = Path("none")  # the name of the recipe in which every key has its default
BARE_NUMBERS = re.compile(r"\s*[-+]?\d[\d.]*(\s*,\s*[-+]?\d[\d.]*)+\s*")  # a list whose brackets were left out


class Section(BaseModel):
    """A part of a recipe: unknown keys and infinite numbers are refused, values cannot be changed.

    The text below a key describes it to users: docs/reference/recipes.md is made from it. One of a list may be written
    as a text where it says so (`from_text`).
    """

    from_text: ClassVar[bool] = False
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)


S = TypeVar("S", bound=Section)
Count = Annotated[int, Field(ge=1)]
UserPath = Annotated[str, AfterValidator(with_home)]  # the place of a file, a volume or a net; workers may have no home
Sizes = tuple[Count, Count, Count]


def one_or_more(value: object) -> object:
    """Return a text as a list of it alone; anything else as it is."""
    return [value] if isinstance(value, str) else value


def load_tree(path: Path | None, settings: Sequence[str] = ()) -> dict[str, Any]:  # Any: TOML values
    """Return what the TOML file at `path` holds with ``key=value`` settings on top; `typed` checks it.

    Raises:
        RecipeError: no such file, or no TOML.
    """
    tree = {} if path is None or path == NO_RECIPE else _read_toml(path)
    set_values(tree, settings)
    return tree


def _read_toml(path: Path) -> dict[str, Any]:  # Any: TOML values
    """Return what the recipe at `path`, or the shipped one of that name, holds."""
    try:
        text = read_text(shipped_recipe(path))
        if instead := stand_in(text.encode()):
            raise RecipeError(f"{path} is not valid TOML, but looks like {instead}")
        return tomllib.loads(text)
    except FileNotFoundError as error:
        known = [*shipped_recipes(), str(NO_RECIPE)]
        raise RecipeError(
            f"no recipe at {path}{nearest(path.stem, known)}; give a TOML file, or the name of a shipped recipe: "
            f"{', '.join(known)}"
        ) from error
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}; give a TOML file") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML, for it holds no text; give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{name_of(path)} is not valid TOML: {error}") from error


def typed(
    model: type[S],
    tree: Mapping[str, Any],  # Any: TOML values
    source: str | Path | None,
    settings: Sequence[str] = (),
    stage: str = "",
) -> S:
    """Return `tree` as a recipe of the kind `model`.

    `source` is the file, or what messages call it; None where there is none. `settings`, ``key=value``, are in `tree`
    and not in the file; their keys begin with `stage` where `tree` is the recipe of one stage.

    Raises:
        RecipeError: an unknown key or a value that does not fit; the message names it, and the setting or the file.
    """
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        name = source if isinstance(source, str) else name_of(source)
        raise RecipeError(complain(error, model, tree, name, settings, stage)) from error


def name_of(path: Path | None) -> str:
    """Return what messages call the recipe at `path`."""
    return "the settings" if path is None or path == NO_RECIPE else recipe_name(path)


def differences(old: BaseModel, new: BaseModel) -> list[str]:
    """Return one line for each key in which two recipes, or the facts of two nets, differ: ``key: old -> new``."""
    before, after = dict(leaves(old.model_dump())), dict(leaves(new.model_dump()))
    keys = sorted(before.keys() | after.keys())
    return [
        f"{key}: {show_value(before.get(key))} -> {show_value(after.get(key))}"
        for key in keys
        if before.get(key) != after.get(key)
    ]


def set_values(tree: dict[str, Any], settings: Sequence[str]) -> None:  # Any: TOML values
    """Write the ``key=value`` of `settings` into `tree`, in any order: a section comes before its keys.

    What `tree` has for another net, or for a trained one, is dropped as `replaced_net` says. Of one key set twice the
    last value counts.

    Raises:
        RecipeError: as of `set_value`.
    """
    ordered = sorted(settings, key=lambda setting: setting.partition("=")[0].count("."))
    given: dict[str, Any] = {}  # Any: as above
    for setting in ordered:
        set_value(given, setting)
    if isinstance(tree.get("net"), dict) and isinstance(given.get("net"), dict):
        tree["net"] = replaced_net(tree["net"], given["net"])
    for setting in ordered:
        set_value(tree, setting)


def replaced_net(net: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:  # Any: TOML values
    """Return the section `net` without what the keys `given` replace: all for another name, weights for others."""
    if isinstance(name := given.get("name"), str) and name != net.get("name"):
        return {}
    one, several = ("weights", "weights_key"), ("ensemble", "combine")
    dropped: tuple[str, ...] = (*one, *several) if given.get("untrained") is True else ()
    dropped = one if "ensemble" in given else several if "weights" in given else dropped
    return {key: value for key, value in net.items() if key not in dropped}


def set_value(tree: dict[str, Any], setting: str) -> None:  # Any: TOML values
    """Write ``key=value`` into `tree`; the brackets of a list of numbers may be left out, for shells that read them.

    Raises:
        RecipeError: it has another form, or goes through a value as if that were a section.
    """
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise RecipeError(f"--set {setting!r}: write key=value, such as windows.blend=hann")
    written = f"[{text}]" if BARE_NUMBERS.fullmatch(text) else text
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    if isinstance(value, str) and not text.endswith(('"', "'")):  # what follows a # belongs to a name, too
        value = text
    *sections, last = key.strip().split(".")
    place: Any = tree  # a section, or a list of them
    for section in sections:
        if isinstance(place, list):
            if not section.isdigit() or int(section) >= len(place):
                raise RecipeError(f"--set {setting!r}: {section} is none of the {len(place)} there, counted from 0")
            place = place[int(section)]
        else:
            place = place.setdefault(section, {})
        if not isinstance(place, dict | list):
            raise RecipeError(f"--set {setting!r}: {section} holds a value, not a section")
    if isinstance(place, list):
        raise RecipeError(f"--set {setting!r}: {sections[-1]} is a list; say which of it, such as data.0.path")
    place[last] = value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:  # Any: recipe values
    """Yield the dotted key and the value of everything in `tree` that is no table."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
