"""The notification: one JSON object, posted to an address once a command has ended, however that went.

Not here: what ended (ending). A driver that is killed cannot tell anybody.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import volpipe
from volpipe.errors import NOTICE, VolpipeError

TIMEOUT = 5.0  # seconds for each answer of the server
PAUSE = 1.0  # before it is tried once more
MOST_SECONDS = 12.0  # of both attempts, however slowly a server answers

log = logging.getLogger(__name__)


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


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: what is posted would become a question without a body."""

    def redirect_request(self, *arguments: object) -> None:
        return None


def notify(address: Address, message: Mapping[str, object]) -> bool:
    """Post `message` to `address`, and return whether a server took it; a fault is a warning."""
    faults: list[str] = []
    thread = threading.Thread(target=_post, args=(address, message, faults), name="volpipe-notify", daemon=True)
    thread.start()
    thread.join(MOST_SECONDS)
    if thread.is_alive():
        faults.append(f"no answer within {MOST_SECONDS:.0f} s")
    elif not faults or faults[-1] == "":
        return True
    log.warning("nobody was notified: %s: %s", address, faults[-1], extra=NOTICE)
    return False


def _post(address: Address, message: Mapping[str, object], faults: list[str]) -> None:
    """Post `message`, once more after a fault; the faults, "" where it went well, come last."""
    headers = {"Content-Type": "application/json", "User-Agent": f"volpipe/{volpipe.__version__}"}
    if (user := address.user) is not None:
        headers["Authorization"] = f"Basic {b64encode(user.encode()).decode()}"
    body = json.dumps(message, default=str).encode()
    opener = urllib.request.build_opener(_NoRedirect)
    for attempt in range(2):
        if attempt:
            time.sleep(PAUSE)
        try:
            request = urllib.request.Request(address.without_user, body, headers, method="POST")
            with opener.open(request, timeout=TIMEOUT):
                faults.append("")
                return
        except (OSError, HTTPException, ValueError) as error:
            faults.append(_reason(error))


def _reason(error: Any) -> str:  # Any: of urllib, whose errors name what they hold
    """Return why a post failed, without the address: what a library says of it may repeat it."""
    code = getattr(error, "code", None)
    if code is not None:
        return f"the server answered {code}"
    cause = getattr(error, "reason", error)
    if isinstance(cause, TimeoutError):
        return f"no answer within {TIMEOUT:.0f} s"
    return str(getattr(cause, "strerror", None) or type(cause).__name__)
