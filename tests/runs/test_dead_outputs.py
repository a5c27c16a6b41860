"""An output, or a folder beside it, that is a dead link is refused before anything is done, and stays as it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import Give
from volumes import noise

SITE = ("--config", "threads")


@pytest.mark.parametrize("name", ["out", "out.run", "above"])
@pytest.mark.parametrize("command", ["run", "segment", "convert", "convert to N5", "convert to TIFF"])
def test_an_output_that_is_a_dead_link_is_refused(tmp_path: Path, give: Give, command: str, name: str) -> None:
    np.save(tmp_path / "a.npy", noise((16, 16, 16)))
    suffix = {"convert to N5": ".n5", "convert to TIFF": ".tif"}.get(command, ".zarr")
    out = Path("above" if name == "above" else ".", f"out{suffix}")
    work = ".partial" if command.startswith("convert") else ".run"
    link = tmp_path / {"out": f"out{suffix}", "out.run": f"out{suffix}{work}", "above": "above"}[name]
    link.symlink_to("/nonexistent/scratch/o")
    given = {
        "run": ("run", *SITE, "--set", "net.name=identity", "a.npy", "-o", out),
        "segment": ("segment", *SITE, "--set", "input.kind=foreground", "a.npy", "-o", out),
    }.get(command, ("convert", "a.npy", out))
    ended = give(*given)
    assert ended.code == 2 and f"{link} is a link that leads nowhere: it names /nonexistent/scratch/o" in ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["a.npy", link.name])
    assert link.is_symlink()
