"""Numbers for people: bytes, times, counts, shapes, voxel sizes and speeds.

Not here: the tables that they stand in (display, tables).
"""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
LONGEST_HOURS, DAYS_OF_YEAR = 72, 365.25


def size(num_bytes: float) -> str:
    """Return bytes for people: 1.5 GiB."""
    for unit in UNITS:
        if num_bytes < 1024 or unit == "PiB":
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")


def sizes(num_bytes: float, other_bytes: float) -> tuple[str, str]:
    """Return bytes as `size` has them, and others in the same unit, without it: 1.5 GiB, and 0.3."""
    text, unit = size(num_bytes), size(num_bytes).split()[1]
    return text, f"{other_bytes / 1024 ** UNITS.index(unit):.1f}"


def bounded(num_bytes: float, is_measured: bool) -> str:
    """Return bytes for people; ≤ where they are an upper bound."""
    return size(num_bytes) if is_measured else f"≤ {size(num_bytes)}"


def duration(seconds: float | None) -> str:
    """Return a time for people: 57 years, 12 days, 1 h 05 min, 3 min 20 s, 4.2 s; "" where it is not known."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= LONGEST_HOURS:
        days = hours / 24
        return f"{days:.0f} days" if days < 2 * DAYS_OF_YEAR else f"{days / DAYS_OF_YEAR:,.0f} years"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def brief(seconds: float | None) -> str:
    """Return a time that may be short for people: 3 ms, else as `duration` has it."""
    return f"{1000 * seconds:.0f} ms" if seconds and seconds < 0.1 else duration(seconds)


def count(number: int, noun: str) -> str:
    """Return a number with its noun: 1 task, 1,200 tasks."""
    return f"{number:,} {noun if number == 1 else plural(noun)}"


def listed(names: Sequence[object], most: int) -> str:
    """Return the first names, and how many more there are: a, b and 1,200 more."""
    return ", ".join(map(str, names[:most])) + (f" and {len(names) - most:,} more" if len(names) > most else "")


def plural(noun: str) -> str:
    """Return the plural of a noun: tasks, boxes, classes."""
    return f"{noun}es" if noun.endswith(("x", "s")) else f"{noun}s"


def shape(values: tuple[int, ...]) -> str:
    return " × ".join(map(str, values))


def in_nm(voxel_size_nm: tuple[float, float, float] | None) -> str:
    if voxel_size_nm is None:
        return "voxel size unknown"
    return " × ".join(f"{v:g}" for v in voxel_size_nm) + " nm"


def voxel_rate(speed: float) -> str:
    """Return voxels per second for people: 0.57 Mvoxel/s."""
    unit, name = (1e6, "Mvoxel/s") if speed >= 1e5 else (1e3, "kvoxel/s")
    return f"{speed / unit:.2f} {name}"
