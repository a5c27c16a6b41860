"""`volpipe recipes`, `nets` and `sites`: what ships with volpipe, each with a line on it; `sites check` tries one out.

Not here: the recipes, nets and sites themselves, or how a site is tried (apps.site_check). Listing executes nothing: no
torch, no net is built. Exit codes of `sites check`: 0 all well, 1 something would fail a run, 2 refused, 4 interrupted.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import volpipe as vp
from volpipe.cli.generate import command
from volpipe.cli.groups import Group, several
from volpipe.display.console import err, interruptible, out
from volpipe.display.sites import checkup_table
from volpipe.resolve import shipped, shipped_recipe, shipped_recipes
from volpipe.syntax import arguments, parse
from volpipe.units import duration

if TYPE_CHECKING:
    from volpipe.sites.findings import Answer

Tree = Mapping[str, Any]  # Any: TOML values
FAULTY = 1

sites_app = several("sites", Group.SITES, 1, "List the shipped sites, or check one.", is_command=True)


@command(Group.NETS, place=1)
def recipes() -> None:
    """List the shipped recipes: what each does, and the command that takes it."""
    for verb in ("run", "segment", "train"):
        rows = [(name, line) for name, kind, line in _recipes() if kind == verb]
        for name, line in rows:
            out.print(f"{name:<26}{line}")
        if rows:
            how = "NAME" if verb == "train" else "--recipe NAME VOLUME"
            out.print(f"{'':<26}volpipe {verb} {how}\n")


@command(Group.NETS, place=2)
def nets() -> None:
    """List the shipped nets: what each is, the options that it takes, and the recipes that have weights for it."""
    for name in shipped("volpipe.models"):
        line, options = _about(name)
        out.print(f"{name:<12}{line}")
        if options:
            out.print(f"{'':<12}options: {', '.join(options)}")
        known = ", ".join(_weights_of(name))
        weights = f"trained weights: by the recipes {known}" if known else "no trained weights"
        out.print(f"{'':<12}{weights}")
    out.print("\nvolpipe run --recipe RECIPE VOLUME runs a net with its weights; volpipe net NAME measures one")


def _recipes() -> Iterator[tuple[str, str, str]]:
    """Yield name, command and first sentence of each shipped recipe."""
    for name in shipped_recipes():
        text = shipped_recipe(Path(name)).read_text(encoding="utf-8")
        tree = tomllib.loads(text)
        verb = "train" if "train" in tree else "segment" if "objects" in tree else "run"
        comment = " ".join(line.lstrip("# ") for line in text.split("\n\n")[0].splitlines() if line.startswith("#"))
        # Up to its first full stop, or to the command that follows a colon.
        yield name, verb, comment.partition(": volpipe ")[0].partition(". ")[0].rstrip(".:")


def _about(net: str) -> tuple[str, list[str]]:
    """Return the first line of a net's docstring, and the options of its function with their defaults."""
    import volpipe.models

    tree = parse(Path(volpipe.models.__path__[0], f"{net}.py").read_text(encoding="utf-8"))
    line = (ast.get_docstring(tree) or "").partition("\n")[0].rstrip(".:")
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == net)
    return line, [f"{each.arg}={ast.unparse(default)}" for each, default in arguments(function) if default is not None]


def _weights_of(net: str) -> Iterator[str]:
    """Yield the shipped recipes of runs that have weights for `net`."""
    for name in shipped_recipes():
        tree: Tree = tomllib.loads(shipped_recipe(Path(name)).read_text(encoding="utf-8"))
        choice = tree.get("net", {})
        if "train" not in tree and choice.get("name") == net and choice.get("weights"):
            yield name


@sites_app.callback(invoke_without_command=True)
def sites(context: typer.Context) -> None:
    """List the shipped sites: where a run can run. `volpipe sites check SITE` tries one out."""
    if context.invoked_subcommand is not None:
        return
    for name, line in vp.list_sites().items():
        out.print(f"{name:<14}{line}")


@command(sites_app, "check_site")
def check(site: str, folder: str, volume: str | None, wait_seconds: float) -> None:
    """Start one block of each executor of SITE, and print what a worker finds there, beside what is here.

    Whatever differs, or would fail a run, is named. Nothing is left running.
    """

    def on_start() -> None:
        err.print(f"starting one block of each executor of {site}; waiting for at most {duration(wait_seconds)}")

    with interruptible("what was started is stopped"):
        checked = vp.check_site(
            site, folder, volume, wait_seconds=wait_seconds, on_start=on_start, on_answer=_print_answer
        )
    out.print(checkup_table(checked))
    found = checked.findings()
    for finding in found:
        out.print(finding.sentence if finding.is_fault else f"note: {finding.sentence}")
    num_faults = sum(finding.is_fault for finding in found)
    if num_faults:
        faults = "1 fault" if num_faults == 1 else f"{num_faults} faults"
        err.print(f"volpipe: site {site} has {faults}, named above")
        raise typer.Exit(FAULTY)
    out.print(f"site {site}: nothing found that would fail a run")


def _print_answer(answer: Answer) -> None:
    said = f"answered after {duration(answer.start_seconds)}" if answer.facts is not None else "did not answer"
    err.print(f"{answer.label} {said}")
