"""What a user names to watch work by: where metrics are read, where a log goes, whom to notify; each checked.

Not here: the metrics, the log or the notification. Nothing heavy is imported: the command line reads its options here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from volpipe.errors import VolpipeError

LOOPBACK = "127.0.0.1"
EVERYWHERE = "0.0.0.0"
SUFFIX = ".prom"  # the only files that the textfile collector reads
MOST_PORT = 65535
STANDARD_ERROR = "-"


@dataclass(frozen=True)
class Port:
    """A port of this machine, at one of its addresses, or under a name of it; 0 is any that is free."""

    host: str
    number: int
    has_host: bool = True  # given by the user

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine, or this pod, can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith("127.")

    def __str__(self) -> str:
        return _joined(self.host, self.number) if self.has_host else str(self.number)

    def at(self, number: int) -> str:
        """Return the address of the metrics, where the port turned out to be `number`."""
        return f"http://{_joined(self.host, number)}/metrics"


def _joined(host: str, number: int) -> str:
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def parse_target(text: str) -> Port | Path:
    """Return the port or the file that `text` names; whether it can be used is not looked at.

    Raises:
        VolpipeError: it names neither.
    """
    host, colon, number = text.rpartition(":")
    if number.isascii() and number.isdecimal() and "/" not in host:
        if colon and not host:
            raise VolpipeError(
                f"--metrics {text}: there is no host before the colon; write {number}, or 0.0.0.0:{number}"
            )
        if int(number) > MOST_PORT:
            raise VolpipeError(f"--metrics {text}: ports end at {MOST_PORT}, and this is {number}")
        return Port(host.strip("[]") or LOOPBACK, int(number), bool(colon))
    path = Path(text).expanduser()
    if path.suffix != SUFFIX:
        raise VolpipeError(
            f"--metrics {text}: write a port such as 9100, HOST:PORT, or a file whose name ends in {SUFFIX}, as those "
            "that node_exporter reads"
        )
    return path


def check_file(option: str, path: Path) -> Path:
    """Return the absolute place of a file to be written, whose folder is there.

    Raises:
        VolpipeError: it is a folder, or there is none for it.
    """
    if path.is_dir():
        raise VolpipeError(f"{option} {path}: it is a folder; name a file in it")
    if not path.absolute().parent.is_dir():
        raise VolpipeError(f"{option} {path}: there is no folder {path.parent}; make it first")
    return path.absolute()


@dataclass(frozen=True)
class Address:
    """An address of the web, shown without what may be a secret: user, path and query."""

    url: str

    @property
    def user(self) -> str | None:
        """The user and the password, user:password, None where the address has none."""
        user, at, _ = urlsplit(self.url).netloc.rpartition("@")
        return unquote(user) if at else None

    @property
    def without_user(self) -> str:
        """The address without them."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def __str__(self) -> str:
        parts = urlsplit(self.url)
        port = f":{parts.port}" if parts.port else ""
        return f"{parts.scheme}://{parts.hostname}{port}/…"


def parse_address(text: str) -> Address:
    """Return the address that `text` is.

    Raises:
        VolpipeError: it is none that can be posted to; the sentence does not repeat it.
    """
    example = "write it whole, such as https://host/path"
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError as error:
        raise VolpipeError(f"--notify: the address cannot be understood ({error}); {example}") from error
    if parts.scheme not in ("http", "https"):
        scheme = f"begins with {parts.scheme}:" if "://" in text else "does not say http:// or https://"
        raise VolpipeError(f"--notify: the address {scheme}; {example}")
    if not parts.hostname or any(character.isspace() or ord(character) > 126 for character in text):
        raise VolpipeError(f"--notify: the address has no host, or a character that addresses do not have; {example}")
    return Address(text)
