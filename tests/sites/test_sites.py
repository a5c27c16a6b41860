"""Sites: the same bytes wherever a run runs, nothing left behind, and each stage on the executors meant for it."""

from __future__ import annotations

import getpass
import os
import pwd
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from command import begin, finish, giver, processes_in, set_each
from conftest import ROOT
from parsl.config import Config
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.base import ParslExecutor
from parsl.providers import LocalProvider, SlurmProvider
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.apps import capacity
from volpipe.apps.htex.executor import ResilientExecutor
from volpipe.apps.pool import on_site
from volpipe.blockwise.journal import Record, read_records
from volpipe.blockwise.pool import Capacity, Gpu
from volpipe.errors import SiteError
from volpipe.runs import worker
from volpipe.runs.worker import RESULTS
from volpipe.sites.find import find_site, list_sites, name_user, try_site

# Measured, windowed, blended, reassembled and coarsened: every stage has units.
EVERY_STAGE = set_each(
    "net.name=volpipe.models.unet3d:unet3d", "net.options={features=[4,6],seed=2}", "net.untrained=true",
    "normalise.method=zscore", "output.shard=[4,8,4]", "output.chunk=[4,4,4]", "output.levels=2",
    *windowed((16, 16, 16), (8, 8, 8), (2, 2, 2), "hann"),
)  # fmt: skip


def command(site: str, mode: str, volume: Path) -> list[str]:
    return ["run", "--config", site, *EVERY_STAGE, *set_each(f"tensors.mode={mode}"), "-o", "out.zarr", str(volume)]


@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_the_same_bytes_on_every_site_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads or processes, one or two, by way of stored windows or not; the recipe alone is told apart."""
    volume = write_volume(tmp_path / "in.n5", noise((24, 28, 20)))
    whole: dict[str, set[str]] = {"stored": set(), "streamed": set()}
    voxels = set()
    for site, workers, mode in [
        ("threads", 1, "stored"),
        ("threads", 2, "streamed"),
        ("local", 2, "stored"),
        ("local", 1, "streamed"),
    ]:
        folder = tmp_path / f"{site}-{workers}-{mode}"
        folder.mkdir()
        monkeypatch.setenv("VOLPIPE_WORKERS", str(workers))
        if site == "threads":
            ended = giver(folder, monkeypatch, capsys)(*command(site, mode, volume))
        else:
            ended = finish(folder, begin(folder, *command(site, mode, volume)))
        assert ended.code == 0, ended.err
        assert processes_in(folder) == []
        assert not list((folder / "out.zarr.run").glob("tensors.*"))
        records = list(read_records(folder / "out.zarr.run/journal.jsonl", RESULTS))
        stages = {record.stage for record in records}
        assert stages >= {"measure", "infer", "pyramid 1", "pyramid 2"}  # blocks may finish all shards
        assert ("factor" in stages) == (mode == "stored")
        pids = {record.usage.pid for record in records}
        assert pids == {os.getpid()} if site == "threads" else 1 <= len(pids) <= workers
        whole[mode].add(fingerprint(folder / "out.zarr"))
        (folder / "out.zarr/zarr.json").unlink()  # says which way the windows took
        voxels.add(fingerprint(folder / "out.zarr"))
    assert [len(found) for found in (*whole.values(), voxels)] == [1, 1, 1]


TWO_EXECUTORS = """
from parsl.config import Config
from parsl.executors import ThreadPoolExecutor

def config(run_dir):
    executors = [ThreadPoolExecutor(label=label, max_threads=2, thread_name_prefix=label) for label in {labels}]
    return Config(executors=executors, run_dir=run_dir, strategy="none", initialize_logging=False, usage_tracking=0)
