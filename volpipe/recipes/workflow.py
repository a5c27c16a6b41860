"""The flow: a recipe of several stages, each reading what an earlier one makes; parsed, and its order checked.

Not here: whether the stages fit their volumes (workflow.plan), or running them (execute).

    [[stage]]                      [[stage]]
    name = "restore"               name = "scores"
    recipe = "superres_z4"         kind = "evaluate"
                                   reference = "truth.n5/raw"
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from volpipe.errors import RecipeError, VolpipeError
from volpipe.geometry.grid import Triple
from volpipe.geometry.labels import Ignore
from volpipe.recipes.inference import ArrayInput, Input, Output, Recipe, Windows
from volpipe.recipes.segmentation import SegmentRecipe
from volpipe.recipes.toml import Section, Sizes, UserPath, load_tree, name_of, replaced_net, set_values, typed
from volpipe.recipes.training import VARIED, TrainRecipe, run_sections
from volpipe.resolve import nearest

VOLUME = "volume"  # what a stage reads that reads the command's argument
OF_LABELS = "labels"  # in place of a path of skeletons: they are made of the reference
Tree = dict[str, Any]  # Any: TOML values, checked by `typed`


class Comparison(Section):
    """What a stage of kind "evaluate" compares its input with; as the options of `volpipe evaluate`."""

    reference: UserPath | None = None
    """The volume that is compared with; left out where skeletons in files stand in for it. Or a stage of kind "train":
    the labels that it learns from, in the box that it holds out."""
    given: UserPath | None = None
    """The input of the net, from which interpolations are scored beside it."""
    labels: bool = False
    """Compare labels, not grey levels."""
    classes: bool = False
    """Compare classes, whose numbers mean the same in both."""
    skeletons: UserPath = ""
    """Score labels by the skeletons at this path, or "labels" by those of the labels of the reference."""
    roi: str | None = None
    """The box that is compared, `z0:z1,y0:y1,x0:x1` of the reference."""
    margin: Triple = (0, 0, 0)
    """Voxels at each face that are left out (z, y, x)."""
    data_range: float | None = None
    """The distance of the largest grey level from the smallest, for PSNR and SSIM."""
    ignore: Ignore = None
    """Labels of which nothing is known, a number or a list: voxels that have them in the reference are left out.
    Without the key, the numbers by which data sets mean "unknown", as `affinities.ignore` of a training; [] leaves none
    out."""
    any_place: bool = False
    """Compare voxel by voxel although voxel sizes or origins say that the two lie elsewhere."""

    @model_validator(mode="after")
    def _fits(self) -> Comparison:
        assert self.kind
        return self

    @property
    def kind(self) -> str:
        """What is scored: "image", "labels", "classes" or "skeletons"."""
        return kind_of(self.reference, labels=self.labels, classes=self.classes, skeletons=self.skeletons)


def kind_of(reference: str | None, *, labels: bool, classes: bool, skeletons: str) -> str:
    """Return what is scored against a reference, by the keys or options that say so.

    Raises:
        RecipeError: several do, or there is no reference, or one too many.
    """
    chosen = {"labels": labels, "classes": classes, "skeletons": bool(skeletons)}
    kinds = [kind for kind, is_chosen in chosen.items() if is_chosen] or ["image"]
    if len(kinds) > 1:
        raise RecipeError(f"{' and '.join(kinds)} are of different scores; give one of them")
    is_in_files = bool(skeletons) and skeletons != OF_LABELS
    if is_in_files and reference is not None:
        raise RecipeError(
            f"skeletons at {skeletons} stand in for a reference; leave {reference} out, or give the path {OF_LABELS}, "
            "by which skeletons are made of it"
        )
    if reference is None and not is_in_files:
        raise RecipeError("reference is missing; give a text, or skeletons in files")
    return kinds[0]


class OutputComparison(Section):
    """What a stage of kind "compare" holds its input against; as the options of `volpipe compare`."""

    other: UserPath
    """The volume that is compared with: that of another stage, by its name, or a path."""
    labels: bool = False
    """Compare labels as objects, whose numbers mean nothing. Whole numbers of more than 16 bits are labels anyway,
    unless `data_range` is given."""
    roi: str | None = None
    """The box that is compared, `z0:z1,y0:y1,x0:x1`."""
    data_range: float | None = None
    """The distance of the largest grey level from the smallest, for PSNR."""
    any_place: bool = False
    """Compare voxel by voxel although voxel sizes or origins say that the two lie elsewhere."""


class Conversion(Section):
    """What a stage of kind "convert" makes of its input: another level, box, channel, type or format, or larger voxels.

    Its sections are those of a run. Integers stay what they are, labels of 64 bits too; floats become
    float32.
    """

    bin: Sizes = (1, 1, 1)
    """Voxels (z, y, x) of the input whose mean is one of the output, for grey levels. Where it does not divide an axis,
    the last voxels are means over the mirrored end."""
    input: Input = Input()
    """Which array, level, channel and box (`roi`) is read, as of a run."""
    windows: Windows = Windows()
    """How large blocks are, as of a run; the result does not depend on it."""
    output: Output = Output()
    """Format, type and layout, as of a run. The type is that of the input; others are rounded and clipped."""


class UserFunction(Section):
    """A Python function over blocks of numpy."""

    function: UserPath
    """`file.py:function` or `module:function`; the code runs with your rights, on the workers."""
    halo: Triple = (0, 0, 0)
    """How far (z, y, x) the function looks; a halo that does not fit it is noticed over random voxels, and refused."""
    options: dict[str, Any] = Field(default_factory=dict)  # Any: whatever the function takes
    """Keyword arguments of the function."""


class BlockFunction(UserFunction):
    """What a stage of kind "function" does: a Python function over blocks of numpy with a halo.

    It gets a block (z, y, x), or (c, z, y, x) of several channels, as it is stored, with the halo around it, and
    returns as many voxels, of as many channels as it likes. The halo is cut off then. Beyond the faces of the volume a
    block shows it mirrored.
    """

    input: Input = Input()
    """Which array, level, channel and box (`roi`) is read, as of a run."""
    windows: Windows = Windows()
    """How large blocks are, as of a run; the result does not depend on it."""
    output: Output = Output()
    """Format, type and layout, as of a run. The type is that of the result; another one must hold all of its values."""


Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]  # part of paths, and of CSV


class Measuring(UserFunction):
    """What a stage of kind "measure" does: a Python function gives rows of each block, of which a table is made.

    It gets a block (z, y, x), or (c, z, y, x) of several channels, as it is stored, with the halo around it, that of
    `other` after it, and as `start` the place (z, y, x) of the first voxel within the halo. It returns arrays of one
    length by the names of columns: those of `by` and those of `combine`. Each voxel is in one block. Beyond the faces
    of the volume its outermost voxels are repeated.
    """

    combine: dict[Name, Literal["sum", "min", "max"]]
    """How rows of several blocks become one, by the names of columns: "sum", "min" or "max"."""
    by: tuple[Name, ...] = ("label",)
    """Columns that tell what a row is of, whole numbers: rows that have the same there become one."""
    ratio: dict[Name, tuple[Name, Name]] = Field(default_factory=dict)
    """Further columns, each of two of `combine`, the first divided by the second. Empty where that is 0."""
    other: UserPath | None = None
    """A second volume, of the same place: that of another stage, by its name, "volume", or a path."""
    roi: str | None = None
    """The box that is measured, `z0:z1,y0:y1,x0:x1`."""
    block: Sizes = (128, 128, 128)
    """Voxels (z, y, x) of a block; the table does not depend on it, but for the rounding of floats by the function."""
    any_place: bool = False
    """Pair both volumes voxel by voxel although voxel sizes or origins say that they lie elsewhere."""

    @model_validator(mode="after")
    def _named_once(self) -> Measuring:
        if not self.by:
            raise ValueError("by is empty; name the columns that tell what a row is of")
        for name, times in Counter([*self.by, *self.combine, *self.ratio]).items():
            if times > 1:
                raise ValueError(f"{times} columns are named {name}, in by, combine and ratio; rename one")
        for part in (part for parts in self.ratio.values() for part in parts if part not in self.combine):
            raise ValueError(f"ratio: combine has no column {part}{nearest(part, self.combine)}")
        return self


class Learning(TrainRecipe):
    """What a stage of kind "train" learns: a training's recipe, and perhaps what is varied in it."""

    sweep: dict[str, Any] = Field(default_factory=dict)  # Any: TOML values
    """Lists of values by key, as in a recipe of `volpipe sweep`: the training of the best held-out score goes on."""
    tune: dict[str, Any] = Field(default_factory=dict)  # Any: TOML values
    """Ranges by key, as in a recipe of `volpipe tune`: the best training goes on."""

    @model_validator(mode="after")
    def _varied_once(self) -> Learning:
        if self.sweep and self.tune:
            raise ValueError("sweep and tune exclude each other; leave one out")
        if (self.sweep or self.tune) and self.train.continue_steps:
            raise ValueError(
                "over corrected labels another training of a search may be the best, so all are made anew; leave out "
                "train.continue_steps, or give the best values in place of the search"
            )
        return self

    @property
    def training(self) -> TrainRecipe:
        """The recipe, without what is varied."""
        return TrainRecipe.model_validate(self.sections)

    @property
    def sections(self) -> Tree:
        """The sections of a training's recipe, without what is varied."""
        return self.model_dump(mode="json", exclude=set(VARIED))


