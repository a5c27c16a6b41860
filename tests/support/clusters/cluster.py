"""A double of Kubernetes on loopback: the pods API over HTTP, and pods that run as processes of this machine.

Not here: what runs them (kubelet), or what is wrong with a manifest (manifests). It covers what volpipe asks for: pods
are created, listed, read and deleted. It mounts nothing, so that claims must lie at paths that exist here; it knows no
users, no networks, no watches, and one node. What a pod owned goes when it is gone; `run_job` does what a job says.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

import psutil
from kubelet import Node, Pod
from manifests import Json, faults

from volpipe.apps.htex.processes import WORKER, WORKERS

PATH = re.compile(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+))?")
VERBS = {("POST", False): "create", ("GET", False): "list", ("GET", True): "get", ("DELETE", True): "delete"}
REASONS = {403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 422: "Invalid", 429: "TooManyRequests"}


class Refused(Exception):
    """A request that is answered with a status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


@dataclass
class Cluster:
    """Pods by name, in the namespaces there are, on one node.

    Attributes:
        folder: for logs of pods and a kubeconfig.
        namespaces: that there are.
        verbs: what the user of the kubeconfig may do with pods.
        node: where pods run, and what it has.
        requests: (verb, namespace, name) of all, in the order in which they came.
        asked: manifests of pods by name, as they came.
        broken: statuses with which the next requests are answered.
        quota: how many pods may be there at a time that have not ended.
        most_gib: of memory that a limit range lets a container have.
        denial: what an admission webhook says to every pod that is created, if it takes none.
        is_silent: whether requests get no answer.
        gone: manifests of pods that were deleted, as they were last.
    """

    folder: Path
    namespaces: set[str] = field(default_factory=lambda: {"lab"})
    verbs: set[str] = field(default_factory=lambda: {"create", "list", "delete"})
    node: Node = field(default_factory=Node)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    asked: dict[str, Json] = field(default_factory=dict)
    broken: list[int] = field(default_factory=list)
    quota: int | None = None
    most_gib: int | None = None
    denial: str | None = None
    is_silent: bool = False
    gone: dict[str, Json] = field(default_factory=dict)
    pods: dict[tuple[str, str], Pod] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    url: str = ""

    @property
    def kubeconfig(self) -> Path:
        return self.folder / "kubeconfig"

    def names(self, phase: str | None = None) -> list[str]:
        """Return the pods' names, of those in `phase` alone if it is given, in the order of their creation."""
        with self.lock:
            return [name for (_, name), pod in self.pods.items() if phase in (None, pod.status["phase"])]

    def selected(self, selector: str) -> list[str]:
        """Return the names of the pods whose labels are those of a selector."""
        with self.lock:
            return [name for (_, name), pod in self.pods.items() if selects(selector, pod.labels)]

    def pod(self, name: str) -> Pod:
        with self.lock:
            return next(pod for (_, known), pod in self.pods.items() if known == name)

    def fail_next(self, status: int, times: int = 1) -> None:
        """Answer the next requests with an error."""
        self.broken += [status] * times

    def is_quiet(self, name: str) -> bool:
        """Return whether nothing runs in a pod any more."""
        return not self.pod(name).processes()

    def stray(self) -> list[psutil.Process]:
        """Return what runs in any pod."""
        with self.lock:
            return [process for pod in self.pods.values() for process in pod.processes()]

    def evict(self, name: str) -> None:
        """Delete a pod by the API of evictions, as `kubectl drain` does."""
        self._disrupt(name, "EvictionByEvictionAPI", "Eviction API: evicting")

    def preempt(self, name: str) -> None:
        """Let a pod make room for one of a higher priority."""
        message = "default-scheduler: preempting to accommodate a higher priority pod"
        self._disrupt(name, "PreemptionByScheduler", message)

    def _disrupt(self, name: str, reason: str, message: str) -> None:
        with self.lock:
            self.node.disrupt(self.pod(name), reason, message)
            self.delete_pod(name)

    def starve(self, name: str) -> None:
        """Let the pod's node run out of memory, so that its kubelet evicts the pod."""
        self._harm(self.node.evict, name)

    def exhaust(self, name: str) -> None:
        """Let the pod take more memory than it may."""
        self._harm(self.node.exhaust, name)

    def expire(self, name: str) -> None:
        """Let the pod reach its deadline."""
        self._harm(self.node.expire, name)

    def lose_node(self, name: str) -> None:
        """Let the node be gone that the pod runs on."""
        self._harm(self.node.lose, name)

    def _harm(self, do: Callable[[Pod], None], name: str) -> None:
        with self.lock:
            do(self.pod(name))

    def check(self, harm: str) -> None:
        """Skip a test that would do what cannot be done here; to a double everything can."""

    def tells(self, harm: str, name: str) -> bool:
        """Return whether the log of a run says what was done to a pod."""
        return True

    def kill_manager(self, name: str) -> None:
        """Kill the process that looks after the pod's workers, which the container's shell waits for."""
        min(self.pod(name).processes(WORKERS), key=psutil.Process.create_time).kill()

    def kill_worker(self, name: str) -> None:
        """Kill the worker of the pod that has worked most."""
        max(self.pod(name).processes(WORKER), key=lambda process: sum(process.cpu_times()[:2])).kill()

    def delete_pod(self, name: str, grace: int | None = None) -> None:
        """Delete a pod as a user would, by `kubectl delete pod`."""
        self.delete("lab", name, {"gracePeriodSeconds": grace})

    @property
    def environment(self) -> dict[str, str]:
        """What tells a driver and its site of this cluster."""
        return {"KUBECONFIG": str(self.kubeconfig), "VOLPIPE_K8S_NAMESPACE": "lab", "VOLPIPE_K8S_ADDRESS": "127.0.0.1"}

    def answer(self, verb: str, namespace: str, name: str, query: Mapping[str, str], body: Json | None) -> Json:
        """Return the answer to a request.

        Raises:
            Refused: with the status to answer with.
        """
        self.requests.append((verb, namespace, name))
        if self.broken:
            raise Refused(self.broken.pop(0), "the double was told to fail")
        if verb not in self.verbs:
            raise Refused(403, f'pods is forbidden: User "double" cannot {verb} resource "pods" in "{namespace}"')
        if namespace not in self.namespaces and verb == "create":
            raise Refused(404, f'namespaces "{namespace}" not found')
        with self.lock:
            if verb == "create":
                return self.create(namespace, body or {})
            if verb == "list":
                chosen = [pod for (where, _), pod in self.pods.items() if where == namespace]
                found = [pod.manifest for pod in chosen if selects(query.get("labelSelector", ""), pod.labels)]
                return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": copy.deepcopy(found)}
            if verb == "get":
                return copy.deepcopy(self._find(namespace, name).manifest)
            return self.delete(namespace, name, {**query, **(body or {})})

    def create(self, namespace: str, body: Json) -> Json:
        """Keep a pod that nothing runs yet."""
        if wrong := faults(body):
            raise Refused(422, f"Pod is invalid: {'; '.join(wrong)}")
        name = body["metadata"]["name"]
        if (namespace, name) in self.pods:
            raise Refused(409, f'pods "{name}" already exists')
        self._admit(name, body)
        self.asked[name] = copy.deepcopy(body)
        body["metadata"] |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": stamp()}
        body["spec"].setdefault("restartPolicy", "Always")
        body["spec"].setdefault("terminationGracePeriodSeconds", 30)
        body |= {"kind": "Pod", "apiVersion": "v1", "status": {"phase": "Pending", "conditions": []}}
        self.pods[namespace, name] = Pod(body, self.folder / f"{name}.log")
        return copy.deepcopy(body)

    def _admit(self, name: str, body: Json) -> None:
        used = sum(not pod.ended for pod in self.pods.values())
        if self.quota is not None and used >= self.quota:
            counts = f"requested: pods=1, used: pods={used}, limited: pods={self.quota}"
            raise Refused(403, f'pods "{name}" is forbidden: exceeded quota: few, {counts}')
        for container in body["spec"]["containers"] if self.most_gib is not None else ():
            memory = container["resources"]["limits"]["memory"]
            if int(memory.removesuffix("Gi")) > self.most_gib:
                said = f"maximum memory usage per Container is {self.most_gib}Gi, but limit is {memory}"
                raise Refused(403, f'pods "{name}" is forbidden: {said}')  # as its LimitRanger says it
        if self.denial is not None:
            raise Refused(400, f'admission webhook "policy.lab" denied the request: {self.denial}')

    def delete(self, namespace: str, name: str, options: Mapping[str, Any]) -> Json:  # Any: JSON
        """Let a pod end; one without grace is gone at once, whatever its node says."""
        with self.lock:
            pod = self._find(namespace, name)
            chosen = options.get("gracePeriodSeconds")
            grace = int(pod.spec["terminationGracePeriodSeconds"] if chosen is None else chosen)
            if "deletionTimestamp" not in pod.metadata or grace == 0:
                pod.metadata["deletionTimestamp"] = stamp(grace)
                pod.metadata["deletionGracePeriodSeconds"] = grace
                self.node.terminate(pod, grace)
            if grace == 0:
                del self.pods[namespace, name]
            return copy.deepcopy(pod.manifest)

    def _find(self, namespace: str, name: str) -> Pod:
        if (namespace, name) not in self.pods:
            raise Refused(404, f'pods "{name}" not found')
        return self.pods[namespace, name]

    def look_after(self, stopped: threading.Event) -> None:
        """Be scheduler and kubelet, until `stopped`."""
        while not stopped.wait(0.05):
            with self.lock:
                for key, pod in list(self.pods.items()):
                    if self.node.advance(pod, [other for other in self.pods.values() if other is not pod]):
                        self.gone[key[1]] = pod.manifest
                        del self.pods[key]
                self._collect_garbage()

    def _collect_garbage(self) -> None:
        """Delete the pods whose owners are gone."""
        known = {pod.metadata["uid"] for pod in self.pods.values()}
        for (_, name), pod in list(self.pods.items()):
            owners = [owner["uid"] for owner in pod.metadata.get("ownerReferences") or []]
            if owners and not known.intersection(owners) and "deletionTimestamp" not in pod.metadata:
                self.delete_pod(name)

    def ending(self, name: str) -> Json | None:
        """Return a pod that has ended as it is, or as it was last; None for one that has not."""
        with self.lock:
            if name in self.gone:
                return self.gone[name]
            pod = self.pod(name)
            return pod.manifest if pod.ended and "deletionTimestamp" not in pod.metadata else None


