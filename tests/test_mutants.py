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
'''


@pytest.fixture
def changes_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from mutating.changes import changes_of

    yield changes_of
    for name in [name for name in sys.modules if name.partition(".")[0] == "mutating"]:
        del sys.modules[name]


def test_logic_changes_and_messages_do_not(changes_of, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "halo.py").write_text(CODE)
    changes = [(change.old, change.new) for change in changes_of(tmp_path, Path("halo.py"))]
    assert {
        ("3", "(4)"), ("False", "True"), ("size < 2", "(size <= 2)"), ("not whole", "(whole)"),
        ("size // 2", "(size * 2)"),
        ("size < 2 and not whole", "(size < 2 or not whole)"), ("max(size // 2, 1)", "min(size // 2, 1)"),
    } <= set(changes)  # fmt: skip
    assert not [new for old, new in changes if "log" in old or old == "size - 1" or "Return" in old]


def test_each_change_of_a_module_is_one_that_can_be_parsed(changes_of) -> None:  # type: ignore[no-untyped-def]
    file = Path("volpipe/units.py")
    text = (ROOT / file).read_text(encoding="utf-8")
    changes = changes_of(ROOT, file)
    assert len(changes) > 10
    for change in changes:
        assert ast.dump(ast.parse(change.applied(text))) != ast.dump(ast.parse(text)), str(change)
