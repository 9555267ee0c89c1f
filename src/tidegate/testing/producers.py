"""A partition's producer state on the bench: appends and end markers in one call each, as a log makes them.

For tests of producer rules, transactions and snapshots without a log around them.
"""

from __future__ import annotations

from pathlib import Path

from tidegate.clock import ManualClock
from tidegate.errors import InvalidError
from tidegate.files import Files
from tidegate.log.format.batch import CONTROL_BIT, TRANSACTIONAL_BIT, BatchHeader
from tidegate.log.producer_state import CompletedTxn, Origin, ProducerEntry, ProducerStates

PID = 1


class ProducerBench:
    """A partition's producer state with an append that does what a log does."""

    def __init__(self, folder: Path, *, files: Files | None = None, clock: ManualClock | None = None) -> None:
        self.folder = folder
        self.clock = clock or ManualClock()
        self.states = ProducerStates(folder, files=files or Files())

    def header(
        self,
        sequence: int,
        offset: int,
        *,
        pid: int = PID,
        epoch: int = 0,
        count: int = 1,
        attributes: int = 0,
        timestamp: int | None = None,
    ) -> BatchHeader:
        now = self.clock.now_ms() if timestamp is None else timestamp
        return BatchHeader(
            base_offset=offset,
            length=49,
            leader_epoch=0,
            magic=2,
            crc=0,
            attributes=attributes,
            last_offset_delta=count - 1,
            base_timestamp=now,
            max_timestamp=now,
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=sequence,
            count=count,
        )

    def append(
        self,
        sequence: int,
        offset: int,
        *,
        pid: int = PID,
        epoch: int = 0,
        count: int = 1,
        txn: bool = False,
        origin: Origin = Origin.CLIENT,
        timestamp: int | None = None,
    ) -> None:
        append = self.states.prepare(pid, origin)
        header = self.header(
            sequence,
            offset,
            pid=pid,
            epoch=epoch,
            count=count,
            attributes=TRANSACTIONAL_BIT if txn else 0,
            timestamp=timestamp,
        )
        append.append(header)
        self.states.update(append)
        self.states.update_map_end_offset(header.next_offset)

    def marker(
        self,
        offset: int,
        *,
        pid: int = PID,
        epoch: int = 0,
        coordinator_epoch: int = 0,
        abort: bool = False,
        origin: Origin = Origin.COORDINATOR,
    ) -> CompletedTxn | None:
        append = self.states.prepare(pid, origin)
        header = self.header(-1, offset, pid=pid, epoch=epoch, attributes=TRANSACTIONAL_BIT | CONTROL_BIT)
        completed = append.append_marker(header, is_abort=abort, coordinator_epoch=coordinator_epoch)
        self.states.update(append)
        if completed is not None:
            self.states.complete_txn(completed)
        self.states.update_map_end_offset(offset + 1)
        return completed

    def entry(self, pid: int = PID) -> ProducerEntry:
        """What is known of a producer, which must be known."""
        entry = self.states.entry(pid)
        if entry is None:
            raise InvalidError(f"producer {pid} is not known in {self.folder.name}")
        return entry

    def reloaded(self, log_start: int, log_end: int, now_ms: int | None = None) -> ProducerBench:
        again = ProducerBench(self.folder, clock=self.clock)
        again.states.truncate_and_reload(
            log_start, log_end, self.clock.now_ms() if now_ms is None else now_ms
        )
        return again

    def files(self) -> list[int]:
        return sorted(int(path.name.split(".")[0]) for path in self.folder.glob("*.snapshot"))
