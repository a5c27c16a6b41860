"""`scripts/mutants`: tries changes of logic that are drawn at random, by the tests near each, and lists the survivors.

A survivor is a question: the change may be one that nobody can see, such as that of a cache or of a time to wait.
The tests of a change are those of the module's own name, those that import the module, those of its package, and the
golden pages, in this order; they end at the first that fails.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
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
DIED, SURVIVED, SLOW = "died", "SURVIVED", "died: out of time"
GOLDEN = Path("tests/docs/test_golden.py")


def draw(seed: int, count: int, below: str) -> list[Change]:
    """Return `count` changes of the modules below a folder, each module as likely as it has places for one."""
    files = sorted(path.relative_to(ROOT) for path in (ROOT / below).rglob("*.py"))
    found = [change for file in files for change in changes_of(ROOT, file)]
    return random.Random(seed).sample(found, count)


def tests_of(module: Path) -> list[list[Path]]:
    """Return the test files that are near a module, in groups, the nearest first; none of them twice."""
    tests = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py"))
    name = ".".join(module.with_suffix("").parts)
    package, _, last = name.rpartition(".")
    imported = re.compile(rf"(?:from|import) {re.escape(name)}\b|from {re.escape(package)} import [^\n]*\b{last}\b")
    folder = Path("tests", *module.parts[1:-1])
    groups = [
        [test for test in tests if test.stem == f"test_{module.stem}" and test.is_relative_to(folder)],
        [test for test in tests if imported.search((ROOT / test).read_text(encoding="utf-8"))],
        [test for test in tests if test.is_relative_to(folder) and folder != Path("tests")],
        [GOLDEN],
    ]
    known: set[Path] = set()
    for group in groups:
        group[:] = [test for test in group if test not in known]
        known.update(group)
    return [group for group in groups if group]


def copy_to(folder: Path) -> None:
    """Copy the checkout, less what is built; weights are links."""

    def link(source: str, target: str) -> None:
        (os.link if source.endswith((".safetensors", ".png")) else shutil.copyfile)(source, target)
        shutil.copymode(source, target)

    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), copy_function=link)
    for name in FILES:
        shutil.copyfile(ROOT / name, folder / name)


def verdict(change: Change, folder: Path, seconds: float, processes: int) -> str:
    """Return what came of a change in the copy `folder`: DIED, SURVIVED, or SLOW, which no test would let pass."""
    place = folder / change.file
    original = place.read_text(encoding="utf-8")
    place.write_text(change.applied(original), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-n",
        str(processes),
        "--dist",
        "loadfile",
        "-p",
        "no:cacheprovider",
    ]
    try:
        for group in tests_of(change.file):
            done = subprocess.run(
                [*command, *map(str, group)], cwd=folder, env=environment, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL, timeout=seconds,
            )  # fmt: skip
            if done.returncode:
                return DIED
    except subprocess.TimeoutExpired:
        return SLOW
    finally:
        place.write_text(original, encoding="utf-8")
    return SURVIVED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the changes that are drawn")
    parser.add_argument("--count", type=int, default=60, help="how many")
    parser.add_argument("--below", default="volpipe", help="the folder whose modules are changed")
    parser.add_argument("--seconds", type=float, default=1200, help="the most that a group of tests may take")
    parser.add_argument("--processes", type=int, default=2, help="that tests run in")
    parser.add_argument("--list", action="store_true", help="print the changes, and try none")
    chosen = parser.parse_args()
    changes = draw(chosen.seed, chosen.count, chosen.below)
    if chosen.list:
        print(*changes, sep="\n")
        return
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        copy_to(Path(folder))
        for number, change in enumerate(changes, 1):
            began = time.monotonic()
            result = verdict(change, Path(folder), chosen.seconds, chosen.processes)
            print(f"{number:3} {result:9} {time.monotonic() - began:5.0f} s  {change}", flush=True)
            survivors += [change] if result == SURVIVED else []
    print(f"\n{len(changes) - len(survivors)} of {len(changes)} died; survivors:", *survivors, sep="\n  ")
