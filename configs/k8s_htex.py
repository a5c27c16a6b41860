"""Kubernetes: pods of CPU workers and of GPU workers, as k8s_htex.toml or VOLPIPE_K8S_* say (copy to change more)."""

from __future__ import annotations

from dataclasses import dataclass, field

from parsl.config import Config

from volpipe.apps import (
    Patience,
    PodProvider,
    ResilientExecutor,
    affinity_to,
    check_folder,
    check_gpus,
    driver_address,
    driver_pod,
    node_disk,
    num_bytes,
    pod_user,
    read_claims,
    read_settings,
    run_mark,
)


@dataclass(frozen=True)
class Settings:
    image: str  # of the workers: the same Python, Parsl and volpipe as the driver's
    namespace: str  # where pods are made
    claims: list[
        str
    ]  # what is mounted: CLAIM:/path, CLAIM/folder:/path, CLAIM:/path:ro; the driver's paths are the same
    address: str | None = None  # where pods reach a driver that is not in the cluster
    cores: int = 8  # of each pod
    memory: str = "16Gi"  # of each pod
    gpus: int = 1  # of each GPU pod; 0 for a cluster without
    gpu_resource: str = "nvidia.com/gpu"  # or such as "nvidia.com/mig-1g.10gb", a part of a GPU
    gpu_nodes: dict[str, str] = field(
        default_factory=dict
    )  # labels of nodes for GPU pods: {"nvidia.com/gpu.product" = "NVIDIA-A100-SXM4-80GB|NVIDIA-H100-80GB-HBM3"}
    node_selector: dict[str, str] = field(default_factory=dict)  # labels of nodes for all pods
    labels: dict[str, str] = field(default_factory=dict)  # of pods: {"kueue.x-k8s.io/queue-name" = "lab"}
    annotations: dict[str, str] = field(default_factory=dict)  # of pods: {"scheduling.volcano.sh/queue-name" = "lab"}
    scheduler: str | None = None  # such as "volcano"
    priority_class: str | None = None  # such as one for nodes that may be taken away
    secrets: list[str] = field(default_factory=list)  # whose keys are variables, such as AWS_ACCESS_KEY_ID
    max_pods: int = 4  # of each kind
    hours: float = 24.0  # that a pod may run; another takes its place
    longest_task: float = 1440.0  # seconds; a pod takes no more tasks when it has less time left
    pending_minutes: float = 30.0  # that a pod may wait for a node
    uid: int | None = None  # of the workers; without, the driver's own, which must not be root
    pull_secrets: list[str] = field(default_factory=list)  # for the image
    node_directory: str | None = (
        None  # in a pod, such as "/cache", on its node's disk; keeps chunks of a slow input on the node's own disk
    )
    encrypted: bool = True  # traffic between driver and workers
    kubeconfig: str | None = None  # without, KUBECONFIG, ~/.kube/config, or the service account of the driver's pod
    context: str | None = None  # of the kubeconfig

    def __post_init__(self) -> None:
        read_claims(self.claims)
        num_bytes(self.memory)


def executor(label: str, settings: Settings, run_dir: str) -> ResilientExecutor:
    gpus = settings.gpus if label == "gpu" else 0
    workers = gpus or settings.cores  # one per GPU, or one per core
    threads = max(1, settings.cores // workers)
    claims = read_claims(settings.claims)
    check_folder(run_dir, claims)  # pods read plan and certificates there
    uid, gid = pod_user(settings.uid)
    check_gpus(settings.gpu_resource, settings.gpus)
    return ResilientExecutor(
        label=label,
        address=driver_address(settings.address),
        max_workers_per_node=workers,
        available_accelerators=gpus,
        encrypted=settings.encrypted,
        longest_task=settings.longest_task,
        node_directory=settings.node_directory,
        worker_logdir_root="/tmp/volpipe",  # a pod's user may write there
        provider=PodProvider(
            image=settings.image,
            namespace=settings.namespace,
            kubeconfig=settings.kubeconfig,
            context=settings.context,
            run=run_mark(run_dir, label),  # finds the pods that a killed driver left
            owner=driver_pod(),  # when the driver's pod is deleted, so are its workers
            init_blocks=1,  # pods at the start
            min_blocks=0,
            max_blocks=settings.max_pods,
            init_cpu=settings.cores,  # requests, and limits: a pod that asks for less than it uses is evicted first
            max_cpu=settings.cores,
            init_mem=settings.memory,
            max_mem=settings.memory,
            gpus=gpus,
            gpu_resource=settings.gpu_resource,
            affinity=affinity_to(settings.gpu_nodes) if gpus else None,
            node_selector=settings.node_selector,
            labels=settings.labels,
            annotations=settings.annotations,
            scheduler=settings.scheduler,
            priority_class=settings.priority_class,
            secrets=settings.secrets,
            disk=node_disk(settings.node_directory, claims),
            claims=claims,
            shm="1Gi",  # /dev/shm, of the pod's memory; a container's own has 64 MiB
            env={"HOME": "/tmp"},
            pull_secrets=settings.pull_secrets,
            uid=uid,
            gid=gid,
            deadline=int(3600 * settings.hours),
            patience=Patience(pending=60 * settings.pending_minutes),
            worker_init=f"export OMP_NUM_THREADS={threads} VOLPIPE_THREADS={threads}",
        ),
    )


def config(run_dir: str) -> Config:
    settings = read_settings(Settings, __file__, "VOLPIPE_K8S")
    labels = ["cpu", "gpu"] if settings.gpus else ["cpu"]
    return Config(
        executors=[executor(label, settings, run_dir) for label in labels],
        run_dir=run_dir,
        strategy="simple",  # htex_auto_scale kills pods that have not connected yet
        initialize_logging=False,
        usage_tracking=0,
    )
