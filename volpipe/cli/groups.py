"""The list of commands, in the groups of the help: each file of a command adds its own.

Not here: what their options are (generate), or how they are typed (options).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import typer
from typer.core import TyperCommand, TyperGroup

import volpipe.cli

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter  # typer's own copy of click, which has no other name

LAST = 100  # the place of a command that may stand anywhere in its group


class Group(Enum):
    """A group of commands: its title in the help."""

    MOST_USED = "Most used"
    OUTPUTS = "Outputs"
    NETS = "Nets and recipes"
    SEARCH = "Search for settings"
    SITES = "Sites and clusters"


@dataclass(frozen=True)
class CommandEntry:
    """A command in its group.

    Attributes:
        place: in the group; those of one place stand by their names.
        run: the command, or those below it.
        parser: the class that parses what is typed, if not Typer's.
    """

    name: str
    group: Group
    place: int
    run: Callable[..., None] | typer.Typer
    parser: type[TyperCommand] | None = None


COMMANDS: list[CommandEntry] = []  # by the files that were imported


def several(name: str, group: Group, place: int, help: str, *, is_command: bool = False) -> typer.Typer:
    """Return the command `name` with others below it, which stands in the help of `group`.

    Args:
        is_command: whether it does something by itself, without one of those.
    """
    below = typer.Typer(cls=Subcommands, no_args_is_help=not is_command, rich_markup_mode=None, help=help)
    COMMANDS.append(CommandEntry(name, group, place, below))
    return below


def commands() -> dict[Group, list[CommandEntry]]:
    """Return all commands of all files beside this one, by groups, in the order of the help."""
    for module in pkgutil.iter_modules(volpipe.cli.__path__):
        importlib.import_module(f"{volpipe.cli.__name__}.{module.name}")
    ordered = sorted(COMMANDS, key=lambda entry: (entry.place, entry.name))
    return {group: [entry for entry in ordered if entry.group is group] for group in Group}


class Subcommands(TyperGroup):
    """A command's help with its subcommands, each with its whole first sentence."""

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _sentence(each.help or "")) for name, each in self.commands.items()])


class Grouped(TyperGroup):
    """The help of volpipe: commands in groups, each with its whole first sentence."""

    def list_commands(self, ctx: Context) -> list[str]:
        """Return the commands in the order of their groups."""
        return [entry.name for entries in commands().values() for entry in entries]

    def format_commands(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the groups."""
        for group, entries in commands().items():
            with formatter.section(group.value):
                formatter.write_dl([(entry.name, _sentence(self.commands[entry.name].help or "")) for entry in entries])


def _sentence(text: str) -> str:
    """Return the first paragraph of a help text, on a line."""
    return " ".join(text.partition("\n\n")[0].split())
