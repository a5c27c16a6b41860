"""waterz, mwatershed or volara over stored affinities; a program by itself, since they bring packages of their own.

    PYTHONPATH=FOLDER python ts2_peers.py NAME AFFINITIES LABELS.npy WORKERS

It prints the seconds from stored affinities to stored labels, in JSON; to import the packages is not counted.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zarr

NEAR = [(-1, 0, 0), (0, -1, 0), (0, 0, -1)]
FAR = [(-3, 0, 0), (0, -3, 0), (0, 0, -3), (-9, 0, 0), (0, -9, 0), (0, 0, -9)]
THRESHOLD = 0.3  # of a mean affinity, the default of volpipe segment
BIAS, FAR_BIAS = -0.4, -0.7  # of volara's README
BLOCK, CONTEXT = 128, 16  # voxels; the longest offset is 9

Work = Callable[[str, str, int], None]


def stored(affinities: str, dtype: str, num: int) -> np.ndarray:
    """Return the first `num` affinities (c, z, y, x), 0 to 1."""
    return np.asarray(zarr.open_array(affinities, mode="r")[:num]).astype(dtype) / 255


def with_waterz() -> Work:
    """Return waterz's own watershed and its default score, the mean affinity, of which 1 - mean counts."""
    import waterz  # type: ignore[import-not-found,unused-ignore]

    def work(affinities: str, labels: str, workers: int) -> None:
        data = stored(affinities, "float32", len(NEAR))
        np.save(labels, next(waterz.agglomerate(data, [1 - THRESHOLD])))

    return work


def with_mwatershed() -> Work:
    """Return mwatershed on voxels, in one piece."""
    import mwatershed  # type: ignore[import-untyped,unused-ignore]

    def work(affinities: str, labels: str, workers: int) -> None:
        data = stored(affinities, "float64", len(NEAR) + len(FAR))
        data[: len(NEAR)] += BIAS
        data[len(NEAR) :] += FAR_BIAS
        np.save(labels, mwatershed.agglom(data, [*NEAR, *FAR]))

    return work


def with_volara() -> Work:
    """Return the pipeline of volara's README, which daisy runs: mwatershed in blocks, a graph in SQLite, a table."""
    from funlib.geometry import Coordinate  # type: ignore[import-not-found,unused-ignore]
    from volara.blockwise import (  # type: ignore[import-not-found,unused-ignore]
        AffAgglom,
        ExtractFrags,
        GraphMWS,
        Relabel,
    )
    from volara.datasets import Affs, Labels  # type: ignore[import-not-found,unused-ignore]
    from volara.dbs import SQLite  # type: ignore[import-not-found,unused-ignore]
    from volara.lut import LUT  # type: ignore[import-not-found,unused-ignore]

    def work(affinities: str, labels: str, workers: int) -> None:
        folder = Path(labels).with_suffix("")
        block, context = Coordinate((BLOCK,) * 3), Coordinate((CONTEXT,) * 3)
        near, far = ([Coordinate(offset) for offset in offsets] for offsets in (NEAR, FAR))
        axes = {"voxel_size": Coordinate(1, 1, 1), "axis_names": ["c^", "z", "y", "x"]}
        affs = Affs(store=Path(affinities), neighborhood=[*near, *far], **axes)
        fragments, segments = (Labels(store=folder / f"{name}.zarr") for name in ("fragments", "segments"))
        db = SQLite(path=folder / "db.sqlite", edge_attrs={"adj_weight": "float", "lr_weight": "float"})
        blocks = {"affs_data": affs, "frags_data": fragments, "block_size": block, "context": context}
        scores = {"adj_weight": near, "lr_weight": far}
        lut, roi = LUT(path=folder / "lut.npz"), affs.array("r").roi
        pipeline = (
            ExtractFrags(db=db, **blocks, bias=[BIAS] * len(near) + [FAR_BIAS] * len(far), num_workers=workers)
            + AffAgglom(db=db, **blocks, scores=scores, num_workers=workers)
            + GraphMWS(
                db=db,
                lut=lut,
                weights={"adj_weight": (1.0, BIAS), "lr_weight": (1.0, FAR_BIAS)},
                roi=[roi.get_begin(), roi.get_shape()],
            )
            + Relabel(frags_data=fragments, seg_data=segments, lut=lut, block_size=block, num_workers=workers)
        )
        folder.mkdir()
        pipeline.run_blockwise()
        np.save(labels, segments.array("r")[:])

    return work


PEERS = {"waterz": with_waterz, "mwatershed": with_mwatershed, "volara": with_volara}


def main() -> None:
    name, affinities, labels, workers = sys.argv[1:]
    work = PEERS[name]()
    started = time.perf_counter()
    work(affinities, labels, int(workers))
    print(json.dumps({"seconds": time.perf_counter() - started}))


if __name__ == "__main__":
    main()
