"""Which layers there are, how they are drawn, where the page begins, and how far a run is."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from urllib.parse import unquote
from urllib.request import urlopen

import numpy as np
import pytest
from arrays import make, write_all
from bucket import Bucket
from command import Give, begin, finish, giver, set_each, wait_until
from volumes import noise, windowed, write_volume

import volpipe as vp
from volpipe.blockwise.journal import Journal, Record
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS, Written
from volpipe.viewer import sources
from volpipe.viewer.layers import Layer, open_scene
from volpipe.viewer.objects import ObjectTable
from volpipe.viewer.progress import DONE, FAILED, RUNNING, WAITING, watch
from volpipe.viewer.state import make_state, shader
from volpipe.viewer.styles import IMAGE, colours
from volpipe.volumes.storage.object_store import Credentials
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, View, create_array, create_multiscale

ROWS = ("run", "--config", "threads", "-o", "out.zarr", "in.n5")
CHOICES = set_each(
    "net.name=identity", "output.shard=[8,16,16]", "output.chunk=[8,16,16]",
    *windowed((8, 16, 16), (0, 0, 0), (1, 1, 1), "crop"),
)  # fmt: skip
FAILING = """
import torch
class Net(torch.nn.Module):
    def forward(self, x):
        if ((x - (200 / 127.5 - 1)).abs() < 1e-3).sum() > 99:
            raise ValueError("this part is broken")
        return x
def build():
    net = Net()
    net.volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 16, 16), intensity="same"
    )
    return net
