"""Quotas, from what the tools of file systems print, what the kernel fills in, and what attributes say.

The outputs are laid out as in the Lustre operations manual, IBM's mmlsquota reference, quota(1), BeeGFS's and Ceph's
documentation; numbers are invented.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plans import planned, volume

from volpipe.errors import PlanError
from volpipe.estimation.estimate import Slots, estimate, upper_bounds
from volpipe.estimation.limits import Limits, check_limits, disk_limits
from volpipe.volumes.storage import quota
from volpipe.volumes.storage.quota import Quota, find_quotas

UID, GID = os.geteuid(), os.getegid()
Tool = Callable[[str, str], None]


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Return a folder that seems to lie on a file system of some kind."""

    def mount(kind: str, source: str) -> Path:
        folder = tmp_path / "my data"
        (folder / "in").mkdir(parents=True)
        escaped = str(folder).replace(" ", "\\040")
        lines = [
            "21 1 254:0 / / rw,relatime shared:1 - ext4 overlay rw",
            f"40 21 0:50 / {escaped} rw,nosuid shared:9 master:2 - {kind} {source} rw",
            f"41 21 0:51 / {folder.parent}/my rw - tmpfs tmpfs rw",
        ]
        (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
        monkeypatch.setattr(quota, "MOUNTS", tmp_path / "mountinfo")
        return folder / "in"

    return mount


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tool:
    """Put a program on PATH, which is a shell script."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")

    def make(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return make


def test_lustre_tells_of_user_group_and_project(mounted: Callable[[str, str], Path], tool: Tool) -> None:
    folder = mounted("lustre", "10.0.0.1@o2ib:/lscratch")
    tool(
        "lfs",
        'case "$*" in\n'
        f'  "quota -q -u {UID} "*) echo "      /scratch  307200*  204800  409600  6d23h  9000  0  10000  -" ;;\n'
        f'  "quota -q -g {GID} "*) echo "/a/mount/with/a/long/name"; echo "   [1024]  0  0  -  7  0  0  -";'
        f' echo "gid {GID} is using default file quota setting" ;;\n'
        '  "project -d "*) echo " 1234 P $3" ;;\n'
        '  "quota -q -p 1234 "*) echo "/scratch 100 0 1100 - 50 40 0 none" ;;\n'
        "  *) exit 3 ;;\n"
        "esac",
    )
    assert find_quotas(folder) == [
        Quota(f"user {UID} on Lustre", 102400 * 1024, 1000),
        Quota("project 1234 on Lustre", 1000 * 1024, 0),  # the soft limit is the only one, and exceeded
    ]


GPFS = """\
case "$*" in
  "-Y -u {uid} gpfs1") cat <<END
*** Report for USR quotas on gpfs1
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:\
blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:quota:defQuota:fid:filesetname:
mmlsquota::0:1:::gpfs1:USR:{uid}:ada:455894288:0:0:0:none:25738:30000:40000:262:none:i:on:off:117:fs1:
mmlsquota::0:1:::gpfs2:USR:{uid}:ada:1:2:2:0:none:1:2:2:0:none:i:on:off:117:fs1:
END
  ;;
  "-Y -g {gid} gpfs1") exit 1 ;;
  "-Y -j em gpfs1") cat <<END
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:\
blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:
mmlsquota::0:1:::gpfs1:FILESET:1:em:1000:4000:5000:500:none:5:0:0:0:none:
END
  ;;
