"""`volpipe view`: volumes in a browser, until it is interrupted.

Not here: what is served (viewer). Ctrl-C is how it ends: exit code 0.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
import webbrowser
from threading import Event
from typing import Annotated, Any

import typer

import volpipe as vp
from volpipe.cli.generate import command
from volpipe.cli.groups import Group
from volpipe.display.console import err, out


@command(Group.MOST_USED, "view", place=3)
def view(
    output: str,
    volumes: list[str],
    *,
    link: Annotated[bool, typer.Option("--link", help="Print the address with the whole state in it.")] = False,
    **options: Any,  # Any: values of options
) -> None:
    """Show OUT and each VOLUME in a browser, side by side, with their difference, by Neuroglancer."""
    try:
        with vp.view(output, *volumes, **options) as viewer:
            for note in viewer.notes:
                err.print(note, soft_wrap=True)
            out.print(viewer.link if link else viewer.url, soft_wrap=True)
            _open_browser(viewer)
            Event().wait()
    except KeyboardInterrupt:
        err.print("closed")


def _open_browser(viewer: vp.Viewer) -> None:
    """Open a browser where there is one; else print how one on another machine gets here."""
    if viewer.is_open:
        away = viewer.url.replace("//127.0.0.1:", f"//{_own_name()}:")
        sentence = f"open to other machines, at {away}: whoever has that address sees these volumes"
        err.print(sentence, soft_wrap=True)
    elif not (_has_display() and webbrowser.open(viewer.url)):
        command = f"ssh -L {viewer.port}:127.0.0.1:{viewer.port} {getpass.getuser()}@{_own_name()}"
        sentence = (
            "no browser can be opened here: open the address in yours; on another machine, give this there first:"
        )
        err.print(f"{sentence}\n  {command}", soft_wrap=True)
    err.print("Ctrl-C ends it")


def _has_display() -> bool:
    """Return whether a browser that is opened here is seen by the user, who may be far away."""
    is_far = bool(os.environ.get("SSH_CONNECTION"))
    return not is_far and (sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY"))))


def _own_name() -> str:
    """Return this machine as an SSH session was given it, else by its name."""
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return connection[2] if len(connection) == 4 else socket.gethostname()
