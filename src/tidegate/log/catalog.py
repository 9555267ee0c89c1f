"""Topic names, partition folders, and the catalog of a log folder, `tidegate.topics`.

The catalog is one line of JSON and one line `crc32c:<8 hex digits over the JSON line>`:

    {"version": 1, "topics": {NAME: {"id": 22 characters, "partitions": n, "config": {KEY: "value"},
     "encoding": {…}}}, "removing": [FOLDER, …]}

`config` holds only the topic's own settings; broker-level settings are in `server.properties`. `encoding` (optional)
describes the keys and values of topics that an app writes results to. `removing` lists partition folders of
deleted topics that may still be on the disk. A partition's folder is `<topic>-<partition>` directly in the log
folder; that of a deleted topic gets a `.<32 hex>-delete` ending.

G1  the catalog is replaced whole (temporary file, sync, rename) under the folder's short lock.
G2  a folder that holds Kafka data but no catalog is foreign: it is described from its partition folders,
    its settings are marked as assumed, and nothing in it is ever changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tidegate.config import parse_properties
from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.format.partition_files import checksummed_json, parse_checksummed_json
from tidegate.log.topic_config import BrokerConfig, ConfigEntry, Source, TopicConfig

MAX_NAME_LENGTH = 249
MAX_PARTITIONS = 100_000
_LEGAL = re.compile(r"[A-Za-z0-9._-]{1,249}")
_FOLDER = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,249})-(?P<partition>0|[1-9]\d{0,9})")
_DELETED = re.compile(r".+\.[0-9a-f]{32}-delete")


class TopicPartition(NamedTuple):
    """One partition of one topic; its string form is the folder name."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class TopicState(NamedTuple):
    """The topic that a name refers to now. A topic that is deleted and created again has another id."""

    topic_id: str
    """Empty where it is not known: a foreign folder, or brokers before 2.8."""
    partitions: int


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """A topic's facts. `assumed` marks a folder without Tidegate's catalog: its settings are guesses.

    `encoding` describes the keys and values if an app that writes results to the topic recorded it; else None.
    """

    name: str
    partition_numbers: tuple[int, ...]
    config: TopicConfig
    topic_id: str | None = None
    assumed: bool = False
    encoding: Mapping[str, Any] | None = None

    @property
    def partitions(self) -> int:
        """The number of partitions; a foreign folder may hold only some of them, see `partition_numbers`."""
        return len(self.partition_numbers)

    def settings(self) -> list[ConfigEntry]:
        """Return every setting: KEY VALUE SOURCE."""
        return self.config.describe()

    def _repr_html_(self) -> str:
        from tidegate.notebook import facts_html, grid_html

        facts = {
            "partitions": self.partitions,
            "id": self.topic_id,
            "settings": "assumed" if self.assumed else None,
        }
        entries = sorted(self.settings(), key=lambda each: each.source is Source.DEFAULT)
        rows = [(each.key, each.value, each.source.value) for each in entries]
        return facts_html(f"topic {self.name}", facts) + grid_html(
            ("key", "value", "source"), rows, total=len(rows), noun="settings"
        )


def check_topic_name(name: str) -> str:
    """Return the name if it is legal; `InvalidError` (INVALID_TOPIC_EXCEPTION) if not."""
    if name in (".", "..") or not _LEGAL.fullmatch(name):
        shown = name if len(name) <= 60 else f"{name[:57]}..."
        raise InvalidError(
            f"topic name {shown!r} is not allowed: use 1 to {MAX_NAME_LENGTH} of the characters "
            f"a-z A-Z 0-9 . _ -, and not . or .. alone",
            kafka_name="INVALID_TOPIC_EXCEPTION",
        )
    return name


def check_partition_count(count: int) -> int:
    """Return the count if a topic may have that many partitions."""
    if not 1 <= count <= MAX_PARTITIONS:
        raise InvalidError(
            f"{count} partitions: a topic has 1 to {MAX_PARTITIONS}", kafka_name="INVALID_PARTITIONS"
        )
    return count


def partition_folder_name(topic: str, partition: int) -> str:
    """Return the folder name, such as `orders-0`; checks both parts."""
    check_topic_name(topic)
    if not 0 <= partition <= 2**31 - 1:
        raise InvalidError(f"partition {partition} of {topic}: a partition is a number from 0")
    return f"{topic}-{partition}"


def parse_folder_name(name: str) -> TopicPartition | None:
    """Return the topic and partition of a folder name; None when it is not a partition folder."""
    match = _FOLDER.fullmatch(name)
    if match is None or match["topic"] in (".", "..") or int(match["partition"]) > 2**31 - 1:
        return None
    return TopicPartition(match["topic"], int(match["partition"]))


