"""Hashes of files and folders, without what differs between two runs of the same commands on one machine."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hashing.commands import Step

# Left out of the attributes `volpipe` of outputs. Paths stay, with FOLDER in place of where the outputs lie.
VOLATILE = {
    "started": "a time",
    "ended": "a time",
    "sessions": "times, one for each time that the command was given",
    "hosts": "a name of the machine",
    "devices": "a name of the machine's processor",
    "packages": "versions",
    "python": "a version",
    "version": "a version",
    "code_sha256": "a hash of a net's source; it has lines of its own, `net code`",
}
VOLATILE_OF_STEPS = {"seconds": "a time", "waited": "a time", "time": "a time"}  # in losses.jsonl
UUID = re.compile(rb'UUID="urn:uuid:[0-9a-f-]{36}"')  # of an OME-TIFF: drawn anew for each file
METADATA = ("zarr.json", ".zattrs", "attributes.json")


def lines_of(folder: Path, step: Step) -> Iterator[str]:
    """Yield name and hash of each output of `step`."""
    for name in step.outputs:
        yield f"{name} {tree_hash(folder / name, folder)}"


def tree_hash(path: Path, folder: Path) -> str:
    """Return the SHA-256 of a file, or of all files in a folder with their relative names."""
    if path.is_file():
        return hashlib.sha256(content(path, folder)).hexdigest()
    digest = hashlib.sha256()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    if not files:
        sys.exit(f"{path} has no files")
    for file in files:
        digest.update(f"{file.relative_to(path)} {hashlib.sha256(content(file, folder)).hexdigest()}\n".encode())
    return digest.hexdigest()


def content(file: Path, folder: Path) -> bytes:
    """Return what counts of a file: its bytes, or what is the same in two runs on one machine."""
    if file.name in METADATA and b'"volpipe"' in file.read_bytes():
        return placeless(json.dumps(stable(json.loads(file.read_bytes())), indent=1), folder)
    if file.name == "losses.jsonl":
        steps = [json.loads(line) for line in file.read_text().splitlines()]
        return json.dumps([{k: v for k, v in step.items() if k not in VOLATILE_OF_STEPS} for step in steps]).encode()
    if file.suffix == ".tif":
        return UUID.sub(b"UUID", file.read_bytes())
    if file.suffix == ".pt":
        return checkpoint(file)
    return placeless(file.read_text(), folder) if file.suffix in (".json", ".toml") else file.read_bytes()


def placeless(text: str, folder: Path) -> bytes:
    return text.replace(str(folder), "FOLDER").encode()


def stable(tree: Any, *, inside: bool = False) -> Any:  # Any: JSON
    """Return `tree` without what is VOLATILE in its attributes `volpipe`."""
    if isinstance(tree, list):
        return [stable(entry, inside=inside) for entry in tree]
    if not isinstance(tree, dict):
        return tree
    kept = {key: value for key, value in tree.items() if not (inside and key in VOLATILE)}
    return {key: stable(value, inside=inside or key == "volpipe") for key, value in kept.items()}


def checkpoint(file: Path) -> bytes:
    """Return names and values in a checkpoint: the name of the process that wrote it is in the file's own bytes."""
    import torch

    def flat(value: Any, name: str) -> Iterator[str]:  # Any: tensors, numbers and what holds them
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from flat(inner, f"{name}/{key}")
        elif isinstance(value, list | tuple):
            for number, inner in enumerate(value):
                yield from flat(inner, f"{name}/{number}")
        elif isinstance(value, torch.Tensor):
            data = value.detach().contiguous().numpy().tobytes()
            yield f"{name} {value.dtype} {tuple(value.shape)} {hashlib.sha256(data).hexdigest()}"
        else:
            yield f"{name} {value!r}"

    return "\n".join(flat(torch.load(file, map_location="cpu", weights_only=True), "")).encode()
