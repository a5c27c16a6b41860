"""`volpipe recipes` and `volpipe nets`: what ships with volpipe, each with a line on it.

Not here: sites (cli_sites), or the recipes and nets themselves. Nothing is executed: no torch, no net is built.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from volpipe.cli.display.console import out
from volpipe.resolve import shipped, shipped_recipe, shipped_recipes

Tree = Mapping[str, Any]  # Any: TOML values


def recipes() -> None:
    """List the shipped recipes: what each does, and the command that takes it."""
    for command in ("run", "segment", "train"):
        rows = [(name, line) for name, kind, line in _recipes() if kind == command]
        for name, line in rows:
            out.print(f"{name:<26}{line}", markup=False)
        if rows:
            out.print(f"{'':<26}{_how(command)}\n", markup=False)


def nets() -> None:
    """List the shipped nets: what each is, the options that it takes, and the recipes that have weights for it."""
    for name in shipped("volpipe.models"):
        line, options = _about(name)
        out.print(f"{name:<12}{line}", markup=False)
        if options:
            out.print(f"{'':<12}options: {', '.join(options)}", markup=False)
        known = list(_weights_of(name))
        if known:
            out.print(f"{'':<12}trained weights: by the recipes {', '.join(known)}", markup=False)
        else:
            out.print(f"{'':<12}no trained weights", markup=False)
    out.print(
        "\nvolpipe run --recipe RECIPE VOLUME runs a net with its weights; volpipe net NAME measures one", markup=False
    )


def _recipes() -> Iterator[tuple[str, str, str]]:
    """Yield name, command and first sentence of each shipped recipe."""
    for name in shipped_recipes():
        text = shipped_recipe(Path(name)).read_text(encoding="utf-8")
        tree = tomllib.loads(text)
        command = "train" if "train" in tree else "segment" if "objects" in tree else "run"
        comment = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
        yield name, command, _first_sentence(comment)


def _first_sentence(text: str) -> str:
    """Return `text` up to its first full stop, or to the command that follows a colon."""
    return text.partition(": volpipe ")[0].partition(". ")[0].rstrip(".:")


def _how(command: str) -> str:
    return "volpipe train NAME" if command == "train" else f"volpipe {command} --recipe NAME VOLUME"


def _about(net: str) -> tuple[str, list[str]]:
    """Return the first line of a net's docstring, and the options of its function with their defaults."""
    tree = ast.parse((Path(_models()) / f"{net}.py").read_text(encoding="utf-8"))
    line = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".:")
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == net)
    given = function.args
    plain = list(zip(reversed(given.args), reversed(given.defaults), strict=False))[::-1]
    named = [(each, default) for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return line, [f"{each.arg}={ast.unparse(default)}" for each, default in (*plain, *named) if default is not None]


def _models() -> str:
    import volpipe.models

    return str(volpipe.models.__path__[0])


def _weights_of(net: str) -> Iterator[str]:
    """Yield the shipped recipes of runs that have weights for `net`."""
    for name in shipped_recipes():
        tree: Tree = tomllib.loads(shipped_recipe(Path(name)).read_text(encoding="utf-8"))
        choice = tree.get("net", {})
        if "train" not in tree and choice.get("name") == net and choice.get("weights"):
            yield name
