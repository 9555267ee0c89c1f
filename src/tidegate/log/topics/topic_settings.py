"""The settings a topic and a broker have: names, types, ranges, defaults (Kafka 3.9) and broker synonyms.

A table and nothing else; `topic_config.py` turns it into typed values with their sources.
"""

from __future__ import annotations

from tidegate.config import INT_MAX, LONG_MAX, Kind, Setting, Settings

_HOUR_MS = 3_600_000
_MINUTE_MS = 60_000
_DAY_MS = 86_400_000

TOPIC_SETTINGS = Settings(
    [
        Setting("segment.bytes", Kind.INT, 1 << 30, "log segment size that forces a roll", 14),
        Setting("segment.ms", Kind.LONG, 7 * _DAY_MS, "log segment age that forces a roll", 1),
        Setting("segment.jitter.ms", Kind.LONG, 0, "largest random head start of a timed roll", 0),
        Setting("segment.index.bytes", Kind.INT, 10 << 20, "size of an index; a full one forces a roll", 4),
        Setting("index.interval.bytes", Kind.INT, 4096, "bytes between two index entries", 0),
        Setting("retention.ms", Kind.LONG, 7 * _DAY_MS, "age at which records may go; -1 never", -1),
        Setting("retention.bytes", Kind.LONG, -1, "partition size above which old records go; -1 none"),
        Setting("file.delete.delay.ms", Kind.LONG, 60_000, "wait before a deleted file leaves the disk", 0),
        Setting(
            "cleanup.policy",
            Kind.LIST,
            frozenset({"delete"}),
            "what happens to old log segments",
            choices=("compact", "delete"),
        ),
        Setting("delete.retention.ms", Kind.LONG, _DAY_MS, "how long tombstones outlive compaction", 0),
        Setting("min.compaction.lag.ms", Kind.LONG, 0, "age before a record may be compacted", 0),
        Setting("max.compaction.lag.ms", Kind.LONG, LONG_MAX, "age at which compaction must happen", 1),
        Setting("min.cleanable.dirty.ratio", Kind.DOUBLE, 0.5, "uncleaned share that starts a pass", 0, 1),
        Setting("max.message.bytes", Kind.INT, 1_048_588, "largest record batch", 0),
        Setting("flush.messages", Kind.LONG, LONG_MAX, "records after which a sync is forced", 1),
        Setting("flush.ms", Kind.LONG, LONG_MAX, "time after which a sync is forced", 0),
        Setting(
            "compression.type",
            Kind.WORD,
            "producer",
            "codec on disk; producer keeps what was sent",
            choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
        ),
        Setting("compression.gzip.level", Kind.INT, -1, "gzip level: -1 (default) or 1 to 9", -1, 9),
        Setting("compression.lz4.level", Kind.INT, 9, "lz4 level", 1, 17),
        Setting("compression.zstd.level", Kind.INT, 3, "zstd level", -131072, 22),
        Setting(
            "message.timestamp.type",
            Kind.WORD,
            "CreateTime",
            "whose time a record carries",
            choices=("CreateTime", "LogAppendTime"),
        ),
        Setting(
            "message.timestamp.before.max.ms",
            Kind.LONG,
            LONG_MAX,
            "how far a timestamp may lie in the past",
            0,
        ),
        Setting(
            "message.timestamp.after.max.ms",
            Kind.LONG,
            LONG_MAX,
            "how far a timestamp may lie in the future",
            0,
        ),
        Setting(
            "message.timestamp.difference.max.ms",
            Kind.LONG,
            LONG_MAX,
            "both of the two above, where they are not set (deprecated)",
            0,
        ),
        Setting(
            "message.format.version",
            Kind.WORD,
            "3.0-IV1",
            "record format (deprecated); kept, not used: always 2",
        ),
        Setting("message.downconversion.enable", Kind.BOOLEAN, True, "for old clients; kept, not used"),
        Setting("preallocate", Kind.BOOLEAN, False, "give a new log segment its full size at once"),
        Setting("min.insync.replicas", Kind.INT, 1, "a cluster's; kept, not used", 1),
        Setting("unclean.leader.election.enable", Kind.BOOLEAN, False, "a cluster's choice; kept, not used"),
        Setting("leader.replication.throttled.replicas", Kind.WORD, "", "a cluster's; kept, not used"),
        Setting("follower.replication.throttled.replicas", Kind.WORD, "", "a cluster's; kept, not used"),
        Setting("remote.storage.enable", Kind.BOOLEAN, False, "tiered storage; not offered here"),
        Setting("local.retention.ms", Kind.LONG, -2, "tiered storage's local share; kept, not used", -2),
        Setting("local.retention.bytes", Kind.LONG, -2, "tiered storage's local share; kept, not used", -2),
    ],
    noun="topic setting",
)

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

BROKER_ONLY_SETTINGS = Settings(
    [
        Setting("log.retention.check.interval.ms", Kind.LONG, 300_000, "time between retention checks", 1),
        Setting("log.initial.task.delay.ms", Kind.LONG, 30_000, "wait before the first check", 0),
        Setting("log.flush.offset.checkpoint.interval.ms", Kind.INT, 60_000, "recovery points written", 0),
        Setting("log.flush.start.offset.checkpoint.interval.ms", Kind.INT, 60_000, "log starts written", 0),
        Setting("replica.high.watermark.checkpoint.interval.ms", Kind.LONG, 5000, "high watermarks written"),
        Setting("num.recovery.threads.per.data.dir", Kind.INT, 1, "a broker's; kept, not used", 1),
        Setting(
            "log.cleaner.enable", Kind.BOOLEAN, True, "whether compacted topics are compacted and aged at all"
        ),
        Setting("log.cleaner.threads", Kind.INT, 1, "divides the memory; one compaction at a time", 0),
        Setting("log.cleaner.dedupe.buffer.size", Kind.LONG, 134_217_728, "memory of the key map"),
        Setting("log.cleaner.io.buffer.load.factor", Kind.DOUBLE, 0.9, "how full the key map may be"),
        Setting("log.cleaner.io.buffer.size", Kind.INT, 524_288, "read and write buffers of compaction", 0),
        Setting(
            "log.cleaner.io.max.bytes.per.second",
            Kind.DOUBLE,
            1.7976931348623157e308,
            "compaction's read and write rate",
        ),
        Setting("log.cleaner.backoff.ms", Kind.LONG, 15_000, "pause when there is nothing to compact", 0),
        Setting("producer.id.expiration.ms", Kind.INT, _DAY_MS, "idle time that forgets a producer", 1),
        Setting("producer.id.expiration.check.interval.ms", Kind.INT, 600_000, "time between such checks", 1),
        Setting("transaction.max.timeout.ms", Kind.INT, 900_000, "longest transaction; kept, not used", 1),
    ],
    noun="broker setting",
)

# Storage settings of a broker that say nothing to an embedded log; read over without complaint.
IGNORED_BROKER_KEYS = frozenset(
    {
        "log.dir",
        "log.dirs",
        "log.dir.failure.timeout.ms",
    }
)

NOT_USED = "kept, not used"
"""In the summary of a setting that Kafka has and that does nothing here."""


def _broker_twins() -> list[Setting]:
    """The broker-level form of every topic setting: same type, the broker's own range where it differs."""
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


def is_used(setting: Setting) -> bool:
    """Whether the setting changes anything in an embedded log."""
    return NOT_USED not in setting.summary
