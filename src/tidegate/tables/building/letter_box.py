"""Dead letters on their way into the table's storage: kept up to a limit of bytes, beyond it counted.

Each letter's size is reckoned from its own bytes, in the order of the topic, so which ones are kept does not depend on
how the topic was cut. A letter that is not kept is still told by the counters: `bad_keys` or `bad_values`, and
`letters_not_kept`.

Thread rule: the draining thread's.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.kernels.windows import admit_sizes
from tidegate.tables.building.source import TableSource
from tidegate.tables.serdes.dead_letters import DeadLetters

LETTER_BYTES: Final = 64  # what a letter takes beside its reason, key and value


class LetterBox:
    """Puts the dead letters of one table away."""

    def __init__(self, source: TableSource) -> None:
        self._source = source
        self._limit_bytes = source.rules.consumed.dead_letter_bytes

    def put(self, letters: DeadLetters) -> int:
        """Take all that are waiting; how many of them were not kept."""
        if not len(letters):
            return 0
        table, state = letters.take(), self._source.letters
        sizes = np.full(table.num_rows, LETTER_BYTES, np.int64)
        for name in ("reason", "key", "value"):
            sizes += pc.fill_null(pc.binary_length(table.column(name)), 0).to_numpy().astype(np.int64)
        admitted = np.empty(table.num_rows, np.uint8)
        kept_bytes = admit_sizes(sizes, state.kept_bytes, self._limit_bytes, admitted)
        kept = table.filter(pa.array(admitted.astype(np.bool_)))
        if kept.num_rows:
            runtime, task = self._source.runtime, self._source.task
            state.index.insert(runtime.writer().append(task, state, _rows(kept)))
        state.kept_bytes = kept_bytes
        return int(table.num_rows - kept.num_rows)


def _rows(letters: pa.Table) -> pa.RecordBatch:
    rows = letters.num_rows
    partitions = [number.to_bytes(4, "big") for number in letters.column("partition").to_pylist()]
    return pa.record_batch(
        {
            "key": pa.array(partitions, pa.binary()),
            "ts": pa.array(np.zeros(rows, np.int64)),
            "seq": letters.column("offset").combine_chunks(),
            "deleted": pa.array(np.zeros(rows, np.bool_)),
            "reason": letters.column("reason").combine_chunks(),
            "value": letters.column("value").combine_chunks(),
            "record_key": letters.column("key").combine_chunks(),
        }
    )
