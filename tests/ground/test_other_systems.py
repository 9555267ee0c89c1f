"""What only Linux has is not needed: neither to import Tidegate nor to run an app in this process.

A process takes the names away that macOS does not have, closes /proc and /sys, and then does what a newcomer does.
Packages of others are imported before, because theirs are built for the system they run on.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tidegate
from tidegate import files as files_module
from tidegate.errors import UnavailableError
from tidegate.files import Files

TAKEN_AWAY = """
import ctypes, fcntl, os, resource, select, signal, socket, sys, time

import asyncio, concurrent.futures, multiprocessing, platform, subprocess, tempfile
import click, cramjam, fastcrc, msgspec, numba, numpy, pyarrow, pyarrow.compute, pyarrow.dataset, rich
try:
    import confluent_kafka, duckdb, jinja2, obstore, pandas, polars, prometheus_client, starlette, uvicorn
except ImportError:
    pass

LINUX_ONLY = {
    os: '''sched_getaffinity sched_setaffinity sched_getscheduler sched_setscheduler posix_fadvise posix_fallocate
           fdatasync pipe2 copy_file_range memfd_create eventfd getrandom splice pidfd_open setns unshare getxattr
           setxattr listxattr removexattr getresuid getresgid setresuid setresgid timerfd_create
           O_DIRECT O_PATH O_NOATIME O_LARGEFILE RWF_NOWAIT RWF_DSYNC SCHED_BATCH P_PIDFD''',
    select: "epoll",
    signal: "SIGRTMIN SIGRTMAX SIGPWR SIGSTKFLT SIGPOLL SIGCLD sigwaitinfo sigtimedwait pidfd_send_signal",
    time: "CLOCK_BOOTTIME CLOCK_MONOTONIC_COARSE CLOCK_TAI clock_settime pthread_getcpuclockid",
    resource: "prlimit RLIMIT_OFILE RLIMIT_RTPRIO RLIMIT_MSGQUEUE RLIMIT_NICE",
    socket: "AF_NETLINK AF_PACKET AF_ALG SOCK_CLOEXEC SOCK_NONBLOCK",
    fcntl: "F_OFD_GETLK F_OFD_SETLK F_OFD_SETLKW F_ADD_SEALS F_GET_SEALS F_SETPIPE_SZ F_GETPIPE_SZ F_SETLEASE F_NOTIFY",
}
for module, names in LINUX_ONLY.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("mallopt", "malloc_trim", "prctl", "sched_getcpu", "mallinfo2"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


ctypes.CDLL = Library


def closed(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | bytes | os.PathLike):
        if os.fsdecode(arguments[0]).startswith(("/proc", "/sys")):
            raise FileNotFoundError(2, "No such file or directory", arguments[0])


sys.addaudithook(closed)
assert not hasattr(os, "sched_getaffinity") and not os.path.exists("/proc/self/nothing")
"""

EVERY_MODULE = """
import importlib, pkgutil, tidegate
missing = []
for found in pkgutil.walk_packages(tidegate.__path__, "tidegate."):
    if not found.name.endswith("__main__"):
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            if error.name.startswith("tidegate"):
                raise
            missing.append(error.name)
print("imported", len([name for name in sys.modules if name.startswith("tidegate")]))
"""

A_PIPELINE = """
import json, threading
import pyarrow as pa
import tidegate as tg
from tidegate.cli.main import run
from tidegate.windows.kinds import Tumbling

log, data = sys.argv[1] + "/log", sys.argv[1]
assert run(["topic", "create", "orders", "--partitions", "3", "--log", log]) == 0
with tg.Log(log) as opened:
    with opened.writer("orders", integrity=True) as sender:
        values = ['{"order": %d, "amount": 2}' % (n % 190) for n in range(200)]
        sender.write(pa.table({"key": [f"k{n % 190 % 7}" for n in range(200)], "value": values}))
assert run(["verify", "orders", "--log", log, "--format", "json"]) == 0
with tg.App("shop", data=data) as app:
    stream = app.stream("orders", value=tg.Json(order="int64", amount="int64"))
    unique = stream.validate().drop_duplicates("order", within="10m")
    unique.window(Tumbling("1h")).agg(total=tg.sum("amount")).to_table("totals")
    assert app.run(until="caught_up", close=True).exit_code == 0
    print("total", sum(app.open_table("totals").to_arrow().column("total").to_pylist()))
assert run(["app", "status", "shop", "--state", data + "/state"]) == 0
assert run(["doctor", "--log", log]) == 0
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TAKEN_AWAY + script, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
    return done.stdout


def test_every_module_is_imported_without_what_only_linux_has() -> None:
    modules = [path for path in Path(tidegate.__file__).parent.rglob("*.py") if path.name != "__main__.py"]
    assert int(run(EVERY_MODULE).split()[-1]) == len(modules)


def test_an_app_runs_here_without_what_only_linux_has(tmp_path: Path) -> None:
    assert "total 380\n" in run(A_PIPELINE, str(tmp_path))


@pytest.mark.parametrize("known", [True, False])
def test_a_sync_asks_for_the_stronger_one_where_the_system_has_it(
    known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS's fsync leaves data in the cache of the drive; a power cut would take what was acknowledged."""
    asked: list[str] = []

    def full(fd: int, how: int) -> None:
        asked.append("full")
        if not known:
            raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(files_module.fcntl, "fcntl", full)
    monkeypatch.setattr(files_module.os, "fsync", lambda fd: asked.append("plain"))
    with Files().open(tmp_path / "file", create=True, write=True) as file:
        file.write_at(0, b"x")
        file.sync()
    Files().sync_folder(tmp_path)
    assert asked == (["full", "full"] if known else ["full", "plain"] * 2)


def test_a_stronger_sync_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(files_module.fcntl, "fcntl", full)
    with Files().open(tmp_path / "file", create=True, write=True) as file:
        for _ in range(2):  # and stays so: the file is poisoned
            with pytest.raises(UnavailableError):
                file.sync()
