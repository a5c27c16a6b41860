"""A server of S3 on loopback for tests: one process's memory, signatures verified, listings in pages.

Not here: versions, and all else that volpipe does not ask for. Written from the S3 API reference and
the description of Signature Version 4, not from the clients that are tested with it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

ACCESS_KEY, SECRET_KEY = "AKIAVOLPIPETEST", "kept/secret+by=volpipe"
SILENCE = 1.2
PAGE = 40  # keys, far fewer than S3's 1000
LEAST_PART = 5 << 20  # bytes of each part of an upload but the last


class Bucket:
    """One bucket, `name`, and the requests that came for it.

    Attributes:
        files: by key.
        uploads: that were begun, and neither completed nor aborted, by their names: key, and by number the parts with
            their tags.
        readable, listable: whether that needs no signature.
        encodings: the Content-Encoding of files that have one, by key.
        is_open: whether pages of other servers may read it (CORS).
        requests: (method, path with query), in the order in which they came.
        broken: the status that every request is answered with, 0 where the server is well.
        num_good: requests that are answered well all the same, before that.
        fault: what goes wrong with a request (method, path): "" or a status, "cut" (half of what is read),
            "reset" (no answer, the connection ends) or "silent" (none for SILENCE seconds).
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.url = ""
        self.files: dict[str, bytes] = {}
        self.encodings: dict[str, str] = {}
        self.uploads: dict[str, tuple[str, dict[int, tuple[bytes, str]]]] = {}
        self.num_uploads = 0
        self.readable = self.listable = self.is_open = False
        self.requests: list[tuple[str, str]] = []
        self.broken = self.num_good = 0
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        self.lock = threading.Lock()
        self._tags: dict[str, tuple[bytes, str]] = {}

    def tag(self, key: str) -> str | None:
        """Return the tag of a file, computed once for each content; None where there is no such file."""
        data = self.files.get(key)
        if data is not None and (key not in self._tags or self._tags[key][0] is not data):
            self._tags[key] = data, etag(data)
        return None if data is None else self._tags[key][1]

    def put(self, key: str, data: bytes, tag: str) -> None:
        """Keep a file with its tag."""
        self._tags[key], self.files[key] = (data, tag), data


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # the default of 5 turns clients away, which come again a second later


