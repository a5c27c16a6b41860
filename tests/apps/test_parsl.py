"""What rests on parts of Parsl that it does not promise: there, and with the meaning that we give them."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import parsl
import psutil
import pytest
from command import is_pool, processes_in, wait_until
from conftest import TEST_PATH
from parsl.config import Config
from parsl.dataflow.dflow import DataFlowKernel
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.errors import BadStateException
from parsl.executors.high_throughput import errors as lost
from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD
from parsl.jobs.errors import TooManyJobFailuresError
from parsl.jobs.states import JobState, JobStatus
from parsl.launchers import SimpleLauncher
from parsl.providers import LocalProvider, SlurmProvider

from volpipe.apps import pool
from volpipe.apps.htex import executor as executor_module
from volpipe.apps.htex import launch
from volpipe.apps.htex.executor import ResilientExecutor, drain_period, translate_error
from volpipe.apps.htex.launch import blocks_folder, grouped, launch_command
from volpipe.apps.htex.lean_imports import PACKAGES
from volpipe.apps.htex.processes import INTERCHANGE, WORKER, WORKERS
from volpipe.apps.htex.watch import Watch, has_lost_interchange, has_lost_results
from volpipe.errors import ManagerLost, RunStopped, SiteError, WorkerLost

ARGUMENTS = {"address": "127.0.0.1", "max_workers_per_node": 1, "heartbeat_period": 1, "heartbeat_threshold": 4}


class Prompt(LocalProvider):
    """Blocks on this machine, looked after every second."""

    status_polling_interval = 1


def local_provider(**arguments: object) -> LocalProvider:
    return Prompt(init_blocks=1, min_blocks=0, max_blocks=1, launcher=SimpleLauncher(), **arguments)


@pytest.fixture
def executor() -> ResilientExecutor:
    return ResilientExecutor("mine", local_provider(), **ARGUMENTS)


@pytest.fixture
def kernel(tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataFlowKernel]:
    """One worker, connected, that knows this module."""
    with started(tmp_path, executor, monkeypatch) as kernel:
        yield kernel


@contextmanager
def started(tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch) -> Iterator[DataFlowKernel]:
    monkeypatch.chdir(tmp_path)  # by which its processes are known
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), TEST_PATH]))
    logging.getLogger("parsl").setLevel(logging.CRITICAL)
    config = Config(
        executors=[executor], run_dir=str(tmp_path), strategy_period=1, initialize_logging=False, usage_tracking=0
    )
    kernel = parsl.load(config)
    pool._poll_alone(kernel)()  # and not beside Parsl's own poll, which would start a second block
    try:
        wait_until(lambda: executor.connected_managers(), 60)
        yield kernel
    finally:
        if executor.bad_state_is_set:  # Parsl then leaves the blocks alone
            executor.provider.cancel(list(executor.blocks_to_job_id.values()))
        kernel.cleanup()
        executor.incoming_q.close()
        wait_until(lambda: not processes_in(tmp_path), 30)
        parsl.clear()


def forked() -> tuple[str, int, bool, list[str]]:
    """The name of this process, of how many threads the one is that it is a fork of, and what that one had imported."""
    threads = len([*Path(f"/proc/{os.getppid()}/task").iterdir()])
    return Path("/proc/self/comm").read_text().strip(), threads, gc.get_freeze_count() > 0, sorted(sys.modules)


@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_workers_are_forks_of_a_process_of_one_thread_that_has_imported_what_nets_need(
    kernel: DataFlowKernel, executor: ResilientExecutor
) -> None:
    name, threads, shares, modules = executor.submit(forked, {}).result(60)
    assert (name, threads, shares) == (WORKER, 1, True)
    assert {"torch", "tensorstore", "volpipe.runs.worker"} <= set(modules)


@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_workers_die_with_what_they_are_forks_of_and_others_take_their_place(
    tmp_path: Path, kernel: DataFlowKernel, executor: ResilientExecutor
) -> None:
    """Else one whose task is lost, by what the pool knows, would go on with it beside the one that has it now."""
    worker = psutil.Process(executor.submit(os.getpid, {}).result(60))
    parent, sleeping = worker.parent(), executor.submit(time.sleep, {}, 60)
    wait_until(lambda: any(manager["tasks"] for manager in executor.connected_managers()), 30)
    assert parent is not None and "forkserver" in " ".join(parent.cmdline())
    parent.kill()
    assert isinstance(sleeping.exception(60), lost.WorkerLost)
    wait_until(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE, 10)
    assert executor.submit(forked, {}).result(60)[0] == WORKER


@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_workers_that_run_no_nets_have_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ResilientExecutor("cpu", local_provider(), **ARGUMENTS)
    with started(tmp_path, executor, monkeypatch):
        name, _, _, modules = executor.submit(forked, {}).result(60)
    assert name == WORKER and "torch" not in modules and "volpipe.runs.worker" in modules


def test_a_checkout_that_is_not_installed_has_parsls_own_pool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    bare = ResilientExecutor("gpu", FakeSlurm(), **ARGUMENTS)
    assert bare.interchange_launch_cmd[-1] == "interchange.py"
    assert DEFAULT_LAUNCH_CMD in bare.launch_cmd


def imported() -> list[str]:
    """What of a driver's packages this process has imported; then the same packages, imported after all."""
    before = [name for name in PACKAGES if name in sys.modules]
    import kubernetes.client
    import sqlalchemy.orm

    return [*before, kubernetes.client.V1Pod.__name__, sqlalchemy.orm.Session.__name__]


