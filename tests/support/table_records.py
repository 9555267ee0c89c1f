"""Builders for tests of tables: windowed records as plain Python, written to a log, and read back as plain Python."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pyarrow as pa

from tidegate.log.format.records import TIMESTAMP_TYPE
from tidegate.log.log import Log
from tidegate.windows.keys import KeyFormat, SessionWindow, TimeWindow, encode_key


class Said(NamedTuple):
    """One record of a topic, as bytes."""

    key: bytes | None
    value: bytes | None
    timestamp: int | None = 0


def window_record(
    key: bytes,
    start: int,
    value: bytes | None,
    timestamp: int | None = None,
    *,
    key_format: KeyFormat = KeyFormat.CHANGELOG,
) -> Said:
    """A record for the time window that starts there."""
    raw = encode_key(key, TimeWindow(start, start + 1), key_format)
    return Said(raw, value, start if timestamp is None else timestamp)


def session_record(
    key: bytes, start: int, end: int, value: bytes | None, timestamp: int | None = None
) -> Said:
    """A record for one session."""
    raw = encode_key(key, SessionWindow(start, end), KeyFormat.SESSION)
    return Said(raw, value, end if timestamp is None else timestamp)


def write_records(
    log: Log, topic: str, records: Iterable[Said], *, partition: int = 0, partitions: int = 1, **settings: Any
) -> None:
    """Write records in their order into one partition; the topic is made when it is not there."""
    log.create_topic(topic, partitions, if_not_exists=True)
    said = list(records)
    table = pa.table(
        {
            "key": pa.array([record.key for record in said], pa.binary()),
            "value": pa.array([record.value for record in said], pa.binary()),
            "timestamp": pa.array([record.timestamp for record in said], pa.int64()).view(TIMESTAMP_TYPE),
        }
    )
    with log.writer(topic, **settings) as writer:
        writer.write(table, partition=partition)


def windows_in(table: Any) -> dict[tuple[Any, int, int], tuple[Any, int | None]]:
    """Everything a table answers: (key, start, end) → (value, timestamp)."""
    return {
        (row.key, row.window.start, row.window.end): (row.value, row.timestamp)
        for row in table.all()
        if row.window is not None
    }
