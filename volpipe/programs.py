"""Nets that come as files of code: TorchScript (.pt) and torch.export (.pt2), loaded only where they are trusted.

Not here: weights, which are data (nets). What these files do when they are loaded or run is up to whoever made them.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from volpipe.errors import VolpipeError
from volpipe.recipe import NetChoice
from volpipe.resolve import told

if TYPE_CHECKING:
    from torch import nn

KINDS = {".pt": "TorchScript", ".pth": "TorchScript", ".ts": "TorchScript", ".pt2": "torch.export"}
VARYING = ("instance_norm", "group_norm")


def is_program(name: str) -> bool:
    """Tell whether the net `name` is a file of code."""
    return ":" not in name and PurePath(name).suffix in KINDS


def load_program(choice: NetChoice, search_path: str) -> nn.Module:
    """Return the net in the file that `choice` names, on the CPU.

    Raises:
        VolpipeError: the recipe does not say that it is trusted, no such file, or one of another kind.
    """
    path = Path(search_path) / choice.name
    kind = KINDS[path.suffix]
    if not choice.trust_model:
        raise VolpipeError(
            f"net {choice.name} is a file of {kind}, which is code and runs with your rights; add --trust-model "
            "(net.trust_model = true) if you trust its maker, or take its weights as safetensors with a net of your own"
        )
    if choice.options:
        raise VolpipeError(f"net {choice.name} is a file of {kind}, which takes no options; leave out {choice.options}")
    if not path.is_file():
        raise VolpipeError(f"no net at {path}")
    try:
        return _load(path, kind)
    except Exception as error:  # whatever torch makes of a file that is something else
        raise VolpipeError(
            f"{path} is no file of {kind}: {told(error)}; weights alone go to net.weights, and their net to net.name"
        ) from error


def _load(path: Path, kind: str) -> nn.Module:
    import torch

    if kind == "torch.export":
        return torch.export.load(path).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # to whoever makes such files
        net: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    return net


def file_hash(choice: NetChoice, search_path: str) -> str:
    """Return the SHA-256 of the file that `choice` names: of weights and code."""
    with (Path(search_path) / choice.name).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def normalising_layers(net: nn.Module) -> list[str]:
    """Return the operators of a loaded file that look beyond a voxel's neighbourhood; [] for other nets."""
    import torch

    if isinstance(net, torch.jit.ScriptModule):
        graph: Any = net.inlined_graph  # Any: torch has no types for it
        return [name for name in VARYING if graph.findAllNodes(f"aten::{name}")]
    if isinstance(net, torch.fx.GraphModule):
        said = " ".join(str(node.target) for node in net.graph.nodes)
        return [name for name in VARYING if name in said]
    return []
