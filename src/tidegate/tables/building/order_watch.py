"""Notices updates that are older than what they replace, and says so once a minute for each partition.

The later offset wins whatever the timestamps say; but a producer that writes updates of one window out of order is
worth a line in the log. A batch whose timestamps do not go back cannot hold such an update and costs nothing. Else
the first rows that went back are looked up, at most `MOST_LOOKED_AT` of a batch, until one is found; so the line is
never wrong, and a busy topic may be told about later than at its first case.

Thread rule: the draining thread's.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.storage import RangeRequest, Time
from tidegate.tables.building.partition_state import PartitionState
from tidegate.tables.building.source import TableSource

QUIET_MS: Final = 60_000
MOST_LOOKED_AT: Final = 256

logger = logging.getLogger(__name__)


class OrderWatch:
    """Looks at the rows of each batch before they are written."""

    def __init__(self, source: TableSource, clock: Clock) -> None:
        self._source = source
        self._clock = clock
        self._told: dict[int, int] = {}

    def look(self, state: PartitionState, rows: pa.RecordBatch) -> None:
        """`state` is as it was before the batch."""
        if rows.num_rows == 0:
            return
        times = rows.column("value_ts").to_numpy()
        running = np.maximum(np.maximum.accumulate(times), state.newest_ms)
        if int(running[0]) == times[0] and np.array_equal(running, times):
            return
        now_ms = self._clock.monotonic_ms()
        told = self._told.get(state.partition)
        if told is not None and now_ms - told < QUIET_MS:
            return
        back = np.flatnonzero(times < running)[:MOST_LOOKED_AT]
        found = self._first_older(state, rows, back.tolist())
        if found is None:
            return
        self._told[state.partition] = now_ms
        offset, time, newer = found
        shape = self._source.rules.shape
        logger.warning(
            "table %s: offset %d of %s-%d has timestamp %d and replaces a value of %d; the later offset wins. "
            "Further ones of this partition are not told for a minute",
            shape.name, offset, shape.topic, state.partition, time, newer,
        )  # fmt: skip

    def _first_older(
        self, state: PartitionState, rows: pa.RecordBatch, back: list[int]
    ) -> tuple[int, int, int] | None:
        """The first of these rows that replaces a newer one: its offset and time, and the newer time."""
        wanted = set(back)
        keys = rows.column("key").take(pa.array(back)).unique()
        mine = pa.compute.index_in(rows.column("key"), keys).is_valid().to_numpy(zero_copy_only=False)
        seen = self._stored_times(state, keys, rows)
        for row in np.flatnonzero(mine)[: 64 * MOST_LOOKED_AT].tolist():
            key, ts, seq, time, offset = (
                rows.column(name)[row].as_py() for name in ("key", "ts", "seq", "value_ts", "offset")
            )
            before = seen.get((key, ts, seq))
            if row in wanted and before is not None and before > time:
                return offset, time, before
            seen[key, ts, seq] = time
        return None

    def _stored_times(
        self, state: PartitionState, keys: pa.Array, rows: pa.RecordBatch
    ) -> dict[tuple[bytes, int, int], int]:
        ts = rows.column("ts").to_numpy()
        reader, source = self._source.runtime.reader(), self._source
        request = RangeRequest(keys, Time(int(ts.min()), int(ts.max())))
        with reader.load(reader.plan(source.task, state, [request])) as loaded:
            table = loaded.to_table()
        columns = [table.column(name).to_pylist() for name in ("key", "ts", "seq", "value_ts")]
        return {(key, start, seq): time for key, start, seq, time in zip(*columns, strict=True)}
