"""Runs on the Slurm of a test, and what disturbs them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command import command_of, is_pool, processes_in, wait_until
from disturbance import Slow
from slurm import Slurm, kill, lacking, running_slurm
from volumes import fingerprint

SETTINGS = {
    "PARTITION": "main", "CORES": "1", "MEM_GB": "1", "GPUS": "0", "MAX_JOBS": "2", "WALLTIME": "00:10:00",
    "LONGEST_TASK": "30", "START_SECONDS": "30", "ADDRESS": "127.0.0.1", "HEARTBEAT": "2", "POLL_SECONDS": "1",
}  # fmt: skip


def new_slurm(factory: pytest.TempPathFactory, *, accounting: bool) -> Iterator[Slurm]:
    if missing := lacking(accounting):
        pytest.skip(f"no {', '.join(missing)} here; `make test` installs them where it may")
    with running_slurm(factory.mktemp("slurm"), accounting=accounting) as slurm:
        yield slurm


def on_slurm(folder: Path, slurm: Slurm, seconds: float = 0.05, site: str = "slurm_htex", **settings: str) -> Slow:
    chosen = {f"VOLPIPE_SLURM_{name}": value for name, value in (SETTINGS | settings).items()}
    home = {"XDG_CONFIG_HOME": str(folder.parent / "no-settings")}
    return Slow(folder, seconds, site=site, environment=slurm.environment | home | chosen)


def pools(slow: Slow) -> list[psutil.Process]:
    """Return the processes that pass tasks to the workers of a job."""
    return [*filter(is_pool, processes_in(slow.folder))]


def check_complete(slow: Slow, slurm: Slurm, undisturbed: str) -> None:
    slow.hurry()
    ended = slow.finish(240)
    assert ended.code == 0, ended.err
    assert fingerprint(slow.out) == undisturbed
    check_gone(slow, slurm)


def check_gone(slow: Slow, slurm: Slurm, seconds: float = 60) -> None:
    wait_until(lambda: not slurm.jobs(), seconds)
    wait_until(lambda: not processes_in(slow.folder), seconds)


def cancel_a_job(slow: Slow, slurm: Slurm) -> None:
    slurm.do("scancel", busy_job(slurm))


def kill_a_pool(slow: Slow, slurm: Slurm) -> None:
    kill([pool_of_nets(slow)])


def kill_a_worker(slow: Slow, slurm: Slurm) -> None:
    workers = set(slow.workers()) & set(pool_of_nets(slow).children(recursive=True))
    kill([max(workers, key=lambda process: sum(process.cpu_times()[:2]))])


def kill_an_interchange(slow: Slow, slurm: Slurm) -> None:
    kill([next(p for p in processes_in(slow.folder) if "interchange" in p.name())])


def kill_the_driver(slow: Slow, slurm: Slurm) -> None:
    slow.interrupt(signal.SIGKILL)


def press_ctrl_c(slow: Slow, slurm: Slurm) -> None:
    slow.interrupt(signal.SIGINT, group=True)


def busy_job(slurm: Slurm) -> str:
    """Return a job that runs the net."""
    listed = slurm.do("squeue", "--noheader", "--states=RUNNING", "--format=%A %j").splitlines()
    return next(line.split()[0] for line in listed if ".gpu." in line)


def pool_of_nets(slow: Slow) -> psutil.Process:
    """Return the process that passes tasks to the workers of a job that runs the net."""
    return next(pool for pool in pools(slow) if "/gpu" in command_of(pool))


def lose_a_node(slow: Slow, slurm: Slurm) -> None:
    """Let node n1 fall silent: its slurmd and all that runs under it."""
    daemon = slurm.node("n1")
    steps = [p for p in psutil.process_iter(["cmdline"]) if "slurmstepd: [" in " ".join(p.info["cmdline"] or [])]
    job = busy_job(slurm)
    (step,) = [step for step in steps if f"[{job}.batch]" in " ".join(step.info["cmdline"])]
    kill([daemon, *step.children(recursive=True), step])


def kill_slurmd(slow: Slow, slurm: Slurm) -> None:
    """Let the daemon of the node die that a worker's job runs on, and leave the job's processes alive."""
    (node,) = slurm.do("squeue", "--noheader", f"--jobs={busy_job(slurm)}", "--format=%N").split()
    kill([slurm.node(node)])
