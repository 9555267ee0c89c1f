"""What a topic does and why: every setting of `topic_settings.py` as a typed value with its source.

A topic's own value wins over the broker's static one (`server.properties`), which wins over the default;
among broker synonyms the finer unit wins (`log.retention.ms`, then `.minutes`, then `.hours`).

C1  a `TopicConfig` or `BrokerConfig` that exists is valid: ranges and cross-checks are tested at its birth.
C2  both are immutable; an altered topic gets a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final, NamedTuple

from tidegate.config import LONG_MAX, SettingValue
from tidegate.errors import InvalidError
from tidegate.log.topics.topic_settings import (
    BROKER_ONLY_SETTINGS,
    BROKER_SETTINGS,
    IGNORED_BROKER_KEYS,
    SYNONYMS,
    TOPIC_SETTINGS,
    is_used,
)

__all__ = ["BrokerConfig", "ConfigEntry", "Source", "TopicConfig"]


_THROTTLED: Final = re.compile(r"(\d+:\d+( *, *\d+:\d+)*)?")
_VERSION: Final = re.compile(r"(0\.(8|9|10|11)\.\d|1\.[01]|2\.[0-8]|3\.\d)(\.\d+)*(-IV\d)?")


class Source(Enum):
    """Where a value came from, in Kafka's words; ASSUMED is ours, for folders without a catalog."""

    TOPIC = "DYNAMIC_TOPIC_CONFIG"
    DYNAMIC_BROKER = "DYNAMIC_BROKER_CONFIG"
    DYNAMIC_DEFAULT_BROKER = "DYNAMIC_DEFAULT_BROKER_CONFIG"
    BROKER = "STATIC_BROKER_CONFIG"
    DEFAULT = "DEFAULT_CONFIG"
    ASSUMED = "ASSUMED"

    def __str__(self) -> str:
        return self.value


class ConfigEntry(NamedTuple):
    """One line of `describe`: KEY VALUE SOURCE."""

    key: str
    value: str
    source: Source


