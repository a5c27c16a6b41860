"""What a driver of pods must know of where it runs: its address, its pod, its user, and whether pods see its folder.

Not here: the pods (provider), or what a site chooses (configs).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from volpipe.apps.kubernetes.pod_spec import Claim, Owner
from volpipe.errors import SettingsError, SiteError

NOTATION = "write CLAIM:/path, CLAIM/folder:/path or CLAIM:/path:ro"


def read_claims(texts: Sequence[str]) -> list[Claim]:
    """Return claims from what a user writes: ``CLAIM[/FOLDER]:/PATH[:ro]``.

    Raises:
        SettingsError: one is written otherwise.
    """
    return [_read_claim(text) for text in texts]


def _read_claim(text: str) -> Claim:
    source, _, rest = text.partition(":")
    path, _, mode = rest.partition(":")
    name, _, folder = source.partition("/")
    if not name or not path or mode not in ("", "ro", "rw"):
        raise SettingsError(f"claim {text!r} cannot be understood; {NOTATION}")
    return Claim(name, path, read_only=mode == "ro", sub_path=folder or None)


def driver_address(given: str | None) -> str:
    """Return where pods reach this driver: its own pod's address in the cluster, else `given`.

    Raises:
        SiteError: this is no pod, and nothing is given.
    """
    address = os.environ.get("POD_IP") or given
    if not address:
        raise SiteError(
            "address is not set, and this driver is not in the cluster, where POD_IP would say it; set "
            "VOLPIPE_K8S_ADDRESS to the address at which pods reach this machine, or run the driver in the cluster "
            "(volpipe k8s manifest)"
        )
    return address


def driver_pod() -> Owner | None:
    """Return the pod that this driver runs in, if it is told, so that its pods go when it goes."""
    name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    return Owner(name, uid) if name and uid else None


def pod_user(given: int | None) -> tuple[int, int]:
    """Return user and group for pods: the driver's own, for each must read and write what the other has written.

    Raises:
        SiteError: that is root, which nobody has asked for, or not what is given.
    """
    own = os.getuid()
    if given is None and own == 0:
        raise SiteError("this driver is root, and pods should not be; run it as another user, or set VOLPIPE_K8S_UID=0")
    if given is not None and given != own:
        raise SiteError(
            f"pods are to run as user {given}, and this driver runs as {own}: neither could write where the other did, "
            f"nor could pods read the run's certificates; run the driver as {given}, or set VOLPIPE_K8S_UID={own}"
        )
    return own, os.getgid()


def check_folder(run_dir: str, claims: Sequence[Claim]) -> None:
    """Refuse a run whose folder pods cannot see: its plan, its scratch and its certificates lie there.

    Raises:
        SiteError: no claim is mounted above it, or only for reading.
    """
    folder = Path(run_dir).absolute()
    if reason := why_unwritable(folder, claims):
        raise SiteError(f"the run's folder {folder.parent} {reason}")


def why_unwritable(place: Path, claims: Sequence[Claim]) -> str:
    """Return why pods cannot write at `place`, from the root, and the remedy; "" where a claim lets them."""
    above = [claim for claim in claims if place.is_relative_to(claim.path)]
    if not above:
        writable = ", ".join(claim.path for claim in claims if not claim.read_only) or "nothing"
        return (
            "is on no claim, so that pods cannot see it; choose an --out below what is mounted for writing "
            f"({writable}), which must be at the same path here"
        )
    nearest = max(above, key=lambda claim: len(Path(claim.path).parts))
    if not nearest.read_only:
        return ""
    return (
        f"is on claim {nearest.name}, which is mounted at {nearest.path} for reading alone; choose an --out elsewhere, "
        "or leave out :ro"
    )


def affinity_to(labels: Mapping[str, str]) -> Mapping[str, object] | None:
    """Return the affinity to nodes that have each of `labels`, with one of the values that | separates."""
    expressions = [{"key": key, "operator": "In", "values": text.split("|")} for key, text in labels.items()]
    if not expressions:
        return None
    terms = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def check_gpus(resource: str, number: int) -> None:
    """Refuse several parts of GPUs in one pod: a process sees only one of them, and workers are told apart by number.

    Raises:
        SiteError: with the setting that helps.
    """
    if "/mig-" in resource and number > 1:
        raise SiteError(
            f"gpus = {number} of {resource}: a process sees one part of a GPU alone; set gpus = 1, and more max_pods"
        )


def node_disk(directory: str | None, claims: Sequence[Claim]) -> str | None:
    """Return where a folder of the node's disk is to be mounted for `directory`; None where it is on something else."""
    if directory is None or not Path(directory).is_absolute() or "$" in directory:
        return None
    if any(Path(directory).is_relative_to(claim.path) for claim in claims):
        return None
    return directory


def run_mark(run_dir: str, label: str) -> str:
    """Return what marks the pods of an executor of a run, also those of an earlier driver of the same run."""
    return f"{label}-{hashlib.sha256(str(Path(run_dir).absolute()).encode()).hexdigest()[:12]}"
