"""The kernel cache: what counts as a change. And when a kernel is loaded: not before it is asked for."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate.kernels
from tidegate.kernels.__main__ import warm
from tidegate.kernels.compiling import INT64, INT64S, _sources, _stamp, kernel

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
    _stamp.cache_clear()  # as in the next process
    kernel.write_text("from tidegate.kernels.memory import load\n")
    assert _stamp(kernel) != before


def test_every_kernel_module_is_warmed() -> None:
    assert {name for name, _ in warm()} == {
        path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")
    }


@pytest.fixture
def doubling() -> tuple[Any, Any]:
    """Two kernels nobody has called: one calls the other."""

    @kernel(INT64(INT64S))
    def first(numbers: Any) -> Any:
        return numbers[0]

    @kernel(INT64(INT64S))
    def doubled(numbers: Any) -> Any:
        return 2 * first(numbers)

    return first, doubled


def test_a_kernel_is_loaded_at_its_first_call_for_its_one_signature(doubling: tuple[Any, Any]) -> None:
    first, doubled = doubling
    assert not first.signatures and not doubled.signatures
    assert first(np.array([21])) == 21
    assert first.signatures == [(INT64S,)] and not doubled.signatures


def test_a_kernel_that_another_one_calls_is_loaded_with_it(doubling: tuple[Any, Any]) -> None:
    first, doubled = doubling
    assert doubled(np.array([21])) == 42
    assert first.signatures == doubled.signatures == [(INT64S,)]


@pytest.mark.parametrize("calls", [0, 1])
def test_arguments_of_other_types_are_refused_at_the_first_call_too(
    doubling: tuple[Any, Any], calls: int
) -> None:
    first, _ = doubling
    for _ in range(calls):
        first(np.array([21]))
    with pytest.raises(TypeError, match="No matching definition"):
        first(np.array([2.5]))
    assert first.signatures == [(INT64S,)]


def test_threads_that_call_first_at_once_load_it_once(doubling: tuple[Any, Any]) -> None:
    _, doubled = doubling
    together, found = threading.Barrier(8), []

    def call() -> None:
        together.wait(10)
        found.append(doubled(np.array([21])))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(300)
    assert found == [42] * 8
    assert doubled.signatures == [(INT64S,)]


def test_an_import_loads_no_kernel_and_warming_loads_all() -> None:
    script = (
        "from tidegate.kernels import decoding, run_merge\n"
        "from tidegate.kernels.compiling import Dispatcher, load_kernels\n"
        "ready = lambda: [bool(each.signatures) for module in (decoding, run_merge)"
        " for each in vars(module).values() if isinstance(each, Dispatcher) and hasattr(each, 'load')]\n"
        "before = ready()\n"
        "load_kernels(decoding); load_kernels(run_merge)\n"
        "print(len(before) > 2, any(before), all(ready()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True"]
