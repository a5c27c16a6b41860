"""`volpipe segment` against waterz, mwatershed and volara, each as its documentation shows, on a real volume.

The volume is ts2 of the FIB-25 data, 250³ voxels of fly medulla, of which VOLPIPE_DATA names the folder above; without
it there is no such row. All take the same affinities of the shipped net, as a run stored them, and store labels.

- waterz: `agglomerate` of its README, with its own watershed and its default score, on the nearest affinities, to the
  threshold that the run has. One thread.
- mwatershed: `agglom` on the voxels of the whole volume, with the biases of volara's README. One thread.
- volara: the pipeline of its README on daisy's workers, as many as cores: fragments by mwatershed in blocks, affinities
  between them in SQLite, a mutex watershed of the graph, labels. Blocks of 128³ with 16 voxels of context.

Beside the seconds the row has the variation of information and the adapted Rand error, against bodies of 1,000 voxels
and more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.comparisons.default import installed
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import Session, environment, remove, session
from volpipe.api.labels import segment
from volpipe.evaluation.label_scores import overlaps
from volpipe.evaluation.scores import label_scores
from volpipe.volumes.volume import open_volume

DATA = Path(os.environ.get("VOLPIPE_DATA", "")) / "fibsem_medulla"
PROGRAM = Path(__file__).with_name("ts2_peers.py")
PEERS = {"waterz": "waterz==0.10.1", "mwatershed": "mwatershed==0.5.4", "volara": "volara==1.0.5"}
LEAST_VOXELS = 1000  # of a body that counts


def affinities(setting: Setting) -> Path:
    """Return the affinities of ts2, made once and kept; a corner of them where sizes are short."""
    path = setting.cache / ("ts2-corner.zarr" if setting.short else "ts2.zarr")
    done = path.with_suffix(".done")
    if not done.exists():
        remove(path)
        roi = ["--set", "input.roi=0:128,0:128,0:128"] if setting.short else []
        command = [sys.executable, "-m", "volpipe", "run", "--recipe", "affinities", "--out", str(path), *roi]
        subprocess.run([*command, str(DATA / "ts2_raw.tif")], check=True, env=environment(), stdout=subprocess.DEVNULL)
        done.touch()
    return path


def own_seconds(running: Session, location: Path) -> float:
    """Return the seconds of the run, whose labels are in its folder."""
    out = running.folder / "labels.zarr"
    remove(out)
    return segment(location, out=out, site=running.executors, progress=False).seconds


def peer_seconds(setting: Setting, name: str, location: Path) -> float:
    """Return the seconds of another program, in a process of its own that leaves labels in a file."""
    folder, labels = installed(setting, PEERS[name], beside=["numpy"]), setting.scratch / f"{name}.npy"
    remove(labels.with_suffix(""))
    command = [sys.executable, "-P", str(PROGRAM), name, str(location / "s0"), str(labels), str(os.cpu_count())]
    env = os.environ | {"PYTHONPATH": str(folder)}
    with tempfile.TemporaryDirectory(dir=setting.scratch) as own:  # volara notes there which blocks are done
        ended = subprocess.run(command, capture_output=True, text=True, env=env, cwd=own, check=False)
    if ended.returncode:
        raise RuntimeError(f"{name} ended with {ended.returncode}: {ended.stderr}")
    return float(json.loads(ended.stdout.splitlines()[-1])["seconds"])


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    location = affinities(setting)
    with session(setting) as running:
        for i in range(repeats):
            names = ["run", *PEERS]
            seconds = {}
            for name in names[i % len(names) :] + names[: i % len(names)]:
                own = name == "run"
                seconds[name] = own_seconds(running, location) if own else peer_seconds(setting, name, location)
            best = min(seconds[name] for name in PEERS)
            yield Outcome(seconds["run"] / best, {name: seconds[name] for name in names} | _scores(setting, running))


def _scores(setting: Setting, running: Session) -> dict[str, float]:
    """Return the variation of information in bits, and the adapted Rand error, of each side."""
    labels = {"run": open_volume(f"{running.folder}/labels.zarr").open().read_raw(...)}
    labels |= {name: np.load(setting.scratch / f"{name}.npy") for name in PEERS}
    truth = open_volume(str(DATA / "ts2_bodies_gt.tif")).open().read_raw(...)
    truth = truth[tuple(slice(n) for n in labels["run"].shape)]
    truth = np.where(np.bincount(truth.ravel())[truth] >= LEAST_VOXELS, truth, 0)
    result: dict[str, float] = {}
    for name, data in labels.items():
        scores = label_scores(overlaps(data, truth))
        result |= {f"{name} VOI": scores.split + scores.merge, f"{name} Rand": scores.rand_error}
    return result


ROWS = [
    Row(
        "ts2",
        "labels of ts2 / the fastest of waterz, mwatershed and volara",
        4.0,
        1.0,
        measure,
        why="seconds from stored affinities of 250³ voxels to stored labels, with workers that are up",
    )
] * DATA.is_dir()
