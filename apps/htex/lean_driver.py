"""Parsl as a driver has it, without SQLAlchemy, which only Parsl's monitoring uses; to be imported before Parsl is.

A site that monitors gets it when it makes its `MonitoringHub`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from volpipe.apps.htex.lean_imports import import_without

PACKAGE = "sqlalchemy"


class Later:
    """Stands for the error that Parsl's monitoring has without SQLAlchemy; asked if there is one, it imports that."""

    def __bool__(self) -> bool:
        starter = importlib.import_module("parsl.monitoring.db_manager").dbm_starter
        monitoring = importlib.import_module("parsl.monitoring.monitoring")
        monitoring.__dict__.update(dbm_starter=starter, _db_manager_excepts=None)
        return False


if not {PACKAGE, "parsl"} & sys.modules.keys() and importlib.util.find_spec(PACKAGE) is not None:
    import_without([PACKAGE], "parsl")
    importlib.import_module("parsl.monitoring.monitoring").__dict__["_db_manager_excepts"] = Later()
