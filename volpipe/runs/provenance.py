"""Where an output comes from: what its attributes say of recipe, net, input, versions and sessions.

Not here: how attributes are stored (formats). What is the same in every run of a recipe stands in the attributes of the
output's own group; what changes from run to run, such as times and sites, in those of the group RUN_KEY inside it, so
that comparing two outputs needs to leave out one file.
"""

from __future__ import annotations

import json
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, Field

import volpipe
from volpipe.blockwise.journal import Journal, Kinds, Record, read_records, read_results
from volpipe.blockwise.ledger import Ledger
from volpipe.errors import RunError
from volpipe.geometry.grid import Box
from volpipe.inference.intensity import Affine
from volpipe.inference.output_plan import OutputPlan, SourceVolume, level_key
from volpipe.inference.runner import Runner
from volpipe.inference.selection import Selection
from volpipe.nets.files import short_hash
from volpipe.nets.identity import NetIdentity
from volpipe.recipes.inference import Recipe
from volpipe.recipes.toml import NO_RECIPE, Section
from volpipe.runs.presence import COMMAND
from volpipe.runs.run_folder import NOTES, Metadata, RunFolder, Session
from volpipe.runs.update_records import Updated, updates_in
from volpipe.runs.verify import metadata_sums, stored_flags
from volpipe.volumes.completeness import joined, mark_complete, mark_incomplete, mark_written, written_boxes
from volpipe.volumes.formats.container import (
    METADATA_NAMES,
    RECORD,
    RUN_KEY,
    create_groups,
    read_attributes,
)
from volpipe.volumes.identity import identify
from volpipe.volumes.noted_files import FILES, note
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.metadata import merge_json, plain

PACKAGES = ("volpipe", "numpy", "onnxruntime", "parsl", "tensorstore", "torch", "z5py", "zarr")


def origin(selection: Selection, normalise: Affine, fingerprints: Sequence[str]) -> dict[str, object]:
    """Return what the output says of its origin, the same in every run of its recipe over this input.

    `fingerprints` are those of the volumes that are read, in order.
    """
    plan = selection.plan
    cells = {} if selection.cells is None else {"windows": selection.num_cells, "fingerprint": selection.fingerprint}
    first, *others = ({**each.model_dump(mode="json")} for each in (plan.source, *plan.source.also))
    for source, fingerprint in zip((first, *others), fingerprints, strict=True):
        source["fingerprint"] = fingerprint
    return {
        "version": volpipe.__version__,
        "recipe": plan.recipe.model_dump(mode="json"),
        "net": plan.net.model_dump(mode="json") | {"code_sha256": plan.code_sha256},
        "input": first | ({"also": others} if others else {}),
        "roi": {"start": plan.roi_box.start, "stop": plan.roi_box.stop},
        **({} if plan.grid is None else {"grid": plan.grid.model_dump(mode="json")}),
        "mask": None if plan.mask is None else plan.mask.model_dump(mode="json"),
        "wanted": cells,
        "windows": {
            "shape": plan.window,
            "overlap": plan.overlap,
            "channels_last": plan.channels_last,
            "precision": plan.precision,
            "block": plan.block,
            "blend": plan.recipe.windows.blend,
        },
        "normalise": normalise.as_json,
        **versions(PACKAGES),
    }


def versions(packages: Sequence[str]) -> dict[str, object]:
    """Return what an output says of Python and of those of `packages` that are installed."""
    installed = {name: found for name in packages if (found := _version(name))}
    return {"packages": installed, "python": platform.python_version()}


def begin_session(folder: RunFolder, site: str, code_sha256: str = "") -> None:
    """Note that a driver starts to work at `site`, with a net of that code."""
    with Journal(folder.sessions, NOTES) as sessions:
        sessions.append(Record("session", (), result=Session(site, time.time(), code_sha256)))


def sessions_of(folder: RunFolder) -> list[Session]:
    """Return the sessions of the run in `folder`, oldest first."""
    return list(read_results(folder.sessions, NOTES, Session))


def begin(folder: RunFolder, plan: OutputPlan, kinds: Kinds) -> None:
    """Mark the output as incomplete before anything of it is written; parts that were written stay so without updates.

    Its metadata need not exist yet.
    """
    keeps_parts = not updates_in(folder.journal, kinds)
    for group in plan.group_folders:
        mark_incomplete(paths.locate(plan.out) / group, plan.array_format, COMMAND.completing, keeps_parts=keeps_parts)