def run_job(
    cluster: Cluster, job: Json, seconds: float = 240, on_pod: Callable[[str], None] = lambda name: None
) -> str:
    """Do what the controller of jobs does with `job`; return "Complete" or "Failed", the job's condition at its end.

    Args:
        cluster: where its pods run, one after the other.
        job: its manifest.
        seconds: that it may take.
        on_pod: told of each pod before it is created.
    """
    num_failed, until = 0, time.monotonic() + seconds
    for number in range(100):
        pod, name = copy.deepcopy(job["spec"]["template"]), f"{job['metadata']['name']}-{number:05}"
        pod["metadata"]["name"] = name
        on_pod(name)
        cluster.create("lab", pod)
        while (ending := cluster.ending(name)) is None:
            assert time.monotonic() < until, f"pod {name} of the job has not ended after {seconds} s"
            time.sleep(0.05)
        if ending["status"]["phase"] == "Succeeded":
            return "Complete"
        action = next((rule["action"] for rule in rules_of(job) if applies(rule, ending["status"])), "Count")
        num_failed += action == "Count"
        if action == "FailJob" or num_failed > job["spec"]["backoffLimit"]:
            return "Failed"
    raise AssertionError("the job was tried a hundred times")


def rules_of(job: Json) -> list[Json]:
    return (job["spec"].get("podFailurePolicy") or {}).get("rules") or []


