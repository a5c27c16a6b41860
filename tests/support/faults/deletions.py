"""Drivers that are killed while they delete: at each deletion in turn."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from inline import Stopped


class Deletions:
    """Deletions of files and folders, at one of which the driver is killed.

    Args:
        number: of that one.
    """

    def __init__(self, number: int) -> None:
        self.number, self.count = number, 0
        self._rng, self._iterdir = random.Random(number), Path.iterdir

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count; folders are listed in random order meanwhile, as a file system may list them."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "iterdir", lambda path: self._shuffled(path))
            for name in ("unlink", "rmdir"):
                patch.setattr(os, name, self._counting(getattr(os, name)))
            yield

    def _shuffled(self, path: Path) -> Iterator[Path]:
        entries = sorted(self._iterdir(path))
        self._rng.shuffle(entries)
        return iter(entries)

    def _counting(self, delete: Any) -> Any:
        def counting(path: Any, *args: Any, **options: Any) -> None:
            self.count += 1
            if self.count == self.number:
                raise Stopped
            delete(path, *args, **options)

        return counting
