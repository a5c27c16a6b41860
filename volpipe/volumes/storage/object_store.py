"""Files in S3 and on web servers: read, written, listed and deleted.

Not here: voxels (tensorstore), names of places (remote), or what lies on a disk (paths). The only file that imports
obstore. A web server is read only, and cannot list. Credentials are in credentials.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar, cast

from volpipe.errors import ChangedError, RemoteError, VolumeError
from volpipe.volumes.storage import decoded_size
from volpipe.volumes.storage.credentials import Credentials, find_credentials, profile_keys
from volpipe.volumes.storage.remote import Remote as Remote
from volpipe.volumes.storage.remote import parse as parse
from volpipe.volumes.storage.requests import DENIED, MOST_SECONDS, PAUSES_SECONDS, REASONS, patiently

if TYPE_CHECKING:
    from obstore import GetOptions, WritableFile
    from obstore.store import HTTPStore, S3Config, S3Store

T = TypeVar("T")
DEFAULT_REGION = "us-east-1"  # servers other than Amazon's accept it
CONNECT_SECONDS = 5
SILENT_SECONDS, LONG_SECONDS = 10, 3600  # without a byte of an answer; of a whole one
UPLOAD_SECONDS, UPLOAD_BYTES = 60, 16 << 20  # for each so many bytes of a file that is written
LISTED_AT_ONCE = DELETED_AT_ONCE = 1000  # the most that S3 takes in one request
ENCODINGS = {
    "gzip": "gzip",
    "x-gzip": "gzip",
    "deflate": "deflate",
    "br": "br",
    "zstd": "zstd",
}  # as a server says them
NO_ENCODINGS = ("", "identity", "none", "utf-8", "aws-chunked")  # what some say of files as they are
MOST_ENCODED_BYTES = 256 << 20  # of a file, stored or unpacked, that is fetched whole where a part is needed

_owner: int | None = None  # the process that uses obstore, whose threads do not survive a fork
_latencies: dict[tuple[str, str], float] = {}  # seconds, by server


def client(place: Remote, upload_seconds: int = 0, num_retries: int = 0) -> S3Store | HTTPStore:
    """Return this process's client of the bucket, or of the web server, that `place` lies in.

    Its requests are made once, and `num_retries` times more where they fail in passing; `upload_seconds` are those that
    one may take that writes.

    Raises:
        VolumeError: this process was forked from one that had a client.
    """
    global _owner
    if _owner not in (None, os.getpid()):
        raise VolumeError(
            f"{place}: this process was forked from one that had opened remote volumes, and cannot open any; "
            'start workers with multiprocessing.get_context("spawn")'
        )
    _owner = os.getpid()
    credentials = find_credentials() if place.is_s3 else None
    return _client(place.root, place.endpoint, place.region, credentials, upload_seconds, num_retries)


@lru_cache(maxsize=16)
def _client(
    root: str, endpoint: str, region: str, credentials: Credentials | None, upload_seconds: int, num_retries: int
) -> S3Store | HTTPStore:
    from obstore.store import HTTPStore, S3Store

    # The wait for an answer ends what is still being uploaded, too, so that this has the time of a whole request.
    waits = {"timeout": upload_seconds} if upload_seconds else {"read_timeout": SILENT_SECONDS, "timeout": LONG_SECONDS}
    seconds = {name: timedelta(seconds=wait) for name, wait in {**waits, "connect_timeout": CONNECT_SECONDS}.items()}
    plain = (endpoint or root).startswith("http://")
    first, last = (timedelta(seconds=pause) for pause in (PAUSES_SECONDS[0], PAUSES_SECONDS[-1]))
    tries = {"max_retries": num_retries, "retry_timeout": timedelta(seconds=MOST_SECONDS if num_retries else 0)}
    tries |= {"backoff": {"init_backoff": first, "max_backoff": last, "base": 2}}
    options: dict[str, Any] = {"client_options": seconds | {"allow_http": plain}, "retry_config": tries}
    if credentials is None:
        options["client_options"]["default_headers"] = {"Accept-Encoding": "identity"}  # else some pack what they send
        return HTTPStore.from_url(root, **options)
    config: S3Config = {"region": region or DEFAULT_REGION, "skip_signature": credentials.kind == "anonymous"}
    if endpoint:
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    if credentials.kind == "profile":
        config |= cast("S3Config", profile_keys())
    return S3Store(root.removeprefix("s3://"), config=config, **options)


def read(file: Remote, limit: int) -> bytes | None:
    """Return the first `limit` bytes of `file`; None where there is none, or none that may be read.

    To those who may not list a bucket S3 says that a missing file is forbidden; `exists` tells the two apart.
    """
    import obstore

    def request() -> bytes:
        result = obstore.get(client(file), file.key)
        encodings = _encodings(file, result)
        if result.meta["size"] > limit and not encodings:
            return bytes(obstore.get_range(client(file), file.key, start=0, end=limit))
        return _undo(file, bytes(result.bytes()), encodings, limit)

    return _ask(file, request, missing_ok=True, denied_ok=True)


def _encodings(file: Remote, result: Any) -> tuple[str, ...]:  # Any: obstore's
    """Return how the server says that it, or whoever put the file there, has packed the bytes, the last way last.

    Raises:
        VolumeError: in a way that is not known.
    """
    words = str(result.attributes.get("Content-Encoding", "")).lower().split(",")
    names = [word.strip() for word in words if word.strip() not in NO_ENCODINGS]
    if unknown := next((name for name in names if name not in ENCODINGS), ""):
        raise VolumeError(
            f"{file.address}: it has Content-Encoding {unknown}; volpipe reads {', '.join(ENCODINGS)}: store it as one "
            "of them, or as it is"
        )
    return tuple(ENCODINGS[name] for name in names)


def _undo(file: Remote, data: bytes, encodings: tuple[str, ...], most: int, own: str = "") -> bytes:
    """Return `data` of `file` without its `encodings`; see `decoded_size.undo`."""
    try:
        return decoded_size.undo(data, encodings, most, own)
    except ValueError as error:
        raise ValueError(
            f"{error}; the server says Content-Encoding: {', '.join(encodings)} of {file.address}"
        ) from None


def read_end(file: Remote, num_bytes: int) -> bytes | None:
    """Return the last `num_bytes` of `file`, all of a shorter one; None where there is none."""
    part = fetch(file, (-num_bytes, 0), denied_ok=True)
    return None if part is None else part.data


def size(file: Remote) -> int | None:
    """Return the bytes of `file`, None where there is none, or none that may be read."""
    known = stamp(file)
    return None if known is None else known.num_bytes


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is written: its bytes, its time in ns since 1970, and the tag that a server gives it."""

    num_bytes: int
    time_ns: int = 0
    tag: str = ""


