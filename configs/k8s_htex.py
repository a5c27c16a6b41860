"""Kubernetes: pods of CPU workers and pods of GPU workers, from VOLPIPE_K8S_* (copy this file to change more)."""

from __future__ import annotations

import os

from parsl.addresses import address_by_hostname
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.providers import KubernetesProvider

# The interchange ends with the driver, even when that is killed, but not by the terminal's Ctrl-C: the driver needs it
# to stop its workers.
INTERCHANGE = ["setsid", "setpriv", "--pdeathsig", "TERM", "--", "interchange.py"]


def setting(name: str, default: str) -> str:
    return os.environ.get(f"VOLPIPE_K8S_{name}", default)


def executor(label: str, cores: int, gpus: int) -> HighThroughputExecutor:
    workers = gpus or cores
    claim = setting("CLAIM", "")
    return HighThroughputExecutor(
        label=label,
        # Pods connect to the driver's own pod; set it from status.podIP.
        address=os.environ.get("POD_IP") or address_by_hostname(),
        max_workers_per_node=workers,
        available_accelerators=gpus,
        block_error_handler=False,
        heartbeat_period=15,
        heartbeat_threshold=60,
        worker_logdir_root="/tmp/volpipe",  # a pod's user may write here
        interchange_launch_cmd=INTERCHANGE,
        provider=KubernetesProvider(
            image=setting("IMAGE", "volpipe"),
            namespace=setting("NAMESPACE", "default"),
            init_blocks=1,
            min_blocks=0,
            max_blocks=int(setting("MAX_PODS", "4")),
            init_cpu=cores,
            max_cpu=cores,
            init_mem=setting("MEM", "16Gi"),
            max_mem=setting("MEM", "16Gi"),
            extra_limits={"nvidia.com/gpu": str(gpus)} if gpus else None,
            extra_requests={"nvidia.com/gpu": str(gpus)} if gpus else None,
            # The claim must be mounted at the same path in the driver's pod: paths are all that travels.
            persistent_volumes=[(claim, setting("MOUNT", "/data"))] if claim else [],
            worker_init=f"export OMP_NUM_THREADS={max(1, cores // workers)}",
        ),
    )


def config(run_dir: str) -> Config:
    cores = int(setting("CORES", "8"))
    return Config(
        executors=[executor("cpu", cores, 0), executor("gpu", cores, int(setting("GPUS", "1")))],
        run_dir=run_dir,
        strategy="simple",  # htex_auto_scale kills blocks that have not connected yet
        initialize_logging=False,
        usage_tracking=0,
    )
