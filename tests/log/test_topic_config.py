"""Topic and broker settings: Kafka's names, defaults, ranges, synonyms and sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.config import INT_MAX, LONG_MAX
from tidegate.errors import InvalidError
from tidegate.log import topic_config
from tidegate.log.topic_config import (
    BROKER_ONLY_SETTINGS,
    SYNONYMS,
    TOPIC_SETTINGS,
    BrokerConfig,
    Source,
    TopicConfig,
    is_used,
)

TIMESTAMP_FIELDS = {  # read by `TopicConfig.timestamp_bounds_ms`, for everybody else
    "message_timestamp_before_max_ms",
    "message_timestamp_after_max_ms",
    "message_timestamp_difference_max_ms",
}

DEFAULTS = {
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
    "segment.jitter.ms": "0",
    "segment.index.bytes": "10485760",
    "index.interval.bytes": "4096",
    "retention.ms": "604800000",
    "retention.bytes": "-1",
    "file.delete.delay.ms": "60000",
    "cleanup.policy": "delete",
    "delete.retention.ms": "86400000",
    "min.compaction.lag.ms": "0",
    "max.compaction.lag.ms": "9223372036854775807",
    "min.cleanable.dirty.ratio": "0.5",
    "max.message.bytes": "1048588",
    "flush.messages": "9223372036854775807",
    "flush.ms": "9223372036854775807",
    "compression.type": "producer",
    "compression.gzip.level": "-1",
    "compression.lz4.level": "9",
    "compression.zstd.level": "3",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.before.max.ms": "9223372036854775807",
    "message.timestamp.after.max.ms": "9223372036854775807",
    "message.timestamp.difference.max.ms": "9223372036854775807",
    "message.format.version": "3.0-IV1",
    "message.downconversion.enable": "true",
    "leader.replication.throttled.replicas": "",
    "follower.replication.throttled.replicas": "",
    "preallocate": "false",
    "min.insync.replicas": "1",
    "unclean.leader.election.enable": "false",
    "remote.storage.enable": "false",
    "local.retention.ms": "-2",
    "local.retention.bytes": "-2",
}


def test_every_topic_setting_has_kafkas_default() -> None:
    assert {entry.key: entry.value for entry in TopicConfig().describe()} == DEFAULTS
    assert {entry.source for entry in TopicConfig().describe()} == {Source.DEFAULT}
    assert TopicConfig() == TopicConfig.of({})


@pytest.mark.parametrize(
    ("key", "lowest", "highest"),
    [
        ("segment.bytes", 14, INT_MAX),
        ("segment.ms", 1, LONG_MAX),
        ("segment.jitter.ms", 0, LONG_MAX),
        ("segment.index.bytes", 4, INT_MAX),
        ("index.interval.bytes", 0, INT_MAX),
        ("retention.ms", -1, LONG_MAX),
        ("retention.bytes", -(2**63), LONG_MAX),
        ("file.delete.delay.ms", 0, LONG_MAX),
        ("delete.retention.ms", 0, LONG_MAX),
        ("min.compaction.lag.ms", 0, LONG_MAX),
        ("max.compaction.lag.ms", 1, LONG_MAX),
        ("min.cleanable.dirty.ratio", 0, 1),
        ("max.message.bytes", 0, INT_MAX),
        ("flush.messages", 1, LONG_MAX),
        ("flush.ms", 0, LONG_MAX),
        ("compression.gzip.level", -1, 9),
        ("compression.lz4.level", 1, 17),
        ("compression.zstd.level", -131072, 22),
        ("message.timestamp.before.max.ms", 0, LONG_MAX),
        ("message.timestamp.after.max.ms", 0, LONG_MAX),
        ("min.insync.replicas", 1, INT_MAX),
        ("local.retention.ms", -2, LONG_MAX),
        ("local.retention.bytes", -2, LONG_MAX),
    ],
)
def test_both_ends_of_a_range_are_accepted_and_what_lies_beyond_is_not(
    key: str, lowest: int, highest: int
) -> None:
    for value in (lowest, highest):
        assert TopicConfig.of({key: str(value)}).source(key) is Source.TOPIC
    for value in (lowest - 1, highest + 1):
        with pytest.raises(InvalidError, match=key):
            TopicConfig.of({key: str(value)})


def test_values_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InvalidError, match="lower the first or raise the second"):
        TopicConfig.of({"min.compaction.lag.ms": "11", "max.compaction.lag.ms": "10"})
    assert TopicConfig.of({"min.compaction.lag.ms": "10", "max.compaction.lag.ms": "10"})
    with pytest.raises(InvalidError, match="gzip"):
        TopicConfig.of({"compression.gzip.level": "0"})
    with pytest.raises(InvalidError, match="tiered"):
        TopicConfig.of({"remote.storage.enable": "true"})
    with pytest.raises(InvalidError):
        TopicConfig(segment_bytes=1)


@pytest.mark.parametrize(
    ("broker", "key", "value", "origin"),
    [
        ({"log.retention.hours": "2"}, "retention.ms", "7200000", "log.retention.hours"),
        (
            {"log.retention.hours": "2", "log.retention.minutes": "5"},
            "retention.ms",
            "300000",
            "log.retention.minutes",
        ),
        (
            {"log.retention.hours": "2", "log.retention.minutes": "5", "log.retention.ms": "7"},
            "retention.ms",
            "7",
            "log.retention.ms",
        ),
        ({"log.retention.ms": "-7"}, "retention.ms", "-1", "log.retention.ms"),
        ({"log.retention.hours": "-1"}, "retention.ms", "-1", "log.retention.hours"),
        ({"log.roll.hours": "1", "log.roll.ms": "9"}, "segment.ms", "9", "log.roll.ms"),
        ({"log.roll.hours": "1"}, "segment.ms", "3600000", "log.roll.hours"),
        ({"log.roll.jitter.hours": "1"}, "segment.jitter.ms", "3600000", "log.roll.jitter.hours"),
        (
            {"log.flush.scheduler.interval.ms": "5", "log.flush.interval.ms": "6"},
            "flush.ms",
            "6",
            "log.flush.interval.ms",
        ),
        ({"message.max.bytes": "99"}, "max.message.bytes", "99", "message.max.bytes"),
        ({"log.cleanup.policy": "compact,delete"}, "cleanup.policy", "compact,delete", "log.cleanup.policy"),
        (
            {"log.cleaner.min.cleanable.ratio": "0.1"},
            "min.cleanable.dirty.ratio",
            "0.1",
            "log.cleaner.min.cleanable.ratio",
        ),
        ({"compression.type": "zstd"}, "compression.type", "zstd", "compression.type"),
    ],
)
def test_a_broker_setting_stands_under_the_topics_own(
    broker: dict[str, str], key: str, value: str, origin: str
) -> None:
    config = TopicConfig.of({}, broker=BrokerConfig.of(broker))
    assert (config.value(key), config.source(key)) == (value, Source.BROKER)
    assert config.origins[key].key == origin
    own = TopicConfig.of({key: DEFAULTS[key]}, broker=BrokerConfig.of(broker))
    assert (own.value(key), own.source(key)) == (DEFAULTS[key], Source.TOPIC)


def test_every_synonym_is_accepted_in_server_properties() -> None:
    for key in (name for pairs in SYNONYMS.values() for name, _ in pairs):
        topic_key = next(topic for topic, pairs in SYNONYMS.items() if key in dict(pairs))
        typed = DEFAULTS[topic_key] if dict(SYNONYMS[topic_key])[key] == 1 else "3"
        assert key in BrokerConfig.of({key: typed}).topic_defaults


def test_a_broker_keeps_records_for_some_time_or_for_ever() -> None:
    for key in ("log.retention.ms", "log.retention.minutes", "log.retention.hours"):
        with pytest.raises(InvalidError, match="1 or more, or -1"):
            BrokerConfig.of({key: "0"})


def test_a_mistyped_storage_key_is_an_error_and_a_foreign_one_is_read_over() -> None:
    with pytest.raises(InvalidError, match=r"did you mean log\.retention\.hours"):
        BrokerConfig.of({"log.retention.hour": "2"})
    with pytest.raises(InvalidError, match=r"message\.max\.bytes"):
        BrokerConfig.of({"message.max.byte": "2"})
    read_over = {
        "listeners": "PLAINTEXT://:9092",
        "node.id": "1",
        "log.dirs": "/x",
        "process.roles": "broker",
    }
    assert set(BrokerConfig.of(read_over).ignored) == set(read_over)


def test_settings_that_do_nothing_here_are_listed_as_ignored() -> None:
    told = {"num.recovery.threads.per.data.dir": "4", "min.insync.replicas": "2", "log.retention.hours": "3"}
    assert BrokerConfig.of(told).ignored == ("num.recovery.threads.per.data.dir", "min.insync.replicas")


def test_a_setting_says_that_it_is_not_used_exactly_when_nothing_reads_it() -> None:
    """Every field of the two records is read somewhere in the sources, or its summary says that it is not."""
    sources = Path(topic_config.__file__).parents[2]
    read = {
        node.attr
        for path in sources.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and not (path.name == "topic_config.py" and node.attr not in TIMESTAMP_FIELDS)
    }
    for setting in [*TOPIC_SETTINGS, *BROKER_ONLY_SETTINGS]:
        if setting.name != "remote.storage.enable":  # refused
            assert is_used(setting) is (setting.name.replace(".", "_").replace("-", "_") in read), setting


def test_broker_only_settings_have_kafkas_defaults_and_tell_their_source() -> None:
    shown = {entry.key: (entry.value, entry.source) for entry in BrokerConfig().describe()}
    assert shown["log.retention.check.interval.ms"] == ("300000", Source.DEFAULT)
    assert shown["producer.id.expiration.ms"] == ("86400000", Source.DEFAULT)
    assert len(shown) == len(list(BROKER_ONLY_SETTINGS)) == 16
    changed = BrokerConfig.of({"log.retention.check.interval.ms": "1s"})
    assert changed.log_retention_check_interval_ms == 1000
    assert changed.describe()[0].source is Source.BROKER
    with pytest.raises(InvalidError):
        BrokerConfig.of({"log.retention.check.interval.ms": "0"})


def test_alter_changes_unsets_and_keeps_the_rest() -> None:
    before = TopicConfig.of({"retention.ms": "1", "segment.bytes": "16KiB"})
    after = before.altered({"retention": "2s"}, unset=["segment.bytes"])
    assert after.overrides() == {"retention.ms": "2000"}
    assert after.segment_bytes == 1 << 30
    assert before.overrides() == {"retention.ms": "1", "segment.bytes": "16384"}


def test_the_age_that_rolls_is_shortened_by_compaction_only() -> None:
    settings = {"segment.ms": "100", "max.compaction.lag.ms": "10"}
    assert TopicConfig.of(settings).max_segment_ms == 100
    compacted = TopicConfig.of({**settings, "cleanup.policy": "compact"})
    assert compacted.max_segment_ms == 10
    assert (compacted.compacts, compacted.deletes) == (True, False)


@given(st.dictionaries(st.sampled_from([setting.name for setting in TOPIC_SETTINGS]), st.text(max_size=12)))
def test_any_typed_setting_is_a_valid_config_or_one_clear_error(typed: dict[str, str]) -> None:
    try:
        config = TopicConfig.of(typed)
    except InvalidError as error:
        assert error.kafka_name == "INVALID_CONFIG"
    else:
        assert TopicConfig.of(config.overrides()) == config


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("leader.replication.throttled.replicas", "*", "*"),
        ("follower.replication.throttled.replicas", "0:1,1:2", "0:1,1:2"),
        ("message.downconversion.enable", "false", "false"),
        ("message.format.version", "2.8-IV1", "2.8-IV1"),
        ("message.timestamp.difference.max.ms", "1000", "1000"),
    ],
)
def test_every_topic_setting_of_kafka_3_9_is_taken(key: str, value: str, shown: str) -> None:
    assert TopicConfig.of({key: value}).overrides() == {key: shown}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("leader.replication.throttled.replicas", "all"),
        ("follower.replication.throttled.replicas", "0:1,2"),
        ("message.format.version", "newest"),
        ("message.timestamp.difference.max.ms", "-1"),
    ],
)
def test_their_values_are_checked_as_a_broker_does(key: str, value: str) -> None:
    with pytest.raises(InvalidError, match=key):
        TopicConfig.of({key: value})


def test_the_deprecated_difference_limits_both_sides_that_are_not_limited() -> None:
    assert TopicConfig.of({"message.timestamp.difference.max.ms": "5"}).timestamp_bounds_ms == (5, 5)
    both = {"message.timestamp.difference.max.ms": "5", "message.timestamp.after.max.ms": "9"}
    assert TopicConfig.of(both).timestamp_bounds_ms == (5, 9)
    assert TopicConfig().timestamp_bounds_ms == (2**63 - 1, 2**63 - 1)
