"""Which batches a read-committed reader must not see.

A fetch comes with the aborted transactions that overlap it, as (producer id, first offset). From a
transaction's first offset on, every transactional batch of its producer is hidden, until that producer's
abort marker passes; then its next transaction is a new matter.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tidegate.log.batches.batch import Buffer
from tidegate.log.batches.batch_table import BatchTable, Flags
from tidegate.log.batches.control import ControlType, read_control


def aborted_batches(buffer: Buffer, table: BatchTable, aborted: Iterable[tuple[Any, ...]]) -> Flags:
    """A flag for each batch of the table: true when it belongs to an aborted transaction.

    Of each item of `aborted` only the first two fields are looked at. One Python step for each transactional
    batch, none for others.
    """
    hidden = np.zeros(len(table), np.bool_)
    waiting = sorted(((first_offset, producer_id) for producer_id, first_offset, *_ in aborted), reverse=True)
    aborting: set[int] = set()
    control, transactional = table.is_control, table.is_transactional & (table.producer_id >= 0)
    last_offset, producers = table.last_offset, table.producer_id
    for index in np.flatnonzero(transactional).tolist():
        while waiting and waiting[-1][0] <= last_offset[index]:
            aborting.add(waiting.pop()[1])
        producer = int(producers[index])
        if producer not in aborting:
            continue
        if not control[index]:
            hidden[index] = True
        elif read_control(buffer, int(table.position[index])).kind is ControlType.ABORT:
            aborting.discard(producer)
    return hidden
