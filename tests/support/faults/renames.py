"""Drivers that are killed at a rename, before or after it: at each in turn."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from inline import Stopped


class Renames:
    """Renames to files of some `names`, at one of which the driver is killed.

    Args:
        number: of that one, counted from 0: twice its place, and one more where it is killed after it.
    """

    def __init__(self, names: Collection[str], number: int) -> None:
        self.names, self.number, self.count, self.is_killed = names, number, 0, False

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count."""
        replace = Path.replace

        def counting(path: Path, target: Path) -> Path:
            if Path(target).name not in self.names:
                return replace(path, target)
            self._kill_at(self.count)
            renamed = replace(path, target)
            self._kill_at(self.count + 1)
            self.count += 2
            return renamed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "replace", counting)
            yield

    def _kill_at(self, number: int) -> None:
        if number == self.number:
            self.is_killed = True
            raise Stopped