Makes = Literal["volume", "weights", "scores"]


@dataclass(frozen=True)
class Link:
    """A key, beside `input`, whose `value` may be an earlier stage that `makes` what is needed: NAME, or NAME/ARRAY.

    The stage begins when that one is complete. A file of the same name is reached as ./NAME, unless the value
    `is_stage` for sure.
    """

    key: str
    value: str
    makes: Makes = "volume"
    is_stage: bool = False

    @property
    def stage(self) -> str:
        return self.value.partition("/")[0]


@dataclass(frozen=True)
class StageKind:
    """A kind of stages: what such a stage says, and what others may have of it.

    Attributes:
        keys: what it says, beside `Head`.
        about: what it does, in sentences for users.
        has_recipe: whether `keys` are those of a recipe, of which a file is named as `recipe`.
        has_input: whether it reads a stage, or the volume, as `input`.
        needs: section without which a stage has to name a recipe.
        makes: what a later stage may read, or not.
        links: returns the keys of a stage that may name other stages.
    """

    keys: type[Section]
    about: str
    has_recipe: bool = True
    has_input: bool = True
    needs: str = ""
    makes: Makes = "volume"
    links: Callable[[Tree], Iterable[Link]] = lambda tree: ()

    @property
    def takes_part(self) -> bool:
        """Whether such a stage may read a box of the volume, or what a mask selects."""
        field = self.keys.model_fields.get("input")
        return field is not None and field.annotation is Input


