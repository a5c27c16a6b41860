"""What makes a process one that workers are forks of: it has Parsl's pool, and shares its memory with them.

It is imported before all that the process imports for its workers.
"""

from __future__ import annotations

import gc
import os
import signal
from functools import partial

from volpipe.apps.htex.processes import PACKAGES, WORKER, be_known_as, import_without


def share_memory() -> None:
    """Keep what was imported from being written to by the first collection of each worker."""
    gc.enable()
    gc.freeze()


gc.disable()  # 0.4 of 2.6 s of this process's processor time (2026-11-25)
import_without(PACKAGES, "parsl.executors.high_throughput.process_worker_pool")
os.register_at_fork(before=share_memory)
# Where this process dies, its workers are taken for dead and others do their tasks: so they are.
os.register_at_fork(after_in_child=partial(be_known_as, WORKER, signal.SIGKILL))
