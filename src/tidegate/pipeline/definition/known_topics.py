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
from tidegate.pipeline.definition.steps import Aggregate, To, WindowKind
from tidegate.tables.options import Consumed
from tidegate.tables.serdes.base import Serde, String
from tidegate.windows.kinds import Hopping, Session, Sliding, Unlimited
from tidegate.windows.operators.windowed_operator import Emit

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
    """How a changelog is written, and for how long after its end a window may change: as said, or as known."""
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
    """For how long after its end a window's rows may still be sent, by the largest timestamp sent before."""
    kind = window.kind
    if window.emit is Emit.CLOSE or isinstance(kind, Unlimited):
        return 0  # rows come in the order of their windows' ends
    if isinstance(kind, Session):
        return kind.gap_ms + kind.grace_ms
    return kind.grace_ms + (1 if isinstance(kind, Sliding) else 0)


def check_reading(flows: Sequence[Flow]) -> None:
    """Refuse flows that read what another one writes as something it is not: their numbers would be wrong."""
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
