"""A flow: one source, its steps in order, its outputs, and everything derived from them.

A `Flow` that exists is valid: names and types fit and it can run. It has the columns after each step, whether records
are repartitioned (`rekey_at`), the number of tasks, the names of stateful operators, and the fingerprint. Workers
receive flows as they are, so a flow holds no connection, file or lock.

The functions at the end return what an app knows about the topics it writes: serdes, kind of table and window size.
Asking for another kind of table over such a topic is refused. For other topics keys default to text and values to
bytes.

Thread rule: immutable values and pure functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from tidegate.durations import DurationLike, duration_ms, format_duration
from tidegate.errors import InternalError, InvalidError
from tidegate.pipeline.analyzer import Shape, ValueFormat, check_sinks, check_steps, rekeying
from tidegate.pipeline.topology import (
    Aggregate,
    AsTable,
    Dedupe,
    KeyBy,
    Lookup,
    Sink,
    Source,
    Step,
    To,
    WindowKind,
    canonical,
    flow_digest,
    flow_document,
    sink_name,
)
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Serde, String
from tidegate.windows.kinds import Hopping, Session, Sliding, Unlimited, as_table
from tidegate.windows.operators.windowed_operator import Emit


@dataclass(frozen=True, eq=False, repr=False)
class Flow:
    """Source, steps and sinks; equal to any flow with the same definition."""

    source: Source
    steps: tuple[Step, ...]
    sinks: tuple[Sink, ...]
    schemas: tuple[pa.Schema, ...] = field(init=False)
    """The columns of the source, then those after each step."""
    key_serdes: tuple[Serde[Any], ...] = field(init=False)
    """The key serde at the source, then after each step."""
    rekey_at: int | None = field(init=False)
    """Which step is the `KeyBy` whose records must be brought together by their new key, if there is one."""
    why: str = field(init=False)
    """Why it is co-partitioned or re-keyed, in a sentence."""

    def __post_init__(self) -> None:
        if self.tables and self.window is not None:  # a table needs stored windows to be read
            kept = replace(self.window, kind=as_table(self.window.kind))
            object.__setattr__(self, "steps", (*self.steps[:-1], kept))
        shape: Shape = check_steps(self.source, self.steps)
        check_sinks(self.source, self.steps, self.sinks, shape)
        rekey_at, why = rekeying(self.source, self.steps)
        object.__setattr__(self, "schemas", shape.schemas)
        object.__setattr__(self, "rekey_at", rekey_at)
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "key_serdes", shape.key_serdes)

    @property
    def name(self) -> str:
        """The name of the first sink: the flow's state is kept under it."""
        return sink_name(self.sinks[0])

    @property
    def window(self) -> Aggregate | None:
        """The step that makes windows, if any: it is the last."""
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Aggregate) else None

    @property
    def result(self) -> Literal["windows", "events"]:
        return "events" if self.window is None else "windows"

    @property
    def result_schema(self) -> pa.Schema:
        """The columns of the results; after windows the aggregates, without key and bounds."""
        return self.schemas[-1]

    @property
    def key_serde(self) -> Serde[Any]:
        """The key serde of the results."""
        return self.key_serdes[-1]

    @property
    def shards(self) -> int | None:
        """The number of tasks of a re-keyed flow, fixed for the app's life; None: one for each source partition."""
        step = None if self.rekey_at is None else self.steps[self.rekey_at]
        return step.shards if isinstance(step, KeyBy) else None

    @property
    def is_stateful(self) -> bool:
        return bool(self.operators)

    @cached_property
    def is_ordered(self) -> bool:
        """Whether events of several source partitions meet in a step whose result depends on their order.

        These are `drop_duplicates`, sessions and a user's own `reduce` behind a `key_by`. Other aggregates of other
        windows give the same result in any order.
        """
        if self.rekey_at is None:
            return False
        window = self.window
        return any(isinstance(step, Dedupe) for step in self.steps) or (
            window is not None
            and (isinstance(window.kind, Session) or any(each.kind == "reduce" for each in window.aggregates))
        )

    @cached_property
    def operators(self) -> dict[int, str]:
        """The steps that keep state, with the names of their stores; stateless steps may be added or removed."""
        names: dict[int, str] = {}
        dedupes = 0
        for place, step in enumerate(self.steps):
            if isinstance(step, Dedupe):
                dedupes += 1
                names[place] = "dedupe" if dedupes == 1 else f"dedupe{dedupes}"
            elif isinstance(step, Aggregate):
                names[place] = "windows"
        return names

    @property
    def topics(self) -> tuple[To, ...]:
        """The sinks that are topics."""
        return tuple(sink for sink in self.sinks if isinstance(sink, To))

    @property
    def tables(self) -> tuple[AsTable, ...]:
        """The sinks that are tables."""
        return tuple(sink for sink in self.sinks if isinstance(sink, AsTable))

    def tasks(self, partitions: int) -> int:
        """Return the number of tasks for so many source partitions."""
        return partitions if self.shards is None else self.shards

    @cached_property
    def document(self) -> dict[str, Any]:
        """The definition as plain values, for storing, comparing and display."""
        return flow_document(self)

    @cached_property
    def fingerprint(self) -> str:
        """A digest that is equal for equal definitions, in any process."""
        return flow_digest(self.document)

    @property
    def description(self) -> bytes:
        """The document as canonical JSON: it is stored, and `evolution.compare` reads it later."""
        return canonical(self.document)

    def value_format(self, sink: To) -> ValueFormat:
        """Return the encoder of values for one of the topics."""
        return ValueFormat.of(sink, self.result_schema, self.window)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        plan = "co-partitioned" if self.rekey_at is None else f"re-keyed over {self.shards} tasks"
        return f"<Flow {self.name}: {self.source.topic} → {len(self.steps)} steps → {self.result}, {plan}>"


