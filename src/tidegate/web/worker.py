"""The process that reads: questions come in on one pipe, documents go out on another, in the order they are done.

It is apart from the server for three reasons: a long read cannot hold the event loop up; Arrow and the compiled
kernels leave memory with it when nobody asks any more; and what takes too long, or breaks, can be ended.

    frame      u32 length, big-endian, then MessagePack
    opening    {log, state, limits, client}: the first frame; settings of a client are secrets, and on no command line
    question   {number, name, words, ask}: a name of `questions`, path parameters, query parameters
    answer     {number, status, body, type, next}: bytes as they go to the client

Never pickled: both sides know the frames' types. Whatever the code beneath prints goes to stderr.

Thread rule: a few threads, each of which reads a frame and answers it; reading and writing are locked.
"""

from __future__ import annotations

import logging
import os
import struct
import sys
import threading
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.log.access.connect import is_kafka
from tidegate.web.failures import INTERNAL, failure_of
from tidegate.web.reading.site import Site
from tidegate.web.settings import Limits

THREADS: Final = 4
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
        return Site(
            self.log if is_kafka(self.log) else Path(self.log), Path(self.state), self.limits, self.client
        )


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


class Worker:
    """Answers questions about one site until its input ends."""

    def __init__(self, site: Site, questions: BinaryIO, answers: BinaryIO) -> None:
        self._site, self._questions, self._answers = site, questions, answers
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._decode = msgspec.msgpack.Decoder(Question)

    def run(self) -> None:
        """A few threads in turn wait for a question, and each answers the one it got: nothing is handed over."""
        threads = [threading.Thread(target=self._serve, name=f"reading-{n}") for n in range(THREADS)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    def _serve(self) -> None:
        while (asked := self._next()) is not None:
            answer = framed(self._found(asked))
            with self._writing:
                self._answers.write(answer)
                self._answers.flush()

    def _next(self) -> Question | None:
        """The next question; None when the input has ended."""
        with self._reading:
            head = self._questions.read(_LENGTH.size)
            if len(head) < _LENGTH.size:
                return None
            body = self._questions.read(length_of(head))
        return self._decode.decode(body)

    def _found(self, asked: Question) -> Answer:
        from tidegate.web.questions import QUESTIONS, Page

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
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get between the frames
    sys.setswitchinterval(SWITCH_SECONDS)
    questions = sys.stdin.buffer
    head = questions.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return
    site = msgspec.msgpack.decode(questions.read(length_of(head)), type=Opening).site()
    Worker(site, questions, answers).run()
    site.close()


if __name__ == "__main__":
    main()
