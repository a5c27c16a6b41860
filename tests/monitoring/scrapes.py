"""Metrics as a scrape reads them, from a port or a file, and free ports."""

from __future__ import annotations

import socket
import urllib.request
from collections import defaultdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Samples = dict[str, dict[Labels, float]]  # by name and by labels, less the output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def samples(text: str | Path) -> Samples:
    """Return what a scrape, or a file of it, has; that a series is there twice is a fault."""
    found: Samples = defaultdict(dict)
    for family in text_string_to_metric_families(text.read_text() if isinstance(text, Path) else text):
        for sample in family.samples:
            labels = frozenset((key, value) for key, value in sample.labels.items() if key != "output" and value)
            assert labels not in found[sample.name], (sample.name, labels)
            found[sample.name][labels] = sample.value
    return found


def labelled(**labels: str) -> Labels:
    return frozenset(labels.items())


def by_state(all_samples: Samples, name: str, **labels: str) -> dict[str, float]:
    """Return the values of a metric by state, of the series with these labels as well."""
    rest = labelled(**labels)
    series = all_samples[name].items()
    return {dict(each)["state"]: value for each, value in series if each - {("state", dict(each)["state"])} == rest}


def state(all_samples: Samples) -> str:
    """Return the state that the work is in; there is one."""
    (current,) = [name for name, value in by_state(all_samples, "volpipe_state").items() if value]
    return current
