"""The key column of rows that lie key after key: each key of a directory, as often as it has rows.

Arrow's `take` looks every row up; keys of neighbouring rows are the same, so copying one over and over is several
times as fast. Nothing else is decided here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.kernels.run_merge import count_key_bytes, spread_keys
from tidegate.storage.runs.hashing import binary_parts

MOST_BYTES = 2**31 - 1


def row_keys(keys: pa.BinaryArray, starts: npt.NDArray[np.int32], first: int, stop: int) -> pa.BinaryArray:
    """The keys of rows first … stop, where those of key i are starts[i] … starts[i + 1]."""
    if first >= stop:
        return pa.array([], pa.binary())
    data, bounds = binary_parts(keys)
    line = int(starts.searchsorted(np.int32(first), "right")) - 1
    size = int(count_key_bytes(bounds, starts, line, first, stop))
    if size > MOST_BYTES:
        raise InvalidError(
            f"{stop - first} rows have {size} bytes of keys, more than one Arrow column holds; read them in smaller "
            "batches, or without their keys"
        )
    content, ends = pa.allocate_buffer(max(1, size)), np.empty(stop - first + 1, np.int32)
    spread_keys(data, bounds, starts, line, first, stop, np.frombuffer(content, np.uint8), ends)
    return pa.Array.from_buffers(pa.binary(), stop - first, [None, pa.py_buffer(ends), content], 0)
