"""Imports point down, heavy packages are imported where they are used, and `import volpipe` costs little."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

FOLDERS = {"volpipe": "volpipe", "apps": "volpipe.apps", "models": "volpipe.models", "configs": "volpipe.configs"}

# Each module once, the highest first; it may import from lower lines only.
LAYERS = (
    "__main__",
    "cli",
    "cli_flow cli_status",
    "status",
    "cli_slurm cli_k8s cli_data cli_shipped cli_sites cli_verify cli_train cli_sweep cli_evaluate cli_net cli_label",
    "sweep tune outcome  flow_cost",
    "trials              flow_run flow_times",
    "                    flow_plan",
    "course              scoreboard gallery label_audit score_cost",
    "lesson              evaluate labelling label_cost",
    "                    label_tasks",
    "                    label_output",
    "train",
    "validate",
    "samples losses checkpoints adversary training_logs ranks",
    "adam",
    "show cli_job        apps.checkups cli_options",
    "terminal",
    "                    apps.start",
    "driver dataset      apps.stages apps.watch tasks",
    "apps.executors      apps.slurm apps.pods",
    "provenance",
    "appraisal           passes verify seams cost",
    "rehearsal           alternatives limits",
    "folder run          presence",
    "pace",
    "worker              estimate",
    "infer",
    "factor reassemble pyramid runner block_sum",
    "memory usage",
    "tensors windows output schedule staging",
    "wanted              sums checksums",
    "plan",
    "window_choice       training_data",
    "nets                region findings",
    "descriptions         state_dicts halo_search",
    "measure              reach",
    "programs            probes",
    "package_nets",
    "onnx_nets packages  geometry",
    "graphs processing   augment",
    "training degrade interpolate targets label_pieces label_graph flow",
    "label_fields",
    "label_plan",
    "label_recipe        levels",
    "recipe journal sites sample convert survey checkup",
    "growth stand_in",
    "identity",
    "volume              scores overlaps picture painting apps.settings apps.surroundings apps.manifest batch",
    "access",
    "complaints",
    "blend ops resolve augment affinities  tissue fetches indexing heap apps.podspec apps.podstatus apps.launch",
    "formats.container   cells",
    "formats.single",
    "formats.slices      formats.probe",
    "formats.n5 formats.hdf5 formats.webknossos formats.tiff formats.mrc formats.npy chance",
    "formats.zarr formats.ome formats.pages",
    "formats.flat formats.tags formats.damage",
    "formats.store formats.cosem formats.census",
    "formats.metadata formats.inflation",
    "formats.files",
    "formats.remote      lock",
    "beats",
    "errors grid interrupts quota seats  apps.unneeded apps.parsl_import",
)
ALONE = ("volpipe.models.", "volpipe.configs.")  # a net and a site are such files as users write
FOR_SITES = {
    *(f"volpipe.apps.{name}" for name in ("executors", "settings", "slurm", "pods", "podstatus", "surroundings")),
    *("volpipe.configs.local", "volpipe.configs.slurm_htex"),  # of which other sites are variations
}
PACKAGES = ("volpipe", "volpipe.formats", "volpipe.apps", "volpipe.models", "volpipe.configs")

# Package: modules (or packages, with a final dot) that import it, as they are imported and in functions alone.
HEAVY = {
    "parsl": (("apps.", "configs."), ("sites",)),
    "torch": (
        (
            "models.",
            "adam",
            "dataset",
            "train",
            "validate",
            "adversary",
            "losses",
            "checkpoints",
            "ranks",
            "onnx_nets",
            "package_nets",
        ),
        (
            "runner",
            "nets",
            "programs",
            "checkup",
            "state_dicts",
            "reach",
            "state_dicts",
            "cost",
            "cli_net",
            "augment",
            "geometry",
            "probes",
            "processing",
        ),
    ),
    "bioimageio": ((), ("packages",)),
    "onnxruntime": ((), ("onnx_nets",)),
    "safetensors": (("checkpoints",), ("state_dicts",)),
    "tensorstore": ((), ("formats.store",)),
    "numcodecs": ((), ("survey",)),
    "google_crc32c": ((), ("checksums", "training_logs")),
    "obstore": ((), ("formats.remote",)),
    "z5py": ((), ("formats.n5",)),
    "zarr": ((), ("formats.zarr",)),
    "h5py": ((), ("formats.hdf5", "formats.probe")),
    "tifffile": ((), ("formats.tiff", "formats.tags")),
    "PIL": ((), ("picture",)),
    "kubernetes": (("apps.pods", "apps.podspec", "apps.podstatus", "apps.manifest"), ()),
    "optuna": ((), ("tune",)),
    "yaml": ((), ("cli_k8s", "packages")),
    "rich": (
        ("cli", "cli_flow", "cli_net", "scoreboard", "show", "terminal"),
        ("cli_label", "cli_sweep", "cli_train"),
    ),
    "cc3d": ((), ("label_pieces",)),
    "fastremap": ((), ("label_pieces",)),
    "mwatershed": ((), ("label_graph",)),
    "typer": (
        (
            *(
                "cli",
                "cli_k8s",
                "cli_sites",
                "cli_slurm",
                "cli_data",
                "cli_evaluate",
                "cli_label",
                "cli_net",
                "cli_train",
            ),
            *("cli_sweep", "cli_verify", "cli_options"),
        ),
        (),
    ),
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
RANKS = {f"volpipe.{name}": rank for rank, line in enumerate(reversed(LAYERS)) for name in line.split()}


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


def imports_of(module: str) -> list[Import]:
    return list(imports(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


def is_named(module: str, names: tuple[str, ...]) -> bool:
    """Tell whether `module` is one of `names`, or in one of them that ends in a dot."""
    inner = module.removeprefix("volpipe.")
    return any(inner == name or (name.endswith(".") and f"{inner}.".startswith(name)) for name in names)


def test_every_module_has_one_place() -> None:
    listed = [name for line in LAYERS for name in line.split()]
    assert len(listed) == len(set(listed))
    own = {module for module in MODULES if module not in PACKAGES and not module.startswith(ALONE)}
    assert own == set(RANKS)


@pytest.mark.parametrize("module", sorted(RANKS))
def test_imports_point_down(module: str) -> None:
    ours = {found.module for found in imports_of(module) if found.module.partition(".")[0] == "volpipe"}
    assert ours <= RANKS.keys() | set(PACKAGES)
    assert {name for name in ours if name not in PACKAGES and RANKS[name] >= RANKS[module]} == set()


@pytest.mark.parametrize("module", sorted(module for module in MODULES if module not in RANKS))
def test_packages_and_nets_import_nothing_of_ours_and_sites_what_is_made_for_them(module: str) -> None:
    ours = {found.module for found in imports_of(module) if found.module.partition(".")[0] == "volpipe"}
    assert ours <= (FOR_SITES if module.startswith("volpipe.configs.") else set())


@pytest.mark.parametrize("package", HEAVY)
def test_a_heavy_package_is_imported_in_its_place_alone(package: str) -> None:
    always, late = HEAVY[package]
    users = {
        (module, found.late)
        for module in MODULES
        for found in imports_of(module)
        if found.module.partition(".")[0] == package
    }
    assert users
    assert [(m, is_late) for m, is_late in users if not is_named(m, always + late if is_late else always)] == []


def test_a_late_import_is_told_from_one_that_is_made_at_once() -> None:
    tree = ast.parse(
        "import a\n"
        "if TYPE_CHECKING:\n    import b\n"
        "if True:\n    import c\n"
        "class C:\n    import d\n    def f(self):\n        from e.f import g\n"
        "try:\n    from volpipe import grid, Box\nexcept ImportError:\n    pass\n"
    )
    found = {(entry.module, entry.late) for entry in imports(tree)}
    early = {("a", False), ("c", False), ("d", False), ("volpipe.grid", False), ("volpipe", False)}
    assert found == early | {("b", True), ("e.f", True)}


def test_nothing_prints_but_the_command_line() -> None:
    printing = {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Name) and node.id == "print"
    }
    assert printing <= {"volpipe.cli"}


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("volpipe", {"torch", "tensorstore", "parsl", "zarr", "z5py", "pydantic", "numpy"}),
        ("volpipe.worker", {"torch", "parsl", "z5py", "zarr", "tensorstore", "rich", "typer"}),
        ("volpipe.volume", {"torch", "parsl", "z5py", "zarr", "tensorstore", "obstore", "pydantic"}),
        # The command line answers to Tab and to a mistyped option, neither of which may wait for a second.
        ("volpipe.cli", {"torch", "parsl", "z5py", "zarr", "tensorstore", "kubernetes", "yaml", "numpy", "pydantic"}),
        ("volpipe.apps.start", {"torch", "z5py", "zarr", "tensorstore"}),
    ],
)
def test_an_import_costs_what_it_needs(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in ended.stdout.split()}
    assert "volpipe" in imported
    assert imported & unwanted == set()
