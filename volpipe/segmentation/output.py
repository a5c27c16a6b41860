"""The output of a segmentation: one array per level, metadata, provenance, and coarser levels.

Not here: which voxel has which label (agglomerate), or the tasks (tasks).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

import volpipe
from volpipe.errors import PlanError
from volpipe.geometry.grid import Box
from volpipe.inference.output import ARRAY_FORMATS, check_precomputed, level_key, levels_of, volume_from_spec
from volpipe.inference.pyramid import coarsened
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.runs.provenance import Origin, parse_origin, read_provenance, versions
from volpipe.segmentation.plan import SegmentPlan
from volpipe.volumes import checksums
from volpipe.volumes.formats.precomputed import SEGMENTATION
from volpipe.volumes.identity import fingerprint
from volpipe.volumes.storage import paths
from volpipe.volumes.volume import (
    ArraySpec,
    Multiscale,
    Volume,
    absolute,
    create_array,
    create_multiscale,
    open_writer,
)

RECIPE_KEY = "labelling"  # of attributes: a run's is "recipe"
PACKAGES = (
    "volpipe",
    *("connected-components-3d", "fastremap", "mwatershed", "numpy", "parsl", "tensorstore", "zarr"),
)


def create_output(plan: SegmentPlan) -> None:
    """Write the metadata of every level and of their group; existing voxels stay."""
    out = paths.locate(plan.out)
    for level in range(len(plan.factors)):
        create_array(out, level_key(level), _spec(plan, level), array_format(plan))
    create_multiscale(out, _multiscale(plan), format=plan.recipe.output.format, attributes=_origin(plan))


def array_format(plan: SegmentPlan) -> str:
    """Return the format of the arrays of the output."""
    return ARRAY_FORMATS[plan.recipe.output.format]


def check_output(plan: SegmentPlan) -> None:
    """Raise where precomputed cannot hold the labels of `plan`, or cannot say where they lie.

    Raises:
        PlanError: with what would do.
    """
    if plan.recipe.output.format == "precomputed":
        check_precomputed([_spec(plan, level) for level in range(len(plan.factors))], _multiscale(plan))


def planned_volume(plan: SegmentPlan, level: int = 0) -> Volume:
    """Return `level` of the labels as `open_volume` will return it; it need not exist yet.

    Raises:
        PlanError: the labels have no such level.
    """
    if level >= len(plan.factors):
        raise PlanError(f"{plan.out} will have no level {level}; its levels are 0 to {len(plan.factors) - 1}")
    return volume_from_spec(plan.out, array_format(plan), _spec(plan, level), _multiscale(plan), level)


def write_labels(plan: SegmentPlan, level: int, box: Box, labels: np.ndarray) -> str:
    """Write `labels` (z, y, x) to `box` of `level`, and return the checksums of the files.

    Only whole shards are written, each by one writer.
    """
    writer = open_writer(plan.out, level_key(level))
    writer.write(box, labels)
    return checksums.take(writer.header, box)


def coarse_labels(plan: SegmentPlan, level: int, box: Box) -> np.ndarray:
    """Return `box` of `level` (z, y, x): the most frequent of the finer labels below each voxel.

    Of equally frequent labels the smallest wins; 0 counts like any other.
    """
    finer = open_writer(plan.out, level_key(level - 1))
    labels = np.empty(box.shape, plan.dtype)
    for part, data in coarsened(plan, level, box, finer.read, "mode"):
        labels[part.relative_to(box.start).slices] = data
    return labels


def _spec(plan: SegmentPlan, level: int) -> ArraySpec:
    choice = plan.recipe.output
    is_precomputed = choice.format == "precomputed"
    return ArraySpec(
        shape=plan.level_shape(level),
        dtype=plan.dtype,
        chunks=plan.chunk,
        shards=plan.shard,
        codec=SEGMENTATION if is_precomputed else choice.codec,
        codec_level=choice.codec_level if choice.codec != "raw" else 0,
    )


def _multiscale(plan: SegmentPlan) -> Multiscale:
    levels, name = levels_of(plan.factors), absolute(plan.out).stem
    size, origin = plan.source.voxel_size_nm, plan.source.origin_nm
    return Multiscale(levels, voxel_size_nm=size, origin_nm=origin, name=name, is_labels=True)


def _origin(plan: SegmentPlan) -> dict[str, object]:
    """Return the provenance attributes of the output, the same in every segmentation by its recipe."""
    source = plan.source.model_dump(include={"path", "key", "shape", "dtype", "view"})
    return {
        "version": volpipe.__version__,
        RECIPE_KEY: plan.recipe.model_dump(mode="json"),
        "input": source | {"fingerprint": fingerprint(plan.source.volume())},
        **versions(PACKAGES),
    }


class LabelOrigin(Origin):
    """The provenance of labels, from which they can be made again."""

    command: ClassVar[str] = "segment"
    recipe: SegmentRecipe


def read_label_origin(output: str | Path) -> LabelOrigin | None:
    """Return the provenance of the labels `output`, None of other outputs.

    Raises:
        RunError: another version wrote it.
    """
    attributes = read_provenance(output)
    if RECIPE_KEY not in attributes:
        return None
    return parse_origin(LabelOrigin, attributes | {"recipe": attributes[RECIPE_KEY]}, output)
