"""Streams: what shall happen to the records of a topic, said step by step.

A stream is an immutable value: every call answers a new one and leaves the old as it was, so a stream can be the
start of several. Each call is checked against the columns there are at that point, before anything runs.

`.to_topic(topic)` and `.to_table(name)` are the ends: they add the steps so far to the app, as a flow. Several ends of
one stream belong to one flow, whose work is done once; flows share no work with each other.

Thread rule: values; ends change their app.
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
from tidegate.pipeline.definition.checking import Shape, check_step, source_shape
from tidegate.pipeline.definition.expressions import Projection, shown
from tidegate.pipeline.definition.inferring import described, key_serde_for
from tidegate.pipeline.definition.steps import (
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
    """Records of one topic and the steps they go through."""

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
        """The columns there are at this point."""
        return self._shape.schemas[-1]

    @property
    def key(self) -> Serde[Any]:
        """How keys are read at this point."""
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
        """Check how producers numbered and check-summed their records; it comes first.

        A corrupt record never counts: `"keep"` sets it aside as a dead letter, `"drop"` leaves it out, `"fail"` stops
        its partition there. Where records are missing, `"fail"` stops and the others count the gap and go on. A
        mapping has a word for each kind: `{"missing": "fail", "corrupt": "drop"}`. `during_push` is for faults before
        a push has ended. Producers silent for longer than `max_age` are forgotten, None for never.
        """
        require_new_names("validate(", renamed, {"on_fault": "on_error"})
        return self._then(Validate(on_error, during_push, max_age_of(max_age)))

    def filter(self, condition: Expression) -> Stream:
        """Only records for which the condition is true: `filter("amount > 0")`; null is not true."""
        return self._then(Filter(condition))

    def select(self, *columns: str, **expressions: Expression) -> Stream:
        """These columns and no others: `select("order_id", total="amount * 1.19")`; `"*"` stands for all there
        are."""
        chosen: list[tuple[str, Expression]] = []
        for name in columns:
            if not isinstance(name, str):
                raise TypeError(
                    f"select takes names of columns, and expressions under a name: {name!r} has none"
                )
            chosen += [(each, each) for each in self.schema.names] if name == ALL_COLUMNS else [(name, name)]
        chosen = [each for each in chosen if each[0] not in expressions]  # a column that is computed anew
        return self._then(Select((*chosen, *expressions.items())))

    def with_columns(self, **expressions: Expression) -> Stream:
        """All columns there are, and these besides: `with_columns(total="amount * 1.19")`. A name that exists is
        computed anew."""
        return self.select(ALL_COLUMNS, **expressions)

    def map(self, function: ArrowFunction, schema: pa.Schema) -> Stream:
        """A function from record batch to record batch with the same rows, and the columns it gives."""
        if not isinstance(schema, pa.Schema):
            raise TypeError(f"map needs the schema of what it gives as a pyarrow.Schema, not {schema!r}")
        return self._then(Map(function, schema))

    def key_by(
        self, expression: Expression, serde: Serde[Any] | None = None, *, shards: int = DEFAULT_SHARDS
    ) -> Stream:
        """Another key: a column or an expression. State after it is kept by that key, in `shards` tasks.

        The number of shards stays for the app's life, whatever engine runs it and with how many processes.
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
        """Of records with one key and the same values in these columns, keep only the first within that much event
        time.

        Records without a key are compared by these columns alone. Where the topic has several partitions, their
        copies may be anywhere, and such a record stops its partition: say `key_by` first. Records with a null in one
        of the columns have no id: they pass and are counted (`no_id`).

        A record more than `grace` (default: `within`) behind stream time cannot be told from a copy. `late="keep"`
        sets it aside in the late table (`LateSettings(…)` says for how long and how many), `"drop"` leaves it out and
        counts it, `"forward"` lets it pass. `refresh` counts the time from the last copy.
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
        """Windows of a kind; `agg` or `count` says what to compute for each.

        `emit="update"` sends a window whenever a round changed it, `"close"` once, when it is final. Records that
        come after that are late: `late="keep"` sets them aside in the late table (`LateSettings(…)` says for how long
        and how many), `"drop"` leaves them out and counts them. `future` keeps records from clocks that run ahead
        from closing windows for all others. After `idle_close` without records a silent partition is not waited for
        any more. `compat="kafka-streams"` keeps Kafka Streams' rules where ours differ (docs:
        differences-from-kafka-streams).
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
        """Columns of the row a table has for the stream's key (or for `key`), null where it has none.

        `value` is how the table's values are read; `lookup("customers", "name", town="city", value=Json(…))` takes
        `city` under the name `town`. `required` leaves records without a row out.
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
        """Send the results to a topic: of windows a windowed changelog as Kafka Streams writes it, else plain
        records.

        Values are JSON in declared order, a lone `count()` an 8-byte long, or what `value` writes. `key_format` is
        how windows stand in keys. `integrity=False` leaves out the numbering for topics that foreign programs
        validate themselves.
        """
        self._app._add(self, To(topic, key_format, value, integrity, partitions))
        return self

    def to_table(self, name: str) -> Stream:
        """Keep the windows as a table of this name, readable with `app.open_table(name)`; no topic is written for it.

        They are kept for the `retention` of the windows; where none is said for a day, or as long as they can change
        if that is more.
        """
        self._app._add(self, AsTable(name))
        return self

    # ── looking at it ────────────────────────────────────────────────────────────────────────────────────────────

    def explain(self) -> str:
        """The plan of this stream in words; `app.explain()` has that of all flows, with sizes."""
        from tidegate.pipeline.definition.explain import explain_steps

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
    """Windows without a result yet: `agg` or `count` says what to compute for each."""

    __slots__ = ("_stream", "_windows")

    def __init__(self, stream: Stream, windows: Aggregate) -> None:
        self._stream, self._windows = stream, windows

    def agg(self, /, *unnamed: AggregateDefinition, **aggregates: AggregateDefinition) -> Stream:
        """Compute these for each window: `agg(orders=count(), revenue=sum("amount"))`. Any name is allowed."""
        given = [*unnamed]
        for name, each in aggregates.items():
            if not isinstance(each, AggregateDefinition):
                raise _not_an_aggregate(name, each)
            given.append(each.named(name))
        return self._stream._then(replace(self._windows, aggregates=tuple(given)))

    def count(self, name: str = "count") -> Stream:
        """How many records each window has."""
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
    "to_topic",
    "to_table",
    "filter",
    "select",
    "with_columns",
    "map",
    "key_by",
    "drop_duplicates",
    "lookup",
    "window",
    "explain",
    "schema",
)


def _emit(emit: Emit | str) -> Emit:
    try:
        return Emit(emit)
    except ValueError:
        raise InvalidError(f"emit is {emit!r}; choose 'update' or 'close'") from None


def _late_table(call: str, late: object, more: str = "") -> LateSettings | None:
    """The late table that was asked for; None: late records are dropped."""
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
