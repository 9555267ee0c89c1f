"""The facts of a flow that planning needs: numbers and names only.

Thread rule: immutable values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.errors import InternalError
from tidegate.pipeline.flow import Flow
from tidegate.pipeline.topology import Aggregate, Dedupe, Lookup
from tidegate.windows.kinds import Unlimited


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
