"""The table through which kernels read many runs: one line of `WIDTH` numbers for each place a run can be read from.

Lines ascend by (bucket, order). A line has the addresses of the run's arrays, how long they are, the first and last
ts of the whole run, its bucket, and its role:

    COMPLETE   everything the run holds is here
    PARTIAL    a hot copy with some keys; the next line is the stored copy of the same run
    STORED     a stored copy; after a PARTIAL line only keys that line lacks are looked for in it.
               KEYS is -1 until somebody loaded it

DELETED is 0 for a run without tombstones, else the address of their bitmap. Nothing checks bounds: addresses come
from runs, which were verified when they were read or made, and whoever fills a table keeps the runs alive.
"""

from __future__ import annotations

from typing import Any, Final

from numba.extending import register_jitable

from tidegate.kernels.memory import load

HASHES, KEY_BOUNDS, KEY_BYTES, STARTS, TS, SEQ, KEYS, ROWS = 0, 1, 2, 3, 4, 5, 6, 7
DELETED, DELETED_OFFSET, MIN_TS, MAX_TS, ROLE, BUCKET = 8, 9, 10, 11, 12, 13
WIDTH: Final = 14
COMPLETE, PARTIAL, STORED = 0, 1, 2


@register_jitable(forceinline=True)
def cell(table: Any, line: Any, column: Any) -> Any:
    return load(table, line * WIDTH + column)
