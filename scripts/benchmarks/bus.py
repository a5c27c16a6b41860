"""Bytes that cross the bus to a GPU and back, by those that are read and written; counted where they would cross.

Not here: how long they take. The path is the same on every device, so that no GPU is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

from benchmarks import inputs
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import DEFAULT_RECIPE, remove
from volpipe.inference.infer import infer
from volpipe.inference.intensity import Affine
from volpipe.inference.output import create_output
from volpipe.inference.runner import Runner, load_runner
from volpipe.inference.scratch import ScratchTensors
from volpipe.inference.selection import Selection
from volpipe.inference.windows import StreamedWindows
from volpipe.recipes.inference import load_recipe
from volpipe.workflow.prepare import prepare

RAW = Affine(127.5, 127.5)  # bytes do not depend on it


def measure(setting: Setting, repeats: int, *, settings: tuple[str, ...]) -> Iterator[Outcome]:
    """Count once, and yield that each time: nothing of it varies."""
    location, out = inputs.volume(setting, setting.cube(512)), setting.scratch / "out.zarr"
    remove(out)
    recipe = load_recipe(DEFAULT_RECIPE, ["net.name=identity", "output.levels=0", *settings])
    plan = prepare(location, recipe, out, Path.cwd())
    create_output(plan, {})
    tensors = ScratchTensors(plan, setting.scratch / "tensors")
    tensors.create()
    source = StreamedWindows(plan.source.volume(), plan.lattice, RAW)
    blocks = [block for block in range(len(plan.blocks)) if not plan.sum_box(block).is_empty]
    for _, outcome in infer(Selection(plan), RAW, tensors, source, blocks):
        if isinstance(outcome, Exception):
            raise outcome
    yield from [_outcome(load_runner(plan), blocks)] * repeats


def _outcome(runner: Runner, blocks: list[int]) -> Outcome:
    plan, bus = runner.plan, runner.bus
    voxels = plan.roi_box.num_voxels
    least = 2 * voxels  # uint8 in, uint8 out
    sides = {"up": bus.up_bytes / voxels, "down": bus.down_bytes / voxels, "blocks": float(len(blocks))}
    return Outcome((bus.up_bytes + bus.down_bytes) / least, sides)


ROWS = [
    Row(
        f"bus-{name}",
        f"bytes over the bus, {what} / input and output",
        most,
        aim,
        functools.partial(measure, settings=settings),
        why="512³ uint8 to uint8, one worker, block after block; sides in bytes per voxel",
        is_quick=name == "crop",  # sums that leave a block weigh more at small sizes
    )
    for name, what, most, aim, settings in (
        ("crop", "windows of the default net", 1.6, 1.3, ("windows.shape=[84,84,84]", "windows.overlap=20")),
        ("hann", "half an overlap", 2.5, 2.0, ("windows.shape=[64,64,64]", "windows.overlap=32", "windows.blend=hann")),
    )
]
