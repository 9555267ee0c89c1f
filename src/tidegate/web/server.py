"""The HTTP server: routes requests to the worker process, and returns its answers as JSON, pages or event streams.

Event streams (server-sent events) ask the worker again every `PAUSE_SECONDS`. A stream ends when the client goes, after
`live_seconds`, or when what it shows is gone; browsers reconnect by themselves.

Thread rule: one event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final
from urllib.parse import parse_qs, quote

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tidegate import __version__
from tidegate.errors import TidegateError
from tidegate.web import endpoints, pages
from tidegate.web.endpoints import ADDRESSED, STREAMS, Endpoint
from tidegate.web.failures import INTERNAL, Failure, failure_of
from tidegate.web.security import (
    COOKIE,
    NO_METHOD,
    Gate,
    Sessions,
    cookies,
    failure_response,
    limited_protocol,
)
from tidegate.web.settings import Settings, is_loopback
from tidegate.web.worker import Answer
from tidegate.web.worker_client import ReaderProcess

PAUSE_SECONDS: Final = 1.0
_HERE: Final = Path(__file__).parent
_JSON: Final = "application/json"
_PAGE: Final = "text/html; charset=utf-8"
Handler = Callable[[Request], Awaitable[Response]]


class Server:
    """One site, served."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.sessions = Sessions(settings)
        self.reading = ReaderProcess(settings)
        self.is_warm = False
        """Whether the process that reads has loaded what it needs."""

    def app(self) -> Any:
        """The ASGI application, gate and all."""
        inner = Starlette(
            routes=self._routes(),
            lifespan=self._life,
            exception_handlers={HTTPException: self._refused, Exception: self._broken},
        )
        return Gate(inner, settings=self.settings, sessions=self.sessions)

    def _routes(self) -> list[Any]:
        routes: list[Any] = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/api/openapi.json", self._openapi),
            *(Route(f"/api{each.path}", self._stream(each)) for each in STREAMS),
        ]
        for endpoint in ADDRESSED:
            routes.append(Route(f"/api{endpoint.path}", self._document(endpoint)))
            if endpoint.page is not None:
                routes.append(Route(endpoint.page, self._page(endpoint)))
        routes.append(Mount("/static", StaticFiles(directory=_HERE / "static")))
        return routes

    @asynccontextmanager
    async def _life(self, _app: Starlette) -> AsyncIterator[None]:
        warming = asyncio.create_task(self._warm())
        try:
            yield
        finally:
            warming.cancel()
            await asyncio.gather(warming, return_exceptions=True)
            await self.reading.close()

    async def _warm(self) -> None:
        try:
            await self.reading.warm()
        except TidegateError:
            pass  # the first question says what is wrong
        self.is_warm = True

    # -- questions -------------------------------------------------------------------------------

    async def _ask(self, name: str, path_params: dict[str, str], query: dict[str, Any]) -> Answer:
        """The answer; of an error, its document."""
        try:
            return await self.reading.ask(name, path_params, query)
        except TidegateError as error:
            status, failure = failure_of(error)
            return Answer(0, status, msgspec.json.encode(failure))

    async def _answer(self, endpoint: Endpoint, request: Request) -> Answer:
        """The answer; cancelled when the client goes (`worker_client`, A5)."""
        asking = asyncio.ensure_future(self._ask(endpoint.name, dict(request.path_params), query_of(request)))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait((asking, leaving), return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            leaving.result()
            raise ClientDisconnect
        finally:
            asking.cancel()
            leaving.cancel()
            await asyncio.gather(asking, leaving, return_exceptions=True)

    def _document(self, endpoint: Endpoint) -> Handler:
        async def answer(request: Request) -> Response:
            found = await self._answer(endpoint, request)
            headers = {}
            if found.type != _JSON:
                ending = "parquet" if "parquet" in found.type else "jsonl"
                headers["content-disposition"] = f'attachment; filename="records.{ending}"'
                if found.next:
                    headers["tidegate-next"] = found.next
            return Response(found.body, found.status, headers, media_type=found.type)

        return answer

    def _page(self, endpoint: Endpoint) -> Handler:
        async def answer(request: Request) -> Response:
            found = await self._answer(endpoint, request)
            if found.status != 200:
                failure = msgspec.json.decode(found.body, type=Failure)
                return Response(pages.failure_page(failure, found.status), found.status, media_type=_PAGE)
            query = query_of(request)
            shown = pages.document_page(
                str(endpoint.screen), found.body, ask=query, path=request.url.path, nav=endpoint.tag,
                api=_json_address(endpoint, request),
                can_leave=self.settings.token is not None,
            )  # fmt: skip
            return Response(shown, media_type=_PAGE)

        return answer

    def _stream(self, endpoint: Endpoint) -> Handler:
        async def answer(request: Request) -> Response:
            path_params, query = dict(request.path_params), query_of(request)
            if last := request.headers.get("last-event-id", ""):
                query["after"] = last
            first = await self._ask(endpoint.name, path_params, query)
            if first.status != 200:
                return Response(first.body, first.status, media_type=first.type)
            events = self._events(endpoint.name, path_params, query, first)
            return StreamingResponse(events, media_type="text/event-stream")

        return answer

    async def _events(
        self, name: str, path_params: dict[str, str], query: dict[str, Any], found: Answer
    ) -> AsyncIterator[bytes]:
        """The first answer and those that differ from the one before, as server-sent events."""
        yield b"retry: 2000\n\n" + _event(found)
        while True:
            await asyncio.sleep(PAUSE_SECONDS)
            after = found.next
            try:
                found = await self.reading.ask(name, path_params, {**query, "after": after})
            except TidegateError:
                return
            if found.status != 200:
                yield b"event: gone\ndata: " + found.body + b"\n\n"
                return
            yield _event(found) if found.next != after else b": still here\n\n"

    # -- the server itself -----------------------------------------------------------------------

    async def _health(self, _request: Request) -> Response:
        return Response(msgspec.json.encode(endpoints.Health("ok", __version__)), media_type=_JSON)

    async def _metrics(self, _request: Request) -> Response:
        """The numbers of all screens, as Prometheus reads them."""
        found = await self._ask("metrics", {}, {})
        return Response(found.body, found.status, media_type=found.type)

    async def _openapi(self, _request: Request) -> Response:
        return Response(msgspec.json.encode(endpoints.openapi_document()), media_type=_JSON)

    async def _login(self, request: Request) -> Response:
        if self.settings.token is None:
            return RedirectResponse("/", 303)
        if request.method != "POST":
            return Response(pages.render("login.html", is_wrong=False), media_type=_PAGE)
        try:
            form = parse_qs((await request.body()).decode("utf-8"), max_num_fields=4)
        except (UnicodeDecodeError, ValueError):
            form = {}
        name = self.sessions.login(form.get("token", [""])[0])
        if name is None:
            await asyncio.sleep(0.2)  # guessing takes its time
            return Response(pages.render("login.html", is_wrong=True), 401, media_type=_PAGE)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            COOKIE, name, max_age=int(self.settings.limits.session_seconds), httponly=True, samesite="strict", path="/",
            secure=request.url.scheme == "https",
        )  # fmt: skip
        return answer

    async def _logout(self, request: Request) -> Response:
        for name in cookies(request.scope["headers"]):
            self.sessions.logout(name)
        answer = RedirectResponse("/login", 303)
        answer.delete_cookie(COOKIE, path="/")
        return answer

    async def _refused(self, request: Request, error: Exception) -> Response:
        """What Starlette itself refuses: an address that is not there, a method that is not taken."""
        status = error.status_code if isinstance(error, HTTPException) else 500
        failure = Failure("not_found", "there is nothing at this address", "begin at / or /api/openapi.json")
        if status == 405:
            failure = NO_METHOD
        if status == 413:
            failure = Failure("body_too_large", "the body is larger than is taken here", "send less")
        return failure_response(request.scope, status, failure)

    async def _broken(self, request: Request, _error: Exception) -> Response:
        """A fault of ours (`security` G5)."""
        return failure_response(request.scope, 500, INTERNAL)


