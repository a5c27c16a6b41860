"""A package imports from those before it, heavy packages only where they are used; `import volpipe` costs little."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT

FOLDERS = {"volpipe": "volpipe", "apps": "volpipe.apps", "models": "volpipe.models", "configs": "volpipe.configs"}

# The lowest first: a module imports from packages of lines above its own, and from its own package.
PACKAGES = (
    "process",
    "errors",
    "syntax",
    "text",
    "user_code",
    "resolve",
    "units",
    "tables",
    "commit",
    "geometry",
    "volumes.storage",
    "volumes.dialects",
    "volumes.formats",
    "volumes",
    "recipes",
    "nets",
    "blockwise",
    "inference",
    "reporting",
    "runs",
    "training.data",
    "training",
    "training.search",
    "synthetic",
    "estimation",
    "stages",
    "segmentation",
    "evaluation",
    "sites",
    "workflow",
    "viewer",
    "notebook",
    "apps.htex apps.slurm apps.kubernetes",
    "apps",
    "display",
    "monitoring",
    "api",
    "cli",
    "__main__",
)
LONGEST_FILE = 800  # lines
ALONE = ("models", "configs")  # a net and a site are such files as users write
FOR_SITES = {"volpipe.apps", "volpipe.configs.local", "volpipe.configs.slurm_htex"}  # others are variations of these

# Heavy package: packages of ours that import it, as they are imported and in functions alone.
HEAVY = {
    "parsl": ({"apps", "apps.htex", "apps.slurm", "apps.kubernetes", "configs"}, {"sites"}),
    "torch": (
        {"models", "nets", "training", "training.data"},
        {"api", "cli", "estimation", "inference", "notebook", "sites"},
    ),
    "bioimageio": (set(), {"nets"}),
    "onnx": (set(), {"nets"}),
    "onnxruntime": (set(), {"nets"}),
    "safetensors": ({"training"}, {"nets"}),
    "dask": (set(), {"volumes"}),
    "tensorstore": (set(), {"volumes.storage"}),
    "numcodecs": (set(), {"volumes"}),
    "google_crc32c": (set(), {"volumes", "volumes.storage", "training"}),
    "obstore": (set(), {"volumes.storage"}),
    "z5py": (set(), {"volumes.formats"}),
    "zarr": (set(), {"volumes.formats"}),
    "h5py": (set(), {"volumes.formats"}),
    "tifffile": (set(), {"volumes.formats"}),
    "PIL": (set(), {"notebook", "reporting"}),
    "anywidget": (set(), {"notebook"}),
    "jinja2": (set(), {"reporting"}),
    "prometheus_client": (set(), {"monitoring"}),
    "kubernetes": ({"apps.kubernetes"}, set()),
    "optuna": (set(), {"training.search"}),
    "tornado": ({"viewer"}, set()),
    "yaml": (set(), {"cli", "nets"}),
    "rich": ({"display"}, {"cli"}),
    "IPython": (set(), {"display", "notebook"}),
    "cc3d": (set(), {"segmentation", "volumes"}),
    "fastremap": (set(), {"segmentation"}),
    "typer": ({"cli"}, set()),
}


@dataclass(frozen=True)
class Import:
    """`module`, as some file imports it; `late` if in a function, or for type checkers alone."""

    module: str
    late: bool


def source_files() -> dict[str, Path]:
    """Return the file of every module in this checkout, by its name once installed."""
    files = {}
    for folder, package in FOLDERS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return files


MODULES = source_files()
RANKS = {package: rank for rank, line in enumerate(PACKAGES) for package in line.split()}


def package_of(module: str) -> str:
    """Return the package of a module, without "volpipe."; of a single file its own name, "" of volpipe itself."""
    inner = module.removeprefix("volpipe").lstrip(".")
    is_package = MODULES[module].name == "__init__.py"
    return inner if is_package or inner in RANKS else inner.rpartition(".")[0]


def imports(node: ast.AST, *, late: bool = False) -> Iterator[Import]:
    """Yield every import below `node`, wherever it stands."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, late) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, f"line {child.lineno}: a relative import"
            inner = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (Import(name if name in MODULES else child.module, late) for name in inner)
        else:
            yield from imports(child, late=late or is_late(child))


def is_late(node: ast.AST) -> bool:
    checking = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return checking or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


