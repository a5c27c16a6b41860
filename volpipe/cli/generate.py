"""Commands from the public functions that they call: arguments become options, and their first sentence is the help.

Not here: what differs on the command line (options), or what a command does. A function is read, not imported, so that
help costs no more than its text. What follows on the first sentence of an argument is for Python alone.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer
from typer import Argument, Option
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

import volpipe
from volpipe import syntax
from volpipe.cli.groups import COMMANDS, LAST, CommandEntry, Group
from volpipe.cli.options import OPTIONS, RESULT_FILES, WATCHED, Strict
from volpipe.display.console import err
from volpipe.errors import VolpipeError
from volpipe.monitoring.command import STANDARD_ERROR, current
from volpipe.resolve import path_of, places_of
from volpipe.volumes.storage.result_file import is_stream

REQUIRED, KEYWORD = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
IN_PYTHON = {"listener", "parents", "progress", "search_path", "view"}  # and callbacks, `on_…`
ITEM = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n     .*)*)", re.MULTILINE)  # of the section Args
SENTENCE = re.compile(r"\. (?=[A-Z])")
ELSEWHERE = re.compile(r"as of `(\w+)`")
Command = Callable[..., None]


@dataclass(frozen=True)
class Parameter:
    """An argument of a public function, as its signature and its docstring have it."""

    name: str
    annotation: str
    default: Any  # Any: a value of that type
    text: str

    @property
    def kind(self) -> Any:  # Any: a type
        """The type of the option: a list of texts, a flag, a number, or a text where anything else is possible too."""
        if "Sequence[str" in self.annotation:
            return list[str]
        types = self.annotation.split(" | ")
        plain = (kind for kind in (bool, int, float) if kind.__name__ in types and "str" not in types)
        return next(plain, str)

    @property
    def default_text(self) -> Any:  # Any: a value of an option
        """The default as it is typed: numbers of three axes with commas between them, nothing where a list is empty."""
        if self.default == ():
            return None
        return ",".join(f"{each:g}" for each in self.default) if isinstance(self.default, tuple) else self.default


def command(
    group: Group | typer.Typer, *functions: str, place: int = LAST, without: Collection[str] = (),
    cls: type[TyperCommand] | None = None,
) -> Callable[[Command], Command]:  # fmt: skip
    """Return a decorator that makes a function a command, with the arguments of public `functions` as its options.

    Parameters of the function that are annotated with an option come behind them. One that counts failures has --strict
    too, and one that has metrics the options by which machines watch it.

    Args:
        group: of the help in which it stands, at `place`, those without one by their names; or the command below which
            it stands, as `sites check`.
        without: arguments that are no options.
        cls: what parses what is typed.
    """

    def decorate(function: Command) -> Command:
        public = {name: each for of in functions for name, each in arguments_of(of).items()}
        is_watched = public.pop("metrics", None) is not None
        arguments = {
            name: each
            for name, each in public.items()
            if not (name in IN_PYTHON or name.startswith("on_") or name in without)
        }
        options = list(_options(function.__name__, arguments))
        own = inspect.signature(function, eval_str=True).parameters.values()
        options += [each for each in own if get_origin(each.annotation) is Annotated]
        if is_watched:
            options += [_parameter(name, None, str | None, info) for name, info in WATCHED.items()]

        @functools.wraps(function)
        def run(**values: Any) -> None:  # Any: values of options
            values = places_of(values)
            check_apart(values)
            if is_watched:
                watched = [values.pop(name) for name in WATCHED]
                if place := current().begin(function.__name__, values.get("recipe"), *watched):
                    err.print(f"metrics are at {place}")
            if values.pop("strict", False):
                values["tolerate"] = 0
            function(**values | {name: values[name] or [] for name in arguments if arguments[name].kind == list[str]})

        run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in options}
        if isinstance(group, Group):
            COMMANDS.append(CommandEntry(function.__name__, group, place, run, cls))
        else:
            group.command(cls=cls)(run)
        return run

    return decorate


def check_apart(values: Mapping[str, Any]) -> None:  # Any: values of options
    """Refuse options that name one file to write twice, or a file that the command reads or makes.

    Raises:
        VolpipeError: with the option and the file.
    """
    named = {name: values[name] for name in RESULT_FILES if isinstance(values.get(name), str)}
    others = [value for name, value in values.items() if name not in named]
    used = {_place_on_disk(text): text for value in others for text in _texts_of(value) if _place_on_disk(text)}
    for name, text in named.items():
        place = _place_on_disk(text)
        if place is not None and place in used:
            raise VolpipeError(
                f"{RESULT_FILES[name]} {text}: the command has this file for something else already "
                f"({used[place]}); name another file"
            )
        used[place] = f"{RESULT_FILES[name]} {text}"


def _texts_of(value: object) -> Iterator[str]:
    """Yield the texts of an option's value, and of KEY=VALUE what may name a file."""
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, str | Path):
            yield from (str(each), *filter(None, [str(each).partition("=")[2]]))


