"""What `volpipe sites check` found on a site, as a table.

Not here: printing, or the check (sites).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table

from volpipe.display.console import columns
from volpipe.units import duration, size

if TYPE_CHECKING:
    from volpipe.sites.findings import Checked
    from volpipe.sites.node_facts import NodeFacts


def checkup_table(checked: Checked) -> Table:
    """Return what the driver and one worker of each executor found; ≠ marks versions that differ from the driver's."""
    names = ("", "here", *(answer.label for answer in checked.answers))
    table = columns(*names, left=names, fold=True)
    contents = [dict(_checkup_cells(checked.here, checked))]
    for answer in checked.answers:
        cells = dict(_checkup_cells(answer.facts, checked)) if answer.facts is not None else {"host": "no answer"}
        if answer.facts is not None:
            cells["time to start"] = duration(answer.start_seconds)
        contents.append(cells)
    for name in dict.fromkeys(name for cells in contents for name in cells):
        table.add_row(name, *(cells.get(name, "") for cells in contents))
    table.caption = f"output: {checked.folder}" + (f"\nvolume: {checked.volume}" if checked.volume else "")
    return table


def _checkup_cells(facts: NodeFacts, checked: Checked) -> Iterator[tuple[str, str]]:
    """Yield name and content of each cell of a column."""
    from volpipe.sites.findings import PACKAGES, differs

    yield "host", facts["host"]
    other = facts["python"].split(".")[:2] != checked.here["python"].split(".")[:2]
    yield "Python", f"{'≠ ' if other else ''}{facts['python']}"
    for name in PACKAGES:
        known = facts["versions"].get(name, "cannot be imported")
        yield name, f"{'≠ ' if differs(name, checked.here, facts) else ''}{known}"
    yield "GPUs", ", ".join(facts["gpus"]) or f"none: {facts['gpu_error']}"
    yield "/dev/shm", "not there" if facts["shm_bytes"] is None else size(facts["shm_bytes"])
    yield "output", "cannot be written" if facts["folder_error"] else "can be written"
    yield "  free", "unknown" if facts["free_bytes"] is None else size(facts["free_bytes"])
    yield "  files", "not counted" if facts["free_files"] is None else f"{facts['free_files']:,}"
    if checked.volume:
        yield "volume", _volume_cell(facts, checked)


def _volume_cell(facts: NodeFacts, checked: Checked) -> str:
    if facts["volume_error"]:
        return "cannot be read"
    if not facts["voxels"]:
        return "not tried"
    if facts is checked.here:
        return "can be read"
    return "the same voxels" if facts["voxels"] == checked.here["voxels"] else "other voxels"
