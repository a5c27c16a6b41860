"""Sites: the same bytes wherever a run runs, nothing left behind, and each stage on the executors meant for it."""

from __future__ import annotations

import getpass
import os
import pwd
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from command import begin, finish, giver, processes_in, set_each
from conftest import ROOT
from parsl.config import Config
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.base import ParslExecutor
from parsl.providers import LocalProvider, SlurmProvider
from volumes import fingerprint, noise, windowed, write_volume

from volpipe.apps import pool
from volpipe.apps.htex.executor import ResilientExecutor
from volpipe.apps.pool import on_site
from volpipe.blockwise.journal import Record, read_records
from volpipe.blockwise.pool import Capacity
from volpipe.errors import SiteError
from volpipe.runs import worker
from volpipe.runs.worker import RESULTS
from volpipe.sites.find import find_site, list_sites, name_user

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


def htex(label: str, workers: int | None, *, max_blocks: int = 1, nodes: int = 1) -> HighThroughputExecutor:
    provider = LocalProvider(max_blocks=max_blocks, nodes_per_block=nodes)
    return HighThroughputExecutor(
        label=label, address="127.0.0.1", max_workers_per_node=workers, provider=provider, encrypted=False
    )


@pytest.mark.parametrize(
    ("make", "slots"),
    [
        (lambda: ThreadPoolExecutor(label="a", max_threads=3), 3),
        (lambda: htex("a", 4), 4),
        (lambda: htex("a", 4, max_blocks=3, nodes=2), 24),
        (lambda: htex("a", None), pool.UNKNOWN_SLOTS),
    ],
)
def test_an_executor_has_as_many_slots_as_it_may_have_workers(make: Callable[[], ParslExecutor], slots: int) -> None:
    assert pool._num_workers(make()) == slots


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
    monkeypatch.setattr(pool, "version", {"torch": torch}.__getitem__)
    assert pool._sees_gpu(tmp_path) == expected


@pytest.mark.parametrize("here", [False, True])
def test_workers_of_a_machine_with_a_gpu_need_the_memory_of_cuda(here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_sees_gpu", lambda: here)
    assert pool._has_gpu(htex("gpu", 2)) == here
    assert pool._has_gpu(ThreadPoolExecutor(label="a", max_threads=3)) == here
    away = HighThroughputExecutor(label="gpu", address="127.0.0.1", provider=SlurmProvider(), encrypted=False)
    assert not pool._has_gpu(away)  # another machine's devices say nothing of it
    assert pool._has_gpu(HighThroughputExecutor(label="gpu", address="127.0.0.1", available_accelerators=1))


@pytest.mark.parametrize("name", ["local", "local.py", "threads", "threads.py"])
def test_a_shipped_site_is_found_with_and_without_its_ending(tmp_path: Path, name: str) -> None:
    config = find_site(name)(tmp_path / "here")
    assert [executor.label for executor in config.executors] == [name.removesuffix(".py")]
    assert config.run_dir == str(tmp_path / "here")
    assert config.usage_tracking == 0
    assert find_site(name)(tmp_path / "here") is not config  # Parsl loads none twice


@pytest.mark.parametrize("name", ["slurm_htex.py", "slurm_htex"])
def test_slurm_without_its_commands_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SiteError, match=rf"^site {name} cannot be used here: .*no sbatch on the PATH; give"):
        find_site(name)(tmp_path)


