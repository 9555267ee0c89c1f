"""Which transaction a batch belongs to, followed through one cleaning of a partition.

Owns the memory of a pass: transactions begun and not yet ended, and for each aborted one whether any of its
data batches was met. From that it answers two questions, batch by batch in offset order: is this data batch
part of an aborted transaction, and may this end marker go? It decides nothing about time: a marker that may
go still waits for its delete horizon.

Invariants:
A1  A marker may go only when no data batch of its transaction was met in this pass, emptied ones included.
A2  An aborted transaction stays in the new transaction index exactly while its marker may not go.

Thread rule: one cleaning, one tracker.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from tidegate.log.segments.transaction_index import AbortedTxn


class MarkerKind(Enum):
    """What a control batch says; `EMPTIED` is one that an earlier pass left without its record."""

    ABORT = "abort"
    COMMIT = "commit"
    OTHER = "other"
    EMPTIED = "emptied"


@dataclass(slots=True)
class _OngoingAbort:
    transaction: AbortedTxn
    data_seen: bool = False


@dataclass(slots=True)
class CleanedTransactions:
    """Feed it every transactional data batch and every control batch of the range, in order."""

    _committing: set[int] = field(default_factory=set)
    _aborting: dict[int, _OngoingAbort] = field(default_factory=dict)
    _announced: list[tuple[int, int, AbortedTxn]] = field(default_factory=list)

    def announce(self, aborted: Iterable[AbortedTxn]) -> None:
        """Aborted transactions of the range ahead; the same one may be announced again."""
        for transaction in aborted:
            entry = (transaction.first_offset, transaction.last_offset, transaction)
            heapq.heappush(self._announced, entry)

    def data(self, *, producer_id: int, last_offset: int) -> bool:
        """A transactional data batch: whether its transaction was aborted."""
        self._begin_up_to(last_offset)
        ongoing = self._aborting.get(producer_id)
        if ongoing is None:
            self._committing.add(producer_id)
            return False
        ongoing.data_seen = True
        return True

    def marker(
        self, kind: MarkerKind, *, producer_id: int, last_offset: int
    ) -> tuple[bool, AbortedTxn | None]:
        """A control batch: whether it may go, and the aborted transaction that stays indexed (A1, A2)."""
        self._begin_up_to(last_offset)
        if kind is MarkerKind.EMPTIED:
            return True, None
        if kind is MarkerKind.ABORT:
            ongoing = self._aborting.pop(producer_id, None)
            if ongoing is not None and ongoing.data_seen:
                return False, ongoing.transaction
            return True, None
        if kind is MarkerKind.COMMIT:
            met = producer_id in self._committing
            self._committing.discard(producer_id)
            return not met, None
        return False, None

    def _begin_up_to(self, offset: int) -> None:
        while self._announced and self._announced[0][0] <= offset:
            _, _, transaction = heapq.heappop(self._announced)
            self._aborting.setdefault(transaction.producer_id, _OngoingAbort(transaction))
