"""The life of a bulk load in its topic: start of push, the tasks' senders, end of push; and heartbeats.

In one partition a push reads

    start of chain, start of push (the driver's sender) | start, data, end (each task's) | end of push, end

Owns the driver's records, and the identity and settings of senders whose every attempt sends the same rows in
the same order. What the records mean to a receiver is `policy`'s.

A *sorted* task shares its GUID with its other attempts, so that repeats are duplicates; a nonce per attempt in
the control records' keys keeps compaction from taking one attempt's start for another's. All that is in a
header must then be the same too: the driver hands out one time for all attempts, and chains do not end by time.
Tasks whose order may differ get a GUID per attempt, which is what a plain `Sender` does.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tidegate.clock import Clock
from tidegate.errors import InvalidError
from tidegate.integrity.chains import ChainLimits
from tidegate.integrity.checksum import control_checksum
from tidegate.integrity.header import (
    CONTROL_VALUE,
    HEARTBEAT,
    ChecksumType,
    ControlType,
    RecordKind,
    Stamp,
    start_of_chain_bytes,
    start_of_push_bytes,
)
from tidegate.integrity.manifest import Manifest
from tidegate.integrity.outlet import RecordWriter, outlet_of
from tidegate.integrity.sender import Sender
from tidegate.integrity.stamping import control_key, control_row
from tidegate.log.writer import Written

NAMESPACE: Final = uuid.UUID("5d1c9a3e-3c0b-5f55-9e0b-7d1f6c7a2b41")
HEARTBEAT_GUID: Final = uuid.uuid5(NAMESPACE, "heartbeat").bytes
"""The well-known producer of heartbeats."""


def stable_guid(name: str, topic: str, partition: int) -> bytes:
    """The same GUID for the same push or application, topic and partition, on every machine."""
    return uuid.uuid5(NAMESPACE, f"{name}\0{topic}\0{partition}").bytes


def sorted_sender(
    writer: RecordWriter,
    *,
    push: str,
    partition: int,
    attempt: int,
    started_ms: int,
    limits: ChainLimits | None = None,
    **settings: Any,
) -> Sender:
    """The sender of one attempt at a task whose rows have one total order.

    `push`, `partition`, `started_ms` and `limits` must be the same for all attempts; `attempt` tells them apart.
    """
    bounds = limits if limits is not None else ChainLimits(max_age=0)
    if bounds.age_ms > 0:
        raise InvalidError(
            "chains of a sorted sender must not end by time: attempts would differ; use max_age=0"
        )
    return Sender(
        writer,
        guid=stable_guid(push, writer.topic, partition),
        nonce=attempt,
        fixed_time_ms=started_ms,
        limits=bounds,
        **settings,
    )


class _Call:
    """A call that, made again after an error, is the same call."""


class Push:
    """The driver's side of a bulk load, through a sender of its own.

    `start()`, then the tasks, then `end(manifests)`; an error in between means no end, and a receiver that waits.
    Both may be called again, also after an error: what was sent is not sent twice.
    """

    def __init__(self, sender: Sender, *, is_sorted: bool = False) -> None:
        self.sender = sender
        self.is_sorted = is_sorted
        self._starting, self._ending = _Call(), _Call()
        self._started = False
        self._ended = False

    def start(self) -> list[Written]:
        """Say to every partition that a push begins; returns when that is stored."""
        if self._started:
            return []
        payload = start_of_push_bytes(is_sorted=self.is_sorted)
        written = self.sender.send_control(
            ControlType.START_OF_PUSH,
            dict.fromkeys(range(self.sender.partitions), payload),
            source=self._starting,
        )
        self._started = True
        return written

    def end(self, manifests: Mapping[int, Manifest]) -> list[Written]:
        """Say to every partition what it must have received; a partition not named must have received nothing."""
        if self._ended:
            return []
        unknown = set(manifests) - set(range(self.sender.partitions))
        if unknown:
            raise InvalidError(f"topic {self.sender.topic} has no partition {min(unknown)}")
        payloads: dict[int, bytes | None] = {
            number: manifests.get(number, Manifest()).to_bytes() for number in range(self.sender.partitions)
        }
        written = self.sender.send_control(ControlType.END_OF_PUSH, payloads, final=True, source=self._ending)
        self._ended = True
        return written


def send_heartbeat(writer: RecordWriter, partitions: Iterable[int], *, clock: Clock) -> list[Written]:
    """One record per partition that says somebody is there: outside all numbering, ignored by validators."""
    now_ms = clock.now_ms()
    payload = start_of_chain_bytes(ChecksumType.NONE)
    stamp = Stamp(RecordKind.CONTROL, ControlType.START_OF_CHAIN, HEARTBEAT, HEARTBEAT_GUID, 0, 0, now_ms, 0)
    crc = control_checksum(stamp, control_key(stamp, 0), CONTROL_VALUE, payload)
    row = control_row(stamp._replace(crc=crc), nonce=0, payload=payload, log_time_ms=now_ms)
    outlet = outlet_of(writer)
    written: list[Written] = []
    numbers = list(partitions)
    for number in numbers:
        written += outlet.prepare([row], number).append()
    outlet.acknowledge(numbers)
    return written
