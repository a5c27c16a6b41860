"""Segmentations, evaluations and flows in processes of their own: workers and drivers die, and the bytes stay."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from command import Ended, begin, finish, giver, processes_in, wait_until
from conftest import ROOT
from workers import happened, lay
from works import WORKS, Kind, prepare

from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.evaluation import subject

pytestmark = pytest.mark.usefixtures("_no_process_outlives_a_test")

# As the site of this machine; it is noticed soon that a driver is gone.
SITE = """
from volpipe.configs import local

def config(run_dir):
    made = local.config(run_dir)
    for executor in made.executors:
        executor.heartbeat_period, executor.heartbeat_threshold = 1, 3
    return made
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["segment", "flow", "evaluate", "compare"])
def test_after_lost_workers_a_killed_driver_and_ctrl_c_the_bytes_are_those_of_one_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    kind = WORKS[name]
    prepare(tmp_path)
    monkeypatch.setattr(subject, "BLOCK", (8, 8, 8))
    whole = giver(tmp_path, monkeypatch, capsys)(*kind.command())
    assert whole.code == 0, whole.err
    known = kind.fingerprints(tmp_path)
    kind.remove(tmp_path)
    (tmp_path / "site.py").write_text(SITE)
    accidents = (f"killed.{kind.stage}", f"without_memory.{kind.stage}")
    faults = lay(tmp_path, *accidents, seconds=0.1)

    def start() -> Driver:
        return Driver(tmp_path, kind, faults)

    first = start()
    first.wait_for(2, "WorkerLost", "MemoryError")
    assert happened(tmp_path) == set(accidents)
    assert first.end(signal.SIGKILL).code == -signal.SIGKILL
    before = kind.units(tmp_path)
    assert len(before) >= 2
    third = start()
    third.wait_for(len(before) + 1)
    ended = third.end(signal.SIGINT)
    assert ended.code == INTERRUPTED, ended.err
    assert ended.err.splitlines()[-1] == "volpipe: interrupted; run the same command again to continue"
    between = kind.units(tmp_path)
    assert set(before) < set(between)
    (tmp_path / "faults" / "seconds").write_text("0")
    ended = start().end()
    assert ended.code == 0, ended.err
    assert kind.fingerprints(tmp_path) == known
    after = kind.units(tmp_path)  # none of an evaluation or a comparison, whose folder goes
    assert len(after) == len(set(after))
    assert not after or set(between) <= set(after)
    wait_until(lambda: not processes_in(tmp_path), 25)


class Driver:
    """The command, in a process whose workers meet accidents."""

    def __init__(self, folder: Path, kind: Kind, faults: dict[str, str]) -> None:
        self.folder, self.kind = folder, kind
        path = os.pathsep.join([faults["FAULTS_FOLDER"], str(ROOT)])
        environment = faults | {"VOLPIPE_WORKERS": "2", "PYTHONPATH": path}
        self.process = begin(folder, *kind.command("site.py"), **environment)

    def wait_for(self, number: int, *words: str) -> None:
        """Wait until so many units are marked, and the log has all `words`."""
        log = self.folder / self.kind.folders[0] / "volpipe.log"

        def is_so() -> bool:
            assert self.process.poll() is None, (self.folder / "err.txt").read_text()
            text = log.read_text() if log.is_file() else ""
            return all(word in text for word in words) and len(self.kind.units(self.folder)) >= number

        wait_until(is_so, 60)

    def end(self, number: signal.Signals | None = None) -> Ended:
        """Return how it ended, after a signal if one is given; Ctrl-C of a terminal reaches all its processes."""
        if number is signal.SIGINT:
            os.killpg(self.process.pid, number)
        elif number is not None:
            self.process.send_signal(number)
        return finish(self.folder, self.process, 60)
