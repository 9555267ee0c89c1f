"""Which requests are answered: limits on connections, then checks of each request before its route is looked up.

Connections (`LimitedProtocol`): uvicorn waits without a limit for the head of a request, and for a client that does not
read its answer. Here a connection without a whole request head after `header_seconds` is closed, and so is one whose
client has not read for `request_seconds`.

P1  hanging clients do not keep others out. A connection is *idle* while its client has to act: send a request, the rest
    of one, or read the answer. When half of `connections` are open, a new one replaces those that have been idle
    longest, except those idle for less than `fresh_seconds`, so that a burst of connections does not close itself.
P2  at most `connections` are open: one more is answered 503 and closed before anything of it is read.
P3  unread answers are bounded (`SEND_BUFFER_BYTES`), so that a client that never reads costs little.

Requests (`Gate`):

G1  Host must name this server (no DNS rebinding); an Origin must be this server's own (no cross-site scripts).
G2  with a token, every path but /health, /login and the style sheet needs it: `Authorization: Bearer …`, or the cookie
    that the login form set. Tokens are compared in constant time, and are never in a URL, a log or a page.
G3  GET and HEAD only, but for /login and /logout. URL, headers, body, time and number of streams have limits. A request
    with both Content-Length and Transfer-Encoding is refused and its connection closed (request smuggling).
G4  every answer has headers against sniffing, framing, foreign scripts, storing and sharing with other sites.
G5  an internal error is a plain 500; the log says what it was, without the request.

Thread rule: the event loop's.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections import OrderedDict
from contextlib import suppress
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

import h11
import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidegate.clock import Clock, SystemClock
from tidegate.web.failures import INTERNAL, Failure, debugging
from tidegate.web.pages import failure_page
from tidegate.web.settings import Limits, Settings

# -- connections -----------------------------------------------------------------------------------

SEND_BUFFER_BYTES: Final = 128 << 10
_BUSY_TEXT = b'{"error":"overload","message":"too many connections are open","remedy":"close some, or wait"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BUSY_TEXT), _BUSY_TEXT)
)


class LimitedProtocol(H11Protocol):
    """uvicorn's protocol, with deadlines; `guarded` makes a class of it for some limits."""

    limits: ClassVar[Limits] = Limits()
    is_refused = False

    def connection_made(self, transport: Any) -> None:
        self._head_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._since = self.loop.time()
        self._make_room()
        if len(self.connections) >= self.limits.connections:  # P2
            self.is_refused = True
            transport.write(_BUSY)
            transport.close()
            return
        with suppress(OSError, AttributeError):  # P3; another kind of socket: then it is the system's own
            transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES
            )
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        self._stop_reading_timer()
        if not self.is_refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        if self._head_timer is None and self._awaits_head:
            self._await_head()
        try:
            super().data_received(data)
        except h11.ProtocolError:  # what follows a refused request, or comes when an answer is on its way
            self.transport.close()
        if not self._awaits_head:
            self._head_came()

    def eof_received(self) -> None:
        if not self.is_refused:
            super().eof_received()

    def on_response_complete(self) -> None:
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._since = self.loop.time()
        self._reading_timer = self.loop.call_later(self.limits.request_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()

    @property
    def _awaits_head(self) -> bool:
        """Whether the next thing to come is the head of a request."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        """Whether it is the client that has to act (P1)."""
        return (
            self._awaits_head
            or self.flow.write_paused
            or (self.cycle.more_body and not self.cycle.response_started)
        )

    def _make_room(self) -> None:
        """Close those that have been idle longest, so many as are too many (P1)."""
        excess = len(self.connections) + 1 - (self.limits.connections + 1) // 2
        if excess <= 0:
            return
        latest = self._since - self.limits.fresh_seconds
        own = [each for each in self.connections if isinstance(each, LimitedProtocol)]
        stale = [each for each in own if each._since <= latest and each._is_idle]
        for each in sorted(stale, key=lambda one: one._since)[:excess]:
            self.connections.discard(each)
            each.transport.abort()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_reading_timer(self) -> None:
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._awaits_head and not self.transport.is_closing():
            self.transport.close()


def limited_protocol(limits: Limits) -> type[LimitedProtocol]:
    """The protocol class for these limits."""
    return type("Guarded", (LimitedProtocol,), {"limits": limits})


# -- requests --------------------------------------------------------------------------------------

COOKIE: Final = "tidegate_session"
OPEN_PATHS: Final = frozenset({"/health", "/login", "/static/page.css"})
POST_PATHS: Final = frozenset({"/login", "/logout"})
LIVE_ENDINGS: Final = ("/tail", "/live")
POLICY: Final = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Final = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
TWO_LENGTHS: Final = Failure(
    "two_lengths",
    "a request with Transfer-Encoding has no Content-Length and is HTTP/1.1",
    "send one of them",
)
WRONG_HOST: Final = Failure(
    "wrong_host",
    "this server does not answer under that name",
    "ask for 127.0.0.1 or localhost, or start it with --allow-host NAME",
)
WRONG_ORIGIN: Final = Failure("wrong_origin", "requests from other sites are refused", "open the page itself")
NO_METHOD: Final = Failure("method", "only GET and HEAD are answered here", "everything is read-only")
NO_TOKEN: Final = Failure(
    "token", "this needs the server's token", "send Authorization: Bearer TOKEN, or log in at /login"
)
TOO_LONG: Final = Failure(
    "too_long", "the request took too long to arrive or to answer", "send less, or ask for less"
)
TOO_MANY: Final = Failure("overload", "too many live pages are open", "close some of them")
log = logging.getLogger("tidegate.web")


class Sessions:
    """Who logged in with the token, until when; by random names that say nothing about it."""

    def __init__(self, settings: Settings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def login(self, offered: str) -> str | None:
        """The name of a new session, None for a wrong token."""
        if not self.is_token(offered):
            return None
        name = secrets.token_urlsafe(32)
        limits = self._settings.limits
        self._until[_digest(name)] = self._clock.monotonic_ms() + limits.session_seconds * 1000
        while len(self._until) > limits.sessions:
            self._until.popitem(last=False)
        return name

    def logout(self, name: str) -> None:
        self._until.pop(_digest(name), None)

    def is_open(self, name: str) -> bool:
        until = self._until.get(_digest(name))
        return until is not None and self._clock.monotonic_ms() < until

    def is_token(self, offered: str) -> bool:
        token = self._settings.token
        return token is not None and hmac.compare_digest(_digest(offered), _digest(token))


class Gate:
    """The middleware that keeps G1 to G5."""

    def __init__(self, app: ASGIApp, *, settings: Settings, sessions: Sessions) -> None:
        self._app, self._settings, self._sessions = app, settings, sessions
        self._names = settings.allowed_names
        self._live = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        began = False

        async def guarded(message: Message) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                kept = b"public, max-age=3600" if scope["path"].startswith("/static/") else b"no-store"
                storing = (b"cache-control", kept)
                message["headers"] = [*message.get("headers", ()), *HEADERS, storing]
            try:
                await send(message)
            except h11.LocalProtocolError:
                pass  # the rest of the request was no HTTP: it has its answer, and the connection ends

        refusal = self._refusal(scope)
        if refusal is not None:
            await self._refuse(scope, guarded, *refusal)
            return
        try:
            await self._timed(scope, receive, guarded)
        except ClientDisconnect:
            pass  # nobody is left to be answered
        except TimeoutError:
            if not began:
                await self._refuse(scope, guarded, 408, TOO_LONG)
        except Exception as error:
            log.error("%s failed: %s", scope["method"][:10], type(error).__name__, exc_info=debugging())
            if not began:
                await self._refuse(scope, guarded, 500, INTERNAL)

    async def _timed(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._settings.limits
        if not scope["path"].endswith(LIVE_ENDINGS):
            async with asyncio.timeout(limits.request_seconds + 1):
                await self._app(scope, self._bounded(receive), send)
            return
        if self._live >= limits.live_streams:
            await self._refuse(scope, send, 429, TOO_MANY)
            return
        self._live += 1
        try:
            async with asyncio.timeout(limits.live_seconds):
                await self._app(scope, self._bounded(receive), send)
        except TimeoutError:
            pass
        finally:
            self._live -= 1

    def _bounded(self, receive: Receive) -> Receive:
        """A body that ends at its limit (413 is answered before, where a length was said)."""
        came = 0

        async def next_message() -> Message:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > self._settings.limits.body_bytes:
                raise HTTPException(413)
            return message

        return next_message

    # -- decisions -------------------------------------------------------------------------------

    def _refusal(self, scope: Scope) -> tuple[int, Failure] | None:
        limits, headers = self._settings.limits, scope["headers"]
        url = len(scope["raw_path"]) + len(scope["query_string"]) + bool(scope["query_string"])
        if url > limits.url_bytes:
            most = f"a URL has at most {limits.url_bytes} bytes"
            return 414, Failure("url_too_long", most, "ask for less at once")
        if sum(len(name) + len(value) for name, value in headers) > limits.header_bytes:
            most = f"headers have at most {limits.header_bytes} bytes"
            return 431, Failure("headers_too_large", most, "send fewer")
        if _has_two_lengths(scope):
            return 400, TWO_LENGTHS
        hosts = _all(headers, b"host")
        if len(hosts) != 1 or not self._is_ours(hosts[0]):
            return 421, WRONG_HOST
        for origin in map(urlsplit, _all(headers, b"origin")):
            if origin.netloc.lower() != hosts[0].lower() or origin.scheme not in ("http", "https"):
                return 403, WRONG_ORIGIN
        if not self._may_use(scope["method"], scope["path"]):
            return 405, NO_METHOD
        if not self._length_fits(headers):
            most = f"a body has at most {limits.body_bytes} bytes"
            return 413, Failure("body_too_large", most, "send less")
        needs_token = self._settings.token is not None and scope["path"] not in OPEN_PATHS
        return (401, NO_TOKEN) if needs_token and not self._is_known(headers) else None

    def _is_ours(self, host: str) -> bool:
        name, colon, port = host.lower().rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host.lower(), ""
        if port and not (port.isascii() and port.isdigit() and len(port) <= 5):
            return False
        return name in self._names

    def _may_use(self, method: str, path: str) -> bool:
        return method in ("GET", "HEAD") or (method == "POST" and path in POST_PATHS)

    def _length_fits(self, headers: list[tuple[bytes, bytes]]) -> bool:
        lengths = _all(headers, b"content-length")
        return all(
            each.isdigit() and len(each) < 16 and int(each) <= self._settings.limits.body_bytes
            for each in lengths
        )

    def _is_known(self, headers: list[tuple[bytes, bytes]]) -> bool:
        for offered in _all(headers, b"authorization"):
            scheme, _, token = offered.partition(" ")
            if scheme.lower() == "bearer" and self._sessions.is_token(token.strip()):
                return True
        return any(self._sessions.is_open(name) for name in cookies(headers))

    # -- answers ---------------------------------------------------------------------------------

    async def _refuse(self, scope: Scope, send: Send, status: int, failure: Failure) -> None:
        response = failure_response(scope, status, failure)
        if status == 401:
            response.headers["www-authenticate"] = "Bearer"
            if wants_page(scope):
                response = RedirectResponse("/login", 303)
        if status == 405:
            response.headers["allow"] = "GET, HEAD, POST" if scope["path"] in POST_PATHS else "GET, HEAD"
        if response.status_code >= 400:
            response.headers["connection"] = "close"
        if scope["method"] == "HEAD":
            response.body = b""
        await response(scope, _nothing, send)


def failure_response(scope: Scope, status: int, failure: Failure) -> Response:
    """An error as a page for people, as a document for programs."""
    if wants_page(scope):
        return Response(failure_page(failure, status), status, media_type="text/html; charset=utf-8")
    return Response(msgspec.json.encode(failure), status, media_type="application/json")


def cookies(headers: list[tuple[bytes, bytes]]) -> list[str]:
    """The session names a client sent."""
    found = []
    for line in _all(headers, b"cookie"):
        for part in line.split(";"):
            name, _, value = part.strip().partition("=")
            if name == COOKIE:
                found.append(value)
    return found[:4]


def wants_page(scope: Scope) -> bool:
    """Whether a person is to read the answer."""
    path: str = scope["path"]
    return (
        not path.startswith("/api")
        and path != "/health"
        and b"text/html" in b",".join(value for name, value in scope["headers"] if name == b"accept")
    )


async def _nothing() -> Message:
    """For answers that are made without the request's body."""
    return {"type": "http.disconnect"}


def _has_two_lengths(scope: Scope) -> bool:
    """RFC 9112, 6.1: both kinds of length, or a chunked body in HTTP/1.0, which has none."""
    names = {name for name, _ in scope["headers"]}
    return b"transfer-encoding" in names and (
        b"content-length" in names or scope.get("http_version") == "1.0"
    )


def _all(headers: Any, wanted: bytes) -> list[str]:
    return [value.decode("latin-1") for name, value in headers if name == wanted]


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
