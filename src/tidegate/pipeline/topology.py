"""The steps of a stream as values, and their recorded form.

A flow is a source, steps in order, and outputs. Steps have no behaviour: `analyzer` checks them against the columns,
`operator_chain` and `transforms` run them, `explain` describes them.

`document` turns a definition into dicts, lists, strings and numbers, so that it can be stored and compared. Its
fingerprint is BLAKE2b of the canonical JSON (sorted keys, no blanks). Paths and addresses are not part of it: an app
that moves to another folder or cluster stays the same app. A function is recorded by module, name and a digest of its
code (bytecode, constants, enclosed plain values). Another Python version changes the digest too, so `evolution` only
reports a changed function and does not refuse it.

Thread rule: immutable values and pure functions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import CellType, CodeType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.integrity.state import DEFAULT_MAX_AGE_MS
from tidegate.tables.serdes.avro import Avro
from tidegate.tables.serdes.base import Serde, WindowedSerde
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import AggregateDefinition, Reducer
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Tumbling, Unlimited
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.layout import StateLayout, dedupe_layout, window_layout
from tidegate.windows.operators.windowed_operator import Compat, Emit, FutureGuard

if TYPE_CHECKING:
    from tidegate.pipeline.flow import Flow


# -- steps ----------------------------------------------------------------------------------------

WindowKind: TypeAlias = Tumbling | Hopping | Sliding | Session | Unlimited
ArrowFunction: TypeAlias = Callable[[pa.RecordBatch], Any]
Expression: TypeAlias = "str | pc.Expression | ArrowFunction"
OnError: TypeAlias = Literal["fail", "drop", "keep"]
OnErrors: TypeAlias = "OnError | Mapping[str, OnError]"
"""One answer to every fault, or one for each kind: `{"missing": "fail"}`; a kind that is not named is kept."""


class ByContent:
    """A value that equals another of its class with the same content; functions are compared by name and code."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and document(self) == document(other)

    def __hash__(self) -> int:
        return hash(digest(document(self)))


