"""An executor that runs: its interchange is waited for, seen when it is dead, and ends with its driver; its workers."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.util import get_temp_dir
from pathlib import Path

import parsl
import psutil
import pytest
import zmq
from command import is_pool, processes_in, wait_until
from conftest import TEST_PATH
from local_executors import ARGUMENTS, local_provider
from parsl.config import Config
from parsl.dataflow.dflow import DataFlowKernel
from parsl.executors.errors import BadStateException
from parsl.executors.high_throughput import errors as lost
from parsl.executors.high_throughput import probe

from volpipe.apps import pool
from volpipe.apps.htex import executor as executor_module
from volpipe.apps.htex.executor import ResilientExecutor, translate_error
from volpipe.apps.htex.processes import INTERCHANGE, PACKAGES, WORKER, WORKERS, probe_apart, with_port
from volpipe.apps.htex.watch import ExecutorWatch, has_lost_interchange, has_lost_results
from volpipe.errors import ManagerLost, RunStopped, WorkerLost

START = f"exec {Path(sys.executable).parent}/{INTERCHANGE}"


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
    pool.begin_blocks(kernel)
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


@contextmanager
def alone(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch, script: str = ""
) -> Iterator[None]:
    """Start an executor without blocks, whose interchange is a `script`, if one is given."""
    if script:
        command = tmp_path / INTERCHANGE
        command.write_text(f"#!/bin/sh\n{script}\n")
        command.chmod(0o755)
        monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), os.environ["PATH"]]))
    executor.run_dir = str(tmp_path)
    executor.start()
    try:
        yield
    finally:
        executor.shutdown()
        executor.incoming_q.close()


def forked() -> tuple[str, int, bool, list[str]]:
    """The name of this process, of how many threads the one is that it is a fork of, and what that one had imported."""
    threads = len([*Path(f"/proc/{os.getppid()}/task").iterdir()])
    return Path("/proc/self/comm").read_text().strip(), threads, gc.get_freeze_count() > 0, sorted(sys.modules)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_workers_are_forks_of_a_process_of_one_thread_that_has_imported_what_nets_need(
    kernel: DataFlowKernel, executor: ResilientExecutor
) -> None:
    name, threads, shares, modules = executor.submit(forked, {}).result(60)
    assert (name, threads, shares) == (WORKER, 1, True)
    assert {"torch", "tensorstore", "volpipe.runs.worker"} <= set(modules)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_a_worker_that_is_killed_while_it_waits_for_a_task_ends_its_pool_and_another_takes_its_place(
    kernel: DataFlowKernel, executor: ResilientExecutor
) -> None:
    """It waits with the lock of the pool's queue: no worker that is left, or comes after it, would get a task."""
    worker = psutil.Process(executor.submit(os.getpid, {}).result(60))
    time.sleep(0.5)  # else it may not wait yet
    worker.kill()
    error = executor.submit(abs, {}, -3).exception(60)
    assert error is None or isinstance(error, lost.ManagerLost)  # of the pool that ended meanwhile
    assert executor.submit(abs, {}, -3).result(60) == 3


def files_of_its_pool() -> list[str]:
    """The folder of this worker's pool for sockets, and the semaphores that it has in its memory."""
    maps = Path("/proc/self/maps").read_text()
    return [str(Path(get_temp_dir()).parent), *set(re.findall("/dev/shm/sem.*", maps))]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
