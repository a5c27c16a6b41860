"""The stages of a flow as its folder remembers them, and the places of outputs.

Not here: making anything (execute), or how far it is (status).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from volpipe.errors import RunError, VolpipeError
from volpipe.runs.report import WorkReport
from volpipe.runs.run_folder import RunFolder
from volpipe.stages.entry import Entry
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json
from volpipe.volumes.volume import Volume
from volpipe.workflow.run_stages import RunStage

FLOW_FILE = "flow.json"


def find_entries(output: str | Path) -> list[Entry] | None:
    """Return the stages of the flow whose outputs lie in `output`, or whose folder it is; None where there is none.

    Raises:
        RunError: what is stored there is damaged.
    """
    place = paths.locate(output)
    is_folder = isinstance(place, Path) and (place / FLOW_FILE).is_file()
    path = place / FLOW_FILE if is_folder else RunFolder.for_stages(place).path / FLOW_FILE
    tree = read_json(path)
    if tree is None:
        return None
    try:
        return [Entry.model_validate(entry) for entry in tree["stages"]]
    except (ValidationError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be understood (written by another version?)") from error


def entries_of(output: str) -> list[Entry]:
    """Return the stages of a flow as `find_entries`; of other work the run that writes `output`, as the only one."""
    if (entries := find_entries(output)) is not None:
        return entries
    return [Entry(name="", kind=RunStage.kind, reads="", out=output, folder=str(RunFolder.find(output).path))]


def place_of(value: object, called: str) -> str | Path | Volume:
    """Return a volume or its location, of a report that of the output; `called` names it in a refusal.

    Raises:
        VolpipeError: it is none of these.
    """
    if isinstance(value, str | Path | Volume):
        return value
    if isinstance(value, WorkReport) and value.makes_volume:
        return str(value.plan.out)
    raise VolpipeError(
        f"{called} is {type(value).__name__}; give a path, a volume, or what vp.run or vp.segment returned"
    )


def location_of(value: object, called: str) -> str:
    """Return the location of what workers open themselves; as `place_of`.

    Raises:
        VolpipeError: it is a volume that is open, with a view perhaps, or no place of one.
    """
    place = place_of(value, called)
    if isinstance(place, Volume):
        raise VolpipeError(f"{called} is opened by workers, by its location; give {place.path!r}, not the volume")
    return str(place)
