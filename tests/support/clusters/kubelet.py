"""The node of the double of Kubernetes: finds out whether a pod fits, runs its command, and can go wrong in every way.

Not here: the API (cluster). A container is a process group of this machine and all that its processes start.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil
from conftest import ROOT
from manifests import Json
from warm import ADDRESS, HELD, read_at_start

MARK = "DOUBLE_OF_POD"  # in the environment of all that runs in a pod
GPU = "nvidia.com/gpu"
PULL_BACK_OFF_SECONDS = 0.5


@dataclass
class Pod:
    """A pod's manifest, with what the API does not tell of it."""

    manifest: Json
    log: Path
    process: subprocess.Popen[bytes] | None = None
    due: float = 0.0  # when its image is there, or is tried again
    began: float = 0.0
    killed_at: float = 0.0
    why: str = ""
    lost_at: float = 0.0
    ended_at: float = 0.0

    @property
    def metadata(self) -> Json:
        return self.manifest["metadata"]  # type: ignore[no-any-return]  # JSON

    @property
    def spec(self) -> Json:
        return self.manifest["spec"]  # type: ignore[no-any-return]  # JSON

    @property
    def status(self) -> Json:
        return self.manifest["status"]  # type: ignore[no-any-return]  # JSON

    @property
    def labels(self) -> Mapping[str, str]:
        return self.metadata.get("labels") or {}

    @property
    def container(self) -> Json:
        return self.spec["containers"][0]  # type: ignore[no-any-return]  # JSON

    @property
    def held(self) -> Path:
        """The file that forks of the pod hold open."""
        return self.log.with_suffix(".held")

    @property
    def ended(self) -> bool:
        return self.status["phase"] in ("Succeeded", "Failed")

    @property
    def num_gpus(self) -> int:
        return int(((self.container.get("resources") or {}).get("limits") or {}).get(GPU, 0))

    def say(self, state: str, **details: object) -> None:
        """Set the state of the container: waiting, running or terminated."""
        self.status["containerStatuses"] = [
            {
                "name": self.container["name"],
                "image": self.container["image"],
                "imageID": "",
                "ready": state == "running",
                "restartCount": 0,
                "state": {state: details},
            }
        ]

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Return what runs in the pod, by this name if one is given, whatever group it has moved to."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = process.environ().get(MARK) == self.metadata["uid"] or self._is_held_by(process)
                is_named = name in ("", process.name())
                if is_ours and is_named and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _is_held_by(self, process: psutil.Process) -> bool:
        for opened in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is closed by now
                if opened.readlink() == self.held:
                    return True
        return False