@pytest.mark.parametrize("is_killed", [False, True])
def test_of_a_pool_no_file_stays_in_memory_or_in_the_folder_for_what_is_temporary(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    temporary = tmp_path / ("longer than a path of a socket may be " * 3)
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with started(tmp_path, executor, monkeypatch):
        folder, *semaphores = executor.submit(files_of_its_pool, {}).result(60)
        assert semaphores and all(Path(file).exists() for file in [folder, *semaphores])
        if is_killed:
            (pool,) = filter(is_pool, processes_in(tmp_path))
            pool.kill()
    assert not any(temporary.iterdir())
    assert not any(Path(file).exists() for file in [folder, *semaphores])
    said = [*tmp_path.rglob("*.err"), *tmp_path.rglob("*.stderr")]
    assert said and not any("leaked" in file.read_text() for file in said)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_workers_that_run_no_nets_have_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ResilientExecutor("cpu", local_provider(), **ARGUMENTS)
    with started(tmp_path, executor, monkeypatch):
        name, _, _, modules = executor.submit(forked, {}).result(60)
    assert name == WORKER and "torch" not in modules and "volpipe.runs.worker" in modules


def imported() -> list[str]:
    """What of a driver's packages this process has imported; then the same packages, imported after all."""
    before = [name for name in PACKAGES if name in sys.modules]
    import kubernetes.client
    import sqlalchemy.orm

    return [*before, kubernetes.client.V1Pod.__name__, sqlalchemy.orm.Session.__name__]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("_pools_start_anew")
def test_a_worker_imports_packages_of_drivers_on_demand(kernel: DataFlowKernel, executor: ResilientExecutor) -> None:
    assert executor.submit(imported, {}).result(60) == ["V1Pod", "Session"]


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


@pytest.mark.long
@pytest.mark.parametrize("shares_files", [True, False])
def test_an_interchange_is_waited_for_by_blocks_that_share_no_files(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch, shares_files: bool
) -> None:
    """Those of several executors start side by side, and workers of this machine beside them."""
    monkeypatch.setattr(executor, "shares_files", shares_files)
    began = time.monotonic()
    with alone(tmp_path, executor, monkeypatch, f"sleep 3\n{START}"):
        assert time.monotonic() - began < 2
        argument = re.search(r"--port=\S+", executor._get_launch_command("0"))
        assert (time.monotonic() - began < 2) == shares_files
        assert argument is not None
        told = with_port(argument[0])
        assert time.monotonic() - began > 3
        assert f"Bound to port {told.removeprefix('--port=')} " in (tmp_path / "mine" / "interchange.log").read_text()
        assert executor.connected_managers() == []


def test_an_executor_whose_workers_cannot_be_told_their_port_is_given_up(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for it as long as the driver is there, and the driver for them."""

    def full(place: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(executor_module, "atomic_write", full)
    monkeypatch.setattr(executor, "shares_files", True)
    with alone(tmp_path, executor, monkeypatch):
        executor._get_launch_command("0")
        wait_until(lambda: executor.bad_state_is_set, 60)
        trouble = ExecutorWatch([executor])
        with pytest.raises(RunStopped, match=r"executor mine was given up: .*No space left on device"):
            trouble.check()


def test_a_pool_looks_for_its_interchange_by_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second connection of one name is ignored until the first is known to be gone."""
    monkeypatch.setattr(probe, "probe_addresses", probe.probe_addresses)  # as it was, in the end
    names: list[bytes] = []

    def answer() -> None:
        names.append(interchange.recv_multipart()[0])
        interchange.send_multipart([names[0], b""])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as interchange:
        url = f"tcp://127.0.0.1:{interchange.bind_to_random_port('tcp://127.0.0.1')}"
        answering = threading.Thread(target=answer)
        answering.start()
        probe_apart()
        assert probe.probe_addresses(context, {url}, timeout_ms=10_000, identity=b"mine") == url
        answering.join()
    assert names == [b"mine-probe"]


def test_a_pool_waits_for_its_port_as_long_as_there_is_a_driver(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as driver:
        driver.wait()
    with pytest.raises(ProcessLookupError):
        with_port(f"--port={tmp_path}/port.{driver.pid}")
    assert with_port("--port=54321") == "--port=54321"


@pytest.mark.slow
def test_a_task_waits_for_an_interchange_that_starts_slowly_and_no_longer_for_one_that_hangs(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a start takes longer than any send; no word of zmq's reaches a user."""
    monkeypatch.setattr(executor_module, "SEND_MILLISECONDS", 100)
    monkeypatch.setattr(executor_module, "LISTEN_SECONDS", 20)
    with alone(tmp_path, executor, monkeypatch, f"sleep 2\n{START}"):
        began = time.monotonic()
        executor.outgoing_q.put("a task")
        assert time.monotonic() - began > 1


@pytest.mark.slow
def test_an_interchange_that_never_takes_a_task_is_named(
    tmp_path: Path, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "SEND_MILLISECONDS", 100)
    monkeypatch.setattr(executor_module, "LISTEN_SECONDS", 0.5)
    with alone(tmp_path, executor, monkeypatch, "cat > /dev/null &\nexec sleep 60"):
        with pytest.raises(
            ConnectionError, match="the interchange of executor mine takes no tasks; this machine may be"
        ):
            executor.outgoing_q.put("a task")
        executor.interchange_proc.kill()


def refuses(executor: ResilientExecutor) -> bool:
    """Return whether a task is refused, rather than that somebody is waited for who takes it."""
    try:
        executor.submit(time.sleep, {}, 0)
    except ConnectionError as error:
        assert str(error) == "the interchange of executor mine has ended"
        return True
    return False


@pytest.mark.long
@pytest.mark.slow
def test_a_dead_interchange_is_seen_and_ends_what_waits(kernel: DataFlowKernel, executor: ResilientExecutor) -> None:
    waiting = executor.submit(time.sleep, {}, 60)
    watch = ExecutorWatch([executor])
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


@pytest.mark.long
@pytest.mark.slow
def test_a_dead_thread_of_results_is_seen_and_ends_what_waits(
    kernel: DataFlowKernel, executor: ResilientExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda died: None)  # the thread's end is what is tested
    watch = ExecutorWatch([executor])
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
def test_only_connected_idle_blocks_are_scaled_in(kernel: DataFlowKernel, executor: ResilientExecutor) -> None:
    assert list(executor.idle_blocks()) == ["0"]
    assert executor.scale_in(0, max_idletime=0.0) == []
    assert executor.scale_in(1, max_idletime=3600.0) == []
    (young,) = executor.scale_out_facade(1)  # starts, and has not connected yet
    wait_until(lambda: executor.idle_blocks()["0"] > 0.2, 5)
    assert executor.scale_in(2, max_idletime=0.1) == ["0"]
    wait_until(lambda: young in executor.status_facade, 10)  # a look of Parsl's that began before is told last
    assert not executor.status_facade[young].terminal


DRIVER = """
import sys, time, parsl
from parsl.config import Config
from local_executors import ARGUMENTS, local_provider
from volpipe.apps.htex.executor import ResilientExecutor

executor = ResilientExecutor("mine", local_provider(), **ARGUMENTS)
parsl.load(Config([executor], run_dir=sys.argv[1], strategy_period=1, initialize_logging=False, usage_tracking=0))
while not executor.connected_managers():
    time.sleep(0.1)
print(executor.interchange_proc.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.long
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


@pytest.mark.long
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
    executor.provider.script_dir = str(tmp_path)
    with alone(tmp_path, executor, monkeypatch):
        executor.scale_out_facade(1)
        wait_until((tmp_path / "reached").exists, 60)
        time.sleep(2 * executor.heartbeat_period)  # the guard has seen the port as well
        psutil.Process(executor.interchange_proc.pid).kill()
        executor.interchange_proc.wait(5)
        (tmp_path / "go on").touch()
        wait_until(lambda: not processes_in(tmp_path), 60)
        (said,) = tmp_path.glob("*.err")
        assert f"no driver listens at 127.0.0.1 port {executor.worker_port} any more" in said.read_text()
        executor.provider.cancel(list(executor.blocks_to_job_id.values()))
