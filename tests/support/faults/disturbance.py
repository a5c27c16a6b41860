"""A run that is slow enough to be killed in the middle, and what its net did: for tests and for scripts/chaos."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import psutil
import pytest
from command import Ended, Process, begin, finish, giver, processes_in, set_each, wait_until
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.apps.htex.processes import WORKER
from volpipe.blockwise.journal import read_records
from volpipe.runs.worker import RESULTS

SHAPE = (24, 28, 20)
WINDOW, STRIDE, PER_BLOCK = 8, 4, 1
COUNTS = tuple(-(-n // STRIDE) for n in SHAPE)  # windows per axis: 210 in all
BLOCKS = tuple(-(-n // PER_BLOCK) for n in COUNTS)
NUM_BLOCKS = 120  # that hold windows: the first along each axis has two, the last none

# Each call notes which window it was given, in a file for each session of the driver. How long a call takes lies
# beside the net, not in it: the hash of its code is in the output. In workers, FAULTS makes reads
# and writes fail now and then, reads slow, and the clock jump.
NET = """
import hashlib, multiprocessing, os, pathlib, random, threading, time, torch
SESSION = pathlib.Path(os.environ["SESSION_FILE"]) if "SESSION_FILE" in os.environ else None
def on_a_worker():
    # A plan looks at its net, in the driver's own thread: zeros to time it, noise to see whether windows agree.
    # A worker gives it noise too, to see whether it is the plan's: fractions, while voxels are whole numbers.
    return multiprocessing.parent_process() is not None or threading.current_thread() is not threading.main_thread()
class Slow(torch.nn.Module):
    volpipe = dict(scale=(1, 1, 1), stride=(1, 1, 1), halo=(0, 0, 0))
    def forward(self, x):
        if x.any() and (x == x.round()).all() and SESSION is not None and on_a_worker():
            with SESSION.open("a") as file:
                file.write(hashlib.sha256(x.cpu().numpy().tobytes()).hexdigest() + "\\n")
            time.sleep(float(pathlib.Path(__file__).with_name("seconds").read_text()))
        return x * 2 + 1
def build():
    return Slow()
def disturb(faults, dice):
    from volpipe.volumes.storage.tensorstore import TensorStoreArray
    def failing(do, share, number):
        def failed(*arguments):
            if dice.random() < share:
                raise OSError(number, os.strerror(number))
            return do(*arguments)
        return failed
    def slowly(do, seconds):
        def done(*arguments):
            time.sleep(dice.uniform(0, seconds))
            return do(*arguments)
        return done
    tell = time.time
    for name, value in (part.split("=") for part in faults.split(",")):
        if name == "eio":
            TensorStoreArray.read = failing(TensorStoreArray.read, float(value), 5)
        elif name == "enospc":
            TensorStoreArray.write = failing(TensorStoreArray.write, float(value), 28)
        elif name == "slow":
            TensorStoreArray.read = slowly(TensorStoreArray.read, float(value))
        else:
            time.time = lambda: tell() + dice.choice([-1, 0, 1]) * float(value)
if os.environ.get("FAULTS") and multiprocessing.parent_process() is not None:
    disturb(os.environ["FAULTS"], random.Random(int(os.environ["FAULTS_SEED"]) + os.getpid()))
"""
FLOW = f"""
[[stage]]
name = "first"
net = {{{{ name = "net.py:build" }}}}
normalise = {{{{ method = "none" }}}}
tensors = {{{{ mode = "{{mode}}" }}}}
windows = {{{{ shape = {[WINDOW] * 3}, overlap = {[WINDOW - STRIDE] * 3}, block = {[PER_BLOCK] * 3}, blend = "hann" }}}}
output = {{{{ chunk = [4, 4, 4], shard = [4, 4, 4] }}}}

[[stage]]
name = "objects"
kind = "label"
input = {{{{ stage = "first", kind = "foreground" }}}}
objects = {{{{ method = "components", threshold = 0.9 }}}}
output = {{{{ block = [8, 8, 8], chunk = [4, 4, 4] }}}}

