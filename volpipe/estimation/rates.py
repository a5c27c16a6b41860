"""The rates of a run that trying its blocks gave: kept in its folder, for workers like those that tried them.

Not here: trying blocks (calibrate), or what follows from rates (estimate).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from volpipe.blockwise.pool import WorkerPool
from volpipe.estimation.estimate import Slots, UnitCosts
from volpipe.estimation.net_speeds import processor
from volpipe.inference.plan import Plan
from volpipe.runs.run_folder import RunFolder


@dataclass(frozen=True)
class Workers:
    """Workers of a site that rates hold for: seconds go with their number and processor, memory with where nets are.

    Attributes:
        slots: how many there are.
        threads: cores of each, None where the site does not say.
        processor: the name of the GPU that each has, or of this machine's processor; "" where nobody knows.
    """

    slots: Slots
    threads: int | None
    processor: str

    @classmethod
    def of(cls, pool: WorkerPool) -> Workers:
        """Return the workers of `pool`."""
        in_process = pool.capacity is not None and pool.capacity.in_process
        slots = Slots(pool.slots["cpu"], pool.slots["gpu"], pool.shared, pool.on_gpu, in_process)
        gpu = None if pool.capacity is None else pool.capacity.gpu
        own = processor() if pool.is_here and not pool.on_gpu else ""
        return cls(slots, pool.worker_threads, own if gpu is None else gpu.name)


def load_rates(folder: RunFolder, plan: Plan, workers: Workers | None) -> UnitCosts | None:
    """Return the rates of `plan` that `workers` gave earlier, or any where it is None; None where there are none."""
    try:
        stored = json.loads(folder.rates_file.read_text(encoding="utf-8"))
        if stored["identity"] != plan.identity:
            return None
        is_same = workers is None or stored["workers"] == dataclasses.asdict(workers)
        return UnitCosts(**stored["rates"]) if is_same else None
    except (OSError, ValueError, KeyError, TypeError):  # none, or another version's: it is made again
        return None


def store_rates(folder: RunFolder, plan: Plan, workers: Workers, rates: UnitCosts) -> None:
    """Keep the `rates` of `plan` that `workers` gave."""
    folder.path.mkdir(mode=0o750, parents=True, exist_ok=True)
    content = {
        "identity": plan.identity,
        "workers": dataclasses.asdict(workers),
        "rates": dataclasses.asdict(rates),
    }
    folder.rates_file.write_text(json.dumps(content, indent=1), encoding="utf-8")
