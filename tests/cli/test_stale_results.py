"""Files of results: one that an earlier command wrote is gone where a later one fails."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np
import pytest
from command import giver
from volumes import noise, write_volume


@pytest.mark.parametrize(
    ("command", "option", "code"),
    [
        (("evaluate", "a.npy", "nan.npy", "--data-range", "1"), "--json", 1),
        (("evaluate", "a.npy", "nan.npy", "--data-range", "1"), "--picture", 1),
        (("evaluate", "a.npy", "gone.npy"), "--json", 2),
        (("segment", "gone.npy", "-o", "s.zarr"), "--json", 2),
        (("compare", "a.npy", "gone.npy"), "--json", 2),
        (("compare", "a.npy", "gone.npy"), "--page", 2),
    ],
)
def test_a_command_that_fails_leaves_no_result_of_an_earlier_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: tuple[str, ...],
    option: str,
    code: int,
) -> None:
    give = giver(tmp_path, monkeypatch, capsys)
    data = np.random.default_rng(0).random((16, 16, 16), np.float32)
    np.save(tmp_path / "a.npy", data)
    data[3, 3, 3] = np.nan
    np.save(tmp_path / "nan.npy", data)
    file = tmp_path / {"--json": "r.json", "--picture": "r.png", "--page": "r.html"}[option]
    file.write_text("of an earlier command")
    ended = give(*command, "--config", "threads", option, file.name)
    assert ended.code == code, ended.err
    assert not file.exists()


def test_the_refusal_of_an_output_that_is_not_complete_names_the_command_that_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    give = giver(tmp_path, monkeypatch, capsys)
    write_volume(tmp_path / "raw.n5", noise((16, 16, 16)), 8)
    sizes = (f"--set={key}=[8,8,8]" for key in ("windows.shape", "output.shard", "output.chunk"))
    whole = ("run", "--config", "threads", "--set=net.name=identity", "--set=windows.block=[1,1,1]", *sizes)
    assert give(*whole, "-o", "o.zarr", "raw.n5/raw", "--only", "0:8,:,:").code == 0
    refused = give("convert", "o.zarr", "copy.tif")
    assert refused.code == 2
    words = " ".join(refused.err.split())
    assert "is incomplete: only 0:8,0:16,0:16 is written" in words
    assert f"`volpipe {shlex.join(whole)} -o o.zarr raw.n5/raw` completes it" in words
    assert "--incomplete" in words
    assert give("info", "o.zarr", "--fast").out.splitlines()[0].endswith("(incomplete, written: 0:8,0:16,0:16)")
    assert give("convert", "o.zarr", "copy.tif", "--incomplete").code == 0
    assert give(*whole, "-o", "o.zarr", "raw.n5/raw").code == 0
    assert give("convert", "o.zarr", "whole.tif").code == 0
