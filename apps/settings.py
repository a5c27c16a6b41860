"""The settings of a site: a frozen dataclass of the site's own, filled from a small TOML file and the environment.

Not here: what a site does with it (configs). Of the same setting, the environment has the last word.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tomllib
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from volpipe.errors import SettingsError, SiteError
from volpipe.resolve import nearest, path_of

Chosen = TypeVar("Chosen")
FILE_VARIABLE = "VOLPIPE_SITE"
SLURM_PREFIX = "VOLPIPE_SLURM"
WORKERS_VARIABLE = "VOLPIPE_WORKERS"
MOST_PER_CORE = 64  # workers, on purpose where an input is slow to fetch; more is a slip of the keyboard
POSITIVE = {"cores", "max_jobs", "max_pods", "hours", "longest_task", "heartbeat", "poll_seconds"}
SWITCHES = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def read_settings(kind: type[Chosen], site: str, prefix: str) -> Chosen:
    """Return the dataclass `kind`, filled; fields without a default must be given.

    Args:
        kind: its fields are str, int, float, bool, list[str] or dict[str, str], each or None.
        site: the site's file, `__file__`; ``~/.config/volpipe/slurm_htex.toml`` has those of ``slurm_htex.py``.
        prefix: of the environment's names, such as VOLPIPE_SLURM.

    Raises:
        SettingsError: a setting is unknown, of the wrong type or too small; the message says where to mend it.
        SiteError: a setting is missing.
    """
    values, missing = _read_values(kind, site, prefix)
    if missing:
        raise SiteError(missing)
    return kind(**values)


def _read_values(
    kind: type[Chosen], site: str, prefix: str
) -> tuple[dict[str, Any], str]:  # Any: values of the hints' types
    """Return the settings as `read_settings` has them, and a sentence on the first one that is missing, "" for none."""
    file = settings_file(Path(site).stem)
    hints = get_type_hints(kind)
    _check_names(file, prefix, hints)
    values = _from_file(file, hints) | _from_environment(prefix, hints)
    for name, value in values.items():
        if name == "walltime" and not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", value):
            raise SettingsError(f"walltime is {value!r}; write HH:MM:SS, such as 04:00:00, and 48:00:00 for two days")
        least = 1 if name in POSITIVE else 0
        if isinstance(value, int | float) and (value < 0 or (least and value == 0)):
            raise SettingsError(
                f"{name} is {value:g} and must be {'above 0' if least else '0 or more'}; put it right in {file}, or "
                f"set {prefix}_{name.upper()}"
            )
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # a dataclass, which mypy has no word for
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in values:
            missing = (
                f"{field.name} is not set; write {field.name} = {_setting_type(hints[field.name]).example} in {file}, "
                f"or set {prefix}_{field.name.upper()}"
            )
            return values, missing
    return values, ""


def read_workers(default: int) -> int:
    """Return the number of workers on this machine: VOLPIPE_WORKERS, or `default`.

    Raises:
        SiteError: it is no number of workers, or more than this machine could ever serve.
    """
    text, cores = os.environ.get(WORKERS_VARIABLE, ""), len(os.sched_getaffinity(0))
    if not text.strip():
        return default
    if not text.strip().isdecimal() or int(text) < 1:
        raise SettingsError(
            f"{WORKERS_VARIABLE} is {text!r}; it must be a number of workers, at least 1, such as {cores}"
        )
    if int(text) > MOST_PER_CORE * cores:
        raise SettingsError(
            f"{WORKERS_VARIABLE} is {text} and this machine has {cores} cores; it may be at most {MOST_PER_CORE} for "
            f"each core, {MOST_PER_CORE * cores}, and {cores} is usually fastest"
        )
    return int(text)


def settings_file(site: str) -> Path:
    """Return where the settings of `site` are: the file of VOLPIPE_SITE, or the site's own in the user's folder."""
    if chosen := os.environ.get(FILE_VARIABLE):
        return path_of(chosen).absolute()
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "volpipe" / f"{site}.toml"


def _from_file(file: Path, hints: dict[str, Any]) -> dict[str, Any]:  # Any: types, and values of those types
    values = _read_toml(file)
    for name, value in values.items():
        if not _is_of_type(value, hints[name]):
            kind = _setting_type(hints[name])
            raise SettingsError(f"{file}: {name} = {value!r} is no {kind.name}; write {kind.example}")
    return values


def _read_toml(file: Path) -> dict[str, Any]:  # Any: TOML values
    if not file.is_file():
        if FILE_VARIABLE in os.environ:
            raise SettingsError(f"{FILE_VARIABLE} names {file}, which is no file; write it, or unset {FILE_VARIABLE}")
        return {}
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{file} is no TOML: {error}") from error


def _from_environment(prefix: str, hints: dict[str, Any]) -> dict[str, Any]:  # Any: as above
    values = {}
    for variable, name in _variables(prefix).items():
        text = os.environ[variable]
        if text == "":
            continue  # as a shell unsets what it only emptied
        try:
            values[name] = _setting_type(hints[name]).read(text)
        except (ValueError, KeyError):
            raise SettingsError(
                f"the environment's {variable}={text!r} is no {_setting_type(hints[name]).name}"
            ) from None
    return values


def _variables(prefix: str) -> dict[str, str]:
    """Return the setting that each variable of the environment with `prefix` names."""
    given = [name for name in os.environ if name.startswith(f"{prefix}_") and name != FILE_VARIABLE]
    return {variable: variable.removeprefix(f"{prefix}_").lower() for variable in given}


def _check_names(file: Path, prefix: str, hints: dict[str, Any]) -> None:  # Any: types
    """Refuse settings that the site does not have, all at once."""
    places = [(str(file), name) for name in _read_toml(file)]
    places += [(f"the environment's {variable}", name) for variable, name in _variables(prefix).items()]
    unknown = [f"{place}: no setting {name!r}{nearest(name, hints)}" for place, name in places if name not in hints]
    if unknown:
        raise SettingsError(f"{'; '.join(unknown)}; there are {', '.join(hints)}")


def as_text(value: object) -> str:
    """Return a setting as the environment has it; a list or a table as JSON where its texts have commas."""
    if not isinstance(value, list | dict):
        return str(value).lower() if isinstance(value, bool) else str(value)
    kind = SETTING_TYPES[list[str] if isinstance(value, list) else dict[str, str]]
    text = ",".join(value if isinstance(value, list) else (f"{key}={each}" for key, each in value.items()))
    try:
        is_read_alike = kind.read(text) == value
    except ValueError:
        is_read_alike = False
    return text if is_read_alike else json.dumps(value)


def _read_list(text: str) -> list[str]:
    if text.startswith("["):
        return TypeAdapter(list[str]).validate_json(text)
    return [part.strip() for part in text.split(",")]


def _read_table(text: str) -> dict[str, str]:
    if text.startswith("{"):
        return TypeAdapter(dict[str, str]).validate_json(text)
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(equals for _, equals, _ in pairs):
        raise ValueError(text)
    return {key.strip(): value.strip() for key, _, value in pairs}


@dataclass(frozen=True)
class SettingType:
    """A type of settings: its name, what one looks like in TOML, and how a text of the environment is read."""

    name: str
    example: str
    read: Callable[[str], object]


SETTING_TYPES: dict[Any, SettingType] = {  # Any: types as they are annotated
    str: SettingType("text", '"..."', str),
    int: SettingType("whole number", "4", int),
    float: SettingType("number", "1.5", float),
    bool: SettingType("true or false", "true", lambda text: SWITCHES[text.lower()]),
    list[str]: SettingType("list of texts", '["...", "..."]', _read_list),
    dict[str, str]: SettingType("table of texts", '{ key = "..." }', _read_table),
}


def _setting_type(hint: Any) -> SettingType:  # Any: a type as it was annotated
    """Return the kind of an annotated type, without its "or None"."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(item for item in get_args(hint) if item is not type(None))
    return SETTING_TYPES[hint]


def _is_of_type(value: object, hint: Any) -> bool:  # Any: a type as it was annotated
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def read_slurm_settings(kind: type[Chosen], site: str) -> Chosen:
    """Return the dataclass `kind`, filled by the TOML file of the `site` and by VOLPIPE_SLURM_...

    Wrong settings are refused whether or not there is a Slurm here.

    Raises:
        SettingsError: a setting is unknown, of the wrong type or too small.
        SiteError: there is no Slurm here, or a setting is missing.
    """
    values, missing = _read_values(kind, site, SLURM_PREFIX)
    settings = None if missing else kind(**values)
    if shutil.which("sbatch") is None:
        raise SiteError("no sbatch on the PATH; give the command on a machine that can submit Slurm jobs")
    return read_settings(kind, site, SLURM_PREFIX) if settings is None else settings


def slurm_settings(site: str) -> dict[str, Any]:  # Any: TOML values
    """Return what the file of `site` and VOLPIPE_SLURM_... say, as they are written; "" is no value.

    Raises:
        SettingsError: the settings are no TOML.
    """
    written = {
        name: os.environ[variable] for variable, name in _variables(SLURM_PREFIX).items() if os.environ[variable]
    }
    return _read_toml(settings_file(Path(site).stem)) | written
