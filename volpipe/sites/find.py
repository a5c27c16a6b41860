"""Sites by name: a file with `config`, a ready `parsl.Config` or a function that returns a fresh one.

Not here: the sites themselves (configs/), or Parsl, which only they import. A site's file is the user's own code.
"""

from __future__ import annotations

import ast
import getpass
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from volpipe.errors import SiteError
from volpipe.resolve import describe_error, load_module, nearest, shipped
from volpipe.syntax import parse

if TYPE_CHECKING:
    from parsl.config import Config

PACKAGE = "volpipe.configs"
NO_HOME = "/nonexistent"  # as Debian has it; a folder that others may write to would let them set up our sites


def name_user() -> None:
    """Give this process a user's name and home where the system knows neither, as for most users of pods.

    Parsl asks for the name when it is loaded; settings and caches are looked for in the home.
    """
    try:
        getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on
        os.environ["LOGNAME"] = f"uid-{os.getuid()}"
    try:
        Path.home()
    except RuntimeError:
        os.environ["HOME"] = NO_HOME


def list_sites() -> dict[str, str]:
    """Return each shipped site with the first line of its docstring, without executing it."""
    sites = {}
    for name in shipped(PACKAGE):
        folders = importlib.import_module(PACKAGE).__path__
        path = next(file for folder in folders if (file := Path(folder) / f"{name}.py").is_file())
        docstring = ast.get_docstring(parse(path.read_text(encoding="utf-8"))) or ""
        sites[name] = docstring.partition("\n")[0]
    return sites


def site_settings(name: str) -> tuple[type, str]:
    """Return the class of the settings of the site `name`, and the site's file.

    Raises:
        SiteError: no such site, or it has none.
    """
    module = _module(name)
    kind = getattr(module, "Settings", None)
    if not isinstance(kind, type) or module.__file__ is None:
        raise SiteError(
            f"site {name} has no class Settings, so that volpipe does not know its settings; give another site"
        )
    return kind, module.__file__


def find_site(name: str) -> Callable[[Path], Config]:
    """Return the function of the site `name`: from the folder for Parsl's files to a fresh configuration.

    Args:
        name: a shipped name, with or without ``.py``, or the path of a Python file.

    Raises:
        SiteError: no such site, or its file cannot be loaded.
    """
    config = _config_of(name)
    return lambda run_dir: _configure(name, config, run_dir)


def try_site(name: str, run_dir: Path) -> Config:
    """Return the configuration of a site with its files under `run_dir`, without starting any of it.

    Raises:
        SettingsError: its settings are wrong.
        SiteError: no such site, or one that gives no configuration; the message says which and why.
    """
    config = _config_of(name)
    return _configure(name, config, run_dir) if callable(config) else config  # a ready one would keep the folder


def _config_of(name: str) -> Config | Callable[[str], Config]:
    """Return `config` of the file of the site `name`."""
    module = _module(name)
    if not hasattr(module, "config"):
        raise SiteError(f"site {name} has no `config`; define config(run_dir) or config = Config(...)")
    return module.config  # type: ignore[no-any-return]  # of a user's file


def _configure(name: str, given: Config | Callable[[str], Config], run_dir: Path) -> Config:
    try:
        config = given(str(run_dir)) if callable(given) else given
    except SiteError as error:
        raise type(error)(f"site {name} cannot be used here: {error}") from error
    except Exception as error:  # a site talks to schedulers; whatever that says is the reason
        raise SiteError(f"site {name} cannot be used here: {describe_error(error)}") from error
    from parsl.config import Config

    if not isinstance(config, Config):
        raise SiteError(f"site {name}: `config` gives {type(config).__name__}, not a parsl.config.Config")
    if config.run_dir == "runinfo":  # Parsl's default: beside whatever folder the command was given in
        config.run_dir = str(run_dir)
    return config


def _module(name: str) -> ModuleType:
    path, stem = Path(name), name.removesuffix(".py")
    known = shipped(PACKAGE)
    try:
        if path.suffix == ".py" and path.is_file():
            return load_module(path)
        if stem in known:
            return importlib.import_module(f"{PACKAGE}.{stem}")
    except Exception as error:  # the file is the user's code
        raise SiteError(f"site {name} cannot be loaded: {describe_error(error)}") from error
    raise SiteError(f"no site {name!r}{nearest(stem, known)}; shipped are {', '.join(known)}, or give a Python file")
