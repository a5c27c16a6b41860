"""The Dockerfile, as far as can be told without building it: where it starts, what it copies, and as whom it runs."""

from __future__ import annotations

import fnmatch
import json
import re
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT

TEXT = (ROOT / "Dockerfile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def instructions() -> list[tuple[str, str]]:
    """Return each instruction and what follows it, lines joined and comments left out."""
    lines = [line for line in TEXT.splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def stages() -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage, from its FROM on."""
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions():
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, rest))
    return found


def of_last(name: str) -> list[str]:
    return [rest for known, rest in stages()[-1] if known == name]


def test_the_python_is_the_one_that_the_project_is_tested_with() -> None:
    (python,) = [rest for name, rest in instructions() if name == "ARG" and rest.startswith("PYTHON=")]
    minor = python.removeprefix("PYTHON=")
    assert PROJECT["project"]["requires-python"] == f">={minor}"
    assert PROJECT["tool"]["mypy"]["python_version"] == minor
    assert f"python{minor}" in (ROOT / "Makefile").read_text()


def test_every_stage_starts_from_the_standard_image_and_none_from_an_address() -> None:
    bases = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    assert bases == ["python:${PYTHON}-slim-bookworm"] * 2
    assert "://" not in TEXT
    assert not re.search(r"\b[\w-]+\.(io|com|org|net)/", TEXT)


def test_it_runs_as_nobody_of_importance_and_is_the_command() -> None:
    assert of_last("USER") == ["1000:1000"]
    assert json.loads(of_last("ENTRYPOINT")[0]) == ["volpipe"]
    assert "volpipe" in PROJECT["project"]["scripts"]
    last = [name for name, _ in stages()[-1]]
    assert "RUN" not in last  # nothing is installed as root into what runs
    assert "ADD" not in dict(instructions())


def test_variants_are_made_by_arguments() -> None:
    build = stages()[0]
    assert [rest for name, rest in build if name == "ARG"] == ["VARIANT=cuda", "TORCH_INDEX="]
    (install,) = [rest for name, rest in build if name == "RUN" and "torch==" in rest]
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"torch=={pinned[1]} " in install
    assert "$VARIANT" in install
    assert "--extra-index-url" in install  # an index of PyTorch's alone would have to have all that is pinned
    assert "--index-url" not in install.replace("--extra-index-url", "")


def test_bytecode_is_made_of_what_workers_import_and_is_all_that_there_is() -> None:
    runs = [rest for name, rest in stages()[0] if name == "RUN"]
    assert all("--no-compile" in rest for rest in runs if "pip install" in rest)
    (modules,) = re.findall(r'python -c "import ([\w., ]+)"$', runs[-1])
    assert "volpipe.runs.worker" in modules
    for module in modules.split(", "):
        assert find_spec(module) is not None
    assert [rest for name, rest in stages()[0] if name == "WORKDIR"][-1] == "/"  # not /source, which has a volpipe too


def test_what_is_cut_from_torch_is_not_what_it_looks_for() -> None:
    import torch

    folder = Path(torch.__file__).parent
    assert (folder / "bin/torch_shm_manager").is_file()  # multiprocessing's; all else there goes
    assert "! -name torch_shm_manager" in TEXT
    assert "torch/include" not in " ".join(rest for _, rest in instructions())


def test_it_gives_its_user_a_name_which_the_system_does_not_know() -> None:
    environment = dict(part.split("=", 1) for rest in of_last("ENV") for part in rest.split())
    assert environment["LOGNAME"] == environment["USER"] == "volpipe"
    assert environment["HOME"] == "/tmp"


def is_sent(path: str) -> bool:
    """Return whether .dockerignore lets the file or folder `path` through; the last rule that matches decides."""
    sent = True
    for rule in (ROOT / ".dockerignore").read_text().split():
        pattern = rule.removeprefix("!").removeprefix("**/")
        parts = path.split("/") if "**" in rule else path.split("/")[:1]
        if any(fnmatch.fnmatch(part, pattern) for part in parts):
            sent = rule.startswith("!")
    return sent


def test_what_is_copied_is_there_and_is_all_that_installs() -> None:
    copies = [rest for name, rest in stages()[0] if name == "COPY"]
    sources = {source for rest in copies for source in rest.split()[:-1]}
    for source in sources:
        assert (ROOT / source).exists()
        assert is_sent(source)
    folders = {folder.split("/")[0] for folder in PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert folders <= sources
    assert PROJECT["project"]["readme"] in sources
    assert of_last("COPY") == ["--from=build /opt/volpipe /opt/volpipe"]


@pytest.mark.parametrize(
    "path",
    [
        ".git",
        ".venv/bin/python",
        "tests/blockwise/test_loop.py",
        "demo/out.zarr",
        "volpipe/__pycache__/cli.pyc",
        "a.env",
    ],
)
def test_nothing_else_is_sent_to_be_built(path: str) -> None:
    assert not is_sent(path)


def test_an_environment_is_made_with_the_bytecode_that_an_image_has() -> None:
    """Else a command takes twice the processor time to its first task where Python may not write bytecode."""
    makefile = (ROOT / "Makefile").read_text()
    (imported,) = re.findall(r"^IMPORTED := (.*)$", makefile, re.MULTILINE)
    assert f'python -c "import {imported}"' in (ROOT / "Dockerfile").read_text()
    rule = makefile[makefile.index("$(READY): ") :].partition("\n\n")[0]
    assert 'env -u PYTHONDONTWRITEBYTECODE $(VENV)/bin/python -c "import $(IMPORTED)"' in rule.splitlines()[-2]
