"""The page of commands: every option of the command line, read from Typer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperArgument

from volpipe.cli.app import app
from volpipe.cli.groups import commands as grouped

HEAD = """# Commands

`volpipe COMMAND -h` prints the same in a terminal. `volpipe --install-completion` completes commands, options, names of
recipes and keys on Tab. `volpipe --version` prints the version and the commit.

An output's folder must exist; `--parents` makes it. [Exit codes](exit-codes.md) say how a command ended, and
[environment variables](environment.md) what else it reads.
"""
Command = Any  # Any: typer's own copy of click has no public name


def page() -> str:
    """Return the page: the commands in the groups of the command line's help."""
    root = typer.main.get_command(app)
    commands = root.commands  # type: ignore[attr-defined]
    parts = [HEAD, _contents(commands)]
    for group, entries in grouped().items():
        parts.append(f"## {group.value}\n")
        for name in (entry.name for entry in entries):
            parts += [_command(path, command) for path, command in _leaves(f"volpipe {name}", commands[name])]
    return "\n".join(parts)


def _contents(commands: dict[str, Command]) -> str:
    names = [entry.name for entries in grouped().values() for entry in entries]
    leaves = [leaf for name in names for leaf in _leaves(f"volpipe {name}", commands[name])]
    rows = [f"| [`{path}`](#{_anchor(path)}) | {cell(_sentence(command))} |" for path, command in leaves]
    return "\n".join(["| command | what it does |", "|---|---|", *rows, ""])


def _leaves(path: str, command: Command) -> Iterator[tuple[str, Command]]:
    """Yield the commands of a group, which may itself be one."""
    inner = getattr(command, "commands", None)
    if inner is None or command.invoke_without_command:
        yield path, command
    for name, below in (inner or {}).items():
        yield from _leaves(f"{path} {name}", below)


def _command(path: str, command: Command) -> str:
    arguments = [each for each in command.params if isinstance(each, TyperArgument)]
    options = [each for each in command.params if not isinstance(each, TyperArgument) and not each.hidden]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *map(_place, arguments)])
    parts = [
        f"### {path}\n",
        inspect.cleandoc(command.help or "").replace("\b\n", "") + "\n",
        f"Usage: `{usage}`\n",
    ]
    if arguments:
        parts.append(
            "\n".join(
                [
                    "| argument | meaning |",
                    "|---|---|",
                    *(f"| `{_place(a)}` | {cell(a.help or '')} |" for a in arguments),
                    "",
                ]
            )
        )
    if options:
        parts.append(
            "\n".join(["| option | value | default | meaning |", "|---|---|---|---|", *map(_option, options), ""])
        )
    return "\n".join(parts)


def _place(argument: Command) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _option(option: Command) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    value = "" if option.is_flag else f"`{option.metavar or option.name.upper()}`"
    notes = [option.help or ""]
    if option.multiple and "several times" not in notes[0]:
        notes.append("May be given several times.")
    if option.envvar:
        notes.append(f"The environment variable `{option.envvar}` sets it too.")
    return f"| {names} | {cell(value)} | {_default(option)} | {cell(' '.join(notes))} |"


def _default(option: Command) -> str:
    if option.required:
        return "required"
    if option.is_flag or option.default in (None, ()):
        return ""
    return f"`{option.default}`"


def _sentence(command: Command) -> str:
    return " ".join((command.help or "").replace("\b\n", "").partition("\n\n")[0].split())


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]+", "-", heading.lower())


def cell(text: str) -> str:
    """Return `text` as a cell of a table holds it."""
    return " ".join(text.split()).replace("|", "\\|")
