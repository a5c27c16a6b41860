"""Run lengths by skeletons are those of a loop over edges and those by hand; files of each kind are read alike."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from command import Give, giver
from inline import Inline
from scored import Workers, evaluated

import volpipe as vp
from volpipe.errors import PlanError, RecipeError, VolumeError
from volpipe.evaluation.evaluate import plan_evaluation
from volpipe.evaluation.run_lengths import Nodes
from volpipe.evaluation.score import Scores
from volpipe.evaluation.scores import skeleton_scores
from volpipe.evaluation.skeletons import Skeletons, read_skeletons
from volpipe.volumes.volume import open_volume

SIZE, ORIGIN = (30.0, 4.0, 8.0), (60.0, 0.0, 16.0)  # nm (z, y, x)
SHAPE = (6, 20, 24)


@pytest.fixture(autouse=True)
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """Return what gives a command in a folder of the test, where all works."""
    monkeypatch.chdir(tmp_path)
    return giver(tmp_path, monkeypatch, capsys)


def write_labels(labels: np.ndarray, name: str = "labels") -> None:
    """Store `labels` (z, y, x) here, in labels.h5, with SIZE and ORIGIN."""
    with h5py.File("labels.h5", "a") as file:
        file.create_dataset(name, data=labels).attrs.update(resolution=SIZE, offset=ORIGIN)


def write_swc(file: str, voxels: list[tuple[float, float, float]], scale: float = 1.0) -> None:
    """Write a neurite through `voxels` (z, y, x) to `file`, which names x first."""
    lines = ["# made up"]
    for i, voxel in enumerate(voxels):
        z, y, x = ((o + s * v) * scale for o, s, v in zip(ORIGIN, SIZE, voxel, strict=True))
        lines.append(f"{i + 1} 0 {x:g} {y:g} {z:g} 1.0 {i or -1}")
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text("\n".join(lines))


def neurites() -> None:
    """Write two neurites along x, of 10 steps of 16 nm and of 5, and labels with an error of each kind on them.

    nodes   0    1    2    3    4    5    6    7    8    9    10
    long    7    7    7    7    9    9    0    9    9    3    3
    short   3    3    5    5    5    5
    """
    labels = np.zeros(SHAPE, np.uint32)
    labels[2, 5, 0:21:2] = [7, 7, 7, 7, 9, 9, 0, 9, 9, 3, 3]
    labels[4, 15, 0:11:2] = [3, 3, 5, 5, 5, 5]
    write_labels(labels)
    write_swc("truth/long.swc", [(2, 5, 2 * i) for i in range(11)])
    write_swc("truth/short.swc", [(4, 15, 2 * i) for i in range(6)])


BLOCKS = [(128, 128, 128), (3, 7, 5)]


@pytest.mark.parametrize("block", BLOCKS)
def test_run_lengths_are_those_by_hand_whatever_the_blocks(block: tuple[int, int, int]) -> None:
    """Runs: of 7 three steps; of 9 one, and one beyond the gap; of 5 three. Label 3 is in both, so that it has none."""
    neurites()
    scores = evaluated(names=("labels.h5/labels", None), kind="skeletons", skeletons="truth", block=block).scores
    assert isinstance(scores, Scores)
    step, total = 16.0, 15 * 16.0
    assert scores.erl == pytest.approx((3**2 + 2**2 + 3**2) * step**2 / total)
    assert scores.max_erl == pytest.approx((10**2 + 5**2) * step**2 / total)
    assert scores.nerl == pytest.approx(22 / 125)
    assert (scores.correct, scores.split, scores.merged, scores.omitted, scores.mergers) == (8, 3, 2, 2, 1)
    of = {each.name: each for each in scores.neurons}
    assert (of["long"].correct, of["long"].split, of["long"].merged, of["long"].omitted) == (5, 2, 1, 2)
    assert (of["short"].length, of["short"].run_length) == (pytest.approx(5 * step), pytest.approx(9 * step / 5))


def test_labels_that_are_ignored_are_background() -> None:
    neurites()
    scores = evaluated(names=("labels.h5/labels", None), kind="skeletons", skeletons="truth", ignore=3).scores
    assert isinstance(scores, Scores)
    assert (scores.correct, scores.split, scores.merged, scores.omitted, scores.mergers) == (8, 1, 0, 6, 0)


def test_blocks_that_were_lost_are_scored_by_the_same_call() -> None:
    neurites()
    options: dict[str, Any] = {"kind": "skeletons", "skeletons": "truth", "block": (3, 7, 5)}
    lost = evaluated(Workers(broken=0), names=("labels.h5/labels", None), **options)
    assert lost.scores is None and [part.unit for part in lost.missing] == [0]
    again = Workers()
    scores = evaluated(again, names=("labels.h5/labels", None), **options).scores
    assert again.blocks == [0] and isinstance(scores, Scores) and scores.correct == 8


def by_a_loop(names: list[str], nodes: list[tuple[str, int]], edges: dict[tuple[int, int], float]) -> dict[str, Any]:
    """Return the scores of nodes (neuron, label), of connected neurons, edge by edge."""
    neurons_of = defaultdict(set)
    for neuron, label in nodes:
        neurons_of[label].add(neuron)
    length, runs = dict.fromkeys(names, 0.0), defaultdict(float)
    kinds = {name: dict.fromkeys(("correct", "split", "merged", "omitted"), 0) for name in names}
    for (a, b), long in edges.items():
        (neuron, one), (_, other) = nodes[a], nodes[b]
        length[neuron] += long
        merged = len(neurons_of[one]) > 1
        kind = "omitted" if 0 in (one, other) else "split" if one != other else "merged" if merged else "correct"
        kinds[neuron][kind] += 1
        if kind == "correct":
            runs[neuron, one] += long
    total = sum(length.values())
    erl = {name: sum(run**2 for (of, _), run in runs.items() if of == name) for name in names}
    return {
        "erl": sum(erl.values()) / total,
        "max_erl": sum(long**2 for long in length.values()) / total,
        "neurons": {name: (length[name], erl[name] / length[name], *kinds[name].values()) for name in names},
    }


@pytest.mark.parametrize("seed", range(8))
def test_run_lengths_of_random_trees_are_those_of_a_loop_over_edges(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names, nodes, edges = [f"n{i}" for i in range(rng.integers(1, 7))], list[tuple[str, int]](), {}
    for i, name in enumerate(names):
        first = len(nodes)
        for j in range(rng.integers(2, 60)):
            label = rng.choice([i + 1, 100 + i, 0, rng.integers(1, 9)], p=[0.8, 0.1, 0.05, 0.05])
            nodes.append((name, int(label)))
            if j:
                edges[first + int(rng.integers(0, j)), first + j] = float(rng.uniform(1, 90))
    labels = np.array([label for _, label in nodes], np.uint64) << np.uint64(40)
    table = Nodes(
        np.array(names), np.array([names.index(name) for name, _ in nodes]), np.zeros((len(nodes), 3), np.int64),
        np.zeros(len(nodes), np.int64), np.array(list(edges)), np.array(list(edges.values())),
    )  # fmt: skip
    scores, known = skeleton_scores(table, labels), by_a_loop(names, nodes, edges)
    assert (scores.erl, scores.max_erl) == pytest.approx((known["erl"], known["max_erl"]))
    found = {n.name: (n.length, n.run_length, n.correct, n.split, n.merged, n.omitted) for n in scores.neurons}
    assert found.keys() == known["neurons"].keys()
    for name, numbers in known["neurons"].items():
        assert found[name] == pytest.approx(numbers)


def test_a_neuron_that_the_box_cuts_in_two_is_no_split_and_no_merge() -> None:
    """A neurite leaves the box along x and comes back; labels may call both parts one object, or two."""
    write_swc("bow.swc", [(1, 2, x) for x in range(10)] + [(1, 6, x) for x in range(9, -1, -1)])
    write_labels(np.ones(SHAPE, int), "one")
    write_labels(np.ones(SHAPE, int) + (np.arange(20) > 4)[:, None], "two")
    for name in ("one", "two"):
        options = {"kind": "skeletons", "skeletons": "bow.swc", "roi": "0:6,0:9,0:8"}
        result = evaluated(names=(f"labels.h5/{name}", None), block=(3, 3, 3), **options)
        assert isinstance(result.scores, Scores)
        assert "4 of 20 nodes, of 1 neuron, lie outside box 0:6,0:9,0:8" in result.notes[0]
        assert (result.scores.nerl, result.scores.correct, result.scores.erl) == (1, 14, pytest.approx(7 * 8))


def test_skeletons_without_an_edge_in_the_box_have_no_run_length() -> None:
    write_labels(np.ones(SHAPE, np.uint8))
    write_swc("a.swc", [(1, 2, 3), (1, 40, 3)])
    scores = evaluated(names=("labels.h5/labels", None), kind="skeletons", skeletons="a.swc").scores
    assert isinstance(scores, Scores)
    assert np.isnan([scores.erl, scores.nerl]).all() and len(scores.neurons) == 1


# ---- files

NAMES, XYZ = ("8", "15"), np.array([[1, 2, 3], [1, 2, 4.5], [7, 8, 9], [7, 8, 10], [7, 9, 9]], float)
LINKS = {"8": [(0, 1)], "15": [(2, 3), (2, 4)]}


def precomputed(folder: Path, scale: float = 1.0, *, zipped: bool = False) -> None:
    folder.mkdir(parents=True)
    transform = [1 / scale, 0, 0, 0, 0, 1 / scale, 0, 0, 0, 0, 1 / scale, 0]
    (folder / "info").write_text(json.dumps({"@type": "neuroglancer_skeletons", "transform": transform}))
    for name, part, first in (("8", XYZ[:2], 0), ("15", XYZ[2:], 2)):
        edges = np.array(LINKS[name], "<u4") - np.uint32(first)
        data = struct.pack("<II", len(part), len(edges)) + (part * scale).astype("<f4").tobytes() + edges.tobytes()
        data += part.astype("<f4").tobytes()  # an attribute
        (folder / f"{name}.gz" if zipped else folder / name).write_bytes(gzip.compress(data) if zipped else data)


def write_as(kind: str) -> str:
    """Store the skeletons as files of a `kind`, and return their path."""
    parent = {b: a for pairs in LINKS.values() for a, b in pairs}
    of = ["8", "8", "15", "15", "15"]
    if kind in ("swc", "SWC"):
        Path("s").mkdir()
        for name in NAMES:
            rows = [f"{i} 3 {x} {y} {z} 1 {parent.get(i, -1)}" for i, (x, y, z) in enumerate(XYZ) if of[i] == name]
            Path(f"s/{name}.{kind}").write_text("\ufeff# c\r\n\r\n" + "\r\n".join(rows) + "  # end\n", encoding="utf-8")
        return "s"
    if kind == "csv":
        rows = [f"{of[i]}, {i}, {parent.get(i, '')}, {x}, {y}, {z}" for i, (x, y, z) in enumerate(XYZ)]
        Path("s.csv").write_text("\n".join(["skeleton_id, treenode_id, parent_treenode_id, x, y, z", *rows]))
        return "s.csv"
    if kind == "tables":
        Path("s").mkdir()
        rows = [f"{x},{y},{z},{of[i]},n{i}" for i, (x, y, z) in enumerate(XYZ)]
        Path("s/nodes.csv").write_text("\ufeff" + "\n".join(["x,y,z,skeleton,node", *rows]), encoding="utf-8")
        pairs = [f"n{a},n{b}" for links in LINKS.values() for a, b in links]
        Path("s/edges.csv").write_text("\n".join(["source,target", *pairs]))
        return "s"
    precomputed(Path("s"), 4.0, zipped=kind == "zipped")
    if kind == "volume":
        Path("v").mkdir()
        Path("s").rename("v/skeletons")
        Path("v/info").write_text(json.dumps({"type": "segmentation", "skeletons": "skeletons"}))
        return "v"
    return "s"


@pytest.mark.parametrize("kind", ["swc", "SWC", "csv", "tables", "precomputed", "zipped", "volume"])
def test_skeletons_are_the_same_from_files_of_each_kind(kind: str) -> None:
    read = read_skeletons(write_as(kind))
    assert sorted(read.names) == ["15", "8"]
    pairs = {tuple(map(tuple, read.positions[edge])) for edge in read.edges}
    expected = {tuple(tuple(XYZ[i][::-1]) for i in edge) for links in LINKS.values() for edge in links}
    assert {frozenset(pair) for pair in pairs} == {frozenset(pair) for pair in expected}
    names = {tuple(position): read.names[i] for position, i in zip(read.positions, read.neurons, strict=True)}
    assert [names[tuple(xyz[::-1])] for xyz in XYZ] == ["8", "8", "15", "15", "15"]


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"notes.txt": "none"}, r"there are no skeletons at s; name an SWC file"),
        ({"a.swc": "# nothing"}, r"have no nodes"),
        ({"a.swc": "1 0 1 2 3 1"}, r"a\.swc: a line is not `id type x y z radius parent`"),
        ({"a.swc": "1 0 1 2 nan 1 -1"}, r"whose position is no number"),
        ({"a.swc": "1 0 1 2 3 1 -1\n2 0 1 2 3 1 7"}, r"the edge from 2 to 7 leads to no other node"),
        ({"a.swc": "1 0 1 2 3 1 -1\n1 0 1 2 3 1 1"}, r"node 1 is there twice"),
        (
            {"a.swc": "1 0 1 2 3 1 1"},
            r"the edge from 1 to 1 .* \(the parent of a root is -1\)",
        ),
        ({"nodes.csv": "node,x,y,z\n", "edges.csv": ""}, r"nodes\.csv has no column skeleton; it needs skeleton, node"),
        ({"info": '{"@type": "neuroglancer_skeletons", "sharding": {}}'}, r"are sharded, which is not read"),
        ({"info": '{"type": "segmentation"}'}, r"is a volume without skeletons"),
        ({"info": '{"@type": "neuroglancer_skeletons"}', "7": "abc"}, r"7 is no precomputed skeleton, or is cut short"),
    ],
)
def test_files_that_hold_no_skeletons_are_refused(files: dict[str, str], sentence: str) -> None:
    Path("s").mkdir()
    for name, text in files.items():
        Path("s", name).write_text(text)
    with pytest.raises(VolumeError, match=sentence):
        read_skeletons("s")
    with pytest.raises(VolumeError, match=r"there are no skeletons at b.obj; name an SWC file"):
        Path("b.obj").touch()
        read_skeletons("b.obj")


# ---- places


@pytest.mark.parametrize(
    ("scale", "sentence"),
    [
        (
            9.0,
            r"no node of the skeletons lies in box .*: nodes lie from 1080 × .* nm \(z, y, x\), and the output .* to ",
        ),
        (1e-3, r"no node of the skeletons lies"),
    ],
)
def test_skeletons_that_lie_elsewhere_are_refused_with_both_extents(scale: float, sentence: str) -> None:
    neurites()
    write_swc("other.swc", [(2, 5, x) for x in range(9)], scale)
    with pytest.raises(PlanError, match=sentence):
        plan_evaluation("labels.h5/labels", None, kind="skeletons", skeletons="other.swc")


def test_positions_in_another_unit_are_refused() -> None:
    np.save("labels.npy", np.ones(SHAPE, np.uint8))
    with pytest.raises(PlanError, match=r"labels\.npy has no voxel size, so that nobody knows where nodes"):
        write_swc("a.swc", [(0, 0, 0), (1, 1, 1)])
        plan_evaluation("labels.npy", None, kind="skeletons", skeletons="a.swc")
    with h5py.File("flat.h5", "a") as file:
        file.create_dataset("labels", data=np.ones(SHAPE, np.uint8)).attrs.update(resolution=SIZE)
    Path("um.swc").write_text("1 0 0 0 0 1 -1\n2 0 0.01 0 0 1 1\n3 0 0.02 0.01 0 1 2")
    with pytest.raises(PlanError, match=r"shorter than 0\.00\d+ voxels: .* multiply those that are in µm by 1000"):
        plan_evaluation("flat.h5/labels", None, kind="skeletons", skeletons="um.swc")
    for scale, is_said in ((1, True), (10, False)):
        Path("voxels.swc").write_text("".join(f"{i + 1} 0 {8 * i * scale} 0 0 1 {i or -1}\n" for i in range(3)))
        notes = plan_evaluation("flat.h5/labels", None, kind="skeletons", skeletons="voxels.swc").notes
        assert any("multiply those in voxels by their size" in note for note in notes) == is_said


@pytest.mark.parametrize(
    ("reference", "options", "sentence"),
    [
        ("labels.h5/labels", {"skeletons": "truth"}, r"skeletons at truth stand in for a reference; leave labels"),
        (None, {"skeletons": "labels"}, r"reference is missing; give a text, or skeletons in files"),
        (None, {"labels": True}, r"reference is missing"),
        ("labels.h5/labels", {"labels": True, "classes": True}, r"labels and classes are of different scores"),
    ],
)
def test_a_reference_is_named_where_there_are_no_skeletons_in_files(
    reference: str | None, options: dict[str, Any], sentence: str
) -> None:
    neurites()
    with pytest.raises(RecipeError, match=sentence):
        vp.evaluate("labels.h5/labels", reference, site="threads", **options)


# ---- of labels


def test_skeletons_of_the_reference_lie_where_its_labels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of kimimaro: the line of each label, in nm along the axes of the array, as kimimaro returns it."""
    seen = []

    def skeletonize(labels: np.ndarray, anisotropy: tuple[float, ...], **options: Any) -> dict[int, SimpleNamespace]:
        seen.append((np.unique(labels).tolist(), anisotropy, options))
        made = {}
        for label in np.unique(labels[labels > 0]).tolist():
            vertices = np.argwhere(labels == label).astype(np.float32) * np.float32(anisotropy)
            edges = np.stack([np.arange(len(vertices) - 1), np.arange(1, len(vertices))], axis=1).astype(np.uint32)
            made[label] = SimpleNamespace(vertices=vertices, edges=edges)
        return made

    truth = np.zeros(SHAPE, np.uint16)
    truth[2, 5, 3:20], truth[3, 7, 2:12], truth[4, 1, 0:9] = 4, 6, 0xFFFE
    write_labels(truth, "truth")
    write_labels(np.where(np.arange(24) < 12, truth, truth * 2))
    monkeypatch.setitem(sys.modules, "kimimaro", SimpleNamespace(skeletonize=skeletonize))
    names = ("labels.h5/labels", "labels.h5/truth")
    result = evaluated(names=names, kind="skeletons", skeletons="labels", roi="1:6,2:20,1:24", ignore=0xFFFE)
    assert isinstance(result.scores, Scores)
    assert seen == [([0, 4, 6], SIZE, {"progress": False, "parallel": 1})]
    assert {n.name: (n.correct, n.split, n.omitted) for n in result.scores.neurons} == {"4": (15, 1, 0), "6": (9, 0, 0)}
    assert result.scores.length == pytest.approx((16 + 9) * 8)
    monkeypatch.setitem(sys.modules, "kimimaro", None)
    with pytest.raises(PlanError, match=r"are made by kimimaro: pip install 'volpipe\[skeletons\]'"):
        evaluated(names=names, kind="skeletons", skeletons="labels")


