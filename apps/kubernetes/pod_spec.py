"""A pod as it is asked of Kubernetes, a worker's or a driver's: arguments in, models of the Kubernetes client out.

Not here: who creates pods of workers and looks after them (provider), the job of a driver (manifest), or what became of
a pod (pod_status).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from kubernetes import client

from volpipe.errors import SettingsError, SiteError
from volpipe.training.rank_info import SERVICE_VARIABLE

RUN_LABEL = "volpipe-run"
WORKERS = {"volpipe-role": "worker"}  # on the pods of every run: what the service selects
SERVICE = "volpipe"  # gives each pod a name in the cluster's DNS; where it is not made, pods only lack that name
LONGEST_LABEL = 63  # of a name in the DNS (RFC 1123)
GPU = "nvidia.com/gpu"
USER = "volpipe"  # the name of a pod's user, whom its system knows by number alone
# Without these, Kubernetes waits 300 s before it gives up a pod whose node does not answer (DefaultTolerationSeconds).
LOST_NODE = ("node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready")
LOST_NODE_SECONDS = 60

# The shell is process 1 of its pod, which ignores TERM unless it is told otherwise: each scale-in would otherwise hold
# the GPU for the whole grace period (30 s each, measured 2026-11).
ENDING_AT_ONCE = """trap 'kill -TERM "$child"; wait "$child"; exit 143' TERM
(
{command}
) &
child=$!
wait "$child"
"""


@dataclass(frozen=True)
class Claim:
    """The persistent volume claim `name`, or its folder `sub_path` alone, mounted at `path`."""

    name: str
    path: str
    read_only: bool = False
    sub_path: str | None = None

    def __post_init__(self) -> None:
        if not PurePosixPath(self.path).is_absolute():
            raise SettingsError(f"claim {self.name} is to be mounted at {self.path!r}; give an absolute path")
        if self.sub_path is not None and ".." in PurePosixPath(f"/{self.sub_path}").parts:
            raise SettingsError(f"claim {self.name}: sub-path {self.sub_path!r} leads out of it; name a folder inside")


@dataclass(frozen=True)
class Owner:
    """The pod whose end takes all others with it: the driver's."""

    name: str
    uid: str


@dataclass(frozen=True)
class Shape:
    """What a pod asks for, beside image, processors and memory.

    Attributes:
        env: environment of the workers, beside the service's name.
        labels, annotations: of the pod, beside the run's own and the service's, such as the queue of Kueue or Volcano.
        scheduler: that places the pod; None for the cluster's own.
        node_selector: labels that its node must have, such as the GPU's type.
        affinity: as in a manifest.
        tolerations: as in a manifest.
        priority_class: decides who goes first and who is evicted.
        shm: size of /dev/shm, such as "8Gi", which is memory of the pod; None leaves the 64 MiB of a container.
        claims: what is mounted; the same claim may be mounted twice.
        pull_secrets: for the registry of the image.
        pull_policy: Always, IfNotPresent or Never; None leaves it to the cluster.
        gpus: how many of `gpu_resource`.
        gpu_resource: what a GPU is called, such as nvidia.com/mig-1g.10gb for a part of one.
        secrets: whose keys are variables of the environment, such as the credentials of a bucket.
        disk: path of an empty folder on the disk of the node, shared by the workers of the pod; None for none.
        uid, gid: user and group of the pod; 0 is root, which many clusters refuse.
        owner: when it goes, this pod goes.
        deadline: seconds that the pod may run; None for ever.
        grace: seconds between TERM and KILL.
    """

    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    scheduler: str | None = None
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: Mapping[str, object] | None = None
    tolerations: Sequence[Mapping[str, object]] = ()
    priority_class: str | None = None
    shm: str | None = None
    claims: Sequence[Claim] = ()
    pull_secrets: Sequence[str] = ()
    pull_policy: str | None = None
    gpus: int = 0
    gpu_resource: str = GPU
    secrets: Sequence[str] = ()
    disk: str | None = None
    uid: int = 1000
    gid: int = 1000
    owner: Owner | None = None
    deadline: int | None = None
    grace: int = 10

    def __post_init__(self) -> None:
        paths = Counter(claim.path for claim in self.claims)
        if self.shm:
            paths["/dev/shm"] += 1
        if self.disk:
            paths[self.disk] += 1
        twice = [path for path, times in paths.items() if times > 1]
        if twice:
            raise SiteError(f"two volumes are to be mounted at {twice[0]}; give each a path of its own")