def deleted_folder_name(topic: str, partition: int, unique_hex: str) -> str:
    """Return the name of a partition folder that waits for removal; the topic is cut to fit 255 characters."""
    suffix = f"-{partition}.{unique_hex}-delete"
    return topic[: 255 - len(suffix)] + suffix


def is_deleted_folder(name: str) -> bool:
    return _DELETED.fullmatch(name) is not None


CATALOG_NAME = "tidegate.topics"
BROKER_SETTINGS_NAME = "server.properties"
_VERSION = 1
_MAX_CATALOG_BYTES = 64 << 20
_MAX_PROPERTIES_BYTES = 1 << 20
_BROKER_FILES = ("meta.properties", "recovery-point-offset-checkpoint", "replication-offset-checkpoint")


@dataclass(frozen=True, slots=True)
class TopicEntry:
    """A topic as the catalog stores it."""

    topic_id: str
    partitions: int
    config: Mapping[str, str]
    encoding: Mapping[str, Any] | None = None

    def described(self, name: str, broker: BrokerConfig) -> TopicDescription:
        config = TopicConfig.of(self.config, broker=broker)
        return TopicDescription(
            name, tuple(range(self.partitions)), config, self.topic_id, encoding=self.encoding
        )


@dataclass(frozen=True, slots=True)
class Catalog:
    """All topics of a log, and the folders still to be removed. Immutable: changes return a new one."""

    topics: Mapping[str, TopicEntry] = field(default_factory=dict)
    removing: tuple[str, ...] = ()

    def entry(self, topic: str) -> TopicEntry:
        """Return the topic, or raise an error that names a similar one."""
        found = self.topics.get(topic)
        if found is None:
            check_topic_name(topic)
            raise unknown_topic(topic, self.topics)
        return found

    def with_topic(self, name: str, entry: TopicEntry) -> Catalog:
        return replace(self, topics={**self.topics, name: entry})

    def without_topic(self, name: str, folders: Iterable[str]) -> Catalog:
        """Return the catalog without the topic, with its folders listed for removal."""
        left = {topic: entry for topic, entry in self.topics.items() if topic != name}
        return Catalog(left, (*self.removing, *folders))

    def to_bytes(self) -> bytes:
        body = {
            "version": _VERSION,
            "topics": {
                name: {
                    "id": entry.topic_id,
                    "partitions": entry.partitions,
                    "config": dict(entry.config),
                    **({} if entry.encoding is None else {"encoding": dict(entry.encoding)}),
                }
                for name, entry in sorted(self.topics.items())
            },
            "removing": list(self.removing),
        }
        return checksummed_json(body)

    @classmethod
    def from_bytes(cls, stored: bytes, path: Path) -> Catalog:
        try:
            body = parse_checksummed_json(stored)
            if body is None:
                raise CorruptError(
                    f"{path}: the catalog does not match its checksum; restore it from a backup. The records are "
                    f"safe in the partition folders: with {path.name} moved away, `verify` and `consume` read them",
                    path=path,
                )
            if body.get("version") != _VERSION:
                raise CorruptError(
                    f"{path}: catalog version {body.get('version')!r} is unknown, this release reads {_VERSION}; "
                    f"use the release that wrote it",
                    path=path,
                )
            topics = {
                check_topic_name(name): TopicEntry(
                    stored_topic["id"],
                    check_partition_count(stored_topic["partitions"]),
                    stored_topic["config"],
                    stored_topic.get("encoding"),
                )
                for name, stored_topic in body["topics"].items()
            }
            return cls(topics, tuple(body["removing"]))
        except InvalidError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"{path}: the catalog has a right checksum and cannot be read ({error}); restore it from a backup",
                path=path,
            ) from error