def applies(rule: Json, status: Json) -> bool:
    """Return whether a rule of a job's pod failure policy is about a pod that ended so."""
    conditions = {(entry["type"], entry["status"]) for entry in status.get("conditions") or []}
    if any((entry["type"], entry["status"]) in conditions for entry in rule.get("onPodConditions") or []):
        return True
    wanted = rule.get("onExitCodes") or {}
    codes = {
        container["state"]["terminated"]["exitCode"]
        for container in status.get("containerStatuses") or []
        if wanted.get("containerName") in (None, container["name"]) and "terminated" in container["state"]
    } - {0}
    values = set(wanted.get("values") or [])
    return bool(wanted) and bool(codes & values if wanted["operator"] == "In" else codes - values)


def selects(selector: str, labels: Mapping[str, str]) -> bool:
    """Return whether `labels` have all of a selector such as "a=b,c": b for a, and anything for c."""
    wanted = [part.partition("=") for part in selector.split(",") if part]
    return all(labels.get(key) == value if equals else key in labels for key, equals, value in wanted)


def stamp(seconds: float = 0.0) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: Cluster

    def do_GET(self) -> None:
        if self.cluster.is_silent:
            self.close_connection = True
            return
        url = urlsplit(self.path)
        found = PATH.fullmatch(url.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if found is None:
                raise Refused(404, f"the double has no {url.path}")
            verb = VERBS[self.command, bool(found[2])]
            query = dict(parse_qsl(url.query))
            self._send(200, self.cluster.answer(verb, found[1], found[2] or "", query, json.loads(body or "null")))
        except Refused as error:
            reason = REASONS.get(error.code, "InternalError")
            failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "metadata": {}, "code": error.code}
            self._send(error.code, failure | {"reason": reason, "message": error.message})

    do_POST = do_DELETE = do_GET

    def _send(self, code: int, answer: Json) -> None:
        content = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True