def _place_on_disk(text: str) -> str | None:
    """Return the place on a disk that `text` may name, links followed; None of streams and remote places."""
    if text == STANDARD_ERROR or "://" in text:
        return None
    with contextlib.suppress(VolpipeError, ValueError, OSError):
        path = path_of(text)
        return None if is_stream(path) or path.is_dir() else os.path.realpath(path)
    return None


def given_to(function: str, options: Mapping[str, Any]) -> dict[str, Any]:  # Any: values of options
    """Return those of `options` that are arguments of a public function."""
    return {name: options[name] for name in arguments_of(function) if name in options}


@functools.cache
def arguments_of(function: str) -> dict[str, Parameter]:
    """Return the arguments of a public function by their names."""
    # No more of the module is parsed than the signature and the docstring: Tab waits for this.
    text = _text_of_module(_modules()[function])
    head = re.search(rf'^def {function}\(.*?"""(?:.|\n)*?"""$', text, re.MULTILINE | re.DOTALL)
    assert head is not None
    node = syntax.parse(head[0]).body[0]
    assert isinstance(node, ast.FunctionDef)
    texts, parameters = _texts(ast.get_docstring(node) or ""), {}
    for each, default in syntax.arguments(node):
        is_many = each is node.args.vararg
        annotation = "Sequence[str]" if is_many or each.annotation is None else ast.unparse(each.annotation)
        value = () if is_many else REQUIRED if default is None else _value(default)
        parameters[each.arg] = Parameter(each.arg, annotation, value, texts.get(each.arg, ""))
    return parameters


def _texts(docstring: str) -> dict[str, str]:
    """Return what a docstring says of each argument, also where it leaves that to another function."""
    texts = {}
    for names, text in ITEM.findall(docstring.partition("\nArgs:\n")[2].partition("\n\n")[0]):
        elsewhere = ELSEWHERE.match(text)
        for name in names.split(", "):
            texts[name] = arguments_of(elsewhere[1])[name].text if elsewhere else " ".join(text.split())
    return texts


def _value(default: ast.expr) -> Any:  # Any: a default
    """Return a default that is written out; None where it is not, as of callbacks."""
    try:
        return ast.literal_eval(default)
    except ValueError:
        return None


@functools.cache
def _modules() -> dict[str, str]:
    """Return the module of each public name, as the stub of the package has it."""
    stub = syntax.parse(Path(volpipe.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [each for each in stub.body if isinstance(each, ast.ImportFrom)]
    return {alias.name: str(each.module) for each in imports for alias in each.names}


@functools.cache
def _text_of_module(module: str) -> str:
    files = (Path(folder, *module.split(".")).with_suffix(".py") for folder in volpipe.__path__)
    return next(file for file in files if file.is_file()).read_text(encoding="utf-8")


def _options(command: str, arguments: Mapping[str, Parameter]) -> Iterator[inspect.Parameter]:
    """Yield the options of `command`, by the `arguments` of its functions."""
    named = {name: _option_of(command, each) for name, each in arguments.items()}
    words = {name: _word(name, info) for name, info in named.items()}
    for name, argument in arguments.items():
        info = copy.copy(named[name])
        # The first sentence of what the argument is, with other arguments named as they are typed.
        sentence = SENTENCE.split(argument.text)[0].rstrip(".")
        sentence = re.sub(r"`(\w+)`", lambda match: words.get(match[1], match[0]), sentence)
        info.help = info.help or (f"{sentence[:1].upper()}{sentence[1:]}." if sentence else "")
        kind, default = argument.kind, argument.default_text
        yield _parameter(name, default, kind if default is not None else kind | None, info)
        if name == "tolerate":
            yield inspect.Parameter("strict", KEYWORD, default=False, annotation=Strict)


def _parameter(name: str, default: object, kind: Any, info: OptionInfo | ArgumentInfo) -> inspect.Parameter:
    return inspect.Parameter(name, KEYWORD, default=default, annotation=Annotated[kind, info])  # Any: a type


def _option_of(command: str, argument: Parameter) -> OptionInfo | ArgumentInfo:
    """Return the option of an argument, without its help."""
    name = argument.name
    differing = OPTIONS.get(f"{command}.{name}") or OPTIONS.get(name)
    if differing is not None:
        return differing
    is_argument = argument.default is REQUIRED
    new: OptionInfo | ArgumentInfo = Argument(metavar=name.upper()) if is_argument else Option(_dashed(name))
    return new


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _word(name: str, info: OptionInfo | ArgumentInfo) -> str:
    """Return how help speaks of an option."""
    if isinstance(info, ArgumentInfo):
        return info.metavar or name.upper()
    return info.default if isinstance(info.default, str) else _dashed(name)
