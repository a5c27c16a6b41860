"""`run` against MONAI's sliding_window_inference on a volume in memory, same net, overlap 0.5, Gaussian.

MONAI gets what it does best with here: one process with a thread per core or a GPU, its volume, normalised, and its
result in memory, on a GPU that of the GPU if that is faster, no progress bar, and as many windows per call as are
fastest in a trial before. Its windows begin at the volume's faces, those of a run half an overlap before, in mirrored
voxels: 7³ against 8³ windows at 256³. The second row pads MONAI's volume by as much, which gives both the same windows
and nearly the same result (at most 0.005 of -1..1 apart over 64³; MONAI's Gaussian lies half a voxel off), and the
third lets MONAI's process keep freed memory as volpipe's workers do.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import inputs, report
from benchmarks.comparisons.peer import Take, peers
from benchmarks.row import Outcome, Row, Setting, compared
from benchmarks.session import DEFAULT_RECIPE, ROOT, session

WINDOW = 64
SETTINGS = (
    f"windows.shape={[WINDOW] * 3}",
    f"windows.overlap={WINDOW // 2}",
    "windows.blend=gaussian",
    "output.levels=0",
)
BATCHES = (1, 2, 4, 8)
EDGE, EDGE_ON_GPU = 256, 512
VERSION = "1.6.1"
KEEP_FREED = {"MALLOC_MMAP_THRESHOLD_": str(2**31 - 1), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


def monai_folder(setting: Setting) -> Path:
    """Return a folder that holds MONAI and nothing else, installed there the first time; torch stays as it is."""
    folder = setting.cache / f"monai-{VERSION}"
    if not (folder / "monai").is_dir():
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        subprocess.run([*pip, "install", "--no-deps", "--target", str(folder), f"monai=={VERSION}"], check=True)
    return folder


def sliding(location: str, padding: int, monai: str) -> Callable[[Take], None]:
    """Return MONAI's inference over a whole volume that is in memory, with the batch that is fastest on a part."""
    sys.path.append(monai)
    import torch
    from monai.inferers.utils import sliding_window_inference  # type: ignore[import-not-found,unused-ignore]

    from volpipe.nets.load import build_net
    from volpipe.recipes.inference import load_recipe
    from volpipe.volumes.volume import open_volume

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # the arithmetic of a run
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = build_net(load_recipe(DEFAULT_RECIPE).net, str(ROOT)).to(device)
    voxels = torch.from_numpy(open_volume(location).open().read_raw(...)).float().div(127.5).sub(1)[None, None]
    if padding:
        voxels = torch.nn.functional.pad(voxels, (padding,) * 6, mode="reflect")

    def infer(data: torch.Tensor, batch: int, summed_on: str) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            found = sliding_window_inference(
                data, (WINDOW,) * 3, batch, net, overlap=0.5, mode="gaussian", sw_device=device, device=summed_on
            )
            found.cpu()
        return time.perf_counter() - started

    edge = WINDOW * (4 if device == "cuda" else 2)
    part = voxels[..., :edge, :edge, :edge]
    infer(part, 1, device)
    ways = itertools.product(BATCHES, {device, "cpu"})
    best = min(ways, key=lambda way: infer(part, *way))

    def work(take: Take) -> None:
        infer(voxels, *best)

    return work


def measure(setting: Setting, repeats: int, *, padding: int = 0, keep_freed: bool = False) -> Iterator[Outcome]:
    location = inputs.volume(setting, setting.cube(EDGE_ON_GPU if report.gpu() else EDGE))
    arguments = location, padding, str(monai_folder(setting))
    with session(setting) as running, peers(1, sliding, *arguments, env=KEEP_FREED if keep_freed else {}) as go:
        yield from compared(repeats, lambda: running.run(location, *SETTINGS, sizing=running.sizing), go, "MONAI")


WHY = (
    "256³ uint8, on a GPU 512³, in N5 to OME-Zarr, windows of 64³, default net; MONAI reads and writes memory only, "
    "has all cores in one process or the GPU, and its fastest batch"
)
ROWS = [
    Row("monai", "run / MONAI sliding_window_inference", 1.1, 1.0, measure, why=WHY),
    Row(
        "monai-same",
        "run / MONAI over the same windows",
        1.1,
        1.0,
        functools.partial(measure, padding=WINDOW // 4),
        why=f"{WHY}; its volume is mirrored by a quarter window at each face before, so that both run the same windows",
    ),
    Row(
        "monai-tuned",
        "run / MONAI over the same windows, memory tuned",
        1.1,
        1.0,
        functools.partial(measure, padding=WINDOW // 4, keep_freed=True),
        why=f"{WHY}; the same windows, and its process keeps freed memory, as a worker of volpipe does",
    ),
]
