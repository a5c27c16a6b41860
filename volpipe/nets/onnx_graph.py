"""A file of ONNX, read as data by the library onnx: operators, opsets, weights, and the files that tensors lie in.

Not here: running it (onnx). Nothing is executed, and no file beside it is opened. Protobuf follows messages within
messages a hundred deep, and refuses what goes deeper.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from volpipe.errors import VolpipeError

if TYPE_CHECKING:
    import onnx

FLOATS = (1, 10, 11)  # TensorProto.DataType: float32, float16, float64
EXTERNAL = 1  # TensorProto.DataLocation
WEIGHING = ("Conv", "ConvTranspose", "Gemm", "MatMul")


@dataclass(frozen=True)
class Graph:
    """The contents of a file of ONNX, graphs within graphs and functions included.

    Attributes:
        opsets: versions by domain; "" is ONNX's own.
        operators: their names, with the domain unless it is ONNX's own.
        functions: operators that the file itself defines.
        external: the files that tensors lie in, as the file names them.
        num_parameters: numbers in its weights, which are tensors of floats.
    """

    opsets: dict[str, int]
    operators: set[str]
    functions: set[str]
    external: list[str]
    num_parameters: int


def read_graph(path: Path, data: bytes) -> Graph:
    """Return the contents of the file of ONNX at `path`, whose bytes are `data`.

    Raises:
        VolpipeError: it is no file of ONNX.
    """
    model = _read_model(path, data)
    messages = _messages_by_kind(model)
    weights = {w.name: math.prod(w.dims) for w in _initializers(messages) if w.data_type in FLOATS and w.dims}
    external = []  # the files of tensors, as each names its own
    for tensor in messages["TensorProto"]:
        file = {entry.key: entry.value for entry in tensor.external_data}.get("location", "")
        external += [file] if tensor.data_location == EXTERNAL or file else []
    graph = Graph(
        opsets={opset.domain: opset.version for opset in model.opset_import},
        operators={_operator(node.domain, node.op_type) for node in messages["NodeProto"]},
        functions={_operator(function.domain, function.name) for function in model.functions},
        external=external,
        num_parameters=sum(weights.values()),
    )
    if not graph.operators or not graph.opsets:
        raise VolpipeError(f"{path} is no file of ONNX: it has no graph")
    return graph


def _read_model(path: Path, data: bytes) -> onnx.ModelProto:
    try:
        import onnx
        from google.protobuf.message import DecodeError
    except ImportError as error:
        raise VolpipeError(f"net {path.name} needs onnx; pip install 'volpipe[models]'") from error
    try:
        return onnx.load_model_from_string(data)
    except DecodeError as error:
        raise VolpipeError(f"{path} is no file of ONNX: {error}") from error


def _messages_by_kind(model: onnx.ModelProto) -> Mapping[str, list[Any]]:  # Any: protobuf has a class for each kind
    """Return the messages within `model`, however deep, in their order, by the name of their kind."""
    kinds = defaultdict(list)
    for message in _messages(model):
        kinds[message.DESCRIPTOR.name].append(message)
    return kinds


def _messages(message: Any) -> Iterator[Any]:  # Any: as above
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if isinstance(value, Sequence) else (value,):
                yield inner
                yield from _messages(inner)


def _initializers(messages: Mapping[str, list[Any]]) -> Iterator[onnx.TensorProto]:
    return (tensor for graph in messages["GraphProto"] for tensor in graph.initializer)


def _operator(domain: str, name: str) -> str:
    return f"{domain}.{name}" if domain else name


def with_random_weights(path: Path, data: bytes, *, positive: bool) -> bytes:
    """Return the file `data`, whose tensors are all in it, with random weights, and biases of zero.

    Zeros among other numbers stay, as part of the net; a tensor of zeros alone is untrained.
    """
    from onnx import numpy_helper

    rng = np.random.default_rng(0)
    model = _read_model(path, data)
    messages = _messages_by_kind(model)
    nodes = messages["NodeProto"]
    tensors = {tensor.name: tensor for tensor in _initializers(messages)}
    tensors |= {
        node.output[0]: node.attribute[0].t
        for node in nodes
        if node.op_type == "Constant" and node.attribute[0].HasField("t")
    }
    names = {out: node.input[0] for node in nodes if node.op_type == "Identity" for out in node.output}
    factors, terms = set[str](), set[str]()
    for node in nodes:
        if node.op_type in WEIGHING and not node.domain:
            first, second, *rest = [names.get(name, name) for name in (*node.input, "")]
            factors |= {first, second}
            terms |= set(rest)
    for name in sorted((factors | terms) & tensors.keys()):
        tensor = tensors[name]
        old = numpy_helper.to_array(tensor)
        if tensor.data_type not in FLOATS or not old.size:
            continue
        new = np.zeros_like(old)
        if name in factors and old.ndim > 1:
            inputs = max(1, math.prod(old.shape[1:]))
            drawn = (
                (rng.random(old.shape) + 0.5) / inputs if positive else rng.normal(size=old.shape) / math.sqrt(inputs)
            )
            new = (np.where(old != 0, drawn, 0) if np.any(old) else drawn).astype(old.dtype)
        tensor.CopyFrom(numpy_helper.from_array(new, tensor.name))
    result: bytes = model.SerializeToString()
    return result
