"""`run` against MONAI's sliding_window_inference on a volume in memory, same net, overlap 0.5, Gaussian.

MONAI gets what it does best with here: one process with a thread per core or a GPU, its volume, normalised, and its
result in memory, on a GPU that of the GPU if that is faster, no progress bar, and as many windows per call as are
fastest in a trial before. Layouts of tensors are as users have them: a plan takes the faster one, MONAI's documentation
names none. MONAI's windows begin at the volume's faces, those of a run half an overlap before, in mirrored voxels: 7³
against 8³ windows at 256³. The second row pads MONAI's volume by as much, which gives both the same windows and nearly
the same result (at most 0.005 of -1..1 apart over 64³; MONAI's Gaussian lies half a voxel off), and the third lets
MONAI's process keep freed memory as volpipe's workers do.

On a GPU there is a row for each shipped net besides, in each arithmetic: a run with the windows that its plan takes
for large volumes, against MONAI with these or the net's own, whichever are faster for it, and with its own overlap.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks import inputs, precision, report
from benchmarks.comparisons.peer import Take, peers
from benchmarks.row import Outcome, Row, Setting, compared
from benchmarks.session import DEFAULT_RECIPE, ROOT, session
from volpipe.geometry.grid import Triple
from volpipe.recipes.inference import Recipe, load_recipe
from volpipe.stages.sizing import Sizing
from volpipe.workflow.prepare import prepare

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
        sizing = Sizing(running.executors.capacity)  # the layout of tensors that a plan takes for a user
        yield from compared(repeats, lambda: running.run(location, *SETTINGS, sizing=sizing), go, "MONAI")


ARITHMETICS = ("float32", "tf32", "bfloat16")
SHAPES_ON_GPU = {  # of volumes, by net: what float32 computes in 4 to 20 s on an H100, and what MONAI holds in 40 GiB
    "unet3d": (1024, 1024, 1024),
    "superres": (256, 1024, 1024),
    "affinities": (768, 768, 768),
    "srgan3d": (64, 512, 512),
}
SETTINGS_ON_GPU = ("output.levels=0", "output.dtype=uint8")


def sliding_on_gpu(location: str, recipe_json: str, planned: list[Triple], monai: str) -> Callable[[Take], None]:
    """Return MONAI's inference over a whole volume on a GPU, in one of ARITHMETICS after another, one for each call.

    Voxels go to the GPU, and come down, as bytes; all between stays there.
    """
    sys.path.append(monai)
    import torch
    from monai.inferers.utils import sliding_window_inference  # type: ignore[import-not-found,unused-ignore]

    from volpipe.nets.load import build_net, describe
    from volpipe.volumes.volume import open_volume

    choice = Recipe.model_validate_json(recipe_json).net
    net, own = build_net(choice, str(ROOT)).cuda(), describe(choice, str(ROOT)).window
    voxels = torch.from_numpy(open_volume(location).open().read_raw(...))[None, None]

    def infer(data: torch.Tensor, arithmetic: str, window: Triple, batch: int) -> float:
        started = time.perf_counter()
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arithmetic == "tf32"
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=arithmetic == "bfloat16"):
            normalised = data.cuda().float().div_(127.5).sub_(1)
            found = sliding_window_inference(normalised, window, batch, net)
            found.mul_(127.5).add_(128).clamp_(0, 255).to(torch.uint8).cpu()
        return time.perf_counter() - started

    def best(arithmetic: str, window: Triple) -> tuple[Triple, int]:
        depth, height, width = (2 * max(sizes) for sizes in zip(own, window, strict=True))
        part = voxels[..., :depth, :height, :width]
        ways = [(own, 1), (own, 4), *([] if window == own else [(window, 1)])]
        infer(part, arithmetic, own, 1)
        return min(ways, key=lambda way: infer(part, arithmetic, *way))

    found = {arithmetic: best(arithmetic, window) for arithmetic, window in zip(ARITHMETICS, planned, strict=True)}
    turns = itertools.cycle(ARITHMETICS)

    def work(take: Take) -> None:
        arithmetic = next(turns)
        infer(voxels, arithmetic, *found[arithmetic])
        torch.cuda.empty_cache()  # the run's workers use the same GPU

    return work


def remember_speeds(recipe: Recipe, gpu: str) -> None:
    """Time windows of a net on this machine's GPU once, as a plan of a large volume does."""
    from volpipe.estimation.measure import speeds_here
    from volpipe.nets.cache import keep_speeds, kept_speeds
    from volpipe.nets.load import describe

    facts, here = describe(recipe.net, str(Path.cwd())), str(Path.cwd())
    if kept_speeds(recipe.net, facts, here, gpu) is not None:
        return
    speeds = speeds_here(recipe.net, facts, here, gpu=gpu)
    if speeds is None or not keep_speeds(recipe.net, facts, here, speeds):
        raise RuntimeError(f"windows of {facts.label} could not be timed, or the times not kept")


def measure_on_gpu(setting: Setting, repeats: int, *, name: str) -> Iterator[Outcome]:
    """Of each repeat the arithmetic in which a run does worst against MONAI; sides in output voxels a second."""
    recipe = setting.scratch / "recipe.toml"
    recipe.write_text(precision.recipe_of(name))
    settings = {each: (*SETTINGS_ON_GPU, f"infer.precision={each}") for each in ARITHMETICS}
    depth, height, width = SHAPES_ON_GPU[name]
    location = inputs.volume(setting, (depth // 2, height // 2, width) if setting.short else (depth, height, width))
    with session(setting) as running:
        capacity = running.executors.capacity
        assert capacity is not None and capacity.gpu is not None
        remember_speeds(load_recipe(recipe), capacity.gpu.name)
        plans = [
            prepare(location, load_recipe(recipe, chosen), setting.scratch / "out.zarr", Path.cwd(), running.sizing)
            for chosen in settings.values()
        ]
        num_voxels = math.prod(plans[0].out_shape) / 1e6
        windows = [plan.window for plan in plans]
        monai = str(monai_folder(setting))
        with peers(1, sliding_on_gpu, location, load_recipe(recipe).model_dump_json(), windows, monai) as go:
            for _ in range(repeats):
                sides = {}
                for each, chosen in settings.items():
                    sides[f"run {each} Mvoxel/s"] = num_voxels / running.run(
                        location, *chosen, sizing=running.sizing, recipe=recipe
                    )
                    sides[f"MONAI {each} Mvoxel/s"] = num_voxels / go()
                ratios = [sides[f"MONAI {each} Mvoxel/s"] / sides[f"run {each} Mvoxel/s"] for each in ARITHMETICS]
                yield Outcome(max(ratios), sides)


WHY = (
    "256³ uint8, on a GPU 512³, in N5 to OME-Zarr, windows of 64³, default net; the run has the layout of "
    "tensors that its plan takes; MONAI reads and writes memory only, has all cores in one process or the GPU, and its "
    "fastest batch"
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
WHY_ON_GPU = (
    "workers up, N5 to OME-Zarr without pyramid, from plan to complete output; MONAI reads and writes memory only, has "
    "the run's windows or the net's own, whichever are faster, and its own overlap of a quarter"
)
ON_GPU = [
    Row(
        f"monai-{name}",
        f"{name}: run / MONAI, the worst of {', '.join(ARITHMETICS)}",
        1.1,
        1.0,
        functools.partial(measure_on_gpu, name=name),
        why=f"{' × '.join(map(str, shape))} voxels, {WHY_ON_GPU}",
    )
    for name, shape in SHAPES_ON_GPU.items()
]
