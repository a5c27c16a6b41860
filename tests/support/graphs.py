"""Files of ONNX for tests: made of torch nets by torch's exporter, or of single operators by hand."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

SPACE = {5: {2: "z", 3: "y", 4: "x"}, 4: {2: "y", 3: "x"}}


def export_onnx(path: Path, net: nn.Module, shape: Sequence[int] = (1, 1, 16, 16, 16), *, free: bool = True) -> None:
    """Write `net` as ONNX; `free`: for any batch and size, else for `shape` alone."""
    axes = {0: "n", **SPACE[len(shape)]} if free else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter, which is told that there is a newer one
        torch.onnx.export(
            net.eval(), (torch.zeros(*shape),), str(path), dynamo=False, opset_version=17,
            input_names=["x"], output_names=["y"], dynamic_axes={"x": axes, "y": axes} if free else None,
        )  # fmt: skip


def write_graph(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    tensors: dict[str, np.ndarray] | None = None,
    *,
    inputs: Sequence[str] = ("x",),
    outputs: Sequence[str] = ("y",),
    shape: Sequence[int | str] = ("n", 1, "z", "y", "x"),
    kind: int = TensorProto.FLOAT,
    opset: int = 17,
) -> None:
    """Write a graph of `nodes` with inputs of `shape` and outputs of any."""
    graph = helper.make_graph(
        list(nodes),
        "graph",
        [helper.make_tensor_value_info(name, kind, list(shape)) for name in inputs],
        [helper.make_tensor_value_info(name, kind, [None] * len(shape)) for name in outputs],
        [numpy_helper.from_array(data, name) for name, data in (tensors or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("mine", 1)])
    model.ir_version = 8
    path.write_bytes(model.SerializeToString())


def kernel(*size: int) -> np.ndarray:
    """Return weights of a convolution from one channel to one, none of them zero."""
    return np.random.default_rng(1).uniform(-1, 1, (1, 1, *size)).astype(np.float32)
