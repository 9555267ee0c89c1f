"""What a Spark read will cover: options and limits turned into positions, by looking at the log.

Runs in Spark's planning processes; only reads. Holds nothing but options, so it can be pickled.

A *loss* is a record that a query was going to read and that is gone: retention removed it, or the topic was
cut or made anew. It stops the query and the message says how to go on; or, with `failOnDataLoss=false`, it is
a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from tidegate.errors import InvalidError, OffsetOutOfRangeError, TidegateWarning
from tidegate.log.format.batch import iter_headers
from tidegate.log.partition_reader import Bounds, PartitionView
from tidegate.spark.topics.extents import Extents, FolderExtents, extents_of, opened
from tidegate.spark.topics.options import SourceOptions
from tidegate.spark.topics.ranges import EARLIEST, LATEST, Place, Position, parse_bound, share

_WALK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Planner:
    """Answers the questions Spark asks before it reads."""

    options: SourceOptions

    @property
    def extents(self) -> Extents:
        return extents_of(self.options)

    def places(self) -> list[Place]:
        """Every partition of the asked-for topics, in order."""
        return self.extents.places()

    def starting(self) -> Position:
        """Where a new query begins."""
        options = self.options
        return self._bound("startingOffsets", options.starting_offsets, options.starting_timestamp, EARLIEST)

    def ending(self) -> Position:
        """Where a batch query ends."""
        options = self.options
        return self._bound("endingOffsets", options.ending_offsets, options.ending_timestamp, LATEST)

    def latest(self) -> Position:
        """The end of every partition, as far as readers may see."""
        return {place: extent.readable for place, extent in self.extents.all().items()}

    def topic_ids(self) -> dict[str, str]:
        """The ids of the topics as they are now, where they are known."""
        with opened(self.options) as log:
            found = log.topic_states(self.options.topics)
        return {topic: state.topic_id for topic, state in found.items() if state.topic_id}

    def of_these_topics(self, start: Position, known: Mapping[str, str], now: Mapping[str, str]) -> Position:
        """`start` without the offsets of topics that were deleted and created again: those begin at their start.

        That is a loss like any other: it stops the query, or warns.
        """
        again = {topic for topic, found in now.items() if known.get(topic, found) != found}
        for topic, partition in sorted(start):
            if topic in again:
                reason = f"the topic was deleted and created again (id {known[topic]} became {now[topic]})"
                self.report_loss((topic, partition), start[topic, partition], 0, reason)
        return {place: offset for place, offset in start.items() if place[0] not in again}

    def check_loss(self, start: Mapping[Place, int], end: Mapping[Place, int]) -> Position:
        """`start` as it can still be read; stops (or warns) where records between the two are gone."""
        present = self.extents.all()
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
        """Stop with the way to resume, or warn where the user chose to go on."""
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
        """`end`, brought nearer so that at most `limit` offsets lie between."""
        backlog = {place: max(0, last - start[place]) for place, last in end.items()}
        return {place: start[place] + count for place, count in share(limit, backlog).items()}

    def admit_bytes(self, start: Mapping[Place, int], end: Position, limit: int) -> Position:
        """`end`, brought nearer so that `limit` stored bytes lie between: whole batches, at least one."""
        folder = _folder(self.extents)
        backlog = {
            place: _bytes_from(folder, place, start[place]) for place in end if end[place] > start[place]
        }
        admitted = dict(start)
        for place, budget in share(limit, backlog).items():
            if budget:
                with folder.view(place) as (view, bounds):
                    admitted[place] = _end_within(view, bounds, start[place], end[place], budget)
        return {place: admitted[place] for place in end}

    # -- inside ----------------------------------------------------------------------------------

    def _bound(self, option: str, text: str | None, moment: int | None, default: int) -> Position:
        if moment is not None:
            return self.extents.at_time(moment)
        present = self.extents.all()
        places = list(present)
        asked = dict.fromkeys(places, default) if text is None else parse_bound(text, places, option=option)
        words = {
            place: {LATEST: extent.readable, EARLIEST: extent.first} for place, extent in present.items()
        }
        return {place: words[place].get(offset, offset) for place, offset in asked.items()}


def _folder(extents: Extents) -> FolderExtents:
    if not isinstance(extents, FolderExtents):
        raise InvalidError(
            "a cluster does not tell how many bytes lie between offsets; limit records instead"
        )
    return extents


def _bytes_from(folder: FolderExtents, place: Place, offset: int) -> int:
    with folder.view(place) as (view, _):
        sizes = view.segment_sizes()
    later = [size for base, size in sizes if base > offset]
    holding = [size for base, size in sizes if base <= offset][-1:]
    return max(1, sum(later) + sum(holding))


def _end_within(view: PartitionView, bounds: Bounds, start: int, end: int, budget: int) -> int:
    """The offset after the last batch that fits into `budget` bytes from `start` on; one always fits.

    Walks the headers instead of asking an index: of the active log segment a reader may not believe it.
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
