"""Report the progress of kernel compilation: to a listener if there is one, else to the log.

A first start after an installation compiles the kernels it calls, a few seconds for each. Which ones a command will
call is not known before, so the total is a bound: the kernels of the modules that were imported and are in no cache.

This module loads no numba, so that the command line can listen before anything is loaded.

Thread rule: any; `begin` and `finish` are called under numba's compiler lock.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger("tidegate.kernels")


@dataclass(frozen=True, slots=True)
class CompileProgress:
    """The progress of this process: `kernel` is being compiled (empty: none), `folder` is the cache folder."""

    kernel: str
    compiled: int
    at_most: int
    folder: Path | None

    @property
    def kept(self) -> str:
        """Whether the next start must compile again, as part of a sentence."""
        if self.folder is None:
            return "at every start, as no folder can be written; NUMBA_CACHE_DIR names one"
        return f"once; kept in {self.folder}"


_listener: Callable[[CompileProgress], None] | None = None
_under_way: list[CompileProgress] = []  # a kernel, a kernel that it calls, …
_compiled = 0
_logged = False


def listen(listener: Callable[[CompileProgress], None] | None) -> None:
    """Call `listener` at the start and end of each compilation; without one, a single line is logged."""
    global _listener
    _listener = listener


def begin(kernel: str, *, missing: int, folder: Path | None) -> None:
    """Report that a kernel is being compiled, one of at most `missing`."""
    global _logged
    _under_way.append(CompileProgress(kernel, _compiled, _compiled + missing, folder))
    if _listener is not None:
        _listener(_under_way[-1])
    elif not _logged:
        _logged = True
        logger.warning(
            "compiling kernels for this machine, %s; all of them ahead: %s -m tidegate.kernels",
            _under_way[-1].kept,
            sys.executable,
        )


def finish() -> None:
    """Report that the last kernel is ready."""
    global _compiled
    _compiled += 1
    done = _under_way.pop()
    if _listener is not None:
        now = _under_way[-1].kernel if _under_way else ""
        _listener(replace(done, kernel=now, compiled=_compiled, at_most=max(done.at_most, _compiled)))
