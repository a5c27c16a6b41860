"""Runs that are updated in the process of the test, over inputs of every format, and what they computed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from hypothesis import strategies as st
from inline import Inline
from nets import SMOOTH
from volumes import fingerprint, windowed, write_volume

from volpipe.blockwise.journal import read_records
from volpipe.geometry.blend import FAMILIES
from volpipe.geometry.grid import Box
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS
from volpipe.volumes.volume import ArraySpec, create_array, open_writer
from volpipe.workflow.driver import Report
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

FLOATS = ("net.intensity=same", "output.dtype=float32", "normalise.low=0", "normalise.high=255")
SHAPE = (16, 16, 48)
ROW = ("net.name=identity", *windowed((16, 16, 8), (0, 0, 0), (1, 1, 1), "crop"))  # six blocks


def planned(folder: Path, *settings_: str, volume: str = "in.n5") -> Plan:
    (folder / "smooth.py").write_text(SMOOTH)
    return prepare(
        volume if "://" in volume else str(folder / volume), load_recipe(None, settings_), folder / "out.zarr", folder
    )


def ran(plan: Plan, inline: Inline | None = None, **options: Any) -> Report:
    report = execute(plan, (inline or Inline()).start, RunOptions(**options))
    assert report.missing == []
    return report


def computed(report: Report) -> tuple[int, int]:
    """Return how many blocks had changed, and how many were computed again."""
    return sum(update.changed for update in report.updates), sum(update.computed for update in report.updates)


def assert_fresh(plan: Plan) -> None:
    """Compare the output with that of a fresh run in its place, which stays there."""
    updated = Path(plan.out).with_name("updated.zarr")
    shutil.rmtree(updated, ignore_errors=True)
    shutil.move(plan.out, updated)
    shutil.rmtree(f"{plan.out}.run")
    ran(plan)
    found, expected = (fingerprint(out) for out in (updated, plan.out))
    assert found == expected


@st.composite
def divisions(draw: st.DrawFn) -> tuple[tuple[int, ...], list[str]]:
    """A volume's shape, and windows, overlap, block and blend that divide it somehow."""
    shape = tuple(draw(st.integers(6, 26)) for _ in range(3))
    window = tuple(draw(st.integers(5, 12)) for _ in range(3))
    overlap = tuple(draw(st.integers(1, w // 3)) * 2 for w in window)
    block = tuple(draw(st.integers(1, 3)) for _ in range(3))
    return shape, windowed(window, overlap, block, draw(st.sampled_from(FAMILIES)))


def write_n5(folder: Path, data: np.ndarray) -> str:
    shutil.rmtree(folder / "in.n5", ignore_errors=True)
    write_volume(folder / "in.n5", data, chunk=8)
    return "in.n5"


def write_zarr(format: str, **layout: Any) -> Callable[[Path, np.ndarray], str]:
    def write(folder: Path, data: np.ndarray) -> str:
        name = "in.precomputed" if format == "precomputed" else "in.zarr"
        spec = ArraySpec(data.shape, data.dtype, (8, 8, 8), axes=("z", "y", "x"), **layout)
        shutil.rmtree(folder / name, ignore_errors=True)
        create_array(folder / name, "s0" if format == "precomputed" else "raw", spec, format)
        open_writer(folder / name, "s0" if format == "precomputed" else "raw").write(Box.from_shape(data.shape), data)
        return name

    return write


def write_slices(folder: Path, data: np.ndarray) -> str:
    (folder / "slices").mkdir(exist_ok=True)
    for z, plane in enumerate(data):
        file = folder / "slices" / f"{z:03}.tif"
        if not file.exists() or not np.array_equal(tifffile.imread(file), plane):
            tifffile.imwrite(file, plane)
    return "slices"


def num_looked(plan: Plan) -> int:
    """Return how many blocks were read without being computed, over all sessions."""
    records = read_records(RunFolder.from_output(Path(plan.out)).journal, RESULTS)
    return sum(len(record.done) for record in records if record.stage.startswith("reread"))


MEASURED = ("net.name=identity", "normalise.method=zscore", *windowed((16, 16, 8), (0, 0, 0), (1, 1, 1), "crop"))
