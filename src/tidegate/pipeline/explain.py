"""Describe the plan of an app: sources, tasks and why, where each record is sent, expected state size.

Estimate of rows in state, from a sample of the source:

    tumbling, hopping  (key, pane) pairs with records, for the retention             rows per second × retention
    sessions           at most one per record, at least one per key                  sessions per second × retention
    sliding            every record                                                  records per second × retention
    deduplication      every accepted id                                 records per second × (within + grace)
    late table         at most its own limit, in every task

A row takes the widths of its columns, its key, 16 bytes for its time and 16 bytes for its directory entry. Values
without a fixed width count as `LOOSE_BYTES`. Compaction, checkpoints and packs that wait for deletion temporarily
need about the same amount again on disk.

Thread rule: pure functions, except for reading the sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidegate.durations import format_duration, format_size
from tidegate.errors import TidegateError
from tidegate.integrity.state import NEVER, Phase
from tidegate.integrity.validator import OnError, ValidationRules, policy_of
from tidegate.integrity.verdicts import FATAL, GAPS, Verdict
from tidegate.log.log import is_kafka, open_log
from tidegate.pipeline.analyzer import Shape, rekeying
from tidegate.pipeline.expressions import described, shown
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.sampling import Fields, Sample, gap_doubts, sample_flow
from tidegate.pipeline.topology import (
    Aggregate,
    Dedupe,
    Filter,
    KeyBy,
    Lookup,
    Map,
    Select,
    Source,
    Step,
    To,
    Validate,
)
from tidegate.storage import StorageConfig
from tidegate.windows.aggregates.definitions import AggregateDefinition
from tidegate.windows.aggregates.folds import Notes, resolve
from tidegate.windows.kinds import Hopping, Session, Sliding, Tumbling, Unlimited
from tidegate.windows.operators.windowed_operator import Emit

if TYPE_CHECKING:
    from tidegate.pipeline.definition.app import App


_BAD = {
    "fail": "their partition stops there, and says how to resume",
    "drop": "left out and counted",
    "keep": "left out, kept as dead letters",
}
_FAULTS = {
    OnError.FAIL: "its partition stops there, and says how to resume",
    OnError.DROP: "left out and counted",
    OnError.KEEP: "left out, kept as a dead letter",
}


def explain_app(app: App, *, sample: bool | None) -> str:
    """Describe all flows, with sizes; `sample` None samples an embedded log only."""
    looks = (not is_kafka(app.log)) if sample is None else sample
    lines = [f"App {app.name}", f"  log    {app.log}", f"  state  {app.state}"]
    if not app.flows:
        lines.append("  no flow yet: end a stream with .to_topic(topic) or .to_table(name)")
    for flow in app.flows:
        found: tuple[Sample | str, Fields] = "nobody looked at the log", Fields()
        if looks:
            found = sample_flow(flow, app.log, app.client)
        doubts = gap_doubts(flow, app.log, app.client) if looks and _validate(flow) is not None else []
        lines += ["", *_flow_lines(flow, found[0], doubts, app), *_field_lines(found[1])]
        tables = sorted({step.table for step in flow.steps if isinstance(step, Lookup)})
        if tables:
            lines += ["  looked-up tables", *(f"    {each}" for each in _lookup_lines(app, tables, looks))]
    return "\n".join(lines)


def _field_lines(found: Fields) -> Iterator[str]:
    """Describe what the sample shows about declared fields."""
    if found.wrong or found.notes:
        yield "  fields"
    for each in found.wrong:
        yield f"    it will not start: {each}"
    for each in found.notes:
        yield f"    {each}"


def explain_steps(source: Source, steps: Sequence[Step], shape: Shape) -> str:
    """Describe a stream that may not have an output yet."""
    lines = [f"Stream {source.topic}", *_step_lines(source, steps, shape.schemas)]
    lines.append(f"  plan   {rekeying(source, steps)[1]}")
    return "\n".join(lines)


def _flow_lines(flow: Flow, found: Sample | str, doubts: Sequence[str], app: App) -> Iterator[str]:
    yield f"Flow {flow.name}"
    yield from _step_lines(flow.source, flow.steps, flow.schemas)
    for sink in flow.sinks:
        yield f"    → {_sink(flow, sink)}"
    yield f"  plan   {flow.why}"
    if flow.rekey_at is not None:
        yield from _order_lines(flow, app.idle_after_ms)
    yield f"  tasks  {_tasks(flow, found)}"
    yield "  where each record goes"
    for what, where in _fates(flow):
        yield f"    {what:<24} {where}"
    for doubt in doubts:
        yield f"    {'a gap that is no fault':<24} {doubt}"
    if flow.is_stateful:
        yield from _size_lines(flow, found, app.storage)


def _order_lines(flow: Flow, idle_after_ms: int | None) -> Iterator[str]:
    """In which order records of several partitions are processed, and which partitions are waited for."""
    topic = flow.source.topic
    if flow.is_ordered:
        yield (
            f"  order  by stream time, partition of {topic} and offset: a record waits until every partition has "
            "come as far"
        )
    else:
        yield f"  order  any: these windows come to the same in whatever order partitions of {topic} are read"
    closes_ms = None if flow.window is None else flow.window.idle_close_ms
    silent_ms = min((each for each in (idle_after_ms, closes_ms) if each is not None), default=None)
    if silent_ms is None:
        yield "         every partition is waited for, however long it is silent (idle_after=None)"
        return
    setting = "idle_after" if silent_ms == idle_after_ms else "idle_close"
    yield f"         a partition that was silent for {format_duration(silent_ms)} ({setting}) is not waited for"
    if flow.is_ordered and idle_after_ms is not None:
        yield (
            "         nor, at the end of a run until caught up, one that was read to its end; what comes later is "
            "worked on later. idle_after=None waits for all"
        )


def _lookup_lines(app: App, tables: Sequence[str], looks: bool) -> Iterator[str]:
    """Describe how current each lookup table is, and which process updates it."""
    if not looks:
        yield f"{', '.join(tables)}: nobody looked how far they are behind their topics"
        return
    from tidegate.pipeline.lookup import table_lags
    from tidegate.storage import open_backend
    from tidegate.storage.backends.base import NoStateError

    settings: dict[str, Any] = {"client": app.client} if is_kafka(app.log) else {"read_only": True}
    try:
        with (
            open_log(app.log, **settings) as log,
            closing(open_backend(app.state, read_only=True)) as backend,
        ):
            found = list(table_lags(log, backend, tables))
    except NoStateError:  # no state yet: the app never ran
        found = [(table, None, None) for table in tables]
    except TidegateError as error:  # a plan can be shown without the tables
        yield f"{', '.join(tables)}: could not be looked at ({error})"
        return
    for table, known, lag in found:
        if known is None:
            yield f"{table}: not built yet; this app builds it from the topic of that name, if there is one"
            continue
        behind = (
            "its topic is not in this log" if lag is None else f"{lag:,} records behind {known.shape.topic}"
        )
        kept = "" if lag is None else "; kept up to date by this app while it runs and no other process does"
        yield f"{table}: commit {known.commits[-1].number}, {behind}{kept}"


# ── source, steps, sinks ─────────────────────────────────────────────────────────────────────────────────────────


def _step_lines(source: Source, steps: Sequence[Step], schemas: Sequence[Any]) -> Iterator[str]:
    value = "bytes" if source.value is None else source.value.name
    time = "the record's timestamp" if source.timestamp is None else f"column {source.timestamp}"
    if source.windows is not None:
        when = (
            "the session's end" if source.windows.size_ms is None else "a millisecond before the window's end"
        )
        time = f"{when} where state is kept"
    yield f"    {source.topic} from {source.start}: key {source.key.name}, value {value}, time is {time}"
    if source.has_updates:
        yield "      changes of windows: where state is kept, what a window was is taken back for its new value"
    elif source.emit is not None:
        yield "      windows that are final, each once"
    yield f"      {described(schemas[0])}"
    for step, before, after in zip(steps, schemas[:-1], schemas[1:], strict=True):
        yield f"    → {_step(step)}"
        if after != before:
            yield f"      {described(after)}"


def _step(step: Step) -> str:
    match step:
        case Validate():
            forgotten = "never" if step.max_age_ms == NEVER else f"after {format_duration(step.max_age_ms)}"
            return (
                f"validate: producers' numbering and checksums; on a fault: {step.on_error}, before the end of a push: "
                f"{step.during_push}; silent producers are forgotten {forgotten}"
            )
        case Filter():
            return f"filter {shown(step.condition)}"
        case Select():
            columns = [
                name if name == shown(expression) else f"{name} = {shown(expression)}"
                for name, expression in step.columns
            ]
            return f"select {', '.join(columns)}"
        case Map():
            return f"map {shown(step.function)}"
        case KeyBy():
            return f"key_by {shown(step.expression)} as {step.serde.name}"
        case Dedupe():
            rule = step.rule
            return (
                f"drop_duplicates by key, {', '.join(rule.columns)} within {format_duration(rule.within_ms)}, "
                f"grace {format_duration(rule.grace_ms)}"
            )
        case Aggregate():
            aggregates = ", ".join(map(_aggregate, step.aggregates))
            when = "on update, once a round" if step.emit is Emit.UPDATE else "on close, once"
            rules = "" if step.compat is None else "; by the rules of Kafka Streams"
            return f"window {_kind(step.kind)}: {aggregates}; sent {when}{rules}"
        case Lookup():
            columns = [column if column == name else f"{column} as {name}" for column, name in step.columns]
            missing = "left out" if step.required else "null"
            by = shown(step.key or "key")
            return f"lookup {', '.join(columns)} in {step.table} by {by}; {missing} where there is none"


def _kind(kind: Any) -> str:
    match kind:
        case Unlimited():
            return "unlimited"
        case Tumbling():
            said = f"tumbling {format_duration(kind.size_ms)}"
        case Hopping():
            said = f"hopping {format_duration(kind.size_ms)} every {format_duration(kind.advance_ms)}"
        case Sliding():
            said = f"sliding {format_duration(kind.difference_ms)}"
        case Session():
            said = f"session with gaps up to {format_duration(kind.gap_ms)}"
    kept = format_duration(kind.retention_ms) + ("" if kind.is_retention_said else " (default)")
    return f"{said}, grace {format_duration(kind.grace_ms)}, kept {kept}"


def _aggregate(each: AggregateDefinition) -> str:
    return f"{each.name} = {each.kind}({', '.join(each.columns)})"


def _sink(flow: Flow, sink: Any) -> str:
    if not isinstance(sink, To):
        return f"table {sink.name}: the committed windows themselves, no topic"
    what = "a windowed changelog" if flow.result == "windows" else "plain records"
    numbered = "numbered and check-summed" if sink.integrity else "without numbering"
    parts = "a partition for each task" if sink.partitions is None else f"{sink.partitions} partitions"
    return f"topic {sink.topic}: {what}, value {flow.value_format(sink)!r}, {numbered}, {parts}"


# ── tasks and fates ──────────────────────────────────────────────────────────────────────────────────────────────


def _tasks(flow: Flow, found: Sample | str) -> str:
    if flow.shards is not None:
        return f"{flow.shards}, a shard of the new keys each; the number stays for the app's life"
    if isinstance(found, Sample):
        return f"{flow.tasks(found.partitions)}, one for each partition of {flow.source.topic}"
    return f"one for each partition of {flow.source.topic}"


def _validate(flow: Flow) -> Validate | None:
    return next((step for step in flow.steps if isinstance(step, Validate)), None)


def _fates(flow: Flow) -> Iterator[tuple[str, str]]:
    """Describe what happens to every kind of record, in the order of the decisions."""
    validate = _validate(flow)
    if validate is not None:
        yield from _faults(validate)
    if flow.source.value is not None or flow.source.windows is not None:
        yield "cannot be read", _BAD[flow.source.on_error]
        takes_back = flow.source.has_updates and flow.is_stateful
        yield "no value (a deletion)", "takes back what its window was" if takes_back else "left out"
    if any(isinstance(step, Filter) for step in flow.steps):
        yield "filtered", "left out"
    for step in flow.steps:
        if isinstance(step, Dedupe):
            yield "copy of an event", "left out and counted"
            if step.rule.late == "forward":
                yield "too late to tell a copy", "goes on"
            else:
                yield "too late to tell a copy", f"left out, {_kept_late(step)}"
            yield "no id", "goes on, and is counted (no_id)"
            if flow.rekey_at is None:
                yield (
                    "no key",
                    "a copy is told by its id alone; where the source has several partitions it stops its partition",
                )
    if flow.window is not None:
        yield from _window_fates(flow.window)
    ends = ", ".join(
        f"topic {sink.topic}" if isinstance(sink, To) else f"table {sink.name}" for sink in flow.sinks
    )
    yield (
        "all others",
        (f"into their windows, results to {ends}" if flow.window is not None else f"to {ends}"),
    )


def _window_fates(window: Aggregate) -> Iterator[tuple[str, str]]:
    yield "no key", "left out and counted"
    if not isinstance(window.kind, Unlimited):
        yield "its window is final", f"left out, {_kept_late(window)}"
    if window.future is not None:
        ahead = format_duration(window.future.ahead_ms)
        fate = {
            "late": f"left out, {_kept_late(window)}",
            "keep": "into their windows",
            "drop": "left out and counted",
        }[window.future.policy]
        yield f"clock > {ahead} ahead", f"{fate}; they close nobody's windows"


def _faults(step: Validate) -> Iterator[tuple[str, str]]:
    """The effect of each kind of fault, and of any fault before the end of a push."""
    rules = ValidationRules(policy_of(step.during_push), policy_of(step.on_error))

    def does(verdict: Verdict, phase: Phase) -> str:
        action = rules.action(verdict, phase)
        goes_on = verdict in GAPS and action is not OnError.FAIL
        return "counted and told, the record behind it goes on" if goes_on else _FAULTS[action]

    kinds = sorted(FATAL)
    for verdict in kinds:
        yield verdict.label, does(verdict, Phase.LIVE)
    if isinstance(step.during_push, str) and rules.action(kinds[0], Phase.PUSHING) is OnError.FAIL:
        yield "a fault before push end", _FAULTS[OnError.FAIL]
        return
    for verdict in kinds:
        yield f"{verdict.label} in a push", does(verdict, Phase.PUSHING)


def _kept_late(step: Dedupe | Aggregate) -> str:
    if step.late is None:
        return "counted"
    kept, size = format_duration(step.late.retention_ms), format_size(step.late.max_bytes)
    return f"kept in the late table ({kept}, {size} a task), then counted"


# ── sizes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _size_lines(flow: Flow, found: Sample | str, storage: StorageConfig) -> Iterator[str]:
    sample = found if isinstance(found, Sample) else None
    yield "  expected state, all tasks together"
    if sample is not None:
        yield (
            f"    from the newest {format_duration(sample.span_ms)} of {flow.source.topic}: "
            f"{sample.records:,} records read, {sample.records_per_second:,.0f}/s and {sample.keys:,} keys "
            "after the steps before state"
        )
    else:
        yield (
            f"    {found}; assuming {ASSUMED.records_per_second:,.0f} records/s and {ASSUMED.keys:,} keys of "
            f"{ASSUMED.key_bytes:.0f} bytes. It grows in proportion."
        )
    sizes = state_sizes(flow, sample)
    for size in sizes:
        yield (
            f"    {size.operator:<13} {_rows(size.rows)} rows × {size.row_bytes} B = {format_size(size.size)}   "
            f"{size.formula}"
        )
        if size.late_bytes:
            yield f"    {size.operator + '.late':<13} at most {format_size(size.late_bytes)} a task"
    yield from _budget_lines(flow, sizes, storage)


def _budget_lines(flow: Flow, sizes: Sequence[StateSize], storage: StorageConfig) -> Iterator[str]:
    total = sum(size.size for size in sizes)
    limit = storage.backlog_limit_bytes
    yield (
        f"  budget of a worker process: {format_size(limit)} of state on disk (backlog_limit_bytes), "
        f"{format_size(storage.worker_total_bytes)} of memory (worker_total_bytes)"
    )
    if total > limit:
        yield (
            f"    {format_size(total)} do not fit one process: use more workers, raise backlog_limit_bytes, "
            "or shorten the retention; over it, reading slows down and then stops with OverloadError"
        )
    else:
        per_row = total / max(1.0, sum(size.rows for size in sizes))
        times = limit / max(total, 1)
        yield f"    holds {_rows(limit / max(per_row, 1.0))} such rows: {times:,.0f} times what is expected"


def _rows(rows: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rows >= size:
            return f"{rows / size:.3g} {unit}"
    return f"{rows:.0f}"


# -- sizing ---------------------------------------------------------------------------------------

PLACE_BYTES = 16
DIRECTORY_BYTES = 16
PRINT_BYTES = 16  # an id's fingerprint
ID_BYTES = PRINT_BYTES + PLACE_BYTES + DIRECTORY_BYTES + 1 + 12
LOOSE_BYTES = 64
ASSUMED = Sample(0, 60_000, 1, 1000.0, 10_000, 16.0, None)
SAMPLED_MS = 60_000


@dataclass(frozen=True)
class StateSize:
    """The expected state of one operator: rows it keeps, bytes per row, and the formula in words."""

    operator: str
    rows: float
    row_bytes: int
    formula: str
    late_bytes: int  # the most that its late table takes, in each task

    @property
    def size(self) -> int:
        return int(self.rows * self.row_bytes)


def state_sizes(flow: Flow, sample: Sample | None) -> list[StateSize]:
    """Return the expected state size of every operator of a flow, all tasks together."""
    seen = ASSUMED if sample is None else sample
    sizes = []
    for place, name in flow.operators.items():
        step = flow.steps[place]
        if isinstance(step, Dedupe):
            sizes.append(_dedupe(name, step, seen))
        elif isinstance(step, Aggregate):
            sizes.append(_windows(name, step, flow.schemas[place], seen))
    return sizes


def row_bytes(step: Aggregate, schema: pa.Schema, key_bytes: float) -> int:
    """Return the bytes of one stored row of windows."""
    states = [*Notes().state, *resolve(step.aggregates, schema).state_schema]
    return int(sum(_width(each.type) for each in states) + PLACE_BYTES + DIRECTORY_BYTES + key_bytes)


def _dedupe(name: str, step: Dedupe, seen: Sample) -> StateSize:
    kept_s = step.rule.retention_ms / 1000
    rows = seen.records_per_second * kept_s
    formula = f"{_rate(seen.records_per_second)} ids/s × {_seconds(kept_s)} (within + grace)"
    return StateSize(name, rows, ID_BYTES, formula, 0 if step.late is None else step.late.max_bytes)


def _windows(name: str, step: Aggregate, schema: pa.Schema, seen: Sample) -> StateSize:
    width, kind = row_bytes(step, schema, seen.key_bytes), step.kind
    late = 0 if step.late is None else step.late.max_bytes
    if isinstance(kind, Unlimited):
        return StateSize(name, seen.keys, width, f"{seen.keys:,} keys, one window each, never dropped", late)
    kept_s = kind.retention_ms / 1000
    match kind:
        case Hopping():
            pane_s = kind.pane_ms / 1000
            fresh = _panes_a_second(kind, seen)
            formula = (
                f"{_rate(fresh)} (key, pane of {_seconds(pane_s)}) pairs/s × {_seconds(kept_s)} retention"
            )
        case Session():
            fresh = min(seen.records_per_second, seen.keys / max(1.0, kind.gap_ms / 1000))
            formula = f"{_rate(fresh)} sessions/s (each key once a gap) × {_seconds(kept_s)} retention"
        case Sliding():
            fresh = seen.records_per_second
            formula = f"{_rate(fresh)} records/s × {_seconds(kept_s)} retention"
    return StateSize(name, fresh * kept_s, width, formula, late)


def _panes_a_second(kind: Hopping, seen: Sample) -> float:
    """How many (key, pane) pairs begin per second: as sampled, at most one per record; without a sample, every key
    in every pane."""
    if seen.panes_per_second is not None:
        return seen.panes_per_second * min(1.0, SAMPLED_MS / kind.pane_ms)
    return min(seen.records_per_second, seen.keys * 1000 / kind.pane_ms)


def _width(kind: pa.DataType) -> float:
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind) or pa.types.is_fixed_size_binary(kind):
        return float(kind.bit_width / 8)
    if pa.types.is_struct(kind):
        return sum(_width(kind.field(place).type) for place in range(kind.num_fields))
    return LOOSE_BYTES


def _rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _seconds(number: float) -> str:
    return f"{number:,.0f} s" if number >= 1 else f"{number:.3g} s"
