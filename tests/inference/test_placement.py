"""Windows at the edge, as MONAI and nnU-Net place and weigh them: against MONAI, and by hand where it has no say."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path

import field
import numpy as np
import pytest
import torch
from inline import Inline
from monai.inferers import sliding_window_inference
from volumes import noise, windowed, write_volume

from volpipe.errors import PlanError
from volpipe.geometry.blend import importance, places_around
from volpipe.geometry.grid import Box, Lattice, Placement, triple
from volpipe.inference.block_sum import makers_weights
from volpipe.inference.plan import Plan
from volpipe.nets.load import build_net
from volpipe.recipes.inference import load_recipe
from volpipe.volumes.volume import open_volume
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

RAW = ("normalise.method=none", "output.levels=0", "net.untrained=true", "windows.block=[1,2,2]")
# Norms over the whole window: their numbers depend on where windows lie, and on their size.
NETS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, norm, channels):
        super().__init__()
        torch.manual_seed(0)
        self.volpipe = dict(
            in_channels=1, out_channels=channels, scale=(1, 1, 1), stride=(1, 1, 1), halo=(2, 2, 2), window=(16, 16, 16)
        )
        self.layers = nn.Sequential(
            nn.Conv3d(1, 4, 3, padding=1), norm(), nn.LeakyReLU(), nn.Conv3d(4, channels, 3, padding=1)
        )
    def forward(self, x):
        return self.layers(x)
def instance():
    return Net(lambda: nn.InstanceNorm3d(4, affine=True), 2)
def group():
    return Net(lambda: nn.GroupNorm(2, 4), 3)
def batch():
    return Net(lambda: nn.BatchNorm3d(4, track_running_stats=False), 1)
def plain():
    return Net(nn.Identity, 1)
"""


def planned(folder: Path, data: np.ndarray, name: str, *settings: str) -> Plan:
    (folder / "nets.py").write_text(NETS)
    write_volume(folder / "in.n5", data)
    recipe = load_recipe(None, [f"net.name=nets.py:{name}", *RAW, *settings])
    return prepare(str(folder / "in.n5"), recipe, folder / "out.zarr", folder)


def ran(plan: Plan, *, seed: int = 0, slots: int = 1) -> np.ndarray:
    assert execute(plan, Inline(seed, slots).start).missing == []
    out = open_volume(plan.out).open()[...]
    return out if out.ndim == 4 else out[np.newaxis]


def grey(shape: tuple[int, ...]) -> np.ndarray:
    return noise(shape).astype(np.float32) / 255


# Every two values meet; every three with -m long.
JOINED = [
    pytest.param(name, mode, overlap, shape, marks=[pytest.mark.long] * ((i + j + k + m) % 3 > 0))
    for i, name in enumerate(("instance", "group", "batch"))
    for j, mode in enumerate(("gaussian", "constant"))
    for k, overlap in enumerate((0.25, 0.5, 0.75))
    for m, shape in enumerate(((16, 25, 37), (9, 16, 40), (5, 6, 7)))
]


@pytest.mark.parametrize(("name", "mode", "overlap", "shape"), JOINED)
def test_numbers_are_those_of_monai(
    tmp_path: Path, name: str, mode: str, overlap: float, shape: tuple[int, ...]
) -> None:
    data, window = grey(shape), 16
    shared = window - int(window * (1 - overlap))
    plan = planned(
        tmp_path, data, name, f"windows.blend={mode}", f"windows.overlap={shared}", f"windows.shape={[window] * 3}"
    )
    assert plan.lattice.placement == "edge"
    net = build_net(plan.recipe.net, str(tmp_path))
    with torch.inference_mode():
        expected = sliding_window_inference(
            torch.from_numpy(data)[None, None], (window,) * 3, 1, net, overlap=overlap, mode=mode
        )[0].numpy()
    np.testing.assert_allclose(ran(plan), expected, rtol=0, atol=1e-5 * np.ptp(expected))


OF_LIBRARIES = [*(("monai", name) for name in field.MONAI), *(("nnunet", name) for name in field.NNUNET)]
# Each net meets each overlap; volumes are odd along all axes, or along one smaller than the window.
FIELD = [
    (function, name, mode, overlap, [(19, 37, 45), (33, 35, 32), (9, 20, 37)][(i + j) % 3])
    for i, (function, name) in enumerate([("banis", ""), ("pytc", ""), ("segneuron", ""), *OF_LIBRARIES])
    for j, (overlap, mode) in enumerate(zip((0.25, 0.5, 0.75), ("gaussian", "constant", "gaussian"), strict=True))
]


