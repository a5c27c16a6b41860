"""`scripts/mutants`: tries changes of logic that are drawn at random, by the tests near each, and lists the survivors.

A survivor is a question: the change may be one that nobody can see, such as that of a cache or of a time to wait.
The tests of a change are those that name its function, then the files that are nearest it, one after the other, and the
golden pages; they end at the first that fails.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mutating.changes import Change, changes_of

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = ("volpipe", "apps", "configs", "models", "tests", "scripts", "docs", "notebooks")
FILES = (
    "pyproject.toml",
    "setup.py",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "constraints.txt",
    "Makefile",
    "mkdocs.yml",
)
DIED, SURVIVED, OPEN = "died", "SURVIVED", "OPEN: out of time"
GOLDEN = Path("tests/docs/test_golden.py")
PASSED, NONE_RUN = 0, 5  # exit codes of pytest
MOST_FIRST = 20  # tests that run before whole files


def draw(seed: int, count: int, below: str) -> list[Change]:
    """Return `count` changes of the modules below a folder, each module as likely as it has places for one."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / below).rglob("*.py"))
    found = [change for file in files for change in changes_of(ROOT, file)]
    return random.Random(seed).sample(found, count)


def tests_of(change: Change, most: int) -> list[Path]:
    """Return the test files that are nearest a change, at most so many, and the golden pages, the nearest first.

    Near are those of the module's own name, those that import the module, those of its package, and those that name
    the changed function or one that comes to call it.
    """
    module = change.file
    name = ".".join(module.with_suffix("").parts)
    package, _, last = name.rpartition(".")
    imported = re.compile(rf"(?:from|import) {re.escape(name)}\b|from {re.escape(package)} import [^\n]*\b{last}\b")
    public = [each for each in change.names if not each.startswith("_")]
    named = re.compile(rf"\b({'|'.join(map(re.escape, public))})\b") if public else None
    folder = Path("tests", *module.parts[1:-1])

    def nearness(test: Path) -> tuple[int, int]:
        text = (ROOT / test).read_text(encoding="utf-8")
        is_own = test.stem == f"test_{module.stem}" and test.is_relative_to(folder)
        mentions = len(set(named.findall(text))) if named else 0
        is_beside = test.is_relative_to(folder) and folder != Path("tests")
        near = 8 * is_own + 4 * bool(imported.search(text)) + 2 * min(mentions, 3) * is_beside + mentions + is_beside
        return near, -len(text)

    tests = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")} - {GOLDEN}
    ranks = sorted(((nearness(test), test) for test in tests), reverse=True)
    return [*(test for (near, _), test in ranks[:most] if near), GOLDEN]


def first_of(change: Change, tests: list[Path], most: int) -> list[str]:
    """Return the tests of some files, at most so many, that name most of what a change stands in, or is called by.

    What a function of the same file names counts for the tests that name that function.
    """
    named = re.compile(rf"\b({'|'.join(map(re.escape, change.names))})\b")
    ranks: list[tuple[int, int, str]] = []
    for test in tests:
        text = (ROOT / test).read_text(encoding="utf-8")
        functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        sources = {node.name: ast.get_source_segment(text, node) or "" for node in functions}
        mentions = {name: set(named.findall(source)) for name, source in sources.items()}
        for name, source in sources.items():
            if name.startswith("test_"):
                used = set(re.findall(r"\w+", source)) & sources.keys()
                ranks.append((len(set().union(*(mentions[each] for each in used))), -len(ranks), f"{test}::{name}"))
    return [name for number, _, name in sorted(ranks, reverse=True)[:most] if number]


def copy_to(folder: Path) -> None:
    """Copy the checkout, less what is built; weights are links."""

    def link(source: str, target: str) -> None:
        (os.link if source.endswith((".safetensors", ".png")) else shutil.copyfile)(source, target)
        shutil.copymode(source, target)

    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=link)
    for name in FILES:
        shutil.copyfile(ROOT / name, folder / name)


def verdict(change: Change, folder: Path, groups: list[list[str]], seconds: float, processes: int) -> tuple[str, str]:
    """Return what came of a change in the copy `folder`, and by which group of tests.

    It is DIED, SURVIVED, or OPEN where a file ran out of its time and no other failed.
    """
    place = folder / change.file
    original = place.read_text(encoding="utf-8")
    place.write_text(change.applied(original), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    workers = ["-n", str(processes), "--dist", "loadfile"] if processes > 1 else ["-n", "0"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *workers]
    late = ""
    try:
        for group in groups:
            code = _exit_code([*command, *group], folder, environment, seconds)
            name = Path(group[0].partition("::")[0]).stem
            if code is None:
                late = name
            elif code not in (PASSED, NONE_RUN):
                return DIED, name
    finally:
        place.write_text(original, encoding="utf-8")
    return (OPEN, late) if late else (SURVIVED, "")


def _exit_code(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> int | None:
    """Return how a command ended in `folder`; None where it took too long: it is killed then, with what it started."""
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the changes that are drawn")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--below", default="volpipe", help="the folder whose modules are changed")
    parser.add_argument("--seconds", type=float, default=1200, help="the most that a file of tests may take")
    parser.add_argument(
        "--files", type=int, default=12, help="of tests that are tried, the nearest, before the golden pages"
    )
    parser.add_argument("--quick", action="store_true", help="run the tests that name what was changed, and no others")
    parser.add_argument("--only", default="", help="numbers of the changes to try, of those that are drawn: 3,7,20")
    parser.add_argument("--processes", type=int, default=2, help="that tests run in")
    parser.add_argument("--list", action="store_true", help="print the changes, and try none")
    chosen = parser.parse_args()
    changes = dict(enumerate(draw(chosen.seed, chosen.count, chosen.below), 1))
    if chosen.only:
        changes = {number: changes[number] for number in map(int, chosen.only.split(","))}
    if chosen.list:
        for number, change in changes.items():
            print(f"{number:3} {change}")
        return
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for number, change in changes.items():
            began = time.monotonic()
            tests = tests_of(change, chosen.files)
            whole = [] if chosen.quick else [[str(test)] for test in tests]
            groups = [first_of(change, tests, MOST_FIRST), *whole]
            result, test = verdict(change, Path(folder), [*filter(None, groups)], chosen.seconds, chosen.processes)
            print(f"{number:3} {result} {test} {time.monotonic() - began:.0f} s  {change}", flush=True)
            survivors += [] if result == DIED else [f"{result} {test} {change}"]
    print(f"\n{len(changes) - len(survivors)} of {len(changes)} died; not:", *survivors, sep="\n  ")
