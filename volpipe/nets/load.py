"""Nets, built from their names, examined for their facts, and checked against them.

Not here: the nets (models/), their facts (facts), or running them (infer). torch is imported to build a net.

A net is a torch module (n, c, z, y, x) -> (n, C, z', y', x'), which may declare in its attribute `volpipe`, in input
voxels (z, y, x): `in_channels`, `out_channels`, `scale`, `stride`, `halo`, `intensity` ("same" as the normalised input,
"unit" for 0..1, or "raw"), `window`, `tile_invariant`. `fixed` is the only size that it takes along an axis, 0 where it
takes others; `normalise` is the normalisation that it needs; `integers` tells that it takes whole numbers of any type
as well and gives the same type, and the same values as for float32. A recipe may give those that a user's net lacks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import math
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from volpipe.errors import NetError, PlanError, VolpipeError
from volpipe.geometry.grid import Triple, align_up, triple
from volpipe.nets import files
from volpipe.nets.agreement import find_disagreement, find_nondeterminism
from volpipe.nets.cache import file_of, file_of_code, kept, once
from volpipe.nets.ensemble_facts import ensemble_facts
from volpipe.nets.facts import (
    NetFacts,
    check_shipped,
    is_shipped,
    look_up,
    weights_path,
)
from volpipe.nets.files import short_hash
from volpipe.nets.identity import NetIdentity
from volpipe.nets.net_geometry import Geometry, OutputError, UnmeasurableError, is_shortage, only_tensor, reason
from volpipe.nets.receptive_field import measure_geometry
from volpipe.nets.state_dicts import load_weights
from volpipe.recipes.complaints import complain
from volpipe.recipes.inference import NetChoice, Windows
from volpipe.resolve import describe_error, load_function, nearest
from volpipe.units import count
from volpipe.user_code import Opened, running
from volpipe.volumes.volume import Volume

if TYPE_CHECKING:
    from torch import nn

GEOMETRY = ("scale", "stride", "halo", "out_channels")
SIZES = ("margin", "remainder", "shrink")
MEASURED_TOO = ("in_channels", "fixed", *SIZES)
ACROSS = {"scale": 1, "stride": 1, "halo": 0, "window": 1, "margin": 0, "remainder": 0, "shrink": 1, "fixed": 0}
# Voxels and channels of a window that is computed; a larger one is tried without values, for which torch loads its
# compiler: 1.7 s and 70 MiB (2026-11).
MOST_COMPUTED = 32**3
# Voxels of a slice of which each may see all, and how many slices with neighbours, in a window.
LARGE_SLICES = (((512, 512), 1), ((256, 256), 16))
SMALL = 16  # voxels along an axis of a window that is computed twice

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """A net, and its identity as far as that is known without calling it."""

    net: nn.Module
    identity: NetIdentity = field(default_factory=NetIdentity)
    members: tuple[Built, ...] = ()  # of an ensemble

    def identified(self, facts: NetFacts | None = None) -> NetIdentity:
        """Return the identity of the net, its output for a fixed window included.

        Args:
            facts: of the net, which say what window it takes where it takes none of the usual ones.
        """
        if self.members:
            known = facts.each if facts is not None else (None,) * len(self.members)
            return NetIdentity(members=tuple(map(Built.identified, self.members, known)))
        if not self.identity.layers:
            return self.identity
        output = self._usual_output
        if not output and facts is not None:
            output = self._output([facts.in_channels], _small_window(facts, facts.window))
        return self.identity.model_copy(update={"output": output})

    @cached_property
    def _usual_output(self) -> tuple[float, ...]:
        """The output for a window of the usual sizes.

        It is computed once, before threads share the net: the weights are others meanwhile.
        """
        from volpipe.nets.adapter import possible_channels
        from volpipe.nets.declared import only_sizes_of, served

        channels = possible_channels(files.inner_net(self.net), served(self.net).context)
        return self._output(channels, only_sizes_of(self.net))

    def _output(self, channels: Sequence[int], fixed: Triple) -> tuple[float, ...]:
        from volpipe.nets.adapter import Adapter
        from volpipe.nets.identity import fixed_output

        net = self.net
        uneven = net.uneven if isinstance(net, Adapter) else None
        if isinstance(net, Adapter):
            net.uneven = None  # which rests on the geometry, which is remembered by this
        try:
            return fixed_output(net, channels, fixed)
        finally:
            if isinstance(net, Adapter):
                net.uneven = uneven


def build_net(choice: NetChoice, search_path: str = "", *, facts: NetFacts | None = None) -> nn.Module:
    """Return the net of `choice` in evaluation mode, on the CPU, with its weights, and with the interface of our nets.

    Args, Raises: as of `build`.
    """
    return build(choice, search_path, facts=facts).net


def build(choice: NetChoice, search_path: str = "", *, facts: NetFacts | None = None) -> Built:
    """Return the net of `choice` in evaluation mode, on the CPU, with its weights, and its identity.

    Args:
        search_path: folder of relative files and modules: where the run was started.
        facts: of this net, which say whether it takes slices; else that is tried.

    Raises:
        VolpipeError: no such net, options it does not take, weights that do not fit it, or untrusted code.
    """
    if choice.ensemble is not None:
        from volpipe.nets.ensemble import Ensemble

        known = facts.each if facts is not None else (None,) * len(choice.ensemble)
        members = tuple(
            build(member, search_path, facts=own) for member, own in zip(choice.members, known, strict=True)
        )
        return Built(Ensemble([each.net for each in members], choice.combine or "mean"), members=members)
    if choice.name.endswith(".py"):
        raise VolpipeError(_functions_hint(choice.name, search_path))
    if files.is_function(choice.name):
        from volpipe.nets.functions import build_function

        return Built(build_function(choice, search_path, () if facts is None else facts.given))
    import torch

    from volpipe.nets.adapter import Adapter, takes_single, takes_slices
    from volpipe.nets.declared import ServedNet

    kind = files.file_kind(choice.name)
    watch: contextlib.AbstractContextManager[Opened | None] = contextlib.nullcontext()
    # The files that a user's code opens meanwhile are noted; not of nets whose own file is all that they are.
    if not is_shipped(choice) and (kind is None or kind.has_own_code):
        watch = running("" if kind is not None else choice.name, search_path)
    with watch as opened:
        net = files.load_program(choice, search_path) if kind is not None else _call_function(choice, search_path)
    with refusing(choice):
        if choice.weights is not None:
            load_weights(net, weights_path(choice.weights, search_path), choice.weights_key)
        with contextlib.suppress(NotImplementedError):  # torch.export fixed the mode when it made the file
            net.eval()
        for parameter in net.parameters():
            parameter.requires_grad_(False)
        is_package = isinstance(net, ServedNet) and net.is_package
        is_served = is_shipped(choice) or is_package  # as one of ours
        types = {tensor.dtype for tensor in net.state_dict().values() if isinstance(tensor, torch.Tensor)}
        is_single = not types & {torch.float16, torch.bfloat16, torch.float64}
        # Windows are float32, and half precision is the recipe's to choose; code may cast windows to its own types.
        if not (is_served or is_single or takes_single(net)):
            net = net.float()
        # before it is called, which may change it
        identity = NetIdentity() if opened is None else _identity_of(choice, search_path, net, opened)
        if is_served and not (choice.plane or choice.context or (is_shipped(choice) and choice.output is not None)):
            return Built(net, identity)
        is_asked = bool(choice.plane or choice.context)
        is_flat = bool(facts.planes) if facts is not None else takes_slices(net, choice.context or 0, is_asked=is_asked)
        adapter = Adapter(net, choice, is_flat=is_flat)
    whole = Built(adapter, identity)
    # An output with as many voxels as its window lacks none; where it does, and unevenly, is known once it is measured.
    adapter.uneven = functools.cache(lambda: cached_geometry(choice, search_path, whole))
    return whole


def _identity_of(choice: NetChoice, search_path: str, net: nn.Module, opened: Opened) -> NetIdentity:
    """Return the identity of `net`, built by code that opened some files."""
    from volpipe.nets.declared import ServedNet
    from volpipe.nets.identity import attributes_hash, layers_hash

    if isinstance(net, ServedNet) and net.is_package:
        # Its import takes a second, which a worker that builds another net does not wait for.
        from volpipe.nets.bioimageio import PackageNet

        if isinstance(net, PackageNet) and not net.is_code:
            return NetIdentity()
    return NetIdentity(
        layers=layers_hash(net),
        files=opened.hashes(*files.code_files(choice.name, search_path)),
        attributes=attributes_hash(net),
    )


@contextlib.contextmanager
def refusing(choice: NetChoice) -> Iterator[None]:
    """Turn an error of a net's own code into a refusal that names the net.

    Raises:
        VolpipeError: with the name of the net, and the words of the error.
    """
    try:
        yield
    except VolpipeError:
        raise
    except (Exception, SystemExit) as error:  # whatever the net's own code raises
        if is_shortage(error):
            raise
        log.debug("net %s fails", choice.name, exc_info=True)
        raise VolpipeError(
            f"net {choice.name}: its code fails: {describe_error(error) or type(error).__name__}"
        ) from error


def _functions_hint(name: str, search_path: str) -> str:
    """Return the refusal of a net that is named by a Python file alone, with the functions in it."""
    path = Path(search_path) / name
    if not path.is_file():
        return f"no Python file at {path}"
    functions = files.functions_in(path)
    example = f"net.name={name}:{functions[0] if functions else 'FUNCTION'}"
    known = f"it has {', '.join(functions)}" if functions else "it has none: define one that returns the net"
    return f"net.name={name} names a Python file, but no function of it; set {example}; {known}"


def _call_function(choice: NetChoice, search_path: str) -> nn.Module:
    """Return the net from the function that `choice` names."""
    from torch import nn

    from volpipe.nets.declared import declared

    name = choice.name
    if not is_shipped(choice):
        function = load_function(name, search_path)
    else:
        check_shipped(name)
        function = load_function(f"volpipe.models.{name}:{name}")
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for option in () if takes_any else choice.options:
        if option not in parameters:
            known = f"; it takes {', '.join(parameters)}" if parameters else "; it takes none"
            raise VolpipeError(f"net {name} has no option {option}{nearest(option, parameters)}{known}")
    try:
        net = function(**choice.options)
    except (TypeError, ValueError) as error:
        raise VolpipeError(f"net {name}: {error}") from error
    except (Exception, SystemExit) as error:  # the function may be the user's code
        raise VolpipeError(f"net {name} cannot be built: {describe_error(error)}") from error
    if not isinstance(net, nn.Module):
        raise VolpipeError(f"net {name}: {name} returned {type(net).__name__}, not a torch.nn.Module")
    declared(net, name)
    if lazy := [key for key, parameter in net.named_parameters() if nn.parameter.is_lazy(parameter)]:
        raise VolpipeError(
            f"net {name} has parameters whose shape its first window makes, such as {lazy[0]}; call it once in {name}, "
            "with a window of zeros"
        )
    return net


@once
def describe(choice: NetChoice, search_path: str = "", window: Triple | None = None) -> NetFacts:
    """Return the facts of the net of `choice`: the shipped ones, or those of the net, built.

    A `window` that its user has chosen is tried where the net takes no usual one.

    Facts of shipped nets with other options and weights are kept in the user's cache, so that planning does not import
    torch.

    Raises:
        VolpipeError: as `build_net`, or for an impossible fact.
    """
    if choice.ensemble is not None:
        if functions := [member.name for member in choice.members if files.is_function(member.name)]:
            raise PlanError(f"{functions[0]} is a function on arrays, and net.ensemble is of nets; leave it out")
        members = [describe(member, search_path, window) for member in choice.members]
        return ensemble_facts(members, choice.combine or "mean")
    if files.is_function(choice.name):
        from volpipe.nets.functions import function_facts

        return function_facts(choice)
    known = look_up(choice)
    if known is not None:
        return NetFacts.model_validate(known)
    return kept(file_of(choice, search_path, "facts"), NetFacts, lambda: examine(choice, search_path, window))


def examine(choice: NetChoice, search_path: str = "", window: Triple | None = None) -> NetFacts:
    """Return the facts of the net of `choice`, which is built; `window` as for `describe`."""
    from volpipe.nets.declared import served

    own = build(choice, search_path)
    net = own.net
    files.run_self_test(net)
    facts: dict[str, Any] = {  # Any: attributes of a net, checked by NetFacts
        "in_channels": 1,
        "out_channels": 1,
        "scale": (1, 1, 1),
        "stride": (1, 1, 1),
        "halo": (0, 0, 0),
        "window": (64, 64, 64),
        "intensity": "raw",
        "tile_invariant": not normalising_layers(net),
        "fixed": (0, 0, 0),
        "normalise": None,
        "integers": False,
        "margin": (0, 0, 0),
        "remainder": (0, 0, 0),
        "shrink": (1, 1, 1),
    }
    with refusing(choice):
        declared = _declared(net) | _overrides(choice)
    facts |= declared
    missing = [key for key in GEOMETRY if key not in declared]
    if set(missing) - {"out_channels"}:  # check_shapes finds wrong out_channels
        try:
            geometry = cached_geometry(choice, search_path, own, window)
        except UnmeasurableError as error:
            if not choice.accept_tile_variance or isinstance(error, OutputError):
                keys = ", ".join(f"net.{key}" for key in missing if key != "out_channels")
                raise VolpipeError(f"net {choice.name}: {error}; {error.remedy.format(keys=keys)}") from error
            geometry = Geometry(facts["scale"], facts["stride"], facts["halo"], facts["halo"], whole_window=str(error))
        facts |= {key: getattr(geometry, key) for key in missing}
        facts |= {key: getattr(geometry, key) for key in MEASURED_TOO if key not in declared}
        facts |= {"outputs": geometry.outputs, "arrays": geometry.arrays}
        if geometry.whole_window or (geometry.further and "halo" in missing):
            facts["tile_invariant"] = False
        if geometry.further and "halo" in missing and not normalising_layers(net):
            facts["windows"] = Windows(blend="crop", placement="lattice")  # with the halo that it gets
        if "window" not in declared and not any(geometry.fixed) and (any(geometry.margin) or max(geometry.shrink) > 1):
            along = zip(facts["window"], facts["margin"], facts["remainder"], facts["stride"], strict=True)
            facts["window"] = triple(
                remainder + align_up(size + 2 * margin - remainder, stride) for size, margin, remainder, stride in along
            )
    if any(facts["margin"]):
        sizes = zip(facts["halo"], facts["margin"], facts["stride"], strict=True)
        facts["halo"] = triple(margin + align_up(max(0, halo - margin), stride) for halo, margin, stride in sizes)
    facts["tile_invariant"] = facts["tile_invariant"] and not normalising_layers(net)
    facts |= {"planes": served(net).planes, "context": served(net).context}
    if "window" not in declared and len(facts["planes"]) == 1 and not facts["tile_invariant"]:
        facts["window"] = net.in_volume(*LARGE_SLICES[facts["context"] > 0])  # type: ignore[operator]  # an Adapter
    facts["window"] = tuple(only or size for only, size in zip(facts["fixed"], facts["window"], strict=True))
    facts |= {"label": files.label_of(choice.name), "num_parameters": files.num_parameters(net)}
    with refusing(choice):
        facts["weights_sha256"] = weights_digest(choice, net, search_path)
    try:
        known = NetFacts(**facts)
        return known.model_copy(update={"identity": own.identified(known)})
    except ValidationError as error:
        why = complain(error, NetFacts, facts, f"net {facts['label']}")
        raise VolpipeError(f"{why}; correct it there") from error


def _declared(net: nn.Module) -> dict[str, Any]:  # Any: values of a declaration
    """Return what a net declares, in the axes of a volume."""
    from volpipe.nets import declared as declarations
    from volpipe.nets.adapter import Adapter, possible_channels

    declared = declarations.declared(net).of(NetFacts.model_fields)
    if not any(declared.get("fixed", ())):
        declared.pop("fixed", None)  # no size is the only one, as far as it says
    if not isinstance(net, Adapter):
        return declared
    if "in_channels" in declared:
        declared["in_channels"] = possible_channels(net, net.context)[0]
    if net.planes:
        if (net.planes != ("yx",) or net.context) and declared.get("tile_invariant", True):
            declared.pop("halo", None)  # which is of other axes, and is measured
        declared |= {key: net.in_volume(declared[key], across) for key, across in ACROSS.items() if key in declared}
    return declared


def _overrides(choice: NetChoice) -> dict[str, Any]:  # Any: sizes of the recipe
    """Return the facts that a recipe gives in place of those that its net declares."""
    keys = choice.model_dump(include={*GEOMETRY, "margin", "remainder", "intensity"}, exclude_none=True)
    if choice.scale is not None:
        keys["scale"] = tuple(round(factor) if factor >= 1 else 1 for factor in choice.scale)
        keys["shrink"] = tuple(1 if factor >= 1 else round(1 / factor) for factor in choice.scale)
    return keys


def cached_geometry(
    choice: NetChoice, search_path: str, own: Built | None = None, window: Triple | None = None
) -> Geometry:
    """Return the geometry of the net of `choice`: from the user's cache while it is the same net, else measured.

    Args:
        own: the net, where it is built already.
        window: that its user has chosen, tried where the net takes no usual one.

    Raises:
        UnmeasurableError: it cannot be measured, or not within the time.
    """

    def new() -> nn.Module:
        from volpipe.nets.adapter import Adapter

        net = build_net(choice, search_path)
        if isinstance(net, Adapter):
            net.uneven = None  # which is measured
        return net

    def measure() -> Geometry:
        log.info("net %s does not declare all of its geometry; measuring it", choice.name)
        layers = normalising_layers((own or build(choice, search_path)).net)
        return measure_geometry(new, whole_window=", ".join(layers), hint=window)

    with refusing(choice):
        if is_shipped(choice):
            return measure()
        own = own or build(choice, search_path)
        # Random weights are others each time; what a net sees depends on those that are zero alone.
        weights = weights_digest(choice, own.net, search_path) if choice.weights is not None else _zeros_hash(own.net)
        what = f"geometry {own.identified().digest} {weights} by {window}"
        return kept(file_of_code(choice, search_path, what), Geometry, measure)


def _zeros_hash(net: nn.Module) -> str:
    """Return the SHA-256 of which parameters of `net` are zero."""
    digest = hashlib.sha256()
    for name, parameter in sorted(net.named_parameters()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode() + (parameter == 0).cpu().numpy().tobytes())
    return digest.hexdigest()


def fitted(choice: NetChoice, facts: NetFacts, volume: Volume, search_path: str = "") -> NetFacts:
    """Return `facts`; of a function on arrays, completed by trying it on voxels like those of `volume`.

    Raises:
        PlanError: the function fails, or sees more than the halo that it declares.
    """
    if choice.ensemble is not None or not files.is_function(choice.name):
        return facts
    from volpipe.nets.functions import tried

    return tried(choice, facts, [(part.num_channels, part.dtype.name) for part in volume.parts], search_path)


@once
def check_geometry(choice: NetChoice, facts: NetFacts, window: Triple, search_path: str = "") -> None:
    """Refuse a user's net whose windows would disagree: its halo or stride is smaller than declared.

    The check of a window (z, y, x) is done once and kept in the user's cache. Halos count in whole strides, as in
    windows. With `accept_tile_variance`, only a net that gives two outputs for one window is refused.

    Raises:
        PlanError: with the declared and the right number.
    """
    if choice.ensemble is not None:
        for member, own in zip(choice.members, facts.each, strict=True):
            check_geometry(member, own, window, search_path)
        return
    if files.is_function(choice.name):  # which was tried
        return
    if is_shipped(choice):
        _check_override(choice, facts, search_path)
        return
    declared = Geometry(
        facts.scale, facts.stride, facts.halo, facts.halo, facts.out_channels, facts.margin, facts.remainder,
        facts.shrink, facts.in_channels,
    )  # fmt: skip
    net = f"{facts.weights_sha256} {facts.identity.digest}"
    memory = file_of_code(choice, search_path, f"agrees {declared} {window} {facts.fixed} {net}")
    try:
        with refusing(choice):
            kept(memory, bool, lambda: _agrees(choice, facts, window, search_path, declared))
    except UnmeasurableError as error:
        if not choice.accept_tile_variance:
            raise PlanError(
                f"whether windows of net {facts.label} agree cannot be checked: {error}; let it take any values, or "
                "set net.accept_tile_variance=true to run it all the same"
            ) from error
        log.warning("windows of net %s cannot be checked: %s", facts.label, error)


def _agrees(choice: NetChoice, facts: NetFacts, window: Triple, search_path: str, declared: Geometry) -> bool:
    """Return True for a net whose windows agree; the others are refused."""

    def new() -> nn.Module:
        return build_net(choice, search_path)

    if not files.is_program(choice.name) and choice.weights is None:
        second = weights_hash(new())
        if second != facts.weights_sha256:
            raise PlanError(
                f"net {facts.label} draws other weights at each call of its function "
                f"({short_hash(facts.weights_sha256)} and {short_hash(second)}), so that each worker would have its "
                "own; call torch.manual_seed in it, or save its state dict and set net.weights to that file"
            )
    own = {*_declared(new()), *_overrides(choice)} & {*GEOMETRY, *SIZES} - {"out_channels"}
    if fault := find_nondeterminism(new, facts.in_channels, (_small_window(facts, window), window)):
        raise PlanError(f"net {facts.label} {fault}")
    is_free = choice.accept_tile_variance or not facts.tile_invariant or (any(facts.margin) and not own)
    if not is_free and (wrong := find_disagreement(new, facts.in_channels, window, declared)):
        raise PlanError(_disagrees(choice, facts, search_path, wrong))
    return True


def _small_window(facts: NetFacts, window: Triple) -> Triple:
    """Return a small window (z, y, x) that the net takes, no larger than `window`."""
    sizes = zip(facts.fixed, window, facts.stride, facts.remainder, facts.margin, strict=True)
    return triple(
        only or min(size, remainder + align_up(max(SMALL, 2 * margin + 1) - remainder, stride))
        for only, size, stride, remainder, margin in sizes
    )


def _disagrees(choice: NetChoice, facts: NetFacts, search_path: str, wrong: str) -> str:
    """Return the refusal of a net whose declared halo or stride is `wrong`, with the right one."""
    key = wrong.split()[0]
    try:
        geometry = cached_geometry(choice, search_path)
        if geometry.whole_window:
            return (
                f"net {facts.label} is declared to have a {key} of {getattr(facts, key)}, but it looks at its whole "
                f"window: {geometry.whole_window}; leave the {key} out, and tile_invariant too"
            )
        right = getattr(geometry, key)
        advice = f"it is {right}; set net.{key}={list(right)}, or correct it in the net"
    except UnmeasurableError as error:
        advice = f"and the right one cannot be measured: {error}"
    return (
        f"net {facts.label} is declared to have a {key} of {getattr(facts, key)}, but with that its windows would "
        f"disagree ({wrong}): {advice}; or set net.accept_tile_variance=true and expect seams"
    )


def _check_override(choice: NetChoice, facts: NetFacts, search_path: str) -> None:
    """Refuse a recipe that sets a smaller halo, or another stride, than a shipped net has."""
    if choice.accept_tile_variance or (choice.halo is None and choice.stride is None):
        return
    own = describe(choice.model_copy(update={"halo": None, "stride": None}), search_path)
    if any(declared < exact for declared, exact in zip(facts.halo, own.halo, strict=True)):
        raise PlanError(
            f"net.halo {facts.halo} is less than the halo {own.halo} of net {facts.label}: windows would disagree at "
            "their faces; leave it out, or set net.accept_tile_variance=true and expect seams"
        )
    if any(declared % exact for declared, exact in zip(facts.stride, own.stride, strict=True)):
        raise PlanError(
            f"net.stride {facts.stride} is not a multiple of the stride {own.stride} of net {facts.label}; leave it out"
        )


def normalising_layers(net: nn.Module) -> list[str]:
    """Return the names of layers that look at the whole window, such as instance norm: windows will disagree."""
    from torch import nn
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.nn.modules.instancenorm import _InstanceNorm

    def varies(layer: nn.Module) -> bool:
        if isinstance(layer, _InstanceNorm | _BatchNorm):
            return not layer.track_running_stats
        return isinstance(layer, nn.GroupNorm)

    own = files.inner_net(net)
    layers = [f"{name} ({type(layer).__name__})" for name, layer in own.named_modules() if varies(layer)]
    return layers + files.normalising_layers(own)


def weights_hash(net: nn.Module) -> str:
    """Return the SHA-256 of all tensors of `net` by name, in sorted order."""
    import torch

    digest = hashlib.sha256()
    for name, value in sorted(net.state_dict().items()):
        if not isinstance(value, torch.Tensor):  # what a module has beside tensors, such as its packed weights
            digest.update(f"{name} {value!r}\n".encode())
            continue
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        tensor = value.dequantize() if value.is_quantized else value.to_dense() if value.is_sparse else value
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_digest(choice: NetChoice, net: nn.Module, search_path: str) -> str:
    """Return the SHA-256 of the weights of `net`, which `choice` names: of its file if it has them, else of tensors."""
    if choice.ensemble is not None:
        from volpipe.nets.ensemble import Ensemble

        assert isinstance(net, Ensemble)
        pairs = zip(choice.members, net.nets, strict=True)
        return files.joined_hash(weights_digest(member, own, search_path) for member, own in pairs)
    kind = files.file_kind(choice.name)
    is_file = kind is not None and kind.has_weights_file and not choice.weights
    return files.file_hash(choice, search_path) if is_file else weights_hash(net)


def check_identity(label: str, planned: NetIdentity, identity: NetIdentity) -> None:
    """Refuse another net than the one that was planned, of the same source and weights.

    Raises:
        NetError: with what differs.
    """
    if differences := planned.differences(identity):
        raise NetError(
            f"net {label} is another one on {socket.gethostname()} than in the plan: {'; '.join(differences)}; make it "
            "the same there, or start over with --fresh"
        )


def check_same_net(choice: NetChoice, facts: NetFacts, weights_sha256: str) -> None:
    """Refuse weights other than those that `facts` describe.

    Raises:
        NetError: with both hashes.
    """
    if weights_sha256 == facts.weights_sha256:
        return
    if choice.ensemble is not None:
        why = "a net of the ensemble changed after the run began; put the old files back, or start over with --fresh"
    elif choice.weights is not None or files.is_program(choice.name):
        changed = choice.weights or choice.name
        why = f"{changed} changed after the run began; put the old file back, or start over with --fresh"
    else:
        why = (
            "its code draws others at each call; call torch.manual_seed in it, or save its state dict and set "
            "net.weights to that file"
        )
    raise NetError(
        f"the weights of net {facts.label} are {short_hash(weights_sha256)} on {socket.gethostname()}, in the plan "
        f"they are {short_hash(facts.weights_sha256)}: {why}"
    )


@once
def check_shapes(choice: NetChoice, facts: NetFacts, window: Triple, search_path: str = "") -> None:
    """Refuse a net whose output for a window (z, y, x) has another shape than declared.

    A large window is tried without values where that works. tests/nets/test_facts.py checks shipped nets.

    Raises:
        PlanError: the net does not take the window, or the shapes differ; the message has both.
    """
    if choice.ensemble is not None:
        for member, own in zip(choice.members, facts.each, strict=True):
            check_shapes(member, own, window, search_path)
        return
    if files.is_function(choice.name):
        return
    if look_up(choice) is not None and not any(w % s for w, s in zip(window, facts.stride, strict=True)):
        return
    memory = file_of(choice, search_path, f"takes {window}")
    kept(memory, bool, lambda: _has_declared_shape(choice, facts, window, search_path))


def _has_declared_shape(choice: NetChoice, facts: NetFacts, window: Triple, search_path: str) -> bool:
    """Return True for a net whose output has the declared shape; the others are refused."""
    import torch

    shape = (1, facts.in_channels, *window)
    small = math.prod(shape) <= MOST_COMPUTED
    for device in ("cpu",) if small else ("meta", "cpu"):
        try:
            net = build_net(choice.model_copy(update={"weights": None}), search_path)
            with torch.device(device), torch.inference_mode():
                out = tuple(only_tensor(net.to(device)(torch.zeros(shape))).shape)
            break
        except UnmeasurableError as error:
            remedy = error.remedy.format(keys="net.scale, net.margin, net.stride and net.halo")
            raise PlanError(f"net {facts.label}: {error}; {remedy}") from error
        except (Exception, SystemExit) as error:  # whatever the net's own code raises
            if device == "cpu":
                raise PlanError(
                    f"net {facts.label} takes no window {window} of {count(facts.in_channels, 'channel')}: "
                    f"{reason(error)}"
                ) from error
            log.info("net %s cannot be tried without values; computing one window", facts.label)
    sizes = zip(window, facts.margin, facts.scale, facts.shrink, strict=True)
    expected = (1, facts.out_channels, *((w - 2 * m) * s // r for w, m, s, r in sizes))
    if out != expected:
        margin = f", margin {facts.margin}" if any(facts.margin) else ""
        coarser = f", {facts.shrink} input voxels per output voxel" if max(facts.shrink) > 1 else ""
        raise PlanError(
            f"net {facts.label}: a window {window} gives {out[1:]}, but scale {facts.scale}{coarser}{margin} and "
            f"{facts.out_channels} channels mean {expected[1:]}; leave out scale, margin and "
            "channels in the net and the recipe, so that they are measured, or correct them"
        )
    return True
