"""The offsets that a Spark read or micro-batch covers, from options, limits and the log's extents.

A *position* maps (topic, partition) to the next offset to read. As JSON it is `{"topic": {"0": 5, "1": 7, "id": …}}`,
with topics sorted by name and partitions by number: Spark compares positions as text, so equal positions have one
spelling (P1). A limit is shared in proportion to what each partition has left, by largest remainder, so that shares
add up to it exactly, and at least one offset is admitted while any is left (P2).

`Planner` opens the log at every call and closes it again; it holds only options, so it can be pickled. A *loss* is a
record that a query was going to read and that is gone: it stops the query with a message that says how to resume, or
with `failOnDataLoss=false` is a warning.

This module does not import pyspark.
"""

from __future__ import annotations

import itertools
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tidegate.errors import InvalidError, OffsetOutOfRangeError, TidegateWarning, UnavailableError
from tidegate.log.format.batch import iter_headers
from tidegate.log.kafka.log import KafkaLog
from tidegate.log.log import Log, open_log
from tidegate.log.partition_reader import Bounds, PartitionView
from tidegate.log.reader import Position as StartPosition
from tidegate.log.reader import PositionKind
from tidegate.spark.options import SourceOptions

# -- ranges ---------------------------------------------------------------------------------------

Place: TypeAlias = "tuple[str, int]"
Position: TypeAlias = "dict[Place, int]"

LATEST = -1
EARLIEST = -2
WORDS = {"latest": LATEST, "earliest": EARLIEST}
ID = "id"  # key of the topic id, next to the partitions of a position


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
    """Return a position as JSON in its one spelling (P1), with the id of each topic that the offsets belong to."""
    spelled: dict[str, dict[str, Any]] = {}
    for (topic, partition), offset in sorted(position.items()):
        spelled.setdefault(topic, {})[str(partition)] = offset
    for topic, topic_id in (topic_ids or {}).items():
        if topic in spelled:
            spelled[topic][ID] = topic_id
    return spelled


def ids_of(spelled: Mapping[str, Any]) -> dict[str, str]:
    """Return the topic ids of a position in JSON; one written by an older release has none."""
    return {topic: str(found[ID]) for topic, found in spelled.items() if ID in found}


def from_json_object(spelled: Mapping[str, Any]) -> Position:
    """Return the position in JSON from Spark's checkpoint."""
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
    """Parse `earliest`, `latest` or JSON into one number per partition; −2 and −1 stand for the two words."""
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
                continue  # a position as in Spark's progress output
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
    """Return how many of `limit` units each partition gets for its backlog (P2)."""
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
    """Return the ranges between two positions, cut into about `min_partitions` pieces of similar length."""
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


class Extent(NamedTuple):
    """One partition: its first offset, its end for readers of this isolation level, and its log end offset."""

    first: int
    readable: int
    end: int


@contextmanager
def opened(options: SourceOptions) -> Iterator[Log | KafkaLog]:
    """Open the log for reading."""
    if not options.is_kafka and not Path(options.log).is_dir():
        raise UnavailableError(f"{options.log} does not exist; option log names the log's folder")
    with open_log(options.log, client=options.client, read_only=True) as log:
        yield log


# -- planning -------------------------------------------------------------------------------------