@pytest.fixture
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the user's settings would be, and commands of a Slurm that does not answer."""
    for command in ("sbatch", "squeue", "scancel", "sacct"):
        (tmp_path / command).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / command).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for variable in [name for name in os.environ if name.startswith(("VOLPIPE_SLURM", "VOLPIPE_SITE"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "volpipe").mkdir()
    return tmp_path / "volpipe"


def test_slurm_asks_for_what_its_file_and_the_environment_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_settings: Path
) -> None:
    (no_settings / "slurm_htex.toml").write_text('partition = "a"\ngpus = 4\ncores = 16\naddress = "10.0.0.1"\n')
    monkeypatch.setenv("VOLPIPE_SLURM_GPU_PARTITION", "b")
    monkeypatch.setenv("VOLPIPE_SLURM_MAX_JOBS", "7")
    cpu, gpu = find_site("slurm_htex.py")(tmp_path).executors
    assert isinstance(cpu, ResilientExecutor)
    assert isinstance(gpu, ResilientExecutor)
    assert (cpu.label, cpu.provider.partition, pool._num_workers(cpu)) == ("cpu", "a", 16 * 7)
    assert (gpu.label, gpu.provider.partition, pool._num_workers(gpu)) == ("gpu", "b", 4 * 7)
    assert (cpu.provider.gpus_per_node, gpu.provider.gpus_per_node) == (None, 4)
    assert "CUDA_VISIBLE_DEVICES" in gpu.launch_cmd
    assert cpu.drain_period == gpu.drain_period == 4 * 3600 - 60 - 900
    assert "--no-requeue" in cpu.provider.scheduler_options
    assert cpu.address == gpu.address == "10.0.0.1"


@pytest.mark.parametrize(
    ("says", "is_busy"),
    [
        ("Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("Unable to contact slurm controller (connect failure)", True),
        ("Batch job submission failed: Job violates accounting/QOS policy (job submit limit)", False),
        ("Batch job submission failed: Invalid account or account/partition combination specified", False),
    ],
)
def test_a_slurm_that_takes_no_job_for_now_is_told_from_one_that_refuses(
    tmp_path: Path, no_settings: Path, monkeypatch: pytest.MonkeyPatch, says: str, is_busy: bool
) -> None:
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "a")
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho 'sbatch: error: {says}' >&2\nexit 1\n")
    (executor,) = find_site("slurm_single")(tmp_path).executors
    executor.provider.script_dir = str(tmp_path)
    with pytest.raises(SiteError) as refused:
        executor.provider.submit("true", 1)
    assert str(refused.value) == f"Slurm does not take a job: sbatch: error: {says}"
    assert executor.provider.is_busy == is_busy


def test_an_sbatch_that_tries_again_and_again_is_killed_lest_it_submit_a_job_that_nobody_knows(
    tmp_path: Path, no_settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "a")
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\nsleep 2\ntouch {tmp_path}/submitted\n")
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/cancelled\n')
    (executor,) = find_site("slurm_single")(tmp_path).executors
    executor.provider.script_dir, executor.provider.cmd_timeout = str(tmp_path), 1
    with pytest.raises(SiteError, match=r"Slurm does not take a job: .*sbatch does not answer within 1 s"):
        executor.provider.submit("true", 1, "mine")
    assert executor.provider.is_busy
    assert (tmp_path / "cancelled").read_text().startswith("--name=mine.")
    time.sleep(1.5)
    assert not (tmp_path / "submitted").exists()


@pytest.fixture
def array_executor(tmp_path: Path, no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> ResilientExecutor:
    """An executor on a Slurm that takes at most three jobs at a time, in an array or not."""
    monkeypatch.setenv("VOLPIPE_SLURM_PARTITION", "a")
    monkeypatch.setenv("VOLPIPE_SLURM_ARRAY", "yes")
    monkeypatch.setenv("VOLPIPE_SLURM_MAX_JOBS", "9")
    (tmp_path / "sbatch").write_text(
        f"""#!/bin/sh
        cp "$1" {tmp_path}/script
        last=$(sed -n 's/^#SBATCH --array=0-//p' "$1")
        left=$(cat {tmp_path}/left)
        if [ "${{last:-0}}" -ge "$left" ]; then echo "error: AssocMaxSubmitJobLimit" >&2; exit 1; fi
        echo $((left - ${{last:-0}} - 1)) > {tmp_path}/left
        echo "${{last:-0}}" >> {tmp_path}/submitted
        echo "Submitted batch job $(wc -l < {tmp_path}/submitted)"
        """
    )
    (tmp_path / "left").write_text("3\n")
    (executor,) = find_site("slurm_single")(tmp_path).executors
    assert isinstance(executor, ResilientExecutor)
    monkeypatch.setattr(executor, "_get_launch_command", lambda block_id: f"start {block_id}")
    executor.provider.script_dir = str(tmp_path)
    return executor


def test_jobs_that_are_wanted_together_are_one_array_of_as_many_as_slurm_takes(
    tmp_path: Path, array_executor: ResilientExecutor
) -> None:
    assert array_executor.scale_out_facade(5) == [
        "0",
        "1",
        "2",
    ]  # 5 are refused, 2 are taken, 3 are refused, 1 is taken
    assert array_executor.blocks_to_job_id == {"0": "1_0", "1": "1_1", "2": "2"}
    assert (tmp_path / "submitted").read_text().split() == ["1", "0"]
    assert array_executor._asks_at > time.monotonic()  # and later asks again


def test_each_job_of_an_array_has_a_block_and_logs_of_its_own(
    tmp_path: Path, array_executor: ResilientExecutor
) -> None:
    assert array_executor.scale_out_facade(1) == ["0"]
    assert "--array" not in (tmp_path / "script").read_text()
    assert array_executor.scale_out_facade(2) == ["1", "2"]
    assert array_executor.blocks_to_job_id == {"0": "1", "1": "2_0", "2": "2_1"}
    script = (tmp_path / "script").read_text()
    assert "start $((1+SLURM_ARRAY_TASK_ID))" in script.splitlines()
    resources = array_executor.provider.resources
    for index in (0, 1):
        logs = {resources[f"2_{index}"][name] for name in ("job_stdout_path", "job_stderr_path")}
        written = re.findall(r"^#SBATCH --(?:output|error)=(.*)$", script, re.MULTILINE)
        assert logs == {path.replace("%a", str(index)) for path in written}
    alive = [job for job, found in resources.items() if not found["status"].terminal]
    assert alive == ["1", "2_0", "2_1"]  # what is asked for, and cancelled at the end


def test_slurm_of_one_executor_serves_all_stages(tmp_path: Path, no_settings: Path) -> None:
    (no_settings / "slurm_single.toml").write_text('partition = "a"\ngpus = 2\nmax_jobs = 3\n')
    (executor,) = find_site("slurm_single")(tmp_path).executors
    assert isinstance(executor, ResilientExecutor)
    assert (executor.provider.partition, executor.provider.gpus_per_node, pool._num_workers(executor)) == ("a", 2, 6)
    assert pool._with_label([executor], "cpu") == pool._with_label([executor], "gpu") == ["slurm"]


@pytest.mark.parametrize("site", ["slurm_htex", "slurm_single"])
def test_slurm_names_what_is_missing_and_where_to_write_it(tmp_path: Path, no_settings: Path, site: str) -> None:
    with pytest.raises(SiteError) as refused:
        find_site(site)(tmp_path)
    assert str(refused.value) == (
        f'site {site} cannot be used here: partition is not set; write partition = "..." in {no_settings}/{site}.toml, '
        "or set VOLPIPE_SLURM_PARTITION"
    )


def test_a_copy_of_a_site_reads_settings_of_its_own_name(tmp_path: Path, no_settings: Path) -> None:
    (tmp_path / "ours.py").write_text((ROOT / "configs/slurm_single.py").read_text())
    (no_settings / "ours.toml").write_text('partition = "ours"\n')
    (executor,) = find_site(str(tmp_path / "ours.py"))(tmp_path).executors
    assert isinstance(executor, ResilientExecutor)
    assert executor.provider.partition == "ours"


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
    gpu, cpu = find_site("local_gpu")(tmp_path).executors
    assert isinstance(gpu, ResilientExecutor)
    assert isinstance(cpu, ResilientExecutor)
    assert gpu.available_accelerators == pinned
    assert pool._num_workers(gpu) == len(pinned)
    assert (gpu.label, cpu.label, cpu.available_accelerators) == ("gpu", "cpu", [])


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
    monkeypatch.setattr("volpipe.configs.local.version", lambda package: build)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    monkeypatch.delenv("VOLPIPE_WORKERS", raising=False)
    for_nets, *others = find_site("local")(tmp_path).executors
    assert isinstance(for_nets, ResilientExecutor)
    assert for_nets.available_accelerators == gpus
    assert pool._num_workers(for_nets) == (len(gpus) or 8)
    assert [(other.label, pool._num_workers(other)) for other in others] == ([("cpu", 4)] if gpus else [])
    assert for_nets.label == ("gpu" if gpus else "local")


@pytest.mark.parametrize(
    ("listed", "code", "chosen", "said"),
    [
        ("", 9, None, "nvidia-smi lists 0 GPUs and CUDA_VISIBLE_DEVICES is None, so none is to be used"),
        ("0\\n", 0, "", "nvidia-smi lists 1 GPUs and CUDA_VISIBLE_DEVICES is '', so none is to be used"),
        (None, 0, None, "no nvidia-smi on the PATH, so no GPU; use --config local"),
    ],
)
def test_a_machine_without_a_gpu_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listed: str | None, code: int, chosen: str | None, said: str
) -> None:
    put_smi(tmp_path, monkeypatch, listed, code, chosen)
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
    monkeypatch.setattr(pool, "memory_bytes", lambda: 64 << 30)
    expected = Capacity((32 << 30) // workers, workers, on_gpu=False)
    assert pool.capacity_at(name, tmp_path) == expected


def test_a_cluster_gives_the_memory_that_is_asked_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {"partition": "cpu", "mem_gb": "32", "cores": "8", "max_jobs": "4", "gpus": "0"}.items():
        monkeypatch.setenv(f"VOLPIPE_SLURM_{key.upper()}", value)
    capacity = pool.capacity_at("slurm_single", tmp_path)
    assert capacity == Capacity(4 * 10**9, 32, on_gpu=False)
