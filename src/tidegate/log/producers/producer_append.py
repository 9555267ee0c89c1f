"""One producer's part in one append: is it in order, and what is known of the producer afterwards.

Owns the rules of idempotent and transactional writing (sequence, epoch and coordinator checks). It changes
nothing but itself: `ProducerStates.update` takes over the outcome once the bytes are written, so a refused or
failed append leaves no trace.

    origin        data batches                                   end markers
    CLIENT        epoch, sequence and transaction checks         epoch and coordinator epoch
    COORDINATOR   epoch and transaction checks                   epoch and coordinator epoch
    REPLICATION   none: they were made when the leader wrote     none; oddities are logged
"""

from __future__ import annotations

import logging
from dataclasses import replace
from enum import Enum
from typing import NamedTuple

from tidegate.errors import FencedError, InvalidError
from tidegate.log.format.batch import MAX_SEQUENCE, NO_SEQUENCE, BatchHeader
from tidegate.log.producers.producer_snapshot import NO_EPOCH, BatchMetadata, ProducerEntry

_log = logging.getLogger(__name__)


class Origin(Enum):
    """Who appends, which decides how much is checked."""

    CLIENT = "client"
    REPLICATION = "replication"
    COORDINATOR = "coordinator"


class CompletedTxn(NamedTuple):
    """A transaction and the marker that ended it; offsets inclusive, `last_offset` is the marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    is_aborted: bool


class ProducerAppend:
    """Checks the batches of one producer in one append, in order, and gathers their effect."""

    def __init__(
        self,
        partition: str,
        current: ProducerEntry,
        origin: Origin,
    ) -> None:
        self.origin = origin
        self._partition = partition
        self._current = current
        self._entry = replace(current, batches=())
        self._started: list[int] = []

    @property
    def producer_id(self) -> int:
        return self._current.producer_id

    @property
    def entry(self) -> ProducerEntry:
        """The producer after this append, with the batches of this append only."""
        return self._entry

    @property
    def started(self) -> tuple[int, ...]:
        """The first offsets of transactions that began in this append."""
        return tuple(self._started)

    def append(self, header: BatchHeader) -> None:
        """Take a data batch whose header carries its final offsets."""
        epoch, first_offset = header.producer_epoch, header.base_offset
        self._check_epoch(epoch, first_offset)
        if self.origin is Origin.CLIENT:
            self._check_sequence(epoch, header.base_sequence, first_offset)
        open_txn = self._entry.txn_first_offset
        if open_txn is not None and not header.is_transactional:
            self._refuse_outside_transaction(first_offset, open_txn)
        batch = BatchMetadata(
            header.last_sequence, header.last_offset, header.last_offset_delta, header.max_timestamp
        )
        self._entry = self._entry.with_batch(epoch, batch)
        if open_txn is None and header.is_transactional:
            self._entry = replace(self._entry, txn_first_offset=first_offset)
            self._started.append(first_offset)

    def append_marker(
        self, header: BatchHeader, *, is_abort: bool, coordinator_epoch: int
    ) -> CompletedTxn | None:
        """Take an end marker; the transaction it ended, None when none was open."""
        offset = header.base_offset
        self._check_epoch(header.producer_epoch, offset)
        self._check_coordinator_epoch(coordinator_epoch, offset)
        first_offset = self._entry.txn_first_offset
        self._entry = self._entry.with_marker(header.producer_epoch, coordinator_epoch, header.max_timestamp)
        if first_offset is None:
            return None
        return CompletedTxn(self.producer_id, first_offset, offset, is_abort)

    # -- the rules -------------------------------------------------------------------------------

    def _check_epoch(self, epoch: int, offset: int) -> None:
        if epoch >= self._entry.epoch:
            return
        message = (
            f"producer {self.producer_id} wrote to {self._partition} at offset {offset} in epoch {epoch}, "
            f"but epoch {self._entry.epoch} is known: a newer producer has taken over; stop this one"
        )
        if self.origin is not Origin.REPLICATION:
            raise FencedError(message, kafka_name="INVALID_PRODUCER_EPOCH")
        _log.warning(message)

    def _check_sequence(self, epoch: int, sequence: int, offset: int) -> None:
        if epoch != self._entry.epoch:
            if sequence != 0 and self._entry.epoch != NO_EPOCH:
                raise self._out_of_order(
                    offset, sequence, f"its new epoch {epoch} (after {self._entry.epoch}) must start with 0"
                )
            return
        if self._current.epoch == NO_EPOCH:
            return  # nothing was known before this append: any sequence may come
        last = self._last_sequence(epoch)
        if sequence != last + 1 and not (sequence == 0 and last == MAX_SEQUENCE):
            raise self._out_of_order(offset, sequence, f"the last one is {last}")

    def _last_sequence(self, epoch: int) -> int:
        if self._entry.batches:
            return self._entry.last_sequence
        return self._current.last_sequence if epoch == self._current.epoch else NO_SEQUENCE

    def _check_coordinator_epoch(self, coordinator_epoch: int, offset: int) -> None:
        if coordinator_epoch >= self._entry.coordinator_epoch:
            return
        message = (
            f"the end marker of producer {self.producer_id} at offset {offset} of {self._partition} has "
            f"coordinator epoch {coordinator_epoch}, but {self._entry.coordinator_epoch} is known: "
            f"a newer coordinator has taken over; stop this one"
        )
        if self.origin is not Origin.REPLICATION:
            raise FencedError(message, kafka_name="TRANSACTION_COORDINATOR_FENCED")
        _log.warning(message)

    def _refuse_outside_transaction(self, offset: int, open_txn: int) -> None:
        message = (
            f"producer {self.producer_id} wrote outside a transaction at offset {offset} of {self._partition}"
            f" while its transaction from offset {open_txn} is open; end that one first"
        )
        if self.origin is not Origin.REPLICATION:
            raise InvalidError(message, kafka_name="INVALID_TXN_STATE")
        _log.warning(message)

    def _out_of_order(self, offset: int, sequence: int, why: str) -> InvalidError:
        return InvalidError(
            f"producer {self.producer_id} sent sequence {sequence} to {self._partition} (offset {offset}), "
            f"but {why}: a batch is missing or came twice; resend from the first unacknowledged batch",
            kafka_name="OUT_OF_ORDER_SEQUENCE_NUMBER",
        )
