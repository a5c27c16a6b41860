"""Slurm: jobs of one kind for all stages, as ~/.config/volpipe/slurm_single.toml says; for small clusters."""

from __future__ import annotations

from dataclasses import dataclass

from parsl.config import Config

from volpipe.apps import read_slurm_settings
from volpipe.configs.slurm_htex import Jobs, executor, with_executors


@dataclass(frozen=True)
class Settings(Jobs):  # all of slurm_htex.py's but gpu_partition; what there is asked of Slurm, line by line, is there
    gpus: int = 0  # of a job; each is a worker, and without one each core is


def config(run_dir: str) -> Config:
    chosen = read_slurm_settings(Settings, __file__)
    return with_executors(run_dir, [executor("slurm", chosen, chosen.partition, chosen.gpus)])
