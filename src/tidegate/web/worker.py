"""The process that reads: questions come in on one pipe, documents go out on another, in the order they are done.

It is apart from the server for three reasons: a long read cannot hold the event loop up; Arrow and the compiled
kernels leave memory with it when nobody asks any more (`resting`); and what takes too long, or breaks, can be ended.

    frame      u32 length, big-endian, then MessagePack
    opening    {log, state, limits, client}: the first frame; settings of a client are secrets, and on no command line
    question   {number, name, words, ask}: a name of `questions`, path parameters, query parameters; with the name
               `GIVE_UP`, that nobody waits for the answer to that number any more
    answer     {number, status, body, type, next}: bytes as they go to the client

Never pickled: both sides know the frames' types. Whatever the code beneath prints goes to stderr.

Thread rule: a few threads, each of which reads a frame and answers it; reading and writing are locked.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import sys
import threading
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.log.access.connect import is_kafka
from tidegate.web.failures import INTERNAL, failure_of
from tidegate.web.reading.site import Site, answering
from tidegate.web.resting import RESTED, WithoutPandas, attend
from tidegate.web.settings import Limits

THREADS: Final = 4
GIVE_UP: Final = "give_up"
SWITCH_SECONDS: Final = 0.001
"""After how long a thread that computes lets another one go on: a look-up must not wait for a scan's turn to end."""
LARGEST_FRAME: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")
log = logging.getLogger("tidegate.web")


class Opening(msgspec.Struct, array_like=True):
    """What there is to read."""

    log: str
    state: str
    limits: Limits
    client: dict[str, str]

    def site(self) -> Site:
        """For the process that answers: it opens what it reads."""
        log = self.log if is_kafka(self.log) else Path(self.log)
        state = self.state if "://" in self.state else Path(self.state)
        return Site(log, state, self.limits, self.client)


class Question(msgspec.Struct, array_like=True):
    """What is asked of the process that reads."""

    number: int
    name: str
    words: dict[str, str]
    ask: dict[str, Any]


class Answer(msgspec.Struct, array_like=True):
    """What it answers; `next` is where a page goes on."""

    number: int
    status: int
    body: bytes
    type: str = "application/json"
    next: str = ""


def framed(value: Opening | Question | Answer) -> bytes:
    data = msgspec.msgpack.encode(value)
    return _LENGTH.pack(len(data)) + data


def length_of(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    return int(length)


def read_frame(file: int) -> bytes | None:
    """The next frame and not a byte more, which may be another process's to read; None when there is none."""
    head = _read(file, _LENGTH.size)
    return None if head is None else _read(file, length_of(head))


def _read(file: int, count: int) -> bytes | None:
    read = bytearray()
    while len(read) < count:
        piece = os.read(file, count - len(read))
        if not piece:
            return None
        read += piece
    return bytes(read)


class Worker:
    """Answers questions about one site until its input ends, or until nobody asks any more."""

    def __init__(self, site: Site, questions: int, answers: int, idle_seconds: float) -> None:
        self._site, self._questions, self._answers = site, questions, answers
        self._idle_seconds = idle_seconds
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._decode = msgspec.msgpack.Decoder(Question)
        self._asked: dict[int, threading.Event] = {}
        """Questions that are being answered, by number; the event is set when one is given up."""
        self._ended: int | None = None

    def run(self) -> int:
        """A few threads in turn wait for a question, and each answers the one it got: nothing is handed over.

        0 when the input has ended, `RESTED` when there was no question for `idle_seconds`.
        """
        threads = [threading.Thread(target=self._serve, name=f"reading-{n}") for n in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return self._ended or 0

    def _serve(self) -> None:
        while (asked := self._next()) is not None:
            answer = memoryview(framed(self._found(asked)))
            with self._writing:
                while answer:
                    answer = answer[os.write(self._answers, answer) :]
                del self._asked[asked.number]

    def _next(self) -> Question | None:
        """The next question; None when there will be none."""
        with self._reading:
            while self._ended is None:
                if not select.select([self._questions], [], [], self._idle_seconds)[0]:
                    with self._writing:
                        self._ended = None if self._asked else RESTED
                elif (body := read_frame(self._questions)) is None:
                    self._ended = 0
                elif (asked := self._decode.decode(body)).name == GIVE_UP:
                    with self._writing:
                        if (given_up := self._asked.get(asked.number)) is not None:
                            given_up.set()
                else:
                    with self._writing:
                        self._asked[asked.number] = threading.Event()
                    return asked
        return None

    def _found(self, asked: Question) -> Answer:
        from tidegate.web.questions import QUESTIONS, Page

        answering(self._asked[asked.number])
        try:
            found = QUESTIONS[asked.name].ask(self._site, asked.words, asked.ask)
        except TidegateError as error:
            status, failure = failure_of(error)
            return Answer(asked.number, status, msgspec.json.encode(failure))
        except FileNotFoundError:
            status, failure = failure_of(_gone())
            return Answer(asked.number, status, msgspec.json.encode(failure))
        except Exception as error:
            log.error("question %s failed: %s", asked.name, type(error).__name__, exc_info=_debugging())
            return Answer(asked.number, 500, msgspec.json.encode(INTERNAL))
        if isinstance(found, Page):
            return Answer(asked.number, 200, found.body, found.type, found.next)
        return Answer(asked.number, 200, msgspec.json.encode(found), next=getattr(found, "next", None) or "")


def load() -> None:
    """Load what answers are made with, so that none waits for it; nothing is opened, and no thread begins."""
    from pyarrow import table

    import tidegate.integrity.audit
    import tidegate.log.access.reader
    import tidegate.pipeline.reading.result_table
    import tidegate.pipeline.rounds.ways_out  # noqa: F401
    from tidegate.log.format.decode import decode
    from tidegate.log.format.encode import encode

    # A record to and fro: what runs compiled code is there then, and the kernels that nearly every question needs.
    decode(encode(table({"key": [b"key"], "value": [b"value"]})), topic="load", partition=0)


def _gone() -> TidegateError:
    from tidegate.web.failures import NotThereError

    return NotThereError(
        "what was being read has gone meanwhile: a log was deleted or moved; load the page again"
    )


def _debugging() -> bool:
    return bool(os.environ.get("TIDEGATE_DEBUG"))


def main() -> None:
    """`python -m tidegate.web.worker`: an opening and questions on its input, answers on its output."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    questions, answers = 0, os.dup(1)
    os.dup2(2, 1)  # what anything prints must not get between the frames
    sys.setswitchinterval(SWITCH_SECONDS)
    first = read_frame(questions)
    if first is None:
        return
    opening = msgspec.msgpack.decode(first, type=Opening)
    WithoutPandas.install()
    load()

    def answer() -> int:
        site = opening.site()
        try:
            return Worker(site, questions, answers, opening.limits.idle_seconds).run()
        finally:
            site.close()

    sys.exit(attend(questions, answer))


if __name__ == "__main__":
    main()