@cache
def imports_of(module: str) -> list[Import]:
    return list(imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def own_imports(module: str) -> set[str]:
    """Return the modules of ours that `module` imports."""
    return {entry.module for entry in imports_of(module) if entry.module.partition(".")[0] == "volpipe"}


LAYERED = sorted(module for module in MODULES if package_of(module).partition(".")[0] not in ALONE)


def test_every_module_is_in_a_package() -> None:
    assert {package_of(module) for module in LAYERED} - {""} == set(RANKS)


@pytest.mark.parametrize("module", LAYERED)
def test_imports_point_down(module: str) -> None:
    rank = RANKS.get(package_of(module), len(PACKAGES))  # volpipe itself hands on names of all
    packages = {package_of(name) for name in own_imports(module)} - {"", package_of(module)}
    assert {package for package in packages - set(ALONE) if RANKS[package] >= rank} == set()


@pytest.mark.parametrize("package", sorted(RANKS))
def test_no_imports_run_in_a_circle_inside_a_package(package: str) -> None:
    graph = {module: own_imports(module) for module in LAYERED if package_of(module) == package}
    order = TopologicalSorter({module: names & graph.keys() - {module} for module, names in graph.items()})
    assert len(list(order.static_order())) == len(graph)


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(LAYERED)))
def test_nets_import_nothing_of_ours_and_sites_what_is_made_for_them(module: str) -> None:
    assert own_imports(module) <= (FOR_SITES if module.startswith("volpipe.configs.") else set())


@pytest.mark.parametrize("module", sorted(name for name, path in MODULES.items() if path.name == "__init__.py"))
def test_a_package_says_what_is_in_it_and_imports_nothing(module: str) -> None:
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert own_imports(module) == ({"volpipe.process"} if module == "volpipe" else set())  # before all else
    assert len(tree.body) == 1 or module in ("volpipe", "volpipe.apps")  # which hand on names of their modules


def test_no_file_is_too_long() -> None:
    ours = [top for top in ROOT.iterdir() if top.is_dir() and top.name != "build" and not top.name.startswith(".")]
    files = [path for top in ours for path in top.rglob("*.py")]
    lengths = {str(path.relative_to(ROOT)): path.read_bytes().count(b"\n") for path in files}
    assert {file: length for file, length in lengths.items() if length > LONGEST_FILE} == {}


@pytest.mark.parametrize("package", HEAVY)
def test_a_heavy_package_is_imported_in_its_place_alone(package: str) -> None:
    always, late = HEAVY[package]
    users = {
        (package_of(module), entry.late)
        for module in MODULES
        for entry in imports_of(module)
        if entry.module.partition(".")[0] == package
    }
    assert {user for user, is_late in users if not is_late} == always
    assert {user for user, is_late in users if is_late} - always == late


def test_a_late_import_is_told_from_one_that_is_made_at_once() -> None:
    tree = ast.parse(
        "import a\n"
        "if TYPE_CHECKING:\n    import b\n"
        "if True:\n    import c\n"
        "class C:\n    import d\n    def f(self):\n        from e.f import g\n"
        "try:\n    from volpipe import errors, Box\nexcept ImportError:\n    pass\n"
    )
    entries = {(entry.module, entry.late) for entry in imports(tree)}
    early = {("a", False), ("c", False), ("d", False), ("volpipe.errors", False), ("volpipe", False)}
    assert entries == early | {("b", True), ("e.f", True)}


def test_nothing_prints_but_the_command_line() -> None:
    printing = {
        package_of(module)
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Name) and node.id == "print")
        or (isinstance(node, ast.Attribute) and node.attr == "print")
    }
    assert printing <= {"cli", "display"}


NUMERICAL = {"torch", "tensorstore", "parsl", "zarr", "z5py", "pydantic", "numpy"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("volpipe", NUMERICAL),
        ("volpipe.runs.worker", {"torch", "parsl", "z5py", "zarr", "tensorstore", "rich", "typer"}),
        ("volpipe.volumes.volume", {"torch", "parsl", "z5py", "zarr", "tensorstore", "obstore", "pydantic"}),
        # The command line answers to Tab and to a mistyped option, neither of which may wait for a second.
        ("volpipe.cli.app", NUMERICAL | {"kubernetes", "yaml"}),
        ("volpipe.apps.pool", {"torch", "z5py", "zarr", "tensorstore"}),
    ],
)
def test_an_import_costs_what_it_needs(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in ended.stdout.split()}
    assert "volpipe" in imported
    assert imported & unwanted == set()


@pytest.mark.parametrize(
    "package", sorted(package for package in RANKS if package not in ("errors", "resolve", "__main__"))
)
def test_a_package_itself_costs_next_to_nothing(package: str) -> None:
    code = f"import sys, volpipe.{package}; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert {name.partition(".")[0] for name in ended.stdout.split()} & NUMERICAL == set()
