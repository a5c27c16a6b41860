"""A name stands for one thing: no class is named like another one, no vague word names a helper in many files."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache

from conftest import ROOT

FILES = 2  # in which one word may name a private function: a reader who jumps by name must not land elsewhere


@cache
def definitions() -> tuple[tuple[ast.stmt, str], ...]:
    """Return the classes and functions of the package, at any depth, each with the path of its file."""
    found = []
    for path in sorted((ROOT / "volpipe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((node, str(path.relative_to(ROOT))))
    return tuple(found)


def test_no_two_public_classes_have_one_name() -> None:
    places = defaultdict(list)
    for node, path in definitions():
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            places[node.name].append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_private_function_of_one_word_is_so_named_in_few_files() -> None:
    places = defaultdict(set)
    for node, path in definitions():
        name = node.name
        if (
            not isinstance(node, ast.ClassDef)
            and name.startswith("_")
            and not name.endswith("__")
            and "_" not in name[1:]
        ):
            places[name].add(path)
    assert {name: sorted(paths) for name, paths in places.items() if len(paths) > FILES} == {}
