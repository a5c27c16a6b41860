"""Parsl, imported without SQLAlchemy, which only its monitoring uses: 0.4 of the 0.9 s that it takes, and 17 MiB.

Not here: what interchanges and workers leave out (unneeded). To be imported before Parsl is; a site that monitors gets
SQLAlchemy when it makes its `MonitoringHub`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

PACKAGE = "sqlalchemy"  # Parsl takes it for optional (2026.10.26)


class Later:
    """Stands for the error that Parsl's monitoring has without SQLAlchemy; asked if there is one, it imports that."""

    def __bool__(self) -> bool:
        starter = importlib.import_module("parsl.monitoring.db_manager").dbm_starter
        monitoring = importlib.import_module("parsl.monitoring.monitoring")
        monitoring.__dict__.update(dbm_starter=starter, _db_manager_excepts=None)
        return False


if not {PACKAGE, "parsl"} & sys.modules.keys() and importlib.util.find_spec(PACKAGE) is not None:
    sys.modules[PACKAGE] = None  # type: ignore[assignment]  # which says that there is none
    try:
        importlib.import_module("parsl")
    finally:
        del sys.modules[PACKAGE]
    importlib.import_module("parsl.monitoring.monitoring").__dict__["_db_manager_excepts"] = Later()