# -- facts ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FlowFacts:
    """One flow. `kept_ms` is how long after the newest event any of its state can be freed by time alone."""

    name: str
    topic: str
    partitions: int
    tasks: int
    is_rekeyed: bool = False
    start: Literal["earliest", "latest"] = "earliest"
    idle_close_ms: int | None = None
    kept_ms: int | None = None  # None: nothing is freed by time
    is_stateful: bool = True
    has_windows: bool = True
    is_ordered: bool = False  # events of all source partitions are processed in one order
    keeps_bad: bool = False  # a record that a step fails on is dropped or kept; else its partition stops
    lookups: tuple[str, ...] = ()
    upstream: tuple[str, ...] = ()  # flows of the same app that write what this one reads


def all_facts(flows: Sequence[Flow], partitions_of: Callable[[str], int | None]) -> dict[str, FlowFacts]:
    """Return the facts of all flows of an app. A source that does not exist yet and is written by another flow will
    have as many partitions as that flow writes; `partitions_of` returns None for it."""
    writers = {sink.topic: (flow, sink) for flow in flows for sink in flow.topics}
    found: dict[str, FlowFacts] = {}

    def facts(flow: Flow) -> FlowFacts:
        if flow.name not in found:
            topic = flow.source.topic
            writer = writers.get(topic)
            partitions = partitions_of(topic)
            if partitions is None:
                if writer is None:
                    raise InternalError(f"topic {topic} has no partitions and no flow that writes it")
                partitions = writer[1].partitions or facts(writer[0]).tasks
            upstream = () if writer is None else (writer[0].name,)
            found[flow.name] = facts_of(flow, partitions, upstream)
        return found[flow.name]

    return {flow.name: facts(flow) for flow in flows}


def facts_of(flow: Flow, partitions: int, upstream: tuple[str, ...] = ()) -> FlowFacts:
    """Return the facts of a flow whose source has so many partitions."""
    window = flow.window
    return FlowFacts(
        name=flow.name,
        topic=flow.source.topic,
        partitions=partitions,
        tasks=flow.tasks(partitions),
        is_rekeyed=flow.rekey_at is not None,
        start=flow.source.start,
        idle_close_ms=None if window is None else window.idle_close_ms,
        kept_ms=_kept_ms(flow),
        is_stateful=flow.is_stateful,
        has_windows=window is not None,
        is_ordered=flow.is_ordered,
        keeps_bad=flow.source.on_error != "fail",
        lookups=tuple(sorted({step.table for step in flow.steps if isinstance(step, Lookup)})),
        upstream=upstream,
    )


def _kept_ms(flow: Flow) -> int | None:
    spans = []
    for step in flow.steps:
        if isinstance(step, Dedupe):
            spans.append(step.rule.retention_ms)
        elif isinstance(step, Aggregate) and not isinstance(step.kind, Unlimited):
            spans.append(step.kind.retention_ms + step.kind.grace_ms)
    return max(spans, default=None)


# -- topics the app writes -------------------------------------------------------------------------

TableKind: TypeAlias = Literal["windowed_table", "sessioned_table", "table"]


def find(flows: Sequence[Flow], topic: str) -> tuple[Flow, To] | None:
    """Return the flow that writes a topic, and that output."""
    for flow in flows:
        for sink in flow.topics:
            if sink.topic == topic:
                return flow, sink
    return None


