"""Runs the blocks of one page, in order, in a folder of its own, and compares what they print with what it shows.

Not here: how a page is read (markdown_page), or what its folder holds at first (fixtures).
"""

from __future__ import annotations

import ast
import csv
import io
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fixtures
import yaml
from markdown_page import CHANGES, LANGUAGES, RUN, SHOWN, Block, blocks_of
from shell import Shell, as_elsewhere
from shown import as_shown, is_shown

REASONS = {
    "a net of your own": "code, or weights, that only the reader has",
    "a container registry": "an image is built, pushed or pulled",
    "a cluster of your own": "a queue, nodes or a Kubernetes that only the reader has",
    "a program of its own": "conda, docker, kind, kubectl, git, ssh, napari and the like, which no test installs",
    "installs packages": "pip would change the environment of the tests",
    "needs the network": "a place on the web",
    "needs a GPU": "there is none where most tests run",
    "a drawing": "a text that no command prints",
    "an excerpt": "a part of a text that another test holds, such as a message of a fault",
    "takes hours": "",
}  # which a block may have for not being run
WRITE = "VOLPIPE_WRITE_PAGES"


class PageError(AssertionError):
    """What is wrong with a page: its file, the line of the block, and why."""


@dataclass
class Page:
    """A page that is run.

    Attributes:
        path: of its Markdown.
        shell: that runs its blocks; its folder is the page's.
        stack: of what its fixtures start, which is stopped with it.
        names: of its Python blocks.
        printed: by the last block that was run; None if none was, or it was left out.
        texts: the blocks of text that are not what was printed, each with what was.
    """

    path: Path
    shell: Shell
    stack: ExitStack
    is_long: bool = False
    names: dict[str, Any] = field(default_factory=dict)  # Any: whatever a page's Python makes
    printed: str | None = None
    texts: list[tuple[Block, str]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.shell.folder

    def error(self, block: Block, reason: str) -> PageError:
        return PageError(f"{self.path.name}:{block.line}: {reason}")

    def take(self, block: Block) -> None:
        """Run a block, write it, or compare it, whichever it is for."""
        for name in block.fixtures:
            self.prepare(name, block)
        if block.is_long and not self.is_long:
            self.printed = None
        elif block.file:
            (self.folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / block.file).write_text(block.text)
        elif block.language in CHANGES:
            self._change(block)
        elif block.language in RUN:
            self.printed = None if block.not_run else getattr(self, f"_run_{block.language}")(block)
        elif block.language in SHOWN and not block.not_run:
            self._compare(block, block.text)

    def prepare(self, name: str, block: Block) -> None:
        function = getattr(fixtures, name, None)
        if function is None:
            raise self.error(block, f"there is no fixture {name} in tests/docs/fixtures.py")
        made = function(self)
        if made is not None:
            self.stack.enter_context(made)

    def bash(self, script: str, code: int = 0, line: int = 0) -> str:
        """Return what a script prints; it must end with `code`."""
        ended, printed = self.shell.run(script)
        if ended != code:
            raise PageError(f"{self.path.name}:{line}: ended with {ended}, not {code}:\n{script}\n{printed[-4000:]}")
        return printed

    def _change(self, block: Block) -> None:
        """Change files as a block shows: the old lines of each hunk must stand in its file, once."""
        for part in block.text.split("--- ")[1:]:
            name, _, hunks = part.partition("\n")
            path = self.folder / name
            text = path.read_text()
            for hunk in hunks.split("@@\n"):
                lines = hunk.splitlines()
                old = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
                new = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
                if text.count(old) != 1:
                    raise self.error(block, f"{name} has these lines {text.count(old)} times, not once:\n{old}")
                text = text.replace(old, new)
            path.write_text(text)

    def _run_bash(self, block: Block) -> str:
        return self.bash(block.text, block.code, block.line)

    def _run_console(self, block: Block) -> str | None:
        """Give each line that begins with "$ ", and compare what follows it."""
        lines = block.text.splitlines()
        if not any(line.startswith("$ ") for line in lines):
            self._compare(block, block.text)
            return self.printed
        for command, shown in commands_of(lines):
            self.printed = self.bash(command, block.code, block.line)
            self._compare(block, shown)
        return self.printed

    def _run_python(self, block: Block) -> str:
        """Run a block in the page's namespace; the value of a last expression is shown, as in a notebook."""
        *tree, last = ast.parse(block.text).body
        printed = io.StringIO()
        with (
            as_elsewhere(self.folder, os.environ | self.shell.environment, self.shell.sites),
            redirect_stdout(printed), redirect_stderr(printed),
        ):  # fmt: skip
            if not isinstance(last, ast.Expr):
                tree, value = [*tree, last], None
            where = f"{self.path.name}:{block.line}"
            exec(compile(ast.Module(tree, []), where, "exec"), self.names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), where, "eval"), self.names)
                if value is not None:
                    print(repr(value))
        return printed.getvalue()

    def _compare(self, block: Block, shown: str) -> None:
        if self.printed is None:
            return
        printed = as_shown(self.printed, self.folder)
        if not is_shown(shown, printed):
            self.texts.append((block, printed))


