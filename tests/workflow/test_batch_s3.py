"""Batches of volumes and outputs in buckets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from batches import SHAPE, NoPool, endings, give, refused
from bucket import Bucket
from volumes import noise, write_volume

import volpipe as vp
from volpipe.errors import VolumeError
from volpipe.workflow import batch


@pytest.fixture(autouse=True)
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three volumes in `raw`, in the current folder."""
    for number, name in enumerate("abc"):
        write_volume(tmp_path / "raw" / f"{name}.n5", noise(SHAPE, seed=number))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "raw"


def test_volumes_and_outputs_lie_in_buckets(bucket: Bucket, raw: Path) -> None:
    for name in "ab":
        vp.convert(raw / f"{name}.n5" / "raw", f"s3://{bucket.name}/raw/{name}.n5/em")
    for volumes in (f"s3://{bucket.name}/raw/*.n5/em", f"s3://{bucket.name}/raw/"):
        report = give(volumes, out=f"s3://{bucket.name}/done/", dry_run=True)
        assert [Path(row.volume.partition("?")[0]).parts[3] for row in report.rows] == ["a.n5", "b.n5"]
    report = give(f"s3://{bucket.name}/raw/", out=f"s3://{bucket.name}/done/")
    assert report.is_complete and report.folder.name == f"{bucket.name}_done.batch"
    np.testing.assert_array_equal(vp.open(f"s3://{bucket.name}/done/b.zarr")[...], vp.open("raw/b.n5")[...])
    assert (
        endings(give(f"s3://{bucket.name}/raw/", out=f"s3://{bucket.name}/done/", site=NoPool())) == ["unchanged"] * 2
    )


def test_a_bucket_without_rights_is_named_before_anything_is_written(bucket: Bucket, raw: Path) -> None:
    bucket.broken = 403
    place = f"s3://{bucket.name}"
    mistakes = refused([f"{place}/raw/", f"{place}/cells.n5/em", "raw/a.n5"], out="done")
    assert [what.partition("?")[0] for what in mistakes] == [f"{place}/raw/", f"{place}/cells.n5/em"]
    assert all("403" in sentence or "denie" in sentence for sentence in mistakes.values()), mistakes
    assert "access denied" in refused(["raw/a.n5"], out=f"{place}/done/")["raw/a.n5"]


def test_a_bucket_that_may_only_be_read_is_named_once(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(folder: object) -> None:
        raise VolumeError("may not be written")

    monkeypatch.setattr(batch, "try_writing", deny)
    ((place, sentence),) = refused(out=f"s3://{bucket.name}/done").items()
    assert (place.partition("?")[0], sentence) == (f"s3://{bucket.name}/done", "may not be written; ")


def test_outputs_in_a_bucket_whose_runs_would_meet_on_the_disk_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    place = f"s3://{bucket.name}"
    (tmp_path / "two.csv").write_text(f"volume,out\nraw/a.n5,{place}/x/one.zarr\nraw/b.n5,{place}/y/one.zarr\n")
    (sentence,) = refused("two.csv").values()
    assert f"would share the folder {tmp_path / 'one.zarr.run'}" in sentence
