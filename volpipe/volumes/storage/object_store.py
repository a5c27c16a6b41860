"""Places in S3 and on web servers: their names, and their small files read, written, listed and deleted.

Not here: voxels (tensorstore), or what lies on a disk (paths). The only file that imports obstore. A web server is read
only, and cannot list. Endpoint and region come with the location, ``s3://bucket/key?endpoint=…&region=…``, or from
the environment; credentials come from the environment or the user's credentials file, and stay there.
"""

from __future__ import annotations

import configparser
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from volpipe.errors import RemoteError, VolumeError

if TYPE_CHECKING:
    from obstore.store import HTTPStore, S3Config, S3Store

SCHEMES = ("s3", "http", "https")
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
DEFAULT_REGION = "us-east-1"  # servers other than Amazon's accept it
CONNECT_SECONDS = 5
ANSWER_SECONDS = 15  # for a small file
RETRY_SECONDS = 15
RETRIES = 3
DELETED_AT_ONCE = 1000  # the most that S3 takes in one request
# Environment variables that tell programs on Amazon's machines where to fetch credentials.
ROLES = ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")

_owner: int | None = None  # the process that uses obstore, whose threads do not survive a fork

DAMAGE = ("FAILED_PRECONDITION", "DATA_LOSS", "INVALID_ARGUMENT", "OUT_OF_RANGE")  # tensorstore's words for it


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
    if _profile_keys():
        return Credentials("profile", _profile())
    may_ask = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "false"
    return Credentials("default" if may_ask or any(map(os.environ.get, ROLES)) else "anonymous")


def _profile() -> str:
    return os.environ.get("AWS_PROFILE") or "default"


