"""Runs from and into buckets: the same bytes, refusals, faults in passing, and no secret kept."""

from __future__ import annotations

import itertools
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from bucket import ACCESS_KEY, SECRET_KEY, Bucket
from command import Give, giver
from inline import Inline, Stopped
from remote_volumes import DATA, SETTINGS, make, plan_of

from volpipe.errors import PlanError, RunError, VolumeError
from volpipe.geometry.grid import Box
from volpipe.runs.run_folder import RunFolder
from volpipe.volumes.storage import object_store, requests
from volpipe.volumes.volume import (
    open_volume,
    open_writer,
)
from volpipe.workflow.driver import execute


@pytest.fixture
def give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(tmp_path, monkeypatch, capsys)


def test_a_run_into_s3_goes_on_to_the_same_bytes(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make("s3://cells/in.zarr")
    plan = plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path)
    with pytest.raises(Stopped):
        execute(plan, Inline(most_tasks=4).start)
    part = [key for key in bucket.files if key.startswith("out.zarr/")]
    assert execute(plan, Inline().start).missing == []
    whole = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    assert 2 < len(part) < len(whole)
    assert execute(plan, Inline().start).was_complete
    local = plan_of("s3://cells/in.zarr", tmp_path / "local.zarr", tmp_path)
    execute(local, Inline().start)
    for level in range(2):
        there = open_volume("s3://cells/out.zarr", level=level).open()[...]
        assert np.array_equal(there, open_volume(tmp_path / "local.zarr", level=level).open()[...])
        assert there.any()
    execute(plan, Inline().start, fresh=True)
    again = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    assert whole.keys() == again.keys()
    assert [key for key in whole if whole[key] != again[key]] == ["out.zarr/run/zarr.json"]  # it holds times


def test_an_output_in_s3_is_not_taken_from_another(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make("s3://cells/in.zarr")
    make("s3://cells/out.zarr")
    plan = plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path)
    for fresh in (False, True):
        with pytest.raises(RunError, match=r"s3://cells/out.zarr.* made"):
            execute(plan, Inline().start, fresh=fresh)
    with pytest.raises(PlanError, match="would overwrite the volume"):
        plan_of("s3://cells/in.zarr", "s3://cells/in.zarr", tmp_path)
    with pytest.raises(PlanError, match="would lie inside the volume"):
        plan_of("s3://cells/in.zarr", "s3://cells/in.zarr/out.zarr", tmp_path)


def test_an_output_that_may_not_be_written_is_refused_at_once(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make("s3://cells/in.zarr")
    bucket.readable = bucket.listable = True
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    workers = Inline()
    with pytest.raises(VolumeError, match=r"s3://cells/out.zarr/.volpipe: access denied \(without credentials\)"):
        execute(plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path), workers.start)
    assert workers.num_tasks == 0
    assert not (tmp_path / "out.zarr.run/plan.json").exists()


def test_a_sample_is_written_to_a_disk_alone(give: Give, tmp_path: Path) -> None:
    ended = give("sample", "s3://cells/a.n5")
    assert (ended.code, ended.out) == (2, "")
    assert "samples are written to a disk, not to s3://" in ended.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_command_runs_from_s3_to_s3_and_keeps_no_secret(bucket: Bucket, give: Give, tmp_path: Path) -> None:
    make("s3://cells/in.zarr")
    given = [part for setting in SETTINGS for part in ("--set", setting)]
    ended = give("run", *given, "-o", "s3://cells/out.zarr", "s3://cells/in.zarr")
    assert ended.code == 0, ended.err
    out = f"s3://cells/out.zarr?endpoint={bucket.url}&region=eu-west-1"
    assert ended.out.splitlines()[-1] == f"wrote {out}"
    assert give("status", "s3://cells/out.zarr").out.splitlines()[-1].strip() == f"{out}: complete"
    assert f"shape       {' × '.join(map(str, DATA.shape))} (z, y, x)" in give("info", "s3://cells/out.zarr").out
    kept = [*bucket.files.values(), *(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())]
    assert (tmp_path / "out.zarr.run/plan.json").is_file()
    assert not [data for data in kept if SECRET_KEY.encode() in data or ACCESS_KEY.encode() in data]


def test_a_run_through_faults_in_passing_ends_with_the_same_bytes(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(object_store, "SILENT_SECONDS", 1)
    monkeypatch.setattr(requests, "PAUSES_SECONDS", (0.01,) * 5)
    make("s3://cells/in.zarr")
    plan = plan_of("s3://cells/in.zarr", "s3://cells/out.zarr", tmp_path)
    assert execute(plan, Inline().start).missing == []
    calm = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    kinds = itertools.chain(("silent", "silent"), itertools.cycle(("500", "503", "429", "cut", "reset")))
    seen, lock = set[tuple[str, str]](), Lock()

    def fault(method: str, path: str) -> str:
        """Let each chunk and shard fail when it is first asked for, or written."""
        with lock:
            is_first = "/c/" in path and (method, path) not in seen
            seen.add((method, path))
            return next(kinds) if is_first else ""

    bucket.fault = fault
    assert execute(plan, Inline().start, fresh=True).missing == []
    rough = {key: data for key, data in bucket.files.items() if key.startswith("out.zarr/")}
    assert calm.keys() == rough.keys()
    assert [key for key in calm if calm[key] != rough[key]] == ["out.zarr/run/zarr.json"]  # it holds times
    assert len({path for method, path in seen if method == "GET" and "/in.zarr/" in path}) >= 36
    folder = RunFolder(tmp_path / "out.zarr.run")
    assert '"failed"' not in folder.journal.read_text()  # requests were made again, and no task
    assert "requests made again: " in folder.log.read_text()


def test_a_store_that_goes_on_failing_is_told_with_file_code_and_time(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "PAUSES_SECONDS", (0.01,) * 5)
    make("s3://cells/a.zarr")
    reader, writer = open_volume("s3://cells/a.zarr").open(), open_writer("s3://cells/a.zarr", "raw")
    bucket.fault = lambda method, path: "503"
    sentence = (
        r"s3://cells/a.zarr/raw/c/\d/\d/\d at http://127.0.0.1:\d+: .*503 Service Unav.*tried 6 times over \d+ s$"
    )
    with pytest.raises(VolumeError, match=rf"s3://cells/a.zarr/raw.*voxels .*: {sentence}"):
        reader[...]
    with pytest.raises(VolumeError, match=sentence):
        writer.write(Box.from_shape(DATA.shape), DATA)