@dataclass(frozen=True, eq=False)
class Source(ByContent):
    """A topic as a source of events: the serdes, the event time, and where a new app begins.

    `value` None: the value stays one binary column `value`. A Json with fields, or an Avro, becomes its columns; any
    other serde one column `value`. `timestamp` names a column to take event time from; None: the record's own.
    `on_error` decides about records that cannot be read or that a step fails on: their partition stops, they are
    left out and counted, or stored as dead letters.

    With `windows` the topic is the changelog of a table and its keys are windowed: an event's key is the inner key,
    and the columns `window_start` and `window_end` precede those of the value. `emit` is then what its writer sends:
    each window's new value whenever it changes, or each window once. `settles_ms` is how long after its end (in the
    writer's stream time) a window may still change, where records do not say which are final.
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
        """Whether a row of a table may occur several times, each time with its new value."""
        return self.emit is Emit.UPDATE


@dataclass(frozen=True, eq=False)
class Validate(ByContent):
    """Check producers' numbering and checksums; `on_error` decides about faults, `during_push` about those before a
    push has ended. Producers silent for longer than `max_age_ms` are forgotten, -1 for never."""

    on_error: OnErrors = "keep"
    during_push: OnErrors = "fail"
    max_age_ms: int = DEFAULT_MAX_AGE_MS


@dataclass(frozen=True, eq=False)
class Filter(ByContent):
    """Keep rows for which the condition is true."""

    condition: Expression


@dataclass(frozen=True, eq=False)
class Select(ByContent):
    """Replace the columns by these."""

    columns: tuple[tuple[str, Expression], ...]


@dataclass(frozen=True, eq=False)
class Map(ByContent):
    """Apply a function over Arrow batches that keeps the number of rows; `schema` describes its result."""

    function: ArrowFunction
    schema: pa.Schema


@dataclass(frozen=True, eq=False)
class KeyBy(ByContent):
    """Repartition by another key: a column or an expression, written by `serde`. Later state is kept by shards."""

    expression: Expression
    serde: Serde[Any]
    shards: int = 8


@dataclass(frozen=True, eq=False)
class Dedupe(ByContent):
    """Keep the first of all records that are the same event."""

    rule: Deduplicate
    late: LateSettings | None = None
    layout: StateLayout | None = None  # of an existing store; None: chosen by the rule


@dataclass(frozen=True, eq=False)
class Aggregate(ByContent):
    """Windows of one kind, and the aggregates of their records."""

    kind: WindowKind
    aggregates: tuple[AggregateDefinition, ...]
    emit: Emit = Emit.UPDATE
    late: LateSettings | None = None
    future: FutureGuard | None = None
    idle_close_ms: int | None = None
    layout: StateLayout | None = None  # of an existing store; None: chosen by the kind
    compat: Compat | None = None  # whose rules apply where they differ; None: Tidegate's


@dataclass(frozen=True, eq=False)
class Lookup(ByContent):
    """Join columns of the table row with the same key, as of one commit of the table; null where there is none."""

    table: str  # the table's name in the app's state
    value: Serde[Any]  # of the table's values
    columns: tuple[tuple[str, str], ...]  # column of the table's value → name here
    key: Expression | None = None  # None: the stream's key
    required: bool = False  # rows without a match are left out


Step: TypeAlias = Validate | Filter | Select | Map | KeyBy | Dedupe | Aggregate | Lookup


@dataclass(frozen=True, eq=False)
class To(ByContent):
    """Write results to a topic: a windowed changelog after windows, plain records otherwise."""

    topic: str
    key_format: Literal["changelog", "topic"] = "changelog"
    value: Serde[Any] | None = None  # None: JSON in declared order; a lone count() an 8-byte long
    integrity: bool = True
    partitions: int | None = None  # of a topic created here; None: one for each task


@dataclass(frozen=True)
class AsTable:
    """Keep the committed windows as a table of this name."""

    name: str


Sink: TypeAlias = To | AsTable


def sink_name(sink: Sink) -> str:
    """The name of a sink in its app: the topic's or the table's."""
    return sink.topic if isinstance(sink, To) else sink.name


# -- fingerprint ----------------------------------------------------------------------------------

Document = dict[str, Any]
LAYOUTS = "layouts"
_PLAIN = (bool, int, float, str, bytes, type(None))


def canonical(document: Any) -> bytes:
    """Return the canonical bytes of a document."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(document: Any) -> str:
    return hashlib.blake2b(canonical(document), digest_size=16).hexdigest()


def flow_document(flow: Flow) -> Document:
    """Return the full definition of a flow, with the layouts of its existing stores."""
    return {
        "name": flow.name,
        "source": document(flow.source),
        "steps": [document(step) for step in flow.steps],
        "sinks": [document(sink) for sink in flow.sinks],
        LAYOUTS: {name: layout(flow.steps[place]) for place, name in flow.operators.items()},
    }


def flow_digest(said: Document) -> str:
    """Return the fingerprint of a flow's document; layouts of existing stores do not change it."""
    return digest({name: value for name, value in said.items() if name != LAYOUTS})


def layout(step: Any) -> Document:
    """Return the widths of an operator's stores, and the number of aggregates of earlier states."""
    match step:
        case Aggregate():
            chosen = step.layout or window_layout(step.kind)
        case Dedupe():
            chosen = step.layout or dedupe_layout(step.rule)
        case _:
            raise TypeError(f"{step!r} keeps no state")
    laid: Document = {"bucket_ms": chosen.bucket_ms, "segment_ms": chosen.segment_ms}
    if step.late is not None:
        laid["late_segment_ms"] = step.late.segment_ms
        if step.late.lacking:
            laid["late_lacking"] = [list(names) for names in step.late.lacking]
    if chosen.grown_from:
        laid["grown_from"] = list(chosen.grown_from)
    return laid


