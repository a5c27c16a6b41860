"""Volumes for tests: made, written, and told apart by one hash."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from volpipe.errors import VolumeError
from volpipe.geometry.grid import Box
from volpipe.volumes.formats.container import RUN_KEY
from volpipe.volumes.volume import ArraySpec, create_array, open_volume, open_writer


def write_volume(path: Path, data: np.ndarray, chunk: int = 16) -> Path:
    """Write `data` (z, y, x), or (c, z, y, x), as an N5 volume."""
    chunks, axes = tuple(min(chunk, n) for n in data.shape), ("c", "z", "y", "x")[-data.ndim :]
    spec = ArraySpec(data.shape, data.dtype, chunks, axes=axes, codec="gzip")
    create_array(path, "raw", spec, "n5")
    open_writer(path, "raw").write(Box.from_shape(data.shape), data)
    return path


def noise(shape: tuple[int, ...], dtype: str = "uint8", seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return rng.normal(0, 100, shape).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


def fingerprint(path: Path | str) -> str:
    """Return one hash of every name and byte below `path`, but for the group with what changes from run to run."""
    digest = hashlib.sha256()
    for file in sorted(Path(path).rglob("*")):
        if file.is_file() and file.parent.name != RUN_KEY:
            digest.update(str(file.relative_to(path)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def windowed(
    window: tuple[int, ...], overlap: tuple[int, ...], block: tuple[int, ...], blend: str, placement: str = "lattice"
) -> list[str]:
    return [
        f"windows.shape={list(window)}",
        f"windows.overlap={list(overlap)}",
        f"windows.block={list(block)}",
        f"windows.blend={blend}",
        f"windows.placement={placement}",
    ]


def outcomes_of_damage(file: Path, size: int, times: int, key: str = "") -> set[str]:
    """Return what came of reading `file` with one of its first `size` bytes changed: "read" or "refused"."""
    whole, rng, outcomes = file.read_bytes(), np.random.default_rng(0), set[str]()
    for place in rng.integers(size, size=times).tolist():
        broken = bytearray(whole)
        broken[place] ^= int(rng.integers(1, 256))
        file.write_bytes(broken)
        try:
            open_volume(file, key or None).open()[...]
            outcomes.add("read")
        except VolumeError:
            outcomes.add("refused")
    return outcomes
