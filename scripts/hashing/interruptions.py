"""Steps that are killed part way, and go on with other code: `--begin` and `--continue`."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from hashing.commands import MARK, Step, environment, give, prepare, python
from hashing.contents import lines_of
from hashing.steps import CROP, INPUTS, run, segment, settings, several, training


@dataclass(frozen=True)
class Interrupted:
    """A step that is killed when `trace`, a journal, a log or the tally of a copy, has `least` entries with `word`."""

    step: Step
    trace: str
    least: int
    signal: signal.Signals
    word: str = ""


def interrupted() -> tuple[Interrupted, ...]:
    """Return what `--begin` begins; blocks are small, so that there is time to kill it."""
    small, site = ("windows.shape=[48,64,64]", "windows.block=[1,1,1]"), ()
    stored = run("stored.zarr", *CROP, "--keep-tensors", *settings("tensors.mode=stored", *small), site=site)
    blended = run("blended.zarr", *CROP, *settings("windows.blend=hann", *small), site=site)
    blocks = segment("labels.zarr", "output.block=[16,32,32]", "output.chunk=[16,32,32]", site=site)
    learnt = training("superres.train", "superres.toml", *settings("train.steps=300"), site=site)
    tried = Step(
        ("sweep", *settings("train.steps=300"), "-o", "superres.sweep", "superres.toml"),
        ("superres.sweep/000/weights.safetensors", "superres.sweep/001/weights.safetensors"),
    )
    copy = Step(("convert", "noise.npy", "noise.n5"), ("noise.n5",))
    return (
        Interrupted(stored, "stored.zarr.run/journal.jsonl", 4, signal.SIGINT, '"infer"'),
        Interrupted(blended, "blended.zarr.run/journal.jsonl", 4, signal.SIGKILL, '"infer"'),
        Interrupted(blocks, "labels.zarr.run/journal.jsonl", 10, signal.SIGKILL, '"edges"'),
        Interrupted(learnt, "superres.train/losses.jsonl", 20, signal.SIGKILL),
        Interrupted(tried, "superres.sweep/000/losses.jsonl", 20, signal.SIGINT),
        Interrupted(several("flow"), "flow/affinities.zarr.run/journal.jsonl", 2, signal.SIGINT, '"infer"'),
        Interrupted(copy, "noise.n5.partial/copied.json", 2, signal.SIGKILL),
    )


def begin(folder: Path) -> None:
    """Make `whole`, where nothing is interrupted, and `begun`, where all is, beside a list of what is expected."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where this runs in the background or under nohup
    work, whole = folder / "work", folder / "whole"
    prepare(work)
    for step in (*INPUTS, run("affinities.zarr", "--recipe", "affinities", *CROP)):
        give(work, step)
    np.save(work / "noise.npy", np.random.default_rng(0).integers(0, 4096, (256, 384, 384), np.uint16))
    shutil.copytree(work, whole)
    with (folder / "expected.txt").open("w") as expected:
        for case in interrupted():
            give(whole, case.step)
            expected.writelines(f"{line}\n" for line in lines_of(whole, case.step))
    for case in interrupted():
        kill(work, case)
    shutil.copytree(work, folder / "begun")  # which keeps the times of inputs, as a run that goes on demands
    print(f"begun: {folder / 'begun'}; go on with scripts/hashes --continue {folder}")


def kill(folder: Path, case: Interrupted) -> None:
    """Begin `case` in `folder`, and kill it with all of its processes once it has done enough."""
    process = subprocess.Popen(
        [*python(), *case.step.command], cwd=folder, env=environment(folder),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    while process.poll() is None and entries(folder / case.trace, case.word) < case.least:
        time.sleep(0.005)
    if process.poll() is not None:
        sys.exit(f"volpipe {' '.join(case.step.command)} ended with {process.returncode} before it could be killed")
    os.killpg(process.pid, case.signal)
    code = process.wait(120)
    while left := processes_of(folder):  # workers in groups of their own, which would go on for some seconds
        for worker in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        time.sleep(0.1)
    if code == 0 or (case.trace.endswith("losses.jsonl") and (folder / case.step.outputs[0]).exists()):
        sys.exit(f"volpipe {' '.join(case.step.command)} came to its end, though it was killed")
    num = entries(folder / case.trace, case.word)
    print(f"{case.step.command[0]} {case.step.outputs[0]}: {case.signal.name} at {num}, exit {code}", flush=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return the processes that commands in `folder` left, by the environment that those have."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            if process.environ().get(MARK) == str(folder):
                left.append(process)
    return left


def entries(trace: Path, word: str) -> int:
    """Return how many lines with `word` a journal or a log has, or how many boxes the tally of a copy; 0 without it."""
    try:
        text = trace.read_text()
    except FileNotFoundError:
        return 0
    if trace.name != "copied.json":
        return sum(word in line for line in text.splitlines())
    tally = json.loads(text)
    return int(tally["below"]) + len(tally["beyond"])


def go_on(folder: Path) -> None:
    """Have what was begun come to its end, and end with 1 where an output is not as expected, or began anew."""
    work, troubles, made = folder / "work", [], []
    shutil.rmtree(work)
    shutil.copytree(folder / "begun", work)
    for case in interrupted():
        started = time.time()
        give(work, case.step)
        made += list(lines_of(work, case.step))
        kept = num_kept(folder / "begun", work, case, started)
        print(f"{case.step.command[0]} {case.step.outputs[0]}: {kept} kept of what was begun", flush=True)
        troubles += [] if kept else [f"{case.step.outputs[0]} was begun anew"]
    expected = (folder / "expected.txt").read_text().splitlines()
    print(*made, sep="\n")
    troubles += [f"{line}: not so without the interruption" for line in made if line not in expected]
    troubles += [f"{line}: expected" for line in expected if line not in made]
    print(*(troubles or ["all as without an interruption"]), sep="\n")
    sys.exit(1 if troubles else 0)


def num_kept(begun: Path, work: Path, case: Interrupted, started: float) -> int:
    """Return how much of what was begun is in the result: entries of its journal (all, or 0), of its log, or files."""
    if case.trace.endswith("copied.json"):
        files = (work / case.step.outputs[0]).rglob("*")
        return sum(file.is_file() and file.stat().st_mtime < started for file in files)
    before, after = ((place / case.trace).read_text() for place in (begun, work))
    old = before[: before.rindex("\n") + 1]
    if case.trace.endswith("journal.jsonl"):
        return old.count("\n") if after.startswith(old) else 0
    return len(set(old.splitlines()) & set(after.splitlines()))  # steps after the last checkpoint are taken again
