"""Complaints: what is wrong with the values of a recipe, in sentences that name the key, the value and what fits.

Not here: what a recipe is (inference). The checks are pydantic's; the words are ours, and come from the types of the
keys.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from volpipe.resolve import nearest

Tree = Mapping[str, Any]  # Any: TOML values
NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four"}
PLAIN = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "a table"}
COMMANDS = {"stage": "`volpipe run`", "data": "`volpipe train`", "objects": "`volpipe segment`"}  # by section
OF_SEVERAL = ("value_error", "assertion_error")  # of our own checks, which look at several keys
MOST_SHOWN = 60  # characters of a value


def complain(
    error: ValidationError,
    model: type[BaseModel],
    tree: Tree,
    source: str,
    settings: Sequence[str] = (),
    stage: str = "",
) -> str:
    """Return what is wrong with `tree` as a `model`: each fault once, after the setting or file to blame.

    The file is called `source`. Of what `settings`, ``key=value`` on top of it, set, they are to blame, not the file;
    their keys begin with `stage` where `tree` is the recipe of one stage.
    """
    prefix = [stage] if stage else []
    problems = error.errors()
    of_sections = [problem for problem in problems if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1]
    unknown = {str(problem["loc"][0]) for problem in of_sections}
    command = next((command for key, command in COMMANDS.items() if key in unknown and key in tree), None)
    if command is not None and not any(setting.startswith(tuple(unknown)) for setting in settings):
        return f"{source} is a recipe of {command}; give it to that command, or another recipe to this one"
    lines: dict[str, list[str]] = {}
    for problem in problems:
        depth = len(problem["loc"])
        if any(len(other["loc"]) > depth and other["loc"][:depth] == problem["loc"] for other in problems):
            continue  # which says more
        names = _known_keys(model, problem["loc"])
        if problem["type"] == "extra_forbidden":
            names = [str(part) for part in problem["loc"]]
            line = f"unknown key {'.'.join(names)}{_alike(names, model)}"
        elif problem["type"] in OF_SEVERAL:
            line = f"{'.'.join(names)}: {problem['ctx']['error']}" if names else str(problem["ctx"]["error"])
        else:
            line = _misfit(model, names, tree)
        is_joint = problem["type"] in OF_SEVERAL
        blamed = _blamed([*prefix, *names], source, settings, is_joint=is_joint)
        if blamed.startswith(f"--set {'.'.join([*prefix, *names])}="):
            line = line.removeprefix(f"{'.'.join(names)}: ")
        lines.setdefault(blamed, []).append(line)
    return "; ".join(f"{blamed}: {'; '.join(dict.fromkeys(words))}" for blamed, words in lines.items())


def show_value(value: object) -> str:
    """Return `value` as a TOML file has it, on a line, cut where it is long."""
    if isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, str):
        text = f"'{value}'"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(show_value, value))}]"
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{key} = {show_value(inner)}' for key, inner in value.items())}}}"
    else:
        text = "not set" if value is None else str(value)
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 1]}…"


def _known_keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """Return the parts of `location` that are keys, or places in a list of sections; not those of pydantic's unions."""
    names: list[str] = []
    annotation: Any = model  # Any: a type, or a form of typing
    for part in location:
        annotation, _ = _type_of_key(annotation, part)
        if annotation is None:
            break
        names.append(str(part))
    return names


def _type_of_key(annotation: Any, part: int | str) -> tuple[Any, Sequence[Any]]:  # Any: a type, or a form of typing
    """Return type and limits of the key `part` in a value of this type, None where there is no such key."""
    section = _section(annotation)
    if isinstance(part, int) and section is not None:
        return section, ()
    if section is not None and (field := section.model_fields.get(str(part))) is not None:
        return field.annotation, field.metadata
    kinds = _union_members(annotation) if section is None and isinstance(part, str) else ()
    return next((get_args(kind)[1] for kind in kinds if get_origin(kind) is dict), None), ()


