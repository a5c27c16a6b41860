"""The server shows what was named to the page that it made, and nothing else to anybody."""

from __future__ import annotations

import gzip
import http.client
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from arrays import make, write_all
from volumes import noise, write_volume

import volpipe as vp
from volpipe.viewer.site import span
from volpipe.volumes.volume import ArraySpec, Level, Multiscale, create_array, create_multiscale

SECRET = b"of another folder"


@dataclass(frozen=True)
class Given:
    """An answer to a request."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(viewer: vp.Viewer, path: str, method: str = "GET", **headers: str) -> Given:
    """Return the answer to a request for `path`, which goes as it is written; "host" may be among `headers`."""
    connection = http.client.HTTPConnection("127.0.0.1", viewer.port, timeout=20)
    try:
        connection.putrequest(method, path, skip_host="host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return Given(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[vp.Viewer]:
    """A viewer of a Zarr, beside which lies a file that nobody named."""
    (tmp_path / "secret.txt").write_bytes(SECRET)
    make(tmp_path / "a.zarr", noise((8, 8, 8)), chunks=(4, 4, 4))
    (tmp_path / "a.zarr" / "notes.txt").write_bytes(SECRET)
    with vp.view(tmp_path / "a.zarr") as opened:
        yield opened


def token(viewer: vp.Viewer) -> str:
    return viewer.url.split("/")[3]


def write_precomputed(folder: Path) -> Path:
    """Write a folder of Neuroglancer's own format with one chunk, and return the chunk's file."""
    spec = ArraySpec((8, 8, 8), np.dtype(np.uint8), (8, 8, 8), codec="raw")
    create_array(folder, "s0", spec, "precomputed")
    write_all(folder, "s0", noise((8, 8, 8)))
    create_multiscale(folder, Multiscale((Level("s0"),), voxel_size_nm=(8, 8, 8)), format="precomputed")
    (file,) = (folder / "s0").iterdir()
    return file


def test_files_and_parts_of_them_are_those_on_disk(tmp_path: Path) -> None:
    file = write_precomputed(tmp_path / "a")
    with vp.view(tmp_path / "a") as viewer:
        _check_parts(viewer, f"/{token(viewer)}/still/0/s0/{file.name}", file.read_bytes())


def test_chunks_that_are_made_have_parts_too(viewer: vp.Viewer) -> None:
    path = f"/{token(viewer)}/still/0/s0/c/0/0/0"
    data = ask(viewer, path).body
    voxels = np.frombuffer(gzip.decompress(data), np.uint8).reshape(64, 64, 64)
    assert (voxels[:8, :8, :8] == noise((8, 8, 8))).all() and not voxels[8:].any()
    _check_parts(viewer, path, data)


def _check_parts(viewer: vp.Viewer, path: str, data: bytes) -> None:
    """Compare what is answered to requests for all and for parts of `path` with `data`."""
    whole = ask(viewer, path)
    assert (whole.status, whole.body, whole.headers["accept-ranges"]) == (200, data, "bytes")
    for header, start, stop in (("bytes=3-9", 3, 10), ("bytes=5-", 5, len(data)), ("bytes=-4", -4, len(data))):
        part = ask(viewer, path, range=header)
        assert (part.status, part.body) == (206, data[start:stop])
    assert ask(viewer, path, range="bytes=3-9").headers["content-range"] == f"bytes 3-9/{len(data)}"
    beyond = ask(viewer, path, range="bytes=99999-")
    assert (beyond.status, beyond.headers["content-range"]) == (416, f"bytes */{len(data)}")
    head = ask(viewer, path, "HEAD")
    assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(data)))
    assert ask(viewer, f"/{token(viewer)}/still/0/s0/c/9/9/9").status == 404


@pytest.mark.parametrize(
    ("header", "expected"),
    [("bytes=0-0", (0, 1)), ("bytes=2-99", (2, 10)), ("bytes=-99", (0, 10)), ("bytes=10-", None), ("bytes=-0", None)],
)
def test_a_part_is_cut_to_what_there_is(header: str, expected: tuple[int, int] | None) -> None:
    assert span(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=", "bytes=-", "bytes=1-2,4-5", "bytes=5-2", "lines=1-2", "bytes=a-b"])
def test_another_range_is_no_part(header: str) -> None:
    with pytest.raises(ValueError, match="Range"):
        span(header, 10)


OUTSIDE = [
    "../secret.txt", "../../secret.txt", "s0/../secret.txt", "s0/../../secret.txt", "s0/c/../../../secret.txt",
    "%2e%2e/secret.txt", "s0/%2e%2e/%2e%2e/secret.txt", "s0/c/%2e%2e%2f%2e%2e%2f%2e%2e%2fsecret.txt",
    "s0/..%2f..%2fsecret.txt", "s0/%252e%252e/secret.txt", "s0//etc/passwd", "/etc/passwd", "s0/%2fetc%2fpasswd",
    "s0/c/0/0/0%00.txt", "s0/..%5c..%5csecret.txt", "notes.txt", "s0/notes.txt", "s0/c", "s0/c/0", "s0/", "s1/c/0/0/0",
    "objects/info", "s0/c/0/0/-1", "s0/c/0/0/0/0",
]  # fmt: skip


@pytest.mark.parametrize("name", OUTSIDE)
def test_nothing_else_on_the_disk_can_be_asked_for(viewer: vp.Viewer, tmp_path: Path, name: str) -> None:
    for prefix in ("still/0/", "live/0/", "v/view/", ""):
        answer = ask(viewer, f"/{token(viewer)}/{prefix}{name}")
        assert answer.status in (400, 403, 404) and SECRET not in answer.body and b"root:" not in answer.body
    absolute = ask(viewer, f"/{token(viewer)}/still/0/s0/{quote(str(tmp_path / 'secret.txt'), safe='')}")
    assert (absolute.status, SECRET in absolute.body) == (404, False)


def test_a_link_that_leads_out_is_not_followed_and_the_page_says_so(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_bytes(SECRET)
    chunk = write_precomputed(tmp_path / "a")
    chunk.unlink()
    chunk.symlink_to(tmp_path / "secret.txt")
    with vp.view(tmp_path / "a") as viewer:
        answer = ask(viewer, f"/{token(viewer)}/still/0/s0/{chunk.name}")
        assert (answer.status, SECRET in answer.body) == (410, False)
        assert b"is a link to a file outside of" in ask(viewer, f"/{token(viewer)}/progress").body


def test_a_link_inside_and_a_volume_that_is_one_are_followed(tmp_path: Path) -> None:
    chunk = write_precomputed(tmp_path / "a")
    chunk.rename(tmp_path / "a/moved")
    chunk.symlink_to(tmp_path / "a/moved")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    with vp.view(tmp_path / "b") as viewer:
        assert ask(viewer, f"/{token(viewer)}/still/0/s0/{chunk.name}").body == (tmp_path / "a/moved").read_bytes()


@pytest.mark.parametrize(
    "path", ["", "still/0/zarr.json", "v/view/", "v/view/index.html", "progress", "events/view", "watch.js"]
)
def test_without_the_token_there_is_nothing(viewer: vp.Viewer, path: str) -> None:
    for wrong in ("", "x/", "A" * 32 + "/", token(viewer)[:-1] + "/", token(viewer) + "A/"):
        assert ask(viewer, f"/{wrong}{path}").status == 404


@pytest.mark.parametrize("path", ["still/0/zarr.json", "still/0/s0/c/0/0/0", "progress", "v/view/"])
def test_another_page_gets_nothing(viewer: vp.Viewer, path: str) -> None:
    whole = f"/{token(viewer)}/{path}"
    own = f"http://127.0.0.1:{viewer.port}"
    same = ask(viewer, whole, origin=own)
    assert (same.status, same.headers["access-control-allow-origin"]) == (200, own)
    others = ("http://evil.example", "null", f"http://127.0.0.1:{viewer.port + 1}", f"https://127.0.0.1:{viewer.port}")
    for origin in others:
        answer = ask(viewer, whole, origin=origin)
        assert answer.status == 403 and "access-control-allow-origin" not in answer.headers
    assert ask(viewer, whole, "OPTIONS", origin="http://evil.example").status == 403
    assert "access-control-allow-origin" not in ask(viewer, whole).headers


def test_a_page_that_gave_its_own_name_to_this_machine_gets_nothing(viewer: vp.Viewer) -> None:
    whole = f"/{token(viewer)}/still/0/zarr.json"
    assert ask(viewer, whole, host=f"evil.example:{viewer.port}").status == 403
    assert ask(viewer, whole, host="[::1").status == 403
    assert ask(viewer, whole, host="evil.example", origin="http://evil.example").status == 403
    assert ask(viewer, whole, host="localhost:9999").status == 200  # another port: forwarded by SSH


def test_a_port_that_is_open_to_others_goes_by_its_names_and_numbers(tmp_path: Path) -> None:
    with vp.view(write_volume(tmp_path / "a.n5", noise((4, 4, 4))), bind="0.0.0.0:0") as viewer:
        assert viewer.is_open and viewer.url.startswith("http://127.0.0.1:")
        whole = f"/{token(viewer)}/progress"
        for host, status in (("10.1.2.3:80", 200), (f"{socket.gethostname()}:80", 200), ("evil.example", 403)):
            assert ask(viewer, whole, host=host).status == status
    with vp.view(tmp_path / "a.n5") as viewer:
        assert not viewer.is_open and ask(viewer, f"/{token(viewer)}/progress", host="10.1.2.3").status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(viewer: vp.Viewer, method: str) -> None:
    for path in ("still/0/s0/c/0/0/0", "progress", "v/view/", "events/view"):
        assert ask(viewer, f"/{token(viewer)}/{path}", method).status == 405


def test_the_address_leads_to_the_page_by_the_name_that_the_browser_has_for_it(viewer: vp.Viewer) -> None:
    answer = ask(viewer, f"/{token(viewer)}/", host="localhost:9999")
    place, _, state = answer.headers["location"].partition("#!")
    assert (answer.status, place) == (302, f"http://localhost:9999/{token(viewer)}/v/view/")
    assert quote(f"http://localhost:9999/{token(viewer)}/still/0/|zarr3:", safe="") in state
    page = ask(viewer, f"/{token(viewer)}/v/view/")
    assert (page.status, page.headers["referrer-policy"]) == (200, "no-referrer")
    assert b"main." in page.body and page.body.count(b"watch.js") == 1


def test_a_port_that_is_taken_is_refused(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "a.n5", noise((4, 4, 4)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(vp.VolpipeError, match="another program listens there; choose another port"):
            vp.view(path, bind=str(taken.getsockname()[1]))


@pytest.mark.parametrize("bind", ["x", "1:2:3", "70000", "127.0.0.1", ":80", "127.0.0.1:"])
def test_what_is_no_port_is_refused(tmp_path: Path, bind: str) -> None:
    with pytest.raises(vp.VolpipeError, match="write a port, such as 8765"):
        vp.view(write_volume(tmp_path / "a.n5", noise((4, 4, 4))), bind=bind)


def test_it_listens_on_loopback_alone_and_not_any_more_once_closed(tmp_path: Path) -> None:
    before = threading.active_count()
    viewer = vp.view(write_volume(tmp_path / "a.n5", noise((4, 4, 4))))
    port = viewer.port
    assert viewer.url.startswith(f"http://127.0.0.1:{port}/") and len(token(viewer)) >= 32
    stream = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    stream.request("GET", f"/{token(viewer)}/events/view")
    assert stream.getresponse().status == 200  # a page that is still open
    viewer.close()
    viewer.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port), 5)
    assert threading.active_count() == before
    stream.close()


def test_a_volume_that_is_gone_is_named_on_the_page(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", noise((8, 8, 8)))
    with vp.view(tmp_path / "a.npy") as viewer:
        assert b'"sentence": ""' in ask(viewer, f"/{token(viewer)}/progress").body
        (tmp_path / "a.npy").rename(tmp_path / "b.npy")
        answer = ask(viewer, f"/{token(viewer)}/still/0/s0/c/0/0/0")
        assert answer.status == 410 and b"a.npy" in answer.body
        assert b"a.npy" in ask(viewer, f"/{token(viewer)}/progress").body