@pytest.mark.long
@pytest.mark.parametrize(("function", "name", "mode", "overlap", "shape"), FIELD)
def test_numbers_of_nets_of_the_field_are_those_of_monai(
    tmp_path: Path, function: str, name: str, mode: str, overlap: float, shape: tuple[int, ...]
) -> None:
    shutil.copy(field.__file__, tmp_path / "field.py")
    data, window = 2 * grey(shape) - 1, (16, 32, 32)
    shared = [w - int(w * (1 - overlap)) for w in window]
    write_volume(tmp_path / "in.n5", data)
    chosen = [f"net.name=field.py:{function}", f"windows.blend={mode}", "windows.placement=edge"]
    chosen += [f"windows.overlap={shared}", f"windows.shape={list(window)}", *RAW]
    chosen += [f'net.options={{name="{name}"}}'] if name else ["net.output=0"]
    plan = prepare(str(tmp_path / "in.n5"), load_recipe(None, chosen), tmp_path / "out.zarr", tmp_path)
    own = getattr(field, function)(*filter(None, [name]))
    net = (lambda windows: own(windows)[0]) if function == "segneuron" else own
    with torch.inference_mode():
        image = torch.from_numpy(data)[None, None]
        expected = sliding_window_inference(image, window, 1, net, overlap=overlap, mode=mode)[0].numpy()
    np.testing.assert_allclose(ran(plan), expected, rtol=0, atol=1e-5 * np.ptp(expected))


@pytest.mark.parametrize(
    ("name", "context", "shape"),
    [
        ("mitonet", 0, (3, 33, 30)),
        ("normed_neighbours", 2, (19, 40, 45)),
        pytest.param("mitonet", 0, (19, 40, 45), marks=pytest.mark.long),
        pytest.param("normed_neighbours", 2, (3, 33, 30), marks=pytest.mark.long),
    ],
)
def test_slices_are_weighed_one_by_one(tmp_path: Path, name: str, context: int, shape: tuple[int, ...]) -> None:
    """As MONAI joins each slice, and its neighbours as channels, of which those at the faces repeat."""
    shutil.copy(field.__file__, tmp_path / "field.py")
    data = 2 * grey(shape) - 1
    write_volume(tmp_path / "in.n5", data)
    division = ["windows.shape=[8,32,32]", "windows.block=[2,1,1]", "net.output=0", f"net.context={context}"]
    chosen = [f"net.name=field.py:{name}", *RAW, *division]
    plan = prepare(str(tmp_path / "in.n5"), load_recipe(None, chosen), tmp_path / "out.zarr", tmp_path)
    assert plan.overlap == (min(2 * context, len(data) - 1), 16, 16)
    own = getattr(field, name)()
    net = own if context else lambda windows: own(windows)["sem_logits"]
    padded = torch.from_numpy(np.pad(data, [(context, context), (0, 0), (0, 0)], mode="edge"))
    slices = torch.stack([padded[i : i + 2 * context + 1] for i in range(len(data))])
    with torch.inference_mode():
        expected = sliding_window_inference(slices, (32, 32), 1, net, overlap=0.5, mode="gaussian")
    expected = expected.numpy().swapaxes(0, 1)
    np.testing.assert_allclose(ran(plan), expected, rtol=0, atol=1e-5 * np.ptp(expected))


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [("windows.overlap=[2,8,8]", "so that windows overlap by 4 at least, not 2"),
     ("windows.blend=constant", "blend constant at the edge joins slices that lack them; set windows.blend=gaussian")],
)  # fmt: skip
def test_windows_that_show_slices_too_few_neighbours_are_refused(tmp_path: Path, setting: str, sentence: str) -> None:
    shutil.copy(field.__file__, tmp_path / "field.py")
    write_volume(tmp_path / "in.n5", grey((16, 33, 30)))
    chosen = ["net.name=field.py:normed_neighbours", "net.context=2", "windows.shape=[8,32,32]", *RAW, setting]
    with pytest.raises(PlanError, match=f"axis z: net normed_neighbours takes 2 slices on each side.*{sentence}"):
        prepare(str(tmp_path / "in.n5"), load_recipe(None, chosen), tmp_path / "out.zarr", tmp_path)


def test_a_net_of_whole_windows_is_tiled_as_its_maker_does_without_an_option(tmp_path: Path) -> None:
    plan = planned(tmp_path, grey((20, 24, 28)), "instance")
    windows = plan.recipe.windows
    assert (windows.placement, windows.blend, plan.window, plan.overlap) == ("edge", "gaussian", (16,) * 3, (8,) * 3)
    assert any("tiled as MONAI and nnU-Net do" in warning for warning in plan.warnings())


