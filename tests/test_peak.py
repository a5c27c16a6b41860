"""Peak memory is that of the process itself."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from conftest import ROOT

CODE = (
    "from volpipe.worker import peak_bytes\nbefore = peak_bytes()\nx = b'1' * (300 << 20)\nprint(before, peak_bytes())"
)


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    large = np.ones(512 << 20, np.uint8)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 300 << 20
    assert after >= 300 << 20
    assert after - before < 310 << 20  # what was held before may have been given back by then
    assert large[-1] == 1
