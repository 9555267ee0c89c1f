"""The kernel cache: what counts as a change."""

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
