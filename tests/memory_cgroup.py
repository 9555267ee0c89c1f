"""A process in a memory cgroup of its own, below the one this process is in: what it may have, and what it had at most.

Version 1 and 2 are known. Where no group can be made (no rights, another system), `limited` says so with None and the
caller measures the process itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")
ENTER = "import os, sys; open(sys.argv[1], 'w').write(str(os.getpid())); os.execv(sys.argv[2], sys.argv[2:])"


class Ended(NamedTuple):
    """How a process ended, and its memory without page cache at the worst."""

    code: int
    output: str
    peak_bytes: int
    oom_kills: int | None  # None: there was no cgroup
    programs: Mapping[str, int] = {}  # program → the most its processes had together


def _own() -> tuple[Path, bool] | None:
    """The folder of this process's memory group, and whether it is of version 1."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if "memory" in kinds.split(","):
                return ROOT / "memory" / path.lstrip("/"), True
            if not kinds and (ROOT / "cgroup.controllers").exists():
                return ROOT / path.lstrip("/"), False
    return None


@contextmanager
def limited(limit_bytes: int) -> Iterator[Path | None]:
    """A new group with this limit below our own, gone afterwards; None where there can be none."""
    own = _own()
    group = None if own is None else own[0] / f"tidegate-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        if group is None or own is None:
            raise OSError("no memory cgroup")
        group.mkdir()
        (group / ("memory.limit_in_bytes" if own[1] else "memory.max")).write_text(str(limit_bytes))
    except OSError:
        if group is not None:
            with suppress(OSError):
                group.rmdir()
        group = None
    try:
        yield group
    finally:
        for _ in range(100):
            if group is None or not group.exists():
                break
            with suppress(OSError):  # a process may still be leaving it
                group.rmdir()
                break
            time.sleep(0.05)


def run_limited(command: Sequence[str], limit_bytes: int) -> Ended:
    """Run a command in a group of its own with this much memory."""
    with limited(limit_bytes) as group:
        entering = [] if group is None else [sys.executable, "-c", ENTER, str(group / "cgroup.procs")]
        process = subprocess.Popen(
            [*entering, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        peak, programs = 0, dict[str, int]()
        while process.poll() is None:
            peak = max(peak, _anonymous(group, process.pid))
            for program, nbytes in _by_program(group).items():
                programs[program] = max(nbytes, programs.get(program, 0))
            time.sleep(0.02)
        output = process.stdout.read() if process.stdout is not None else ""
        return Ended(process.returncode, output, peak, _kills(group), programs)


def _by_program(group: Path | None) -> dict[str, int]:
    """The anonymous memory of a group's processes now, by program; what forked processes share counts for each."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError):
        for pid in [] if group is None else (group / "cgroup.procs").read_text().split():
            name = Path(f"/proc/{pid}/comm").read_text().strip().rstrip("0123456789.")
            found[name] = found.get(name, 0) + _anonymous(None, int(pid))
    return found


def _anonymous(group: Path | None, pid: int) -> int:
    with suppress(OSError, ValueError):
        if group is None:
            lines = Path(f"/proc/{pid}/status").read_text().splitlines()
            return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
        for line in (group / "memory.stat").read_text().splitlines():
            name, number = line.split()
            if name in ("rss", "anon"):
                return int(number)
    return 0


def _kills(group: Path | None) -> int | None:
    if group is None:
        return None
    for name in ("memory.events", "memory.oom_control"):
        with suppress(OSError):
            for line in (group / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None
