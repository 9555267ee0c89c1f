"""The kernel cache: what counts as a change."""

import subprocess
import sys
from pathlib import Path

import tidegate.kernels
from tidegate.kernels.__main__ import warm
from tidegate.kernels.compiling import _sources, _stamp

PACKAGE = Path(tidegate.kernels.__file__).parent


def test_a_kernel_depends_on_the_files_of_what_it_calls() -> None:
    files = {path.name: path.read_bytes() for path in PACKAGE.glob("*.py")}
    needed = set(_sources(PACKAGE / "decoding.py"))
    for name in ("decoding.py", "varints.py", "memory.py", "headers.py", "compiling.py"):
        assert files[name] in needed
    assert files["encoding.py"] not in needed


def test_an_edit_in_a_helper_changes_the_stamp(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("from tidegate.kernels.varints import read_varint\n")
    before = _stamp(kernel)
    kernel.write_text("from tidegate.kernels.memory import load\n")
    assert _stamp(kernel) != before


def test_every_kernel_module_is_warmed() -> None:
    assert {name for name, _ in warm()} == {
        path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")
    }


def test_a_cache_that_cannot_be_read_is_compiled_anew(tmp_path: Path) -> None:
    """An index may be cut short, or name a class that an upgrade took away."""
    source = tmp_path / "doubling.py"
    source.write_text(
        "from numba import types\n"
        "from tidegate.kernels.compiling import INT64, kernel\n"
        "@kernel(INT64(INT64))\n"
        "def double(number):\n"
        "    return number * 2\n"
        "print(double(21))\n"
    )

    def run() -> str:
        done = subprocess.run([sys.executable, str(source)], capture_output=True, text=True, check=False)
        return done.stdout.strip() or done.stderr

    assert run() == "42"
    (index,) = (tmp_path / "__pycache__").glob("*.nbi")
    index.write_bytes(index.read_bytes()[:-9])
    assert run() == "42"
    assert run() == "42"
