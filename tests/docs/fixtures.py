"""What pages find in their folder, or on their machine: `<!-- fixture: NAME -->` calls the function NAME.

A function gets the page, writes into the page's folder, and may return a context manager, which ends with the page.
Volumes are invented, 64 voxels along an axis at the most, and made once for all pages.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from arrays import make, write_all
from slurm import SBIN, running_slurm
from volumes import write_volume
from webhook import webhook as receiving

import volpipe as vp
from volpipe.geometry.affinities import OFFSETS
from volpipe.geometry.affinities import affinities as affinities_of
from volpipe.volumes.volume import open_volume

if TYPE_CHECKING:
    from runner import Page

SMALL = 64  # voxels along an axis
SITES = ("slurm_htex", "slurm_single", "k8s_htex", "k8s_nautilus", "local_gpu")
SHAPES = {"sample.n5": (SMALL,) * 3, "small.n5": (32, 48, 48)}
SLURM_SETTINGS = {
    "PARTITION": "main", "GPU_PARTITION": "main", "CORES": "1", "MEM_GB": "1", "GPUS": "0", "MAX_JOBS": "1",
    "WALLTIME": "00:10:00", "LONGEST_TASK": "30", "START_SECONDS": "30", "ADDRESS": "127.0.0.1", "HEARTBEAT": "2",
    "POLL_SECONDS": "1",
}  # fmt: skip
KUBECTL = """#!{python}
import sys
sys.path[:0] = {path!r}
import yaml
from manifests import faults
text = sys.stdin.read() if "-" in sys.argv else open(sys.argv[sys.argv.index("--filename") + 1]).read()
manifests = [manifest for manifest in yaml.safe_load_all(text) if manifest]
assert sys.argv[1] == "apply" and manifests, sys.argv
for manifest in manifests:
    assert not faults(manifest), faults(manifest)
    print(f"{{manifest['kind'].lower()}}/{{manifest['metadata']['name']}} created")
"""
GOLDEN = """#!/bin/bash
printf '$ volpipe'; printf ' %q' "$@"; printf '\\n'
streams=$(mktemp -d)
volpipe "$@" >"$streams/out" 2>"$streams/err"; code=$?
cat "$streams/out"; sed 's/^/! /' "$streams/err"
[ "$code" = 0 ] || printf '[%s]\\n' "$code"
"""
PIP = """#!{python}
import re, sys
extras = {extras!r}
assert sys.argv[1] == "install", sys.argv
for name in (name for name in sys.argv[2:] if not name.startswith("-")):
    match = re.fullmatch(r"volpipe(?:\\[([\\w,]+)\\])?", name)
    assert match and set((match[1] or extras[0]).split(",")) <= set(extras), f"no such extra: {{name}}"
