"""Nets in files of ONNX: measured as their originals are, run as they are, refused where they are more than data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from command import Give, giver
from graphs import export_onnx, kernel, write_graph
from nets import run as run_net
from onnx import TensorProto, helper, numpy_helper
from test_halos import NETS
from torch import nn
from volumes import noise, write_volume

from volpipe.errors import PlanError, VolpipeError
from volpipe.models.unet3d import unet3d
from volpipe.nets.load import build_net, check_shapes, describe, normalising_layers
from volpipe.nets.onnx import load_onnx
from volpipe.nets.onnx_graph import read_graph, with_random_weights
from volpipe.nets.receptive_field import measure_geometry
from volpipe.recipes.inference import NetChoice
from volpipe.volumes.volume import open_volume

node = helper.make_node
IDENTITY = [node("Identity", ["x"], ["y"])]


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("name", ["shift-y", "superres-2", "unet-one-level", "unet-anisotropic", "unet-residual"])
def test_an_exported_net_is_measured_to_be_what_its_original_declares(tmp_path: Path, name: str) -> None:
    net = NETS[name]()
    own = net.volpipe
    export_onnx(tmp_path / "net.onnx", net, (1, own["in_channels"], *(4 * s for s in own["stride"])))
    found = measure_geometry(lambda: load_onnx(tmp_path / "net.onnx"), own["in_channels"])
    assert (found.scale, found.stride, found.halo) == (own["scale"], own["stride"], own["halo"])
    assert found.out_channels == own["out_channels"]


# Graphs by hand, and what their scale, stride, and reach below and above are by pencil.
CONV = node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 1, 5], pads=[1, 0, 4, 1, 0, 0])
POOL = node("MaxPool", ["x"], ["p"], kernel_shape=[1, 2, 2], strides=[1, 2, 2])
UP = node(
    "Resize", ["p", "", "s"], ["y"], mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
)
BY_HAND: dict[str, tuple[list[Any], dict[str, np.ndarray], tuple[Any, ...]]] = {
    "identity": ([node("Identity", ["x"], ["y"])], {}, ((1, 1, 1), (1, 1, 1), (0, 0, 0), (0, 0, 0))),
    "convolution": ([CONV], {"w": kernel(3, 1, 5)}, ((1, 1, 1), (1, 1, 1), (1, 0, 4), (1, 0, 0))),
    "dilated": (
        [node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3, 3], dilations=[1, 2, 5], pads=[1, 2, 5] * 2)],
        {"w": kernel(3, 3, 3)}, ((1, 1, 1), (1, 1, 1), (1, 2, 5), (1, 2, 5)),
    ),
    "pooled": ([POOL, UP], {"s": np.float32([1, 1, 1, 2, 2])}, ((1, 1, 1), (1, 2, 2), (0, 1, 1), (0, 1, 1))),
    "threefold": (
        [node("Resize", ["x", "", "s"], ["y"], mode="linear", coordinate_transformation_mode="half_pixel")],
        {"s": np.float32([1, 1, 3, 1, 1])}, ((3, 1, 1), (1, 1, 1), (1, 0, 0), (1, 0, 0)),
    ),
    "saturating": (
        [node("Conv", ["x", "w"], ["a"], kernel_shape=[3, 3, 3], pads=[1] * 6), node("Tanh", ["a"], ["b"]),
         node("Conv", ["b", "w"], ["y"], kernel_shape=[3, 3, 3], pads=[1] * 6)],
        {"w": kernel(3, 3, 3)}, ((1, 1, 1), (1, 1, 1), (2, 2, 2), (2, 2, 2)),
    ),
    "dark": (  # of which nothing comes through where voxels are above zero
        [node("Neg", ["x"], ["n"]), node("Relu", ["n"], ["r"]),
         node("Conv", ["r", "w"], ["y"], kernel_shape=[3, 3, 3], pads=[1] * 6)],
        {"w": kernel(3, 3, 3)}, ((1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_a_graph_made_by_hand_is_measured_to_be_what_it_was_made_of(tmp_path: Path, name: str) -> None:
    nodes, tensors, (scale, stride, before, after) = BY_HAND[name]
    write_graph(tmp_path / "net.onnx", nodes, tensors)
    found = measure_geometry(lambda: load_onnx(tmp_path / "net.onnx"))
    assert (found.scale, found.stride, found.before, found.after) == (scale, stride, before, after)


def run_over(give: Give, net: str, *settings: str) -> tuple[np.ndarray, str]:
    """Return what a run of `net` over in.n5 in this folder gives, and what it said."""
    chosen = (f"net.name={net}", "normalise.method=none", "output.dtype=float32", *settings)
    arguments = [part for setting in chosen for part in ("--set", setting)]
    ended = give("run", "--config", "threads", *arguments, "--details", "--fresh", "-o", "out.zarr", "in.n5")
    assert ended.code == 0, ended.err
    return np.squeeze(open_volume("out.zarr").open()[...]), ended.out


def test_a_run_with_onnx_gives_what_its_original_gives_for_the_whole_volume(tmp_path: Path, give: Give) -> None:
    net, volume = unet3d(features=(2, 3)), noise((24, 40, 36))
    export_onnx(tmp_path / "net.onnx", net)
    write_volume(tmp_path / "in.n5", volume)
    found, said = run_over(give, "net.onnx", "windows.shape=[32,36,36]")
    # The exporter keeps one tensor of those that are alike, such as biases of nothing.
    stored = sum(numpy_helper.to_array(tensor).size for tensor in onnx.load("net.onnx").graph.initializer)
    assert f"net       net, {stored} parameters" in said and "halo of the net 9 × 9 × 9" in said
    due = run_net(net, np.pad(volume.astype(np.float32), 10, mode="reflect"))[10:-10, 10:-10, 10:-10]
    assert np.abs(found - due).max() <= 1e-5 * np.abs(due).max()


class Flat(nn.Module):
    """A net (n, 1, y, x) -> (n, 2, y, x): a smoothing, and a difference along y."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        with torch.no_grad():
            self.conv.weight.zero_()
            self.conv.weight[0] = 1 / 9
            self.conv.weight[1, 0, :, 1] = torch.tensor([-1.0, 0.0, 1.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.conv(x)
        return out


@pytest.mark.parametrize("is_free", [True, False])
def test_a_net_of_slices_runs_over_each_slice(tmp_path: Path, give: Give, is_free: bool) -> None:
    export_onnx(tmp_path / "flat.onnx", Flat(), (1, 1, 24, 32), free=is_free)
    volume = noise((5, 40, 50))
    write_volume(tmp_path / "in.n5", volume)
    facts = describe(NetChoice(name="flat.onnx"), str(tmp_path))
    assert (facts.halo, facts.scale, facts.out_channels) == ((0, 1, 1), (1, 1, 1), 2)
    assert facts.fixed == ((0, 0, 0) if is_free else (0, 24, 32))
    found, _ = run_over(give, "flat.onnx")
    padded = np.pad(volume.astype(np.float64), ((0, 0), (1, 1), (1, 1)), mode="reflect")
    smooth = sum(padded[:, j : j + 40, i : i + 50] for j in range(3) for i in range(3)) / 9
    np.testing.assert_allclose(found[0], smooth, atol=1e-3)
    np.testing.assert_allclose(found[1], padded[:, 2:, 1:-1] - padded[:, :-2, 1:-1], atol=1e-3)


def test_a_net_of_one_size_gets_windows_of_that_size_and_no_other(tmp_path: Path, give: Give) -> None:
    net, volume = unet3d(features=(2, 3)), noise((20, 41, 30))
    export_onnx(tmp_path / "net.onnx", net, (1, 1, 32, 36, 40), free=False)
    write_volume(tmp_path / "in.n5", volume)
    facts = describe(NetChoice(name="net.onnx"), str(tmp_path))
    assert (facts.fixed, facts.window) == ((32, 36, 40), (32, 36, 40))
    assert (facts.stride, facts.halo) == ((2, 2, 2), (9, 9, 9))
    found, said = run_over(give, "net.onnx")
    assert "of 32 × 36 × 40 voxels, overlap 20 × 20 × 20" in said
    due = run_net(net, np.pad(volume.astype(np.float32), ((10, 10), (10, 11), (10, 10)), mode="reflect"))
    due = due[10:30, 10:51, 10:40]
    assert np.abs(found - due).max() <= 1e-5 * np.abs(due).max()
    refused = give("plan", "--set", "net.name=net.onnx", "--set", "windows.shape=[32,36,44]", "in.n5")
    assert refused.code == 2
    assert "axis x: net net takes windows of 40 voxels alone, not 44; set windows.shape=auto" in " ".join(
        refused.err.split()
    )
    with pytest.raises(VolpipeError, match=r"takes windows of \(32, 36, 40\) voxels alone, not \(32, 36, 36\)"):
        build_net(NetChoice(name="net.onnx"), str(tmp_path))(torch.zeros(1, 1, 32, 36, 36))


def test_a_net_of_one_size_keeps_it_where_a_larger_window_would_waste_less(tmp_path: Path, give: Give) -> None:
    write_graph(tmp_path / "net.onnx", IDENTITY, shape=(1, 1, 11, "y", "x"))
    write_volume(tmp_path / "in.n5", noise((3, 20, 20)))
    said = ("net.halo=[5,0,0]", "net.stride=[1,1,1]", "net.scale=[1,1,1]", "net.out_channels=1")
    arguments = [part for setting in ("net.name=net.onnx", *said) for part in ("--set", setting)]
    ended = give("plan", "--quick", *arguments, "in.n5")
    assert ended.code == 0, ended.err
    assert "3 of 11 × 20 × 20 voxels, overlap 10 × 0 × 0" in ended.out


@pytest.mark.parametrize(("kind", "dtype"), [(TensorProto.FLOAT16, np.float16), (TensorProto.DOUBLE, np.float64)])
def test_floats_of_other_widths_are_given_and_taken(tmp_path: Path, kind: int, dtype: type) -> None:
    write_graph(tmp_path / "net.onnx", [node("Add", ["x", "c"], ["y"])], {"c": np.array(2, dtype)}, kind=kind)
    net = build_net(NetChoice(name="net.onnx"), str(tmp_path))
    out = net(torch.full((2, 1, 3, 4, 5), 0.5))
    assert out.dtype == torch.float32
    assert torch.equal(out, torch.full((2, 1, 3, 4, 5), 2.5))
    # Very large voxels, by which it is measured, are infinite in half precision; numpy's warnings would be errors here.
    assert describe(NetChoice(name="net.onnx"), str(tmp_path)).halo == (0, 0, 0)
    assert net(torch.full((1, 1, 3, 4, 5), 1e20)).isinf().all() == (dtype is np.float16)


REFUSED: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "custom": ([node("Melt", ["x"], ["y"], domain="mine")], {}, "needs the operator mine.Melt, which is none of"),
    "unknown": ([node("Melt", ["x"], ["y"])], {}, r"cannot be run by onnxruntime .* \(opsets ai.onnx 17.*Melt"),
    "opset": (IDENTITY, {"opset": 999}, r"cannot be run by onnxruntime .* \(opsets ai.onnx 999"),
    "inputs": ([node("Add", ["x", "x2"], ["y"])], {"inputs": ("x", "x2")}, r"has 2 inputs \(x, x2\); nets of one"),
    "integers": (IDENTITY, {"kind": TensorProto.UINT8}, r"input x is tensor\(uint8\); floats are run"),
    "axes": (IDENTITY, {"shape": ("n", 1, "x")}, "input x has 3 axes"),
    "batch": (IDENTITY, {"shape": (4, 1, "z", "y", "x")}, "takes 4 windows at once; export it with a free batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_graph_that_is_not_served_is_refused_with_a_sentence(tmp_path: Path, name: str) -> None:
    nodes, how, sentence = REFUSED[name]
    write_graph(tmp_path / "net.onnx", nodes, **how)
    with pytest.raises(VolpipeError, match=f"net net.onnx.*{sentence}"):
        build_net(NetChoice(name="net.onnx"), str(tmp_path))


def external(folder: Path, place: str) -> None:
    """Write a graph whose weights are, as it says, in the file `place`."""
    tensor = numpy_helper.from_array(kernel(3, 3, 3), "w")
    size = len(tensor.raw_data)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", place), ("offset", "0"), ("length", str(size))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    nodes = [node("Conv", ["x", "w"], ["y"], kernel_shape=[3, 3, 3], pads=[1] * 6)]
    write_graph(folder / "net.onnx", nodes)
    model = onnx.load(folder / "net.onnx", load_external_data=False)
    model.graph.initializer.append(tensor)
    (folder / "net.onnx").write_bytes(model.SerializeToString())


def test_tensors_in_a_file_beside_are_read_measured_and_part_of_the_hash(tmp_path: Path) -> None:
    external(tmp_path, "net.data")
    (tmp_path / "net.data").write_bytes(kernel(3, 3, 3).tobytes())
    facts = describe(NetChoice(name="net.onnx"), str(tmp_path))
    assert (facts.halo, facts.num_parameters) == ((1, 1, 1), 27)
    seen = torch.rand(1, 1, 6, 7, 8)
    due = nn.functional.conv3d(seen, torch.from_numpy(kernel(3, 3, 3)), padding=1)
    torch.testing.assert_close(build_net(NetChoice(name="net.onnx"), str(tmp_path))(seen), due)
    (tmp_path / "net.data").write_bytes((2 * kernel(3, 3, 3)).tobytes())
    assert describe(NetChoice(name="net.onnx"), str(tmp_path)).weights_sha256 != facts.weights_sha256


@pytest.mark.parametrize("place", ["../secret.data", "/etc/passwd", "sub/../../secret.data", "link.data", ""])
def test_tensors_outside_of_the_folder_are_refused(tmp_path: Path, place: str) -> None:
    (tmp_path / "secret.data").write_bytes(kernel(3, 3, 3).tobytes())
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "link.data").symlink_to(tmp_path / "secret.data")
    external(folder, place)
    with pytest.raises(VolpipeError, match=r"wants tensors from .*, outside of its folder"):
        load_onnx(folder / "net.onnx")


def test_a_sparse_tensor_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    write_graph(tmp_path / "net.onnx", IDENTITY)
    model = onnx.load(tmp_path / "net.onnx")
    values = numpy_helper.from_array(np.float32([1, 2]), "s")
    values.ClearField("raw_data")
    values.data_location = TensorProto.EXTERNAL
    entry = values.external_data.add()
    entry.key, entry.value = "location", "/etc/passwd"
    sparse = helper.make_sparse_tensor(values, numpy_helper.from_array(np.array([0, 3])), [4])
    model.graph.sparse_initializer.append(sparse)
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(VolpipeError, match=r"wants tensors from '/etc/passwd', outside of its folder"):
        load_onnx(tmp_path / "net.onnx")


def test_what_is_no_onnx_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.onnx"
    write_graph(whole, [CONV], {"w": kernel(3, 1, 5)})
    with pytest.raises(VolpipeError, match=r"no net at .*net\.onnx"):
        build_net(NetChoice(name="net.onnx"), str(tmp_path))
    data = whole.read_bytes()
    for content in (b"", b"rubbish" * 100, b"\xff" * 64, data[: len(data) // 2], data[:-1]):
        (tmp_path / "net.onnx").write_bytes(content)
        with pytest.raises(VolpipeError, match=r"net.onnx is no file of ONNX"):
            build_net(NetChoice(name="net.onnx"), str(tmp_path))
    for choice, said in ((NetChoice(name="whole.onnx", options={"a": 1}), "takes no options"),
                         (NetChoice(name="whole.onnx", weights="w.pt"), "has its weights in it")):  # fmt: skip
        with pytest.raises(VolpipeError, match=said):
            build_net(choice, str(tmp_path))


def test_a_graph_is_read_as_onnx_reads_it(tmp_path: Path) -> None:
    body = helper.make_graph([node("Relu", ["x"], ["b"])], "body", [], [])
    nodes = [node("If", ["c"], ["y"], then_branch=body, else_branch=body), node("Mine", ["x"], ["z"], domain="own")]
    write_graph(tmp_path / "net.onnx", nodes, {"c": np.array(True), "w": kernel(3, 3, 3), "h": np.float16([1, 2])})
    data = (tmp_path / "net.onnx").read_bytes()
    graph = read_graph(Path("net.onnx"), data)
    assert graph.operators == {"If", "Relu", "own.Mine"}
    assert graph.opsets == {"": 17, "mine": 1}
    assert graph.num_parameters == 27 + 2


@pytest.mark.parametrize("is_raw", [True, False])
def test_weights_are_drawn_anew_and_what_was_meant_to_be_zero_stays(tmp_path: Path, is_raw: bool) -> None:
    sparse = kernel(3, 3, 3)
    sparse[0, 0, 1] = 0
    nodes = [node("Conv", ["x", "w", "b"], ["a"], kernel_shape=[3, 3, 3], pads=[1] * 6),
             node("Conv", ["a", "none"], ["y"], kernel_shape=[1, 1, 1])]  # fmt: skip
    tensors = {"w": sparse, "b": np.float32([7]), "none": np.zeros((1, 1, 1, 1, 1), np.float32)}
    write_graph(tmp_path / "net.onnx", nodes, tensors)
    model = onnx.load(tmp_path / "net.onnx")
    if not is_raw:
        model.graph.initializer[0].CopyFrom(helper.make_tensor("w", TensorProto.FLOAT, sparse.shape, sparse.ravel()))
    data = with_random_weights(tmp_path / "net.onnx", model.SerializeToString(), positive=True)
    model = onnx.load_from_string(data)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    assert np.array_equal(found["w"] == 0, sparse == 0) and (found["w"] >= 0).all()
    assert not np.array_equal(found["w"], sparse)
    assert found["b"] == 0 and found["none"] > 0


def test_deeply_nested_graphs_are_refused_and_not_followed(tmp_path: Path) -> None:
    def wrapped(number: int, inner: bytes) -> bytes:
        size, text = len(inner), bytes([number << 3 | 2])
        while size > 127:
            text, size = text + bytes([size & 127 | 128]), size >> 7
        return text + bytes([size]) + inner

    data = b""
    for _ in range(3000):
        data = wrapped(1, wrapped(5, wrapped(6, data)))  # a node, of an attribute, of a graph
    (tmp_path / "net.onnx").write_bytes(wrapped(8, b"") + wrapped(7, data))
    with pytest.raises(VolpipeError, match=r"net.onnx is no file of ONNX"):
        load_onnx(tmp_path / "net.onnx")


def test_operators_that_look_at_whole_windows_are_found(tmp_path: Path) -> None:
    nodes = [node("InstanceNormalization", ["x", "s", "b"], ["y"])]
    write_graph(tmp_path / "net.onnx", nodes, {"s": np.ones(1, np.float32), "b": np.zeros(1, np.float32)})
    choice = NetChoice(name="net.onnx", halo=(0, 0, 0), stride=(1, 1, 1), scale=(1, 1, 1), out_channels=1)
    assert normalising_layers(build_net(choice, str(tmp_path))) == ["InstanceNormalization of the graph"]
    assert not describe(choice, str(tmp_path)).tile_invariant


def test_a_window_that_a_graph_cannot_take_is_refused_with_its_reason(tmp_path: Path) -> None:
    export_onnx(tmp_path / "net.onnx", unet3d(features=(2, 3)))
    choice = NetChoice(name="net.onnx")
    facts = describe(choice, str(tmp_path))
    check_shapes(choice, facts, (20, 20, 20), str(tmp_path))
    with pytest.raises(PlanError, match=r"net net takes no window \(21, 20, 20\) of 1 channel: .*Concat"):
        check_shapes(choice, facts, (21, 20, 20), str(tmp_path))


def test_the_command_prints_a_graphs_geometry(tmp_path: Path, give: Give) -> None:
    write_graph(tmp_path / "net.onnx", [CONV], {"w": kernel(3, 1, 5)})
    ended = give("net", "net.onnx", "--no-costs")
    assert ended.code == 0, ended.err
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["receptive", "field", "3", "1", "5"] in rows
    assert ["exact", "halo", "1", "0", "4", "1", "×", "0", "×", "4"] in rows


@pytest.mark.long
@pytest.mark.slow
def test_the_command_tries_windows_of_the_one_size_that_a_graph_takes(tmp_path: Path, give: Give) -> None:
    write_graph(tmp_path / "net.onnx", [CONV], {"w": kernel(3, 1, 5)}, shape=(1, 1, 12, 16, 20))
    ended = give("net", "net.onnx")
    assert ended.code == 0, ended.err
    assert "choose net.halo=[1, 0, 4] windows.shape=[12, 16, 20] infer.batch=1" in " ".join(ended.out.split())