@contextmanager
def running(folder: Path, **choices: Any) -> Iterator[Cluster]:  # Any: fields of Node
    """Give a cluster until the end, when all that it runs is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(folder, node=Node(folder=folder, **choices))
    server = Server(("127.0.0.1", 0), type("ClusterHandler", (Handler,), {"cluster": cluster}))
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    write_kubeconfig(cluster)
    stopped = threading.Event()
    threads = [
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True),
        threading.Thread(target=cluster.look_after, args=(stopped,), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield cluster
    finally:
        stopped.set()
        server.shutdown()
        server.server_close()
        for thread in threads:
            thread.join(5)
        for pod in cluster.pods.values():
            cluster.node.kill(pod)


def write_kubeconfig(cluster: Cluster) -> None:
    """Write what KUBECONFIG names: a context that works, and one that leads nowhere."""
    nowhere = {"server": "http://127.0.0.1:9"}
    user = {"cluster": "double", "user": "double"}
    cluster.kubeconfig.write_text(
        json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "double",
                "clusters": [
                    {"name": "double", "cluster": {"server": cluster.url}},
                    {"name": "nowhere", "cluster": nowhere},
                ],
                "users": [{"name": "double", "user": {"token": "none"}}],
                "contexts": [
                    {"name": "double", "context": user},
                    {"name": "nowhere", "context": user | {"cluster": "nowhere"}},
                ],
            }
        )
    )


class HasPods(Protocol):
    def names(self, phase: str | None = None) -> list[str]: ...


def wait_for_pods(cluster: HasPods, phase: str, number: int, seconds: float = 30.0) -> list[str]:
    """Return the names of pods in `phase`, once there are so many."""
    until = time.monotonic() + seconds
    while len(found := cluster.names(phase)) < number:
        assert time.monotonic() < until, f"{len(found)} pods {phase}, not {number}, after {seconds} s"
        time.sleep(0.02)
    return found
