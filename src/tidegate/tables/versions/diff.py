"""Compare two versions: keys gained, lost and changed, with examples of each, and the verdicts.

Rows are compared in shares of the keys, so that memory is bounded by `share_bytes` and not by the versions: partition
by partition where both have as many, and within these by a hash of the key. A share is one join over whole columns;
keys and values are compared by their bytes.

Thread rule: pure functions, except for reading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.log.writer import partitions_of_column
from tidegate.tables.versions.catalog import TableVersion
from tidegate.tables.versions.reader import VersionSnapshot, view_version

if TYPE_CHECKING:
    from tidegate.clock import Clock
    from tidegate.storage.backends.base import StorageBackend

EXAMPLES: Final = 5
SHARE_BYTES: Final = 256 << 20
_ROW: Final = pa.schema([("key", pa.binary()), ("value", pa.binary())])


@dataclass(frozen=True, slots=True)
class Changed:
    """One key that differs; None where a side does not have it."""

    key: bytes
    before: bytes | None
    after: bytes | None


@dataclass(slots=True)
class Difference:
    """What would change in a table if the second version replaced the first."""

    before: TableVersion
    after: TableVersion
    same: int = 0
    gained: int = 0
    lost: int = 0
    changed: int = 0
    examples: dict[str, list[Changed]] = field(default_factory=dict)

    @property
    def is_none(self) -> bool:
        return not (self.gained or self.lost or self.changed)

    @property
    def verdicts(self) -> dict[str, tuple[int, int]]:
        """The validation counts of both versions, side by side."""
        names = sorted({*self.before.verdicts, *self.after.verdicts})
        return {name: (self.before.verdicts.get(name, 0), self.after.verdicts.get(name, 0)) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as plain values."""
        return {
            "before": self.before.name,
            "after": self.after.name,
            "rows": [self.before.rows, self.after.rows],
            "same": self.same,
            "gained": self.gained,
            "lost": self.lost,
            "changed": self.changed,
            "verdicts": {name: list(both) for name, both in self.verdicts.items()},
            "examples": {
                kind: [{"key": each.key, "before": each.before, "after": each.after} for each in found]
                for kind, found in self.examples.items()
            },
        }


def diff_versions(
    backend: StorageBackend,
    before: TableVersion,
    after: TableVersion,
    *,
    examples: int = EXAMPLES,
    share_bytes: int = SHARE_BYTES,
    clock: Clock | None = None,
) -> Difference:
    """Compare two versions that are ready; keep `examples` of each kind of difference, the first by key."""
    found = Difference(before, after)
    one, other = view_version(backend, before, clock=clock), view_version(backend, after, clock=clock)
    try:
        for left, right in _shares(one, other, share_bytes):
            _compare(found, left, right, examples)
    finally:
        one.close()
        other.close()
    return found


def _shares(
    one: VersionSnapshot, other: VersionSnapshot, share_bytes: int
) -> Iterator[tuple[pa.Table, pa.Table]]:
    """Yield the rows of both sides, share by share; a key is in the same share of both."""
    alike = one.commit.version.partitions == other.commit.version.partitions
    groups: list[list[int] | None] = (
        [[number] for number in range(one.commit.version.partitions)] if alike else [None]
    )
    largest = max(one.commit.version.nbytes, other.commit.version.nbytes) // len(groups)
    shares = 1 + largest // share_bytes
    for group in groups:
        for share in range(shares):
            yield _rows(one, group, share, shares), _rows(other, group, share, shares)


def _rows(view: VersionSnapshot, group: list[int] | None, share: int, shares: int) -> pa.Table:
    source, batches = view.source, []
    for state in source.partitions:
        if group is not None and state.partition not in group:
            continue
        with state.store.open_scan(0, columns=["key", "value"]) as scan:
            for batch in scan:
                rows = batch.select(["key", "value"])
                if shares > 1:
                    rows = rows.filter(pa.array(partitions_of_column(rows.column("key"), shares) == share))
                if rows.num_rows:
                    batches.append(pa.RecordBatch.from_arrays(rows.columns, schema=_ROW))
    return pa.Table.from_batches(batches, _ROW)


def _compare(found: Difference, left: pa.Table, right: pa.Table, examples: int) -> None:
    joined = left.rename_columns(["key", "before"]).join(
        right.rename_columns(["key", "after"]), "key", join_type="full outer"
    )
    had, has = joined["before"].is_valid(), joined["after"].is_valid()
    equal = pc.fill_null(pc.equal(joined["before"], joined["after"]), False)
    kinds = {
        "gained": pc.and_not(has, had),
        "lost": pc.and_not(had, has),
        "changed": pc.and_not(pc.and_(had, has), equal),
    }
    found.same += _count(equal)
    for kind, mask in kinds.items():
        count = _count(mask)
        setattr(found, kind, getattr(found, kind) + count)
        if count and examples:
            _note(found.examples.setdefault(kind, []), joined.filter(mask), examples)


def _note(noted: list[Changed], rows: pa.Table, examples: int) -> None:
    """Keep the first by key, of those noted before and these."""
    order = pc.sort_indices(rows["key"].combine_chunks())[:examples]
    noted += [Changed(row["key"], row["before"], row["after"]) for row in rows.take(order).to_pylist()]
    noted.sort(key=lambda each: each.key)
    del noted[examples:]


def _count(mask: pa.ChunkedArray) -> int:
    return int(pc.sum(mask).as_py() or 0)