def test_labels_that_are_too_many_to_skeletonise_are_refused_before() -> None:
    np.lib.format.open_memmap("large.npy", "w+", np.uint8, (700, 700, 700))  # a hole on disk
    with pytest.raises(PlanError, match=r"up to 268,435,456 voxels, and box .* has 343,000,000; give a smaller --roi"):
        plan_evaluation("large.npy", "large.npy", kind="skeletons", skeletons="labels")


# ---- the command, and files that change


def test_the_command_prints_scores_and_writes_them_to_json_and_the_page(give: Give) -> None:
    neurites()
    command = ("evaluate", "labels.h5/labels", "--skeletons", "truth", "--config", "threads")
    ended = give(*command, "--json", "s.json", "--report", "r.html")
    assert ended.code == 0, ended.err
    lines = [" ".join(line.split()) for line in ended.out.splitlines()]
    assert "normalised (NERL) 0.1760" in lines and "correct edges 8 (53.3 %)" in lines
    assert "long 160 20.8 5 2 1 2" in lines
    written = json.loads(Path("s.json").read_text())
    assert written["scores"]["output"]["nerl"] == pytest.approx(22 / 125) and "reference" not in written
    assert [n["name"] for n in written["scores"]["output"]["neurons"]] == ["long", "short"]
    page = Path("r.html").read_text()
    assert "The evaluation against truth." in page and "Neurons" in page and "run length" in page
    assert give(*command, "--labels").err.startswith("volpipe: labels and skeletons are of different scores")


