"""A run from a bucket into a bucket, over a line with latency and a limit: its share of the line, and its requests."""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks import inputs
from benchmarks.row import Measure, Outcome, Row, Setting
from benchmarks.session import DEFAULT_RECIPE, IDENTITY, ROOT, Session, environment, session
from volpipe.blockwise.journal import read_records
from volpipe.estimation.memory import memory_bytes
from volpipe.geometry.grid import Box, Grid
from volpipe.recipes.inference import load_recipe
from volpipe.runs.run_folder import RunFolder
from volpipe.runs.worker import RESULTS
from volpipe.synthetic.volume import SyntheticVolume
from volpipe.volumes.storage import object_store
from volpipe.volumes.storage.object_store import Remote
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer
from volpipe.workflow.prepare import prepare
from volpipe.workflow.work_plan import execute

NAME = "bench"
SETTINGS = (*IDENTITY, "tensors.mode=streamed", "output.codec=raw")
RATE = 200e6  # of the line in each direction, in bytes per second
PLAIN_REQUESTS = 32  # at a time, of a plain program in each direction
CHUNK = (64, 64, 64)


@contextmanager
def served(folder: Path, rate: float = 0.0) -> Iterator[Callable[[], Counter[str]]]:
    """Serve the files of `folder` by its name, from a process of its own; give what counts requests since it was asked.

    A line (link) of `rate` bytes per second in each direction lies between; none where it is 0.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(folder, there), daemon=True)
    process.start()
    settings: dict[str, str] = here.recv()

    def requests() -> Counter[str]:
        here.send("count")
        counts: Counter[str] = here.recv()
        return counts

    line = _line(settings["AWS_ENDPOINT_URL"], rate) if rate else nullcontext()
    try:
        with mock.patch.dict(os.environ, settings), line:
            yield requests
    finally:
        process.terminate()
        process.join()


@contextmanager
def _line(url: str, rate: float) -> Iterator[None]:
    """Let this process and its workers reach the server at `url` by a line."""
    port = url.rpartition(":")[2]
    command = [sys.executable, "-m", "benchmarks.stores.link", port, str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as line:
        assert line.stdout is not None
        try:
            with mock.patch.dict(os.environ, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{int(line.stdout.readline())}"}):
                yield
        finally:
            line.terminate()


def _serve(folder: Path, there: Connection) -> None:
    """Serve `folder` in a bucket, and answer what asks for counts; in a process of its own."""
    sys.path.append(str(ROOT / "tests" / "support" / "faults"))
    server = importlib.import_module("bucket")
    vars(server)["PAGE"] = 1000  # keys, as S3 lists them
    with server.serving(NAME) as bucket:
        files = (file for file in folder.rglob("*") if file.is_file())
        bucket.files |= {f"{folder.name}/{file.relative_to(folder)}": file.read_bytes() for file in files}
        for key in bucket.files:
            bucket.tag(key)  # as those of a real server are there before anybody reads
        keys = {"AWS_ACCESS_KEY_ID": server.ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": server.SECRET_KEY}
        there.send({"AWS_ENDPOINT_URL": bucket.url, "AWS_REGION": "eu-west-1", **keys})
        while there.recv():
            there.send(Counter(_kind(*request) for request in bucket.requests))
            bucket.requests.clear()


def _kind(method: str, path: str) -> str:
    return "LIST" if "list-type=2" in path else method


def raw_volume(setting: Setting, side: int, shards: tuple[int, int, int] | None = None) -> Path:
    """Return a container of uncompressed chunks of 64³ of a uint8 volume, `raw`, made once and kept."""
    path = setting.cache / f"raw-{side}{'-sharded' if shards else ''}.zarr"
    done = path.with_suffix(".done")
    if not done.exists():
        tile = np.asarray(SyntheticVolume(inputs.TILE, 0).raw(Box.from_shape(inputs.TILE)))
        spec = ArraySpec((side,) * 3, tile.dtype, CHUNK, shards, codec="raw")
        create_array(path, "raw", spec, "zarr3")
        boxes = Grid(spec.shape, shards or inputs.TILE)
        for box in map(boxes.box, range(len(boxes))):
            repeats = [-(-n // t) for n, t in zip(box.shape, tile.shape, strict=True)]
            data = np.tile(tile, repeats)[Box.from_shape(box.shape).slices]
            open_writer(path, "raw").write(box, np.ascontiguousarray(data))
        done.touch()
    return path


def _plain(source: Remote, keys: list[str], num_files: int) -> float:
    """Return the seconds in which a plain program reads `keys`, and writes as much in `num_files` beside that."""
    place = Remote(source.root, ("plain",), source.endpoint, source.region)
    content = bytes(len(keys) * math.prod(CHUNK) // num_files)

    started = time.perf_counter()
    with ThreadPoolExecutor(PLAIN_REQUESTS) as readers, ThreadPoolExecutor(PLAIN_REQUESTS) as writers:
        works = [readers.submit(object_store.fetch, source / key) for key in keys]
        works += [writers.submit(object_store.write, place / str(number), content) for number in range(num_files)]
        for work in works:
            work.result()
    seconds = time.perf_counter() - started
    object_store.delete(place)
    return seconds


def _run(running: Session, location: str, folder: Path) -> tuple[float, float, float]:
    """Return the seconds of the blocks of a run into the bucket, those of the run, and the peak memory by the plan."""
    out = object_store.parse(f"s3://{NAME}/out.zarr")
    object_store.delete(out)
    started = time.perf_counter()
    with chdir(folder):  # where the run's folder is to be
        plan = prepare(location, load_recipe(DEFAULT_RECIPE, SETTINGS), str(out), folder)
        report = execute(plan, lambda _: nullcontext(running.executors))
    seconds = time.perf_counter() - started
    assert report.missing == []
    kept = RunFolder(next(folder.glob("*.run")))
    usages = [record.usage for record in read_records(kept.journal, RESULTS) if record.stage == "infer"]
    blocks = max(usage.started + usage.seconds for usage in usages) - min(usage.started for usage in usages)
    return blocks, seconds, max(usage.peak_bytes for usage in usages) / memory_bytes(plan, None)


def measure(setting: Setting, repeats: int, rate: float = RATE, side: int = 1024) -> Iterator[Outcome]:
    """Yield seconds of the blocks of a run by those of a plain program that moves as many bytes there, in turn."""
    container = raw_volume(setting, side // 2 if setting.short else side)
    with served(container, rate) as requests, session(setting) as running:
        location = f"s3://{NAME}/{container.name}/raw"
        source = open_volume(location).folder
        assert isinstance(source, Remote)
        keys = [name for name, _ in object_store.list_files(source) if name.startswith("c/")]
        for turn in range(repeats):
            folder = setting.scratch / f"run{turn}"
            folder.mkdir()
            requests()
            blocks, seconds, memory = _run(running, location, folder)
            counts = requests()
            plain = _plain(source, keys, counts["PUT"])
            num_bytes = len(keys) * math.prod(CHUNK)  # each way
            sides = {"blocks": blocks, "run": seconds, "plain program": plain, "line": num_bytes / rate}
            sides |= {"MB/s each way": num_bytes / blocks / 1e6, "plain MB/s each way": num_bytes / plain / 1e6}
            sides |= {"requests per chunk": counts.total() / (len(keys) + counts["PUT"]), "peak / planned": memory}
            yield Outcome(blocks / plain, sides | dict(counts))


def by_line(rate: float, side: int) -> Measure:
    """Return what yields seconds of the blocks by those that the bytes need on a line that the processors can fill."""

    def measured(setting: Setting, repeats: int) -> Iterator[Outcome]:
        for outcome in measure(setting, repeats, rate, side):
            yield Outcome(outcome.sides["blocks"] / outcome.sides["line"], outcome.sides)

    return measured


ROWS = [
    Row(
        "s3",
        "blocks from bucket to bucket / a plain program's reads and writes, 20 ms, 200 MB/s",
        1.5,
        1.11,
        measure,
        why="1024³ uint8, chunks of 64³, uncompressed on both sides so that the line is what limits; identity, two "
        "workers that are up, from the start of the first block to the end of the last; requests are all that came, "
        "with those of plan and report, by chunks read and files written; the plain program makes 32 requests at a "
        "time in each direction, the line is a process between",
    ),
    Row(
        "line",
        "blocks from bucket to bucket / the line's own time, 20 ms, 12.5 MB/s",
        1.25,
        1.11,
        by_line(12.5e6, 1024),
        why="as `s3`, on a line that the processors are faster than; the bytes of the volume by its rate, as reading "
        "and writing go on at once; the first block is not written meanwhile, and the last not read",
    ),
    Row(
        "line-slabs",
        "blocks in slabs from bucket to bucket / the line's own time, 20 ms, 50 MB/s",
        1.25,
        1.11,
        by_line(50e6, 1344),
        why="as `line`, 1344³, whose blocks are shards of 54 MB that are uploaded in parts while they are computed",
    ),
]
