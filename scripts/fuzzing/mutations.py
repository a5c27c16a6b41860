"""Mutations of files: bits flipped, bytes cut, moved and put in, numbers and fields replaced by interesting ones.

Not here: what comes of them (trial). All is drawn from one seed, so that a number names an input.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Rng = np.random.Generator
Files = Mapping[str, bytes | None]  # None for a file that is left out

NUMBERS = (0, 1, -1, 2, 3, 7, 8, 127, 128, 255, 256, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1, -(2**31), 2**31,
           2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, 10**18, 10**40)  # fmt: skip
TEXTS = ("", "..", "../..", "/", "/etc/passwd", "a/../../b", "s0", "0", ".", "\0", "é", "x" * 300, "NaN", "Infinity",
         "gzip", "blosc", "zstd", "pickle", "vlen-utf8", "uint8", "float64", "<u2", "|b1", "O", "F")  # fmt: skip
ODD: tuple[Any, ...] = (None, True, False, 0.5, -1.5, 1e308, float("nan"), float("inf"), [], {}, [[]], [0] * 9,
       [1] * 3, [-1] * 3, [2**62] * 3, {"id": "pickle"}, {"name": "gzip", "configuration": {"level": 99}})  # fmt: skip
JSON = (".json", ".zarray", ".zattrs", ".zgroup")
HEADER_BYTES = 1024  # where most formats say what they are
MAX_CHANGES = 4


def mutate(files: Mapping[str, bytes], rng: Rng) -> dict[str, bytes | None]:
    """Return the files that change, as they become."""
    changed: dict[str, bytes | None] = {}
    for _ in range(1 + int(rng.random() < 0.15)):
        name = _choose(sorted(files), rng)
        if rng.random() < 0.02 and len(files) > 1:
            changed[name] = None
            continue
        text = changed.get(name) or files[name]
        if name.endswith(JSON) and rng.random() < 0.85:
            changed[name] = _json(text, rng)
        else:
            other = files[_choose(sorted(files), rng)]
            changed[name] = _bytes(text, other, rng)
    return changed


def _choose(choices: Any, rng: Rng) -> Any:  # Any: one of what comes in
    return choices[int(rng.integers(len(choices)))]


def _bytes(text: bytes, other: bytes, rng: Rng) -> bytes:
    """Return `text` with a few changes, parts of `other` among them."""
    data = bytearray(text)
    for _ in range(int(rng.integers(1, MAX_CHANGES + 1))):
        _choose(CHANGES, rng)(data, other, rng)
    return bytes(data)


def _place(data: bytearray, rng: Rng) -> int:
    """Return a place in `data`, half of the time where a header would be."""
    most = min(len(data), HEADER_BYTES) if rng.random() < 0.5 else len(data)
    return int(rng.integers(most)) if most else 0


def _flip(data: bytearray, other: bytes, rng: Rng) -> None:
    if data:
        data[_place(data, rng)] ^= 1 << int(rng.integers(8))


def _cut(data: bytearray, other: bytes, rng: Rng) -> None:
    del data[_place(data, rng) :]


def _drop(data: bytearray, other: bytes, rng: Rng) -> None:
    place = _place(data, rng)
    del data[place : place + int(rng.integers(1, 33))]


def _insert(data: bytearray, other: bytes, rng: Rng) -> None:
    place = _place(data, rng)
    data[place:place] = rng.bytes(int(rng.integers(1, 33)))


def _splice(data: bytearray, other: bytes, rng: Rng) -> None:
    start = int(rng.integers(len(other) + 1))
    part = other[start : start + int(rng.integers(1, 65))]
    place = _place(data, rng)
    data[place : place + len(part)] = part


def _number(data: bytearray, other: bytes, rng: Rng) -> None:
    """Put an interesting number where there may have been one."""
    size, letter = _choose(((1, "B"), (2, "H"), (4, "I"), (8, "Q")), rng)
    number = int(_choose(NUMBERS, rng)) % 2 ** (8 * size)
    place = _place(data, rng)
    place -= place % size if rng.random() < 0.8 else 0
    data[place : place + size] = struct.pack(f"{_choose('<>', rng)}{letter}", number)


CHANGES: tuple[Callable[[bytearray, bytes, Rng], None], ...] = (_flip, _flip, _cut, _drop, _insert, _splice, _number,
                                                                _number, _number)  # fmt: skip


def _json(text: bytes, rng: Rng) -> bytes:
    """Return the JSON of `text` with one or two of its values replaced, left out, doubled or moved."""
    try:
        tree = json.loads(text)
    except ValueError:
        return _bytes(text, text, rng)
    for _ in range(1 + int(rng.random() < 0.3)):
        _change_value(tree, rng)
    return json.dumps(tree).encode()


def _change_value(tree: Any, rng: Rng) -> None:  # Any: JSON
    """Change one value somewhere in `tree`."""
    node = tree
    while isinstance(node, dict | list) and node:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = _choose(keys, rng)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.75:
            node = node[key]
            continue
        kind = rng.random()
        if kind < 0.1:
            del node[key]
        elif kind < 0.2 and isinstance(node, dict):
            node[_choose(sorted(node), rng)] = node[key]
        elif kind < 0.25 and isinstance(node, list):
            node.append(node[key])
        elif kind < 0.3:
            node[key] = _nested(int(rng.integers(2, 400)))
        else:
            node[key] = _odd(node[key], rng)
        return


def _nested(depth: int) -> Any:  # Any: JSON
    tree: Any = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def _odd(value: Any, rng: Rng) -> Any:  # Any: JSON
    """Return something to stand for `value`, most often of its kind."""
    kind = rng.random()
    if isinstance(value, int) and kind < 0.5:
        return int(_choose(NUMBERS, rng)) if kind < 0.35 else value + int(rng.integers(-3, 4))
    if isinstance(value, str) and kind < 0.5:
        return _choose(TEXTS, rng)
    return _choose((*NUMBERS, *TEXTS, *ODD), rng)
