"""Rebuild a flow from its recorded definition, for reading: an app's tables without the program that made them.

The definition of an app is stored as plain values (`topology`). Reading a window's rows needs the stores' shapes and
the columns' types and never runs a step. A function of a step is stored by name only, so it is replaced by one that
returns nothing. A `reduce` consists of functions that reading would have to call: its column is null here, and
`unread_columns` names it; other columns are not affected. Where the columns cannot be known without the program
(`select` by a function or an Arrow expression, serdes of the user's own), the table is refused with a reference to
`App.open_table`, which has the program.

F1  nothing is guessed: every step that keeps state has its recorded shape, or the flow is refused.

Thread rule: pure functions, except for `open_recorded`, which opens a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa

from tidegate.clock import Clock
from tidegate.durations import format_duration
from tidegate.errors import InvalidError, UnavailableError
from tidegate.pipeline.admin import list_apps
from tidegate.pipeline.checkpoint import FlowLine, Records
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.table import ResultTable
from tidegate.pipeline.topology import (
    AbsentFunction,
    Aggregate,
    AsTable,
    Dedupe,
    Filter,
    KeyBy,
    Lookup,
    Map,
    Select,
    Sink,
    Source,
    Step,
    To,
    Validate,
    document,
)
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.serdes.json import PLAIN_SERDES, Json
from tidegate.tables.serdes.json_values import field_of
from tidegate.windows.aggregates.definitions import AggregateDefinition, Reducer
from tidegate.windows.kinds import Deduplicate, Hopping, Session, Sliding, Tumbling, Unlimited
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.windowed_operator import Emit, FutureGuard

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RecordedTable:
    """A table that an app keeps: its name, its flow, and the source topic."""

    app: str
    name: str
    flow: str
    topic: str


def recorded_tables(backend: StorageBackend, app: str) -> list[RecordedTable]:
    """Return the tables of an app as of its last commit; those with windows can be opened."""
    return [
        RecordedTable(app, sink["name"], line.name, line.topic)
        for line in _lines(backend, app)
        for sink in msgspec.json.decode(line.description)["sinks"]
        if sink["step"] == "table"
    ]


def open_recorded(
    backend: StorageBackend, app: str, table: str, *, clock: Clock | None = None
) -> ResultTable:
    """Open the table as of the app's last commit, without the app's program."""
    known = {each.name: each for each in recorded_tables(backend, app)}
    if table not in known:
        names = ", ".join(sorted(known)) or "none"
        raise InvalidError(f"app {app} has no table {table[:100]!r}; it has: {names}")
    flow = recorded_flow(recorded_line(backend, known[table]).description)
    return ResultTable(backend, app, flow, clock=clock, owns_backend=False)


def recorded_line(backend: StorageBackend, table: RecordedTable) -> FlowLine:
    """Return the record of the flow that keeps the table."""
    return next(each for each in _lines(backend, table.app) if each.name == table.flow)


def all_recorded(backend: StorageBackend) -> list[RecordedTable]:
    """Return the tables of every app that has committed."""
    found: list[RecordedTable] = []
    for app in list_apps(backend):
        try:
            found += recorded_tables(backend, app)
        except UnavailableError:  # no commit yet
            continue
    return found


def find_recorded(backend: StorageBackend, name: str | None) -> RecordedTable | None:
    """Return the table of that name, or APP:NAME; without a name the only table. None if no app has one."""
    app, colon, short = (name or "").rpartition(":")
    found = [
        each
        for each in all_recorded(backend)
        if name is None or (each.name == short and (not colon or each.app == app))
    ]
    if len(found) > 1:
        names = ", ".join(f"{each.app}:{each.name}" for each in found)
        which = f"several apps have a table {short!r}" if short else "apps have several tables"
        raise InvalidError(f"{which}; name one of {names}")
    return found[0] if found else None


def recorded_flow(description: bytes) -> Flow:
    """Return the flow that a stored definition describes (F1)."""
    said: Document = msgspec.json.decode(description, type=dict[str, Any])
    try:
        source = _source(said["source"])
        steps = tuple(_step(each) for each in said["steps"])
        sinks = tuple(_sink(each) for each in said["sinks"])
        flow = Flow(source, steps, sinks)
    except (KeyError, TypeError) as error:
        raise _refused(said, f"its definition is not known here ({error})") from None
    for step, recorded in zip(steps, said["steps"], strict=True):
        if isinstance(step, Aggregate | Dedupe) and _shape(document(step)) != _shape(recorded):
            raise _refused(said, f"its {recorded['step']} was made by another release, or by a function")
    return flow


def unread_columns(flow: Flow) -> tuple[str, ...]:
    """Return the columns of a recorded flow whose values need the program."""
    window = flow.window
    return () if window is None else tuple(each.name for each in window.aggregates if each.kind == "reduce")


def _shape(said: Document) -> Document:
    """Return what a stateful step records about its stores: everything except the functions of a reduce."""
    aggregates = [dict(each) for each in said.get("aggregates", ())]
    for each in aggregates:
        if each["kind"] == "reduce":
            reducer = each["options"]["reducer"]
            each["options"] = {"reducer": {name: reducer[name] for name in ("state", "result", "version")}}
    return {**said, "aggregates": aggregates}


def _lines(backend: StorageBackend, app: str) -> tuple[FlowLine, ...]:
    records = Records(backend, app)
    newest = records.newest()
    if newest is None:
        raise UnavailableError(f"app {app} has no commit yet; run it, or wait for its first round")
    return records.flows_of(records.read_commit(newest)[0])


def _refused(said: Document, why: str) -> InvalidError:
    return InvalidError(
        f"table {said.get('name', '')!r} cannot be read without the program that made it: {why}; read it "
        "with App.open_table, or read its changelog topic"
    )


def _source(said: Document) -> Source:
    if said["windows"] is not None:
        raise TypeError("it reads the changelog of another table")
    value = None if said["value"] is None else _serde(said["value"])
    on_error: Any = "drop" if said["on_bad"] == "skip" else said["on_bad"]
    return Source(said["topic"], _serde(said["key"]), value, said["timestamp"], said["start"], on_error)


def _step(said: Document) -> Step:
    match said["step"]:
        case "validate":
            if "on_error" not in said:  # an earlier release had other words; reading a table does not need it
                return Validate()
            return Validate(said["on_error"], said["during_push"], said["max_age_ms"])
        case "filter":
            return Filter(said["condition"].get("sql") or AbsentFunction(pa.bool_()))
        case "select":
            return Select(tuple((name, _required_sql(each)) for name, each in said["columns"]))
        case "map":
            schema = pa.schema([field_of(name, written) for name, written in said["schema"]])
            return Map(AbsentFunction(schema), schema)
        case "lookup":
            columns = tuple((there, here) for there, here in said["columns"])
            key = None if said["key"] is None else _required_sql(said["key"])
            return Lookup(said["table"], _serde(said["value"]), columns, key, said["required"])
        case "key_by":
            serde = _serde(said["serde"])
            return KeyBy(
                said["expression"].get("sql") or AbsentFunction(serde.arrow_type), serde, said["shards"]
            )
        case "deduplicate":
            rule = Deduplicate(
                said["columns"],
                format_duration(said["within_ms"]),
                grace=format_duration(said["grace_ms"]),
                late=said["late"],
                refresh=said["refresh"],
            )
            return Dedupe(rule, _late(said["keep_late"]))
        case "aggregate":
            future = said["future"]
            return Aggregate(
                _kind(said["kind"]),
                tuple(_aggregate(each) for each in said["aggregates"]),
                Emit(said["emit"]),
                _late(said["keep_late"]),
                None if future is None else FutureGuard(format_duration(future[0]), future[1]),
                said["idle_close_ms"],
                compat=said.get("compat"),
            )
        case other:
            raise TypeError(f"a step {other!r}")


def _sink(said: Document) -> Sink:
    if said["step"] == "table":
        return AsTable(said["name"])
    value = None if said["value"] is None else _serde(said["value"])
    return To(said["topic"], said["key_format"], value, said["integrity"], said["partitions"])


def _kind(said: Document) -> Any:
    lengths = {name: format_duration(said[name]) for name in said if name.endswith("_ms")}
    kept: dict[str, Any] = {"grace": lengths.get("grace_ms"), "retention": lengths.get("retention_ms")}
    match said["kind"]:
        case "hopping" if said["size_ms"] == said["advance_ms"]:
            return Tumbling(lengths["size_ms"], **kept)
        case "hopping":
            return Hopping(lengths["size_ms"], lengths["advance_ms"], **kept)
        case "sliding":
            return Sliding(lengths["difference_ms"], **kept)
        case "session":
            return Session(lengths["gap_ms"], **kept)
        case "unlimited":
            return Unlimited(said["start_ms"])
        case other:
            raise TypeError(f"windows of a kind {other!r}")


def _aggregate(said: Document) -> AggregateDefinition:
    if said["kind"] == "reduce":
        made = said["options"]["reducer"]
        state, result = (field_of(said["name"], _written(made[each])).type for each in ("state", "result"))
        reducer = Reducer(
            state, lambda _, groups, count: pa.nulls(count, state), lambda _, groups, count: pa.nulls(count, state),
            lambda states: pa.nulls(len(states), result), result, made["version"],
        )  # fmt: skip
        return AggregateDefinition("reduce", tuple(said["columns"]), (("reducer", reducer),), said["name"])
    options = tuple((name, value) for name, value in said["options"].items())
    return AggregateDefinition(said["kind"], tuple(said["columns"]), options, said["name"])


def _serde(said: Any) -> Any:
    if isinstance(said, str) and said in PLAIN_SERDES:
        return PLAIN_SERDES[said]
    if isinstance(said, Mapping) and "json" in said:
        return Json(**{name: field_of(name, _written(each)) for name, each in said["json"]})
    raise TypeError(f"a serde {said!r}")


def _written(said: str) -> str:
    """Return the type that Arrow prints this way."""
    return said.replace(", tz=UTC]", "]").replace("date32[day]", "date")


def _late(said: list[int] | None) -> LateSettings | None:
    return None if said is None else LateSettings(format_duration(said[0]), said[1])


def _required_sql(said: Document) -> str:
    if "sql" not in said:
        raise TypeError("a select by a function or an Arrow expression")
    return str(said["sql"])
