"""What the labels of a segmentation say of how they were made, written and read.

Not here: their arrays (plan, inference.output), or which voxel has which label (agglomerate).
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import volpipe
from volpipe.geometry.grid import Triple
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.toml import Section
from volpipe.runs.provenance import Origin, parse_origin, read_provenance, versions
from volpipe.segmentation.plan import SegmentPlan

RECIPE_KEY = "labelling"  # of attributes: a run's is "recipe"
PACKAGES = (
    "volpipe",
    *("connected-components-3d", "fastremap", "numpy", "parsl", "tensorstore", "zarr"),
)


def origin(plan: SegmentPlan, fingerprint: str) -> dict[str, object]:
    """Return the provenance attributes of the output, the same in every segmentation by its recipe and block.

    `fingerprint` is that of the volume.
    """
    source = plan.source.model_dump(include={"path", "key", "shape", "dtype", "view"})
    return {
        "version": volpipe.__version__,
        RECIPE_KEY: plan.recipe.model_dump(mode="json"),
        "block": plan.block,
        "input": source | {"fingerprint": fingerprint},
        **versions(PACKAGES),
    }


class LabelOrigin(Origin):
    """The provenance of labels, from which they can be made again."""

    command: ClassVar[str] = "segment"
    recipe: SegmentRecipe
    block: Triple

    @property
    def again(self) -> Section:
        """The recipe for `volume`, with the block that was taken, by which fragments are cut; it may have grown."""
        tree = super().again.model_dump(mode="json")
        tree["output"]["block"] = self.block
        return SegmentRecipe.model_validate(tree)


def read_label_origin(output: str | Path) -> LabelOrigin | None:
    """Return the provenance of the labels `output`, None of other outputs.

    Raises:
        RunError: another version wrote it.
    """
    attributes = read_provenance(output)
    if RECIPE_KEY not in attributes:
        return None
    return parse_origin(LabelOrigin, attributes | {"recipe": attributes[RECIPE_KEY]}, output)
