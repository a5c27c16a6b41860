"""The shipped sites for Kubernetes: what they ask for, and what they refuse before anything is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, running
from manifests import Json
from parsl.executors import HighThroughputExecutor

from volpipe.apps import capacity
from volpipe.apps.kubernetes import environment
from volpipe.apps.kubernetes.environment import check_folder, driver_pod, node_disk, pod_user, read_claims, run_mark
from volpipe.apps.kubernetes.pod_spec import Claim, Owner
from volpipe.apps.kubernetes.provider import PodProvider
from volpipe.errors import SiteError
from volpipe.sites.find import find_site

SITES = ["k8s_htex.py", "k8s_nautilus.py"]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A cluster that KUBECONFIG names, and settings that both sites can do with."""
    with running(tmp_path / "cluster", claims={"scratch", "data"}) as cluster:
        told(
            monkeypatch,
            image="lab/volpipe:1",
            namespace="lab",
            claims=f"scratch:{tmp_path}, data/raw:/data:ro",
            address="10.0.0.1",
            uid=str(os.getuid()),
        )
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        for name in ("POD_IP", "POD_NAME", "POD_UID"):
            monkeypatch.delenv(name, raising=False)
        yield cluster


def told(monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(f"VOLPIPE_K8S_{name.upper()}", value)


def executors(site: str, folder: Path) -> dict[str, HighThroughputExecutor]:
    found = {}
    for executor in find_site(site)(folder / "out.zarr.run/parsl").executors:
        assert isinstance(executor, HighThroughputExecutor)
        found[executor.label] = executor
    return found


def manifest_of(executor: HighThroughputExecutor, cluster: Cluster) -> Json:
    """Return the pod that the cluster is asked for."""
    assert isinstance(executor.provider, PodProvider)
    executor.provider.submit("true", 1)
    name = cluster.names()[-1]
    executor.provider.close()
    return cluster.asked[name]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("setting", ["image", "namespace", "claims"])
def test_what_is_missing_is_refused_by_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str, setting: str
) -> None:
    monkeypatch.delenv(f"VOLPIPE_K8S_{setting.upper()}")
    with pytest.raises(SiteError, match=rf"{setting} is not set; .*VOLPIPE_K8S_{setting.upper()}"):
        executors(site, tmp_path)


