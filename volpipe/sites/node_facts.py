"""The facts of a worker: its host, packages and GPUs, and what it can read and write.

Not here: what is made of it (findings). A worker gets this file as text, because the volpipe that it has may be another
one, or none: nothing but Python's own library is imported before it is looked for, and plain data go in and come out.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import importlib.metadata
import os
import platform
import socket
import sys
import time
import uuid
import warnings
from pathlib import Path
from typing import TypedDict

SHM = "/dev/shm"


class VolumeBox(TypedDict):
    """A box of a volume: `path` and `key` as of a Volume, `start` and `stop` in voxels (z, y, x)."""

    path: str
    key: str
    start: list[int]
    stop: list[int]


class Question(TypedDict):
    """The question to a worker.

    Attributes:
        packages: names that are imported, volpipe among them.
        version: of the volpipe that asks; another one is not trusted with `part`.
        mark: a file that the driver has written; beside it a small file is written and deleted.
        part: what is read of a volume, if anything.
        try_gpus: whether each process that asks may also compute a little on a GPU.
    """

    packages: list[str]
    version: str
    mark: str
    part: VolumeBox | None
    try_gpus: bool


class NodeFacts(TypedDict):
    """The facts of a worker; errors are "" where there was none.

    Attributes:
        python, executable: version, and the file.
        versions, broken: of each package its version, or why it cannot be imported.
        code: hash of volpipe's own files, "" where it cannot be imported.
        gpus: names of the CUDA devices that torch sees; `gpu_error` says why there are none.
        visible: CUDA_VISIBLE_DEVICES, None where it is not set.
        shm_bytes: size of /dev/shm, None where it is not there.
        folder_error: why the folder of the mark cannot be written.
        free_bytes, free_files: of its disk, None where nobody counts.
        voxels: hash of what was read.
        volume_error: why nothing was.
        seconds: that all this took.
    """

    host: str
    python: str
    executable: str
    versions: dict[str, str]
    broken: dict[str, str]
    code: str
    gpus: list[str]
    gpu_error: str
    visible: str | None
    shm_bytes: int | None
    folder_error: str
    free_bytes: int | None
    free_files: int | None
    voxels: str
    volume_error: str
    seconds: float


def examine(question: Question) -> NodeFacts:
    """Return the facts of this process; a fault that it finds is no error."""
    started = time.monotonic()
    versions, broken = find_versions(question["packages"])
    gpus, gpu_error = find_gpus(question["try_gpus"]) if "torch" in versions else ([], "torch cannot be imported")
    free_bytes, free_files = free_space(question["mark"])
    voxels, volume_error = try_volume(question["part"], versions.get("volpipe"), question["version"])
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "versions": versions,
        "broken": broken,
        "code": hash_of_code() if "volpipe" in versions else "",
        "gpus": gpus,
        "gpu_error": gpu_error,
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "shm_bytes": shm_bytes(),
        "folder_error": try_folder(Path(question["mark"])),
        "free_bytes": free_bytes,
        "free_files": free_files,
        "voxels": voxels,
        "volume_error": volume_error,
        "seconds": time.monotonic() - started,
    }


def find_versions(packages: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the version of each package that can be imported, and of the others why not."""
    versions, broken = {}, {}
    for name in packages:
        try:
            module = importlib.import_module(name)  # what is installed may not be what PYTHONPATH puts before it
            versions[name] = str(getattr(module, "__version__", None) or importlib.metadata.version(name))
        except Exception as error:  # whatever a broken package says
            broken[name] = one_line(error)
    return versions, broken


def hash_of_code() -> str:
    """Return a hash of volpipe's own files, less apps, models and sites, which lie elsewhere in a checkout."""
    folder = Path(str(importlib.import_module("volpipe").__file__)).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        place = file.relative_to(folder)
        if place.parts[0] not in ("apps", "models", "configs"):
            digest.update(place.as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def find_gpus(try_them: bool) -> tuple[list[str], str]:
    """Return the names of the CUDA devices that torch sees, and why it sees none."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            number = torch.cuda.device_count() if torch.cuda.is_available() else 0
            names = [torch.cuda.get_device_name(i) for i in range(number)]
            if names and try_them:  # torch may lack the code for a GPU that it sees
                torch.ones(1, device="cuda").add(1).item()
        except Exception as error:  # whatever the driver says
            return [], one_line(error)
    if names:
        return names, ""
    if torch.version.cuda is None and torch.version.hip is None:
        return [], f"torch {torch.__version__} was built without CUDA"
    return [], " ".join(str(said[0].message).split()) if said else "torch finds no device"


def shm_bytes() -> int | None:
    """Return the size of the memory that processes share, None where there is none."""
    try:
        stat = os.statvfs(SHM)
    except OSError:
        return None
    return stat.f_blocks * stat.f_frsize


def free_space(mark: str) -> tuple[int | None, int | None]:
    """Return the bytes and the files for which there is room beside `mark`; None where nobody counts."""
    folder = next(parent for parent in Path(mark).parents if parent.exists())
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else None


def try_folder(mark: Path) -> str:
    """Return why nothing can be written beside `mark`, "" if it can."""
    own = mark.with_name(f"{mark.name}-{uuid.uuid4().hex}")
    try:
        if not mark.parent.is_dir():
            return "it is not there"
        if not mark.exists():
            return "another folder has that path there, without what this command wrote to it"
        with own.open("xb") as file:
            file.write(bytes(4096))
            os.fsync(file.fileno())
    except OSError as error:
        return "the disk is full" if error.errno == errno.ENOSPC else one_line(error)
    finally:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)
    return ""


def try_volume(part: VolumeBox | None, version: str | None, wanted: str) -> tuple[str, str]:
    """Return the hash of the voxels of `part`, and why they cannot be read.

    Args:
        version: of volpipe here, None where there is none.
        wanted: of volpipe where the question comes from.
    """
    if part is None or version != wanted:  # of which there is a finding anyway
        return "", ""
    try:
        from volpipe.geometry.grid import Box
        from volpipe.volumes.volume import open_volume

        z, y, x = part["start"]
        start, (z, y, x) = (z, y, x), part["stop"]
        data = open_volume(part["path"], part["key"]).as_it_is.open().read(Box(start, (z, y, x)))
    except Exception as error:  # whatever a library makes of a volume that is not what it was
        return "", one_line(error)
    return hashlib.sha256(f"{data.dtype} {data.shape}".encode() + data.tobytes()).hexdigest(), ""


def one_line(error: Exception) -> str:
    """Return the message of an error, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()) or type(error).__name__
