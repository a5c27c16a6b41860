"""What a process of volpipe was started with, put right before all else: streams, the path of modules, warnings.

Not here: what is printed (display.console), or a Python program that imports volpipe, which keeps what it has. Only
what Python itself has loaded by then is imported: the current folder may have a file named as any other module.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

SAFE_PATH = "PYTHONSAFEPATH"  # a variable that Python reads as it starts


def prepare_process() -> None:
    """Make this process, and those that it starts, work whatever it was started with.

    No module is looked for in the current folder, which may have a script `random.py`. A warning of some library is no
    error: what a user asks of his own programs by PYTHONWARNINGS is not asked of these.
    """
    open_descriptors()
    os.environ |= _variables()
    sys.warnoptions[:] = [option for option in sys.warnoptions if not _is_error(option)]
    warnings.filters[:] = [each for each in warnings.filters if each[0] != "error"]  # type: ignore[index]


def open_descriptors() -> None:
    """Open what goes nowhere in place of each standard stream that was closed.

    The next file that is opened would else get its number, and what a library writes to standard output would be
    written into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free


def leave_current_folder() -> None:
    """Take the current folder out of the path of modules, where `python -m volpipe` has put it.

    It comes last where it is the checkout of which this is the code, for the processes that this one starts.
    """
    is_module = sys.argv[:1] == ["-m"]  # while Python looks for the module
    if not is_module or sys.flags.safe_path:
        return
    module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
    if module.partition(".")[0] == __package__:
        folder = sys.path.pop(0)
        if folder == os.path.dirname(os.path.dirname(__file__)):  # noqa: PTH120  # pathlib is not loaded yet
            sys.path.append(folder)


def module_command(module: str) -> list[str]:
    """Return the command of a Python process that runs `module` of volpipe."""
    return [sys.executable, "-P", "-m", module]


def environment() -> dict[str, str]:
    """Return the environment for `module_command`: it finds the modules that this process finds."""
    return os.environ | _variables() | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@contextmanager
def starting_processes() -> Iterator[None]:
    """Let processes that are started meanwhile, as those of multiprocessing, leave out the current folder too."""
    before = {name: os.environ.get(name) for name in _variables()}
    os.environ |= _variables()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _variables() -> Mapping[str, str]:
    """Return the variables for processes that are started from here."""
    options = [option for option in os.environ.get("PYTHONWARNINGS", "").split(",") if not _is_error(option)]
    return {SAFE_PATH: "1"} | ({"PYTHONWARNINGS": ",".join(options)} if "PYTHONWARNINGS" in os.environ else {})


def _is_error(option: str) -> bool:
    """Return whether an option of warnings makes errors of some; Python takes the first letters of an action too."""
    action = option.partition(":")[0].strip()
    return bool(action) and "error".startswith(action)
