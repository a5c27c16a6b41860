"""What a site is told: from its file and the environment, and refused by name where it is missing or makes no sense."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from volpipe.apps.settings import read_settings, settings_file
from volpipe.errors import SiteError


@dataclass(frozen=True)
class Selection:
    partition: str
    account: str | None = None
    cores: int = 8
    memory_gb: float = 2.5
    exclusive: bool = False
    claims: list[str] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def _nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith(("VOLPIPE_SITE", "VOLPIPE_LAB"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def read() -> Selection:
    return read_settings(Selection, "/anywhere/lab.py", "VOLPIPE_LAB")


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "volpipe").mkdir(exist_ok=True)
    file = tmp_path / "volpipe/lab.toml"
    file.write_text(text)
    return file


def test_the_file_of_the_site_fills_what_it_names_and_defaults_the_rest(tmp_path: Path) -> None:
    write(tmp_path, 'partition = "a"\ncores = 4\nmemory_gb = 3\nclaims = ["x", "y"]\nnodes = { kind = "h200" }\n')
    assert read() == Selection("a", None, 4, 3, False, ["x", "y"], {"kind": "h200"})


def test_the_environment_has_the_last_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 'partition = "a"\ncores = 4\naccount = "us"\n')
    for name, text in {
        "CORES": "16", "EXCLUSIVE": "yes", "MEMORY_GB": "1.5", "CLAIMS": "p, q", "NODES": "gpu=a100,zone=b",
        "ACCOUNT": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"VOLPIPE_LAB_{name}", text)
    assert read() == Selection("a", "us", 16, 1.5, True, ["p", "q"], {"gpu": "a100", "zone": "b"})


def test_another_file_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 'partition = "a"\n')
    (tmp_path / "other.toml").write_text('partition = "b"\n')
    monkeypatch.setenv("VOLPIPE_SITE", str(tmp_path / "other.toml"))
    assert read().partition == "b"
    monkeypatch.setenv("VOLPIPE_SITE", str(tmp_path / "none.toml"))
    with pytest.raises(SiteError, match=r"VOLPIPE_SITE names .*none\.toml, which is no file"):
        read()


def test_without_a_folder_for_settings_they_are_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings_file("lab") == tmp_path / ".config/volpipe/lab.toml"


def test_what_is_missing_is_named_with_both_ways_to_give_it(tmp_path: Path) -> None:
    with pytest.raises(SiteError) as refused:
        read()
    file = tmp_path / "volpipe/lab.toml"
    assert (
        str(refused.value) == f'partition is not set; write partition = "..." in {file}, or set VOLPIPE_LAB_PARTITION'
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partiton = 'a'", "no setting 'partiton' (did you mean 'partition'?); there are partition, account, cores"),
        ("cores = 'four'", "cores = 'four' is no whole number; write 4"),
        ("cores = 4.0", "cores = 4.0 is no whole number"),
        ("cores = true", "cores = True is no whole number"),
        ("memory_gb = true", "memory_gb = True is no number"),
        ("exclusive = 1", "exclusive = 1 is no true or false"),
        ("claims = 'x'", "claims = 'x' is no list of texts"),
        ("nodes = { kind = 3 }", "nodes = {'kind': 3} is no table of texts"),
        ("account = 7", "account = 7 is no text"),
        ("partition =", "is no TOML: "),
    ],
)
def test_what_a_file_cannot_mean_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(SiteError) as refused:
        read()
    assert str(refused.value).startswith(str(file))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("PARTITON", "a", "no setting 'partiton' (did you mean 'partition'?)"),
        ("CORES", "four", "VOLPIPE_LAB_CORES='four' is no whole number"),
        ("EXCLUSIVE", "maybe", "VOLPIPE_LAB_EXCLUSIVE='maybe' is no true or false"),
        ("NODES", "a100", "VOLPIPE_LAB_NODES='a100' is no table of texts"),
    ],
)
def test_what_the_environment_cannot_mean_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    monkeypatch.setenv("VOLPIPE_LAB_PARTITION", "a")
    monkeypatch.setenv(f"VOLPIPE_LAB_{name}", text)
    with pytest.raises(SiteError) as refused:
        read()
    assert said in str(refused.value)
