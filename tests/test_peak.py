"""Peak memory is that of the process itself."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from conftest import ROOT

# What importing took and gave back is no part of what is held before: the system is told to count anew.
CODE = """
import pathlib
from volpipe.usage import peak_bytes
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = peak_bytes()
x = b"1" * (300 << 20)
print(before, peak_bytes())
"""


def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it() -> None:
    large = np.ones(512 << 20, np.uint8)
    done = subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    assert before < 300 << 20
    assert 300 << 20 <= after - before < 310 << 20
    assert large[-1] == 1
