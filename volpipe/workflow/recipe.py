"""The recipe of several stages: its file, parsed, each stage by the keys of its kind, and the order of all checked.

Not here: whether the stages fit their volumes (plan), or running them (execute).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from volpipe.errors import RecipeError
from volpipe.recipes.toml import Section, UserPath, load_tree, name_of, replaced_net, set_values, typed
from volpipe.recipes.training import TrainRecipe, run_sections
from volpipe.recipes.workflow import VOLUME, Flow, FlowStage, Link, Name, Tree
from volpipe.resolve import nearest
from volpipe.workflow.kinds import KINDS

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
    links = {head.name: tuple(KINDS[head.kind].links(entry)) for head, entry in zip(heads, trees, strict=True)}
    reads = _inputs_in_order(heads, links, name)
    for head, entry in zip(heads, trees, strict=True):
        of_volume = for_volume if reads[head.name] == VOLUME and KINDS[head.kind].takes_part() else ()
        set_values(entry, (*for_runs, *of_volume) if KINDS[head.kind].runs_net else of_volume)
    if for_volume and not any(KINDS[head.kind].takes_part() and reads[head.name] == VOLUME for head in heads):
        raise RecipeError(f"{name}: no run reads the volume, so {for_volume[0]} is about none; leave it out")
    stages: dict[str, FlowStage] = {}
    for head, entry in zip(heads, trees, strict=True):
        beside = tuple(dict.fromkeys(link.stage for link in links[head.name] if link.stage in links))
        trainers = (link.stage for link in links[head.name] if link.makes == "weights")
        makers: Iterator[Any] = (stages[each].choice for each in trainers)  # Any: keys of a kind that makes weights
        trained = next(makers, None) if KINDS[head.kind].runs_net else None
        choose = partial(_choice, head, entry, name, settings)
        choice = choose(None if trained is None else trained.training)
        for_net = None if trained is None else choose
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


def _inputs_in_order(heads: Sequence[Head], links: Mapping[str, Sequence[Link]], name: str) -> dict[str, str]:
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
    if kind.runs_net and head.recipe is None and "net" not in own:
        raise RecipeError(f'{source}: it names no net; give recipe = "default", another recipe, or [stage.net]')
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
