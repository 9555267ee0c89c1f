"""What an app knows of the topics it writes, so that its own results can be read without saying everything twice.

Of a topic that one of its flows ends in, the serdes, the kind and the size of windows are known, and asking for
another kind of table is refused. Of any other topic keys are text, as for streams, and values bytes, unless said.

Thread rule: pure functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from tidegate.durations import DurationLike, duration_ms, format_duration
from tidegate.errors import InvalidError
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.steps import To
from tidegate.tables.building.consumed import Consumed
from tidegate.tables.serdes.plain import Serde, String
from tidegate.windows.kinds import Hopping, Session, Sliding

TableKind: TypeAlias = Literal["windowed_table", "sessioned_table", "table"]


def find(flows: Sequence[Flow], topic: str) -> tuple[Flow, To] | None:
    """The flow that ends in a topic, and that end."""
    for flow in flows:
        for sink in flow.topics:
            if sink.topic == topic:
                return flow, sink
    return None


def check_kind(flows: Sequence[Flow], topic: str, wanted: TableKind) -> None:
    """Refuse to read results as something they are not."""
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
    """The size of a topic's windows: as said, or as known; both must agree."""
    known = find(flows, topic)
    kind = None if known is None or known[0].window is None else known[0].window.kind
    here = (
        kind.size_ms
        if isinstance(kind, Hopping)
        else kind.difference_ms
        if isinstance(kind, Sliding)
        else None
    )
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
    """How keys and values of a topic are read."""
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
