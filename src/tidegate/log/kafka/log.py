"""`KafkaLog`, for `kafka://host:port`: topics of a cluster with the methods of `Log`, through confluent-kafka.

It handles topics, their settings, and the first and end offsets of partitions, which it requests from the cluster
without a consumer (a consumer would begin to fetch). Records are read and written by `reader` and `writer`.
Nothing is cached: every call asks the cluster.

Thread rule: may be shared by threads, like the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tidegate.clock import SystemClock
from tidegate.errors import InvalidError, TidegateError, UnavailableError
from tidegate.log.catalog import TopicDescription, TopicState, check_topic_name, unknown_topic
from tidegate.log.kafka.client import (
    PATIENCE_MS,
    TIMEOUT_SECONDS,
    admin_client,
    calling,
    client_settings,
    load_client,
)
from tidegate.log.log import numbered
from tidegate.log.topic_config import TOPIC_SETTINGS, ConfigEntry, Origin, Source, TopicConfig

if TYPE_CHECKING:
    from tidegate.log.kafka.reader import KafkaReader
    from tidegate.log.reader import StartLike


class Offsets:
    """Requests offsets of one topic for an isolation level; all partitions in one request."""

    def __init__(self, servers: str, admin: Any, topic: str, isolation: str) -> None:
        self._servers, self._admin, self._topic = servers, admin, topic
        self._module = load_client()
        levels = self._module.IsolationLevel
        self._level = levels.READ_COMMITTED if isolation == "read_committed" else levels.READ_UNCOMMITTED
        self._kinds: Any = import_module("confluent_kafka.admin").OffsetSpec

    def first(self, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition → its first offset."""
        return self._certain(self._asked(dict.fromkeys(partitions, self._kinds.earliest())))

    def end(self, partitions: Iterable[int]) -> dict[int, int]:
        """Return partition → the first offset that readers of this isolation level cannot read yet."""
        return self._certain(self._asked(dict.fromkeys(partitions, self._kinds.latest())))

    def at(self, times_ms: Mapping[int, int]) -> dict[int, int]:
        """Return partition → the first offset at or after that time; negative where there is none."""
        return self._asked({number: self._kinds.for_timestamp(time) for number, time in times_ms.items()})

    def _certain(self, found: dict[int, int]) -> dict[int, int]:
        """Raise unless every partition has an offset; a broker that dies during the request may return none."""
        for number, offset in found.items():
            if offset < 0:
                raise UnavailableError(
                    f"{self._servers} gave no offset of {self._topic}-{number} (it said {offset}): the broker may be "
                    "starting or going; try again"
                )
        return found

    def _asked(self, wanted: Mapping[int, Any]) -> dict[int, int]:
        places = {self._module.TopicPartition(self._topic, number): what for number, what in wanted.items()}

        tries = 0

        def ask() -> dict[int, int]:
            nonlocal tries
            tries += 1
            if tries > 1:  # the client caches leaders for minutes; refresh them
                self._admin.list_topics(timeout=TIMEOUT_SECONDS)
            futures = self._admin.list_offsets(
                places, isolation_level=self._level, request_timeout=TIMEOUT_SECONDS
            )
            return {place.partition: int(future.result().offset) for place, future in futures.items()}

        what = f"ask for the offsets of {self._topic}"
        return calling(what, self._servers, ask, admin=self._admin, patience_ms=PATIENCE_MS)


_HIDDEN_PREFIX = "__"
_LISTED_PAUSE_MS = 20


@dataclass(frozen=True, slots=True)
class KafkaTopicDescription(TopicDescription):
    """A topic of a cluster; its settings are as the broker reports them, including those unknown to Tidegate."""

    entries: tuple[ConfigEntry, ...] = ()

    def settings(self) -> list[ConfigEntry]:
        return list(self.entries)