"""


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    return giver(tmp_path, monkeypatch, capsys)


def kinds(layers: tuple[Layer, ...]) -> list[tuple[str, str]]:
    return [(layer.name, layer.style.name) for layer in layers]


def test_inputs_come_first_and_the_difference_last(tmp_path: Path) -> None:
    raw = write_volume(tmp_path / "raw.n5", noise((8, 8, 8)))
    out = make(tmp_path / "out.zarr", noise((8, 8, 8)))
    labels = make(tmp_path / "labels.zarr", noise((8, 8, 8), "uint32"))
    scene = open_scene(out, [raw, labels])
    assert kinds(scene.layers) == [
        ("raw raw", "image"), ("labels", "labels"), ("out", "image"), ("out − raw raw", "difference"),
    ]  # fmt: skip
    names = (f"{raw}:raw", str(labels), str(out))
    assert scene.notes == tuple(
        f"{name}: voxel size unknown: places are in voxels, and there is no scale bar" for name in names
    )
    state = make_state(scene, "http://x")
    assert [panel["layers"] for row in state["layout"]["children"] for panel in row["children"]] == [
        ["raw raw"], ["raw raw", "labels"], ["out"], ["out − raw raw"],
    ]  # fmt: skip


def test_two_volumes_of_one_name_have_two_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first, second = make(tmp_path / "a.zarr", noise((8, 8, 8))), make(tmp_path / "b/a.zarr", noise((8, 8, 8)))
    assert [layer.name for layer in open_scene(first, [second]).layers] == ["a", "a (2)", "a (2) − a"]


@pytest.mark.parametrize(
    ("shape", "dtype", "key", "kind"),
    [
        ((4, 4, 4), "uint8", "raw", "image"), ((4, 4, 4), "uint16", "raw", "image"),
        ((4, 4, 4), "float32", "raw", "image"), ((4, 4, 4), "int64", "x", "labels"),
        ((4, 4, 4), "uint8", "labels", "labels"), ((4, 4, 4), "uint32", "raw", "labels"),
        ((3, 4, 4, 4), "float32", "affinities", "colours"), ((4, 4, 4), "float32", "labels", "image"),
    ],
)  # fmt: skip
def test_type_channels_and_name_tell_labels_from_images(
    tmp_path: Path, shape: tuple[int, ...], dtype: str, key: str, kind: str
) -> None:
    spec = ArraySpec(shape, np.dtype(dtype), shape, axes=("c", "z", "y", "x")[-len(shape) :])
    create_array(tmp_path / "a.n5", key, spec, "n5")
    write_all(tmp_path / "a.n5", key, noise(shape, dtype))
    (layer,) = open_scene(tmp_path / "a.n5" / key, ()).layers
    assert layer.style.name == kind


def test_labels_that_say_so_are_labels(tmp_path: Path) -> None:
    create_array(tmp_path / "a.zarr", "s0", ArraySpec((4, 4, 4), np.dtype(np.uint8), (4, 4, 4)), "zarr3")
    create_multiscale(tmp_path / "a.zarr", Multiscale((Level("s0"),), is_labels=True))
    assert open_scene(tmp_path / "a.zarr", ()).layers[0].style.name == "labels"


def test_the_shader_has_the_shades_and_the_channels() -> None:
    raster = sources.Raster((4, 4, 4), (1, 1, 1))
    assert "grey(range=[-3.5, 7], window=[-8.75, 12.25])" in shader(Layer("a", IMAGE, raster, shades=(-3.5, 7)))
    two, five = (shader(Layer("a", colours(n), raster, num_channels=n)) for n in (2, 5))
    assert "channel=1" in two and "channel=2" not in two and "channel=2" in five and "blue()" in five


def test_a_page_begins_at_the_voxel_that_is_asked_for_and_shows_all_of_a_slice(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noise((10, 20, 400)))
    volume = vp.open(tmp_path / "a.npy", view=View(voxel_size_nm=(40, 8, 4), origin_nm=(80, 0, -4)))
    scene = open_scene(volume, ())
    state = make_state(scene, "http://x", (3, 7, 11))
    assert state["position"] == [11 - 4 / 4, 7, 3 + 80 / 40]
    assert state["dimensions"] == {"x": [4e-9, "m"], "y": [8e-9, "m"], "z": [40e-9, "m"]}
    assert 400 * 4 / (state["crossSectionScale"] * 4) < 640  # pixels of a panel in a window of 1280
    with pytest.raises(vp.VolpipeError, match=r"--at 10,0,0 lies outside of a, which has 10 × 20 × 400 voxels"):
        vp.view(volume, at=(10, 0, 0))
    with pytest.raises(vp.VolpipeError, match="--at -1,0,0 lies outside"):
        vp.view(volume, at=(-1, 0, 0))


def test_a_difference_lies_where_both_are(tmp_path: Path) -> None:
    before, after = noise((8, 12, 16)), noise((4, 6, 8), seed=1)
    np.save(tmp_path / "raw.npy", before)
    np.save(tmp_path / "out.npy", after)
    raw = vp.open(tmp_path / "raw.npy", view=View(voxel_size_nm=(4, 4, 4), origin_nm=(100, 100, 100)))
    out = vp.open(tmp_path / "out.npy", view=View(voxel_size_nm=(4, 4, 4), origin_nm=(108, 96, 132)))
    source = sources.difference(raw, out)
    assert source is not None
    data = source.read(0, vp.Box((0, 0, 0), (4, 6, 8)))
    expected = np.full((4, 6, 8), sources.NOTHING)
    expected[:, 1:] = after[:, 1:].astype(float) - before[2:6, 0:5, 8:16]  # out's row 0 lies before the input
    np.testing.assert_array_equal(data, expected[np.newaxis])


@pytest.mark.parametrize(
    ("size", "origin", "reason"),
    [((2, 2, 2), (0, 0, 0), "have other voxels"), ((4, 4, 4), (1, 0, 0), "have other voxels"),
     ((4, 4, 4), (4000, 0, 0), "share no voxel")],
)  # fmt: skip
def test_a_difference_that_cannot_be_is_said(
    tmp_path: Path, size: tuple[float, float, float], origin: tuple[float, float, float], reason: str
) -> None:
    for name in ("raw.npy", "out.npy"):
        np.save(tmp_path / name, noise((4, 4, 4)))
    raw = vp.open(tmp_path / "raw.npy", view=View(voxel_size_nm=(4, 4, 4)))
    out = vp.open(tmp_path / "out.npy", view=View(voxel_size_nm=size, origin_nm=origin))
    scene = open_scene(out, [raw])
    assert len(scene.layers) == 2 and f"no difference is shown: raw and out {reason}" in scene.notes
    assert [note for note in scene.notes if "has voxels of 4 × 4 × 4 nm (z, y, x), their centres from" in note]


def test_volumes_in_a_bucket_are_read_by_the_browser_where_they_are_public(
    tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = f"s3://{bucket.name}/a.zarr"
    data = noise((8, 8, 8))
    create_array(location, "s0", ArraySpec(data.shape, data.dtype, (4, 4, 4)), "zarr3")
    write_all(location, "s0", data)  # type: ignore[arg-type]
    create_multiscale(location, Multiscale((Level("s0"),), voxel_size_nm=(4, 4, 4)))
    (private,) = open_scene(location, ()).layers
    assert private.source is not None and private.url == ""  # a browser has no keys: this process reads it
    np.testing.assert_array_equal(private.source.read(0, vp.Box((0, 0, 0), (8, 8, 8)))[0], data)  # type: ignore[attr-defined]
    volume, nobody = vp.open(location), Credentials("anonymous")
    moved = vp.open(location, view=View(voxel_size_nm=(5, 5, 5)))
    attributes = sources.read_attributes(sources.absolute(volume.path))
    monkeypatch.setattr(sources, "read_attributes", lambda folder: attributes)  # this bucket answers to keys alone
    monkeypatch.setattr(sources, "find_credentials", lambda: nobody)
    assert sources.public_url(volume) == f"{bucket.url}/{location[5:]}/|zarr3:"
    assert sources.public_url(moved) == ""  # which the metadata do not say


def test_an_output_that_is_complete_is_not_watched(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 16, 16)))
    assert give(*ROWS, *CHOICES).code == 0
    assert watch(str(tmp_path / "out.zarr")) is None
    scene = open_scene(tmp_path / "out.zarr", [tmp_path / "in.n5"])
    assert [layer.style.name for layer in scene.layers] == ["image", "image", "difference"]
    assert not any(layer.source.is_live for layer in scene.layers if layer.source is not None)


def test_blocks_that_failed_and_that_are_done_are_marked(tmp_path: Path, give: Give) -> None:
    data = noise((8, 32, 48))
    data[0, 16:, 16:32] = 200
    write_volume(tmp_path / "in.n5", data)
    (tmp_path / "net.py").write_text(FAILING)
    choices = [choice.replace("identity", "net.py:build") for choice in CHOICES]
    assert give(*ROWS, *choices, "--tolerate", "0.9").code == 1
    run = watch(str(tmp_path / "out.zarr"))
    assert run is not None
    progress = run.look()
    np.testing.assert_array_equal(progress.cells, [[[DONE] * 3, [DONE, FAILED, DONE]]])
    written = np.ones((8, 32, 48), bool)
    written[:, 16:, 16:32] = False
    np.testing.assert_array_equal(run.written(vp.Box((0, 10, 5), (8, 30, 40))), written[:, 10:30, 5:40])
    assert progress.sentence == "5 of 6 shards written, 1 failed, nobody works on it"
    with vp.view(tmp_path / "out.zarr") as viewer:
        before = json.loads(urlopen(f"{viewer.url}progress", timeout=20).read())
        with Journal(run.folder.journal, RESULTS) as journal:  # as a later session would, after mending
            journal.append(Record("infer", (4,), result=Written(((0, 4, "00000000"),))))
        after = json.loads(urlopen(f"{viewer.url}progress", timeout=20).read())
    assert (run.look().cells == DONE).all()
    assert before["sentence"] == progress.sentence and after["sentence"] == "6 of 6 shards written"
    assert before["version"] != after["version"]


def test_a_difference_from_an_output_under_way_has_nothing_where_that_is_not_written(
    tmp_path: Path, give: Give
) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 16, 32)))
    make(tmp_path / "other.zarr", noise((8, 16, 32), seed=1))
    assert give(*ROWS, *CHOICES, "--only", "0:8,0:16,0:16").code == 0
    layer = next(layer for layer in open_scene("other.zarr", ["out.zarr"]).layers if layer.style.name == "difference")
    assert isinstance(layer.source, sources.Chunks) and layer.source.is_live
    shown = layer.source.read(0, vp.Box((0, 0, 0), (8, 16, 32)))
    expected = noise((8, 16, 32), seed=1).astype(np.float32) - noise((8, 16, 32))
    expected[:, :, 16:] = sources.NOTHING
    np.testing.assert_array_equal(shown, expected[np.newaxis])


def test_greys_of_an_output_are_measured_once_it_has_voxels(tmp_path: Path, give: Give) -> None:
    data = noise((8, 16, 32))
    write_volume(tmp_path / "in.n5", data)
    assert give(*ROWS, *CHOICES, *set_each("output.dtype=float32")).code == 0
    journal = RunFolder.from_output(tmp_path / "out.zarr").journal
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"")
    with vp.view(tmp_path / "out.zarr") as viewer:
        assert json.loads(urlopen(f"{viewer.url}progress", timeout=20).read())["late"] == {}
        journal.write_bytes(lines[0])  # one of two shards
        late = json.loads(urlopen(f"{viewer.url}progress", timeout=20).read())["late"]
    boxes = [data[:, :, :16], data[:, :, 16:]]
    ranges = [np.percentile(box, [0.5, 99.5]) for box in boxes]
    assert any(late["out s0"]["grey"]["range"] == pytest.approx(each) for each in ranges)


def test_images_of_other_greys_have_no_difference(tmp_path: Path) -> None:
    raw = make(tmp_path / "raw.zarr", noise((8, 8, 8)))
    for name, factor, kinds_ in (("same", 1.0, ["image", "image", "difference"]), ("raw", 1e-3, ["image", "image"])):
        out = make(tmp_path / f"{name}_out.zarr", noise((8, 8, 8), seed=1).astype(np.float32) * factor)
        scene = open_scene(out, [raw])
        assert [layer.style.name for layer in scene.layers] == kinds_
        said = [note for note in scene.notes if note.startswith("no difference is shown: raw has greys of uint8 from")]
        assert len(said) == 3 - len(kinds_)


def test_a_run_folder_that_cannot_be_understood_hides_no_output(tmp_path: Path) -> None:
    make(tmp_path / "out.zarr", noise((8, 8, 8)))
    (tmp_path / "out.zarr.run").mkdir()
    (tmp_path / "out.zarr.run/plan.json").write_text("{}")
    scene = open_scene(tmp_path / "out.zarr", ())
    assert scene.layers[0].run is None
    assert any("plan.json cannot be understood" in note and "is shown as it is now" in note for note in scene.notes)


def test_a_journal_that_is_begun_anew_is_read_anew(tmp_path: Path, give: Give) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 16, 32)))
    assert give(*ROWS, *CHOICES).code == 0
    folder = RunFolder.from_output(tmp_path / "out.zarr")
    lines = folder.journal.read_bytes().splitlines(keepends=True)
    folder.journal.write_bytes(lines[0])
    run = watch(str(tmp_path / "out.zarr"))
    assert run is not None and sorted(run.look().cells.ravel()) == [WAITING, DONE]
    folder.journal.write_bytes(b"")
    assert (run.look().cells == WAITING).all() and not run.written(vp.Box((0, 0, 0), (8, 16, 32))).any()
    folder.journal.write_bytes(lines[0] + lines[1][:-1])  # the last line is not whole yet
    assert sorted(run.look().cells.ravel()) == [WAITING, DONE]
    with folder.journal.open("ab") as file:
        file.write(b"\n")
    assert (run.look().cells == DONE).all()
    assert RUNNING not in run.look().cells


def test_objects_are_listed_with_their_voxels_and_boxes(tmp_path: Path) -> None:
    labels = np.zeros((4, 6, 8), np.uint32)
    labels[1:3, 2:5, 3:4] = 1
    make(tmp_path / "a.zarr", labels.astype(np.float32))
    choices = ["input.kind=foreground", "objects.method=components"]
    vp.segment(tmp_path / "a.zarr", out=tmp_path / "out.zarr", site="threads", settings=choices)
    with vp.view(tmp_path / "out.zarr") as viewer:
        table = json.loads(urlopen(f"{viewer.url}still/0/objects/info", timeout=20).read())
        state = json.loads(unquote(viewer.link.partition("#!")[2]))
    names = {entry["id"]: entry["values"] for entry in table["inline"]["properties"]}
    with (tmp_path / "out.zarr.run/objects.csv").open() as file:
        rows = file.read().splitlines()[1:]
    assert len(table["inline"]["ids"]) == len(rows) > 0
    assert names["voxels"][0] == max(int(row.split(",")[1]) for row in rows)
    z, y, x = (slice(*map(int, part.split(":"))) for part in names["object"][0].partition(", ")[0].split(","))
    out = vp.open(tmp_path / "out.zarr")[...]
    assert np.count_nonzero(out[z, y, x] == int(table["inline"]["ids"][0])) == names["voxels"][0]
    schemes = [source["url"].rpartition("|")[2] for source in state["layers"][0]["source"]]
    assert schemes == ["zarr3:", "neuroglancer-precomputed:", "neuroglancer-precomputed:"]  # voxels, table, surfaces


def test_the_surface_of_an_object_encloses_its_voxels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = np.zeros((6, 8, 10), bool)
    mask[1:3, 2:6, 3:4], mask[2, 3, 4:9], mask[5, 0, 0] = True, True, True
    np.save(tmp_path / "a_labels.npy", mask.astype(np.uint32) * 7)
    volume = vp.open(tmp_path / "a_labels.npy", view=View(voxel_size_nm=(30, 6, 8), origin_nm=(60, 3, 100)))
    (tmp_path / "t.csv").write_text("label,voxels,z0,y0,x0,z1,y1,x1\n7,14,1,0,0,6,6,9\n")
    objects = ObjectTable(tmp_path / "t.csv", volume)
    assert json.loads(objects.answer("mesh/7:0") or b"") == {"fragments": ["7"]}
    data = objects.answer("mesh/7") or b""
    count = int(np.frombuffer(data, "<u4", 1)[0])
    vertices = np.frombuffer(data, "<f4", 3 * count, 4).reshape(-1, 3).astype(float)
    triangles = vertices[np.frombuffer(data, "<u4", offset=4 + 12 * count).reshape(-1, 3)]
    # The volumes that outward triangles span with the origin add up to that of the object.
    assert np.linalg.det(triangles).sum() / 6 == pytest.approx(np.count_nonzero(mask) * 30 * 6 * 8)
    np.testing.assert_allclose(vertices.min(0), [100 - 4, 3 - 3, 60 + 30 - 15])
    np.testing.assert_allclose(vertices.max(0), [100 + 8.5 * 8, 3 + 5.5 * 6, 60 + 5.5 * 30])
    assert len(np.unique(vertices, axis=0)) == count  # shared by the faces that meet there
    assert objects.answer("mesh/8") is None and objects.answer("mesh/../7") is None
    monkeypatch.setattr("volpipe.viewer.objects.MESH_VOXELS", 10)
    with pytest.raises(vp.VolpipeError, match="object 7 is too large to be drawn"):
        objects.answer("mesh/7")


@pytest.mark.usefixtures("_no_process_outlives_a_test")
def test_the_command_prints_the_address_and_how_to_get_there_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 16, 16)))
    way = {"SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22", "DISPLAY": "", "WAYLAND_DISPLAY": ""}
    process = begin(tmp_path, "view", "in.n5", "--at", "1,2,3", "--link", **way)
    wait_until(lambda: "Ctrl-C" in (tmp_path / "err.txt").read_text() or process.poll() is not None, 60)
    page, _, state = (tmp_path / "out.txt").read_text().strip().partition("#!")
    assert json.loads(unquote(state))["position"] == [3, 2, 1]
    assert b"<title>volpipe" in urlopen(page, timeout=20).read()
    process.send_signal(signal.SIGINT)
    ended = finish(tmp_path, process)
    assert ended.code == 0 and ended.out.count("\n") == 1
    port = page.split(":")[2].split("/")[0]
    assert f"ssh -L {port}:127.0.0.1:{port} " in ended.err and "@10.0.0.2\n" in ended.err
    assert "voxel size unknown: places are in voxels" in ended.err and ended.err.endswith("Ctrl-C ends it\nclosed\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing.zarr"], "no volume at"),
        (["in.n5", "nothing.zarr"], "no volume at"),
        (["in.n5", "--at", "1,2"], "write three whole numbers, z,y,x, such as 24,512,512"),
        (["in.n5", "--at", "1,2,99"], "lies outside of in raw, which has 8 × 16 × 16 voxels (z, y, x), from 0"),
        (["in.n5", "--bind", "here"], "write a port, such as 8765, or an address and a port"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, give: Give, arguments: list[str], sentence: str) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 16, 16)))
    ended = give("view", *arguments)
    assert ended.code == 2 and sentence in ended.err


def test_without_the_client_it_is_said_how_to_install_it(
    tmp_path: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_volume(tmp_path / "in.n5", noise((8, 16, 16)))
    monkeypatch.setattr("volpipe.viewer.site.find_spec", lambda name: None)
    ended = give("view", "in.n5")
    assert ended.code == 2 and "pip install 'volpipe[view]'" in ended.err


def test_precomputed_is_read_by_us_while_it_is_made_and_by_the_browser_then(tmp_path: Path, give: Give) -> None:
    np.save(tmp_path / "in.npy", noise((8, 16, 32)))
    assert give("convert", "--voxel-size-nm", "30,6,8", "in.npy", "in.n5").code == 0
    choices = ["out.precomputed" if choice == "out.zarr" else choice for choice in (*ROWS, *CHOICES)]
    assert "out.precomputed" in choices and give(*choices).code == 0
    (whole,) = open_scene(tmp_path / "out.precomputed", ()).layers
    assert (whole.source.scheme, whole.run) == ("neuroglancer-precomputed", None)
    journal = RunFolder.from_output(tmp_path / "out.precomputed").journal
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0])
    growing, progress = open_scene(tmp_path / "out.precomputed", ()).layers
    assert (growing.source.is_live, growing.run is not None, progress.style.name) == (True, True, "progress")
