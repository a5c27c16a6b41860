"""A Slurm of a test's own: munged, slurmctld and two slurmd of this machine, on loopback, as any user.

Not here: what is tried on it. Nodes n1 and n2 have four cores and four made-up GPUs each. Nothing outside its folder is
touched; what it started, it stops.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from command import wait_until

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "sinfo", "scontrol")
NEEDED_FOR_ACCOUNTING = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr")
SBIN = "/usr/sbin:/sbin"

SLURM_CONF = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SlurmdTimeout=10
KillWait=2
MinJobAge={min_job_age}
MaxJobCount={max_jobs}
InactiveLimit=0
Waittime=0
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
GresTypes=gpu
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4 RealMemory=8000 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverTimeLimit=0 PriorityTier=1 GraceTime=2
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.sock
AccountingStorageEnforce=associations,limits,qos
"""
SLURMDBD_CONF = """
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={storage_port}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
CommunicationParameters=NoInAddrAny
"""
GRANTS = (
    "create user if not exists 'slurm'@'127.0.0.1' identified by 'slurm';"
    "create user if not exists 'slurm'@'localhost' identified by 'slurm';"
    "grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1'; grant all on slurm_acct_db.* to 'slurm'@'localhost';"
    "create database if not exists slurm_acct_db"
)


def lacking(accounting: bool = False) -> list[str]:
    """Return the commands that a Slurm needs and that are not there."""
    path = f"{os.environ['PATH']}:{SBIN}"
    return [name for name in NEEDED + NEEDED_FOR_ACCOUNTING * accounting if shutil.which(name, path=path) is None]


