"""Slurm: jobs of CPU workers and jobs of GPU workers, from VOLPIPE_SLURM_* (copy this file to change more)."""

from __future__ import annotations

import os
import shutil

from parsl.addresses import address_by_hostname
from parsl.config import Config
from parsl.executors import HighThroughputExecutor
from parsl.launchers import SimpleLauncher
from parsl.providers import SlurmProvider

# The interchange ends with the driver, even when that is killed, but not by the terminal's Ctrl-C: the driver needs it
# to stop its workers.
INTERCHANGE = ["setsid", "setpriv", "--pdeathsig", "TERM", "--", "interchange.py"]


def setting(name: str, default: str) -> str:
    return os.environ.get(f"VOLPIPE_SLURM_{name}", default)


def executor(label: str, partition: str, cores: int, gpus: int) -> HighThroughputExecutor:
    workers = gpus or cores
    return HighThroughputExecutor(
        label=label,
        # Workers connect to this address of the machine that runs the driver.
        address=setting("ADDRESS", address_by_hostname()),
        max_workers_per_node=workers,
        available_accelerators=gpus,
        block_error_handler=False,
        heartbeat_period=15,
        heartbeat_threshold=60,
        interchange_launch_cmd=INTERCHANGE,
        provider=SlurmProvider(
            partition=partition,
            account=setting("ACCOUNT", "") or None,
            qos=setting("QOS", "") or None,
            walltime=setting("WALLTIME", "04:00:00"),
            init_blocks=1,
            min_blocks=0,
            max_blocks=int(setting("MAX_JOBS", "4")),
            nodes_per_block=1,
            cores_per_node=cores,
            mem_per_node=int(setting("MEM_GB", "32")),
            gpus_per_node=gpus or None,
            exclusive=False,
            scheduler_options="#SBATCH --no-requeue",  # Parsl starts a new job itself
            worker_init=f"{setting('INIT', 'true')}\nexport OMP_NUM_THREADS={max(1, cores // workers)}",
            launcher=SimpleLauncher(),
        ),
    )


def config(run_dir: str) -> Config:
    if shutil.which("sbatch") is None:
        raise FileNotFoundError("no sbatch on the PATH; give the command on a machine that can submit Slurm jobs")
    partition, cores = setting("PARTITION", ""), int(setting("CORES", "8"))
    return Config(
        executors=[
            executor("cpu", partition, cores, 0),
            executor("gpu", setting("GPU_PARTITION", partition), cores, int(setting("GPUS", "1"))),
        ],
        run_dir=run_dir,
        strategy="simple",  # htex_auto_scale kills blocks that have not connected yet
        initialize_logging=False,
        usage_tracking=0,
    )
