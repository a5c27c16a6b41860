"""Manifests: what a namespace needs before a driver can run in it, and the job that runs one.

Not here: printing them (k8s), or the pods of workers, which drivers create themselves (pod_spec).
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes import client

from volpipe.apps.kubernetes.pod_spec import SERVICE, WORKERS, Shape, container_of, spec_of
from volpipe.blockwise.interrupts import INTERRUPTED

ACCOUNT = "volpipe"
RBAC = "rbac.authorization.k8s.io"
VERSIONS = {"Job": "batch/v1", "Role": f"{RBAC}/v1", "RoleBinding": f"{RBAC}/v1"}  # of kinds beyond the core's
LABELS = {"app.kubernetes.io/name": ACCOUNT}
VERBS = ["create", "list", "delete"]  # all that PodProvider asks for
# Where the driver's own pod is told, by which workers find it and go when it goes.
DOWNWARD = {"POD_IP": "status.podIP", "POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
INCOMPLETE, REFUSED = 1, 2  # exit codes; a command that was refused will not do better the next time
ATTEMPTS_AGAIN = 3
# A driver took 370 MiB with a net of no parameters (2026-11-21); those of its net come on top.
DRIVER_CORES, DRIVER_MEMORY = "1", "4Gi"
GRACE_SECONDS = 90  # a driver that is told to stop takes its pods along
KEPT_SECONDS = 7 * 24 * 3600

Manifest = dict[str, Any]  # Any: JSON


def rights(namespace: str) -> list[Manifest]:
    """Return the account that drivers run as, and the least that it must be allowed: pods, in this namespace."""
    account = {"kind": "ServiceAccount", "name": ACCOUNT}
    role = {"apiGroup": RBAC, "kind": "Role", "name": ACCOUNT}
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": VERBS}
    return [
        _manifest("ServiceAccount", ACCOUNT, namespace),
        _manifest("Role", ACCOUNT, namespace, rules=[rule]),
        _manifest("RoleBinding", ACCOUNT, namespace, roleRef=role, subjects=[account | {"namespace": namespace}]),
    ]


def storage(namespace: str, sizes: Mapping[str, str], storage_class: str | None = None) -> list[Manifest]:
    """Return claims of these sizes, by name, that pods on many nodes may write at once."""
    kind = {} if storage_class is None else {"storageClassName": storage_class}
    specs = {
        name: {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": size}}, **kind}
        for name, size in sizes.items()
    }
    return [_manifest("PersistentVolumeClaim", name, namespace, spec=spec) for name, spec in specs.items()]


def service(namespace: str) -> Manifest:
    """Return the headless service by which each worker's pod has a name in the cluster's DNS, ready or not."""
    # Such a service needs no ports, and those of ranks are known only as they start.
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": WORKERS}
    return _manifest("Service", SERVICE, namespace, spec=spec)


def driver_job(
    command: Sequence[str], image: str, namespace: str, shape: Shape, *, folder: str, metrics_port: int | None = None
) -> Manifest:
    """Return the job that gives `command` in the cluster, again where it was cut short: a run then goes on.

    Args:
        command: what follows ``volpipe`` on the command line.
        image: of driver and workers.
        shape: claims, user, environment and pull secrets.
        folder: in which the command is given.
        metrics_port: at which the driver serves metrics, for a Prometheus that looks for pods by their annotations;
            None where it serves none.
    """
    # A queue takes a job by its label.
    metadata = client.V1ObjectMeta(labels={**LABELS, **shape.labels}, annotations=dict(shape.annotations) or None)
    found_by = {**_found_by(metrics_port), **shape.annotations}
    of_pod = client.V1ObjectMeta(labels=metadata.labels, annotations=found_by or None)
    amounts = {"cpu": DRIVER_CORES, "memory": DRIVER_MEMORY}
    driver = container_of(
        "driver", image, shape, {}, DOWNWARD,
        command=["volpipe", *command],
        ports=[client.V1ContainerPort(container_port=metrics_port, name="metrics")] if metrics_port else None,
        working_dir=folder,
        resources={"limits": amounts, "requests": amounts},
    )  # fmt: skip
    pod = spec_of(driver, shape, service_account_name=ACCOUNT, termination_grace_period_seconds=GRACE_SECONDS)
    spec = {
        "backoffLimit": ATTEMPTS_AGAIN,
        "podFailurePolicy": _failure_policy([REFUSED] if command[0] == "run" else [INCOMPLETE, REFUSED]),
        "template": {"metadata": of_pod, "spec": pod},
        "ttlSecondsAfterFinished": KEPT_SECONDS,
    }
    return _manifest("Job", _job_name(command), namespace, metadata, spec=spec)


def _found_by(port: int | None) -> dict[str, str]:
    """Return the annotations by which Prometheus finds the metrics of a pod."""
    prefix = "prometheus.io"
    return {f"{prefix}/scrape": "true", f"{prefix}/port": str(port), f"{prefix}/path": "/metrics"} if port else {}


def _failure_policy(hopeless: Sequence[int]) -> Manifest:
    """Return which ends of a driver's pod do not count, and which `hopeless` exit codes end its job at once.

    The first rule that fits decides.
    """
    disrupted = {"status": "True", "type": "DisruptionTarget"}  # a drained node, an eviction, a preemption
    interrupted = {"containerName": "driver", "operator": "In", "values": [INTERRUPTED]}  # somebody deleted the pod
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [disrupted]},
            {"action": "Ignore", "onExitCodes": interrupted},
            {"action": "FailJob", "onExitCodes": {**interrupted, "values": hopeless}},
        ]
    }


def _job_name(command: Sequence[str]) -> str:
    """Return a name that is the same for the same command: nobody starts it twice by mistake."""
    return f"volpipe-{hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()[:8]}"


def _manifest(
    kind: str, name: str, namespace: str, metadata: client.V1ObjectMeta | None = None, **parts: object
) -> Manifest:
    """Return a manifest as JSON; `parts` may hold models of the Kubernetes client, whose empty fields are left out."""
    named = copy.copy(metadata) or client.V1ObjectMeta(labels=LABELS)
    named.name, named.namespace = name, namespace
    manifest = client.ApiClient().sanitize_for_serialization(
        {"apiVersion": VERSIONS.get(kind, "v1"), "kind": kind, "metadata": named, **parts}
    )
    assert isinstance(manifest, dict)
    return manifest