"""


@pytest.fixture
def threads_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """Give what fills up with the names of the executors whose threads ran each of the worker's functions."""
    ran: dict[str, set[str]] = {}

    def noting(name: str, function: Callable[..., Record[Any]]) -> Callable[..., Record[Any]]:
        def noted(*arguments: object) -> Record[Any]:
            ran.setdefault(name, set()).add(threading.current_thread().name.rpartition("_")[0])
            return function(*arguments)

        return noted

    for name in ("measure", "factor", "infer", "reassemble", "coarsen", "discard"):
        monkeypatch.setattr(worker, name, noting(name, getattr(worker, name)))
    yield ran


@pytest.mark.long
@pytest.mark.parametrize(
    ("labels", "cpu", "gpu"),
    [
        (["cpu", "gpu"], {"cpu"}, {"gpu"}),
        (["gpu_h200", "cpu_big"], {"cpu_big"}, {"gpu_h200"}),
        (["gpu", "mine"], {"gpu", "mine"}, {"gpu"}),
        (["mine"], {"mine"}, {"mine"}),
    ],
)
def test_stages_run_on_the_executors_of_their_label(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    threads_of: dict[str, set[str]],
    labels: list[str],
    cpu: set[str],
    gpu: set[str],
) -> None:
    write_volume(tmp_path / "in.n5", noise((24, 28, 20)))
    (tmp_path / "site.py").write_text(TWO_EXECUTORS.format(labels=labels))
    give = giver(tmp_path, monkeypatch, capsys)
    ended = give("run", "--config", "site.py", *EVERY_STAGE, *set_each("tensors.mode=stored"), "in.n5")
    assert ended.code == 0, ended.err
    assert threads_of.pop("infer") == gpu
    assert set(threads_of) == {"measure", "factor", "reassemble", "coarsen", "discard"}
    assert set().union(*threads_of.values()) == cpu


def htex(
    label: str, workers: int | None, *, max_blocks: int = 1, nodes: int = 1, gpus: Sequence[str] = ()
) -> HighThroughputExecutor:
    return HighThroughputExecutor(
        label=label,
        address="127.0.0.1",
        max_workers_per_node=workers,
        available_accelerators=gpus,
        provider=LocalProvider(max_blocks=max_blocks, nodes_per_block=nodes),
        encrypted=False,
    )


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda: ThreadPoolExecutor(label="a", max_threads=3), 3),
        (lambda: htex("a", 4), 4),
        (lambda: htex("a", 4, max_blocks=3, nodes=2), 24),
        (lambda: htex("a", None), capacity.UNKNOWN_SLOTS),
    ],
)
def test_an_executor_has_as_many_slots_as_it_may_have_workers(make: Callable[[], ParslExecutor], slots: int) -> None:
    assert capacity.count_workers(make()) == slots


@pytest.mark.parametrize(
    ("devices", "visible", "torch", "expected"),
    [
        (["nvidia0", "nvidiactl"], None, "2.13.0", True),
        (["nvidia0", "nvidiactl"], "1", "2.13.0", True),
        (["nvidia0", "nvidiactl"], "", "2.13.0", False),
        (["nvidia0", "nvidiactl"], None, "2.13.0+cpu", False),
        (["nvidiactl"], None, "2.13.0", False),
    ],
)
def test_a_machine_has_a_gpu_where_torch_will_see_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], visible: str | None, torch: str, expected: bool
) -> None:
    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("volpipe.apps.capacity.version", {"torch": torch}.__getitem__)
    assert capacity._sees_gpu(tmp_path) == expected


@pytest.mark.parametrize("here", [False, True])
def test_workers_of_a_machine_with_a_gpu_need_the_memory_of_cuda(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "_sees_gpu", lambda: here)
    assert capacity.has_gpu(htex("gpu", 2)) == here
    assert capacity.has_gpu(ThreadPoolExecutor(label="a", max_threads=3)) == here
    away = HighThroughputExecutor(label="gpu", address="127.0.0.1", provider=SlurmProvider(), encrypted=False)
    assert not capacity.has_gpu(away)  # another machine's devices say nothing of it
    assert capacity.has_gpu(HighThroughputExecutor(label="gpu", address="127.0.0.1", available_accelerators=1))