@dataclass
class Slurm:
    """A running Slurm whose files are in `folder`; give its commands with `environment`."""

    folder: Path
    accounting: bool = False
    max_jobs: int = 10000  # that the controller knows at a time
    min_job_age: int = 300  # seconds for which it knows one that has ended
    ports: list[int] = field(default_factory=list)
    daemons: list[psutil.Process] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def do(self, *command: str) -> str:
        """Return what a command of Slurm prints."""
        environment = os.environ | self.environment | {"PATH": f"{os.environ['PATH']}:{SBIN}"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert ended.returncode == 0, f"{command}: {ended.stderr}{ended.stdout}"
        return ended.stdout

    def jobs(self, *states: str) -> list[str]:
        """Return the jobs that have not ended; with `states`, those in one of these."""
        wanted = ",".join(states) or "PENDING,CONFIGURING,RUNNING,COMPLETING,SUSPENDED"
        return self.do("squeue", "--noheader", f"--states={wanted}", "--format=%A").split()

    def start(self) -> None:
        self._write_files()
        self._daemon(
            "munged", "--force", f"--key-file={self.folder}/munge.key", f"--socket={self.folder}/munge.sock",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munge.seed",
        )  # fmt: skip
        if self.accounting:
            self._start_accounting()
        self._daemon("slurmctld")
        for node in ("n1", "n2"):
            self.start_node(node)
        wait_until(lambda: self._nodes("idle") == 2, 30)

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-N", node)

    def node(self, name: str) -> psutil.Process:
        """Return the process of slurmd on a node."""
        return psutil.Process(int((self.folder / f"slurmd-{name}.pid").read_text()))

    def is_alive(self, name: str) -> bool:
        """Return whether the slurmd of a node runs."""
        with suppress(psutil.NoSuchProcess):
            return self.node(name).status() != psutil.STATUS_ZOMBIE
        return False

    def stop(self) -> None:
        """Cancel what runs and stop what was started, the latest first."""
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.do("scancel", "--user", psutil.Process().username())
            wait_until(lambda: not self.jobs(), 20)
        for daemon in reversed(self.daemons + self._forked()):
            with suppress(psutil.NoSuchProcess):
                daemon.terminate()
                try:
                    daemon.wait(10)
                except psutil.TimeoutExpired:
                    daemon.kill()

    def _nodes(self, state: str) -> int:
        return self.do("sinfo", "--noheader", "-N", "--partition=main", "-o", "%t").split().count(state)

    def _daemon(self, *command: str) -> None:
        self.do(*command)

    def _forked(self) -> list[psutil.Process]:
        """Return the daemons that put themselves into the background, in the order of their start."""
        names = ("munged", "slurmdbd", "slurmctld", "slurmd-n1", "slurmd-n2")
        found = []
        for file in (self.folder / f"{name}.pid" for name in names):
            with suppress(OSError, ValueError, psutil.NoSuchProcess):
                process = psutil.Process(int(file.read_text()))
                if process.name() == file.stem.partition("-")[0]:
                    found.append(process)
        return found

    def _write_files(self) -> None:
        for name in ("ctld", "n1", "n2", "gpu"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.ports = free_ports(5)
        values = {"host": socket.gethostname().partition(".")[0], "user": psutil.Process().username()}
        text = SLURM_CONF.format(
            folder=self.folder, ports=self.ports, max_jobs=self.max_jobs, min_job_age=self.min_job_age, **values
        )
        if self.accounting:
            text += ACCOUNTING.format(folder=self.folder, port=self.ports[3])
            dbd = self.folder / "slurmdbd.conf"
            dbd.write_text(
                SLURMDBD_CONF.format(
                    folder=self.folder, port=self.ports[3], storage_port=self.ports[4], user=values["user"]
                )
            )
            dbd.chmod(0o600)
        (self.folder / "slurm.conf").write_text(text)
        lines = []
        for node in ("n1", "n2"):
            for number in range(4):
                make_gpu(self.folder / f"gpu/{node}_{number}")
            lines.append(f"NodeName={node} Name=gpu File={self.folder}/gpu/{node}_[0-3]\n")
        (self.folder / "gres.conf").write_text("".join(lines))

    def _start_accounting(self) -> None:
        folder, user = self.folder, psutil.Process().username()
        self.do(
            "mariadb-install-db", "--no-defaults", f"--user={user}", f"--datadir={folder}/db",
            "--auth-root-authentication-method=normal", "--skip-test-db",
        )  # fmt: skip
        command = [
            "mariadbd", "--no-defaults", f"--user={user}", f"--datadir={folder}/db", f"--socket={folder}/db.sock",
            f"--pid-file={folder}/mariadbd.pid", "--bind-address=127.0.0.1", f"--port={self.ports[4]}",
            "--innodb-buffer-pool-size=64M", "--innodb-flush-log-at-trx-commit=0",
        ]  # fmt: skip
        path = f"{os.environ['PATH']}:{SBIN}"
        with (folder / "mariadbd.log").open("w") as log:
            started = subprocess.Popen(
                [shutil.which("mariadbd", path=path) or "mariadbd", *command[1:]], stdout=log, stderr=log
            )
        self.daemons.append(psutil.Process(started.pid))
        started.returncode = 0  # stop() waits for it, not this
        wait_until(lambda: self._answers("mariadb", "--no-defaults", "-uroot", f"-S{folder}/db.sock", "-e", GRANTS), 60)
        self._daemon("slurmdbd")
        wait_until(lambda: self._answers("sacctmgr", "-i", "add", "cluster", "lab"), 60)
        self.do("sacctmgr", "-i", "add", "account", "lab", "cluster=lab")
        self.do("sacctmgr", "-i", "add", "user", user, "account=lab", "cluster=lab")

    def _answers(self, *command: str) -> bool:
        try:
            self.do(*command)
        except AssertionError:
            time.sleep(0.2)
            return False
        return True


@contextmanager
def running_slurm(
    folder: Path, *, accounting: bool = False, max_jobs: int = 10000, min_job_age: int = 300
) -> Iterator[Slurm]:
    """Give a Slurm in `folder`, and stop it."""
    slurm = Slurm(folder, accounting, max_jobs, min_job_age)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def make_gpu(path: Path) -> None:
    """Make a device that Slurm takes for a GPU; without the rights for that, a file, which it only counts."""
    try:
        os.mknod(path, 0o020666, os.makedev(1, 3))
    except PermissionError:
        path.touch()


def free_ports(number: int) -> list[int]:
    """Return as many ports in a row that nobody listens on."""
    for first in range(21000 + os.getpid() % 4000, 30000, number):
        with suppress(OSError):
            for port in range(first, first + number):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
            return list(range(first, first + number))
    raise OSError("no free ports")


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
