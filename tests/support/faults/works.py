"""One small work of each kind, over the same volume: what faults of all of them are tried on."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from command import set_each
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.blockwise.journal import Record, read_records
from volpipe.evaluation.subject import RESULTS
from volpipe.geometry.grid import Box
from volpipe.runs import worker
from volpipe.segmentation import tasks

SHAPE = (16, 32, 48)
CHUNK = 16
BAD = Box((0, 16, 32), (16, 32, 48))  # the chunk that CHUNK_FILE holds, x first as N5 has it
CHUNK_FILE = Path("in.n5/raw/2/1/0")
KINDS = (*worker.RESULTS, *tasks.RESULTS, *RESULTS)
LABELS = ("input.kind=foreground", "objects.method=components", "objects.threshold=0.5")
SIZES = ("output.block=[8,8,8]", "output.chunk=[4,4,4]", "output.levels=1")
FLOW = """
[[stage]]
name = "first"
net = { name = "identity" }
normalise = { method = "none" }
windows = { shape = [8, 8, 8], overlap = 0, block = [1, 1, 1], blend = "crop" }
output = { chunk = [8, 8, 8], shard = [8, 8, 8] }

[[stage]]
name = "objects"
kind = "label"
input = { stage = "first", kind = "foreground" }
objects = { method = "components", threshold = 0.5 }
output = { block = [8, 8, 8], chunk = [4, 4, 4] }
"""


@dataclass(frozen=True)
class Kind:
    """A kind of work.

    Attributes:
        arguments: of the command, without a site.
        made: what it makes.
        folders: those of its runs.
        stage: that reads the volume first, in the first of the folders.
        reach: voxels around its own that a task of that stage reads.
        block: voxels per axis of such a task.
    """

    arguments: tuple[str, ...]
    made: tuple[str, ...]
    folders: tuple[str, ...]
    stage: str
    reach: int = 0
    block: int = 8

    def command(self, site: str = "threads", *options: str) -> list[str]:
        return [self.arguments[0], "--config", site, *options, *self.arguments[1:]]

    def fingerprints(self, folder: Path) -> dict[str, str]:
        """Return a hash of each thing that was made in `folder`."""
        places = {name: folder / name for name in self.made}
        return {name: fingerprint(p) if p.is_dir() else p.read_text() for name, p in places.items()}

    def remove(self, folder: Path) -> None:
        """Delete all that was made in `folder`."""
        for name in (*self.made, *self.folders, "out", "out.run"):
            place = folder / name
            if place.is_dir():
                shutil.rmtree(place)
            else:
                place.unlink(missing_ok=True)

    def records(self, folder: Path) -> list[Record[object]]:
        """Return what the journals of the runs in `folder` have."""
        return [r for name in self.folders for r in read_records(folder / name / "journal.jsonl", KINDS)]

    def units(self, folder: Path) -> list[tuple[str, str, int]]:
        """Return run, stage and number of every unit that is marked done, as often as it is."""
        return [
            (name, record.stage, unit)
            for name in self.folders
            for record in read_records(folder / name / "journal.jsonl", KINDS)
            for unit in record.done
        ]

    def touching(self, box: Box) -> set[Box]:
        """Return the boxes of the tasks of the first stage that read a voxel of `box`."""
        counts = tuple(n // self.block for n in SHAPE)
        own = [tuple(i * self.block for i in index) for index in np.ndindex(counts)]
        boxes = (Box(corner, tuple(a + self.block for a in corner)) for corner in own)
        return {b for b in boxes if not (self._read(b) & box).is_empty}

    def _read(self, box: Box) -> Box:
        return Box(tuple(a - self.reach for a in box.start), tuple(b + self.reach for b in box.stop))


NET = (
    "net.name=identity", "normalise.method=none", "output.levels=1",
    *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"),
)  # fmt: skip
WORKS = {
    "run": Kind(
        ("run", *set_each(*NET), "-o", "out.zarr", "in.n5"), ("out.zarr",), ("out.zarr.run",), "infer",
    ),
    "segment": Kind(
        ("segment", *set_each(*LABELS, *SIZES), "-o", "out.zarr", "in.n5"),
        ("out.zarr", "out.zarr.run/objects.csv"), ("out.zarr.run",), "pieces", 1,
    ),
    "evaluate": Kind(
        ("evaluate", "--json", "out.json", "in.n5", "truth.n5"),
        ("out.json",), ("volpipe_in_truth_scores.run",), "evaluate", 3, 16,
    ),
    "compare": Kind(
        ("compare", "--json", "out.json", "--page", "out.html", "in.n5", "truth.n5"),
        ("out.json",), ("volpipe_in_truth_compare.run",), "compare", 0, 16,
    ),
    "flow": Kind(
        ("run", "--recipe", "flow.toml", "-o", "out", "in.n5"),
        ("out/first.zarr", "out/objects.zarr", "out/objects.zarr.run/objects.csv"),
        ("out/first.zarr.run", "out/objects.zarr.run"), "infer",
    ),
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Write what the works read into `folder`: objects of 4³ voxels in noise, and the same with less of it."""
    coarse = np.random.default_rng(0).integers(0, 2, [n // 4 for n in SHAPE], np.uint8)
    objects = 180 * np.kron(coarse, np.ones((4, 4, 4), np.uint8))
    write_volume(folder / "in.n5", objects + noise(SHAPE) // 4, CHUNK)
    write_volume(folder / "truth.n5", objects, CHUNK)
    (folder / "flow.toml").write_text(FLOW)