def _section(annotation: Any) -> type[BaseModel] | None:  # Any: a type, or a form of typing
    """Return the section that `annotation` is, or is a list of."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _union_members(annotation: Any) -> Iterator[Any]:  # Any: a type, or a form of typing
    """Yield the members of the union `annotation`, without None."""
    if get_origin(annotation) in (Union, types.UnionType):
        for kind in get_args(annotation):
            yield from _union_members(kind)
    elif annotation is not type(None):
        yield annotation


def _misfit(model: type[BaseModel], names: Sequence[str], tree: Tree) -> str:
    """Return the sentence that the value at `names` does not fit its key."""
    annotation: Any = model  # Any: a type, or a form of typing
    metadata: Sequence[Any] = ()
    value: Any = tree  # Any: a TOML value
    for name in names:
        annotation, metadata = _type_of_key(annotation, int(name) if name.isdigit() else name)
        if isinstance(value, Mapping) and name not in value:
            return f"{'.'.join(names)} is missing; give {phrases(annotation, metadata)[0]}"
        value = value[int(name)] if isinstance(value, list | tuple) else value[name]
    kinds = phrases(annotation, metadata)
    if isinstance(value, float) and not math.isfinite(value):
        kinds = [kind.replace("a number", "a finite number") for kind in kinds]
    joined = f"not {kinds[0]}" if len(kinds) == 1 else f"neither {' nor '.join(kinds)}"
    key = ".".join(names) or "the recipe"
    words = [word for kind in _union_members(annotation) if get_origin(kind) is Literal for word in get_args(kind)]
    return f"{key}: {show_value(value)} is {joined}{nearest(value, words) if isinstance(value, str) else ''}"


def phrases(annotation: Any, metadata: Sequence[Any]) -> list[str]:  # Any: a type, or a form of typing
    """Return a phrase for each kind of value that `annotation` takes."""
    return [_phrase(kind, metadata) for kind in _union_members(annotation)]


def _phrase(kind: Any, metadata: Sequence[Any]) -> str:  # Any: a type, or a form of typing
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _phrase(inner[0], [*metadata, *inner[1:]])
    if origin is Literal:
        words = ", ".join(str(word) for word in inner)
        return words if len(inner) == 1 else f"one of {words}"
    if origin is tuple and inner[-1] is not Ellipsis:
        axes = " [z, y, x]" if len(inner) == 3 else ""
        return f"a list of {NUMBERS.get(len(inner), len(inner))} {_plural(_phrase(inner[0], metadata))}{axes}"
    if origin in (tuple, list):
        if (section := _section(inner[0])) is not None:
            if getattr(section, "from_text", False):
                return f"a list of texts, or of tables with the keys {', '.join(section.model_fields)}"
            return "a list of sections, each begun as [[data]]"
        return f"a list of {_plural(_phrase(inner[0], ()))}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"a section, which has the keys {', '.join(kind.model_fields)}"
    return f"{PLAIN.get(origin or kind, 'a value')}{_bounds(metadata)}"


def _plural(phrase: str) -> str:
    """Return "a whole number from 1" as "whole numbers from 1"."""
    if not phrase.startswith("a "):
        return phrase if phrase.startswith("one of") else f"values {phrase}"
    for one, many in (("a list of ", "lists of "), ("a whole number", "whole numbers"), ("a number", "numbers")):
        if phrase.startswith(one):
            return f"{many}{phrase.removeprefix(one)}"
    return f"{phrase.removeprefix('a ')}s"


def _bounds(metadata: Sequence[Any]) -> str:  # Any: pydantic's and annotated_types'
    """Return " from 1", " above 0 up to 5" and the like; "" where any value will do."""
    flat = [part for entry in metadata for part in (entry.metadata if isinstance(entry, FieldInfo) else [entry])]
    words = ""
    for name, word in (("ge", "from"), ("gt", "above"), ("le", "to"), ("lt", "below")):
        for part in flat:
            bound = getattr(part, name, None)
            if bound is not None:
                words += f"{' and' if words and name == 'lt' else ''} {word} {bound:g}"
    pattern = next(filter(None, (getattr(part, "pattern", None) for part in flat)), None)
    if pattern is not None:
        words += " of letters, digits, - and _"
    return words


def _alike(names: Sequence[str], model: type[BaseModel]) -> str:
    """Return the key that an unknown one may mean, beside it or of the same name elsewhere; else all beside it."""
    annotation: Any = model  # Any: a type, or a form of typing
    for name in names[:-1]:
        annotation, _ = _type_of_key(annotation, int(name) if name.isdigit() else name)
    section = _section(annotation)
    fields = {} if section is None else section.model_fields
    meant = nearest(names[-1], fields)
    if meant:
        return meant
    namesake = next((key for key in keys(model) if key.rpartition(".")[2] == names[-1]), None)
    if namesake is not None:
        return f" (did you mean {namesake!r}?)"
    return f"; there are {', '.join(fields)}" if fields else ""


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the keys of `model` with their sections, such as windows.shape; of a list, those of its first section.

    Sections whose names the user gives are one key.
    """
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if section is None or get_origin(field.annotation) is dict:
            yield f"{prefix}{name}"
        else:
            place = "0." if get_origin(field.annotation) is tuple else ""
            yield from keys(section, f"{prefix}{name}.{place}")


def _blamed(names: Sequence[str], source: str, settings: Sequence[str], *, is_joint: bool) -> str:
    """Return who is to blame for what stands at `names`: a setting, the file, or the file with settings on top.

    With `is_joint` keys below `names` do not go together, of which the file may have some.
    """
    parts = {setting: tuple(setting.partition("=")[0].strip().split(".")) for setting in settings}
    place = tuple(names)
    own = [setting for setting, key in parts.items() if place[: len(key)] == key]
    if own:
        return f"--set {own[-1]}"
    around = [f"--set {setting}" for setting, key in parts.items() if key[: len(place)] == place]
    if not around:
        return source
    return " ".join([f"{source} with", *around]) if is_joint else around[-1]
