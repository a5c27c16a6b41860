"""bioimage.io packages for tests: small nets with weights, descriptions of both formats, and tests that they pass."""

from __future__ import annotations

import functools
import hashlib
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from graphs import export_onnx
from test_trust import script
from torch import nn

from volpipe.nets.load import describe
from volpipe.recipes.inference import NetChoice

ABOUT = {
    "type": "model", "name": "Small net", "description": "of a test", "authors": [{"name": "Nobody"}], "license": "MIT",
    "cite": [{"text": "none", "url": "https://example.org"}], "documentation": "README.md", "tags": [],
    "timestamp": "2026-01-01T00:00:00",
}  # fmt: skip
NAMES = {"b": "batch", "c": "channel"}
Values = np.ndarray

SEEN = np.random.default_rng(0).normal(100, 9, (1, 1, 6, 24, 20)).astype(np.float32)


class Smooth(nn.Module):
    """A net that pools and comes back: stride (1, 2, 2), halo (1, 3, 3), two channels of output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv3d(1, 3, 3, padding=1)
        self.second = nn.Conv3d(3, 2, (1, 3, 3), padding=(0, 1, 1))
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.max_pool3d(torch.relu(self.first(x)), (1, 2, 2))
        out: torch.Tensor = self.second(nn.functional.interpolate(y, scale_factor=(1.0, 2.0, 2.0)))
        return out


def out_of(net: nn.Module, values: Values) -> Values:
    with torch.inference_mode():
        out: Values = net(torch.from_numpy(np.ascontiguousarray(values, np.float32))).numpy()
    return out


def description(
    form: str,
    axes: str = "bczyx",
    *,
    before: Sequence[Mapping[str, Any]] = (),
    after: Sequence[Mapping[str, Any]] = (),
    least: Mapping[str, int] | None = None,
    step: Mapping[str, int] | None = None,
    halo: int = 0,
    channels: int = 2,
) -> dict[str, Any]:
    """Return a description, but for its weights, of format "0.4" or "0.5"; steps as that format has them.

    Args:
        least, step: by axis of space; sizes are `least` alone where `step` is 0.
    """
    least = {"z": 4, "y": 16, "x": 16} | dict(least or {})
    step = {"z": 1, "y": 2, "x": 2} | dict(step or {})
    given: dict[str, Any] = {"axes": [], "preprocessing": list(before)}
    made: dict[str, Any] = {"axes": [], "postprocessing": list(after)}
    if form == "0.4":
        sizes = [least.get(a, 1) for a in axes]
        steps = [step.get(a, 0) for a in axes]
        given |= {"name": "raw", "axes": axes, "data_type": "float32", "shape": {"min": sizes, "step": steps}}
        made |= {
            "name": "made",
            "axes": axes,
            "data_type": "float32",
            "halo": [halo if a in "zyx" else 0 for a in axes],
        }
        offset = [(channels - 1) / 2 if a == "c" else 0 for a in axes]
        made["shape"] = {"reference_tensor": "raw", "scale": [1] * len(axes), "offset": offset}
        tests = {"test_inputs": ["in.npy"], "test_outputs": ["out.npy"]}
        return {**ABOUT, "format_version": "0.4.10", "inputs": [given], "outputs": [made], **tests}
    for a in axes:
        if a == "b":
            mine = theirs = {"type": "batch"}
        elif a == "c":
            mine = {"type": "channel", "channel_names": ["em"]}
            theirs = {"type": "channel", "channel_names": [f"c{i}" for i in range(channels)]}
        else:
            size = {"min": least[a], "step": step[a]} if step[a] else least[a]
            mine = {"type": "space", "id": a, "size": size}
            theirs = {"type": "space", "id": a, "size": {"tensor_id": "raw", "axis_id": a}}
            theirs |= {"halo": halo} if halo else {}
        given["axes"].append(mine)
        made["axes"].append(theirs)
    for tensor, name, file in ((given, "raw", "in.npy"), (made, "made", "out.npy")):
        tensor |= {"id": name, "data": {"type": "float32"}, "test_tensor": {"source": file}}
    return {**ABOUT, "format_version": "0.5.4", "inputs": [given], "outputs": [made]}


@functools.cache
def scripted(kind: type[nn.Module]) -> bytes:
    """Return a net of this class as TorchScript, for which a process is started once."""
    with tempfile.TemporaryDirectory() as folder:
        script(Path(folder) / "net.pt", kind().eval())
        return (Path(folder) / "net.pt").read_bytes()


def write_package(
    folder: Path,
    said: dict[str, Any],
    net: nn.Module,
    seen: Values,
    due: Values,
    *,
    kinds: Sequence[str] = ("onnx",),
    shape: Sequence[int] = (1, 1, 4, 16, 16),
) -> Path:
    """Write a package of `net` and the description `said`, whose test takes `seen` to `due`; return its folder."""
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("a net\n")
    np.save(folder / "in.npy", seen)
    np.save(folder / "out.npy", due)
    weights: dict[str, Any] = {}
    if "onnx" in kinds:
        export_onnx(folder / "net.onnx", net, shape)
        weights["onnx"] = {"source": "net.onnx", "opset_version": 17, "sha256": sha256(folder / "net.onnx")}
    if "torchscript" in kinds:
        (folder / "net.pt").write_bytes(scripted(type(net)))
        weights["torchscript"] = {"source": "net.pt", "pytorch_version": "2.6", "sha256": sha256(folder / "net.pt")}
    rewrite(folder, said | {"weights": weights})
    return folder


def rewrite(folder: Path, said: Mapping[str, Any]) -> None:
    (folder / "rdf.yaml").write_text(yaml.safe_dump(dict(said), sort_keys=False))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what the description in `folder` says."""
    said = yaml.safe_load((folder / "rdf.yaml").read_text())
    change(said)
    rewrite(folder, said)


def zipped(folder: Path, path: Path, inside: str = "") -> Path:
    """Return the zip at `path` with what is in `folder`."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, inside + file.name)
    return path


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def smooth(folder: Path, form: str = "0.5", *, kinds: tuple[str, ...] = ("onnx",), **how: Any) -> Path:
    """Write a package of Smooth without steps."""
    due = out_of(Smooth(), SEEN)
    return write_package(folder, description(form, **how), Smooth(), SEEN, due, kinds=kinds)


def facts_of(path: Path, **choice: Any) -> Any:
    return describe(NetChoice(name=str(path), **choice))
