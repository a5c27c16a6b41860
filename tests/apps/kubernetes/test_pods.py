"""Pods through the real provider and the real client: their status is true, and none is left, whatever happens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster import Cluster, running, wait_for_pods
from command import wait_until
from kubernetes import client
from kubernetes.config import incluster_config
from parsl.jobs.states import JobState, JobStatus

from volpipe.apps.kubernetes.pod_spec import Claim
from volpipe.apps.kubernetes.pod_status import Patience, judge
from volpipe.apps.kubernetes.provider import PodProvider, connect, num_bytes
from volpipe.errors import SiteError

IMAGE = "lab/volpipe:1"
FOR_EVER = "sleep 600"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with running(tmp_path / "cluster", images={IMAGE}) as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        yield cluster
        close_all()
        wait_until(lambda: cluster.names() == [], 10)


MADE: list[PodProvider] = []


def provider(**arguments: Any) -> PodProvider:  # Any: those of a provider
    MADE.append(PodProvider(**({"image": IMAGE, "namespace": "lab", "poll_seconds": 1, "grace": 2} | arguments)))
    return MADE[-1]


def close_all() -> None:
    while MADE:
        MADE.pop().close()


def status_of(pods: PodProvider, job: str) -> JobStatus:
    (status,) = pods.status([job])
    assert isinstance(status, JobStatus)
    return status


def wait_for(pods: PodProvider, job: str, state: JobState, seconds: float = 15) -> JobStatus:
    wait_until(lambda: status_of(pods, job).state == state, seconds)
    return status_of(pods, job)


def processes_of(cluster: Cluster, name: str) -> list[psutil.Process]:
    return cluster.pod(name).processes()


def test_a_pod_is_pending_runs_and_completes(cluster: Cluster) -> None:
    pods = provider(env={"GREETING": "hello"}, worker_init="echo $GREETING")
    job = pods.submit("sleep 0.5", 1, "parsl.cpu.block-0")
    assert status_of(pods, job).state == JobState.PENDING
    wait_for(pods, job, JobState.RUNNING)
    status = wait_for(pods, job, JobState.COMPLETED)
    assert (status.exit_code, status.message) == (0, None)
    (name,) = cluster.names("Succeeded")
    assert name.startswith("parsl.cpu.block-0.")
    assert (cluster.folder / f"{name}.log").read_text() == "hello\n"


def test_one_request_tells_of_all_pods(cluster: Cluster) -> None:
    pods = provider()
    jobs = [pods.submit(FOR_EVER, 1) for _ in range(3)]
    wait_for_pods(cluster, "Running", 3)
    before = len(cluster.requests)
    assert [status.state for status in pods.status(jobs)] == [JobState.RUNNING] * 3
    assert cluster.requests[before:] == [("list", "lab", "")]


def lose_node(cluster: Cluster, name: str) -> None:
    cluster.node.lose(cluster.pod(name))


def evict(cluster: Cluster, name: str) -> None:
    cluster.node.evict(cluster.pod(name))


def exhaust(cluster: Cluster, name: str) -> None:
    cluster.node.exhaust(cluster.pod(name))


def kill(cluster: Cluster, name: str) -> None:
    cluster.node.kill(cluster.pod(name))


def drain(cluster: Cluster, name: str) -> None:
    cluster.delete_pod(name, grace=1)


def evict_by_api(cluster: Cluster, name: str) -> None:
    cluster.evict(name)


def preempt(cluster: Cluster, name: str) -> None:
    cluster.preempt(name)


def delete(cluster: Cluster, name: str) -> None:
    cluster.delete_pod(name, grace=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("harm", "state", "sentence", "code"),
    [
        (delete, JobState.CANCELLED, "the pod is gone: somebody deleted it", None),
        (drain, JobState.CANCELLED, "the pod is being deleted: somebody asked for it", None),
        (evict_by_api, JobState.CANCELLED, "the pod is being deleted: EvictionByEvictionAPI: Eviction API: evic", None),
        (preempt, JobState.CANCELLED, "the pod is being deleted: PreemptionByScheduler: default-scheduler: pre", None),
        (evict, JobState.CANCELLED, "the cluster took the pod (Evicted): The node was low on resource: memory.", None),
        (exhaust, JobState.FAILED, "the pod was OOM-killed, exit code 137: it needs more memory", 137),
        (kill, JobState.FAILED, "the pod's command ended with exit code 137 (Error)", 137),
        (lose_node, JobState.CANCELLED, "the pod is being deleted: DeletionByTaintManager: Taint manager", None),
    ],
)
def test_what_happened_to_a_pod_is_told(
    cluster: Cluster, harm: Callable[[Cluster, str], None], state: JobState, sentence: str, code: int | None
) -> None:
    pods = provider()
    job = pods.submit(FOR_EVER, 1)
    (name,) = wait_for_pods(cluster, "Running", 1)
    cluster.node.linger = 3.0  # seconds for which a deleted pod has phase Failed, as its command ended with 143
    with cluster.lock:
        harm(cluster, name)
    if harm in (drain, evict_by_api, preempt):
        wait_for_pods(cluster, "Failed", 1)
    status = wait_for(pods, job, state)
    assert sentence in (status.message or "")
    assert status.exit_code == code
    assert pods.last_words_of(name.replace(".", "-")) == status.message
    assert pods.last_words_of("another") == ""
    assert pods.cancel([job]) == [True]
    assert status_of(pods, job).state == state  # a pod that ended was not cancelled


@pytest.mark.parametrize(
    ("ended", "state"),
    [(-5, JobState.FAILED), (0, JobState.CANCELLED), (3, JobState.CANCELLED), (None, JobState.CANCELLED)],
)
def test_a_pod_that_failed_before_somebody_deleted_it_has_failed(ended: float | None, state: JobState) -> None:
    """Seconds between the request to delete it and the end of its command; its grace is 10 s."""
    asked = datetime(2026, 1, 1, tzinfo=UTC)
    finished = None if ended is None else asked + timedelta(seconds=ended)
    terminated = client.V1ContainerStateTerminated(exit_code=143, reason="Error", finished_at=finished)
    container = client.V1ContainerStatus(
        name="worker", image="", image_id="", ready=False, restart_count=0,
        state=client.V1ContainerState(terminated=terminated),
    )  # fmt: skip
    pod = client.V1Pod(
        metadata=client.V1ObjectMeta(
            deletion_timestamp=asked + timedelta(seconds=10), deletion_grace_period_seconds=10
        ),
        status=client.V1PodStatus(phase="Failed", container_statuses=[container]),
    )
    assert judge(pod).state == state


def test_a_pod_on_a_lost_node_is_removed_though_its_node_never_agrees(cluster: Cluster) -> None:
    pods = provider()
    job, other = pods.submit(FOR_EVER, 1), pods.submit(FOR_EVER, 1)
    first, _ = wait_for_pods(cluster, "Running", 2)
    cluster.node.patience = 0.0
    with cluster.lock:
        lose_node(cluster, first)
    wait_for(pods, job, JobState.CANCELLED)
    assert first in cluster.names()
    wait_until(lambda: pods.status([other]) and first not in cluster.names(), 15)


def test_a_deadline_is_a_time_out_and_no_failure(cluster: Cluster) -> None:
    pods = provider(deadline=1)
    job = pods.submit(FOR_EVER, 1)
    status = wait_for(pods, job, JobState.TIMEOUT)
    assert (status.message or "").startswith("the pod reached its deadline: Pod was active on the node longer")
    assert provider(deadline=3723).walltime == "01:02:03"
    assert provider().walltime is None


def test_the_exit_code_of_a_command_is_told(cluster: Cluster) -> None:
    pods = provider()
    job = pods.submit("exit 3", 1)
    status = wait_for(pods, job, JobState.FAILED)
    assert (status.exit_code, status.message) == (3, "the pod's command ended with exit code 3 (Error)")


def test_an_image_that_is_not_there_is_told_and_its_pod_removed(cluster: Cluster) -> None:
    pods = provider(image="lab/nowhere:1", patience=Patience(start=1.0))
    job = pods.submit(FOR_EVER, 1)
    status = wait_for(pods, job, JobState.FAILED)
    assert "image lab/nowhere:1 cannot be pulled: " in (status.message or "")
    assert "ImagePullBackOff" in (status.message or "") or "ErrImagePull" in (status.message or "")
    wait_until(lambda: cluster.names() == [], 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"gpus": 5}, "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        ({"node_selector": {"a": "b"}},
         "Unschedulable: 0/1 nodes are available: 1 node(s) didn't match Pod's node aff"),
        ({"claims": [Claim("none", "/data")]},
         'Unschedulable: 0/1 nodes are available: persistentvolumeclaim "none" not found'),
    ],
)  # fmt: skip
def test_the_words_of_the_scheduler_are_handed_on(cluster: Cluster, arguments: dict[str, object], words: str) -> None:
    pods = provider(patience=Patience(pending=1.0), **arguments)
    job = pods.submit(FOR_EVER, 1)
    assert status_of(pods, job).state == JobState.PENDING
    status = wait_for(pods, job, JobState.FAILED)
    assert re.match(r"no pod could start within \d s: ", status.message or "")
    assert words in (status.message or "")
    wait_until(lambda: cluster.names() == [], 5)


def test_a_busy_cluster_is_waited_for(cluster: Cluster) -> None:
    pods = provider(gpus=4)
    first, second = pods.submit(FOR_EVER, 1), pods.submit(FOR_EVER, 1)
    wait_for(pods, first, JobState.RUNNING)
    assert status_of(pods, second).state == JobState.PENDING
    pods.cancel([first])
    wait_for(pods, second, JobState.RUNNING)


def test_cancelling_ends_the_pod_soon_and_what_is_gone_is_no_error(cluster: Cluster) -> None:
    pods = provider(grace=20)
    job = pods.submit(FOR_EVER, 1)
    (name,) = wait_for_pods(cluster, "Running", 1)
    processes = processes_of(cluster, name)
    assert processes
    assert pods.cancel([job]) == [True]
    wait_until(lambda: cluster.names() == [], 5)  # far less than the grace
    assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert pods.cancel([job]) == [True]
    assert status_of(pods, job).state == JobState.CANCELLED


def test_a_refusal_is_handed_on_in_the_words_of_kubernetes(cluster: Cluster) -> None:
    with pytest.raises(SiteError, match='in namespace nowhere: 404 Not Found: namespaces "nowhere" not found'):
        provider(namespace="nowhere").submit(FOR_EVER, 1)
    cluster.verbs.remove("create")
    with pytest.raises(SiteError, match=r"403 Forbidden: pods is forbidden: User .* cannot create"):
        provider().submit(FOR_EVER, 1)
    cluster.verbs.add("create")
    cluster.quota = 0
    with pytest.raises(SiteError, match=r"403 Forbidden: pods .* is forbidden: exceeded quota: few, requested: pods=1"):
        provider().submit(FOR_EVER, 1)
    cluster.quota, cluster.most_gib = None, 1
    with pytest.raises(
        SiteError, match=r"403 Forbidden: pods .* is forbidden: maximum memory usage per Container is 1Gi"
    ):
        provider(max_mem="2Gi").submit(FOR_EVER, 1)
    provider(max_mem="1Gi").submit(FOR_EVER, 1)
    cluster.most_gib, cluster.denial = None, "no memory limit above 1Gi"
    with pytest.raises(SiteError, match=r'400 .*: admission webhook "policy.lab" denied the request: no memory limit'):
        provider().submit(FOR_EVER, 1)
    cluster.denial = None
    with pytest.raises(SiteError, match=r"422 .*: Pod is invalid: metadata.labels: Invalid value: 'of/me'"):
        provider(labels={"lab": "of/me"}).submit(FOR_EVER, 1)


@pytest.mark.parametrize(("code", "passes"), [(403, False), (429, True), (503, True)])
def test_a_refusal_that_may_pass_by_itself_is_told_apart(cluster: Cluster, code: int, passes: bool) -> None:
    pods = provider()
    cluster.fail_next(404)  # what it begins with is a look for older pods
    cluster.fail_next(code, times=2)
    with pytest.raises(SiteError, match=str(code)):
        pods.submit(FOR_EVER, 1)
    assert pods.is_busy == passes


def test_pods_that_cannot_be_deleted_at_the_end_are_named_with_the_command_that_deletes_them(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    pods = provider(run="mine")
    jobs = [pods.submit(FOR_EVER, 1) for _ in range(2)]
    names = wait_for_pods(cluster, "Running", 2)
    cluster.is_silent = True
    assert pods.cancel(jobs) == [False, False]
    num_asked = len([record for record in caplog.records if "cannot be deleted" in record.getMessage()])
    pods.close()
    cluster.is_silent = False
    assert num_asked == 1  # and not again for each pod, when nobody answers
    (notice,) = [record.getMessage() for record in caplog.records if getattr(record, "notice", False)]
    assert notice.startswith("pods may be left in namespace lab: Kubernetes does not answer")
    assert all(name in notice for name in names)
    assert notice.endswith("kubectl delete pod --namespace lab --selector volpipe-run=mine")
    provider(run="mine").delete_pods()


def test_pods_that_ended_long_before_are_not_said_to_be_left_and_the_words_of_the_api_are(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that had expired was told as an API that does not answer."""
    pods = provider(run="mine")
    jobs = [pods.submit(FOR_EVER, 1) for _ in range(2)]
    gone, left = wait_for_pods(cluster, "Running", 2)
    cluster.delete_pod(gone, grace=0)
    (ended,) = [job for job in jobs if pods.resources[job]["pod_name"] == gone]
    wait_for(pods, ended, JobState.CANCELLED)
    cluster.fail_next(401)
    pods.close()
    (notice,) = [record.getMessage() for record in caplog.records if getattr(record, "notice", False)]
    assert gone not in notice and left in notice
    assert "401" in notice
    provider(run="mine").delete_pods()


