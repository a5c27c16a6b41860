"""Runs on pods that are slow enough to be disturbed in the middle: for tests and for scripts/pods."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from cluster import Cluster, running
from command import begin, processes_in
from disturbance import Slow

IMAGE = "lab/volpipe:1"

# The shipped site, but for how patient it is: what takes minutes there takes seconds here.
SITE = """
from volpipe.apps.podstatus import Patience
from volpipe.configs import k8s_htex
from volpipe.configs.k8s_htex import Settings

def config(run_dir):
    chosen = k8s_htex.config(run_dir)
    chosen.strategy_period = 1
    for executor in chosen.executors:
        executor.heartbeat_period, executor.heartbeat_threshold = 2, 8
        executor.worker_logdir_root = run_dir
        executor.provider.poll_seconds = 1
        executor.provider.patience = Patience(pending={pending}, start=2)
    return chosen
"""


@dataclass
class SlowPods(Slow):
    """The same command again and again, on pods of `cluster`.

    Attributes:
        cluster: that runs the pods; its only claim is the folder that `folder` lies in.
        pending: seconds that a pod may wait for a node.
        settings: of the site, in the environment.
    """

    cluster: Cluster = field(default_factory=lambda: Cluster(Path()))
    pending: float = 60.0
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.folder / "site.py").write_text(SITE.format(pending=self.pending))

    @property
    def command(self) -> list[str]:
        return [part if part != "local" else "site.py" for part in super().command]

    def begin(self) -> subprocess.Popen[str]:
        self.num_sessions += 1
        self.cluster.node.env["SESSION_FILE"] = str(self._calls(self.num_sessions))
        self.process = begin(self.folder, *self.command, **self.environment)
        return self.process

    @property
    def environment(self) -> dict[str, str]:
        """What tells the site; also what says where the cluster is."""
        return {
            "KUBECONFIG": str(self.cluster.kubeconfig),
            "VOLPIPE_K8S_IMAGE": IMAGE,
            "VOLPIPE_K8S_NAMESPACE": "lab",
            "VOLPIPE_K8S_CLAIMS": f"scratch:{self.folder.parent}",
            "VOLPIPE_K8S_ADDRESS": "127.0.0.1",
            "VOLPIPE_K8S_CORES": "2",
            "VOLPIPE_K8S_GPUS": "0",
            "VOLPIPE_K8S_MAX_PODS": "1",
            "VOLPIPE_K8S_UID": str(os.getuid()),
            **self.settings,
        }

    def left(self) -> list[psutil.Process | str]:
        """Return the pods and processes that there are."""
        found: list[psutil.Process | str] = [*self.cluster.names(), *processes_in(self.folder)]
        return found + [process for pod in list(self.cluster.pods.values()) for process in pod.processes()]

    def pod_processes(self, name: str, part: str) -> list[psutil.Process]:
        """Return the processes of a pod whose command has `part`."""
        return [p for p in self.cluster.pod(name).processes() if part in " ".join(p.cmdline())]


def delete(slow: SlowPods, name: str) -> None:
    slow.cluster.delete_pod(name)


def evict(slow: SlowPods, name: str) -> None:
    slow.cluster.node.evict(slow.cluster.pod(name))


def exhaust_memory(slow: SlowPods, name: str) -> None:
    slow.cluster.node.exhaust(slow.cluster.pod(name))


def reach_deadline(slow: SlowPods, name: str) -> None:
    slow.cluster.node.expire(slow.cluster.pod(name))


def lose_node(slow: SlowPods, name: str) -> None:
    slow.cluster.node.lose(slow.cluster.pod(name))


def kill_manager(slow: SlowPods, name: str) -> None:
    pools = slow.pod_processes(name, "process_worker_pool.py")
    min((p for p in pools if "python" in p.name() or "process_worker" in p.name()), key=lambda p: p.pid).kill()


def kill_worker(slow: SlowPods, name: str) -> None:
    workers = slow.pod_processes(name, "spawn_main")
    max(workers, key=lambda process: sum(process.cpu_times()[:2])).kill()


# What may happen to a pod in the middle of a run, and what the run's log then says.
HARMS: dict[str, tuple[Callable[[SlowPods, str], None], str]] = {
    "deleted": (delete, "the pod is (gone: somebody deleted it|being deleted)"),
    "evicted": (evict, r"the cluster took the pod \(Evicted\): The node was low on resource: memory\."),
    "out of memory": (exhaust_memory, "the pod was OOM-killed, exit code 137: it needs more memory"),
    "deadline": (reach_deadline, "the pod reached its deadline: Pod was active on the node longer"),
    "node lost": (lose_node, "the pod is being deleted: DeletionByTaintManager"),
    "manager killed": (kill_manager, r"the pod's command ended with exit code 137 \(Error\)"),
    "worker killed": (kill_worker, "WorkerLost"),
}


@contextmanager
def cluster_for(folder: Path) -> Iterator[Cluster]:
    """Give a cluster with everything that `SlowPods` asks for in folders of `folder`."""
    with running(folder / "cluster", images={IMAGE}, claims={"scratch"}) as cluster:
        yield cluster
