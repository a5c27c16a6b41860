"""What blocks read when they were computed, against what they would read now, as far as files tell.

Not here: what rests on a block that has changed (update), or the states of files (volumes.file_states).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from volpipe.blockwise.journal import Record
from volpipe.geometry.grid import Box
from volpipe.volumes.file_states import KnownStates, is_same, states_of
from volpipe.volumes.volume import Volume

LOOK = "reread changed"  # a stage that reads blocks without computing them
NO_FINGERPRINT = b""
FINGERPRINT = np.dtype("S33")  # two hashes of 16 digits


@dataclass(frozen=True, eq=False)
class Known:
    """What the journal knows of what blocks read; blocks are counted.

    Attributes:
        fingerprints: of each block, FINGERPRINT; NO_FINGERPRINT where none was noted, or where it was taken back.
        mixed: a flag for each block that was computed again for its neighbours, and then read other voxels than when it
            wrote the shards that were kept.
    """

    fingerprints: np.ndarray
    mixed: np.ndarray

    def of(self, block: int) -> str:
        """Return the fingerprint of `block`, "" where there is none."""
        text: str = self.fingerprints[block].decode()
        return text


def find_known(records: Iterable[Record[Any]], num_blocks: int) -> Known:  # Any: of any kind
    """Return what the `records` of a journal know of what the blocks of its work read."""
    known = Known(np.zeros(num_blocks, FINGERPRINT), np.zeros(num_blocks, bool))
    for record in records:
        for block, fingerprint in getattr(record.result, "seen", ()):
            before = known.of(block)
            is_other = bool(before) and not is_same(before, fingerprint)
            if record.stage == LOOK and (is_other or not before):
                continue  # an update that was interrupted before it could take the block back
            known.mixed[block] |= is_other
            known.fingerprints[block] = fingerprint.encode()
    return known


@dataclass(frozen=True, eq=False)
class InputComparison:
    """Blocks of a work whose input is not as it was when they read it; an array of flags, (blocks,), for each answer.

    Attributes:
        known: what they read.
        changed: which are known to have changed; a block that did not note what it read counts as changed.
        moved: whose files are in another state, or tell none: only their voxels can say whether they changed.
    """

    known: Known
    changed: np.ndarray
    moved: np.ndarray

    @property
    def num_open(self) -> int:
        """Number of blocks that an update may find changed."""
        return int(np.count_nonzero(self.changed | self.moved))


def compare(
    records: Iterable[Record[Any]], volume: Volume, box: Callable[[int], Box], done: np.ndarray
) -> InputComparison:  # Any: of any kind
    """Return how `volume` compares with what the blocks read of which the `records` of a journal speak.

    Args:
        box: of the volume, that a block reads.
        done: a flag for each block.
    """
    known = find_known(records, len(done))
    has_read = known.fingerprints != NO_FINGERPRINT
    moved, states = np.zeros(len(done), bool), states_of(volume, KnownStates)
    for block in np.flatnonzero(has_read & ~known.mixed).tolist():
        now = states.hash(box(block))
        moved[block] = not now or now != known.of(block).partition(":")[0]
    return InputComparison(known, known.mixed | (done & ~has_read), moved)
