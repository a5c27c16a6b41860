"""Rich's console without its little languages: `[bold]` and `:two:` in a path are those letters.

Not here: streams (console), or what is printed. A test holds that no other module makes a console, or text of markup.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.progress import TextColumn
from rich.status import Status
from rich.text import Text


def plain_console(**options: Any) -> Console:  # Any: as rich has them
    """Return a console that prints every text as it is, also in cells, titles and captions of tables."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def plain_column(template: str) -> TextColumn:
    """Return the column of a bar that shows `template` of its task as it is."""
    return TextColumn(template, markup=False)


def plain_status(console: Console, text: str) -> Status:
    """Return a line on `console` that shows `text` as it is; `update` takes a `Text`."""
    return console.status(Text(text))
