"""After an update labels are those of a fresh segmentation of the input as it is now, byte for byte."""

from __future__ import annotations

import contextlib
import itertools
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from arrays import make
from command import THREADS, Give, giver, set_each
from deletions import Deletions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline import Stopped
from segmented import Crowd, blobs, led_recipe, noisy, random_leads, recipe, tree

import volpipe as vp
from volpipe.blockwise.journal import read_records
from volpipe.errors import RunError
from volpipe.geometry.affinities import OFFSETS
from volpipe.recipes.segmentation import INSTANCES, SegmentRecipe
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_provenance
from volpipe.segmentation import boxes
from volpipe.segmentation import plan as planning
from volpipe.segmentation.driver import SegmentationResult, plan_segmentation, segment
from volpipe.segmentation.plan import SegmentPlan
from volpipe.segmentation.tasks import RESULTS
from volpipe.volumes.volume import open_volume
from volpipe.workflow.status import find_status

LAWS = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CHOICES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("affinities", {"method": "components", "threshold": 0.6}),
    ("affinities", {"threshold": 0.4, "background": 0.3}),
    ("affinities", {"agglomerate": "mutex", "min_voxels": 3, "smooth": (0, 1, 1)}),
    ("membrane", {"threshold": 0.7, "background": 0.3}),
    ("foreground", {"method": "components", "threshold": 0.6}),
    ("centres", {"reach": (3, 2, 2), "window": (3, 3, 3)}),
    ("flows", {"reach": (2, 2, 2), "steps": 20}),
)
SMALL = recipe((8, 8, 8), threshold=0.5, background=0.4)


