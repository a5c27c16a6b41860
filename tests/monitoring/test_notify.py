"""Notifications: one post at the end, however that was; no server changes how a command ends."""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command import THREADS, Ended, Give, giver, set_each
from scrapes import free_port
from trainings import make_folder
from volumes import noise, windowed, write_volume
from webhook import SECRET, Webhook, webhook

import volpipe as vp
from volpipe.monitoring import notify

SETTINGS = ("normalise.method=none", "output.levels=1", *windowed((8, 8, 8), (0, 0, 0), (1, 1, 1), "crop"))
NET = """
import pathlib, threading, time, torch
class Net(torch.nn.Module):
    volpipe = dict(
        in_channels=1, out_channels=1, scale=(1, 1, 1), stride=(1, 1, 1),
        halo=(0, 0, 0), window=(8, 8, 8), intensity="same"
    )
    def forward(self, x):
        while (x == 9).all() and pathlib.Path("wait").exists():
            time.sleep(0.02)
        if pathlib.Path("fail").exists() and threading.current_thread() is not threading.main_thread():
            raise ValueError("this net does not want to")
        return x
def build():
    return Net()
"""
KEYS = {"what", "output", "state", "exit_code", "seconds", "missing", "message", "command", "folder", "report"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_volume(tmp_path / "in.n5", noise((8, 8, 32)), 8)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.fixture
def give(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Give:
    return giver(folder, monkeypatch, capsys)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    monkeypatch.setattr(notify, "TIMEOUT", 0.3)
    monkeypatch.setattr(notify, "PAUSE", 0.0)
    with webhook() as served:
        yield served


def command(url: str, *options: str) -> list[str]:
    net = set_each("net.name=net.py:build", *SETTINGS)
    return ["run", *THREADS, *net, "--notify", url, *options, "-o", "out.zarr", "in.n5"]


def test_one_post_says_how_a_run_ended(folder: Path, give: Give, hook: Webhook) -> None:
    ended = give(*command(hook.url))
    assert ended.code == 0 and ended.err == ""
    (post,) = hook.posts
    assert set(post) == KEYS
    report = folder / "out.zarr.run" / "report.html"
    assert post.items() >= {
        "what": "run", "output": str(folder / "out.zarr"), "state": "complete", "exit_code": 0, "missing": 0,
        "message": "", "folder": str(folder), "report": str(report) if report.is_file() else None,
    }.items()  # fmt: skip
    assert post["command"].startswith("volpipe run --config threads") and "--notify" not in post["command"]
    assert 0 < post["seconds"] < 100
    assert hook.headers[0]["Content-Type"] == "application/json"
    assert hook.headers[0]["Authorization"] == f"Basic {b64encode(f'me:{SECRET}'.encode()).decode()}"
    assert hook.headers[0]["User-Agent"] == f"volpipe/{vp.__version__}"
    report.write_text("<html></html>")
    assert give(*command(hook.url)).code == 0  # nothing to do
    assert hook.posts[1]["state"] == "complete" and hook.posts[1]["report"] == str(report)


def test_a_run_that_lacks_parts_or_stops_says_why(folder: Path, give: Give, hook: Webhook) -> None:
    (folder / "in.n5" / "raw" / "1" / "0" / "0").write_bytes(b"damage")
    assert give(*command(hook.url)).code == 1
    assert (hook.posts[0]["state"], hook.posts[0]["missing"]) == ("incomplete", 2)  # a block, and what is made of it
    assert "2 parts missing, first infer 1 (0:8,0:8,8:16)" in hook.posts[0]["message"]
    (folder / "fail").touch()
    ended = give(*command(hook.url, "--fresh"))
    assert ended.code == 1 and hook.posts[1]["state"] == "stopped"
    assert hook.posts[1]["missing"] is None and hook.posts[1]["exit_code"] == 1
    assert (
        "running the net (infer) failed" in hook.posts[1]["message"] and "does not want to" in hook.posts[1]["message"]
    )


def test_what_is_refused_before_the_start_is_told_too(folder: Path, give: Give, hook: Webhook) -> None:
    arguments = command(hook.url)
    assert give(*arguments[:-1], "none.n5").code == 2
    (post,) = hook.posts
    assert post["state"] == "refused" and post["output"] is None and "no volume at" in post["message"]
    assert give(*arguments, "--metrics", "99999").code == 2
    assert hook.posts[1]["message"].startswith("--metrics 99999: ports end at")


@pytest.mark.parametrize(
    ("mood", "num_posts", "reason"),
    [
        ({"hangs": True}, 2, "no answer within"),
        ({"trickles": True}, 1, "no answer within"),
        ({"statuses": [500, 500]}, 2, "the server answered 500"),
        ({"statuses": [302, 302]}, 2, "the server answered 302"),
        ({"statuses": [503]}, 2, None),
    ],
)
def test_a_server_that_does_not_take_it_changes_no_exit_code(
    mood: dict[str, Any],
    num_posts: int,
    reason: str | None,
    folder: Path,
    give: Give,
    hook: Webhook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notify, "MOST_SECONDS", 1.0)
    for name, value in mood.items():
        setattr(hook, name, value)
    began = time.monotonic()
    ended = give(*command(hook.url))
    assert ended.code == 0 and time.monotonic() - began < 20
    assert len(hook.posts) == num_posts
    if reason is None:
        assert ended.err == ""
    else:
        warning = " ".join(ended.err.split())
        assert warning.startswith(f"volpipe: nobody was notified: http://127.0.0.1:{hook.port}/…: ")
        assert reason in warning
    check_silence(folder, ended)


def test_a_server_that_is_not_there_changes_no_exit_code(folder: Path, give: Give, hook: Webhook) -> None:
    ended = give(*command(f"http://127.0.0.1:{free_port()}/{SECRET}"))
    assert ended.code == 0 and "nobody was notified" in ended.err and "Connection refused" in ended.err
    check_silence(folder, ended)


def check_silence(folder: Path, ended: Ended) -> None:
    """Look for the secrets of the address in all that is printed or written."""
    assert SECRET not in ended.out + ended.err
    files = [path for path in (folder / "out.zarr.run").rglob("*") if path.is_file()]
    assert {"progress.json", "volpipe.log"} <= {path.name for path in files}
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        (f"hooks.lab.org/{SECRET}", "does not say http:// or https://"),
        (f"ftp://lab.org/{SECRET}", "begins with ftp:"),
        (f"file:///{SECRET}", "begins with file:"),
        (f"https:///{SECRET}", "has no host"),
        (f"https://lab.org:port/{SECRET}", "cannot be understood"),
        (f"https://lab.org/a b{SECRET}", "a character that addresses do not have"),
    ],
)
def test_an_address_that_is_none_is_refused_without_repeating_it(
    url: str, sentence: str, folder: Path, give: Give
) -> None:
    ended = give(*command(url))
    assert ended.code == 2 and ended.err.startswith("volpipe: --notify: the address ")
    assert sentence in " ".join(ended.err.split()) and SECRET not in ended.err
    assert not (folder / "out.zarr.run").exists()


def test_the_address_may_be_in_the_environment(
    folder: Path, give: Give, hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOLPIPE_NOTIFY", hook.url)
    make_folder(folder)
    assert give("train", *THREADS, "recipe.toml", "-o", "t").code == 0
    (post,) = hook.posts
    assert (post["what"], post["state"], post["output"]) == ("train", "complete", str(folder / "t"))


def test_a_batch_is_one_post_that_counts_its_datasets(folder: Path, give: Give, hook: Webhook) -> None:
    for number in range(2):
        write_volume(folder / "raw" / f"{number}.n5", noise((8, 8, 16), seed=number), 8)
    (folder / "raw" / "1.n5" / "raw" / "0" / "0" / "0").write_bytes(b"damage")
    net = set_each("net.name=net.py:build", *SETTINGS)
    ended = give("batch", *THREADS, *net, f"--notify={hook.url}", "-o", "done", "raw/*.n5/raw")
    assert ended.code == 1
    (post,) = hook.posts
    assert (post["what"], post["state"], post["missing"]) == ("batch", "incomplete", 1)
    assert post["message"].startswith("1 of 2 datasets are not complete; the first: 2 parts missing")
    assert "--notify" not in post["command"] and SECRET not in json.dumps(post)
