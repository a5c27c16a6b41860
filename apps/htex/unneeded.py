"""Packages that Parsl imports in every process though none but some drivers use them: half of a process's start.

Not here: who puts the folder with these stand-ins first in a process's PYTHONPATH (executors, launch).
"""

from __future__ import annotations

from pathlib import Path

PACKAGES = ("kubernetes", "sqlalchemy")  # Parsl takes both for optional (2026.10.26)

STAND_IN = '''\
"""Stands in for a package that Parsl imports and does not use here; whoever else imports it gets the package."""

import importlib
import sys

importer = sys._getframe(1)
while importer.f_code.co_filename.startswith("<frozen importlib"):
    importer = importer.f_back
if importer.f_globals.get("__name__", "").startswith("parsl."):
    raise ImportError(f"{__name__} is left out, as this process does not need it")
sys.path.remove(__file__.rpartition("/")[0])
del sys.modules[__name__]
importlib.import_module(__name__)
'''


def write_stand_ins(folder: Path) -> Path:
    """Write a module for each of PACKAGES into a folder in `folder`, and return that."""
    place = folder / "unneeded"
    place.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        (place / f"{package}.py").write_text(STAND_IN, encoding="utf-8")
    return place
