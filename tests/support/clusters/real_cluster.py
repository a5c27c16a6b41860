"""Whatever cluster KUBECONFIG names, for the same scenarios as the double; only where a user has set one up for it.

VOLPIPE_K8S_IMAGE, _NAMESPACE, _CLAIMS and _ADDRESS say the rest, as for a run: the first claim that may be written must
be mounted at the same path here, and pods must reach the address. The namespace is for these tests alone: pods of runs
are deleted after each test. It may demand the restricted level of pod security. Two pods of 2 CPUs and 4 GiB must fit
beside each other, and for pods of two kinds one GPU. Rights: to create, list and delete pods, and where a harm in
`pods.HARMS` says so, pods/exec or pods/eviction.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream
from urllib3.exceptions import HTTPError

from volpipe.apps.htex.processes import WORKER, WORKERS
from volpipe.apps.kubernetes.environment import read_claims
from volpipe.apps.kubernetes.pod_spec import RUN_LABEL
from volpipe.apps.kubernetes.provider import connect
from volpipe.errors import SiteError

# Kills the oldest or newest process of the pod by its name, which no shell has; the image need not have pgrep.
KILL = "grep -lx '{name}' /proc/[0-9]*/comm | cut -d/ -f3 | sort -n | {which} | xargs kill -9"
EXEC_SECONDS, GONE_SECONDS = 60, 120
IMPOSSIBLE = {
    "expire": "a deadline cannot be brought forward on a real cluster",
    "lose_node": "no node of a real cluster is stopped for a test",
    "starve": "no node of a real cluster is filled up for a test",
    "preempt": "a preemption needs a priority class, which a namespace's user may not make",
}
NEEDED = ("IMAGE", "NAMESPACE", "CLAIMS", "ADDRESS")


@dataclass
class RealCluster:
    """The pods of volpipe's runs in a namespace of a real cluster."""

    api: client.CoreV1Api
    namespace: str
    claim: Path
    image: str

    @property
    def environment(self) -> dict[str, str]:
        """What tells a site; the user has told all of it already."""
        return {}

    def names(self, phase: str | None = None) -> list[str]:
        found = self.api.list_namespaced_pod(self.namespace, label_selector=RUN_LABEL).items
        return [str(p.metadata.name) for p in found if phase in (None, p.status.phase)]  # type: ignore[union-attr]

    def is_quiet(self, name: str) -> bool:
        """Return whether nothing runs in a pod any more."""
        return name not in self.names("Running")

    def stray(self) -> list[Any]:  # Any: processes, of which a real cluster shows none
        return []

    def delete_pod(self, name: str) -> None:
        self.api.delete_namespaced_pod(name, self.namespace)

    def evict(self, name: str) -> None:
        eviction = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=self.namespace))
        self.api.create_namespaced_pod_eviction(name, self.namespace, eviction)

    def kill_manager(self, name: str) -> None:
        self._run(name, KILL.format(name=WORKERS, which="head -1"))

    def kill_worker(self, name: str) -> None:
        self._run(name, KILL.format(name=WORKER, which="tail -1"))

    def exhaust(self, name: str) -> None:
        self._run(name, "python -c 'x = [bytearray(2**28) for _ in range(4096)]'")

    def check(self, harm: str) -> None:
        """Skip a test, before it begins, that would do what nobody does to a real cluster for a test."""
        if harm in IMPOSSIBLE:
            pytest.skip(IMPOSSIBLE[harm])

    def tells(self, harm: str, name: str) -> bool:
        """Return whether a run's log says what was done to a pod: for its memory cgroup v1 kills a process, no pod."""
        return harm != "exhaust" or self._run(name, "[ -f /sys/fs/cgroup/cgroup.controllers ] && echo v2") == "v2"

    def delete_pods(self) -> None:
        """Delete all pods of runs, and wait until they are gone and their share of the nodes is free."""
        for name in self.names():
            with contextlib.suppress(ApiException):  # gone meanwhile
                self.api.delete_namespaced_pod(name, self.namespace, grace_period_seconds=0)
        until = time.monotonic() + GONE_SECONDS
        while left := self.names():
            assert time.monotonic() < until, f"pods are left: {left}"
            time.sleep(0.5)

    def _run(self, name: str, script: str) -> str:
        """Return what a shell in the pod prints."""
        client = stream(
            self.api.connect_get_namespaced_pod_exec, name, self.namespace, command=["/bin/bash", "-c", script],
            stderr=True, stdout=True, _preload_content=False,
        )  # fmt: skip
        try:
            client.run_forever(timeout=EXEC_SECONDS)
            return str(client.read_stdout()).strip()
        finally:
            client.close()
            client.sock.shutdown()  # which close leaves to a server that has closed first


def find_cluster() -> RealCluster:
    """Return the cluster that the user has set up, or skip the test with the reason why there is none."""
    missing = [name for name in NEEDED if not os.environ.get(f"VOLPIPE_K8S_{name}")]
    if not os.environ.get("KUBECONFIG") or missing:
        needed = "KUBECONFIG" if not missing else f"VOLPIPE_K8S_{missing[0]}"
        pytest.skip(f"no real Kubernetes: {needed} is not set")
    namespace = os.environ["VOLPIPE_K8S_NAMESPACE"]
    claims = read_claims(os.environ["VOLPIPE_K8S_CLAIMS"].split(","))
    writable = [Path(claim.path) for claim in claims if not claim.read_only and os.access(claim.path, os.W_OK)]
    if not writable:
        pytest.skip("no real Kubernetes: no claim that may be written is mounted at its path here")
    try:
        api = client.CoreV1Api(connect())
        api.list_namespaced_pod(namespace, _request_timeout=(5, 5))
    except (SiteError, ApiException, HTTPError) as error:
        pytest.skip(f"no real Kubernetes: {error}")
    cluster = RealCluster(api, namespace, writable[0], os.environ["VOLPIPE_K8S_IMAGE"])
    if left := cluster.names():
        pytest.skip(f"namespace {namespace} has pods of runs, which tests would delete: {', '.join(left)}")
    return cluster


def folder_on(cluster: RealCluster) -> Path:
    """Return a new folder that the cluster's pods see too."""
    return Path(tempfile.mkdtemp(prefix="volpipe-tests-", dir=cluster.claim))
