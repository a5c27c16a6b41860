"""Reading and writing alone: `run` with a net that does nothing, against decoding and encoding every chunk once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import inputs
from benchmarks.comparisons.peer import Take, peers
from benchmarks.row import Outcome, Row, Setting, compared
from benchmarks.session import DEFAULT_RECIPE, IDENTITY, remove, session
from volpipe.inference.output import create_output, write_voxels
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.stages.sizing import Sizing
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare


def copy(plan_json: str) -> Callable[[Take], None]:
    """Return what decodes each input chunk once and encodes each output chunk once, shard by shard."""
    plan = Plan.model_validate_json(plan_json)
    volume = open_volume(plan.source.path, plan.source.key)

    def work(take: Take) -> None:
        reader, shards = volume.open(), plan.shards()
        while (number := take()) < len(shards):
            box = shards.box(number)
            write_voxels(plan, 0, box, reader.read(box))

    return work


def measure(setting: Setting, repeats: int, size: int = 512) -> Iterator[Outcome]:
    location = inputs.volume(setting, setting.cube(size))
    out = setting.scratch / "floor.zarr"
    with session(setting) as running:
        sizing = Sizing(running.executors.capacity)  # of both sides, as `volpipe run` takes it
        plan = prepare(location, load_recipe(DEFAULT_RECIPE, IDENTITY), out, Path.cwd(), sizing)
        workers = running.executors.slots["gpu"]
        with peers(workers, copy, plan.model_dump_json(), env={"VOLPIPE_THREADS": "1", "OMP_NUM_THREADS": "1"}) as go:

            def floor() -> float:
                remove(out)
                create_output(plan, {})
                return go()

            yield from compared(repeats, lambda: running.run(location, *IDENTITY, sizing=sizing), floor, "floor")


def measure_large(setting: Setting, repeats: int) -> Iterator[Outcome]:
    yield from measure(setting, repeats, 1024)


WHAT = "run of the identity / decode and encode each chunk once"
WHY = (
    "uint8, N5 gzip 64³ to OME-Zarr zstd 64³ without pyramid; as many processes of one thread as workers, "
    "up on both sides; the floor reads and writes whole shards through the same library, those of the run's plan"
)
START_AND_END = "start and end, 0.3 s of a run whatever its size, are two thirds of the fastest floor"
ROWS = [
    Row("floor", WHAT, 2.2, 1.3, measure, why=f"512³ {WHY}; {START_AND_END}"),
    Row("floor-large", f"{WHAT}, 1024³", 1.3, 1.0, measure_large, why=f"1024³ {WHY}; start and end count less"),
]
