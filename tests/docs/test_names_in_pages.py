"""Modules, files and classes that the design's pages, CONTRIBUTING.md and docstrings name are there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from markdown_page import blocks_of

FOLDERS = ("volpipe", "apps", "configs", "models")
PAGES = (*sorted((ROOT / "docs" / "design").glob("*.md")), ROOT / "CONTRIBUTING.md")
CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"[\w./-]*(?:/|\.(?:py|md|toml|json|txt|pyi|ipynb))")
WORD = re.compile(r"[\w./-]+")
CLASS = re.compile(r"[A-Z][a-z]+[A-Za-z]*")
DOTTED = re.compile(r"(?:volpipe|apps|configs|models)(?:\.\w+)+")
PLACEHOLDERS = re.compile(r"[A-Z]{3,}")  # NAME.py, OUT.run
ELSEWHERE = re.compile(r"Not here: (.*?)(?:\.\s|\.$|::|\Z)", re.DOTALL)  # what a module's docstring says lies elsewhere
IN_BRACKETS = re.compile(r"\(([a-z_.]+(?:(?:, | or | and )[a-z_.]+)*)\)")
BUILT_IN = {"None", "True", "False"}


@cache
def sources() -> dict[str, ast.Module]:
    """Return the code of each module, by its path: volpipe/geometry/grid.py."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in files}


@cache
def modules() -> frozenset[str]:
    """Return the names of all modules and packages, whole and short: volpipe.apps.pool, apps.pool, pool."""
    names = set[str]()
    for file in sources():
        parts = Path(file).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        for whole in (parts, ("volpipe", *parts)):
            names |= {".".join(whole[first:last]) for last in range(1, len(whole) + 1) for first in range(last)}
    return frozenset(names)


@cache
def classes() -> frozenset[str]:
    nodes = (node for tree in sources().values() for node in ast.walk(tree))
    return frozenset(node.name for node in nodes if isinstance(node, ast.ClassDef))


def defined(name: str) -> bool:
    """Return whether a dotted name is a module, or a name at the top of one: volpipe.errors.NOTICE."""
    module, _, last = name.rpartition(".")
    files = [ROOT / f"{module.replace('.', '/')}{end}" for end in (".py", "/__init__.py", "/__init__.pyi")]
    nodes = (node for file in files if file.is_file() for node in ast.parse(file.read_text("utf-8")).body)
    return name in modules() or any(last in names_of(node) for node in nodes)


def names_of(node: ast.stmt) -> set[str]:
    """Return the names that a statement binds."""
    match node:
        case ast.FunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.ImportFrom() | ast.Import():
            return {alias.asname or alias.name for alias in node.names}
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}


def is_there(path: str) -> bool:
    return any((folder / path).exists() for folder in (ROOT, ROOT / "volpipe", ROOT / "docs"))


def missing_from_page(text: str) -> Iterator[str]:
    """Yield what a page names that is not there; files that the page itself writes are."""
    blocks = blocks_of(text)
    written = {block.file for block in blocks}
    drawn = [word for block in blocks if block.not_run == "a drawing" for word in WORD.findall(block.text)]
    for name in (*drawn, *CODE.findall(FENCE.sub("", text))):
        is_known = (
            PLACEHOLDERS.search(name)
            or name in written
            or (PATH.fullmatch(name) and is_there(name))
            or (CLASS.fullmatch(name) and name in classes() | BUILT_IN)
            or (DOTTED.fullmatch(name) and defined(name))
        )
        if not is_known and any(pattern.fullmatch(name) for pattern in (PATH, CLASS, DOTTED)):
            yield name


def missing_from_docstring(text: str) -> Iterator[str]:
    """Yield the modules that a docstring names and that are not there."""
    for name in CODE.findall(text):
        if DOTTED.fullmatch(name) and not defined(name):
            yield name
    for sentence in ELSEWHERE.findall(text):
        for names in IN_BRACKETS.findall(sentence):
            for name in re.split(", | or | and ", names):
                if name not in modules() and not any((ROOT / "volpipe").rglob(name)):  # such as explore.js
                    yield name


def test_contributing_describes_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| package |")[2].partition("\n\n")[0]
    described = {name for row in table.splitlines() for name in CODE.findall(row.split("|")[1]) if "|" in row}
    folders = {path.parent.relative_to(ROOT / "volpipe") for path in (ROOT / "volpipe").glob("*/**/__init__.py")}
    assert described == {str(folder) for folder in folders}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_for_developers_names_is_there(page: Path) -> None:
    assert list(missing_from_page(page.read_text(encoding="utf-8"))) == []


def test_modules_that_docstrings_name_are_there() -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    faults = [
        f"{file}: {name}"
        for file, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, kinds)
        for name in missing_from_docstring(ast.get_docstring(node) or "")
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("Blocks (`geometry/grid.py`) are a `Box`; `volpipe.geometry.grid` has it; `NAME.py` is yours.", []),
        ("Blocks (`geometry/grids.py`) are a `Boxing`, of `volpipe.geometry.grids`.", 3 * [True]),
        ("```text\n`gone.py`\n```\n", []),
        ("<!-- not run: a drawing -->\n```text\ngeometry/grid.py ─► geometry/gone.py\n```\n", [True]),
    ],
)
def test_a_name_that_is_gone_is_noticed_on_a_page(text: str, missing: list[bool]) -> None:
    assert [True for _ in missing_from_page(text)] == missing


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        (
            "One.\n\nNot here: boxes (geometry.grid), or tasks (apps.pool, task). Gone (cli_run) is another sentence.",
            [],
        ),
        ("One.\n\nNot here: boxes (geometry.grids), or tasks\n(cli_run or task).", ["geometry.grids", "cli_run"]),
        ("One, as `volpipe.geometry.grid.Boxed` is.", ["volpipe.geometry.grid.Boxed"]),
    ],
)
def test_a_module_that_is_gone_is_noticed_in_a_docstring(text: str, missing: list[str]) -> None:
    assert list(missing_from_docstring(text)) == missing
