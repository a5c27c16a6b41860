"""The display below a cell of a notebook, drawn again in place.

Not here: what is drawn. IPython alone is needed, no widget: what was drawn last stays in the notebook's file too.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.jupyter import JUPYTER_HTML_FORMAT

from volpipe.display.plain import plain_console

WIDTH = 120  # characters
DRAW_SECONDS = 0.25  # between two drawings: each is a message to the browser


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook; nothing is imported to find out."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def html_of(renderable: RenderableType) -> dict[str, str]:
    """Return `renderable` as a notebook takes it: as HTML, whose text is escaped, and as plain text."""
    console = plain_console(record=True, file=io.StringIO(), width=WIDTH, force_jupyter=False)
    console.print(renderable)
    page = console.export_html(inline_styles=True, code_format=JUPYTER_HTML_FORMAT, clear=False)
    return {"text/html": page, "text/plain": console.export_text()}


@dataclass
class Cell:
    """A display below the cell that runs; it appears with the first drawing, and stays when the work is over."""

    _handle: Any = None  # IPython's, which is imported where there is one
    _latest: Callable[[], RenderableType] | None = None
    _drawn: float = 0.0

    def draw(self, make: Callable[[], RenderableType]) -> None:
        """Show what `make` returns in place of what was shown; not at once where that was a moment ago."""
        self._latest = make
        if time.monotonic() - self._drawn >= DRAW_SECONDS:
            self.close()

    def close(self) -> None:
        """Show what is to be shown now."""
        if self._latest is None:
            return
        content, self._latest = html_of(self._latest()), None
        if self._handle is None:
            from IPython.display import display

            self._handle = display(content, raw=True, display_id=True)
        else:
            self._handle.update(content, raw=True)
        self._drawn = time.monotonic()
