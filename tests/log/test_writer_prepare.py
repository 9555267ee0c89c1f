"""Check first, store later: `Writer.prepare`, for callers that number records themselves."""

from __future__ import annotations

import errno
from pathlib import Path

import pyarrow as pa
import pytest

from tidegate.clock import ManualClock
from tidegate.errors import InvalidError, UnavailableError
from tidegate.files import Effect, Files
from tidegate.log.format.records import RecordColumns, coerce
from tidegate.log.log import Log


def rows(*values: str) -> RecordColumns:
    return coerce(pa.table({"key": list(values), "value": list(values)}))


def stored(log: Log) -> list[str]:
    return [value.decode() for batch in log.reader("t") for value in batch.column("value").to_pylist()]


def test_nothing_is_stored_before_append_and_nothing_is_read_before_acknowledge(tidegate_log: Log) -> None:
    tidegate_log.create_topic("t")
    writer = tidegate_log.writer("t")
    prepared = writer.prepare([rows("a", "b"), rows("c")], 0)
    assert tidegate_log.partition("t", 0).log_end_offset == 0
    written = prepared.append()
    assert [(batch.first_offset, batch.last_offset) for batch in written] == [(0, 1), (2, 2)]
    assert prepared.append() == written  # there is nothing left to store
    writer.acknowledge([0])
    assert stored(tidegate_log) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("config", "columns", "message"),
    [
        ({"max.message.bytes": "1000"}, coerce(pa.table({"value": ["x" * 2000]})), "nothing was written"),
        ({"cleanup.policy": "compact"}, coerce(pa.table({"value": ["x"]})), "no key"),
        (
            {"message.timestamp.after.max.ms": "1000"},
            coerce(pa.table({"value": ["x"], "timestamp": pa.array([2**50], pa.int64())})),
            "timestamps",
        ),
    ],
)
def test_what_the_log_would_refuse_is_refused_before_anything_is_stored(
    tidegate_log: Log, config: dict[str, str], columns: RecordColumns, message: str
) -> None:
    tidegate_log.create_topic("t", 1, config)
    with pytest.raises(InvalidError, match=message):
        tidegate_log.writer("t").prepare([rows("a"), columns], 0)
    assert tidegate_log.partition("t", 0).log_end_offset == 0


@pytest.mark.parametrize("kind", ["CreateTime", "LogAppendTime"])
def test_checking_leaves_the_batch_as_it_was(tidegate_log: Log, kind: str) -> None:
    tidegate_log.create_topic("t", 1, {"message.timestamp.type": kind})
    writer = tidegate_log.writer("t", compression="zstd")
    for value in ("a", "b"):
        writer.prepare([rows(value)], 0).append()
    writer.acknowledge([0])
    assert stored(tidegate_log) == ["a", "b"]


@pytest.mark.parametrize("producer_id", [None, 7])
def test_an_append_that_failed_goes_on_with_the_batch_it_was_at(
    tmp_path: Path, manual_clock: ManualClock, producer_id: int | None
) -> None:
    failing: list[int] = []

    def watch(effect: Effect) -> None:
        if effect.kind == "write" and effect.path.suffix == ".log" and failing:
            failing[0] -= 1
            if failing[0] < 0:
                raise OSError(errno.ENOSPC, "full")

    with Log(tmp_path / "log", files=Files(watch=watch), clock=manual_clock) as log:
        log.create_topic("t")
        writer = log.writer("t", batch_records=1, producer_id=producer_id)
        writer.write(pa.table({"key": ["0"], "value": ["0"]}))
        prepared = writer.prepare([rows("a", "b", "c")], 0)
        failing.append(1)
        with pytest.raises(UnavailableError):
            prepared.append()
        failing.clear()
        assert len(prepared.append()) == 3
        writer.acknowledge([0])
        writer.write(pa.table({"key": ["d"], "value": ["d"]}))
        assert stored(log) == ["0", "a", "b", "c", "d"]
