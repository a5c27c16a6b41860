"""What `volpipe k8s manifest` prints: an API server would take it, its rights suffice, and its job runs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster, applies, rules_of, run_job
from command import Ended, Give, begin, finish, giver, processes_in, wait_until
from conftest import ROOT
from disturbance import Slow
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client
from manifests import LABEL, SUBDOMAIN, Json, faults, plain
from pods import SlowPods, cluster_for
from real_cluster import KILL
from trainings import Threads, losses_in, make_folder
from volumes import fingerprint

from volpipe.apps.htex.processes import WORKER, WORKERS
from volpipe.apps.kubernetes.manifest import service
from volpipe.apps.kubernetes.pod_spec import Claim, Owner, Shape, host_name, worker_pod
from volpipe.blockwise.interrupts import INTERRUPTED
from volpipe.errors import SiteError
from volpipe.recipes.training import WEIGHTS, load_training
from volpipe.training.driver import run_training
from volpipe.training.logs import last_step

RUN = ("run", "--config", "k8s_htex", "volume.n5", "-o", "out.zarr")
VARIED = """
[sweep]
"train.seed" = [1, 2]
[tune]
"train.learning_rate" = { low = 1e-4, high = 1e-2 }
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Gives a command where the settings of a site are told; no cluster is needed to print."""
    for name, value in {
        "IMAGE": "lab/volpipe:1",
        "NAMESPACE": "lab",
        "CLAIMS": "data:/data:ro,scratch/me:/scratch",
        "ADDRESS": "10.0.0.1",
        "MAX_PODS": "7",
        "PULL_SECRETS": "lab-registry",
    }.items():
        monkeypatch.setenv(f"VOLPIPE_K8S_{name}", value)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    shipped = (ROOT / "configs/train_superres_z2.toml").read_text()
    (tmp_path / "mine.toml").write_text(shipped.replace("[train]", "[train]\nvalidate_every = 100") + VARIED)
    (tmp_path / "batch.toml").write_text('volumes = "/data/*.n5"\nout = "/data/{stem}"\nrecipe = "affinitis"\n')
    return giver(tmp_path, monkeypatch, capsys)


def documents(ended: Ended) -> list[Json]:
    assert ended.code == 0, ended.err
    return list(yaml.safe_load_all(ended.out))


def test_an_api_server_would_take_all_that_is_printed(give: Give) -> None:
    found = documents(give("k8s", "manifest", "--size", "scratch=10Ti", "--storage-class", "fast", *RUN))
    assert [each["kind"] for each in found] == ["ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim", "Job"]
    assert [faults(each) for each in found] == [[]] * 5
    assert {each["metadata"]["namespace"] for each in found} == {"lab"}
    assert found[3]["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "fast",
        "resources": {"requests": {"storage": "10Ti"}},
    }


def test_a_driver_may_do_nothing_but_with_pods_of_its_namespace(give: Give) -> None:
    account, role, binding = documents(give("k8s", "manifest", "--only", "rights"))
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["create", "list", "delete"]}]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": role["metadata"]["name"],
    }
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": "lab"}]


def test_the_service_of_trainings_selects_all_pods_of_workers_and_opens_nothing(give: Give) -> None:
    (service,) = documents(give("k8s", "manifest", "--only", "service"))
    assert faults(service) == []
    assert (service["metadata"]["name"], service["metadata"]["namespace"]) == ("volpipe", "lab")
    assert service["spec"] == {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"volpipe-role": "worker"},
    }


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        ([], ["Service"]),
        (["train", "mine.toml", "--config", "k8s_htex"], ["Service", "Job"]),
        (["sweep", "mine.toml", "--config", "k8s_htex"], ["Service", "Job"]),
        (["tune", "mine.toml", "--config", "k8s_htex"], ["Service", "Job"]),
        ([*RUN], ["Job"]),
        (["sites", "check", "k8s_htex"], ["Job"]),
    ],
)
def test_the_service_is_printed_with_what_may_train(give: Give, command: list[str], kinds: list[str]) -> None:
    ended = give("k8s", "manifest", *command)
    found = documents(ended)
    assert [each["kind"] for each in found] == ["ServiceAccount", "Role", "RoleBinding", *kinds]
    assert [fault for each in found for fault in faults(each)] == []
    assert ("# service: once, for trainings of several ranks" in ended.out) == ("Service" in kinds)


def test_the_job_gives_the_same_command_with_the_same_settings(give: Give) -> None:
    (job,) = documents(give("k8s", "manifest", "--only", "job", *RUN))
    spec = job["spec"]["template"]["spec"]
    (driver,) = spec["containers"]
    assert driver["command"] == ["volpipe", *RUN]
    assert driver["workingDir"] == "/scratch"
    told = {entry["name"]: entry.get("value") or entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in driver["env"]}
    assert told == {
        "POD_IP": "status.podIP",
        "POD_NAME": "metadata.name",
        "POD_UID": "metadata.uid",
        "LOGNAME": "volpipe",
        "HOME": "/tmp",
        "VOLPIPE_K8S_IMAGE": "lab/volpipe:1",
        "VOLPIPE_K8S_NAMESPACE": "lab",
        "VOLPIPE_K8S_CLAIMS": "data:/data:ro,scratch/me:/scratch",
        "VOLPIPE_K8S_MAX_PODS": "7",
        "VOLPIPE_K8S_PULL_SECRETS": "lab-registry",
        "VOLPIPE_K8S_UID": "1000",
    }  # not the address of a driver outside
    assert {mount["mountPath"] for mount in driver["volumeMounts"]} == {"/data", "/scratch"}
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["imagePullSecrets"] == [{"name": "lab-registry"}]
    assert spec["serviceAccountName"] == "volpipe"
    assert spec["enableServiceLinks"] is False  # VOLPIPE_K8S_SERVICE_PORT of a service volpipe-k8s is no setting


@pytest.mark.parametrize("option", [("--metrics", "9100"), ("--metrics=9100",), ("--metrics", "0.0.0.0:9100")])
def test_prometheus_finds_the_pod_of_a_driver_that_serves_metrics(give: Give, option: tuple[str, ...]) -> None:
    (job,) = documents(give("k8s", "manifest", "--only", "job", *RUN[:3], *option, *RUN[3:]))
    assert faults(job) == []
    template = job["spec"]["template"]
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true", "prometheus.io/port": "9100", "prometheus.io/path": "/metrics",
    }  # fmt: skip
    (driver,) = template["spec"]["containers"]
    assert driver["command"] == ["volpipe", *RUN[:3], "--metrics", "0.0.0.0:9100", *RUN[3:]]
    assert driver["ports"] == [{"containerPort": 9100, "name": "metrics"}]
    assert "annotations" not in job["metadata"]


@pytest.mark.parametrize("command", [("compare", "/scratch/a.zarr", "/scratch/b.zarr"), ("train", "/scratch/r.toml")])
def test_metrics_of_any_command_are_open_to_others(give: Give, command: tuple[str, ...]) -> None:
    (job,) = documents(give("k8s", "manifest", "--only", "job", *command, "--config", "k8s_htex", "--metrics", "9100"))
    (driver,) = job["spec"]["template"]["spec"]["containers"]
    assert driver["command"][-2:] == ["--metrics", "0.0.0.0:9100"]


def test_a_pod_that_serves_no_metrics_to_others_is_not_found(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    for option in ((), ("--metrics", "/scratch/m.prom"), ("--metrics", "127.0.0.1:9100")):
        ended = give("k8s", "manifest", "--only", "job", *RUN, *option)
        (job,) = documents(ended)
        assert "annotations" not in job["spec"]["template"]["metadata"]
        (driver,) = job["spec"]["template"]["spec"]["containers"]
        assert "ports" not in driver and driver["command"] == ["volpipe", *RUN, *option]
        assert ("only the driver's own pod reaches it" in ended.err) == ("127.0.0.1:9100" in option)
    ended = give("k8s", "manifest", *RUN, "--metrics", "0")
    assert ended.code == 2 and "nobody would know the port in the pod" in ended.err
    assert give("k8s", "manifest", *RUN, "--metrics", "9100m").code == 2
    monkeypatch.setenv("VOLPIPE_K8S_ANNOTATIONS", "prometheus.io/scrape=false")
    (job,) = documents(give("k8s", "manifest", "--only", "job", *RUN, "--metrics", "9100"))
    assert job["spec"]["template"]["metadata"]["annotations"]["prometheus.io/scrape"] == "false"  # the user's own


def test_the_same_command_is_the_same_job(give: Give) -> None:
    def name(*command: str) -> str:
        (job,) = documents(give("k8s", "manifest", "--only", "job", *command))
        return str(job["metadata"]["name"])

    assert name(*RUN) == name(*RUN)
    assert name(*RUN) != name(*RUN, "--fresh")


def test_a_check_of_the_site_is_a_job_that_is_not_repeated_whatever_it_finds(give: Give) -> None:
    command = ["sites", "check", "k8s_htex", "/data/in.n5", "--out", "/scratch"]
    (check,) = documents(give("k8s", "manifest", "--only", "job", *command))
    (run,) = documents(give("k8s", "manifest", "--only", "job", *RUN))
    assert check["spec"]["template"]["spec"]["containers"][0]["command"] == ["volpipe", *command]
    assert [rules_of(job)[-1]["onExitCodes"]["values"] for job in (check, run)] == [[1, 2], [2]]
    assert faults(check) == []


@pytest.mark.parametrize(
    ("code", "conditions", "action"),
    [
        (1, [], {"run": "Count", "train": "FailJob"}),
        (2, [], {"run": "FailJob", "train": "FailJob"}),
        (4, [], {"run": "Ignore", "train": "Ignore"}),  # somebody deleted the pod
        (137, [], {"run": "Count", "train": "Count"}),
        (1, [("DisruptionTarget", "True")], {"run": "Ignore", "train": "Ignore"}),  # drained, evicted, preempted
        (1, [("Ready", "True"), ("DisruptionTarget", "False")], {"run": "Count", "train": "FailJob"}),
    ],
)
def test_a_driver_that_was_disturbed_is_started_again_and_one_that_gave_up_is_not(
    give: Give, code: int, conditions: list[tuple[str, str]], action: dict[str, str]
) -> None:
    status = {
        "conditions": [{"type": kind, "status": value} for kind, value in conditions],
        "containerStatuses": [{"name": "driver", "state": {"terminated": {"exitCode": code}}}],
    }
    for verb, command in (("run", RUN), ("train", ("train", "mine.toml", "--config", "k8s_htex"))):
        (job,) = documents(give("k8s", "manifest", "--only", "job", *command))
        assert next((rule["action"] for rule in rules_of(job) if applies(rule, status)), "Count") == action[verb]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["run", "volume.n5"], "no --config, so it would run in the driver's pod alone; add --config k8s_htex"),
        (["run", "--config", "threads", "volume.n5"], "site threads has no class Settings"),
        (["--only", "jobs", *RUN], "--only jobs: write rights, claims, service or job"),
        (["--only", "job"], "a job needs a command; append it"),
        (["--size", "scratch", *RUN], "--size scratch=: write CLAIM=SIZE of one of the claims data, scratch"),
        (["--size", "data=10TB", *RUN], "--size data: '10TB' is no quantity of Kubernetes; write 16Gi, or 500Mi"),
        (["--size", "other=1Ti", *RUN], "--size other=1Ti: write CLAIM=SIZE of one of the claims data, scratch"),
        (
            ["runn", *RUN[1:]],
            "there is no command `volpipe runn --config k8s_htex volume.n5 -o out.zarr`: runn is none",
        ),
        (["runn", *RUN[1:]], "(did you mean 'run'?)"),
        (["sites", "chek", "k8s_htex", *RUN[1:3]], "chek is none (did you mean 'check'?)"),
        (["segment", "a.zarr", "--config", "k8s_htex", "--fesh"], "No such option: --fesh"),
        # outputs that would be lost, or cannot be written
        (
            [*RUN[:4], "-o", "/data/out.zarr"],
            "--out /data/out.zarr is on claim data, which is mounted at /data for read",
        ),
        (
            [*RUN[:4], "-o", "/data/../home/out.zarr"],
            "is on no claim, so that pods cannot see it; choose an --out below",
        ),
        ([*RUN[:4], "-o", "../out.zarr"], "--out ../out.zarr is on no claim"),
        (["train", "mine.toml", *RUN[1:3], "-o", "/data/t"], "--out /data/t is on claim data"),
        (["segment", "a.zarr", *RUN[1:3], "-o", "/tmp/l.zarr"], "--out /tmp/l.zarr is on no claim"),
        (["segment", "a.zarr", *RUN[1:3], "--json", "/tmp/s.json"], "--json /tmp/s.json is on no claim"),
        (["evaluate", "a.zarr", "b.zarr", *RUN[1:3], "--picture", "/tmp/p.png"], "--picture /tmp/p.png is on no claim"),
        (["batch", "/data/*.n5", *RUN[1:3], "-o", "/data/{stem}.zarr"], "--out /data/{stem}.zarr is on claim data"),
        (["batch", "batch.toml", *RUN[1:3]], 'out = "/data/{stem}" of batch.toml is on claim data'),
        # recipes
        *(
            ([command, "other.toml", *RUN[1:3]], "there is no other.toml in this folder")
            for command in ("train", "sweep", "tune", "batch")
        ),
        (["sweep", "defaul", *RUN[1:3]], "no recipe at defaul (did you mean 'default'?)"),
        (["sweep", "train_superres_z2", *RUN[1:3]], "has no [sweep]; add one"),
        (["batch", "/data/*.n5", *RUN[1:3], "-o", "out", "--recipe", "superres_z9"], "no recipe at superres_z9"),
        (["batch", "batch.toml", *RUN[1:3], "-o", "out"], "no recipe at affinitis (did you mean 'affinities'?)"),
        (["batch", "/data/*.n5", *RUN[1:3]], "batch: it needs a place for its outputs"),
    ],
)
def test_what_cannot_be_printed_is_refused_in_a_sentence(give: Give, command: list[str], sentence: str) -> None:
    ended = give("k8s", "manifest", *command)
    assert ended.code == 2
    assert sentence in ended.err
    assert ended.out == ""


def test_a_recipe_on_a_claim_and_an_output_in_a_bucket_are_not_refused(give: Give) -> None:
    for command in (
        ("sweep", "/scratch/mine.toml", *RUN[1:3]),
        (*RUN[:4], "-o", "s3://lab/out.zarr"),
        (*RUN[:4], "--log-json", "-"),
        ("batch", "/data/*.n5", *RUN[1:3], "-o", "s3://lab/{stem}.zarr"),
    ):
        assert [each["kind"] for each in documents(give("k8s", "manifest", "--only", "job", *command))] == ["Job"]
    ended = give("k8s", "manifest", "--only", "job", "sweep", "/scratch/mine.toml", *RUN[1:3])
    assert "/scratch/mine.toml cannot be seen from here; whether it is there was not checked" in ended.err


def test_a_job_has_the_queue_and_secrets_of_its_workers(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLPIPE_K8S_LABELS", "kueue.x-k8s.io/queue-name=lab")
    monkeypatch.setenv("VOLPIPE_K8S_SECRETS", "bucket-keys,other")
    monkeypatch.setenv("VOLPIPE_K8S_SCHEDULER", "volcano")
    (job,) = documents(give("k8s", "manifest", "--only", "job", *RUN))
    template = job["spec"]["template"]
    assert faults(job) == []
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lab"  # by which a queue holds a job back
    assert template["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "lab"
    assert template["spec"]["schedulerName"] == "volcano"
    (driver,) = template["spec"]["containers"]
    assert [entry["secretRef"]["name"] for entry in driver["envFrom"]] == ["bucket-keys", "other"]
    assert {"name": "VOLPIPE_K8S_LABELS", "value": "kueue.x-k8s.io/queue-name=lab"} in driver["env"]


def test_a_base_for_kustomize_has_what_is_printed(tmp_path: Path, give: Give) -> None:
    printed = documents(give("k8s", "manifest", "--size", "scratch=10Ti", *RUN))
    ended = give("k8s", "manifest", "--directory", "base", "--size", "scratch=10Ti", *RUN)
    assert ended.code == 0
    assert "volume.n5 cannot be seen from here" in ended.err
    (kind,) = yaml.safe_load_all((tmp_path / "base/kustomization.yaml").read_text())
    assert (kind["kind"], kind["resources"]) == ("Kustomization", ["rights.yaml", "claims.yaml", "job.yaml"])
    written = [d for name in kind["resources"] for d in yaml.safe_load_all((tmp_path / "base" / name).read_text())]
    assert written == printed


def test_memory_that_is_no_quantity_is_refused_before_there_is_a_pod(
    give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLPIPE_K8S_MEMORY", "16GB")
    ended = give("k8s", "manifest", *RUN)
    assert (ended.code, ended.out) == (2, "")
    assert "memory '16GB' is no quantity of Kubernetes; write 16Gi, or 500Mi" in ended.err


def test_a_missing_setting_is_named(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VOLPIPE_K8S_NAMESPACE")
    ended = give("k8s", "manifest", *RUN)
    assert ended.code == 2
    assert "namespace is not set" in ended.err


def test_without_a_claim_to_write_to_no_job_is_printed(give: Give, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOLPIPE_K8S_CLAIMS", "data:/data:ro")
    ended = give("k8s", "manifest", *RUN)
    assert ended.code == 2
    assert "no claim may be written" in ended.err


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with cluster_for(tmp_path / "nodes") as cluster:
        yield cluster


@pytest.mark.long
@pytest.mark.slow
def test_a_driver_in_the_cluster_makes_the_bytes_of_this_machine_after_a_loss(tmp_path: Path, cluster: Cluster) -> None:
    """The job's pod starts worker pods with no more rights than were printed; they go with it, and the job goes on."""
    plain = Slow(tmp_path / "plain", seconds=0, site="threads")
    ended = finish(plain.folder, begin(plain.folder, *plain.command))
    assert ended.code == 0, ended.err
    slow = SlowPods(tmp_path / "pods", seconds=0.02, cluster=cluster)
    job = job_of(slow, cluster, *slow.command)
    spec = job["spec"]["template"]["spec"]
    assert spec["containers"][0]["workingDir"] == str(slow.folder)
    assert spec["securityContext"]["runAsUser"] == os.getuid()
    drivers: list[str] = []
    with ThreadPoolExecutor(1) as controller:
        condition = controller.submit(run_job, cluster, job, 200, drivers.append)
        wait_until(slow.marked, 150)
        (worker,) = [name for name in cluster.names("Running") if name not in drivers]
        (owner,) = cluster.pod(worker).metadata["ownerReferences"]
        assert (owner["name"], owner["uid"]) == (drivers[0], cluster.pod(drivers[0]).metadata["uid"])
        cluster.delete_pod(drivers[0])
        assert condition.result() == "Complete", cluster.pod(drivers[-1]).log.read_text()
    assert len(drivers) == 2
    code = cluster.gone[drivers[0]]["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"]
    assert code == INTERRUPTED
    assert worker in cluster.gone
    assert fingerprint(slow.out) == fingerprint(plain.out)
    wait_until(lambda: cluster.names() == [drivers[1]], 20)
    assert processes_in(slow.folder) == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("harm", ["delete_pod", "evict"])
