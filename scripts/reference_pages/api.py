"""The page of the Python API: a directive of mkdocstrings for each public name, where the code defines it."""

from __future__ import annotations

import inspect

import volpipe as vp

HEAD = """# Python

`import volpipe as vp` gives the names of this page. Each is loaded when it is first used, so that the import is quick.
`dir(vp)` lists them. [Notebooks](../notebooks.md) shows them at work.
"""


def page() -> str:
    """Return the page: functions first, then what they return and raise."""
    names = sorted(vp.__all__)
    functions = [name for name in names if not inspect.isclass(getattr(vp, name))]
    classes = [name for name in names if name not in functions]
    parts = [HEAD, "## Functions\n", *map(_directive, functions), "## Classes\n", *map(_directive, classes)]
    return "\n".join(parts)


def _directive(name: str) -> str:
    thing = getattr(vp, name)
    return (
        f"::: {thing.__module__}.{thing.__qualname__}\n    options:\n      heading: vp.{name}\n"
        f"      toc_label: {name}\n"
        f"      heading_level: 3\n"
    )