"""


@cache
def store() -> Path:
    """Return the folder of what all pages share; it goes with this process."""
    folder = tempfile.TemporaryDirectory()
    STORES.append(folder)
    return Path(folder.name)


STORES: list[tempfile.TemporaryDirectory[str]] = []


@cache
def invented(name: str) -> Path:
    """Return a container with `raw` and `labels`, as `volpipe sample` writes it."""
    vp.sample(store() / name, shape=SHAPES[name])  # type: ignore[arg-type]  # three
    return store() / name


@cache
def true_affinities() -> np.ndarray:
    """Return the affinities (c, z, y, x) of the labels of sample.n5, bytes."""
    labels = open_volume(invented("sample.n5"), "labels").open()[...]
    near, known = affinities_of(labels, OFFSETS)
    result: np.ndarray = np.where(known, near, 1).astype(np.uint8) * 255
    return result


def put(page: Page, place: str, of: str = "sample.n5") -> Path:
    path = page.folder / place
    shutil.copytree(invented(of), path, dirs_exist_ok=True)
    return path


def checkout(page: Page) -> None:
    """The code of this checkout, to be changed; weights are links."""

    def copied(source: str, target: str) -> None:
        (os.symlink if source.endswith(".safetensors") else shutil.copyfile)(source, target)

    from markdown_page import ROOT

    for name in ("volpipe", "apps", "configs", "models"):
        ignored = shutil.ignore_patterns("__pycache__", "vega")
        shutil.copytree(ROOT / name, page.folder / name, ignore=ignored, copy_function=copied)
    shutil.copyfile(ROOT / "pyproject.toml", page.folder / "pyproject.toml")


# Volumes


def sample(page: Page) -> None:
    """sample.n5 with raw and labels."""
    put(page, "sample.n5")


def cells(page: Page) -> None:
    """cells.n5 with raw, labels, and neurons, which are the labels too."""
    path = put(page, "cells.n5")
    shutil.copytree(path / "labels", path / "neurons")


def scan(page: Page) -> None:
    """scan.raw, the raw voxels of sample.n5 without a header, of 64 voxels along each axis."""
    (page.folder / "scan.raw").write_bytes(open_volume(invented("sample.n5"), "raw").open()[...].tobytes())


def volume(page: Page) -> None:
    """volume.n5, whose one array is raw."""
    shutil.copytree(invented("sample.n5") / "raw", page.folder / "volume.n5" / "raw")
    (page.folder / "volume.n5" / "attributes.json").write_text('{"n5": "2.0.0"}')


def nuclei(page: Page) -> None:
    """nuclei.zarr: twelve bright nuclei in 40³ voxels of 8 bits, which touch or not."""
    places = np.random.default_rng(1).permutation(np.argwhere(np.ones((3, 3, 3))))[:12] * 12 + 8
    distance = np.linalg.norm(np.indices((40, 40, 40))[None] - places[:, :, None, None, None], axis=1).min(axis=0)
    make(
        page.folder / "nuclei.zarr",
        np.rint(255 * np.exp(-((distance / 4) ** 2) / 2)).astype(np.uint8),
        chunks=(20,) * 3,
    )


def corrected(page: Page) -> None:
    """restored.zarr, the output of a run over sample.n5, one voxel of which was corrected since."""
    sample(page)
    page.bash("volpipe run --config threads -o restored.zarr sample.n5/raw")
    data = vp.open(page.folder / "sample.n5", "raw").open()[...]
    data[0, 0, 0] ^= 1
    write_all(page.folder / "sample.n5", "raw", data)


def tissue(page: Page) -> None:
    """tissue.zarr, a mask for cells.n5 that is 0 in one half."""
    data = np.zeros((SMALL,) * 3, np.uint8)
    data[:, : SMALL // 2] = 1
    make(page.folder / "tissue.zarr", data, chunks=(SMALL,) * 3)


def coarse_volume(page: Page) -> None:
    """volume.n5, whose one array is the mean of pairs of slices of truth.n5/raw."""
    vp.convert(vp.open(invented("sample.n5"), "raw"), page.folder / "volume.n5" / "raw", bin=(2, 1, 1))


def truth(page: Page) -> None:
    """truth.n5 with raw and labels; truth.zarr, which are the labels."""
    path = put(page, "truth.n5")
    vp.convert(vp.open(path, "labels"), page.folder / "truth.zarr")


def raw_folder(page: Page) -> None:
    """raw/ with thin.n5 and thick.n5, in each an array em; and more.csv, which names another volume."""
    for seed, name in enumerate(("raw/thin.n5", "raw/thick.n5", "other.n5")):
        source = vp.open(invented("sample.n5"), "raw").open()[:48, : 48 - 8 * seed, :48]
        path = write_volume(page.folder / name, source + np.uint8(seed))
        (path / "raw").rename(path / "em")
    (page.folder / "more.csv").write_text("volume\nother.n5/em\n")


def affinities(page: Page) -> None:
    """affinities.zarr and cells_affinities.zarr, of the labels of cells.n5."""
    for name in ("affinities.zarr", "cells_affinities.zarr"):
        make(
            page.folder / name, true_affinities(), axes=("c", "z", "y", "x"), chunks=(1, SMALL, SMALL, SMALL),
            attributes={"resolution": [16, 8, 8]},
        )  # fmt: skip


def membranes(page: Page) -> None:
    """map.zarr, whose array s0 is high at membranes."""
    data = 255 - true_affinities()[:3].min(axis=0)
    make(page.folder / "map.zarr" / "s0", data, chunks=(64, 64, 64))


def output(page: Page) -> None:
    """out.zarr, the output of a run over cells.n5."""
    if not (page.folder / "cells.n5").exists():
        cells(page)
    page.bash("volpipe run --config threads -o out.zarr cells.n5/raw")


def another_output(page: Page) -> None:
    """other.zarr, the output of a run of the identity over cells.n5."""
    page.bash("volpipe run --config threads --set net.name=identity -o other.zarr cells.n5/raw")


def small(page: Page) -> None:
    """small.n5 with raw and labels, 32 × 48 × 48 voxels."""
    put(page, "small.n5", "small.n5")


def two_outputs(page: Page) -> None:
    """old.zarr and new.zarr, which differ by the blend of their windows."""
    cells(page)
    for name, blend in (("old", "crop"), ("new", "hann")):
        windows = f"--set windows.shape=[48,48,48] --set windows.overlap=[20,20,20] --set windows.blend={blend}"
        page.bash(f"volpipe run --config threads {windows} -o {name}.zarr cells.n5/raw")


def two_batches(page: Page) -> None:
    """old/ and new/, the outputs of two batches over raw/."""
    raw_folder(page)
    for name, clip in (("old", 255), ("new", 128)):
        low = f"--set net.name=identity --set normalise.high={clip} --set normalise.low=0"
        page.bash(f"volpipe batch --config threads {low} 'raw/*.n5/em' -o {name}/")


def a_batch(page: Page) -> None:
    """reprocess.toml, a batch over raw/ that is complete."""
    raw_folder(page)
    (page.folder / "reprocess.toml").write_text('volumes = ["raw/*.n5/em"]\nout = "restored"\n')
    page.bash("volpipe batch --config threads reprocess.toml")


def labels(page: Page) -> None:
    """labels.zarr, the objects of cells_affinities.zarr."""
    if not (page.folder / "cells_affinities.zarr").exists():
        affinities(page)
    page.bash("volpipe segment --config threads -o labels.zarr cells_affinities.zarr")


def training(page: Page) -> None:
    """mine.toml, a training of four steps with a sweep and a search; and b.n5, another volume for it."""
    from trainings import LEANING, make_folder

    steps = "[train]\nsteps = 4\nwarm_up = 1\nthreads = 1\nschedule = 'constant'\nvalidate_every = 2\n"
    more = (
        "[sweep]\n'train.learning_rate' = [1e-3, 3e-4]\n"
        "[tune]\ntrials = 2\n'train.learning_rate' = { low = 1e-4, high = 1e-2, log = true }\n"
    )
    make_folder(page.folder)
    (page.folder / "recipe.toml").unlink()
    (page.folder / "mine.toml").write_text(LEANING + steps + more)
    vp.convert(vp.open(page.folder / "v.tif"), page.folder / "b.n5")


# Nets


def my_net(page: Page) -> None:
    """mynet.py, whose functions net and affinities return a net, and affinities.safetensors."""
    (page.folder / "mynet.py").write_text(
        "import torch\n\n\n"
        "def net():\n    return torch.nn.Conv3d(1, 1, 3, padding=1)\n\n\n"
        "def affinities():\n"
        "    return torch.nn.Sequential(torch.nn.Conv3d(1, 9, 3, padding=1), torch.nn.Sigmoid())\n"
    )
    page.names.pop("__file__", None)
    import torch
    from safetensors.torch import save_file

    for name, channels in (("net", 1), ("affinities", 9)):
        torch.manual_seed(0)
        layer = torch.nn.Conv3d(1, channels, 3, padding=1)
        prefix = "" if name == "net" else "0."
        tensors = {f"{prefix}{key}": value.contiguous() for key, value in layer.state_dict().items()}
        save_file(tensors, page.folder / f"{name}.safetensors")


def neighbours(page: Page) -> None:
    """mynet.pt, weights of a net of five slices: two convolutions."""
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Conv2d(5, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(8, 1, 1))
    torch.save(net.state_dict(), page.folder / "mynet.pt")


def onnx_net(page: Page) -> None:
    """model.onnx, a net of one convolution."""
    import torch
    from graphs import export_onnx

    torch.manual_seed(0)
    export_onnx(page.folder / "model.onnx", torch.nn.Conv3d(1, 1, 3, padding=1))


def package(page: Page) -> None:
    """affable-shark.zip, a package of bioimage.io that smooths."""
    from zoo import smooth, zipped

    zipped(smooth(page.folder.parent / "package"), page.folder / "affable-shark.zip")


# Machines and programs


def golden(page: Page) -> None:
    """`golden ARGUMENTS`: gives them to volpipe, and prints both streams, one after the other, and the exit code."""
    page.shell.add_tool("golden", GOLDEN)
    # What other tests measured of a net is not known here, and no table breaks its lines by the length of a path.
    page.shell.environment |= {"XDG_CACHE_HOME": str(page.folder.parent / "cache"), "COLUMNS": "1000"}


def clusters_by_threads(page: Page) -> None:
    """Sites of clusters are threads of this machine here: for pages on which a site is one option of many."""
    page.shell.sites.update(dict.fromkeys(SITES, "threads"))


@contextmanager
def slurm(page: Page) -> Iterator[None]:
    """A real Slurm of two nodes on this machine, and settings of slurm_htex for it; sbatch and squeue are found."""
    with tempfile.TemporaryDirectory() as folder, running_slurm(Path(folder)) as cluster:
        environment = page.shell.environment
        environment |= cluster.environment | {f"VOLPIPE_SLURM_{name}": value for name, value in SLURM_SETTINGS.items()}
        environment["PATH"] += f"{os.pathsep}{SBIN}"
        yield


def kubectl(page: Page) -> None:
    """A kubectl that checks what it is to apply against the API's own types, and applies nothing."""
    import sys

    support = Path(__file__).resolve().parent.parent / "support"
    page.shell.add_tool(
        "kubectl", KUBECTL.format(python=sys.executable, path=[str(support / "clusters"), str(support)])
    )


def pip(page: Page) -> None:
    """A pip that installs nothing, and fails where volpipe has no extra of that name."""
    import sys
    import tomllib

    from markdown_page import ROOT

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page.shell.add_tool("pip", PIP.format(python=sys.executable, extras=sorted(project["optional-dependencies"])))


@contextmanager
def webhook(page: Page) -> Iterator[None]:
    """A server that takes posts, at $HOOK."""
    with receiving() as hook:
        page.shell.environment["HOOK"] = f"http://127.0.0.1:{hook.port}/volpipe"
        yield