@dataclass(frozen=True)
class Part:
    """Bytes of a file, or all of them, and the stamp of the file that they were in.

    `num_bytes` are those of the whole file: of one that its server has packed, unpacked; None: as the stamp says.
    """

    data: bytes
    stamp: Stamp
    num_bytes: int | None = None

    @property
    def file_bytes(self) -> int:
        """The bytes of the whole file."""
        return self.stamp.num_bytes if self.num_bytes is None else self.num_bytes


def fetch(
    file: Remote,
    span: tuple[int, int] | None = None,
    tag: str = "",
    *,
    denied_ok: bool = False,
    most: int = MOST_ENCODED_BYTES,
    own: str = "",
) -> Part | None:
    """Return `file`, or the bytes of a `span` of it, by one request; None where there is no such file.

    One that has a Content-Encoding is unpacked, and is fetched whole where a span of it is needed: a server that packs
    what it sends counts other bytes than one that stores it so.

    Args:
        file: what to read.
        span: its first byte and that after its last, or (-n, 0) for its last n; all where it is None.
        tag: refuse a file with another tag.
        denied_ok: whether a file that may not be read counts as one that is not there.
        most: the bytes that a file with a Content-Encoding may unpack to.
        own: the encoding that the file has without that, such as "gzip" of a chunk whose codec is that.

    Raises:
        ChangedError: the file has another tag.
        RemoteError: it may not be read, or no answer.
        VolumeError: it is too large to be fetched whole, or its Content-Encoding is not known.
        ValueError: its Content-Encoding cannot be undone.
    """
    import obstore

    options: GetOptions = {"if_match": tag} if tag else {}
    if span is not None:
        options["range"] = {"suffix": -span[0]} if span[0] < 0 else span

    def request() -> tuple[Part, tuple[str, ...]]:
        started = time.perf_counter()
        result = obstore.get(client(file), file.key, options=options)  # its first byte came, not all
        seconds, server = time.perf_counter() - started, (file.root, file.endpoint)
        _latencies[server] = min(seconds, _latencies.get(server, seconds))
        return Part(bytes(result.bytes()), _stamp(result.meta)), _encodings(file, result)

    answer = _ask(file, request, missing_ok=True, denied_ok=denied_ok)
    if answer is None or not answer[1]:
        return None if answer is None else answer[0]
    part, encodings = answer
    if span is None:
        data = _undo(file, part.data, encodings, most, own)
        return Part(data, part.stamp, len(data))
    if part.stamp.num_bytes > MOST_ENCODED_BYTES:
        raise VolumeError(
            f"{file.address} has Content-Encoding {', '.join(encodings)}, so that no part of its "
            f"{part.stamp.num_bytes} bytes can be read by itself; store it without, or copy it to a folder"
        )
    whole = fetch(file, None, tag, denied_ok=denied_ok, most=most)
    if whole is None:
        return None
    first, last = span if span[0] >= 0 else (max(0, len(whole.data) + span[0]), len(whole.data))
    return Part(whole.data[first:last], whole.stamp, len(whole.data))


