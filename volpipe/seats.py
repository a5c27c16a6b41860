"""Seats: the place of each rank in an attempt of a training, as the driver gives them out.

Not here: what ranks do with each other (ranks). Files named here lie in the training's folder.
"""

from __future__ import annotations

from dataclasses import dataclass

ABANDONED = "abandoned"  # names the attempt that no rank should join any more
PEER_LOST = "peer lost"  # the result of a rank that failed because another was gone
SERVICE_VARIABLE = "VOLPIPE_SERVICE"  # in the environment of a pod: the service that gives it a name in the cluster


@dataclass(frozen=True)
class Seat:
    """The place of one rank in one attempt of a training.

    Attributes:
        rank: counted from 0.
        ranks: of the attempt.
        attempt: names it, as no other.
        address: where the driver hears its workers; "" where it does not know.
    """

    rank: int = 0
    ranks: int = 1
    attempt: str = ""
    address: str = "127.0.0.1"


ALONE = Seat()
