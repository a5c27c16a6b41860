"""Files that options name: which are streams, and by which marks a command knows its own."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from volpipe.volumes.formats.precomputed import EVEN_CHUNK, even_chunk
from volpipe.volumes.storage.result_file import (
    comment,
    generator,
    is_stream,
    json_bytes,
    json_kind,
    page_kind,
    png_bytes,
    png_kind,
    text_kind,
)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/dev/stdout", True), ("/dev/stderr", True), ("/dev/fd/1", True), ("/proc/self/fd/2", True),
        ("/dev/fd/99", True), ("/dev/null", True), ("/dev/fd/x", False), ("/dev", False), ("/no/such", False),
        ("a\0b", False),
    ],
)  # fmt: skip
def test_streams_are_told_from_files(path: str, expected: bool) -> None:
    assert is_stream(Path(path)) is expected


def test_a_pipe_is_a_stream_and_a_file_is_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    assert is_stream(tmp_path / "pipe") and not is_stream(tmp_path / "file") and not is_stream(tmp_path)


def test_each_kind_of_file_is_known_by_its_writer() -> None:
    made, other = "volpipe evaluate --json", "volpipe compare --json"
    data = json_bytes(made, {"a": [1]})
    assert data == b'{\n "written_by": "volpipe evaluate --json",\n "a": [\n  1\n ]\n}\n'
    assert json_kind(made).start.match(data) and not json_kind(other).start.match(data)  # type: ignore[union-attr]
    page = b'<!DOCTYPE html>\n<html lang="en">\n<head>\n' + generator("a --page") + b"\n"
    for names, is_known in ((("a --page",), True), (("b", "a --page"), True), (("b",), False)):
        assert bool(page_kind(*names).start.match(page)) is is_known  # type: ignore[union-attr]
    text = comment("volpipe k8s").encode() + b"x: 1\n"
    assert text_kind("volpipe k8s").start.match(text)  # type: ignore[union-attr]
    assert not text_kind("volpipe slurm").start.match(text)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="Out of range float values"):
        json_bytes(made, {"a": float("nan")})


def test_a_picture_names_its_writer_and_stays_a_picture() -> None:
    file = io.BytesIO()
    Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4)).save(file, "PNG")
    data = png_bytes("volpipe evaluate --picture", file.getvalue())
    image = Image.open(io.BytesIO(data))
    assert image.info["Software"] == "volpipe evaluate --picture"
    np.testing.assert_array_equal(np.asarray(image), np.arange(12).reshape(3, 4))
    assert png_kind("volpipe evaluate --picture").start.match(data)  # type: ignore[union-attr]
    assert not png_kind("another").start.match(data)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "shard", [(64, 64, 64), (256, 256, 256), (128, 64, 32), (96, 96, 96), (33, 64, 64), (4, 1024, 1024), (1, 9, 9)]
)
def test_an_even_chunk_is_the_smallest_of_enough_voxels(shard: tuple[int, int, int]) -> None:
    halved = [tuple(n // 2**k for n in shard) for k in range(9) if all(n % 2**k == 0 and n >= 2**k for n in shard)]
    enough = [chunk for chunk in halved if int(np.prod(chunk)) >= EVEN_CHUNK]
    assert even_chunk(shard) == (enough[-1] if enough else shard)
