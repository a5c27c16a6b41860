"""The text of a report as someone reads it: a line for each fact, row, sentence, picture, and column of a chart.

What belongs to a moment or a machine is left out: of tables and charts of tasks all but the names.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from PIL import Image

ENDS = {"h1", "h2", "h3", "p", "tr", "figcaption", "dd", "span", "footer"}
CELLS = {"td", "th", "dt", "div", "a", "h1"}
OF_A_MACHINE = ("packages |", "Python |", "hosts |", "devices |", "volpipe |", "code of the net", "plan |")
OF_A_MOMENT = {"began", "ended", "seconds", "mean", "rate", "node"}  # columns of charts
OF_TASKS = ("By stage", "By worker", "By node", "By session", "Stages", "The slowest tasks")  # tables


class Reader(HTMLParser):
    """Collects the lines of a report."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._line: list[str] = []
        self._hidden = 0
        self._title = ""
        self._is_data = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script" and given.get("type") == "application/json":
            self._is_data = True
        elif tag in ("style", "script", "nav", "noscript", "title"):
            self._hidden += 1
        elif tag == "img":
            self._line.append(picture(given.get("src") or ""))
        elif tag == "a" and given.get("href"):
            self._line.append(f"[{given['href']}]")
        elif tag == "p" and given.get("class") == "warning":
            self._line.append("!")
        elif tag in ("h2", "h3"):
            self._end()

    def handle_endtag(self, tag: str) -> None:
        if tag == "script" and self._is_data:
            self._is_data = False
        elif tag in ("style", "script", "nav", "noscript", "title"):
            self._hidden -= 1
        elif tag == "h3":
            self._title = " ".join(self._line)
            self._end()
        elif tag == "tr" and self._title in OF_TASKS:
            self._line = self._line[:1]
            self._end()
        elif tag in ENDS:
            self._end()
        elif tag in CELLS:
            self._line.append("|")

    def handle_data(self, data: str) -> None:
        if self._is_data:
            self._end()
            self.lines += chart(json.loads(data))
        elif not self._hidden and data.strip():
            self._line.append(" ".join(data.split()))

    def _end(self) -> None:
        line = " ".join(self._line).strip(" |")
        if line and not line.startswith(OF_A_MACHINE):
            self.lines.append(line.replace(f"{socket.gethostname()} {os.getpid()}", "this process"))
        self._line = []


def picture(source: str) -> str:
    """Return the pixels of a picture in a few numbers: its size, and the mean of each colour."""
    kind, _, text = source.partition(";base64,")
    data = base64.b64decode(text)
    if "svg" in kind:
        return f"<a drawing: {' '.join(re.sub(r'<[^>]*>', ' ', data.decode()).split())}>"
    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"), float)
    means = " ".join(f"{mean:.1f}" for mean in pixels.mean((0, 1)))
    height, width, _ = pixels.shape
    return f"<{kind.removeprefix('data:')} {height} × {width}, colours {means}, spread {pixels.std():.1f}>"


def chart(drawn: dict[str, object]) -> list[str]:
    """Return a line for each column of a chart that is none of tasks."""
    columns = drawn["columns"]
    assert isinstance(columns, dict)
    names = [] if "began" in columns else [name for name in columns if name not in OF_A_MOMENT]
    return [f"<{name}: {column(columns[name])}>" for name in names]


def column(values: list[object]) -> str:
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    if len(numbers) < sum(value is not None for value in values):
        return ", ".join(sorted({str(value) for value in values}))
    if not numbers:
        return "nothing"
    return f"{len(values)}, {min(numbers):.3f} to {max(numbers):.3f}, mean {np.mean(numbers):.3f}"


def text_of(file: str | Path) -> str:
    """Return the text of the report in `file`."""
    reader = Reader()
    reader.feed(Path(file).read_text(encoding="utf-8").partition("<footer")[0])
    reader.close()
    return "\n".join(reader.lines)