def latency(place: Remote) -> float:
    """Return the shortest time, in seconds, to the first byte of an answer from the server of `place`; 0.0 where none
    came to this process.
    """
    return _latencies.get((place.root, place.endpoint), 0.0)


def stamp(file: Remote) -> Stamp | None:
    """Return the stamp of `file`; None where it does not exist or may not be read."""
    import obstore

    return _ask(file, lambda: _stamp(obstore.head(client(file), file.key)), missing_ok=True, denied_ok=True)


def _stamp(metadata: Any) -> Stamp:  # Any: obstore's, which has no type for it at run time
    changed = metadata["last_modified"]
    return Stamp(int(metadata["size"]), int(changed.timestamp()) * 10**9, metadata["e_tag"] or "")


def write(file: Remote, data: bytes) -> None:
    """Write `file`, whole or not at all.

    Raises:
        VolumeError: it may not be written.
    """
    import obstore

    check_writable(file)
    _ask(file, lambda: obstore.put(client(file, _seconds(len(data))), file.key, data, use_multipart=False))


def _seconds(num_bytes: int) -> int:
    """Return the time that a request with `num_bytes` may take."""
    return UPLOAD_SECONDS << (num_bytes // UPLOAD_BYTES).bit_length()


def open_upload(file: Remote, part_bytes: int, parts_at_once: int) -> WritableFile:
    """Return what writes `file` in parts of `part_bytes`; it is there once that is closed. Parts are tried again."""
    import obstore

    upload = client(file, _seconds(part_bytes * parts_at_once), num_retries=len(PAUSES_SECONDS))
    return obstore.open_writer(upload, file.key, buffer_size=part_bytes, max_concurrency=parts_at_once)


def check_writable(file: Remote) -> None:
    """Raise VolumeError if `file` is on a web server, which is read only."""
    if not file.is_s3:
        raise VolumeError(f"{file} is on a web server, which is read only; write to a folder or to s3://")


def try_writing(folder: Remote) -> None:
    """Write and delete an empty file in `folder`, so that missing rights show before hours of work.

    Raises:
        VolumeError: files may not be written there, or not be deleted.
    """
    probe = folder / ".volpipe"
    write(probe, b"")
    delete_file(probe)


def list_folders(folder: Remote) -> list[str]:
    """Return the names of the folders in `folder`, sorted.

    Raises:
        VolumeError: it cannot be listed.
    """
    import obstore

    _check_listable(folder)
    result = _ask(folder, lambda: obstore.list_with_delimiter(client(folder), folder.key))
    assert result is not None
    return sorted(PurePosixPath(prefix).name for prefix in result["common_prefixes"])


def _check_listable(folder: Remote) -> None:
    if not folder.is_s3:
        raise VolumeError(f"{folder}: a web server cannot be asked what it holds; name the array: …/volume.zarr/key")


def list_files(folder: Remote, at_once: int = LISTED_AT_ONCE) -> Iterator[tuple[str, int]]:
    """Yield every file under `folder`: its key there, and its bytes.

    Raises:
        VolumeError: it cannot be listed.
    """
    return ((name, stamp.num_bytes) for name, stamp in list_stamps(folder, at_once))


def list_stamps(folder: Remote, at_once: int = LISTED_AT_ONCE) -> Iterator[tuple[str, Stamp]]:
    """Yield every file under `folder`, `at_once` of them together: its key there, and its stamp; see `list_files`."""
    import obstore

    _check_listable(folder)
    last: str | None = None
    pages: Iterator[Any] | None = None  # Any: obstore's

    def page() -> Any:
        nonlocal pages
        try:
            pages = pages or iter(obstore.list(client(folder), folder.key, offset=last, chunk_size=at_once))
            return next(pages, ())
        except Exception:
            pages = None  # the next attempt goes on after the last file that came
            raise

    while entries := _ask(folder, page):
        for entry in entries:
            yield entry["path"].removeprefix(f"{folder.key}/"), _stamp(entry)
        last = entries[-1]["path"]


def exists(folder: Remote) -> bool:
    """Return whether anything lies under `folder` in a bucket.

    Raises:
        VolumeError: no such bucket, it may not be listed, or no answer.
    """
    return next(list_files(folder), None) is not None


def delete(folder: Remote) -> None:
    """Delete all that lies under `folder`."""
    import obstore

    check_writable(folder)
    keys = (f"{folder.key}/{name}" for name, _ in list_files(folder))
    while batch := list(itertools.islice(keys, DELETED_AT_ONCE)):
        _ask(folder, partial(obstore.delete, client(folder), batch))


def delete_file(file: Remote) -> None:
    """Delete `file`, if it is there.

    Raises:
        VolumeError: it may not be deleted.
    """
    import obstore

    check_writable(file)
    _ask(file, lambda: obstore.delete(client(file), file.key), missing_ok=True)


def _ask(place: Remote, request: Callable[[], T], *, missing_ok: bool = False, denied_ok: bool = False) -> T | None:
    """Return what `request` gives, made again where it fails in passing; None for a missing or denied file that is ok.

    Raises:
        ChangedError: the file at `place` has another tag than the request names.
        RemoteError: with the meaning of the error in one sentence.
    """
    from obstore.exceptions import BaseError, PreconditionError

    try:
        return patiently(place, request)
    except PreconditionError:
        raise ChangedError(f"{place} changed while it was read") from None
    except (BaseError, OSError) as error:
        is_denied = re.search(DENIED, str(error)) is not None
        is_absent = missing_ok and isinstance(error, FileNotFoundError) and not is_denied
        if (is_absent or (denied_ok and is_denied)) and "NoSuchBucket" not in str(error):
            return None
        raise RemoteError(explain(place, error)) from None  # obstore's own text fills a page


@contextmanager
def explaining(place: Remote) -> Iterator[None]:
    """Raise RemoteError for an error of the store at `place`."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        raise RemoteError(explain(place, error)) from None


def explain(place: Remote, error: Exception) -> str:
    """Return the meaning and the remedy of `error`, of obstore or tensorstore, in one sentence."""
    text = str(error).partition("\n\nDebug source")[0]
    how = find_credentials() if place.is_s3 else None
    signed = "without credentials" if how is None or how.kind == "anonymous" else f"credentials: {how.kind}"
    facts = {
        "bucket": place.bucket,
        "server": (place.endpoint or "Amazon's S3") if place.is_s3 else place.root,
        "signed": signed,
        "region": place.region or DEFAULT_REGION,
    }
    notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ()))
    for pattern, reason in REASONS.items():
        if re.search(pattern, text):
            return f"{place.address}: {reason.format(**facts)}{notes}"
    return f"{place.address} at {facts['server']}: {' '.join(text.split())[:300]}{notes}"
