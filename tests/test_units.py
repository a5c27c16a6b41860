"""Numbers as people read them: bytes, times, counts, lists, shapes and speeds."""

from __future__ import annotations

import pytest

from volpipe import units

DAY = 86_400


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1024**2 - 1, "1024.0 KiB"),
        (1024**2, "1.0 MiB"), (3.25 * 1024**3, "3.2 GiB"), (1024**4, "1.0 TiB"), (1024**5, "1.0 PiB"),
        (5000 * 1024**5, "5000.0 PiB"),
    ],
)  # fmt: skip
def test_bytes_have_the_largest_unit_of_which_there_is_one(num_bytes: float, text: str) -> None:
    assert units.size(num_bytes) == text
    assert units.bounded(num_bytes, is_measured=True) == text
    assert units.bounded(num_bytes, is_measured=False) == f"≤ {text}"


def test_two_numbers_of_bytes_have_one_unit() -> None:
    assert units.sizes(3 * 1024**2, 1024**2 // 2) == ("3.0 MiB", "0.5")
    assert units.sizes(1024, 5 * 1024**2) == ("1.0 KiB", "5120.0")
    assert units.sizes(7, 9) == ("7 B", "9.0")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""), (0, "0.0 s"), (4.24, "4.2 s"), (59.94, "59.9 s"), (60, "1 min 00 s"), (200.4, "3 min 20 s"),
        (3599, "59 min 59 s"), (3599.6, "1 h 00 min"), (3900, "1 h 05 min"), (72 * 3600 - 1, "71 h 59 min"),
        (72 * 3600, "3 days"), (12.6 * DAY, "13 days"), (730 * DAY, "730 days"), (730.5 * DAY, "2 years"),
        (57 * 365.25 * DAY, "57 years"), (1e6 * 365.25 * DAY, "1,000,000 years"),
    ],
)  # fmt: skip
def test_a_time_has_two_units_at_most(seconds: float | None, text: str) -> None:
    assert units.duration(seconds) == text


def test_a_short_time_is_in_milliseconds() -> None:
    assert [units.brief(s) for s in (None, 0, 0.0004, 0.003, 0.0994, 0.1, 75)] == [
        "", "0.0 s", "0 ms", "3 ms", "99 ms", "0.1 s", "1 min 15 s"
    ]  # fmt: skip


def test_counts_have_their_nouns() -> None:
    counts = ((0, "task"), (1, "task"), (2, "task"), (1200, "box"), (1, "class"))
    assert [units.count(*each) for each in counts] == ["0 tasks", "1 task", "2 tasks", "1,200 boxes", "1 class"]
    assert [units.plural(noun) for noun in ("axis x", "class", "slice")] == ["axis xes", "classes", "slices"]


def test_lists_name_the_first_and_count_the_rest() -> None:
    assert units.listed([], 2) == ""
    assert units.listed(["a", "b"], 2) == "a, b"
    assert units.listed(["a", "b", "c"], 2) == "a, b and 1 more"
    assert units.listed(range(1202), 2) == "0, 1 and 1,200 more"


def test_shapes_sizes_and_speeds() -> None:
    assert units.shape((4, 50, 6)) == "4 × 50 × 6"
    assert units.in_nm((30.0, 4.25, 4.0)) == "30 × 4.25 × 4 nm"
    assert units.in_nm(None) == "voxel size unknown"
    assert [units.voxel_rate(v) for v in (0.0, 570.0, 99_999.0, 100_000.0, 2.5e6)] == [
        "0.00 kvoxel/s", "0.57 kvoxel/s", "100.00 kvoxel/s", "0.10 Mvoxel/s", "2.50 Mvoxel/s"
    ]  # fmt: skip
