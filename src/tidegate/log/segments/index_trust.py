"""Whether what stands beside a log segment may be believed; decided once, on first use.

Where an offset index says a batch begins, the batch found there proves or refutes it. What cannot be proved
that way: a time index (a flipped timestamp would skip records), a transaction index (a flipped producer id
would show an aborted one), and the offset index as a bound. So their first use compares the file with the
segment's seal. Without a seal (another program's folder, a segment somebody else is writing) the first two are
not used: walking the headers of one segment is the price of a right answer; and a transaction index is held to
its own order.

Owns the decision, not the consequence. Decisions are kept; any thread may ask.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tidegate.errors import CorruptError
from tidegate.files import Files
from tidegate.log.segments.offset_index import OffsetIndex
from tidegate.log.segments.seals import Seal, read_seal, sum_file
from tidegate.log.segments.time_index import TimeIndex
from tidegate.log.segments.transaction_index import TransactionIndex

logger = logging.getLogger("tidegate.log")


class IndexTrust:
    """What a log segment's seal says about the files beside it."""

    __slots__ = (
        "_are_transactions_sound",
        "_base_offset",
        "_files",
        "_folder",
        "_is_seal_read",
        "_seal",
        "_sound",
    )

    def __init__(self, folder: Path, base_offset: int, *, files: Files) -> None:
        self._folder = folder
        self._base_offset = base_offset
        self._files = files
        self._seal: Seal | None = None
        self._is_seal_read = False
        self._sound: dict[str, bool] = {}
        self._are_transactions_sound = False

    def seal(self, size: int) -> Seal | None:
        """The segment's seal, if it has a readable one that speaks of a `.log` of this size."""
        if not self._is_seal_read:
            try:
                self._seal = read_seal(self._files, self._folder, self._base_offset)
            except CorruptError as error:
                logger.warning("%s; the log segment's own batches are read instead", error)
            self._is_seal_read = True
        seal = self._seal
        return seal if seal is not None and seal.files[".log"].size == size else None

    def is_sound(self, index: OffsetIndex | TimeIndex, size: int) -> bool:
        """Whether what the index says may be believed without proof."""
        kind = index.path.suffix
        if kind not in self._sound:
            seal = self.seal(size)
            sound = seal is not None and sum_file(self._files, index.path) == seal.files.get(kind)
            if seal is not None and not sound:
                logger.warning("%s is damaged and not used; the log segment is walked instead", index.path)
            self._sound[kind] = sound
        return self._sound[kind]

    def require_sound(self, index: TransactionIndex, size: int) -> None:
        """Raise unless the transaction index may be believed."""
        if self._are_transactions_sound:
            return
        seal = self.seal(size)
        if seal is None:
            index.sanity_check()
        elif sum_file(self._files, index.path) != seal.files.get(".txnindex"):
            raise CorruptError(
                f"{index.path} was changed since it was sealed, so aborted transactions cannot be told from "
                f"committed ones; remove it and the seal beside it and reopen the log to rebuild it",
                path=index.path,
            )
        self._are_transactions_sound = True
