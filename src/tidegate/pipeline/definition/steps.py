"""What a stream can be asked to do, one value for each step; no behaviour.

A flow is a source, steps in order, and sinks. `checking` holds it against the columns there are, `tasks/` turns it
into operators, `explain` into words. Steps are compared and hashed by what they say, so that an app that is started
again can be told from one that was changed.

Thread rule: values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.integrity.state import DEFAULT_MAX_AGE_MS
from tidegate.tables.serdes.base import Serde, WindowedSerde
from tidegate.windows.aggregates.definitions import AggregateDefinition
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Tumbling, Unlimited
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.layout import StateLayout
from tidegate.windows.operators.windowed_operator import Compat, Emit, FutureGuard

WindowKind: TypeAlias = Tumbling | Hopping | Sliding | Session | Unlimited
ArrowFunction: TypeAlias = Callable[[pa.RecordBatch], Any]
Expression: TypeAlias = "str | pc.Expression | ArrowFunction"
OnError: TypeAlias = Literal["fail", "drop", "keep"]
OnErrors: TypeAlias = "OnError | Mapping[str, OnError]"
"""One answer to every fault, or one for each kind: `{"missing": "fail"}`; a kind that is not named is kept."""


class ByContent:
    """Equal to another value of its class that says the same; functions are compared by name and code."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        from tidegate.pipeline.definition.fingerprint import document

        return type(self) is type(other) and document(self) == document(other)

    def __hash__(self) -> int:
        from tidegate.pipeline.definition.fingerprint import digest, document

        return hash(digest(document(self)))


@dataclass(frozen=True, eq=False)
class Source(ByContent):
    """A topic as events: how keys and values are read, which time counts, where a new app begins.

    `value` None: the value stays one binary column `value`. A Json with fields, or an Avro, becomes its columns; any
    other serde one column `value`. `timestamp` names a column to take event time from; None: the record's own.
    `on_error` is what happens to records that cannot be read or that a step fails on: their partition stops, they are
    left out and counted, or kept as dead letters.

    With `windows` the topic is the changelog of a table: its keys are read by it, an event's key is the key inside,
    and the columns `window_start` and `window_end` come before those of the value. `emit` is then what its writer
    sends: each window's new value whenever it changes, or each window once. `settles_ms` is for how long after its end
    (in the writer's stream time) a window may still change, where records do not say which are final.
    """

    topic: str
    key: Serde[Any]
    value: Serde[Any] | None
    timestamp: str | None = None
    start: Literal["earliest", "latest"] = "earliest"
    on_error: OnError = "fail"
    windows: WindowedSerde[Any] | None = None
    emit: Emit | None = None
    settles_ms: int = 0

    @property
    def has_updates(self) -> bool:
        """Whether one row of a table may come several times, each time with its new value."""
        return self.emit is Emit.UPDATE


@dataclass(frozen=True, eq=False)
class Validate(ByContent):
    """Producers' numbering and checksums are followed; `on_error` is what a fault does, `during_push` what it does
    before a push has ended. Producers silent for longer than `max_age_ms` are forgotten, -1 for never."""

    on_error: OnErrors = "keep"
    during_push: OnErrors = "fail"
    max_age_ms: int = DEFAULT_MAX_AGE_MS


@dataclass(frozen=True, eq=False)
class Filter(ByContent):
    """Only rows for which it is true."""

    condition: Expression


@dataclass(frozen=True, eq=False)
class Select(ByContent):
    """These columns instead of those there were."""

    columns: tuple[tuple[str, Expression], ...]


@dataclass(frozen=True, eq=False)
class Map(ByContent):
    """A function over Arrow batches, of the same number of rows; `schema` is what it gives."""

    function: ArrowFunction
    schema: pa.Schema


@dataclass(frozen=True, eq=False)
class KeyBy(ByContent):
    """Another key: a column, or an expression, written by `serde`. State after it is kept by shards."""

    expression: Expression
    serde: Serde[Any]
    shards: int = 8


@dataclass(frozen=True, eq=False)
class Dedupe(ByContent):
    """Of records that are one event, the first goes on."""

    rule: Deduplicate
    late: LateSettings | None = None
    layout: StateLayout | None = None  # of a store from before; None: what suits the rule


@dataclass(frozen=True, eq=False)
class Aggregate(ByContent):
    """Windows of one kind, and what is made of the records in them."""

    kind: WindowKind
    aggregates: tuple[AggregateDefinition, ...]
    emit: Emit = Emit.UPDATE
    late: LateSettings | None = None
    future: FutureGuard | None = None
    idle_close_ms: int | None = None
    layout: StateLayout | None = None  # of a store from before; None: what suits the kind
    compat: Compat | None = None  # whose rules apply where they differ; None: Tidegate's


@dataclass(frozen=True, eq=False)
class Lookup(ByContent):
    """Columns of a table's row with the same key, as one commit of the table has them; null where there is none."""

    table: str  # the table's name in the app's state
    value: Serde[Any]  # of the table's values
    columns: tuple[tuple[str, str], ...]  # column of the table's value → name here
    key: Expression | None = None  # None: the stream's key
    required: bool = False  # rows without a match are left out


Step: TypeAlias = Validate | Filter | Select | Map | KeyBy | Dedupe | Aggregate | Lookup


@dataclass(frozen=True, eq=False)
class To(ByContent):
    """Results as records of a topic: a windowed changelog after windows, plain records otherwise."""

    topic: str
    key_format: Literal["changelog", "topic"] = "changelog"
    value: Serde[Any] | None = None  # None: JSON in declared order; a lone count() an 8-byte long
    integrity: bool = True
    partitions: int | None = None  # of a topic made here; None: one for each task


@dataclass(frozen=True)
class AsTable:
    """The committed state of the windows, readable under this name."""

    name: str


Sink: TypeAlias = To | AsTable


def sink_name(sink: Sink) -> str:
    """What a sink is called in its app: the topic's or the table's name."""
    return sink.topic if isinstance(sink, To) else sink.name
