"""Slurm: jobs of CPU workers and jobs of GPU workers, as ~/.config/volpipe/slurm_htex.toml says."""

from __future__ import annotations

from dataclasses import dataclass

from parsl.addresses import address_by_hostname
from parsl.config import Config
from parsl.launchers import SimpleLauncher

from volpipe.apps import ResilientExecutor, SlurmJobs, read_slurm_settings


@dataclass(frozen=True)
class Jobs:
    """Each is a line of the TOML file, or VOLPIPE_SLURM_PARTITION and so on in the environment."""

    partition: str  # `sinfo` lists them
    account: str | None = None  # `sacctmgr show associations user=$USER` lists them
    qos: str | None = None  # of the jobs, where the cluster has several
    constraint: str | None = None  # a feature of nodes, such as "h200"
    max_jobs: int = 4  # of each kind at a time
    array: bool = False  # whether jobs that are needed at the same time are submitted as one array
    walltime: str = "04:00:00"  # of a job, HH:MM:SS
    longest_task: int = 1440  # seconds; a job that has less left starts no task any more, and ends
    start_seconds: int = 60  # from a job's start until its workers are there
    cores: int = 8  # of a job
    mem_gb: int = 32  # of a job; 0 asks for none, on a cluster that refuses --mem
    gpus: int = 1  # of a GPU job, one worker each; 0 where the net runs on CPUs
    init: str = "true"  # shell line before workers start: "module load cuda; source ~/venv/bin/activate"
    address: str | None = None  # of the machine of this command, as compute nodes reach it
    node_directory: str | None = None  # on a node's own disk, such as "$TMPDIR"; keeps chunks of a slow input
    heartbeat: int = 15  # seconds; what does not answer four times is lost
    poll_seconds: int = 30  # how often Slurm is asked for the state of jobs


@dataclass(frozen=True)
class Settings(Jobs):
    gpu_partition: str | None = None  # where GPUs are, if elsewhere


def executor(label: str, chosen: Jobs, partition: str, gpus: int) -> ResilientExecutor:
    workers = gpus or chosen.cores
    threads = max(1, chosen.cores // workers)
    return ResilientExecutor(
        label=label,  # "cpu" and "gpu" get the stages of that kind
        address=chosen.address or address_by_hostname(),
        max_workers_per_node=workers,
        available_accelerators=gpus,  # each worker has one to itself, of those that Slurm gave to the job
        longest_task=chosen.longest_task,
        start_seconds=chosen.start_seconds,
        heartbeat_period=chosen.heartbeat,
        heartbeat_threshold=4 * chosen.heartbeat,
        node_directory=chosen.node_directory,
        provider=SlurmJobs(
            partition=partition,
            account=chosen.account,
            qos=chosen.qos,
            constraint=chosen.constraint,
            walltime=chosen.walltime,
            init_blocks=1,  # jobs at the start; more come with the tasks
            min_blocks=0,  # jobs that stay without tasks
            max_blocks=chosen.max_jobs,
            nodes_per_block=1,
            cores_per_node=chosen.cores,
            mem_per_node=chosen.mem_gb or None,
            gpus_per_node=gpus or None,
            exclusive=False,  # a node may have other jobs beside ours
            scheduler_options="#SBATCH --no-requeue",  # a lost job is replaced by a new one
            worker_init=f"{chosen.init}\nexport OMP_NUM_THREADS={threads} VOLPIPE_THREADS={threads}",
            launcher=SimpleLauncher(),
            poll_seconds=chosen.poll_seconds,
            has_arrays=chosen.array,
        ),
    )


def with_executors(run_dir: str, executors: list[ResilientExecutor]) -> Config:
    return Config(
        executors=executors,
        run_dir=run_dir,  # Parsl's files, beside the output
        strategy="htex_auto_scale",  # jobs that are idle for max_idletime are given back, also while others work
        max_idletime=120,  # seconds
        strategy_period=2,  # seconds between two looks at whether there are jobs enough
        initialize_logging=False,
        usage_tracking=0,
    )


def config(run_dir: str) -> Config:
    chosen = read_slurm_settings(Settings, __file__)
    cpu = executor("cpu", chosen, chosen.partition, 0)
    gpu = executor("gpu", chosen, chosen.gpu_partition or chosen.partition, chosen.gpus)
    return with_executors(run_dir, [cpu, gpu])
