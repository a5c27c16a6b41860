"""Runs on pods that are slow enough to be disturbed in the middle: for tests and for scripts/pods."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from cluster import Cluster, running
from command import processes_in
from disturbance import Slow
from real_cluster import RealCluster

IMAGE = "lab/volpipe:1"

# The shipped site, but for how patient it is: what takes minutes there takes seconds here.
SITE = """
import dataclasses, os
from volpipe.apps.kubernetes.pod_status import Patience
from volpipe.configs import k8s_htex
from volpipe.configs.k8s_htex import Settings

def config(run_dir):
    chosen = k8s_htex.config(run_dir)
    chosen.strategy_period = 1
    for executor in chosen.executors:
        executor.heartbeat_period, executor.heartbeat_threshold = 2, 8
        executor.worker_logdir_root = run_dir
        executor.provider.poll_seconds = 1
        env = dict(executor.provider.shape.env)
        if "SESSION_FILE" in os.environ:
            env["SESSION_FILE"] = os.environ["SESSION_FILE"]
        executor.provider.shape = dataclasses.replace(executor.provider.shape, env=env)
        executor.provider.patience = Patience(pending={pending}, start=2)
    return chosen
"""


@dataclass
class SlowPods(Slow):
    """The same command again and again, on pods of `cluster`.

    Attributes:
        cluster: that runs the pods; the folder that `folder` lies in is on its claim.
        pending: seconds that a pod may wait for a node.
        settings: of the site, in the environment.
    """

    cluster: Cluster | RealCluster = field(default_factory=lambda: Cluster(Path()))
    pending: float = 60.0
    settings: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.folder / "site.py").write_text(SITE.format(pending=self.pending))
        self.site = "site.py"
        of_double = {"VOLPIPE_K8S_IMAGE": IMAGE, "VOLPIPE_K8S_CLAIMS": f"scratch:{self.folder.parent}"}
        self.environment = {
            **(of_double if isinstance(self.cluster, Cluster) else {}),
            **self.cluster.environment,
            "VOLPIPE_K8S_CORES": "2",
            "VOLPIPE_K8S_GPUS": "0",
            "VOLPIPE_K8S_MAX_PODS": "1",
            "VOLPIPE_K8S_MEMORY": "4Gi",
            "VOLPIPE_K8S_UID": str(os.getuid()),
            **self.settings,
        }

    def left(self) -> list[psutil.Process | str]:
        """Return the pods and processes that there are."""
        return [*self.cluster.names(), *processes_in(self.folder), *self.cluster.stray()]


@dataclass(frozen=True)
class Harm:
    """What may happen to a pod in the middle of a run.

    Attributes:
        method: of a cluster, which does it.
        said: what the run's log then says.
        needs: right that it takes on a real cluster beside those of a run, or why it is for the double alone.
    """

    method: str
    said: str
    needs: str = ""


HARMS = {
    "deleted": Harm("delete_pod", "the pod is (gone: somebody deleted it|being deleted)"),
    "evicted": Harm(
        "evict", "the pod is (gone|being deleted: EvictionByEvictionAPI: Eviction API: evicting)", "pods/eviction"
    ),
    "preempted": Harm(
        "preempt",
        "the pod is (gone|being deleted: PreemptionByScheduler: default-scheduler: preempting)",
        "a priority class: the double alone",
    ),
    "starved": Harm(
        "starve",
        r"the cluster took the pod \(Evicted\): The node was low on resource: memory",
        "a node whose memory is full: the double alone",
    ),
    "out of memory": Harm(
        "exhaust",
        "the pod was OOM-killed, exit code 137: it needs more memory",
        "pods/exec; nodes with cgroup v2, else a process alone is killed and nothing is said",
    ),
    "deadline": Harm(
        "expire", "the pod reached its deadline: Pod was active on the node longer", "time: the double alone"
    ),
    "node lost": Harm(
        "lose_node", "the pod is being deleted: DeletionByTaintManager", "a node to stop: the double alone"
    ),
    "manager killed": Harm("kill_manager", r"the pod's command ended with exit code 137 \(Error\)", "pods/exec"),
    "worker killed": Harm("kill_worker", "WorkerLost", "pods/exec"),
}


@contextmanager
def cluster_for(folder: Path, **choices: Any) -> Iterator[Cluster]:  # Any: fields of Node
    """Give a double with everything that `SlowPods` asks for in folders of `folder`."""
    with running(folder / "cluster", images={IMAGE}, claims={"scratch"}, **choices) as cluster:
        yield cluster