[[stage]]
name = "scores"
kind = "evaluate"
input = "first"
reference = "../in.n5"
"""

ONE_WORKER = {"VOLPIPE_WORKERS": "1"}  # where a second would tell nothing more


@dataclass
class Slow:
    """The same command again and again in `folder`, over a small volume.

    Attributes:
        seconds: that the net takes for each of 210 windows.
        mode: "stored" or "streamed".
        site: where it runs.
        environment: of the command.
        place: folder of the output, where that is another one.
    """

    folder: Path
    seconds: float = 0.05
    mode: str = "stored"
    site: str = "local"
    environment: dict[str, str] = field(default_factory=dict)
    place: Path | None = None
    num_sessions: int = 0
    process: Process | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        write_volume(self.folder.parent / "in.n5", noise(SHAPE))
        (self.folder / "net.py").write_text(NET)
        (self.folder / "seconds").write_text(str(self.seconds))

    @property
    def command(self) -> list[str]:
        division = windowed((WINDOW,) * 3, (WINDOW - STRIDE,) * 3, (PER_BLOCK,) * 3, "hann")
        recipe = set_each("net.name=net.py:build", "normalise.method=none", f"tensors.mode={self.mode}", *division)
        return ["run", "--config", self.site, *recipe, "-o", str(self.out), str(self.folder.parent / "in.n5")]

    @property
    def out(self) -> Path:
        return (self.place or self.folder) / "out.zarr"

    @property
    def run(self) -> Path:
        return (self.place or self.folder) / "out.zarr.run"

    @property
    def runs(self) -> list[Path]:
        """Folders of all runs that the command makes."""
        return [self.run]

    def made(self) -> str:
        """Return a hash of what the command makes."""
        return fingerprint(self.out)

    def begin(self) -> Process:
        """Start the next session."""
        self.num_sessions += 1
        environment = {"VOLPIPE_WORKERS": "2", "SESSION_FILE": str(self._calls(self.num_sessions))}
        self.process = begin(self.folder, *self.command, **environment | self.environment)
        return self.process

    def interrupt(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal to the driver, or to its group as a terminal does."""
        assert self.process is not None
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def hurry(self) -> None:
        """Let the net take no time from now on: all that was to be disturbed was."""
        (self.folder / "seconds.0").write_text("0")
        (self.folder / "seconds.0").replace(self.folder / "seconds")  # which the net reads meanwhile

    def finish(self, seconds: float = 120) -> Ended:
        assert self.process is not None
        return finish(self.folder, self.process, seconds)

    def marked(self, stage: str = "infer") -> set[int]:
        """Return the units of `stage` that the journal has."""
        return {unit for r in read_records(self.run / "journal.jsonl", RESULTS) if r.stage == stage for unit in r.done}

    def wait_for_calls(self, number: int) -> None:
        """Wait until the net was called so often in this session, or the session is over."""
        assert self.process is not None
        process, calls = self.process, self._calls(self.num_sessions)
        wait_until(
            lambda: process.poll() is not None or (calls.exists() and len(calls.read_text().splitlines()) >= number),
            120,
        )

    def computed(self, session: int) -> Counter[int]:
        """Return how many windows of each block the net was given in a session, counted from 1."""
        return Counter(self.calls(session))

    def calls(self, session: int) -> list[int]:
        """Return the block of each window that the net was given in a session, in that order."""
        if not self._calls(session).exists():
            return []
        blocks = blocks_by_window()
        return [blocks[line] for line in self._calls(session).read_text().splitlines() if len(line) == 64]

    def workers(self) -> list[psutil.Process]:
        """Return the processes that hold the net."""
        return [process for process in processes_in(self.folder) if has_net(process)]

    def _calls(self, session: int) -> Path:
        return self.folder / f"calls.{session}"


class SlowFlow(Slow):
    """The same run as the first stage of a flow: objects of its output follow, and scores."""

    @property
    def command(self) -> list[str]:
        (self.folder / "flow.toml").write_text(FLOW.format(mode=self.mode))
        recipe = ["--recipe", "flow.toml", "-o", str(self.out), str(self.folder.parent / "in.n5")]
        return ["run", "--config", self.site, *recipe]

    @property
    def out(self) -> Path:
        return (self.place or self.folder) / "out"

    @property
    def run(self) -> Path:
        return self.out / "first.zarr.run"

    @property
    def runs(self) -> list[Path]:
        return [self.out.with_name("out.run"), *sorted(self.out.glob("*.run"))]

    def made(self) -> str:
        """Return a hash of arrays, table and scores: attributes say where the input of a stage lies."""
        objects, scores = self.out / "objects.zarr", json.loads((self.out / "scores.json").read_text())["scores"]
        table = (self.out / "objects.zarr.run" / "objects.csv").read_text()
        levels = [fingerprint(self.out / "first.zarr"), *(fingerprint(level) for level in sorted(objects.glob("s*")))]
        return hashlib.sha256(json.dumps([levels, table, scores]).encode()).hexdigest()


def made_in_one_go(folder: Path, mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the fingerprint of what nothing disturbs, in threads of this process and without the net's delay."""
    slow = Slow(folder, seconds=0, mode=mode)
    ended = giver(slow.folder, monkeypatch, capsys)(*in_threads(slow.command))
    assert ended.code == 0, ended.err
    return slow.made()


def in_threads(command: list[str]) -> list[str]:
    """Return a command for workers of this machine as one for threads of its driver."""
    return [part if part != "local" else "threads" for part in command]


def has_net(process: psutil.Process) -> bool:
    """Return whether this is a worker that has begun a task of a net; one that ends just now has not."""
    try:
        is_worker = process.name() == WORKER and process.num_threads() > 1  # a fork has one, until it reads
        return is_worker and any("libtorch" in mapped.path for mapped in process.memory_maps())
    except psutil.NoSuchProcess:
        return False


@lru_cache
def blocks_by_window() -> dict[str, int]:
    """Return the block of each window, by the hash of its voxels: of noise, no two are alike."""
    before = (WINDOW - STRIDE) // 2
    padded = np.pad(noise(SHAPE).astype(np.float32), [(before, WINDOW + STRIDE)] * 3, mode="reflect")
    found = {}
    for index in np.ndindex(*COUNTS):
        corner = [i * STRIDE for i in index]
        window = padded[tuple(slice(c, c + WINDOW) for c in corner)]
        block = np.ravel_multi_index([max(0, i * STRIDE - before) // (STRIDE * PER_BLOCK) for i in index], BLOCKS)
        found[hashlib.sha256(np.ascontiguousarray(window).tobytes()).hexdigest()] = int(block)
    assert len(found) == np.prod(COUNTS)
    return found
