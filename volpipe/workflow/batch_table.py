"""The table of a batch: a row for each dataset, as values, as `batch.json` and `batch.csv`, and found again.

Not here: how rows come about (batch), or printing (cli.batch).
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import volpipe
from volpipe.blockwise.notes import StageNote
from volpipe.errors import RunError
from volpipe.runs.report import Ending
from volpipe.tables import html_table
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.object_store import Remote
from volpipe.volumes.storage.paths import Location, atomic_write
from volpipe.workflow.output_state import State

TABLE = "batch"  # batch.json and batch.csv, in the batch's folder
SUFFIX = ".batch"  # of that folder
STORE_SECONDS = 1.0  # between two writings, at least: of 10,000 rows one takes 23 ms, and nothing rests on the table
SHOWN = ("volume", "state", "ended", "wall_seconds", "cpu_seconds", "missing", "out", "reason")  # in a notebook

RowState = Literal["waiting", "running", "done", "unchanged", "incomplete", "failed", "interrupted"]


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A dataset of a batch: what was to be done with it, and how that ended.

    Attributes:
        volume, out, recipe: its place, that of its output, and the recipe's name.
        state, why: of its output before anything ran, and what differs.
        ended, reason: how it ended, and why it failed.
        shape, num_blocks: of the volume (z, y, x), and of all stages.
        output_bytes, output_files, output_folders: planned; bounds unless `is_measured`.
        scratch_bytes, scratch_files, scratch_folders: planned, at their highest; bounds too.
        worker_seconds: planned, of one worker; None where no block was tried.
        share_left: of the work, 0 to 1, before anything ran.
        wall_seconds: of the session that ended it; None where nobody noted it.
        cpu_seconds, read_bytes, written_bytes: of its tasks, over all sessions.
        seams: the highest score of any stage, by axis.
        missing: parts that failed.
        warnings: about its net, its mask and its grey levels.
        grey: by which rule a net sees its grey levels, and which become -1 and 1: "8 bits: 0 … 255"; "" without a net.
        provenance: a hash of what the output says of its origin.
        changed_blocks, computed_blocks: by an update, those that had read voxels which changed, or lay at a face that
            moved, and all that were computed again; None where nobody looked.
    """

    volume: str
    out: str
    recipe: str
    state: State
    why: str = ""
    ended: RowState = "waiting"
    reason: str = ""
    shape: tuple[int, ...] = ()
    num_blocks: int = 0
    output_bytes: float = 0.0
    output_files: int = 0
    output_folders: int = 0
    scratch_bytes: float = 0.0
    scratch_files: int = 0
    scratch_folders: int = 0
    is_measured: bool = False
    worker_seconds: float | None = None
    share_left: float = 1.0
    wall_seconds: float | None = None
    cpu_seconds: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    seams: Mapping[str, float] = field(default_factory=dict)
    missing: int = 0
    warnings: tuple[str, ...] = ()
    grey: str = ""
    provenance: str = ""
    changed_blocks: int | None = None
    computed_blocks: int | None = None

    @property
    def changes(self) -> str:
        """How many blocks had changed, of how many, and how many were computed; "" where nobody looked."""
        if self.changed_blocks is None:
            return ""
        computed = f", {self.computed_blocks:,} computed" if self.computed_blocks else ""
        return f"{self.changed_blocks:,} of {self.num_blocks:,}{computed}"

    @property
    def grey_rule(self) -> str:
        """The rule alone, which volumes of one kind share."""
        return self.grey.partition(":")[0]

    @property
    def is_complete(self) -> bool:
        return self.ended in ("done", "unchanged")

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> DatasetRow:  # Any: JSON
        """Return the row that `tree`, of a table, describes."""
        return cls(**{**tree, "shape": tuple(tree["shape"]), "warnings": tuple(tree["warnings"])})

    def cells(self) -> dict[str, object]:
        """Return the row as a line of CSV."""
        tree = asdict(self) | {f"seam_{axis}": self.seams.get(axis, "") for axis in "zyx"}
        del tree["seams"]
        tree |= {"shape": "x".join(map(str, self.shape)), "warnings": "; ".join(self.warnings)}
        return {name: "" if value is None else value for name, value in tree.items()}


COLUMNS = tuple(DatasetRow("", "", "", "new").cells())