def _credentials_file() -> Path:
    return Path(os.environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser()


def _profile_keys() -> S3Config:
    """Return obstore's settings for the keys of the user's profile, {} where it has none."""
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(_credentials_file().read_text(encoding="utf-8"))
    except (OSError, RuntimeError):  # none there, or no home
        return {}
    except configparser.Error as error:
        raise VolumeError(f"{_credentials_file()} is no credentials file: {error.message.splitlines()[0]}") from None
    settings = dict(parser.items(_profile())) if parser.has_section(_profile()) else {}
    names = ("access_key_id", "secret_access_key", "session_token")
    keys = {name: settings[f"aws_{name}"] for name in names if f"aws_{name}" in settings}
    complete = {"access_key_id", "secret_access_key"} <= keys.keys()
    return cast("S3Config", keys) if complete else {}


def kvstore(folder: Remote) -> dict[str, Any]:  # Any: JSON
    """Return tensorstore's spec of `folder`."""
    path = f"{folder.key}/" if folder.parts else ""
    if not folder.is_s3:
        return {"driver": "http", "base_url": folder.root, "path": path}
    credentials = find_credentials()
    signed: dict[str, str] = {"type": credentials.kind}
    if credentials.kind == "profile":
        signed |= {"profile": credentials.profile, "filename": str(_credentials_file())}
    spec: dict[str, Any] = {"driver": "s3", "bucket": folder.bucket, "path": path, "aws_credentials": signed}
    if folder.endpoint:
        spec |= {"endpoint": folder.endpoint, "aws_region": folder.region or DEFAULT_REGION}
    elif folder.region:
        spec["aws_region"] = folder.region
    return spec


def client(place: Remote) -> S3Store | HTTPStore:
    """Return this process's client of the bucket, or of the web server, that `place` lies in.

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
    return _client(place.root, place.endpoint, place.region, find_credentials() if place.is_s3 else None)


@lru_cache(maxsize=16)
def _client(root: str, endpoint: str, region: str, credentials: Credentials | None) -> S3Store | HTTPStore:
    from obstore.store import HTTPStore, S3Store

    seconds = {"timeout": timedelta(seconds=ANSWER_SECONDS), "connect_timeout": timedelta(seconds=CONNECT_SECONDS)}
    plain = (endpoint or root).startswith("http://")
    retry = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
    options: dict[str, Any] = {"client_options": seconds | {"allow_http": plain}, "retry_config": retry}
    if credentials is None:
        return HTTPStore.from_url(root, **options)
    config: S3Config = {"region": region or DEFAULT_REGION, "skip_signature": credentials.kind == "anonymous"}
    if endpoint:
        config |= {"endpoint": endpoint, "aws_endpoint_url_s3": endpoint}
    if credentials.kind == "profile":
        config |= _profile_keys()
    return S3Store(root.removeprefix("s3://"), config=config, **options)


def read(file: Remote, limit: int) -> bytes | None:
    """Return the first `limit` bytes of `file`; None where there is none, or none that may be read.

    To those who may not list a bucket S3 says that a missing file is forbidden; `exists` tells the two apart.
    """
    import obstore

    with _explained(file, missing_ok=True):
        result = obstore.get(client(file), file.key)
        if result.meta["size"] > limit:
            return bytes(obstore.get_range(client(file), file.key, start=0, end=limit))
        return bytes(result.bytes())
    return None


def read_end(file: Remote, num_bytes: int) -> bytes | None:
    """Return the last `num_bytes` of `file`, all of a shorter one; None where there is none."""
    import obstore

    with _explained(file, missing_ok=True):
        return bytes(obstore.get(client(file), file.key, options={"range": {"suffix": num_bytes}}).bytes())
    return None


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


def stamp(file: Remote) -> Stamp | None:
    """Return the stamp of `file`; None where it does not exist or may not be read."""
    import obstore

    with _explained(file, missing_ok=True):
        return _stamp(obstore.head(client(file), file.key))
    return None


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
    with _explained(file):
        obstore.put(client(file), file.key, data, use_multipart=False)


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
    with _explained(folder):
        prefixes = obstore.list_with_delimiter(client(folder), folder.key)["common_prefixes"]
    return sorted(PurePosixPath(prefix).name for prefix in prefixes)


def _check_listable(folder: Remote) -> None:
    if not folder.is_s3:
        raise VolumeError(f"{folder}: a web server cannot be asked what it holds; name the array: …/volume.zarr/key")


def list_files(folder: Remote) -> Iterator[tuple[str, int]]:
    """Yield every file under `folder`: its key there, and its bytes.

    Raises:
        VolumeError: it cannot be listed.
    """
    import obstore

    _check_listable(folder)
    with _explained(folder):
        for entry in itertools.chain.from_iterable(obstore.list(client(folder), folder.key, chunk_size=1000)):
            yield entry["path"].removeprefix(f"{folder.key}/"), entry["size"]


def list_stamps(folder: Remote) -> Iterator[tuple[str, Stamp]]:
    """Yield every file under `folder`: its key there, and its stamp; see `list_files`."""
    import obstore

    _check_listable(folder)
    with _explained(folder):
        for entry in itertools.chain.from_iterable(obstore.list(client(folder), folder.key, chunk_size=1000)):
            yield entry["path"].removeprefix(f"{folder.key}/"), _stamp(entry)


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
        with _explained(folder):
            obstore.delete(client(folder), batch)


def delete_file(file: Remote) -> None:
    """Delete `file`, if it is there.

    Raises:
        VolumeError: it may not be deleted.
    """
    import obstore

    check_writable(file)
    with _explained(file), suppress(FileNotFoundError):
        obstore.delete(client(file), file.key)


@contextmanager
def _explained(place: Remote, *, missing_ok: bool = False) -> Iterator[None]:
    """Turn obstore's errors into one sentence; with `missing_ok` ignore a missing or forbidden file."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        is_absent = isinstance(error, FileNotFoundError) or re.search(DENIED, str(error))
        if missing_ok and is_absent and "NoSuchBucket" not in str(error):
            return
        raise RemoteError(explain(place, error)) from None  # obstore's own text fills a page


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
    r"range .* was ignored": (
        "{server} sends whole files alone, and sharded arrays are read in parts; copy it to a folder or to s3://"
    ),
    r"error sending request|timed out|Timeout was reached|Could not (connect|resolve)|curl_code": (
        "no answer from {server}; check the address, ?endpoint= or AWS_ENDPOINT_URL, and the network"
    ),
}


def is_damage(error: Exception) -> bool:
    """Tell whether `error` is about the bytes that came, not about the way to them."""
    text = str(error)
    return text.startswith(DAMAGE) and not any(re.search(pattern, text) for pattern in REASONS)


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
    for pattern, reason in REASONS.items():
        if re.search(pattern, text):
            return f"{place.address}: {reason.format(**facts)}"
    return f"{place.address} at {facts['server']}: {' '.join(text.split())[:300]}"