@pytest.mark.parametrize("code", [500, 429, 403])
def test_trouble_with_the_api_changes_nothing_that_was_known(cluster: Cluster, code: int) -> None:
    pods = provider()
    job = pods.submit(FOR_EVER, 1)
    wait_for(pods, job, JobState.RUNNING)
    cluster.fail_next(code)
    assert status_of(pods, job).state == JobState.RUNNING
    cluster.fail_next(code)
    assert pods.cancel([job]) == [False]
    assert status_of(pods, job).state == JobState.RUNNING
    assert pods.cancel([job]) == [True]


def test_an_api_server_that_is_gone_changes_nothing_that_was_known(tmp_path: Path) -> None:
    with running(tmp_path / "cluster") as cluster:
        pods = provider(kubeconfig=str(cluster.kubeconfig))
        job = pods.submit(FOR_EVER, 1)
        wait_for(pods, job, JobState.RUNNING)
    pods.kube_client.api_client.close()
    assert status_of(pods, job).state == JobState.RUNNING
    assert pods.cancel([job]) == [False]
    assert pods.delete_pods() == []
    close_all()


def test_deleting_pods_takes_every_pod_of_the_run_and_no_other(cluster: Cluster) -> None:
    mine, other = provider(run="mine"), provider(run="other")
    ended = mine.submit("true", 1)
    mine.submit(FOR_EVER, 1)
    other.submit(FOR_EVER, 1)
    wait_for_pods(cluster, "Running", 2)
    wait_for(mine, ended, JobState.COMPLETED)
    assert len(mine.delete_pods()) == 2
    wait_until(lambda: len(cluster.names()) == 1, 5)
    assert cluster.pod(cluster.names()[0]).labels["volpipe-run"] == "other"