@pytest.mark.parametrize("site", SITES)
def test_a_driver_outside_must_say_where_pods_reach_it(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    monkeypatch.delenv("VOLPIPE_K8S_ADDRESS")
    with pytest.raises(SiteError, match="address is not set, and this driver is not in the cluster"):
        executors(site, tmp_path)
    monkeypatch.setenv("POD_IP", "10.1.2.3")
    assert {executor.address for executor in executors(site, tmp_path).values()} == {"10.1.2.3"}


@pytest.mark.parametrize("site", SITES)
def test_an_output_that_pods_cannot_see_is_refused(cluster: Cluster, site: str) -> None:
    with pytest.raises(SiteError, match=r"the run's folder /home/me/out.zarr.run is on no claim, so that pods cannot"):
        executors(site, Path("/home/me"))
    with pytest.raises(SiteError, match=r"is on claim data, which is mounted at /data for reading alone"):
        executors(site, Path("/data"))


@pytest.mark.parametrize("site", SITES)
def test_without_a_cluster_a_site_is_refused_in_a_sentence(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SiteError, match=rf"^site {site} cannot be used here: no cluster is known: .*Set KUBECONFIG"):
        executors(site, tmp_path)


def test_k8s_htex_asks_for_what_it_is_told(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, cores="6", memory="24Gi", gpus="2", max_pods="3", hours="2", pull_secrets="lab-registry")
    found = executors("k8s_htex", tmp_path)
    assert {label: capacity.count_workers(executor) for label, executor in found.items()} == {"cpu": 18, "gpu": 6}
    assert found["gpu"].encrypted
    assert found["gpu"].drain_period == 2 * 3600 - 60 - 1440
    assert capacity.memory_of_worker(found["gpu"]) == 12 * 2**30
    spec = manifest_of(found["gpu"], cluster)["spec"]
    (container,) = spec["containers"]
    expected = {"cpu": "6", "memory": "24Gi", "nvidia.com/gpu": "2"}
    assert container["resources"] == {"limits": expected, "requests": expected}
    assert container["image"] == "lab/volpipe:1"
    assert "OMP_NUM_THREADS=3" in container["args"][1]
    assert {
        m["mountPath"]: (m.get("subPath"), m["readOnly"]) for m in container["volumeMounts"] if "readOnly" in m
    } == {str(tmp_path): (None, False), "/data": ("raw", True)}
    assert spec["activeDeadlineSeconds"] == 7200
    assert spec["imagePullSecrets"] == [{"name": "lab-registry"}]
    assert spec["securityContext"]["runAsUser"] == os.getuid()
    limits = manifest_of(found["cpu"], cluster)["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "6", "memory": "24Gi"}


def test_k8s_htex_asks_for_queues_parts_of_gpus_types_of_nodes_secrets_and_a_nodes_disk(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(
        monkeypatch, gpu_resource="nvidia.com/mig-1g.10gb", gpu_nodes="nvidia.com/gpu.product=A100|H100,zone=a",
        node_selector="disk=nvme", labels="kueue.x-k8s.io/queue-name=lab", priority_class="spot", scheduler="volcano",
        annotations="scheduling.volcano.sh/queue-name=lab", secrets="bucket-keys", node_directory="/cache",
    )  # fmt: skip
    found = executors("k8s_htex", tmp_path)
    cpu, gpu = (manifest_of(found[label], cluster) for label in ("cpu", "gpu"))
    for pod in (cpu, gpu):
        spec, metadata = pod["spec"], pod["metadata"]
        assert metadata["labels"].items() >= {"kueue.x-k8s.io/queue-name": "lab", "volpipe-role": "worker"}.items()
        assert metadata["annotations"] == {"scheduling.volcano.sh/queue-name": "lab"}
        assert (spec["schedulerName"], spec["priorityClassName"]) == ("volcano", "spot")
        assert spec["nodeSelector"] == {"disk": "nvme"}
        (container,) = spec["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "bucket-keys"}}]
        assert {"name": "disk", "emptyDir": {}} in spec["volumes"]
        assert {"name": "disk", "mountPath": "/cache"} in container["volumeMounts"]
    assert "affinity" not in cpu["spec"]
    required = gpu["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [
        {
            "matchExpressions": [
                {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["A100", "H100"]},
                {"key": "zone", "operator": "In", "values": ["a"]},
            ]
        }
    ]
    assert gpu["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == "1"
    assert "nvidia.com/gpu" not in gpu["spec"]["containers"][0]["resources"]["limits"]
    told(monkeypatch, gpus="2")
    with pytest.raises(SiteError, match=r"gpus = 2 of nvidia.com/mig-1g.10gb: a process sees one part of a GPU alone"):
        executors("k8s_htex", tmp_path)


@pytest.mark.parametrize(
    ("directory", "mounted"),
    [(None, None), ("/cache", "/cache"), ("$TMPDIR", None), ("/$USER", None), ("/scratch/cache", None)],
)
def test_a_nodes_disk_is_mounted_where_nothing_else_is(directory: str | None, mounted: str | None) -> None:
    assert node_disk(directory, [Claim("scratch", "/scratch")]) == mounted


def test_without_gpus_there_is_one_kind_of_pod(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(monkeypatch, gpus="0")
    assert set(executors("k8s_htex", tmp_path)) == {"cpu"}


def test_k8s_nautilus_asks_for_a_type_of_gpu(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, gpu_type="NVIDIA-L40")
    spec = manifest_of(executors("k8s_nautilus", tmp_path)["nautilus"], cluster)["spec"]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L40"}
    assert spec["priorityClassName"] == "opportunistic"
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}} in spec["volumes"]
    assert {v["persistentVolumeClaim"]["claimName"] for v in spec["volumes"] if "persistentVolumeClaim" in v} == {
        "scratch",
        "data",
    }
    told(monkeypatch, priority_class="default")
    spec = manifest_of(executors("k8s_nautilus", tmp_path)["nautilus"], cluster)["spec"]
    assert "priorityClassName" not in spec


def test_the_drivers_pod_owns_its_workers(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver_pod() is None
    monkeypatch.setenv("POD_NAME", "volpipe-x7k2p")
    monkeypatch.setenv("POD_UID", "0b1c")
    assert driver_pod() == Owner("volpipe-x7k2p", "0b1c")
    metadata = manifest_of(executors("k8s_htex", tmp_path)["cpu"], cluster)["metadata"]
    assert [(owner["kind"], owner["name"], owner["uid"]) for owner in metadata["ownerReferences"]] == [
        ("Pod", "volpipe-x7k2p", "0b1c")
    ]


def test_pods_of_a_run_are_known_again_and_those_of_others_are_not(tmp_path: Path) -> None:
    marks = {
        run_mark(str(tmp_path / "a.zarr.run/parsl"), "cpu"),
        run_mark(str(tmp_path / "a.zarr.run/parsl"), "gpu"),
        run_mark(str(tmp_path / "b.zarr.run/parsl"), "cpu"),
    }
    assert len(marks) == 3
    assert run_mark(str(tmp_path / "a.zarr.run/parsl"), "cpu") in marks


def test_claims_are_read_as_they_are_written() -> None:
    assert read_claims(["data:/data:ro", "scratch/users/me:/home/me", "lab.scratch:/scratch:rw"]) == [
        Claim("data", "/data", read_only=True),
        Claim("scratch", "/home/me", sub_path="users/me"),
        Claim("lab.scratch", "/scratch"),
    ]


@pytest.mark.parametrize("text", ["data", ":/data", "data:", "data:/data:rx"])
def test_a_claim_that_is_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(SiteError, match=rf"claim '{text}' cannot be understood; write CLAIM:/path"):
        read_claims([text])


def test_the_nearest_claim_decides_whether_a_folder_can_be_written() -> None:
    claims = [Claim("data", "/data", read_only=True), Claim("out", "/data/out")]
    check_folder("/data/out/a.zarr.run/parsl", claims)
    with pytest.raises(SiteError, match="is on claim data"):
        check_folder("/data/outer/a.zarr.run/parsl", claims)


@pytest.mark.parametrize(
    ("own", "given", "sentence"),
    [
        (0, None, "this driver is root, and pods should not be; run it as another user, or set VOLPIPE_K8S_UID=0"),
        (1005, 1000, "pods are to run as user 1000, and this driver runs as 1005: .*VOLPIPE_K8S_UID=1005"),
    ],
)
def test_pods_of_another_user_than_the_drivers_are_refused(
    monkeypatch: pytest.MonkeyPatch, own: int, given: int | None, sentence: str
) -> None:
    monkeypatch.setattr(environment.os, "getuid", lambda: own)
    with pytest.raises(SiteError, match=sentence):
        pod_user(given)


@pytest.mark.parametrize(("own", "given"), [(0, 0), (1005, None), (1005, 1005)])
def test_pods_run_as_the_driver(monkeypatch: pytest.MonkeyPatch, own: int, given: int | None) -> None:
    monkeypatch.setattr(environment.os, "getuid", lambda: own)
    assert pod_user(given)[0] == own
