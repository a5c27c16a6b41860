"""Pictures of an output, as far as it is written: for its report, and for a table of many.

Not here: how a picture is drawn (reporting), or the page that has them (unit_records).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Generic, TypeVar

from volpipe.blockwise.stage import Schedule
from volpipe.errors import RunError
from volpipe.inference.output import split_arrays
from volpipe.inference.output_plan import OutputPlan
from volpipe.reporting.comparison import ShownOutput, slices_of
from volpipe.reporting.overview import main_picture, overview_of, small_picture
from volpipe.reporting.page import Draft, Item, Picture, Sentence
from volpipe.runs.held_work import QUICK_BYTES
from volpipe.runs.output_files import shard_of
from volpipe.runs.unit_records import UnitRecords
from volpipe.runs.verify import has_lost_files, written
from volpipe.volumes.storage import paths

P = TypeVar("P", bound=OutputPlan)


@dataclass(frozen=True)
class OutputPictures(Generic[P]):
    """Pictures of the output of a plan.

    Attributes:
        subject: returns an array of the output and its input for pictures, with what a schedule says is missing; None
            before it is known.
    """

    plan: P
    records: UnitRecords
    subject: Callable[[P, Schedule], ShownOutput | None]

    def main(self, title: str) -> Picture | None:
        """Return a slice of the whole output, as far as it is written; None before there is one."""
        subject = self._checked_subject(0, self.records.taken().schedule)
        return None if subject is None else main_picture(subject, title)

    def thumbnail(self, edge: int) -> tuple[bytes, str] | None:
        """Return a small slice of the whole output, which is complete, and its media type; None where there is none."""
        subject = self.subject(self.plan.arrays[0], self.records.schedule())
        if subject is None:
            return None
        return small_picture(replace(subject, is_missing=lambda level, shard: False), edge)

    def drafts(self, schedule: Schedule) -> list[Draft]:
        """Return slices of input and output, of each array, where `schedule` has what is done."""
        subject_of = cache(lambda place: self._checked_subject(place, schedule))  # opened once for all pictures

        def drawn(place: int, draw: Callable[[ShownOutput], Sequence[Item]]) -> Sequence[Item]:
            subject = subject_of(place)
            return draw(subject) if subject is not None else [Sentence("Nothing is computed yet.")]

        drafts, arrays = list[Draft](), self.plan.arrays
        for place, array in enumerate(arrays):
            of = f" of {paths.locate(array.out).name}" if len(arrays) > 1 else ""
            drafts += [
                Draft(f"Slices{of}", partial(drawn, place, slices_of), f"Slices{of}"),
                Draft(f"Overview{of}", partial(drawn, place, overview_of), f"Overview{of}"),
            ]
        return drafts

    def _checked_subject(self, place: int, schedule: Schedule) -> ShownOutput | None:
        """Return the subject of an array, which knows what was written and is gone."""
        array, journal = self.plan.arrays[place], self.records.folder.journal
        subject = self.subject(array, schedule)
        if subject is None or not journal.is_file() or journal.stat().st_size > QUICK_BYTES:
            return subject

        @cache
        def checksums() -> dict[tuple[int, int], str]:
            """Return those of shards; none where the journal is damaged, which its tally says."""
            try:
                return written(self.records)
            except RunError:
                return {}

        def is_gone(level: int, number: int) -> bool:
            noted = checksums().get((level, number), "")
            return bool(noted) and has_lost_files(
                self.plan.out, shard_of(array, level, number, split_arrays(noted)[place])
            )

        return replace(subject, is_gone=is_gone)
