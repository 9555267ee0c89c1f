"""An S3 server for the tests that meet real HTTP: moto's, from this environment or named by TIDEGATE_S3_SERVER.

Without one those tests are skipped, and the run says so at its end.

    s3_endpoint   the server
    s3            a place of one's own on it, by its address alone: settings are in the environment, as users have them;
                  every request passes a proxy that counts it, and can lose answers or be down
"""

from __future__ import annotations

import http.client
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

NOT_RUN = (
    "S3 NOT RUN: no moto server here; pip install 'moto[s3]' flask flask-cors, or set TIDEGATE_S3_SERVER"
)
BUCKET = "tidegate-tests"
SETTINGS = {"region": "us-east-1", "access_key_id": "x", "secret_access_key": "y"}


def server_command() -> list[str] | None:
    if named := os.environ.get("TIDEGATE_S3_SERVER"):
        return named.split()
    if importlib.util.find_spec("moto") and importlib.util.find_spec("flask_cors"):
        return [sys.executable, "-m", "moto.server"]
    found = shutil.which("moto_server")
    return [found] if found else None


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    command = server_command()
    if command is None:
        pytest.skip(NOT_RUN)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [*command, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        make_bucket(endpoint, server)
        yield endpoint
    finally:
        server.kill()
        server.wait()


def make_bucket(endpoint: str, server: subprocess.Popen[bytes]) -> None:
    credential = (
        "AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    )
    request = urllib.request.Request(
        f"{endpoint}/{BUCKET}", method="PUT", data=b"", headers={"Authorization": credential}
    )
    deadline = time.monotonic() + 300
    while True:
        try:
            urllib.request.urlopen(request, timeout=10).close()
            return
        except urllib.error.URLError:
            if server.poll() is not None:
                pytest.skip(f"{NOT_RUN} ({server.args!r} ended at once)")
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


class S3Proxy(ThreadingHTTPServer):
    """Passes every request on and keeps it in `requests` as (method, path).

    While `forgets` is above 0 the answer to a PUT is thrown away after the work was done; while `down` it answers 503.
    """

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = urlsplit(server).netloc
        self.requests: list[tuple[str, str]] = []
        self.forgets = 0
        self.forgotten = 0
        self.down = False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is none of the test's business."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: S3Proxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, self.path))
        if self.server.down:
            self._answer(503, {}, b"")
            return
        upstream = http.client.HTTPConnection(self.server.server, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers))
        response = upstream.getresponse()
        content = response.read()
        upstream.close()
        if self.command == "PUT" and self.server.forgets > 0:
            self.server.forgets -= 1
            self.server.forgotten += 1
            self._answer(503, {}, b"")
        else:
            self._answer(response.status, dict(response.getheaders()), content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for key, value in headers.items():
            if key.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                self.send_header(key, value)
        length = (
            headers.get("Content-Length", str(len(content))) if self.command == "HEAD" else str(len(content))
        )
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def proxied(endpoint: str) -> Iterator[S3Proxy]:
    """A proxy before the server, for a while."""
    server = S3Proxy(endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(300)


@dataclass
class Place:
    """A prefix of a bucket, and what was asked of it."""

    url: str
    proxy: S3Proxy
    environment: dict[str, str] = field(default_factory=dict)

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """How often each operation is asked for in the block, once it has ended."""
        found: Counter[str] = Counter()
        before = len(self.proxy.requests)
        yield found
        found.update(operation(*each) for each in self.proxy.requests[before:])


def operation(method: str, path: str) -> str:
    """A request by the name S3 charges it under."""
    asked = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if method == "POST" and "delete" in asked:
        return "DELETE"
    return "LIST" if "list-type" in asked else method


def object_of(path: str) -> str:
    """The object that a request is about, without bucket and prefix."""
    return unquote(urlsplit(path).path).split("/", 3)[-1]


@pytest.fixture
def s3(s3_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with proxied(s3_endpoint) as proxy:
        environment = {
            "AWS_ENDPOINT_URL": proxy.url,
            "AWS_REGION": SETTINGS["region"],
            "AWS_ACCESS_KEY_ID": SETTINGS["access_key_id"],
            "AWS_SECRET_ACCESS_KEY": SETTINGS["secret_access_key"],
            "TIDEGATE_CACHE": str(tmp_path / "cache"),
        }
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield Place(f"s3://{BUCKET}/{os.getpid()}-{tmp_path.name}", proxy, environment)