def check_kind(flows: Sequence[Flow], topic: str, wanted: TableKind) -> None:
    """Refuse to read results as another kind of table."""
    known = find(flows, topic)
    if known is None:
        return
    window = known[0].window
    fitting: TableKind = "table"
    if window is not None:
        fitting = "sessioned_table" if isinstance(window.kind, Session) else "windowed_table"
    if fitting != wanted:
        holds = "plain records" if window is None else f"{window.kind.name} windows"
        raise InvalidError(f"{topic} holds {holds}: use app.{fitting}({topic!r}, …)")


def window_size(flows: Sequence[Flow], topic: str, size: DurationLike | None) -> DurationLike:
    """Return the window size of a topic, given or known; if both, they must agree."""
    known = find(flows, topic)
    here = None if known is None or known[0].window is None else _size_ms(known[0].window.kind)
    if size is None:
        if here is None:
            raise InvalidError(
                f"windowed_table({topic!r}): give window_size=, which is not in the topic's bytes"
            )
        return format_duration(here)
    if here is not None and duration_ms(size) != here:
        raise InvalidError(
            f"windowed_table({topic!r}): window_size is {format_duration(duration_ms(size))}, but the app "
            f"makes windows of {format_duration(here)}; leave it out"
        )
    return size


def changelog(
    flows: Sequence[Flow], topic: str, emit: Emit | str | None, grace: DurationLike | None
) -> tuple[Emit, int]:
    """Return how a changelog is written, and how long after its end a window may change: given or known."""
    known = find(flows, topic)
    window = None if known is None else known[0].window
    try:
        written = (Emit.UPDATE if window is None else window.emit) if emit is None else Emit(emit)
    except ValueError:
        raise InvalidError(f"changes of {topic}: emit is {emit!r}; choose 'update' or 'close'") from None
    if grace is None:
        return written, 0 if window is None else settles_ms(window)
    return written, duration_ms(grace)


def settles_ms(window: Aggregate) -> int:
    """Return how long after its end a window's rows may still be sent, by the largest timestamp sent before."""
    kind = window.kind
    if window.emit is Emit.CLOSE or isinstance(kind, Unlimited):
        return 0  # rows are sent in the order of their windows' ends
    if isinstance(kind, Session):
        return kind.gap_ms + kind.grace_ms
    return kind.grace_ms + (1 if isinstance(kind, Sliding) else 0)


def check_reading(flows: Sequence[Flow]) -> None:
    """Refuse flows that read another flow's output as another kind: their results would be wrong."""
    for flow in flows:
        known = find(flows, flow.source.topic)
        window = None if known is None else known[0].window
        source = flow.source
        if window is None or not flow.is_stateful:
            continue
        if source.windows is None:
            raise InvalidError(
                f"{source.topic} has {window.kind.name} windows, whose keys and changes app.stream does not know: read "
                f"it with app.changes({source.topic!r}, …)"
            )
        if isinstance(window.kind, Unlimited):
            raise InvalidError(
                f"{source.topic} has unlimited windows, which have no end to go by in other windows; read it with "
                f"app.table, or window the records that it is made of"
            )
        size = None if isinstance(window.kind, Session) else _size_ms(window.kind)
        if source.windows.size_ms != size:
            said, made = (
                "sessions" if each is None else f"windows of {format_duration(each)}"
                for each in (source.windows.size_ms, size)
            )
            raise InvalidError(f"changes of {source.topic} are read as {said}, and the app writes {made}")
        if source.emit is not window.emit:
            raise InvalidError(
                f"changes of {source.topic} are read as emit={str(source.emit)!r}, and the app writes them with "
                f"emit={str(window.emit)!r}: leave emit= out of app.changes, after the flow that writes the topic"
            )


def _size_ms(kind: WindowKind) -> int | None:
    if isinstance(kind, Hopping):
        return kind.size_ms
    return kind.difference_ms if isinstance(kind, Sliding) else None


def key_format(flows: Sequence[Flow], topic: str) -> str:
    known = find(flows, topic)
    return "changelog" if known is None else known[1].key_format


def consumed(
    flows: Sequence[Flow],
    topic: str,
    key: Serde[Any] | None,
    value: Serde[Any] | None,
    given: Consumed | None,
) -> Consumed:
    """Return the serdes for keys and values of a topic."""
    if given is not None:
        if key is not None or value is not None:
            raise InvalidError(
                "key= and value= stand for consumed=Consumed(key, value): give the one or the other"
            )
        return given
    known = find(flows, topic)
    if known is None:
        return Consumed(key=String() if key is None else key, value=value)
    flow, sink = known
    return Consumed(
        key=flow.key_serde if key is None else key,
        value=flow.value_format(sink).read_serde(flow.result_schema) if value is None else value,
    )
