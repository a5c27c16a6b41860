"""Places in S3 and on web servers, ``s3://bucket/key?endpoint=…&region=…``, ``https://host/path``, and files there.

Not here: voxels (tensorstore), or what lies on a disk (paths). The only file that imports obstore. A web server is read
only, and cannot list. Endpoint and region come with the location, or from the environment, where credentials stay.
"""

from __future__ import annotations

import configparser
import itertools
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from volpipe.errors import ChangedError, RemoteError, VolumeError
from volpipe.text import read_text
from volpipe.volumes.storage import decoded_size
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

    To those who may not list a bucket S3 says that a missing file is forbidden; `paths.exists` tells the two apart.
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


@dataclass(frozen=True)
class Stamp:
    """What changes when a file is written: its bytes, its time in ns since 1970, and the tag that a server gives it."""

    num_bytes: int
    time_ns: int = 0
    tag: str = ""


@dataclass(frozen=True)
class Fetched:
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
) -> Fetched | None:
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

    def request() -> tuple[Fetched, tuple[str, ...]]:
        result = obstore.get(client(file), file.key, options=options)
        return Fetched(bytes(result.bytes()), _stamp(result.meta)), _encodings(file, result)

    answer = _ask(file, request, missing_ok=True, denied_ok=denied_ok)
    if answer is None or not answer[1]:
        return None if answer is None else answer[0]
    part, encodings = answer
    if span is None:
        data = _undo(file, part.data, encodings, most, own)
        return Fetched(data, part.stamp, len(data))
    if part.stamp.num_bytes > MOST_ENCODED_BYTES:
        raise VolumeError(
            f"{file.address} has Content-Encoding {', '.join(encodings)}, so that no part of its "
            f"{part.stamp.num_bytes} bytes can be read by itself; store it without, or copy it to a folder"
        )
    whole = fetch(file, None, tag, denied_ok=denied_ok, most=most)
    if whole is None:
        return None
    first, last = span if span[0] >= 0 else (max(0, len(whole.data) + span[0]), len(whole.data))
    return Fetched(whole.data[first:last], whole.stamp, len(whole.data))


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


SCHEMES = ("s3", "http", "https")
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")


@dataclass(frozen=True)
class Remote:
    """A folder or file in a bucket or on a web server, by name; names are put together as with a `Path`.

    Attributes:
        root: "s3://bucket", or "https://host:port".
        parts: of the key below it.
        endpoint: the S3 server, "" for Amazon's.
        region: of the bucket, "" if unknown.
    """

    root: str
    parts: tuple[str, ...] = ()
    endpoint: str = ""
    region: str = ""

    def __str__(self) -> str:
        settings = (("endpoint", self.endpoint), ("region", self.region))
        query = "&".join(f"{name}={quote(value, safe=':/')}" for name, value in settings if value)
        return f"{self.address}?{query}" if query else self.address

    def __truediv__(self, key: str) -> Remote:
        return self.joinpath(key)

    def joinpath(self, *keys: str) -> Remote:
        inner = tuple(part for key in keys for part in PurePosixPath(key).parts)
        return replace(self, parts=self.parts + inner)

    @property
    def address(self) -> str:
        """The location without its settings."""
        key = self.key if self.is_s3 else quote(self.key)
        return f"{self.root}/{key}".rstrip("/")

    @property
    def key(self) -> str:
        return "/".join(self.parts)

    @property
    def is_s3(self) -> bool:
        return self.root.startswith("s3://")

    @property
    def bucket(self) -> str:
        return self.root.removeprefix("s3://")

    @property
    def name(self) -> str:
        return self.parts[-1] if self.parts else ""

    @property
    def stem(self) -> str:
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> Remote:
        return replace(self, parts=self.parts[:-1])

    @property
    def parents(self) -> tuple[Remote, ...]:
        return tuple(replace(self, parts=self.parts[:n]) for n in reversed(range(len(self.parts))))

    def relative_to(self, other: Remote) -> PurePosixPath:
        return PurePosixPath(*self.parts).relative_to(PurePosixPath(*other.parts))


