"""What is wrong with a manifest: the API's own types, and the rules of its server that a wrong one trips over.

Not here: a server (cluster). The types are those of the Kubernetes client, which come from the API's description; the
rules are written from the API's reference, not from the code under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from kubernetes import client
from pydantic import ValidationError

Json = dict[str, Any]  # Any: JSON
Manifest = Mapping[str, Any]  # Any: JSON

KINDS = {
    "Pod": (client.V1Pod, "v1"),
    "Job": (client.V1Job, "batch/v1"),
    "Service": (client.V1Service, "v1"),
    "ServiceAccount": (client.V1ServiceAccount, "v1"),
    "Role": (client.V1Role, "rbac.authorization.k8s.io/v1"),
    "RoleBinding": (client.V1RoleBinding, "rbac.authorization.k8s.io/v1"),
    "PersistentVolumeClaim": (client.V1PersistentVolumeClaim, "v1"),
}
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1035, which has no digit first
LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]{0,61})?[A-Za-z0-9])?")
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
FACTORS = {"m": Fraction(1, 1000), None: 1, "k": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
FACTORS |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def faults(manifest: Manifest) -> list[str]:
    """Return what is wrong with `manifest`, each in a sentence; nothing, if an API server would take it."""
    kind = manifest.get("kind", "Pod")
    if kind not in KINDS:
        return [f"kind: Unsupported value: {kind!r}"]
    model, version = KINDS[kind]
    if manifest.get("apiVersion", version) != version:
        return [f"apiVersion: {manifest['apiVersion']} has no {kind}"]
    try:
        read = model.from_dict(dict(manifest))
    except ValidationError as error:
        return [" ".join(str(error).split())]
    unknown = [f'unknown field "{path}"' for path in lost(manifest, plain(read))]
    return unknown + list(_faults_of_metadata(manifest)) + list(_faults_of_kind(kind, manifest))


def plain(model: object) -> Any:  # Any: JSON
    return json.loads(json.dumps(client.ApiClient().sanitize_for_serialization(model)))


def lost(given: Any, read: Any, path: str = "") -> list[str]:  # Any: JSON
    """Return the paths of what is in `given` and not in `read`."""
    if isinstance(given, Mapping):
        known = read if isinstance(read, Mapping) else {}
        here = [f"{path}{key}" for key, value in given.items() if key not in known and value is not None]
        return here + [p for key in given.keys() & known.keys() for p in lost(given[key], known[key], f"{path}{key}.")]
    if isinstance(given, list) and isinstance(read, list):
        return [found for a, b in zip(given, read, strict=True) for found in lost(a, b, path)]
    return []


def _faults_of_kind(kind: str, manifest: Manifest) -> Iterator[str]:
    if kind == "Pod":
        yield from faults_of_pod(manifest.get("spec") or {})
    if kind == "Job":
        template = manifest["spec"]["template"]["spec"]
        if template.get("restartPolicy") not in ("Never", "OnFailure"):
            yield f"restartPolicy: Unsupported value of a Job: {template.get('restartPolicy')}"
        yield from faults_of_pod(template)
    if kind == "Service":
        yield from _faults_of_service(manifest)
    if kind == "PersistentVolumeClaim":
        if not manifest["spec"].get("accessModes"):
            yield "spec.accessModes: Required value"
        if "storage" not in ((manifest["spec"].get("resources") or {}).get("requests") or {}):
            yield "spec.resources.requests[storage]: Required value"


def _faults_of_service(manifest: Manifest) -> Iterator[str]:
    spec, name = manifest["spec"], manifest["metadata"]["name"]
    if not SERVICE_NAME.fullmatch(name):
        yield f"metadata.name: Invalid value: {name!r}"
    if not spec.get("ports") and spec.get("clusterIP") != "None":
        yield "spec.ports: Required value"
    for value in (spec.get("selector") or {}).values():
        if not LABEL_VALUE.fullmatch(value):
            yield f"spec.selector: Invalid value: {value!r}"


def _faults_of_metadata(manifest: Manifest) -> Iterator[str]:
    metadata = manifest.get("metadata") or {}
    name = metadata.get("name") or ""
    if not SUBDOMAIN.fullmatch(name) or len(name) > 253:
        yield f"metadata.name: Invalid value: {name!r}"
    for value in (metadata.get("labels") or {}).values():
        if not LABEL_VALUE.fullmatch(value):
            yield f"metadata.labels: Invalid value: {value!r}"
    for owner in metadata.get("ownerReferences") or []:
        if not owner["uid"] or not owner["name"]:
            yield "metadata.ownerReferences: uid and name must not be empty"


def faults_of_pod(spec: Manifest) -> Iterator[str]:
    """Yield what is wrong with the spec of a pod, beyond types."""
    for field in ("hostname", "subdomain"):
        if (spec.get(field) or "") and not LABEL.fullmatch(spec[field]):
            yield f"spec.{field}: Invalid value: {spec[field]!r}"
    names = [volume["name"] for volume in spec.get("volumes") or []]
    if len(set(names)) != len(names):
        yield "spec.volumes: Duplicate value"
    yield from (f"spec.volumes.name: Invalid value: {name!r}" for name in names if not LABEL.fullmatch(name))
    if not spec.get("containers"):
        yield "spec.containers: Required value"
    if (spec.get("activeDeadlineSeconds") or 1) < 1:
        yield f"spec.activeDeadlineSeconds: Invalid value: {spec['activeDeadlineSeconds']}"
    context = spec.get("securityContext") or {}
    if context.get("runAsNonRoot") and context.get("runAsUser") == 0:
        yield "container's runAsUser breaks non-root policy"
    for entry in spec.get("tolerations") or []:
        if entry.get("operator") == "Exists" and entry.get("value"):
            yield "spec.tolerations: value must be empty when operator is Exists"
        if "tolerationSeconds" in entry and entry.get("effect") != "NoExecute":
            yield "spec.tolerations.effect: must be NoExecute when tolerationSeconds is set"
    for container in spec.get("containers") or []:
        yield from _faults_of_container(container, set(names))


def _faults_of_container(container: Manifest, volumes: set[str]) -> Iterator[str]:
    if not LABEL.fullmatch(container["name"]):
        yield f"spec.containers.name: Invalid value: {container['name']!r}"
    if not container.get("image"):
        yield "spec.containers.image: Required value"
    mounts = container.get("volumeMounts") or []
    paths = [mount["mountPath"] for mount in mounts]
    if len(set(paths)) != len(paths):
        yield "volumeMounts.mountPath: must be unique"
    for mount in mounts:
        if mount["name"] not in volumes:
            yield f"volumeMounts.name: Not found: {mount['name']!r}"
        sub_path = mount.get("subPath") or ""
        if sub_path.startswith("/") or ".." in sub_path.split("/"):
            yield f"volumeMounts.subPath: must be a relative path without '..': {sub_path!r}"
    for variable in container.get("env") or []:
        if variable.get("value") and variable.get("valueFrom"):
            yield f"env[{variable['name']}]: may not have both value and valueFrom"
    yield from _faults_of_resources(container.get("resources") or {})


def _faults_of_resources(resources: Manifest) -> Iterator[str]:
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    bad = [text for text in (*limits.values(), *requests.values()) if not QUANTITY.fullmatch(text)]
    yield from (f"resources: quantities must match the regular expression: {text!r}" for text in bad)
    if bad:
        return
    for name, text in requests.items():
        if "/" in name and limits.get(name) != text:
            yield f"requests[{name}]: must be equal to limits"
        elif name in limits and amount(text) > amount(limits[name]):
            yield f"requests[{name}]: Invalid value: {text!r}: must be less than or equal to limit {limits[name]}"


def amount(quantity: str) -> Fraction:
    found = QUANTITY.fullmatch(quantity)
    assert found is not None
    return Fraction(found[1]) * FACTORS[found[2]]
