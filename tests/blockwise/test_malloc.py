"""Arrays outside of malloc's heap."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from volpipe.blockwise.malloc import mapped

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NUM_BYTES = 64 << 20


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.mark.parametrize("shape", [(3, 5, 7), (0, 4, 4)])
def test_a_mapped_array_is_of_zeros_and_can_be_written(shape: tuple[int, ...]) -> None:
    array = mapped(shape, np.dtype(np.uint16))
    assert (array.shape, array.dtype, array.any()) == (shape, np.uint16, False)
    array[...] = 9
    assert (array == 9).all()


@pytest.mark.skipif(
    not LARGE_PAGES.is_file() or "[never]" in LARGE_PAGES.read_text(), reason="the system has no large pages"
)
def test_a_mapped_array_has_large_pages() -> None:
    array = mapped((NUM_BYTES,), np.dtype(np.uint8))
    before = page_faults()
    array[:] = 1
    assert page_faults() - before < NUM_BYTES / resource.getpagesize() / 2  # a tenth and less; some may not be had