def _net_link(tree: Tree) -> Iterator[Link]:
    """Yield the training of the weights that a run takes."""
    net = tree.get("net")
    if isinstance(net, dict) and isinstance(net.get("stage"), str):
        yield Link("net", net["stage"], "weights", is_stage=True)


def _data_links(tree: Tree) -> Iterator[Link]:
    """Yield the volumes of a training."""
    data = tree.get("data")
    for number, entry in enumerate(data if isinstance(data, list) else ()):
        for key in ("path", "labels"):
            if isinstance(entry, dict) and isinstance(entry.get(key), str):
                yield Link(f"data.{number}.{key}", entry[key])


def _truth_link(tree: Tree) -> Iterator[Link]:
    """Yield the training whose labels are compared with."""
    if isinstance(tree.get("reference"), str):
        yield Link("reference", tree["reference"], "weights")


def _other_link(tree: Tree) -> Iterator[Link]:
    """Yield the second volume."""
    if "other" in tree:
        yield Link("other", str(tree["other"]))


KINDS: Mapping[str, StageKind] = {
    "run": StageKind(Recipe, "a net; the keys of its recipe follow.", needs="net", links=_net_link),
    "label": StageKind(SegmentRecipe, "a segmentation."),
    "convert": StageKind(
        Conversion, "a part, a level, a type or a format of the input, or larger voxels.", has_recipe=False
    ),
    "function": StageKind(BlockFunction, "a Python function over blocks.", has_recipe=False),
    "train": StageKind(
        Learning, "the weights of a net, as `volpipe train`.", has_input=False, makes="weights", links=_data_links
    ),
    "evaluate": StageKind(Comparison, "scores.", has_recipe=False, makes="scores", links=_truth_link),
    "compare": StageKind(
        OutputComparison,
        "how much two outputs differ.",
        has_recipe=False,
        makes="scores",
        links=_other_link,
    ),
    "measure": StageKind(
        Measuring, "a table, by a Python function over blocks.", has_recipe=False, makes="scores", links=_other_link
    ),
}
if TYPE_CHECKING:
    KindName = str
