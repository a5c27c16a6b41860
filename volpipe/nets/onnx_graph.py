"""A file of ONNX, read without a library: operators, opsets, weights and their places in the file.

Not here: running it (onnx). The fields are those of onnx.proto3 of ONNX, in protobuf's wire format
(protobuf.dev/programming-guides/encoding). Lengths are checked first, and nothing is executed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

MOST_DEPTH = 16  # of graphs in graphs: bodies of If and Loop
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
FLOATS: Mapping[int, np.dtype] = {1: np.dtype("<f4"), 10: np.dtype("<f2"), 11: np.dtype("<f8")}  # TensorProto.DataType
WEIGHING = ("Conv", "ConvTranspose", "Gemm", "MatMul")
EXTERNAL = 1  # TensorProto.DataLocation


class GraphError(ValueError):
    """Bytes that are no ONNX."""


@dataclass(frozen=True)
class Initializer:
    """A tensor of floats: its shape, and the place of its bytes in this file, if they lie in it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int = 0
    stop: int = 0
    is_constant: bool = False  # of an operator, not learned

    @property
    def is_here(self) -> bool:
        return self.stop - self.start == math.prod(self.shape) * self.dtype.itemsize > 0


@dataclass(frozen=True)
class Node:
    """One operator: its name, with the domain unless it is ONNX's own, and its tensors by name."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass
class Graph:
    """The contents of a file of ONNX.

    Attributes:
        opsets: versions by domain; "" is ONNX's own.
        nodes: of the graph and of the graphs in it.
        weights: tensors of floats by name.
        external: the files that tensors lie in, as the file names them.
        functions: operators that the file itself defines.
    """

    opsets: dict[str, int] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    weights: dict[str, Initializer] = field(default_factory=dict)
    external: list[str] = field(default_factory=list)
    functions: set[str] = field(default_factory=set)

    @property
    def operators(self) -> set[str]:
        return {node.operator for node in self.nodes}

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(w.shape) for w in self.weights.values() if w.shape and not w.is_constant)


def read_graph(data: bytes) -> Graph:
    """Return the contents of the file of ONNX `data`.

    Raises:
        GraphError: it is no file of ONNX.
    """
    graph = Graph()
    try:
        for number, value in _fields(data, 0, len(data)):
            if number == 8:
                opset = _texts(data, value)
                graph.opsets[opset.get(1, "")] = dict(_fields(data, *_span(value))).get(2, 0)  # type: ignore[assignment]
            elif number == 7:
                _read_graph(graph, data, _span(value), 0)
            elif number == 25:
                _read_function(graph, data, _span(value))
    except (UnicodeDecodeError, IndexError) as error:
        raise GraphError(str(error)) from error
    if not graph.nodes or not graph.opsets:
        raise GraphError("it has no graph")
    return graph


Value = int | tuple[int, int]


def _fields(data: bytes, start: int, stop: int) -> Iterator[tuple[int, Value]]:
    """Yield each field between `start` and `stop`: its number, with an integer or the span of its bytes."""
    while start < stop:
        key, start = _varint(data, start, stop)
        number, kind = key >> 3, key & 7
        value: Value
        if kind == VARINT:
            value, start = _varint(data, start, stop)
        elif kind == BYTES:
            size, start = _varint(data, start, stop)
            value, start = (start, start + size), start + size
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
            value, start = (start, start + size), start + size
        else:
            raise GraphError(f"a field of kind {kind}")
        if start > stop:
            raise GraphError("it is cut short")
        yield number, value


def _varint(data: bytes, start: int, stop: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if start >= stop:
            raise GraphError("it is cut short")
        byte = data[start]
        start += 1
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value, start
    raise GraphError("a number of more than 64 bits")


def _span(value: Value) -> tuple[int, int]:
    if isinstance(value, int):
        raise GraphError("a number in place of a message")
    return value


def _texts(data: bytes, value: Value) -> dict[int, str]:
    """Return the last text of each field of bytes in the message `value`."""
    texts = {}
    for number, inner in _fields(data, *_span(value)):
        if not isinstance(inner, int):
            texts[number] = data[slice(*inner)].decode(errors="replace")
    return texts


def _read_graph(graph: Graph, data: bytes, span: tuple[int, int], depth: int) -> None:
    if depth > MOST_DEPTH:
        raise GraphError(f"graphs within graphs, more than {MOST_DEPTH} deep")
    for number, value in _fields(data, *span):
        if number == 1:
            _read_node(graph, data, _span(value), depth)
        elif number == 5:
            _read_tensor(graph, data, _span(value))


def _read_node(graph: Graph, data: bytes, span: tuple[int, int], depth: int) -> None:
    texts: dict[int, list[str]] = {1: [], 2: [], 4: [], 7: []}
    attributes = []
    for number, value in _fields(data, *span):
        if number in texts:
            texts[number].append(data[slice(*_span(value))].decode())
        elif number == 5:
            attributes.append(_span(value))
    domain = "".join(texts[7])
    name = "".join(texts[4])
    graph.nodes.append(Node(f"{domain}.{name}" if domain else name, tuple(texts[1]), tuple(texts[2])))
    for attribute in attributes:
        for number, value in _fields(data, *attribute):
            if number in (6, 11):
                _read_graph(graph, data, _span(value), depth + 1)
            elif number in (5, 10):  # of a Constant, which is called what the node gives
                _read_tensor(graph, data, _span(value), "".join(texts[2]))


def _read_function(graph: Graph, data: bytes, span: tuple[int, int]) -> None:
    name, domain = "", ""
    for number, value in _fields(data, *span):
        if number == 1:
            name = data[slice(*_span(value))].decode()
        elif number == 10:
            domain = data[slice(*_span(value))].decode()
        elif number == 7:
            _read_node(graph, data, _span(value), 1)
    graph.functions.add(f"{domain}.{name}" if domain else name)


def _read_tensor(graph: Graph, data: bytes, span: tuple[int, int], name: str = "") -> None:
    shape: list[int] = []
    is_constant = bool(name)
    kind, content, is_external, place = 0, (0, 0), False, ""
    for number, value in _fields(data, *span):
        if number == 1:  # packed or not
            shape += [value] if isinstance(value, int) else _packed(data, value)
        elif number == 2 and isinstance(value, int):
            kind = value
        elif number in (4, 9, 10) and not isinstance(value, int):  # floats, raw bytes, doubles
            content = value
        elif number == 8:
            name = data[slice(*_span(value))].decode() or name
        elif number == 13:
            entry = _texts(data, value)
            place = entry.get(2, "") if entry.get(1) == "location" else place
        elif number == 14:
            is_external = value == EXTERNAL
    if place or is_external:
        graph.external.append(place)
        content = (0, 0)
    if kind in FLOATS:
        graph.weights[name] = Initializer(tuple(shape), FLOATS[kind], *content, is_constant)


def _packed(data: bytes, span: tuple[int, int]) -> list[int]:
    values, (start, stop) = [], span
    while start < stop:
        value, start = _varint(data, start, stop)
        values.append(value)
    return values


def with_random_weights(data: bytes, graph: Graph, *, positive: bool) -> bytes:
    """Return the file `data` with random weights, and biases of zero.

    Zeros among other numbers stay, as part of the net; a tensor of zeros alone is untrained.
    """
    rng = np.random.default_rng(0)
    result = bytearray(data)
    weights, biases = _weights_and_biases(graph)
    for name in sorted(weights | biases):
        tensor = graph.weights.get(name)
        if tensor is None or not tensor.is_here:
            continue
        old = np.frombuffer(data, tensor.dtype, math.prod(tensor.shape), tensor.start)
        new = np.zeros_like(old)
        if name in weights and len(tensor.shape) > 1:
            new = _random_values(rng, old, tensor.shape, positive=positive)
        result[tensor.start : tensor.stop] = new.tobytes()
    return bytes(result)


def _random_values(rng: np.random.Generator, old: np.ndarray, shape: Sequence[int], *, positive: bool) -> np.ndarray:
    inputs = max(1, math.prod(shape[1:]))
    new = (rng.random(old.size) + 0.5) / inputs if positive else rng.normal(size=old.size) / math.sqrt(inputs)
    values = np.where(old != 0, new, 0) if np.any(old) else new
    drawn: np.ndarray = values.astype(old.dtype)
    return drawn


def _weights_and_biases(graph: Graph) -> tuple[set[str], set[str]]:
    """Return the names of the tensors that multiply, and of those that are added."""
    names = {out: node.inputs[0] for node in graph.nodes if node.operator == "Identity" for out in node.outputs}
    weights, biases = set(), set()
    for node in graph.nodes:
        if node.operator in WEIGHING:
            first, second, *rest = [names.get(name, name) for name in (*node.inputs, "")]
            weights |= {first, second}
            biases |= set(rest)
    return weights, biases - weights
