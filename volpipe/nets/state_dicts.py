"""Weights from safetensors and torch's checkpoints: the part of a file that fits a net.

Not here: the nets (load), or the checkpoints of our own trainings (training). Files are data: ``weights_only=True``.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from volpipe.errors import VolpipeError
from volpipe.text import check_no_text
from volpipe.units import listed

if TYPE_CHECKING:
    import torch
    from torch import nn

COMPILED = "_orig_mod."  # which torch.compile writes into names, anywhere
DEEPEST = 8  # dictionaries and lists inside each other, searched for tensors
COUNTER = "num_batches_tracked"  # of batch norms, which old files lack
MOST_NAMED = 3
MORE = "too many"


def load_weights(net: nn.Module, path: Path, key: str | None = None) -> None:
    """Load the tensors in the file at `path` that fit `net` into it.

    They may lie in any dictionary of the file, and their names may have a prefix. What torch itself loads fits, under
    other names too: weights of an earlier form of a layer, such as weight_norm's.

    Args:
        path: a safetensors file, or a torch file.
        key: the dotted place in the file to search; None for all of it.

    Raises:
        VolpipeError: no such file, other contents than tensors and plain values, no tensors that fit, or two sets.
    """
    own = {name: tensor for name, tensor in net.state_dict().items() if hasattr(tensor, "shape")}
    names = {name.replace(COMPILED, ""): name for name in own}
    names = names if len(names) == len(own) else {name: name for name in own}

    def load(state: Mapping[str, torch.Tensor]) -> None:
        net.load_state_dict({names.get(name, name): tensor for name, tensor in state.items()})

    def takes(state: Mapping[str, torch.Tensor]) -> bool:
        try:
            load(state)
        except (RuntimeError, KeyError, TypeError, AttributeError):
            return False
        return True

    state = _fitting({plain: own[name] for plain, name in names.items()}, path, key, takes)
    try:
        load(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        why = " ".join(str(error).split())
        raise VolpipeError(
            f"the weights in {path} do not fit the net: {why}; give the net.options that they were trained with"
        ) from error


def _fitting(
    expected: Mapping[str, torch.Tensor],
    path: Path,
    key: str | None,
    takes: Callable[[Mapping[str, torch.Tensor]], bool],
) -> dict[str, torch.Tensor]:
    """Return the tensors in the file at `path`, or in its part `key`, that fit a net with the state dict `expected`.

    Args:
        takes: returns whether the net itself loads tensors of other names.
    """
    if not path.is_file():
        raise VolpipeError(f"no weights at {path}")
    everything, groups = _tensors_by_place(read_file(path), path)
    within = "" if key is None else f"{key.replace(COMPILED, '')}."
    tensors = {name: tensor for name, tensor in everything.items() if name.startswith(within)}
    if not tensors:
        places = ", ".join(place.rstrip(".") or "the file itself" for place, _ in groups.most_common(MOST_NAMED))
        raise VolpipeError(f"{path} has no tensors under net.weights_key {key!r}; it has some under {places}")
    matches: Counter[str] = Counter()
    for name in tensors:
        starts = [0, *(place.end() for place in re.finditer(r"\.", name))]
        matches.update(name[:start] for start in starts if name[start:] in expected)
    fitting = [prefix for prefix in matches if not _misfit(expected, _below(tensors, prefix))]
    if len(fitting) > 1:
        keys = [prefix.rstrip(".") for prefix in fitting]
        raise VolpipeError(
            f"{' and '.join(keys)} in {path} both fit the net; name the one that is meant, such as "
            f"net.weights_key={keys[0]}"
        )
    if fitting:
        return {name: tensor for name, tensor in expected.items() if name.endswith(COUNTER)} | _below(
            tensors, fitting[0]
        )
    inner = {prefix: count for prefix, count in groups.items() if prefix.startswith(within)}
    for prefix in sorted({*matches, *inner}, key=lambda prefix: -matches[prefix]):
        if takes(_below(tensors, prefix)):
            return _below(tensors, prefix)
    raise VolpipeError(_refusal(expected, path, tensors, matches, inner or {within: 0}))


def _refusal(
    expected: Mapping[str, torch.Tensor],
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    matches: Counter[str],
    groups: Mapping[str, int],
) -> str:
    """Return the refusal of a file of which no part fits the net, with the differences of the part that is nearest."""
    nearest = max(matches or groups, key=lambda prefix: ((matches or groups)[prefix], -len(prefix)))
    why = _misfit(expected, _below(tensors, nearest))
    place = f"{path}, {nearest.rstrip('.')}," if nearest else f"{path}"
    if why.startswith(MORE) and matches:
        rest = f"{path.stem}_of_net{path.suffix}"
        return (
            f"the weights in {place} do not fit the net: {why}, which the net has no part for; let its function build "
            "that part, or save the others alone, in Python: torch.save({name: weights[name] for name in "
            f"net.state_dict()}}, {rest!r}), with weights as they are loaded"
        )
    advice = "the net.options" if matches else "the net.name and the net.options"
    return f"the weights in {place} do not fit the net: {why}; give {advice} that they were trained with"


def read_file(path: Path) -> object:
    """Return the contents of the file at `path`: tensors, plain values and numpy's numbers, in dictionaries and lists.

    Raises:
        VolpipeError: it holds something else, which is named, or cannot be read.
    """
    import torch

    check_no_text(path, "file of weights")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of TorchScript, which is refused below
            with torch.serialization.safe_globals(_numpy_globals()):
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever the readers raise for another file
        raise VolpipeError(_unreadable(path, str(error), type(error).__name__)) from error


def _numpy_globals() -> list[Any]:  # Any: classes and functions, as torch has them
    """Return the classes of numpy's numbers, which trainers write into files of weights; none runs code of the file."""
    import numpy as np

    kinds = [type(np.dtype(name)) for name in ("float16", "float32", "float64", "int32", "int64", "bool")]
    return [np.dtype, np._core.multiarray.scalar, (np._core.multiarray.scalar, "numpy.core.multiarray.scalar"), *kinds]  # type: ignore[attr-defined]  # numpy's stubs lack it


