"""Nets that a notebook hands over as torch modules, under names that recipes can give while they are used.

Not here: nets by name, file or package (nets).
"""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from volpipe.errors import VolpipeError
from volpipe.resolve import describe_error

if TYPE_CHECKING:
    from torch import nn

PLACE = "volpipe_notebook_nets"  # no file has it: nothing measured of one net is kept for another of the same name
_lock = threading.Lock()


def is_module(net: object) -> TypeGuard[nn.Module]:
    """Return whether `net` is a torch module; torch is not imported to tell."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(net, torch.nn.Module)


@contextmanager
def named(net: nn.Module) -> Iterator[str]:
    """Yield a name for `net`, as a recipe's net.name has it.

    What is built by that name are copies on the CPU: the notebook's own net stays on its device and in its mode.

    Raises:
        VolpipeError: the net cannot be copied.
    """
    label = type(net).__name__
    try:
        own = copy.deepcopy(net).cpu()
    except Exception as error:  # whatever the net's own code raises
        raise VolpipeError(
            f"net {label} cannot be copied ({describe_error(error)}); write a function that returns it into a file, "
            "and give file.py:function"
        ) from error
    with _lock:
        registry = sys.modules.setdefault(PLACE, ModuleType(PLACE))
        names = itertools.chain([label], (f"{label}_{i}" for i in itertools.count(2)))
        name = next(name for name in names if not hasattr(registry, name))
        setattr(registry, name, lambda: copy.deepcopy(own))
    try:
        yield f"{PLACE}:{name}"
    finally:
        delattr(registry, name)