class AbsentFunction:
    """Stands for a function that only the app's program has: it answers nulls, so that types are known."""

    __name__ = "of the program"

    def __init__(self, answer: pa.DataType | pa.Schema) -> None:
        self._answer = answer

    def __call__(self, batch: pa.RecordBatch) -> Any:
        if isinstance(self._answer, pa.DataType):
            return pa.nulls(batch.num_rows, self._answer)
        nulls = [pa.nulls(batch.num_rows, field.type) for field in self._answer]
        return pa.RecordBatch.from_arrays(nulls, schema=self._answer)


def needs_program(step: Step) -> bool:
    """Whether a step of a recorded flow calls a function that only the app's program has."""
    called = step.condition if isinstance(step, Filter) else step.function if isinstance(step, Map) else None
    return isinstance(called, AbsentFunction)


def document(said: Any) -> Document:
    """Return a source, a step or a sink as plain values."""
    match said:
        case Source():
            return {
                "step": "source",
                "topic": said.topic,
                "key": serde(said.key),
                "value": None if said.value is None else serde(said.value),
                "timestamp": said.timestamp,
                "start": said.start,
                "on_bad": "skip"
                if said.on_error == "drop"
                else said.on_error,  # stored this way since the first release
                "windows": None if said.windows is None else serde(said.windows),
                **({} if said.emit is None else {"emit": str(said.emit), "settles_ms": said.settles_ms}),
            }
        case Validate():
            return {
                "step": "validate",
                "on_error": _policy(said.on_error),
                "during_push": _policy(said.during_push),
                "max_age_ms": said.max_age_ms,
            }
        case Filter():
            return {"step": "filter", "condition": expression(said.condition)}
        case Select():
            columns = [[name, expression(each)] for name, each in said.columns]
            return {"step": "select", "columns": columns}
        case Map():
            return {"step": "map", "function": function(said.function), "schema": schema(said.schema)}
        case KeyBy():
            return {
                "step": "key_by",
                "expression": expression(said.expression),
                "serde": serde(said.serde),
                "shards": said.shards,
            }
        case Dedupe():
            rule = said.rule
            return {
                "step": "deduplicate",
                "columns": list(rule.columns),
                "within_ms": rule.within_ms,
                "grace_ms": rule.grace_ms,
                "late": rule.late,
                "refresh": rule.refresh,
                "keep_late": _late(said),
            }
        case Aggregate():
            return {
                "step": "aggregate",
                "kind": window(said.kind),
                "aggregates": [aggregate(each) for each in said.aggregates],
                "emit": str(said.emit),
                "keep_late": _late(said),
                "future": None if said.future is None else [said.future.ahead_ms, said.future.policy],
                "idle_close_ms": said.idle_close_ms,
                **({} if said.compat is None else {"compat": said.compat}),
            }
        case Lookup():
            return {
                "step": "lookup",
                "table": said.table,
                "value": serde(said.value),
                "columns": [list(each) for each in said.columns],
                "key": None if said.key is None else expression(said.key),
                "required": said.required,
            }
        case To():
            return {
                "step": "to",
                "topic": said.topic,
                "key_format": said.key_format,
                "value": None if said.value is None else serde(said.value),
                "integrity": said.integrity,
                "partitions": said.partitions,
            }
        case AsTable():
            return {"step": "table", "name": said.name}
    raise TypeError(f"{said!r} is no step of a flow")


def window(kind: Any) -> Document:
    """Return a kind of windows as plain values; durations in milliseconds."""
    match kind:
        case Hopping():
            lengths = {"size_ms": kind.size_ms, "advance_ms": kind.advance_ms}
        case Sliding():
            lengths = {"difference_ms": kind.difference_ms}
        case Session():
            lengths = {"gap_ms": kind.gap_ms}
        case Unlimited():
            return {"kind": "unlimited", "start_ms": kind.start_ms}
        case _:
            raise TypeError(
                f"{kind!r} is no kind of window; use Tumbling, Hopping, Sliding, Session or Unlimited"
            )
    name = "hopping" if isinstance(kind, Hopping) else kind.name
    return {"kind": name, **lengths, "grace_ms": kind.grace_ms, "retention_ms": kind.retention_ms}