def test_a_driver_begins_by_removing_what_a_killed_one_left(cluster: Cluster) -> None:
    provider(run="mine").submit(FOR_EVER, 1)
    (left,) = wait_for_pods(cluster, "Running", 1)
    again = provider(run="mine")
    assert cluster.names() == [left]  # a site that is only looked at removes nothing
    again.submit(FOR_EVER, 1)
    again.submit(FOR_EVER, 1)
    wait_until(lambda: left not in cluster.names(), 5)
    wait_for_pods(cluster, "Running", 2)


def test_the_arguments_of_parsls_provider_mean_the_same(cluster: Cluster) -> None:
    cluster.node.claims |= {"data.of.lab", "scratch"}
    pods = provider(
        persistent_volumes=[("data.of.lab", "/data"), ("data.of.lab", "/again")],
        claims=[Claim("scratch", "/scratch")],
        secret="parsls", pull_secrets=["ours"], user_id="1234", group_id="4321", annotations={"a": "b"},
        extra_limits={"example.com/nic": "1"}, extra_requests={"example.com/nic": "1"}, max_mem="2Gi", pod_name="mine",
    )  # fmt: skip
    pods.submit("true", 1)
    pod = cluster.pod(cluster.names()[0])
    assert pod.metadata["name"].startswith("mine.")
    assert pod.metadata["annotations"] == {"a": "b"}
    assert pod.labels["parsl-job-id"] in pods.resources
    assert {m["mountPath"] for m in pod.container["volumeMounts"]} == {"/data", "/again", "/scratch"}
    assert len(pod.spec["volumes"]) == 2
    assert pod.spec["imagePullSecrets"] == [{"name": "parsls"}, {"name": "ours"}]
    assert (pod.spec["securityContext"]["runAsUser"], pod.spec["securityContext"]["runAsGroup"]) == (1234, 4321)
    assert pod.container["resources"]["limits"]["example.com/nic"] == "1"
    assert pods.mem_per_node == 2 * 2**30 / 1e9


