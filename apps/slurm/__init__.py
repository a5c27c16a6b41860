"""Slurm: jobs of workers, and the job of a driver."""
