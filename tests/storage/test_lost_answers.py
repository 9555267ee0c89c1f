"""An object store whose answers get lost: a proxy before a real S3 server that did the work and says 503."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from s3_server import BUCKET, SETTINGS, S3Proxy, proxied
from tidegate.errors import ConflictError, UnavailableError
from tidegate.storage.backends.base import MissingObjectError
from tidegate.storage.backends.objects import ObjectsBackend


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[S3Proxy]:
    with proxied(s3_endpoint) as server:
        yield server


@pytest.fixture
def backend(proxy: S3Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectsBackend:
    monkeypatch.setattr("tidegate.storage.backends.objects.MAX_RETRIES", 3)
    options = {"endpoint": proxy.url, **SETTINGS}
    return ObjectsBackend.open(f"s3://{BUCKET}/{tmp_path.name}", cache=tmp_path, options=options)


def test_a_put_whose_answer_was_lost_has_happened_once(backend: ObjectsBackend, proxy: S3Proxy) -> None:
    proxy.forgets = 1
    backend.put("t/a", [b"abc"])
    assert proxy.forgotten == 1
    assert backend.read("t/a").to_pybytes() == b"abc"
    proxy.forgets = 1
    with pytest.raises(ConflictError):
        backend.put("t/a", [b"xyz"])


def test_a_publish_whose_answer_was_lost_is_known_to_have_won(
    backend: ObjectsBackend, proxy: S3Proxy
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


def test_a_store_that_is_down_is_unavailable_and_never_empty(backend: ObjectsBackend, proxy: S3Proxy) -> None:
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
