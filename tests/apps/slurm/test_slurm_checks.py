"""Nets are timed on GPU workers of a real Slurm, whose GPUs are made up, for plans to choose by; sites are checked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command import Ended, begin, finish, processes_in, sentences
from slurm import Slurm, kill
from slurm_runs import check_gone, new_slurm, on_slurm
from workers import put_hook

from volpipe.volumes.volume import ArraySpec, create_array

pytestmark = [pytest.mark.slow, pytest.mark.slurm]

# A worker's GPU, as torch has it, is a double, and so are the times of windows on it.
DOUBLE = """
def disturb(module):
    import torch
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda: "Made-up 9000"
    torch.cuda.get_device_properties = lambda number: type("", (), {"total_memory": 16 << 30})
    module.is_quick_to_compare = lambda facts, speeds: False
    module.measure_speeds_on_gpu = lambda choice, facts, gpu, *others, **more: module.NetSpeeds(
        processor=gpu,
        speeds=[{"arithmetic": (False, "float32"), "bytes_per_voxel": 300, "windows": [
            {"window": (n, n, n), "seconds": n**3 / 2e8} for n in (84, 148)]}],
    )
"""
SLOW = "def disturb(module):\n    import time\n    time.sleep(60)\n"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    yield from new_slurm(tmp_path_factory, accounting=False)


@pytest.fixture(autouse=True)
def _no_process_outlives_a_test(tmp_path: Path) -> Iterator[None]:
    yield
    kill(processes_in(tmp_path))


def give(folder: Path, slurm: Slurm, *command: str, **settings: str) -> Ended:
    """Give a command on Slurm; see that no job, process or file of it is left."""
    slow = on_slurm(folder, slurm, 0, GPUS="1", MEM_GB="4", **settings)
    environment = slow.environment | {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    ended = finish(slow.folder, begin(slow.folder, *command, **environment), 240)
    assert "Traceback" not in ended.err
    check_gone(slow, slurm)
    assert not [*slow.folder.glob(".volpipe*")]
    return ended


@pytest.mark.long
def test_windows_are_timed_on_a_gpu_worker_and_plans_for_the_site_choose_by_that(tmp_path: Path, slurm: Slurm) -> None:
    (tmp_path / "double").mkdir()
    put_hook(tmp_path / "double", "volpipe.estimation.measure", DOUBLE)
    create_array(tmp_path / "large.n5", "raw", ArraySpec((2048,) * 3, np.dtype("uint8"), (64,) * 3), "n5")
    plan = ("plan", "--quick", "--config", "slurm_htex", f"{tmp_path}/large.n5", "-o", "out.zarr")
    before = give(tmp_path / "before", slurm, *plan)
    assert "the net's own; `volpipe net NAME --config SITE` times others on the site's GPUs" in joined(before.out)
    init = f"export PYTHONPATH={tmp_path}/double:$PYTHONPATH"
    timed = give(tmp_path / "timed", slurm, "net", "unet3d", "--config", "slurm_htex", INIT=init)
    assert timed.code == 0, timed.err
    assert "Mvoxel/s on Made-up 9000, 16.0 GiB; plans for slurm_htex choose windows by them" in timed.out
    after = give(tmp_path / "after", slurm, *plan)
    assert "times as fast as windows of 84 × 84 × 84, the net's own" in joined(after.out)
    elsewhere = give(tmp_path / "elsewhere", slurm, *plan, CONSTRAINT="a100")  # where another GPU may come
    assert "`volpipe net NAME --config SITE` times others" in joined(elsewhere.out)


def joined(text: str) -> str:
    """Return a text of a table without its line breaks."""
    return " ".join(text.split())


@pytest.mark.long
def test_a_worker_that_sees_no_gpu_is_named(tmp_path: Path, slurm: Slurm) -> None:
    """Slurm gives a made-up GPU, of which CUDA knows nothing."""
    ended = give(tmp_path / "none", slurm, "net", "unet3d", "--config", "slurm_htex")
    assert ended.code == 2
    assert "sees no GPU; `volpipe sites check` says why" in ended.err.splitlines()[-1]
    assert not [*(tmp_path / "cache").rglob("site-*")]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"GPUS": "0"}, "asks for no GPU for nets"),
        pytest.param(
            {"PARTITION": "nowhere"},
            "executor gpu: no worker could start, or none could report",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_site_without_its_gpus_is_refused(tmp_path: Path, slurm: Slurm, settings: dict[str, str], said: str) -> None:
    slow = on_slurm(tmp_path / "refused", slurm, 0, **({"GPUS": "1"} | settings))
    ended = finish(slow.folder, begin(slow.folder, "net", "unet3d", "--config", "slurm_htex", **slow.environment), 240)
    assert ended.code == 2 and "Traceback" not in ended.err
    assert said in ended.err.splitlines()[-1]
    check_gone(slow, slurm)


@pytest.mark.long
@pytest.mark.parametrize(
    ("init", "wait", "said"),
    [
        ("sleep 60", "3", "executor gpu: no answer within 3 s, for no worker has started"),
        pytest.param(
            "export PYTHONPATH={double}:$PYTHONPATH",
            "15",
            "executor gpu: its worker has not timed the net within 15 s",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_late_worker_is_waited_for_no_longer(tmp_path: Path, slurm: Slurm, init: str, wait: str, said: str) -> None:
    """Its job starts late, or its net takes long."""
    (tmp_path / "double").mkdir()
    put_hook(tmp_path / "double", "volpipe.estimation.measure", SLOW)
    slow = on_slurm(tmp_path / "late", slurm, 0, GPUS="1", MEM_GB="4", INIT=init.format(double=tmp_path / "double"))
    command = ("net", "unet3d", "--config", "slurm_htex", "--wait", wait)
    ended = finish(slow.folder, begin(slow.folder, *command, **slow.environment), 240)
    assert ended.code == 2
    assert said in ended.err and "wait longer with --wait" in ended.err
    check_gone(slow, slurm)


# ---- the check of a site


def check_site(folder: Path, slurm: Slurm, wait: float = 120, **settings: str) -> tuple[int, list[str]]:
    """Return the exit code of `volpipe sites check` on Slurm, and what it named; see that no job is left."""
    slow = on_slurm(folder, slurm, 0, **settings)
    command = ["sites", "check", "slurm_htex", str(folder.parent / "in.n5"), "--wait", str(wait)]
    ended = finish(slow.folder, begin(slow.folder, *command, **slow.environment), 240)
    assert "Traceback" not in ended.err
    check_gone(slow, slurm)
    return ended.code, sentences(ended)


@pytest.mark.long
def test_a_check_of_a_site_on_slurm_finds_nothing_where_all_is_well(tmp_path: Path, slurm: Slurm) -> None:
    code, named = check_site(tmp_path / "well", slurm)
    assert (code, named) == (0, ["note: gpu: its site asks for no GPU, so nets run on CPUs there"])


@pytest.mark.long
def test_a_check_of_a_site_on_slurm_gives_the_last_words_of_its_jobs(tmp_path: Path, slurm: Slurm) -> None:
    code, named = check_site(tmp_path / "broken", slurm, INIT="echo no module named cuda >&2; exit 3")
    assert code == 1
    assert [sentence.partition(":")[0] for sentence in named] == ["cpu", "gpu"]
    assert all("last said: no module named cuda" in sentence for sentence in named)


@pytest.mark.long
def test_a_check_of_a_site_on_slurm_waits_no_longer_than_it_was_told(tmp_path: Path, slurm: Slurm) -> None:
    slurm.do("scontrol", "update", "nodename=n[1-2]", "state=drain", "reason=test")
    try:
        code, named = check_site(tmp_path / "drained-nodes", slurm, wait=6)
    finally:
        slurm.do("scontrol", "update", "nodename=n[1-2]", "state=resume")
    assert code == 1
    assert [sentence.partition(":")[0] for sentence in named] == ["cpu", "gpu"]
    waiting = "no answer within 6 s, for no worker has started; its block is PENDING and last said: Slurm says PENDING"
    assert all(waiting in sentence for sentence in named)