def parse(location: str) -> Remote:
    """Return the place that a URL names.

    Raises:
        VolumeError: another scheme, no bucket or host, a setting that is not known, or a password in it.
    """
    scheme, _, rest = location.partition("://")
    if scheme not in SCHEMES:
        raise VolumeError(f"{location}: volpipe reads folders, s3:// and http(s)://, not {scheme}://; copy it to one")
    if scheme != "s3":
        return _parse_http(location)
    rest, _, query = rest.partition("?")
    bucket, _, key = rest.partition("/")
    if not BUCKET.fullmatch(bucket):
        raise VolumeError(f"s3://{rest}: {bucket!r} is no bucket's name; write s3://bucket/path/volume.zarr")
    settings = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(settings.keys() - {"endpoint", "region"})
    if unknown:
        raise VolumeError(f"s3://{rest}: setting {unknown[0]!r} is not known; use endpoint=URL and region=NAME")
    endpoint = settings.get("endpoint", _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")).rstrip("/")
    if endpoint:
        _check_endpoint(endpoint)
    region = settings.get("region", _first("AWS_REGION", "AWS_DEFAULT_REGION"))
    return Remote(f"s3://{bucket}", _split(key, location), endpoint, region)


def _parse_http(location: str) -> Remote:
    url = urlsplit(location)
    if not url.hostname:
        raise VolumeError(f"{location} names no host; write https://host/path/volume.zarr")
    if url.query or url.fragment or url.username or url.password:
        raise VolumeError(
            f"{url.scheme}://{url.hostname}{url.path}: user names, passwords and ?… in a web address would be "
            "kept with the output, so volpipe takes none; give a public address, or use s3://"
        )
    return Remote(f"{url.scheme}://{url.netloc}", _split(unquote(url.path), location))


def _split(key: str, location: str) -> tuple[str, ...]:
    parts = tuple(part for part in key.split("/") if part)
    if {".", ".."} & set(parts):
        raise VolumeError(f"{location}: a key may not have . or .. in it; write it out")
    return parts


def _check_endpoint(endpoint: str) -> None:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname or url.username or url.query:
        address = f"{url.scheme}://{url.hostname}"
        raise VolumeError(f"S3 endpoint {address} is not http(s)://host:port; set ?endpoint= or AWS_ENDPOINT_URL so")


def _first(*names: str) -> str:
    return next((value for name in names if (value := os.environ.get(name))), "")


# Environment variables that tell programs on Amazon's machines where to fetch credentials.
ROLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")


@dataclass(frozen=True)
class Credentials:
    """How requests are signed.

    Attributes:
        kind: "environment", "profile", "default" (the roles that Amazon gives to machines) or "anonymous".
        profile: the name of the profile.
    """

    kind: str
    profile: str = ""


def find_credentials() -> Credentials:
    """Return the first that there is of keys in the environment, a profile with keys, a role; or anonymous.

    EC2's own service is not asked, unless AWS_EC2_METADATA_DISABLED says "false": elsewhere that costs seconds.
    """
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return Credentials("environment")
    if profile_keys():
        return Credentials("profile", _profile())
    may_ask = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "false"
    return Credentials("default" if may_ask or any(map(os.environ.get, ROLES)) else "anonymous")


def _profile() -> str:
    return os.environ.get("AWS_PROFILE") or "default"


def credentials_file() -> Path:
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()


def profile_keys() -> dict[str, str]:
    """Return the keys of the user's profile as obstore names them, {} where it has none."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(read_text(credentials_file()))
    except (OSError, RuntimeError):  # none there, or no home
        return {}
    except UnicodeDecodeError as error:
        raise VolumeError(f"{credentials_file()} is no credentials file, for it holds no text: {error}") from None
    except configparser.Error as error:
        raise VolumeError(f"{credentials_file()} is no credentials file: {error.message.splitlines()[0]}") from None
    settings = dict(parser.items(_profile())) if parser.has_section(_profile()) else {}
    names = ("access_key_id", "secret_access_key", "session_token")
    keys = {name: settings[f"aws_{name}"] for name in names if f"aws_{name}" in settings}
    complete = {"access_key_id", "secret_access_key"} <= keys.keys()
    return keys if complete else {}