def _unreadable(path: Path, words: str, kind: str) -> str:
    """Return why torch, with the message `words`, cannot read a file, and what to do."""
    if "TorchScript archive" in words:
        return f"{path} is a program of TorchScript, not weights; name it as net.name={path.name}, with --trust-model"
    classes = _classes(path, words)
    load = f"torch.load({path.name!r}, weights_only=False)"
    safe = f"{path.stem}.safetensors"
    if any(name.startswith(("torch.nn.modules.", "torch.fx.")) for name in classes):
        return (
            f"{path} holds no plain tensors but a whole net, which is code and is not loaded; if you trust its maker, "
            f"save its weights alone, in Python: net = {load}; safetensors.torch.save_file(net.state_dict(), {safe!r})"
        )
    if classes:
        return (
            f"{path} holds no plain tensors alone: {listed(classes, MOST_NAMED)} would be made, which is "
            f"code and is not; if you trust its maker, save the weights alone, in Python: file = {load}; "
            f"safetensors.torch.save_file(file['state_dict'], {safe!r}), or by another key, of a net file.state_dict()"
        )
    if kind == "UnpicklingError":  # whose words advise weights_only=False
        return (
            f"{path} is no file of weights that can be read: it holds no plain tensors, is cut short or is something "
            "else; name a .pt, .pth, .ckpt or .safetensors file, or copy it again"
        )
    first = re.sub(r"\x1b\[[\d;]*m", "", words).strip().partition("\n")[0]
    return f"{path} holds no plain tensors: {kind}: {first}"


def _classes(path: Path, words: str) -> list[str]:
    """Return the names of classes and functions that a torch file would call, sorted, as far as torch finds them."""
    import torch

    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(path)))
    except Exception:  # an old format, or a file that is something else
        return re.findall(r"Unsupported (?:global: GLOBAL|class) ([\w.]+)", words)[:1]


def _tensors_by_place(whole: object, path: Path) -> tuple[dict[str, torch.Tensor], Counter[str]]:
    """Return the tensors in the contents of a file by their dotted place, and the number in each dictionary."""
    entries = list(_tensors_in(whole, ""))
    names = [place + name for place, name, _ in entries]
    plain = [name.replace(COMPILED, "") for name in names]
    if not entries or not isinstance(whole, Mapping | list | tuple):
        raise VolpipeError(
            f"{path} holds no tensors by name, but {type(whole).__name__}; save the net's state dict: "
            f"torch.save(net.state_dict(), {path.name!r})"
        )
    names = plain if len(set(plain)) == len(names) else names
    tensors = {name: tensor for name, (_, _, tensor) in zip(names, entries, strict=True)}
    return tensors, Counter(place.replace(COMPILED, "") for place, _, _ in entries)


def _tensors_in(value: object, place: str, depth: int = 0) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield each tensor in `value` with its place, which ends in a point, and its name there."""
    import torch

    entries: Mapping[object, object] = (
        value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, list | tuple) else {}
    )
    for key, entry in entries.items():
        if isinstance(entry, torch.Tensor):
            yield place, str(key), entry
        elif depth < DEEPEST:
            yield from _tensors_in(entry, f"{place}{key}.", depth + 1)


def _below(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _misfit(expected: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the differences of weights from the expected ones: the first of each kind, and how many more."""
    kinds = (
        ("missing", [name for name in expected if name not in tensors and not name.endswith(COUNTER)]),
        (MORE, [name for name in tensors if name not in expected]),
        ("of another shape", [
            f"{name} {tuple(tensors[name].shape)} for {tuple(tensor.shape)}"
            for name, tensor in expected.items() if name in tensors and tensors[name].shape != tensor.shape
        ]),
    )  # fmt: skip
    return ", ".join(
        f"{what}: {names[0]}" + (f" and {len(names) - 1} more" if names[1:] else "") for what, names in kinds if names
    )
