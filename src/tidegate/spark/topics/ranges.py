"""Which offsets a Spark read or micro-batch covers: pure arithmetic over topics, partitions and offsets.

A *position* maps (topic, partition) to the next offset to read. As JSON it is `{"topic": {"0": 5, "1": 7, "id": …}}`,
Spark's Kafka notation, with topics sorted by name and partitions by number: Spark compares positions as text,
so equal positions must have one spelling (P1).

Admission: a limit is shared among partitions in proportion to what each has left, by largest remainder, so
that the shares add up to the limit exactly, and at least one offset is admitted while any is left (P2).

Nothing here reads a log or imports pyspark.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate.errors import InvalidError

Place: TypeAlias = "tuple[str, int]"
Position: TypeAlias = "dict[Place, int]"

LATEST = -1
EARLIEST = -2
WORDS = {"latest": LATEST, "earliest": EARLIEST}
ID = "id"  # beside the partitions of a topic in a spelled position


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """Offsets `start` to `end` (exclusive) of one partition: one Spark task."""

    topic: str
    partition: int
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def to_json_object(
    position: Mapping[Place, int], topic_ids: Mapping[str, str] | None = None
) -> dict[str, dict[str, Any]]:
    """The one spelling of a position (P1), with the id of each topic that the offsets count in."""
    spelled: dict[str, dict[str, Any]] = {}
    for (topic, partition), offset in sorted(position.items()):
        spelled.setdefault(topic, {})[str(partition)] = offset
    for topic, topic_id in (topic_ids or {}).items():
        if topic in spelled:
            spelled[topic][ID] = topic_id
    return spelled


def ids_of(spelled: Mapping[str, Any]) -> dict[str, str]:
    """The topic ids of a spelled position; one that an older release wrote has none."""
    return {topic: str(found[ID]) for topic, found in spelled.items() if ID in found}


def from_json_object(spelled: Mapping[str, Any]) -> Position:
    """The inverse, for positions that Spark hands back from its checkpoint."""
    try:
        return {
            (topic, int(partition)): int(offset)
            for topic, partitions in spelled.items()
            for partition, offset in partitions.items()
            if partition != ID
        }
    except (AttributeError, TypeError, ValueError):
        raise InvalidError(
            f"{json.dumps(spelled)[:200]} is not a position of the tidegate source; the checkpoint belongs "
            f"to another source: give every query a checkpoint folder of its own"
        ) from None


def parse_bound(text: str, places: list[Place], *, option: str) -> Position:
    """`earliest`, `latest` or JSON, as one number per partition; −2 and −1 stand for the two words."""
    word = WORDS.get(text.strip().lower())
    if word is not None:
        return dict.fromkeys(places, word)
    try:
        spelled = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidError(_bound_help(option, text)) from None
    if not isinstance(spelled, dict):
        raise InvalidError(_bound_help(option, text))
    topics = {topic for topic, _ in places}
    if len(topics) == 1 and all(str(key).isdecimal() for key in spelled):
        spelled = {next(iter(topics)): spelled}
    given = _given_offsets(spelled, option, text)
    unknown = sorted(given.keys() - set(places))
    missing = sorted(set(places) - given.keys())
    if unknown:
        raise InvalidError(f"{option} names {_list(unknown)}, which the topics do not have; remove it")
    if missing:
        raise InvalidError(
            f"{option} leaves out {_list(missing)}; give -2 (earliest), -1 (latest) or an offset"
        )
    return given


def _given_offsets(spelled: dict[str, Any], option: str, text: str) -> Position:
    given: Position = {}
    for topic, partitions in spelled.items():
        if not isinstance(partitions, dict):
            raise InvalidError(_bound_help(option, text))
        for partition, offset in partitions.items():
            if partition == ID:
                continue  # a position as Spark's progress shows it
            number = WORDS.get(offset, offset) if isinstance(offset, str) else offset
            if not str(partition).isdecimal() or isinstance(number, bool) or not isinstance(number, int):
                raise InvalidError(_bound_help(option, text))
            if number < EARLIEST:
                raise InvalidError(f"{option} has offset {number} for {topic}-{partition}; the least is -2")
            given[topic, int(partition)] = number
    return given


def _bound_help(option: str, text: str) -> str:
    return (
        f"{option}={text[:80]!r} is neither earliest, latest nor JSON like "
        f'{{"orders": {{"0": 23, "1": -2}}}} (-2 earliest, -1 latest)'
    )


def _list(places: list[Place]) -> str:
    return ", ".join(f"{topic}-{partition}" for topic, partition in places[:5]) + (
        f" and {len(places) - 5} more" if len(places) > 5 else ""
    )


def share(limit: int, backlog: Mapping[Place, int]) -> Position:
    """How many of `limit` units each partition gets of its backlog (P2)."""
    total = sum(backlog.values())
    if total <= limit:
        return dict(backlog)
    limit = max(limit, 1)
    shares = {place: limit * size // total for place, size in backlog.items()}
    rest = limit - sum(shares.values())
    by_remainder = sorted(backlog, key=lambda place: (-(limit * backlog[place] % total), place))
    for place in by_remainder[:rest]:
        shares[place] += 1
    return shares


def split(start: Mapping[Place, int], end: Mapping[Place, int], min_partitions: int = 0) -> list[OffsetRange]:
    """The ranges between two positions, cut into about `min_partitions` pieces of similar length."""
    whole = [
        OffsetRange(topic, partition, start[topic, partition], last)
        for (topic, partition), last in sorted(end.items())
        if last > start[topic, partition]
    ]
    total = sum(map(len, whole))
    if min_partitions <= len(whole) or total == 0:
        return whole
    pieces = share(min_partitions - len(whole), {(r.topic, r.partition): len(r) for r in whole})
    return [piece for r in whole for piece in _cut(r, 1 + pieces[r.topic, r.partition])]


def _cut(whole: OffsetRange, pieces: int) -> list[OffsetRange]:
    pieces = max(1, min(pieces, len(whole)))
    edges = [whole.start + len(whole) * i // pieces for i in range(pieces + 1)]
    return [
        OffsetRange(whole.topic, whole.partition, first, last) for first, last in itertools.pairwise(edges)
    ]
