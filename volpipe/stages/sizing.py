"""By what a plan takes the sizes that its recipe leaves open.

Not here: the choice of sizes (estimation.window_choice).
"""

from __future__ import annotations

from dataclasses import dataclass

from volpipe.blockwise.pool import Capacity
from volpipe.inference.plan import NetSizes


@dataclass(frozen=True)
class Sizing:
    """By what a plan takes the sizes that its recipe leaves open.

    Attributes:
        capacity: what the site gives its workers, None where no site is known: then the net's own are taken.
        fresh: whether a run that was begun does not count; else its sizes are kept, on whatever site it goes on.
        sizes: these, where they are known.
    """

    capacity: Capacity | None = None
    fresh: bool = False
    sizes: NetSizes | None = None


UNSIZED = Sizing()
