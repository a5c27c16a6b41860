"""Trials of usage of `scripts/fuzz`: each sees a fault that is planted, and says so again for the same seed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

from fuzzing import usage  # from this checkout
from fuzzing.main import fuzz_usage
from fuzzing.trial import GOOD

from volpipe.volumes import volume
from volpipe.volumes.volume import Reader, Volume


def test_palettes_are_the_numbers_that_pillow_reads() -> None:
    summary = fuzz_usage(["palettes"], 1, range(60))
    assert summary.failures == []
    assert summary.rows["palettes"].kinds["same"] == 60


def test_a_seed_gives_the_same_case_each_time() -> None:
    drawn = [usage.draw_name(np.random.default_rng([7, number])) for number in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_names_are_of_all_letters() -> None:
    rng = np.random.default_rng(3)
    letters = set("".join(usage.draw_name(rng) for _ in range(2000)))
    assert {*usage.ODD_LETTERS} <= letters
    assert sum(ord(letter) > 127 for letter in letters) > 500
    assert not letters & {"/", "\0"}


def make_all() -> None:
    """Make the volumes of trials, which are read as they are made, before a fault is planted."""
    for name in usage.NAMED:
        usage.make(name)


class Zeros:
    """A volume, or a reader of one, whose voxels are zeros, whatever is missing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def open(self) -> Zeros:
        return self

    def __getitem__(self, index: object) -> np.ndarray:
        return np.zeros(usage.make("n5 raw").data.shape, np.uint16)


def test_voxels_that_are_made_up_for_dead_links_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    make_all()
    monkeypatch.setattr(volume, "open_volume", Zeros)
    assert {usage.attempt("links", 0, number).kind for number in range(3)} == {"wrong"}


@pytest.mark.parametrize("trial", ["names", "palettes"])
def test_a_reader_of_other_voxels_is_seen(monkeypatch: pytest.MonkeyPatch, trial: str) -> None:
    make_all()
    read = Reader._read
    monkeypatch.setattr(Reader, "_read", lambda self, index: read(self, index) + np.uint8(1))
    kinds = [usage.attempt(trial, 0, number).kind for number in range(6)]
    assert "wrong" in kinds
    assert not set(kinds) & {*GOOD[1:]}


def test_a_palette_of_which_nothing_is_said_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Callable[..., Volume] = volume.open_volume
    monkeypatch.setattr(volume, "open_volume", lambda *given: replace(opened(*given), notes=()))
    assert usage.attempt("palettes", 0, 0).text == "no note says palette"


PLANTED: dict[str, tuple[str, str]] = {  # a command that takes the place of volpipe, and the trial that must see it
    "a traceback": ("streams", "raise ValueError"),
    "a signal": ("streams", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
    "no copy": ("streams", "pass"),
    "a file replaced": ("options", "import sys; open(sys.argv[-1] if '.' in sys.argv[-1] else 'a.npy', 'w')"),
    "a file deleted": ("options", "import pathlib; pathlib.Path('labels.csv').unlink()"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_command_with_a_fault_is_seen(fault: str) -> None:
    trial, code = PLANTED[fault]
    outcomes = [usage.attempt(trial, 0, number, (sys.executable, "-c", code)) for number in range(8)]
    assert "wrong" in {outcome.kind for outcome in outcomes}
    assert not {outcome.kind for outcome in outcomes} & {"error", "hang"}


def test_a_command_that_does_all_right_passes(tmp_path: Path) -> None:
    script = tmp_path / "copy.py"
    script.write_text("import shutil, sys\nif sys.argv[1] == 'convert':\n    shutil.copy(*sys.argv[2:])\n")
    command: Any = (sys.executable, str(script))
    for trial in usage.COMMANDS:
        assert {usage.attempt(trial, 0, number, command).kind for number in range(4)} == {"same"}
