"""Limits of machines, disks and the volume; a plan that exceeds them is refused before it runs.

Not here: the estimate of a plan (estimate).
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from volpipe.errors import NOTICE, PlanError
from volpipe.estimation.estimate import Estimate
from volpipe.geometry.grid import align_up
from volpipe.inference.plan import Plan
from volpipe.inference.tiling import AXES, LARGEST_WASTE
from volpipe.units import sizes
from volpipe.volumes.formats.ome_zarr import label_place
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.object_store import Remote, check_writable
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.quota import find_quotas
from volpipe.volumes.volume import Volume

log = logging.getLogger(__name__)

GIB = 1 << 30
IN_A_POD = "KUBERNETES_SERVICE_HOST"  # set by Kubernetes in every container
LOOKS = 100  # files of a volume that are checked before a run


@dataclass(frozen=True)
class Limits:
    """Room and memory that there are, None where they are unknown.

    Attributes:
        free_bytes, free_files: of the disk that the output goes to; its quota, where that is less. Folders count as
            files.
        worker_bytes: memory that each worker may take.
        bytes_by, files_by: whose quota it is that is less, "" where it is the disk.
    """

    free_bytes: int | None = None
    free_files: int | None = None
    worker_bytes: int | None = None
    bytes_by: str = ""
    files_by: str = ""


def disk_limits(out: Location, worker_bytes: int | None = None) -> Limits:
    """Return the limits of the disk that holds `out`, which need not exist yet, and of quotas; a bucket has none."""
    if not isinstance(out, Path):
        return Limits(worker_bytes=worker_bytes)
    folder = next(parent for parent in (out, *out.parents) if parent.exists())
    status = os.statvfs(folder)
    quotas = find_quotas(folder)
    free, bytes_by = _lowest((shutil.disk_usage(folder).free, ""), *((q.bytes_left, q.name) for q in quotas))
    # Some file systems make inodes as they go and count none.
    paths, files_by = _lowest((status.f_favail or None, ""), *((q.files_left, q.name) for q in quotas))
    return Limits(free, paths, worker_bytes, bytes_by, files_by)


def _lowest(*limits: tuple[int | None, str]) -> tuple[int | None, str]:
    """Return the lowest known limit, and the name of its quota."""
    known = [(number, name) for number, name in limits if number is not None]
    return min(known, key=lambda limit: limit[0]) if known else (None, "")


def check_apart(out: Location, volume: Volume, what: str) -> None:
    """Refuse an output that cannot be written, or that would change what the run reads, the `volume` or the `mask`.

    Raises:
        PlanError: with the places.
    """
    if isinstance(out, Remote):
        check_writable(out)
    # Labels of an image lie in its container, beside its arrays.
    place = paths.locate(volume.path) if label_place(out) is None else volume.folder
    source, target = _resolved(place), _resolved(out)
    if target == source or target in source.parents:
        raise PlanError(f"the output {out} would overwrite the {what} {volume.path}; choose another --out")
    if source in target.parents:
        raise PlanError(f"the output {out} would lie inside the {what} {volume.path}; choose another --out")


def _resolved(place: Location) -> Location:
    return place.resolve() if isinstance(place, Path) else place


def check_access(source: Location | None, out: Location) -> None:
    """Refuse a volume that this user may not read, judged by some of its files, or an output that it may not write.

    Args:
        source: the volume's file or folder; None where it does not exist yet.
        out: the output, which need not exist yet.

    Raises:
        PlanError: with the place, and what to do.
        VolumeError: one of the files is a link that leads nowhere.
    """
    if isinstance(source, Path):
        for path in itertools.islice(_paths_in(source), LOOKS):
            paths.check_links(path)
            if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else 0)):
                raise PlanError(
                    f"{path} of the volume may not be read; run as a user who may read it, or change its mode"
                )
    if isinstance(out, Path):
        for name in (out, out.with_name(f"{out.name}.run")):
            paths.check_links(name)
        place = next(parent for parent in (out, *out.parents) if parent.exists())
        if not os.access(place, os.W_OK):
            raise PlanError(f"{out} cannot be made: {place} {unwritable(place)}; choose another --out")


def _paths_in(source: Path) -> Iterator[Path]:
    yield source
    for folder, _, names in os.walk(source):
        yield Path(folder)
        yield from (Path(folder, name) for name in names)


def unwritable(place: Path) -> str:
    """Return why the folder `place` cannot be written, and in a pod the remedy."""
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return "is on a file system that is mounted read-only"
    status = place.stat()
    reason = (
        f"may not be written by user {os.geteuid()}: it is user {status.st_uid}'s, mode {status.st_mode & 0o7777:o}"
    )
    if status.st_uid == 0 and IN_A_POD in os.environ:
        return (
            f"{reason}. A folder of a claim that does not exist is made by Kubernetes, as root's: make it beforehand "
            f"(mkdir, chown {os.geteuid()}), let an init container do that, or use a storage class that minds fsGroup"
        )
    return reason


def check_window(plan: Plan) -> None:
    """Refuse a window whose core alone is larger than the volume: the rest would be mirrored voxels.

    Such a plan is sound, but wasteful.

    Raises:
        PlanError: with the axis, both sizes and a window that is enough.
    """
    for axis, size, window, overlap, stride, least in zip(
        AXES, plan.source.shape, plan.window, plan.overlap, plan.net.stride, plan.net.least, strict=True
    ):
        enough = max(least, overlap + align_up(size, stride))
        is_mirrored = plan.lattice.placement == "lattice" and plan.recipe.windows.shape != "auto"
        if is_mirrored and window > max(enough, overlap + LARGEST_WASTE * size):
            raise PlanError(
                f"axis {axis}: windows.shape {window} is too large for a volume of {size} voxels: with an overlap of "
                f"{overlap}, of mirrored voxels there, it can be at most {enough}; set it to that, or to auto"
            )


def check_limits(plan: Plan, estimate: Estimate, limits: Limits, share_left: float = 1.0) -> None:
    """Refuse a plan that takes more than there is.

    Bytes on disk count only once they were measured, and those of an output that is stored as it is: of others, the
    estimate knows no compression.

    Args:
        share_left: of the work; the output of earlier sessions is on the disk already.

    Raises:
        PlanError: with what is needed, what there is, and what would fit.
    """
    smaller = f"a windows.block below {list(plan.block)}, such as {[max(1, n // 2) for n in plan.block]}"
    if max(plan.block) == 1:
        smaller = f"a windows.shape below {list(plan.window)}"
    check_worker(estimate.memory_bytes, limits.worker_bytes, f"use {smaller}")
    num_bytes = 0.0
    if estimate.is_measured:
        num_bytes = share_left * (estimate.output_bytes + estimate.scratch_bytes)
    elif plan.recipe.output.codec == "raw" and not plan.needs_scan:  # what is empty is not stored
        num_bytes = share_left * estimate.output_bytes
    check_room("output and scratch", share_left * estimate.inodes, num_bytes, plan.out, limits)


def check_worker(num_bytes: float, worker_bytes: int | None, remedy: str) -> None:
    """Refuse work for which a worker needs more memory than the `worker_bytes` that it has, None where nobody knows.

    Raises:
        PlanError: with both, and the `remedy`.
    """
    if worker_bytes is not None and num_bytes > worker_bytes:
        raise PlanError(
            f"a worker needs {num_bytes / GIB:.1f} GiB of memory and has {worker_bytes / GIB:.1f} GiB; {remedy}, or "
            "run fewer workers at a time"
        )


def check_room(what: str, num_inodes: float, num_bytes: float, out: Location | str, limits: Limits) -> None:
    """Refuse files and folders, and bytes, of `what` that the disk of `out` has no room for.

    Raises:
        PlanError: with what is needed, and what there is.
    """
    if limits.free_files is not None and num_inodes > limits.free_files:
        raise PlanError(
            f"{what} need {num_inodes:,.0f} files and folders, and {out} may have {limits.free_files:,}"
            f"{of_quota(limits.files_by)}; use larger output.shard or output.chunk, or another --out"
        )
    if limits.free_bytes is not None and num_bytes > limits.free_bytes:
        need, free = sizes(num_bytes, limits.free_bytes)
        raise PlanError(
            f"{what} need {need} and {out} has {free} free"
            f"{of_quota(limits.bytes_by)}; free some, choose another --out, or store less (output.dtype, "
            "output.codec_level)"
        )


def room_warning(what: str, most_bytes: float, out: Location | str, limits: Limits) -> str:
    """Return that the disk of `out` may have no room for up to `most_bytes` of `what`, "" if it has."""
    if limits.free_bytes is None or most_bytes <= limits.free_bytes:
        return ""
    most, free = sizes(most_bytes, limits.free_bytes)
    return (
        f"where nothing compresses, {what} take {most}, and {out} has {free} free{of_quota(limits.bytes_by)}; the work "
        "stops when the disk is full, and continues once there is room"
    )


def warn_of_room(what: str, most_bytes: float, out: Location | str, limits: Limits) -> None:
    """Tell the user if the disk of `out` may have no room for up to `most_bytes` of `what`."""
    if warning := room_warning(what, most_bytes, out, limits):
        log.warning("%s", warning, extra=NOTICE)


def of_quota(name: str) -> str:
    """Return whose quota a limit is, for the end of a sentence; "" where it is the disk."""
    return f" (quota of {name})" if name else ""