def worker_pod(
    name: str, image: str, command: str, shape: Shape, resources: Mapping[str, Mapping[str, str]], account: str | None
) -> client.V1Pod:
    """Return the pod of a block of workers, which runs `command` in a shell.

    Args:
        resources: "limits" and "requests", less its GPUs.
        account: that the pod runs as; None for the namespace's default.
    """
    gpus = {shape.gpu_resource: str(shape.gpus)} if shape.gpus else {}
    container = container_of(
        "worker", image, shape, {SERVICE_VARIABLE: SERVICE},
        command=["/bin/bash"],
        args=["-c", ENDING_AT_ONCE.format(command=command.strip())],
        image_pull_policy=shape.pull_policy,
        resources={kind: {**amounts, **gpus} for kind, amounts in resources.items()},
    )  # fmt: skip
    owner = shape.owner and client.V1OwnerReference(
        api_version="v1", kind="Pod", name=shape.owner.name, uid=shape.owner.uid
    )
    # What the pod bears of its node: no lost one for long, unless the user says otherwise.
    own = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_SECONDS}
        for key in LOST_NODE
        if all(entry.get("key") != key for entry in shape.tolerations)
    ]
    spec = spec_of(
        container, shape,
        hostname=host_name(name), subdomain=SERVICE, service_account_name=account,
        node_selector=dict(shape.node_selector) or None,
        affinity=dict(shape.affinity) if shape.affinity else None,
        priority_class_name=shape.priority_class,
        tolerations=[*shape.tolerations, *own],
        active_deadline_seconds=shape.deadline,
        termination_grace_period_seconds=shape.grace,
        automount_service_account_token=False,  # workers have no business with the cluster
    )  # fmt: skip
    metadata = client.V1ObjectMeta(
        name=name,
        labels={**shape.labels, **WORKERS},
        annotations=dict(shape.annotations) or None,
        owner_references=[owner] if owner else None,
    )
    return client.V1Pod(metadata=metadata, spec=spec)


def spec_of(container: client.V1Container, shape: Shape, **more: Any) -> client.V1PodSpec:  # Any: fields of the model
    """Return the specification of a pod with one container: its user, volumes and secrets, and `more`."""
    return client.V1PodSpec(
        containers=[container],
        restart_policy="Never",  # restarted in place, a broken pod would look as if it ran
        security_context=client.V1PodSecurityContext(
            run_as_non_root=shape.uid != 0,
            run_as_user=shape.uid,
            run_as_group=shape.gid,
            fs_group=shape.gid,
            # Always would open the run's certificates to the group, which Parsl then refuses to read.
            fs_group_change_policy="OnRootMismatch",
            seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault"),
        ),
        image_pull_secrets=[client.V1LocalObjectReference(name=name) for name in shape.pull_secrets] or None,
        volumes=_volumes(shape) or None,
        scheduler_name=shape.scheduler,
        enable_service_links=False,  # a Service called volpipe-k8s would else be taken for settings
        **more,
    )


def container_of(
    name: str,
    image: str,
    shape: Shape,
    env: Mapping[str, str],
    fields: Mapping[str, str] | None = None,
    **more: Any,  # Any: fields of the model
) -> client.V1Container:
    """Return the container of a pod, which may do what any process may, and no more.

    Args:
        env: variables, beside those of `shape`.
        fields: variables that have a field of the pod, by its path.
        more: of the model.
    """
    downward = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in (fields or {}).items()]
    variables = {"LOGNAME": USER, **env, **shape.env}
    return client.V1Container(
        name=name,
        image=image,
        env=[*downward, *({"name": name, "value": value} for name, value in variables.items())],
        env_from=[client.V1EnvFromSource(secret_ref=client.V1SecretEnvSource(name=name)) for name in shape.secrets]
        or None,
        volume_mounts=_mounts(shape) or None,
        security_context=client.V1SecurityContext(
            allow_privilege_escalation=False, capabilities=client.V1Capabilities(drop=["ALL"])
        ),
        **more,
    )


def host_name(pod: str) -> str:
    """Return the name of a pod as one label of the DNS; of a long name its end, which tells pods apart."""
    return pod.replace(".", "-")[-LONGEST_LABEL:].strip("-")


def _volumes(shape: Shape) -> list[client.V1Volume]:
    """Return a volume for each claim, however often it is mounted, and one for /dev/shm."""
    names = list(dict.fromkeys(claim.name for claim in shape.claims))
    entries = []
    for number, name in enumerate(names):
        read_only = all(claim.read_only for claim in shape.claims if claim.name == name)
        source = client.V1PersistentVolumeClaimVolumeSource(claim_name=name, read_only=read_only)
        entries.append(client.V1Volume(name=f"claim-{number}", persistent_volume_claim=source))
    if shape.shm:
        memory = client.V1EmptyDirVolumeSource(medium="Memory", size_limit=shape.shm)
        entries.append(client.V1Volume(name="shm", empty_dir=memory))
    if shape.disk:
        # Without a size: what workers keep there heeds what is free, and a pod beyond its limit would be evicted.
        entries.append(client.V1Volume(name="disk", empty_dir=client.V1EmptyDirVolumeSource()))
    return entries


def _mounts(shape: Shape) -> list[client.V1VolumeMount]:
    """Return where the volumes are mounted."""
    names = list(dict.fromkeys(claim.name for claim in shape.claims))
    entries = [
        client.V1VolumeMount(
            name=f"claim-{names.index(claim.name)}",
            mount_path=claim.path,
            read_only=claim.read_only,
            sub_path=claim.sub_path,
        )
        for claim in shape.claims
    ]
    if shape.shm:
        entries.append(client.V1VolumeMount(name="shm", mount_path="/dev/shm"))
    if shape.disk:
        entries.append(client.V1VolumeMount(name="disk", mount_path=shape.disk))
    return entries
