"""Requests to stores: many at a time, made again after pauses that grow where they fail in passing; what errors mean.

Not here: the requests (object_store), tensorstore's, which has retries of its own, or damaged bytes on a disk (damage).
"""

from __future__ import annotations

import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from contextvars import ContextVar
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Generic, Self, TypeVar

if TYPE_CHECKING:
    from volpipe.geometry.grid import Box, Grid  # commands that read no array need no numpy

T = TypeVar("T")
log = logging.getLogger(__name__)

REQUESTS_AT_ONCE, FEWEST_AT_ONCE, BYTES_AT_ONCE = 32, 4, 16 << 20
# Half of each at least, as it is drawn, so that workers that failed together do not come again together.
PAUSES_SECONDS = (0.25, 0.5, 1.0, 2.0, 4.0)
MOST_SECONDS = 30.0  # after which no request is made again, so that a server that says nothing is told soon
UNREACHED_PAUSES = 2  # where nobody listens: most often the address is wrong
PASSING = re.compile(
    r"status code: (429|50[0234])|SlowDown|RequestTimeout|error sending request|body error|error decoding|timed out"
)
UNREACHED = re.compile(r"Connection ?refused|dns error|failed to lookup")
DAMAGE = ("FAILED_PRECONDITION", "DATA_LOSS", "INVALID_ARGUMENT", "OUT_OF_RANGE")  # tensorstore's words for it
DENIED = r"40[13] (Unauthorized|Forbidden)|AccessDenied|PERMISSION_DENIED"
REASONS: Mapping[str, str] = {
    r"NoSuchBucket": "there is no bucket {bucket}; check its name, and the endpoint ({server})",
    rf"{DENIED}|InvalidAccessKeyId|SignatureDoesNotMatch": (
        "access denied ({signed}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
        "where a bucket may be read but not listed, give the whole key of the array"
    ),
    r"PermanentRedirect|Redirect|redirect|AuthorizationHeaderMalformed|301 ": (
        "the bucket lies in another region than {region}; set AWS_REGION, or add ?region=NAME to the location"
    ),
    r"range .* was ignored|non-partial response|Range request not supported": (
        "{server} sends whole files alone, and sharded arrays are read in parts; copy it to a folder or to s3://"
    ),
    r"error sending request|timed out|Timeout was reached|Could not (connect|resolve)|curl_code": (
        "no answer from {server}; check the address, ?endpoint= or AWS_ENDPOINT_URL, and the network"
    ),
}

_repeated: list[str] = []  # why, of each request that was made again
_lock = threading.Lock()
_inside: ContextVar[bool] = ContextVar("inside", default=False)  # whether this thread is one of the pool


def is_damage(error: Exception) -> bool:
    """Tell whether `error` is about the bytes that came, not about the way to them."""
    text = str(error)
    return text.startswith(DAMAGE) and not any(re.search(pattern, text) for pattern in REASONS)


def patiently(what: object, request: Callable[[], T]) -> T:
    """Return what `request` gives; one that fails in passing is made again.

    Raises:
        Exception: the last one, with a note on how often and how long it was tried.
    """
    started, tries = time.monotonic(), 0
    while True:
        tries += 1
        try:
            return request()
        except Exception as error:
            if not PASSING.search(str(error)):
                raise
            seconds = time.monotonic() - started
            pauses = PAUSES_SECONDS[: UNREACHED_PAUSES if UNREACHED.search(str(error)) else None]
            if tries > len(pauses) or seconds > MOST_SECONDS:
                error.add_note(f"tried {tries} times over {seconds:.0f} s")
                raise
            pause = pauses[tries - 1] * random.uniform(0.5, 1.0)
            _note_retry(what, error, pause)
        time.sleep(pause)


def _note_retry(what: object, error: Exception, pause: float) -> None:
    reason = " ".join(str(error).partition("\n\nDebug source")[0].split())[:200]
    with _lock:
        _repeated.append(reason)
    log.info("%s: %s; tried again in %.1f s", what, reason, pause)


def take_notes() -> tuple[str, ...]:
    """Return a sentence on the requests of this process that were made again since it was last asked, if any were."""
    with _lock:
        num, last = len(_repeated), _repeated[-1] if _repeated else ""
        _repeated.clear()
    return (f"requests made again: {num}, the last because of: {last}",) if num else ()


def each(works: Sequence[Callable[[], T]]) -> list[T]:
    """Return what `works` give, many of them at a time; after the first error no other is begun.

    One of the works may call this too. Its own works then go on in its thread, one after the other: if all threads
    waited for works that have no thread, none would end.

    Raises:
        Exception: the first error, once those that were begun have ended.
    """
    if _inside.get():
        return [work() for work in works]
    futures: list[Future[T]] = [_pool().submit(work) for work in works]
    try:
        return [future.result() for future in futures]
    finally:
        wait([future for future in futures if not future.cancel()])


def in_turn(works: Iterable[Callable[[], T]], at_once: int) -> list[T]:
    """Return what `works` give; see `InTurn`.

    Raises:
        Exception: the first error, once those that were begun have ended.
    """
    with closing(InTurn(works, at_once)) as turns:
        return [future.result() for future in turns]


class InTurn(Generic[T]):
    """The futures of `works`, in their order, each once it is over.

    Up to `at_once` go on at a time, in threads where they are several; the next one is taken when there is room. If it
    is neither followed to the end nor closed, nobody waits for those under way. A generator would wait for them where
    garbage is collected, also where they wait for whoever collects it.
    """

    def __init__(self, works: Iterable[Callable[[], T]], at_once: int) -> None:
        self._works, self._at_once, self._begun = iter(works), at_once, deque[Future[T]]()
        self._pool = ThreadPoolExecutor(at_once, "volpipe-in-turn") if at_once > 1 else None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Future[T]:
        for work in islice(self._works, self._at_once - len(self._begun)):
            self._begun.append(_done_future(work) if self._pool is None else self._pool.submit(work))
        if not self._begun:
            self.close()
            raise StopIteration
        wait([self._begun[0]])
        return self._begun.popleft()

    def close(self) -> None:
        """Wait for those that were begun, and begin no other."""
        self._works = iter(())
        if self._pool is not None:
            self._pool.shutdown()


def _done_future(work: Callable[[], T]) -> Future[T]:
    """Return the future of `work`, which is done here."""
    future = Future[T]()
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)
    return future


def num_at_once(num_bytes: int, fewest: int = FEWEST_AT_ONCE) -> int:
    """Return how many parts of `num_bytes` each take BYTES_AT_ONCE, at least the `fewest`."""
    return max(fewest, min(REQUESTS_AT_ONCE, BYTES_AT_ONCE // max(1, num_bytes)))


def boxes_at_once(boxes: Sequence[Box], chunks: Grid, voxel_bytes: int) -> int:
    """Return how many of `boxes` of an array may be read at a time: `chunks` that they touch are decoded as a whole."""
    return num_at_once(max(map(chunks.num_voxels_touching, boxes), default=0) * voxel_bytes, fewest=1)


def room(num_bytes: int, fewest: int = FEWEST_AT_ONCE) -> threading.Semaphore:
    """Return what lets as many pass as `num_at_once` says."""
    return threading.Semaphore(num_at_once(num_bytes, fewest))


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(REQUESTS_AT_ONCE, "volpipe-requests", _inside.set, (True,))


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
