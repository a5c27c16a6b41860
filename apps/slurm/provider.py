"""Jobs of Slurm, single or in arrays, as blocks of workers: Parsl's provider, with the truth about how a job ended.

Not here: what is asked of Slurm (configs), or the job of a driver (driver_script).
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from itertools import islice
from typing import Any

from parsl.jobs.states import JobState, JobStatus
from parsl.providers import SlurmProvider
from parsl.providers.errors import SubmitException

from volpipe.errors import SiteError

STATES = {
    JobState.PENDING: "PENDING CONFIGURING REQUEUED REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD",
    JobState.RUNNING: "RUNNING COMPLETING RESIZING SIGNALING STAGE_OUT",
    JobState.HELD: "SUSPENDED STOPPED",
    JobState.COMPLETED: "COMPLETED",
    JobState.CANCELLED: "CANCELLED",
    JobState.TIMEOUT: "TIMEOUT DEADLINE PREEMPTED",  # the end of a job's time is no failure of its
    JobState.FAILED: "FAILED NODE_FAIL BOOT_FAIL OUT_OF_MEMORY LAUNCH_FAILED REVOKED SPECIAL_EXIT",
}
STATE_OF = {word: state for state, words in STATES.items() for word in words.split()}
POLL_SECONDS = 30
# What Slurm says when it takes no job for now, whoever asks: its controller is full, restarts, or is not reached.
BUSY = (
    "temporarily unable to accept job", "Unable to contact slurm controller", "Socket timed out", "Connection refused",
    "Resource temporarily unavailable", "Zero Bytes were transmitted", "does not answer",
)  # fmt: skip
SACCT = "sacct -X --noheader --parsable2 --format=JobID,State"
SQUEUE = "squeue --noheader --array --states=all --format='%i|%T'"
LOGS = ("job_stdout_path", "job_stderr_path")
NO_ANSWER = 124  # exit code of a command that took too long, as timeout(1) has it


class SlurmJobs(SlurmProvider):
    """A provider of Slurm jobs; arguments are those of Parsl's SlurmProvider, by name, and these.

    Parsl takes every job that ended for a completed one from the second look on, and never sees the end of jobs that
    Slurm has forgotten. A job that ended keeps its state here, with Slurm's word for it in the status's message.

    Args:
        poll_seconds: how often Slurm is asked.
        has_arrays: whether jobs that are needed at the same time are one array.
    """

    def __init__(
        self,
        *,
        poll_seconds: int = POLL_SECONDS,
        has_arrays: bool = False,
        **arguments: Any,  # Any: those of Parsl's provider
    ) -> None:
        self.poll_seconds, self.has_arrays = poll_seconds, has_arrays
        self._num_elements = 0  # of the array that is being submitted
        self.is_busy = False  # whether the last refusal may pass by itself
        super().__init__(**arguments)
        self.has_accounting = self._cmd.startswith("sacct")

    @property
    def status_polling_interval(self) -> int:
        """Seconds between two looks."""
        return self.poll_seconds

    def submit(self, command: str, tasks_per_node: int, job_name: str = "volpipe") -> str:
        """Submit a job that runs `command`, and return its number.

        Raises:
            SiteError: Slurm does not take it; the message is Slurm's own.
        """
        try:
            return str(super().submit(command, tasks_per_node, job_name))
        except SubmitException as error:
            words = " ".join(filter(None, ((error.stderr or "").strip(), (error.stdout or "").strip()))) or str(error)
            self.is_busy = any(phrase in words for phrase in BUSY)
            if error.retcode == NO_ANSWER:  # it may have been taken all the same
                self.execute_wait(f"scancel --name={shlex.quote(error.job_name)}")
            raise SiteError(f"Slurm does not take a job: {' '.join(words.split())}") from error

    def submit_array(self, command: str, number: int, job_name: str) -> list[str]:
        """Submit an array of `number` jobs that each run `command`, and return their numbers, such as 17_0.

        Raises:
            SiteError: Slurm does not take it; the message is Slurm's own.
        """
        self._num_elements = number
        try:
            array = self.submit(command, 1, job_name)
        finally:
            self._num_elements = 0
        whole = self.resources[array]
        jobs = [f"{array}_{index}" for index in range(number)]
        for index, job in enumerate(jobs):
            self.resources[job] = whole | {name: f"{whole[name]}.{index}" for name in LOGS} | {"job_id": job}
        whole["status"] = JobStatus(JobState.COMPLETED)  # its elements stand for it from here on
        return jobs

    def _write_submit_script(
        self,
        template: str,
        script_filename: str,
        job_name: str,
        configs: dict[str, Any],  # Any: Parsl's values
    ) -> None:
        """Write the script of a job, or of an array of jobs that each have logs of their own."""
        if self._num_elements:
            options = f"{configs['scheduler_options']}\n#SBATCH --array=0-{self._num_elements - 1}"
            configs = configs | {name: f"{configs[name]}.%a" for name in LOGS} | {"scheduler_options": options}
        super()._write_submit_script(template, script_filename, job_name, configs)  # type: ignore[no-untyped-call]

    def execute_wait(self, cmd: str, timeout: int | None = None) -> tuple[int, str, str]:
        """Return exit code, output and complaint of a command of Slurm; one that takes too long is killed.

        Parsl leaves it running: an sbatch that tries again and again would submit a job that nobody knows of.
        """
        seconds = timeout or self.cmd_timeout
        process = subprocess.Popen(
            cmd, shell=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            output, complaint = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, complaint = process.communicate()
            return NO_ANSWER, output, f"{complaint.strip()} ({cmd.split()[0]} does not answer within {seconds} s)"
        return process.returncode, output, complaint

    def _status(self) -> None:
        """Ask Slurm for the jobs that have not ended yet."""
        alive = (str(job) for job, resource in list(self.resources.items()) if not resource["status"].terminal)
        while jobs := list(islice(alive, self.status_batch_size)):
            words = self._job_states(jobs)
            if words is None:
                return
            for job in jobs:
                if job in words:
                    self._set_status(job, STATE_OF.get(words[job], JobState.UNKNOWN), f"Slurm says {words[job]}")
                elif not self.has_accounting or is_element(job):  # it may hear of a job late, and forgets none
                    self._set_status(job, JobState.COMPLETED, "Slurm does not know the job any more")

    def _job_states(self, jobs: list[str]) -> dict[str, str] | None:
        """Return Slurm's word for the state of each of `jobs` that it knows, None where it does not answer."""
        if not self.has_accounting:
            return self._say(f"{SQUEUE} --jobs={','.join(jobs)}")
        words = self._say(f"{SACCT} --jobs={','.join(jobs)}")
        elements = [job for job in jobs if is_element(job)]
        if words is None or not elements:
            return words
        # Accounting has one record for all that wait of an array, and forgets those of them that were cancelled.
        queued = self._say(f"{SQUEUE} --jobs={','.join(elements)}")
        return None if queued is None else words | queued

    def _say(self, command: str) -> dict[str, str] | None:
        """Return the state of each job that a command of Slurm prints, None where Slurm does not answer."""
        clusters = f" --clusters={shlex.quote(self.clusters)}" if self.clusters else ""
        code, output, complaint = self.execute_wait(command + clusters)
        if code != 0 and "Invalid job id" not in complaint:
            return None
        lines = (line.strip().partition("|") for line in output.splitlines())
        return {job: state.split()[0] for job, _, state in lines if state}  # "CANCELLED by 1000" is CANCELLED

    def _set_status(self, job: str, state: JobState, message: str) -> None:
        resource = self.resources[job]
        resource["status"] = JobStatus(
            state, message, stdout_path=resource["job_stdout_path"], stderr_path=resource["job_stderr_path"]
        )


def is_element(job: str) -> bool:
    """Return whether a job's number is that of an array's element, such as 17_0."""
    return "_" in job
