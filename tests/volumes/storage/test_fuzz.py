"""Fuzzing, in short (`scripts/fuzz` is the long form): no damaged volume crashes, hangs, eats memory or reads wrong."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from fuzzing import main, trial  # from this checkout
from fuzzing.main import fuzz, report
from fuzzing.mutations import mutate
from fuzzing.originals import NAMES, make
from fuzzing.trial import FAILED, GOOD, Outcome, attempt, lay, seed_of

INPUTS = 1000


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder with one original, whole, in "whole"."""
    original = make("n5 raw")
    lay(original, dict(original.files), tmp_path / "whole", tmp_path / "whole")
    yield tmp_path


def test_damaged_volumes_are_refused_or_read_right() -> None:
    summary = fuzz(NAMES, 1, INPUTS, 2)
    lines = list(report(summary))
    assert summary.failures == [], "\n".join(lines)
    assert sum(sum(row.kinds.values()) for row in summary.rows.values()) >= INPUTS
    assert len(summary.rows) == 8
    for name, row in summary.rows.items():
        assert row.kinds["refused"] > 0 and sum(row.kinds[kind] for kind in GOOD[1:]) > 0, f"{name}: {row.kinds}"


def test_a_seed_gives_the_same_input_each_time() -> None:
    for name in ("n5 raw", "tiff ome", "mrc plain", "hdf5 gzip"):
        files = make(name).files
        made = [mutate(files, np.random.default_rng(seed_of(name, 5, 6))) for _ in range(2)]
        assert made[0] == made[1] != mutate(files, np.random.default_rng(seed_of(name, 5, 7)))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda found: None, "same"),
        (lambda found: (_ for _ in ()).throw(ValueError("a fault of ours")), "error"),
        (lambda found: np.add(found.array, 1, out=found.array), "wrong"),
    ],
)
def test_a_wrong_reader_is_seen(place: Path, change: object, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk is touched, and stays as it is; then a reader that fails, or adds one to all."""
    from volpipe.volumes.volume import Reader

    class Found:
        array: np.ndarray

    original = make("n5 raw")
    monkeypatch.setattr(trial, "mutate", lambda files, rng: {"v.n5/a/0/0/0": original.files["v.n5/a/0/0/0"]})
    read = Reader._read

    def changed(self: Reader, index: object) -> np.ndarray:
        found = Found()
        found.array = read(self, index)  # type: ignore[arg-type]
        change(found)  # type: ignore[operator]
        return found.array

    monkeypatch.setattr(Reader, "_read", changed)
    assert attempt("n5 raw", 0, 0, place / "whole", place / "input").kind == kind


def _die(name: str, seed: int, number: int, pristine: Path, folder: Path) -> Outcome:
    if number == 3:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 5:
        time.sleep(600)
    if number == 7:
        np.ones(5 * 2**26, np.uint8)
    return Outcome("refused")


def _work(pipe: object, folder: str) -> None:
    """What the processes of the next test run: as always, but with an attempt that dies, hangs and eats memory."""
    main.attempt = _die
    main.work(pipe, folder)  # type: ignore[arg-type]


@pytest.mark.long
def test_crash_hang_and_memory_are_seen_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "HANG_SECONDS", 15.0)

    class Context:
        """Starts `_work` in place of `work`."""

        def __init__(self) -> None:
            self.own = main.multiprocessing.get_context("spawn")

        def __getattr__(self, name: str) -> object:
            return getattr(self.own, name)

        def Process(self, target: object, args: tuple[object, ...], daemon: bool) -> object:
            return self.own.Process(target=_work, args=args, daemon=daemon)

    context = Context()
    with monkeypatch.context() as patch:
        patch.setattr(main, "context", lambda: context)
        summary = fuzz(("n5 raw",), 4, 10, 1)
    assert [(number, outcome.kind) for _, _, number, outcome in summary.failures] == [
        (3, "crash"), (5, "hang"), (7, "memory"),
    ]  # fmt: skip
    assert summary.rows["n5"].kinds["refused"] == 7
    named = [line for line in report(summary) if line.startswith(FAILED)]
    assert "scripts/fuzz --seed 4 --number 3 'n5 raw'" in named[0] and "-11" in named[0]
