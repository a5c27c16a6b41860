"""Kubernetes shared by many labs, as Nautilus: data and scratch, a GPU of one type, pods that may be evicted."""

from __future__ import annotations

from dataclasses import dataclass

from parsl.config import Config

from volpipe.apps import (
    Patience,
    PodProvider,
    ResilientExecutor,
    check_folder,
    driver_address,
    driver_pod,
    node_disk,
    pod_user,
    read_claims,
    read_settings,
    run_mark,
)


@dataclass(frozen=True)
class Settings:
    image: str  # of the workers: the same Python, Parsl and volpipe as the driver's
    namespace: str  # where pods are made
    claims: list[str]  # such as ["em-data:/data:ro", "scratch/me:/scratch"]; the driver's paths are the same
    gpu_type: str = "NVIDIA-A10"  # kubectl get nodes -L nvidia.com/gpu.product lists them
    priority_class: str | None = (
        "opportunistic"  # first to be evicted, and counted against nobody; None for the default
    )
    max_pods: int = 8  # at a time
    node_directory: str | None = (
        None  # in a pod, such as "/cache", on its node's disk; keeps chunks of a slow input on the node's own disk
    )
    uid: int | None = None  # of the workers; without, the driver's own, which must not be root
    address: str | None = None  # where pods reach a driver that is not in the cluster

    def __post_init__(self) -> None:
        read_claims(self.claims)


def config(run_dir: str) -> Config:
    settings = read_settings(Settings, __file__, "VOLPIPE_K8S")
    claims = read_claims(settings.claims)
    check_folder(run_dir, claims)  # pods read plan and certificates there
    uid, gid = pod_user(settings.uid)
    workers = ResilientExecutor(
        label="nautilus",  # the only executor: all stages run on it
        address=driver_address(settings.address),
        max_workers_per_node=1,  # one per GPU
        available_accelerators=1,
        failed_blocks=20,  # evictions are no failures, but nodes of many owners break in many ways
        longest_task=1440,  # seconds; a pod takes no more tasks when it has less time left
        node_directory=settings.node_directory,
        worker_logdir_root="/tmp/volpipe",  # a pod's user may write there
        provider=PodProvider(
            image=settings.image,
            namespace=settings.namespace,
            run=run_mark(run_dir, "nautilus"),  # finds the pods that a killed driver left
            owner=driver_pod(),  # when the driver's pod is deleted, so are its workers
            init_blocks=1,  # pods at the start
            min_blocks=0,
            max_blocks=settings.max_pods,
            init_cpu=4,  # requests are what is counted as used, so they are what a worker uses
            max_cpu=8,
            init_mem="16Gi",
            max_mem="16Gi",
            gpus=1,
            node_selector={"nvidia.com/gpu.product": settings.gpu_type},
            priority_class=None if settings.priority_class == "default" else settings.priority_class,
            disk=node_disk(settings.node_directory, claims),
            claims=claims,  # data for reading alone, scratch for the run; the same claim may be mounted twice
            shm="4Gi",  # /dev/shm, of the pod's memory
            env={"HOME": "/tmp"},
            uid=uid,
            gid=gid,
            deadline=6 * 3600,  # seconds; bare pods live no longer there
            patience=Patience(pending=4 * 3600),  # others' pods come first
            worker_init="export OMP_NUM_THREADS=4 VOLPIPE_THREADS=4",
        ),
    )
    return Config(
        executors=[workers],
        run_dir=run_dir,
        strategy="simple",  # htex_auto_scale kills pods that have not connected yet
        initialize_logging=False,
        usage_tracking=0,
    )
