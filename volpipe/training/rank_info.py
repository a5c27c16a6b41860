"""The place of each rank in an attempt of a training, assigned by the driver.

Not here: the ranks' collectives (distributed). Files named here lie in the training's folder.
"""

from __future__ import annotations

from dataclasses import dataclass

ABANDONED = "abandoned"  # a file with the attempt that no rank may join any more
SERVICE_VARIABLE = "VOLPIPE_SERVICE"  # in the environment of a pod: the service that gives it a name in the cluster


@dataclass(frozen=True)
class RankInfo:
    """The place of one rank in one attempt of a training.

    Attributes:
        rank: number of the rank, from 0.
        attempt: unique name of the attempt.
        address: on which the driver listens to its workers; "" where unknown.
    """

    rank: int = 0
    ranks: int = 1
    attempt: str = ""
    address: str = "127.0.0.1"
