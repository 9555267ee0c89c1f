"""An object store whose answers get lost: a proxy before a real S3 server that did the work and says 503."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tidegate.errors import ConflictError, UnavailableError
from tidegate.storage.backends.objects import ObjectsBackend
from tidegate.storage.backends.port import MissingObjectError


class ForgetfulProxy(ThreadingHTTPServer):
    """Passes every request on; while `forgets` is above 0, the answer to a PUT is thrown away."""

    daemon_threads = True

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server = urlsplit(server).netloc
        self.forgets = 0
        self.forgotten = 0
        self.down = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ForgetfulProxy

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
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


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[ForgetfulProxy]:
    server = ForgetfulProxy(s3_endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(300)


@pytest.fixture
def backend(proxy: ForgetfulProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectsBackend:
    monkeypatch.setattr("tidegate.storage.backends.objects.MAX_RETRIES", 3)
    options = {
        "endpoint": proxy.url,
        "region": "us-east-1",
        "access_key_id": "x",
        "secret_access_key": "y",
    }
    return ObjectsBackend.open(f"s3://tidegate-tests/{tmp_path.name}", cache=tmp_path, options=options)


def test_a_put_whose_answer_was_lost_has_happened_once(
    backend: ObjectsBackend, proxy: ForgetfulProxy
) -> None:
    proxy.forgets = 1
    backend.put("t/a", [b"abc"])
    assert proxy.forgotten == 1
    assert backend.read("t/a").to_pybytes() == b"abc"
    proxy.forgets = 1
    with pytest.raises(ConflictError):
        backend.put("t/a", [b"xyz"])


def test_a_publish_whose_answer_was_lost_is_known_to_have_won(
    backend: ObjectsBackend, proxy: ForgetfulProxy
) -> None:
    proxy.forgets = 1
    first = backend.publish("t/current", b"one", expected=None)
    assert backend.read_published("t/current") == (b"one", first)
    proxy.forgets = 1
    second = backend.publish("t/current", b"two", expected=first)
    assert backend.read_published("t/current") == (b"two", second)
    assert proxy.forgotten == 2
    proxy.forgets = 1
    with pytest.raises(ConflictError):
        backend.publish("t/current", b"three", expected=first)


def test_a_store_that_is_down_is_unavailable_and_never_empty(
    backend: ObjectsBackend, proxy: ForgetfulProxy
) -> None:
    backend.put("t/a", [b"abc"])
    proxy.down = True
    calls = (
        lambda: backend.read("t/a"),
        lambda: backend.read("t/absent"),
        lambda: backend.read_published("t/current"),
        lambda: backend.put("t/b", [b"x"]),
        lambda: backend.delete("t/a"),
        lambda: list(backend.list("t")),
    )
    for call in calls:
        with pytest.raises(UnavailableError, match="could not"):
            call()
    proxy.down = False
    assert backend.read("t/a").to_pybytes() == b"abc"
    with pytest.raises(MissingObjectError):
        backend.read("t/absent")
