"""Python's syntax trees, made by one thread at a time; tracebacks need them to underline what failed, numpy to read.

Python before 3.11.8, and 3.12 before 3.12.2, counts the depth of a tree for all threads together (python/cpython
issue 106905): where two threads make trees at once, either may get a SystemError in place of its tree or traceback.
"""

from __future__ import annotations

import ast
import logging
import threading
import traceback
from types import TracebackType

one_thread = threading.Lock()  # held by who makes a tree, and by who lets numpy read an array from a file


def parse(source: str | bytes) -> ast.Module:
    """Return the tree of a Python file.

    Raises:
        SyntaxError, ValueError: it is none.
    """
    with one_thread:
        return ast.parse(source)


def arguments(function: ast.FunctionDef) -> list[tuple[ast.arg, ast.expr | None]]:
    """Return the arguments of a function, each with its default, None where it has none."""
    given = function.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults)) + given.defaults
    many = [] if given.vararg is None else [(given.vararg, None)]
    plain, named = zip(given.args, defaults, strict=True), zip(given.kwonlyargs, given.kw_defaults, strict=True)
    return [*plain, *many, *named]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error with those of its causes, as Python prints it."""
    with one_thread:
        return "".join(traceback.format_exception(error)).rstrip("\n")


class LogFormatter(logging.Formatter):
    """Writes tracebacks into a log as `traceback_of` does."""

    def formatException(
        self, ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
    ) -> str:
        """Return the traceback of a logged error."""
        return traceback_of(ei[1]) if ei[1] is not None else super().formatException(ei)