@dataclass
class Table:
    """The rows of a batch, and their two files in its folder, which may be a moment behind until `store` is called.

    Each row is made into text once.
    """

    folder: Path
    rows: list[DatasetRow]

    def __post_init__(self) -> None:
        self._texts = list(map(_texts_of, self.rows))
        self._is_behind, self._stored = True, 0.0

    @property
    def note(self) -> StageNote:
        """How far the batch is."""
        return note_of(self.rows)

    def set(self, number: int, row: DatasetRow) -> None:
        """Put `row` in the place of another; the files follow."""
        self.rows[number], self._texts[number] = row, _texts_of(row)
        self._is_behind = True
        self.keep_up()

    def keep_up(self) -> None:
        """Write both files where a row changed, and not right after they were written."""
        if self._is_behind and time.monotonic() - self._stored >= STORE_SECONDS:
            self.store()

    def store(self) -> None:
        """Write both files, each whole or not at all."""
        rows = ",\n".join(text for text, _ in self._texts)
        version = json.dumps(volpipe.__version__)
        atomic_write(self.folder / f"{TABLE}.json", f'{{"version": {version}, "datasets": [\n{rows}\n]}}\n'.encode())
        lines = [_csv_line({name: name for name in COLUMNS}), *(line for _, line in self._texts)]
        atomic_write(self.folder / f"{TABLE}.csv", "".join(lines).encode())
        self._is_behind, self._stored = False, time.monotonic()


def _texts_of(row: DatasetRow) -> tuple[str, str]:
    return json.dumps(asdict(row)), _csv_line(row.cells())


def _csv_line(cells: Mapping[str, object]) -> str:
    line = io.StringIO()
    csv.DictWriter(line, COLUMNS).writerow(cells)
    return line.getvalue()


def read_table(folder: Path) -> list[DatasetRow] | None:
    """Return the rows that a batch left in `folder`; None where there is no batch.

    Raises:
        RunError: they cannot be understood.
    """
    file = folder / f"{TABLE}.json"
    if not file.is_file():
        return None
    try:
        return [DatasetRow.from_json(tree) for tree in json.loads(file.read_bytes())["datasets"]]
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{file} cannot be understood (written by another version?); move it away") from error


def note_of(rows: Sequence[DatasetRow]) -> StageNote:
    """Return how many datasets are done, at work and failed."""
    count = Counter[str](row.ended for row in rows)
    failed = count["failed"] + count["incomplete"]
    return StageNote(count["done"] + count["unchanged"], len(rows), count["running"], failed)


def batch_folder(place: Location) -> Path:
    """Return the folder of the batch that is named after `place`: its TOML file, or the folder of its outputs."""
    if isinstance(place, Remote):
        return Path.cwd() / f"{'_'.join((place.bucket, *place.parts))}{SUFFIX}"
    if place.suffix.lower() == ".toml":
        return place.with_suffix(SUFFIX)
    return place / f"volpipe{SUFFIX}" if place in (Path.cwd(), Path("/")) else place.with_name(place.name + SUFFIX)


def find_batch(output: str) -> Path | None:
    """Return the folder of the batch that `output` names by its file, its folder or that of its outputs; else None."""
    place = paths.locate(output)
    folders = ([place] if isinstance(place, Path) else []) + [batch_folder(place)]
    return next((folder for folder in folders if (folder / f"{TABLE}.json").is_file()), None)


@dataclass
class BatchReport:
    """How a batch ended: a row for each dataset; `batch.json` and `batch.csv` in its folder hold the same.

    Attributes:
        rows: in the order of the batch.
        seconds: of this session.
        notes: sentences about all datasets.
    """

    rows: list[DatasetRow]
    folder: Path
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return all(row.is_complete for row in self.rows)

    @property
    def ending(self) -> Ending:
        """How it ended."""
        return Ending.of_many([row.reason for row in self.rows if not row.is_complete], len(self.rows), "datasets")

    def to_json(self) -> dict[str, Any]:  # Any: plain values
        """Return the same in plain values, as `batch.json` has them."""
        return {"version": volpipe.__version__, "datasets": [asdict(row) for row in self.rows]}

    def to_pandas(self) -> Any:  # Any: a DataFrame, of a package that need not be there
        """Return the rows as a pandas.DataFrame, in the columns of `batch.csv`."""
        import pandas

        return pandas.DataFrame([row.cells() for row in self.rows], columns=COLUMNS)

    def _repr_html_(self) -> str:
        lines = (row.cells() for row in self.rows)
        return html_table(SHOWN, ([line[name] for name in SHOWN] for line in lines))
