"""HTTP connections with an end: how long a client may take over its headers, and how many may be open.

uvicorn's own protocol waits for ever for the first bytes of a request; here a connection that has not sent a whole
request head after `header_seconds` is closed, whether it sends nothing, or a byte now and then. One connection more
than allowed is answered 503 and closed, before anything of it is read.

Thread rule: the event loop's.
"""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from tidegate.web.settings import Limits

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
        if len(self.connections) >= self.limits.connections:
            self.is_refused = True
            transport.write(_BUSY)
            transport.close()
            return
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        if not self.is_refused:
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.is_refused:
            return
        if self._head_timer is None and self._is_waiting:
            self._await_head()
        try:
            super().data_received(data)
        except h11.ProtocolError:  # what follows a refused request, or comes when an answer is on its way
            self.transport.close()
        if not self._is_waiting:
            self._head_came()

    def eof_received(self) -> None:
        if not self.is_refused:
            super().eof_received()

    @property
    def _is_waiting(self) -> bool:
        """Whether the next thing to come is the head of a request."""
        return self.cycle is None or self.cycle.response_complete

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(self.limits.header_seconds, self._give_up)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self._is_waiting and not self.transport.is_closing():
            self.transport.close()


def guarded(limits: Limits) -> type[GuardedProtocol]:
    """The protocol class for these limits."""
    return type("Guarded", (GuardedProtocol,), {"limits": limits})
