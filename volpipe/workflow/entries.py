"""The stages of a flow as its folder remembers them, the work whose plan lies in a folder, and the places of outputs.

Not here: making anything (execute), or how far it is (status).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from volpipe.errors import RunError, VolpipeError
from volpipe.inference.plan import Plan
from volpipe.runs.run_folder import RunFolder
from volpipe.segmentation.driver import SegmentationResult, SegmentWork
from volpipe.segmentation.plan import SegmentPlan
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import read_json
from volpipe.volumes.volume import Volume
from volpipe.workflow.driver import Report, RunWork

FLOW_FILE = "flow.json"


class Entry(BaseModel):
    """A stage, as the flow's folder remembers it.

    Attributes:
        reads: place of what it reads.
        needs: the stages that it needs, by name, and "volume" for what the flow is given.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str
    reads: str
    out: str
    folder: str
    needs: tuple[str, ...] = ()

    @property
    def run(self) -> RunFolder:
        """The folder of the run that writes the output."""
        return RunFolder(Path(self.folder))

    @property
    def journals(self) -> list[Path]:
        """The journals of its tasks: its own, and those of the trainings of a sweep or a search."""
        return [self.run.journal, *sorted(self.run.path.glob(f"[0-9]*/{self.run.journal.name}"))]


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
    return [Entry(name="", kind="run", reads="", out=output, folder=str(RunFolder.find(output).path))]


def find_work(folder: RunFolder) -> RunWork | SegmentWork | None:
    """Return the work whose plan lies in `folder`, None where there is none.

    Raises:
        RunError: what is stored there is damaged.
    """
    plan, labels = folder.load(Plan), folder.load(SegmentPlan)
    if labels is not None:  # both may have been moved
        return SegmentWork(labels, folder=folder)
    return RunWork(plan, folder=folder) if plan is not None else None


def place_of(value: object, called: str) -> str | Path | Volume:
    """Return a volume or its location, of a report that of the output; `called` names it in a refusal.

    Raises:
        VolpipeError: it is none of these.
    """
    if isinstance(value, str | Path | Volume):
        return value
    if isinstance(value, Report | SegmentationResult):
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
