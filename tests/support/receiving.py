"""Read a topic record by record and validate it with the scalar rules, for tests of senders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tidegate.integrity.columns import checksum_of, field_sum
from tidegate.integrity.header import EndOfChain, Stamp, start_of_chain_from_bytes
from tidegate.integrity.state import Producer
from tidegate.integrity.verdicts import Note, Verdict
from validation_rules import Observed, judge


class Arrived(NamedTuple):
    """One record with its metadata, None without."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    stamp: Stamp | None
    payload: bytes | None

    @property
    def position(self) -> tuple[int, int]:
        """Chain and sequence."""
        if self.stamp is None:
            raise ValueError("no metadata")
        return self.stamp.chain, self.stamp.sequence


def arrived(batches: Iterable[Any]) -> list[Arrived]:
    """The records of Arrow batches, control records included."""
    return [record for batch in batches for record in _records(batch)]


def _records(batch: Any) -> Iterator[Arrived]:
    for row in batch.to_pylist():
        headers = {header["key"]: header["value"] for header in row["headers"]}
        stamp = Stamp.from_bytes(headers["div"]) if "div" in headers else None
        time = row["timestamp"]
        yield Arrived(
            row["offset"],
            -1 if time is None else round(time.timestamp() * 1000),
            row["key"],
            row["value"],
            stamp,
            headers.get("divc"),
        )


def verdicts(records: Iterable[Arrived], *, settled: bool = False) -> list[Verdict]:
    """The verdict of each record, nothing tolerated; `settled` as after the end of a push."""
    known: dict[bytes, Producer | None] = {}
    found = []
    for record in records:
        stamp = record.stamp
        if stamp is None:
            found.append(Verdict.UNMANAGED)
        elif stamp.is_heartbeat:
            found.append(Verdict.HEARTBEAT)
        else:
            outcome = judge(
                known.get(stamp.guid),
                _observed(record, stamp),
                settled=settled,
                tolerates=lambda producer, observed: Note.NONE,
            )
            known[stamp.guid] = outcome.producer
            found.append(outcome.verdict)
    return found


def _observed(record: Arrived, stamp: Stamp) -> Observed:
    payload = record.payload
    starts, ends = stamp.is_start_of_chain and payload is not None, stamp.is_end_of_chain
    return Observed(
        stamp,
        offset=record.offset,
        log_time=record.timestamp,
        computed_crc=checksum_of(stamp, record.key, record.value, payload),
        field_sum=field_sum(stamp, record.key, record.value),
        announced_type=start_of_chain_from_bytes(payload) if starts and payload is not None else 0,
        certified=EndOfChain.from_bytes(payload) if ends and payload is not None else None,
    )
