"""Sums of blocks: who finishes a shard depends on the order of work, its bytes do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from plans import facts, planned, volume
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.inference.output import create_output
from volpipe.inference.plan import Plan
from volpipe.inference.scratch import PARTS
from volpipe.recipes.inference import load_recipe
from volpipe.runs import worker
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import Job
from volpipe.volumes.storage.paths import partial_of
from volpipe.workflow.prepare import prepare

RECIPE = ["net.name=shift", "normalise.method=none", "output.levels=0", "output.dtype=float32"]


def job_of(folder: Path, *settings: str) -> Job:
    """Return a job over 36 blocks of noise whose sums reach into their neighbours."""
    folder.mkdir()
    location = write_volume(folder / "in.n5", noise((24, 28, 20)))
    division = windowed((8, 8, 8), (4, 4, 4), (2, 2, 2), "hann")
    plan = prepare(str(location), load_recipe(None, [*RECIPE, *division, *settings]), folder / "out", folder)
    RunFolder(folder / "run").path.mkdir()
    RunFolder(folder / "run").store(plan)
    create_output(plan, {})
    job = Job(str(folder / "run"), plan.identity)
    job.tensors.create()
    return job


def blocks_of(plan: Plan) -> list[int]:
    return [block for block in range(len(plan.blocks)) if not plan.sum_box(block).is_empty]


def ran(job: Job, order: Sequence[int]) -> set[int]:
    """Run the blocks in `order`, a task each, and reassemble what they left; return the shards that they finished."""
    closed: set[int] = set()
    for block in order:
        record = worker.infer(job, [block])
        assert record.failed == ()
        assert record.result is not None and closed.isdisjoint(record.result.shared)
        closed |= set(record.result.shared)
    plan = job.plan
    left = [s for s in range(len(plan.shards())) if s not in closed and not plan.is_direct(s)]
    assert worker.reassemble(job, left).failed == ()
    return closed


@pytest.mark.parametrize("settings", [(), ("input.roi=3:22,:,5:19",), ("output.shard=[4,8,4]", "output.chunk=[4,4,4]")])
def test_whoever_finishes_a_shard_its_bytes_are_the_same(tmp_path: Path, settings: tuple[str, ...]) -> None:
    ascending, descending = (job_of(tmp_path / name, *settings) for name in ("up", "down"))
    plan, blocks = ascending.plan, blocks_of(ascending.plan)
    shared = {shard for shard in range(len(plan.shards())) if not plan.is_direct(shard)}
    assert ran(ascending, blocks) == shared != set()
    assert ran(descending, blocks[::-1]) == set()
    assert fingerprint(tmp_path / "up/out") == fingerprint(tmp_path / "down/out")


def test_blocks_in_order_store_no_core(tmp_path: Path) -> None:
    job = job_of(tmp_path / "a")
    ran(job, blocks_of(job.plan))
    parts = {path.relative_to(job.tensors.sums_path / job.tensors.sums_key).parts[0]
             for path in job.tensors.sums_path.rglob("c/*/0/0/0/0")}  # fmt: skip
    assert parts == {"z", "y", "x"}


def test_tensors_that_are_discarded_leave_no_folder(tmp_path: Path) -> None:
    job = job_of(tmp_path / "a", "tensors.mode=stored", "tensors.format=zarr3")
    blocks = blocks_of(job.plan)
    assert worker.factor(job, blocks).failed == ()
    ran(job, blocks)
    arrays = [path for path in Path(job.folder).rglob("c") if path.is_dir()]
    assert all(any(array.iterdir()) for array in arrays) and len(arrays) == 4  # the windows, and three parts of sums
    assert worker.discard(job, blocks, "windows").failed == ()
    assert worker.discard(job, range(len(PARTS) * len(job.plan.blocks)), "sum").failed == ()
    assert [path for array in arrays for path in array.iterdir()] == []


def test_the_tensor_of_a_killed_task_is_forgotten_with_its_folder(tmp_path: Path) -> None:
    job = job_of(tmp_path / "a")
    first, second, *_ = blocks_of(job.plan)
    worker.infer(job, [first, second])
    left = [job.tensors.sum_file(block, 1) for block in (first, second)]
    partial_of(left[0]).touch()
    job.tensors.forget_sums(np.arange(len(job.plan.blocks)) == second)
    assert not left[0].parents[3].exists() and left[1].exists()


def shared_by(job: Job, block: int) -> tuple[int, ...]:
    result = worker.infer(job, [block]).result
    assert result is not None
    return result.shared


def test_a_block_whose_earlier_neighbour_is_gone_leaves_its_shard_to_others(tmp_path: Path) -> None:
    job = job_of(tmp_path / "a")
    plan, (first, second, *_) = job.plan, blocks_of(job.plan)
    worker.infer(job, [first])
    job.tensors.sum_file(first, 3).unlink()
    assert shared_by(job, second) == ()
    worker.infer(job, [first])
    assert shared_by(job, second) == tuple(
        s for s in plan.shards_of_block(second) if plan.blocks_of_shard(s) == (first, second)
    )


def test_blocks_grow_where_windows_overlap_much_and_where_they_would_be_very_many() -> None:
    apart, half = "windows.overlap=0", "windows.overlap=32"

    def core(settings: str, side: int) -> tuple[int, ...]:
        division = ("windows.blend=hann", "windows.shape=[64,64,64]", settings, "output.format=n5")
        return planned(*division, of=volume((side,) * 3), net=facts()).blocks.cell

    assert core(apart, 256) == core(apart, 1024) == core(apart, 4096) == (128, 128, 128)
    assert core(apart, 6144) == (128, 256, 256)
    assert core(apart, 100_000) == (256, 256, 256)
    assert core(half, 256) == (128, 128, 128)  # larger ones would be fewer than workers
    assert core(half, 512) == (256, 256, 256)
