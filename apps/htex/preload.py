"""The last of what a process imports that workers are forks of: Parsl's pool, then what lets them share its memory."""

from __future__ import annotations

import gc
import os
from functools import partial

from volpipe.apps.htex.lean_imports import PACKAGES, import_without
from volpipe.apps.htex.processes import WORKER, name_process

import_without(PACKAGES, "parsl.executors.high_throughput.process_worker_pool")
gc.collect()
gc.freeze()  # else the first collection of each worker writes to all that it shares with the others
os.register_at_fork(after_in_child=partial(name_process, WORKER))
