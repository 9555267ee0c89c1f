"""Events as they happen, to a browser (server-sent events): new records of a topic, new rounds of an app.

Each stream asks the reading process again and again, with a pause between; it ends when the client goes, when it has
been open for `live_seconds`, or when what it shows is gone. Browsers open it again by themselves.

Thread rule: the event loop's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tidegate.errors import TidegateError
from tidegate.web.asking import Reading
from tidegate.web.failures import failure_of
from tidegate.web.questions import LIVE

PAUSE_SECONDS: Final = 1.0
_STREAM: Final = "text/event-stream"


def live_routes(reading: Reading) -> list[Route]:
    return [Route(f"/api{each.path}", _streaming(reading, each.name)) for each in LIVE]


def _streaming(reading: Reading, name: str) -> Any:
    async def answer(request: Request) -> Response:
        from tidegate.web.server import query_of

        words, ask = dict(request.path_params), query_of(request)
        last = request.headers.get("last-event-id", "")
        if last:
            ask["after"] = last
        try:
            first = await reading.ask(name, words, ask)
        except TidegateError as error:
            status, failure = failure_of(error)
            return Response(msgspec.json.encode(failure), status, media_type="application/json")
        if first.status != 200:
            return Response(first.body, first.status, media_type=first.type)
        return StreamingResponse(
            _events(reading, name, words, ask, first.next, first.body), media_type=_STREAM
        )

    return answer


async def _events(
    reading: Reading, name: str, words: dict[str, str], ask: dict[str, Any], after: str, body: bytes
) -> AsyncIterator[bytes]:
    yield b"retry: 2000\n\n" + _event(after, body)
    while True:
        await asyncio.sleep(PAUSE_SECONDS)
        try:
            found = await reading.ask(name, words, {**ask, "after": after})
        except TidegateError:
            return
        if found.status != 200:
            yield b"event: gone\ndata: " + found.body + b"\n\n"
            return
        if found.next != after:
            after = found.next
            yield _event(after, found.body)
        else:
            yield b": still here\n\n"


def _event(number: str, body: bytes) -> bytes:
    return b"id: " + number.encode() + b"\ndata: " + body + b"\n\n"