@pytest.mark.parametrize("name", ["local", "local.py", "threads", "threads.py"])
def test_a_shipped_site_is_found_with_and_without_its_ending(tmp_path: Path, name: str) -> None:
    config = find_site(name)(tmp_path / "here")
    assert [executor.label for executor in config.executors] == [name.removesuffix(".py")]
    assert config.run_dir == str(tmp_path / "here")
    assert config.usage_tracking == 0
    assert find_site(name)(tmp_path / "here") is not config  # Parsl loads none twice


SMI = """#!/bin/sh
printf '{listed}'
exit {code}
"""


@pytest.mark.parametrize(
    ("listed", "code", "chosen", "pinned"),
    [("0\\n1\\n", 0, None, ["0", "1"]), ("0\\n1\\n2\\n", 0, "2,0", ["2", "0"]), ("0\\n", 0, "GPU-ab", ["GPU-ab"])],
)
def test_each_gpu_of_this_machine_gets_a_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str, code: int, chosen: str | None, pinned: list[str]
) -> None:
    put_smi(tmp_path, monkeypatch, listed, code, chosen)
    monkeypatch.setattr("volpipe.apps.capacity.version", lambda package: "2.13.0+cu130")
    gpu, cpu = find_site("local_gpu")(tmp_path).executors
    assert isinstance(gpu, ResilientExecutor)
    assert isinstance(cpu, ResilientExecutor)
    assert gpu.available_accelerators == pinned
    assert capacity.count_workers(gpu) == len(pinned)
    assert (gpu.label, cpu.label, cpu.available_accelerators) == ("gpu", "cpu", [])


@pytest.mark.parametrize(
    ("cores", "gpus", "for_gpu", "for_others"), [(2, 1, (1, 2), 1), (16, 1, (8, 16), 8), (64, 4, (8, 16), 8)]
)
def test_workers_on_a_machine_with_gpus_unpack_with_several_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, gpus: int, for_gpu: tuple[int, int], for_others: int
) -> None:
    """Coarser levels of 2048³ took 15 s of 58 at the end, when one or two of them had work (H100, 2026-11-26)."""
    put_smi(tmp_path, monkeypatch, "".join(f"{gpu}\\n" for gpu in range(gpus)), 0, None)
    monkeypatch.setattr("volpipe.apps.capacity.version", lambda package: "2.13.0+cu130")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.delenv("VOLPIPE_WORKERS", raising=False)
    said = []
    for executor in find_site("local_gpu")(tmp_path).executors:
        assert isinstance(executor, ResilientExecutor)
        said.append(executor.provider.worker_init)
    assert said == [
        f"export OMP_NUM_THREADS={for_gpu[0]} VOLPIPE_THREADS={for_gpu[1]}",
        f"export OMP_NUM_THREADS=1 VOLPIPE_THREADS={for_others}",
    ]


@pytest.mark.parametrize(
    ("listed", "code", "chosen", "build", "gpus"),
    [
        ("0\\n1\\n", 0, None, "2.13.0", ["0", "1"]),
        ("0\\n1\\n2\\n", 0, "2,0", "2.13.0+cu130", ["2", "0"]),
        ("0\\n1\\n", 0, None, "2.13.0+cpu", []),  # which could not use them
        ("0\\n", 0, "", "2.13.0", []),
        ("0\\n", 0, "-1", "2.13.0", []),
        ("", 9, None, "2.13.0", []),
        (None, 0, None, "2.13.0", []),
    ],
)
def test_the_default_finds_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, code: int, chosen: str | None, build: str,
    gpus: list[str],
) -> None:  # fmt: skip
    put_smi(tmp_path, monkeypatch, listed, code, chosen)
    monkeypatch.setattr("volpipe.apps.capacity.version", lambda package: build)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("VOLPIPE_WORKERS", raising=False)
    for_nets, *others = find_site("local")(tmp_path).executors
    assert isinstance(for_nets, ResilientExecutor)
    assert for_nets.available_accelerators == gpus
    assert capacity.count_workers(for_nets) == (len(gpus) or 8)
    assert [(other.label, capacity.count_workers(other)) for other in others] == ([("cpu", 4)] if gpus else [])
    assert for_nets.label == ("gpu" if gpus else "local")


