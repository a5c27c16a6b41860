"""Names to code and files: a shipped name, `module:function`, a path to a Python file, or any path as users type it.

Not here: what is done with it. Files of a user's are the user's own code and run with the user's rights.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

from volpipe.errors import VolpipeError
from volpipe.user_code import FILE, AsItIs, running

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")
NO_PATHS = frozenset({"key", "channel", "settings"})  # arguments whose text may begin with ~ and is no path


def with_home(text: str) -> str:
    """Return the path `text` with the home of a user in place of `~` or `~name` at its beginning.

    That of a net may have a word before it, such as nnunet:~/folder.

    Raises:
        VolpipeError: there is no such user.
    """
    head, place = re.fullmatch(r"(\w+:(?=~))?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]  # it matches any
    if not place.startswith("~"):
        return text
    known = os.path.expanduser(place)  # noqa: PTH111  # a text, of which the rest stays as it is
    if known == place:
        raise VolpipeError(
            f"{text}: there is no user {place.partition('/')[0][1:]!r} whose home that is; write ./{place} for a file "
            "that is called so"
        )
    return (head or "") + known


def typed_place(value: V) -> V:
    """Return `value`, of an argument, with homes in place of `~` where it is a path or a list of them.

    A file in the current folder that is called ~name itself is written ./~name. Its path is from the root then: a path
    keeps no dot, and is not to be taken for a home later.
    """
    kind: Any = type(value)  # Any: its items are no part of it
    if kind in (list, tuple):
        items: Any = value
        return kind(map(typed_place, items))  # type: ignore[no-any-return]
    if not isinstance(value, str | Path):
        return value
    text = with_home(str(value))
    is_odd = isinstance(value, str) and value.startswith("./") and str(Path(value)).startswith("~")
    return type(value)(Path.cwd() / text if is_odd else text)


def path_of(text: str | os.PathLike[str]) -> Path:
    """Return the path that a user's `text` names; as `typed_place`."""
    return Path(typed_place(os.fspath(text) if isinstance(text, Path) else text))


def homes_known(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public `function` that knows homes by `~` in all of its arguments but NO_PATHS."""
    names = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*arguments: P.args, **named: P.kwargs) -> R:
        given = [
            value if name in NO_PATHS else typed_place(value)
            for name, value in zip((*names, *names[-1:] * len(arguments)), arguments, strict=False)
        ]
        return function(*given, **places_of(named))  # type: ignore[arg-type]  # of the same kinds

    return call


def places_of(named: Mapping[str, Any]) -> dict[str, Any]:  # Any: values of arguments
    """Return arguments by their names, with homes in place of `~` in all but NO_PATHS."""
    return {name: value if name in NO_PATHS else typed_place(value) for name, value in named.items()}


def load_module(path: Path) -> ModuleType:
    """Return the module in the Python file at `path`, executed afresh."""
    if not path.is_file():
        raise VolpipeError(f"no Python file at {path}")
    # of that file alone, for another folder may have one of its name
    name = f"{FILE}{path.stem}_{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path, loader=AsItIs(name, str(path)))
    if spec is None or spec.loader is None:
        raise VolpipeError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise
    return module


def load_function(reference: str, search_path: str = "") -> Callable[..., Any]:  # Any: a user's factory takes anything
    """Return the function that `reference` names: ``module:function`` or ``path/to/file.py:function``.

    Args:
        reference: the name.
        search_path: folder in which modules and relative files are looked for first.

    Raises:
        VolpipeError: no such module, file or function; the message lists what there is.
    """
    place, _, name = reference.rpartition(":")
    if not place:
        raise VolpipeError(f"{reference!r} names no function; write module:function or file.py:function")
    try:
        with contextlib.nullcontext() if place.startswith("volpipe.") else running(reference, search_path):
            module = load_module(Path(search_path) / place) if place.endswith(".py") else _import(place)
    except VolpipeError:
        raise
    except (Exception, SystemExit) as error:  # the file is the user's code
        raise VolpipeError(f"{place} cannot be loaded: {describe_error(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = sorted(key for key in vars(module) if not key.startswith("_"))
        raise VolpipeError(f"{place} has no function {name!r}; it has {', '.join(known)}")
    return function  # type: ignore[no-any-return]  # callable() narrows no further


def describe_error(error: BaseException) -> str:
    """Return type, message and place (file and line) of an error of the user's own code, on one line."""
    message = " ".join(str(error).split())
    others = ("<", str(Path(traceback.__file__).parent))  # the import system and the standard library
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(others) and "site-packages" not in frame.filename
    ]
    # A SyntaxError says where it is itself.
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own and type(error) is not SyntaxError else ""
    if isinstance(error, SystemExit):
        return f"it ends the program by sys.exit({message}){place}; move that below if __name__ == '__main__'"
    return f"{type(error).__name__}: {message}{place}" if message else f"{type(error).__name__}{place}"


def shipped(package: str) -> list[str]:
    """Return the names of the public modules in `package`, sorted."""
    folders = importlib.import_module(package).__path__
    return sorted(p.stem for folder in folders for p in Path(folder).glob("*.py") if not p.stem.startswith("_"))


def shipped_recipe(recipe: Path) -> Path:
    """Return the file of a recipe given as a path, or as the name of a shipped one: of a file in volpipe.configs."""
    if recipe.is_file() or recipe.parent != Path():
        return recipe
    file = _recipes() / (recipe.name if recipe.suffix == ".toml" else f"{recipe.name}.toml")
    return file if file.is_file() else recipe


def default_recipe() -> Path:
    """Return the file of the shipped default recipe, whatever lies in the current folder."""
    return _recipes() / "default.toml"


def shipped_recipes() -> list[str]:
    """Return the names of the shipped recipes, sorted."""
    return sorted(path.stem for path in _recipes().glob("*.toml"))


def shipped_starts() -> list[str]:
    """Return the names of the shipped recipes of runs whose training is a shipped recipe too, sorted."""
    names = shipped_recipes()
    return [name for name in names if f"train_{name}" in names]


def recipe_name(recipe: Path) -> str:
    """Return the name of a recipe for messages: that of a shipped one, else the path as the user wrote it."""
    path = shipped_recipe(recipe)
    return f"the shipped recipe {path.stem}" if path.parent == _recipes() else str(recipe)


def _recipes() -> Path:
    return Path(importlib.import_module("volpipe.configs").__path__[0])


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean X?)" for the known name closest to `name`, or "" where none is close."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise VolpipeError(f"no module {error.name!r} for {name!r}; install it where the workers run") from error