@contextmanager
def serving(name: str = "cells") -> Iterator[Bucket]:
    """Give a bucket, served until the end."""
    bucket = Bucket(name)
    server = Server(("127.0.0.1", 0), type("BucketHandler", (Handler,), {"bucket": bucket}))
    bucket.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield bucket
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    bucket: Bucket
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer leaves in one piece, not in two that wait for each other
    disable_nagle_algorithm = True

    def log_message(self, format: str, *arguments: object) -> None:
        pass

    def handle_one(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bucket, found = self.bucket, urlsplit(self.path)
        query = dict(parse_qsl(found.query, keep_blank_values=True))
        name, _, key = unquote(found.path).lstrip("/").partition("/")
        bucket.requests.append((self.command, self.path))
        bucket.num_good -= 1
        fault = bucket.fault(self.command, self.path)
        if fault:
            self.fail(fault)
        elif bucket.broken and bucket.num_good < 0:
            self.answer_error(bucket.broken, "InternalError")
        elif not self.may(key, body):
            self.answer_error(403, "AccessDenied")
        elif name != bucket.name:
            self.answer_error(404, "NoSuchBucket")
        elif not key:
            self.answer_bucket(query, body)
        else:
            body_tag = etag(body) if self.command == "PUT" else ""  # while others are served
            with bucket.lock:
                is_part = self.command != "GET" and ("uploads" in query or "uploadId" in query)
                answer = (
                    self.upload_answer(key, query, body, body_tag) if is_part else self.file_answer(key, body, body_tag)
                )
            answer()  # others are served while it is on its way

    do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = handle_one

    def fail(self, fault: str) -> None:
        """Answer a request with a fault; see `Bucket`."""
        if fault.isdecimal():
            self.answer_error(int(fault), "SlowDown" if fault == "503" else "InternalError")
            return
        self.close_connection = True
        if fault == "silent":
            time.sleep(SILENCE)
        elif fault == "cut" and self.command == "GET":
            self.wfile.write(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nETag: "cut"\r\n')
            self.wfile.write(b"Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT\r\n\r\nhalf")
        else:  # so that the end of the connection is a reset
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def may(self, key: str, body: bytes) -> bool:
        """Tell whether the request is signed, or need not be; a missing file is denied to those who may not list."""
        signed = self.headers.get("Authorization")
        if signed:
            return is_signed(self, signed, body)
        if self.command not in ("GET", "HEAD"):
            return False
        if not key:
            return self.bucket.listable
        return self.bucket.readable and (self.bucket.listable or key in self.bucket.files)

    def answer_bucket(self, query: dict[str, str], body: bytes) -> None:
        if self.command == "POST" and "delete" in query:
            names = [node.text or "" for node in ElementTree.fromstring(body).iter() if node.tag.endswith("Key")]
            with self.bucket.lock:
                for name in names:
                    self.bucket.files.pop(name, None)
            gone = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
            self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
        elif self.command == "GET" and query.get("list-type") == "2":
            self.answer(200, self.listing(query).encode())
        else:
            self.answer_error(501, "NotImplemented")

    def listing(self, query: dict[str, str]) -> str:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token", query.get("start-after", ""))
        with self.bucket.lock:
            files = {key: data for key, data in self.bucket.files.items() if key.startswith(prefix)}
        entries: dict[str, bytes | None] = {}
        for key, data in sorted(files.items()):
            inner, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            entries |= {f"{prefix}{inner}{delimiter}": None} if found else {key: data}
        left = [name for name in sorted(entries) if name > after]
        page = left[: min(PAGE, int(query.get("max-keys", PAGE)))]
        xml = [f"<Name>{self.bucket.name}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}</KeyCount>"]
        for name in page:
            if (stored := entries[name]) is None:
                xml.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            else:
                time = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                known = f"<ETag>{escape(self.bucket.tag(name) or '')}</ETag><Size>{len(stored)}</Size>"
                xml.append(f"<Contents><Key>{escape(name)}</Key>{time}{known}</Contents>")
        more = len(left) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(xml)}</ListBucketResult>"
        )

    def file_answer(self, key: str, body: bytes, body_tag: str) -> Callable[[], None]:
        """Do what is asked of a file; return what answers. `body_tag` is the tag of a `body` that is to be kept."""
        files, tag = self.bucket.files, self.bucket.tag(key)
        wanted, unwanted = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if tag is None and self.command in ("GET", "HEAD"):
            return partial(self.answer_error, 404, "NoSuchKey")  # whatever the conditions
        if (wanted and wanted != tag) or (unwanted and tag and unwanted in ("*", tag)):
            reading = self.command in ("GET", "HEAD")
            return partial(self.answer_error, 304 if reading and unwanted else 412, "PreconditionFailed")
        if self.command == "PUT":
            self.bucket.put(key, body, body_tag)
            return partial(self.answer, 200, b"", tag=body_tag)
        if self.command == "DELETE":
            files.pop(key, None)
            return partial(self.answer, 204, b"")
        assert tag is not None
        return partial(self.answer_range, files[key], tag)

    def upload_answer(self, key: str, query: dict[str, str], body: bytes, body_tag: str) -> Callable[[], None]:
        """Do what is asked of a multipart upload; return what answers. `body_tag` is the tag of a part, in `body`."""
        bucket = self.bucket
        if self.command == "POST" and "uploads" in query:
            bucket.num_uploads += 1
            name = f"upload-{bucket.num_uploads}"
            bucket.uploads[name] = key, {}
            known = f"<Bucket>{bucket.name}</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
            return partial(
                self.answer, 200, f"<InitiateMultipartUploadResult>{known}</InitiateMultipartUploadResult>".encode()
            )
        name = query.get("uploadId", "")
        if name not in bucket.uploads or bucket.uploads[name][0] != key:
            return partial(self.answer_error, 404, "NoSuchUpload")
        parts = bucket.uploads[name][1]
        if self.command == "PUT":
            number = int(query["partNumber"])
            if not 1 <= number <= 10_000:
                return partial(self.answer_error, 400, "InvalidArgument")
            parts[number] = body, body_tag
            return partial(self.answer, 200, b"", tag=body_tag)
        if self.command == "DELETE":
            del bucket.uploads[name]
            return partial(self.answer, 204, b"")
        return self.completed(key, name, parts, body)

    def completed(self, key: str, name: str, parts: dict[int, tuple[bytes, str]], body: bytes) -> Callable[[], None]:
        """Make a file of the `parts` of upload `name` that `body` lists, if they are there and in order."""
        values = {tag: [node.text or "" for node in ElementTree.fromstring(body).iter() if node.tag.endswith(tag)]
                  for tag in ("PartNumber", "ETag")}  # fmt: skip
        numbers = list(map(int, values["PartNumber"]))
        if numbers != sorted(set(numbers)) or not numbers:
            return partial(self.answer_error, 400, "InvalidPartOrder")
        if any(n not in parts or parts[n][1] != tag for n, tag in zip(numbers, values["ETag"], strict=True)):
            return partial(self.answer_error, 400, "InvalidPart")
        if any(len(parts[n][0]) < LEAST_PART for n in numbers[:-1]):
            return partial(self.answer_error, 400, "EntityTooSmall")
        digests = b"".join(bytes.fromhex(parts[n][1].strip('"')) for n in numbers)
        tag = f'"{etag(digests)[1:-1]}-{len(numbers)}"'
        self.bucket.put(key, b"".join(parts[n][0] for n in numbers), tag)
        del self.bucket.uploads[name]
        known = f"<Bucket>{self.bucket.name}</Bucket><Key>{escape(key)}</Key><ETag>{escape(tag)}</ETag>"
        return partial(
            self.answer, 200, f"<CompleteMultipartUploadResult>{known}</CompleteMultipartUploadResult>".encode()
        )

    def answer_range(self, data: bytes, tag: str) -> None:
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if not found:
            self.answer(200, data, tag=tag)
            return
        first, last = found.groups()
        start = int(first) if first else max(0, len(data) - int(last))
        stop = min(len(data), int(last) + 1) if first and last else len(data)
        if start >= stop:
            self.answer_error(416, "InvalidRange")
            return
        self.answer(206, data[start:stop], tag=tag, place=f"bytes {start}-{stop - 1}/{len(data)}")

    def encoding(self, status: int) -> str:
        key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
        return self.bucket.encodings.get(key, "") if status in (200, 206) else ""

    def answer_error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>no</Message><BucketName>{self.bucket.name}</BucketName></Error>"
        self.answer(status, b"" if status == 304 else text.encode())

    def answer(self, status: int, body: bytes, *, tag: str = "", place: str = "") -> None:
        self.send_response(status)
        origin = "*" if self.bucket.is_open else ""
        headers = {"ETag": tag, "Content-Range": place, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                   "Access-Control-Allow-Origin": origin, "Content-Encoding": self.encoding(status)}  # fmt: skip
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD" and status not in (204, 304):
            self.wfile.write(body)


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