def test_a_training_goes_on_after_its_driver_was_disturbed(tmp_path: Path, cluster: Cluster, harm: str) -> None:
    slow = SlowPods(tmp_path / "pods", seconds=0, cluster=cluster)
    folder = make_folder(slow.folder)
    settings = ("train.steps=200", "train.checkpoint_every=5")
    run_training(
        load_training(folder / "recipe.toml", settings), folder / "whole", Threads(1).start, search_path=folder
    )
    options = [part for setting in settings for part in ("--set", setting)]
    job = job_of(slow, cluster, "train", "recipe.toml", "--config", slow.site, "--out", "cut", *options)
    drivers: list[str] = []
    with ThreadPoolExecutor(1) as controller:
        condition = controller.submit(run_job, cluster, job, 200, drivers.append)
        wait_until(lambda: last_step(folder / "cut") > 7, 120)
        getattr(cluster, harm)(drivers[0])
        assert condition.result() == "Complete", cluster.pod(drivers[-1]).log.read_text()
    assert len(drivers) == 2
    assert losses_in(folder / "cut") == losses_in(folder / "whole")
    assert (folder / "cut" / WEIGHTS).read_bytes() == (folder / "whole" / WEIGHTS).read_bytes()


def job_of(slow: SlowPods, cluster: Cluster, *command: str) -> Json:
    """Return the job that is printed for `command`, and let its pods have the rights that are printed, and no more."""
    settings = {name: value for name, value in slow.environment.items() if "ADDRESS" not in name}
    printed = documents(finish(slow.folder, begin(slow.folder, "k8s", "manifest", *command, **settings)))
    kinds = {document["kind"]: document for document in printed}
    cluster.verbs = set(kinds["Role"]["rules"][0]["verbs"])
    cluster.node.accounts[kinds["ServiceAccount"]["metadata"]["name"]] = cluster.kubeconfig
    return kinds["Job"]


