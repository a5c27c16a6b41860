"""What is installed is what the tree holds, and a run works however volpipe came to be importable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from conftest import ROOT

from volpipe.geometry.grid import Box
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer

PLACES = {"volpipe": "volpipe", "apps": "volpipe/apps", "models": "volpipe/models", "configs": "volpipe/configs"}
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
OFFLINE = ["--quiet", "--no-deps", "--no-index"]
SECONDS_TO_RUN = 200.0
SECONDS_TO_END = 10.0

# The net of the runs: the identity, which notes where each process that builds it has volpipe from.
NET = """
import os
import sys
from pathlib import Path

import volpipe.apps.app
import volpipe.configs.local
from volpipe.models.identity import identity

ours = [module.__file__ for name, module in sys.modules.items() if name.partition(".")[0] == "volpipe"]
Path(__file__).with_name(f"imported_{os.getpid()}").write_text("\\n".join(filter(None, ours)))
"""
RECIPE = """
net = { name = "noting.py:identity" }
windows = { shape = [16, 16, 16], block = [1, 1, 2] }
tensors = { mode = "stored" }
"""


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run `command`; its output is shown where it fails."""
    ended = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_TO_RUN,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows or would: a build must not live on what earlier builds left behind."""
    copy = tmp_path_factory.mktemp("packaging") / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    folder = tree.parent / "wheel"
    source = shutil.copytree(tree, tree.parent / "source")
    commit_all(source)
    run(*PIP, "wheel", *OFFLINE, "--no-build-isolation", "--wheel-dir", folder, source)
    (path,) = folder.iterdir()
    return path


def git(folder: Path, *arguments: str) -> str:
    """Return what git prints in `folder`, under a name of our own."""
    who = ["-c", "user.name=A test", "-c", "user.email=test@example.org"]
    command = ["git", *who, "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit_all(folder: Path) -> None:
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "All files")


def test_a_wheel_holds_the_files_of_the_tree_and_no_others(tree: Path, wheel: Path) -> None:
    expected = {
        f"{place}/{path.relative_to(tree / folder)}"
        for folder, place in PLACES.items()
        for path in (tree / folder).rglob("*")
        if path.is_file()
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    described = {name for name in names if name.partition("/")[0].endswith(".dist-info")}
    assert names - described == expected | {"volpipe/commit.txt"}
    assert {"volpipe/py.typed", "volpipe/apps/pool.py", "volpipe/__init__.pyi", "volpipe/configs/local.py"} <= expected


def test_a_wheel_knows_the_commit_that_it_was_built_from(tree: Path, wheel: Path) -> None:
    head = git(tree.parent / "source", "rev-parse", "HEAD")
    noted = zipfile.ZipFile(wheel).read("volpipe/commit.txt").decode()
    assert noted == f"{head[:12]}\n"


def test_a_wheel_installs_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}
        (metadata,) = (top for top in tops if top != "volpipe")
        assert metadata.startswith("volpipe-")
        assert metadata.endswith(".dist-info")
        assert file.read(f"{metadata}/top_level.txt").split() == [b"volpipe"]


@dataclass(frozen=True)
class Layout:
    """One way to have volpipe: where its modules must come from, and how Python is started."""

    places: Mapping[str, Path]
    python: Path
    path: str = ""

    def owns(self, file: str) -> bool:
        return any(Path(file).is_relative_to(place) for place in self.places.values())


def checkout(root: Path) -> dict[str, Path]:
    return {name: root / name for name in PLACES}


def installed_wheel(tree: Path, wheel: Path) -> Layout:
    target = tree.parent / "target"
    run(*PIP, "install", *OFFLINE, "--target", target, wheel)
    return Layout({name: target / place for name, place in PLACES.items()}, Path(sys.executable), str(target))


def editable_install(tree: Path, wheel: Path) -> Layout:
    """Return an environment of its own that sees the packages of this one, with our tree."""
    source = shutil.copytree(tree, tree.parent / "edited")
    environment = tree.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/python*/site-packages")
    others = [entry for entry in sys.path if entry.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    run(*PIP, "--python", python, "install", *OFFLINE, "--no-build-isolation", "--editable", source)
    return Layout(checkout(source), python)


def bare_checkout(tree: Path, wheel: Path) -> Layout:
    return Layout(checkout(tree), Path(sys.executable), str(tree))


LAYOUTS = {"a wheel": installed_wheel, "an editable install": editable_install, "a bare checkout": bare_checkout}


@pytest.fixture(scope="module")
def runs(tree: Path, wheel: Path) -> Iterator[dict[str, Future[Run]]]:
    """A run in each layout, all at once: each mostly waits."""
    with ThreadPoolExecutor() as pool:
        yield {name: pool.submit(run_in, lay_out, tree, wheel) for name, lay_out in LAYOUTS.items()}


@dataclass(frozen=True)
class Run:
    """A run that ended well: what it read, and what it wrote."""

    layout: Layout
    data: np.ndarray
    folder: Path


def run_in(lay_out: Callable[[Path, Path], Layout], tree: Path, wheel: Path) -> Run:
    layout = lay_out(tree, wheel)
    folder = tree.parent / f"run_in_{lay_out.__name__}"
    folder.mkdir()
    data = np.random.default_rng(0).integers(0, 256, (16, 20, 37), np.uint8)
    create_array(folder / "cells.n5", "raw", ArraySpec(data.shape, data.dtype, (16, 16, 16), codec="gzip"), "n5")
    open_writer(folder / "cells.n5", "raw").write(Box.from_shape(data.shape), data)
    (folder / "noting.py").write_text(NET)
    (folder / "recipe.toml").write_text(RECIPE)
    command = ["run", "--config", "local", "--recipe", "recipe.toml", "--out", "same.zarr", "cells.n5"]
    with none_left_behind(folder) as environment:
        environment |= {"PYTHONPATH": layout.path, "VOLPIPE_WORKERS": "1"}
        run(layout.python, "-m", "volpipe", *command, cwd=folder, env=environment)
    return Run(layout, data, folder)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_with_workers_of_its_own_works_from(runs: dict[str, Future[Run]], name: str) -> None:
    found = runs[name].result()
    assert np.array_equal(open_volume(found.folder / "same.zarr").open()[...], found.data)
    notes = [note.read_text().split("\n") for note in found.folder.glob("imported_*")]
    assert len(notes) >= 2  # by the driver, and by its worker
    for files in notes:
        assert [file for file in files if not found.layout.owns(file)] == []
        assert all(any(Path(file).is_relative_to(place) for file in files) for place in found.layout.places.values())


@contextmanager
def none_left_behind(folder: Path) -> Iterator[dict[str, str]]:
    """Give an environment, and raise if a process that was started in it outlives the context; none stays."""
    mark = {"VOLPIPE_TEST_FOLDER": str(folder)}
    try:
        yield os.environ | mark
    finally:
        left = marked(mark)
        deadline = time.monotonic() + SECONDS_TO_END
        while left and time.monotonic() < deadline:
            time.sleep(0.1)
            left = marked(mark)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert left == []


def marked(mark: Mapping[str, str]) -> list[psutil.Process]:
    """Return the processes, children or not, that have `mark` in their environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # ended meanwhile, or of another user
            if mark.items() <= process.environ().items():
                found.append(process)
    return found