else:
    KindName = Literal[tuple(KINDS)]


class Head(Section):
    """What every `[[stage]]` says, beside the keys of its kind."""

    name: Name
    """Name of the stage, a part of paths."""
    kind: KindName = Field("run", description=" ".join(f"{name}: {kind.about}" for name, kind in KINDS.items()))
    recipe: UserPath | None = None
    """A shipped recipe or a TOML file; keys of the stage are set on top of it."""
    input: str | None = None
    """The stage that is read, or "volume"; without it the stage before. Of several arrays one is named after it, as in
    "predict/affinities"."""


@dataclass(frozen=True)
class FlowStage:
    """One stage: `reads` is the name of an earlier one, or "volume"; `choice` is what to do, checked by its kind.

    `array` is what it reads of that stage, where it makes several; `beside` has the other stages that it needs.
    `for_net` returns the choice of a run whose net the first of these trains, by the recipe of a training of it.
    """

    name: str
    kind: str
    reads: str
    choice: Section
    array: str = ""
    beside: tuple[str, ...] = ()
    for_net: Callable[[TrainRecipe], Section] | None = None

    @property
    def input(self) -> ArrayInput | None:
        """The section that says which array is read; None for a kind that has none."""
        return getattr(self.choice, "input", None)


@dataclass(frozen=True)
class Flow:
    """The stages of the file `source`, each after the one that it reads."""

    source: str
    stages: tuple[FlowStage, ...]


@contextmanager
def named(stage: str) -> Iterator[None]:
    """Begin what our errors say with the name of the stage that they are about."""
    try:
        yield
    except VolpipeError as error:
        error.args = (f"stage {stage}: {error}",)
        raise


