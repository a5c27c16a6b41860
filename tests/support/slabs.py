"""Plans whose blocks are computed slab by slab, although they are small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from volpipe.geometry import block_shape
from volpipe.inference import pyramid
from volpipe.inference import selection as selection_module
from volpipe.inference.intensity import Affine
from volpipe.inference.plan import Plan
from volpipe.inference.windows import StreamedWindows
from volpipe.recipes.inference import load_recipe
from volpipe.runs import worker
from volpipe.workflow.prepare import prepare

NORMALISE = Affine(127.5, 127.5)


@contextmanager
def slabs_of(voxels: int) -> Iterator[None]:
    """Let slabs, and layers of coarser levels and of statistics, have so many voxels."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (block_shape, pyramid, selection_module, worker):
            patch.setattr(module, "SLAB_VOXELS", voxels)
        patch.setattr(block_shape, "WHOLE_SUM", 2 * voxels)
        yield


def planned(folder: Path, volume: Path, out: str, *settings: str) -> Plan:
    return prepare(str(volume), load_recipe(None, settings), folder / out, folder)


def source_of(plan: Plan) -> StreamedWindows:
    return StreamedWindows(plan.source.volume(), plan.lattice, NORMALISE)
