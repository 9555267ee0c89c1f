"""What a Spark read of a table will cover: which commit, which columns in which types, and bounds of rows.

Runs in Spark's planning processes; looks at the list of commits and at no row. Light to import, because each of
those processes does it anew.

Columns: key, window_start, window_end (not in tables of plain keys), value, timestamp, partition, offset, as the
table's own queries give them, with times as timestamps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import pyarrow as pa

from tidegate.durations import format_moment
from tidegate.errors import InvalidError, UnavailableError
from tidegate.spark.tables.options import TableOptions
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.commits import Commit, CommitList, load_commits, stored_tables
from tidegate.tables.options import Consumed, TableRules, TableShape

LATEST: Final = 2**63 - 1
LARGEST_MS: Final = (2**63 - 1) // 1000
"""The last millisecond that Spark's timestamps, which count microseconds, reach."""
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Which rows a read is about; milliseconds, both ends inclusive."""

    keys: tuple[bytes, ...] | None = None
    start_from: int = 0
    start_to: int = LATEST
    end_from: int = 0
    end_to: int = LATEST
    partitions: frozenset[int] | None = None

    @property
    def is_nothing(self) -> bool:
        return self.keys == () or self.start_from > self.start_to or self.end_from > self.end_to


EVERYTHING: Final = RowBounds()


def chosen_commit(backend: StorageBackend, options: TableOptions) -> CommitList:
    """The table's list, cut down to the one commit that is asked for."""
    name = options.table or _only_table(backend, options.state)
    found = load_commits(backend, name)
    if found is None:
        known = ", ".join(stored_tables(backend)) or "none"
        raise InvalidError(f"there is no table {name!r} in {options.state}; there are {known}")
    commits = found[0].commits
    if not commits:
        raise UnavailableError(f"table {name} has no commit yet; try again when its builder has made one")
    return msgspec.structs.replace(found[0], commits=(_chosen(commits, options, name),))


def _only_table(backend: StorageBackend, state: str) -> str:
    known = stored_tables(backend)
    if len(known) != 1:
        reason = f"there are {', '.join(known)}" if known else f"there is none in {state}"
        raise InvalidError(f"option table is missing: the table's name; {reason}")
    return known[0]


def _chosen(commits: Sequence[Commit], options: TableOptions, name: str) -> Commit:
    reach = f"there are {commits[0].number} to {commits[-1].number}"
    if options.version is not None:
        for commit in commits:
            if commit.number == options.version:
                return commit
        raise InvalidError(f"commit {options.version} of table {name} is not kept; {reach}")
    if options.moment_ms is None:
        return commits[-1]
    for commit in reversed(commits):
        if commit.committed_ms <= options.moment_ms:
            return commit
    first = format_moment(commits[0].committed_ms)
    raise InvalidError(
        f"table {name} keeps no commit as old as {format_moment(options.moment_ms)}; {reach}, the first of {first}"
    )


def rules_of(shape: TableShape, options: TableOptions) -> TableRules:
    """The stored shape with the serdes to read it with."""
    key, value = options.serde("key", shape.key_serde), options.serde("value", shape.value_serde)
    return TableRules(shape, key, value, Consumed(), "fail")


def table_schema(rules: TableRules, columns: Sequence[str] = ()) -> pa.Schema:
    """The columns of a table in types that Spark has; those asked for, in that order."""
    windows = [("window_start", TIMESTAMP), ("window_end", TIMESTAMP)] if rules.shape.is_windowed else []
    known = {
        "key": sparks_type(rules.key.arrow_type),
        **dict(windows),
        "value": sparks_type(rules.value.arrow_type),
        "timestamp": TIMESTAMP,
        "partition": pa.int32(),
        "offset": pa.int64(),
    }
    check_columns(columns, tuple(known), rules.shape.name)
    return pa.schema([(name, known[name]) for name in columns or known])


def check_columns(columns: Sequence[str], known: Sequence[str], table: str) -> None:
    for name in columns:
        if name not in known:
            raise InvalidError(f"table {table} has no column {name!r}; it has {', '.join(known)}")


def sparks_type(kind: pa.DataType) -> pa.DataType:
    """The nearest type that Spark has and that holds every value."""
    if pa.types.is_unsigned_integer(kind):
        return {8: pa.int16(), 16: pa.int32(), 32: pa.int64()}.get(kind.bit_width, pa.decimal128(20, 0))
    if pa.types.is_timestamp(kind):
        return TIMESTAMP
    if pa.types.is_list(kind):
        return pa.list_(sparks_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(each.name, sparks_type(each.type)) for each in kind])
    return kind
