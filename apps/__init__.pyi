from .htex.executor import ResilientExecutor
from .kubernetes.environment import (
    affinity_to,
    check_folder,
    check_gpus,
    driver_address,
    driver_pod,
    node_disk,
    pod_user,
    read_claims,
    run_mark,
)
from .kubernetes.pod_status import Patience
from .kubernetes.provider import PodProvider
from .settings import read_settings, read_slurm_settings
from .slurm.provider import SlurmJobs

__all__ = [
    "Patience",
    "PodProvider",
    "ResilientExecutor",
    "SlurmJobs",
    "affinity_to",
    "check_folder",
    "check_gpus",
    "driver_address",
    "driver_pod",
    "node_disk",
    "pod_user",
    "read_claims",
    "read_settings",
    "read_slurm_settings",
    "run_mark",
]
