"""The user's credentials for S3: where they are, by the environment and the credentials file. They stay there.

Not here: requests that are signed with them (object_store, tensorstore).
"""

from __future__ import annotations

import configparser
import os
from dataclasses import dataclass
from pathlib import Path

from volpipe.errors import VolumeError

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
        parser.read_string(credentials_file().read_text(encoding="utf-8"))
    except (OSError, RuntimeError):  # none there, or no home
        return {}
    except configparser.Error as error:
        raise VolumeError(f"{credentials_file()} is no credentials file: {error.message.splitlines()[0]}") from None
    settings = dict(parser.items(_profile())) if parser.has_section(_profile()) else {}
    names = ("access_key_id", "secret_access_key", "session_token")
    keys = {name: settings[f"aws_{name}"] for name in names if f"aws_{name}" in settings}
    complete = {"access_key_id", "secret_access_key"} <= keys.keys()
    return keys if complete else {}
