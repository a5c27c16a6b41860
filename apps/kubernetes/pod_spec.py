"""What a worker's pod asks of Kubernetes beyond what Parsl's provider can say: arguments in, `V1Pod` out.

Not here: who creates pods and looks after them (provider), or what became of one (pod_status).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

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


def dress(pod: client.V1Pod, shape: Shape) -> client.V1Pod:
    """Return `pod`, as Parsl makes it, with all that `shape` asks for."""
    dressed = copy.deepcopy(pod)
    metadata, spec = dressed.metadata, dressed.spec
    assert metadata is not None and spec is not None  # Parsl gives both
    metadata.labels = {**(metadata.labels or {}), **shape.labels, **WORKERS}
    metadata.annotations = {**(metadata.annotations or {}), **shape.annotations} or None
    spec.hostname, spec.subdomain = host_name(metadata.name or ""), SERVICE
    if shape.owner:
        owner = client.V1OwnerReference(api_version="v1", kind="Pod", name=shape.owner.name, uid=shape.owner.uid)
        metadata.owner_references = [owner]
    _place(spec, shape)
    _bound(spec, shape)
    spec.security_context = pod_security(shape)
    spec.image_pull_secrets = [*(spec.image_pull_secrets or []), *secrets(shape)] or None
    spec.volumes = volumes(shape) or None
    _dress_container(spec.containers[0], shape)
    return dressed


def host_name(pod: str) -> str:
    """Return the name of a pod as one label of the DNS; of a long name its end, which tells pods apart."""
    return pod.replace(".", "-")[-LONGEST_LABEL:].strip("-")


def pod_security(shape: Shape) -> client.V1PodSecurityContext:
    """Return whom all of a pod runs as."""
    return client.V1PodSecurityContext(
        run_as_non_root=shape.uid != 0,
        run_as_user=shape.uid,
        run_as_group=shape.gid,
        fs_group=shape.gid,
        # Always would open the run's certificates to the group, which Parsl then refuses to read.
        fs_group_change_policy="OnRootMismatch",
        seccomp_profile=client.V1SeccompProfile(type="RuntimeDefault"),
    )


def container_security() -> client.V1SecurityContext:
    """Return what a container may do beyond what any process may: nothing."""
    return client.V1SecurityContext(allow_privilege_escalation=False, capabilities=client.V1Capabilities(drop=["ALL"]))


def secret_variables(shape: Shape) -> list[client.V1EnvFromSource]:
    """Return the environment that secrets give to driver and workers."""
    return [client.V1EnvFromSource(secret_ref=client.V1SecretEnvSource(name=name)) for name in shape.secrets]


def secrets(shape: Shape) -> list[client.V1LocalObjectReference]:
    return [client.V1LocalObjectReference(name=name) for name in shape.pull_secrets]


def _place(spec: client.V1PodSpec, shape: Shape) -> None:
    """Say where the pod may run, and before whom."""
    spec.node_selector = dict(shape.node_selector) or None
    spec.affinity = client.V1Affinity.from_dict(dict(shape.affinity)) if shape.affinity else None
    spec.priority_class_name, spec.scheduler_name = shape.priority_class, shape.scheduler
    tolerations = [client.V1Toleration.from_dict(dict(entry)) for entry in shape.tolerations]
    own = [
        client.V1Toleration(key=key, operator="Exists", effect="NoExecute", toleration_seconds=LOST_NODE_SECONDS)
        for key in LOST_NODE
        if all(entry.get("key") != key for entry in shape.tolerations)
    ]
    spec.tolerations = [entry for entry in (*tolerations, *own) if entry is not None]


def _bound(spec: client.V1PodSpec, shape: Shape) -> None:
    """Say how the pod ends."""
    spec.restart_policy = "Never"  # restarted in place, a broken pod would look as if it ran
    spec.active_deadline_seconds = shape.deadline
    spec.termination_grace_period_seconds = shape.grace
    spec.enable_service_links = False  # a Service called volpipe-k8s would else be taken for settings
    spec.automount_service_account_token = False  # workers have no business with the cluster


def volumes(shape: Shape) -> list[client.V1Volume]:
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


def mounts(shape: Shape) -> list[client.V1VolumeMount]:
    """Return where the volumes of `volumes` are mounted."""
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


def _dress_container(container: client.V1Container, shape: Shape) -> None:
    container.name = "worker"
    container.ports = None  # Parsl says 80
    container.image_pull_policy = shape.pull_policy
    env = {"LOGNAME": USER, SERVICE_VARIABLE: SERVICE, **shape.env}
    container.env = [client.V1EnvVar(name=name, value=value) for name, value in env.items()]
    container.env_from = secret_variables(shape) or None
    container.volume_mounts = mounts(shape) or None
    container.security_context = container_security()
    if shape.gpus and container.resources is not None:
        count = {shape.gpu_resource: str(shape.gpus)}
        container.resources.limits = {**(container.resources.limits or {}), **count}
        container.resources.requests = {**(container.resources.requests or {}), **count}
    command = (container.args or ["", ""])[1]
    container.args = ["-c", ENDING_AT_ONCE.format(command=command.strip())]