def find_flow(
    path: Path, settings: Sequence[str] = (), *, for_volume: Sequence[str] = (), for_runs: Sequence[str] = ()
) -> Flow | None:
    """Return the flow in the TOML file at `path`; None where it is the recipe of one run.

    Args:
        settings: ``stage.key=value``, on top of what the file says of that stage.
        for_volume: ``key=value``, on top of each run, conversion and function that reads the volume itself.
        for_runs: ``key=value``, on top of each run.

    Raises:
        RecipeError: no such file, stages without an order, unknown keys, values that do not fit; it names the stage.
    """
    tree, name = load_tree(path), name_of(path)
    if "stage" not in tree:
        return None
    others = [key for key in tree if key != "stage"]
    if others:
        raise RecipeError(f"{name}: {others[0]} stands beside the stages; write it into one, as [stage.{others[0]}]")
    entries = tree["stage"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(f"{name}: stage is no list of tables; begin each stage with [[stage]]")
    if not entries:
        raise RecipeError(f"{name}: it declares no stage; write one as [[stage]], or leave `stage` out")
    trees = [dict(entry) for entry in entries]
    _spread(trees)
    _set_each(trees, settings)
    heads = [_head(entry, f"{name}, stage {number}", settings) for number, entry in enumerate(trees, 1)]
    links = {head.name: _links(head, entry) for head, entry in zip(heads, trees, strict=True)}
    reads = _order(heads, links, name)
    for head, entry in zip(heads, trees, strict=True):
        of_volume = for_volume if reads[head.name] == VOLUME and KINDS[head.kind].takes_part else ()
        set_values(entry, (*for_runs, *of_volume) if head.kind == "run" else of_volume)
    if for_volume and not any(KINDS[head.kind].takes_part and reads[head.name] == VOLUME for head in heads):
        raise RecipeError(f"{name}: no run reads the volume, so {for_volume[0]} is about none; leave it out")
    stages: dict[str, FlowStage] = {}
    for head, entry in zip(heads, trees, strict=True):
        beside = tuple(dict.fromkeys(link.stage for link in links[head.name] if link.stage in links))
        trained = next((stages[each].choice for each in beside), None) if head.kind == "run" else None
        choose = partial(_choice, head, entry, name, settings)
        choice = choose(trained.training) if isinstance(trained, Learning) else choose(None)
        for_net = choose if isinstance(trained, Learning) else None
        array = (head.input or "").partition("/")[2]
        stages[head.name] = FlowStage(head.name, head.kind, reads[head.name], choice, array, beside, for_net)
    return Flow(str(path), tuple(stages.values()))


def _spread(trees: Sequence[Tree]) -> None:
    """Write ``input = "name"`` and ``net = "name"`` of each stage as the sections that its recipe has."""
    for entry in trees:
        for key in ("input", "net"):
            if isinstance(entry.get(key), str):
                entry[key] = {"stage": entry[key]}


def _set_each(trees: Sequence[Tree], settings: Sequence[str]) -> None:
    """Write each of `settings` into the stage that it begins with."""
    by_name = {str(entry.get("name")): entry for entry in trees}
    own: dict[str, list[str]] = {name: [] for name in by_name}
    for setting in settings:
        stage, dot, rest = setting.partition(".")
        if not dot or stage not in by_name or "=" in stage:
            known = ", ".join(by_name)
            raise RecipeError(
                f"--set {setting!r}: begin with the name of a stage, of {known}, such as "
                f"{next(iter(by_name))}.windows.blend=hann"
            )
        own[stage].append(rest)
    for name, entry in by_name.items():
        feeds = [setting for setting in own[name] if setting.partition("=")[0].strip() in ("input", "net")]
        set_values(entry, feeds)  # before the keys of these sections, which would be lost
        _spread([entry])
        set_values(entry, [setting for setting in own[name] if setting not in feeds])
        if isinstance(entry.get("data"), dict):  # [stage.data] of one volume
            entry["data"] = [entry["data"]]


def _head(entry: Tree, source: str, settings: Sequence[str]) -> Head:
    head = {key: value for key, value in entry.items() if key in ("name", "kind", "recipe")}
    feed = entry.get("input", {})
    head |= {"input": feed.get("stage") if isinstance(feed, dict) else feed}
    return typed(Head, head, source, settings, str(entry.get("name", "")))


def _links(head: Head, entry: Tree) -> tuple[Link, ...]:
    return tuple(KINDS[head.kind].links(entry))


def _order(heads: Sequence[Head], links: Mapping[str, Sequence[Link]], name: str) -> dict[str, str]:
    """Return what each stage reads; all of them come before it."""
    counts = Counter(head.name for head in heads)
    twice = next((each for each, count in counts.items() if count > 1), None)
    if twice is not None:
        raise RecipeError(f"{name}: {counts[twice]} stages are named {twice}; give each a name of its own")
    reads: dict[str, str] = {}
    before = VOLUME
    for head in heads:
        if head.name == VOLUME:
            raise RecipeError(f"{name}: no stage may be named {VOLUME}, which is the command's argument; rename it")
        reads[head.name] = ((head.input or "").partition("/")[0] or before) if KINDS[head.kind].has_input else VOLUME
        before = head.name if KINDS[head.kind].makes == "volume" else before
    for number, head in enumerate(heads):
        earlier = {each.name: each for each in heads[:number]}
        for link in (Link("input", reads[head.name], is_stage=True), *links[head.name]):
            _check_link(link, head.name, earlier, reads, f"{name}, stage {head.name}, {link.key}:")
    return reads


def _check_link(link: Link, own: str, earlier: Mapping[str, Head], reads: Mapping[str, str], start: str) -> None:
    """Refuse a stage, called `own`, that needs what is not made before it."""
    feed, volume = link.stage, f", or {VOLUME}" if link.makes == "volume" else ""
    if feed == own:
        raise RecipeError(f"{start} it reads itself; name an earlier stage, or {VOLUME}")
    if feed in earlier and (makes := KINDS[earlier[feed].kind].makes) != link.makes:
        raise RecipeError(f"{start} {feed} makes {makes} and no {link.makes}; name a stage that does{volume}")
    if feed == VOLUME or feed in earlier:
        return
    if feed not in reads:
        if link.is_stage:
            raise RecipeError(f"{start} there is no stage {feed}{nearest(feed, (*reads, VOLUME))}")
        return
    circle = [own]
    while circle[-1] in reads and circle[-1] not in circle[:-1]:
        circle.append(reads[circle[-1]])
    if circle[-1] == own:
        raise RecipeError(f"{start} stages read each other in a circle: {' ← '.join(circle)}; let one read {VOLUME}")
    raise RecipeError(f"{start} {feed} comes after it; move [[stage]] {feed} before {own}")


def _choice(head: Head, entry: Tree, name: str, settings: Sequence[str], trained: TrainRecipe | None) -> Section:
    """Return what the stage is to do: its recipe's file, with what stands in the stage on top.

    Of a run whose net an earlier stage has `trained`, what follows from that recipe takes the place of the file.
    """
    source, kind = f"{name}, stage {head.name}", KINDS[head.kind]
    own = {key: value for key, value in entry.items() if key not in ("name", "kind", "recipe", "input")}
    feed = {key: value for key, value in entry.get("input", {}).items() if key != "stage"}
    no_keys = ["recipe"] if head.recipe is not None and not kind.has_recipe else []
    no_keys += ["input"] if head.input is not None and not kind.has_input else []
    no_keys += feed if "input" not in kind.keys.model_fields else []
    if no_keys:
        raise RecipeError(f"{source}: {no_keys[0]} is no key of a stage of kind {head.kind}; leave it out")
    if kind.needs and head.recipe is None and kind.needs not in own:
        raise RecipeError(
            f'{source}: it names no {kind.needs}; give recipe = "default", another recipe, or [stage.{kind.needs}]'
        )
    tree = load_tree(Path(head.recipe)) if head.recipe is not None else {}
    if "stage" in tree:
        raise RecipeError(f"{source}: the recipe {head.recipe} has stages itself; write them into {name}")
    if trained is not None:
        if given := [key for key in ("name", "weights", "untrained") if key in own["net"]] or [*tree]:
            raise RecipeError(f"{source}: its net is that of stage {own['net']['stage']}; leave out {given[0]}")
        own["net"] = {key: value for key, value in own["net"].items() if key != "stage"}
        tree = run_sections(trained)
    tree = merged(tree, own | ({"input": feed} if feed else {}))
    return typed(kind.keys, tree, source, settings, head.name)


def merged(tree: Tree, own: Tree) -> Tree:
    """Return a recipe with the keys of the sections `own` on top, which drop of its net what `replaced_net` says."""
    if isinstance(tree.get("net"), dict) and isinstance(own.get("net"), dict):
        tree = tree | {"net": replaced_net(tree["net"], own["net"])}
    return _on_top(tree, own)


def _on_top(below: Tree, own: Tree) -> Tree:
    """Return `below` with the values of `own`; of sections within them, with those of each key."""
    both = {key for key, value in own.items() if isinstance(value, dict) and isinstance(below.get(key), dict)}
    return below | own | {key: _on_top(below[key], own[key]) for key in both}
