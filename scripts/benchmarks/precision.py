"""A net's speed on the GPU by arithmetic: float32, TF32 and bfloat16, each with and without channels last.

Not here: anything around the net. Windows are on the GPU before the clock starts, and stay there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.row import Outcome, Row, Setting
from volpipe.nets.load import build_net, describe
from volpipe.recipes.inference import load_recipe
from volpipe.resolve import shipped_recipe

if TYPE_CHECKING:
    from torch import Tensor, nn

VOXELS = 1 << 22  # of the output of one call, about: enough to fill a GPU, little enough to fit
SECONDS = 1.0  # of each measurement
MODES = [
    (f"{arithmetic}{' channels last' if channels_last else ''}", arithmetic, channels_last)
    for arithmetic in ("float32", "tf32", "bfloat16")
    for channels_last in (False, True)
]
RECIPES = {"unet3d": "default", "superres": "superres_z4", "affinities": "affinities"}


def recipe_of(name: str) -> str:
    """Return the recipe of the net that the row `name` measures: a shipped one, or that of srgan3d at full size."""
    if name in RECIPES:
        return shipped_recipe(Path(RECIPES[name])).read_text()
    return '[net]\nname = "srgan3d"\noptions = { variant = "z4" }\nuntrained = true\n'


def measure(setting: Setting, repeats: int, *, name: str) -> Iterator[Outcome]:
    import torch

    recipe = setting.scratch / "recipe.toml"
    recipe.write_text(recipe_of(name))
    choice = load_recipe(recipe).net
    facts, net = describe(choice), build_net(choice).cuda()
    cut = 2 if setting.short else 1
    window = [size // cut // step * step for size, step in zip(facts.window, facts.stride, strict=True)]
    voxels = math.prod(window) * math.prod(facts.scale)
    size = max(1, VOXELS // voxels)
    batch = torch.rand(size, facts.in_channels, *window, device="cuda") * 2 - 1
    for _ in range(repeats):
        took = {label: seconds_of(net, batch, arithmetic, layout) for label, arithmetic, layout in MODES}
        best = min(seconds for label, seconds in took.items() if label.startswith("bfloat16"))
        rates = {f"{label} Mvoxel/s": size * voxels / seconds / 1e6 for label, seconds in took.items()}
        yield Outcome(best / took["float32"], rates)


def seconds_of(net: nn.Module, batch: Tensor, arithmetic: str, channels_last: bool) -> float:
    """Return the seconds of one call, the mean over about SECONDS of calls, by the GPU's own clock."""
    import torch

    layout = torch.channels_last_3d if channels_last else torch.contiguous_format
    net = net.to(memory_format=layout)  # type: ignore[call-overload]  # stubs lack 3d
    batch = batch.contiguous(memory_format=layout)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = arithmetic == "tf32"
    torch.backends.cudnn.deterministic = True  # as in a run
    half = arithmetic == "bfloat16"

    def timed(calls: int) -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begun.record()
        for _ in range(calls):
            net(batch)
        ended.record()
        torch.cuda.synchronize()
        return float(begun.elapsed_time(ended)) / 1000 / calls

    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=half):
        timed(2)
        return timed(max(2, math.ceil(SECONDS / timed(1))))


ROWS = [
    Row(
        f"precision-{name}",
        f"{name}: bfloat16 / float32",
        1.0,
        0.5,
        functools.partial(measure, name=name),
        why="windows of the net's own size, on the GPU before and after, as many per call as give 4 million voxels, "
        "one at least; voxels are those of the output, halo included",
    )
    for name in (*RECIPES, "srgan3d")
]
