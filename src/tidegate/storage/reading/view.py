"""One key's rows in one range: ordered, each once; and what keeps a load valid while it is read.

A position is a row's number in the view, 0 up to `len(view)`.

Rows are read where they lie: a view holds stretches of runs, and copies them only when asked for a batch.

`Holding` gives everything a load took (pins, a scratch permit, keys in use) back exactly once, when the last
holder lets go: the loaded ranges themselves, and each view entered with `with`.

Thread rule: a view belongs to one thread at a time; `Holding` may be let go on any.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np
import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.storage.reading.lookup import Found, Int32s, cut, gather, stretch_ends
from tidegate.storage.runs.hashing import UInt64s
from tidegate.storage.runs.run import Int64s
from tidegate.storage.spec import Cursor

_COUNTING = threading.Lock()


class Holding:
    """What a load took and must give back; counts its holders."""

    __slots__ = ("_holders", "_releases")

    def __init__(self, releases: Sequence[Callable[[], None]] = ()) -> None:
        self._holders = 1
        self._releases = releases

    @property
    def is_open(self) -> bool:
        return self._holders > 0

    def retain(self) -> None:
        with _COUNTING:
            if self._holders == 0:
                raise InvalidError("these ranges are closed: load them again")
            self._holders += 1

    def release(self) -> None:
        """One holder less; the last gives everything back, also when giving back some of it fails."""
        with _COUNTING:
            self._holders -= 1
            releases, last = self._releases, self._holders == 0
            if last:
                self._releases = ()
        if last:
            release_all(releases)


class KeyUse(Protocol):
    """Who wants to know which keys are read: the task's clock of key accesses."""

    def touch(self, hashes: UInt64s) -> None:
        """These keys were accessed now."""

    def hold(self, hashes: UInt64s) -> None:
        """These keys are in use until `unhold` is called with the same."""

    def unhold(self, hashes: UInt64s) -> None: ...

    def begin_use(self, key_hash: int) -> None:
        """One key was accessed now, and is in use until `end_use`."""

    def end_use(self, key_hash: int) -> None: ...


class KeyHolding(Holding):
    """All that a read of one hot key takes: the key is in use."""

    __slots__ = ("_hash", "_use")

    def __init__(self, use: KeyUse, key_hash: int) -> None:
        use.begin_use(key_hash)
        self._holders = 1
        self._use = use
        self._hash = key_hash

    def release(self) -> None:
        with _COUNTING:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._use.end_use(self._hash)


def release_all(releases: Sequence[Callable[[], None]]) -> None:
    """Call every one, in order, whatever the others do; the first error is raised at the end."""
    for position, release in enumerate(releases):
        try:
            release()
        except BaseException:
            release_all(releases[position + 1 :])
            raise


class SortedRangeView:
    """The rows of one key inside one request's bounds, ascending by cursor."""

    __slots__ = ("_ends", "_entered", "_found", "_hides", "_holding", "_schema", "_stretches", "key", "rows")

    def __init__(
        self,
        found: Found,
        stretches: Int32s,
        rows: int,
        key: bytes,
        schema: pa.Schema,
        holding: Holding,
        hides: bool = True,  # whether runs have columns that readers do not see
    ) -> None:
        self.key = key
        self.rows = rows
        self._found = found
        self._stretches = stretches
        self._schema = schema
        self._holding = holding
        self._hides = hides
        self._ends: list[int] | None = None
        self._entered = 0

    def __len__(self) -> int:
        return self.rows

    def __enter__(self) -> SortedRangeView:
        self._holding.retain()
        self._entered += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of what entering the view took; closing again does nothing."""
        if self._entered:
            self._entered -= 1
            self._holding.release()

    # ── seeking ──────────────────────────────────────────────────────────────────────────────────────────────

    def cursor(self, position: int) -> Cursor:
        """The cursor of the row at this position."""
        line, row = self._locate(position)
        run = self._found.run_of(line)
        return Cursor(int(run.ts[row]), int(run.seq[row]))

    def seek_eq(self, cursor: Cursor) -> int | None:
        """The position of the row with this cursor; None when the view has no such row."""
        position = bisect_left(range(self.rows), cursor, key=self.cursor)
        return position if position < self.rows and self.cursor(position) == cursor else None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def ts(self) -> Int64s:
        """Every row's ts."""
        return self._numbers("ts")

    @property
    def seq(self) -> Int64s:
        """Every row's seq."""
        return self._numbers("seq")

    def to_batch(self, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """All rows: ts, seq and payload, or the columns asked for."""
        return self.slice(0, self.rows, columns)

    def slice(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Rows from position `start` up to, not including, `stop`; clamped to the view."""
        self._check_open()
        start, stop = max(0, start), min(self.rows, stop)
        whole = (start, stop) == (0, self.rows)
        part = self._stretches if whole else cut(self._stretches, self._stretch_ends(), start, stop)
        if columns is None:
            return gather(self._found, part, self._schema, select=self._hides)
        return gather(self._found, part, pa.schema([self._schema.field(name) for name in columns]))

    def batches(self, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """All rows where they lie, without a copy, one stretch after the other."""
        self._check_open()
        names = self._schema.names if columns is None else list(columns)
        for line, start, stop in self._stretches.tolist():
            yield self._found.run_of(line).rows.slice(start, stop - start).select(names)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _check_open(self) -> None:
        if not self._holding.is_open:
            raise InvalidError(
                "this view is closed: read it inside the `with` of its load, or enter the view itself"
            )

    def _stretch_ends(self) -> list[int]:
        if self._ends is None:
            self._ends = stretch_ends(self._stretches)
        return self._ends

    def _locate(self, position: int) -> tuple[int, int]:
        if not 0 <= position < self.rows:
            raise IndexError(f"position {position} of a view of {self.rows} rows")
        self._check_open()
        ends = self._stretch_ends()
        at = bisect_right(ends, position)
        line, _, stop = self._stretches[at].tolist()
        return line, stop - (ends[at] - position)

    def _numbers(self, name: str) -> Int64s:
        self._check_open()
        pieces = [getattr(self._found.run_of(line), name)[a:b] for line, a, b in self._stretches.tolist()]
        if len(pieces) == 1:
            return pieces[0]  # type: ignore[no-any-return]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)
