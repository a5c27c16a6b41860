"""`volpipe run` as installed against other programs, each with the windows and the blend that its documentation shows.

The same net, volume and cores for all. The run reads N5 and writes OME-Zarr with its levels. The others get the volume
in memory, one process with a thread per core, and keep the result in memory: what they read and write is not counted.

- MONAI: SlidingWindowInferer with windows of 160³, as its tutorial of a spleen in 3D has it, and its own defaults: an
  overlap of a quarter, whose mean counts, and one window at a time. The tutorial's four would take 10 GB here.
- chunkflow: windows of 20 × 256 × 256 that overlap by 4 × 64 × 64, its bump, and its mask of the whole chunk, as its
  README and tutorial show. Its batch is 1, since it refuses others for torch, and the volume is one chunk.
- BiaPy: windows of 128³ with a padding of 10, as its reference of the configuration has it for large volumes. Its
  inference by chunks takes nets of its own or of a model zoo, and refuses restoration: so its functions that cut and
  merge are called around this net, two windows at a time, its default.

How far each lies from the net on the whole is taken in a cube in the middle of the volume, in grey levels of 8 bits.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks import inputs
from benchmarks.comparisons.monai import monai_folder
from benchmarks.comparisons.peer import Prepare, Take, peers
from benchmarks.row import Outcome, Row, Setting
from benchmarks.session import DEFAULT_RECIPE, ROOT, Session, session
from volpipe.geometry.grid import Box
from volpipe.stages.sizing import Sizing
from volpipe.volumes.volume import open_volume

if TYPE_CHECKING:
    from torch import Tensor, nn

MODEL = Path(__file__).with_name("chunkflow_model.py")
MIDDLE = 192  # voxels along the cube that is compared; with 16 around it the net takes 7 GB for it
AROUND = 16  # voxels; the halo of the default net is 9
MONAI_WINDOW = (160,) * 3
CHUNKFLOW_WINDOW, CHUNKFLOW_OVERLAP = (20, 256, 256), (4, 64, 64)
BIAPY_WINDOW, BIAPY_PADDING, BIAPY_BATCH = (128, 128, 128, 1), (10, 10, 10), 2


@dataclass(frozen=True)
class Peer:
    """Another program: how it is installed, and what it does with a volume in memory.

    Attributes:
        name: as the table has it.
        folder: gives the folder that holds it and what it needs.
        prepare: gives its inference over a volume, which leaves the cube in the middle in a file.
    """

    name: str
    folder: Callable[[Setting], Path]
    prepare: Prepare


def installed(setting: Setting, package: str, *, beside: Sequence[str] = ("torch", "numpy")) -> Path:
    """Return a folder that holds `package` and all that it needs, with the packages `beside` it that the run has."""
    folder = setting.cache / package.replace("==", "-")
    done = folder / "complete"
    if not done.exists():
        pins = [f"{name}=={importlib.metadata.version(name).partition('+')[0]}" for name in beside]
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", "--upgrade", "--target", str(folder), *pins, package], check=True)
        done.touch()
    return folder


def default_net() -> nn.Module:
    """Return the net of the default recipe, which takes -1..1 and gives -1..1; with a thread for each core."""
    import torch

    from volpipe.nets.load import build_net
    from volpipe.recipes.inference import load_recipe

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    return build_net(load_recipe(DEFAULT_RECIPE).net, str(ROOT))


def normalised(voxels: np.ndarray) -> Tensor:
    """Return `voxels` (z, y, x), uint8, as (1, 1, z, y, x), float32, in -1..1."""
    import torch

    return torch.from_numpy(voxels).float().div(127.5).sub(1)[None, None]


def grey(values: np.ndarray) -> np.ndarray:
    """Return `values` in -1..1 as grey levels, uint8."""
    levels: np.ndarray = np.clip(np.rint((values + 1) * 127.5), 0, 255).astype(np.uint8)
    return levels


def middle(shape: tuple[int, ...], around: int = 0) -> Box:
    """Return the cube in the middle of a volume that is compared, with `around` voxels more at each face."""
    half = min(MIDDLE, min(shape) // 2) // 2 + around
    centre = [size // 2 for size in shape]
    return Box(tuple(c - half for c in centre), tuple(c + half for c in centre))


def whole(location: str, out: str) -> Callable[[Take], None]:
    """Return what computes the cube in the middle, and its surroundings, in one window."""
    import torch

    net, volume = default_net(), open_volume(location).open()
    inner = slice(AROUND, -AROUND)

    def work(take: Take) -> None:
        with torch.inference_mode():
            data = net(normalised(volume.read_raw(middle(volume.shape, AROUND).slices)))[0, 0]
        np.save(out, grey(data[inner, inner, inner].numpy()))

    return work


def with_monai(location: str, out: str, folder: str) -> Callable[[Take], None]:
    """Return MONAI's inference."""
    sys.path.insert(0, folder)
    import torch
    from monai.inferers import SlidingWindowInferer  # type: ignore[import-not-found,unused-ignore]

    net, voxels = default_net(), open_volume(location).open().read_raw(...)
    inferer = SlidingWindowInferer(roi_size=MONAI_WINDOW)

    def work(take: Take) -> None:
        with torch.inference_mode():
            result = inferer(normalised(voxels), net)[0, 0]
        np.save(out, grey(result[middle(voxels.shape).slices].numpy()))

    return work