def is_signed(request: BaseHTTPRequestHandler, authorization: str, body: bytes) -> bool:
    """Tell whether the request bears the signature (AWS4-HMAC-SHA256) of the one user that there is."""
    said = dict(re.findall(r"(Credential|SignedHeaders|Signature)=([^,\s]+)", authorization))
    user, day, region, service, _ = said["Credential"].split("/")
    digest = request.headers["x-amz-content-sha256"]
    if digest != "UNSIGNED-PAYLOAD" and digest != hashlib.sha256(body).hexdigest():
        return False
    path, _, query = request.path.partition("?")
    pairs = sorted((quote(k, safe="-_.~"), quote(v, safe="-_.~")) for k, v in parse_qsl(query, keep_blank_values=True))
    headers = "".join(f"{name}:{request.headers[name].strip()}\n" for name in said["SignedHeaders"].split(";"))
    canonical = "\n".join(
        [request.command, path, "&".join(f"{k}={v}" for k, v in pairs), headers, said["SignedHeaders"], digest]
    )
    scope = f"{day}/{region}/{service}/aws4_request"
    hashed = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{SECRET_KEY}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers["x-amz-date"], scope, hashed])
    return user == ACCESS_KEY and hmac.compare_digest(
        hmac.new(key, text.encode(), "sha256").hexdigest(), said["Signature"]
    )
