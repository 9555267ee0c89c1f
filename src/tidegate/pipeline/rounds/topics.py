"""The topics an app needs: those it reads must exist, those it writes are made where they are missing.

What the app writes to a topic is recorded with it (`tables/topic_encoding`), and another encoding is refused.

Thread rule: one master, one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from tidegate.durations import format_duration
from tidegate.errors import InvalidError
from tidegate.integrity.verdicts import INTEGRITY_LAG_MS
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log
from tidegate.pipeline.definition.fingerprint import serde, window
from tidegate.pipeline.definition.flow import Flow
from tidegate.pipeline.definition.known_topics import find
from tidegate.pipeline.definition.steps import To
from tidegate.pipeline.rounds.facts import FlowFacts
from tidegate.pipeline.rounds.heads import Heads
from tidegate.storage.backends.base import StorageBackend
from tidegate.tables.topic_encoding import TopicEncoding, read_encoding, record_encoding, require_fit
from tidegate.windows.changelog import StoreKind, changelog_settings
from tidegate.windows.kinds import Session, Unlimited

CLIENT_BATCH_BYTES: Final = 1_000_000  # librdkafka's default of message.max.bytes


def make_topics(
    log: Log | KafkaLog,
    backend: StorageBackend,
    app: str,
    flows: Sequence[Flow],
    facts: Mapping[str, FlowFacts],
) -> dict[str, int]:
    """Make what is missing of the topics the flows write; the number of partitions of each of them."""
    counts = log.partition_counts()
    for flow in flows:
        for sink in flow.topics:
            wanted = facts[flow.name].tasks if sink.partitions is None else sink.partitions
            if sink.topic not in counts:
                log.create_topic(sink.topic, wanted, sink_settings(flow, sink), if_not_exists=True)
                counts = log.partition_counts()
            elif sink.partitions is not None and counts[sink.topic] != wanted:
                raise InvalidError(
                    f"topic {sink.topic} has {counts[sink.topic]} partitions, and flow {flow.name} is to write "
                    f"{wanted}: leave out partitions=, or write to another topic"
                )
            _keep_encoding(log, backend, app, counts[sink.topic], sink.topic, encoding_of(flow, sink))
    return {sink.topic: counts[sink.topic] for flow in flows for sink in flow.topics}


def largest_batch(log: Log | KafkaLog, topic: str, client: Mapping[str, str]) -> int:
    """The bytes of the largest batch that can be written to the topic; to a cluster, that the client sends."""
    if not isinstance(log, Log):
        return int(client.get("message.max.bytes", CLIENT_BATCH_BYTES))
    config = log.describe(topic).config
    return min(config.max_message_bytes, config.segment_bytes)


def require_as_recorded(log: Log | KafkaLog, backend: StorageBackend, flows: Sequence[Flow]) -> None:
    """Refuse windows over changes of a topic that is recorded to be written otherwise than it is read."""
    counts = log.partition_counts()
    for flow in flows:
        source = flow.source
        if source.windows is None or not flow.is_stateful or source.topic not in counts:
            continue
        recorded = read_encoding(log, backend, source.topic)
        if recorded is None or not recorded.emit:
            continue
        if source.emit != recorded.emit:
            raise InvalidError(
                f"flow {flow.name} reads changes of {source.topic} as emit={str(source.emit)!r}, and the topic is "
                f"written with emit={recorded.emit!r}: say app.changes({source.topic!r}, emit={recorded.emit!r}, …)"
            )
        if recorded.window_size_ms != source.windows.size_ms:
            said, made = (
                "sessions" if size is None else f"windows of {format_duration(size)}"
                for size in (source.windows.size_ms, recorded.window_size_ms)
            )
            raise InvalidError(
                f"flow {flow.name} reads changes of {source.topic} as {said}, and the topic has {made}"
            )


def require_one_writer(
    flows: Sequence[Flow], facts: Mapping[str, FlowFacts], counts: Mapping[str, int]
) -> None:
    """Refuse windows over changes of a topic whose partitions several tasks write: none knows what is final for all."""
    for flow in flows:
        if flow.source.windows is None or not flow.is_stateful:
            continue
        known = find(flows, flow.source.topic)
        if known is not None and counts[flow.source.topic] != facts[known[0].name].tasks:
            topic, tasks = flow.source.topic, facts[known[0].name].tasks
            raise InvalidError(
                f"flow {flow.name} makes windows of the changes in {topic}, which has {counts[topic]} partitions and "
                f"{tasks} tasks that write it: of one that is ahead, changes by the others would come too late. Leave "
                f"partitions= out of .to_topic({topic!r}), and let the app make the topic"
            )


def encoding_of(flow: Flow, sink: To) -> TopicEncoding:
    """What the keys and values of a flow's records in a topic are."""
    value = flow.value_format(sink)
    said = (
        {"json": [[each.name, str(each.type)] for each in flow.result_schema]}
        if value.serde is None
        else serde(value.serde)
    )
    key, aggregate = serde(flow.key_serde), flow.window
    if aggregate is None:
        return TopicEncoding(key, said)
    kind = {
        name: length
        for name, length in window(aggregate.kind).items()
        if name not in ("grace_ms", "retention_ms")  # not in the records, and may grow
    }
    return TopicEncoding(key, said, kind, sink.key_format, str(aggregate.emit))


def _keep_encoding(
    log: Log | KafkaLog, backend: StorageBackend, app: str, partitions: int, topic: str, now: TopicEncoding
) -> None:
    """Record the encoding, or refuse it where the topic holds records of another one."""
    recorded = read_encoding(log, backend, topic)
    if recorded == now:
        return
    if recorded is not None and any(head.end for head in Heads(log).of(topic, partitions).values()):
        now = require_fit(topic, recorded, now, app)
    if recorded != now:
        record_encoding(log, backend, topic, now)


def sink_settings(flow: Flow, sink: To) -> dict[str, str]:
    """How a topic of results is kept: windows as Kafka Streams keeps a changelog, others as the log's default says.

    Numbered records stay for a day at least before compaction may take them: a gap among younger ones is loss.
    """
    window = flow.window
    if window is None:
        return {}
    own = {"min.compaction.lag.ms": str(INTEGRITY_LAG_MS)} if sink.integrity else {}
    if isinstance(window.kind, Unlimited):
        return changelog_settings("key-value", own=own)
    kind: StoreKind = "session" if isinstance(window.kind, Session) else "window"
    return changelog_settings(kind, retention=window.kind.retention_ms, own=own)