@pytest.mark.parametrize(
    ("listed", "code", "chosen", "said"),
    [
        ("0\\n", 0, None, "the torch that is installed was built without CUDA"),
        ("", 9, None, "nvidia-smi lists 0 GPUs and CUDA_VISIBLE_DEVICES is None, so none is to be used"),
        ("0\\n", 0, "", "nvidia-smi lists 1 GPUs and CUDA_VISIBLE_DEVICES is '', so none is to be used"),
        (None, 0, None, "no nvidia-smi on the PATH, so no GPU; use --config local"),
    ],
)
def test_a_machine_without_a_gpu_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, code: int, chosen: str | None, said: str
) -> None:
    put_smi(tmp_path, monkeypatch, listed, code, chosen)
    monkeypatch.setattr("volpipe.apps.capacity.version", lambda package: "2.13.0+cpu")
    with pytest.raises(SiteError) as refused:
        find_site("local_gpu")(tmp_path)
    assert said in str(refused.value)


def put_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, code: int, chosen: str | None) -> None:
    """Put a command in place of NVIDIA's that lists GPUs and ends with a code."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    if listed is not None:
        (tmp_path / "nvidia-smi").write_text(SMI.format(listed=listed, code=code))
        (tmp_path / "nvidia-smi").chmod(0o755)


def test_a_site_of_the_users_own_may_be_a_ready_config(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from parsl.config import Config\n"
        "from parsl.executors import ThreadPoolExecutor\n"
        "config = Config(executors=[ThreadPoolExecutor(label='mine')])\n"
    )
    config = find_site(str(tmp_path / "mine.py"))(tmp_path / "run")
    assert isinstance(config, Config)
    assert [executor.label for executor in config.executors] == ["mine"]
    assert config.run_dir == str(tmp_path / "run")  # not Parsl's default, beside the command


def test_a_site_is_looked_for_before_anything_is_opened() -> None:
    with pytest.raises(SiteError, match="no site 'nowhere'"):
        on_site("nowhere")


def test_every_shipped_site_has_a_line() -> None:
    lines = list_sites()
    shipped = {"k8s_htex", "k8s_nautilus", "local", "local_gpu", "slurm_htex", "slurm_single", "threads"}
    assert set(lines) == shipped
    assert all(lines.values())


DEAD_POOL = """
from parsl.config import Config
from parsl.providers import LocalProvider
from volpipe.apps.htex.executor import ResilientExecutor

class Impatient(LocalProvider):
    status_polling_interval = 1

def config(run_dir):
    executor = ResilientExecutor(
        label="mine", address="127.0.0.1", heartbeat_period=2, heartbeat_threshold=10,
        provider=Impatient(init_blocks=1, max_blocks=1, worker_init="echo there is no such module >&2; exit 3"),
    )
    return Config(executors=[executor], run_dir=run_dir, strategy_period=1, initialize_logging=False)