class KafkaLog:
    """A Kafka cluster with the methods of `Log`."""

    def __init__(self, servers: str, client: Mapping[str, str]) -> None:
        self.servers = servers
        self.client = client_settings(servers, client)
        load_client()
        self._admin_module: Any = import_module("confluent_kafka.admin")
        self._held: Any = admin_client(servers, self.client)

    def __enter__(self) -> KafkaLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"KafkaLog({self.servers!r})"

    # -- topics ----------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return the names of all topics except internal ones, sorted."""
        return sorted(name for name in self._metadata() if not name.startswith(_HIDDEN_PREFIX))

    def partition_counts(self) -> dict[str, int]:
        """Return topic → number of partitions."""
        return {
            name: len(found.partitions)
            for name, found in sorted(self._metadata().items())
            if not name.startswith(_HIDDEN_PREFIX)
        }

    def topic_states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Return the id and number of partitions of each given topic that exists.

        Ids come from the controller; they are empty while no controller can be reached.
        """
        found = self._listed()
        names = [topic for topic in topics if topic in found.topics]
        if not names or found.controller_id not in found.brokers:
            return {name: TopicState("", len(found.topics[name].partitions)) for name in names}
        wanted = load_client().TopicCollection(names)
        futures = self._calling(
            "describe topics", lambda: self._admin.describe_topics(wanted, request_timeout=TIMEOUT_SECONDS)
        )
        states: dict[str, TopicState] = {}
        for name, future in futures.items():
            try:
                described = self._calling(f"describe topic {name}", future.result)
            except TidegateError as error:
                if error.kafka_name not in ("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_OR_PARTITION"):
                    raise
                continue
            topic_id = str(described.topic_id)
            is_known = topic_id.strip("A") != ""  # all zero where brokers have no ids
            states[name] = TopicState(topic_id if is_known else "", len(described.partitions))
        return states

    def describe(self, topic: str) -> KafkaTopicDescription:
        """Return partitions and settings, with the broker's source of each."""
        metadata = self._topic_metadata(topic)
        resource = self._resource(topic)
        admin = self._admin

        def ask() -> Any:
            return admin.describe_configs([resource], request_timeout=TIMEOUT_SECONDS)[resource].result()

        found = self._calling(f"describe topic {topic}", ask, patience_ms=PATIENCE_MS)
        entries = tuple(
            ConfigEntry(name, entry.value or "", _source(entry.source))
            for name, entry in sorted(found.items())
        )
        return KafkaTopicDescription(
            topic, tuple(sorted(metadata.partitions)), _typed(entries), None, entries=entries
        )

    def partition_rows(self, topic: str) -> list[dict[str, Any]]:
        """Return a row for each partition, as `describe` shows it: leader, replicas and offsets."""
        metadata = self._topic_metadata(topic)
        with self.reader(topic) as reader:
            starts, ends = reader.start_offsets(), reader.end_offsets()
        return [
            {
                "partition": number,
                "leader": partition.leader,
                "replicas": list(partition.replicas),
                "in_sync": list(partition.isrs),
                "log_start": starts[number],
                "high_watermark": ends[number],
            }
            for number, partition in sorted(metadata.partitions.items())
        ]

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        config: Mapping[str, Any] | None = None,
        *,
        if_not_exists: bool = False,
        replication_factor: int = -1,
    ) -> KafkaTopicDescription:
        """Create a topic, by default with the cluster's default replication factor."""
        check_topic_name(name)
        if not (if_not_exists and name in self._metadata()):
            new = self._admin_module.NewTopic(
                name,
                num_partitions=partitions,
                replication_factor=replication_factor,
                config=_formatted(config or {}),
            )
            self._wait(f"create topic {name}", self._admin.create_topics([new])[name])
            self._await_listed(name)
        return self.describe(name)

    def alter_topic(
        self, name: str, set: Mapping[str, Any] | None = None, unset: Iterable[str] = ()
    ) -> KafkaTopicDescription:
        """Change settings; `unset` resets settings to the broker's value."""
        self._topic_metadata(name)
        module = self._admin_module
        changes: dict[str, str | None] = dict(_formatted(set or {}))
        changes.update((_known_name(key), None) for key in unset)
        kinds = module.AlterConfigOpType
        entries = [
            module.ConfigEntry(key, value, incremental_operation=kinds.DELETE if value is None else kinds.SET)
            for key, value in changes.items()
        ]
        resource = self._resource(name, entries)
        future = self._admin.incremental_alter_configs([resource])[resource]
        self._wait(f"alter topic {name}", future)
        return self.describe(name)

    def add_partitions(self, name: str, total: int) -> KafkaTopicDescription:
        """Add partitions to a topic."""
        self._topic_metadata(name)
        new = self._admin_module.NewPartitions(name, total)
        self._wait(f"add partitions to topic {name}", self._admin.create_partitions([new])[name])
        return self.describe(name)

    def delete_topic(self, name: str) -> None:
        """Remove a topic and all its records."""
        self._topic_metadata(name)
        self._wait(f"delete topic {name}", self._admin.delete_topics([name])[name])

    # -- records ---------------------------------------------------------------------------------

    def writer(self, topic: str, *, integrity: bool | Mapping[str, Any] = False, **settings: Any) -> Any:
        """Return a `KafkaWriter` of Arrow tables; with `integrity` a `Sender` around it, as `Log.writer` does.

        The client's retries must keep the sender's order, so its producer is idempotent.
        """
        from tidegate.log.kafka.writer import KafkaWriter

        partitions = len(self._topic_metadata(topic).partitions)
        if integrity is False:
            return KafkaWriter(self.servers, self.client, topic, **settings)
        writer = KafkaWriter(self.servers, self.client, topic, **{"idempotent": True, **settings})
        return numbered(writer, integrity, partitions=partitions)

    def reader(
        self,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        start: StartLike = "earliest",
        stop: StartLike | None = None,
        **settings: Any,
    ) -> KafkaReader:
        """Return a reader of Arrow batches; it joins no consumer group and commits nothing."""
        from tidegate.log.kafka.reader import KafkaReader

        known = tuple(sorted(self._topic_metadata(topic).partitions))
        numbers = known if partitions is None else tuple(partitions)
        for number in numbers:
            if number not in known:
                raise InvalidError(
                    f"topic {topic} has no partition {number}; it has 0 to {len(known) - 1}",
                    kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
                )
        return KafkaReader(
            self.servers, self.client, topic, numbers, start=start, stop=stop, admin=self._admin, **settings
        )

    def bounds(
        self, topic: str, partitions: Iterable[int], *, isolation: str = "read_uncommitted"
    ) -> dict[int, tuple[int, int]]:
        """Return partition → its first offset, and the first one that this isolation level cannot read yet."""
        numbers, offsets = list(partitions), Offsets(self.servers, self._admin, topic, isolation)
        first, end = offsets.first(numbers), offsets.end(numbers)
        return {number: (first[number], end[number]) for number in numbers}

    def compacted_below(self, topic: str, partition: int) -> None:
        """Return None: a cluster does not report how far its cleaners have come."""

    def offset_for_time(self, topic: str, partition: int, time_ms: int) -> int | None:
        """Return the first offset whose timestamp is at or after `time_ms`; None if there is none."""
        found = Offsets(self.servers, self._admin, topic, "read_uncommitted").at({partition: time_ms})
        return found[partition] if found[partition] >= 0 else None

    def close(self) -> None:
        """Close the client now, or at the end of a call that another thread is in.

        Left to the garbage collector, the client could be destroyed in one of its own threads, which crashes the
        process.
        """
        self._held = None

    @property
    def _admin(self) -> Any:
        held = self._held
        if held is None:
            raise InvalidError(f"{self!r} was closed; open it again")
        return held

    def _metadata(self) -> dict[str, Any]:
        topics: dict[str, Any] = self._listed().topics
        return topics

    def _listed(self) -> Any:
        admin = self._admin
        return self._calling(
            "list topics", lambda: admin.list_topics(timeout=TIMEOUT_SECONDS), patience_ms=PATIENCE_MS
        )

    def _await_listed(self, topic: str) -> None:
        """Wait until the new topic is listed: every broker needs a moment to learn of it."""
        clock = SystemClock()
        deadline_ms = clock.monotonic_ms() + int(TIMEOUT_SECONDS * 1000)
        while topic not in self._metadata() and clock.monotonic_ms() < deadline_ms:
            clock.sleep_ms(_LISTED_PAUSE_MS)

    def _topic_metadata(self, topic: str) -> Any:
        known = self._metadata()  # never by name: asking for an unknown topic may create it
        if topic not in known:
            check_topic_name(topic)
            raise unknown_topic(topic, known)
        return known[topic]

    def _resource(self, topic: str, entries: list[Any] | None = None) -> Any:
        kind = self._admin_module.ResourceType.TOPIC
        return self._admin_module.ConfigResource(kind, topic, incremental_configs=entries)

    def _wait(self, what: str, future: Any) -> None:
        self._calling(what, future.result)

    def _calling(self, what: str, call: Any, *, patience_ms: int = 0) -> Any:
        return calling(what, self.servers, call, admin=self._admin, patience_ms=patience_ms)