@dataclass
class Node:
    """One node, with so many GPUs and these images, claims and labels; None is anything.

    Attributes:
        env: of every container, as its image would have it.
        accounts: files with what pods of a service account are given, by its name: a kubeconfig, instead of a token.
        patience: seconds after which the pods of a lost node are deleted, instead of their toleration's.
        unseen: a folder that is empty in every container, as what no claim holds.
        linger: seconds for which a deleted pod is still there with phase Failed, once its command has ended.
    """

    folder: Path = Path()
    gpus: int = 4
    images: set[str] | None = None
    claims: set[str] = field(default_factory=set)
    labels: Mapping[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    accounts: dict[str, Path] = field(default_factory=dict)
    pull_seconds: float = 0.1
    patience: float = 3.0
    unseen: Path | None = None
    linger: float = 0.2

    def advance(self, pod: Pod, others: Sequence[Pod]) -> bool:
        """Do what is next for `pod`; return whether it is gone."""
        if pod.lost_at:
            self._give_up(pod)
        elif "deletionTimestamp" in pod.metadata:
            return self._take_leave(pod)
        elif not pod.ended:
            self._go_on(pod, others)
        return False

    def _take_leave(self, pod: Pod) -> bool:
        """End a pod that is being deleted: a kubelet first tells how its command ended, and then lets it go."""
        if pod.process is None:
            return True
        if not pod.ended:
            if pod.process.poll() is None and time.monotonic() <= pod.killed_at:
                return False
            self.kill(pod)
            self._end(pod, pod.process.returncode)
            pod.ended_at = time.monotonic()
        return time.monotonic() >= pod.ended_at + self.linger

    def _go_on(self, pod: Pod, others: Sequence[Pod]) -> None:
        if "nodeName" not in pod.spec:
            self._schedule(pod, others)
        elif pod.process is None:
            self._start(pod)
        elif pod.process.poll() is not None:
            self._end(pod, pod.process.returncode)
        elif time.monotonic() > pod.began + (pod.spec.get("activeDeadlineSeconds") or float("inf")):
            self.expire(pod)

    def _schedule(self, pod: Pod, others: Sequence[Pod]) -> None:
        if obstacle := self._obstacle(pod, others):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": obstacle}
            pod.status["conditions"] = [condition]
            return
        pod.spec["nodeName"] = "double"
        pod.status["conditions"] = [{"type": "PodScheduled", "status": "True"}]
        pod.say("waiting", reason="ContainerCreating")
        pod.due = time.monotonic() + self.pull_seconds

    def _obstacle(self, pod: Pod, others: Sequence[Pod]) -> str | None:
        claimed = [v["persistentVolumeClaim"]["claimName"] for v in pod.spec.get("volumes") or []
                   if v.get("persistentVolumeClaim")]  # fmt: skip
        missing = [name for name in claimed if name not in self.claims]
        if missing:
            return f'0/1 nodes are available: persistentvolumeclaim "{missing[0]}" not found.'
        wanted = pod.spec.get("nodeSelector") or {}
        if any(self.labels.get(key) != value for key, value in wanted.items()):
            return "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
        taken = sum(other.num_gpus for other in others if "nodeName" in other.spec and not other.ended)
        if pod.num_gpus + taken > self.gpus:
            return f"0/1 nodes are available: 1 Insufficient {GPU}."
        limits = (pod.container.get("resources") or {}).get("limits") or {}
        unknown = [name for name in limits if "/" in name and name != GPU]
        return f"0/1 nodes are available: 1 Insufficient {unknown[0]}." if unknown else None

    def _start(self, pod: Pod) -> None:
        if time.monotonic() < pod.due:
            return
        image = pod.container["image"]
        if self.images is not None and image not in self.images:
            before = pod.status["containerStatuses"][0]["state"]["waiting"]["reason"]
            reason = "ErrImagePull" if before == "ContainerCreating" else "ImagePullBackOff"
            pod.say("waiting", reason=reason, message=f'Back-off pulling image "{image}"')
            pod.due = time.monotonic() + PULL_BACK_OFF_SECONDS
            return
        pod.held.touch()
        with pod.log.open("ab") as log:
            pod.process = subprocess.Popen(
                [*self._mounts(), *(pod.container.get("command") or []), *(pod.container.get("args") or [])],
                env=self._environment(pod),
                cwd=pod.container.get("workingDir") or self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        pod.began = time.monotonic()
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        pod.status.update(phase="Running", startTime=now, podIP="127.0.0.1")
        pod.say("running", startedAt=now)

    def _mounts(self) -> list[str]:
        """Return what a command begins with to see other files than this machine has."""
        if self.unseen is None:
            return []
        hide = f'mount -t tmpfs tmpfs "{self.unseen}" && exec "$@"'
        return ["unshare", "--mount", "--propagation", "private", "sh", "-c", hide, "sh"]

    def _environment(self, pod: Pod) -> dict[str, str]:
        """Return what a container sees: of this machine's environment only what an image would have."""
        names = "PATH", "HOME", "TMPDIR", "XDG_CACHE_HOME", ADDRESS
        here = {name: os.environ[name] for name in names if name in os.environ}
        of_image = {"PYTHONPATH": str(ROOT), "HOSTNAME": pod.spec.get("hostname") or pod.metadata["name"]} | self.env
        account = self.accounts.get(pod.spec.get("serviceAccountName", ""))
        if account is not None and pod.spec.get("automountServiceAccountToken", True):
            of_image["KUBECONFIG"] = str(account)
        own = {entry["name"]: self._value(entry, pod) for entry in pod.container.get("env") or []}
        return read_at_start(os.environ) | here | of_image | own | {MARK: pod.metadata["uid"], HELD: str(pod.held)}

    def _value(self, entry: Json, pod: Pod) -> str:
        if "valueFrom" not in entry:
            return str(entry.get("value", ""))
        known = {
            "metadata.name": pod.metadata["name"],
            "metadata.namespace": pod.metadata["namespace"],
            "metadata.uid": pod.metadata["uid"],
            "status.podIP": "127.0.0.1",
        }
        return str(known[entry["valueFrom"]["fieldRef"]["fieldPath"]])

    def _end(self, pod: Pod, returncode: int) -> None:
        self.kill(pod)
        code = returncode if returncode >= 0 else 128 - returncode
        pod.status["phase"] = "Succeeded" if code == 0 else "Failed"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        pod.say("terminated", exitCode=code, reason=pod.why or ("Completed" if code == 0 else "Error"), finishedAt=now)

    def _fail(self, pod: Pod, reason: str, message: str) -> None:
        self.kill(pod)
        pod.status.update(phase="Failed", reason=reason, message=message)
        pod.status.pop("containerStatuses", None)

    def _give_up(self, pod: Pod) -> None:
        """Tell what Kubernetes tells of a pod whose node does not answer: after a while, that it is being deleted."""
        if "deletionTimestamp" not in pod.metadata and time.monotonic() > pod.lost_at + self.patience:
            until = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            pod.metadata["deletionTimestamp"] = until
            message = "Taint manager: deleting due to NoExecute taint"
            reason = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
            pod.status["conditions"] = [reason | {"message": message}]

    def terminate(self, pod: Pod, grace: int) -> None:
        """Send TERM, and see to it that KILL follows; a node that is lost hears of nothing."""
        pod.killed_at = time.monotonic() + grace
        if pod.process is not None and not pod.lost_at:
            self.send(pod, signal.SIGTERM if grace else signal.SIGKILL)
        if not grace:
            self.kill(pod)

    def send(self, pod: Pod, number: signal.Signals) -> None:
        """Send a signal to process 1 of the container."""
        assert pod.process is not None
        with contextlib.suppress(ProcessLookupError):
            pod.process.send_signal(number)

    def kill(self, pod: Pod) -> None:
        """Kill all that runs in the pod, as happens in a container when its process 1 ends."""
        if pod.process is None:
            return
        for process in pod.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        pod.process.kill()
        pod.process.wait()

    def disrupt(self, pod: Pod, reason: str, message: str) -> None:
        """Note why the cluster is about to delete a pod."""
        condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
        pod.status["conditions"] = [*(pod.status.get("conditions") or []), condition]

    def expire(self, pod: Pod) -> None:
        """End a pod as its deadline does."""
        self._fail(pod, "DeadlineExceeded", "Pod was active on the node longer than the specified deadline")

    def evict(self, pod: Pod) -> None:
        """Evict a pod, as a kubelet does that runs out of memory."""
        self._fail(pod, "Evicted", "The node was low on resource: memory.")

    def exhaust(self, pod: Pod) -> None:
        """Let the kernel kill the whole container for its memory, as under cgroup v2."""
        pod.why = "OOMKilled"
        self.kill(pod)

    def lose(self, pod: Pod) -> None:
        """Let the node with this pod be gone: its processes are, and nobody tells."""
        pod.lost_at = time.monotonic()
        self.kill(pod)
