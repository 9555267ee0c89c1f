"""Waiting for kernels to be compiled: told at once, with how far it is, and not where nothing shall be said."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tidegate.cli.output import CompileReporter, Verbosity
from tidegate.clock import ManualClock
from tidegate.kernels.compile_progress import CompileProgress

FOLDER = Path("/cache/kernels")
STEPS = [
    CompileProgress("decode_records", 0, 9, FOLDER),
    CompileProgress("read_varint", 0, 9, FOLDER),
    CompileProgress("decode_records", 1, 9, FOLDER),
    CompileProgress("", 2, 9, FOLDER),
    CompileProgress("validate_batch", 2, 9, FOLDER),
    CompileProgress("", 3, 9, FOLDER),
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, talk: Verbosity, *, step_ms: int = 2000
) -> str:
    clock = ManualClock(0)
    monkeypatch.setattr(sys, "stderr", stream)
    listener = CompileReporter(talk, clock=clock)
    for step in STEPS:
        listener(step)
        clock.advance(step_ms)
    return stream.getvalue()


def test_a_pipe_gets_one_line_at_once_and_one_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, io.StringIO(), Verbosity()).splitlines() == [
        "compiling kernels for this machine (once; kept in /cache/kernels)",
        "compiling kernels: 2 ready of at most 9, 6 s",
    ]


def test_a_terminal_sees_what_is_compiled_and_the_line_is_gone_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = told(monkeypatch, Terminal(), Verbosity())
    first, _, drawn = shown.partition("\n")
    assert first == "\r\x1b[Kcompiling kernels for this machine (once; kept in /cache/kernels)"
    assert drawn.split("\r\x1b[K") == [
        "",
        "compiling kernels: 0 ready of at most 9, 0 s, now decode_records",
        "compiling kernels: 0 ready of at most 9, 2 s, now read_varint",
        "compiling kernels: 1 ready of at most 9, 4 s, now decode_records",
        "",
        "compiling kernels: 2 ready of at most 9, 8 s, now validate_batch",
        "",
    ]


def test_a_quiet_command_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = Verbosity()
    talk.level = 0
    assert told(monkeypatch, Terminal(), talk) == ""


def test_a_folder_that_cannot_be_written_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    CompileReporter(Verbosity(), clock=ManualClock(0))(CompileProgress("decode_records", 0, 9, None))
    assert "at every start, as no folder can be written; NUMBA_CACHE_DIR names one" in stream.getvalue()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_that_compiles_in_a_thread_is_as_quiet_as_it_was_asked_to_be(
    quiet: bool, tmp_path: Path
) -> None:
    """Kernels are compiled in whichever thread calls them first; `-q` is known to the main thread's context only."""
    script = tmp_path / "verb.py"
    script.write_text(
        "import sys, threading\n"
        "import click\n"
        "from tidegate.cli import main\n"
        "from tidegate.cli.options import verbosity_options\n"
        "@click.command()\n"
        "@verbosity_options\n"
        "def command():\n"
        "    from tidegate.kernels.jit import INT64, kernel\n"
        "    @kernel(INT64(INT64))\n"
        "    def double(number):\n"
        "        return 2 * number\n"
        "    thread = threading.Thread(target=lambda: print(double(21)))\n"
        "    thread.start(); thread.join()\n"
        "main.COMMANDS['compile'] = main.LazyCommand('verb:command', 'x')\n"
        "sys.modules['tidegate.cli.verb'] = sys.modules['__main__']\n"
        "sys.exit(main.run(sys.argv[1:]))\n"
    )
    arguments = ["compile", "-q"] if quiet else ["compile"]
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "42\n"), done.stderr
    assert ("compiling kernels for this machine (once; kept in" in done.stderr) is not quiet
    assert quiet is (done.stderr == "")
