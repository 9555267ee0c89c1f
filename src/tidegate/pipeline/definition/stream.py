"""Streams: a topic's records and the steps applied to them.

A stream is immutable: every call returns a new stream, so one stream can be the start of several. Each call is
checked against the columns at that point, before anything runs.

`.to_topic(topic)` and `.to_table(name)` are the outputs: they add the steps so far to the app, as a flow. Several
outputs of one stream belong to one flow, whose work is done once; flows share no work with each other.

Thread rule: immutable values; outputs change their app.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any, Literal, Never, TypeAlias

import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms
from tidegate.errors import InvalidError
from tidegate.integrity.state import max_age_of
from tidegate.integrity.validator import require_new_names
from tidegate.pipeline.analyzer import Shape, check_step, source_shape
from tidegate.pipeline.expressions import Projection, described, key_serde_for, shown
from tidegate.pipeline.topology import (
    Aggregate,
    ArrowFunction,
    AsTable,
    Dedupe,
    Expression,
    Filter,
    KeyBy,
    Lookup,
    Map,
    OnErrors,
    Select,
    Source,
    Step,
    To,
    Validate,
    WindowKind,
)
from tidegate.tables.serdes.base import Serde
from tidegate.windows.aggregates.definitions import AggregateDefinition
from tidegate.windows.aggregates.definitions import count as count_records
from tidegate.windows.kinds import Deduplicate
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.windowed_operator import Compat, Emit, FutureGuard

if TYPE_CHECKING:
    from tidegate.pipeline.definition.app import App

DEFAULT_SHARDS = 8
KEEP_LATE = LateSettings()
GUARD = FutureGuard()
ALL_COLUMNS = "*"
WINDOW_SETTINGS = ("emit", "late", "future", "idle_close", "compat")
Late: TypeAlias = Literal["keep", "drop"] | LateSettings


class Stream:
    """The records of one topic and the steps applied to them."""

    __slots__ = ("_app", "_shape", "_source", "_steps")

    def __init__(
        self, app: App, source: Source, steps: tuple[Step, ...] = (), shape: Shape | None = None
    ) -> None:
        self._app, self._source, self._steps = app, source, steps
        self._shape = source_shape(source) if shape is None else shape

    @property
    def source(self) -> Source:
        return self._source

    @property
    def steps(self) -> tuple[Step, ...]:
        return self._steps

    @property
    def schema(self) -> pa.Schema:
        """The columns at this point."""
        return self._shape.schemas[-1]

    @property
    def key(self) -> Serde[Any]:
        """The serde of the key at this point."""
        return self._shape.key_serdes[-1]

    # ── steps ────────────────────────────────────────────────────────────────────────────────────────────────────

    def validate(
        self,
        on_error: OnErrors = "keep",
        *,
        during_push: OnErrors = "fail",
        max_age: DurationLike | None = "7d",
        **renamed: Never,
    ) -> Stream:
        """Check the producers' numbering and checksums; this is the first step.

        A corrupt record never counts: `"keep"` stores it as a dead letter, `"drop"` leaves it out, `"fail"` stops
        its partition there. Where records are missing, `"fail"` stops and the others count the gap and continue. A
        mapping sets each kind of fault: `{"missing": "fail", "corrupt": "drop"}`. `during_push` is for faults before
        a push has ended. Producers silent for longer than `max_age` are forgotten; None keeps them for ever.
        """
        require_new_names("validate(", renamed, {"on_fault": "on_error"})
        return self._then(Validate(on_error, during_push, max_age_of(max_age)))

    def filter(self, condition: Expression) -> Stream:
        """Keep only records for which the condition is true: `filter("amount > 0")`; null is not true."""
        return self._then(Filter(condition))

    def select(self, *columns: str, **expressions: Expression) -> Stream:
        """Keep these columns and no others: `select("order_id", total="amount * 1.19")`; `"*"` stands for all."""
        chosen: list[tuple[str, Expression]] = []
        for name in columns:
            if not isinstance(name, str):
                raise TypeError(
                    f"select takes names of columns, and expressions under a name: {name!r} has none"
                )
            chosen += [(each, each) for each in self.schema.names] if name == ALL_COLUMNS else [(name, name)]
        chosen = [each for each in chosen if each[0] not in expressions]  # this column is computed anew
        return self._then(Select((*chosen, *expressions.items())))

    def with_columns(self, **expressions: Expression) -> Stream:
        """Add columns, or replace those of the same name: `with_columns(total="amount * 1.19")`."""
        return self.select(ALL_COLUMNS, **expressions)

    def map(self, function: ArrowFunction, schema: pa.Schema) -> Stream:
        """Apply a function from record batch to record batch with the same rows; `schema` names the resulting
        columns."""
        if not isinstance(schema, pa.Schema):
            raise TypeError(f"map needs the schema of what it gives as a pyarrow.Schema, not {schema!r}")
        return self._then(Map(function, schema))

    def key_by(
        self, expression: Expression, serde: Serde[Any] | None = None, *, shards: int = DEFAULT_SHARDS
    ) -> Stream:
        """Repartition by another key: a column or an expression. Later state is kept by that key, in `shards` tasks.

        The number of shards is fixed for the app's life, whichever engine runs it and with how many processes.
        """
        if serde is None:
            what = f"stream {self._source.topic}, key_by"
            kind = Projection([("key", expression)], self.schema, self.key, what=what).schema.field(0).type
            serde = key_serde_for(kind, f"{what}: {shown(expression)}")
        return self._then(KeyBy(expression, serde, shards))

    def drop_duplicates(
        self,
        columns: str | Sequence[str],
        within: DurationLike,
        *,
        grace: DurationLike | None = None,
        late: Late | Literal["forward"] = "keep",
        refresh: bool = False,
        **renamed: Never,
    ) -> Stream:
        """Keep the first of all records with the same key and the same values in these columns, within that much event
        time.

        Records without a key are compared by these columns alone. If the topic has several partitions, their copies
        may be in any of them, and such a record stops its partition: use `key_by` first. Records with a null in one
        of the columns have no id: they pass and are counted (`no_id`).

        A record more than `grace` (default: `within`) behind stream time cannot be told from a copy. `late="keep"`
        stores it in the late table (`LateSettings(…)` limits age and bytes), `"drop"` leaves it out and counts it,
        `"forward"` lets it pass. With `refresh` the time is measured from the last copy.
        """
        require_new_names("drop_duplicates(", renamed, {"keep_late": "late"})
        kept = None if late == "forward" else _late_table("drop_duplicates", late, ", 'forward'")
        passes: Literal["drop", "forward"] = "forward" if late == "forward" else "drop"
        return self._then(
            Dedupe(Deduplicate(columns, within, grace=grace, late=passes, refresh=refresh), kept)
        )

    def window(
        self,
        kind: WindowKind,
        *,
        emit: Emit | Literal["update", "close"] = Emit.UPDATE,
        late: Late = "keep",
        future: FutureGuard | None = GUARD,
        idle_close: DurationLike | None = None,
        compat: Compat | None = None,
    ) -> WindowedStream:
        """Group records into windows of a kind; `agg` or `count` says what to compute for each window.

        `emit="update"` sends a window after every round that changed it, `"close"` once, when it is final. Records
        that arrive later are late: `late="keep"` stores them in the late table (`LateSettings(…)` limits age and
        bytes), `"drop"` leaves them out and counts them. `future` guards against clocks that run ahead: records
        further in the future do not close the windows of others. After `idle_close` without records a silent
        partition is not waited for any more. `compat="kafka-streams"` keeps Kafka Streams' rules where Tidegate's
        differ (docs: differences-from-kafka-streams).
        """
        kept = _late_table("window", late)
        if future is not None and not isinstance(future, FutureGuard):
            raise InvalidError(f"future={future!r}: give FutureGuard(…), or None for no guard")
        if kept is None and future is GUARD:
            future = FutureGuard(policy="keep")
        idle_close_ms = None if idle_close is None else duration_ms(idle_close)
        return WindowedStream(
            self, Aggregate(kind, (), _emit(emit), kept, future, idle_close_ms, compat=compat)
        )

    def lookup(
        self,
        table: str,
        *columns: str,
        value: Serde[Any],
        key: Expression | None = None,
        required: bool = False,
        **renamed: str,
    ) -> Stream:
        """Join columns of the table row with the stream's key (or with `key`); they are null if there is no such row.

        `value` is the serde of the table's values. `lookup("customers", "name", town="city", value=Json(…))` adds
        `city` under the name `town`. `required` leaves out records without a row.
        """
        wanted = [(name, name) for name in columns] + [(column, name) for name, column in renamed.items()]
        return self._then(Lookup(table, value, tuple(wanted), key, required))

    # ── ends ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def to_topic(
        self,
        topic: str,
        *,
        key_format: Literal["changelog", "topic"] = "changelog",
        value: Serde[Any] | None = None,
        integrity: bool = True,
        partitions: int | None = None,
    ) -> Stream:
        """Send the results to a topic: windows as a windowed changelog like that of Kafka Streams, other results as
        plain records.

        Values are JSON in declared order, a lone `count()` is an 8-byte long; `value` sets another serde.
        `key_format` is how windows are encoded in keys. `integrity=False` omits the numbering, for topics that other
        programs validate themselves.
        """
        self._app._add(self, To(topic, key_format, value, integrity, partitions))
        return self

    def to_table(self, name: str) -> Stream:
        """Keep the windows as a table of this name, readable with `app.open_table(name)`; no topic is written for it.

        Windows are kept for their `retention`; without one, for a day or as long as they can change, whichever is
        longer.
        """
        self._app._add(self, AsTable(name))
        return self

    # ── looking at it ────────────────────────────────────────────────────────────────────────────────────────────

    def explain(self) -> str:
        """Return the plan of this stream as text; `app.explain()` has that of all flows, with sizes."""
        from tidegate.pipeline.explain import explain_steps

        return explain_steps(self._source, self._steps, self._shape)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Stream)
            and self._app is other._app
            and (self._source, self._steps) == (other._source, other._steps)
        )

    def __hash__(self) -> int:
        return hash((self._source, self._steps))

    def __repr__(self) -> str:
        return f"<Stream {self._source.topic}, {len(self._steps)} steps: {described(self.schema)}>"

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.explain())}</pre>"

    def __getattr__(self, name: str) -> Never:
        if name in RENAMED:
            raise _renamed(self, name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")

    def _then(self, step: Step) -> Stream:
        shape = check_step(self._source, self._steps, step, self._shape)
        return Stream(self._app, self._source, (*self._steps, step), shape)


class WindowedStream:
    """Windows without aggregates yet: `agg` or `count` says what to compute for each."""

    __slots__ = ("_stream", "_windows")

    def __init__(self, stream: Stream, windows: Aggregate) -> None:
        self._stream, self._windows = stream, windows

    def agg(self, /, *unnamed: AggregateDefinition, **aggregates: AggregateDefinition) -> Stream:
        """Compute these aggregates for each window: `agg(orders=count(), revenue=sum("amount"))`. Any name works."""
        given = [*unnamed]
        for name, each in aggregates.items():
            if not isinstance(each, AggregateDefinition):
                raise _not_an_aggregate(name, each)
            given.append(each.named(name))
        return self._stream._then(replace(self._windows, aggregates=tuple(given)))

    def count(self, name: str = "count") -> Stream:
        """Count the records of each window."""
        return self.agg(count_records().named(name))

    def __repr__(self) -> str:
        return f"<WindowedStream {self._stream.source.topic}, {self._windows.kind!r}: no result yet>"

    def __getattr__(self, name: str) -> Never:
        if name in RENAMED:
            raise _renamed(self._stream, name)
        if name in _NEEDS_AGGREGATE:
            raise InvalidError(
                f"windows of {self._stream.source.topic} have no result yet: say what to compute for each before "
                f".{name}(…), like .agg(orders=count())"
            )
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")


RENAMED = {"aggregate": "agg", "deduplicate": "drop_duplicates", "table": "to_table", "to": "to_topic"}


def _not_an_aggregate(name: str, given: object) -> Exception:
    if name in WINDOW_SETTINGS:
        return InvalidError(f"agg({name}={given!r}) is said of the windows now: window(…, {name}={given!r})")
    return TypeError(
        f"{name}={given!r} is no aggregate; write {name}=count(), {name}=sum('amount') and the like"
    )


def _renamed(stream: Stream, name: str) -> InvalidError:
    return InvalidError(f"stream {stream.source.topic}: .{name}(…) is .{RENAMED[name]}(…) now")


_NEEDS_AGGREGATE = (
    *("to_topic", "to_table", "filter", "select", "with_columns", "map", "key_by", "drop_duplicates"),
    *("lookup", "window", "explain", "schema"),
)


def _emit(emit: Emit | str) -> Emit:
    try:
        return Emit(emit)
    except ValueError:
        raise InvalidError(f"emit is {emit!r}; choose 'update' or 'close'") from None


def _late_table(call: str, late: object, more: str = "") -> LateSettings | None:
    """The settings of the late table; None: late records are dropped."""
    if late == "keep":
        return KEEP_LATE
    if late == "drop":
        return None
    if isinstance(late, LateSettings):
        return late
    raise InvalidError(
        f"{call}(late={late!r}): choose 'keep', 'drop'{more}, or give LateSettings(…) to say how long and how many "
        "late records are kept"
    )
