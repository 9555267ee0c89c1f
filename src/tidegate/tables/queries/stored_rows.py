"""What a table over a topic answers from: the rows of its partitions, live or as a commit left them.

Thread rule: from any thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.errors import UnsupportedError
from tidegate.tables.building.partition_state import EARLIEST
from tidegate.tables.building.source import TableSource
from tidegate.tables.queries.reading import LATEST, KeyEnds, all_rows, rows_of_key, rows_of_keys
from tidegate.tables.queries.results import StoredForm


class StoredRows:
    """`RowSource` over a `TableSource`."""

    def __init__(self, source: TableSource) -> None:
        self.source = source
        self.kind = source.rules.shape.kind
        self.form = StoredForm(source.rules)

    def encoded(self, key: Any) -> bytes | None:
        return self.source.rules.key.encode(key)

    def find(self, keys: Sequence[bytes], first: int, last: int) -> list[pa.RecordBatch]:
        if self.kind == "key":
            first = last = 0
        end = LATEST if self.kind == "session" else last
        if len(keys) == 1:
            found = rows_of_key(self.source, keys[0], first, end)
        else:
            found = rows_of_keys(self.source, keys, first, end)
        return self._started(found, last)

    def scan(
        self, first: int, last: int, *, keys: KeyEnds | None = None, batch_rows: int = 1 << 16
    ) -> Iterator[pa.RecordBatch]:
        if self.kind == "key":
            first, last = EARLIEST, LATEST
        end = LATEST if self.kind == "session" else last
        found = all_rows(self.source, first, end, keys=keys, batch_rows=batch_rows)
        return (rows for batch in found for rows in self._started([batch], last) if rows.num_rows)

    def late(self) -> pa.Table:
        raise UnsupportedError(
            f"table {self.form.name} keeps no late records: records of windows that have expired are counted in "
            f"`counts.expired`, and lie in topic {self.source.rules.shape.topic}"
        )

    def dead_letters(self) -> pa.Table:
        return self.source.dead_letters()

    def _started(self, batches: list[pa.RecordBatch], last: int) -> list[pa.RecordBatch]:
        """Of sessions those that start at `last` or before."""
        if self.kind != "session" or last == LATEST:
            return batches
        return [batch.filter(pc.less_equal(batch.column("seq"), last)) for batch in batches]
