"""Parsl without packages that it imports where they are installed, and that a process does not use.

They are most of a start: 0.7 of 1.4 s of an interchange, 0.4 of 0.9 s of a driver.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

PACKAGES = ("kubernetes", "sqlalchemy")  # Parsl takes both for optional (2026.10.26)


def import_without(packages: Sequence[str], module: str) -> None:
    """Import `module`, to which those of `packages` that nobody has imported yet seem not to be installed."""
    hidden = [package for package in packages if package not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None says that there is none
    try:
        importlib.import_module(module)
    finally:
        for package in hidden:
            del sys.modules[package]
