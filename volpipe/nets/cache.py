"""The user's cache: what was measured or checked of nets, kept by hashes of their code, options and weights.

Not here: the measuring (load, estimation.measure), or the facts that ship with volpipe (facts).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from volpipe.nets import files
from volpipe.nets.facts import (
    NetFacts,
    NetSpeeds,
    choice_digest,
    is_shipped,
    models_folder,
    shipped_speeds,
    speeds_of_members,
    torch_version,
)
from volpipe.recipes.inference import NetChoice
from volpipe.volumes.storage import paths

log = logging.getLogger(__name__)

_memory_of: ContextVar[dict[Any, Any] | None] = ContextVar("results of checks", default=None)  # Any: of any function
R = TypeVar("R")
M = TypeVar("M", bound=BaseModel)


@contextlib.contextmanager
def remembering() -> Iterator[None]:
    """Examine and check each net once meanwhile: many plans are made of few nets, none of which changes."""
    token = _memory_of.set({})
    try:
        yield
    finally:
        _memory_of.reset(token)


def once(function: Callable[..., R]) -> Callable[..., R]:
    """Return `function`, whose results are kept while somebody is `remembering`."""

    @functools.wraps(function)
    def call(choice: NetChoice, *arguments: Any) -> R:  # Any: the function's own
        memory = _memory_of.get()
        if memory is None:
            return function(choice, *arguments)
        key = (function.__name__, choice.model_dump_json(), *map(str, arguments))
        if key not in memory:
            memory[key] = function(choice, *arguments)
        result: R = memory[key]
        return result

    return call


def file_of(choice: NetChoice, search_path: str, what: str) -> Path | None:
    """Return the cache file for `what` of a shipped net; None for a net whose code may be anywhere."""
    if not is_shipped(choice):
        return None
    folder = Path(__file__).parent
    code = [folder / "load.py", folder / "facts.py", *sorted(models_folder().glob("*.py"))]
    digest = choice_digest(choice, search_path, code, torch_version(), what)
    return None if digest is None else cache_file(files.label_of(choice.name), digest)


def cache_file(name: str, digest: str) -> Path:
    """Return the file of the user's cache for what `digest` stands for, of a net or a site called `name`."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "volpipe" / f"{name}-{digest[:24]}.json"


def kept(memory: Path | None, kind: type[R], make: Callable[[], R]) -> R:
    """Return what the cache file `memory` holds, or else what `make` returns, which is written to it."""
    values = TypeAdapter(kind)
    if memory is not None and memory.is_file():
        with contextlib.suppress(OSError, ValidationError):  # a file cut short is written again
            return values.validate_json(memory.read_bytes())
    result = make()
    if memory is not None:
        try:
            paths.write(memory, values.dump_json(result))
        except OSError as error:  # without a cache, the same work is done again
            log.debug("%s cannot be written: %s", memory, error)
    return result


def without_weights(choice: NetChoice) -> NetChoice:
    """Return the `choice` of the same net with whatever weights."""
    without = {"weights": None, "weights_key": None}
    several = choice.ensemble and tuple(entry.model_copy(update=without) for entry in choice.ensemble)
    return choice.model_copy(update={**without, "ensemble": several})


def file_of_code(choice: NetChoice, search_path: str, what: str) -> Path | None:
    """Return the cache file for `what` of a net from a file; None for a net whose code may be anywhere."""
    for name in (member.name for member in choice.members):
        place = name.removeprefix(files.FUNCTION).rpartition(":")[0]
        is_file = files.is_program(name) or place.endswith(".py")
        if choice.ensemble and not place:  # a shipped net among others, whose code is known as well
            continue
        if not (is_file or (place and files.is_beside(place, Path(search_path)))):
            return None
    code = files.code_hash_of(choice, search_path)
    modules = sorted(Path(__file__).parent.glob("*.py"))
    digest = choice_digest(without_weights(choice), search_path, modules, torch_version(), code, what)
    return cache_file(files.label_of(choice.name), digest) if code and digest else None


def load_measured(choice: NetChoice, search_path: str, what: str, kind: type[M]) -> M | None:
    """Return `what` was measured of the net of `choice` and is remembered; None where nothing is."""
    memory = _file_of_measured(choice, search_path, what)
    if memory is not None and memory.is_file():
        with contextlib.suppress(OSError, ValidationError):  # a file cut short is written again
            return kind.model_validate_json(memory.read_bytes())
    return None


def store_measured(choice: NetChoice, search_path: str, what: str, value: BaseModel) -> bool:
    """Keep `what` was measured of the net of `choice` in the user's cache; return whether it can be kept."""
    memory = _file_of_measured(choice, search_path, what)
    if memory is None:
        return False
    try:
        paths.write(memory, value.model_dump_json().encode())
    except OSError as error:  # without a cache, it is measured again
        log.debug("%s cannot be written: %s", memory, error)
        return False
    return True


def can_store_measured(choice: NetChoice, search_path: str) -> bool:
    """Return whether anything can be remembered of the net of `choice`: its code is known."""
    return _file_of_measured(choice, search_path, "") is not None


def _file_of_measured(choice: NetChoice, search_path: str, what: str) -> Path | None:
    memory_of = file_of if is_shipped(choice) else file_of_code
    return memory_of(without_weights(choice), search_path, what)  # where their numbers matter, `what` names them


def kept_speeds(choice: NetChoice, facts: NetFacts, search_path: str, processor: str) -> NetSpeeds | None:
    """Return what windows of the net of `choice` cost on a processor or GPU, if they were measured there."""
    return load_measured(choice, search_path, _speeds_key(facts, processor), NetSpeeds)


def keep_speeds(choice: NetChoice, facts: NetFacts, search_path: str, speeds: NetSpeeds) -> bool:
    """Keep the cost of windows of the net of `choice` on a processor; return whether it can be kept."""
    return store_measured(choice, search_path, _speeds_key(facts, speeds.processor), speeds)


def _speeds_key(facts: NetFacts, processor: str) -> str:
    return f"speeds of {facts.identity.form} on {processor}"


def known_speeds(choice: NetChoice, facts: NetFacts, search_path: str, processor: str) -> NetSpeeds | None:
    """Return what windows of the net of `choice` cost on a `processor`: as measured there, else as shipped."""
    known = kept_speeds(choice, facts, search_path, processor) or shipped_speeds(choice)
    if known is not None or choice.ensemble is None:
        return known
    pairs = zip(choice.members, facts.each, strict=True)
    of_members = [known_speeds(member, own, search_path, processor) for member, own in pairs]
    measured = [speeds for speeds in of_members if speeds is not None]
    return speeds_of_members(measured) if len(measured) == len(of_members) else None
