"""The commit that volpipe was built from, or that its checkout is at.

Not here: the version, which __init__ has. Outputs name the version; the commit is for reports of faults.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BUILT = FOLDER / "commit.txt"  # in a package that was built; setup.py writes it
UNKNOWN = "unknown"
SECONDS = 10.0  # that git may take


def commit() -> str:
    """Return the commit, with "-dirty" where files of the checkout have changed since; "unknown" without a note."""
    if BUILT.is_file():
        return BUILT.read_text(encoding="utf-8").strip()
    return commit_of(FOLDER.parent)


def commit_of(root: Path) -> str:
    """Return the commit of the checkout whose top is `root`; "unknown" where it is none, or there is no git."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--match=v*"]
    if not (root / ".git").exists():  # else git would look for a checkout around it
        return UNKNOWN
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return ended.stdout.strip()
