"""The commands `volpipe k8s …`: what a cluster must be given before, and in order to, run a driver in it.

Not here: the manifests themselves (apps.kubernetes.manifest), or a run (app).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from volpipe.cli.groups import Group, several
from volpipe.cli.job import TRAININGS, check_command, command_options, warn
from volpipe.display.console import out, print_as_stored, result_is_in_files
from volpipe.errors import SiteError, VolpipeError
from volpipe.monitoring.exposition import EVERYWHERE, Port, parse_target
from volpipe.resolve import path_of
from volpipe.volumes.storage.result_file import ResultFile, comment, text_kind

if TYPE_CHECKING:
    from volpipe.apps.kubernetes.pod_spec import Claim

PREFIX = "VOLPIPE_K8S"
NEEDED = ("image", "namespace", "claims")
OF_A_DRIVER_OUTSIDE = ("address", "kubeconfig", "context", "uid")
USER = 1000  # of pods where the site has no setting for it; the image's own
INPUTS = (
    "volume",
    "affinities",
    "recipe",
    "mask",
    "output",
    "reference",
    "given",
)  # options and arguments that are read
DEFAULT_SITE = "k8s_htex"
MANIFEST = text_kind("volpipe k8s manifest --directory")
PARTS = ("rights", "claims", "service", "job")

k8s = several("k8s", Group.SITES, 3, "Run the driver in a Kubernetes cluster.")


@k8s.callback()
def commands() -> None:
    """Run the driver in a Kubernetes cluster."""


@k8s.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def manifest(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]...", help="What follows `volpipe`: run or train --config SITE …, or sites check SITE …."
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="PART", help="One of rights, claims, service, job; by default all needed.")
    ] = None,
    size: Annotated[
        list[str] | None, typer.Option(metavar="CLAIM=SIZE", help="Make a claim of this size, such as scratch=10Ti.")
    ] = None,
    storage_class: Annotated[str | None, typer.Option(metavar="NAME", help="Storage class of the claims.")] = None,
    directory: Annotated[
        str | None,
        typer.Option(metavar="BASE", help="Write the manifests to this folder, as a base for kustomize."),
    ] = None,
) -> None:
    """Print manifests: the rights that a driver needs, claims to be made, the service of trainings, the job of COMMAND.

    The service gives the pods of a training names by which its ranks meet. Unless asked for, it is printed with
    train, sweep and tune, and without a COMMAND.

    Image, namespace, claims and all else come from the site's settings, as for a driver that runs here.
    """
    if only not in (None, *PARTS):
        raise VolpipeError(f"--only {only}: write {', '.join(PARTS[:-1])} or {PARTS[-1]}")
    if only == "job" and not command:
        raise VolpipeError("--only job: a job needs a command; append it, such as: run --config k8s_htex volume.n5")
    is_for_trainings = not command or command[0] in TRAININGS  # which alone need the service
    parts = {  # all are right, or none is printed
        part: documents
        for part, documents in _documents_by_part(context, command or [], size or [], storage_class)
        if documents
        and (part.partition(":")[0] == only or (only is None and (is_for_trainings or not part.startswith("service"))))
    }
    if directory is not None:
        _write_base(path_of(directory), parts)
        return
    for part, documents in parts.items():
        print_as_stored(_yaml_of(part, documents))


def _documents_by_part(
    context: typer.Context, command: Sequence[str], sizes: Sequence[str], storage_class: str | None
) -> Iterable[tuple[str, list[dict[str, Any]]]]:  # Any: JSON
    """Yield each part, what it is for, and its manifests."""
    from volpipe.sites.find import site_settings

    site = _site_of(command)
    kind, file = site_settings(site)  # which says in a sentence if the Kubernetes client is not installed
    from volpipe.apps.kubernetes.environment import read_claims
    from volpipe.apps.kubernetes.manifest import driver_job, rights, service, storage
    from volpipe.apps.kubernetes.pod_spec import Shape
    from volpipe.apps.settings import read_settings

    missing = [name for name in NEEDED if name not in {field.name for field in dataclasses.fields(kind)}]
    if missing:
        raise SiteError(
            f"site {site} has no setting {missing[0]}, so it is none for Kubernetes; give --config k8s_htex"
        )
    settings: Any = read_settings(kind, file, PREFIX)  # Any: a dataclass of a site's own
    asked = getattr(settings, "uid", None)
    uid = USER if asked is None else asked
    own_uid = {f"{PREFIX}_UID": str(uid)} if hasattr(settings, "uid") else {}
    claims = read_claims(settings.claims)
    shape = Shape(
        env={"HOME": "/tmp", **environment(settings), **own_uid},
        claims=claims,
        pull_secrets=getattr(settings, "pull_secrets", []),
        secrets=getattr(settings, "secrets", []),
        labels=getattr(settings, "labels", {}),
        annotations=getattr(settings, "annotations", {}),
        scheduler=getattr(settings, "scheduler", None),
        uid=uid,
        gid=uid,
    )
    yield "rights: once, by whoever may give them in the namespace", rights(settings.namespace)
    yield (
        "claims: once, unless they exist already",
        storage(settings.namespace, _claim_sizes(sizes, claims), storage_class),
    )
    yield "service: once, for trainings of several ranks", [service(settings.namespace)]
    if command:
        _check_command_in_cluster(context, command, claims)
        command, port = _with_metrics(context, command)
        job = driver_job(
            command, settings.image, settings.namespace, shape, folder=_job_folder(claims), metrics_port=port
        )
        yield "job: the run; run the same job again to continue", [job]


def _check_command_in_cluster(context: typer.Context, command: Sequence[str], claims: Sequence[Claim]) -> None:
    """Refuse what COMMAND itself would refuse, as far as it can be known here: the cluster has other files."""
    name, folder, given = command[0], Path(_job_folder(claims)), command_options(context, command)
    read = (given.get(option) for option in INPUTS)
    for place in (str(place) for place in read if isinstance(place, str | Path)):
        if place.startswith("/") and not any(Path(place).is_relative_to(claim.path) for claim in claims):
            warn(
                f"{place} lies on none of the claims, {', '.join(claim.path for claim in claims)}: pods will not see it"
            )
    check_command(name, given, folder, lambda what, place: _check_writable(what, place, folder, claims))


def _check_writable(what: str, place: str, folder: Path, claims: Sequence[Claim]) -> None:
    """Refuse an output, which `what` names, that would be lost with its pod, or cannot be written; buckets are left."""
    from volpipe.apps.kubernetes.environment import why_unwritable

    if "://" in place:
        return
    known = place.partition("{")[0]  # of a name for each of several outputs
    if reason := why_unwritable(Path(os.path.normpath(folder / known)), claims):
        raise SiteError(f"{what} {reason}")


def _with_metrics(context: typer.Context, command: Sequence[str]) -> tuple[list[str], int | None]:
    """Return COMMAND, whose --metrics PORT is to be reached from outside of its pod, and that port; None without."""
    words = list(command)
    asked = command_options(context, command).get("metrics")
    target = None if asked is None else parse_target(asked)
    if not isinstance(target, Port):
        return words, None
    if not target.number:
        raise VolpipeError("--metrics 0: nobody would know the port in the pod; give a number, such as 9100")
    if not target.has_host:
        place = next(i for i, word in enumerate(words) if word.partition("=")[0] == "--metrics")
        words[place : place + (1 if "=" in words[place] else 2)] = ["--metrics", f"{EVERYWHERE}:{target.number}"]
    elif target.is_loopback:
        warn(f"--metrics {asked}: only the driver's own pod reaches it; give the port alone for a Prometheus elsewhere")
        return words, None
    return words, target.number


def environment(settings: Any) -> dict[str, str]:  # Any: a dataclass of a site's own
    """Return the environment that tells a driver in the cluster what `settings` say; defaults are the site's own."""
    from volpipe.apps.settings import as_text

    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if (
            field.name not in OF_A_DRIVER_OUTSIDE
            and value is not None
            and value != field.default
            and value not in ([], {})
        ):
            found[f"{PREFIX}_{field.name.upper()}"] = as_text(value)
    return found