esac
"""


def test_gpfs_tells_of_user_and_fileset(mounted: Callable[[str, str], Path], tool: Tool) -> None:
    folder = mounted("gpfs", "/dev/gpfs1")
    tool("mmlsquota", GPFS.format(uid=UID, gid=GID))
    tool("mmlsattr", 'printf "file name:            x\\nfileset name:         em\\nsnapshot name:\\n"')
    assert find_quotas(folder) == [
        Quota("user ada on GPFS gpfs1", None, 40000 - 25738 - 262),
        Quota("fileset em on GPFS gpfs1", 3500 * 1024, None),
    ]


def test_beegfs_tells_of_user_and_group(mounted: Callable[[str, str], Path], tool: Tool) -> None:
    folder = mounted("beegfs", "beegfs_nodev")
    tool(
        "beegfs-ctl",
        f'[ "$1 $2" = "--getquota --csv" ] && [ "$5" = "--mount={folder.parent}" ] || exit 1\n'
        "echo name,id,size,hard,files,hard\n"
        f'case "$3 $4" in "--uid {UID}") echo "ada,{UID},78843904,100000000,5,unlimited" ;;'
        f' "--gid {GID}") echo "lab,{GID},1,unlimited,7,10" ;; esac',
    )
    assert find_quotas(folder) == [
        Quota("user ada on BeeGFS", 100000000 - 78843904, None),
        Quota("group lab on BeeGFS", None, 3),
    ]


def test_nfs_tells_of_the_file_system_that_is_asked_for(mounted: Callable[[str, str], Path], tool: Tool) -> None:
    folder = mounted("nfs4", "server:/home/ada")
    tool(
        "quota",
        '[ "$1 $2" = "-w -p" ] || exit 1\n'
        f'[ "$3" = "-u" ] || {{ echo "Disk quotas for group lab (gid {GID}): none"; exit; }}\n'
        f'echo "Disk quotas for user ada (uid {UID}):"\n'
        'echo "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace"\n'
        'echo "server:/home/bob  1 1 1 0 1 1 1 0"\n'
        'echo "server:/home/ada  20168000* 20000000 25000000 1764000000 100 0 0 0"',
    )
    assert find_quotas(folder) == [Quota(f"user {UID} on server:/home/ada", (25000000 - 20168000) * 1024, None)]


def test_ceph_tells_of_folders(mounted: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mounted("ceph", "10.0.0.1:6789:/")
    known = {
        (folder, "ceph.quota.max_files"): b"1000",
        (folder, "ceph.dir.rentries"): b"900",
        (folder.parent, "ceph.quota.max_bytes"): b"5000",
        (folder.parent, "ceph.dir.rbytes"): b"6000",
        (folder.parent.parent, "ceph.quota.max_bytes"): b"1",  # beyond the mount: another file system
    }

    def getxattr(place: Path, name: str) -> bytes:
        if (place, name) not in known:
            raise OSError(61, "No data available")
        return known[place, name]

    monkeypatch.setattr(os, "getxattr", getxattr)
    assert find_quotas(folder) == [
        Quota(f"folder {folder} on CephFS", None, 100),
        Quota(f"folder {folder.parent} on CephFS", 0, None),
    ]


def test_the_kernel_tells_of_both(mounted: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = mounted("xfs", "/dev/sdb1")
    # struct dqblk: limits in KiB, space in bytes, then files, times, and what of it is valid
    blocks = {0x80000700: (2000, 1000, 1_000_000, 0, 0, 5, 0, 0, 63), 0x80000701: (0, 0, 7, 60, 50, 10, 0, 0, 63)}

    class Libc:
        def quotactl(self, command: ctypes.c_int, device: bytes, number: ctypes.c_int, block: object) -> int:
            assert device == b"/dev/sdb1"
            code = command.value & 0xFFFFFFFF
            assert number.value == {0x80000700: UID, 0x80000701: GID}[code]
            ctypes.memmove(block, struct.pack("=8QI", *blocks[code]), 68)
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: Libc())
    assert find_quotas(folder) == [
        Quota(f"user {UID} on /dev/sdb1", 2000 * 1024 - 1_000_000, None),
        Quota(f"group {GID} on /dev/sdb1", None, 50),
    ]


@pytest.mark.parametrize(
    "script",
    ["exit 1", "echo lots of text, no numbers /x", "echo /x 1 2", "printf '\\377\\n'", "kill -9 $$", "sleep 60 | cat"],
)
@pytest.mark.parametrize(("kind", "name"), [("lustre", "lfs"), ("gpfs", "mmlsquota"), ("nfs", "quota")])
def test_a_tool_that_fails_is_no_quota_and_takes_no_time(
    mounted: Callable[[str, str], Path], tool: Tool, monkeypatch: pytest.MonkeyPatch, script: str, kind: str, name: str
) -> None:
    monkeypatch.setattr(quota, "ANSWER_SECONDS", 0.3)
    folder = mounted(kind, "server:/x")
    tool(name, script)
    started = time.monotonic()
    assert find_quotas(folder) == []
    assert time.monotonic() - started < 30


def test_without_tools_mounts_and_quotas_there_are_none(
    mounted: Callable[[str, str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("lustre", "gpfs", "beegfs", "nfs4", "ceph", "overlay"):
        monkeypatch.setenv("PATH", str(tmp_path))
        folder = mounted(kind, "none")
        assert find_quotas(folder) == []
        folder.rmdir()
        folder.parent.rmdir()
    monkeypatch.setattr(quota, "MOUNTS", tmp_path / "no such file")
    assert find_quotas(tmp_path) == []


def test_the_lesser_of_disk_and_quotas_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def found(folder: Path) -> list[Quota]:
        asked.append(folder)
        return [Quota("user ada", 5, 10**30), Quota("group lab", 7, 3), Quota("project em", None, None)]

    monkeypatch.setattr("volpipe.estimation.limits.find_quotas", found)
    limits = disk_limits(tmp_path / "not/yet/there.zarr", 9)
    assert asked == [tmp_path]
    assert limits == Limits(5, 3, 9, "user ada", "group lab")
    monkeypatch.setattr("volpipe.estimation.limits.find_quotas", lambda folder: [Quota("user ada", 10**30, 10**30)])
    disk = os.statvfs(tmp_path)
    limits = disk_limits(tmp_path)
    assert (limits.bytes_by, limits.files_by) == ("", "")
    assert limits.free_bytes == pytest.approx(disk.f_bavail * disk.f_frsize, rel=0.05)


def test_a_refusal_names_whose_quota_it_is() -> None:
    plan = planned()
    rates = dataclasses.replace(upper_bounds(plan), has_bytes=True)
    found = estimate(plan, volume(), 1.0, Slots(1, 1, shared=True), rates)
    with pytest.raises(PlanError, match=r"may have 1 \(quota of group lab\); use larger output\.shard"):
        check_limits(plan, found, Limits(free_files=1, files_by="group lab"))
    with pytest.raises(PlanError, match=r"has 0\.0 free \(quota of user ada\); free some"):
        check_limits(plan, found, Limits(free_bytes=1, bytes_by="user ada"))