@pytest.mark.slow
def test_a_worker_leaves_out_what_only_drivers_need_until_a_task_wants_it(
    kernel: DataFlowKernel, executor: ResilientExecutor
) -> None:
    assert executor.submit(imported, {}).result(60) == ["V1Pod", "Session"]


@pytest.mark.parametrize("program", ["interchange", "process_worker_pool"])
def test_parsl_is_imported_without_packages_that_it_does_without(program: str) -> None:
    """When only this fails for the plain import, Parsl imports them no more, and ours may go."""
    module = f"parsl.executors.high_throughput.{program}"
    lean = f"from volpipe.apps.htex.lean_imports import *; import_without(PACKAGES, {module!r})"
    for imported, found in ((f"import {module}", [*PACKAGES]), (lean, [])):
        look = f"{imported}; import sys; print(*(p for p in {PACKAGES} if p in sys.modules))"
        ended = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
        assert ended.stdout.split() == found


@pytest.mark.parametrize("first", ["", "import parsl\n", "import sqlalchemy\n"])
def test_a_driver_leaves_out_sqlalchemy_until_a_site_monitors(first: str) -> None:
    look = f"""{first}
import sys, volpipe.apps.pool
from parsl.monitoring import MonitoringHub, monitoring
print("sqlalchemy" in sys.modules)
hub = MonitoringHub()
print("sqlalchemy" in sys.modules, monitoring.dbm_starter.__name__, monitoring._db_manager_excepts)
"""
    ended = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [str(bool(first)), "True", "dbm_starter", "None"]


@pytest.mark.slow
def test_a_lost_worker_and_a_lost_manager_come_back_as_our_own_errors(
    tmp_path: Path, kernel: DataFlowKernel, executor: ResilientExecutor
) -> None:
    error = executor.submit(os._exit, {}, 3).exception(60)
    assert isinstance(error, lost.WorkerLost)
    assert isinstance(translate_error(error), WorkerLost)
    sleeping = executor.submit(time.sleep, {}, 60)
    wait_until(lambda: any(manager["tasks"] for manager in executor.connected_managers()), 30)
    assert executor.idle_blocks() == {}
    (pool,) = filter(is_pool, processes_in(tmp_path))
    pool.kill()  # what it leaves ends with it, as the fixture sees
    error = sleeping.exception(60)
    assert isinstance(error, lost.ManagerLost)
    assert isinstance(translate_error(error), ManagerLost)
    assert str(translate_error(error)).endswith("no longer answers, or its job has ended")


