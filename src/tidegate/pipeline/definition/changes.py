"""Whether an app that was changed can go on with the state it has, and what that means for its results.

Flows are told by their names (their first sink). For each, what was recorded is held against what is said now
(`differences` has the rules); stores then keep the widths and columns they were made with.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import msgspec

from tidegate.durations import format_duration
from tidegate.errors import CorruptError, InvalidError
from tidegate.pipeline.definition.differences import Change, added_fields, declares_anew, differences
from tidegate.pipeline.definition.fingerprint import LAYOUTS, Document
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import Aggregate, Dedupe
from tidegate.windows.operators.late import LateSettings
from tidegate.windows.operators.layout import StateLayout

Kind: TypeAlias = Literal["same", "compatible", "incompatible"]
_WAYS_OUT = (
    "Change it back; or give the app another name, which starts anew beside this one; or let it begin anew with "
    "`tidegate app reset {app}`; or compute everything again from the log with `tidegate app replay {app}`. Where "
    "other windows or values are sent now, send them to another topic, too: a topic holds one encoding."
)


@dataclass(frozen=True)
class Changes:
    """All differences; `flows` are those to run, with stores laid out as those there are.

    `fresh` flows start from nothing, `removed` ones are not gone on with.
    """

    changes: tuple[Change, ...]
    flows: tuple[Flow, ...]
    fresh: frozenset[str]
    removed: frozenset[str]

    @property
    def kind(self) -> Kind:
        if not self.changes:
            return "same"
        return "compatible" if all(each.is_compatible for each in self.changes) else "incompatible"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should be told, a sentence each; what does not fit first."""
        return tuple(str(each) for each in sorted(self.changes, key=lambda each: each.is_compatible))

    def require(self, app: str) -> None:
        """`InvalidError` with what does not fit and the ways out."""
        wrong = [str(each) for each in self.changes if not each.is_compatible]
        if wrong:
            raise InvalidError(
                f"app {app} was changed in a way its state cannot follow:\n- "
                + "\n- ".join(wrong)
                + "\n"
                + _WAYS_OUT.format(app=app)
            )


def compare(recorded: Mapping[str, bytes], flows: Sequence[Flow]) -> Changes:
    """Hold the descriptions that were recorded, by flow, against the flows there are now."""
    found: list[Change] = []
    to_run: list[Flow] = []
    fresh: list[str] = []
    for flow in flows:
        before = recorded.get(flow.name)
        if before is None:
            fresh.append(flow.name)
            to_run.append(flow)
            start = "the beginning" if flow.source.start == "earliest" else "the end"
            found.append(
                Change(flow.name, True, "is new", f"it reads {flow.source.topic} from {start} of the log on")
            )
            continue
        described = _decoded(flow.name, before)
        found += differences(flow.name, described, flow.document)
        to_run.append(_laid_out(flow, described))
    removed = frozenset(recorded) - {flow.name for flow in flows}
    for name in sorted(removed):
        found.append(
            Change(
                name,
                True,
                "is not said any more",
                "its state and results stay as they are, and nothing is added to them",
            )
        )
    return Changes(tuple(found), tuple(to_run), frozenset(fresh), removed)


def as_recorded(flow: Flow, description: bytes) -> Flow:
    """The flow with its stores laid out as recorded: what a reader of committed state needs."""
    return _laid_out(flow, _decoded(flow.name, description))


def _decoded(name: str, description: bytes) -> Document:
    try:
        said: Document = msgspec.json.decode(description, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"the recorded definition of flow {name} cannot be read: {error}", kafka_name=None
        ) from None
    return said


def _laid_out(flow: Flow, recorded: Document) -> Flow:
    """The flow with the stores of before, where they differ from those it would choose."""
    steps = list(flow.steps)
    added = added_fields(recorded, flow.document)
    for place, name in flow.operators.items():
        step, laid = steps[place], recorded.get(LAYOUTS, {}).get(name)
        if laid is None or not isinstance(step, Aggregate | Dedupe):
            continue
        grown_from = sorted({*laid.get("grown_from", ()), *_fewer_aggregates(recorded, step)})
        layout = StateLayout(laid["bucket_ms"], laid["segment_ms"], tuple(grown_from))
        late, segment_ms = step.late, laid.get("late_segment_ms")
        if late is not None and segment_ms is not None:
            lacking = _lacking(laid, added if declares_anew(flow.document["steps"][:place]) is None else ())
            late = LateSettings(format_duration(late.retention_ms), late.max_bytes, segment_ms, lacking)
        steps[place] = replace(step, layout=layout, late=late)
    laid_out = Flow(flow.source, tuple(steps), flow.sinks)
    return flow if laid_out.document == flow.document else laid_out


def _lacking(laid: Document, added: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Of each earlier set of columns that a late table may hold, those of now that it lacks."""
    before = [sorted({*names, *added}) for names in laid.get("late_lacking", ())]
    return tuple(tuple(names) for names in [*before, *([sorted(added)] if added else [])])


def _fewer_aggregates(recorded: Document, step: Aggregate | Dedupe) -> list[int]:
    """How many aggregates there were, if there are more now."""
    before = [len(each["aggregates"]) for each in recorded["steps"] if each["step"] == "aggregate"]
    return [count for count in before if isinstance(step, Aggregate) and count < len(step.aggregates)]
