"""Check a definition against its columns, and choose the encoding of results in topics.

Each step is checked when it is added, so that an error points at the line that caused it. `validate` comes first (it
reads producers' numbers), windows come last and once, and a `key_by` in front of stateful steps before all of them.

| results | bytes in a topic |
|---|---|
| a serde was given | what it writes: of an object or record all its columns, else the one column |
| a lone `count()` | 8 bytes, big-endian, as Kafka Streams counts |
| one column of bytes called `value` | those bytes, unchanged |
| anything else | a JSON object with the columns in their declared order |

Thread rule: pure functions. User functions are called with empty batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tidegate.errors import InvalidError
from tidegate.integrity.state import NEVER
from tidegate.integrity.validator import policy_of
from tidegate.log.catalog import check_topic_name
from tidegate.pipeline.expressions import (
    VALUE,
    Mapped,
    Projection,
    described,
    is_object,
    key_serde_for,
    nearest,
    require_writable,
    shown,
    source_schema,
    unknown_column,
    value_schema,
)
from tidegate.pipeline.messages import component
from tidegate.pipeline.topology import (
    Aggregate,
    AsTable,
    Dedupe,
    Filter,
    KeyBy,
    Lookup,
    Map,
    OnErrors,
    Select,
    Sink,
    Source,
    Step,
    To,
    Validate,
    sink_name,
)
from tidegate.storage.backends.base import MAX_COMPONENT_BYTES
from tidegate.tables.serdes.base import Bytes, Long, Serde, require_raw
from tidegate.tables.serdes.json import Json, encode_objects
from tidegate.windows.aggregates.folds import RETRACTABLE, resolve
from tidegate.windows.kinds import Hopping, Session, Sliding, Unlimited
from tidegate.windows.operators.dedupe import check_columns
from tidegate.windows.operators.windowed_operator import Emit

# -- values ---------------------------------------------------------------------------------------

_UNWRITABLE = (TypeError, InvalidError, pa.ArrowInvalid, pa.ArrowNotImplementedError)


@dataclass(frozen=True, eq=False)
class ValueFormat:
    """Encodes the values of one sink; `column` is the only one written, or None for all of `columns`."""

    columns: tuple[str, ...]
    serde: Serde[Any] | None  # None: JSON
    column: str | None = None

    @classmethod
    def of(cls, sink: To, schema: pa.Schema, window: Aggregate | None) -> ValueFormat:
        """Choose and check the format; `InvalidError` names the sink and what does not fit."""
        if sink.value is not None:
            chosen = cls._given(sink, sink.value, schema)
        elif window is not None and _is_lone_count(window):
            long: Any = Long()
            chosen = cls(tuple(schema.names), long, schema.names[0])
        elif schema.names == [VALUE] and pa.types.is_binary(schema.field(0).type):
            chosen = cls((VALUE,), Bytes(), VALUE)
        else:
            chosen = cls(tuple(schema.names), None)
        chosen._try(sink, schema)
        return chosen

    @classmethod
    def _given(cls, sink: To, serde: Serde[Any], schema: pa.Schema) -> ValueFormat:
        require_raw(serde)
        if is_object(serde):
            wanted = [each.name for each in serde.arrow_type]
            for name in wanted:
                if name not in schema.names:
                    raise InvalidError(
                        f"to {sink.topic}: its value declares {name!r}, which is no column of the "
                        f"results{nearest(name, schema.names)}; they are {described(schema)}"
                    )
            return cls(tuple(wanted), serde)
        if len(schema.names) != 1:
            raise InvalidError(
                f"to {sink.topic}: {serde!r} writes one column, and the results have {len(schema.names)} "
                f"({described(schema)}); select one, or leave value= out for JSON"
            )
        return cls(tuple(schema.names), serde, schema.names[0])

    def encode(self, values: pa.RecordBatch) -> pa.BinaryArray:
        """Return the encoded values of these rows; a null only where its one column is null."""
        if self.serde is None:
            return encode_objects(values)
        if self.column is not None:
            return self.serde.encode_column(values.column(values.schema.get_field_index(self.column)))
        chosen = values.select(list(self.columns))
        return self.serde.encode_column(
            pa.StructArray.from_arrays(chosen.columns, fields=list(chosen.schema))
        )

    def read_serde(self, schema: pa.Schema) -> Serde[Any] | None:
        """Return the serde for a table over the topic that reads these values; None where JSON cannot express a
        type."""
        if self.serde is not None:
            return self.serde
        try:
            return Json(**{each.name: each.type for each in schema})
        except (InvalidError, TypeError):
            return None

    def __repr__(self) -> str:
        if self.serde is None:
            return f"JSON of {', '.join(self.columns)}"
        return repr(self.serde) if self.column is None else f"{self.column} as {self.serde.name}"

    def _try(self, sink: To, schema: pa.Schema) -> None:
        for each in schema if self.serde is None else ():
            if _has_binary(each.type):
                raise InvalidError(
                    f"to {sink.topic}: {each.name} is {each.type}, which JSON cannot say; select it as text, like "
                    f"hex({each.name}) or base64({each.name}), or give a serde as value="
                )
        try:
            if self.serde is not None and self.column is not None:
                require_writable(self.serde, schema.field(self.column).type)
            none = [pa.array([], each.type) for each in schema]
            self.encode(pa.RecordBatch.from_arrays(none, schema=schema))
        except (*_UNWRITABLE, pa.ArrowKeyError) as error:
            raise InvalidError(
                f"to {sink.topic}: results of {described(schema)} cannot be written by {self!r}: {error}"
            ) from None


def _is_lone_count(window: Aggregate) -> bool:
    only = window.aggregates[0]
    return len(window.aggregates) == 1 and only.kind == "count" and not only.columns


def _has_binary(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_binary(kind.field(place).type) for place in range(kind.num_fields))
    return bool(
        pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    )


# -- checking -------------------------------------------------------------------------------------

MAX_SHARDS = 1024
_CHOICES = {
    "on_error": ("fail", "drop", "keep"),
    "start": ("earliest", "latest"),
    "key_format": ("changelog", "topic"),
}


_UPDATES = "{topic} has a window's new value whenever it changes (emit='update')."
_ON_CLOSE = (
    "have it written with window(…, emit='close'), each window once when it is final, and read it with "
    "app.changes(…, emit='close')"
)
_A_NEW_VALUE_IS_NO_COPY = (
    "A new value is no copy of the one before it, and dropping it would leave a wrong one; leave drop_duplicates out "
    f"(one value counts for each window), or {_ON_CLOSE}"
)


@dataclass(frozen=True, eq=False)
class Shape:
    """The columns and keys at the source, then after each step."""

    schemas: tuple[pa.Schema, ...]
    key_serdes: tuple[Serde[Any], ...]

    def then(self, schema: pa.Schema, key: Serde[Any]) -> Shape:
        return Shape((*self.schemas, schema), (*self.key_serdes, key))


def source_shape(source: Source) -> Shape:
    """Check a source and return the shape of its events."""
    check_topic_name(source.topic)
    where = f"stream {source.topic}"
    for serde in (source.key, source.value):
        if serde is not None:
            require_raw(serde)
    _choice(where, "start", source.start)
    _choice(where, "on_error", source.on_error)
    schema = source_schema(source)
    twice = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if twice:
        raise InvalidError(f"{where}: its values have {', '.join(twice)} twice; declare each field once")
    if source.timestamp is not None:
        _check_timestamp(where, source.timestamp, schema)
    return Shape((schema,), (source.key,))


def check_steps(source: Source, steps: Sequence[Step]) -> Shape:
    """Check all steps in order and return the shape of events after them."""
    shape = source_shape(source)
    for place, step in enumerate(steps):
        shape = check_step(source, steps[:place], step, shape)
    return shape


def check_step(source: Source, before: Sequence[Step], step: Step, shape: Shape) -> Shape:
    """Check one step and return the shape of events after it."""
    schema, key = shape.schemas[-1], shape.key_serdes[-1]
    where = f"stream {source.topic}, {step_name(step)}"
    _check_order(where, before, step)
    match step:
        case Validate():
            _check_policy(where, "on_error", step.on_error)
            _check_policy(where, "during_push", step.during_push)
            if step.max_age_ms < NEVER:
                raise InvalidError(f"{where}: max_age is {step.max_age_ms} ms; None is never")
            return shape.then(schema, key)
        case Filter():
            kind = Projection([("condition", step.condition)], schema, key, what=where).schema.field(0).type
            if not pa.types.is_boolean(kind):
                raise InvalidError(
                    f"{where}: {shown(step.condition)} is {kind}, and a condition is true or false; write a "
                    "comparison, like amount > 0"
                )
            return shape.then(schema, key)
        case Select():
            return shape.then(_check_select(where, step, schema, key), key)
        case Map():
            Mapped(step.function, step.schema, schema, key, what=where)
            return shape.then(step.schema, key)
        case KeyBy():
            _check_key(where, step, schema, key)
            return shape.then(schema, step.serde)
        case Dedupe():
            if source.has_updates:
                raise InvalidError(
                    f"{where}: {_UPDATES.format(topic=source.topic)} {_A_NEW_VALUE_IS_NO_COPY}"
                )
            for name in step.rule.columns:
                if name not in schema.names:
                    raise unknown_column(where, name, schema)
            check_columns(step.rule.columns, schema)
            return shape.then(schema, key)
        case Aggregate():
            return shape.then(_check_aggregate(where, step, schema, source), key)
        case Lookup():
            return shape.then(_check_lookup(where, step, schema, key), key)
    raise TypeError(f"{step!r} is no step")


def check_sinks(source: Source, steps: Sequence[Step], sinks: Sequence[Sink], shape: Shape) -> None:
    """Check the outputs."""
    if not sinks:
        raise InvalidError(
            f"stream {source.topic} goes nowhere: end it with .to_topic(topic) or .to_table(name)"
        )
    names = [sink_name(sink) for sink in sinks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidError(
            f"stream {source.topic} goes to {', '.join(twice)} twice; give each end its own name"
        )
    last = steps[-1] if steps else None
    for sink in sinks:
        name = check_topic_name(sink_name(sink))
        if len(component(name)) > MAX_COMPONENT_BYTES:
            raise InvalidError(
                f"stream {source.topic} goes to a name of {len(name)} characters, {name[:40]}…; what an app writes to "
                f"has at most {MAX_COMPONENT_BYTES}, because the state of the app is kept under it"
            )
        if isinstance(sink, AsTable):
            if not isinstance(last, Aggregate):
                raise InvalidError(
                    f"table {sink.name}: only windows are kept as a table; use .window(…).agg(…) "
                    "before, or .to_topic(topic) and app.table(topic) for the last value of each key"
                )
            continue
        if sink.topic == source.topic:
            raise InvalidError(
                f"stream {source.topic} would read what it writes, for ever; send it to another topic"
            )
        _choice(f"to {sink.topic}", "key_format", sink.key_format)
        if sink.partitions is not None and sink.partitions < 1:
            raise InvalidError(f"to {sink.topic}: partitions is {sink.partitions}; at least 1")
        ValueFormat.of(sink, shape.schemas[-1], last if isinstance(last, Aggregate) else None)


def rekeying(source: Source, steps: Sequence[Step]) -> tuple[int | None, str]:
    """Return the `key_by` that repartitions records, if any, and the reason."""
    keyed = [place for place, step in enumerate(steps) if isinstance(step, KeyBy)]
    stateful = [place for place, step in enumerate(steps) if isinstance(step, Dedupe | Aggregate)]
    if not stateful:
        rest = (
            "no step keeps state"
            if not keyed
            else "no step after key_by keeps state, so records stay where they are"
        )
        return None, f"co-partitioned: {rest}"
    before = [place for place in keyed if place < stateful[-1]]
    if not before:
        return None, (
            f"co-partitioned: state is kept by the key of {source.topic}, so its partition i is task i and nothing "
            "is shuffled"
        )
    step = steps[before[-1]]
    expression = shown(step.expression) if isinstance(step, KeyBy) else ""
    return before[-1], (
        f"re-keyed: {step_name(steps[stateful[0]])} keeps state by {expression}, which is not the key of "
        f"{source.topic}, so records are brought together by their new key"
    )


def step_name(step: Step) -> str:
    """Return the name of the step as users write it."""
    match step:
        case Dedupe():
            return "drop_duplicates"
        case KeyBy():
            return "key_by"
        case Aggregate():
            return "window"
    return type(step).__name__.casefold()


def _check_order(where: str, before: Sequence[Step], step: Step) -> None:
    if any(isinstance(each, Aggregate) for each in before):
        raise InvalidError(
            f"{where}: windows are the last step of a stream; send the results somewhere with .to_topic(topic), "
            "and go on from there with app.changes(topic, …), which takes back what a window was when it changes"
        )
    if isinstance(step, Validate) and before:
        raise InvalidError(
            f"{where}: validate reads how producers numbered their records, so it comes first: stream(…).validate()"
        )
    if isinstance(step, Dedupe | Aggregate):
        kept = [place for place, each in enumerate(before) if isinstance(each, Dedupe)]
        keyed = [place for place, each in enumerate(before) if isinstance(each, KeyBy)]
        if kept and keyed and kept[0] < keyed[-1]:
            raise InvalidError(
                f"{where}: drop_duplicates stands before a key_by that this step needs, so state would be kept "
                "on both sides of a shuffle; put key_by first (copies are then found by the new key), or "
                "send the deduplicated records to a topic and read that"
            )


def _check_select(where: str, step: Select, schema: pa.Schema, key: Serde[Any]) -> pa.Schema:
    names = [name for name, _ in step.columns]
    if not names:
        raise InvalidError(f"{where}: no column is left; name at least one of {', '.join(schema.names)}")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidError(f"{where}: {', '.join(twice)} comes twice; give each column its own name")
    return Projection(step.columns, schema, key, what=where).schema


def _check_key(where: str, step: KeyBy, schema: pa.Schema, key: Serde[Any]) -> None:
    require_raw(step.serde)
    if (
        isinstance(step.shards, bool)
        or not isinstance(step.shards, int)
        or not 1 <= step.shards <= MAX_SHARDS
    ):
        raise InvalidError(f"{where}: shards is {step.shards!r}; a whole number from 1 to {MAX_SHARDS}")
    kind = Projection([("key", step.expression)], schema, key, what=where).schema.field(0).type
    try:
        require_writable(step.serde, kind)
    except _UNWRITABLE as error:
        raise InvalidError(
            f"{where}: {shown(step.expression)} is {kind}, which {step.serde!r} does not write ({error}); cast it, "
            "or give another serde"
        ) from None


def _check_aggregate(where: str, step: Aggregate, schema: pa.Schema, source: Source) -> pa.Schema:
    if not isinstance(step.kind, Hopping | Sliding | Session | Unlimited):
        raise TypeError(
            f"{where}: {step.kind!r} is no kind of window; use Tumbling, Hopping, Sliding, Session or Unlimited"
        )
    if step.compat not in (None, "kafka-streams"):
        raise InvalidError(
            f"{where}: compat is {step.compat!r}; only 'kafka-streams' is known, or leave it out"
        )
    if step.emit is Emit.CLOSE and isinstance(step.kind, Unlimited):
        raise InvalidError(f"{where}: an unlimited window never closes; use emit='update'")
    if step.future is not None and step.future.policy == "late" and step.late is None:
        raise InvalidError(
            f"{where}: the future guard sets records aside in the late table, and late='drop' leaves none; "
            "give late=LateSettings(…), or future=FutureGuard(…, policy='keep'), or future=None"
        )
    if source.has_updates and isinstance(step.kind, Session | Sliding):
        raise InvalidError(
            f"{where}: {_UPDATES.format(topic=source.topic)} {step.kind.name.capitalize()} windows lie where records "
            f"lie, so a row that changes could not be taken back out of them; {_ON_CLOSE}"
        )
    for each in step.aggregates if source.has_updates else ():
        if each.kind not in RETRACTABLE:
            raise InvalidError(
                f"{where}: {_UPDATES.format(topic=source.topic)} {each.name} = {each.kind}({', '.join(each.columns)}) "
                f"cannot take back what a window was before; {', '.join(RETRACTABLE)} can. For {each.kind}, {_ON_CLOSE}"
            )
    try:
        return resolve(step.aggregates, schema, retractable=source.has_updates).result_schema
    except InvalidError as error:
        raise InvalidError(f"{where}: {error}") from None


def _check_lookup(where: str, step: Lookup, schema: pa.Schema, key: Serde[Any]) -> pa.Schema:
    check_topic_name(step.table)
    require_raw(step.value)
    there = value_schema(step.value)
    if not step.columns:
        raise InvalidError(f"{where}: say which columns of {step.table} are wanted: {', '.join(there.names)}")
    added: list[pa.Field] = []
    for column, name in step.columns:
        if column not in there.names:
            raise unknown_column(f"{where} in {step.table}", column, there)
        if name in schema.names or name in [each.name for each in added]:
            raise InvalidError(
                f"{where}: there is a column {name!r} already; take it under another name, like "
                f"{name}_of_{step.table}={column!r}"
            )
        added.append(pa.field(name, there.field(column).type))
    if step.key is not None:
        by = Projection([("key", step.key)], schema, key, what=where)
        key_serde_for(by.schema.field("key").type, f"{where}: key")
    return pa.schema([*schema, *added])


def _check_timestamp(where: str, name: str, schema: pa.Schema) -> None:
    if name not in schema.names:
        raise unknown_column(f"{where}, timestamp", name, schema)
    kind = schema.field(name).type
    if not (pa.types.is_timestamp(kind) or pa.types.is_int64(kind)):
        raise InvalidError(
            f"{where}: timestamp={name!r} is {kind}; event time is a timestamp, or a long of milliseconds. "
            f"The columns are {described(schema)}"
        )


def _check_policy(where: str, name: str, said: OnErrors) -> None:
    try:
        policy_of(said)
    except InvalidError as error:
        raise InvalidError(f"{where}: {name} is {error}") from None


def _choice(where: str, name: str, value: object) -> None:
    allowed = _CHOICES[name]
    if value not in allowed:
        raise InvalidError(f"{where}: {name} is {value!r}; choose {', '.join(map(repr, allowed))}")