# ---- pods of workers


TWO_CORES = {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}


def pod_with(command: str = "true\n\nprocess_worker_pool.py", **choices: Any) -> client.V1Pod:  # Any: fields of Shape
    return worker_pod("volpipe.0a1b2c3d", "lab/volpipe:1", command, Shape(**choices), TWO_CORES, "worker")


def manifest_with(**choices: Any) -> Json:  # Any: fields of Shape
    """Return the manifest of a pod with a shape, which an API server would take."""
    manifest = plain(pod_with(**choices))
    assert faults(manifest) == []
    return manifest


def shell_of(command: str) -> list[str]:
    """Return what the container of a pod starts."""
    (container,) = pod_with(command).spec.containers
    return [*container.command, *container.args]


def container_of(manifest: Json) -> Json:
    (container,) = manifest["spec"]["containers"]
    return container  # type: ignore[no-any-return]  # JSON


def test_a_pod_is_not_root_and_may_do_little() -> None:
    manifest = manifest_with()
    assert manifest["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "fsGroup": 1000,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    expected = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container_of(manifest)["securityContext"] == expected
    assert manifest["spec"]["automountServiceAccountToken"] is False
    assert manifest_with(uid=0)["spec"]["securityContext"]["runAsNonRoot"] is False


def test_a_pod_is_never_restarted_in_place_and_ends_soon() -> None:
    spec = manifest_with(deadline=3600, grace=5)["spec"]
    assert (spec["restartPolicy"], spec["activeDeadlineSeconds"], spec["terminationGracePeriodSeconds"]) == (
        "Never",
        3600,
        5,
    )
    assert "activeDeadlineSeconds" not in manifest_with()["spec"]
    assert spec["enableServiceLinks"] is False  # a service volpipe-k8s would be taken for settings


def test_what_a_user_asks_for_is_in_the_manifest() -> None:
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}
    taint = {"key": "nautilus.io/reservation", "operator": "Exists", "effect": "NoSchedule"}
    manifest = manifest_with(
        env={"HOME": "/tmp"},
        labels={"lab": "em"},
        node_selector={"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"},
        affinity=affinity,
        tolerations=[taint],
        priority_class="opportunistic",
        pull_secrets=["mine", "ours"],
        pull_policy="Always",
        gpus=2,
    )
    spec, container = manifest["spec"], container_of(manifest)
    assert {"name": "HOME", "value": "/tmp"} in container["env"]
    assert {"name": "LOGNAME", "value": "volpipe"} in container["env"]
    assert manifest["metadata"]["labels"] == {"lab": "em", "volpipe-role": "worker"}
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}
    assert spec["affinity"] == affinity
    assert spec["tolerations"][0] == taint
    assert spec["priorityClassName"] == "opportunistic"
    assert [secret["name"] for secret in spec["imagePullSecrets"]] == ["mine", "ours"]
    assert spec["serviceAccountName"] == "worker"
    assert container["imagePullPolicy"] == "Always"
    assert container["resources"] == {
        "limits": {"cpu": "2", "nvidia.com/gpu": "2"},
        "requests": {"cpu": "2", "nvidia.com/gpu": "2"},
    }
    assert "ports" not in container


