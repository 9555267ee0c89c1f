"""A Python with everything imported, that turns into commands and pages by forking: one import for all of them.

What a person types is run by a real bash, each `tidegate` in it by a process of its own, with the exit code, pipes and
signals of one; only that process is a fork of this one instead of a new interpreter, which saves the imports. The
`tidegate` first on the PATH is a small client (`CLIENT`): it hands its descriptors, folder and environment over and
waits. When it is killed, so is the fork. `tests/tidy/test_newcomer.py` and `tests/cli` start the real thing.

Run as a script (`python warm.py SOCKET`) this file is that server.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

CLIENT = """#!{python} -IS
import array, json, os, socket, sys
ask = socket.socket(socket.AF_UNIX)
ask.connect({path!r})
what = json.dumps({{"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ)}}).encode()
rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
ask.sendmsg([len(what).to_bytes(4, "big") + what], [rights])
said = ask.recv(1)
os._exit(said[0] if said else 70)
"""
READY_S = 120


class Ran(NamedTuple):
    """How a page ended, and what each of its blocks printed (stdout, in order)."""

    code: int
    printed: list[str]
    said: str


class Warm:
    """The server's owner: starts it, runs pages in it, ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = str(folder / "s")
        self.bin = folder / "bin"

    def __enter__(self) -> Warm:
        self.bin.mkdir()
        client = self.bin / "tidegate"
        client.write_text(CLIENT.format(python=sys.executable, path=self._path), encoding="utf-8")
        client.chmod(0o755)
        self._server = subprocess.Popen([sys.executable, __file__, self._path], start_new_session=True)
        for _ in range(READY_S * 50):
            if os.path.exists(self._path):
                return self
            assert self._server.poll() is None, "the warm Python did not start"
            time.sleep(0.02)
        raise AssertionError("the warm Python is not ready")

    def __exit__(self, *_: object) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def environment(self, *, warm: bool = True) -> dict[str, str]:
        """Of a page: the small client (if `warm`), then this environment's programs, before all others."""
        places = [str(self.bin)] * warm + [str(Path(sys.executable).parent), os.environ["PATH"]]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}
        return {**kept, "PATH": os.pathsep.join(places), "NO_COLOR": "1"}

    def run(self, blocks: list[tuple[str, str]], folder: Path, *, limit_s: float, fork: bool = True) -> Ran:
        """Blocks of a page, one after the other in a fresh process.

        Not `fork`: in the server itself, which cannot serve commands meanwhile; they are the real ones then.
        """
        heard = folder.parent / f"{folder.name}.heard"
        ask = socket.socket(socket.AF_UNIX)
        ask.settimeout(limit_s)
        ask.connect(self._path)
        with open(heard, "wb") as stream, open(os.devnull, "rb") as nothing, ask:
            what = {
                "blocks": blocks,
                "folder": str(folder),
                "environment": self.environment(warm=fork),
                "fork": fork,
            }
            _send(ask, what, [nothing.fileno(), stream.fileno(), stream.fileno()])
            try:
                said = ask.recv(1)
                code = said[0] if said else 70
            except TimeoutError:
                code = 124
        text = heard.read_text(encoding="utf-8", errors="replace")
        if code == 124:
            text += f"\nkilled after {limit_s} s"
        results = folder.parent / f"{folder.name}.printed"
        printed = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
        return Ran(code, printed, text)


def _send(ask: socket.socket, what: dict[str, Any], descriptors: list[int]) -> None:
    data = json.dumps(what).encode()
    ask.sendmsg(
        [len(data).to_bytes(4, "big") + data],
        [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))],
    )


# -- the server ----------------------------------------------------------------------------------


def serve(path: str) -> None:
    """Import, listen, and fork for each request; one that is not to fork is done here, by this process."""
    _import_everything()
    door = socket.socket(socket.AF_UNIX)
    door.bind(path + ".new")
    door.listen(64)
    os.rename(path + ".new", path)
    while True:
        conversation, _ = door.accept()
        _reap()
        what, descriptors = _receive(conversation)
        if not what.get("fork", True):
            with _in_place(what, descriptors):
                conversation.sendall(bytes([_run_blocks(what)]))
        elif os.fork() == 0:
            door.close()
            _watch(conversation, what, descriptors)
        for each in descriptors:
            os.close(each)
        conversation.close()


