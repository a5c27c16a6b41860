"""What a site is told: from its file and the environment, and refused by name where it is missing or makes no sense."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from volpipe.apps.settings import as_text, read_settings, read_workers, settings_file
from volpipe.errors import SiteError
from volpipe.sites.find import find_site


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


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (["x", "y"], "x,y"), (["x,y"], '["x,y"]'), ({"a": "1", "b": "2"}, "a=1,b=2"), ({"a": "x=y"}, "a=x=y"),
        ({"a": "x,y"}, '{"a": "x,y"}'), ({"a": "x,b=y"}, '{"a": "x,b=y"}'),
    ],
)  # fmt: skip
def test_the_environment_has_lists_and_tables_of_any_texts(
    monkeypatch: pytest.MonkeyPatch, value: list[str] | dict[str, str], text: str
) -> None:
    assert as_text(value) == text
    monkeypatch.setenv("VOLPIPE_LAB_PARTITION", "a")
    monkeypatch.setenv(f"VOLPIPE_LAB_{'CLAIMS' if isinstance(value, list) else 'NODES'}", text)
    assert value in (read().claims, read().nodes)


@pytest.mark.parametrize("text", ["[1]", '["x"', '[["x"]]'])
def test_a_list_of_the_environment_that_is_none_of_texts_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("VOLPIPE_LAB_CLAIMS", text)
    with pytest.raises(SiteError, match="is no list of texts"):
        read()


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


def test_all_settings_that_a_site_does_not_have_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "partiton = 'a'\nwall = 4")
    monkeypatch.setenv("VOLPIPE_LAB_CORSE", "4")
    with pytest.raises(SiteError) as refused:
        read()
    assert str(refused.value).startswith(
        f"{file}: no setting 'partiton' (did you mean 'partition'?); {file}: no setting 'wall'; "
        "the environment's VOLPIPE_LAB_CORSE: no setting 'corse' (did you mean 'cores'?); there are partition, account"
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("PARTITON", "a", "no setting 'partiton' (did you mean 'partition'?)"),
        ("CORES", "four", "VOLPIPE_LAB_CORES='four' is no whole number"),
        ("EXCLUSIVE", "maybe", "VOLPIPE_LAB_EXCLUSIVE='maybe' is no true or false"),
        ("NODES", "a100", "VOLPIPE_LAB_NODES='a100' is no table of texts"),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str) -> None:
    monkeypatch.setenv("VOLPIPE_LAB_PARTITION", "a")
    monkeypatch.setenv(f"VOLPIPE_LAB_{name}", text)
    with pytest.raises(SiteError) as refused:
        read()
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cores = 0", "cores is 0 and must be above 0; put it right in "),
        ("cores = -2", "cores is -2 and must be above 0"),
        ("memory_gb = -0.5", "memory_gb is -0.5 and must be 0 or more"),
    ],
)
def test_a_number_that_no_machine_can_have_is_refused(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path, f'partition = "a"\n{text}\n')
    with pytest.raises(SiteError) as refused:
        read()
    assert str(refused.value).startswith(said)
    assert str(refused.value).endswith(f"or set VOLPIPE_LAB_{text.split()[0].upper()}")


@pytest.mark.parametrize(("text", "number"), [(None, 3), ("", 3), ("1", 1), ("7", 7), ("128", 128)])
def test_the_environment_has_the_number_of_workers(
    monkeypatch: pytest.MonkeyPatch, text: str | None, number: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.delenv("VOLPIPE_WORKERS", raising=False)
    if text is not None:
        monkeypatch.setenv("VOLPIPE_WORKERS", text)
    assert read_workers(3) == number


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "VOLPIPE_WORKERS is '0'; it must be a number of workers, at least 1, such as 2"),
        ("-4", "VOLPIPE_WORKERS is '-4'; it must be"),
        ("2.5", "VOLPIPE_WORKERS is '2.5'; it must be"),
        ("all", "VOLPIPE_WORKERS is 'all'; it must be"),
        ("2000", "VOLPIPE_WORKERS is 2000 and this machine has 2 cores; it may be at most 64 for each core, 128, and"),
    ],
)
@pytest.mark.parametrize("site", ["threads", "local"])
def test_a_number_of_workers_that_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str, site: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setenv("VOLPIPE_WORKERS", text)
    with pytest.raises(SiteError) as refused:
        find_site(site)(tmp_path)
    assert str(refused.value).startswith(f"site {site} cannot be used here: {said}")
