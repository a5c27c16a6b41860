"""Refusals for want of room or memory, and warnings of it: both numbers, whose quota it is, and what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from plans import facts, planned, volume

from volpipe.errors import PlanError, VolpipeError
from volpipe.estimation.limits import (
    GIB,
    Limits,
    check_access,
    check_apart,
    check_room,
    check_window,
    check_worker,
    room_warning,
)


def test_a_worker_may_take_all_of_its_memory_and_no_more() -> None:
    check_worker(GIB, GIB, "use less")
    check_worker(9 * GIB, None, "use less")
    with pytest.raises(PlanError) as refusal:
        check_worker(2.5 * GIB, 2 * GIB, "use less")
    assert str(refusal.value) == (
        "a worker needs 2.5 GiB of memory and has 2.0 GiB; use less, or run fewer workers at a time"
    )


def test_a_disk_may_be_filled_and_no_more() -> None:
    limits = Limits(free_bytes=3 << 20, free_files=1000)
    check_room("blocks", 1000, 3 << 20, "out.zarr", limits)
    check_room("blocks", 10**9, 1e18, "out.zarr", Limits())
    with pytest.raises(PlanError) as refusal:
        check_room("blocks", 1001.4, 0, "out.zarr", limits)
    assert str(refusal.value) == (
        "blocks need 1,001 files and folders, and out.zarr may have 1,000; use larger output.shard or output.chunk, or "
        "another --out"
    )
    with pytest.raises(PlanError) as refusal:
        check_room("blocks", 0, 4 << 20, "out.zarr", Limits(free_bytes=3 << 20, bytes_by="group lab"))
    assert str(refusal.value) == (
        "blocks need 4.0 MiB and out.zarr has 3.0 free (quota of group lab); free some, choose another --out, or store "
        "less (output.dtype, output.codec_level)"
    )


def test_who_may_run_out_of_room_is_told() -> None:
    assert room_warning("blocks", 3 << 20, "out.zarr", Limits(free_bytes=3 << 20)) == ""
    assert room_warning("blocks", 3 << 20, "out.zarr", Limits()) == ""
    assert room_warning("blocks", 4 << 20, "out.zarr", Limits(free_bytes=3 << 20)) == (
        "where nothing compresses, blocks take 4.0 MiB, and out.zarr has 3.0 free; the work stops when the disk is "
        "full, and continues once there is room"
    )


def test_an_output_lies_apart_from_what_it_is_made_of(tmp_path: Path) -> None:
    source = volume()
    given = type(source)(**{**vars(source), "path": str(tmp_path / "a" / "in.n5")})
    for place, words in (
        ("a/in.n5", "would overwrite the mask"), ("a", "would overwrite the mask"),
        ("a/in.n5/x/y.zarr", "would lie inside the mask"),
    ):  # fmt: skip
        with pytest.raises(PlanError, match=f"{words} .*in.n5; choose another --out"):
            check_apart(tmp_path / place, given, "mask")
    check_apart(tmp_path / "a" / "out.zarr", given, "mask")
    check_apart(tmp_path / "a" / "in.n5.zarr", given, "mask")


@pytest.mark.parametrize(
    ("size", "window", "overlap", "enough"),
    [(40, 40, 0, 0), (40, 46, 4, 0), (40, 47, 4, 44), (40, 80, 0, 40), (41, 42, 0, 0)],
)
def test_a_window_may_be_a_little_longer_than_the_volume_and_its_overlap(
    size: int, window: int, overlap: int, enough: int
) -> None:
    plan = planned(
        f"windows.shape=[16,{window},16]", f"windows.overlap=[0,{overlap},0]", of=volume((40, size, 40)),
        net=facts(stride=(2, 2, 2) if size == 41 else (1, 1, 1)),
    )  # fmt: skip
    if not enough:
        check_window(plan)
        return
    with pytest.raises(PlanError, match=rf"axis y: windows.shape {window} is too large .* it can be at most {enough};"):
        check_window(plan)


def test_a_volume_that_may_not_be_read_and_a_link_that_leads_nowhere_are_named(tmp_path: Path) -> None:
    (tmp_path / "in.n5").mkdir()
    check_access(tmp_path / "in.n5", tmp_path / "out.zarr")
    (tmp_path / "in.n5" / "raw").symlink_to(tmp_path / "lost")
    with pytest.raises(VolpipeError, match=r"raw.*lost"):
        check_access(tmp_path / "in.n5", tmp_path / "out.zarr")