def unknown_topic(topic: str, known: Iterable[str]) -> InvalidError:
    """Return the error for an unknown topic; it names the most similar one."""
    from difflib import get_close_matches

    near = get_close_matches(topic, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"create it with `tidegate topic create {topic}`"
    return InvalidError(
        f"topic {topic} does not exist; {hint} (`tidegate topic list` shows all)",
        kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
    )


_BROKER_DEFAULTS = BrokerConfig()


class LogFolder:
    """The files that describe a log folder. Reads them at each call: other processes may change the catalog."""

    def __init__(self, files: Files, path: Path) -> None:
        self.files = files
        self.path = path

    @property
    def catalog_path(self) -> Path:
        return self.path / CATALOG_NAME

    def is_ours(self) -> bool:
        return self.files.exists(self.catalog_path)

    def is_foreign(self) -> bool:
        """Return whether the folder holds Kafka data without Tidegate's catalog (G2)."""
        return not self.is_ours() and bool(
            self._folders() or any(self.files.exists(self.path / name) for name in _BROKER_FILES)
        )

    def read(self) -> Catalog:
        """Return the catalog; an empty one if there is none yet."""
        try:
            stored = self.files.read(self.catalog_path, limit=_MAX_CATALOG_BYTES)
        except FileNotFoundError:
            return Catalog()
        return Catalog.from_bytes(stored, self.catalog_path)

    def write(self, catalog: Catalog) -> None:
        self.files.publish(self.catalog_path, catalog.to_bytes())

    def initialise(self) -> None:
        """Make the folder a Tidegate log; does nothing if it is one, refuses a folder with other content."""
        if self.is_ours():
            return
        if self.is_foreign():
            raise ConflictError(
                f"{self.path} holds Kafka data that Tidegate did not create, so it is only read; choose "
                f"another --log folder to write to"
            )
        if self.files.exists(self.path):
            strangers = [name for name in self.files.list(self.path) if self._is_folder(name)]
            if strangers:
                raise InvalidError(
                    f"{self.path} holds other folders ({', '.join(strangers[:3])}); choose an empty or a new "
                    f"folder for the log"
                )
        self.files.mkdir(self.path)

    def broker_config(self) -> BrokerConfig:
        """Return the settings of `server.properties`; the defaults if there is none."""
        path = self.path / BROKER_SETTINGS_NAME
        try:
            stored = self.files.read(path, limit=_MAX_PROPERTIES_BYTES)
        except FileNotFoundError:
            return _BROKER_DEFAULTS
        try:
            return BrokerConfig.of(parse_properties(stored.decode("utf-8")))
        except (InvalidError, UnicodeDecodeError) as error:
            raise InvalidError(f"{path}: {error}", kafka_name="INVALID_CONFIG") from None

    def describe_all(self) -> list[TopicDescription]:
        """Return every topic, by name."""
        broker = self.broker_config()
        if not self.is_ours():
            return self._described_from_folders(broker)
        return [entry.described(name, broker) for name, entry in sorted(self.read().topics.items())]

    def describe(self, topic: str) -> TopicDescription:
        """Return one topic, or raise an error that names the most similar one."""
        check_topic_name(topic)
        if not self.files.exists(self.path):
            raise InvalidError(
                f"there is no log at {self.path}: give --log URL or set TIDEGATE_LOG, or create it with "
                f"`tidegate topic create {topic}`",
                kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
            )
        if not self.is_ours():
            described = {found.name: found for found in self._described_from_folders(self.broker_config())}
            if topic not in described:
                raise unknown_topic(topic, described)
            return described[topic]
        return self.read().entry(topic).described(topic, self.broker_config())

    def states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Return the id and number of partitions of each given topic that exists."""
        if self.is_ours():
            known = {
                name: TopicState(entry.topic_id, entry.partitions)
                for name, entry in self.read().topics.items()
            }
        else:
            found = self._described_from_folders(self.broker_config())
            known = {each.name: TopicState(each.topic_id or "", each.partitions) for each in found}
        return {topic: known[topic] for topic in topics if topic in known}

    def _folders(self) -> list[TopicPartition]:
        if not self.files.exists(self.path):
            return []
        found = [parse_folder_name(name) for name in self.files.list(self.path)]
        return [place for place in found if place is not None and self._is_folder(str(place))]

    def _is_folder(self, name: str) -> bool:
        found = self.files.stat(self.path / name)
        return found is not None and found.is_folder

    def _described_from_folders(self, broker: BrokerConfig) -> list[TopicDescription]:
        numbers: dict[str, list[int]] = {}
        for place in self._folders():
            numbers.setdefault(place.topic, []).append(place.partition)
        config = TopicConfig.of({}, broker=broker, assumed=True)
        return [
            TopicDescription(name, tuple(sorted(found)), config, None, assumed=True)
            for name, found in sorted(numbers.items())
        ]


def require_folder(files: Files, folder: Path, place: TopicPartition) -> None:
    """Raise unless the partition's folder exists and is a folder, not a link out of the log."""
    found = files.stat(folder)
    if found is None:
        raise CorruptError(
            f"{folder}: the folder of partition {place} is missing; restore it from a backup", path=folder
        )
    if not found.is_folder:
        raise InvalidError(
            f"{folder} is not a folder but a link or a file, which a log may not hold; put the real folder "
            f"in its place"
        )
