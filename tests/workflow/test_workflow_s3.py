"""Recipes of several stages whose outputs go to a bucket, over a real server on loopback, or to a disk alike."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bucket import ACCESS_KEY, SECRET_KEY, Bucket
from command import THREADS, Give, giver
from inline import Inline, Stopped
from volumes import write_volume

from volpipe.errors import PlanError, RunError, VolumeError
from volpipe.estimation import limits
from volpipe.inference.plan import Plan
from volpipe.recipes.inference import load_recipe
from volpipe.runs.options import RunOptions
from volpipe.runs.provenance import read_origin
from volpipe.runs.run_folder import RunFolder
from volpipe.stages.kind import StagePlan
from volpipe.volumes.storage import paths
from volpipe.volumes.storage.paths import Location
from volpipe.volumes.storage.quota import Quota
from volpipe.workflow.cost import forecast_flow
from volpipe.workflow.entries import find_entries
from volpipe.workflow.execute import FlowListener, FlowReport, flow_work
from volpipe.workflow.kinds import KINDS
from volpipe.workflow.plan import FlowPlan, plan_flow
from volpipe.workflow.prepare import prepare
from volpipe.workflow.recipe import find_flow
from volpipe.workflow.status import find_status
from volpipe.workflow.work_plan import execute

SHAPE = (16, 24, 16)
OUT = "s3://cells/out"
FLOW = """
[[stage]]
name = "chances"
net = { name = "identity" }
windows = { shape = [8, 8, 8], overlap = 0, block = [1, 1, 1] }
output = { levels = 1 }

[[stage]]
name = "objects"
kind = "label"
input = { stage = "chances", kind = "foreground", range = [0, 255] }
objects = { method = "components", threshold = 0.5 }
output = { block = [16, 16, 16], chunk = [8, 8, 8], levels = 1 }

[[stage]]
name = "scores"
kind = "evaluate"
labels = true
reference = "truth.n5"

[[stage]]
name = "coarse"
kind = "label"
input = { stage = "chances", kind = "foreground", level = 1, range = [0, 255] }
objects = { method = "components", threshold = 0.5 }
output = { block = [8, 8, 8], chunk = [4, 4, 4], levels = 0 }

