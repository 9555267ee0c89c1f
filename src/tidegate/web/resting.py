"""Resting between questions: a process that has loaded everything, holds little, and forks one that answers.

Loading takes a second and more, and what was read and computed leaves memory behind. So who answers is a child, which
is let go when nobody asks any more; the one that loaded stays, asleep, and the next question finds an answerer within
milliseconds.

    asleep ──► a question is in the pipe ──► fork ──► the child reads it, and those after it, and answers
      ▲                                                          │
      └───────── no question for `idle_seconds` ◄────────────────┘

F1  a question in the pipe is read by whoever answers, whole or not at all: nothing is lost between two answerers.
F2  asleep it has no thread of ours but one, no open file of the site, and no page that a file could give it again.
F3  neither outlives the other when it breaks, so that the server sees it, tells who waits, and starts anew.

Thread rule: one thread.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any, Final

RESTED: Final = 3
"""How a child ends that nobody asked for long; with 0 it says that the input has ended."""
_DEATH_SIGNAL: Final = 1  # PR_SET_PDEATHSIG
_DO_NOT_NEED: Final = 4  # MADV_DONTNEED
_MAPS: Final = Path("/proc/self/smaps")
_MAP: Final = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S+) .* /.*\n((?:\w+:.*\n)+)", re.MULTILINE)
_UNCHANGED: Final = re.compile(r"^Anonymous: +0 kB$", re.MULTILINE)


def attend(questions: int, answer: Callable[[], int]) -> int:
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
        if code != RESTED:
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


class WithoutPandas(MetaPathFinder):
    """Arrow loads pandas, where there is one, with its first array: 40 MiB and 0.2 s that no answer is made of."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("pandas is not loaded here", name=name)

    @classmethod
    def install(cls) -> None:
        if "pandas" not in sys.modules:
            sys.meta_path.insert(0, cls())


def _end_with_parent() -> None:
    with suppress(OSError, AttributeError):  # another system: then it ends when nobody asks any more
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _code_of(answer: Callable[[], int]) -> int:
    """How a child ends, whatever happens in it: it never goes on as its parent."""
    try:
        return answer()
    except BaseException as error:  # noqa: BLE001 - told, and then the process ends
        sys.stderr.write(f"the process that answers broke: {type(error).__name__}: {error}\n")
        return 1
    finally:
        sys.stderr.flush()