def seal(
    folder: RunFolder,
    plan: OutputPlan,
    kinds: Kinds,
    findings: Mapping[str, object],
    *,
    is_complete: bool,
    only: Box | None = None,
) -> None:
    """Write what changes from run to run, with `findings`, into the output, and note the checksums of its metadata.

    Args:
        is_complete: whether all of the output is written, which is noted last.
        only: the box of the output (z, y, x) that was asked for, where what it needs is written.
    """
    out, format = paths.locate(plan.out), plan.array_format
    with paths.reading_once():
        files = {FILES: note(stored_flags(plan, read_records(folder.journal, kinds)), COMMAND.completing)}
        _write_run(plan, plain(_history(folder, plan, kinds) | files | dict(findings)))
    if is_complete:
        for group in reversed(plan.group_folders):
            mark_complete(out / group, format)
    elif only is not None:
        for array in reversed(plan.groups):
            mark_written(paths.locate(array.out), format, _written_boxes(array, plan, only))
    folders = ["", RUN_KEY, *plan.group_folders[1:], *plan.level_keys]
    folders += filter(None, [plan.folders.properties_folder])
    with Journal(folder.sessions, NOTES) as sessions:
        sessions.append(Record("metadata", (), result=metadata_sums(out, folders, METADATA_NAMES)))


def unseal(plan: OutputPlan, updates: Sequence[Updated]) -> None:
    """Write into the output that it is being updated, in place of how its run ended; no part counts as written."""
    for group in plan.group_folders:
        mark_incomplete(paths.locate(plan.out) / group, plan.array_format, COMMAND.completing)
    _write_run(plan, plain({"updating": True, "updates": list(map(_entry, updates))}))


def _write_run(plan: OutputPlan, attributes: Mapping[str, object]) -> None:
    """Write `attributes` as what the output says of its run."""
    out, folders = paths.locate(plan.out), plan.folders
    create_groups(out, f"{RUN_KEY}/attributes", folders.name)
    merge_json(out / RUN_KEY / folders.run_file, folders.with_attributes({}, {RECORD: attributes}))


