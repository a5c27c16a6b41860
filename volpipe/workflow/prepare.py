"""The plan of a run of one net: its volume opened, net and mask looked at, and all checked against each other.

Not here: the plan itself (inference.plan), or the run (driver).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from volpipe.errors import PlanError, RunError, VolumeError
from volpipe.estimation.limits import check_access, check_apart
from volpipe.estimation.window_choice import fastest_plan
from volpipe.geometry.grid import triple
from volpipe.inference.output import check_name, check_output
from volpipe.inference.output_plan import SourceVolume
from volpipe.inference.plan import NetSizes, Plan, make_plan
from volpipe.inference.plan_notes import plan_notes, with_trained_normalisation
from volpipe.inference.roi import lay_mask
from volpipe.inference.statistics import as_trained, in_own_type, mapping
from volpipe.nets.facts import (
    NetFacts,
    check_thickness,
    check_trained,
    on_trained_grid,
    with_net_defaults,
    with_normalisation,
    with_spacing,
)
from volpipe.nets.load import check_geometry, check_shapes, describe, fitted
from volpipe.nets.trained import Trained, unknown_size_note
from volpipe.recipes.inference import AlsoInput, ArrayInput, Recipe
from volpipe.recipes.toml import differences
from volpipe.runs.run_folder import RunFolder
from volpipe.stages.sizing import UNSIZED, Sizing
from volpipe.volumes.on_grid import resampled
from volpipe.volumes.stack import check_stack, stack
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.values import Sample, take_sample
from volpipe.volumes.volume import View, Volume, open_volume


def prepare(location: str, recipe: Recipe, out: str | Location, search_path: Path, sizing: Sizing = UNSIZED) -> Plan:
    """Return the plan for `location`; everything that can be refused before the start is refused here."""
    volume = open_volume(location, recipe.input.key, recipe.input.level, view=recipe.input.view)
    plan = prepare_for(volume, recipe, out, search_path, sizing, sample_for(recipe, volume))
    for source in (plan.source, *plan.source.also):
        check_access(paths.locate(source.path), paths.locate(out))
    return plan


def prepare_for(
    volume: Volume,
    recipe: Recipe,
    out: str | Location,
    search_path: Path,
    sizing: Sizing = UNSIZED,
    sample: Sample | None = None,
) -> Plan:
    """Return the plan for `volume`, which need not exist yet; all that can be refused without it is refused here.

    A `sample` of it tells what its values look like; plan.warnings() says what a user should know. Volumes that are
    read with it are opened, unless it is one of several.
    """
    check_name(out)
    if recipe.input.also and len(volume.parts) == 1:
        volume = stack([volume, *(open_also(also, search_path) for also in recipe.input.also)])
    check_stack(volume)
    chosen = recipe.windows.shape
    net = describe(recipe.net, str(search_path), None if chosen == "auto" else triple(chosen))
    check_trained(recipe.net, net)
    net = with_spacing(recipe.net, net)
    stored, volume = volume, _on_trained_grid(volume, net)
    net = fitted(recipe.net, net, volume, str(search_path))
    target = paths.locate(out)
    begun = None if sizing.fresh else _begun_plan(target)
    is_same_type = begun is not None and begun.source.dtype == volume.dtype.name
    given, trained = recipe.normalise, Trained.beside(recipe.net, str(search_path))
    recipe = with_trained_normalisation(with_normalisation(recipe, net), trained)
    recipe = _as_mapped(recipe, begun if is_same_type else None, sample)
    recipe = _in_own_types(with_net_defaults(recipe, net), volume)
    mask = _open_mask(recipe.input.mask, search_path, recipe.input.incomplete)

    def make(sizes: NetSizes) -> Plan:
        folder, num_workers = str(search_path), None if sizing.capacity is None else sizing.capacity.num_workers
        return make_plan(
            recipe, volume, net, out=target, search_path=folder, mask=mask, sizes=sizes, num_workers=num_workers,
            stored=stored,
        )  # fmt: skip

    sizes = sizing.sizes or _begun_sizes(begun, recipe, net)
    plan = fastest_plan(make, sizing.capacity) if sizes is None else make(sizes)
    plan = plan if sizing.fresh else RunFolder.from_output(target).as_begun(plan)
    check_thickness(volume, net)
    for part in volume.parts:
        check_apart(target, part, "volume")
    if mask is not None:
        check_apart(target, mask, "mask")
    for array in plan.arrays:
        check_output(array)
    check_shapes(recipe.net, net, plan.window, str(search_path))
    check_geometry(recipe.net, net, plan.window, str(search_path))
    notes = replace(
        plan.notes,
        volume=(*plan.notes.volume, *filter(None, [unknown_size_note(volume, trained)])),
        fit=tuple(plan_notes(recipe, given, net, volume.parts[0], sample, mask, trained)),
        mapping=mapping(recipe.normalise, volume.parts[0].stored_dtype),
    )
    return plan.changed(notes=notes)


OUTPUT_OF: Mapping[str, Callable[[Plan], object]] = {  # an array of a run, as far as later stages rest on it
    "array": lambda plan: plan.folder,
    "channels": lambda plan: plan.num_channels,
    "voxels (z, y, x)": lambda plan: plan.shown_shape,
    "type": lambda plan: plan.out_dtype,
    "intensity": lambda plan: plan.intensity,
    "offsets": lambda plan: plan.recipe.net.offsets,
}


def longest_first(plans: Sequence[Plan], maker: str = "") -> Sequence[Plan]:
    """Return the `plans` of one run with the nets that the stage `maker` tries, by the nets' multiplications.

    Raises:
        PlanError: later stages would read something else with another net.
    """
    first, *others = plans
    for plan, what in itertools.product(others, OUTPUT_OF):
        of_first, of_other = (", ".join(str(OUTPUT_OF[what](array)) for array in each.arrays) for each in (first, plan))
        if of_first != of_other:
            net = "; ".join(line for line in differences(first.recipe, plan.recipe) if line.startswith("net."))
            raise PlanError(
                f"stage {maker} tries nets of other outputs, {what} {of_first} and {of_other} ({net}); later stages "
                "rest on that, and scores do not compare: try those nets in a stage of training for each"
            )
    if not others:
        return plans
    note = f"the longest of {len(plans)} nets that stage {maker} tries"
    ranked = sorted(plans, key=lambda plan: -plan.net.num_parameters * plan.lattice.num_windows * prod(plan.window))
    return [plan.changed(notes=replace(plan.notes, net=note)) for plan in ranked]


def sample_for(recipe: Recipe, volume: Volume) -> Sample | None:
    """Return a sample of `volume`; None where `recipe` takes values as they are, whatever they are."""
    return None if recipe.normalise.method == "none" else take_sample(volume)


def _begun_plan(out: Location) -> Plan | None:
    """Return the plan of the run that was begun for `out`; None where there is none."""
    try:
        return RunFolder.from_output(out).load(Plan)
    except RunError:  # another version's: the run itself refuses it
        return None


def _begun_sizes(old: Plan | None, recipe: Recipe, net: NetFacts) -> NetSizes | None:
    """Return the sizes of the run that was begun, if it is by the same recipe; None where there is none."""
    if old is None or old.net != net or (old.recipe.windows, old.recipe.infer) != (recipe.windows, recipe.infer):
        return None
    return old.sizes


def _as_mapped(recipe: Recipe, old: Plan | None, sample: Sample | None) -> Recipe:
    """Return `recipe` with the map of grey levels that a sample asks for; a run that was begun keeps its own."""
    own, kept = recipe.normalise, None if old is None else old.recipe.normalise
    if own.method == "auto" and kept is not None and kept.method == "bytes" and own.low is None and own.mean is None:
        rule = {"method": kept.method, "low": kept.low, "high": kept.high}
        return recipe.model_copy(update={"normalise": own.model_copy(update=rule)})
    if kept == own:
        return recipe
    return as_trained(recipe, sample)


def check_opened(volume: Volume, choice: ArrayInput) -> None:
    """Refuse a recipe whose `choice` is another array, channel or place than the `volume` that a caller has opened.

    Raises:
        PlanError: with the keys, and what to do instead.
    """
    fields = ArrayInput.model_fields
    chosen = [f"input.{name}" for name, field in fields.items() if getattr(choice, name) != field.default]
    if not chosen:
        return
    key = volume.key if choice.key is None and not choice.level else choice.key
    try:
        is_same = open_volume(volume.path, key, choice.level, view=choice.view) == volume
    except VolumeError:
        is_same = False
    if not is_same:
        raise PlanError(
            f"the volume {volume} is open already, and the recipe chooses another by {', '.join(chosen)}; give the "
            "location instead of the volume, or leave them out and choose by vp.open(…)"
        )


def prepare_again(plan: Plan) -> Plan:
    """Return `plan` for its volume and its mask as they are now; the net is looked at only where these are others."""
    volume = plan.source.volume()
    laid = None if plan.mask is None else lay_mask(open_volume(plan.mask.path, plan.mask.key), volume)
    if SourceVolume.from_volume(volume) == plan.source and laid == plan.mask:
        return plan
    source = plan.source
    stored = volume if source.resampling is None else open_volume(source.path, source.key, view=source.view).as_it_is
    return prepare_for(stored, plan.recipe, plan.out, Path(plan.search_path), Sizing(sizes=plan.sizes))


def open_also(also: AlsoInput, search_path: Path) -> Volume:
    """Return a volume that is read with the first one; a relative place counts from `search_path`."""
    place = also.path if "://" in also.path else search_path / also.path
    return open_volume(place, also.key, also.level, view=also.view)


def _on_trained_grid(volume: Volume, net: NetFacts) -> Volume:
    """Return `volume` on the grid of voxels that the net was trained on, each of several interpolated for itself."""
    how = net.interpolation
    if len(volume.parts) == 1 or how is None:
        return on_trained_grid(volume, net)
    parts, first = list[Volume](), 0
    for part in volume.parts:
        limits = how.limits[first : first + part.num_channels]
        own = net.model_copy(update={"interpolation": how.model_copy(update={"limits": limits})})
        sized = replace(part, voxel_size_nm=volume.voxel_size_nm)  # which it may not say itself
        parts.append(resampled(part, on_trained_grid(sized, own).resampling))
        first += part.num_channels
    return stack(parts)


def _in_own_types(recipe: Recipe, volume: Volume) -> Recipe:
    """Return `recipe` with the maps of grey levels that it has for the types of several volumes read in a wider one."""
    first, *others = (part.stored_dtype for part in volume.parts)
    if all(dtype == first for dtype in others):
        return recipe
    also = tuple(
        each.model_copy(update={"normalise": in_own_type(each.normalise or recipe.normalise, dtype)})
        for each, dtype in zip(recipe.input.also or (), others, strict=True)
    )
    own = in_own_type(recipe.normalise, first)
    return recipe.model_copy(update={"input": recipe.input.model_copy(update={"also": also}), "normalise": own})


def _open_mask(location: str | None, search_path: Path, is_read_incomplete: bool) -> Volume | None:
    if location is None:
        return None
    place = location if "://" in location else search_path / location
    return open_volume(place, view=View(incomplete=is_read_incomplete))