def test_windows_spread_evenly_are_weighed_as_nnunet_does(tmp_path: Path) -> None:
    """By the formulas of its `compute_steps_for_sliding_window` and `compute_gaussian`, window by window."""
    data, window = grey((23, 30, 16)), (16, 16, 16)
    plan = planned(tmp_path, data, "group", "windows.placement=even", f"windows.shape={list(window)}")
    net, starts = build_net(plan.recipe.net, str(tmp_path)), []
    for n, w in zip(data.shape, window, strict=True):
        count = int(np.ceil((n - w) / (w * 0.5))) + 1
        starts.append([int(np.round((n - w) / max(1, count - 1) * i)) for i in range(count)])
    weights = np.ones(window)
    for axis, w in enumerate(window):
        side = np.exp(-0.5 * ((np.arange(w) - w // 2) / (w / 8)) ** 2)
        weights *= side.reshape([-1 if i == axis else 1 for i in range(3)])
    weights = np.float16(10 * weights).astype(np.float64)
    weights[weights == 0] = weights[weights > 0].min()
    total, weight = np.zeros((3, *data.shape)), np.zeros(data.shape)
    for start in itertools.product(*starts):
        place = Box.from_shape(window).shift(start).slices
        with torch.inference_mode():
            total[:, *place] += weights * net(torch.from_numpy(data[place])[None, None])[0].numpy()
        weight[place] += weights
    expected = total / weight
    np.testing.assert_allclose(ran(plan), expected, rtol=0, atol=1e-5 * np.ptp(expected))


def test_cropped_at_the_edge_a_net_gives_what_it_gives_of_the_whole_volume(tmp_path: Path) -> None:
    """With the zeros that its own layers pad, not with mirrored voxels around the volume."""
    data = grey((24, 31, 40))
    plan = planned(tmp_path, data, "plain", "windows.placement=edge", "windows.shape=[16,16,16]")
    with torch.inference_mode():
        expected = build_net(plan.recipe.net, str(tmp_path))(torch.from_numpy(data)[None, None])[0].numpy()
    np.testing.assert_allclose(ran(plan), expected, rtol=0, atol=1e-5 * np.ptp(expected))
    with pytest.raises(PlanError, match="axis z: blend crop needs an overlap of 4"):
        planned(tmp_path, data, "plain", "windows.placement=edge", "windows.shape=[16,16,16]", "windows.overlap=2")
    with pytest.raises(PlanError, match="axis z: window 32 is longer than the volume of 24 voxels"):
        planned(tmp_path, data, "plain", "windows.placement=edge", "windows.shape=[32,16,16]")


@pytest.mark.parametrize("placement", ["edge", pytest.param("even", marks=pytest.mark.long)])
def test_the_bytes_depend_on_no_block_worker_or_way_to_the_net(tmp_path: Path, placement: Placement) -> None:
    bytes_of = set()
    for i, (block, mode, slots) in enumerate([((1, 1, 2), "streamed", 1), ((1, 1, 2), "stored", 3)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        division = windowed((8, 10, 12), (4, 5, 7), block, "gaussian", placement)
        plan = planned(folder, grey((19, 33, 28)), "instance", *division, f"tensors.mode={mode}")
        bytes_of.add(ran(plan, seed=i, slots=slots).tobytes())
    assert len(bytes_of) == 1


def test_a_region_is_cut_from_the_output_of_the_whole(tmp_path: Path) -> None:
    data, outputs = grey((19, 33, 28)), []
    for name, more in (("whole", ()), ("part", ("input.roi=3:17,5:30,9:22",))):
        (tmp_path / name).mkdir()
        division = windowed((8, 10, 12), (4, 5, 7), (2, 1, 1), "gaussian", "edge")
        outputs.append(ran(planned(tmp_path / name, data, "group", *division, *more)))
    np.testing.assert_allclose(outputs[1], outputs[0][:, 3:17, 5:30, 9:22], rtol=0, atol=1e-6)


@pytest.mark.parametrize("placement", ["edge", "even"])
@pytest.mark.parametrize("shape", [(5, 9, 8), (17, 23, 31)])
def test_makers_weights_sum_to_one_at_every_voxel(placement: Placement, shape: tuple[int, int, int]) -> None:
    window, scale = (8, 9, 6), (2, 1, 1)
    lattice = Lattice(shape, window, (4, 6, 3), (2, 2, 2), placement=placement)
    assert importance(placement, window).min() > 0
    total = np.zeros([n * s for n, s in zip(shape, scale, strict=True)])
    for index in np.ndindex(*lattice.counts):
        around = triple(places_around(lattice, axis, i) for axis, i in enumerate(index))
        weights = makers_weights(placement, window, scale, around, "cpu").numpy()
        box = Box.from_shape(window).shift(lattice.window_start(index))
        inside = box & Box.from_shape(shape)
        part = weights[inside.relative_to(box.start).scaled(scale).slices]
        total[inside.scaled(scale).slices] += part
    np.testing.assert_allclose(total, 1, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "more"), [("classes", ()), ("image", ("output.activation=softmax",))])
def test_classes_and_probabilities_are_made_of_joined_windows(tmp_path: Path, kind: str, more: tuple[str, ...]) -> None:
    data = grey((18, 20, 22))
    (tmp_path / "raw").mkdir()
    numbers = ran(planned(tmp_path / "raw", data, "group"))
    plan = planned(tmp_path, data, "group", f"output.kind={kind}", *more)
    if kind == "classes":
        assert plan.dtype == np.uint8
        np.testing.assert_array_equal(ran(plan)[0], numbers.argmax(axis=0))
    else:
        raised = np.exp(numbers - numbers.max(axis=0))
        np.testing.assert_allclose(ran(plan), raised / raised.sum(axis=0), rtol=1e-5)


def test_one_channel_has_no_classes(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="takes the largest of several channels, and the net has one"):
        planned(tmp_path, grey((8, 8, 8)), "plain", "output.kind=classes")
