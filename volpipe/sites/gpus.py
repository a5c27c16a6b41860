"""The GPUs that sites gave before, remembered by what was asked for, so that plans need not start a job to know them.

Not here: how they were found (apps.net_times), or how fast nets are on them (nets.cache).
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from volpipe.blockwise.pool import Gpu
from volpipe.nets.cache import cache_file
from volpipe.volumes.storage import paths

_GPU = TypeAdapter(Gpu)


def remembered_gpu(asked: str) -> Gpu | None:
    """Return the GPU that came where this was `asked` for; None where nobody looked."""
    with contextlib.suppress(OSError, ValidationError):  # none, or a file cut short
        return _GPU.validate_json(_memory_of(asked).read_bytes())
    return None


def remember_gpu(asked: str, gpu: Gpu) -> None:
    """Keep that this `gpu` came where this was `asked` for.

    Raises:
        OSError: the user's cache cannot be written.
    """
    paths.write(_memory_of(asked), _GPU.dump_json(gpu))


def _memory_of(asked: str) -> Path:
    return cache_file("site", hashlib.sha256(asked.encode()).hexdigest())
