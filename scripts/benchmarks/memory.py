"""What a worker needs at its peak over a large volume, and over a small one beside it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import command, run_folder
from volpipe.blockwise.journal import read_records
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS

MIB = 2**20


def worker_peak(setting: Setting, side: int) -> float:
    """Return the highest resident memory of any worker of a run over side³ voxels, in MiB."""
    out = setting.scratch / "out.zarr"
    command(inputs.volume(setting, (side, side, side)), out, ["net.name=identity"])
    records = read_records(RunFolder(run_folder(out)).journal, RESULTS)
    return max(record.usage.peak_bytes for record in records) / MIB


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    large = 768 if setting.short else 1024
    for turn in range(repeats):
        order = (256, large) if turn % 2 else (large, 256)
        peaks = {side: worker_peak(setting, side) for side in order}
        yield Outcome(peaks[large], {"256³": peaks[256]})


ROWS = [
    Row(
        "worker",
        "peak memory of a worker over 1024³",
        1024.0,
        1024.0,
        measure,
        unit="MiB",
        why="identity, default windows and blocks, with pyramid; a GiB is what a worker may take beside its net; 768³ "
        "where sizes are short",
    )
]
