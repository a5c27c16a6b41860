"""Nets in files of ONNX, run by onnxruntime: a module as any other to its callers, without a gradient.

Not here: what else is in such a file (onnx_graph). It is data: operators of ONNX's own and of onnxruntime's release, no
code of its maker's; operators that need a library, and tensors outside of the file's folder, are refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from volpipe.errors import VolpipeError
from volpipe.nets.declared import Declaration, ServedNet
from volpipe.nets.onnx_graph import Graph, read_graph, with_random_weights
from volpipe.resolve import describe_error
from volpipe.text import check_no_text

KNOWN_DOMAINS = ("", "ai.onnx", "ai.onnx.ml")
FLOATS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(double)": np.float64}
TYPES = FLOATS | {f"tensor({name})": np.dtype(name).type for name in ("uint8", "int8", "uint16", "int16", "int32")}
VARYING = (
    "InstanceNormalization", "GroupNormalization", "MeanVarianceNormalization", "GlobalAveragePool", "GlobalMaxPool",
)  # fmt: skip
LARGEST_BYTES = 2**31  # of a protobuf message
MOST_LAST = 4  # channels of an input that may come last

log = logging.getLogger(__name__)


class OnnxGraph:
    """A graph of one input and any outputs, of any axes, and an onnxruntime session for each device."""

    def __init__(self, path: Path, data: bytes, graph: Graph) -> None:
        self.path, self.graph = path, graph
        self._data = data
        self._sessions: dict[str, Any] = {}  # Any: onnxruntime has no types
        session = self._session("cpu")
        entries = session.get_inputs()
        names = ", ".join(entry.name for entry in entries)
        if len(entries) != 1:
            raise VolpipeError(f"net {path.name} has {len(entries)} inputs ({names}); nets of one are run")
        if entries[0].type not in TYPES:
            raise VolpipeError(
                f"net {path.name}: input {names} is {entries[0].type}; numbers are run: {', '.join(TYPES)}"
            )
        results = session.get_outputs()
        self.input, self.outputs = entries[0], [result.name for result in results if result.type in TYPES]
        if not self.outputs:
            kinds = ", ".join(f"{result.name} {result.type}" for result in results)
            raise VolpipeError(
                f"net {path.name} gives {kinds}; numbers are run: {', '.join(TYPES)}; export it without what follows "
                "them, such as ArgMax"
            )

    @property
    def varying(self) -> list[str]:
        """Operators that look at the whole window."""
        return [f"{op} of the graph" for op in VARYING if op in self.graph.operators]

    def with_random_weights(self, *, positive: bool) -> OnnxGraph:
        """Return this graph with random weights; unchanged if its weights are in other files."""
        if self.graph.external:
            return self
        return OnnxGraph(self.path, with_random_weights(self.path, self._data, positive=positive), self.graph)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types for it
    def __call__(self, data: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the outputs for `data`, of the input's axes, by name, as float32 on the same device."""
        if data.device.type == "meta":
            raise NotImplementedError("onnxruntime has no shapes without values")
        session = self._session(data.device.type)
        with np.errstate(over="ignore"):  # what half precision cannot hold is infinite there, as in torch
            values = data.detach().cpu().contiguous().numpy().astype(TYPES[self.input.type], copy=False)
        outs = session.run(self.outputs, {self.input.name: values})
        with np.errstate(over="ignore"):
            singles = [out.astype(np.float32, copy=False) for out in outs]
        tensors = (torch.from_numpy(single).to(data.device) for single in singles)
        return dict(zip(self.outputs, tensors, strict=True))

    def _session(self, device: str) -> Any:  # Any: onnxruntime has no types
        if device not in self._sessions:
            self._sessions[device] = _start_session(self.path, self._data, self.graph, device)
        return self._sessions[device]


