"""Sites: those that are shipped, and whether one can be used.

Not here: the sites (configs), how one is tried (apps.site_check), or printing (cli).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from volpipe.errors import SiteError
from volpipe.sites.find import find_site, list_sites
from volpipe.sites.findings import Answer, Checked

__all__ = ["check_site", "list_sites"]

WAIT_SECONDS = 300.0


def check_site(
    site: str | Path,
    folder: str | Path = ".",
    volume: str | Path | None = None,
    *,
    wait_seconds: float = WAIT_SECONDS,
    on_start: Callable[[], None] = lambda: None,
    on_answer: Callable[[Answer], None] = lambda answer: None,
) -> Checked:
    """Return what one worker of each executor of a site finds, and the driver; nothing is left running.

    Args:
        site: a shipped name or a Python file.
        folder: of a run's output, which workers should be able to write; where it does not exist, the nearest above.
        volume: that workers should be able to read.
        wait_seconds: for workers to answer.
        on_start: called when nothing is left to refuse, before workers are started.
        on_answer: called with each answer as it comes.

    Returns:
        Its `findings()` name each fault: what would fail a run.

    Raises:
        SiteError: no such site, or it cannot be used here.
        VolumeError: there is no such volume here.
    """
    from volpipe.apps.site_check import check_site as check

    if str(folder).startswith(("s3:", "http:", "https:")):
        raise SiteError(f"--out {folder}: only folders are tried; give the one that the run's folder would be in")
    configure, whole = find_site(str(site)), Path(folder).absolute()
    place = next(parent for parent in (whole, *whole.parents) if parent.is_dir())
    array = None if volume is None else str(volume)
    return check(configure, place, array, wait_seconds=wait_seconds, on_start=on_start, on_answer=on_answer)
