"""Whatever cluster KUBECONFIG names, for the same scenarios as the double; only where a user has set one up for it.

VOLPIPE_K8S_IMAGE, _NAMESPACE, _CLAIMS and _ADDRESS say the rest, as for a run: the first claim that may be written must
be mounted at the same path here, and pods must reach the address. Who tests needs pods/exec and pods/eviction as well.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import stream
from urllib3.exceptions import HTTPError

from volpipe.apps.pods import connect
from volpipe.apps.podspec import RUN_LABEL
from volpipe.apps.surroundings import read_claims
from volpipe.errors import SiteError

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
        self._run(
            name, "kill -9 $(grep -la process_worker_pool /proc/[0-9]*/cmdline | cut -d/ -f3 | sort -n | sed -n 3p)"
        )

    def kill_worker(self, name: str) -> None:
        self._run(name, "kill -9 $(grep -la spawn_main /proc/[0-9]*/cmdline | cut -d/ -f3 | sort -n | tail -1)")

    def exhaust(self, name: str) -> None:
        self._run(name, "python -c 'x = [bytearray(2**28) for _ in range(4096)]'")

    def expire(self, name: str) -> None:
        pytest.skip("a deadline cannot be brought forward on a real cluster")

    def lose_node(self, name: str) -> None:
        pytest.skip("no node of a real cluster is stopped for a test")

    def _run(self, name: str, script: str) -> None:
        command = ["/bin/bash", "-c", script]
        stream(
            self.api.connect_get_namespaced_pod_exec, name, self.namespace, command=command, stderr=True, stdout=True
        )


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
    return RealCluster(api, namespace, writable[0], os.environ["VOLPIPE_K8S_IMAGE"])


def folder_on(cluster: RealCluster) -> Path:
    """Return a new folder that the cluster's pods see too."""
    return Path(tempfile.mkdtemp(prefix="volpipe-tests-", dir=cluster.claim))
