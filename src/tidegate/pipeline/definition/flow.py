"""A flow: one source, steps in order, and where the results go; all that follows from these, worked out once.

A flow that exists is valid: names and types fit, and it can be run as it is. What follows from the definition is
plain to read: the columns after each step, whether records must change places (`rekey_at`), how many tasks there
are, the names of the operators that keep state, and the fingerprint that tells a changed flow from the same one.

Flows travel to workers as they are, so nothing in them holds a connection, a file or a lock.

Thread rule: values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from tidegate.pipeline.definition.checking import Shape, check_sinks, check_steps, rekeying
from tidegate.pipeline.definition.fingerprint import canonical, flow_digest, flow_document
from tidegate.pipeline.definition.steps import (
    Aggregate,
    AsTable,
    Dedupe,
    KeyBy,
    Sink,
    Source,
    Step,
    To,
    sink_name,
)
from tidegate.pipeline.definition.values import ValueFormat
from tidegate.tables.serdes.base import Serde
from tidegate.windows.kinds import Session, as_table


@dataclass(frozen=True, eq=False, repr=False)
class Flow:
    """Source, steps and sinks; equal to another flow that says the same."""

    source: Source
    steps: tuple[Step, ...]
    sinks: tuple[Sink, ...]
    schemas: tuple[pa.Schema, ...] = field(init=False)
    """The columns of the source, then those after each step."""
    rekey_at: int | None = field(init=False)
    """Which step is the `KeyBy` whose records must be brought together by their new key, if there is one."""
    why: str = field(init=False)
    """Why it is co-partitioned or re-keyed, in a sentence."""

    def __post_init__(self) -> None:
        if self.tables and self.window is not None:  # what is read must be kept to be read
            kept = replace(self.window, kind=as_table(self.window.kind))
            object.__setattr__(self, "steps", (*self.steps[:-1], kept))
        shape: Shape = check_steps(self.source, self.steps)
        check_sinks(self.source, self.steps, self.sinks, shape)
        rekey_at, why = rekeying(self.source, self.steps)
        object.__setattr__(self, "schemas", shape.schemas)
        object.__setattr__(self, "rekey_at", rekey_at)
        object.__setattr__(self, "why", why)
        object.__setattr__(self, "_key_serdes", shape.key_serdes)

    @property
    def name(self) -> str:
        """The name of the first sink: what the flow's state is kept under."""
        return sink_name(self.sinks[0])

    @property
    def window(self) -> Aggregate | None:
        """The step that makes windows, if there is one: it is the last."""
        last = self.steps[-1] if self.steps else None
        return last if isinstance(last, Aggregate) else None

    @property
    def result(self) -> Literal["windows", "events"]:
        return "events" if self.window is None else "windows"

    @property
    def result_schema(self) -> pa.Schema:
        """The columns of the results: of windows, what was aggregated, without key and bounds."""
        return self.schemas[-1]

    @property
    def key_serdes(self) -> tuple[Serde[Any], ...]:
        """How keys are read at the source, then after each step."""
        serdes: tuple[Serde[Any], ...] = self._key_serdes  # type: ignore[attr-defined]
        return serdes

    @property
    def key_serde(self) -> Serde[Any]:
        """How the keys of the results are read and written."""
        return self.key_serdes[-1]

    @property
    def shards(self) -> int | None:
        """How many tasks a re-keyed flow has, for the app's life; None: as many as the source has partitions."""
        step = None if self.rekey_at is None else self.steps[self.rekey_at]
        return step.shards if isinstance(step, KeyBy) else None

    @property
    def is_stateful(self) -> bool:
        return bool(self.operators)

    @cached_property
    def is_ordered(self) -> bool:
        """Whether events of several source partitions meet in a step whose result depends on their order.

        That is `drop_duplicates`, sessions and a user's own `reduce` behind a `key_by`. Other aggregates of other
        windows come to the same in any order.
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
        """The steps that keep state, with the names their stores have; other steps may come and go beside them."""
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
        """How many tasks there are when the source has so many partitions."""
        return partitions if self.shards is None else self.shards

    @cached_property
    def document(self) -> dict[str, Any]:
        """The definition as plain values: what is stored, compared and shown."""
        return flow_document(self)

    @cached_property
    def fingerprint(self) -> str:
        """The same for flows that say the same, in any process."""
        return flow_digest(self.document)

    @property
    def description(self) -> bytes:
        """The document as canonical JSON: what is stored, for `changes.compare` to look at later."""
        return canonical(self.document)

    def value_format(self, sink: To) -> ValueFormat:
        """What writes the values of one of the topics."""
        return ValueFormat.of(sink, self.result_schema, self.window)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        plan = "co-partitioned" if self.rekey_at is None else f"re-keyed over {self.shards} tasks"
        return f"<Flow {self.name}: {self.source.topic} → {len(self.steps)} steps → {self.result}, {plan}>"
