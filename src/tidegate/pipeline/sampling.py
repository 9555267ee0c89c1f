"""Sample a log through the stateless steps of a flow.

The sample shows how many records, keys and ids a minute has, and whether the columns that state depends on exist at
all: a misspelt field would be null in every record, and sums, ids and times with it (`check_fields`).

At most `MAX_RECORDS` are read from the end of the log, the same number from each partition; the records of the
newest minute of event time show how fast state grows. Values that cannot be read are left out here; the run reports
them.

Thread rule: opens the log for reading and closes it again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from tidegate.clock import SystemClock
from tidegate.errors import TidegateError
from tidegate.integrity.verdicts import tolerance_of
from tidegate.log.log import is_kafka, open_log
from tidegate.pipeline.expressions import nearest, shown
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.topology import Aggregate, Dedupe, Filter, KeyBy, Lookup, Map, Select, Step
from tidegate.storage import open_backend
from tidegate.tables.serdes.avro import Avro
from tidegate.tables.serdes.json import Json
from tidegate.tables.serdes.json_values import is_optional
from tidegate.windows.events import EventBatch
from tidegate.windows.kinds import Hopping

SAMPLE_MS = 60_000
MAX_RECORDS = 200_000
START_RECORDS = 1000  # sampled whenever an app starts
NAMED_RECORDS = 200  # records whose fields are listed


@dataclass(frozen=True)
class Sample:
    """A sample; rates are per second of event time, after the steps before the first that keeps state."""

    records: int  # as read
    span_ms: int  # of event time
    partitions: int
    records_per_second: float
    keys: int
    key_bytes: float
    panes_per_second: float | None = None  # different (key, pane) pairs, where windows have panes


@dataclass(frozen=True)
class Fields:
    """What a sample shows about declared fields: errors that prevent a start, and notes."""

    wrong: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def sample_flow(flow: Flow, log: str, client: Mapping[str, str]) -> tuple[Sample | str, Fields]:
    """Return a sample, or why there is none, and its findings about fields."""
    topic = flow.source.topic
    try:
        with _opened(log, client) as opened:
            if opened is None:
                return f"there is no log at {log} yet", Fields()
            if topic not in opened.topics():
                return f"there is no topic {topic} yet", Fields()
            numbers = tuple(opened.describe(topic).partition_numbers)
            batches = list(_newest(opened, topic, len(numbers), MAX_RECORDS))
    except TidegateError as error:  # a plan can be shown without a sample
        return f"the log could not be looked at ({error})", Fields()
    fields = _checked(flow, batches, len(numbers), calls_functions=True)
    events = [each for each in _events(flow, batches) if len(each)]
    if not events:
        return f"{flow.source.topic} holds nothing that comes so far", fields
    read = sum(batch.num_rows for batch in batches)
    return _measured(flow, _last_minute(events), read, len(numbers)), fields


@contextmanager
def _opened(log: str, client: Mapping[str, str]) -> Iterator[Any]:
    """Open a log for reading; None where there is no folder yet."""
    if is_kafka(log):
        with open_log(log, client=client or None) as opened:
            yield opened
    elif Path(log).is_dir():
        with open_log(log, client=client or None, read_only=True) as opened:
            yield opened
    else:
        yield None


def gap_doubts(flow: Flow, log: str, client: Mapping[str, str]) -> list[str]:
    """Return the reasons why a validator might not see loss in the flow's topic, each once; none if that is unknown."""
    topic = flow.source.topic
    try:
        with _opened(log, client) as opened:
            if opened is None or topic not in opened.topics():
                return []
            found = [
                (number, tolerance_of(opened, topic, number).doubt())
                for number in opened.describe(topic).partition_numbers
            ]
    except TidegateError:  # reported with the sample
        return []
    told = (f"{topic}-{number}: {doubt}" if "offset" in doubt else doubt for number, doubt in found if doubt)
    return list(dict.fromkeys(told))


