"""Topic names and the folders they live in; `TopicConfig` is re-exported for users.

A partition's folder is `<topic>-<partition>` directly in the log folder. Because only letters, digits, dot,
underscore and dash are allowed, no name can leave the log folder; the folder of a deleted topic gets a
`.<32 hex>-delete` ending, which no valid partition folder has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tidegate.errors import InvalidError
from tidegate.log.topics.topic_config import BrokerConfig, ConfigEntry, Source, TopicConfig

__all__ = [
    "BrokerConfig",
    "TopicConfig",
    "TopicDescription",
    "TopicPartition",
    "check_partition_count",
    "check_topic_name",
    "deleted_folder_name",
    "is_deleted_folder",
    "parse_folder_name",
    "partition_folder_name",
]

MAX_NAME_LENGTH = 249
MAX_PARTITIONS = 100_000
_LEGAL = re.compile(r"[A-Za-z0-9._-]{1,249}")
_FOLDER = re.compile(r"(?P<topic>[A-Za-z0-9._-]{1,249})-(?P<partition>0|[1-9]\d{0,9})")
_DELETED = re.compile(r".+\.[0-9a-f]{32}-delete")


class TopicPartition(NamedTuple):
    """One partition of one topic; prints as its folder is called."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


class TopicState(NamedTuple):
    """Which topic stands behind a name now. A topic that is deleted and created again has another id."""

    topic_id: str
    """Empty where it is not known: a foreign folder, or brokers before 2.8."""
    partitions: int


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """What is known of a topic. `assumed` marks a folder without our catalog: its settings are guesses.

    `encoding` is what an app that writes results to the topic recorded of its keys and values, if one did.
    """

    name: str
    partition_numbers: tuple[int, ...]
    config: TopicConfig
    topic_id: str | None = None
    assumed: bool = False
    encoding: Mapping[str, Any] | None = None

    @property
    def partitions(self) -> int:
        """How many; a foreign folder may hold only some of a topic's, so see `partition_numbers`."""
        return len(self.partition_numbers)

    def settings(self) -> list[ConfigEntry]:
        """Every setting: KEY VALUE SOURCE."""
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
    """The name itself when it is legal, `InvalidError` (INVALID_TOPIC_EXCEPTION) when not."""
    if name in (".", "..") or not _LEGAL.fullmatch(name):
        shown = name if len(name) <= 60 else f"{name[:57]}..."
        raise InvalidError(
            f"topic name {shown!r} is not allowed: use 1 to {MAX_NAME_LENGTH} of the characters "
            f"a-z A-Z 0-9 . _ -, and not . or .. alone",
            kafka_name="INVALID_TOPIC_EXCEPTION",
        )
    return name


def check_partition_count(count: int) -> int:
    """The count itself when a topic may have so many partitions."""
    if not 1 <= count <= MAX_PARTITIONS:
        raise InvalidError(
            f"{count} partitions: a topic has 1 to {MAX_PARTITIONS}", kafka_name="INVALID_PARTITIONS"
        )
    return count


def partition_folder_name(topic: str, partition: int) -> str:
    """`orders-0`; checks both parts."""
    check_topic_name(topic)
    if not 0 <= partition <= 2**31 - 1:
        raise InvalidError(f"partition {partition} of {topic}: a partition is a number from 0")
    return f"{topic}-{partition}"


def parse_folder_name(name: str) -> TopicPartition | None:
    """The topic and partition a folder name stands for, None when it is not a partition folder."""
    match = _FOLDER.fullmatch(name)
    if match is None or match["topic"] in (".", "..") or int(match["partition"]) > 2**31 - 1:
        return None
    return TopicPartition(match["topic"], int(match["partition"]))


def deleted_folder_name(topic: str, partition: int, unique_hex: str) -> str:
    """The name a partition folder gets until it is removed; the topic is cut to fit 255 characters."""
    suffix = f"-{partition}.{unique_hex}-delete"
    return topic[: 255 - len(suffix)] + suffix


def is_deleted_folder(name: str) -> bool:
    return _DELETED.fullmatch(name) is not None
