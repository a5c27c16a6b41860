"""Blocks of jobs: asked for within the limits of a scheduler, drained before their walltime, and their last words."""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from local_executors import ARGUMENTS, FakeSlurm, Prompt, local_provider
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.high_throughput import errors as lost
from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD
from parsl.jobs.errors import TooManyJobFailuresError
from parsl.jobs.states import JobState, JobStatus
from parsl.launchers import SimpleLauncher

from volpipe.apps import capacity, pool
from volpipe.apps.app import APPS
from volpipe.apps.htex import executor as executor_module
from volpipe.apps.htex import launch
from volpipe.apps.htex.executor import ResilientExecutor, drain_period, translate_error
from volpipe.apps.htex.launch import blocks_folder, grouped, launch_command
from volpipe.apps.htex.processes import INTERCHANGE, PACKAGES, WORKERS
from volpipe.apps.htex.watch import ExecutorWatch
from volpipe.errors import RunStopped, SiteError


@pytest.fixture
def executor() -> ResilientExecutor:
    return ResilientExecutor("mine", local_provider(), **ARGUMENTS)


class Limited(Prompt):
    """Takes `most` blocks at a time and refuses others."""

    most = 1
    is_busy = False

    def submit(self, command: str, tasks_per_node: int, job_name: str = "") -> str:
        if sum(not entry["status"].terminal for entry in self.resources.values()) >= self.most:
            raise SiteError("exceeded quota: few")
        job = str(len(self.resources))
        self.resources[job] = {"status": JobStatus(JobState.PENDING)}
        return job


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> ResilientExecutor:
    """An executor whose scheduler refuses more than one block, and is asked again after 2 s, 4 s and so on."""
    executor = ResilientExecutor("mine", Limited(init_blocks=1, max_blocks=4, launcher=SimpleLauncher()), **ARGUMENTS)
    monkeypatch.setattr(executor, "_get_launch_command", lambda block: "")
    return executor


