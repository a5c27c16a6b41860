"""Names of places in S3 and on web servers: ``s3://bucket/key?endpoint=…&region=…``, ``https://host/path``.

Not here: requests (object_store). Endpoint and region come with the location, or from the environment.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from volpipe.errors import VolumeError

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
