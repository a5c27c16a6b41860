"""Pictures of flows and batches for their reports: the main picture of each stage, a thumbnail of each dataset.

Not here: the pictures of one run (runs.work), or the pages that these stand on (pages).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from volpipe.errors import VolpipeError
from volpipe.reporting.page import Draft, Item
from volpipe.runs.run_folder import RunFolder
from volpipe.workflow.batch_table import DatasetRow
from volpipe.workflow.entries import Entry, find_entries, find_work

MOST_THUMBNAILS, THUMBNAIL = 100, 128  # datasets of a batch, pixels
MOST_STAGES = 12  # of a flow
FLOW_SECTION = "Outputs"


def stage_pictures(entries: Sequence[Entry]) -> list[Draft]:
    """Return the main picture of each stage of a flow that makes a volume."""
    makers = [entry for entry in entries if entry.kind != "evaluate"][:MOST_STAGES]
    return [Draft(f"Output of stage {entry.name}", partial(_stage_picture, entry), FLOW_SECTION) for entry in makers]


def _stage_picture(entry: Entry) -> list[Item]:
    work = find_work(entry.run)
    picture = None if work is None else work.main_picture(entry.name)
    return [] if picture is None else [picture]


def thumbnails(rows: Sequence[DatasetRow]) -> dict[int, tuple[bytes, str]]:
    """Return a small picture, with its media type, of complete datasets by their numbers; of flows the last output.

    They are of the first MOST_THUMBNAILS that have one.
    """
    pictures: dict[int, tuple[bytes, str]] = {}
    for number, row in enumerate(rows):
        if len(pictures) >= MOST_THUMBNAILS:
            break
        if row.is_complete and (picture := _thumbnail(row)) is not None:
            pictures[number] = picture
    return pictures


def _thumbnail(row: DatasetRow) -> tuple[bytes, str] | None:
    try:
        works = [work for folder in _folders(row) if (work := find_work(folder)) is not None]
        return works[-1].thumbnail(THUMBNAIL) if works else None
    except (VolpipeError, OSError, ValueError):  # its own report says so
        return None


def _folders(row: DatasetRow) -> Iterator[RunFolder]:
    """Yield the folders of the runs that make volumes of a dataset."""
    entries = find_entries(row.out)
    if entries is None:
        yield RunFolder.find(row.out)
    else:
        yield from (entry.run for entry in entries if entry.kind != "evaluate")
