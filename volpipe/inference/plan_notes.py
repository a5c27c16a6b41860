"""What a user should know of a volume for a net before it runs, in sentences: all notes of a plan that rest on both.

Not here: what is wrong with a net itself (nets.facts), or what is refused (plan). The sentences are printed
with the plan, and stand in the log and the report of the run.
"""

from __future__ import annotations

import numpy as np

from volpipe.errors import PlanError
from volpipe.inference.statistics import is_counted, mapping_notes, resolve_method, sampled_affine
from volpipe.nets.facts import NetFacts, axes_notes, border_notes, is_shipped, spacing_notes
from volpipe.nets.trained import Trained, contrast_notes, voxel_notes
from volpipe.recipes.inference import Normalise, Recipe
from volpipe.volumes.values import Sample, constant_notes, image_share, size_notes, take_sample
from volpipe.volumes.volume import Volume


def plan_notes(
    recipe: Recipe, given: Normalise, net: NetFacts, volume: Volume, sample: Sample | None, mask: Volume | None,
    trained: Trained | None,
) -> list[str]:  # fmt: skip
    """Return what a user should know of `volume` for `net`, most of it by a `sample`; None where none could be taken.

    Args:
        recipe: with what the net asks for.
        given: the normalisation as the user wrote it.
        trained: what the weights learned from; None where nobody knows.
    """
    notes = [*size_notes(volume), *(f"mask: {note}" for note in (mask.value_notes if mask is not None else ()))]
    notes += [*axes_notes(volume, net), *spacing_notes(volume, net)]
    if trained is not None:
        notes += voxel_notes(volume, trained, net.label)
    if sample is None:
        return notes
    notes += [*constant_notes(sample), *mapping_notes(recipe, sample)]
    is_ours = is_shipped(recipe.net) and all(
        each.weights is None or each.weights.startswith("volpipe:") for each in recipe.net.members
    )
    is_known = is_ours or net.normalise is not None or recipe.net.trained_range is not None
    if given == Normalise() and not is_known and (trained is None or trained.normalise is None):
        notes += default_notes(recipe, sample, net.label)
    if trained is not None and not sample.is_constant:
        notes += contrast_notes(sample.volume, trained, net.label)
    masked = None if mask is None else take_sample(mask)
    if masked is not None and not np.issubdtype(masked.volume.dtype, np.floating) and image_share(masked) is not None:
        notes.append(
            f"mask: {masked.seen}, and looks like an image: all that is not 0 is selected; is it the right array?"
        )
    return [*notes, *border_notes(sample.volume, net)]


def with_trained_normalisation(recipe: Recipe, trained: Trained | None) -> Recipe:
    """Return `recipe` with the map of grey levels that its weights learned with, where it gives none itself.

    Raises:
        PlanError: the nets of an ensemble learned with different ones.
    """
    if trained is None or recipe.normalise != Normalise():
        return recipe
    if recipe.net.trained_range is not None:  # which says how those of other types are mapped
        return recipe
    if trained.unlike:
        one, other, *_ = (each.model_dump(include=each.model_fields_set) for each in trained.unlike)
        raise PlanError(
            f"nets of the ensemble learned with different grey levels, {one} and {other}, and all get the same; set "
            "normalise to what all of them take, or train them with one normalise"
        )
    if trained.normalise is None:
        return recipe
    return recipe.model_copy(update={"normalise": trained.normalise})


def default_notes(recipe: Recipe, sample: Sample, label: str) -> list[str]:
    """Return which numbers a net gets where nobody said which it was trained with, and how to say it."""
    dtype = sample.volume.dtype
    choice = resolve_method(recipe.normalise, dtype)
    if sample.is_constant or choice.method == "none":
        return []
    voxels = np.concatenate([box.reshape(len(box), -1) for box in sample.boxes], axis=1)
    shift, scale = (np.array(row) for row in sampled_affine(choice, voxels).rows[:2])
    ends = [(end - shift) / scale for end in sample.ends]
    low, high = (float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)) if is_counted(dtype) else sample.ends
    return [
        f"{sample.seen}, and net {label} gets about {ends[0].min():.3g} to {ends[1].max():.3g} for them, while nothing "
        "says which it was trained with: set as stored, normalise.method=none; 0 to 1, "
        f"normalise.low={2 * low - high:g} normalise.high={high:g}; -1 to 1, normalise.low={low:g} "
        f"normalise.high={high:g}; or mean 0 and deviation 1, normalise.method=zscore"
    ]