def test_an_unknown_argument_is_refused_by_name(cluster: Cluster) -> None:
    with pytest.raises(TypeError, match="node_selektor"):
        provider(node_selektor={"a": "b"})


def test_a_context_of_a_kubeconfig_is_followed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBECONFIG")
    assert connect(str(cluster.kubeconfig)).configuration.host == cluster.url
    assert connect(str(cluster.kubeconfig), "nowhere").configuration.host == "http://127.0.0.1:9"
    with pytest.raises(SiteError, match=r"kubeconfig .*, context none: .*[Cc]ontext"):
        connect(str(cluster.kubeconfig), "none")


def test_in_a_pod_its_service_account_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_text("certificate")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SiteError, match=r"no cluster is known: .*volpipe k8s manifest"):
        connect()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    chosen = connect().configuration
    assert (chosen.host, chosen.ssl_ca_cert) == ("https://10.0.0.1:443", str(tmp_path / "ca.crt"))
    assert chosen.get_api_key_with_prefix("BearerToken") == "bearer secret"


@pytest.mark.parametrize(
    ("quantity", "size"), [("16Gi", 16 * 2**30), ("500Mi", 500 * 2**20), ("1.5G", 1_500_000_000), ("1024", 1024)]
)
def test_a_quantity_of_memory_is_a_number_of_bytes(quantity: str, size: int) -> None:
    assert num_bytes(quantity) == size


def test_what_is_no_quantity_of_memory_is_refused() -> None:
    with pytest.raises(SiteError, match="memory '16GB' is no quantity of Kubernetes; write 16Gi"):
        num_bytes("16GB")
