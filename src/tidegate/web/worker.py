"""The worker process: reads requests from one pipe, writes answers to another, in the order they are done.

    frame      u32 length, big-endian, then MessagePack
    opening    {log, state, limits, client}: the first frame; client settings are secrets, so not on a command line
    question   {number, name, path_params, query}: a name of `ENDPOINTS`; the name `GIVE_UP` cancels that number
    answer     {number, status, body, type, next}: bytes as they go to the client

Both sides know the types of the frames; nothing is pickled. Whatever the code beneath prints goes to stderr.

Pre-forked: the parent keeps imports loaded; a child serves, and exits after `idle_seconds` without a request.

    parent waits ──► a request is in the pipe ──► fork ──► the child reads it and those after it, and answers
      ▲                                                               │
      └──────────── no request for `idle_seconds` ◄───────────────────┘

F1  a request in the pipe is read by one child, whole or not at all: none is lost between two children.
F2  while it waits, the parent has one thread, no open file of the site, and no file-backed page that can be read again.
F3  when parent or child fails, both end, so that the server notices, answers those who wait, and starts a new worker.

Thread rule: the parent has one thread; a child has `THREADS`, each of which reads a frame and answers it, under locks.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
import select
import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Final

import msgspec

from tidegate.errors import TidegateError
from tidegate.log.log import is_kafka
from tidegate.web.endpoints import ENDPOINTS
from tidegate.web.failures import INTERNAL, NotThereError, debugging, failure_of
from tidegate.web.schemas import RawAnswer
from tidegate.web.settings import Limits
from tidegate.web.site import Site, answering

# -- pre-forking -----------------------------------------------------------------------------------

IDLE: Final = 3
"""How a child ends that nobody asked for long; with 0 it says that the input has ended."""
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_DO_NOT_NEED: Final = 4  # MADV_DONTNEED
_MAPS: Final = Path("/proc/self/smaps")
_MAP: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) .* /.*\n((?:\w+:.*\n)+)", re.MULTILINE)
_UNCHANGED: Final = re.compile(r"^Anonymous: +0 kB$", re.MULTILINE)


def serve_in_children(questions: int, answer: Callable[[], int]) -> int:
    """Sleep until there is something to read; then `answer()` in a child; until that ends otherwise than `RESTED`."""
    gc.collect()
    gc.freeze()  # a child's collector then writes into none of the pages that they share
    while True:
        give_back()
        select.select([questions], [], [])
        child = os.fork()
        if child == 0:
            _end_with_parent()
            os._exit(_code_of(answer))
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != IDLE:
            return 1 if code < 0 else code


def give_back() -> None:
    """Return to the system what can be had again: freed memory, and pages of libraries, which are in its file cache."""
    with suppress(OSError, AttributeError):  # another system: then it is larger
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        for start, end in unchanged_maps(_MAPS.read_text()):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _DO_NOT_NEED)


def unchanged_maps(smaps: str) -> Iterator[tuple[int, int]]:
    """Where files are mapped that cannot be written there, and of which no page was (as a loader does, relocating)."""
    for start, end, mode, facts in _MAP.findall(smaps):
        if "w" not in mode and _UNCHANGED.search(facts):
            yield int(start, 16), int(end, 16)


class PandasBlocker(MetaPathFinder):
    """Arrow loads pandas, where there is one, with its first array: 40 MiB and 0.2 s that no answer is made of."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not loaded here", name=name)


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):  # another system: then it ends when nobody asks any more
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _code_of(answer: Callable[[], int]) -> int:
    """Return the exit code of a child process; an exception never lets it run the parent's code."""
    try:
        return answer()
    except BaseException as error:  # noqa: BLE001 - told, and then the process ends
        sys.stderr.write(f"the process that answers broke: {type(error).__name__}: {error}\n")
        return 1
    finally:
        sys.stderr.flush()


# -- the worker ------------------------------------------------------------------------------------

THREADS: Final = 4
GIVE_UP: Final = "give_up"
SWITCH_SECONDS: Final = 0.001
"""After how long a thread that computes lets another one go on: a look-up must not wait for a scan's turn to end."""
LARGEST_FRAME: Final = 64 << 20
_LENGTH: Final = struct.Struct(">I")
_GONE: Final = NotThereError(
    "what was being read has gone meanwhile: a log was deleted or moved; load the page again"
)
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
    path_params: dict[str, str]
    query: dict[str, Any]


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
                        self._ended = None if self._asked else IDLE
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

        answering(self._asked[asked.number])
        try:
            found = ENDPOINTS[asked.name].ask(self._site, asked.path_params, asked.query)
        except TidegateError as error:
            status, failure = failure_of(error)
            return Answer(asked.number, status, msgspec.json.encode(failure))
        except FileNotFoundError:
            status, failure = failure_of(_GONE)
            return Answer(asked.number, status, msgspec.json.encode(failure))
        except Exception as error:
            log.error("question %s failed: %s", asked.name, type(error).__name__, exc_info=debugging())
            return Answer(asked.number, 500, msgspec.json.encode(INTERNAL))
        if isinstance(found, RawAnswer):
            return Answer(asked.number, 200, found.body, found.type, found.next)
        return Answer(asked.number, 200, msgspec.json.encode(found), next=getattr(found, "next", None) or "")


def load() -> None:
    """Load what answers are made with, so that none waits for it; nothing is opened, and no thread begins."""
    from pyarrow import table

    import tidegate.integrity.partition_audit
    import tidegate.log.reader
    import tidegate.pipeline.admin  # noqa: F401
    from tidegate.log.format.decode import decode
    from tidegate.log.format.encode import encode

    # A record to and fro: what runs compiled code is there then, and the kernels that nearly every question needs.
    decode(encode(table({"key": [b"key"], "value": [b"value"]})), topic="load", partition=0)


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
    sys.meta_path.insert(0, PandasBlocker())
    load()

    def answer() -> int:
        site = opening.site()
        try:
            return Worker(site, questions, answers, opening.limits.idle_seconds).run()
        finally:
            site.close()

    sys.exit(serve_in_children(questions, answer))


if __name__ == "__main__":
    main()