def test_an_interchange_is_not_waited_for_before_a_block_needs_it(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that those of several executors start side by side."""
    slow = tmp_path / INTERCHANGE
    slow.write_text(f"#!/bin/sh\nsleep 3\nexec {Path(sys.executable).parent}/{INTERCHANGE}\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    executor.run_dir = str(tmp_path)
    began = time.monotonic()
    executor.start()
    try:
        assert time.monotonic() - began < 2
        port = re.search(r"--port=(\d+)", executor._get_launch_command("0"))
        assert time.monotonic() - began > 3
        assert port is not None
        assert int(port[1]) == executor.worker_port > 0
        assert executor.connected_managers() == []
    finally:
        executor.shutdown()
        executor.incoming_q.close()


@pytest.mark.slow
def test_a_task_waits_for_an_interchange_that_starts_slowly_and_no_longer_for_one_that_hangs(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a start takes longer than any send; no word of zmq's reaches a user."""
    monkeypatch.setattr(executor_module, "SEND_MILLISECONDS", 100)
    monkeypatch.setattr(executor_module, "LISTEN_SECONDS", 20)
    slow = tmp_path / INTERCHANGE
    slow.write_text(f"#!/bin/sh\nsleep 2\nexec {Path(sys.executable).parent}/{INTERCHANGE}\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    executor.run_dir = str(tmp_path)
    executor.start()
    try:
        began = time.monotonic()
        executor.outgoing_q.put("a task")
        assert time.monotonic() - began > 1
    finally:
        executor.shutdown()
        executor.incoming_q.close()


@pytest.mark.slow
def test_an_interchange_that_never_takes_a_task_is_named(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "SEND_MILLISECONDS", 100)
    monkeypatch.setattr(executor_module, "LISTEN_SECONDS", 0.5)
    deaf = tmp_path / INTERCHANGE
    deaf.write_text("#!/bin/sh\ncat > /dev/null &\nexec sleep 60\n")
    deaf.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    executor.run_dir = str(tmp_path)
    executor.start()
    try:
        with pytest.raises(
            ConnectionError, match="the interchange of executor mine takes no tasks; this machine may be"
        ):
            executor.outgoing_q.put("a task")
    finally:
        executor.interchange_proc.kill()
        executor.shutdown()
        executor.incoming_q.close()


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


def refuses(executor: ResilientExecutor) -> bool:
    """Return whether a task is refused, rather than that somebody is waited for who takes it."""
    try:
        executor.submit(time.sleep, {}, 0)
    except ConnectionError as error:
        assert str(error) == "the interchange of executor mine has ended"
        return True
    return False


@pytest.mark.slow
def test_a_dead_interchange_is_seen_and_ends_what_waits(kernel: DataFlowKernel, executor: ResilientExecutor) -> None:
    waiting = executor.submit(time.sleep, {}, 60)
    watch = Watch([executor])
    assert not has_lost_interchange(executor)
    assert watch._trouble_of(executor) is None
    psutil.Process(executor.interchange_proc.pid).kill()
    wait_until(lambda: executor.interchange_proc.poll() is not None, 5)
    wait_until(lambda: refuses(executor), 10)  # zmq's own thread may not have seen yet that nobody is there
    watch.start()
    error = waiting.exception(10)
    assert isinstance(error, BadStateException | RunStopped)
    with pytest.raises(RunStopped, match="the interchange of executor mine ended or hangs"):
        watch.check()
    watch.stop()


@pytest.mark.slow
def test_an_executor_closes_when_nobody_uses_its_sockets(tmp_path: Path, executor: ResilientExecutor) -> None:
    """A task that no interchange takes is waited for; closing its socket meanwhile would abort this process."""
    executor.run_dir = str(tmp_path)
    executor.start()
    psutil.Process(executor.interchange_proc.pid).kill()
    executor.interchange_proc.wait(5)
    refused: list[BaseException] = []

    def send() -> None:
        try:
            executor.outgoing_q.put("a task")
        except ConnectionError as error:
            refused.append(error)

    sender = threading.Thread(target=send)
    sender.start()
    wait_until(executor._sending.locked, 5)
    executor.shutdown()
    sender.join()
    assert str(refused[0]) == "the interchange of executor mine has ended"
    send()
    assert str(refused[1]) == "executor mine is closed"
    executor.incoming_q.close()


@pytest.mark.slow
def test_a_dead_thread_of_results_is_seen_and_ends_what_waits(
    kernel: DataFlowKernel, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda died: None)  # the thread's end is what is tested
    watch = Watch([executor])
    assert not has_lost_results(executor)
    executor.submit(unloadable, {})
    wait_until(lambda: has_lost_results(executor), 30)
    waiting = executor.submit(time.sleep, {}, 60)
    watch.start()
    assert isinstance(waiting.exception(10), BadStateException | RunStopped)
    with pytest.raises(RunStopped, match="the thread of results of executor mine ended or hangs"):
        watch.check()
    watch.stop()


class Unloadable:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return int, ("no number",)


def unloadable() -> object:
    return Unloadable()


@pytest.mark.slow
def test_only_a_connected_idle_block_is_scaled_in_and_only_as_many_as_asked(
    kernel: DataFlowKernel, executor: ResilientExecutor
) -> None:
    assert list(executor.idle_blocks()) == ["0"]
    assert executor.scale_in(0, max_idletime=0.0) == []
    assert executor.scale_in(1, max_idletime=3600.0) == []
    (young,) = executor.scale_out_facade(1)  # starts, and has not connected yet
    wait_until(lambda: executor.idle_blocks()["0"] > 0.2, 5)
    assert executor.scale_in(2, max_idletime=0.1) == ["0"]
    wait_until(lambda: young in executor.status_facade, 10)  # a look of Parsl's that began before is told last
    assert not executor.status_facade[young].terminal


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


class FakeSlurm(SlurmProvider):
    """A provider whose commands are never given."""

    def execute_wait(self, cmd: str, timeout: int | None = None) -> tuple[int, str, str]:
        return 1, "", ""


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
        Watch([executor]).check()


@pytest.mark.parametrize(
    ("walltime", "start", "longest", "seconds"), [("01:00:00", 60, 600, 2940), ("00:01:30", 30, 20, 40)]
)
def test_a_block_drains_before_its_walltime_could_cut_off_a_task(
    walltime: str, start: float, longest: float, seconds: int
) -> None:
    assert drain_period(walltime, start, longest) == seconds
    executor = ResilientExecutor(
        "far", FakeSlurm(walltime=walltime), longest_task=longest, start_seconds=start, **ARGUMENTS
    )
    assert executor.drain_period == seconds


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
    assert Watch([executor])._trouble_of(executor) is None
    Watch([executor]).check()


def test_threads_share_the_memory_of_their_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.psutil, "virtual_memory", lambda: SimpleNamespace(available=10 << 30))
    shares = [pool._worker_bytes(ThreadPoolExecutor(label="threads", max_threads=n)) for n in (1, 2, 2000)]
    assert shares == [10 << 30, 5 << 30, (10 << 30) // 2000]


def test_an_exception_of_ours_survives_the_way_back() -> None:
    import pickle

    from volpipe import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) > 5
    for kind in kinds:
        again = pickle.loads(pickle.dumps(kind("what is wrong")))
        assert (type(again), str(again)) == (kind, "what is wrong")


DRIVER = """
import sys, time, parsl
from parsl.config import Config
from test_parsl import ARGUMENTS, ResilientExecutor, local_provider

executor = ResilientExecutor("mine", local_provider(), **ARGUMENTS)
parsl.load(Config([executor], run_dir=sys.argv[1], strategy_period=1, initialize_logging=False, usage_tracking=0))
while not executor.connected_managers():
    time.sleep(0.1)
print(executor.interchange_proc.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_the_interchange_ends_with_a_driver_that_was_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), TEST_PATH])}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    interchange = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    driver.stdout.close()
    wait_until(lambda: not interchange.is_running(), 10)
    wait_until(lambda: not processes_in(tmp_path), 30)


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


def test_a_process_that_the_system_kills_for_its_memory_is_told_by_its_block(
    tmp_path: Path, executor: ResilientExecutor
) -> None:
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


# A pool that is delayed where it waits for its interchange without end: reached, and not registered yet.
DELAYED_POOL = """#!{python}
import pathlib, time
from parsl.executors.high_throughput import probe
find = probe.probe_addresses
def find_and_wait(*arguments, **options):
    found = find(*arguments, **options)
    pathlib.Path("reached").touch()
    while not pathlib.Path("go on").exists():
        time.sleep(0.05)
    return found
probe.probe_addresses = find_and_wait
from volpipe.apps.htex.processes import workers
workers()
"""


@pytest.mark.slow
def test_a_pool_that_was_registering_when_its_interchange_died_ends(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parsl's pool alone waits until its walltime: nothing bounds the wait for the answer to its second probe."""
    monkeypatch.chdir(tmp_path)
    pool = tmp_path / WORKERS
    pool.write_text(DELAYED_POOL.format(python=sys.executable))
    pool.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]))
    executor.run_dir = str(tmp_path)
    executor.provider.script_dir = str(tmp_path)
    executor.start()
    try:
        executor.scale_out_facade(1)
        wait_until((tmp_path / "reached").exists, 60)
        time.sleep(2 * executor.heartbeat_period)  # the guard has seen the port as well
        psutil.Process(executor.interchange_proc.pid).kill()
        executor.interchange_proc.wait(5)
        (tmp_path / "go on").touch()
        wait_until(lambda: not processes_in(tmp_path), 60)
        (said,) = tmp_path.glob("*.err")
        assert f"no driver listens at 127.0.0.1 port {executor.worker_port} any more" in said.read_text()
    finally:
        executor.provider.cancel(list(executor.blocks_to_job_id.values()))
        executor.shutdown()
        executor.incoming_q.close()
