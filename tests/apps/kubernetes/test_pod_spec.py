"""Pods as they are asked for: all that a user may need is in the manifest, and an API server would take it."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client
from manifests import LABEL, SUBDOMAIN, Json, faults, plain
from real_cluster import KILL

from volpipe.apps.htex.processes import WORKER, WORKERS
from volpipe.apps.kubernetes.manifest import service
from volpipe.apps.kubernetes.pod_spec import Claim, Owner, Shape, host_name, worker_pod
from volpipe.errors import SiteError

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
    own = {
        "key": "node.kubernetes.io/unreachable",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 7,
    }
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
    (
        {"spec": {"containers": [ONE[0] | {"volumeMounts": [EMPTY | {"mountPath": "/"}]}]}},
        "volumeMounts.name: Not found: 'v'",
    ),
    ({"spec": {"containers": ONE, "volumes": [EMPTY | {"emptyDir": {}}] * 2}}, "spec.volumes: Duplicate value"),
    (
        {"spec": {"containers": [ONE[0] | {"resources": TOO_MUCH}]}},
        "requests[memory]: Invalid value: '1500Mi': must be less than or equal to limit 1Gi",
    ),
]


@pytest.mark.parametrize(("part", "sentence"), WRONG)
def test_the_double_finds_what_is_wrong_with_a_manifest(part: Json, sentence: str) -> None:
    good = {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "a", "image": "b"}]}}
    assert faults(good) == []
    found = faults(good | part)
    assert any(sentence in fault for fault in found), found
