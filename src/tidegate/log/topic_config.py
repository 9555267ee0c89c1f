"""Settings of topics and brokers: names, types, ranges, defaults (Kafka 3.9), and typed values with their
sources.

A topic's own value overrides the broker's static one (`server.properties`), which overrides the default.
Among broker synonyms the finer unit wins (`log.retention.ms`, then `.minutes`, then `.hours`).

C1  a `TopicConfig` or `BrokerConfig` is always valid: its constructor tests ranges and
    cross-checks.
C2  both are immutable; an altered topic gets a new one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, Final, NamedTuple

from tidegate.config import INT_MAX, LONG_MAX, Kind, Setting, Settings, SettingValue
from tidegate.errors import InvalidError

_HOUR_MS = 3_600_000
_MINUTE_MS = 60_000
_DAY_MS = 86_400_000


# Topic key → broker keys in order of priority, each with the factor that brings its unit to milliseconds.
SYNONYMS: dict[str, tuple[tuple[str, int], ...]] = {
    "segment.bytes": (("log.segment.bytes", 1),),
    "segment.ms": (("log.roll.ms", 1), ("log.roll.hours", _HOUR_MS)),
    "segment.jitter.ms": (("log.roll.jitter.ms", 1), ("log.roll.jitter.hours", _HOUR_MS)),
    "segment.index.bytes": (("log.index.size.max.bytes", 1),),
    "index.interval.bytes": (("log.index.interval.bytes", 1),),
    "retention.ms": (
        ("log.retention.ms", 1),
        ("log.retention.minutes", _MINUTE_MS),
        ("log.retention.hours", _HOUR_MS),
    ),
    "retention.bytes": (("log.retention.bytes", 1),),
    "file.delete.delay.ms": (("log.segment.delete.delay.ms", 1),),
    "cleanup.policy": (("log.cleanup.policy", 1),),
    "delete.retention.ms": (("log.cleaner.delete.retention.ms", 1),),
    "min.compaction.lag.ms": (("log.cleaner.min.compaction.lag.ms", 1),),
    "max.compaction.lag.ms": (("log.cleaner.max.compaction.lag.ms", 1),),
    "min.cleanable.dirty.ratio": (("log.cleaner.min.cleanable.ratio", 1),),
    "max.message.bytes": (("message.max.bytes", 1),),
    "flush.messages": (("log.flush.interval.messages", 1),),
    "flush.ms": (("log.flush.interval.ms", 1), ("log.flush.scheduler.interval.ms", 1)),
    "compression.type": (("compression.type", 1),),
    "compression.gzip.level": (("compression.gzip.level", 1),),
    "compression.lz4.level": (("compression.lz4.level", 1),),
    "compression.zstd.level": (("compression.zstd.level", 1),),
    "message.timestamp.type": (("log.message.timestamp.type", 1),),
    "message.timestamp.before.max.ms": (("log.message.timestamp.before.max.ms", 1),),
    "message.timestamp.after.max.ms": (("log.message.timestamp.after.max.ms", 1),),
    "message.timestamp.difference.max.ms": (("log.message.timestamp.difference.max.ms", 1),),
    "message.format.version": (("log.message.format.version", 1),),
    "message.downconversion.enable": (("log.message.downconversion.enable", 1),),
    "preallocate": (("log.preallocate", 1),),
    "min.insync.replicas": (("min.insync.replicas", 1),),
    "unclean.leader.election.enable": (("unclean.leader.election.enable", 1),),
    "local.retention.ms": (("log.local.retention.ms", 1),),
    "local.retention.bytes": (("log.local.retention.bytes", 1),),
}


# Broker storage settings that do not apply to an embedded log; ignored without a warning.
IGNORED_BROKER_KEYS = frozenset(
    {
        "log.dir",
        "log.dirs",
        "log.dir.failure.timeout.ms",
    }
)

NOT_USED = "kept, not used"
"""In the summary of a setting that Kafka has and that does nothing here."""


def is_used(setting: Setting) -> bool:
    """Return whether the setting changes anything in an embedded log."""
    return NOT_USED not in setting.summary


_THROTTLED: Final = re.compile(r"(\d+:\d+( *, *\d+:\d+)*)?")
_VERSION: Final = re.compile(r"(0\.(8|9|10|11)\.\d|1\.[01]|2\.[0-8]|3\.\d)(\.\d+)*(-IV\d)?")


class Source(Enum):
    """The source of a value, in Kafka's words; ASSUMED is Tidegate's, for folders without a catalog."""

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
    """The source that set a value, and the name under which it was set there."""

    source: Source
    key: str


def _setting(
    kind: Kind,
    default: SettingValue,
    summary: str,
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a setting; its name is the field's, with dots for underscores."""
    return field(default=default, metadata={"setting": (kind, default, summary, minimum, maximum, choices)})


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The settings of a whole log folder. `topic_defaults` holds those that topics inherit, by broker key."""

    log_retention_check_interval_ms: int = _setting(Kind.LONG, 300_000, "time between retention checks", 1)
    log_initial_task_delay_ms: int = _setting(Kind.LONG, 30_000, "wait before the first check", 0)
    log_flush_offset_checkpoint_interval_ms: int = _setting(Kind.INT, 60_000, "recovery points written", 0)
    log_flush_start_offset_checkpoint_interval_ms: int = _setting(Kind.INT, 60_000, "log starts written", 0)
    replica_high_watermark_checkpoint_interval_ms: int = _setting(Kind.LONG, 5000, "high watermarks written")
    num_recovery_threads_per_data_dir: int = _setting(Kind.INT, 1, "a broker's; kept, not used", 1)
    log_cleaner_enable: bool = _setting(
        Kind.BOOLEAN, True, "whether compacted topics are compacted and aged at all"
    )
    log_cleaner_threads: int = _setting(Kind.INT, 1, "divides the memory; one compaction at a time", 0)
    log_cleaner_dedupe_buffer_size: int = _setting(Kind.LONG, 134_217_728, "memory of the key map")
    log_cleaner_io_buffer_load_factor: float = _setting(Kind.DOUBLE, 0.9, "how full the key map may be")
    log_cleaner_io_buffer_size: int = _setting(Kind.INT, 524_288, "read and write buffers of compaction", 0)
    log_cleaner_io_max_bytes_per_second: float = _setting(
        Kind.DOUBLE, 1.7976931348623157e308, "compaction's read and write rate"
    )
    log_cleaner_backoff_ms: int = _setting(Kind.LONG, 15_000, "pause when there is nothing to compact", 0)
    producer_id_expiration_ms: int = _setting(Kind.INT, _DAY_MS, "idle time that forgets a producer", 1)
    producer_id_expiration_check_interval_ms: int = _setting(Kind.INT, 600_000, "time between such checks", 1)
    transaction_max_timeout_ms: int = _setting(Kind.INT, 900_000, "longest transaction; kept, not used", 1)
    topic_defaults: Mapping[str, SettingValue] = field(default_factory=dict)
    explicit: frozenset[str] = field(default=frozenset(), compare=False)
    ignored: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for setting in BROKER_ONLY_SETTINGS:
            object.__setattr__(self, _field(setting.name), setting.parse(getattr(self, _field(setting.name))))
        for topic_key in SYNONYMS:
            _inherited(topic_key, self.topic_defaults)

    def altered(self, changes: Mapping[str, Any]) -> BrokerConfig:
        """Return a copy with some settings changed, by their keys in `server.properties`."""
        asked = BrokerConfig.of(changes)
        own = {_field(key): getattr(asked, _field(key)) for key in changes if key in BROKER_ONLY_SETTINGS}
        return replace(self, **own, topic_defaults={**self.topic_defaults, **asked.topic_defaults})

    @classmethod
    def of(cls, typed: Mapping[str, Any]) -> BrokerConfig:
        """Build the settings from `server.properties` keys.

        Keys that have no effect here, because they do not concern storage (`listeners`, …) or are not used, are
        listed in `ignored`. A mistyped storage key is an error: a retention that silently stays at its default costs
        data or a disk.
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
        """Return the broker's value for a topic setting and the broker key that sets it; None when none does."""
        return _inherited(topic_key, self.topic_defaults)

    def describe(self) -> list[ConfigEntry]:
        """Return the broker-only settings: KEY VALUE SOURCE."""
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
    """The effective settings of one topic. `TopicConfig()` has all defaults; `of` reads dotted names."""

    segment_bytes: int = _setting(Kind.INT, 1 << 30, "log segment size that forces a roll", 14)
    segment_ms: int = _setting(Kind.LONG, 7 * _DAY_MS, "log segment age that forces a roll", 1)
    segment_jitter_ms: int = _setting(Kind.LONG, 0, "largest random head start of a timed roll", 0)
    segment_index_bytes: int = _setting(Kind.INT, 10 << 20, "size of an index; a full one forces a roll", 4)
    index_interval_bytes: int = _setting(Kind.INT, 4096, "bytes between two index entries", 0)
    retention_ms: int = _setting(Kind.LONG, 7 * _DAY_MS, "age at which records may go; -1 never", -1)
    retention_bytes: int = _setting(Kind.LONG, -1, "partition size above which old records go; -1 none")
    file_delete_delay_ms: int = _setting(Kind.LONG, 60_000, "wait before a deleted file leaves the disk", 0)
    cleanup_policy: frozenset[str] = _setting(
        Kind.LIST, frozenset({"delete"}), "what happens to old log segments", choices=("compact", "delete")
    )
    delete_retention_ms: int = _setting(Kind.LONG, _DAY_MS, "how long tombstones outlive compaction", 0)
    min_compaction_lag_ms: int = _setting(Kind.LONG, 0, "age before a record may be compacted", 0)
    max_compaction_lag_ms: int = _setting(Kind.LONG, LONG_MAX, "age at which compaction must happen", 1)
    min_cleanable_dirty_ratio: float = _setting(Kind.DOUBLE, 0.5, "uncleaned share that starts a pass", 0, 1)
    max_message_bytes: int = _setting(Kind.INT, 1_048_588, "largest record batch", 0)
    flush_messages: int = _setting(Kind.LONG, LONG_MAX, "records after which a sync is forced", 1)
    flush_ms: int = _setting(Kind.LONG, LONG_MAX, "time after which a sync is forced", 0)
    compression_type: str = _setting(
        Kind.WORD,
        "producer",
        "codec on disk; producer keeps what was sent",
        choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
    )
    compression_gzip_level: int = _setting(Kind.INT, -1, "gzip level: -1 (default) or 1 to 9", -1, 9)
    compression_lz4_level: int = _setting(Kind.INT, 9, "lz4 level", 1, 17)
    compression_zstd_level: int = _setting(Kind.INT, 3, "zstd level", -131072, 22)
    message_timestamp_type: str = _setting(
        Kind.WORD, "CreateTime", "whose time a record carries", choices=("CreateTime", "LogAppendTime")
    )
    message_timestamp_before_max_ms: int = _setting(
        Kind.LONG, LONG_MAX, "how far a timestamp may lie in the past", 0
    )
    message_timestamp_after_max_ms: int = _setting(
        Kind.LONG, LONG_MAX, "how far a timestamp may lie in the future", 0
    )
    message_timestamp_difference_max_ms: int = _setting(
        Kind.LONG, LONG_MAX, "both of the two above, where they are not set (deprecated)", 0
    )
    message_format_version: str = _setting(
        Kind.WORD, "3.0-IV1", "record format (deprecated); kept, not used: always 2"
    )
    message_downconversion_enable: bool = _setting(Kind.BOOLEAN, True, "for old clients; kept, not used")
    preallocate: bool = _setting(Kind.BOOLEAN, False, "give a new log segment its full size at once")
    min_insync_replicas: int = _setting(Kind.INT, 1, "a cluster's; kept, not used", 1)
    unclean_leader_election_enable: bool = _setting(Kind.BOOLEAN, False, "a cluster's choice; kept, not used")
    leader_replication_throttled_replicas: str = _setting(Kind.WORD, "", "a cluster's; kept, not used")
    follower_replication_throttled_replicas: str = _setting(Kind.WORD, "", "a cluster's; kept, not used")
    remote_storage_enable: bool = _setting(Kind.BOOLEAN, False, "tiered storage; not offered here")
    local_retention_ms: int = _setting(Kind.LONG, -2, "tiered storage's local share; kept, not used", -2)
    local_retention_bytes: int = _setting(Kind.LONG, -2, "tiered storage's local share; kept, not used", -2)
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
        """Build from dotted names over a broker's values over the defaults; `assumed` marks guessed settings."""
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
        """The age at which a log segment rolls; `max.compaction.lag.ms` shortens it."""
        return min(self.max_compaction_lag_ms, self.segment_ms) if self.compacts else self.segment_ms

    @property
    def timestamp_bounds_ms(self) -> tuple[int, int]:
        """The largest distance of a timestamp into the past and into the future.

        The deprecated `message.timestamp.difference.max.ms` replaces either one that is not limited.
        """
        either = self.message_timestamp_difference_max_ms
        before, after = self.message_timestamp_before_max_ms, self.message_timestamp_after_max_ms
        return (either if before == LONG_MAX else before, either if after == LONG_MAX else after)

    def value(self, key: str) -> str:
        """Return one value as Kafka prints it."""
        setting = TOPIC_SETTINGS.find(key)
        return setting.format(getattr(self, _field(setting.name)))

    def source(self, key: str) -> Source:
        return self.origins[TOPIC_SETTINGS.find(key).name].source

    def describe(self) -> list[ConfigEntry]:
        """Return every setting in the order of the table: KEY VALUE SOURCE."""
        return [
            ConfigEntry(setting.name, self.value(setting.name), self.origins[setting.name].source)
            for setting in TOPIC_SETTINGS
        ]

    def overrides(self) -> dict[str, str]:
        """Return the topic's own settings, in a form that can be stored and passed to `of`."""
        return {entry.key: entry.value for entry in self.describe() if entry.source is Source.TOPIC}

    def altered(
        self, changes: Mapping[str, Any], *, unset: Iterable[str] = (), broker: BrokerConfig | None = None
    ) -> TopicConfig:
        """Return a copy with some settings changed and others reset to their inherited value."""
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


def _settings_of(config: type, noun: str) -> Settings:
    return Settings(
        [
            Setting(each.name.replace("_", "."), *each.metadata["setting"])
            for each in fields(config)
            if each.metadata
        ],
        noun=noun,
    )


TOPIC_SETTINGS = _settings_of(TopicConfig, "topic setting")
BROKER_ONLY_SETTINGS = _settings_of(BrokerConfig, "broker setting")


def _broker_twins() -> list[Setting]:
    """Return the broker-level setting of every topic setting: same type, the broker's own range where it differs."""
    twins = []
    for topic_key, pairs in SYNONYMS.items():
        setting = TOPIC_SETTINGS[topic_key]
        for key, factor in pairs:
            kind, low, high = setting.kind, setting.minimum, setting.maximum
            if factor != 1:
                kind, high = Kind.INT, INT_MAX
            if topic_key == "retention.ms":
                low = None  # any negative number means never; zero is refused by `BrokerConfig`
            elif key == "log.roll.hours":
                low = 1
            twins.append(Setting(key, kind, setting.default, setting.summary, low, high, setting.choices))
    return twins


BROKER_SETTINGS = Settings([*_broker_twins(), *BROKER_ONLY_SETTINGS], noun="broker setting")
