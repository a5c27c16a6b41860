"""A stage as the folder of its flow remembers it.

Not here: the file that remembers it (workflow.entries).
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from volpipe.runs.run_folder import RunFolder


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