def aggregate(definition: AggregateDefinition) -> Document:
    options = {
        name: _reducer(value) if isinstance(value, Reducer) else value for name, value in definition.options
    }
    return {
        "name": definition.name,
        "kind": definition.kind,
        "columns": list(definition.columns),
        "options": options,
    }


def serde(said: Any) -> Any:
    """Return what a serde reads and writes; the address of its registry does not count."""
    match said:
        case Json():
            return {"json": [[name, _field(said.schema.field(name))] for name in said.fields]}
        case Avro():
            return {"avro": json.loads(said.text), "subject": said.subject}
        case WindowedSerde():
            return {
                "windowed": serde(said.inner),
                "size_ms": said.size_ms,
                "key_format": said.key_format.value,
            }
    kind = type(said)
    if kind.__module__.startswith("tidegate."):
        return str(said.name)
    return {"serde": f"{kind.__module__}:{kind.__qualname__}", "type": str(said.arrow_type)}


def schema(said: pa.Schema) -> list[Any]:
    return [[each.name, _field(each)] for each in said]


def expression(said: Any) -> Any:
    """Return SQL as written, an Arrow expression as Arrow prints it, a function by name and code."""
    if isinstance(said, str):
        return {"sql": said.strip()}
    if isinstance(said, pc.Expression):
        return {"arrow": str(said)}
    return function(said)


def function(said: Any) -> Document:
    wrapped = getattr(said, "func", None)  # functools.partial
    inner = wrapped if callable(wrapped) else said
    code = getattr(inner, "__code__", None)
    if code is None:
        kind = inner if isinstance(inner, type) else type(inner)
        if hasattr(inner, "__qualname__"):
            kind = inner
        return {"function": f"{getattr(kind, '__module__', '')}:{kind.__qualname__}", "code": None}
    enclosed = [_enclosed(cell) for cell in getattr(inner, "__closure__", None) or ()]
    given = [*getattr(said, "args", ()), *sorted(getattr(said, "keywords", {}).items())]
    defaults = getattr(inner, "__defaults__", None) or ()
    parts = [
        *_code_parts(code),
        *(repr(value) for value in enclosed if isinstance(value, _PLAIN)),
        *map(repr, given),
        *(repr(value) for value in defaults if isinstance(value, _PLAIN)),
    ]
    return {
        "function": f"{inner.__module__}:{inner.__qualname__}",
        "code": hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest(),
    }


def _enclosed(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that was never bound
        return ...


def without_code(said: Any) -> Any:
    """Return a document in which functions are identified by their names alone."""
    if isinstance(said, Mapping):
        is_function = "function" in said and "code" in said
        kept = (name for name in said if not (is_function and name == "code"))
        return {name: without_code(said[name]) for name in kept}
    return [without_code(value) for value in said] if isinstance(said, list) else said


def _reducer(made: Reducer) -> Document:
    return {
        "state": str(made.state),
        "result": str(made.result),
        "version": made.version,
        "merge": function(made.merge),
        "partial": None if made.partial is None else function(made.partial),
        "finish": None if made.finish is None else function(made.finish),
    }


def _late(said: Dedupe | Aggregate) -> list[int] | None:
    return None if said.late is None else [said.late.retention_ms, said.late.max_bytes]


def _field(said: pa.Field) -> str:
    return f"{said.type}" + ("" if said.nullable else " not null")


def _code_parts(code: CodeType) -> Iterator[str]:
    """Yield the code of a function without its location; docstrings are constants and count."""
    yield code.co_code.hex()
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code_parts(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(constant, key=repr))
        else:
            yield repr(constant)


def _policy(said: OnErrors) -> Any:
    return said if isinstance(said, str) else dict(sorted(said.items()))
