"""Nets that come as files: TorchScript (.pt) and torch.export (.pt2), which are code, and ONNX (.onnx), which is data.

Not here: weights alone, which are data (nets). What files of code do when they are loaded or run is up to whoever made
them: they are loaded only where they are trusted.
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

KINDS = {".pt": "TorchScript", ".pth": "TorchScript", ".ts": "TorchScript", ".pt2": "torch.export", ".onnx": "ONNX"}
DATA = ("ONNX",)
VARYING = ("instance_norm", "group_norm")


def is_program(name: str) -> bool:
    """Tell whether the net `name` is a file, not a function."""
    return ":" not in name and PurePath(name).suffix in KINDS


def load_program(choice: NetChoice, search_path: str) -> nn.Module:
    """Return the net in the file that `choice` names, on the CPU.

    Raises:
        VolpipeError: the recipe does not say that it is trusted, no such file, or one of another kind.
    """
    path = Path(search_path) / choice.name
    kind = KINDS[path.suffix]
    if kind not in DATA and not choice.trust_model:
        raise VolpipeError(
            f"net {choice.name} is a file of {kind}, which is code and runs with your rights; add --trust-model "
            "(net.trust_model = true) if you trust its maker, or take its weights as safetensors with a net of your own"
        )
    if choice.options:
        raise VolpipeError(f"net {choice.name} is a file of {kind}, which takes no options; leave out {choice.options}")
    if not path.is_file():
        raise VolpipeError(f"no net at {path}")
    if kind == "ONNX":
        return _load_onnx(choice, path)
    try:
        return _load(path, kind)
    except Exception as error:  # whatever torch makes of a file that is something else
        raise VolpipeError(
            f"{path} is no file of {kind}: {told(error)}; weights alone go to net.weights, and their net to net.name"
        ) from error


def _load_onnx(choice: NetChoice, path: Path) -> nn.Module:
    from volpipe.onnx_nets import load_onnx

    if choice.weights is not None:
        raise VolpipeError(f"net {choice.name} has its weights in it; leave out net.weights {choice.weights}")
    return load_onnx(path)


def _load(path: Path, kind: str) -> nn.Module:
    import torch

    if kind == "torch.export":
        return torch.export.load(path).module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # to whoever makes such files
        net: nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    return net


def file_hash(choice: NetChoice, search_path: str) -> str:
    """Return the SHA-256 of the file that `choice` names: of weights and code, and of files beside it that it needs."""
    path = Path(search_path) / choice.name
    if KINDS[path.suffix] == "ONNX":
        from volpipe.onnx_nets import onnx_hash

        return onnx_hash(path)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def num_parameters(net: nn.Module) -> int:
    """Return how many numbers a net has learned, whatever it keeps them in."""
    said = getattr(net, "num_parameters", None)
    return said if isinstance(said, int) else sum(p.numel() for p in net.parameters())


def normalising_layers(net: nn.Module) -> list[str]:
    """Return the operators of a loaded file that look beyond a voxel's neighbourhood; [] for other nets."""
    import torch

    if isinstance(found := getattr(net, "varying", None), list):
        return found
    if isinstance(net, torch.jit.ScriptModule):
        graph: Any = net.inlined_graph  # Any: torch has no types for it
        return [name for name in VARYING if graph.findAllNodes(f"aten::{name}")]
    if isinstance(net, torch.fx.GraphModule):
        said = " ".join(str(node.target) for node in net.graph.nodes)
        return [name for name in VARYING if name in said]
    return []
