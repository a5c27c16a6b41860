from .executors import HoldingExecutor
from .pods import PodProvider
from .podstatus import Patience
from .settings import read_settings, read_slurm_settings
from .slurm import SlurmJobs
from .surroundings import (
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

__all__ = [
    "HoldingExecutor",
    "Patience",
    "PodProvider",
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