def write(path: Path, data: np.ndarray, chunk: int = 4) -> Path:
    """Write affinities (c, z, y, x), or a map (z, y, x); chunks that are as they were stay so, also of a larger one."""
    chunks = (*data.shape[:-3], chunk, chunk, chunk)
    if not path.exists():
        make(path, data, chunks=chunks)
        return path
    array = zarr.open_array(path, mode="r+")
    assert isinstance(array, zarr.Array)
    array.resize(data.shape)
    for corner in np.ndindex(*(-(-n // chunk) for n in data.shape[-3:])):
        part = (..., *(slice(chunk * i, chunk * (i + 1)) for i in corner))
        if not np.array_equal(array[part], data[part]):
            array[part] = data[part]
    return path


def made(source: Path, chosen: SegmentRecipe, workers: Crowd | None = None, **options: Any) -> SegmentationResult:
    """Return how the segmentation of `source` ended; its labels lie beside it."""
    out, fresh = source.with_name("l.zarr"), bool(options.get("fresh"))
    plan = plan_segmentation(str(source), chosen, out, source.parent, fresh=fresh)
    result = segment(plan, (workers or Crowd()).start, RunOptions(**options))
    assert result.missing == []
    return result


def assert_fresh(source: Path, chosen: SegmentRecipe, plan: SegmentPlan | None = None) -> None:
    """Compare the labels and their table with those of a fresh segmentation in their place, which stay there.

    It is of `plan`, or else of sizes that are chosen anew.
    """
    out = source.with_name("l.zarr")
    run = out.with_name("l.zarr.run")
    found, table = tree(out), (run / "objects.csv").read_text()
    shutil.rmtree(out)
    shutil.rmtree(run)
    made(source, chosen) if plan is None else segment(plan, Crowd().start)
    assert (run / "objects.csv").read_text() == table
    expected = tree(out)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []


def num_units(out: Path) -> dict[str, int]:
    """Return how many units of each stage were done, as often as they were."""
    done: dict[str, int] = {}
    for record in read_records(out.with_name("l.zarr.run") / "journal.jsonl", RESULTS):
        done[record.stage] = done.get(record.stage, 0) + len(record.done)
    return done


def check_law(data: st.DataObject, most_edge: int) -> None:
    """Edit, grow, interrupt, update."""
    kind, objects = data.draw(st.sampled_from(CHOICES))
    levels = data.draw(st.integers(1, 3))
    shape = tuple(data.draw(st.integers(3, most_edge)) for _ in range(3))
    block = tuple(data.draw(st.sampled_from([4, 6, 8])) for _ in range(3))
    chosen = (led_recipe if kind in INSTANCES else recipe)(block, kind, **objects)
    chosen = chosen.model_copy(update={"output": chosen.output.model_copy(update={"levels": levels})})
    channels = {"affinities": (len(OFFSETS),), "centres": (5,), "flows": (4,)}.get(kind, ())
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    with tempfile.TemporaryDirectory() as name:

        def invented(size: tuple[int, ...]) -> np.ndarray:
            return random_leads(rng, kind, size[-3:]) if kind in INSTANCES else rng.integers(0, 256, size, np.uint8)

        voxels = invented((*channels, *shape))
        source = write(Path(name) / "a.zarr", voxels)
        for _ in range(data.draw(st.integers(1, 3))):
            with contextlib.suppress(Stopped):
                made(source, chosen, Crowd(2, int(rng.integers(0, 60))), update=True)
            more = data.draw(st.sampled_from([(0, 0, 0), (0, 0, 0), (3, 0, 0), (5, 2, 0), (0, 0, 4)]))
            voxels = np.pad(voxels, [(0, 0)] * len(channels) + [(0, n) for n in more], mode="reflect")
            for _ in range(data.draw(st.integers(0, 2))):
                start = [int(rng.integers(0, n)) for n in voxels.shape[-3:]]
                part = (..., *(slice(a, a + 2) for a in start))
                voxels[part] = invented(voxels[part].shape)
            write(source, voxels)
        plan = made(source, chosen, Crowd(2), update=True).plan
        assert made(source, chosen, nothing := Crowd(), update=True).was_complete
        assert nothing.num_sent == 0
        assert_fresh(source, chosen, plan)


@pytest.fixture(autouse=True)
def _small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solve the graph in boxes of few blocks, and number objects by few voxels, as of a large volume."""
    monkeypatch.setattr(boxes, "EDGE", 8)
    monkeypatch.setattr(boxes, "SLAB", 1000)


@LAWS
@given(st.data())
def test_updated_labels_are_those_of_a_fresh_segmentation(data: st.DataObject) -> None:
    """Edited and grown at random, interrupted anywhere, also before the first segmentation was complete."""
    check_law(data, 9)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(LAWS, max_examples=200)
@given(st.data())
def test_updated_labels_are_those_of_a_fresh_segmentation_at_length(data: st.DataObject) -> None:
    check_law(data, 18)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Noisy affinities (9, 16, 24, 32) of blobs: 24 blocks of 8 voxels."""
    return write(tmp_path / "a.zarr", noisy(blobs((16, 24, 32)), 0.2))


@pytest.mark.long
def test_only_what_rests_on_a_changed_block_is_made_again(source: Path) -> None:
    """A hole in a block: its fragments, the edges of the 12 blocks around it and itself, labels that changed."""
    made(source, SMALL, update=True)
    voxels = zarr.open_array(source)[...]
    voxels[:, 3:5, 11:13, 3:5] = 0
    write(source, voxels)
    labels = open_volume(source.with_name("l.zarr")).open()[...]
    result = made(source, SMALL, update=True)
    assert [(update.changed, update.computed) for update in result.updates] == [(1, 1)]
    again = {stage: took.units for stage, took in result.totals.items()}
    assert (again["pieces"], again["edges"], again["graph"]) == (1, 12, 1)
    now = open_volume(source.with_name("l.zarr")).open()[...]
    blocks = [tuple(slice(8 * i, 8 * i + 8) for i in place) for place in np.ndindex(2, 3, 4)]
    num_other = sum(not np.array_equal(labels[part], now[part]) for part in blocks)
    assert 0 < num_other <= again["paint"] < 24
    assert_fresh(source, SMALL)


@pytest.mark.long
def test_labels_that_stay_are_not_painted(source: Path) -> None:
    """The same fragments and objects, of somewhat other affinities; and files that were only written again."""
    made(source, SMALL)
    before = num_units(source)
    voxels = zarr.open_array(source)[...]
    voxels[0, 8, 8, 8] ^= 1
    write(source, voxels)
    assert made(source, SMALL, update=True).updates[0].changed > 0
    assert num_units(source)["paint"] == before["paint"]
    zarr.open_array(source, mode="r+")[:, :4] = voxels[:, :4]
    computed = num_units(source)
    assert made(source, SMALL, update=True).was_complete
    assert {**num_units(source), "reread changed": 0} == {**computed, "reread changed": 0}
    assert_fresh(source, SMALL)


@pytest.mark.long
def test_growth_along_z_computes_the_new_blocks_and_the_old_face(tmp_path: Path) -> None:
    voxels = noisy(blobs((40, 16, 16)), 0.2)
    source = write(tmp_path / "a.zarr", voxels[:, :20])
    made(source, SMALL, update=True)
    write(source, voxels)
    result = made(source, SMALL, update=True)
    assert str(result.updates[0]).startswith("the volume has grown from 20 × 16 × 16 to 40 × 16 × 16: 4 blocks lay")
    assert result.totals["pieces"].units == 4 + 8
    assert_fresh(source, SMALL)


@pytest.mark.long
def test_fragments_stay_for_an_update_alone_and_are_made_again_where_they_are_gone(source: Path) -> None:
    run, names = source.with_name("l.zarr.run"), ("pieces", "edges", "ids.zarr", "solved")
    made(source, SMALL, update=True)
    assert all((run / name).is_dir() for name in names)
    assert made(source, SMALL).was_complete
    assert not any((run / name).exists() for name in names)
    assert made(source, SMALL, update=True).was_complete
    voxels = zarr.open_array(source)[...]
    voxels[:, 3, 12, 4] ^= 255
    write(source, voxels)
    assert [(update.changed, update.computed) for update in made(source, SMALL, update=True).updates] == [(1, 24)]
    (run / "pieces" / "5.npz").unlink()
    voxels[:, 3, 12, 4] ^= 255
    write(source, voxels)
    assert [(update.changed, update.computed) for update in made(source, SMALL, update=True).updates] == [(1, 2)]
    assert_fresh(source, SMALL)


def test_a_damaged_fragment_is_not_painted(source: Path) -> None:
    """Read as zeros it would be background. A new object in the first block changes the labels of all others."""
    made(source, SMALL, update=True)
    lost = source.with_name("l.zarr.run") / "ids.zarr" / "c" / "1" / "2" / "3"
    lost.unlink()
    voxels = zarr.open_array(source)[...]
    voxels[:, :5, :5, :5] = 0
    voxels[:, 1:4, 1:4, 1:4] = 255
    write(source, voxels)
    plan = plan_segmentation(str(source), SMALL, source.with_name("l.zarr"), source.parent)
    with contextlib.suppress(RunError):
        assert segment(plan, Crowd().start, RunOptions(update=True)).missing
    assert "damaged" in (source.with_name("l.zarr.run") / "volpipe.log").read_text()


def test_what_cannot_be_updated_is_refused(source: Path) -> None:
    made(source, SMALL)
    voxels = zarr.open_array(source)[...]
    write(source, voxels[:, :12])
    with pytest.raises(RunError, match=r"axis z: the volume .* had 16 voxels and has 12; --update follows a volume"):
        made(source, SMALL, update=True)
    write(source, voxels)
    voxels[0, 0, 0, 0] ^= 255
    write(source, voxels)
    with pytest.raises(RunError, match="use --update to compute what has changed"):
        made(source, SMALL, update=False)


@pytest.mark.long
def test_the_command_says_what_it_does_and_status_how_much_it_would(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give: Give = giver(source.parent, monkeypatch, capsys)
    command = ("segment", "a.zarr", "-o", "l.zarr", *THREADS, *set_each("output.block=[8,8,8]", "output.chunk=[4,4,4]"))
    assert give(*command).code == 0
    assert "its input has not changed" in give("status", "--changes", "l.zarr").out
    voxels = zarr.open_array(source)[...]
    voxels[:, 3, 12, 4] ^= 255
    write(source, voxels)
    said = " ".join(give("status", "l.zarr").out.split())
    assert "complete, but its input has changed since" in said
    said = " ".join(give("status", "--changes", "l.zarr").out.split())
    assert re.search(r" \d of 24 blocks read files that have changed; `volpipe segment --update` compares", said)
    ended = give(*command, "--update")
    assert ended.code == 0, ended.err
    assert "1 block of 24 read voxels that have changed; 24 are computed again" in ended.out
    assert "is complete, and nothing has changed" in give(*command, "--update").out
    assert read_provenance(source.with_name("l.zarr"))["run"]["updates"][0]["changed"] == 1
    assert give("verify", "l.zarr").code == 0
    assert find_status(str(source.with_name("l.zarr"))).is_complete


@pytest.mark.long
def test_a_segmentation_that_has_grown_keeps_its_blocks_and_levels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fresh one would choose larger blocks for the grown volume, and other coarser levels."""
    for name, value in {"BLOCK": 8, "LARGE_BLOCK": 16, "CHUNK": 8, "MANY": 20 * 16 * 16}.items():
        monkeypatch.setattr(planning, name, value)
    chosen = SegmentRecipe.model_validate(SMALL.model_dump(exclude={"output"}) | {"output": {"levels": 3}})
    voxels = noisy(blobs((40, 16, 16)), 0.2)
    source = write(tmp_path / "a.zarr", voxels[:, :3])
    before = made(source, chosen, update=True).plan
    write(source, voxels)
    grown = made(source, chosen, update=True).plan
    assert grown.block == before.block == (8, 8, 8)
    assert grown.factors == before.factors == ((1, 1, 1), (2, 2, 2), (4, 4, 4), (4, 8, 8))
    for update in (False, True):
        result = made(source, chosen, nothing := Crowd(), update=update)
        assert result.was_complete and not result.updates and nothing.num_sent == 0
    assert_fresh(source, chosen, grown)
    labels = open_volume(source.with_name("l.zarr")).open()[...]
    again = vp.reproduce(source.with_name("l.zarr"))
    assert "output.block=[8, 8, 8]" in again.command
    made_again = vp.segment(source, recipe=again.origin.again, out=tmp_path / "again.zarr", site="threads")
    np.testing.assert_array_equal(open_volume(made_again.out).open()[...], labels)
    fresh = made(source, chosen, fresh=True).plan
    assert (fresh.block, fresh.factors[3]) == ((16, 16, 16), (8, 8, 8))


@pytest.mark.long
def test_after_a_kill_while_scratch_is_deleted_an_update_makes_what_was_lost_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object through three blocks, of which the ends are not read again."""
    monkeypatch.setattr(boxes, "EDGE", 8)
    voxels = noisy(np.ones((8, 8, 24), int), 0.0)
    edited = voxels.copy()
    edited[:, 4, 4, 12] ^= 8
    source, kept = write(tmp_path / "a.zarr", voxels), tmp_path / "kept"
    made(source, SMALL, update=True)
    shutil.copytree(tmp_path, kept, ignore=shutil.ignore_patterns("kept"))
    for number in itertools.count(1):
        for name in ("a.zarr", "l.zarr", "l.zarr.run"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(kept / name, tmp_path / name)
        deletions = Deletions(number)
        with deletions.counted(), contextlib.suppress(Stopped):
            made(source, SMALL)
        write(source, edited)
        assert made(source, SMALL, update=True).num_objects == 1, number
        np.testing.assert_array_equal(open_volume(tmp_path / "l.zarr").open()[...], 1)
        if deletions.count < number:
            break
    assert number > 20
    assert_fresh(source, SMALL)
