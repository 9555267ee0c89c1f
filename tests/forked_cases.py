"""Cases that may end in anything, each in a fork of a process that has loaded what they need.

For scripts with one thread, never inside pytest. A signal ends one case and is told; a case that does not end is
interrupted as by Ctrl-C, then killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

INTERRUPTED_S = 60.0
RAISED = 70  # the exit code of a case whose function raised


def forked(work: Callable[[], int], folder: Path, said: Path, patience_s: float) -> tuple[str, int]:
    """How `work` ended in `folder`: `exit` and its code, `signal` and its number, or `hang`; it prints into `said`."""
    child = os.fork()
    if child == 0:
        code = RAISED
        try:
            os.setsid()
            os.chdir(folder)
            with said.open("wb") as out, open(os.devnull, "rb") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            code = work()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else RAISED
        except KeyboardInterrupt:
            code = 130
        except BaseException:  # noqa: BLE001  (whatever it is, it is told)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ended = _wait(child, patience_s)
    if ended is None:
        os.kill(child, signal.SIGINT)
        ended = _wait(child, INTERRUPTED_S)
    if ended is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return "hang", 0
    return ("signal", os.WTERMSIG(ended)) if os.WIFSIGNALED(ended) else ("exit", os.WEXITSTATUS(ended))


def last_words(said: Path) -> str:
    """The last of what a case printed; the file is gone afterwards."""
    text = said.read_bytes()[-3000:].decode("utf-8", "replace") if said.exists() else ""
    said.unlink(missing_ok=True)
    return text


def told(script: Path, *arguments: object) -> list[dict[str, Any]]:
    """Run a script of cases; the JSON lines it printed, one a case."""
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)], capture_output=True, text=True, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (done.returncode, lines[-1:], done.stderr[-2000:])
    return lines


def _wait(child: int, seconds: float) -> int | None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    return None
