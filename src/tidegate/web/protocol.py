"""HTTP connections with an end: how long a client may take, and how many connections may be open.

uvicorn's own protocol waits for ever for the first bytes of a request, and for a client that does not read its answer.
Here a connection that has not sent a whole request head after `header_seconds` is closed, whether it sends nothing, or
a byte now and then; so is one that has not read what was sent to it for `request_seconds`.

P1  clients that hang do not keep others out. A connection is *idle* while its client has to act: send a request, the
    rest of one, or read the answer. When half of `connections` are open, a new one takes the place of those that have
    been idle longest. One that became idle less than `fresh_seconds` ago is left alone, so that a burst of new
    connections does not close itself.
P2  never more than `connections` are open: one more is answered 503 and closed, before anything of it is read.
P3  what waits in the system to be read by a client is bounded (`SEND_BUFFER_BYTES`), so that a client that never
    reads costs little.

Thread rule: the event loop's.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidegate.web.settings import Limits

SEND_BUFFER_BYTES: Final = 128 << 10
_BUSY_TEXT = b'{"error":"overload","message":"too many connections are open","remedy":"close some, or wait"}'
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_BUSY_TEXT), _BUSY_TEXT)
)


class GuardedProtocol(H11Protocol):
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
        own = [each for each in self.connections if isinstance(each, GuardedProtocol)]
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


def guarded(limits: Limits) -> type[GuardedProtocol]:
    """The protocol class for these limits."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits})