def test_a_lost_node_gives_its_pods_up_after_a_minute_unless_the_user_says_otherwise() -> None:
    def seconds(**choices: Any) -> dict[str, int]:  # Any: fields of Shape
        return {t["key"]: t["tolerationSeconds"] for t in manifest_with(**choices)["spec"]["tolerations"]}

    assert seconds() == {"node.kubernetes.io/unreachable": 60, "node.kubernetes.io/not-ready": 60}
    own = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 7}
    assert seconds(tolerations=[own]) == {"node.kubernetes.io/unreachable": 7, "node.kubernetes.io/not-ready": 60}


def test_claims_are_mounted_where_they_should_be_the_same_one_twice_too() -> None:
    manifest = manifest_with(
        claims=[
            Claim("data.of.lab", "/data", read_only=True),
            Claim("scratch", "/scratch"),
            Claim("scratch", "/home/me", sub_path="users/me", read_only=True),
        ],
        shm="8Gi",
    )
    volumes = {volume["name"]: volume for volume in manifest["spec"]["volumes"]}
    assert len(volumes) == 3
    found = {}
    for mount in container_of(manifest)["volumeMounts"]:
        source = volumes[mount["name"]].get("persistentVolumeClaim")
        claim = (source["claimName"], source["readOnly"]) if source else volumes[mount["name"]]["emptyDir"]
        found[mount["mountPath"]] = (claim, mount.get("readOnly"), mount.get("subPath"))
    assert found == {
        "/data": (("data.of.lab", True), True, None),
        "/scratch": (("scratch", False), False, None),
        "/home/me": (("scratch", False), True, "users/me"),
        "/dev/shm": ({"medium": "Memory", "sizeLimit": "8Gi"}, None, None),
    }


