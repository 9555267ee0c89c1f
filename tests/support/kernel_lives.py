"""A kernel's two lives, for tests: compiled, and plain Python with every access checked; and arrays for both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

BOTH = pytest.mark.parametrize("life", ["compiled", "plain"])


def alive(kernel: Any, life: str) -> Any:
    return kernel if life == "compiled" else kernel.py_func


def int32s(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


def columns(values: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """The bytes and the bounds of a binary column."""
    return np.frombuffer(b"".join(values), np.uint8), np.cumsum([0, *map(len, values)], dtype=np.int32)