def _reap() -> None:
    """Let go of watchers that have ended; their time then counts as this process's."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _import_everything() -> None:
    """What pages and commands import, without Spark and without starting a thread that a fork would lose."""
    import importlib
    import pkgutil

    import pandas  # noqa: F401

    import tidegate
    import tidegate.cli

    for name in tidegate.__all__:
        getattr(tidegate, name)
    for module in pkgutil.iter_modules(tidegate.cli.__path__, "tidegate.cli."):
        importlib.import_module(module.name)
    for room in (
        "tidegate.pipeline",
        "tidegate.integrity",
        "tidegate.log",
        "tidegate.storage",
        "tidegate.windows",
    ):
        package = importlib.import_module(room)
        for module in pkgutil.walk_packages(package.__path__, room + "."):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)


def _receive(conversation: socket.socket) -> tuple[dict[str, Any], list[int]]:
    data, descriptors, _, _ = socket.recv_fds(conversation, 1 << 20, 3)
    while len(data) < 4 + int.from_bytes(data[:4], "big"):
        data += conversation.recv(1 << 20)
    return json.loads(data[4:]), list(descriptors)


def _watch(conversation: socket.socket, what: dict[str, Any], descriptors: list[int]) -> None:
    """Fork the worker, wait for its end or for the client's, and pass the exit code on."""
    worker = os.fork()
    if worker == 0:
        conversation.close()
        os.setsid()
        for wanted, given in enumerate(descriptors):
            os.dup2(given, wanted)
        os.chdir(what["folder"])
        os.environ.clear()
        os.environ.update(what["environment"])
        code = 70
        try:
            code = _run_blocks(what) if "blocks" in what else _run_command(what["arguments"])
        except BaseException:  # noqa: BLE001 - the process edge
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    for each in descriptors:
        os.close(each)
    ended = os.pidfd_open(worker)
    ready, _, _ = select.select([ended, conversation], [], [])
    if ended not in ready:  # the client is gone: so is what it started
        os.killpg(worker, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if "blocks" in what:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker, signal.SIGKILL)  # what a page left running
    with contextlib.suppress(BrokenPipeError):
        conversation.sendall(bytes([status if status >= 0 else 128 - status]))
    os._exit(0)


def _run_command(arguments: list[str]) -> int:
    import atexit

    from tidegate.cli.main import main

    sys.argv = ["tidegate", *arguments]
    try:
        main()
    except SystemExit as end:
        code = end.code
    atexit._run_exitfuncs()
    return code if isinstance(code, int) else 0 if code is None else 1


def _run_blocks(what: dict[str, Any]) -> int:
    """The blocks of a page, their names shared; what each printed goes beside the page's folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    folder = Path(what["folder"])
    sys.path.insert(0, "")
    printed: list[str] = []
    for number, (language, code) in enumerate(what["blocks"], 1):
        print(f"--- block {number} ({language})", file=sys.stderr, flush=True)
        place = folder.parent / f"{folder.name}.{number}"
        with open(place, "w+b") as stream:
            failed = _run_block(language, code, names, number, stream.fileno())
        text = place.read_text(encoding="utf-8", errors="replace")
        place.unlink()
        print(text, file=sys.stderr, flush=True)
        printed.append(text)
        if failed:
            return 1
    (folder.parent / f"{folder.name}.printed").write_text(json.dumps(printed), encoding="utf-8")
    return 0


def _run_block(language: str, code: str, names: dict[str, Any], number: int, stdout: int) -> bool:
    if language == "sh":
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], stdout=stdout, check=False)
        return done.returncode != 0
    kept = os.dup(1)
    sys.stdout.flush()
    os.dup2(stdout, 1)
    try:
        exec(compile(code, f"block {number}", "exec"), names)
    except BaseException:  # noqa: BLE001 - the process edge
        traceback.print_exc()
        return True
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
    return False


@contextlib.contextmanager
def _in_place(what: dict[str, Any], descriptors: list[int]) -> Any:
    """This process in the folder and environment of a request, and back."""
    kept, folder, environment = [os.dup(each) for each in range(3)], os.getcwd(), dict(os.environ)
    for wanted, given in enumerate(descriptors):
        os.dup2(given, wanted)
    os.chdir(what["folder"])
    os.environ.update(what["environment"])
    try:
        yield
    finally:
        for wanted, given in enumerate(kept):
            os.dup2(given, wanted)
            os.close(given)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)


if __name__ == "__main__":
    serve(sys.argv[1])