"""
NOBODY = ("unshare", "--user", "--map-user=54321", "--map-group=54321", "--")


@pytest.mark.long
@pytest.mark.slow
def test_a_user_whom_the_system_does_not_know_may_run(tmp_path: Path) -> None:
    """As in a pod, whose image has no entry for its user: no name, and no home either."""
    if subprocess.run([*NOBODY, "true"], capture_output=True).returncode:
        pytest.skip("this machine gives processes no users of their own")
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CACHE_HOME")
    }
    given = [
        sys.executable,
        "-m",
        "volpipe",
        "run",
        "--config",
        "local",
        *set_each("net.name=identity"),
        "in.n5",
        "-o",
        "out.zarr",
    ]
    ended = subprocess.run(
        [*NOBODY, *given], cwd=tmp_path, env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert f"wrote {tmp_path}/out.zarr" in ended.stdout


def test_a_user_without_a_name_or_home_gets_both_for_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME"):
        monkeypatch.setenv(name, "")  # and as before at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    name_user()
    assert getpass.getuser() == f"uid-{os.getuid()}"
    assert not Path.home().exists()  # in a folder that others may write to, they could set up sites for us
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setenv("HOME", "/home/me")
    name_user()
    assert (getpass.getuser(), str(Path.home())) == ("me", "/home/me")


@pytest.mark.slow
def test_a_site_whose_workers_cannot_start_is_given_up_with_their_last_words(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 8, 8)))
    (tmp_path / "site.py").write_text(DEAD_POOL)
    ended = finish(tmp_path, begin(tmp_path, "run", "--config", "site.py", "--set", "net.name=identity", "in.n5"))
    assert ended.code == 2
    (sentence,) = [line for line in ended.err.splitlines() if line.startswith("volpipe: ")]
    assert "executor mine cannot start workers: " in sentence
    assert "the last said: there is no such module" in sentence
    assert processes_in(tmp_path) == []


@pytest.mark.parametrize(("name", "workers"), [("local", 4), ("threads", 4)])
def test_the_memory_by_which_windows_are_chosen_is_the_same_whatever_else_the_machine_does(
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLPIPE_WORKERS", str(workers))
    monkeypatch.setattr(capacity, "memory_bytes", lambda: 64 << 30)
    expected = Capacity((32 << 30) // workers, workers, on_gpu=False)
    assert capacity.capacity_at(name, tmp_path) == expected


@pytest.mark.parametrize("name", ["local", "threads"])
@pytest.mark.parametrize(("free", "limit", "share"), [(500, 8, 2), (8, 500, 2)])  # GiB
def test_workers_here_may_take_what_is_free_but_no_more_than_their_control_group(
    name: str, free: int, limit: int, share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLPIPE_WORKERS", "4")
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=free << 30))
    monkeypatch.setattr(capacity, "shared_bytes", lambda: limit << 30)
    (executor,) = try_site(name, tmp_path).executors
    assert capacity.memory_of_worker(executor) == share << 30


def test_a_cluster_gives_the_memory_that_is_asked_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"partition": "cpu", "mem_gb": "32", "cores": "8", "max_jobs": "4", "gpus": "0"}.items():
        monkeypatch.setenv(f"VOLPIPE_SLURM_{key.upper()}", value)
    given = capacity.capacity_at("slurm_single", tmp_path)
    assert given == Capacity(4 * 10**9, 32, on_gpu=False, is_here=False)


NAME = "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    ("listed", "code", "expected"),
    [
        (f"Disabled, 81559, {NAME}\\n", 0, Gpu(NAME, 81559 << 20)),
        ("[N/A], 16384, Tesla, P100\\n[N/A], 16384, Tesla, P100\\n", 0, Gpu("Tesla, P100", 16 << 30)),
        (f"Disabled, 81559, {NAME}\\nDisabled, 40960, NVIDIA A100\\n", 0, None),
        (f"Enabled, 81559, {NAME}\\n", 0, None),
        ("0\\n", 0, None),
        ("", 9, None),
        (None, 0, None),
    ],
)
def test_the_kind_of_a_machines_gpus_is_what_their_driver_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, code: int, expected: Gpu | None
) -> None:
    put_smi(tmp_path, monkeypatch, listed, code, None)
    gpus = htex("gpu", 2, gpus=["0", "GPU-ab"])
    assert capacity._gpu_of([gpus]) == expected
    assert capacity.capacity_of([gpus, htex("cpu", 2)]).gpu == expected
    away = HighThroughputExecutor(
        label="gpu", address="127.0.0.1", provider=SlurmProvider(), encrypted=False, available_accelerators=2
    )
    assert capacity.capacity_of([away]).gpu is None  # its driver is another one
    assert capacity._gpu_of([htex("local", 2)]) is None
