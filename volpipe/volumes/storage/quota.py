"""Quotas of the user, the group, the project or a folder, which free space does not show.

Not here: free space itself, or what a plan needs (limits). Each file system is asked in its own way, without the rights
of root; one that does not answer within a few seconds, or not as expected, is taken to have no quota. Project quotas of
ext4 and XFS are not asked for: those show as free space.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

MOUNTS = Path("/proc/self/mountinfo")  # proc_pid_mountinfo(5)
ANSWER_SECONDS = 5
TOOL_FOLDERS = ("/usr/lpp/mmfs/bin",)  # IBM's tools are there, and seldom on PATH
KIB = 1024
# quotactl(2), <linux/quota.h>: QCMD(Q_GETQUOTA, type); limits are in units of 1 KiB, usage is in bytes.
GET_QUOTA = 0x800007


@dataclass(frozen=True)
class Quota:
    """The rest of one quota.

    Attributes:
        name: whose it is, for people.
        bytes_left, files_left: 0 where it is used up, None where it does not limit them.
    """

    name: str
    bytes_left: int | None
    files_left: int | None


@dataclass(frozen=True)
class Mount:
    """A mounted file system: where, of what kind, and what of."""

    point: Path
    kind: str
    source: str


def find_quotas(folder: Path) -> list[Quota]:
    """Return the quotas that limit what this user writes into `folder`, which exists."""
    place = folder.resolve()
    mount = _mount_of(place)
    if mount is None:
        return []
    quotas = []
    try:
        for quota in WAYS.get(mount.kind, _ask_kernel)(place, mount):
            if quota.bytes_left is not None or quota.files_left is not None:
                quotas.append(quota)
    except (OSError, ValueError, IndexError, KeyError, subprocess.TimeoutExpired) as error:
        log.info("the quota of %s (%s) cannot be read: %s", place, mount.kind, error)
    return quotas


def _mount_of(place: Path) -> Mount | None:
    """Return the innermost file system that `place` lies in; None where nobody says."""
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    mounts = [mount for line in lines if place.is_relative_to((mount := _parse_mount(line)).point)]
    # Of two at the same place the later one covers the earlier.
    return max(reversed(mounts), key=lambda mount: len(mount.point.parts), default=None)


def _parse_mount(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), before.split()[4])
    kind, source, *_ = after.split()
    return Mount(Path(point), kind, source)


def _command_output(*command: str) -> str:
    """Return what `command` prints, "" where it is not installed or fails."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *TOOL_FOLDERS))
    program = shutil.which(command[0], path=path)
    if program is None:
        return ""
    plain = os.environ | {"LC_ALL": "C"}
    with subprocess.Popen(
        [program, *command[1:]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=plain, start_new_session=True,
    ) as process:  # fmt: skip
        try:
            printed, problem = process.communicate(timeout=ANSWER_SECONDS)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # and what it started: IBM's tools are scripts
            raise
    if process.returncode:
        log.info("%s ended with %d: %s", " ".join(command), process.returncode, problem.strip()[:200])
    return "" if process.returncode else printed


def _owners(folder: Path) -> tuple[tuple[str, int], tuple[str, int]]:
    """Return the user and the group that new files in `folder` will have, each by its kind and number."""
    status = folder.stat()
    return ("user", os.geteuid()), ("group", status.st_gid if status.st_mode & stat.S_ISGID else os.getegid())


def _bytes_within(used: int, hard: int, soft: int = 0) -> int | None:
    """Return the rest of a limit; 0 is no limit. The soft limit counts where it is the only one."""
    limit = hard or soft
    return max(0, limit - used) if limit else None


def _ask_lustre(folder: Path, mount: Mount) -> Iterator[Quota]:
    """Yield what `lfs quota` says; see the Lustre operations manual, chapter "Configuring and managing quotas"."""
    owners = [*_owners(folder)]
    project = _command_output("lfs", "project", "-d", str(folder)).split()
    if project and int(project[0]):
        owners.append(("project", int(project[0])))
    for what, number in owners:
        words = _command_output("lfs", "quota", "-q", f"-{what[0]}", str(number), str(folder)).split()
        starts = [i for i, word in enumerate(words) if word.startswith("/")]
        if starts:  # the values may stand on a line of their own
            yield _from_columns(f"{what} {number} on Lustre", words[starts[0] + 1 :])


def _ask_nfs(folder: Path, mount: Mount) -> Iterator[Quota]:
    """Yield what the server's rquotad says to `quota`, one file system a line (-w), graces as numbers (-p)."""
    for what, number in _owners(folder):
        for line in _command_output(
            "quota", "-w", "-p", f"-{what[0]}", *([str(number)] if what == "user" else [])
        ).splitlines():
            words = line.split()
            if words and words[0] == mount.source:
                yield _from_columns(f"{what} {number} on {mount.source}", words[1:])


def _from_columns(name: str, words: Sequence[str]) -> Quota:
    """Return a quota from KiB used, soft, hard, grace, and the same of files; * marks what is too much, [] a guess."""
    values = [0 if i in (3, 7) else int(word.strip("*[]")) for i, word in enumerate(words[:7])]
    kib_used, kib_soft, kib_hard, _, files_used, files_soft, files_hard = values
    return Quota(
        name,
        _bytes_within(KIB * kib_used, KIB * kib_hard, KIB * kib_soft),
        _bytes_within(files_used, files_hard, files_soft),
    )


def _ask_gpfs(folder: Path, mount: Mount) -> Iterator[Quota]:
    """Yield what `mmlsquota -Y` says: lines of fields between colons, named by a line HEADER; blocks are KiB."""
    device = mount.source.removeprefix("/dev/")
    questions = [[f"-{what[0]}", str(number), device] for what, number in _owners(folder)]
    fileset = re.search(r"^fileset name:\s+(\S+)", _command_output("mmlsattr", "-L", str(folder)), re.MULTILINE)
    if fileset:
        questions.append(["-j", fileset[1], device])
    for question in questions:
        names: list[str] = []
        for line in _command_output("mmlsquota", "-Y", *question).splitlines():
            fields = line.split(":")
            if "HEADER" in fields:
                names = fields
                continue
            row = dict(zip(names, fields, strict=False))
            if row.get("filesystemName") == device:
                yield _from_gpfs(row)


def _from_gpfs(row: dict[str, str]) -> Quota:
    blocks = [int(row[name]) * KIB for name in ("blockUsage", "blockInDoubt", "blockLimit", "blockQuota")]
    files = [int(row[name]) for name in ("filesUsage", "filesInDoubt", "filesLimit", "filesQuota")]
    kinds = {"USR": "user", "GRP": "group", "FILESET": "fileset"}
    name = f"{kinds.get(row['quotaType'], row['quotaType'])} {row['name']} on GPFS {row['filesystemName']}"
    return Quota(name, *(_bytes_within(used + doubt, hard, soft) for used, doubt, hard, soft in (blocks, files)))


def _ask_beegfs(folder: Path, mount: Mount) -> Iterator[Quota]:
    """Yield what `beegfs-ctl --getquota --csv` says: name, id, bytes, their limit, chunk files, their limit."""
    for what, number in _owners(folder):
        question = ("--getquota", "--csv", f"--{what[0]}id", str(number), f"--mount={mount.point}")
        for line in _command_output("beegfs-ctl", *question).splitlines():
            fields = line.split(",")
            if len(fields) == 6 and fields[1] == str(number):
                num_bytes, hard, files, most = (int(f) if f.isdecimal() else 0 for f in fields[2:])
                yield Quota(f"{what} {fields[0]} on BeeGFS", _bytes_within(num_bytes, hard), _bytes_within(files, most))


def _ask_ceph(folder: Path, mount: Mount) -> Iterator[Quota]:
    """Yield the quotas of `folder` and of those around it, which are attributes (docs.ceph.com, "CephFS quotas")."""
    for place in (folder, *folder.parents):
        yield Quota(
            f"folder {place} on CephFS",
            _bytes_within(_attribute(place, "ceph.dir.rbytes"), _attribute(place, "ceph.quota.max_bytes")),
            _bytes_within(_attribute(place, "ceph.dir.rentries"), _attribute(place, "ceph.quota.max_files")),
        )
        if place == mount.point:
            return


def _attribute(place: Path, name: str) -> int:
    """Return a number that is an extended attribute, 0 where there is none."""
    with suppress(OSError):
        return int(os.getxattr(place, name))
    return 0


class _Block(ctypes.Structure):
    """struct dqblk of <sys/quota.h>."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("hard_kib", "soft_kib", "used_bytes")),
        *((name, ctypes.c_uint64) for name in ("hard_files", "soft_files", "files", "bytes_time", "files_time")),
        ("valid", ctypes.c_uint32),
    ]


def _ask_kernel(folder: Path, mount: Mount) -> Iterator[Quota]:
    """Yield the quotas of a file system on a disk of this machine, of which anybody may ask for their own."""
    if not mount.source.startswith("/dev/"):
        return
    for kind, (what, number) in enumerate(_owners(folder)):  # USRQUOTA is 0, GRPQUOTA is 1
        block = _get_quota(mount.source, kind, number)
        if block is not None:
            num_bytes = _bytes_within(block.used_bytes, KIB * block.hard_kib, KIB * block.soft_kib)
            files = _bytes_within(block.files, block.hard_files, block.soft_files)
            yield Quota(f"{what} {number} on {mount.source}", num_bytes, files)


def _get_quota(device: str, kind: int, number: int) -> _Block | None:
    """Return what quotactl says of the user or group `number`, None where quotas are off or nobody knows them."""
    block = _Block()
    command = ctypes.c_int(GET_QUOTA << 8 | kind)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.quotactl(command, os.fsencode(device), ctypes.c_int(number), ctypes.byref(block))
    return None if failed else block


Ask = Callable[[Path, Mount], Iterator[Quota]]
WAYS: dict[str, Ask] = {
    "lustre": _ask_lustre,
    "gpfs": _ask_gpfs,
    "beegfs": _ask_beegfs,
    **dict.fromkeys(("nfs", "nfs4"), _ask_nfs),
    **dict.fromkeys(("ceph", "fuse.ceph", "fuse.ceph-fuse"), _ask_ceph),
}
