"""`run` against dask's map_overlap over the same Zarr, same net and halo.

dask gets what it does best with here: threads, one per core, that run torch with a thread each (its processes copy
arrays), an array of chunks larger than those on disk, of the size that is fastest in a trial before, its overlap
mirrored at the faces, and its output written as the same chunks of Zarr, zstd 1. The run may use a larger window than
the net's own in turn; both choices are in WINDOW and CHUNKS.
"""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import inputs
from benchmarks.comparisons.peer import Take, peers
from benchmarks.row import Outcome, Row, Setting, compared
from benchmarks.session import DEFAULT_RECIPE, ROOT, session

HALO = 10  # of the default net, 9, in whole strides
CHUNKS = (64, 128, 256)
WINDOW = 128 + 2 * HALO


def array_functions() -> Any:  # Any: dask's functions have no types
    """Return dask.array."""
    import dask.array

    return dask.array


def overlapped(location: str, out: str) -> Callable[[Take], None]:
    """Return dask's inference over a volume on disk to another, with the chunks that are fastest."""
    import dask
    import torch
    import zarr
    from zarr.codecs import ZstdCodec

    from volpipe.nets.load import build_net
    from volpipe.recipes.inference import load_recipe

    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # the arithmetic of a run
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net = build_net(load_recipe(DEFAULT_RECIPE).net, str(ROOT)).to(device)
    da = array_functions()
    source = zarr.open_array(location, mode="r")
    workers = len(os.sched_getaffinity(0))

    def infer(block: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            data = torch.from_numpy(np.asarray(block)).to(device).float().div(127.5).sub(1)[None, None]
            grey: np.ndarray = net(data)[0, 0].add(1).mul(127.5).round().clamp(0, 255).byte().cpu().numpy()
        return grey

    def convert(chunk: int) -> float:
        shutil.rmtree(out, ignore_errors=True)
        target = zarr.create_array(
            out, shape=source.shape, dtype=source.dtype, chunks=(64,) * 3, compressors=ZstdCodec(level=1)
        )
        started = time.perf_counter()
        with dask.config.set(scheduler="threads", num_workers=workers), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            array = da.from_zarr(source, chunks=(chunk,) * 3)
            found = da.map_overlap(
                infer, array, depth=HALO, boundary="reflect", dtype=np.uint8, meta=np.zeros((0,) * 3, np.uint8)
            )
            da.store(found, target, lock=False)
        return time.perf_counter() - started

    fitting = [chunk for chunk in CHUNKS if chunk <= max(source.shape) // 2]
    best = min(fitting, key=convert)

    def work(take: Take) -> None:
        convert(best)

    return work


def measure(setting: Setting, repeats: int) -> Iterator[Outcome]:
    location = inputs.volume(setting, setting.cube(256), "zarr2")
    out = setting.scratch / "dask.zarr"
    settings = (f"windows.shape={[WINDOW] * 3}", "output.levels=0")
    with session(setting) as running, peers(1, overlapped, location, str(out)) as go:
        yield from compared(repeats, lambda: running.run(location, *settings), go, "dask")


ROWS = [
    Row(
        "dask",
        "run / dask map_overlap over the same Zarr",
        0.9,
        0.6,
        measure,
        why="256³ uint8, Zarr v2 to Zarr, default net and its halo, windows with a core of 128³; dask has a thread per "
        "core and its fastest chunks of 64³, 128³ and 256³",
    )
]
