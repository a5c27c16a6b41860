"""Pods of workers: Parsl's Kubernetes provider, with all that a pod may need, a status that is true, and no pod left.

Not here: what a pod asks for (pod_spec), what its status means (pod_status), or sites (configs).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config import ConfigException
from parsl.jobs.states import JobState, JobStatus
from parsl.providers import KubernetesProvider
from parsl.providers.kubernetes import kube
from urllib3.exceptions import HTTPError

from volpipe.apps.kubernetes.pod_spec import RUN_LABEL, Claim, Shape, host_name, worker_pod
from volpipe.apps.kubernetes.pod_status import PATIENCE, Patience, is_on_lost_node, judge, obstacle, wait_reason
from volpipe.errors import NOTICE, SettingsError, SiteError

log = logging.getLogger(__name__)

TIMEOUT = (5.0, 30.0)  # seconds to connect to the API server, and to wait for its answer; without, for ever
ENDING_TIMEOUT = (3.0, 5.0)  # the same where pods are deleted: the user waits for it
DEAF_SECONDS = 15.0  # for which an API server that did not answer when a pod was deleted is not asked to delete others
AGAIN = 1  # times that a request without an answer is repeated
OVERDUE = timedelta(seconds=5)  # after the end of its grace period, only a lost node leaves a pod
NOT_FOUND, TOO_MANY, BROKEN = 404, 429, 500
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
UNITS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


class PodProvider(KubernetesProvider):
    """A KubernetesProvider whose pods are what `Shape` says, and are all gone when the driver is.

    Every field of `Shape` is an argument, and so is every argument of Parsl's provider: its `persistent_volumes` are
    mounted beside `claims`, its `secret` is used beside `pull_secrets`, `user_id` and `group_id` are `uid` and `gid`.

    Args:
        run: marks the pods; those of an earlier driver of the same run, which was killed, are deleted at the start.
        kubeconfig: file that says where the cluster is; without, KUBECONFIG, ~/.kube/config, or the pod around us.
        context: of that file, instead of its current one.
        poll_seconds: how often the pods are looked at, in one request for all.
        patience: how long a pod may wait before it is given up.

    Raises:
        SiteError: there is no cluster, or a pod cannot be as it should.
    """

    def __init__(
        self,
        *,
        run: str | None = None,
        kubeconfig: str | None = None,
        context: str | None = None,
        poll_seconds: int = 10,
        patience: Patience = PATIENCE,
        **arguments: Any,  # Any: fields of Shape, and arguments of Parsl's provider, which checks them
    ) -> None:
        self.run = run or uuid.uuid4().hex[:12]
        self.kubeconfig, self.context = kubeconfig, context
        self.poll_seconds, self.patience = poll_seconds, patience
        names = {field.name for field in dataclasses.fields(Shape)}
        own = {name: arguments.pop(name) for name in names & arguments.keys()}
        mounted = [Claim(name, path) for name, path in arguments.get("persistent_volumes", [])]
        own["claims"] = [*mounted, *own.get("claims", ())]
        own["labels"] = {**own.get("labels", {}), RUN_LABEL: self.run}
        for parsls, ours in (("user_id", "uid"), ("group_id", "gid")):
            if arguments.get(parsls) is not None:
                own.setdefault(ours, int(arguments[parsls]))
        if (secret := arguments.get("secret")) is not None:
            own["pull_secrets"] = [secret, *own.get("pull_secrets", ())]
        self.shape = Shape(**own)
        with _without_configuration():
            super().__init__(**arguments)
        self.kube_client = client.CoreV1Api(connect(kubeconfig, context))
        self.mem_per_node = num_bytes(self.max_mem) / 1e9  # GB, by which the plan knows what a worker may take
        self._started, self._deaf_until = False, 0.0
        self._complaint = ""  # the last words of the API about pods that cannot be listed or deleted
        self.is_busy = False  # whether the last refusal may pass by itself
        self._lock = threading.Lock()

    @property
    def status_polling_interval(self) -> int:
        return self.poll_seconds

    @property
    def walltime(self) -> str | None:
        """How long a pod may run, HH:MM:SS, None for ever."""
        if self.shape.deadline is None:
            return None
        minutes, seconds = divmod(self.shape.deadline, 60)
        return f"{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"

    def submit(self, cmd_string: str, tasks_per_node: int, job_name: str = "volpipe") -> str:
        """Create a pod that runs `cmd_string`, and return its job's name.

        Raises:
            SiteError: Kubernetes does not take it; the message is Kubernetes' own.
        """
        with self._lock:
            if not self._started:
                self._started = True
                atexit.register(self.close)
                self.delete_pods()
        try:
            job = str(super().submit(cmd_string, tasks_per_node, job_name))
        except (ApiException, HTTPError) as error:
            code = error.status if isinstance(error, ApiException) else None
            self.is_busy = code is None or code == TOO_MANY or code >= BROKEN
            raise SiteError(
                f"Kubernetes does not take a pod in namespace {self.namespace}: {api_message(error)}"
            ) from error
        self.resources[job] |= {"status": JobStatus(JobState.PENDING), "since": time.monotonic(), "stuck": None}
        return job

    def _create_pod(  # type: ignore[override]  # by name, as Parsl calls it
        self,
        image: str,
        pod_name: str,
        job_id: str,
        cmd_string: str,
        service_account_name: str | None,
        **others: object,
    ) -> None:
        """Create the pod of a job; less what Parsl's has that nobody asked for."""
        resources = {
            "limits": {"cpu": str(self.max_cpu), "memory": self.max_mem} | self.extra_limits,
            "requests": {"cpu": str(self.init_cpu), "memory": self.init_mem} | self.extra_requests,
        }
        shape = dataclasses.replace(self.shape, labels={"parsl-job-id": job_id, **self.shape.labels})
        pod = worker_pod(pod_name, image, cmd_string, shape, resources, service_account_name)
        self.kube_client.create_namespaced_pod(self.namespace, pod, _request_timeout=TIMEOUT)

    def cancel(self, job_ids: Sequence[object]) -> list[bool]:
        """Delete the pods of `job_ids` and return which are gone or going; one that is gone already is no error."""
        return [self._cancel(job) for job in job_ids]

    def delete_pods(self) -> list[str]:
        """Delete every pod of this run, whoever started it and however it ended; return the names."""
        pods = self._list_pods() or {}
        for name, pod in pods.items():
            self._delete_pod(name, force=is_overdue(pod) or is_on_lost_node(pod))
        return list(pods)

    def close(self) -> None:
        """Leave no pod behind, or say which are left; otherwise called when Python ends."""
        created = [str(entry["pod_name"]) for entry in self.resources.values() if not entry["status"].terminal]
        pods = self._list_pods(ENDING_TIMEOUT)
        self._deaf_until = 0.0  # it answers now, or what is left is told
        if pods is None:
            left = created
        else:
            left = [
                n for n, pod in pods.items() if not self._delete_pod(n, force=is_overdue(pod) or is_on_lost_node(pod))
            ]
        if left:
            log.warning(
                "pods may be left in namespace %s: Kubernetes does not answer, or does not let them be deleted (%s): "
                "%s; when it does: kubectl delete pod --namespace %s --selector %s=%s",
                self.namespace, self._complaint, ", ".join(left), self.namespace, RUN_LABEL, self.run, extra=NOTICE,
            )  # fmt: skip
        atexit.unregister(self.close)
        self._started = False

    def last_words_of(self, host: str) -> str:
        """Return why the pod ended whose host has that name, "" while it has not, or is none of these."""
        for entry in list(self.resources.values()):
            if host in (entry["pod_name"], host_name(entry["pod_name"])) and entry["status"].terminal:
                return str(entry["status"].message or "")
        return ""

    def _cancel(self, job: object) -> bool:
        deleted = self._delete_pod(self.resources[job]["pod_name"])
        if deleted and not self.resources[job]["status"].terminal:
            self.resources[job]["status"] = JobStatus(JobState.CANCELLED)
        return deleted

    def _status(self) -> None:
        """Look at all pods; where Kubernetes does not answer, what was known stays."""
        # Known before they are listed: one that is created meanwhile would seem to be gone.
        jobs = {job: entry for job, entry in list(self.resources.items()) if not entry["status"].terminal}
        pods = self._list_pods() if jobs else None
        if pods is None:
            return
        for entry in jobs.values():
            pod = pods.get(entry["pod_name"])
            status = judge(pod)
            if status.state == JobState.PENDING and pod is not None:
                status = self._lose_patience(pod, entry) or status
            if entry["status"].terminal:  # cancelled meanwhile
                continue
            entry["status"] = status
            if status.terminal and status.message:
                log.warning("pod %s: %s", entry["pod_name"], status.message)
        for name, pod in pods.items():
            if is_overdue(pod):
                self._delete_pod(name, force=True)

    def _lose_patience(self, pod: client.V1Pod, entry: dict[str, Any]) -> JobStatus | None:  # Any: Parsl's own record
        """Return a failure, and delete the pod, if it has waited for too long."""
        now, reason = time.monotonic(), obstacle(pod)
        entry["stuck"] = (entry["stuck"] or now) if reason else None
        if reason and now - entry["stuck"] >= self.patience.start:
            sentence = f"{reason} (for {now - entry['stuck']:.0f} s)"
        elif now - entry["since"] >= self.patience.pending:
            sentence = f"no pod could start within {now - entry['since']:.0f} s: {wait_reason(pod)}"
        else:
            return None
        self._delete_pod(entry["pod_name"])
        return JobStatus(JobState.FAILED, sentence)

    def _list_pods(self, timeout: tuple[float, float] = TIMEOUT) -> dict[str, client.V1Pod] | None:
        """Return the pods of this run by name, or None where Kubernetes does not answer."""
        try:
            pods = self.kube_client.list_namespaced_pod(
                self.namespace, label_selector=f"{RUN_LABEL}={self.run}", _request_timeout=timeout
            )
        except (ApiException, HTTPError) as error:
            self._complaint = api_message(error)
            log.warning("the pods of run %s cannot be listed: %s", self.run, self._complaint)
            return None
        return {pod.metadata.name: pod for pod in pods.items if pod.metadata is not None and pod.metadata.name}

    def _delete_pod(self, name: str, *, force: bool = False) -> bool:
        """Delete a pod; `force` does not wait for its node, which may be lost. Return whether it is gone or going."""
        if time.monotonic() < self._deaf_until:
            return False
        grace = 0 if force else None
        try:
            self.kube_client.delete_namespaced_pod(
                name, self.namespace, grace_period_seconds=grace, _request_timeout=ENDING_TIMEOUT
            )
        except ApiException as error:
            if error.status != NOT_FOUND:
                self._complaint = api_message(error)
                log.warning("pod %s cannot be deleted: %s", name, self._complaint)
            return bool(error.status == NOT_FOUND)
        except HTTPError as error:
            self._deaf_until, self._complaint = time.monotonic() + DEAF_SECONDS, api_message(error)
            log.warning("pod %s cannot be deleted: %s", name, self._complaint)
            return False
        return True