def _written_boxes(plan: OutputPlan, whole: OutputPlan, only: Box) -> dict[str, list[Box]]:
    """Return what is written of each level, with the shards that `only` touches, a box of the output `whole`."""
    grid = plan.shards()
    ends = zip(only.start, only.stop, whole.shards().cell, grid.cell, grid.shape, strict=True)
    axes = [(a // w * c, min(-(-b // w) * c, n)) for a, b, w, c, n in ends]
    box = Box(tuple(a for a, _ in axes), tuple(b for _, b in axes))
    finest = joined([*written_boxes(paths.locate(plan.out), level_key(0)), box])
    coarser = {
        level_key(level): [inner for each in finest if not (inner := _shown_by(plan, level, each)).is_empty]
        for level in range(1, len(plan.factors))
    }
    return {level_key(0): finest} | coarser


def _shown_by(plan: OutputPlan, level: int, box: Box) -> Box:
    """Return the shards of `level` that show nothing but voxels in `box` of the finest level."""
    start, stop, grid = list[int](), list[int](), plan.shards(level)
    for a, b, c, f, whole, n in zip(
        box.start, box.stop, grid.cell, plan.factors[level], plan.out_shape, grid.shape, strict=True
    ):
        start.append(-(-a // (c * f)) * c)
        stop.append(n if b == whole else b // (c * f) * c)
    return Box(tuple(start), tuple(stop))


def _entry(update: Updated) -> dict[str, object]:
    """Return what an output says of an update."""
    fields: dict[str, object] = {"changed": update.changed, "computed": update.computed, "blocks": update.blocks}
    return {"at": _moment(update.at)} | fields | ({"why": update.why} if update.why else {})


def has_voxels(out: paths.Location) -> bool:
    """Return whether there is more of an output than its metadata."""
    files = paths.list_files(out) if paths.exists(out) else ()
    return any(file.rpartition("/")[2] not in METADATA_NAMES for file, _ in files)


def is_sealed(folder: RunFolder) -> bool:
    """Return whether the last thing that a driver noted in `folder` was the end of a session."""
    last = None
    for record in read_records(folder.sessions, NOTES):
        last = record.result
    return isinstance(last, Metadata)


def _history(folder: RunFolder, plan: OutputPlan, kinds: Kinds) -> dict[str, Any]:  # Any: JSON
    ledger, updates = Ledger(folder.journal, kinds).look(), updates_in(folder.journal, kinds)
    ended = max((totals.ended for totals in ledger.totals.values()), default=0.0) or time.time()
    kept = {"statistics": "of the volume as it was before the updates"} if updates and updates[-1].normalise else {}
    sessions = sessions_of(folder)
    started = min((session.began for session in sessions), default=ended)
    return {
        "site": sessions[-1].site if sessions else "",
        "started": _moment(started),
        "ended": _moment(ended),
        "folder": plan.search_path,
        "output": plan.out,
        "sessions": [{"site": s.site, "started": _moment(s.began), "code_sha256": s.code_sha256} for s in sessions],
        "devices": sorted(ledger.devices - {""}),
        "hosts": sorted(ledger.hosts - {""}),
        **({"updates": list(map(_entry, updates))} if updates else {}),
        **kept,
    }


def _moment(seconds: float) -> str:
    """Return `seconds` since 1970 as ISO 8601, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


@cache  # looking for it takes milliseconds
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def stored_fingerprint(output: str | Path) -> str:
    """Return the fingerprint of the input that `output` names, "" where there is no output, or none that says it."""
    return str(_stored_value(output, "input", "fingerprint") or "")


def stored_offsets(output: str | Path) -> object:
    """Return the offsets that `output` names for its channels, None where it is no output, or names none."""
    return _stored_value(output, "recipe", "net", "offsets")


def _stored_value(output: str | Path, *keys: str) -> object:
    """Return the value that `output` has under `keys`, one inside the other; None where there is none."""
    try:
        value: object = read_provenance(output)
    except RunError:
        return None
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class Origin(BaseModel):
    """What an output says that making it again needs: `command` made it, by `recipe`; `run` says where."""

    command: ClassVar[str]
    recipe: Section
    input: dict[str, Any]  # Any: JSON
    run: dict[str, Any]

    @property
    def volume(self) -> str:
        """The location of the array that was read."""
        place = paths.locate(self.input["path"])
        return str(place / self.input["key"]) if self.input["key"] else str(place)

    @property
    def again(self) -> Section:
        """The recipe for `volume`, which names the array itself."""
        tree = self.recipe.model_dump(mode="json")
        tree["input"] |= {"key": None, "level": 0}
        return type(self.recipe).model_validate(tree)

    @property
    def out(self) -> str:
        """Where the output that is made again may go, beside the first."""
        old = paths.locate(self.run["output"])
        return str(old.parent / f"{old.stem}_again{old.suffix}")


class RunOrigin(Origin):
    """What an output of a run says that making it again needs, and by which packages it was made."""

    command: ClassVar[str] = "run"
    recipe: Recipe
    net: dict[str, Any]  # Any: JSON
    windows: dict[str, Any] = Field(default_factory=dict)
    normalise: Affine
    packages: dict[str, str] = Field(default_factory=dict)
    python: str = ""

    @property
    def again(self) -> Section:
        """The recipe for `volume`, with the windows and the arithmetic that were taken, on whatever site it runs."""
        tree = super().again.model_dump(mode="json")
        tree["windows"]["shape"] = self.windows.get("shape", tree["windows"]["shape"])
        if tree["windows"]["blend"] != "crop":  # else the halo decides, whatever the windows
            tree["windows"]["overlap"] = self.windows.get("overlap", tree["windows"]["overlap"])
        if self.net.get("tile_invariant") and self.net.get("windows") is None:
            # what `with_net_defaults` chooses for such a net by itself
            for key, own in (("blend", "crop"), ("placement", "lattice")):
                tree["windows"][key] = "auto" if tree["windows"].get(key) == own else tree["windows"][key]
        for key in ("channels_last", "precision"):
            tree["infer"][key] = self.windows.get(key, tree["infer"][key])
        return Recipe.model_validate(tree)


def changes(origin: RunOrigin, runner: Runner) -> list[str]:
    """Return a sentence for each change since the output of `origin` was made that may change its voxels."""
    label, sentences = origin.net["label"], []
    for what, now in (("weights", runner.weights_sha256), ("code", runner.code_sha256)):
        if now != origin.net[f"{what}_sha256"]:
            before = origin.net[f"{what}_sha256"]
            sentences.append(f"the {what} of net {label} changed: SHA-256 {short_hash(before)} -> {short_hash(now)}")
    before = NetIdentity.model_validate(origin.net.get("identity", {}))
    sentences += [f"net {label}: {each}" for each in before.differences(runner.identity)]
    read = (origin.input, *origin.input.get("also", ()))
    for said, volume in zip(read, SourceVolume.model_validate(origin.input).volume().parts, strict=True):
        if identify(volume).fingerprint != said["fingerprint"]:
            sentences.append(f"the volume {said['path']} changed since")
    installed = {"python": platform.python_version()} | {name: _version(name) for name in origin.packages}
    for name, before in (*origin.packages.items(), ("python", origin.python)):
        if before and installed[name] != before:
            sentences.append(f"{name} is {installed[name] or 'not installed'}, it was {before}")
    devices = origin.run.get("devices", [])
    if devices and runner.device_name not in devices:
        sentences.append(
            f"the net ran on {', '.join(devices)}, now on {runner.device_name}; devices sum in other orders"
        )
    return sentences


Said = TypeVar("Said", bound=Origin)


def read_origin(output: str | Path) -> RunOrigin:
    """Return the origin that the attributes of `output` describe.

    Raises:
        RunError: it is no output of a run, or an earlier version's.
    """
    attributes = read_provenance(output)
    if "recipe" not in attributes:
        raise RunError(
            f"{output} says nothing of where it comes from: its attributes have no recipe under `volpipe`; name an "
            "output of `volpipe run` or `volpipe segment`"
        )
    return parse_origin(RunOrigin, attributes, output)


def read_provenance(output: str | paths.Location) -> dict[str, Any]:  # Any: JSON
    """Return what the attributes of `output` say of where it comes from, and under "run" those of its group RUN_KEY.

    Raises:
        RunError: there is no output.
    """
    place = paths.locate(output)
    if not paths.exists(place):
        raise RunError(f"there is nothing at {output}; name an output of `volpipe run` or `volpipe segment`")
    outer, inner = (read_attributes(group).get("volpipe") for group in (place, place / RUN_KEY))
    run = {"output": str(place)} | (inner if isinstance(inner, dict) else {})
    return (outer if isinstance(outer, dict) else {}) | {"run": run}


def parse_origin(kind: type[Said], attributes: dict[str, Any], output: str | Path) -> Said:  # Any: JSON
    """Return what `attributes` of `output`, typed.

    Raises:
        RunError: another version wrote them.
    """
    try:
        return kind.model_validate(attributes)
    except ValueError as error:
        raise RunError(
            f"{output} was made by another version, whose attributes cannot be understood; use that one, or run again"
        ) from error


def settings_of(recipe: Section) -> list[str]:
    """Return ``key=value`` for each key of `recipe` that is not as an empty one of its kind has it."""
    empty, lines = type(recipe)().model_dump(mode="json"), []
    for section, values in recipe.model_dump(mode="json").items():
        lines += [f"{section}.{key}={toml(value)}" for key, value in values.items() if value != empty[section][key]]
    return lines


def to_toml(recipe: Section) -> str:
    """Return `recipe`, of a run, a labelling or a training, as a file."""
    lines = []
    for section, values in recipe.model_dump(mode="json", exclude_none=True).items():
        tables = values if isinstance(values, list) else [values]
        for table in tables:
            lines.append(f"[[{section}]]" if tables is values else f"[{section}]")
            lines += [f"{key} = {toml(value)}" for key, value in table.items()]
            lines.append("")
    return "\n".join(lines)


def toml(value: object) -> str:
    """Return a value of a recipe, plain as JSON has it, as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def command_of(origin: Origin, recipe_file: Path | None = None) -> str:
    """Return the command that makes the output again, for a shell; its recipe in `recipe_file`, or as settings."""
    recipe = ["--recipe", str(recipe_file or NO_RECIPE)]
    settings = [] if recipe_file else [part for s in settings_of(origin.again) for part in ("--set", s)]
    site = ["--config", origin.run["site"]] if origin.run.get("site") else []
    command = ["volpipe", origin.command, *site, *recipe, *settings, "-o", origin.out, origin.volume]
    folder = origin.run.get("folder")
    return (f"cd {shlex.quote(folder)} && " if folder else "") + shlex.join(command)