class OnnxNet(ServedNet):
    """A net run by onnxruntime, of volumes (n, c, z, y, x) or of slices (n, c, y, x), one by one; outputs by name."""

    draws_weights = True

    def __init__(self, graph: OnnxGraph) -> None:
        super().__init__()
        self._graph = graph
        self._name = name = graph.path.name
        shape = [n if isinstance(n, int) else 0 for n in graph.input.shape]
        if graph.input.type not in FLOATS:
            raise VolpipeError(f"net {name}: input {graph.input.name} is {graph.input.type}; floats are run")
        if len(shape) not in (4, 5):
            raise VolpipeError(
                f"net {name}: input {graph.input.name} has {len(shape)} axes; nets of (n, c, z, y, x) and (n, c, y, x) "
                "are run"
            )
        # As TensorFlow has them: channels, of which the number is known, come last.
        self._is_last = shape[1] != shape[-1] and 0 < shape[-1] <= MOST_LAST and not 0 < shape[1] <= MOST_LAST
        if self._is_last:
            shape = [shape[0], shape[-1], *shape[1:-1]]
        if shape[0] > 1:
            raise VolpipeError(f"net {name} takes {shape[0]} windows at once; export it with a free batch, or of 1")
        is_flat = len(shape) == 4
        self._one_by_one = is_flat or bool(shape[0])
        self._sizes = tuple(shape[2:])
        self.declaration = Declaration(in_channels=shape[1] or 1, fixed=self._sizes, slices=is_flat)
        self.varying = graph.varying
        self.num_numbers = graph.graph.num_parameters

    def with_random_weights(self, *, positive: bool) -> OnnxNet:
        """Return this net with random weights."""
        return OnnxNet(self._graph.with_random_weights(positive=positive))

    def forward(self, windows: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        if windows.device.type != "meta":
            check_size(self._name, self._sizes, tuple(windows.shape[2:]))
        data = windows.movedim(1, -1) if self._is_last else windows
        parts = [self._graph(part) for part in (torch.split(data, 1) if self._one_by_one else [data])]
        outs = {name: torch.cat([part[name] for part in parts]) for name in self._graph.outputs}
        if self._is_last:
            outs = {name: out.movedim(-1, 1) if out.ndim == data.ndim else out for name, out in outs.items()}
        return next(iter(outs.values())) if len(outs) == 1 else outs


def load_graph(path: Path) -> OnnxGraph:
    """Return the graph in the file of ONNX at `path`, ready to run.

    Raises:
        VolpipeError: it is no ONNX, needs foreign operators or files, or onnxruntime cannot run it.
    """
    if path.stat().st_size >= LARGEST_BYTES:
        raise VolpipeError(f"{path} has {path.stat().st_size} bytes, a file of ONNX less than {LARGEST_BYTES}")
    check_no_text(path, "file of ONNX")
    data = path.read_bytes()
    graph = read_graph(path, data)
    for operator in sorted(graph.operators - graph.functions):
        domain = operator.rpartition(".")[0]
        if domain not in KNOWN_DOMAINS:
            raise VolpipeError(
                f"net {path.name} needs the operator {operator}, which is none of ONNX's own; export it without, "
                "or run it as TorchScript"
            )
    for name in graph.external:
        external_file(path, name)
    return OnnxGraph(path, data, graph)


def load_onnx(path: Path) -> OnnxNet:
    """Return the net in the file of ONNX at `path`; errors as of `load_graph`, and for unsupported axes."""
    return OnnxNet(load_graph(path))


def external_file(path: Path, name: str) -> Path:
    """Return the file of tensors `name` of the file of ONNX at `path`.

    Raises:
        VolpipeError: it is outside of its folder, or not there.
    """
    folder = path.parent.resolve()
    file = (folder / name).resolve()
    if not name or folder not in file.parents:
        raise VolpipeError(f"net {path.name} wants tensors from {name!r}, outside of its folder; put them beside it")
    if not file.is_file():
        raise VolpipeError(f"net {path.name} wants tensors from {name!r}, which is not beside it")
    check_no_text(file, "file of tensors")
    return file


def onnx_hash(path: Path) -> str:
    """Return the SHA-256 of the file of ONNX at `path`, and of the files with its tensors."""
    data = path.read_bytes()
    digest = hashlib.sha256(data)
    for name in sorted(set(read_graph(path, data).external)):
        with external_file(path, name).open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _start_session(path: Path, data: bytes, graph: Graph, device: str) -> Any:  # Any: onnxruntime has no types
    try:
        import onnxruntime
    except ImportError as error:
        raise VolpipeError(f"net {path.name} needs onnxruntime; pip install 'volpipe[models]'") from error

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.enable_cpu_mem_arena = False  # it keeps twice the largest tensor for good
    options.log_severity_level = 4
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # cores are shared with other workers
    providers: list[Any] = ["CPUExecutionProvider"]  # Any: a name, or a name with options
    if device == "cuda":
        if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
            exact = {"use_tf32": "0", "cudnn_conv_algo_search": "DEFAULT"}
            providers.insert(0, ("CUDAExecutionProvider", exact))
        else:
            log.warning("net %s runs on the CPU: this onnxruntime has no CUDA; install onnxruntime-gpu", path.name)
    try:
        return onnxruntime.InferenceSession(os.fspath(path) if graph.external else data, options, providers=providers)
    except Exception as error:  # onnxruntime has an exception for each of its codes
        opsets = ", ".join(f"{domain or 'ai.onnx'} {number}" for domain, number in graph.opsets.items())
        raise VolpipeError(
            f"net {path.name} cannot be run by onnxruntime {onnxruntime.__version__} (opsets {opsets}): "
            f"{describe_error(error)}"
        ) from error


def check_size(name: str, fixed: Sequence[int], sizes: tuple[int, ...]) -> None:
    """Refuse a window of other sizes (z, y, x) than `fixed`; 0 stands for any size."""
    expected = tuple(f or n for f, n in zip(fixed, sizes, strict=True))
    if expected != sizes:
        raise VolpipeError(f"net {name} takes windows of {expected} voxels alone, not {sizes}; set windows.shape to it")
