"""A newcomer's hour: docs/start.md followed literally, command by command, at a terminal.

One shell for the whole page, so that what a block sets up is there for the next; one Python for its Python blocks. Both
see a terminal (a pseudo one), so they print what a person would see, and where the page shows it, it is compared.

*Quick*: in this environment, without the block that installs. *Full*: in an empty folder with an empty home, that block
included: a new virtual environment, the wheel built from this tree and its dependencies from the configured index.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pages import DOCS, ROOT, Block, blocks, difference
from warm import Warm

PAGE = DOCS / "start.md"
LIMIT_S = 600
DONE = "block-is-done"
PYTHON = f"""
import json, sys
names = {{"__name__": "__main__"}}
sys.path.insert(0, "")
for line in sys.stdin:
    exec(compile(json.loads(line), "block", "exec"), names)
    print("{DONE} 0", flush=True)
"""


class Terminal:
    """A program at a pseudo terminal that is told one block after the other."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        self._ours, theirs = pty.openpty()
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, text: str) -> str:
        """What is on the screen afterwards; fails when the program ends, or a block fails."""
        assert self._child.stdin is not None
        self._child.stdin.write(text.encode())
        self._child.stdin.flush()
        raw, deadline = b"", time.monotonic() + LIMIT_S
        while DONE.encode() not in raw:
            ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"nothing more after {LIMIT_S} s:\n{screen(raw)}"
            try:
                raw += os.read(self._ours, 1 << 16)
            except OSError:  # the other side of the terminal is closed
                raise AssertionError(f"a command of the page failed:\n{text}\n{screen(raw)}") from None
        said, _, code = screen(raw).rpartition(DONE)
        assert code.strip() == "0", f"exit code {code}:\n{text}\n{said}"
        return said.lstrip("\n")  # the end of the line before may come with this block's

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait(LIMIT_S)
        os.close(self._ours)


def screen(raw: bytes) -> str:
    """What is left on a terminal: of each line what was written last, without colours."""
    text = raw.decode("utf-8", "replace").replace("\r\n", "\n")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return "\n".join(line.rpartition("\r")[2] for line in text.split("\n"))


@pytest.fixture
def follow() -> Iterator[Callable[[list[Block], Path, dict[str, str], str], None]]:
    opened: list[Terminal] = []

    def through(page: list[Block], folder: Path, environment: dict[str, str], python: str) -> None:
        environment = {**environment, "COLUMNS": "200", "LINES": "50", "TERM": "dumb", "NO_COLOR": "1"}
        shell = Terminal(["bash", "--noprofile", "--norc"], folder, environment)
        opened.append(shell)
        shell.type(f"set -eo pipefail\necho {DONE} $?\n")
        interpreter: Terminal | None = None
        for block in page:
            if block.language == "sh":
                said = shell.type(f"{{\n{block.code}\n}} < /dev/null\necho {DONE} $?\n")
            else:
                if interpreter is None:  # by now the shell knows which python is meant
                    found = shell.type(f"command -v {python}\necho {DONE} $?\n").split()[-1]
                    interpreter = Terminal([found, "-c", PYTHON], folder, environment)
                    opened.append(interpreter)
                said = interpreter.type(json.dumps(block.code) + "\n")
            if block.output is not None:
                assert difference(block.output, said) is None, difference(block.output, said)

    yield through
    for each in opened:
        each.close()


def wanted(*, install: bool) -> list[Block]:
    return [block for block in blocks(PAGE) if install or "install" not in block.flags]


def test_the_page_is_followed_in_this_environment(
    tmp_path: Path, warm: Warm, follow: Callable[[list[Block], Path, dict[str, str], str], None]
) -> None:
    page = wanted(install=False)
    assert sum(block.output is not None for block in page) >= 8
    follow(page, tmp_path, warm.environment(), sys.executable)


@pytest.mark.soak
def test_the_page_is_followed_from_nothing(
    tmp_path: Path, follow: Callable[[list[Block], Path, dict[str, str], str], None]
) -> None:
    folder, home = tmp_path / "empty", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(tmp_path),
            str(ROOT),
        ],
        check=True,
        timeout=LIMIT_S,
    )
    (wheel,) = tmp_path.glob("tidegate-*.whl")
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"tidegate=={wheel.name.split('-')[1]}\n", encoding="utf-8")
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.find-links"], capture_output=True, text=True
    )
    elsewhere = os.environ.get("PIP_FIND_LINKS", listed.stdout)
    kept = ("PATH", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    # The page says `pip install tidegate`: this tree's is meant, everything else comes from where pip is told to look.
    environment |= {
        "HOME": str(home),
        "PIP_CONSTRAINT": str(constraint),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": " ".join([str(tmp_path), *elsewhere.split()]),
    }
    of_user = Path.home() / ".config" / "pip" / "pip.conf"
    if of_user.exists():
        environment.setdefault("PIP_CONFIG_FILE", str(of_user))
    cache = Path.home() / ".cache" / "pip"
    if cache.is_dir():
        environment.setdefault("PIP_CACHE_DIR", str(cache))
    began = time.monotonic()
    follow(wanted(install=True), folder, environment, "python")
    (installed,) = folder.glob("tidegate-env/lib/python3*/site-packages/tidegate/notebook.py")
    assert installed.read_bytes() == (ROOT / "src" / "tidegate" / "notebook.py").read_bytes()
    print(f"from nothing to the end of the page: {time.monotonic() - began:.0f} s")