def _event(found: Answer) -> bytes:
    return b"id: " + found.next.encode() + b"\ndata: " + found.body + b"\n\n"


async def _left(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def query_of(request: Request) -> dict[str, Any]:
    """The parameters of a URL; an empty one is as if it were not there, one given twice is a wrong question."""
    found: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        if name in found:
            found[name] = [value]  # no parameter is a list, so that is told
        elif value != "":
            found[name] = value
    return found


def _json_address(endpoint: Endpoint, request: Request) -> str:
    """Where the document of a screen is."""
    path_params = {name: quote(str(value), safe="") for name, value in request.path_params.items()}
    return pages.link("/api" + endpoint.path.format(**path_params), **query_of(request))


class QuietServer(uvicorn.Server):
    """uvicorn that wakes once a second, for the date in its answers, instead of ten times: an idle server idles."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    async def main_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        while not (self.should_exit or await self.on_tick(0)):
            try:
                async with asyncio.timeout(1.0):
                    await self._ending.wait()
            except TimeoutError:
                continue

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)


def serve(settings: Settings, *, ready: Callable[[str], None] | None = None) -> None:
    """Listen until interrupted; `ready` is told the address once the first page would come at once."""
    site = Server(settings)
    server = QuietServer(uvicorn_config(site))

    async def run() -> None:
        told = asyncio.create_task(_tell(server, site, ready))
        await server.serve()
        told.cancel()

    asyncio.run(run())


async def _tell(server: uvicorn.Server, site: Server, ready: Callable[[str], None] | None) -> None:
    while not (server.started and site.is_warm):
        await asyncio.sleep(0.02)
    if ready is not None:
        port = server.servers[0].sockets[0].getsockname()[1]
        host = "localhost" if is_loopback(site.settings.host) else site.settings.host
        ready(f"http://{host}:{port}/")


def _is_fault(record: logging.LogRecord) -> bool:
    """An answer that nobody could take any more is no fault; ours are logged where they happen (`security`, G5)."""
    return not str(record.msg).startswith("ASGI callable returned without")


def uvicorn_config(site: Server) -> uvicorn.Config:
    """uvicorn with our limits, and without a log of what was asked for."""
    settings, limits = site.settings, site.settings.limits
    told = logging.getLogger("uvicorn.error")
    told.setLevel(logging.ERROR)
    told.addFilter(_is_fault)
    return uvicorn.Config(
        site.app(),
        host=settings.host,
        port=settings.port,
        http=limited_protocol(limits),
        ws="none",
        loop="asyncio",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=limits.url_bytes + limits.header_bytes + 1024,
        timeout_graceful_shutdown=2,
    )
