"""The server's side of the worker process: starts it on demand, and replaces it when it fails.

A1  a request gets an answer or an error within `request_seconds`: a worker that does not answer in time is killed, and
    the next request starts another. Requests only read, so one that lost its worker is sent once more, within its time.
A2  at most `MOST_WAITING` requests wait; one more gets an overload error.
A3  after `idle_seconds` without a request the worker releases its memory (`worker`).
A4  requests that may read very much never occupy all threads of the worker: a look-up finds one free. Such a request
    counts until the worker has answered it, also when its client has gone; one that finds no place within half of
    `request_seconds` gets an overload error.
A5  a cancelled request (its client has gone, or its time is over) leaves the queue, or the worker is told to stop
    reading for it. In any case A1 ends it.

Thread rule: the event loop's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tidegate.errors import OverloadError
from tidegate.web.endpoints import ENDPOINTS
from tidegate.web.failures import ReadingEndedError, TooLongError
from tidegate.web.settings import Settings
from tidegate.web.worker import GIVE_UP, LARGEST_FRAME, THREADS, Answer, Opening, Question, framed, length_of

MOST_WAITING: Final = 512
ENDING_SECONDS: Final = 2.0
_ENDED: Final = "the process that reads has ended; ask again in a moment"
log = logging.getLogger("tidegate.web")


@dataclass(slots=True)
class _Running:
    """One process, and who waits for it."""

    process: asyncio.subprocess.Process
    waiting: dict[int, asyncio.Future[Answer]] = field(default_factory=dict)
    is_ended: bool = False

    def end(self) -> None:
        """Once, with its child: to signal a process that has ended would take its end from whoever waits for it."""
        if self.process.returncode is None and not self.is_ended:
            self.is_ended = True
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class ReaderProcess:
    """One process that reads, from the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._running: _Running | None = None
        self._listeners: set[asyncio.Task[None]] = set()
        self._number = 0
        self._is_closed = False
        self._starting = asyncio.Lock()
        self._decode = msgspec.msgpack.Decoder(Answer)
        self._long = asyncio.Semaphore(THREADS - 1)

    async def ask(self, name: str, path_params: dict[str, str], query: dict[str, Any]) -> Answer:
        """The answer; `TooLongError` when it does not come in time (A1). To cancel this gives the question up (A5)."""
        until = asyncio.get_running_loop().time() + self._settings.limits.request_seconds
        is_long = ENDPOINTS[name].is_long
        if is_long:
            await self._turn()
        self._number += 1
        question = Question(self._number, name, path_params, query)
        going = asyncio.ensure_future(self._ask_again(question, until))
        going.add_done_callback(lambda done: self._answered(done, is_long=is_long))
        try:
            return await asyncio.shield(going)
        except asyncio.CancelledError:
            self._give_up(question)
            raise

    async def _turn(self) -> None:
        """Wait for a place among the long questions (A4)."""
        try:
            async with asyncio.timeout(self._settings.limits.request_seconds / 2):
                await self._long.acquire()
        except TimeoutError:
            raise OverloadError(
                f"{THREADS - 1} long questions are being answered, and others wait; ask again in a moment"
            ) from None

    def _answered(self, done: asyncio.Future[Answer], *, is_long: bool) -> None:
        if is_long:
            self._long.release()
        if not done.cancelled():
            done.exception()  # where nobody waits for it any more, nobody is told

    def _give_up(self, question: Question) -> None:
        running = self._running
        if running is not None and question.number in running.waiting and running.process.stdin is not None:
            with suppress(ConnectionError, RuntimeError):
                running.process.stdin.write(framed(Question(question.number, GIVE_UP, {}, {})))

    async def _ask_again(self, question: Question, until: float) -> Answer:
        try:
            return await self._ask(question, until)
        except ReadingEndedError:
            return await self._ask(question, until)

    async def _ask(self, question: Question, until: float) -> Answer:
        running = await self._started()
        if len(running.waiting) >= MOST_WAITING:
            raise OverloadError(f"{MOST_WAITING} questions are waiting already; ask again in a moment")
        coming: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        running.waiting[question.number] = coming
        try:
            if running.process.stdin is None:
                raise BrokenPipeError
            running.process.stdin.write(framed(question))
            async with asyncio.timeout_at(until):
                await running.process.stdin.drain()
                return await coming
        except TimeoutError:
            log.warning(
                "question %s took longer than its time; the process that reads is replaced", question.name
            )
            self._drop(running)
            raise TooLongError("the answer took too long; ask for less: fewer rows, one partition") from None
        except (ConnectionError, RuntimeError):
            self._drop(running)
            raise ReadingEndedError(_ENDED) from None
        finally:
            running.waiting.pop(question.number, None)

    async def warm(self) -> None:
        """Start it now and let it load what reading needs, so that the first page comes at once."""
        await self.ask("warm", {}, {})

    async def close(self) -> None:
        self._is_closed = True
        if self._running is not None:
            self._drop(self._running)
        await asyncio.gather(*self._listeners, return_exceptions=True)

    @property
    def pid(self) -> int | None:
        """The process's number while there is one."""
        return None if self._running is None else self._running.process.pid

    # -- inside ----------------------------------------------------------------------------------

    async def _started(self) -> _Running:
        async with self._starting:
            if self._is_closed:
                raise ReadingEndedError("the server is closing; ask again when it is back")
            if self._running is None or self._running.process.returncode is not None:
                settings = self._settings
                opening = Opening(
                    str(settings.log), str(settings.state), settings.limits, dict(settings.client)
                )
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tidegate.web.worker",
                    stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20, process_group=0,
                    env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # it forks, and multiplies no matrices
                )  # fmt: skip
                if process.stdin is not None:
                    process.stdin.write(framed(opening))
                self._running = _Running(process)
                listener = asyncio.create_task(self._listen(self._running))
                self._listeners.add(listener)
                listener.add_done_callback(self._listeners.discard)
            return self._running

    async def _listen(self, running: _Running) -> None:
        """Hand answers to those who wait, until the process ends; then whoever still waits is told."""
        answers = running.process.stdout
        try:
            while answers is not None:
                length = length_of(await answers.readexactly(4))
                if length > LARGEST_FRAME:
                    break
                answer = self._decode.decode(await answers.readexactly(length))
                waiting = running.waiting.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.MsgspecError):
            pass
        finally:
            if self._running is running:
                self._running = None
            for waiting in running.waiting.values():
                if not waiting.done():
                    waiting.set_exception(ReadingEndedError(_ENDED))
            try:
                async with asyncio.timeout(ENDING_SECONDS):  # it said its last word, and goes by itself
                    await running.process.wait()
            except TimeoutError:
                running.end()
                await running.process.wait()

    def _drop(self, running: _Running) -> None:
        if self._running is running:
            self._running = None
        running.end()