class Origin(NamedTuple):
    """Who set a value, and under which name it was set there."""

    source: Source
    key: str


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The settings of a whole log folder. `topic_defaults` holds those that topics inherit, by broker key."""

    log_retention_check_interval_ms: int = 300_000
    log_initial_task_delay_ms: int = 30_000
    log_flush_offset_checkpoint_interval_ms: int = 60_000
    log_flush_start_offset_checkpoint_interval_ms: int = 60_000
    replica_high_watermark_checkpoint_interval_ms: int = 5000
    num_recovery_threads_per_data_dir: int = 1
    log_cleaner_enable: bool = True
    log_cleaner_threads: int = 1
    log_cleaner_dedupe_buffer_size: int = 134_217_728
    log_cleaner_io_buffer_load_factor: float = 0.9
    log_cleaner_io_buffer_size: int = 524_288
    log_cleaner_io_max_bytes_per_second: float = 1.7976931348623157e308
    log_cleaner_backoff_ms: int = 15_000
    producer_id_expiration_ms: int = 86_400_000
    producer_id_expiration_check_interval_ms: int = 600_000
    transaction_max_timeout_ms: int = 900_000
    topic_defaults: Mapping[str, SettingValue] = field(default_factory=dict)
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for setting in BROKER_ONLY_SETTINGS:
            object.__setattr__(self, _field(setting.name), setting.parse(getattr(self, _field(setting.name))))
        for topic_key in SYNONYMS:
            _inherited(topic_key, self.topic_defaults)

    @classmethod
    def of(cls, typed: Mapping[str, Any]) -> BrokerConfig:
        """From `server.properties` keys.

        Keys that do nothing here, because they do not concern storage (`listeners`, …) or are not used, are listed in
        `ignored`; a mistyped storage key is an error: a retention that silently stays at its default costs data or a
        disk.
        """
        storage, ignored = {}, []
        for key, value in typed.items():
            if key in BROKER_SETTINGS:
                storage[key] = value
                if not is_used(BROKER_SETTINGS[key]):
                    ignored.append(key)
            elif key in IGNORED_BROKER_KEYS or not (
                key.startswith("log.") or BROKER_SETTINGS.nearest(key, likeness=0.85)
            ):
                ignored.append(key)
            else:
                BROKER_SETTINGS.find(key, value)  # raises, naming the nearest
                storage[key] = value
        parsed = BROKER_SETTINGS.parse(storage)
        own = {_field(key): value for key, value in parsed.items() if key in BROKER_ONLY_SETTINGS}
        inherited = {key: value for key, value in parsed.items() if key not in BROKER_ONLY_SETTINGS}
        return cls(
            **own,  # type: ignore[arg-type]
            topic_defaults=inherited,
            explicit=frozenset(parsed),
            ignored=tuple(ignored),
        )

    def inherited(self, topic_key: str) -> tuple[SettingValue, str] | None:
        """The broker's value for a topic setting and the broker key that says so, None when none does."""
        return _inherited(topic_key, self.topic_defaults)

    def describe(self) -> list[ConfigEntry]:
        """The broker-only settings, KEY VALUE SOURCE."""
        return [
            ConfigEntry(
                setting.name,
                setting.format(getattr(self, _field(setting.name))),
                Source.BROKER if setting.name in self.explicit else Source.DEFAULT,
            )
            for setting in BROKER_ONLY_SETTINGS
        ]


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings in force for one topic. `TopicConfig()` is all defaults; `of` reads dotted names."""

    segment_bytes: int = 1 << 30
    segment_ms: int = 604_800_000
    segment_jitter_ms: int = 0
    segment_index_bytes: int = 10 << 20
    index_interval_bytes: int = 4096
    retention_ms: int = 604_800_000
    retention_bytes: int = -1
    file_delete_delay_ms: int = 60_000
    cleanup_policy: frozenset[str] = frozenset({"delete"})
    delete_retention_ms: int = 86_400_000
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = LONG_MAX
    min_cleanable_dirty_ratio: float = 0.5
    max_message_bytes: int = 1_048_588
    flush_messages: int = LONG_MAX
    flush_ms: int = LONG_MAX
    compression_type: str = "producer"
    compression_gzip_level: int = -1
    compression_lz4_level: int = 9
    compression_zstd_level: int = 3
    message_timestamp_type: str = "CreateTime"
    message_timestamp_before_max_ms: int = LONG_MAX
    message_timestamp_after_max_ms: int = LONG_MAX
    message_timestamp_difference_max_ms: int = LONG_MAX
    message_format_version: str = "3.0-IV1"
    message_downconversion_enable: bool = True
    preallocate: bool = False
    min_insync_replicas: int = 1
    unclean_leader_election_enable: bool = False
    leader_replication_throttled_replicas: str = ""
    follower_replication_throttled_replicas: str = ""
    remote_storage_enable: bool = False
    local_retention_ms: int = -2
    local_retention_bytes: int = -2
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for setting in TOPIC_SETTINGS:
            value = setting.parse(getattr(self, _field(setting.name)))
            object.__setattr__(self, _field(setting.name), value)
        if not self.origins:
            origins = {
                setting.name: Origin(
                    Source.DEFAULT
                    if getattr(self, _field(setting.name)) == setting.default
                    else Source.TOPIC,
                    setting.name,
                )
                for setting in TOPIC_SETTINGS
            }
            object.__setattr__(self, "origins", origins)
        self._cross_check()

    @classmethod
    def of(
        cls,
        typed: Mapping[str, Any] | None = None,
        *,
        broker: BrokerConfig | None = None,
        assumed: bool = False,
    ) -> TopicConfig:
        """From dotted names over a broker's values over the defaults; `assumed` marks what is guessed."""
        own = TOPIC_SETTINGS.parse(typed or {})
        broker = broker if broker is not None else BrokerConfig()
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = {}
        for setting in TOPIC_SETTINGS:
            key = setting.name
            if key in own:
                values[_field(key)], origins[key] = own[key], Origin(Source.TOPIC, key)
            elif (inherited := broker.inherited(key)) is not None:
                values[_field(key)], origins[key] = inherited[0], Origin(Source.BROKER, inherited[1])
            else:
                values[_field(key)] = setting.default
                origins[key] = Origin(Source.ASSUMED if assumed else Source.DEFAULT, key)
        return cls(**values, origins=origins)

    @property
    def compacts(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def deletes(self) -> bool:
        return "delete" in self.cleanup_policy

    @property
    def max_segment_ms(self) -> int:
        """Age at which a log segment rolls: compaction's maximum lag shortens it."""
        return min(self.max_compaction_lag_ms, self.segment_ms) if self.compacts else self.segment_ms

    @property
    def timestamp_bounds_ms(self) -> tuple[int, int]:
        """How far a timestamp may lie in the past and in the future.

        The deprecated `message.timestamp.difference.max.ms` stands in for either that is not limited.
        """
        either = self.message_timestamp_difference_max_ms
        before, after = self.message_timestamp_before_max_ms, self.message_timestamp_after_max_ms
        return (either if before == LONG_MAX else before, either if after == LONG_MAX else after)

    def value(self, key: str) -> str:
        """One value, as Kafka prints it."""
        setting = TOPIC_SETTINGS.find(key)
        return setting.format(getattr(self, _field(setting.name)))

    def source(self, key: str) -> Source:
        return self.origins[TOPIC_SETTINGS.find(key).name].source

    def describe(self) -> list[ConfigEntry]:
        """Every setting, in the order of the table: KEY VALUE SOURCE."""
        return [
            ConfigEntry(setting.name, self.value(setting.name), self.origins[setting.name].source)
            for setting in TOPIC_SETTINGS
        ]

    def overrides(self) -> dict[str, str]:
        """What the topic itself sets, ready to be stored and given to `of` again."""
        return {entry.key: entry.value for entry in self.describe() if entry.source is Source.TOPIC}

    def altered(
        self, changes: Mapping[str, Any], *, unset: Iterable[str] = (), broker: BrokerConfig | None = None
    ) -> TopicConfig:
        """With some settings changed and others back at their inherited value."""
        own: dict[str, Any] = dict(self.overrides())
        for name in unset:
            own.pop(TOPIC_SETTINGS.find(name).name, None)
        own.update(TOPIC_SETTINGS.parse(changes))
        return TopicConfig.of(own, broker=broker)

    def _cross_check(self) -> None:
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise InvalidError(
                f"min.compaction.lag.ms={self.min_compaction_lag_ms} is above "
                f"max.compaction.lag.ms={self.max_compaction_lag_ms}; lower the first or raise the second",
                kafka_name="INVALID_CONFIG",
            )
        for key in ("leader.replication.throttled.replicas", "follower.replication.throttled.replicas"):
            replicas = getattr(self, _field(key))
            if replicas != "*" and not _THROTTLED.fullmatch(replicas):
                raise InvalidError(
                    f"{key}={replicas}: not * or a list of PARTITION:BROKER", kafka_name="INVALID_CONFIG"
                )
        if not _VERSION.fullmatch(self.message_format_version):
            raise InvalidError(
                f"message.format.version={self.message_format_version}: not a version of Kafka up to 3.9, "
                f"such as 3.0-IV1",
                kafka_name="INVALID_CONFIG",
            )
        if self.compression_gzip_level == 0:
            raise InvalidError(
                "compression.gzip.level=0: out of range; valid is -1 or 1 to 9", kafka_name="INVALID_CONFIG"
            )
        if self.remote_storage_enable:
            raise InvalidError(
                "remote.storage.enable=true: tiered storage is not offered; leave it false",
                kafka_name="INVALID_CONFIG",
            )


def _field(key: str) -> str:
    return key.replace(".", "_")


def _inherited(topic_key: str, broker_values: Mapping[str, SettingValue]) -> tuple[SettingValue, str] | None:
    for key, factor in SYNONYMS.get(topic_key, ()):
        if key not in broker_values:
            continue
        value = broker_values[key]
        if isinstance(value, int) and not isinstance(value, bool):
            value = min(value * factor, LONG_MAX)
            if topic_key == "retention.ms":
                if value == 0:
                    raise InvalidError(
                        f"{key}=0: out of range; valid is 1 or more, or -1 for ever",
                        kafka_name="INVALID_CONFIG",
                    )
                value = max(value, -1)
        return TOPIC_SETTINGS[topic_key].parse(value), key
    return None


def _fields_match_settings() -> bool:
    """Guards the two tables against drifting apart (checked by a test)."""
    own = {name.name for name in fields(TopicConfig)} - {"origins"}
    return own == {_field(setting.name) for setting in TOPIC_SETTINGS}