_WALK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Planner:
    """Computes the positions that Spark asks for before it reads."""

    options: SourceOptions

    def extents(self) -> dict[Place, Extent]:
        """Return the current extent of each partition, in order."""
        found: dict[Place, Extent] = {}
        with opened(self.options) as log:
            if isinstance(log, Log):
                return {place: self._extent(view, bounds) for place, view, bounds in self._views(log)}
            for topic in self.options.topics:  # one request per topic
                with log.reader(topic, isolation=self.options.isolation, start=0) as reader:
                    starts, ends = reader.start_offsets(), reader.end_offsets()
                found |= {(topic, number): Extent(starts[number], end, end) for number, end in ends.items()}
        return dict(sorted(found.items()))

    def at_time(self, moment_ms: int) -> Position:
        """Return the first offset of each partition at or after a time; its end if there is none."""
        found: Position = {}
        with opened(self.options) as log:
            if isinstance(log, Log):
                for place, view, bounds in self._views(log):
                    offset = view.offset_for_time(moment_ms, bounds)
                    found[place] = self._extent(view, bounds).readable if offset is None else offset
                return found
            start = StartPosition(PositionKind.TIME, moment_ms)
            for topic in self.options.topics:
                with log.reader(topic, isolation=self.options.isolation, start=start) as reader:
                    found |= {(topic, number): offset for number, offset in reader.positions().items()}
        return dict(sorted(found.items()))

    def starting(self) -> Position:
        """Return the position where a new query begins."""
        options = self.options
        return self._bound("startingOffsets", options.starting_offsets, options.starting_timestamp, EARLIEST)

    def ending(self) -> Position:
        """Return the position where a batch query ends."""
        options = self.options
        return self._bound("endingOffsets", options.ending_offsets, options.ending_timestamp, LATEST)

    def latest(self) -> Position:
        """Return the end of every partition for readers of this isolation level."""
        return {place: extent.readable for place, extent in self.extents().items()}

    def topic_ids(self) -> dict[str, str]:
        """Return the current ids of the topics, where they are known."""
        with opened(self.options) as log:
            found = log.topic_states(self.options.topics)
        return {topic: state.topic_id for topic, state in found.items() if state.topic_id}

    def of_these_topics(self, start: Position, known: Mapping[str, str], now: Mapping[str, str]) -> Position:
        """Return `start` without the offsets of topics that were deleted and created again: those begin at their start.

        That is a loss like any other: it stops the query, or warns.
        """
        again = {topic for topic, found in now.items() if known.get(topic, found) != found}
        for topic, partition in sorted(start):
            if topic in again:
                reason = f"the topic was deleted and created again (id {known[topic]} became {now[topic]})"
                self.report_loss((topic, partition), start[topic, partition], 0, reason)
        return {place: offset for place, offset in start.items() if place[0] not in again}

    def check_loss(self, start: Mapping[Place, int], end: Mapping[Place, int]) -> Position:
        """Return `start` moved to offsets that can still be read; stop (or warn) if records in between are gone."""
        present = self.extents()
        usable: Position = {}
        for place in sorted(end.keys() | start.keys()):
            if place not in present:
                self.report_loss(place, start.get(place, 0), 0, "the topic or partition was deleted")
                continue
            first, _, last = present[place]
            wanted = start.get(place, first)
            if wanted < first and end.get(place, first) > wanted:
                self.report_loss(place, wanted, first, "retention or deletion removed them")
            elif wanted > last:
                self.report_loss(place, wanted, last, f"the log now ends at {last}: it was cut or made anew")
            usable[place] = min(max(wanted, first), last)
        return usable

    def report_loss(self, place: Place, wanted: int, goes_on: int, reason: str) -> None:
        """Stop with the way to resume, or warn if the user chose to continue."""
        topic, partition = place
        gone = f"{wanted} to {goes_on - 1}" if goes_on > wanted else f"from {wanted} on"
        what = f"{topic}-{partition}: offsets {gone} are gone before this query read them: {reason}"
        if not self.options.fail_on_data_loss:
            warnings.warn(f"{what}; going on without them", TidegateWarning, stacklevel=2)
            return
        raise OffsetOutOfRangeError(
            f"{what}. To go on with what is left, restart the query from the same checkpoint with "
            f".option('failOnDataLoss', 'false'), once; to start anew, use a new checkpointLocation. "
            f"`tidegate log lifetime {topic}` says how long records stay, and what to change",
            offset=wanted,
            first=goes_on,
            end=goes_on,
        )

    def admit_rows(self, start: Mapping[Place, int], end: Position, limit: int) -> Position:
        """Return `end`, reduced so that at most `limit` offsets are in between."""
        backlog = {place: max(0, last - start[place]) for place, last in end.items()}
        return {place: start[place] + count for place, count in share(limit, backlog).items()}

    def admit_bytes(self, start: Mapping[Place, int], end: Position, limit: int) -> Position:
        """Return `end`, reduced so that `limit` stored bytes are in between: whole batches, at least one."""
        with opened(self.options) as log:
            if not isinstance(log, Log):
                raise InvalidError(
                    "a cluster does not tell how many bytes lie between offsets; limit records instead"
                )
            views = {place: log.view(*place) for place in end if end[place] > start[place]}
            backlog = {place: _bytes_from(view, start[place]) for place, view in views.items()}
            admitted = dict(start)
            for place, budget in share(limit, backlog).items():
                if budget:
                    view = views[place]
                    admitted[place] = _end_within(view, view.bounds(), start[place], end[place], budget)
        return {place: admitted[place] for place in end}

    def _bound(self, option: str, text: str | None, moment: int | None, default: int) -> Position:
        if moment is not None:
            return self.at_time(moment)
        present = self.extents()
        places = list(present)
        asked = dict.fromkeys(places, default) if text is None else parse_bound(text, places, option=option)
        words = {
            place: {LATEST: extent.readable, EARLIEST: extent.first} for place, extent in present.items()
        }
        return {place: words[place].get(offset, offset) for place, offset in asked.items()}

    def _views(self, log: Log) -> Iterator[tuple[Place, PartitionView, Bounds]]:
        for topic in sorted(self.options.topics):
            description = log.describe(topic)
            for number in description.partition_numbers:
                view = log.view(topic, number, description=description)
                yield (topic, number), view, view.bounds()

    def _extent(self, view: PartitionView, bounds: Bounds) -> Extent:
        committed = self.options.isolation == "read_committed"
        readable = view.last_stable(bounds) if committed else bounds.high_watermark
        return Extent(bounds.log_start, readable, bounds.high_watermark)


def _bytes_from(view: PartitionView, offset: int) -> int:
    sizes = view.segment_sizes()
    later = [size for base, size in sizes if base > offset]
    holding = [size for base, size in sizes if base <= offset][-1:]
    return max(1, sum(later) + sum(holding))


def _end_within(view: PartitionView, bounds: Bounds, start: int, end: int, budget: int) -> int:
    """Return the offset after the last batch that fits into `budget` bytes from `start` on; one always fits.

    It reads batch headers instead of an index: a reader must not trust the index of the active log segment.
    """
    offset, used = start, 0
    while offset < end:
        fetched = view.fetch(offset, _WALK_BYTES, bounds)
        if fetched is None:
            return end
        before = offset
        for _, header in iter_headers(fetched.data):
            if header.next_offset > offset:
                if used and used + header.size > budget:
                    return offset
                offset, used = header.next_offset, used + header.size
                if offset >= end:
                    return end
        if offset == before:  # damage, which the task that reads it reports
            return end
    return end