def connect(kubeconfig: str | None = None, context: str | None = None) -> client.ApiClient:
    """Return a client of the cluster that a kubeconfig names, or else of the one around this pod.

    Args:
        kubeconfig: file; without, KUBECONFIG (as it is now, not when the client was imported) or ~/.kube/config.
        context: of that file, instead of its current one.

    Raises:
        SiteError: none is named, or the file says something else.
    """
    file = kubeconfig or os.environ.get("KUBECONFIG") or None
    chosen = client.Configuration()
    chosen.retries = AGAIN
    try:
        config.load_kube_config(file, context, client_configuration=chosen, persist_config=False)
    except ConfigException as error:
        if kubeconfig or context:
            raise SiteError(
                f"kubeconfig {file or '~/.kube/config'}, context {context or 'current'}: {error}"
            ) from error
        try:
            config.load_incluster_config(client_configuration=chosen)
        except ConfigException as inside:
            raise SiteError(
                f"no cluster is known: {error} (kubeconfig {file or '~/.kube/config'}), and this is no pod with a "
                f"service account: {inside} Set KUBECONFIG, or run the driver in the cluster (volpipe k8s manifest)"
            ) from inside
    return client.ApiClient(chosen)


@contextlib.contextmanager
def _without_configuration() -> Iterator[None]:
    """Keep Parsl from loading the current context, which need not be the one that is meant, for the whole process."""

    names = vars(kube)
    before = names["config"]
    names["config"] = SimpleNamespace(load_kube_config=lambda: None, config_exception=before.config_exception)
    try:
        yield
    finally:
        names["config"] = before


def is_overdue(pod: client.V1Pod) -> bool:
    """Return whether a deleted pod should be gone by now: its node is lost, and Kubernetes waits for it for ever."""
    until = pod.metadata.deletion_timestamp if pod.metadata is not None else None
    return until is not None and datetime.now(UTC) > until + OVERDUE


def api_message(error: Exception) -> str:
    """Return the message of Kubernetes, in one line."""
    if not isinstance(error, ApiException):
        return " ".join(str(error).split())
    try:
        message = json.loads(error.body or "")["message"]
    except (ValueError, KeyError, TypeError):
        message = error.body or ""
    return " ".join(f"{error.status} {error.reason}: {message}".split())


def num_bytes(quantity: str, what: str = "memory") -> int:
    """Return the bytes of a quantity of `what` as Kubernetes writes it, such as 16Gi.

    Raises:
        SettingsError: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", quantity)
    if match is None or match[2] not in UNITS:
        raise SettingsError(f"{what} {quantity!r} is no quantity of Kubernetes; write 16Gi, or 500Mi")
    return int(float(match[1]) * UNITS[match[2]])
