"""What rests on parts of Parsl that it does not promise: there, and with the meaning that we give them."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from local_executors import ARGUMENTS, FakeSlurm, local_provider
from parsl.executors import HighThroughputExecutor, ThreadPoolExecutor
from parsl.executors.high_throughput.executor import DEFAULT_LAUNCH_CMD

from volpipe.apps import capacity
from volpipe.apps.htex.executor import ResilientExecutor, drain_period
from volpipe.apps.htex.launch import launch_command
from volpipe.apps.htex.processes import INTERCHANGE, PACKAGES, WORKERS
from volpipe.apps.htex.watch import Watch
from volpipe.errors import SiteError


@pytest.fixture
def executor() -> ResilientExecutor:
    return ResilientExecutor("mine", local_provider(), **ARGUMENTS)


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
    assert Watch([executor])._trouble_of(executor) is None
    Watch([executor]).check()


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
