"""What became of a pod, told from what Kubernetes says of it: a status for Parsl, with a sentence.

Not here: asking Kubernetes (provider).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from kubernetes import client
from parsl.jobs.states import JobState, JobStatus

# Reasons for which a container waits that waiting alone seldom mends.
BAD_IMAGE = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"}
BAD_START = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
# Reasons of a failed pod that are the cluster's doing, and no fault of the pod: they say nothing against the next one.
TAKEN = {"Evicted", "Preempting", "NodeLost", "NodeShutdown", "Shutdown", "Terminated", "NodeAffinity"}

SAME_MOMENT = timedelta(seconds=1)  # Kubernetes tells times in whole seconds


@dataclass(frozen=True)
class Patience:
    """How long a pod may wait, in seconds: for a node and its volumes, and for a container that cannot start."""

    pending: float = 1800.0
    start: float = 180.0


PATIENCE = Patience()


def judge(pod: client.V1Pod | None) -> JobStatus:
    """Return the status of a pod that was created; None is one that Kubernetes does not know any more."""
    if pod is None:
        return JobStatus(JobState.CANCELLED, "the pod is gone: somebody deleted it")
    status, metadata = pod.status, pod.metadata
    assert status is not None and metadata is not None
    if status.phase == "Succeeded":
        return JobStatus(JobState.COMPLETED, exit_code=0)
    if status.phase == "Failed" and not _ended_by_deletion(pod):
        return _failure(status)
    if metadata.deletion_timestamp is not None:
        return JobStatus(
            JobState.CANCELLED, f"the pod is being deleted: {disruption(status) or 'somebody asked for it'}"
        )
    if status.phase == "Pending":
        return JobStatus(JobState.PENDING, wait_reason(pod))
    return JobStatus(JobState.RUNNING)


def _ended_by_deletion(pod: client.V1Pod) -> bool:
    """Return whether a pod failed because it was being deleted: its command then ends with 143, through no fault."""
    status, metadata = pod.status, pod.metadata
    assert status is not None and metadata is not None
    if metadata.deletion_timestamp is None or status.reason:  # its end has a reason of its own
        return False
    ended = _ended(status)
    asked = metadata.deletion_timestamp - timedelta(seconds=metadata.deletion_grace_period_seconds or 0)
    return ended is None or ended.finished_at is None or ended.finished_at >= asked - SAME_MOMENT


def _failure(status: client.V1PodStatus) -> JobStatus:
    reason, message = status.reason or "", status.message or ""
    if reason == "DeadlineExceeded":
        return JobStatus(JobState.TIMEOUT, f"the pod reached its deadline: {message}")
    if reason in TAKEN or disruption(status):
        why = message or disruption(status) or "Kubernetes gives no reason"
        return JobStatus(JobState.CANCELLED, f"the cluster took the pod ({reason or 'disruption'}): {why}")
    ended = _ended(status)
    if ended is None:
        return JobStatus(JobState.FAILED, f"the pod failed: {reason or 'no reason'}: {message}".rstrip(": "))
    if ended.reason == "OOMKilled":
        sentence = f"the pod was OOM-killed, exit code {ended.exit_code}: it needs more memory, or fewer workers"
        return JobStatus(JobState.FAILED, sentence, exit_code=ended.exit_code)
    sentence = f"the pod's command ended with exit code {ended.exit_code} ({ended.reason or 'Error'})"
    return JobStatus(JobState.FAILED, f"{sentence}: {ended.message}" if ended.message else sentence, ended.exit_code)


def _ended(status: client.V1PodStatus) -> client.V1ContainerStateTerminated | None:
    states = [container.state for container in status.container_statuses or [] if container.state is not None]
    return next((state.terminated for state in states if state.terminated is not None), None)


def disruption(status: client.V1PodStatus) -> str | None:
    """Return why the cluster ends a pod, in its own words: evicted, preempted, or on a node that is lost."""
    cause = [entry for entry in status.conditions or [] if entry.type == "DisruptionTarget" and entry.status == "True"]
    return f"{cause[0].reason}: {cause[0].message}" if cause else None


def is_on_lost_node(pod: client.V1Pod) -> bool:
    """Return whether Kubernetes deletes `pod` because of its node, which will hardly answer that it has ended it."""
    return pod.status is not None and (disruption(pod.status) or "").startswith("DeletionByTaintManager")


def obstacle(pod: client.V1Pod) -> str | None:
    """Return why the container of a pending pod cannot start, None where it may merely take time."""
    status = pod.status
    for container in (status.container_statuses if status is not None else None) or []:
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None and waiting.reason in BAD_IMAGE:
            return f"image {container.image} cannot be pulled: {waiting.reason}: {waiting.message}"
        if waiting is not None and waiting.reason in BAD_START:
            return f"the container cannot start: {waiting.reason}: {waiting.message}"
    return None


def wait_reason(pod: client.V1Pod) -> str:
    """Return for what a pending pod waits, in the scheduler's own words where it has not found a node."""
    status = pod.status
    assert status is not None
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    states = [container.state for container in status.container_statuses or [] if container.state is not None]
    waiting = next((state.waiting for state in states if state.waiting is not None), None)
    return (
        f"{waiting.reason}: {waiting.message or 'no message'}" if waiting is not None else "Kubernetes gives no reason"
    )