def test_skeletons_that_change_meanwhile_are_looked_at_again() -> None:
    neurites()
    evaluation = plan_evaluation("labels.h5/labels", None, kind="skeletons", skeletons="truth")
    write_swc("truth/short.swc", [(4, 15, x) for x in range(5)])
    with pytest.raises(PlanError, match=r"truth has changed since it was looked at"):
        evaluation.with_nodes(Path("nodes.npz")).store_nodes()
    volume, skeletons = open_volume("labels.h5/labels"), read_skeletons("truth")
    assert isinstance(skeletons, Skeletons)
    table = Nodes.placed(skeletons, volume, evaluation.box, (3, 7, 5))
    table.store(Path("nodes.npz"))
    np.testing.assert_array_equal(Nodes.load(Path("nodes.npz")).voxels, table.voxels)


def test_a_stage_scores_by_skeletons_again_where_these_have_changed() -> None:
    neurites()
    Path("flow.toml").write_text('[[stage]]\nname = "scores"\nkind = "evaluate"\nskeletons = "truth"\n')
    found = []
    for step in (1, 1, 2):
        write_swc("truth/short.swc", [(4, 15, step * i) for i in range(6)])
        vp.run("labels.h5/labels", "flow.toml", out="out", site=Inline())
        scores = json.loads(Path("out/scores.json").read_text())["scores"]["output"]
        found.append({each["name"]: each["length"] for each in scores["neurons"]}["short"])
    assert found == pytest.approx([40, 40, 80])


def test_nodes_that_are_stored_as_code_are_not_loaded(tmp_path: Path) -> None:
    """A folder of scores may come from somebody else."""
    code = np.array([SimpleNamespace(), None], dtype=object)
    np.savez(tmp_path / "nodes.npz", **dict.fromkeys(Nodes.__dataclass_fields__, code))
    with pytest.raises(ValueError, match="Object arrays cannot be loaded when allow_pickle=False"):
        Nodes.load(tmp_path / "nodes.npz")
