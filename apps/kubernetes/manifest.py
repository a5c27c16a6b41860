"""Manifests: what a namespace needs before a driver can run in it, and the job that runs one.

Not here: printing them (k8s), or the pods of workers, which drivers create themselves (pod_spec).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes import client

from volpipe.apps.kubernetes.pod_spec import (
    SERVICE,
    USER,
    WORKERS,
    Shape,
    container_security,
    mounts,
    pod_security,
    secret_variables,
    secrets,
    volumes,
)
from volpipe.blockwise.interrupts import INTERRUPTED

ACCOUNT = "volpipe"
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
    account = client.V1ServiceAccount(api_version="v1", kind="ServiceAccount", metadata=_metadata(ACCOUNT, namespace))
    rule = client.V1PolicyRule(api_groups=[""], resources=["pods"], verbs=VERBS)
    group = "rbac.authorization.k8s.io"
    role = client.V1Role(api_version=f"{group}/v1", kind="Role", metadata=_metadata(ACCOUNT, namespace), rules=[rule])
    binding = client.V1RoleBinding(
        api_version=f"{group}/v1",
        kind="RoleBinding",
        metadata=_metadata(ACCOUNT, namespace),
        role_ref=client.V1RoleRef(api_group=group, kind="Role", name=ACCOUNT),
        subjects=[client.RbacV1Subject(kind="ServiceAccount", name=ACCOUNT, namespace=namespace)],
    )
    return [_plain(model) for model in (account, role, binding)]


def storage(namespace: str, sizes: Mapping[str, str], storage_class: str | None = None) -> list[Manifest]:
    """Return claims of these sizes, by name, that pods on many nodes may write at once."""
    return [
        _plain(
            client.V1PersistentVolumeClaim(
                api_version="v1",
                kind="PersistentVolumeClaim",
                metadata=_metadata(name, namespace),
                spec=client.V1PersistentVolumeClaimSpec(
                    access_modes=["ReadWriteMany"],
                    storage_class_name=storage_class,
                    resources=client.V1VolumeResourceRequirements(requests={"storage": size}),
                ),
            )
        )
        for name, size in sizes.items()
    ]


def service(namespace: str) -> Manifest:
    """Return the headless service by which each worker's pod has a name in the cluster's DNS, ready or not."""
    spec = client.V1ServiceSpec(
        cluster_ip="None",  # in words; such a service needs no ports, and those of ranks are known only as they start
        publish_not_ready_addresses=True,
        selector=WORKERS,
    )
    return _plain(client.V1Service(api_version="v1", kind="Service", metadata=_metadata(SERVICE, namespace), spec=spec))


def driver_job(command: Sequence[str], image: str, namespace: str, shape: Shape, *, folder: str) -> Manifest:
    """Return the job that gives `command` in the cluster, again where it was cut short: a run then goes on.

    Args:
        command: what follows ``volpipe`` on the command line.
        image: of driver and workers.
        namespace: of both.
        shape: claims, user, environment and pull secrets.
        folder: in which the command is given.
    """
    template = client.V1PodTemplateSpec(
        metadata=client.V1ObjectMeta(
            labels={"app.kubernetes.io/name": ACCOUNT, **shape.labels}, annotations=dict(shape.annotations) or None
        ),
        spec=client.V1PodSpec(
            containers=[_driver(command, image, shape, folder)],
            restart_policy="Never",
            service_account_name=ACCOUNT,
            security_context=pod_security(shape),
            image_pull_secrets=secrets(shape) or None,
            volumes=volumes(shape) or None,
            enable_service_links=False,
            scheduler_name=shape.scheduler,
            termination_grace_period_seconds=GRACE_SECONDS,
        ),
    )
    spec = client.V1JobSpec(
        template=template,
        backoff_limit=ATTEMPTS_AGAIN,
        pod_failure_policy=_failure_policy([REFUSED] if command[0] == "run" else [INCOMPLETE, REFUSED]),
        ttl_seconds_after_finished=KEPT_SECONDS,
    )
    metadata = _metadata(_job_name(command), namespace)
    metadata.labels = {**(metadata.labels or {}), **shape.labels}  # a queue takes a job by its label
    metadata.annotations = dict(shape.annotations) or None
    job = client.V1Job(api_version="batch/v1", kind="Job", metadata=metadata, spec=spec)
    return _plain(job)


def _failure_policy(hopeless: Sequence[int]) -> client.V1PodFailurePolicy:
    """Return which ends of a driver's pod end its job, and which do not even count; the first rule that fits decides.

    Args:
        hopeless: exit codes of commands that will not do better the next time.
    """
    disrupted = client.V1PodFailurePolicyOnPodConditionsPattern(type="DisruptionTarget", status="True")
    return client.V1PodFailurePolicy(
        rules=[
            # A drained node, an eviction, a preemption.
            client.V1PodFailurePolicyRule(action="Ignore", on_pod_conditions=[disrupted]),
            _on_exit("Ignore", [INTERRUPTED]),  # somebody deleted the pod
            _on_exit("FailJob", hopeless),
        ]
    )


def _on_exit(action: str, codes: Sequence[int]) -> client.V1PodFailurePolicyRule:
    requirement = client.V1PodFailurePolicyOnExitCodesRequirement(
        container_name="driver", operator="In", values=list(codes)
    )
    return client.V1PodFailurePolicyRule(action=action, on_exit_codes=requirement)


def _driver(command: Sequence[str], image: str, shape: Shape, folder: str) -> client.V1Container:
    downward = [
        client.V1EnvVar(
            name=name,
            value_from=client.V1EnvVarSource(field_ref=client.V1ObjectFieldSelector(field_path=path)),
        )
        for name, path in DOWNWARD.items()
    ]
    env = {"LOGNAME": USER, **shape.env}
    amounts = {"cpu": DRIVER_CORES, "memory": DRIVER_MEMORY}
    return client.V1Container(
        name="driver",
        image=image,
        command=["volpipe", *command],
        working_dir=folder,
        env_from=secret_variables(shape) or None,
        env=[*downward, *(client.V1EnvVar(name=name, value=value) for name, value in env.items())],
        resources=client.V1ResourceRequirements(requests=amounts, limits=amounts),
        volume_mounts=mounts(shape) or None,
        security_context=container_security(),
    )


def _job_name(command: Sequence[str]) -> str:
    """Return a name that is the same for the same command: nobody starts it twice by mistake."""
    return f"volpipe-{hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()[:8]}"


def _metadata(name: str, namespace: str) -> client.V1ObjectMeta:
    return client.V1ObjectMeta(name=name, namespace=namespace, labels={"app.kubernetes.io/name": ACCOUNT})


def _plain(model: object) -> Manifest:
    manifest = client.ApiClient().sanitize_for_serialization(model)
    assert isinstance(manifest, dict)
    return manifest
