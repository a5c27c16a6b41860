"""Trees and tracebacks that several threads make at once."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from volpipe.segmentation.tasks import load, save
from volpipe.syntax import parse, traceback_of

NESTED = "a = ((1 + 2) + (3 + (4 + 5))) * f(g(h(1)))\n" * 40


@pytest.fixture
def switching() -> Iterator[None]:
    """Change threads wherever garbage is collected, so also in the middle of a tree."""

    def switch(*_: object) -> None:
        time.sleep(1e-4)

    before = gc.get_threshold()
    gc.callbacks.append(switch)
    gc.set_threshold(50)
    yield
    gc.set_threshold(*before)
    gc.callbacks.remove(switch)


def parse_and_fail() -> None:
    parse(NESTED)
    raise ValueError(("at the end", 1)[0] + "")


def tracebacks(_: int) -> set[str]:
    found = set()
    for _ in range(50):
        try:
            parse_and_fail()
        except ValueError as error:
            found.add(traceback_of(error))
    return found


@pytest.mark.usefixtures("switching")
def test_threads_get_trees_and_tracebacks_at_once() -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(tracebacks, range(2))
    assert one == other and len(one) == 1
    assert one.pop().endswith("ValueError: at the end")


@pytest.mark.usefixtures("switching")
def test_threads_read_arrays_at_once(tmp_path: Path) -> None:
    save(tmp_path / "names.npz", ids=np.arange(3))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: load(tmp_path / "names.npz", ["ids"])["ids"].tolist(), range(400)))
    assert found == [[0, 1, 2]] * 400
