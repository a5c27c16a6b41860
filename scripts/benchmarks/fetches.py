"""How often the store is asked for an input chunk, counted by tensorstore itself in every worker."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import command
from volpipe.blockwise.pool import Capacity
from volpipe.estimation.estimate import Slots, estimate
from volpipe.estimation.memory import net_bytes
from volpipe.models.identity import Identity
from volpipe.recipes.inference import load_recipe
from volpipe.resolve import default_recipe
from volpipe.stages.sizing import Sizing
from volpipe.volumes.volume import ArraySpec, create_array
from volpipe.workflow.prepare import prepare

NUM_WORKERS = 2
WORKER_BYTES = 6 << 30  # half of 24 GiB for two

SETTINGS = (
    "tensors.mode=streamed",
    "windows.shape=[64,64,64]",
    "windows.overlap=32",
    "windows.blend=crop",  # no block sums, which would be read through the same counters
    "output.levels=0",
)
BYTES_READ = "/tensorstore/kvstore/file/bytes_read"
READS = "/tensorstore/kvstore/file/batch_read"


class Counting(Identity):
    """The identity, which notes at each window what its process has read through tensorstore so far."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self.folder = folder

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "meta":
            counts = {name: counted(name) for name in (BYTES_READ, READS)}
            (self.folder / f"{os.getpid()}.json").write_text(json.dumps(counts))
        return torch.clone(x)


def counting(*, folder: str) -> Counting:
    """Return the net of this row; a run finds it by name."""
    return Counting(Path(folder))


def counted(name: str) -> int:
    """Return the value of one of tensorstore's metrics in this process; 0 before it is first used."""
    import tensorstore as ts

    found = [metric for metric in ts.experimental_collect_matching_metrics(name) if metric["name"] == name]
    return int(sum(value["value"] for metric in found for value in metric["values"]))


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Bytes read by bytes of all chunk files, the input's: with `crop` there are no block sums to be read."""
    location = inputs.volume(setting, setting.cube(512))
    stored = sum(path.stat().st_size for path in Path(location).rglob("*") if path.is_file() and path.name.isdecimal())
    for turn in range(repeats):
        folder = setting.scratch / f"counts{turn}"
        folder.mkdir()
        net = (f"net.name={__file__}:counting", f'net.options={{folder="{folder}"}}')
        command(location, setting.scratch / "out.zarr", [*net, *SETTINGS])
        read = sum(json.loads(path.read_text())[BYTES_READ] for path in folder.glob("*.json"))
        yield Outcome(read / stored, {"MiB read": read / 2**20, "MiB of chunks": stored / 2**20})


def planned(setting: Setting, repeats: int) -> Iterator[Outcome]:
    """Fetches of a chunk of 2048³ voxels by the default recipe's plan; nothing is read, so that one turn is enough."""
    location = setting.scratch / "large.n5"
    create_array(location, "raw", ArraySpec((2048,) * 3, np.dtype("uint8"), (64,) * 3, codec="gzip"), "n5")
    recipe, folder = load_recipe(default_recipe(), []), setting.scratch
    plan = prepare(
        str(location), recipe, folder / "large.zarr", folder, Sizing(Capacity(WORKER_BYTES, NUM_WORKERS, on_gpu=False))
    )
    result = estimate(plan, plan.source.volume(), 1.0, Slots(NUM_WORKERS, NUM_WORKERS, shared=True))
    memory = result.memory_bytes - (net_bytes(plan) or 0.0)
    yield Outcome(result.amplification, {"files": float(result.output_files), "worker without net MiB": memory / 2**20})


ROWS = [
    Row(
        "plan-fetches",
        "fetches of an input chunk, planned for 2048³",
        1.3,
        1.3,
        planned,
        why="the default recipe, N5 in chunks of 64³, two workers of 6 GiB, whose windows have a core of 128³; beside, "
        "files of the output, and memory of a worker",
        is_quick=True,
    ),
    Row(
        "fetches",
        "fetches of an input chunk",
        1.5,
        1.2,
        measure,
        why="512³ uint8, chunks 64³, streamed windows of 64³ with 50 % overlap; bytes that tensorstore read in all "
        "workers by the bytes of all chunks",
    ),
]
