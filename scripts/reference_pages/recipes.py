"""The page of recipes: every key with its type, default and description, read from the pydantic models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from reference_pages.commands import cell
from volpipe.recipes.batch import BatchRecipe
from volpipe.recipes.complaints import phrases
from volpipe.recipes.inference import Recipe
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.training import TrainRecipe
from volpipe.training.search.optuna import Choices, Range, TuneSection
from volpipe.workflow.kinds import KINDS as STAGES
from volpipe.workflow.recipe import Head

HEAD = """# Recipes

A recipe says what to do, in TOML. `--set section.key=value` changes single keys on the command line, and
`settings=[...]` in Python. A key that a recipe does not have is refused, with the one that you may mean.

Without `--recipe`, `volpipe run` takes the shipped recipe `default`, a small denoiser. `volpipe recipes` lists all that
ship. `--recipe none` has the defaults of this page. Lists have the axes z, y, x; `--set` takes them
as `[24,16,16]` and as `24,16,16`. Sizes are voxels of the input unless the text says otherwise.
"""
KINDS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("Runs", "`volpipe run`, `volpipe plan`, `volpipe batch` and `vp.run` read these.", Recipe),
    ("Segmentations", "`volpipe segment` and `vp.segment` read these.", SegmentRecipe),
    ("Trainings", "`volpipe train`, `sweep` and `tune` read these. A net has no default here.", TrainRecipe),
)
PARTS: tuple[tuple[str, str, tuple[tuple[str, type[BaseModel]], ...]], ...] = (
    (
        "Several stages",
        "A recipe that declares stages has nothing beside them ([Several stages](../flows.md)).",
        (
            ("[[stage]]", Head),
            *((f'[[stage]] of kind "{name}"', kind.keys) for name, kind in STAGES.items() if not kind.has_recipe),
        ),
    ),
    ("Batches", "The file of `volpipe batch` ([Batches](../batches.md)).", (("the file", BatchRecipe),)),
    (
        "Searches",
        "Tables of a training's recipe. `[sweep]` has lists of values by key; `[tune]` is for Optuna "
        "([Training and scores](../training.md)).",
        (("[tune]", TuneSection), ("a range of [tune.ranges]", Range), ("a choice of [tune.ranges]", Choices)),
    ),
)


def page() -> str:
    """Return the page, a section of it for each kind of recipe."""
    parts = [HEAD]
    for name, about, model in KINDS:
        parts.append(f"## {name}\n\n{about} {model.__doc__}\n")
        for title, kind in _sections(model):
            named = [(f"{title[:-1]}.{key}]", inner) for key, inner in _named(kind)]
            parts += [_table(*each, kind=name) for each in ((title, kind), *named)]
        if not any(field.is_required() for field in model.model_fields.values()):
            title = f"### All defaults ({name.lower()})"
            parts.append(f"{title}\n\nA key without a default is behind a #.\n\n{_as_toml(model)}")
    for name, about, models in PARTS:
        parts.append(f"## {name}\n\n{about}\n")
        parts += [_table(title, model, name) for title, model in models]
    return "\n".join(parts)


def _sections(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the sections of a recipe: their titles as in TOML, and their models."""
    for key, field in model.model_fields.items():
        inner = get_args(field.annotation)
        yield (f"[[{key}]]", inner[0]) if inner else (f"[{key}]", field.annotation)


def _named(section: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the keys of a section that hold others, in a list or by names that the user gives, and their models."""
    for key, field in section.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            inner = {dict: get_args(kind)[-1:], tuple: get_args(kind)[:1]}.get(get_origin(kind), ())
            name = f"{key}.NAME" if get_origin(kind) is dict else key
            yield from ((name, each) for each in inner if isinstance(each, type) and issubclass(each, BaseModel))


def _as_toml(model: type[BaseModel]) -> str:
    """Return a block of TOML with every key of a recipe."""
    lines = []
    for title, section in _sections(model):
        lines.append(f"\n{title}")
        for name, field in section.model_fields.items():
            value = field.get_default(call_default_factory=True)
            lines.append(f"# {name}" if value is None else f"{name} = {json.dumps(value)}")
    return "\n".join(["```toml", *lines, "```", ""]).replace("```toml\n\n", "```toml\n")


def _table(title: str, model: type[BaseModel], kind: str) -> str:
    """Return a table of the keys of a section; two headings of the page are never alike."""
    rows = [
        f"| `{name}` | {_types(field)} | {_default(field)} | {_described(model, name)} |"
        for name, field in model.model_fields.items()
    ]
    heading = f"### `{title}` ({kind.lower()})" if title.startswith("[") else f"### {title.capitalize()}"
    return "\n".join(
        [f"{heading}\n", f"{_first(model)}\n", "| key | value | default | |", "|---|---|---|---|", *rows, ""]
    )


def _first(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").partition("\n\n")[0].split())


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def _types(field: FieldInfo) -> str:
    if _is_section(field):
        return "a section"
    return cell(" or ".join(phrases(field.annotation, field.metadata)).replace("values such a value", "any values"))


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined and field.default_factory is None:
        return "required"
    if _is_section(field):
        return ""
    value: Any = field.get_default(call_default_factory=True)  # Any: that of a key
    return "" if value is None else f"`{cell(json.dumps(value))}`"


def _described(model: type[BaseModel], name: str) -> str:
    text = model.model_fields[name].description
    if not text:
        raise SystemExit(f"{model.__name__}.{name} has no description; write a text below it, for users")
    return cell(text)
