"""The memory that this process may have is the smallest limit of its control groups and of those above them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from volpipe.volumes.storage import memory

MIB = 1 << 20


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": 64 * MIB}, 64 * MIB),  # a container's own
        ("0::/job_1/step_0\n", {"job_1/memory.max": 32 * MIB, "job_1/step_0/memory.max": "max"}, 32 * MIB),
        ("0::/a/b\n", {"a/b/memory.max": 48 * MIB, "a/memory.max": 16 * MIB, "memory.max": 96 * MIB}, 16 * MIB),
        ("0::/docker/1f\n", {"memory.max": 24 * MIB}, 24 * MIB),  # the host's path, in a container
        ("0::/a\n", {"b/memory.max": 8 * MIB}, None),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("0::/a\n", {}, None),
        (
            "5:cpu,cpuacct:/a\n4:memory:/uid_1/job_2\n1:name=systemd:/a\n0::/a\n",
            {"memory/uid_1/memory.limit_in_bytes": 40 * MIB, "memory/uid_1/job_2/memory.limit_in_bytes": 2**63 - 4096},
            40 * MIB,
        ),
    ],
    ids=["container", "job", "above", "host-path", "other", "max", "none", "version-1"],
)  # fmt: skip
def test_the_smallest_limit_of_the_groups_above_a_process_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: Mapping[str, int | str], limit: int | None
) -> None:
    mounted, own = tmp_path / "groups", tmp_path / "own"
    own.write_text(groups)
    for name, content in files.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(f"{content}\n")
    (tmp_path / "memory.max").write_text("1\n")  # above all groups
    monkeypatch.setattr(memory, "GROUPS", mounted)
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "absent")
    whole = memory.shared_bytes()
    monkeypatch.setattr(memory, "OWN_GROUPS", own)
    assert memory.shared_bytes() == (limit or whole)
    assert memory.memory_bytes.__wrapped__() <= memory.shared_bytes()
