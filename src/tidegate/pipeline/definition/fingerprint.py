"""What a definition says, as plain values: the same in every process, so that definitions can be stored and compared.

A document holds dicts, lists, strings, numbers and nothing else. The fingerprint is BLAKE2b of its canonical JSON
(keys in order, no blanks). Nothing about places is in it: an app that moves to another folder or cluster stays the
same app.

Functions are told by module and name. Their code is digested, too (bytecode, constants, plain values they enclose),
so a changed body is seen; another version of Python changes it as well, which is why `changes` only remarks on it.

Thread rule: pure functions.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from tidegate.pipeline.definition.steps import (
    Aggregate,
    AsTable,
    Dedupe,
    Filter,
    KeyBy,
    Lookup,
    Map,
    OnErrors,
    Select,
    Source,
    To,
    Validate,
)
from tidegate.tables.serdes.avro import Avro
from tidegate.tables.serdes.base import WindowedSerde
from tidegate.tables.serdes.json import Json
from tidegate.windows.aggregates.definitions import AggregateDefinition, Reducer
from tidegate.windows.kinds import Hopping, Session, Sliding, Unlimited
from tidegate.windows.operators.layout import dedupe_layout, window_layout

if TYPE_CHECKING:
    from tidegate.pipeline.definition.flow import Flow

Document = dict[str, Any]
LAYOUTS = "layouts"
_PLAIN = (bool, int, float, str, bytes, type(None))


def canonical(document: Any) -> bytes:
    """A document as the bytes that stand for it."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(document: Any) -> str:
    return hashlib.blake2b(canonical(document), digest_size=16).hexdigest()


def flow_document(flow: Flow) -> Document:
    """All that a flow says, and how the stores are laid out that it goes on with."""
    return {
        "name": flow.name,
        "source": document(flow.source),
        "steps": [document(step) for step in flow.steps],
        "sinks": [document(sink) for sink in flow.sinks],
        LAYOUTS: {name: layout(flow.steps[place]) for place, name in flow.operators.items()},
    }


def flow_digest(said: Document) -> str:
    """The fingerprint of a flow's document; what was laid out before does not change what is said."""
    return digest({name: value for name, value in said.items() if name != LAYOUTS})


def layout(step: Any) -> Document:
    """The widths of an operator's stores, and how many aggregates states of before have."""
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


def document(said: Any) -> Document:
    """A source, a step or a sink as plain values."""
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
                else said.on_error,  # as it has always been stored
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
    """A kind of windows; durations in milliseconds."""
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
    options: Document = {}
    for name, value in definition.options:
        options[name] = _reducer(value) if isinstance(value, Reducer) else value
    return {
        "name": definition.name,
        "kind": definition.kind,
        "columns": list(definition.columns),
        "options": options,
    }


def serde(said: Any) -> Any:
    """What a serde reads and writes; where its registry is does not count."""
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
    """SQL as it was written, an Arrow expression as Arrow prints it, a function by name and code."""
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
    parts = [*_code_parts(code)]
    for cell in getattr(inner, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # a name that was never bound
            continue
        if isinstance(value, _PLAIN):
            parts.append(repr(value))
    for value in (*getattr(said, "args", ()), *sorted(getattr(said, "keywords", {}).items())):
        parts.append(repr(value))
    for value in getattr(inner, "__defaults__", None) or ():
        if isinstance(value, _PLAIN):
            parts.append(repr(value))
    return {
        "function": f"{inner.__module__}:{inner.__qualname__}",
        "code": hashlib.blake2b("\0".join(parts).encode(), digest_size=8).hexdigest(),
    }


def without_code(said: Any) -> Any:
    """A document in which functions are told by their names alone."""
    if isinstance(said, Mapping):
        if "function" in said and "code" in said:
            return {name: without_code(value) for name, value in said.items() if name != "code"}
        return {name: without_code(value) for name, value in said.items()}
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
    """What a function does, without where it stands; docstrings are constants and count, for what it is worth."""
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
