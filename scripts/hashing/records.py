"""The contents of folders of runs that are no output: hashes of plans, and the names in records."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hashing.contents import placeless


def record_lines(folder: Path) -> Iterator[str]:
    """Yield hashes of plans, whose text a run's identity is made of, and the names in all records beside outputs."""
    for name in ("plan.json", "label.json"):
        for file in sorted(folder.rglob(name)):
            told = json.loads(file.read_bytes())
            code = told.pop("code_sha256", None)  # of models/, not of volpipe/
            text = placeless(json.dumps(told), folder)
            yield f"{file.relative_to(folder)} {hashlib.sha256(text).hexdigest()}"
            if code is not None:
                yield f"net code of {file.relative_to(folder)} {code}"
    names, stages = names_in_records(folder)
    for name, keys in sorted(names.items()):
        yield f"keys of {name}: {' '.join(sorted(keys))}"
    yield f"stages: {', '.join(sorted(stages))}"


def names_in_records(folder: Path) -> tuple[dict[str, set[str]], set[str]]:
    """Return the keys in JSON files of runs and trainings, by the file's name, and the stages in journals."""
    names, stages = defaultdict[str, set[str]](set), set[str]()
    for run_folder in (path for suffix in ("run", "train", "sweep") for path in folder.rglob(f"*.{suffix}")):
        for file in (f for pattern in ("*.json", "*.jsonl", "0*/*.json*") for f in run_folder.glob(pattern)):
            lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
            for tree in map(json.loads, lines):
                names[file.name] |= set(keys_in(tree))
                if file.suffix == ".jsonl" and "stage" in tree:
                    stages.add(tree["stage"])
    return names, stages


def keys_in(tree: Any) -> Iterator[str]:  # Any: JSON
    """Yield the keys of all objects in `tree`, but for names of files and numbers, which are data."""
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    if isinstance(tree, dict):
        yield from (key for key in tree if "/" not in key and not key.isdigit())
    for value in values:
        yield from keys_in(value)