def check_fields(flows: Sequence[Flow], log: Any) -> Fields:
    """Return what the newest records of an open log show about the fields of flows; nothing where there are none.

    The user's functions are not called: they run in workers. Columns behind one are not checked.
    """
    counts = log.partition_counts()
    samples: dict[str, list[pa.RecordBatch]] = {}
    wrong, notes = list[str](), list[str]()
    for flow in flows:
        topic = flow.source.topic
        if topic not in counts:
            continue
        if topic not in samples:
            try:
                samples[topic] = list(_newest(log, topic, counts[topic], START_RECORDS))
            except TidegateError:  # the run reports what is wrong with the log
                samples[topic] = []
        found = _checked(flow, samples[topic], counts[topic], calls_functions=False)
        wrong += [f"flow {flow.name}: {each}" for each in found.wrong]
        notes += [f"flow {flow.name}: {each}" for each in found.notes]
    return Fields(tuple(wrong), tuple(notes))


def _newest(log: Any, topic: str, partitions: int, most: int) -> Iterator[pa.RecordBatch]:
    """Read the last records of every partition, without control records."""
    with log.reader(topic, start=-max(1, most // partitions)) as reader:
        yield from reader


def _events(flow: Flow, batches: list[pa.RecordBatch]) -> Iterator[EventBatch]:
    """Yield their events, as they reach the first step that keeps state."""
    stages = [_stage(flow, place) for place in range(_first_kept(flow))]
    for events, _ in _decoded(flow, batches):
        events = events.take(events.ts >= 0)
        for stage in stages:
            if stage is not None and len(events):
                events = stage(events)
        yield events


def _first_kept(flow: Flow) -> int:
    """Return how many steps precede the first that keeps state or reads a table."""
    kept = (place for place, step in enumerate(flow.steps) if isinstance(step, Dedupe | Aggregate | Lookup))
    return next(kept, len(flow.steps))


def _stage(flow: Flow, place: int) -> Any:
    from tidegate.pipeline.transforms import Around, stage_of

    # only lookups use the surrounding process, and none is reached
    around = Around(open_backend("memory://"), SystemClock())
    return stage_of(flow.steps[place], flow.schemas[place], flow.key_serdes[place], around)


def _decoded(flow: Flow, batches: list[pa.RecordBatch]) -> Iterator[tuple[EventBatch, dict[int, str]]]:
    """Yield the events of readable records, and the rows whose event time seems to be in another unit."""
    from tidegate.pipeline.decoder import RecordDecoder

    decoder = RecordDecoder(flow.source, flow.schemas[0])
    for batch in batches:
        decoded = decoder.decode(batch)
        good = np.ones(batch.num_rows, np.bool_)
        good[decoded.bad_rows] = False
        if decoded.absent is not None:
            good &= ~decoded.absent
        times = decoder.event_time(decoded.values, batch.column("timestamp"))
        events = EventBatch(
            decoded.key,
            times,
            batch.column("offset").to_numpy(),
            batch.column("partition").to_numpy(),
            times,
            decoded.values,
        ).take(good)
        stamps = batch.column("timestamp").filter(pa.array(good))
        yield events, decoder.implausible_times(events.values, stamps)


# ── fields ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _checked(flow: Flow, batches: list[pa.RecordBatch], partitions: int, *, calls_functions: bool) -> Fields:
    """Return what a sample shows about the fields of a flow."""
    decoded = [each for each in _decoded(flow, batches) if len(each[0])]
    read = sum(len(events) for events, _ in decoded)
    if not read:
        return Fields()
    looked = _Looked(flow, read, _names_in(flow, batches), [events for events, _ in decoded])
    wrong = [*looked.time([reasons for _, reasons in decoded]), *looked.steps(partitions, calls_functions)]
    return Fields(tuple(dict.fromkeys(wrong)), tuple(looked.notes(wrong)))


_LEAVE_OUT = "leave them out with .filter('key IS NOT NULL')"


class _Looked:
    """A sample's events, and the fields that none of them has."""

    def __init__(self, flow: Flow, read: int, names: set[str] | None, events: list[EventBatch]) -> None:
        self._flow, self._read, self._names, self._events = flow, read, names, events
        value = flow.source.value
        declared = value.schema if isinstance(value, Json) and value.fields else ()
        self._optional = {each.name for each in declared if is_optional(each)}
        if isinstance(value, Avro):
            self._optional |= value.optional
        self._missing = [name for name in flow.schemas[0].names if _is_null(events, name)]
        # what is computed from optional fields, once one of them is null everywhere
        self._may_be_null = bool(self._optional.intersection(self._missing))

    def time(self, reasons: list[dict[int, str]]) -> Iterator[str]:
        """Yield errors about event time that is missing, or in another unit, everywhere."""
        name = self._flow.source.timestamp
        if name in self._missing and name not in self._optional:
            yield f"event time is {self._nowhere(str(name))}"
        elif sum(map(len, reasons)) == self._read and (self._flow.is_stateful or name is not None):
            yield f"{next(iter(reasons[0].values()))}; so it is in all {self._read:,} records looked at"

    def steps(self, partitions: int, calls_functions: bool) -> Iterator[str]:
        """Yield errors about ids, aggregates and keys that are null in every event that reaches their step."""
        events, keyed = self._events, None
        for place, step in enumerate(self._flow.steps):
            match step:
                case Lookup():
                    return
                case Dedupe():
                    yield from self._columns("drop_duplicates", step.rule.columns, events)
                    if self._flow.rekey_at is None and partitions > 1 and _has_no_key(events):
                        yield (
                            f"drop_duplicates finds copies by key inside a partition, and {self._no(events)} has a "
                            f"key; say .key_by({step.rule.columns[0]!r}) before it, or {_LEAVE_OUT}"
                        )
                case Aggregate():
                    for each in step.aggregates:
                        yield from self._columns(f"aggregate {each.name}", each.columns, events)
                    if _has_no_key(events):
                        yield from self._keys(keyed, events)
                case _:
                    if not calls_functions and _has_function(step):
                        return
                    try:
                        stage = _stage(self._flow, place)
                        events = [each if stage is None else stage(each) for each in events]
                    except Exception:  # noqa: BLE001 - a function of the user's: the run will tell
                        return
                    keyed = step if isinstance(step, KeyBy) else keyed
            events = [each for each in events if len(each)]
            if not events:
                return
            self._may_be_null |= any(_is_null(events, name) for name in self._optional)

    def notes(self, wrong: Sequence[str]) -> Iterator[str]:
        """Yield declared fields that no record has and no error mentions."""
        for name in self._missing:
            if name not in self._optional and not any(repr(name) in each for each in wrong):
                yield f"declared is {self._nowhere(name)}"

    @property
    def _none(self) -> str:
        return f"none of the {self._read:,} newest records of {self._flow.source.topic}"

    def _no(self, events: list[EventBatch]) -> str:
        """None of the records read, or none of those that earlier steps left."""
        return self._none if sum(map(len, events)) == self._read else "no record that comes so far"

    def _keys(self, keyed: KeyBy | None, events: list[EventBatch]) -> Iterator[str]:
        """Yield errors about windows of events that all have no key."""
        if keyed is None:
            yield (
                f"windows are kept by key, and {self._no(events)} has a key, so all would be left out; say .key_by(…) "
                f"before .window(…), or {_LEAVE_OUT}"
            )
            return
        name = shown(keyed.expression)
        if _is_null(events, name):
            yield from self._columns("key_by", [name], events)
        elif not self._may_be_null:
            condition = f"({name}) IS NOT NULL" if isinstance(keyed.expression, str) else "…"
            yield (
                f"windows are kept by key, and key_by({name!r}) gives none to any record that comes so far, so all "
                f"would be left out; key by something else, or say .filter({condition!r}) before it"
            )

    def _columns(self, what: str, columns: Sequence[str], events: list[EventBatch]) -> Iterator[str]:
        source = self._flow.schemas[0].names
        for name in columns:
            if name in self._optional or not _is_null(events, name):
                continue
            if name in self._missing:
                yield f"{what} needs {self._nowhere(name)}"
            elif name in source or not self._may_be_null:
                remedy = self._remedy(name) if name in source else ""
                said = f"{what} needs {name!r}, which is null in all records that come so far"
                yield f"{said}; {remedy}" if remedy else said

    def _nowhere(self, name: str) -> str:
        """`'amout', which none of the 50 newest records of orders has; did you mean amount? …`"""
        if self._names is None or name in self._names:
            said = f"{name!r}, which is null in all of the {self._read:,} newest records of {self._flow.source.topic}"
        else:
            near = nearest(name, self._names).rstrip("?")
            have = ", ".join(sorted(self._names)[:12]) or "no field at all"
            said = f"{name!r}, which {self._none} has{near + '?' if near else ';'} they have {have}"
        remedy = self._remedy(name)
        return f"{said}. Write it as it is there, or {remedy}" if remedy else said

    def _remedy(self, name: str) -> str:
        """How to declare a source's field that may be null everywhere; empty for values without fields."""
        if isinstance(self._flow.source.value, Json):
            kind = self._flow.schemas[0].field(name).type
            return f'declare it tg.field("{kind}", optional=True) if it may be missing'
        if isinstance(self._flow.source.value, Avro):
            return f"say Avro(…, optional=[{name!r}]) if it may be null in all of them"
        return ""


def _has_function(step: Step) -> bool:
    """Whether a step calls a function of the user's."""
    match step:
        case Filter():
            return callable(step.condition)
        case Select():
            return any(callable(expression) for _, expression in step.columns)
        case KeyBy():
            return callable(step.expression)
    return isinstance(step, Map)


def _is_null(events: list[EventBatch], name: str) -> bool:
    """Whether an existing column has only nulls."""
    columns = [each.values.column(name) for each in events if name in each.values.schema.names]
    return bool(columns) and all(each.null_count == len(each) for each in columns)


def _has_no_key(events: list[EventBatch]) -> bool:
    return bool(events) and all(each.key.null_count == len(each) for each in events)


def _names_in(flow: Flow, batches: list[pa.RecordBatch]) -> set[str] | None:
    """The field names in a few of the values, where they are JSON objects."""
    if not isinstance(flow.source.value, Json):
        return None
    names = set[str]()
    for batch in batches:
        for raw in batch.column("value").slice(0, NAMED_RECORDS // max(1, len(batches)) + 1).to_pylist():
            try:
                found = json.loads(raw) if raw is not None else None
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                names.update(found)
    return names


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _last_minute(events: list[EventBatch]) -> list[EventBatch]:
    """Return the events of the newest minute of event time; a few clocks that run ahead do not make it empty."""
    newest = int(np.quantile(np.concatenate([each.ts for each in events]), 0.99, method="higher"))
    kept = [each.take((each.ts > newest - SAMPLE_MS) & (each.ts <= newest)) for each in events]
    return [each for each in kept if len(each)]


def _measured(flow: Flow, events: list[EventBatch], read: int, partitions: int) -> Sample:
    ts = np.concatenate([each.ts for each in events])
    keys = pa.chunked_array([each.key for each in events]).dictionary_encode().combine_chunks()
    if isinstance(keys, pa.ChunkedArray):
        keys = pa.concat_arrays(keys.chunks)
    codes = keys.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    span_ms = max(1000, int(ts.max() - ts.min()) + 1)
    lengths = [len(key) for key in keys.dictionary.to_pylist() if key is not None]
    panes = None
    if flow.window is not None and isinstance(flow.window.kind, Hopping):
        width = min(flow.window.kind.pane_ms, SAMPLE_MS)
        pairs = np.unique(np.stack([codes.astype(np.int64), ts // width]), axis=1).shape[1]
        panes = pairs * 1000 / max(span_ms, width)
    return Sample(
        records=read,
        span_ms=span_ms,
        partitions=partitions,
        records_per_second=len(ts) * 1000 / span_ms,
        keys=len(lengths),
        key_bytes=sum(lengths) / max(1, len(lengths)),
        panes_per_second=panes,
    )
