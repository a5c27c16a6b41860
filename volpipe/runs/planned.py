"""What was planned for the making of an output, kept in its folder for the report that sets it beside what it took.

Not here: the estimate itself (estimation), or the report (pages).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from volpipe.volumes.storage.paths import atomic_write

FILE = "planned.json"


@dataclass(frozen=True)
class Planned:
    """Bytes, files, memory and time as planned; None where nobody knew.

    Attributes:
        identity: of the plan.
        seconds: from the first task to the last.
        read_bytes, written_bytes: of all tasks, as stored, scratch included.
        scratch_bytes: at their highest.
        is_measured: whether bytes were measured on a few blocks; else they are upper bounds.
        stage_seconds: of all workers together, by stage.
    """

    identity: str
    seconds: float | None = None
    memory_bytes: float | None = None
    read_bytes: float | None = None
    written_bytes: float | None = None
    output_bytes: float | None = None
    output_files: int | None = None
    scratch_bytes: float | None = None
    is_measured: bool = False
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def worker_seconds(self) -> float | None:
        """Of all workers together."""
        return sum(self.stage_seconds.values()) or None

    def store(self, folder: Path) -> None:
        """Keep this in `folder`."""
        atomic_write(folder / FILE, json.dumps(dataclasses.asdict(self), indent=1).encode())

    @classmethod
    def load(cls, folder: Path, identity: str) -> Planned | None:
        """Return what was planned for the plan of that `identity`; None where nothing is kept, or of another one."""
        try:
            tree: dict[str, Any] = json.loads((folder / FILE).read_bytes())  # Any: JSON
            planned = cls(**tree)
        except (OSError, ValueError, TypeError):
            return None
        return planned if planned.identity == identity else None
