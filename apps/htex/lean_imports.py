"""Parsl without packages that it imports and does not use here: most of a process's start.

To be imported before Parsl is: the driver then has no SQLAlchemy, which only Parsl's monitoring uses (0.4 of 0.9 s and
17 MiB); a site that monitors gets it when it makes its `MonitoringHub`. Interchanges and workers have stand-ins in a
folder that `executor` and `launch` put first in their PYTHONPATH.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

DRIVER_PACKAGE = "sqlalchemy"
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


class Later:
    """Stands for the error that Parsl's monitoring has without SQLAlchemy; asked if there is one, it imports that."""

    def __bool__(self) -> bool:
        starter = importlib.import_module("parsl.monitoring.db_manager").dbm_starter
        monitoring = importlib.import_module("parsl.monitoring.monitoring")
        monitoring.__dict__.update(dbm_starter=starter, _db_manager_excepts=None)
        return False


def write_stand_ins(folder: Path) -> Path:
    """Write a module for each of PACKAGES into a folder in `folder`, and return that."""
    place = folder / "unneeded"
    place.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        (place / f"{package}.py").write_text(STAND_IN, encoding="utf-8")
    return place


if not {DRIVER_PACKAGE, "parsl"} & sys.modules.keys() and importlib.util.find_spec(DRIVER_PACKAGE) is not None:
    sys.modules[DRIVER_PACKAGE] = None  # type: ignore[assignment]  # which says that there is none
    try:
        importlib.import_module("parsl")
    finally:
        del sys.modules[DRIVER_PACKAGE]
    importlib.import_module("parsl.monitoring.monitoring").__dict__["_db_manager_excepts"] = Later()
