"""The logs of a training: lines of JSON, and an event file for TensorBoard, which workers need not have installed.

Not here: the entries (loop). An event file is a row of records, each a message of protocol buffers
(https://protobuf.dev, the encoding) between its length and checksums, as in TensorFlow's record files
(tensorflow/core/lib/io)::

    length, 8 bytes | masked CRC32C of it, 4 | message | masked CRC32C of it, 4      all little-endian
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from volpipe.recipes.training import EVENTS, LOSSES
from volpipe.volumes.storage.paths import atomic_write

EVENT_FILE = "events.out.tfevents.0.volpipe"
MASK = 0xA282EAD8  # of TensorFlow's checksums
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types
VERSION = b"brain.Event:2"
SCORES = ("psnr", "auc", "mean dice")  # keys of a validation, one for each kind; higher is better
CHANCE = 0.6  # an AUC below it: of shuffled labels it is 0.5, of nets of any use 0.8 and more
PACE_BYTES, PACE_SECONDS = 1 << 16, 120.0  # of the end of the log, by which the speed is measured

Write = Callable[[Mapping[str, float]], None]  # of an entry


@contextmanager
def open_log(folder: Path, step: int) -> Iterator[Write]:
    """Yield a function that adds an entry to both logs in the training's `folder`, which are first cut at `step`."""
    entries = [entry for entry in read_log(folder) if entry["step"] <= step]
    write_events(folder / EVENTS, entries)
    losses, events = folder / LOSSES, folder / EVENTS / EVENT_FILE
    # A new file: what a rank of a killed driver still writes goes with the old one.
    atomic_write(losses, "".join(json.dumps(entry) + "\n" for entry in entries).encode())
    with losses.open("a", encoding="utf-8", buffering=1) as lines, events.open("ab", buffering=0) as records:

        def write(entry: Mapping[str, float]) -> None:
            lines.write(json.dumps(entry) + "\n")
            records.write(event(entry))

        yield write


def read_log(folder: Path, accepts: Callable[[str], bool] = bool) -> list[dict[str, float]]:
    """Return the entries of a training's log whose lines are accepted, without a last line that is unfinished."""
    path = folder / LOSSES
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.endswith("\n") and accepts(line)]


def sampled_log(folder: Path, most: int, accepts: Callable[[bytes], bool]) -> Iterator[dict[str, float]]:
    """Yield about `most` entries of a training's log, evenly spread, and all whose lines are accepted.

    Lines that are not whole or damaged are left out.
    """
    path = folder / LOSSES
    if not path.is_file():
        return
    with path.open("rb") as lines:
        every = -(-sum(1 for _ in lines) // most)
        lines.seek(0)
        for number, line in enumerate(lines):
            if number % every and not accepts(line):
                continue
            with contextlib.suppress(ValueError):
                yield json.loads(line)


def read_scores(folder: Path) -> list[tuple[int, float]]:
    """Return step and score of each validation in a training's log, without damaged lines, and NaN of equal labels."""
    path, scores = folder / LOSSES, list[tuple[int, float]]()
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        name = next((name for name in SCORES if f'"{name}"'.encode() in line), None)
        if name is not None:
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if not math.isnan(entry[name]):
                    scores.append((int(entry["step"]), entry[name]))
    return scores


def scores_in(entry: Mapping[str, float]) -> dict[str, float]:
    """Return the scores in an entry of a training's log, by name, without losses, rates and times."""
    return {name: value for name, value in entry.items() if name in (*SCORES, "accuracy") or name.startswith("dice ")}


def no_better(folder: Path) -> str:
    """Return a sentence if the weights of a training are no better than those that it began with; "" otherwise."""
    scores = read_scores(folder)
    if len(scores) < 2 or scores[0][0] or scores[-1][1] > scores[0][1]:
        return ""
    (_, before), (step, after) = scores[0], scores[-1]
    return (
        f"on what was held out the net is no better than before: {before:.5g} before, {after:.5g} after step {step:,}. "
        "Keep the weights that it began with; a smaller train.learning_rate, fewer steps or more data may do better"
    )


def near_chance(folder: Path) -> str:
    """Return a sentence if the last score of a training on labels is near chance; "" otherwise."""
    aucs = [entry["auc"] for entry in read_log(folder, lambda line: '"auc"' in line)]
    if not aucs or not aucs[-1] < CHANCE:
        return ""
    return (
        f"AUC {aucs[-1]:.2f} is chance or near it (0.5): the net cannot tell which voxels are of one object. Look "
        "whether the labels lie on the image in a viewer (axes, flips, place) and number objects; else more steps or "
        "another train.learning_rate may do"
    )


def last_step(folder: Path) -> int:
    """Return the last step in the log of a training, 0 without one; only the end of the file is read."""
    entries = last_entries(folder, 4096)
    return int(entries[-1]["step"]) if entries else 0


@dataclass(frozen=True)
class TrainingPace:
    """How far a training is by its log: its last step, the loss of that, and steps per second; None where unknown."""

    step: int
    loss: float
    speed: float | None


def read_pace(folder: Path) -> TrainingPace | None:
    """Return the pace of the training in `folder`, None before its first step; only the end of its log is read."""
    entries = [entry for entry in last_entries(folder, PACE_BYTES) if entry["step"]]
    if not entries:
        return None
    last = entries[-1]
    recent = [entry for entry in entries if last["time"] - entry["time"] < PACE_SECONDS]
    seconds = (last["time"] - recent[0]["time"]) / (len(recent) - 1) if len(recent) > 1 else last["seconds"]
    return TrainingPace(int(last["step"]), float(last["loss"]), 1 / seconds if seconds > 0 else None)


def last_entries(folder: Path, num_bytes: int) -> list[dict[str, float]]:
    """Return the whole entries in the last `num_bytes` of a training's log, oldest first."""
    path = folder / LOSSES
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - num_bytes))
        lines = file.read().split(b"\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}")]


def write_events(folder: Path, entries: Iterable[Mapping[str, float]]) -> None:
    """Write the scalars of `entries`, each with its "step" and "time", to a new event file in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / EVENT_FILE
    partial = path.with_name(f".{EVENT_FILE}")
    with partial.open("wb") as file:
        file.write(record(_key(1, FIXED64) + struct.pack("<d", 0.0) + _bytes(3, VERSION)))
        for entry in entries:
            file.write(event(entry))
    partial.replace(path)


def event(entry: Mapping[str, float]) -> bytes:
    """Return a record with the scalars of one step: message Event with fields wall_time 1, step 2, summary 5."""
    values = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _key(2, FIXED32) + struct.pack("<f", value))  # tag 1, simple_value 2
        for name, value in entry.items()
        if name not in ("step", "time")
    )
    time = _key(1, FIXED64) + struct.pack("<d", entry.get("time", 0.0))
    step = _key(2, VARINT) + _varint(int(entry["step"]))
    return record(time + step + _bytes(5, values))


def record(message: bytes) -> bytes:
    """Return `message` framed as a record."""
    length = struct.pack("<Q", len(message))
    return length + _checksum(length) + message + _checksum(message)


def _checksum(data: bytes) -> bytes:
    from google_crc32c import value

    crc = value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + MASK) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value >= 0x80:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(value)) + value