def _formatted(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in the names and units that the broker expects; the broker checks those unknown here."""
    formatted: dict[str, str] = {}
    for name, value in config.items():
        try:
            setting = TOPIC_SETTINGS.find(name, value)
        except InvalidError:
            if TOPIC_SETTINGS.nearest(name, likeness=0.9) is not None:
                raise
            formatted[name] = str(value)
        else:
            formatted[setting.name] = setting.format(setting.parse(value))
    return formatted


def _known_name(name: str) -> str:
    try:
        return TOPIC_SETTINGS.find(name).name
    except InvalidError:
        return name


def _source(number: int) -> Source:
    names = {
        1: Source.TOPIC,
        2: Source.DYNAMIC_BROKER,
        3: Source.DYNAMIC_DEFAULT_BROKER,
        4: Source.BROKER,
        5: Source.DEFAULT,
    }
    return names.get(int(number), Source.ASSUMED)


def _typed(entries: Sequence[ConfigEntry]) -> TopicConfig:
    """Return the settings known here as a `TopicConfig` with their sources; values out of range are left out."""
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {
        setting.name: Origin(Source.ASSUMED, setting.name) for setting in TOPIC_SETTINGS
    }
    for entry in entries:
        if entry.key not in TOPIC_SETTINGS or entry.key == "remote.storage.enable":
            continue
        try:
            values[entry.key.replace(".", "_")] = TOPIC_SETTINGS[entry.key].parse(entry.value)
        except InvalidError:
            continue
        origins[entry.key] = Origin(entry.source, entry.key)
    return TopicConfig(**values, origins=origins)
