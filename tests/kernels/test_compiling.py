"""The kernel cache: what counts as a change. And when a kernel is loaded: not before it is asked for."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate.kernels
from tidegate.kernels import jit
from tidegate.kernels.__main__ import warm
from tidegate.kernels.jit import INT64, INT64S, _parts, kernel, stamp_of
from tidegate.kernels.record_batch import decode_records

PACKAGE = Path(tidegate.kernels.__file__).parent


def called_by(function: Any) -> set[str]:
    """The names of all functions whose code is part of a kernel's stamp."""
    found: set[Any] = set()
    list(_parts(function, found))
    return {each.__name__ for each in found}


def test_a_kernel_is_stamped_with_what_it_calls_and_nothing_else() -> None:
    names = called_by(decode_records.py_func)
    assert {"decode_records", "read_varint", "load", "_load"} <= names  # `_load` is what `load` is lowered to
    assert not names & {"encode_records", "measure_records", "store_word"}


STAMPED = """
from tidegate.kernels.jit import load
from tidegate.kernels.jit import stamp_of

SCALE = 2
{extra}
def scaled(number):
    return number * SCALE

def table():
    return POWERS[1]

def used(number):
    return scaled(number) + table()

def unused(number):
    return number + 1
"""


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("return number * SCALE", "return number * SCALE + 1", False),  # a function that it calls
        ("SCALE = 2", "SCALE = 3", False),  # a constant of that function
        ("[1, 2]", "[1, 3]", False),  # the content of a table
        ("np.int64", "np.uint32", False),  # or its type
        ("return number + 1", "return number + 2", True),  # a function that it does not call
        ("def scaled", "# a comment\n\ndef scaled", True),  # and what moves lines
    ],
)
def test_a_stamp_changes_with_the_code_that_is_compiled(before: str, after: str, same: bool) -> None:
    source = STAMPED.format(extra="import numpy as np\nPOWERS = np.array([1, 2], np.int64)")
    assert before in source
    stamps = []
    for text in (source, source.replace(before, after)):
        module: dict[str, Any] = {"__name__": "stamped"}
        exec(compile(text, "stamped.py", "exec"), module)
        stamps.append(stamp_of(module["used"]))
    assert (stamps[0] == stamps[1]) is same


def test_what_an_intrinsic_is_lowered_to_is_part_of_the_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    before = stamp_of(decode_records.py_func)
    monkeypatch.setitem(jit.INTRINSICS, jit.load, [lambda source, index: None])
    assert stamp_of(decode_records.py_func) != before


def test_stamps_are_the_same_in_every_process() -> None:
    script = (
        "from tidegate.kernels.record_batch import decode_records\n"
        "from tidegate.kernels.jit import stamp_of\n"
        "print(stamp_of(decode_records.py_func))"
    )
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        )
        assert done.stdout.strip() == stamp_of(decode_records.py_func)


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
        "from tidegate.kernels import record_batch as decoding, run_merge\n"
        "from tidegate.kernels.jit import Dispatcher, load_kernels\n"
        "ready = lambda: [bool(each.signatures) for module in (decoding, run_merge)"
        " for each in vars(module).values() if isinstance(each, Dispatcher) and hasattr(each, 'load')]\n"
        "before = ready()\n"
        "load_kernels(decoding); load_kernels(run_merge)\n"
        "print(len(before) > 2, any(before), all(ready()))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "False", "True"]