def commands_of(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Return each command of a console, and what is shown below it."""
    command, shown = "", list[str]()
    for line in lines:
        if line.startswith("$ "):
            if command:
                yield command, "\n".join(shown)
            command, shown = line[2:], []
        elif line.startswith("> ") and not shown:
            command += f"\n{line[2:]}"
        else:
            shown.append(line)
    yield command, "\n".join(shown)


def faults_of(text: str) -> list[str]:
    """Return what is wrong with the blocks of a page, without running one."""
    faults, can_show = [], False
    for block in blocks_of(text):
        if block.language not in LANGUAGES:
            faults.append(f"line {block.line}: a block of {block.language or 'no language'}; say bash, python, text …")
        if block.not_run and block.not_run not in REASONS:
            faults.append(f"line {block.line}: {block.not_run!r} is no reason that tests/docs/runner.py allows")
        if block.language in SHOWN and not block.not_run and not can_show:
            faults.append(f"line {block.line}: a text that no block above it prints; mark it, or run the block")
        if reason := _unreadable(block):
            faults.append(f"line {block.line}: {reason}")
        if block.language in RUN and not block.file:
            can_show = not block.not_run
    return faults


def _unreadable(block: Block) -> str:
    """Return why a block of data cannot be read; "" if it can."""
    read: dict[str, Any] = {  # Any: readers of text
        "toml": tomllib.loads, "json": json.loads, "yaml": lambda text: list(yaml.safe_load_all(text)),
        "python": ast.parse, "csv": lambda text: list(csv.reader(text.splitlines(), strict=True)),
    }  # fmt: skip
    try:
        read.get(block.language, str)(block.text)
    except (ValueError, SyntaxError, yaml.YAMLError, csv.Error) as error:
        return f"cannot be read as {block.language}: {error}"
    return ""


def run_page(path: Path, folder: Path, *, is_long: bool = False) -> Page:
    """Return a page whose blocks were run in `folder`, which is not there yet."""
    folder.mkdir()
    with tempfile.TemporaryDirectory() as tools, ExitStack() as stack:
        home = folder.parent / "home"
        home.mkdir()
        environment = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
        sites = {} if is_long else {"local": "threads"}
        shell = Shell(folder, Path(tools), environment, sites, is_real=is_long)
        page = Page(path, shell, stack, is_long, {"__name__": "__main__"})
        for block in blocks_of(path.read_text(encoding="utf-8")):
            page.take(block)
    return page


def rewrite(page: Page) -> None:
    """Write what was printed into the page, where it shows something else."""
    lines = page.path.read_text(encoding="utf-8").splitlines()
    for block, printed in reversed(page.texts):
        if block.language == "console" and "$ " in block.text:
            raise page.error(block, f"shows something else; rewrite it by hand:\n{printed}")
        indent = " " * (len(lines[block.line - 1]) - len(lines[block.line - 1].lstrip()))
        old = block.text.count("\n")
        lines[block.line : block.line + old] = [f"{indent}{line}".rstrip() for line in printed.splitlines()]
    page.path.write_text("\n".join(lines) + "\n", encoding="utf-8")
