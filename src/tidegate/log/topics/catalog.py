"""Which topics a log folder has: `tidegate.topics`, and what a folder without it is.

`tidegate.topics` is one line of JSON and one line `crc32c:<8 hex digits over the JSON line>`:

    {"version": 1, "topics": {NAME: {"id": 22 characters, "partitions": n, "config": {KEY: "value"},
     "encoding": {…}}}, "removing": [FOLDER, …]}

`config` holds only what the topic itself sets; broker-level settings are in `server.properties` beside it.
`encoding` is there for topics that an app writes results to: what their keys and values are
(`tables/topic_encoding.py`). Topics without it, and catalogs of before, have none.
`removing` lists partition folders of deleted topics that may still be on the disk: whoever changes the
catalog next finishes the removal.

G1  the catalog is replaced whole (temporary file, sync, rename) under the folder's short lock.
G2  a folder that holds Kafka data but no catalog is foreign: it is described from its partition folders,
    its settings are marked as assumed, and nothing in it is ever changed.

Does not cover opening partitions; `embedded.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tidegate.config import parse_properties
from tidegate.errors import ConflictError, CorruptError, InvalidError
from tidegate.files import Files
from tidegate.log.topics.checksummed_json import checksummed_json, parse_checksummed_json
from tidegate.log.topics.topic_config import BrokerConfig, TopicConfig
from tidegate.log.topics.topics import (
    TopicDescription,
    TopicPartition,
    TopicState,
    check_partition_count,
    check_topic_name,
    parse_folder_name,
)

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


@dataclass(frozen=True, slots=True)
class Catalog:
    """All topics of a log, and the folders still to be removed. Immutable: a change makes a new one."""

    topics: Mapping[str, TopicEntry] = field(default_factory=dict)
    removing: tuple[str, ...] = ()

    def entry(self, topic: str) -> TopicEntry:
        """The topic, or an error naming one that looks like it."""
        found = self.topics.get(topic)
        if found is None:
            check_topic_name(topic)
            raise unknown_topic(topic, self.topics)
        return found

    def with_topic(self, name: str, entry: TopicEntry) -> Catalog:
        return replace(self, topics={**self.topics, name: entry})

    def without_topic(self, name: str, folders: Iterable[str]) -> Catalog:
        """The topic gone, its folders listed for removal."""
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
            return cls._from_body(body, path)
        except InvalidError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptError(
                f"{path}: the catalog has a right checksum and cannot be read ({error}); restore it from a backup",
                path=path,
            ) from error

    @classmethod
    def _from_body(cls, body: Any, path: Path) -> Catalog:
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


def unknown_topic(topic: str, known: Iterable[str]) -> InvalidError:
    """The error for a topic that is not there; it names the likeliest one meant."""
    from difflib import get_close_matches

    near = get_close_matches(topic, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"create it with `tidegate topic create {topic}`"
    return InvalidError(
        f"topic {topic} does not exist; {hint} (`tidegate topic list` shows all)",
        kafka_name="UNKNOWN_TOPIC_OR_PARTITION",
    )


_BROKER_DEFAULTS = BrokerConfig()


class LogFolder:
    """What a log folder says about itself. Reads at each call: other processes may change the catalog."""

    def __init__(self, files: Files, path: Path) -> None:
        self.files = files
        self.path = path

    @property
    def catalog_path(self) -> Path:
        return self.path / CATALOG_NAME

    def is_ours(self) -> bool:
        return self.files.exists(self.catalog_path)

    def is_foreign(self) -> bool:
        """Kafka data without our catalog (G2)."""
        return not self.is_ours() and bool(
            self._folders() or any(self.files.exists(self.path / name) for name in _BROKER_FILES)
        )

    def read(self) -> Catalog:
        """The catalog; an empty one where there is none yet."""
        try:
            stored = self.files.read(self.catalog_path, limit=_MAX_CATALOG_BYTES)
        except FileNotFoundError:
            return Catalog()
        return Catalog.from_bytes(stored, self.catalog_path)

    def write(self, catalog: Catalog) -> None:
        self.files.publish(self.catalog_path, catalog.to_bytes())

    def initialise(self) -> None:
        """Make the folder a log of ours; fine when it is one, refused when it holds something else."""
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
        """The settings of `server.properties`; the defaults where there is none."""
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
        """Every topic, by name."""
        broker = self.broker_config()
        if not self.is_ours():
            return self._described_from_folders(broker)
        return [
            TopicDescription(
                name,
                tuple(range(entry.partitions)),
                TopicConfig.of(entry.config, broker=broker),
                entry.topic_id,
                encoding=entry.encoding,
            )
            for name, entry in sorted(self.read().topics.items())
        ]

    def describe(self, topic: str) -> TopicDescription:
        """One topic, or the error that names the likeliest one meant."""
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
        entry = self.read().entry(topic)
        config = TopicConfig.of(entry.config, broker=self.broker_config())
        return TopicDescription(
            topic, tuple(range(entry.partitions)), config, entry.topic_id, encoding=entry.encoding
        )

    def states(self, topics: Iterable[str]) -> dict[str, TopicState]:
        """Id and number of partitions of each of these topics that exists."""
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
    """The partition's folder is there, and is a folder rather than a way out of the log."""
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
