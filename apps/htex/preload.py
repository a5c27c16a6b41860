"""The last of what a process imports that workers are forks of: Parsl's pool, then what lets them share its memory."""

from __future__ import annotations

import gc
import os
import signal
from functools import partial

from volpipe.apps.htex.lean_imports import PACKAGES, import_without
from volpipe.apps.htex.processes import WORKER, be_known_as

import_without(PACKAGES, "parsl.executors.high_throughput.process_worker_pool")
gc.enable()
gc.freeze()  # else the first collection of each worker writes to all that it shares with the others
# Where this process dies, its workers are taken for dead and others do their tasks: so they are.
os.register_at_fork(after_in_child=partial(be_known_as, WORKER, signal.SIGKILL))
