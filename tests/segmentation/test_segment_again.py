"""Labels made again: pieces of random blocks by `volpipe verify`, all of them by what `volpipe reproduce` prints."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from arrays import make
from command import THREADS, Ended, Give, giver, set_each
from hypothesis import given, settings
from hypothesis import strategies as st
from volumes import fingerprint, noise

from volpipe.geometry.affinities import affinities
from volpipe.geometry.grid import Box
from volpipe.geometry.levels import level_shape
from volpipe.inference.output_plan import levels_of
from volpipe.recipes.segmentation import NEAREST
from volpipe.segmentation.verify import num_misfits
from volpipe.volumes.volume import Multiscale, create_multiscale, open_volume, open_writer

SHAPE, BLOCKS = (13, 16, 11), 2 * 2 * 2
SIZES = set_each("output.block=[8,8,8]", "output.chunk=[4,4,4]")
NEAR = set_each(f"input.offsets={list(map(list, NEAREST))}")
COMPONENTS = set_each("objects.method=components", "objects.threshold=0.9")


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    """The command; affinities of noise lie at a.zarr, a map of noise at m.zarr."""
    make(tmp_path / "a.zarr", noise((9, *SHAPE)), chunks=(9, 8, 8, 8))
    make(tmp_path / "m.zarr", noise(SHAPE), chunks=(8, 8, 8))
    return giver(tmp_path, monkeypatch, capsys)


def label(give: Give, source: str, *options: str, out: str = "l.zarr") -> None:
    ended = give("segment", source, "-o", out, *THREADS, *SIZES, *options)
    assert ended.code == 0, ended.err


def blocks_in(ended: Ended) -> dict[int, str]:
    """Return what a verification said of each block that it computed again."""
    lines = re.findall(r"^block (\d+) \(s0 (\S+)\): (.*)$", ended.out, re.MULTILINE)
    assert len(lines) == ended.out.count("block ")
    for number, box, _ in lines:
        starts = (8 * int(n) for n in np.unravel_index(int(number), (2, 2, 2)))
        assert box == ",".join(f"{a}:{min(a + 8, n)}" for a, n in zip(starts, SHAPE, strict=True))
    return {int(number): said for number, _, said in lines}


# ---- pieces of random blocks


@pytest.mark.parametrize(
    ("source", "options"),
    [
        ("a.zarr", set_each("objects.threshold=0.6", "objects.background=0.4")),
        ("a.zarr", set_each("objects.agglomerate=mutex", "objects.min_voxels=9", "objects.smooth=[0,2,1]")),
        ("a.zarr", [*COMPONENTS, "--set", "objects.min_voxels=5"]),
        ("m.zarr", set_each("input.kind=foreground", "objects.method=components", "objects.threshold=0.6")),
        ("m.zarr", set_each("input.kind=membrane", "objects.background=0.3", "objects.threshold=0.8")),
    ],
)
def test_blocks_that_are_cut_into_pieces_again_have_the_labels_that_are_stored(
    tmp_path: Path, give: Give, source: str, options: list[str]
) -> None:
    label(give, source, *options)
    assert len(np.unique(open_volume(tmp_path / "l.zarr").open().read_raw(...))) > 5
    ended = give("verify", "l.zarr", "--recompute", "1000")
    assert (ended.code, blocks_in(ended)) == (0, dict.fromkeys(range(BLOCKS), "the same"))


def test_so_many_blocks_are_chosen_by_the_seed(give: Give) -> None:
    label(give, "a.zarr", *set_each("objects.threshold=0.6"))
    chosen = [list(blocks_in(give("verify", "l.zarr", "--recompute", "3", "--seed", n))) for n in "00123"]
    assert all(len(set(blocks)) == 3 and blocks == sorted(blocks) for blocks in chosen)
    assert chosen[0] == chosen[1]
    assert len(set(map(tuple, chosen))) > 2


def test_a_voxel_that_is_not_as_its_piece_is_found(tmp_path: Path, give: Give) -> None:
    """Objects of 2³ voxels, one in the middle of each block, which is then the only piece in it."""
    truth = np.zeros((16, 16, 16), np.uint8)
    for corner in np.ndindex(2, 2, 2):
        truth[tuple(slice(8 * i + 3, 8 * i + 5) for i in corner)] = 1
    make(tmp_path / "t.zarr", np.uint8(255) * affinities(truth, NEAREST)[0], chunks=(3, 8, 8, 8))
    label(give, "t.zarr", *NEAR, *COMPONENTS, "--set", "objects.background=0.1")
    writer, whole = open_writer(tmp_path / "l.zarr", "s0"), Box.from_shape(truth.shape)
    known = writer.read(whole)
    assert known.max() == BLOCKS and np.array_equal(known > 0, truth > 0)

    def said(block: int, *changes: tuple[tuple[slice | int, ...], int]) -> str:
        """Return what is said of `block` where labels in it are changed; nothing may be said of others."""
        corner = tuple(8 * int(n) for n in np.unravel_index(block, (2, 2, 2)))
        box = Box(corner, tuple(n + 8 for n in corner))
        labels = known[box.slices].copy()
        for place, value in changes:
            labels[place] = value
        writer.write(box, labels)
        lines = re.findall(r"^block (\d+) .*: (.*)$", give("verify", "l.zarr", "--recompute", "8").out, re.MULTILINE)
        writer.write(box, known[box.slices])
        assert {int(n) for n, told in lines if told != "the same"} <= {block}
        return dict(lines)[str(block)]

    piece = (slice(3, 5),) * 3
    assert said(5, ((3, 4, 3), 7)) == "1 voxels differ"
    assert said(2, ((3, 4, 3), 0)) == "1 voxels differ"
    assert said(0, ((0, 7, 2), 1), ((7, 7, 7), 3)) == "2 voxels differ"
    assert said(7, ((4, slice(3, 5), slice(3, 5)), 99)) == "4 voxels differ"  # half of it
    assert said(3, (piece, 0)) == "8 voxels differ"
    assert said(3, (piece, 2)) == "the same"  # as after two pieces were joined by mistake: only all of it can tell


def test_a_label_that_is_missing_is_forgiven_to_small_pieces_alone() -> None:
    ids = np.array([[[1, 1, 1, 2, 2, 0]]], np.uint32)
    none = np.zeros(ids.shape, np.uint32)
    assert [num_misfits(ids, none, least) for least in (0, 2, 3, 4)] == [5, 5, 3, 0]


@settings(max_examples=50)
@given(
    voxels=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0, 1, 2, 2**40])), min_size=1, max_size=20),
    least=st.integers(0, 5),
)
def test_misfits_are_those_that_counting_voxel_by_voxel_finds(voxels: list[tuple[int, int]], least: int) -> None:
    ids, labels = (np.array([side], np.uint64).reshape(1, 1, -1) for side in zip(*voxels, strict=True))
    due = 0
    for piece in {piece for piece, _ in voxels}:
        found = Counter(label for each, label in voxels if each == piece)
        may_be = {0} if piece == 0 else set(found) if found.total() < least else set(found) - {0}
        due += found.total() - max((found[label] for label in may_be), default=0)
    assert num_misfits(ids.astype(np.uint32), labels, least) == due


def test_only_what_is_written_is_compared(tmp_path: Path, give: Give) -> None:
    label(give, "a.zarr", *set_each("objects.threshold=0.6"))
    journal = tmp_path / "l.zarr.run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    left = [line for line in lines if not ('"paint"' in line and json.loads(line)["done"][0] in (1, 6))]
    assert len(lines) - len(left) == 2
    journal.write_text("".join(left))
    ended = give("verify", "l.zarr", "--recompute", "1000")
    assert (ended.code, list(blocks_in(ended))) == (1, [0, 2, 3, 4, 5, 7])


def test_labels_of_a_volume_that_has_changed_differ_and_of_another_or_none_are_refused(
    tmp_path: Path, give: Give
) -> None:
    label(give, "a.zarr", *set_each("objects.threshold=0.6"))
    shutil.rmtree(tmp_path / "a.zarr")
    make(tmp_path / "a.zarr", noise((9, *SHAPE), seed=5), chunks=(9, 8, 8, 8))
    changed = give("verify", "l.zarr", "--recompute", "8")
    assert changed.code == 1
    assert ", 0 not as they were written" in changed.out
    assert all(re.fullmatch(r"[\d,]+ voxels differ", told) for told in blocks_in(changed).values())

    shutil.rmtree(tmp_path / "a.zarr")
    make(tmp_path / "a.zarr", noise((9, 13, 16, 12)))
    another = give("verify", "l.zarr", "--recompute", "8")
    assert (another.code, blocks_in(another), another.err.count("\n")) == (2, {}, 1)
    assert "is uint8 (9, 13, 16, 12) (c, z, y, x), its labels are of uint8 (9, 13, 16, 11)" in another.err

    shutil.rmtree(tmp_path / "a.zarr")
    gone = give("verify", "l.zarr", "--recompute", "8")
    assert (gone.code, gone.err.count("\n")) == (2, 1)
    assert str(tmp_path / "a.zarr") in gone.err
    assert give("verify", "l.zarr").code == 0


# ---- all of it


def pyramid(folder: Path) -> None:
    """Write a map of noise in two levels as `p.zarr`, of voxels of 40, 8 and 8 nm."""
    steps = ((1, 1, 1), (1, 2, 2))
    for number, step in enumerate(steps):
        make(folder / "p.zarr" / f"s{number}", noise(level_shape((13, 32, 22), step)), chunks=(8, 16, 16))
    create_multiscale(folder / "p.zarr", Multiscale(levels_of(steps), voxel_size_nm=(40.0, 8.0, 8.0)))


@pytest.mark.parametrize(
    ("source", "options", "in_file"),
    [
        ("a.zarr", [*COMPONENTS, "--set", "output.levels=2"], False),
        ("a.zarr", set_each("objects.agglomerate=mutex", "objects.min_voxels=9", "objects.smooth=[0,2,1]"), True),
        ("p.zarr", set_each("input.level=1", "input.kind=membrane", "objects.threshold=0.8"), False),
    ],
)
def test_the_command_that_reproduce_prints_makes_the_same_labels(
    tmp_path: Path, give: Give, source: str, options: list[str], *, in_file: bool
) -> None:
    if source == "p.zarr":
        pyramid(tmp_path)
    label(give, source, *options)
    ended = give("reproduce", "l.zarr", *(["--recipe-out", "again.toml"] if in_file else []))
    assert ended.code == 0
    change, folder, then, program, *arguments = shlex.split(ended.out)
    assert (change, folder, then, program) == ("cd", str(tmp_path), "&&", "volpipe")
    assert arguments[:3] == ["segment", *THREADS]
    assert (tmp_path / "again.toml").exists() == in_file
    made = give(*arguments)
    assert made.code == 0, made.err
    first, again = (made_in(tmp_path / f"{name}.zarr") for name in ("l", "l_again"))
    assert first == again
    assert len(first[0].splitlines()) > 5


def made_in(out: Path) -> tuple[str, list[str]]:
    """Return the table of the objects in `out`, and a hash of the files of each level."""
    table = (out.with_name(f"{out.name}.run") / "objects.csv").read_text()
    return table, [fingerprint(out / key) for key in open_volume(out).levels]


def test_labels_without_what_was_written_into_them_say_what_is_missing(tmp_path: Path, give: Give) -> None:
    label(give, "m.zarr", *set_each("input.kind=foreground"))
    (tmp_path / "l.zarr").rename(tmp_path / "moved.zarr")
    assert shlex.split(give("reproduce", "moved.zarr").out)[-2] == str(tmp_path / "l_again.zarr")
    shutil.rmtree(tmp_path / "moved.zarr" / "run")  # as before it was closed
    *_, out, source = shlex.split(give("reproduce", "moved.zarr").out)
    assert (out, source) == (str(tmp_path / "moved_again.zarr"), str(tmp_path / "m.zarr"))

    file = tmp_path / "moved.zarr" / "zarr.json"
    told = json.loads(file.read_text())
    told["attributes"]["volpipe"]["labelling"]["objects"]["colour"] = "red"
    file.write_text(json.dumps(told))
    later = give("reproduce", "moved.zarr")
    assert (later.code, later.out) == (2, "")
    assert "was made by another version, whose attributes cannot be understood" in later.err
    del told["attributes"]["volpipe"]
    file.write_text(json.dumps(told))
    silent = give("reproduce", "moved.zarr")
    assert (silent.code, silent.out) == (2, "")
    assert "moved.zarr says nothing of where it comes from: its attributes have no recipe" in silent.err
    assert "`volpipe segment`" in silent.err