[[stage]]
name = "same"
kind = "evaluate"
input = "chances"
reference = "in.n5"
"""
PLACES = pytest.mark.parametrize("out", [OUT, "out"], ids=["bucket", "disk"])
VOLUMES, SCORES = ("chances.zarr", "objects.zarr", "coarse.zarr"), ("scores.json", "same.json")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a map of cubes lies, and which cube is which: six voxels wide, windows end between them."""
    monkeypatch.chdir(tmp_path)
    place = np.indices(SHAPE)
    inside = (place % 8 % 7 > 0).all(axis=0)
    number = 1 + np.ravel_multi_index(tuple(place // 8), tuple(n // 8 for n in SHAPE))
    write_volume(tmp_path / "in.n5", np.where(inside, 255, 0).astype(np.uint8), chunk=8)
    write_volume(tmp_path / "truth.n5", np.where(inside, number, 0).astype(np.uint8), chunk=8)
    (tmp_path / "flow.toml").write_text(FLOW)
    return tmp_path


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(folder, monkeypatch, capsys)


def planned(folder: Path, *settings: str, out: str | Path = OUT) -> FlowPlan:
    flow = find_flow(folder / "flow.toml", settings)
    assert flow is not None
    return plan_flow(flow, str(folder / "in.n5"), out, folder)


def run(plan: FlowPlan, most_tasks: int | None = None, *, fresh: bool = False) -> FlowReport:
    return execute(plan, Inline(most_tasks=most_tasks).start, RunOptions(fresh=fresh))


def stop_in(plan: FlowPlan, name: str, num_tasks: int) -> None:
    """Run `plan` until so many tasks of the stage `name` were sent, and stop it there."""
    workers = Inline()

    def on_stage(stage: StagePlan) -> None:
        if stage.name == name:
            workers._most_tasks = workers.num_tasks + num_tasks

    with pytest.raises(Stopped):
        execute(plan, workers.start, listener=FlowListener(on_stage))


def stored(bucket: Bucket, name: str = "out") -> dict[str, bytes]:
    """Return the files below `name`, but for those that say when they were made."""
    below = {key.removeprefix(f"{name}/"): data for key, data in bucket.files.items() if key.startswith(f"{name}/")}
    return {key: data for key, data in below.items() if not key.endswith("/run/zarr.json")}


def on_disk(out: Path) -> dict[str, bytes]:
    """Return the same of outputs in the folder `out`, without the folders of runs."""
    files = [path for path in out.rglob("*") if path.is_file() and ".run" not in str(path.relative_to(out))]
    found = {str(path.relative_to(out)): path.read_bytes() for path in files}
    return {key: data for key, data in found.items() if not key.endswith("/run/zarr.json")}


def placed(found: dict[str, bytes], folder: Path) -> dict[str, bytes]:
    """Return `found` as it would be in `folder`: where outputs name the place of others."""
    moved = {}
    for key, data in found.items():
        if key.endswith(".json"):
            data = re.sub(rf"{OUT}/([\w.]+)/(\w+)\?[^\"]*".encode(), rf"{folder}/\1:\2".encode(), data)
            data = re.sub(rf"{OUT}/([\w.]+)\?[^\"]*".encode(), rf"{folder}/\1".encode(), data)
        moved[key] = data
    return moved


def test_a_flow_into_a_bucket_goes_on_to_the_bytes_of_one_on_a_disk(bucket: Bucket, folder: Path) -> None:
    undisturbed = Inline()
    execute(planned(folder, out=folder / "local"), undisturbed.start)
    plan, done = planned(folder), set[str]()
    for _ in range(5):
        with pytest.raises(Stopped):
            execute(plan, Inline(most_tasks=undisturbed.num_tasks // 6).start)
        before, done = done, {entry.name for entry in find_entries(OUT) or [] if KINDS[entry.kind].is_done(entry)}
        assert before <= done < {stage.name for stage in plan.stages}  # what is complete stays so
    report = run(plan)
    assert report.is_complete
    assert {ended.stage.name for ended in report.stages if ended.report.was_complete} == done
    wanted = on_disk(folder / "local")
    assert {key.partition("/")[0] for key in wanted} == {*VOLUMES, *SCORES}
    assert sum(key.count("/") > 1 for key in wanted) > 20
    assert placed(stored(bucket), folder / "local") == wanted
    told = json.loads(bucket.files["out/scores.json"])
    assert (told["scores"]["output"]["split"], told["scores"]["output"]["merge"]) == (0, 0)


def test_a_flow_in_a_bucket_that_is_complete_starts_nothing_and_writes_nothing(bucket: Bucket, folder: Path) -> None:
    run(planned(folder))
    before, workers = dict(bucket.files), Inline()
    report = execute(planned(folder), workers.start)
    assert report.was_complete
    assert workers.num_tasks == 0
    assert bucket.files == before


def test_a_status_says_what_the_journal_knows_where_the_bucket_cannot_be_asked(bucket: Bucket, folder: Path) -> None:
    recipe = load_recipe(None, ["net.name=identity"])
    execute(prepare("in.n5", recipe, "s3://cells/out.zarr", folder), Inline().start)
    assert find_status("s3://cells/out.zarr").remark == ""
    bucket.broken = 403
    unseen = find_status("s3://cells/out.zarr")
    assert unseen.is_complete and "cannot be seen" in unseen.remark
    bucket.broken, bucket.files = 0, {}
    gone = find_status("s3://cells/out.zarr")
    assert not gone.is_complete and "its output is gone" in gone.remark


def test_a_stage_that_is_not_begun_is_not_taken_for_a_run_of_another(bucket: Bucket, folder: Path) -> None:
    recipe = load_recipe(None, ["net.name=identity"])
    execute(prepare("in.n5", recipe, "objects.zarr", folder), Inline().start)  # its run: objects.zarr.run, here
    work = flow_work(planned(folder))
    with work.folder.locked():
        work.claim()
    with pytest.raises(RunError, match="holds no plan"):
        find_status("s3://cells/out/objects.zarr")


def test_fresh_deletes_what_all_stages_left_in_a_bucket_and_no_run_of_another(bucket: Bucket, folder: Path) -> None:
    recipe = load_recipe(None, ["net.name=identity"])
    execute(prepare("in.n5", recipe, "s3://cells/chances.zarr", folder), Inline().start)  # its run: chances.zarr.run
    run(planned(folder), fresh=True)
    assert find_status("s3://cells/chances.zarr").is_complete
    assert "out/objects.zarr/s1/zarr.json" in bucket.files
    changed = planned(folder, "objects.output.levels=0")
    with pytest.raises(RunError, match=r"^stage objects: .*cells_out.run/objects.zarr.run holds a segmentation with"):
        run(changed)
    others = {key: data for key, data in bucket.files.items() if not key.startswith("out/")}
    with pytest.raises(Stopped):
        run(changed, 1, fresh=True)
    assert {key for key in bucket.files if not key.startswith("out/chances.zarr/")} == others.keys()
    assert run(changed).is_complete
    assert "out/objects.zarr/s1/zarr.json" not in bucket.files
    assert {key: data for key, data in bucket.files.items() if not key.startswith("out/")} == others


@pytest.mark.long
@pytest.mark.parametrize(("one", "two"), [("s3://cells/a/out", "s3://cells/b/out"), ("s3://cells", "s3://cells/out")])
def test_flows_into_two_places_know_nothing_of_each_other(bucket: Bucket, folder: Path, one: str, two: str) -> None:
    first, second = planned(folder, out=one), planned(folder, "chances.normalise.method=none", out=two)
    run(first)
    assert find_entries(two) is None
    run(second)
    assert run(first).was_complete
    folders = [stage.folder.path for plan in (first, second) for stage in plan.stages]
    assert len(set(folders)) == len(folders)
    assert all(path.is_relative_to(folder) for path in folders)
    for plan in (first, second):
        for stage in plan.stages[:2]:
            assert RunFolder.from_output(stage.out) == stage.folder
        kept = plan.stages[0].folder.load(Plan)
        assert kept is not None and kept.model_dump() == plan.stages[0].plan.model_dump()  # notes are not kept


def take_away(plan: FlowPlan, number: int) -> None:
    """Delete the output of a stage, and the run that made it."""
    paths.delete(plan.stages[number].out)
    shutil.rmtree(plan.stages[number].folder.path)


def text_of(file: Location) -> str:
    return (paths.read(file, 1 << 20) or b"").decode()


@pytest.mark.parametrize("out", [OUT, pytest.param("out", marks=pytest.mark.long)], ids=["bucket", "disk"])
def test_a_stage_that_is_taken_away_is_made_again_with_its_scores_and_no_other(
    bucket: Bucket, folder: Path, out: str
) -> None:
    plan = planned(folder, out=out)
    run(plan)
    take_away(plan, 1)
    scores = plan.stages[2].out
    paths.write(scores, text_of(scores).replace("split", "spilt").encode())
    stopped = planned(folder, "objects.objects.min_voxels=2", out=out)
    with pytest.raises(Stopped):
        run(stopped, 1)
    assert not paths.exists(scores)  # of another output than there will be
    report = run(stopped)
    assert [done.stage.name for done in report.stages if not done.report.was_complete] == ["objects", "scores"]
    assert "split" in text_of(scores)


@PLACES
def test_what_later_stages_have_read_is_not_made_again_behind_their_backs(
    bucket: Bucket, folder: Path, out: str
) -> None:
    plan = planned(folder, out=out)
    run(plan)
    take_away(plan, 0)
    with pytest.raises(RunError, match=r"^stage chances: it is not complete, but stage objects, which needs it, was b"):
        run(plan)


@PLACES
def test_an_input_that_was_changed_by_others_is_refused(bucket: Bucket, folder: Path, out: str) -> None:
    plan = planned(folder, out=out)
    run(replace(plan, stages=plan.stages[:1]))
    file = plan.stages[0].out / "s0" / "zarr.json"
    paths.write(file, json.dumps(json.loads(text_of(file)) | {"shape": [8, 24, 16]}).encode())
    with pytest.raises(RunError, match=r"^stage objects: its input .*out/chances.zarr.* is uint8 \(8, 24, 16\)"):
        run(plan)


@PLACES
def test_outputs_of_others_are_refused_before_the_first_stage(bucket: Bucket, folder: Path, out: str) -> None:
    plan = planned(folder, out=out)
    if isinstance(plan.stages[1].out, Path):
        plan.stages[1].out.mkdir(parents=True)
    paths.write(plan.stages[1].out / "zarr.json", b"{}")
    for fresh in (False, True):
        with pytest.raises(
            RunError, match=r"^stage objects: .*out/objects.zarr.* exists and no segmentation in .* made"
        ):
            run(plan, 0, fresh=fresh)
    assert not paths.exists(plan.stages[0].out)


@PLACES
def test_an_output_may_not_lie_where_the_volume_or_a_reference_does(bucket: Bucket, folder: Path, out: str) -> None:
    recipe = load_recipe(None, ["net.name=identity"])
    execute(prepare("in.n5", recipe, f"{out}/objects.zarr", folder), Inline().start)
    flow = find_flow(folder / "flow.toml", [f"scores.reference={out}/objects.zarr"])
    assert flow is not None
    for volume, what in ((f"{out}/objects.zarr", "volume"), ("in.n5", "reference")):
        with pytest.raises(PlanError, match=rf"^stage objects: the output .*objects.zarr.* would overwrite the {what}"):
            plan_flow(flow, volume, out, folder)


def test_room_on_a_disk_says_nothing_of_a_bucket(bucket: Bucket, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "find_quotas", lambda place: [Quota("nobody", 0, 0)])
    with pytest.raises(PlanError, match=r"\(quota of nobody\)"):
        forecast_flow(planned(folder, out=folder / "local")).check()
    forecast_flow(planned(folder)).check()


@pytest.mark.parametrize(
    ("out", "sentence"),
    [
        (
            "s3://nothing/out",
            r"volpipe: s3://nothing/out/.volpipe: there is no bucket nothing; check its name, and the .*",
        ),
        (
            "https://127.0.0.1/out",
            r"volpipe: https://127.0.0.1/out is on a web server, which is read only; write to .*",
        ),
        ("gs://cells/out", r"volpipe: gs://cells/out: volpipe reads folders, s3:// and .*"),
    ],
)
def test_a_place_that_is_none_is_refused_in_a_line(
    bucket: Bucket, folder: Path, give: Give, out: str, sentence: str
) -> None:
    ended = give("run", *THREADS, "--recipe", "flow.toml", "-o", out, "in.n5")
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(sentence + "\n", ended.err)


def test_a_bucket_that_may_not_be_written_is_refused_before_any_worker_starts(
    bucket: Bucket, folder: Path, give: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.readable = bucket.listable = True
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    ended = give("run", *THREADS, "--recipe", "flow.toml", "-o", OUT, "in.n5")
    assert (ended.code, ended.out) == (2, "")
    assert re.fullmatch(r"volpipe: s3://cells/out/.volpipe: access denied \(without credentials\); set .*\n", ended.err)
    assert not bucket.files
    assert not (folder / "cells_out.run" / "parsl").exists()


def test_files_in_a_bucket_are_deleted_one_by_one_and_one_that_is_gone_is_no_error(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket.files |= {"a/b.json": b"1", "a/b.json.old": b"2", "a/b.json/c": b"3"}
    for _ in range(2):
        paths.delete_file(paths.locate("s3://cells/a/b.json"))
        assert bucket.files == {"a/b.json.old": b"2", "a/b.json/c": b"3"}
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(VolumeError, match=r"s3://cells/a/b.json.old: access denied"):
        paths.delete_file(paths.locate("s3://cells/a/b.json.old"))


@pytest.mark.long
def test_the_commands_take_stages_in_a_bucket_as_they_take_those_on_a_disk(
    bucket: Bucket,
    folder: Path,
    give: Give,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = (*THREADS, "--recipe", "flow.toml", "-o", OUT, "in.n5")
    out, before = f"?endpoint={bucket.url}&region=eu-west-1", sorted(folder.iterdir())
    quick = give("plan", "--quick", *command)
    assert (quick.code, quick.err, sorted(folder.iterdir())) == (0, "", before)
    assert f"output    {OUT}/chances.zarr{out}" in quick.out
    assert re.search(
        r"in s3://cells/out\?\S+ ≤ [\d.]+ KiB in \d+ files, which stay; on the disk of \S+cells_out.run at", quick.out
    )
    tried = give("plan", *command)
    assert (tried.code, tried.err) == (0, "")
    assert not bucket.files
    ended = give("run", *command)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[-1] == f"wrote {OUT}/coarse.zarr{out}"
    assert {path.name for path in folder.iterdir()} - {path.name for path in before} == {"cells_out.run"}
    assert "is complete already; nothing to do" in give("run", *command).out
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    from_there = giver(elsewhere, monkeypatch, capsys)
    for status in (give("status", OUT), from_there("status", folder / "cells_out.run")):
        assert status.code == 0
        assert set(re.findall(r"s3://cells/out/(\w+\.\w+)\S+: complete", status.out)) == {*VOLUMES, *SCORES}
    assert from_there("status", OUT).code == 2
    for name in ("chances", "objects", "coarse"):
        checked = give("verify", f"{OUT}/{name}.zarr")
        assert (checked.code, checked.out.endswith(" files read, 0 not as they were written\n")) == (0, True)
        assert give("status", f"{OUT}/{name}.zarr").code == 0
    assert f"-o '{OUT}/chances_again.zarr{out}' {folder}/in.n5/raw" in give("reproduce", f"{OUT}/chances.zarr").out
    assert read_origin(f"{OUT}/chances.zarr").volume == f"{folder}/in.n5/raw"
    assert give("evaluate", *THREADS, f"{OUT}/chances.zarr", "in.n5").code == 0
    del bucket.files["out/scores.json"]
    assert give("status", OUT).code == 1
    kept = [*bucket.files.values(), *(path.read_bytes() for path in folder.rglob("*") if path.is_file())]
    assert not [data for data in kept if SECRET_KEY.encode() in data or ACCESS_KEY.encode() in data]