def with_chunkflow(location: str, out: str, folder: str) -> Callable[[Take], None]:
    """Return chunkflow's inference, whose inputs and outputs are in 0..1."""
    sys.path.insert(0, folder)
    from chunkflow.chunk import Chunk  # type: ignore[import-not-found,unused-ignore]
    from chunkflow.flow.divid_conquer.inferencer import Inferencer  # type: ignore[import-not-found,unused-ignore]

    voxels = open_volume(location).open().read_raw(...)
    inferencer = Inferencer(
        str(MODEL),
        "",
        CHUNKFLOW_WINDOW,
        output_patch_overlap=CHUNKFLOW_OVERLAP,
        num_output_channels=1,
        framework="pytorch",
        mask_output_chunk=True,
    )

    def work(take: Take) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):  # bars of progress
            result = inferencer(Chunk(voxels)).array[0]
        np.save(out, grey(result[middle(voxels.shape).slices] * 2 - 1))

    return work


def with_biapy(location: str, out: str, folder: str) -> Callable[[Take], None]:
    """Return what BiaPy does with a volume around a net: to cut, to call and to merge."""
    sys.path.insert(0, folder)
    import torch

    # PyPI's torchvision wants a torch with CUDA, and does not load without these operators, which nobody calls here.
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    from biapy.data import data_3D_manipulation as biapy  # type: ignore[import-not-found,unused-ignore]

    net, voxels = default_net(), open_volume(location).open().read_raw(...)

    def work(take: Take) -> None:
        data = normalised(voxels)[0, 0, ..., None].numpy()  # (z, y, x, c)
        windows, _ = biapy.crop_3D_data_with_overlap(data, BIAPY_WINDOW, padding=BIAPY_PADDING, verbose=False)
        results = np.empty_like(windows)
        with torch.inference_mode():
            for i in range(0, len(windows), BIAPY_BATCH):
                batch = torch.from_numpy(windows[i : i + BIAPY_BATCH]).movedim(-1, 1)
                results[i : i + BIAPY_BATCH] = net(batch).movedim(1, -1).numpy()
        result = biapy.merge_3D_data_with_overlap(results, data.shape, padding=BIAPY_PADDING, verbose=False)
        np.save(out, grey(result[middle(voxels.shape).slices][..., 0]))

    return work


PEERS = (
    Peer("MONAI", monai_folder, with_monai),
    Peer("chunkflow", lambda setting: installed(setting, "chunkflow==1.2.0"), with_chunkflow),
    Peer("BiaPy", lambda setting: installed(setting, "biapy==3.7.1"), with_biapy),
)


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    location = inputs.volume(setting, setting.cube(512))
    files = {name: setting.scratch / f"{name}.npy" for name in ("whole", *(peer.name for peer in PEERS))}
    with peers(1, whole, location, str(files["whole"])) as go:
        go()
    with contextlib.ExitStack() as stack:
        running = stack.enter_context(session(setting))
        sides = {"run": lambda: running.run(location, sizing=Sizing(running.executors.capacity))}
        for peer in PEERS:
            process = peers(1, peer.prepare, location, str(files[peer.name]), str(peer.folder(setting)))
            sides[peer.name] = stack.enter_context(process)
        for i in range(repeats):
            names = [*sides][i % len(sides) :] + [*sides][: i % len(sides)]
            seconds = {name: sides[name]() for name in names}
            best = min(seconds[peer.name] for peer in PEERS)
            yield Outcome(seconds["run"] / best, {name: seconds[name] for name in sides} | _distances(running, files))


def _distances(running: Session, files: dict[str, Path]) -> dict[str, float]:
    """Return how far each side lies from the net on the whole: the most in grey levels, the mean in thousandths."""
    output = open_volume(str(running.folder / "out.zarr")).open()
    cubes = {"run": output.read_raw(middle(output.shape).slices)}
    cubes |= {peer.name: np.load(files[peer.name]) for peer in PEERS}
    expected = np.load(files["whole"]).astype(np.int16)
    result: dict[str, float] = {}
    for name, cube in cubes.items():
        difference = np.abs(cube.astype(np.int16) - expected)
        result |= {f"{name} off by": float(difference.max()), f"{name} mean/1000": 1000 * float(difference.mean())}
    return result


ROWS = [
    Row(
        "default",
        "run as installed / the fastest of MONAI, chunkflow and BiaPy",
        1.0,
        1 / 1.8,
        measure,
        why="512³ uint8 in N5 to OME-Zarr, default recipe; the others as their documentation shows them, in memory; "
        "'off by' is the highest distance from the net on the whole, in grey levels of 8 bits, inside 192³ in the "
        "middle, 'mean/1000' the mean one in thousandths of a grey level",
    )
]
