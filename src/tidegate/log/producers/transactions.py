"""The transactions of one partition that readers of committed records must not pass yet.

Pure state, no files: which transactions are open, which are complete but whose marker the high watermark has
not passed, and so the first unstable offset. `producer_state` feeds it; it knows nothing of sequences.
Thread rule: belongs to its partition's owner.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import NamedTuple

from tidegate.errors import InvalidError


class CompletedTxn(NamedTuple):
    """A transaction and the marker that ended it; offsets inclusive, `last_offset` is the marker's."""

    producer_id: int
    first_offset: int
    last_offset: int
    is_aborted: bool


@dataclass(frozen=True, slots=True)
class OpenTxn:
    """A transaction that began at `first_offset`."""

    producer_id: int
    first_offset: int


class Transactions:
    """Open transactions and complete ones that are not replicated yet, by first offset."""

    def __init__(self) -> None:
        self._open: dict[int, OpenTxn] = {}
        self._open_order: list[int] = []
        self._unreplicated: dict[int, CompletedTxn] = {}

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the earliest transaction begins that is open or not replicated yet."""
        undecided = self.first_undecided_offset
        if not self._unreplicated:
            return undecided
        unreplicated = min(self._unreplicated)
        return unreplicated if undecided is None else min(undecided, unreplicated)

    @property
    def first_undecided_offset(self) -> int | None:
        """Where the earliest open transaction begins."""
        return self._open_order[0] if self._open_order else None

    @property
    def oldest_open(self) -> OpenTxn | None:
        return self._open[self._open_order[0]] if self._open_order else None

    @property
    def has_unreplicated(self) -> bool:
        return bool(self._unreplicated)

    def begin(self, txn: OpenTxn) -> None:
        if txn.first_offset not in self._open:
            insort(self._open_order, txn.first_offset)
        self._open[txn.first_offset] = txn

    def last_stable_offset(self, completed: CompletedTxn) -> int:
        """What is stable once `completed` ended: up to the earliest open transaction of another producer."""
        for first_offset in self._open_order:
            if self._open[first_offset].producer_id != completed.producer_id:
                return first_offset
        return completed.last_offset + 1

    def complete(self, completed: CompletedTxn) -> None:
        """Close an open transaction; it stays unstable until the high watermark passes its marker."""
        if self._open.pop(completed.first_offset, None) is None:
            raise InvalidError(
                f"the transaction of producer {completed.producer_id} at offset {completed.first_offset} "
                f"cannot end at {completed.last_offset}: it is not open",
                kafka_name="INVALID_TXN_STATE",
            )
        del self._open_order[bisect_left(self._open_order, completed.first_offset)]
        self._unreplicated[completed.first_offset] = completed

    def on_high_watermark(self, offset: int) -> None:
        """Forget complete transactions whose marker lies before `offset`."""
        if self._unreplicated:
            self._unreplicated = {
                first_offset: txn
                for first_offset, txn in self._unreplicated.items()
                if txn.last_offset >= offset
            }

    def clear(self) -> None:
        self._open.clear()
        self._open_order.clear()
        self._unreplicated.clear()
