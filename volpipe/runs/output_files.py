"""The files of an output and its folder: created, closed to readers while it changes, verified and deleted.

Not here: whether they may be (standing), or what the voxels are. Work that makes a volume *has* such files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from volpipe.errors import RunError
from volpipe.inference.output import create_output, grow_output, remove_leftovers, split_arrays, stored_box
from volpipe.inference.output_plan import OutputPlan
from volpipe.runs.provenance import begin, begin_session, unseal
from volpipe.runs.unit_records import UnitRecords
from volpipe.runs.update_records import Updated, updates_in
from volpipe.runs.verify import Shard, Verdict, check_files, metadata_of, written
from volpipe.volumes.storage import paths

log = logging.getLogger(__name__)

P = TypeVar("P", bound=OutputPlan)


def shard_of(array: OutputPlan, level: int, number: int, sums: str) -> Shard:
    """Return a shard of an array, with the checksums that were noted of its files."""
    box = array.shards(level).box(number)
    return Shard(f"{array.folder}/{array.key(level)}".lstrip("/"), box, stored_box(array, box), sums)


@dataclass
class OutputFiles(Generic[P]):
    """The files that the work of a plan writes."""

    plan: P
    records: UnitRecords
    is_noted: bool = False  # whether the folder has noted this session

    @property
    def place(self) -> paths.Location:
        """Where the output goes."""
        return paths.locate(self.plan.out)

    def shards(self) -> list[Shard]:
        """Return the shards that were written, by the journal, with their checksums."""
        arrays = self.plan.arrays
        return [
            shard_of(array, *key, own)
            for key, sums in written(self.records).items()
            for array, own in zip(arrays, split_arrays(sums), strict=True)
        ]

    def verify(
        self, shards: Sequence[Shard], due: Callable[[int], np.ndarray | None], *, is_fast: bool = False
    ) -> Verdict:
        """Read every file of the output, and compare it with what its task noted.

        Args:
            shards: that were written, of which there are some.
            due: returns a flag for each shard of a level, whether it is written in the end; None where all are.
            is_fast: whether to look only whether the files of voxels are there.
        """
        plan = self.plan
        verdict = check_files(plan.out, shards, metadata_of(self.records.folder), plan.level_keys, is_fast=is_fast)
        levels = [(due(level), len(plan.shards(level))) for level in range(len(plan.factors))]
        num_due = sum(num if flags is None else int(flags.sum()) for flags, num in levels)
        verdict.num_unwritten = num_due - len(shards) // len(plan.arrays)
        return verdict

    def check_journal(self) -> None:
        """Refuse to verify an output without its journal.

        Raises:
            RunError: saying what to do.
        """
        folder = self.records.folder
        if not folder.journal.is_file():
            raise RunError(
                f"{folder.path} holds no journal, which alone knows what the output's files should hold; restore "
                "the folder, or give the command with --fresh to make both again"
            )

    def write_metadata(self, provenance: dict[str, object], of_arrays: Sequence[dict[str, object]] = ()) -> None:
        """Write the metadata of the output, first of all that it is not complete; voxels that exist stay.

        Arguments are as of `create_output`.
        """
        folder, kinds = self.records.folder, self.records.kinds
        with paths.reading_once():
            begin(folder, self.plan, kinds)
            if any(update.plan for update in updates_in(folder.journal, kinds)):  # the volume has grown
                grow_output(self.plan)
            create_output(self.plan, provenance, of_arrays)

    def note_session(self, site: str) -> None:
        """Note that this session works on the output, which is not sealed from then on."""
        if not self.is_noted:
            begin_session(self.records.folder, site, getattr(self.plan, "code_sha256", ""))
            self.is_noted = True

    def unseal(self, updates: Sequence[Updated]) -> bool:
        """Let the output say that it is being updated, and return whether there is one."""
        is_there = paths.exists(self.place)
        if is_there:
            unseal(self.plan, updates)
        return is_there

    def clear(self) -> None:
        """Delete the output, and then what the folder has of it: without, nobody would know any more whose it is.

        After a kill at any moment nothing of either counts, and `claim` deletes the rest.
        """
        folder = self.records.folder
        paths.atomic_write(folder.clearing, b"")
        paths.delete(self.place)
        (folder.path / self.plan.FILE).unlink(missing_ok=True)  # what comes to the output's place is another's
        folder.clear()

    def clean(self) -> None:
        """Delete what killed writers left in the output."""
        for path in remove_leftovers(self.place):
            log.info("deleted %s, which a killed writer left", path)
