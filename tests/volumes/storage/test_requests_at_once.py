"""Works that wait for other works of their own: all end, however many they are."""

from __future__ import annotations

import subprocess
import sys

NESTED = """
import threading
from volpipe.volumes.storage.requests import REQUESTS_AT_ONCE, each

begun = threading.Barrier(REQUESTS_AT_ONCE)

def outer(number):
    begun.wait(30)  # every thread has one of these
    return each([lambda: each([lambda: number, lambda: -number])] * 2)

assert each([lambda n=n: outer(n) for n in range(REQUESTS_AT_ONCE)]) == [
    [[n, -n]] * 2 for n in range(REQUESTS_AT_ONCE)
]

def failing():
    raise OSError("of an inner work")

try:
    each([lambda: each([failing])])
except OSError as error:
    print(error)
"""


def test_works_that_wait_for_works_end() -> None:
    """Where every thread waited for works that had no thread, a read of many missing chunks hung."""
    ended = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "of an inner work\n"), ended.stderr