def _site_of(command: Sequence[str]) -> str:
    """Return the site of a command; without a command, the shipped one."""
    if not command:
        return DEFAULT_SITE
    if list(command[:2]) == ["sites", "check"] and len(command) > 2:
        return command[2]
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == "--config" and after:
            return after
        if word.startswith("--config="):
            return word.partition("=")[2]
    raise VolpipeError(
        f"{' '.join(command)}: no --config, so it would run in the driver's pod alone; add --config k8s_htex"
    )


def _claim_sizes(texts: Sequence[str], claims: Sequence[Claim]) -> dict[str, str]:
    from volpipe.apps.kubernetes.provider import num_bytes

    found = dict(text.partition("=")[::2] for text in texts)
    names = {claim.name for claim in claims}
    for name, size in found.items():
        if not size or name not in names:
            raise VolpipeError(
                f"--size {name}={size}: write CLAIM=SIZE of one of the claims {', '.join(sorted(names))}"
            )
        num_bytes(size, f"--size {name}:")
    return found


def _job_folder(claims: Sequence[Claim]) -> str:
    """Return where the command is given in the cluster: here too, if this folder is on a claim."""
    here = Path.cwd()
    if any(here.is_relative_to(claim.path) for claim in claims):
        return str(here)
    writable = [claim.path for claim in claims if not claim.read_only]
    if not writable:
        raise SiteError("no claim may be written, so that no run can have its folder there; leave out :ro of one")
    return writable[0]


def _yaml_of(part: str, documents: Sequence[dict[str, Any]]) -> str:  # Any: JSON
    import yaml

    return f"# {part}\n{yaml.safe_dump_all(documents, sort_keys=False, explicit_start=True)}"


def _write_base(directory: Path, parts: dict[str, list[dict[str, Any]]]) -> None:  # Any: JSON
    """Write each part to a file of its name, and what makes `kubectl apply --kustomize` take them all."""
    result_is_in_files()
    files = {f"{part.partition(':')[0]}.yaml": _yaml_of(part, documents) for part, documents in parts.items()}
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(files)}
    texts = {**files, "kustomization.yaml": _yaml_of("volpipe, a base for overlays", [kind])}
    directory.mkdir(parents=True, exist_ok=True)
    results = {name: ResultFile("--directory", directory / name, MANIFEST) for name in texts}
    for result in results.values():  # all are right, or none is written
        result.check()
    for name, text in texts.items():
        results[name].write(f"{comment(MANIFEST.writer)}{text}".encode())
    out.print(f"wrote {directory}: {', '.join(files)}; kubectl apply --kustomize {directory}")
