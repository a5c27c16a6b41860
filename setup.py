"""Writes the commit of the checkout into a package that is built; all else is in pyproject.toml."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def commit_of(root: Path) -> str:
    """Return the commit of the checkout at `root`, by volpipe/commit.py, which needs nothing to be installed."""
    spec = importlib.util.spec_from_file_location("commit", root / "volpipe" / "commit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    commit: str = module.commit_of(root)
    return commit


class BuildWithCommit(build_py):
    """The usual step, and the file commit.txt beside the modules."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            (Path(self.build_lib) / "volpipe" / "commit.txt").write_text(f"{commit_of(ROOT)}\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithCommit})