def test_refusals_count_only_while_no_block_is_accepted(
    limited: ResilientExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    assert limited.scale_out_facade(4) == ["0"]
    for seconds in (2, 4, 8, 16, 32, 64):
        assert limited.scale_out_facade(3) == []  # too soon to ask again
        clock.now += seconds
        assert limited.scale_out_facade(3) == []
    assert [status.state for status in limited.status_facade.values()] == [JobState.PENDING]
    assert [record.getMessage() for record in caplog.records if getattr(record, "notice", False)] == [
        "executor mine gets no more blocks for now, and continues with the 1 that it has: exceeded quota: few"
    ]
    limited.provider.most = 0
    limited.provider.resources["0"]["status"] = limited.status_facade["0"] = JobStatus(JobState.CANCELLED)
    clock.now += 300
    for number in range(1, 4):
        assert limited.scale_out_facade(3) == []
        assert sum(status.state == JobState.FAILED for status in limited.status_facade.values()) == number
        clock.now += 300
    limited.provider.most = 2
    assert len(limited.scale_out_facade(2)) == 2


def test_a_scheduler_that_takes_nothing_for_now_is_waited_for_half_an_hour(
    limited: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    limited.provider.most, limited.provider.is_busy = 0, True
    for _ in range(6):
        assert limited.scale_out_facade(1) == []
        assert limited.status_facade == {}
        clock.now += 299
    clock.now += 300
    assert limited.scale_out_facade(1) == []
    assert [status.state for status in limited.status_facade.values()] == [JobState.FAILED]


def test_a_limit_that_another_executor_has_used_up_is_waited_for_until_that_gives_back(
    limited: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    other = ResilientExecutor("other", Limited(launcher=SimpleLauncher()), **ARGUMENTS)
    monkeypatch.setattr(other, "_get_launch_command", lambda block: "")
    other.scale_out_facade(1)
    limited.siblings, limited.provider.most = [other], 0
    assert limited.scale_out_facade(1) == []
    assert limited.status_facade == {}
    clock.now += 301
    assert limited.scale_out_facade(1) == []
    assert [status.state for status in limited.status_facade.values()] == [JobState.FAILED]
    limited.is_patient = False  # as in a check of a site
    clock.now += 301
    assert limited.scale_out_facade(1) == []
    assert len(limited.status_facade) == 2


class Clock:
    """The time of executors, which passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(executor_module.time, "monotonic", lambda: self.now)


def status_of(*states: JobState) -> dict[str, JobStatus]:
    return {str(number): JobStatus(state) for number, state in enumerate(states)}


def test_blocks_are_judged_by_the_latest_few() -> None:
    failed, done = JobState.FAILED, JobState.COMPLETED
    executor = ResilientExecutor("mine", local_provider(), failed_blocks=3, **ARGUMENTS)
    for states in ([failed], [failed, failed], [failed, failed, done], [failed, failed, done, failed, failed]):
        executor.handle_errors(status_of(*states))
        assert not executor.bad_state_is_set
    executor.handle_errors(status_of(done, failed, failed, JobState.MISSING))
    assert executor.bad_state_is_set
    assert isinstance(executor.executor_exception, TooManyJobFailuresError)
    with pytest.raises(RunStopped, match="executor mine was given up"):
        ExecutorWatch([executor]).check()


@pytest.mark.parametrize(
    ("walltime", "start", "longest", "seconds"), [("01:00:00", 60, 600, 2940), ("00:01:30", 30, 20, 40)]
)
def test_a_block_drains_before_its_walltime(walltime: str, start: float, longest: float, seconds: int) -> None:
    assert drain_period(walltime, start, longest) == seconds
    executor = ResilientExecutor(
        "far", FakeSlurm(walltime=walltime), longest_task=longest, start_seconds=start, **ARGUMENTS
    )
    assert executor.drain_period == seconds


@pytest.mark.parametrize(
    ("pool", "code", "said"),
    [
        ("nothing_of_that_name", 127, "nothing_of_that_name: command not found"),
        ("sh -c 'echo no driver >&2; kill -9 $$'", 128 + 9, "no driver"),
        ("echo well", 0, ""),
    ],
)
def test_the_last_words_of_a_block_are_those_of_its_pool(pool: str, code: int, said: str) -> None:
    places = {"addresses": "127.0.0.1", "worker_port": 9, "heartbeat_period": 1, "heartbeat_threshold": 4}
    command = grouped(pool).format(**places).format(block_id=0)
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code
    assert ended.stderr.rstrip().endswith(said)
    assert len(ended.stderr.splitlines()) == bool(said)


def test_a_process_killed_for_its_memory_is_told_by_its_block(tmp_path: Path, executor: ResilientExecutor) -> None:
    """Cgroup v1 kills a process, not its pod; the count of such kills is looked at, here in a file of ours."""
    counter, executor.run_dir = tmp_path / "memory.oom_control", str(tmp_path)
    counter.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "mine").mkdir()
    host = socket.gethostname()
    died = lost.WorkerLost(1, host)
    assert str(translate_error(died, [executor])) == f"worker 1 on {host} died"
    pool = f"sh -c 'sleep 2; echo oom_kill 4 > {counter}; while ! ls {tmp_path}/mine | grep -q .; do sleep 0.1; done'"
    places = {"addresses": "127.0.0.1", "worker_port": 9, "heartbeat_period": 1, "heartbeat_threshold": 60}
    command = (blocks_folder(tmp_path / "mine") + grouped(pool)).format(**places).format(block_id=0)
    for file in launch.MEMORY_FILES:
        assert f" {file}" in command
    command = command.replace(" ".join(launch.MEMORY_FILES), f"/no/such/file {counter}")
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, "")
    words = f"worker 1 on {host} was killed for want of memory: ask for more, or for fewer workers"
    assert str(translate_error(died, [executor])) == words
    executor.provider.mem_per_node = 0.629
    assert "; 0.629 GB are for 1 workers there: " in str(translate_error(died, [executor]))


def test_processes_of_a_block_are_waited_for_until_they_run_no_more_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    block = subprocess.Popen(["sleep", "0.5"], start_new_session=True)  # a zombie then, until it is asked how it ended
    pool._await_ends([block.pid])
    assert psutil.Process(block.pid).status() == psutil.STATUS_ZOMBIE
    block.wait()
    monkeypatch.setattr(pool, "BLOCK_SECONDS", 0.1)
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as endless:
        pool._await_ends([block.pid, endless.pid])
        assert endless.poll() is None
        assert "processes of a block did not end within" in caplog.text
        endless.kill()


# ---- what Parsl does not promise


def test_a_checkout_that_is_not_installed_has_parsls_own_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    bare = ResilientExecutor("gpu", FakeSlurm(), **ARGUMENTS)
    assert bare.interchange_launch_cmd[-1] == "interchange.py"
    assert DEFAULT_LAUNCH_CMD in bare.launch_cmd


@pytest.mark.parametrize("program", ["interchange", "process_worker_pool"])
def test_parsl_is_imported_without_packages_that_it_does_without(program: str) -> None:
    """When only this fails for the plain import, Parsl imports them no more, and ours may go."""
    module = f"parsl.executors.high_throughput.{program}"
    lean = f"from volpipe.apps.htex.processes import *; import_without(PACKAGES, {module!r})"
    for imported, found in ((f"import {module}", [*PACKAGES]), (lean, [])):
        look = f"{imported}; import sys; print(*(p for p in {PACKAGES} if p in sys.modules))"
        ended = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
        assert ended.stdout.split() == found


def test_the_broken_scale_in_of_parsl_is_still_why_we_have_our_own() -> None:
    """When this fails, Parsl's own stops at the number that it was asked for, and ours may go."""
    source = inspect.getsource(HighThroughputExecutor.scale_in)
    assert source.index("block_ids_to_kill.append(x[0])") < source.index("if len(block_ids_to_kill) == blocks:")


def test_the_executor_is_tied_encrypted_and_patient_unless_told_otherwise() -> None:
    remote = ResilientExecutor("far", FakeSlurm(), **ARGUMENTS | {"heartbeat_period": 7})
    assert remote.encrypted
    assert remote.interchange_launch_cmd[-1] == INTERCHANGE
    assert "--pdeathsig" in remote.interchange_launch_cmd
    assert (remote.heartbeat_period, remote.heartbeat_threshold, remote.prefetch_capacity) == (7, 4, 0)
    assert not ResilientExecutor("near", local_provider(), address="127.0.0.1").encrypted
    assert ResilientExecutor("near", local_provider(), address="127.0.0.1").heartbeat_threshold == 60


def test_a_walltime_too_short_for_a_task_is_refused_with_both() -> None:
    with pytest.raises(SiteError, match=r"walltime 00:10:00 is 600 s, .* 60 s .* 540 s; ask .* above 600 s"):
        drain_period("00:10:00", 60, 540)
    with pytest.raises(SiteError, match="longest_task is 5 s, but the provider has no walltime"):
        ResilientExecutor("near", local_provider(), longest_task=5, **ARGUMENTS)


def test_gpu_workers_of_slurm_use_what_slurm_gave() -> None:
    """Parsl formats the command twice before a shell of the job reads it; "given" is in the job's environment."""
    once = launch_command(has_nets=True, given=["0", "1"]).format_map(Anything())
    asked = "echo" + once.format(block_id=3).partition("--available-accelerators")[2]
    for given, seen in ((None, "0 1"), ("2,3", "2 3"), ("GPU-ab", "GPU-ab")):
        environment = {"PATH": os.environ["PATH"]} | ({} if given is None else {"CUDA_VISIBLE_DEVICES": given})
        told = subprocess.run(
            ["bash", "-c", asked],
            env=environment, capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert told.strip() == seen
    with_gpus = ResilientExecutor("gpu", FakeSlurm(), available_accelerators=2, **ARGUMENTS)
    assert launch_command(has_nets=True, given=2) in with_gpus.launch_cmd
    assert with_gpus.available_accelerators == ["0", "1"]
    others = ResilientExecutor("cpu", FakeSlurm(), **ARGUMENTS)
    assert DEFAULT_LAUNCH_CMD.replace("process_worker_pool.py", WORKERS) in others.launch_cmd
    near = ResilientExecutor("near", local_provider(), available_accelerators=2, **ARGUMENTS)
    assert launch_command(has_nets=True) in near.launch_cmd


class Anything(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""


def test_an_executor_of_threads_has_what_the_watch_asks_for() -> None:
    executor = ThreadPoolExecutor(label="threads")
    assert ExecutorWatch([executor])._trouble_of(executor) is None
    ExecutorWatch([executor]).check()


def test_threads_share_the_memory_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=10 << 30))
    monkeypatch.setattr(capacity, "shared_bytes", lambda: 64 << 30)
    shares = [capacity.memory_of_worker(ThreadPoolExecutor(label="threads", max_threads=n)) for n in (1, 2, 2000)]
    assert shares == [10 << 30, 5 << 30, (10 << 30) // 2000]


def test_an_exception_of_ours_survives_the_way_back() -> None:
    import pickle

    from volpipe import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 5
    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind("what is wrong")))
        assert (type(again), str(again)) == (kind, "what is wrong")


@pytest.mark.parametrize("name", APPS)
def test_an_app_names_a_function_that_is_there(name: str) -> None:
    module, _, function = APPS[name].function.partition(":")
    assert callable(getattr(import_module(module), function))
