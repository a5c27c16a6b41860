"""What a page shows of a command, compared with what the command prints.

Numbers that belong to a machine or a moment (seconds, bytes, dates, processes, ports) are not compared, nor are spaces.
Numbers with a decimal point may differ by a tenth, as rounding differs between processors. Everything else is.
"""

from __future__ import annotations

import re
import socket
from pathlib import Path

ELLIPSIS = "…"
MASKS = (
    re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)?"),
    re.compile(r"\d[\d.,]*(?:e[-+]\d+)? (?:(?:h|min) \d+ (?:min|s)|[mµn]?s|min|h|%)(?!\w)"),
    re.compile(r"\d[\d.,]* (?:[KMGT]iB|B)\b"),
    re.compile(r"(?<=process )\d+(?: on [\w.-]+)?"),
    re.compile(r"127\.0\.0\.1:\d+(?:/[\w/-]*)?"),
)
DECIMAL = re.compile(r"(?<![\w.])-?\d[\d,]*\.\d+(?:e[-+]?\d+)?(?![\w.])")
SAME = "#"


def as_shown(printed: str, folder: Path) -> str:
    """Return output as a page shows it: paths are relative to the page's folder, and no line ends in spaces."""
    text = printed.replace(f"{folder}/", "").replace(str(folder), ".").replace(socket.gethostname(), "login1")
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def is_shown(shown: str, printed: str) -> bool:
    """Return whether a page shows what was printed; a line "…" stands for any lines, "…" in a line for any words."""
    expected, lines = _lines(shown), _lines(printed)
    return _matches(expected, lines)


def _lines(text: str) -> list[str]:
    lines = [" ".join(_masked(line).split()) for line in text.splitlines()]
    return [line for line in lines if line]


def _masked(line: str) -> str:
    for mask in MASKS:
        line = mask.sub(SAME, line)
    return line


def _matches(expected: list[str], lines: list[str]) -> bool:
    if not expected:
        return not lines
    if expected[0] == ELLIPSIS:
        return any(_matches(expected[1:], lines[number:]) for number in range(len(lines) + 1))
    return bool(lines) and _is_line(expected[0], lines[0]) and _matches(expected[1:], lines[1:])


def _is_line(expected: str, line: str) -> bool:
    pattern = ".*".join(re.escape(DECIMAL.sub("\0", part)) for part in expected.split(ELLIPSIS))
    pattern = pattern.replace(re.escape("\0"), f"({DECIMAL.pattern})").replace("\0", f"({DECIMAL.pattern})")
    if ELLIPSIS in expected:
        return re.fullmatch(pattern, line) is not None
    numbers, others = DECIMAL.findall(expected), DECIMAL.findall(line)
    if DECIMAL.sub("\0", expected) != DECIMAL.sub("\0", line) or len(numbers) != len(others):
        return False
    return all(map(_is_near, numbers, others))


def _is_near(one: str, other: str) -> bool:
    low, high = sorted(float(number.replace(",", "")) for number in (one, other))
    return high - low <= max(0.1 * max(abs(low), abs(high)), 0.015)
