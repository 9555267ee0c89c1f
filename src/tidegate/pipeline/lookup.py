"""Lookups: join events with a table's rows by key, and keep the tables of an app up to date.

A round reads the newest commit that exists when it is planned, and the same commit when it is repeated. A table built
by another process must keep that commit while the round runs (tables keep their last ten).

Keys are written with the table's serde: text for text or bytes, whole numbers of any width for `Int` and `Long`,
numbers that fit a double for `Double`. A number that the table's keys cannot hold has no row. Types that cannot match
are refused (`require_key`). Each distinct key of a batch is looked up once, in one plan.

`TableCommits` runs before planning, at most once a second: it advances tables that no other process builds, from
their last commit or from the topic of their name. `lags` gives, for each table, how many records of its topic the
newest commit has not seen. A table that cannot be built here is read as it is, and the reason is logged.

Thread rule: a lookup belongs to its task's thread, `TableCommits` to the coordinator's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tidegate.clock import Clock
from tidegate.errors import FencedError, InvalidError, TidegateError, UnavailableError
from tidegate.pipeline.expressions import Projection, key_serde_for, one_array, shown
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.log_end_offsets import LogEndOffsets
from tidegate.pipeline.topology import Lookup
from tidegate.randomness import Randomness
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.commits import DEFAULT_TTL_MS, CommitList, load_commits
from tidegate.tables.ingest.materializer import Cadence, Claim, Materialiser
from tidegate.tables.options import Consumed, TableRules, table_rules
from tidegate.tables.queries import rows_of_keys
from tidegate.tables.serdes.base import Bytes, Serde
from tidegate.tables.serdes.json import serde_from, stored_serde
from tidegate.tables.snapshot import StoredSnapshot, stored_snapshot, task_of
from tidegate.windows.events import EventBatch

_PLAIN_KEYS: Final = frozenset({"bytes", "string", "int", "long", "double"})


class LookupStage:
    """Adds columns of a table's rows to events."""

    def __init__(
        self, step: Lookup, schema: pa.Schema, key: Serde[Any], backend: StorageBackend, clock: Clock
    ) -> None:
        self.table = step.table
        self._step, self._backend, self._clock = step, backend, clock
        self._serde, self._key_kind = key, lookup_key(step, schema, key)
        self._stored: Serde[Any] | None = None
        self._expression: Projection | None = None
        if step.key is not None:
            self._expression = Projection([("key", step.key)], schema, key, what="lookup")
        self._columns = lookup_columns(step)
        self._schema = pa.schema([*schema, *self._columns])
        self._snapshot: StoredSnapshot | None = None

    def at(self, commit: int) -> None:
        """Read this commit of the table from now on."""
        if self._snapshot is not None and self._snapshot.commit.number == commit:
            return
        known = table_commits(self._backend, self.table)
        found = next((each for each in known.commits if each.number == commit), None)
        if found is None:
            raise UnavailableError(
                f"commit {commit} of table {self.table}, which this round looks into, is not kept any more; there are "
                f"{known.commits[0].number} to {known.commits[-1].number}. Start the app again: it plans the round anew"
            )
        if self._snapshot is not None:
            self._snapshot.show(found, {task_of(known.shape): found.token})
            return
        if known.shape.kind != "key":
            raise InvalidError(
                f"table {self.table} holds windows; a lookup needs a table of plain keys, like app.table(topic)"
            )
        self._stored = require_key(self._step, self._key_kind, self._serde, known.shape.key_serde)
        rules = TableRules(known.shape, Bytes(), self._step.value, Consumed(), "fail")
        self._snapshot = stored_snapshot(self._backend, rules, found, clock=self._clock)

    def __call__(self, events: EventBatch) -> EventBatch:
        if self._snapshot is None:
            raise InvalidError(f"a round that looks into table {self.table} names no commit of it")
        keys = self._keys(events).dictionary_encode()
        found = pa.Table.from_batches(
            rows_of_keys(self._snapshot.source, keys.dictionary, 0, 0) or [_NO_ROWS]
        )
        place = pc.take(pc.index_in(keys.dictionary, found["key"].combine_chunks()), keys.indices)
        if self._step.required:
            kept = place.is_valid().to_numpy(zero_copy_only=False)
            events, place = events.take(kept), place.filter(pa.array(kept))
        decoded = self._step.value.decode_column(one_array(found["value"])).require_good()
        columns = [*events.values.columns]
        for (wanted, _), field in zip(self._step.columns, self._columns, strict=True):
            column = pc.struct_field(decoded, wanted) if pa.types.is_struct(decoded.type) else decoded
            columns.append(column.take(place).cast(field.type))
        return events.with_values(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def close(self) -> None:
        if self._snapshot is not None:
            self._snapshot.close()

    def _keys(self, events: EventBatch) -> pa.Array:
        if self._expression is not None:
            (column,) = self._expression.arrays(events)
            return stored_keys(column, self._stored or key_serde_for(column.type, "lookup"))
        if self._stored is None:
            return events.key
        return stored_keys(self._serde.decode_column(events.key).require_good(), self._stored)


def lookup_key(step: Lookup, schema: pa.Schema, key: Serde[Any]) -> pa.DataType:
    """Return the type of the lookup key; `InvalidError` for types that have no byte encoding."""
    if step.key is None:
        return key.arrow_type
    kind = Projection([("key", step.key)], schema, key, what="lookup").schema.field("key").type
    key_serde_for(kind, f"lookup in {step.table}: key")
    return kind


def require_key(step: Lookup, kind: pa.DataType, key: Serde[Any], stored: str) -> Serde[Any] | None:
    """Return the serde that writes keys of this type to find rows of the table; None: as the stream's own bytes.

    `stored` is the table's key serde. `InvalidError` where keys of the two types can never be equal.
    """
    there = serde_from(stored)
    if step.key is None and (stored == repr(key) or isinstance(key, Bytes) or isinstance(there, Bytes)):
        return None
    if there is not None and _meets(kind, there.arrow_type) and there.name in _PLAIN_KEYS:
        return there
    by = "the stream's key" if step.key is None else f"key {shown(step.key)}"
    raise InvalidError(
        f"lookup in {step.table}: {by} is {kind}, and the table has keys of {stored}, so no row would ever be found. "
        f'Cast it, like lookup({step.table!r}, …, key="CAST(… AS {_sql_type(there)})"), or build the table with the '
        "key serde that its topic has"
    )


def stored_keys(column: pa.Array, serde: Serde[Any]) -> pa.BinaryArray:
    """Return keys as the table has them; null where the table's type cannot hold one, so there is no such row."""
    wanted = serde.arrow_type
    if pa.types.is_integer(column.type) and pa.types.is_integer(wanted):
        here, there = np.iinfo(column.type.to_pandas_dtype()), np.iinfo(wanted.to_pandas_dtype())
        if here.max > there.max or here.min < there.min:
            fits = pc.and_(
                pc.less_equal(column, pa.scalar(min(here.max, there.max), column.type)),
                pc.greater_equal(column, pa.scalar(max(here.min, there.min), column.type)),
            )
            column = pc.if_else(fits, column, pa.scalar(None, column.type))
        return serde.encode_column(column.cast(wanted))
    if pa.types.is_floating(wanted):
        return serde.encode_column(column.cast(wanted))
    return column.cast(pa.string()).cast(pa.binary()) if _is_text(column.type) else column.cast(pa.binary())


def _meets(kind: pa.DataType, there: pa.DataType) -> bool:
    """Whether a value of one type can equal one of the other, without loss."""
    if _is_text(there) or _is_bytes(there):
        return _is_text(kind) or _is_bytes(kind)
    if pa.types.is_integer(there):
        return bool(pa.types.is_integer(kind))
    if pa.types.is_integer(kind):  # a double holds whole numbers of up to 53 bits
        return bool(kind.bit_width <= 32)
    return bool(pa.types.is_floating(kind))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _sql_type(serde: Serde[Any] | None) -> str:
    names = {"int": "INTEGER", "long": "BIGINT", "double": "DOUBLE", "bytes": "BLOB"}
    return names.get("" if serde is None else serde.name, "VARCHAR")


def lookup_columns(step: Lookup) -> list[pa.Field]:
    """Return the columns that a lookup adds: null where the table has no row."""
    kind = step.value.arrow_type
    if not pa.types.is_struct(kind):
        return [pa.field(name, kind) for _, name in step.columns]
    return [pa.field(name, kind.field(wanted).type) for wanted, name in step.columns]


def table_commits(backend: StorageBackend, table: str) -> CommitList:
    """Return the commits of a table; `UnavailableError` before the first."""
    found = load_commits(backend, table)
    if found is None or not found[0].commits:
        raise UnavailableError(
            f"there is no commit of table {table} to look into yet; build it first, in the state of this app: "
            f"app.table({table!r}, …)"
        )
    return found[0]


_NO_ROWS = pa.record_batch({"key": pa.array([], pa.binary()), "value": pa.array([], pa.binary())})


REFRESH_MS: Final = 1000
IDLE_MS: Final = 10_000
_CADENCE: Final = Cadence(commit_interval_ms=60_000)

logger = logging.getLogger(__name__)


class TableCommits:
    """The commits of lookup tables, as planning needs them; this process keeps some of the tables up to date."""

    def __init__(
        self,
        backend: StorageBackend,
        log: Any,
        heads: LogEndOffsets,
        flows: Iterable[Flow],
        *,
        clock: Clock,
        randomness: Randomness,
    ) -> None:
        self._backend = backend
        self.lags: dict[str, int] = {}
        self._log, self._heads = log, heads
        self._clock, self._randomness = clock, randomness
        self._looked_ms: int | None = None
        self._builders: dict[str, Materialiser] = {}
        self._left: set[str] = set()  # tables that cannot be built here
        self._wanted: dict[str, tuple[Lookup, Serde[Any]]] = {}
        for flow in flows:
            for place, step in enumerate(flow.steps):
                if isinstance(step, Lookup):
                    key = flow.key_serdes[place]
                    kind = lookup_key(step, flow.schemas[place], key)
                    known = load_commits(backend, step.table)
                    if known is not None and known[0].shape.kind == "key":
                        require_key(step, kind, key, known[0].shape.key_serde)
                    own = key if step.key is None else key_serde_for(kind, "lookup")
                    self._wanted.setdefault(step.table, (step, own))

    def newest(self) -> dict[str, int]:
        """Return the newest commit of each table; `UnavailableError` if one has none yet."""
        now_ms = self._clock.monotonic_ms()
        if self._looked_ms is None or now_ms - self._looked_ms >= REFRESH_MS:
            for name in self._wanted:
                self._refresh(name)
            self._looked_ms = self._clock.monotonic_ms()
        return {
            table: table_commits(self._backend, table).commits[-1].number for table in sorted(self._wanted)
        }

    def are_kept(self, planned: Mapping[str, int]) -> bool:
        """Whether a plan's commits can still be read: a table keeps only its last ones."""
        return all(
            any(each.number == number for each in table_commits(self._backend, table).commits)
            for table, number in planned.items()
        )

    def close(self) -> None:
        """Close the tables that are built here."""
        for name in list(self._builders):
            self._let_go(name)

    def _refresh(self, name: str) -> None:
        try:
            builder = self._builders.get(name) or self._claimed(name)
            if builder is not None:
                builder.advance_to(builder.end_offsets(), IDLE_MS)
                builder.commit()
                builder.commit_if_due()  # renews the lease
        except FencedError:
            self._let_go(name)  # another process builds it now
        except TidegateError as error:
            self._let_go(name)
            self._left.add(name)
            logger.warning("table %s, which is looked up, cannot be kept up to date here: %s", name, error)
        known = load_commits(self._backend, name)
        lag = None if known is None else records_behind(self._heads, known[0])
        self.lags.pop(name, None)
        if lag is not None:
            self.lags[name] = lag

    def _claimed(self, name: str) -> Materialiser | None:
        """Take the lease to build the table, if it is free; None where it cannot be built here."""
        rules = None if name in self._left else self._rules(name)
        if rules is None:
            return None
        builder = Claim(
            self._log,
            rules,
            self._backend,
            cadence=_CADENCE,
            storage=None,
            lease_ttl_ms=DEFAULT_TTL_MS,
            clock=self._clock,
            randomness=self._randomness,
            scheduler=None,
        ).attempt()
        if builder is not None:
            self._builders[name] = builder
        return builder

    def _rules(self, name: str) -> TableRules | None:
        """The table's definition; None where its topic is not in this log, or it is not a table of plain keys."""
        known = load_commits(self._backend, name)
        topic = name if known is None else known[0].shape.topic
        partitions = self._heads.partitions(topic)
        if partitions is None:
            return None
        if known is None:
            step, key = self._wanted[name]
            consumed = Consumed(key, step.value, isolation="read_committed")
            return table_rules("key", topic, tuple(range(partitions)), consumed=consumed)
        shape = known[0].shape
        if shape.kind != "key" or (known[0].commits and records_behind(self._heads, known[0]) is None):
            return None
        key, value = stored_serde(shape.key_serde), stored_serde(shape.value_serde)
        return TableRules(shape, key, value, Consumed(isolation="read_committed"), "fail")

    def _let_go(self, name: str) -> None:
        builder = self._builders.pop(name, None)
        if builder is not None:
            with suppress(TidegateError):
                builder.close()
            builder.source.runtime.close()


def table_lags(
    log: Any, backend: StorageBackend, tables: Iterable[str]
) -> Iterator[tuple[str, CommitList | None, int | None]]:
    """Yield each table with its commits (None before the first) and its lag (None where the topic is not in the
    log)."""
    heads = LogEndOffsets(log)
    for table in tables:
        found = load_commits(backend, table)
        known = None if found is None or not found[0].commits else found[0]
        yield table, known, None if known is None else records_behind(heads, known)


def records_behind(heads: LogEndOffsets, known: CommitList) -> int | None:
    """Count the records that the newest commit has not seen; None where the topic is not the one it was built from."""
    shape = known.shape
    there = heads.partitions(shape.topic)
    if there is None or not known.commits or max(shape.partitions, default=0) >= there:
        return None
    ends, seen = heads.of(shape.topic, there), known.commits[-1].positions
    if any(offset > ends[number].end for number, offset in seen.items()):
        return None
    return sum(ends[number].end - seen.get(number, 0) for number in shape.partitions)
