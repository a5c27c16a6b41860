"""`scripts/mutants`: which changes a file admits, and that each is one change of a file that still can be read."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

CODE = '''
def halo(size: int = 3, *, whole: bool = False) -> int:
    """Return 1 and more."""
    log.debug("size %d", 1 + 2)
    if size < 2 and not whole:
        raise ValueError(f"{size - 1} < 2")
    return max(size // 2, 1)


class Window:
    def _least(self) -> int:
        return sum(halo(n) + 1 for n, _ in zip((1,), (2,), strict=True))

    def shape(self) -> int:
        return self._least()
'''


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutating"]:
        del sys.modules[name]


@pytest.fixture
def changes_of(scripts: None) -> object:
    from mutating.changes import changes_of

    return changes_of


def test_logic_changes_and_messages_do_not(changes_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "halo.py").write_text(CODE)
    changes = [(change.old, change.new) for change in changes_of(tmp_path, Path("halo.py"))]
    assert {
        ("3", "(4)"), ("False", "True"), ("size < 2", "(size <= 2)"), ("not whole", "(whole)"),
        ("size // 2", "(size * 2)"),
        ("size < 2 and not whole", "(size < 2 or not whole)"), ("max(size // 2, 1)", "min(size // 2, 1)"),
    } <= set(changes)  # fmt: skip
    assert not [new for old, new in changes if "log" in old or old == "size - 1" or "Return" in old or old == "True"]


def test_a_change_knows_who_comes_to_call_it(changes_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "halo.py").write_text(CODE)
    names = {change.old: change.names for change in changes_of(tmp_path, Path("halo.py"))}
    assert names["size // 2"] == {"halo", "_least", "shape", "Window"}
    assert names["halo(n) + 1"] == {"_least", "shape", "Window"}


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(
    ("file", "nearest"),
    [
        ("volpipe/units.py", "test_units"),
        ("volpipe/geometry/grid.py", "test_grid"),
        ("volpipe/runs/seams.py", "test_seams"),
    ],
)
def test_the_nearest_tests_are_those_of_the_module_and_the_golden_pages_are_the_last(file: str, nearest: str) -> None:
    from mutating.changes import changes_of
    from mutating.main import GOLDEN, tests_of

    tests = tests_of(changes_of(ROOT, Path(file))[0], 5)
    assert len(tests) == len(set(tests)) == 6
    assert (tests[0].stem, tests[-1]) == (nearest, GOLDEN)
    assert all((ROOT / test).is_file() for test in tests)


def test_each_change_of_a_module_is_one_that_can_be_parsed(changes_of) -> None:  # type: ignore[no-untyped-def]
    file = Path("volpipe/units.py")
    text = (ROOT / file).read_text(encoding="utf-8")
    changes = changes_of(ROOT, file)
    assert len(changes) > 10
    for change in changes:
        assert ast.dump(ast.parse(change.applied(text))) != ast.dump(ast.parse(text)), str(change)
