"""The two lives of the memory functions: checked in plain Python, one operation when compiled."""

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import njit

from tidegate.kernels import jit
from tidegate.kernels.jit import copy, load, pointer, prefetch, store

KINDS = [np.uint8, np.int8, np.int16, np.int32, np.uint32, np.int64]


@njit
def compiled_load(array: Any, index: int) -> Any:
    return load(pointer(array), index)


@njit
def compiled_store(array: Any, index: int, value: int) -> None:
    store(pointer(array), index, value)


@njit
def compiled_copy(target: Any, into: int, source: Any, out_of: int, length: int) -> None:
    copy(pointer(target), into, pointer(source), out_of, length)


@njit
def compiled_prefetch(array: Any, index: int) -> None:
    prefetch(pointer(array), index)


@pytest.mark.parametrize("kind", KINDS)
def test_loads_widen_and_keep_the_sign(kind: Any) -> None:
    limits = np.iinfo(kind)
    array = np.array([limits.min, 0, limits.max], kind)
    assert [compiled_load(array, i) for i in range(3)] == [limits.min, 0, limits.max]
    assert [load(array, i) for i in range(3)] == [limits.min, 0, limits.max]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [0, 1, -1, 255, 2**31, -(2**63)])
def test_stores_keep_the_low_bits(kind: Any, value: int) -> None:
    plain, compiled = np.zeros(3, kind), np.zeros(3, kind)
    store(plain, 1, value)
    compiled_store(compiled, 1, value)
    assert plain.tolist() == compiled.tolist() == [0, np.array([value]).astype(kind)[0], 0]


def test_copies_move_exactly_the_bytes_asked_for() -> None:
    source = np.arange(10, dtype=np.uint8)
    plain, compiled = np.zeros(10, np.uint8), np.zeros(10, np.uint8)
    copy(plain, 2, source, 5, 3)
    compiled_copy(compiled, 2, source, 5, 3)
    assert plain.tolist() == compiled.tolist() == [0, 0, 5, 6, 7, 0, 0, 0, 0, 0]


def test_plain_python_refuses_to_leave_an_array() -> None:
    array = np.zeros(4, np.uint8)
    for index in (-1, 4):
        with pytest.raises(IndexError):
            load(array, index)
        with pytest.raises(IndexError):
            store(array, index, 1)
    for into, out_of, length in ((-1, 0, 1), (0, -1, 1), (4, 0, 1), (0, 4, 1), (0, 0, 5), (0, 0, -1)):
        with pytest.raises(IndexError):
            copy(array, into, array.copy(), out_of, length)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("index", [0, 3, 4, -1, 2**40, -(2**40), 2**62])
def test_a_prefetch_changes_nothing_and_may_be_anywhere(kind: Any, index: int) -> None:
    array = np.arange(4, dtype=kind)
    prefetch(array, index)
    compiled_prefetch(array, index)
    assert array.tolist() == [0, 1, 2, 3]


# -- arrays that a kernel makes itself -----------------------------------------------------------


def unkept(source: str) -> list[str]:
    """Arrays of a function's own whose pointer is taken and that are not mentioned again by `keep`."""
    missing: list[str] = []
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        made: set[str] = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target, value in zip(flat(node.targets[0]), flat(node.value), strict=False):
                    if isinstance(target, ast.Name) and is_numpys(value):
                        made.add(target.id)
        called = [node for node in ast.walk(function) if isinstance(node, ast.Call) and node.args]
        given = {
            name: {call.args[0].id for call in called if is_call(call, name)}  # type: ignore[attr-defined]
            for name in ("pointer", "keep")
        }
        missing += [f"{function.name}: {name}" for name in sorted(made & given["pointer"] - given["keep"])]
    return missing


def flat(node: ast.expr) -> list[ast.expr]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def is_numpys(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "np"
        and node.func.attr in {"empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"}
    )


def is_call(node: ast.Call, name: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == name and isinstance(node.args[0], ast.Name)


@pytest.mark.parametrize("path", sorted(Path(jit.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_arrays_made_in_a_kernel_are_kept_while_there_are_pointers_to_them(path: Path) -> None:
    """numba lets an array go behind its last mention, and a pointer is none."""
    assert unkept(path.read_text()) == []


def test_the_look_for_arrays_that_are_not_kept_finds_one() -> None:
    lost = "def f(n):\n    a, b = np.zeros(n), np.empty(3)\n    x, y = pointer(a), pointer(b)\n    keep(b)\n"
    assert unkept(lost) == ["f: a"]


USED_AFTER = """
import numpy as np
import pyarrow as pa
from tidegate.kernels.aggregates import estimate_sketches
from tidegate.tables.serdes.json import JsonDecoder

decoder = JsonDecoder({"order": "int64", "amount": "double"})
for count in (1, 5, 40, 400) * 20:
    values = [b'{"shop":"s1","order":%d,"amount":%d.5}' % (place, place % 89) for place in range(count)]
    found = decoder.decode(pa.array(values, pa.binary())).batch
    assert found.column(0).to_pylist() == list(range(count))
sketch, numbers = np.array([1, 0, 0, 65], np.uint8), np.zeros(1)
print(estimate_sketches(sketch, np.array([0, 4], np.int32), numbers), "fine")
"""


def test_kernels_do_not_use_what_they_have_let_go() -> None:
    """With memory that is overwritten when it is given back, what is used after that is found at once."""
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", USED_AFTER],
        env=os.environ | {"PYTHONMALLOC": "debug"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "fine" in done.stdout