def test_the_owner_takes_its_pods_with_it() -> None:
    owners = manifest_with(owner=Owner("driver-x7k2p", "0b1c"))["metadata"]["ownerReferences"]
    assert owners == [{"apiVersion": "v1", "kind": "Pod", "name": "driver-x7k2p", "uid": "0b1c"}]


def test_a_pod_has_a_name_in_the_dns_by_the_service_that_is_printed_for_its_namespace() -> None:
    printed = service("lab")
    assert faults(printed) == []
    manifest = manifest_with(labels={"volpipe-role": "mine"})
    assert manifest["spec"]["subdomain"] == printed["metadata"]["name"]
    assert manifest["spec"]["hostname"] == "volpipe-0a1b2c3d"
    assert printed["spec"]["selector"].items() <= manifest["metadata"]["labels"].items()
    assert {"name": "VOLPIPE_SERVICE", "value": printed["metadata"]["name"]} in container_of(manifest)["env"]


@given(st.from_regex(SUBDOMAIN, fullmatch=True).filter(lambda name: len(name) <= 253 - 9))
def test_whatever_parsl_calls_a_pod_its_host_has_one_label_that_no_other_pod_has(name: str) -> None:
    first, second = (host_name(f"{name}.{job}") for job in ("0a1b2c3d", "0a1b2c3e"))
    assert LABEL.fullmatch(first)
    assert first != second
    assert f"{name}.0a1b2c3d".replace(".", "-").endswith(first)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Claim("data", "data"), "claim data is to be mounted at 'data'; give an absolute path"),
        (lambda: Claim("data", "/data", sub_path="../x"), "sub-path '../x' leads out of it"),
        (lambda: Shape(claims=[Claim("a", "/data"), Claim("b", "/data")]), "two volumes are to be mounted at /data"),
        (lambda: Shape(claims=[Claim("a", "/dev/shm")], shm="1Gi"), "two volumes are to be mounted at /dev/shm"),
    ],
)
def test_what_no_pod_can_be_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(SiteError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize("code", [0, 3])
def test_the_command_keeps_its_exit_code_and_what_ran_before_it(code: int) -> None:
    assert subprocess.run(shell_of(f"export A=b\n\ntest $A = b && exit {code}\n")).returncode == code


@pytest.mark.parametrize(("name", "which"), [(WORKER, "tail -1"), (WORKERS, "head -1")])
def test_what_kills_in_a_real_pod_finds_neither_itself_nor_a_shell(tmp_path: Path, name: str, which: str) -> None:
    """Among processes of its own, as in a pod."""
    own = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*own, "true"], capture_output=True).returncode:
        pytest.skip("only root, with its rights, may have processes of its own")
    (tmp_path / name).symlink_to("/bin/sleep")
    script = f"""bash -c 'sleep 60 & wait' {name} & shell=$!
    for n in 1 2; do {tmp_path}/{name} 60 & done
    sleep 0.5
    bash -c {shlex.quote(KILL.format(name=name, which=which))}
    sleep 0.5; jobs -r | wc -l; kill -0 $shell; echo $?"""
    ended = subprocess.run([*own, "bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert ended.stdout.split() == ["2", "0"], ended.stderr  # of three, one sleep was killed, and not the shell


def test_term_ends_a_command_at_once_that_the_shell_waits_for() -> None:
    process = subprocess.Popen(shell_of("true\n\nsleep 30\n"), start_new_session=True)
    time.sleep(0.3)
    began = time.monotonic()
    process.terminate()
    assert process.wait(10) == 143
    assert time.monotonic() - began < 5


ONE: list[Json] = [{"name": "a", "image": "b"}]
EMPTY, TOO_MUCH = {"name": "v"}, {"limits": {"memory": "1Gi"}, "requests": {"memory": "1500Mi"}}
WRONG = [
    ({"spec": {"containers": ONE, "hostname": "a.b"}}, "spec.hostname: Invalid value: 'a.b'"),
    ({"spec": {"containers": ONE, "hostname": "a" * 64}}, "spec.hostname: Invalid value: 'aaaa"),
    ({"spec": {"containers": ONE, "subdomain": "Lab"}}, "spec.subdomain: Invalid value: 'Lab'"),
    ({"kind": "Service", "spec": {"selector": {"a": "b"}}}, "spec.ports: Required value"),
    ({"kind": "Service", "spec": {"clusterIP": "None", "selector": {"a": "/"}}}, "spec.selector: Invalid value: '/'"),
    ({"kind": "Service", "metadata": {"name": "1a"}, "spec": {"clusterIP": "None"}}, "metadata.name: Invalid value"),
    ({"metadata": {"name": "A"}}, "metadata.name: Invalid value: 'A'"),
    ({"metadata": {"name": "a", "labels": {"run": "of/me"}}}, "metadata.labels: Invalid value: 'of/me'"),
    ({"spec": {"containers": []}}, "spec.containers: Required value"),
    ({"spec": {"containers": [{"name": "a"}]}}, "spec.containers.image: Required value"),
    ({"spec": {"containers": [{"image": "a"}]}}, "name"),
    ({"spec": {"containers": ONE, "restartPolicyy": "Never"}}, 'unknown field "spec.restart'),
    ({"spec": {"containers": [{"name": "a", "image": 3}]}}, "valid string"),
    ({"spec": {"containers": [ONE[0] | {"volumeMounts": [EMPTY | {"mountPath": "/"}]}]}},
     "volumeMounts.name: Not found: 'v'"),
    ({"spec": {"containers": ONE, "volumes": [EMPTY | {"emptyDir": {}}] * 2}}, "spec.volumes: Duplicate value"),
    ({"spec": {"containers": [ONE[0] | {"resources": TOO_MUCH}]}},
     "requests[memory]: Invalid value: '1500Mi': must be less than or equal to limit 1Gi"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "sentence"), WRONG)
def test_the_double_finds_what_is_wrong_with_a_manifest(part: Json, sentence: str) -> None:
    good = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "image": "b"}]}}
    assert faults(good) == []
    found = faults(good | part)
    assert any(sentence in fault for fault in found), found
