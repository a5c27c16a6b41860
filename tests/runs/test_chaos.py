"""Ten disturbances of a run, and small disks that are full: its bytes, files and processes afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chaos import Round
from disks import small_disk
from disturbance import ONE_WORKER, Slow, made_in_one_go

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")


@pytest.fixture
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    return made_in_one_go(tmp_path / "undisturbed", "streamed", monkeypatch, capsys)


KINDS = ("worker", "frozen worker", "manager", "driver", "frozen driver", "TERM")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [KINDS, pytest.param((*KINDS, "worker", "worker", "manager", "worker"), marks=pytest.mark.long)], ids=len
)
def test_after_kills_of_all_kinds_the_bytes_are_those_of_one_go(
    tmp_path: Path, undisturbed: str, kinds: tuple[str, ...]
) -> None:
    slow = Slow(tmp_path / "killed", seconds=0.1, mode="streamed")
    round = Round(slow, random.Random(11), latest=1.0)
    for what in kinds:
        round.disturb(what)
    round.finish(undisturbed)
    assert round.troubles == []
    assert len(round.rows) == len(kinds)
    assert sum(row.again for row in round.rows) > 0  # else nothing was under way when it was killed


@pytest.mark.long
def test_faults_below_cost_time_or_blocks_and_no_bytes(tmp_path: Path, undisturbed: str) -> None:
    slow = Slow(tmp_path / "lied", seconds=0, mode="streamed", environment=ONE_WORKER)
    round = Round(slow, random.Random(5))
    round.lie("all lies")
    round.finish(undisturbed)
    assert round.troubles == []
    log = (slow.run / "volpipe.log").read_text()
    assert "Input/output error" in log or "No space left on device" in log


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds",
    [("full disk", "read-only"), pytest.param(("no inodes", "full disk", "read-only"), marks=pytest.mark.long)],
    ids=len,
)
def test_on_a_disk_with_too_little_a_run_ends_with_a_sentence_and_goes_on_later(
    tmp_path: Path, undisturbed: str, kinds: tuple[str, ...]
) -> None:
    with small_disk(tmp_path / "disk") as remount:
        place = tmp_path / "disk"
        slow = Slow(tmp_path / "starved", seconds=0, mode="streamed", place=place, environment=ONE_WORKER)
        round = Round(slow, random.Random(3))
        for what in kinds:
            round.starve(what, remount)
        assert [row.what for row in round.rows if row.code == 0] == []
        round.finish(undisturbed)
        assert round.troubles == []
